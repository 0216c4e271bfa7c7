"""What cluster-top judges, as values only: verdicts, phases and states, never their words."""

import copy
import re

import pytest
import simulate
from situations import as_sent

from llama405b_tools.top.draw.panels import draw_headline
from llama405b_tools.top.state import verdicts
from llama405b_tools.top.state.cluster import ClusterState, guard_acts_in_s
from llama405b_tools.top.state.picture import ClusterVerdict, GuardShown, HostState, RunPhase, Severity

T0 = simulate.BEGIN
NODE = {"host": "h", "state": "exited", "attempt": 1, "pid": 1, "pid_start": 1, "exit_code": 1}
KILLED = NODE | {"cause": {"kind": "rank killed", "rank": 9, "signal": 9}}
LOST = NODE | {"cause": {"kind": "lost peer", "rank": 0, "exit_code": 1}}


def play(seconds, change=lambda host, frame: None, n_hosts=4):
    """The cluster after so much of the incident; ``change`` edits each frame."""
    names = simulate.host_names(n_hosts)
    cluster, last = ClusterState(names, 2.0), T0
    for event in simulate.simulate_incident(n_hosts, seconds=seconds):
        if "frame" in event:
            frame = as_sent(event["frame"])
            change(event["host"], frame)
            cluster.take_frame(event["host"], frame, event["t"])
            last = event["t"]
            if event["host"] == names[-1]:
                cluster.advance(last)
    cluster.advance(last)
    return cluster, last


@pytest.mark.parametrize(("slow_s", "figures"), [(2.5, ["0.50", "10"]), (2.2, None)])
def test_a_slow_rank_costs_a_share_of_the_step(slow_s, figures):
    """Of 5 s, of which the others compute for 2."""
    busy = [(2.0, "a", 0), (2.0, "a", 1), (slow_s, "b", 2), (2.0, "b", 3)]
    found = [
        (host, rank, re.findall(r"[\d.]+", note.words)) for host, rank, note in verdicts.find_slowest_rank(busy, 5.0)
    ]
    assert found == ([("b", 2, figures)] if figures else [])


def run_of(frame, **new):
    frame["run"] |= new


def beats(frame, **new):
    for beat in frame["run"]["beats"]:
        beat |= new


def at(host, edit):
    return lambda name, frame: edit(frame) if name == host else None


def metrics(first, **new):
    """Metrics from a step on."""

    def change(_, frame):
        for each in frame["run"].get("metrics", ()):
            each |= new if each["step"] >= first else {}

    return change


def retried(from_step, each, before=0, attempts=0):
    """So many retries of the allocator in each step from one on; from ``attempts`` on, steps are of another attempt, which has none."""

    def change(_, frame):
        for step in frame["run"].get("metrics", ()):
            step["num_alloc_retries"] = before + each * max(0, step["step"] - from_step)
            if attempts and step["step"] >= attempts:
                step |= {"num_alloc_retries": 0, "attempt": step["attempt"] + 1}

    return change


def quick(first):
    """Steps that take 0.1 s, and 0.3 s from a step on."""

    def change(host, frame):
        metrics(0, step_s=0.1)(host, frame)
        metrics(first, step_s=0.3)(host, frame)

    return change


def planned(step_s):
    """A step that the plan predicts."""
    return lambda _, frame: run_of(frame, expected_step_s=step_s)


def stands(**new):
    """Heartbeats that stand since the step of 30 s, while the run goes on."""
    return lambda frame: beats(frame, time=T0 + 30, step=1181, **new)


def without_gpus(frame):
    frame |= {"pci_gpus": 0, "smi": {"text": None, "hung_s": 0.0}}
    frame["run"]["log_age_s"] = None


def only(first, last):
    """Metrics of some steps alone."""

    def change(_, frame):
        found = frame["run"].get("metrics", [])
        run_of(frame, metrics=[each for each in found if first <= each["step"] <= last])

    return change


def test_who_is_named_is_who_was_decided_on_by_whoever_ended_the_attempt():
    ended = NODE | {"state": "killed", "exit_code": None, "signal": 15, "cause": {"kind": "signal", "signal": 15}}
    decided = {"host": "gpu-3", "cause": {"kind": "hung", "host": "gpu-3", "rank": 20, "phase": "train", "step": 5}}
    for attempt, named in ((1, "gpu-3"), (0, "gpu-1")):  # not by a blame on an attempt before
        recorded = decided | {"attempt": attempt}
        cluster, _ = play(50, lambda _, frame, it=recorded: run_of(frame, alive=False, status=ended, blame=it))
        assert cluster.make_view().why.partition(":")[0] == named


