"""A rehearsal: what it starts, kills and resumes, what it does not trust, and that it leaves nothing behind."""

import pytest
from fakes import FakeFleet, over

from llama405b.contract.errors import RunError, UserError
from llama405b.contract.records import Cause, CauseKind, Metrics
from llama405b.spec.probes import Probe, ProbeResult
from llama405b_tools.agent.messages import StreamMessage
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.launch import probes
from llama405b_tools.launch.request import parse_launch
from llama405b_tools.run import follow


@pytest.fixture
def fleet(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(follow, "POLL_S", 0.01)
    monkeypatch.setattr(follow, "PEER_GRACE_S", 0.05)
    monkeypatch.setattr(probes, "run_probes", lambda *_, **more: [])  # run/test_run_probes.py tests it
    with FakeFleet(("a", "b")) as found:
        yield found


def steps(attempt, *losses, first=1):
    """The news of steps that were taken."""
    return StreamMessage(metrics=tuple(
        Metrics(step, 0.0, loss, 1.0, 1e-5, 8, 8.0, 1.0, 0.0, 0.5, 0.4, 0.1, attempt=attempt)
        for step, loss in enumerate(losses, first)
    ))  # fmt: skip


def rehearsed(fleet, *lives, more=(), saved=(2,)):
    """Rehearse; ``lives``: what each launch says on a and on b; ``saved``: the checkpoints' steps. Returns the exit code."""
    for i, name in enumerate(("a", "b")):
        fleet.fakes[name].saved = saved
        fleet.fakes[name].lives = [life[i] for life in lives]
    flags = ["--run", "r", "--rehearse", "--preset", "demo", "--data.paths", "stdlib", *more]
    return probes.rehearse(parse_launch(flags, 0.0), list(fleet.hosts.values()), fleet)


def asked(fleet, name, action):
    return [request for heard, request in fleet.fakes[name].heard if heard == action]


@pytest.fixture
def ended_everywhere(fleet):
    """Whatever happens, each host's last word was to end the rehearsal and delete its checkpoints."""
    yield
    for name in ("a", "b"):
        last = asked(fleet, name, "stop")[-1]
        assert (last.run, last.discard, last.hard, last.only) == ("r-rehearsal", True, False, None)
        assert not fleet.fakes[name].alive


def test_settings_that_are_refused_are_refused_before_the_tests(fleet, monkeypatch):
    monkeypatch.setattr(probes, "run_probes", lambda *_, **more: pytest.fail("the tests began"))
    with pytest.raises(UserError, match=r"divi|rank"):
        rehearsed(fleet, more=("--parallel.tp", "3"))
    assert asked(fleet, "a", "start") == []


@pytest.mark.usefixtures("ended_everywhere")
class TestRehearsal:
    def test_it_steps_saves_is_killed_and_resumes_to_the_same_loss(self, fleet, capsys):
        code = rehearsed(fleet, ([steps(1, 5.0, 4.0, 3.5)], []), ([steps(2, 3.5001, first=3)], []))
        assert code == 0, capsys.readouterr().out
        assert [stop.hard for stop in asked(fleet, "b", "stop")] == [True, False]
        before, after = [start.plan.program for start in asked(fleet, "b", "start")]
        assert before[before.index("--resume") + 1] == "no"
        assert after[after.index("--resume") + 1] == "2"
        assert "--model.layers=2" in before
        assert "--model.weights=random" in before

    def test_another_loss_after_the_resume_is_not_trusted(self, fleet, capsys):
        assert rehearsed(fleet, ([steps(1, 5.0, 4.0, 3.5)], []), ([steps(2, 3.6, first=3)], [])) == 1
        assert "checkpoints from these hosts cannot be trusted" in capsys.readouterr().out

    def test_a_checkpoint_whose_next_step_was_not_taken_is_passed_over(self, fleet, capsys):
        lives = ([steps(1, 5.0, 4.0, 3.5, 3.2)], []), ([steps(2, 3.5001, first=3)], [])
        assert rehearsed(fleet, *lives, saved=(2, 4)) == 0, capsys.readouterr().out
        again = asked(fleet, "b", "start")[1].plan.program
        assert again[again.index("--resume") + 1] == "2"

    def test_only_a_checkpoint_that_is_there_is_resumed(self, fleet, capsys):
        """The save of step 4 was due during that of step 2."""
        lives = ([steps(1, 5.0, 4.0, 3.5, 3.2, 3.1, 3.0)], []), ([steps(2, 3.5001, first=3)], [])
        assert rehearsed(fleet, *lives, saved=(2, 6)) == 0, capsys.readouterr().out
        again = asked(fleet, "b", "start")[1].plan.program
        assert again[again.index("--resume") + 1] == "2"

    def test_a_later_checkpoint_is_resumed_to_the_loss_of_its_next_step(self, fleet, capsys):
        lives = ([steps(1, 5.0, 4.0, 3.5, 3.2, 3.1)], []), ([steps(2, 3.3, first=5)], [])
        assert rehearsed(fleet, *lives, saved=(2, 4)) == 1
        assert "after the resume, step 5 has loss 3.300000, but 3.100000 before" in capsys.readouterr().out

    def test_one_that_saved_nothing_is_no_success(self, fleet, capsys):
        assert rehearsed(fleet, ([steps(1, 5.0, 4.0, 3.5)], []), saved=()) == 1
        assert "the run saved no checkpoint that can be resumed" in capsys.readouterr().out

    def test_it_takes_few_steps_keeps_few_checkpoints_and_is_tethered_to_this_process(self, fleet):
        assert rehearsed(fleet, ([steps(1, 5.0, 4.0, 3.5)], []), ([steps(2, 3.5, first=3)], [])) == 0
        config = probes.rehearsal_request(
            parse_launch(["--run", "r", "--preset", "demo", "--data.paths", "x"], 0.0)
        ).config
        assert (config.training.max_steps, config.checkpoint.keep) == (30, 2)
        actions = [action for action, _ in fleet.fakes["b"].heard]
        assert actions.index("tether") < actions.index("stop")
        assert [lease.run for lease in asked(fleet, "b", "tether")] == ["r-rehearsal"]

    def test_an_old_loss_of_the_step_is_not_taken_for_the_resumed_one(self, fleet, capsys):
        again = [steps(1, 5.0, 4.0, 3.5, 3.4), steps(2, 3.7, first=3)]  # the file still has the first attempt's lines
        assert rehearsed(fleet, ([steps(1, 5.0, 4.0, 3.5)], []), (again, [])) == 1
        assert "has loss 3.700000" in capsys.readouterr().out

    def test_a_failure_is_named_by_host_and_phase(self, fleet, capsys):
        killed = over("b", Cause(CauseKind.RANK_KILLED, "b", 1, signal=9, phase="load"))
        assert rehearsed(fleet, ([], [killed])) == 1
        said = capsys.readouterr().out
        assert "b: exited 1: rank 1 was killed by SIGKILL (in phase load)" in said
        assert len(asked(fleet, "a", "start")) == 1

    def test_one_that_ends_too_early_is_no_success(self, fleet, capsys):
        assert rehearsed(fleet, ([steps(1, 5.0), over("a")], [over("b")])) == 1
        assert "the run ended before step 3" in capsys.readouterr().out

    def test_one_whose_last_step_is_skipped_goes_no_further(self, fleet, capsys):
        took = [steps(1, 5.0, 4.0), steps(1, 3.4, first=4)]
        assert rehearsed(fleet, ([*took, over("a")], [over("b")])) == 1
        assert "step 3 was skipped: all of its targets are masked" in capsys.readouterr().out
        assert len(asked(fleet, "a", "start")) == 1

    def test_without_checkpoints_there_is_nothing_to_resume(self, fleet, capsys):
        code = rehearsed(fleet, ([steps(1, 5.0, 4.0, 3.5)], []), more=["--checkpoint.every", "0"])
        assert code == 0
        assert "nothing was saved" in capsys.readouterr().out
        assert len(asked(fleet, "a", "start")) == 1

    def test_a_host_that_does_not_come_back_is_named(self, fleet, capsys):
        fleet.fakes["b"].lives = []
        real, starts = fleet.fakes["b"].start, []

        def start(request):
            starts.append(request)
            if len(starts) > 1:
                raise HostError("the link broke")
            return real(request)

        fleet.fakes["b"].start = start
        assert rehearsed(fleet, ([steps(1, 5.0, 4.0, 3.5)], []), ([], [])) == 1
        assert "b: the link broke" in capsys.readouterr().out


def test_what_cannot_be_ended_is_said(fleet):
    fleet.fakes["b"].faults["stop"] = HostError("gone")
    with pytest.raises(RunError, match=r"b: could not be queried: gone; .* stop --run r-rehearsal"):
        rehearsed(fleet, ([steps(1, 5.0, 4.0, 3.5)], []))


def test_what_fails_at_the_first_tests_begins_no_trial(fleet, monkeypatch, capsys):
    failed = ProbeResult(Probe.COLLECTIVES, 2, 2, "", "", 7.0, fault="all-gather gives 1 instead of 2")
    monkeypatch.setattr(probes, "run_probes", lambda *_, **more: [failed])
    assert rehearsed(fleet) == 1
    said = capsys.readouterr().out
    assert "rehearsal: FAILED after 0 s at its first tests: collectives" in said
    assert "all-gather gives 1 instead of 2; run `llama405b doctor --deep`" in said
    assert asked(fleet, "a", "start") == []
