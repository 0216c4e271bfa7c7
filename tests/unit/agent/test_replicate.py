"""Which copies are kept, and which are not."""

import types

import pytest

from llama405b.contract.checkpoints import Endpoint, Ring, replicas, replicated_steps
from llama405b.contract.paths import RunDir
from llama405b_tools.agent import relay
from llama405b_tools.agent.relay import _delete_old_copies


def _copies(root, host, *steps, whole=True):
    for step in steps:
        path = root / f"of-{host}/step-{step:08d}"
        path.mkdir(parents=True)
        if whole:
            (path / "manifest.json").touch()


def _left(root):
    return sorted(f"{path.parent.name} {int(path.name[5:])}" for path in root.glob("of-*/step-*"))


@pytest.mark.parametrize(
    ("everywhere", "left"),
    [
        (0, ["of-a 2", "of-a 3", "of-z 1", "of-z 2"]),
        (1, ["of-a 1", "of-a 2", "of-a 3", "of-z 1", "of-z 2"]),
        (2, ["of-a 2", "of-a 3", "of-z 2"]),
        (3, ["of-a 2", "of-a 3"]),
    ],
)
def test_the_newest_copies_stay_and_the_step_that_is_copied_everywhere(tmp_path, everywhere, left):
    _copies(tmp_path, "a", 1, 2, 3)
    _copies(tmp_path, "z", 1, 2)  # the host before this one, in an earlier order
    ring = Ring(1, "a", Endpoint(1, "127.0.0.1", 1, "t"), str(tmp_path), "r", 2, everywhere=everywhere)
    _delete_old_copies(tmp_path / "of-a", ring)
    assert _left(tmp_path) == left


def test_a_copy_without_a_manifest_is_none(tmp_path):
    _copies(tmp_path, "a", 1)
    _copies(tmp_path, "b", 1, 2, whole=False)
    assert [path.parent.name for path in replicas(tmp_path, "step-00000001")] == ["of-a"]
    assert replicated_steps(tmp_path) == {"step-00000001"}


@pytest.mark.parametrize("since_s", [0.0, 600.0])
def test_a_copier_tries_again_after_the_last_word_however_long_it_has_failed(tmp_path, monkeypatch, since_s):
    clock = types.SimpleNamespace(now=1e6, monotonic=lambda: clock.now)
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(relay, "time", clock)
    monkeypatch.setattr(relay, "write_private", lambda *_: None)
    monkeypatch.setattr(relay.threading, "Thread", lambda **_: types.SimpleNamespace(start=lambda: None))
    copier, tried = object.__new__(relay.Replicator), []
    copier.run, copier.host, copier.endpoint = RunDir(tmp_path), "a", Endpoint(1, "127.0.0.1", 1, "t")
    (
        copier.is_finishing,
        copier.is_upstream_done,
        copier.is_receiving,
        copier.last_received_at,
        copier.last_progress_at,
    ) = False, True, False, 0.0, 0.0

    def give(_):
        tried.append(copier.is_finishing)
        if not copier.is_finishing and clock.now > 1e6 + since_s:
            copier.is_finishing, copier.last_progress_at = True, clock.now  # as _listen_to_runner does
        clock.now += 120  # it stalls
        return False

    copier.read_ring, copier._copy_newest, copier._send = (
        lambda: Ring(1, "b", copier.endpoint, str(tmp_path), "r", 2),
        give,
        lambda *_: None,
    )
    copier.main()
    assert tried.count(True) == 2
