"""What cluster-top judges, as values only: verdicts, phases and states, never their words."""

import copy

import pytest

from llama405b_tools.top.state import simulate
from llama405b_tools.top.state.cluster import Cluster
from llama405b_tools.top.state.picture import GuardShown, HostState, Level, RunPhase, Verdict

T0 = simulate.BEGIN
NODE = {"host": "h", "state": "exited", "attempt": 1, "pid": 1, "pid_start": 1, "exit_code": 1}
KILLED = NODE | {"cause": {"kind": "rank killed", "rank": 9, "signal": 9}}
LOST = NODE | {"cause": {"kind": "lost peer", "rank": 0, "exit_code": 1}}


def play(seconds, change=lambda host, frame: None, n_hosts=4):
    """The cluster after so much of the incident; ``change`` edits each frame."""
    names = simulate.names(n_hosts)
    cluster, last = Cluster(names, 2.0), T0
    for event in simulate.incident(n_hosts, seconds=seconds):
        if "frame" in event:
            frame = copy.deepcopy(event["frame"])
            change(event["host"], frame)
            cluster.take(event["host"], frame, event["t"])
            last = event["t"]
            if event["host"] == names[-1]:
                cluster.advance(last)
    cluster.advance(last)
    return cluster, last


def run_of(frame, **new):
    frame["run"] |= new


def beats(frame, **new):
    for beat in frame["run"]["beats"]:
        beat |= new


def at(host, edit):
    return lambda name, frame: edit(frame) if name == host else None


def test_who_is_named_is_who_was_decided_on_by_whoever_ended_the_attempt():
    ended = NODE | {"state": "killed", "exit_code": None, "signal": 15, "cause": {"kind": "signal", "signal": 15}}
    decided = {"host": "gpu-3", "cause": {"kind": "hung", "host": "gpu-3", "rank": 20, "phase": "train", "step": 5}}
    for attempt, named in ((1, "gpu-3"), (0, "gpu-1")):  # not by a blame on an attempt before
        recorded = decided | {"attempt": attempt}
        cluster, _ = play(50, lambda _, frame, it=recorded: run_of(frame, alive=False, status=ended, blame=it))
        assert cluster.picture().why.partition(":")[0] == named


@pytest.mark.parametrize(
    ("seconds", "change", "verdict", "code", "phase"),
    [
        (14, None, Verdict.HEALTHY, 0, RunPhase.LOADING),
        (50, None, Verdict.HEALTHY, 0, RunPhase.TRAIN),
        (84, None, Verdict.DEGRADED, 1, RunPhase.TRAIN),  # a hot GPU
        (simulate.HUNG + 40, None, Verdict.DEGRADED, 1, RunPhase.TRAIN),  # silent, and not for long enough
        (simulate.HUNG + 80, None, Verdict.HUNG, 3, RunPhase.HUNG),
        (14, lambda _, frame: run_of(frame, trains=False, beats=[], metrics=[]), Verdict.HEALTHY, 0, RunPhase.RUNNING),
        (50, lambda _, frame: beats(frame, phase="checkpoint"), Verdict.HEALTHY, 0, RunPhase.CKPT),
        (50, lambda _, frame: beats(frame, phase="eval"), Verdict.HEALTHY, 0, RunPhase.EVAL),
        (50, at("gpu-2", lambda frame: beats(frame, phase="failed")), Verdict.FAILED, 3, RunPhase.FAILED),
        (50, at("gpu-2", lambda frame: beats(frame, state="T")), Verdict.DEGRADED, 1, RunPhase.TRAIN),
        (50, lambda _, frame: run_of(frame, net="SOCKET"), Verdict.DEGRADED, 1, RunPhase.TRAIN),
        (50, lambda _, frame: run_of(frame, alive=False, status=KILLED), Verdict.FAILED, 3, RunPhase.FAILED),
        (50, lambda _, frame: run_of(frame, alive=False, status=NODE | {"exit_code": 0}), Verdict.HEALTHY, 0, RunPhase.STOPPED),
        (50, lambda _, frame: run_of(frame, alive=False, status=NODE | {"state": "stopped"}), Verdict.HEALTHY, 0, RunPhase.STOPPED),
        (50, lambda _, frame: run_of(frame, alive=False, status=None), Verdict.HEALTHY, 0, RunPhase.STARTING),
        (50, at("gpu-3", lambda frame: frame["smi"].update(text=None, hung_s=45.0)), Verdict.DEGRADED, 1, RunPhase.TRAIN),
    ],
)  # fmt: skip
def test_the_whole(seconds, change, verdict, code, phase):
    cluster, _ = play(seconds, change or (lambda *_: None))
    pic = cluster.picture()
    assert (pic.verdict, pic.exit_code, pic.training.phase) == (verdict, code, phase)


def test_the_host_where_it_began_has_failed():
    cluster, _ = play(50, lambda host, frame: run_of(frame, alive=False, status=KILLED if host == "gpu-3" else LOST))
    found = cluster.found
    assert max(found.failures, key=lambda failure: failure.origin).host == "gpu-3"
    assert {state for state, _ in found.states.values()} == {HostState.FAILED}


def test_a_guard_that_is_gone_is_not_healthy():
    cluster, _ = play(50)
    for guard, verdict in (
        (GuardShown.GONE, Verdict.DEGRADED), (GuardShown.WATCHING, Verdict.HEALTHY), (GuardShown.NONE, Verdict.HEALTHY),
    ):  # fmt: skip
        cluster.guard = guard
        assert cluster.picture().verdict is verdict


@pytest.mark.parametrize("state", [HostState.AUTH, HostState.REFUSED, HostState.TIMEOUT, HostState.DOWN])
def test_a_host_without_a_connection(state):
    cluster, now = play(50)
    cluster.link("gpu-2", state, "why", now)
    cluster.advance(now)
    pic = cluster.picture()
    assert (pic.hosts[1].state, pic.verdict, pic.exit_code) == (state, Verdict.DOWN, 3)
    assert [(change.host, change.level) for change in pic.events][-1] == ("gpu-2", Level.BAD)


def test_to_look_changes_nothing():
    cluster, _ = play(simulate.HUNG + 80)
    first = cluster.picture()
    before = copy.deepcopy({key: value for key, value in vars(cluster).items() if key != "hosts"})
    for _ in range(3):
        cluster.picture()
    assert {key: value for key, value in vars(cluster).items() if key != "hosts"} == before
    assert cluster.picture() == first


def test_what_is_wrong_is_said_once_while_its_numbers_change():
    cluster, now = play(84)
    said = len(cluster.events)
    for moment in range(1, 5):
        cluster.advance(now + moment)
    assert len(cluster.events) == said
