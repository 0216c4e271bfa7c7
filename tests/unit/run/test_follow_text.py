"""What following a run prints."""

import dataclasses
import re
import types

import pytest
from run_rig import ended, metrics, plan, take

from llama405b.contract.records import Cause, CauseKind, EvaluationMetrics, EventKind, Phase, RunEvent
from llama405b_tools.agent.messages import RankHeartbeat
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.run import follow
from llama405b_tools.run.follow import QUIET_S, SAME_QUIET_S, EndKind, IdleMessage, RunMonitor, summarise

FLEET = Fleet([Host("a", "hosts:1")])


@pytest.fixture
def watch():
    return RunMonitor(plan("-m", "llama405b.train"))


@pytest.fixture
def foreign():
    """A program of the user's own."""
    return RunMonitor(plan("mine.py"))


def test_a_silence_before_the_first_step_is_explained(watch):
    silence = IdleMessage(watch, 100.0)
    assert silence.due(100.0 + QUIET_S - 1) == []
    assert silence.due(110.0) == ["10 s: starting Python and PyTorch (ranks 0-1)"]
    take(watch, "b", beats=(RankHeartbeat(1, "b", 5, 0.0, 0, Phase.DATA, 0.0),), now=0.0)
    silence.since_s = 111.0
    assert silence.due(121.0) == ["21 s: starting Python and PyTorch (rank 0), reading the data (rank 1)"]
    take(watch, "a", beats=(RankHeartbeat(0, "a", 5, 0.0, 0, Phase.LOAD, 0.0),), now=0.0)
    take(watch, "b", beats=(RankHeartbeat(1, "b", 5, 0.0, 0, Phase.LOAD, 0.0),), now=0.0)
    assert silence.due(131.0) == ["31 s: loading the weights (ranks 0-1)"]
    assert silence.due(131.0 + SAME_QUIET_S - 1) == []  # the same is not repeated so often
    assert silence.due(131.0 + SAME_QUIET_S) == ["91 s: loading the weights (ranks 0-1)"]
    take(watch, "a", metrics=(metrics(1, 5.0, 2),))
    assert silence.due(900.0) == []


def test_an_evaluation_before_the_first_step_is_no_step(watch, capsys):
    silence = IdleMessage(watch, 100.0)
    for host, rank in (("a", 0), ("b", 1)):
        take(watch, host, beats=(RankHeartbeat(rank, host, 5, 0.0, 0, Phase.EVAL, 0.0),), now=0.0)
    assert silence.due(110.0) == ["10 s: evaluating (ranks 0-1)"]
    take(watch, "a", metrics=(EvaluationMetrics(0, 0.0, 7.6, 2),))
    take(watch, "b", beats=(RankHeartbeat(1, "b", 5, 0.0, 0, Phase.TRAIN, 0.0),), now=0.0)
    assert silence.due(120.0) == ["20 s: evaluating (rank 0), taking the first step (rank 1)"]
    summarise(watch, watch.plan, FLEET)
    assert "steps" not in capsys.readouterr().out
    last = dataclasses.replace(metrics(2, 4.0, 2), evaluation_loss=4.25)
    take(watch, "a", metrics=(metrics(1, 5.0, 2), last))
    summarise(watch, watch.plan, FLEET)
    assert "steps 1-2, loss 5.000 -> 4.500 (mean of the last 2), evaluation 7.600 -> 4.250 after step 2, " in (
        capsys.readouterr().out
    )


TRACEBACK = "Traceback (most recent call last):\nKeyError: 'x'"


def test_what_another_programs_ranks_write_to_standard_error_is_shown(watch, foreign):
    entries = ((0.0, "r-2_0/attempt_0/0/stdout.log", "hello"), (0.0, "r-2_0/attempt_0/0/stderr.log", TRACEBACK))
    shown = ["hello", "a │ Traceback (most recent call last):", "a │ KeyError: 'x'"]
    assert take(foreign, "a", entries=entries) == shown
    assert take(foreign, "b", entries=entries) == [line.replace("a │", "b │") for line in shown[1:]]
    assert take(watch, "a", entries=entries) == ["hello"]  # ours says why it ended in one line


def test_resuming_is_suggested_only_where_there_is_a_checkpoint(watch, foreign, capsys):
    for each in (watch, foreign):
        for kind in (EndKind.FAILED, EndKind.STOPPED):
            each.failures, each.stopped_by = [], ""
            if kind is EndKind.FAILED:
                take(each, "a", node=ended(Cause(CauseKind.RANK_EXIT, "a", 0)))
            else:
                each.stopped_by = "me"
            assert summarise(each, each.plan, FLEET).kind is kind
    assert "--resume" not in "".join(capsys.readouterr())
    take(watch, "a", events=(RunEvent(0.0, "rank-0", EventKind.RESUMED, 2, 4, "/old"),))
    summarise(watch, watch.plan, FLEET)
    assert "stopped by me; to continue, repeat the launch with --run r --resume auto" in capsys.readouterr().out


def test_a_failure_says_whose_log_to_read(watch, capsys):
    killed = Cause(CauseKind.RANK_KILLED, "b", 1, signal=9, gpu="4")
    take(watch, "b", node=ended(killed))
    ending = summarise(watch, watch.plan, Fleet([Host("a", "my-hosts:1")]))
    logs = r"; `\S+ logs my-hosts --run r --attempt 2 --rank 1` shows its log"
    assert re.fullmatch(rf"b: exited 1: rank 1 \(GPU 4\) was killed by SIGKILL{logs}", ending.words)
    assert f"FAILED  {ending.words}\n" in capsys.readouterr().err


@pytest.mark.parametrize(("now_b", "failed_at"), [(None, 1200.0), (5000.0, 1180.0)])
def test_a_failure_has_the_time_at_which_its_host_saw_it_by_the_heads_clock(watch, monkeypatch, now_b, failed_at):
    """b's clock is 3900 s ahead; it saw the failure 20 s before now, and if it is not heard, that is told now."""
    clock = types.SimpleNamespace(now=10.0)
    monkeypatch.setattr(follow.time, "monotonic", lambda: clock.now)
    assert watch.failed_at("b") == 0.0
    take(watch, "a", beats=(), now=1100.0)
    if now_b:
        take(watch, "b", beats=(), now=now_b)
    clock.now = 110.0
    news = ended(Cause(CauseKind.RANK_KILLED, "b", 1, signal=9))
    take(watch, "b", node=dataclasses.replace(news, status=dataclasses.replace(news.status, time=5080.0)))
    assert watch.failed_at("b") == failed_at


def test_another_program_is_not_taken_for_training(foreign, capsys):
    assert summarise(foreign, foreign.plan, FLEET).kind is EndKind.WELL
    assert "model" not in capsys.readouterr().out
