"""What stop says of the checkpoints of a run that it ended."""

import dataclasses

from fakes import FakeHost
from run_rig import metrics, plan

from llama405b.contract.records import Phase
from llama405b_tools.agent.messages import RankHeartbeat, StopReply
from llama405b_tools.verbs.stop import print_saved

HINT = "; it was still saving: --grace 120s would have given it more time"


def ended(phase, *, was_alive=True, saved="/w/runs/r/checkpoints/step-00000008", unsaved=""):
    """A host whose rank was last heard in this phase, at step 10."""
    host = FakeHost("a")
    host.plan, host.checkpoint = plan("-m", "llama405b.train"), saved
    beat = RankHeartbeat(0, "a", 5, 0.0, 10, phase, 0.0)
    node = dataclasses.replace(host.run(), metrics=metrics(10, 1.0, 2), heartbeats=(beat,), unsaved=unsaved)
    return StopReply(True, was_alive, node=node)


def test_more_time_is_named_only_where_a_save_was_cut_off(capsys):
    for others, words in [
        ([ended(Phase.CHECKPOINT)], f" (2 steps earlier){HINT}"),
        ([ended(Phase.TRAIN), ended(Phase.CHECKPOINT)], f" (2 steps earlier){HINT}"),
        ([ended(Phase.CHECKPOINT, was_alive=False)], " (2 steps earlier)"),  # it had died
        (
            [ended(Phase.CHECKPOINT), ended(Phase.CHECKPOINT, was_alive=False)],
            " (2 steps earlier)",
        ),  # and one waits for it
        ([ended(Phase.FAILED, unsaved="step 10: no space")], " (2 steps earlier)"),
        ([ended(Phase.CHECKPOINT, unsaved="step 9: no space")], " (2 steps earlier)"),
        ([ended(Phase.DONE)], " (2 steps earlier)"),  # checkpoint.every is 0 since
        ([ended(Phase.TRAIN)], " (2 steps earlier)"),  # a step that hangs, or nobody waited
    ]:
        print_saved(others, 30.0)
        assert (
            capsys.readouterr().out == f"last step: 10; newest checkpoint: /w/runs/r/checkpoints/step-00000008{words}\n"
        )


def test_a_first_save_that_is_cut_off_is_told_too(capsys):
    print_saved([ended(Phase.CHECKPOINT, saved=None)], 30.0)
    assert capsys.readouterr().out == f"last step: 10; newest checkpoint: none{HINT}\n"