@pytest.mark.parametrize(
    ("seconds", "change", "verdict", "code", "phase"),
    [
        (14, None, ClusterVerdict.LOADING, 0, RunPhase.LOADING),
        (50, None, ClusterVerdict.HEALTHY, 0, RunPhase.TRAINING),
        (84, None, ClusterVerdict.DEGRADED, 1, RunPhase.TRAINING),  # a hot GPU
        (simulate.HUNG + 40, None, ClusterVerdict.DEGRADED, 1, RunPhase.TRAINING),  # silent, and not for long enough
        (simulate.HUNG + 80, None, ClusterVerdict.HUNG, 3, RunPhase.HUNG),
        (14, lambda _, frame: run_of(frame, trains=False, beats=[], metrics=[]), ClusterVerdict.RUNNING, 0, RunPhase.RUNNING),
        (50, lambda _, frame: beats(frame, phase="checkpoint"), ClusterVerdict.SAVING, 0, RunPhase.SAVING),
        (50, lambda _, frame: beats(frame, phase="eval"), ClusterVerdict.EVALUATING, 0, RunPhase.EVALUATING),
        (50, at("gpu-2", lambda frame: beats(frame, phase="failed")), ClusterVerdict.FAILED, 3, RunPhase.FAILED),
        (50, at("gpu-2", lambda frame: beats(frame, state="T")), ClusterVerdict.DEGRADED, 1, RunPhase.TRAINING),
        (50, lambda _, frame: run_of(frame, net="SOCKET"), ClusterVerdict.DEGRADED, 1, RunPhase.TRAINING),
        (50, lambda _, frame: run_of(frame, alive=False, status=KILLED), ClusterVerdict.FAILED, 3, RunPhase.FAILED),
        (50, lambda _, frame: run_of(frame, alive=False, status=NODE | {"exit_code": 0}), ClusterVerdict.LOST, 1, RunPhase.STOPPED),
        (50, lambda _, frame: run_of(frame, alive=False, status=NODE | {"state": "stopped"}), ClusterVerdict.LOST, 1, RunPhase.STOPPED),
        (50, lambda _, frame: run_of(frame, alive=False, status=None), ClusterVerdict.STARTING, 0, RunPhase.STARTING),
        (50, at("gpu-3", lambda frame: frame["smi"].update(text=None, hung_s=45.0)), ClusterVerdict.DEGRADED, 1, RunPhase.TRAINING),
    ],
)  # fmt: skip
def test_the_whole(seconds, change, verdict, code, phase):
    cluster, _ = play(seconds, change or (lambda *_: None))
    pic = cluster.make_view()
    assert (pic.verdict, pic.exit_code, pic.training.phase) == (verdict, code, phase)


@pytest.mark.parametrize(
    ("load_s", "verdict"),
    [(60.0, ClusterVerdict.HUNG), (300.0, ClusterVerdict.TRAINING), (0.0, ClusterVerdict.TRAINING)],
)
def test_the_first_step_may_take_as_long_as_the_run_allows(load_s, verdict):
    def compiles(_, frame):
        run_of(frame, load_s=load_s, metrics=[])
        beats(frame, step=0, phase="train", time=T0 - 150, phase_since=T0 - 150)

    assert play(50, compiles)[0].make_view().verdict is verdict


def test_a_save_that_failed_stands_out_until_one_succeeds():
    full = "step 1184: No space left on device \x1b[31m"
    pic = play(50, at("gpu-1", lambda frame: run_of(frame, unsaved=full)))[0].make_view()
    assert (pic.verdict, pic.why) == (ClusterVerdict.DEGRADED, "not saved: step 1184: No space left on device ")
    assert "checkpoint_step" in pic.training.odd_in
    assert play(50, lambda _, frame: run_of(frame, unsaved=""))[0].make_view().verdict is ClusterVerdict.HEALTHY


@pytest.mark.parametrize("step", [0, 1200], ids=["before the first step", "without training"])
def test_an_evaluation_without_a_step_is_shown_as_no_step(step):
    def evaluated(_, frame):
        line = {"step": step, "time": 0.0, "evaluation_loss": 7.6, "attempt": 1}
        run_of(frame, metrics=[line] if frame["run"].get("metrics") else [])
        beats(frame, step=0)

    pic = play(50, evaluated)[0].make_view()
    shown = "\n".join(line.plain for line in draw_headline(pic, 160))
    assert f"step {step}" in shown
    assert f"eval 7.6000 @{step}" in shown
    assert "steps at risk" not in shown
    assert (pic.training.loss, pic.training.step_s, pic.training.lost_steps) == (None, None, None)
    assert pic.verdict is ClusterVerdict.TRAINING


