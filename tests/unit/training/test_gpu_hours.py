"""What a run has spent is counted over its attempts, by a clock of the test's own."""

import json
from types import SimpleNamespace

import pytest

from llama405b.contract.errors import UserError
from llama405b.contract.paths import RunDir
from llama405b.training import guards

WORLD, LOADING_S = 64, 600


class Clock:
    """Of a machine that was started a moment ago; whoever waits has it move."""

    def __init__(self):
        self.now = self.until = 5.0
        self.waits, self.threads = [], []

    def monotonic(self):
        return self.now

    def wait(self, seconds):
        self.waits.append(seconds)
        self.now += seconds
        return self.now > self.until


@pytest.fixture
def clock(monkeypatch):
    found = Clock()

    def thread(target, **_):
        return SimpleNamespace(start=lambda: found.threads.append(target), join=lambda: None)

    event = SimpleNamespace(wait=found.wait, set=lambda: None)
    monkeypatch.setattr(guards, "time", found)
    monkeypatch.setattr(guards, "threading", SimpleNamespace(Thread=thread, Event=lambda: event))
    return found


@pytest.fixture
def attempt(tmp_path, clock):
    """Begin another attempt of a run on many GPUs."""

    def begin(gpu_hours, said=None, *, is_rank0=True):
        said = [] if said is None else said
        journal = SimpleNamespace(write_event=lambda kind, detail: said.append(kind.value), log=said.append)
        me = SimpleNamespace(is_rank0=is_rank0, world_size=WORLD)
        context = SimpleNamespace(rank=me, run=RunDir(tmp_path), journal=journal)
        return guards.Budget(gpu_hours, context, clock.now)

    return begin


def kept(tmp_path):
    return json.loads((tmp_path / "spent.json").read_text())["gpu_hours"]


def test_attempts_that_end_while_they_load_are_counted(tmp_path, clock, attempt):
    for n in range(5):
        attempt(60)
        assert kept(tmp_path) == pytest.approx(n * WORLD * LOADING_S / 3600)  # at once
        clock.until = clock.now + LOADING_S
        clock.threads.pop()()  # until it is killed
        assert kept(tmp_path) == pytest.approx((n + 1) * WORLD * LOADING_S / 3600)
    assert max(clock.waits) <= 10
    with pytest.raises(UserError, match=r"^--training\.gpu_hours: 53\.33 of 53 are spent; raise it to continue"):
        attempt(53)


def test_it_stops_in_time_for_two_steps_and_a_save_and_says_how_much(tmp_path, clock, attempt):
    first, said = attempt(2.0), []
    clock.now += 56.25  # an hour of 64 GPUs
    first.close()
    second = attempt(2.0, said)
    second.set_save_size(30e9)  # 30 s, and 1.5 times that
    assert not second.after_step(2.0, 0.0)
    clock.now += 56.25 - 45 - 5 - 4 - 0.5
    assert not second.after_step(2.0, 0.0)
    assert said == []
    clock.now += 1
    assert second.after_step(2.0, 0.0)
    assert second.stop_reason == "as 1.05 of 2 GPU-hours are spent"
    assert not second.after_step(2.0, 10.0)  # it has saved in less
    clock.now += 36
    assert second.after_step(2.0, 10.0)
    assert said == ["1.69 of 2 GPU-hours are spent (--training.gpu_hours)", "budget"]
    assert second.remaining_s == pytest.approx(17.5)


def test_a_line_has_as_many_digits_as_count(clock, attempt):
    small = attempt(0.1)
    clock.now += 5.0
    assert small.after_step(1.0, 0.0)
    assert small.stop_reason == "as 0.089 of 0.1 GPU-hours are spent"


def test_other_ranks_and_runs_without_a_budget_are_never_stopped(tmp_path, clock, attempt):
    other, free = attempt(1.0, is_rank0=False), attempt(0)
    clock.now += 1e6
    assert not other.after_step(1.0, 1.0)
    assert not free.after_step(1.0, 1.0)
    other.close()
    assert kept(tmp_path) == 0
    free.close()
    assert kept(tmp_path) == pytest.approx(1e6 * WORLD / 3600)
