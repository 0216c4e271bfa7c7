"""What status and stop say of a run that has taken no step."""

import dataclasses

import pytest
from fakes import FakeHost, over, running_fleet
from run_rig import plan

from llama405b.contract.accounting import Attempt, CountedStep, account_time
from llama405b.contract.records import Cause, CauseKind, EvaluationMetrics, Phase
from llama405b_tools.agent.messages import RankHeartbeat, StopReply
from llama405b_tools.run.query import ask_hosts
from llama405b_tools.verbs.status import print_progress, print_run
from llama405b_tools.verbs.stop import print_saved


def test_a_failure_says_its_gpu_and_whose_log_to_read(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    with running_fleet(("a", "b"), plan("-m", "mine", attempt=1, created=1.0)) as fleet:
        fleet.fakes["b"].alive = False
        fleet.fakes["b"].node_status = over("b", Cause(CauseKind.RANK_KILLED, "b", 1, signal=9, gpu="4")).node.status
        seen = ask_hosts(fleet, "r")
    assert print_run(seen, None, as_json=False) == 1
    said = f"b: exited 1: rank 1 (GPU 4) was killed by SIGKILL; `{seen.command('logs')} --rank 1` shows its log\n"
    assert capsys.readouterr().out.endswith(said)


@pytest.mark.parametrize(("gpu", "unit"), [("3", "GPU-h"), ("", "rank-h")])
def test_hours_are_those_of_gpus_where_there_are_any(monkeypatch, tmp_path, capsys, gpu, unit):
    monkeypatch.chdir(tmp_path)
    account = account_time(0.0, [Attempt(1)], [CountedStep(1, 7200.0, 7200.0)], 8, 7200.0)
    with running_fleet(("a",), plan("-m", "mine", attempt=1, created=1.0)) as fleet:
        seen = ask_hosts(fleet, "r")
    beat = RankHeartbeat(0, "a", 5, 0.0, 0, Phase.TRAIN, 0.0, gpu=gpu)
    [reply] = seen.host_runs.values()
    seen = dataclasses.replace(seen, replies={"a": dataclasses.replace(reply, heartbeats=(beat,))})
    print_run(seen, account, as_json=False)
    assert f": 16.0 {unit} trained" in capsys.readouterr().out


def test_an_evaluation_without_a_step_is_no_training(capsys):
    host = FakeHost("a")
    host.plan = plan("-m", "llama405b.train")
    beat = RankHeartbeat(0, "a", 5, 0.0, 0, Phase.DONE, 0.0)
    found = dataclasses.replace(host.run(), metrics=EvaluationMetrics(0, 0.0, 7.65, 1), heartbeats=(beat,))
    print_progress([found])
    assert capsys.readouterr().out == "evaluation of step 0: loss 7.6500\n"
    print_progress([dataclasses.replace(found, metrics=EvaluationMetrics(40, 0.0, None, 1))])
    assert capsys.readouterr().out == "evaluation of step 40: loss —\n"
    print_saved([StopReply(True, True, node=found)], 30.0)
    assert capsys.readouterr().out == ""