def test_a_line_of_another_trainer_about_something_else_hides_no_step():
    def more(_, frame):
        if lines := frame["run"].get("metrics"):
            lines.append({"step": lines[-1]["step"], "val_acc": 0.5})

    assert play(50, more)[0].make_view().training == play(50)[0].make_view().training


def test_the_last_evaluation_is_shown():
    def evaluated(_, frame):
        for each in frame["run"].get("metrics", ()):
            each |= {"evaluation_loss": each["step"] / 1000} if each["step"] % 5 == 0 else {}

    def shown(pic):
        return "\n".join(line.plain for line in draw_headline(pic, 160))

    pic = play(50, evaluated)[0].make_view()
    assert (pic.training.evaluation_loss, pic.training.evaluated_step) == (1.18, 1180)
    assert "eval 1.1800 @1180" in shown(pic)
    assert "eval" not in shown(play(50)[0].make_view())


LAST = 1184  # step after 50 s
NAN = float("nan")
USUAL_LOSS, USUAL_S = 2.2, 6.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "change", "verdict"),
    [
        (50, metrics(LAST - 9, step_s=1.25 * USUAL_S), ClusterVerdict.DEGRADED),
        (50, metrics(LAST - 9, step_s=1.1 * USUAL_S), ClusterVerdict.HEALTHY),
        (50, metrics(LAST, step_s=9 * USUAL_S), ClusterVerdict.HEALTHY),  # one step
        (50, metrics(LAST - 2, step_s=3.0 * USUAL_S), ClusterVerdict.DEGRADED),  # half of the last minute
        (50, metrics(LAST - 60, step_s=3.0 * USUAL_S), ClusterVerdict.DEGRADED),  # half of all steps: they are not the usual
        (50, lambda *it: [quick(LAST)(*it), planned(0.0)(*it)], ClusterVerdict.TRAINING),  # half of the steps take six seconds
        (50, planned(4.0), ClusterVerdict.DEGRADED),
        (50, planned(5.5), ClusterVerdict.HEALTHY),
        (50, planned(9.0), ClusterVerdict.HEALTHY),
        (50, metrics(LAST - 1, loss=11 * USUAL_LOSS), ClusterVerdict.DEGRADED),
        (50, metrics(LAST, loss=11 * USUAL_LOSS), ClusterVerdict.HEALTHY),  # one step
        (50, metrics(LAST - 4, loss=3.3 * USUAL_LOSS), ClusterVerdict.DEGRADED),
        (50, metrics(LAST - 3, loss=3.3 * USUAL_LOSS), ClusterVerdict.HEALTHY),
        (50, metrics(LAST - 19, loss=2.1 * USUAL_LOSS), ClusterVerdict.DEGRADED),
        (50, metrics(LAST - 18, loss=2.1 * USUAL_LOSS), ClusterVerdict.HEALTHY),
        (50, metrics(LAST - 19, loss=1.4 * USUAL_LOSS), ClusterVerdict.HEALTHY),
        (50, metrics(LAST - 40, loss=1e6), ClusterVerdict.DEGRADED),
        (50, lambda host, frame: [metrics(LAST - 9, loss=NAN)(host, frame), metrics(LAST - 8, loss=2.2)(host, frame)],
        ClusterVerdict.DEGRADED), (50, metrics(LAST, loss=NAN), ClusterVerdict.DEGRADED),  # at once: the weights may be lost
        (50, metrics(LAST, loss="nan"), ClusterVerdict.DEGRADED),
        (50, retried(from_step=0, each=0, before=8), ClusterVerdict.HEALTHY),  # in earlier steps
        (50, retried(from_step=LAST - 5, each=27), ClusterVerdict.DEGRADED),
        (50, retried(from_step=LAST - 5, each=27, attempts=LAST), ClusterVerdict.TRAINING),  # another process counts
        (50, at("gpu-3", lambda frame: beats(frame, step="?")), ClusterVerdict.DEGRADED),  # malformed: as if there were none
        (simulate.RELOADED + 20, at("gpu-3", lambda frame: run_of(frame, beats=[])), ClusterVerdict.TRAINING),  # not for long
        (simulate.RELOADED + 50, at("gpu-3", lambda frame: run_of(frame, beats=[])), ClusterVerdict.DEGRADED),
        (60, at("gpu-3", lambda frame: run_of(frame, beats=frame["run"]["beats"][1:])), ClusterVerdict.DEGRADED),
        (60, lambda _, frame: run_of(frame, beats=[]), ClusterVerdict.DEGRADED),
        (140, at("gpu-2", stands()), ClusterVerdict.DEGRADED),
        (140, lambda _, frame: [stands()(frame), without_gpus(frame)], ClusterVerdict.DEGRADED),  # and no hang: the metrics go on
        (140, only(0, 1181), ClusterVerdict.DEGRADED),
        (140, only(0, 0), ClusterVerdict.DEGRADED),
        (50, only(0, 0), ClusterVerdict.TRAINING),
        (140, lambda _, frame: [metrics(0, time=None, attempt=0)(_, frame), run_of(frame, beats=[])], ClusterVerdict.RUNNING),  # by another
    ],
)  # fmt: skip
def test_steps_that_are_not_as_they_were_or_of_which_too_little_is_told(seconds, change, verdict):
    if seconds == 140:  # past the hot GPU
        assert play(seconds)[0].make_view().verdict is ClusterVerdict.HEALTHY
    assert play(seconds, change)[0].make_view().verdict is verdict


