"""One writer per directory of checkpoints. The clock and the other holders are the test's."""

import errno
import os
import shutil
import subprocess
import threading
import types

import pytest

from llama405b.checkpoint import store
from llama405b.checkpoint.store import LeaseHolder
from llama405b.contract.checkpoints import Lease
from llama405b.contract.errors import UserError
from llama405b.contract.files import read_record
from ops_rig import wait_for


class Clock:
    """Passes when somebody sleeps; ``meanwhile`` happens then."""

    def __init__(self, monkeypatch):
        self.now, self.meanwhile = 0.0, lambda: None
        monkeypatch.setattr(store.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(store.time, "sleep", self.sleep)

    def sleep(self, seconds):
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(store, "RENEW_EVERY_S", 3600.0)  # holders renew when the test says so
    return Clock(monkeypatch)


@pytest.fixture
def hold(tmp_path):
    held = []

    def make(run, attempt=1, where="node:/w"):
        holder = LeaseHolder(tmp_path, run, where, attempt)
        held.append(holder)
        return holder

    yield make
    for holder in held:
        holder.end_requested.set()


def take(holder):
    said = []
    holder.acquire(said.append)
    return said


def leases(root):
    return sorted(path.name for path in root.iterdir())


def test_a_run_that_ended_leaves_the_directory_at_once(clock, hold, tmp_path):
    first = hold("a")
    assert take(first) == []
    first.release()
    second = hold("b")
    assert take(second) == []
    assert leases(tmp_path) == ["lease-00000002.json"]
    assert clock.now == 0


def test_a_higher_attempt_of_the_same_run_takes_over_at_once(clock, hold):
    take(first := hold("a", 1))
    assert take(hold("a", 2)) == []
    assert clock.now == 0
    with pytest.raises(UserError, match=r"run 'a' \(attempt 2, node:/w\) took over this directory"):
        first.check()


@pytest.mark.parametrize("other", [("b", 9, "node:/w"), ("a", 1, "node:/w"), ("a", 2, "elsewhere:/w")])
def test_a_living_run_is_not_replaced(clock, hold, tmp_path, other):
    take(first := hold("a", 1))
    clock.meanwhile = lambda: first._write(first.number)
    with pytest.raises(
        UserError, match=r"--checkpoint.dir: run 'a' \(attempt 1, node:/w\) is writing checkpoints into"
    ):
        take(hold(*other))
    first.check()
    assert leases(tmp_path) == ["lease-00000001.json"]


def test_a_dead_run_is_replaced_after_it_was_watched(clock, hold):
    take(first := hold("a"))
    assert take(hold("b"))[0].endswith("used this directory and may still be running; watching it for 90 s")
    assert clock.now >= store.STALE_S
    with pytest.raises(UserError, match="run 'b'"):
        first.check()


def test_a_run_that_ends_while_it_is_watched_is_replaced_then(clock, hold):
    take(first := hold("a"))
    clock.meanwhile = first.release
    take(hold("b"))
    assert clock.now < store.STALE_S


def test_of_two_that_find_a_dead_run_one_gets_the_directory(clock, hold, tmp_path):
    take(hold("dead"))
    one, other = hold("b"), hold("c")

    def faster():
        if clock.now >= store.STALE_S and not other.number:
            other._create(2)

    clock.meanwhile = faster
    with pytest.raises(UserError, match="run 'c'"):
        take(one)
    other.check()


def test_a_holder_that_wakes_up_after_a_takeover_does_not_renew(clock, hold, tmp_path, monkeypatch):
    take(first := hold("a"))
    take(second := hold("a", 2))
    first.leaving = threading.Event()
    monkeypatch.setattr(store, "RENEW_EVERY_S", 0.0)
    first._renew()  # returns: it has nothing to renew any more
    assert leases(tmp_path) == ["lease-00000002.json"]
    second.check()


def test_it_is_renewed_while_it_is_held(hold, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "RENEW_EVERY_S", 0.01)
    take(holder := hold("a"))
    path = tmp_path / "lease-00000001.json"
    seen = set()
    wait_for(lambda: seen.add(read_record(Lease, path).renewed) or len(seen) > 2)
    holder.release()
    assert read_record(Lease, path).ended


def test_a_renewal_that_is_being_written_does_not_undo_the_end(hold, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "RENEW_EVERY_S", 0.01)
    holder, writes = hold("a"), LeaseHolder._write
    is_renewing, has_ended = threading.Event(), threading.Event()

    def write(self, number, *, ended=False):
        if threading.current_thread() is self.renewer:
            monkeypatch.setattr(store, "RENEW_EVERY_S", 60.0)  # as long as the end waits for a renewal
            is_renewing.set()
            assert self.end_requested.wait(60)
            has_ended.wait(0.3)  # set only if the end did not wait
        writes(self, number, ended=ended)
        if ended:
            has_ended.set()

    take(holder)
    monkeypatch.setattr(LeaseHolder, "_write", write)
    assert is_renewing.wait(60)
    holder.release()
    holder.renewer.join(60)
    assert read_record(Lease, tmp_path / "lease-00000001.json").ended


def test_a_run_that_holds_no_directory_needs_none(hold, tmp_path):
    holder = LeaseHolder(tmp_path / "absent", "a", "node:/w", 1)
    holder.check()
    holder.release()
    assert leases(tmp_path) == []


def test_a_lease_that_cannot_be_written_is_not_held_and_keeps_nobody_waiting(clock, hold, tmp_path, monkeypatch):
    def full(path, record):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(store, "write_json", full)
        holder = hold("a")
        with pytest.raises(OSError, match="No space left"):
            take(holder)
        holder.check()
        holder.release()
    assert leases(tmp_path) == []
    assert take(hold("b")) == []


def test_a_directory_that_was_removed_is_made_anew(clock, hold, tmp_path):
    holder = LeaseHolder(tmp_path / "c", "a", "node:/w", 1)
    (tmp_path / "c").mkdir()
    said = take(holder)
    shutil.rmtree(tmp_path / "c")
    holder.check()
    assert leases(tmp_path / "c") == ["lease-00000001.json"]
    assert said == [f"{tmp_path}/c: was removed or emptied during the run; saving continues there"]
    holder.check()
    assert len(said) == 1
    holder.end_requested.set()


@pytest.mark.parametrize("way", ["its run's", "another's"])
def test_a_directory_that_another_run_has_made_anew_is_its(clock, hold, tmp_path, way):
    take(first := hold("a"))
    (tmp_path / leases(tmp_path)[0]).unlink()
    take(second := hold("b"))
    if way == "another's":
        with pytest.raises(UserError, match="run 'b'"):
            first.check()
        first.release()
    else:
        second.release()
        first.check()
        assert leases(tmp_path) == ["lease-00000001.json", "lease-00000002.json"]
        with pytest.raises(UserError, match="run 'a'"):
            second.check()
    assert read_record(Lease, tmp_path / "lease-00000001.json").run == "b"


@pytest.fixture
def mounted(tmp_path):
    """A directory that is mounted, with ways to unmount it and to mount it again."""
    source, point = tmp_path / "disk", tmp_path / "mounted here"
    (source / "c").mkdir(parents=True)
    point.mkdir()

    def mount():
        subprocess.run(["mount", "--bind", source, point], check=True)

    def unmount():
        subprocess.run(["umount", point], check=True)

    if os.getuid() != 0 or subprocess.run(["mount", "--bind", source, point], check=False).returncode:
        pytest.skip("NOT RUN: may not mount")
    yield point, mount, unmount
    subprocess.run(["umount", "-q", point], check=False)


@pytest.mark.parametrize("below", ["", "c"])
def test_nothing_is_written_where_a_filesystem_is_not_mounted(clock, mounted, monkeypatch, below):
    point, mount, unmount = mounted
    holder = LeaseHolder(point / below, "a", "node:/w", 1)
    said = take(holder)
    unmount()
    with pytest.raises(OSError, match=f"the filesystem on {point} is no longer mounted") as gone:
        holder.check()
    assert gone.value.errno == errno.ENODEV
    holder.end_requested.set()  # the test renews
    holder.end_requested = types.SimpleNamespace(wait=lambda _: next(turns), is_set=lambda: False, set=lambda: None)
    turns = iter([False, True])
    holder._renew()
    assert list(point.iterdir()) == []
    mount()
    holder.check()
    turns = iter([False, True])
    holder._renew()
    assert read_record(Lease, point / below / "lease-00000001.json").renewed
    assert said == []
    unmount()
    holder.renewer = types.SimpleNamespace(join=lambda _: None)
    holder.release()
    assert list(point.iterdir()) == []
