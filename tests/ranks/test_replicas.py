"""Copies of the hosts' parts on the next host: a lost host's come back, by the real process that copies."""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_node_local import ROOT, _resume

from conftest import ROOT as CHECKOUT
from llama405b.contract.paths import RunDir
from llama405b.spec.plan import Node, Plan
from ops_rig import wait_for
from ranks_rig import run_ranks
from update_rig import build, data_file, flip, save, take

HOSTS = 3
RUN = Path("runs/run")


def _plan(place):
    nodes = tuple(Node(f"host-{i}", 1, i, "", sys.executable, "127.0.0.1", "lo", {}) for i in range(HOSTS))
    plan = Plan("run", 1, 0.0, "", "", (), (), nodes, str(ROOT), replicates=True)
    for i in range(HOSTS):
        run = RunDir(place / f"host-{i}" / RUN)
        run.plan.parent.mkdir(parents=True)
        run.plan.write_text(json.dumps(dataclasses.asdict(plan)))


@contextlib.contextmanager
def _replicators(place):
    """What the node runners start on the hosts; all end with their standard input."""
    env = os.environ | {"PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'tools'}"}
    started = []
    try:
        for i in range(HOSTS):
            argv = [sys.executable, "-m", "llama405b_tools.agent.relay", str(RUN), f"host-{i}"]
            started.append(subprocess.Popen(argv, cwd=place / f"host-{i}", env=env, stdin=subprocess.PIPE))
        yield started
    finally:
        for process in started:
            process.stdin.close()
            process.wait(60)


def _save(me, directory, place, steps):
    from llama405b.checkpoint import replication, saving
    from llama405b.checkpoint.store import Store

    os.chdir(Path(place) / f"host-{me.index}")
    module, updater = build(me, directory, offload="optimizer", overlap=True)
    store = Store(ROOT, 2, me, run=RunDir(RUN), shared=False)
    store.acquire()
    copies, everywhere = replication.Replication(store), []
    copies.begin(0)
    made = saving.CheckpointSaver.__init__
    saving.CheckpointSaver.__init__ = lambda self, store: made(self, store, replication=copies)
    for step in range(1, steps[-1] + 1):
        take(me, module, updater, step)
        if step in steps:
            save(store, step, updater)
            Path(ROOT, f"step-{step:08d}", "Thumbs.db").touch()  # of a file server; it is no part of the checkpoint
            wait_for(lambda step=step: copies.update_replicated_step() >= step)
            everywhere.append(copies.replicated_step)
    store.close()
    return [take(me, module, updater, step) for step in (5, 6)], everywhere


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    place = tmp_path_factory.mktemp("ring")
    _plan(place)
    with _replicators(place) as started:
        told = run_ranks(HOSTS, _save, tiny, place, (1, 2, 3, 4))
        for process in started:
            process.stdin.write(b"last\n")
            process.stdin.flush()
        assert [process.wait(60) for process in started] == [0] * HOSTS
    return place, told


@pytest.fixture
def ring(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "ring")
    return tmp_path / "ring", saved[1]


def test_each_host_has_a_whole_copy_of_the_one_before(saved):
    place, told = saved
    assert [everywhere for _, everywhere in told] == [[1, 2, 3, 4]] * HOSTS
    for i in range(HOSTS):
        before = (i - 1) % HOSTS
        copy = place / f"host-{i}" / ROOT / f"of-host-{before}"
        assert [path.name for path in sorted(copy.glob("step-*"))] == ["step-00000003", "step-00000004"]
        events = (place / f"host-{i}" / RUN / f"events/copies-host-{i}.jsonl").read_text().splitlines()
        assert [(event["kind"], event["step"]) for event in map(json.loads, events)][-1] == ("copied", 4)
        its = place / f"host-{before}" / ROOT / "step-00000004"
        names = {path.relative_to(its) for path in its.rglob("*") if path.is_file()} - {Path("Thumbs.db")}
        assert Path(f"weights-{before}-0.safetensors") in names
        assert {path.relative_to(copy / its.name) for path in (copy / its.name).rglob("*") if path.is_file()} == names
        for name in names:
            assert (copy / its.name / name).read_bytes() == (its / name).read_bytes()


@pytest.mark.parametrize("lost", range(HOSTS))
def test_any_one_host_may_be_lost(tiny, ring, lost):
    place, told = ring
    shutil.rmtree(place / f"host-{lost}")
    for (done, after, *_), (losses, _) in zip(run_ranks(HOSTS, _resume, tiny, place, HOSTS), told, strict=True):
        assert (done, after) == (4, losses)


def test_a_damaged_file_is_read_from_its_copy_and_a_step_whose_copy_is_damaged_too_gives_way(tiny, ring):
    place, told = ring
    bad = data_file(place / "host-1" / ROOT / "step-00000004", 1)
    flip(bad)
    for (done, after, _, left, passed), (losses, _) in zip(
        run_ranks(HOSTS, _resume, tiny, place, HOSTS), told, strict=True
    ):
        assert (done, after, passed) == (4, losses, [])
        assert not any("tmp" in name for name in left)
    flip(place / "host-2" / ROOT / "of-host-1/step-00000004" / bad.name)
    for done, *_, passed in run_ranks(HOSTS, _resume, tiny, place, HOSTS):
        assert done == 3
        assert len(passed) == 1
        assert f"{bad.name}: its content does not match its checksum" in passed[0]


def test_two_neighbours_lost_are_said(tiny, ring):
    place, _ = ring
    for lost in (1, 2):
        shutil.rmtree(place / f"host-{lost}")
    said = run_ranks(HOSTS, _resume, tiny, place, HOSTS)[0]
    assert "none verifies" in said
    assert "step-00000004/optimizer-1-0.safetensors: not on any host of this run" in said