def test_what_is_wrong_with_the_run_is_an_event_and_so_is_its_end():
    def slow(_, frame):
        for each in frame["run"].get("metrics", ()):
            each["step_s"] = 18.0 if 1165 <= each["step"] <= LAST else 6.0

    cluster, _ = play(140, slow)
    assert [change.level for change in cluster.events if not change.host] == [Severity.WARNING, Severity.NOTE]
    assert cluster.make_view().verdict is ClusterVerdict.HEALTHY


def test_a_loss_that_is_not_a_number_is_unknown():
    training = play(50, metrics(LAST, loss=NAN))[0].make_view().training
    assert (training.step, training.loss, len(training.losses)) == (LAST, None, 124)


def test_what_is_at_risk_is_the_time_that_the_steps_took():
    def uneven(_, frame):
        for each in frame["run"].get("metrics", ()):
            each["step_s"] = 60.0 if each["step"] == 1182 or each["step"] < 1170 else 6.0

    seconds = []
    for moment in (36, 42, 48, 54):  # one step more each time, since the checkpoint of step 1180
        training = play(moment, uneven)[0].make_view().training
        seconds.append(training.lost_rank_hours * 3600 / training.world)
    assert seconds == pytest.approx([6, 66, 72, 78])


def test_the_checkpoint_is_known_without_the_host_that_writes_it():
    cluster = ClusterState(simulate.host_names(2), 2.0)
    for event in simulate.simulate_incident(2, seconds=50):
        if event["host"] == "gpu-2" and "frame" in event:
            cluster.take_frame("gpu-2", event["frame"], event["t"])
    cluster.set_link("gpu-1", HostState.TIMEOUT, "no answer", T0 + 50)
    cluster.advance(T0 + 50)
    assert cluster.make_view().training.checkpoint_step == 1180


def test_only_hosts_of_the_run_can_bring_it_down():
    def spare(host, frame):
        if nodes := frame["run"].get("nodes"):
            run_of(frame, nodes=[node for node in nodes if node[0] != "gpu-4"])
        if host == "gpu-4":
            frame["run"] = None

    for host, verdict, code in (("gpu-4", ClusterVerdict.DEGRADED, 1), ("gpu-3", ClusterVerdict.DOWN, 3)):
        cluster, now = play(50, spare)
        cluster.set_link(host, HostState.TIMEOUT, "no answer", now)
        cluster.advance(now)
        pic = cluster.make_view()
        assert (pic.verdict, pic.exit_code) == (verdict, code)
        assert host in pic.why


