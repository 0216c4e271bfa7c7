"""What checkpoints cost a run: seconds that training loses to them, beside training and in turn.

The schedule is the real one (worker, hooks, saves), on one rank, with a state of real size and a stand-in for the device: each
unit's forward, backward and update take a fixed time, and no core. Cost is the time of all steps and saves less that of
the same steps without saves: so it has what blocked and what made steps slower. What the last save takes after the last step
is reported apart. Saves in turn, and loads from a disk whose cache is empty, are compared with torch's DCP.
"""

import dataclasses
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from benchmarks.update import UNITS, WIDTH, Case, Trace, stand_in_model
from llama405b.checkpoint.format import CheckpointReader, RejectedCheckpoint, open_manifest
from llama405b.checkpoint.index import Held, Holdings, plan_index
from llama405b.checkpoint.resume import targets_of
from llama405b.checkpoint.saving import THREADS, CheckpointSaver, SavedCheckpoint
from llama405b.checkpoint.state import state_to_save
from llama405b.checkpoint.store import Store
from llama405b.contract import reader
from llama405b.contract.checkpoints import INDEX, FileDigest, Manifest, RunIdentity, TrainedSoFar, write_manifest
from llama405b.contract.errors import UserError
from llama405b.contract.hashes import BLOCK_BYTES
from llama405b.contract.paths import RunDir
from llama405b.distributed import ranks
from llama405b.distributed.ranks import Rank
from llama405b.optim.offload import HostUpdater, UnitState, UpdateParams
from llama405b.optim.optimizer import build_optimizer
from llama405b.optim.updater import state_tensors
from llama405b.predict.search import find_model_shape
from llama405b.settings.axes import Axes
from llama405b.settings.schema import Config, Optimizer
from llama405b.spec.tensors import ShardLayout

SHARES = (0.5, 4.0)  # of a step: what a save takes
IDENTITY = RunIdentity("stand-in", "stand-in", 1, 1, "fp32", 0, 0)
BYTES_PER_PARAMETER = 12  # FP32 weights and moments
BACKWARD, UPDATE = 2.0, 0.5  # of a unit's forward
KEEP = 2
PLAIN_BYTES = 1 << 20  # at a time, of plain writes


