"""Being told: of what changes, once, and of nothing else."""

import dataclasses

from shown import HOT, played
from situations import SITUATIONS, play

from llama405b_tools.top.exporter import SETTLE_S, VerdictNotifier
from llama405b_tools.top.state.picture import ClusterVerdict
from ops_rig import wait_for

PIC = played(8, HOT).pic


def see(changes, *verdicts, every_s=2.0, begin=0.0):
    return [
        told
        for i, verdict in enumerate(verdicts)
        if (told := changes.update(dataclasses.replace(PIC, verdict=verdict, why="why", time=begin + i * every_s)))
    ]


def test_worse_at_once_and_better_after_it_has_lasted():
    changes = VerdictNotifier()
    healthy, bad = ClusterVerdict.HEALTHY, ClusterVerdict.DEGRADED
    n = int(SETTLE_S / 2) + 1
    assert see(changes, healthy, bad, ClusterVerdict.HUNG) == [bad, ClusterVerdict.HUNG]
    assert see(changes, *[healthy] * 5, bad, *[healthy] * n, begin=10) == [healthy]
    assert see(changes, *[bad, healthy] * 10, begin=100) == [bad]  # it flaps: told once


def test_phases_of_a_run_that_goes_well_and_the_first_look_are_no_change():
    changes = VerdictNotifier()
    phases = (
        ClusterVerdict.LOADING,
        ClusterVerdict.TRAINING,
        ClusterVerdict.HEALTHY,
        ClusterVerdict.SAVING,
        ClusterVerdict.EVALUATING,
        ClusterVerdict.CONNECTING,
    )
    assert see(changes, *phases * 20) == []
    assert see(VerdictNotifier(), *[ClusterVerdict.FAILED] * 40) == []
    assert see(changes, *[ClusterVerdict.DONE] * 20, begin=1000) == [ClusterVerdict.DONE]


def test_a_hang_is_told_as_it_gets_worse():
    situation = next(each for each in SITUATIONS if each.name == "a hang, GPUs idle")
    changes = VerdictNotifier()
    assert [told for _, pic in play(situation) if (told := changes.update(pic))] == [
        ClusterVerdict.DEGRADED,
        ClusterVerdict.HUNG,
    ]


def test_the_command_is_told_what_and_why(tmp_path):
    out = tmp_path / "told"
    command = f'cat >{out}; echo "$LLAMA405B_EVENT $LLAMA405B_RUN $LLAMA405B_MESSAGE" >>{out}; mv {out} {out}.done'
    see(VerdictNotifier(command), ClusterVerdict.HEALTHY, ClusterVerdict.FAILED)
    wait_for((tmp_path / "told.done").exists, 10)
    assert (tmp_path / "told.done").read_text() == "llama-405b: FAILED: why\nFAILED llama-405b why\n"
    complaints = []
    see(VerdictNotifier("exit 3", on_error=complaints.append), ClusterVerdict.HEALTHY, ClusterVerdict.FAILED)
    wait_for(lambda: complaints, 10)
    assert complaints == ["--on-change failed (exit code 3)"]


def test_what_the_terminal_is_told_has_no_other_control_sequence():
    written = []
    changes = VerdictNotifier(write=written.append)
    changes.update(dataclasses.replace(PIC, verdict=ClusterVerdict.HEALTHY))
    changes.update(dataclasses.replace(PIC, verdict=ClusterVerdict.HUNG, why="a\x1b]2;b\x07;c\nd"))
    title, worse, bell, notice = written
    assert title == f"\x1b]2;● HEALTHY llama-405b {PIC.training.step}\x1b\\"
    assert worse.startswith("\x1b]2;✖ HUNG llama-405b ")
    assert bell == "\a"
    assert notice == "\x1b]9;llama-405b: HUNG: a;c d\x1b\\\x1b]777;notify;cluster-top;llama-405b: HUNG: a,c d\x1b\\"
