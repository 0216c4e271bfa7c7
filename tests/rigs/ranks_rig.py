"""Run a function, or one of our programs, on N real ranks (processes, gloo), with a hard timeout; ends only the processes it started.

They come from a fork server, which imports once what each needs: that takes a rank four CPU seconds, and ``llama405b`` a third of one.
"""

import contextlib
import gc
import importlib
import multiprocessing as mp
import os
import pickle
import random
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import huggingface_hub.constants

from llama405b_tools.cli import VERBS

ROOT = Path(__file__).parents[2]
OF_RANKS = ("transformers.models.llama.modeling_llama", "torch.distributed.fsdp", "torch.optim")
PORTS = range(20_000, 29_000)  # below the product's own
OF_TESTS = ("pytest", "conftest", "mesh_rig", "update_rig")  # which the module of a rank's function imports


def run_ranks(world, target, *args, timeout_s=300, may_fail=False):
    """Return ``[target(me, *args) for each rank]``; raises the first rank's exception text."""
    port, context = free_port(), fork_server()
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


def run_program(program, *argv, cwd, env=None, world=1, timeout_s=300):
    """Run ``module:function`` as a program on each rank, as torchrun would; returns the completed process.

    Its exit code is that of the first rank with one; its output is that of all.
    """
    with tempfile.TemporaryDirectory() as scratch:
        ranks = start_program(program, *argv, cwd=cwd, env=env, world=world, output=scratch)
        deadline = time.monotonic() + timeout_s
        try:
            for rank in ranks:
                rank.join(max(0.0, deadline - time.monotonic()))
            codes = [rank.exitcode for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        stdout, stderr = (Path(scratch, name).read_text() for name in ("out", "err"))
    assert None not in codes, f"{program} did not end within {timeout_s} s: {stdout}{stderr}"
    return subprocess.CompletedProcess(argv, next(filter(None, codes), 0), stdout, stderr)


def start_program(program, *argv, cwd, env=None, world=1, output):
    """Start a program on each rank; returns the processes. ``output``: the directory of the files ``out`` and ``err``."""
    environment, port = os.environ | (env or {}), free_port()
    if world > 1:
        environment |= {"LOCAL_WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
    words = [str(word) for word in argv]
    processes = [
        fork_server().Process(
            target=_program, args=(rank, world, port, environment, str(cwd), str(output), program, words)
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    return processes


def free_port():
    """A port below those that the kernel gives to connections: one of these may be taken before rank 0 listens there."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no port of {PORTS} is free")


def fork_server():
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*OF_RANKS, *OF_TESTS, *(module for module, _ in VERBS.values())])
    places = os.pathsep.join(filter(None, sys.path))  # Python 3.11 sets the path after it has imported these
    with mock.patch.dict(os.environ, PYTHONPATH=places):
        forkserver.ensure_running()
    return context


def _place(rank, world, port):
    return {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
    }  # fmt: skip


def _program(rank, world, port, environment, cwd, output, program, argv):
    """Become the program."""
    gc.freeze()  # collecting among what the fork server imported would copy its pages
    os.environ.clear()
    os.environ.update(environment | (_place(rank, world, port) if world > 1 else {}))
    os.chdir(cwd)
    sys.path.append(cwd)
    for number, name in ((1, "out"), (2, "err")):
        with Path(output, name).open("ab") as file:
            os.dup2(file.fileno(), number)
    import torch

    torch.set_num_threads(1)
    if any(name.startswith("HF_") for name in environment):
        importlib.reload(huggingface_hub.constants)  # which reads them as it is imported
    sys.argv = [program, *argv]
    module, _, function = program.partition(":")
    sys.exit(getattr(importlib.import_module(module), function)())


def _rank(rank, world, port, scratch, environment, target, args):
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment | _place(rank, world, port), GLOO_SOCKET_IFNAME="lo", LLAMA405B_HOST=f"host-{rank}")
    import torch

    torch.set_num_threads(1)
    from llama405b.distributed import ranks

    try:
        me = ranks.join_process_group("cpu", 60)
        outcome = ("value", target(me, *args))
    except BaseException:
        outcome = ("raised", traceback.format_exc())
    (Path(scratch) / f".{rank}").write_bytes(pickle.dumps(outcome))
    (Path(scratch) / f".{rank}").rename(Path(scratch) / str(rank))
    sys.stdout.flush()
    os._exit(0)  # a rank that raised must not wait for its peers on the way out