class _Training:
    """Steps of the stand-in, whose state has ``n_bytes``."""

    def __init__(self, n_bytes: int) -> None:
        self.case = Case(0.0, 0.0, 0.0)
        self.model = stand_in_model(self.case, Trace())
        master = nn.Module()  # by the model's names, as masters of its weights are
        for name, _ in self.model.named_parameters():
            owner = nn.Module()
            master.add_module(name.partition(".")[0], owner)
            owner.weight = nn.Parameter(torch.randn(n_bytes // BYTES_PER_PARAMETER // UNITS))
        self.updater = HostUpdater(
            self.model, master, build_optimizer(master, Optimizer()), torch.device("cpu"), lambda _: None
        )
        self.updater._update_unit = self._stand_in
        self.x, self.step_s = torch.randn(2, WIDTH), 0.0

    def _stand_in(self, part: UnitState, _sums: Sequence[Sequence[Tensor]], step: UpdateParams) -> None:
        for _, parameters in part.groups:
            step.before_update(state_tensors(self.updater.optimizer, parameters))
        time.sleep(self.model[0].case.update)

    def pace(self, step_s: float) -> None:
        """Set how long a step takes."""
        self.step_s = step_s
        forward = step_s / (1 + BACKWARD) / UNITS
        for unit in self.model:
            unit.case = Case(forward, BACKWARD * forward, UPDATE * forward)

    def step(self) -> None:
        """Take a step."""
        self.model(self.x).sum().backward()
        self.updater.update()


class _Saves:
    """Saves of the stand-in's state, in a directory of their own."""

    def __init__(self, training: _Training, directory: Path, me: Rank) -> None:
        self.training, self.number = training, 0
        self.store = Store(directory / "checkpoints", KEEP, me, run=RunDir(directory))
        self.store.acquire()
        self.saving = CheckpointSaver(self.store)

    def begin(self, *, beside: bool = False) -> None:
        """Begin the next one."""
        self.number += 1
        self.saving.begin(
            self.number, self.training.updater, IDENTITY, TrainedSoFar(0), self.training.step_s if beside else None
        )

    def finish(self) -> SavedCheckpoint:
        """Wait for it.

        Raises:
            UserError: It could not be written.
        """
        outcome = self.saving.finish()
        self.saving.finish_pruning()
        if not isinstance(outcome, SavedCheckpoint):
            raise outcome or UserError("checkpoint: nothing was saved")
        return outcome


def bench_checkpoint(gb: float, saves: int, directory: Path | None) -> tuple[dict[str, Any], str]:
    """Measure what ``saves`` checkpoints of ``gb`` GB cost: see the module."""
    n_bytes = int(gb * 1e9)
    with tempfile.TemporaryDirectory(dir=directory, prefix="bench-checkpoint-") as scratch:
        me = ranks.join_process_group("cpu", 600)
        try:
            training = _Training(n_bytes)
            work = _Saves(training, Path(scratch), me)
            speeds = _speeds(work, Path(scratch), n_bytes, max(3, saves // 6))
            versus = _against_dcp(work, Path(scratch), n_bytes, max(3, saves // 6))
            planning = [_planning(world) for world in (64, 512)]
            cases = [_compare(training, work, share, n_bytes / speeds[0], saves) for share in SHARES]
            work.store.close()
        finally:
            dist.destroy_process_group()
    disk = _disk_of(Path(scratch).parent)
    report = {
        "bytes": n_bytes, "saves": saves, "disk": disk, "bytes_per_s": speeds[0], "plain_bytes_per_s": speeds[1],
        "write_ratio": speeds[0] / speeds[1], "against_dcp": versus, "planning": planning, "cases": cases, "torch": torch.__version__,
    }  # fmt: skip
    ours, plain = (speed / 1e9 for speed in speeds)
    lines = [f"{gb:g} GB on {disk}: {ours:.2f} GB/s, plain writes {plain:.2f} GB/s; ours / plain {ours / plain:.2f}"]
    for what in ("save", "load"):
        own_speed, dcp_speed = versus[what]
        lines.append(
            f"{what} in turn: {own_speed:.2f} GB/s, torch's DCP {dcp_speed:.2f} GB/s; ours / DCP {own_speed / dcp_speed:.2f}"
        )
    lines += [
        f"rank 0's CPU for 405B on {each['world']} ranks: {each['plan_s']:.2f} s before step 1, {each['save_s']:.3f} s a save; an index of "
        f"{each['index_bytes'] / 1e6:.1f} MB"
        for each in planning
    ]
    lines.append("save / step   beside, a save   in turn, a save   beside / in turn   last wait")
    for case in cases:
        beside, in_turn = (case[way] / saves for way in ("beside_s", "in_turn_s"))
        ratio, wait = case["ratio"], case["last_wait_s"]
        lines.append(
            f"{case['share']:<13g} {beside:.3f} s          {in_turn:.3f} s           {ratio:.3f}              {wait:.2f} s"
        )
    return report, "\n".join(lines)


def _compare(training: _Training, work: _Saves, share: float, save_s: float, saves: int) -> dict[str, float]:
    """Take the same steps without saves, with saves in turn, and with saves beside."""
    training.pace(save_s / share)
    each = int(share) + 2  # steps from one save to the next: one more than it lasts
    bare = in_turn = beside = last_wait_s = 0.0
    for _ in range(saves):  # in rotating order, as disks have moods
        bare += _timed(training, each)
        began = time.perf_counter()
        work.begin()
        work.finish()
        in_turn += time.perf_counter() - began + _timed(training, each)
        began = time.perf_counter()
        work.begin(beside=True)
        beside += time.perf_counter() - began + _timed(training, each)
        began = time.perf_counter()
        work.finish()
        last_wait_s = time.perf_counter() - began
        beside += last_wait_s
    return {
        "share": share,
        "step_s": bare / saves / each,
        "in_turn_s": in_turn - bare,
        "beside_s": beside - bare,
        "ratio": (beside - bare) / (in_turn - bare),
        "last_wait_s": last_wait_s,
    }


def _timed(training: _Training, steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        training.step()
    training.updater.wait()
    return time.perf_counter() - began


def _speeds(work: _Saves, scratch: Path, n_bytes: int, repeat: int) -> tuple[float, float]:
    """Return the bytes per second of our saves, and of plain writes of as much by as many threads; medians.

    Both delete as much as they write: a save retires an older one, which takes a disk with ``discard`` 0.15 s per GB.
    """
    ours, plain = [], []
    content = torch.randn(PLAIN_BYTES // 4).numpy().tobytes()

    def write(number: int) -> None:
        with (scratch / f"plain-{number}").open("wb") as file:
            for _ in range(n_bytes // THREADS // PLAIN_BYTES):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())

    for number in range(KEEP + repeat):
        began = time.perf_counter()
        work.begin()
        work.finish()
        if number < KEEP:  # nothing to delete yet
            continue
        ours.append(n_bytes / (time.perf_counter() - began))
        began = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(write, range(THREADS)))
        for number in range(THREADS):
            (scratch / f"plain-{number}").unlink()
        plain.append(n_bytes // THREADS // PLAIN_BYTES * PLAIN_BYTES * THREADS / (time.perf_counter() - began))
    return statistics.median(ours), statistics.median(plain)


def _disk_of(directory: Path) -> str:
    """Name the filesystem that a directory is on."""
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    place = directory.resolve()
    device, point, kind = max((m for m in mounts if place.is_relative_to(m[1])), key=lambda mount: len(mount[1]))
    return f"{device} ({kind}, {point})"


def _against_dcp(work: _Saves, scratch: Path, n_bytes: int, repeat: int) -> dict[str, tuple[float, float]]:
    """Return the GB/s of saves and of loads, ours and those of torch's DCP, in turns; medians. Ours hash and verify all bytes."""
    seconds: dict[tuple[str, bool], list[float]] = {
        (what, own): [] for what in ("save", "load") for own in (True, False)
    }
    state = state_to_save(work.training.updater, work.store.rank)
    for _ in range(repeat):
        for own in (True, False):
            began = time.perf_counter()
            if own:
                work.begin()
                path = work.finish().path
            else:
                dcp.save(state, checkpoint_id=(path := scratch / "dcp"))
            seconds["save", own].append(time.perf_counter() - began)
            _forget(path)
            began = time.perf_counter()
            if own:
                opened = open_manifest(path)
                assert not isinstance(opened, RejectedCheckpoint)
                checkpoint = CheckpointReader(path, opened[0])
                checkpoint.read(checkpoint.plan(targets_of(state)))
            else:
                dcp.load(state, checkpoint_id=path)
            seconds["load", own].append(time.perf_counter() - began)
    return {
        what: (
            n_bytes / 1e9 / statistics.median(seconds[what, True]),
            n_bytes / 1e9 / statistics.median(seconds[what, False]),
        )
        for what in ("save", "load")
    }


def _forget(directory: Path) -> None:
    """Drop a directory's files from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _planning(world: int) -> dict[str, float]:
    """Return what planning who writes what, and each save's manifest, cost rank 0 with 405B on simulated ranks."""
    llama = find_model_shape(Config(), "llama3.1-405b")
    assert llama
    shapes, axes = llama.tensors(), Axes(world)
    layout = ShardLayout.from_shapes(shapes, axes)
    sent = []
    for rank in range(world):
        held = {f"rng.{rank}.cpu": Held("U8", (5056,), (((0, 5056),),))}
        for name, shape in shapes.items():
            part = Held("F32", shape, (layout.slice_of(name, shape, rank),))
            moments = {f"optimizer.state.{name}.{kind}": part for kind in ("exp_avg", "exp_avg_sq")}
            held |= {f"model.{name}": part, f"optimizer.state.{name}.step": Held("F32", (), ((),)), **moments}
        sent.append(reader.dumps(Holdings.of(held)))
    began = time.process_time()
    index = reader.dumps(plan_index([reader.loads(Holdings, text, "a rank's") for text in sent]))
    plan_s = time.process_time() - began
    n_files = 2 * THREADS + 1
    n_blocks = -(-BYTES_PER_PARAMETER * llama.parameters // world // n_files // BLOCK_BYTES)
    digest = FileDigest(n_blocks * BLOCK_BYTES, 0, (hashlib.sha256().hexdigest(),) * n_blocks)
    digests = [
        reader.dumps(
            {f"weights-{rank}-{n}.safetensors": dataclasses.replace(digest, rank=rank) for n in range(n_files)}
        )
        for rank in range(world)
    ]
    began = time.process_time()
    parts = [reader.loads(dict[str, FileDigest], text, "a rank's") for text in digests]
    files = {name: each for part in parts for name, each in part.items()} | {INDEX: FileDigest(0, 0, digest.blocks[:1])}
    write_manifest(Manifest(3, 1, files, world))
    return {"world": world, "plan_s": plan_s, "save_s": time.process_time() - began, "index_bytes": len(index)}