def test_after_this_machine_slept_its_hosts_are_awaited_and_not_down():
    cluster, slept = play(50)
    events, now = len(cluster.events), slept + 92
    cluster.note_sleep(92, now)
    for host in ("gpu-1", "gpu-2"):
        cluster.set_link(host, HostState.DOWN, "the sampler ended", now)
    cluster.advance(now + 1)
    pic = cluster.make_view()
    assert (pic.verdict, pic.exit_code, pic.why) == (ClusterVerdict.CONNECTING, 1, "away 92 s; reconnecting")
    assert {row.state for row in pic.hosts} == {HostState.CONNECTING}
    assert [change.level for change in pic.events][events:] == [Severity.NOTE]
    frames = {event["host"]: event["frame"] for event in simulate.simulate_incident(4, seconds=50) if "frame" in event}
    for host in ("gpu-2", "gpu-3", "gpu-4"):
        cluster.take_frame(host, frames[host] | {"now": now + 2}, now + 2)
    cluster.advance(now + 3)
    assert [row.state for row in cluster.make_view().hosts] == [HostState.CONNECTING] + 3 * [HostState.OK]
    cluster.set_link("gpu-1", HostState.TIMEOUT, "no answer", now + 31)
    cluster.advance(now + 31)
    assert (cluster.make_view().hosts[0].state, cluster.make_view().verdict) == (HostState.TIMEOUT, ClusterVerdict.DOWN)
    assert [change.level for change in cluster.events if change.host == "gpu-1"] == [Severity.BAD]


def test_the_host_where_it_began_has_failed():
    cluster, _ = play(50, lambda host, frame: run_of(frame, alive=False, status=KILLED if host == "gpu-3" else LOST))
    found = cluster.snapshot
    assert max(found.failures, key=lambda failure: failure.origin_score).host == "gpu-3"
    assert {state for state, _ in found.host_states.values()} == {HostState.FAILED}


@pytest.mark.parametrize("before", [True, False])
def test_a_rank_that_is_known_to_be_gone_is_named_until_its_host_says_more(before):
    def change(host, frame):
        if frame["now"] > T0 + 44 and host == "gpu-3":  # torchrun there has not noticed, and then ends the other ranks
            gone = frame["run"]["beats"] if frame["now"] > T0 + 46 else frame["run"]["beats"][5:6]
            for beat in gone if before else ():
                beat["state"] = ""
        elif frame["now"] > T0 + 46:
            run_of(frame, alive=False, status=LOST | {"time": frame["now"]})

    cluster, _ = play(50, change)
    assert (cluster.make_view().verdict, cluster.snapshot.culprit_host) == (
        ClusterVerdict.FAILED,
        "gpu-3" if before else "",
    )
    assert [failure.cause.rank for failure in cluster.snapshot.failures if failure.origin_score] == (
        [21] if before else []
    )
    after, _ = play(
        56,
        lambda host, frame: (
            run_of(frame, alive=False, status=KILLED)
            if host == "gpu-3" and frame["now"] > T0 + 50
            else change(host, frame)
        ),
    )
    assert [failure.cause.rank for failure in after.snapshot.failures if failure.origin_score] == [9]


@pytest.mark.parametrize(("link", "culprit"), [(HostState.DOWN, "gpu-3"), (None, "")])
def test_of_a_host_that_is_lost_no_victim_is_blamed(link, culprit):
    cluster, now = play(
        50, lambda host, frame: None if host == "gpu-3" else run_of(frame, alive=False, status=LOST | {"time": T0 + 30})
    )
    if link:
        cluster.set_link("gpu-3", link, "no answer", now)
        cluster.advance(now)
    assert (cluster.make_view().verdict, cluster.snapshot.culprit_host == "gpu-3") == (
        ClusterVerdict.FAILED,
        bool(culprit),
    )
    assert cluster.snapshot.host_states["gpu-3"][0] is (link or HostState.OK)


def test_steps_that_only_the_other_hosts_tell_of_are_at_risk_too():
    cluster = ClusterState(simulate.host_names(4), 2.0)
    for event in simulate.simulate_incident(4, seconds=56):
        if "frame" in event and (event["host"] != "gpu-1" or event["t"] < T0 + 44):
            cluster.take_frame(event["host"], event["frame"], event["t"])
    cluster.set_link("gpu-1", HostState.TIMEOUT, "no answer", T0 + 45)
    cluster.advance(T0 + 55)
    shown = cluster.make_view().training
    assert (shown.checkpoint_step, shown.step, shown.lost_steps) == (1180, 1185, 5)
    assert shown.lost_rank_hours == pytest.approx(5 * 6.0 * shown.world / 3600)


@pytest.mark.parametrize(
    ("stopped", "verdict"), [(8, ClusterVerdict.DEGRADED), (7, ClusterVerdict.RUNNING), (0, ClusterVerdict.RUNNING)]
)
def test_a_program_of_the_users_own_whose_every_process_is_stopped_does_not_run(stopped, verdict):
    def foreign(host, frame):
        run_of(frame, trains=False, beats=[], metrics=[])
        states = ["T"] * stopped + ["S"] * (8 - stopped)
        frame["procs"] = [[900 + n, state, 5, 1 << 30, str(n), "python own.py"] for n, state in enumerate(states)]
        frame["procs"].append([899, "S", 5, 1 << 30, "", "torchrun"])

    assert play(50, foreign)[0].make_view().verdict is verdict


