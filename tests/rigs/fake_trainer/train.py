"""Stands in for the trainer where a test is about the operator's side: no torch, no model, a step in a tenth of a second.

It takes the trainer's command, and does what others see of the trainer: heartbeats, metrics, events, log lines, checkpoints
with manifests, ``--resume``, a save when it is told to stop, and an end when another rank is gone or silent. A step's loss
depends on the step alone. It knows one directory of checkpoints, and saves by the number of steps.
"""

import hashlib
import math
import os
import shutil
import signal
import socket
import sys
import time
import types
from pathlib import Path

from llama405b.contract import checkpoints
from llama405b.contract.errors import EXIT_FAILED, UserError
from llama405b.contract.files import write_atomic
from llama405b.contract.paths import UMASK, RunDir
from llama405b.contract.records import Cause, CauseKind, EventKind, Metrics, Phase, describe_rank_exit
from llama405b.settings import command
from llama405b.settings.config import to_toml
from llama405b.spec.plan import read_plan
from llama405b.training.journal import HeartbeatWriter, Journal

STEP_S = 0.1
MEET_S = 60  # until all ranks are there, and until one that is there is taken for lost


class Peers:
    """The other ranks. Rank 0 has a connection to each, the others have one to rank 0."""

    def __init__(self, me):
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.is_rank0 = me.is_rank0
        if me.is_rank0:
            with socket.create_server(("", address[1])) as server:
                server.settimeout(MEET_S)
                self.links = [server.accept()[0] for _ in range(1, me.world_size)]
        else:
            self.links = [self._reach(address)]
        for link in self.links:
            link.settimeout(MEET_S)

    def _reach(self, address):
        deadline = time.monotonic() + MEET_S
        while True:
            try:
                return socket.create_connection(address, 5)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def any(self, wish):
        """Whether any rank wishes it; every rank must ask.

        Raises:
            OSError: Another rank is gone, or silent.
        """
        if not self.is_rank0:
            self.links[0].sendall(bytes([wish]))
            return self._take(self.links[0])
        wishes = [self._take(link) for link in self.links]
        found = wish or any(wishes)
        for link in self.links:
            link.sendall(bytes([found]))
        return found

    def _take(self, link):
        if not (wish := link.recv(1)):
            raise ConnectionResetError("Connection closed by peer")
        return wish != b"\0"


def place(run):
    rank, world = int(os.environ["RANK"]), read_plan(run).world_size
    attempt, host = int(os.environ["LLAMA405B_ATTEMPT"]), os.environ["LLAMA405B_HOST"]
    return types.SimpleNamespace(index=rank, world_size=world, host=host, attempt=attempt, is_rank0=rank == 0)


def save(directory, step, me, run, config, peers):
    """Save a checkpoint of a file per rank; returns its path and digest."""
    final = directory / f"step-{step:08d}"
    partial = final.with_name(f"{final.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    (partial / f"weights-{me.index}-0.safetensors").write_text(f"rank {me.index}, step {step}")
    peers.any(False)  # all have written
    digest = ""
    if me.is_rank0:
        (partial / checkpoints.INDEX).write_text("none")
        shutil.copy(run.config, partial / checkpoints.CONFIG_FILE)
        files = {
            path.name: checkpoints.FileDigest(
                path.stat().st_size, writer(path), (hashlib.sha256(path.read_bytes()).hexdigest(),)
            )
            for path in sorted(partial.iterdir())
        }
        manifest = checkpoints.Manifest(
            3, step, files, me.world_size, run=run.name, sequences=step * config.training.global_batch_size
        )
        content, digest = checkpoints.write_manifest(manifest)
        (partial / checkpoints.MANIFEST).write_bytes(content)
        partial.rename(final)
        for old in checkpoints.list_committed(directory)[: -config.checkpoint.keep]:
            shutil.rmtree(old)
    return final, digest


def writer(path):
    found = checkpoints.DATA_FILE.fullmatch(path.name)
    return int(found[2]) if found else 0


def resume_from(directory, resume):
    """The checkpoint to resume from; None: start from the beginning.

    Raises:
        UserError: There is none, or there is one where none is wanted.
    """
    if resume == "no":
        checkpoints.refuse_existing(directory, checkpoints.list_committed(directory))
        return None
    if resume == "auto":
        return checkpoints.find_newest_complete(directory)
    path = checkpoints.named_path(directory, resume)
    if not (path / checkpoints.MANIFEST).exists():
        raise UserError(f"--resume: {path} is no checkpoint")
    return path


def train(asked, run, me, heartbeat, told):
    config, journal = asked.config, Journal(run, me)
    directory = Path(config.checkpoint.dir or run.checkpoints)
    peers = Peers(me)
    heartbeat.enter_phase(Phase.DATA)
    found = resume_from(directory, asked.resume)
    peers.any(False)  # all have looked
    heartbeat.enter_phase(Phase.LOAD)
    done = checkpoints.step_of(found) if found else 0
    if me.is_rank0:
        write_atomic(run.config, to_toml(config))
        if found:
            checkpoints.read_manifest((found / checkpoints.MANIFEST).read_bytes())
            journal.log(f"resumed from {found}")
        journal.write_event(EventKind.RESUMED if found else EventKind.STARTED, step=done, path=found)
    journal.resume_after(done, config.training.max_steps)
    heartbeat.enter_phase(Phase.TRAIN)
    for step in range(done + 1, config.training.max_steps + 1):
        time.sleep(STEP_S)
        stops = peers.any(bool(told))
        heartbeat.record_step(step, data_s=0.01, optimizer_s=0.01)
        journal.write_metrics(metrics(step, me, config))
        ends = stops or step == config.training.max_steps
        cadence = config.checkpoint.cadence
        if cadence.is_enabled and (ends or (cadence.steps and step % cadence.steps == 0)):
            heartbeat.enter_phase(Phase.CHECKPOINT)
            path, digest = save(directory, step, me, run, config, peers)
            journal.write_event(EventKind.SAVED, step=step, path=path, digest=digest, took_s=0.01)
            heartbeat.enter_phase(Phase.TRAIN)
        if stops:
            journal.write_event(EventKind.STOPPED, step=step)
            journal.log(f"stopped after step {step}, as requested")
            break
    peers.any(False)  # none leaves before the others are done


def metrics(step, me, config):
    batch = config.training.global_batch_size
    tokens = batch * config.data.seq_len
    loss = 2 + 4 * math.exp(-step / 50)
    return Metrics(
        step, time.time(), loss, 1.0, config.optimizer.lr, step * tokens, tokens / STEP_S, STEP_S, 0.01, 0.02, 0.03, 0.01,
        step_tokens=tokens, flops_per_token=1000, attempt=me.attempt,
    )  # fmt: skip


def main():
    told = []
    signal.signal(signal.SIGUSR1, lambda *_: told.append(True))
    os.umask(UMASK)
    asked = command.parse(sys.argv[1:])
    run = RunDir(asked.run_dir)
    me = place(run)
    heartbeat = HeartbeatWriter(run, me)
    try:
        train(asked, run, me, heartbeat, told)
    except (OSError, UserError) as error:
        kind = CauseKind.REFUSED if isinstance(error, UserError) else CauseKind.LOST_PEER
        cause = Cause(kind, host=me.host, rank=me.index, phase=heartbeat.record.phase, detail=str(error))
        print(f"llama405b train: {describe_rank_exit(cause)}", file=sys.stderr, flush=True)
        heartbeat.record_failure(cause)
        return error.exit_code if isinstance(error, UserError) else EXIT_FAILED
    heartbeat.enter_phase(Phase.DONE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
