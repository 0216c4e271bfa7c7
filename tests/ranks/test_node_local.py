"""Checkpoints on the hosts' own disks: each host keeps its part, and a resume brings what a host lacks."""

import os
import re
import shutil
import types
from pathlib import Path

import pytest

from ranks_rig import run_ranks
from update_rig import bits, build, data_file, flip, same, save, take

ROOT = Path("checkpoints")  # by the same name on every host


def _on_host(me, hosts, order=None):
    """Be a rank on the host that is ``order``'s for it: its directory is this process's."""
    host = (order or range(hosts))[me.index * hosts // me.world_size]
    os.chdir(hosts_dir(host))
    return host


def hosts_dir(host):
    path = Path(os.environ["HOSTS"]) / f"host-{host}"
    path.mkdir(exist_ok=True)
    return path


def _store(me, run="run"):
    from llama405b.checkpoint.store import Store
    from llama405b.contract.paths import RunDir

    return Store(ROOT, 2, me, run=RunDir(Path(run)), shared=False)


def _save(me, directory, place, hosts, steps=(2, 4)):
    os.environ["HOSTS"] = str(place)
    _on_host(me, hosts)
    module, updater = build(me, directory, offload="optimizer", overlap=True)
    store = _store(me)
    store.acquire()
    for step in range(1, steps[-1] + 1):
        take(me, module, updater, step)
        if step in steps:
            save(store, step, updater)
    store.close()
    after = [take(me, module, updater, step) for step in (5, 6)]
    return after, store.owner_of, bits(module, updater)


def _resume(me, directory, place, hosts, order=None, wanted="auto"):
    from llama405b.checkpoint.format import DamagedError
    from llama405b.checkpoint.resume import Resume
    from llama405b.contract.errors import UserError

    os.environ["HOSTS"] = str(place)
    _on_host(me, hosts, order)
    module, updater = build(me, directory, offload="optimizer", overlap=True)
    store, brought, done = _store(me), [], None
    try:
        store.acquire()
        chosen = Resume(store, wanted)
        while done is None and chosen.checkpoint:
            try:
                done = chosen.load(module, updater, lambda n, _: brought.append(n))
            except DamagedError as fault:
                brought.append(str(fault))
    except UserError as error:
        return str(error)
    finally:
        store.close()
    after = [take(me, module, updater, step) for step in range(done + 1, 7)] if done else []
    left = sorted(path.name for path in ROOT.iterdir() if path.is_dir())
    return done, after, bits(module, updater), left, [str(each) for each in chosen.rejected]


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    place = tmp_path_factory.mktemp("hosts")
    return place, run_ranks(4, _save, tiny, place, 2)


@pytest.fixture
def hosts(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "hosts")
    return tmp_path / "hosts", saved[1]


def _data_files(host, step=4):
    return sorted(path.name.split("-")[1] for path in (host / ROOT / f"step-{step:08d}").glob("*.safetensors"))


def test_each_host_keeps_what_its_ranks_wrote_and_all_that_describes_it(saved):
    place, told = saved
    assert told[0][1] == (0, 0, 2, 2)
    assert {*_data_files(place / "host-0")} == {"0", "1"}
    assert {*_data_files(place / "host-1")} == {"2", "3"}
    for host in (place / "host-0", place / "host-1"):
        there = {path.name for path in (host / ROOT).iterdir() if path.is_dir()}
        assert there == {"step-00000002", "step-00000004"}
        assert (host / ROOT / "step-00000004/index.json").is_file()
    manifests = {(place / host / ROOT / "step-00000004/manifest.json").read_bytes() for host in ("host-0", "host-1")}
    assert len(manifests) == 1


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["as before", "in another order"])
def test_it_resumes_to_the_same_losses(tiny, hosts, order):
    place, told = hosts
    for (done, after, state, left, passed), (losses, _, expected) in zip(
        run_ranks(4, _resume, tiny, place, 2, order), told, strict=True
    ):
        assert (done, after, passed) == (4, losses, [])
        assert same(state, expected)
        assert left == ["step-00000002", "step-00000004"]


def test_another_number_of_ranks_and_of_hosts_resumes(tiny, hosts):
    place, told = hosts
    for world, n_hosts, order in ((2, 2, [1, 0]), (3, 3, None)):  # the third host is blank
        for done, after, *_ in run_ranks(world, _resume, tiny, place, n_hosts, order):
            assert done == 4
            assert [loss for loss, _ in after] == pytest.approx([loss for loss, _ in told[0][0]], abs=1e-3)


def test_a_lost_host_is_said_and_nothing_is_changed(tiny, hosts):
    place, _ = hosts
    shutil.rmtree(place / "host-1")
    said = run_ranks(4, _resume, tiny, place, 2)[0]
    assert said.startswith(f"--resume auto: {ROOT} has 2 checkpoints, but none verifies (")
    assert "not on any host of this run" in said
    assert sorted(path.name for path in (place / "host-0" / ROOT).glob("step-*")) == ["step-00000002", "step-00000004"]


def test_a_step_that_one_host_lacks_or_has_damaged_gives_way_to_the_one_before(tiny, hosts):
    place, _ = hosts
    flip(data_file(place / "host-1" / ROOT / "step-00000004", 2))
    for done, *_, left, passed in run_ranks(4, _resume, tiny, place, 2):
        assert done == 2
        assert len(passed) == 1
        assert re.search(r"\w+-2-\d.safetensors: its content does not match its checksum", passed[0])
        assert [name[:19] for name in left] == ["step-00000002", "step-00000004.aside"]


def test_a_commit_that_was_cut_short_is_finished(tiny, hosts):
    place, told = hosts
    step = place / "host-1" / ROOT / "step-00000004"
    step.rename(step.with_name("step-00000004.run.tmp"))
    done, after, *_ = run_ranks(4, _resume, tiny, place, 2)[0]
    assert (done, after) == (4, told[0][0])


def _said_at_the_start(me, place):
    from llama405b.contract.paths import RunDir
    from llama405b.settings.schema import Checkpoint
    from llama405b.training.setup import open_checkpoints

    os.environ["HOSTS"] = str(place)
    _on_host(me, me.world_size)
    said = []
    context = types.SimpleNamespace(rank=me, run=RunDir(Path("run")), journal=types.SimpleNamespace(log=said.append))
    saving, _ = open_checkpoints(Checkpoint(storage="local", every="0"), 60, "no", 1, context, lambda _: None)
    saving.store.close()
    return said


@pytest.mark.parametrize(
    ("world", "where"),
    [
        (1, "1 directory in all; losing a host loses all checkpoints"),
        (2, "2 directories in all; the next host keeps a copy"),
    ],
)
def test_a_copy_is_promised_where_there_is_a_next_host(tmp_path, world, where):
    assert run_ranks(world, _said_at_the_start, tmp_path)[0] == [f"checkpoints: each host keeps its part, {where}"]