def test_a_guard_that_is_gone_is_not_healthy():
    cluster, _ = play(50)
    for guard, verdict in (
        (GuardShown.GONE, ClusterVerdict.DEGRADED), (GuardShown.WATCHING, ClusterVerdict.HEALTHY), (GuardShown.NONE,
        ClusterVerdict.HEALTHY),
    ):  # fmt: skip
        cluster.guard = guard
        assert cluster.make_view().verdict is verdict


@pytest.mark.slow
def test_a_hang_says_when_its_guard_ends_it():
    told = {"run": "llama-405b", "pid": 7, "pid_start": 1, "machine": "far x y", "limit": 3, "hang_after_s": 300.0}

    def guarded(seconds):
        cluster, _ = play(simulate.HUNG + seconds, lambda host, frame: frame["run"] and run_of(frame, guard=told))
        cluster.guard = GuardShown.WATCHING
        return guard_acts_in_s(cluster.snapshot), cluster.make_view()

    (before_s, _), (left_s, pic) = guarded(70), guarded(80)
    assert 200 < left_s < 300 - 70
    assert before_s - left_s == pytest.approx(10.0, abs=2.1)
    minutes, seconds = divmod(int(left_s), 60)
    assert f"{minutes}:{seconds:02d}" in pic.advice
    unguarded, _ = play(simulate.HUNG + 80)
    assert guard_acts_in_s(unguarded.snapshot) is None


@pytest.mark.parametrize("state", [HostState.AUTH, HostState.REFUSED, HostState.TIMEOUT, HostState.DOWN])
def test_a_host_without_a_connection(state):
    cluster, now = play(50)
    cluster.set_link("gpu-2", state, "why", now)
    cluster.advance(now)
    pic = cluster.make_view()
    assert (pic.hosts[1].state, pic.verdict, pic.exit_code) == (state, ClusterVerdict.DOWN, 3)
    assert [(change.host, change.level) for change in pic.events][-1] == ("gpu-2", Severity.BAD)


def test_to_look_changes_nothing():
    cluster, _ = play(simulate.HUNG + 80)
    first = cluster.make_view()
    before = copy.deepcopy({key: value for key, value in vars(cluster).items() if key != "hosts"})
    for _ in range(3):
        cluster.make_view()
    assert {key: value for key, value in vars(cluster).items() if key != "hosts"} == before
    assert cluster.make_view() == first


def test_what_is_wrong_is_said_once_while_its_numbers_change():
    cluster, now = play(84)
    said = len(cluster.events)
    for moment in range(1, 5):
        cluster.advance(now + moment)
    assert len(cluster.events) == said


def test_an_xid_that_is_told_before_nvidia_smi_answers_is_on_its_gpu_once_it_does():
    def change(host, frame):
        if host == "gpu-3" and frame["now"] < T0 + 1:
            frame["smi"] = {"text": None, "hung_s": 1.0}
            frame["kernel"] = ["NVRM: Xid (PCI:0000:20:00): 79, pid=41500, GPU has fallen off the bus."]
            frame["kernel_times"] = [T0 - 30]

    marked = {
        seconds: [
            (row.name, gpu.index) for row in play(seconds, change)[0].make_view().hosts for gpu in row.gpus if gpu.odd
        ]
        for seconds in (1, 10)
    }
    assert marked == {1: [], 10: [("gpu-3", 5)]}
    assert any("Xid 79" in note for note in play(1, change)[0].make_view().hosts[2].notes)


def test_what_ranks_of_another_attempt_computed_does_not_count():
    def change(host, frame):
        if frame["run"]["attempt"] == 2:
            beats(frame, busy_s=None)
        elif host == "gpu-3":
            beats(frame, busy_s=9.0)

    assert not any(
        "behind" in note for row in play(simulate.RELOADED + 30, change)[0].make_view().hosts for note in row.notes
    )


def test_several_ranks_of_a_host_that_lost_contact_are_one_host():
    cause = {"kind": "lost peer", "rank": 0, "exit_code": 1}
    pic = play(50, lambda _, frame: beats(frame, phase="failed", cause=cause, time=frame["now"]))[0].make_view()
    assert (pic.verdict, "4 hosts" in pic.why) == (ClusterVerdict.FAILED, True)
