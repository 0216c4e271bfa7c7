"""Run a function on N real ranks (processes, gloo), with a hard timeout; ends only the processes it started."""

import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch.multiprocessing as mp


def run_ranks(world, target, *args, timeout_s=150, may_fail=False):
    """Return ``[target(me, *args) for each rank]``; raises the first rank's exception text."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("forkserver")  # the server imports once what every rank needs
    context.set_forkserver_preload(
        ["transformers.models.llama.modeling_llama", "torch.distributed.fsdp", "torch.optim"]
    )
    with tempfile.TemporaryDirectory() as scratch:
        processes = [
            context.Process(target=_rank, args=(rank, world, port, scratch, dict(os.environ), target, args))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        try:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        finally:
            for process in processes:
                process.kill()
                process.join()
        results = []
        for rank in range(world):
            path = Path(scratch) / str(rank)
            results.append(pickle.loads(path.read_bytes()) if path.exists() else ("gone", processes[rank].exitcode))
        if may_fail:
            return results
        for rank, (kind, value) in enumerate(results):
            assert kind != "gone" or rank in hung, f"rank {rank} died with exit code {value}; {results}"
        raised = [(rank, value) for rank, (kind, value) in enumerate(results) if kind == "raised"]
        for rank, value in sorted(raised, key=lambda entry: "gloo" in entry[1]):  # a lost peer is the effect
            raise AssertionError(f"rank {rank}: {value}")
        assert not hung, f"ranks {hung} did not end within {timeout_s} s"
        return [value for _, value in results]


def _rank(rank, world, port, scratch, environment, target, args):
    os.environ.update(
        environment,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        GLOO_SOCKET_IFNAME="lo",
        LLAMA405B_HOST=f"host-{rank}",
    )
    import torch

    torch.set_num_threads(1)
    from llama405b.distributed import ranks

    try:
        me = ranks.join("cpu", 60)
        outcome = ("value", target(me, *args))
    except BaseException:
        outcome = ("raised", traceback.format_exc())
    (Path(scratch) / f".{rank}").write_bytes(pickle.dumps(outcome))
    (Path(scratch) / f".{rank}").rename(Path(scratch) / str(rank))
    sys.stdout.flush()
    os._exit(0)  # a rank that raised must not wait for its peers on the way out
