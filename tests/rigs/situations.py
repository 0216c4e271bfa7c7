"""What goes wrong on a cluster, as edits of a healthy simulation's frames; and what cluster-top has to say of each.

Eight hosts with eight GPUs train at 6 s a step. A situation begins at 126 s; ``t`` counts from there.
"""

import copy
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import simulate

from llama405b_tools.top.state.cluster import ClusterState
from llama405b_tools.top.state.picture import ClusterView, GuardShown

BEGIN_S, INTERVAL_S, N_HOSTS = 126.0, 2.0, 8
STEP = simulate.CALM.step(BEGIN_S)  # the last one before
HEAD, SICK, RANK = "gpu-1", "gpu-3", 21  # rank 21 is on GPU 5 of gpu-3
Frame = dict[str, Any]
Edit = Callable[[str, Frame, float], None]
NODE = {"host": "h", "state": "exited", "attempt": 1, "pid": 1, "pid_start": 1, "exit_code": 1}


class Slow(simulate.IncidentScript):
    """Steps that take several times as long from the beginning of the situation on."""

    factor = 2.0

    def step(self, t):
        calm = simulate.CALM.step(min(t, BEGIN_S))
        return calm + max(0, int((t - BEGIN_S) / (self.factor * simulate.STEP_S)))


class Slower(Slow):
    factor = 1.4


@dataclasses.dataclass(frozen=True)
class Situation:
    """Something that happens, and when what has to be said of it."""

    name: str
    edit: Edit
    says: tuple[tuple[str, str, float], ...]  # verdict, pattern of its reason, seconds until then at most
    before: str  # what the first edition of the screen said, and when
    lasts_s: float = 30.0
    script: simulate.IncidentScript = simulate.CALM
    culprit: str = ""  # the one host that may be blamed
    check: Callable[[ClusterView], object] = lambda _: True
    guard: GuardShown = GuardShown.NONE


def watch(
    situation: Situation, read: Callable[[Frame], object] = lambda _: None, begun: ClusterState | None = None
) -> Iterator[tuple[float, ClusterState]]:
    """Yield the cluster after each round of frames, with the seconds since the situation began.

    ``read``: takes log lines. ``begun``: the cluster as it is when the situation begins; rounds before are left out.
    """
    names = simulate.host_names(N_HOSTS)
    cluster = begun or ClusterState(names, INTERVAL_S)
    for event in simulate.simulate_incident(N_HOSTS, INTERVAL_S, BEGIN_S + situation.lasts_s, situation.script):
        t = event["t"] - simulate.BEGIN - BEGIN_S
        if begun and t < 0:
            continue
        if "frame" not in event:
            read(event)
            continue
        frame = as_sent(event["frame"])
        if t >= 0:
            cluster.guard = situation.guard
            situation.edit(event["host"], frame, t)
        if not frame.get("lost"):
            cluster.take_frame(event["host"], frame, event["t"])
        if event["host"] == names[-1]:
            cluster.advance(event["t"])
            yield t, cluster


def as_sent(frame: Frame) -> Frame:
    """A copy, as it comes from a host."""
    return json.loads(json.dumps(frame))


def play(situation: Situation) -> list[tuple[float, ClusterView]]:
    """Return a picture after each round of frames, with the seconds since the situation began."""
    calm, begun = _until(situation.script)
    return [*calm, *((t, cluster.make_view()) for t, cluster in watch(situation, begun=copy.deepcopy(begun)))]


@functools.cache
def _until(script: simulate.IncidentScript) -> tuple[list[tuple[float, ClusterView]], ClusterState]:
    """Return the pictures before any situation of a script, and the cluster when it begins."""
    rounds = [
        (t, cluster.make_view(), cluster)
        for t, cluster in watch(Situation("", lambda *_: None, (), "", lasts_s=0.0, script=script))
    ]
    return [(t, picture) for t, picture, _ in rounds], rounds[-1][2]


def said(situation: Situation, pictures: list[tuple[float, ClusterView]]) -> list[float | None]:
    """Return after how many seconds each of its verdicts was given, and stayed until the next; None: never."""
    after = [entry for entry in pictures if entry[0] >= 0]
    times: list[float | None] = []
    for verdict, pattern, _ in situation.says:
        hits = [t for t, pic in after if pic.verdict == verdict and re.search(pattern, pic.why)]
        times.append(hits[0] if hits else None)
    verdict, pattern, _ = situation.says[-1]
    last = after[-1][1]
    if not (last.verdict == verdict and re.search(pattern, last.why)):
        times[-1] = None
    return times


# edits


def beats(frame: Frame, rank: int | None = None, **new: Any) -> None:
    for beat in frame["run"]["beats"]:
        if rank in (None, beat["rank"]):
            beat.update(new)


def on(host: str, edit: Callable[[Frame, float], object]) -> Edit:
    return lambda name, frame, t: edit(frame, t) if name == host else None  # type: ignore[return-value]


def on_all(edit: Callable[[Frame, float], object]) -> Edit:
    return lambda _, frame, t: edit(frame, t)  # type: ignore[return-value]


def both(*edits: Edit) -> Edit:
    def change(host: str, frame: Frame, t: float) -> None:
        for edit in edits:
            edit(host, frame, t)

    return change


def gpus(frame: Frame, change: Mapping[int, str | Callable[[str], str]], only: int | None = None) -> None:
    """Change fields of nvidia-smi's answer, by their place."""
    lines = frame["smi"]["text"].splitlines()
    for i, line in enumerate(lines):
        if only in (None, i):
            values = line.split(", ")
            for place, new in change.items():
                values[place] = new if isinstance(new, str) else new(values[place])
            lines[i] = ", ".join(values)
    frame["smi"]["text"] = "".join(f"{line}\n" for line in lines)


UTILIZATION, HEAT, POWER, CLOCK, ECC = 4, 7, 8, 10, 11


def stands(frame: Frame, t: float) -> None:
    """No rank moves any more; rank 21 is a step behind."""
    beats(frame, time=simulate.BEGIN + BEGIN_S, step=STEP)
    beats(frame, RANK, step=STEP - 1)
    frame["run"].pop("metrics", None)
    frame["run"].update(log_age_s=t, checkpoint_step=1190)
    for port in frame["ib"]:
        port["counters"].update(port_rcv_data=10**9, port_xmit_data=10**9)


def idle(frame: Frame, t: float) -> None:
    gpus(frame, {POWER: "133.00", CLOCK: "345"})


def busy(frame: Frame, t: float) -> None:
    gpus(frame, {POWER: "434.00"})


def phase(name: str, **more: Any) -> Callable[[Frame, float], None]:
    """Every rank is in a phase since the situation began."""

    def change(frame: Frame, t: float) -> None:
        stands(frame, t)
        beats(frame, phase=name, phase_since=simulate.BEGIN + BEGIN_S, step=STEP, **more)

    return change


def writes(frame: Frame, t: float) -> None:
    frame["io"] = [[beat["pid"], int(t * 1e8)] for beat in frame["run"]["beats"]]


def ended(frame: Frame, **status: Any) -> None:
    frame["run"].update(alive=False, beats=[], status=NODE | status)
    rests(frame)


def rests(frame: Frame) -> None:
    """Its GPUs and links have nothing to do."""
    gpus(frame, {UTILIZATION: "0", HEAT: "38", POWER: "119.00", CLOCK: "345"})
    for port in frame["ib"]:
        port["counters"].update(port_rcv_data=10**9, port_xmit_data=10**9)


def metrics(frame: Frame, **new: Any) -> None:
    for each in frame["run"].get("metrics", ()):
        if each["step"] > STEP:
            each.update(new)


def no_more_metrics(frame: Frame, t: float) -> None:
    if t >= INTERVAL_S:
        frame["run"].pop("metrics", None)


def lost(frame: Frame, t: float) -> None:
    frame["lost"] = True


def stopped_and_lost(host: str, frame: Frame, t: float) -> None:
    no_more_metrics(frame, t)
    frame["run"].update(checkpoint_step=1190, unsaved="step 1197: No space left on device" if host == HEAD else "")
    ended(frame, state="stopped", exit_code=None, cause={"kind": "stopped", "by": "ann@desk"})


def killed(host: str, frame: Frame, t: float) -> None:
    """Rank 21 is killed; the others notice at once, and its own host says so four seconds later."""
    frame["run"].pop("metrics", None)
    frame["run"]["checkpoint_step"] = 1190
    if host != SICK:
        ended(
            frame,
            cause={"kind": "lost peer", "rank": 0, "exit_code": 1, "phase": "train"},
            time=simulate.BEGIN + BEGIN_S,
        )
    elif t >= 4:
        ended(frame, cause={"kind": "rank killed", "rank": RANK, "signal": 9}, time=simulate.BEGIN + BEGIN_S)
    else:
        stands(frame, t)


def ended_by_guard(host: str, frame: Frame, t: float) -> None:
    cause = {"kind": "hung", "host": SICK, "rank": RANK, "phase": "train", "step": STEP - 1, "age_s": 300.0}
    frame["run"].pop("metrics", None)
    frame["run"]["blame"] = {"attempt": 1, "host": SICK, "cause": cause}
    ended(frame, state="stopped", exit_code=None, cause={"kind": "stopped", "by": "the guard"})


def ended_for_a_restart(host: str, frame: Frame, t: float) -> None:
    """Somebody asked for a restart: the run saves, and 6 s later its hosts end one after the other."""
    asked = {"kind": "stopped", "host": HEAD, "by": "ann@desk"}
    frame["run"]["blame"] = {"attempt": 1, "host": HEAD, "cause": asked}
    if t >= 6 + int(host[-1]) % 3:
        frame["run"].pop("metrics", None)
        ended(frame, state="killed", exit_code=None, signal=15, cause={"kind": "signal", "host": host, "signal": 15})


def slow_rank(frame: Frame, t: float) -> None:
    gpus(frame, {POWER: "434.00"})
    beats(frame, RANK, busy_s=10.6)


def without_apps(frame: Frame, t: float) -> None:
    frame["smi"]["apps"] = ""


def foreign(frame: Frame, t: float) -> None:
    frame["smi"]["apps"] += "99999, GPU-025, 9000\n"
    frame["foreign"] = [[99999, "bob", "python other.py"]]


def other_pids(frame: Frame, t: float) -> None:
    """In a container, nvidia-smi lists the machine's pids, which nobody knows there."""
    frame["smi"]["apps"] = "".join(f"{900_000 + i}, GPU-{i:03d}, 70000\n" for i in range(8))
    frame["foreign"] = [[900_000 + i, "", ""] for i in range(8)]


def steps_of(seconds: float) -> Callable[[Frame, float], None]:
    return lambda frame, t: metrics(frame, step_s=seconds, tokens_per_s=9024 * 6 / seconds)


def xid(at: float) -> Callable[[Frame, float], None]:
    """An Xid of GPU 5, at a moment counted from the beginning of the simulation."""

    def change(frame: Frame, t: float) -> None:
        if t < INTERVAL_S:
            frame["kernel"] = ["NVRM: Xid (PCI:0000:20:00): 79, pid=41500, GPU has fallen off the bus."]
            frame["kernel_times"] = [simulate.BEGIN + at]

    return change


HUNG_21 = rf"{SICK}: rank {RANK} is silent for"
SITUATIONS = (
    Situation(
        "a rank is stopped by a signal",
        both(on_all(stands), on_all(idle), on(SICK, lambda frame, t: beats(frame, RANK, state="T"))),
        (
            ("DEGRADED", f"^{SICK}: rank {RANK}: it is stopped by a signal", 2),
            ("HUNG", HUNG_21 + ".*stopped by a signal", 64),
        ),
        "right: DEGRADED 2 s, HUNG 60 s",
        70,
        culprit=SICK,
        check=lambda pic: f" on {SICK} lets rank {RANK} go on; a says why" in pic.advice,
    ),
    Situation(
        "a hang, GPUs idle",
        both(on_all(stands), on_all(idle)),
        (("DEGRADED", "fell from", 6), ("DEGRADED", "this step has run", 14), ("HUNG", HUNG_21, 64)),
        "HEALTHY for 18 s, HUNG 60 s",
        70,
        culprit=SICK,
        check=lambda pic: pic.training.is_stale and pic.training.tokens_per_s is None,
    ),
    Situation(
        "a hang, GPUs at 62% (NCCL spins)",
        both(on_all(stands), on_all(busy)),
        (("DEGRADED", "this step has run|fell from", 14), ("HUNG", HUNG_21, 184)),
        "DEGRADED for ever",
        190,
        culprit=SICK,
    ),
    Situation(
        "a hang, and a colleague's process on another GPU of that host",
        both(on_all(stands), on_all(idle), on(SICK, lambda frame, t: gpus(frame, {POWER: "650.00"}, 2))),
        (("DEGRADED", "", 6), ("HUNG", HUNG_21, 64)),
        "DEGRADED for ever",
        70,
        culprit=SICK,
    ),
    Situation(
        "a rank's process is a zombie",
        both(on_all(stands), on_all(idle), on("gpu-6", lambda frame, t: beats(frame, 44, state="Z"))),
        (
            ("DEGRADED", "^gpu-6: rank 44: its process has ended", 2),
            ("HUNG", "gpu-6: rank 44 is silent.*has ended", 64),
        ),
        "blamed rank 0",
        70,
        culprit="gpu-6",
    ),
    Situation(
        "a rank's process is gone",
        both(on_all(stands), on_all(idle), on("gpu-6", lambda frame, t: beats(frame, 44, state=""))),
        (("DEGRADED", "^gpu-6: rank 44: its process is gone", 2), ("HUNG", "gpu-6: rank 44 is silent", 64)),
        "blamed rank 0",
        70,
        culprit="gpu-6",
    ),
    Situation(
        "a rank has no heartbeat, and the others wait",
        both(
            on_all(stands),
            on_all(idle),
            on("gpu-6", lambda frame, t: frame["run"].update(beats=frame["run"]["beats"][1:])),
        ),
        (("DEGRADED", "^gpu-6: no heartbeat from rank 40", 34), ("HUNG", "gpu-6: no heartbeat from rank 40", 64)),
        "blamed rank 21",
        70,
        culprit="gpu-6",
    ),
    Situation(
        "steps take twice as long",
        on_all(steps_of(12.0)),
        (("DEGRADED", "a step takes .* times the planned 5.80 s", 62),),
        "HEALTHY for ever",
        90,
        Slow(*simulate.CALM),
    ),
    Situation(
        "steps take 40% longer",
        on_all(steps_of(8.4)),
        (("DEGRADED", "a step takes .* times the planned 5.80 s", 70),),
        "HEALTHY for ever",
        90,
        Slower(*simulate.CALM),
    ),
    Situation(
        "a rank computes at half speed",
        both(on_all(steps_of(12.0)), on_all(slow_rank)),
        (("DEGRADED", r"gpu-3: rank 21: it is 5\.\d\d s behind in every step: it costs \d\d%, and 1 more", 50),),
        "HEALTHY for ever",
        90,
        Slow(*simulate.CALM),
        check=lambda pic: [row.name for row in pic.hosts if row.notes] == [SICK],
    ),
    Situation(
        "a rank is 0.9 s behind",
        on_all(lambda frame, t: beats(frame, RANK, busy_s=6.0)),
        (("DEGRADED", r"gpu-3: rank 21: it is 0\.\d\d s behind in every step: it costs 1\d%", 20),),
        "HEALTHY for ever",
    ),
    Situation(
        "the loss is not a number",
        on_all(lambda frame, t: metrics(frame, loss=None) if t < 8 else None),
        (("DEGRADED", "the loss of step .* not a finite number", 8),),
        "DEGRADED for one step",
        60,
    ),
    Situation(
        "the loss is 1e6",
        on_all(lambda frame, t: metrics(frame, loss=1e6)),
        (("DEGRADED", "the loss is 1e", 14),),
        "DEGRADED 114 s",
    ),
    Situation(
        "the loss has doubled",
        on_all(lambda frame, t: metrics(frame, loss=4.6)),
        (("DEGRADED", "the loss is 4.6", 122),),
        "HEALTHY for ever",
        130,
    ),
    Situation(
        "a GPU is hot and slowed",
        on(SICK, lambda frame, t: gpus(frame, {HEAT: "88", POWER: "385.00", CLOCK: "1185", 13: "0x40"}, 3)),
        (("DEGRADED", "gpu-3: gpu 3: slowed by hardware thermal slowdown", 4),),
        "right: 2-4 s",
    ),
    Situation(
        "all GPUs at 93 °C",
        on_all(lambda frame, t: gpus(frame, {HEAT: "93"})),
        (("DEGRADED", "93 °C", 4),),
        "HEALTHY for ever",
    ),
    Situation(
        "seven ECC errors",
        on(SICK, lambda frame, t: gpus(frame, {ECC: "7"}, 5)),
        (("DEGRADED", "gpu-3: gpu 5: 7 uncorrected ECC errors", 4),),
        "right: 3 s",
    ),
    Situation(
        "Xid 79",
        on(SICK, xid(BEGIN_S)),
        (("DEGRADED", "gpu-3: gpu 5: Xid 79", 2),),
        "right: 1 s, on no GPU and for ever",
        check=lambda pic: [gpu.index for row in pic.hosts for gpu in row.gpus if gpu.odd] == [5],
    ),
    Situation(
        "an Xid of this attempt from before the start",
        on(SICK, xid(-30.0)),
        (("DEGRADED", "gpu-3: gpu 5: Xid 79", 2),),
        "never",
    ),
    Situation("an Xid of an earlier attempt", on(SICK, xid(-90.0)), (("HEALTHY", "", 0),), "never"),
    Situation(
        "a GPU is lost",
        on(
            SICK,
            lambda frame, t: frame["smi"].update(text="".join(frame["smi"]["text"].splitlines(keepends=True)[:-1])),
        ),
        (("DEGRADED", "gpu-3: 1 of 8 GPUs are lost", 4),),
        "right: 1 s",
    ),
    Situation(
        "a GPU is lost, and nvidia-smi says so where its values were",
        on(SICK, lambda frame, t: gpus(frame, dict.fromkeys(range(1, 14), "[GPU is lost]"), 5)),
        (("DEGRADED", "gpu-3: gpu 5: GPU is lost", 4),),
        "HEALTHY, GPU 64/64",
        check=lambda pic: (pic.gpus_seen, pic.gpus_expected) == (63, 64),
    ),
    Situation(
        "a save fails: the disk is full",
        on(HEAD, lambda frame, t: frame["run"].update(unsaved="step 1197: No space left on device")),
        (("DEGRADED", "not saved: step 1197: No space left", 2),),
        "right: 4 s",
    ),
    Situation(
        "a stop whose last save fails",
        stopped_and_lost,
        (("STOPPED, STEPS LOST", "by ann@desk after step 1,197: 7 steps lost; not saved: step 1197", 2),),
        "STOPPED, ● HEALTHY or disk nearly full",
    ),
    Situation(
        "clocks an hour apart",
        on(
            SICK,
            lambda frame, t: (
                beats(frame, time=frame["run"]["beats"][0]["time"] + 3600),
                frame.update(now=frame["now"] + 3600),
            ),
        ),
        (("HEALTHY", "", 0),),
        "right",
    ),
    Situation(
        "metrics stand, ranks go on",
        on_all(no_more_metrics),
        (("DEGRADED", "no metrics since step 1197", 44),),
        "DEGRADED 30 s, old numbers as if live",
        60,
    ),
    Situation(
        "a save hangs",
        both(on_all(phase("checkpoint")), on_all(idle)),
        (
            ("SAVING", "saving for", 2),
            ("DEGRADED", "saving for 3.s, usually 12s", 40),
            ("HUNG", "64 of 64 ranks: saving for .*usually 12s.*nothing moves", 124),
        ),
        "HEALTHY for ever",
        130,
    ),
    Situation(
        "a save on a slow disk",
        both(on_all(phase("checkpoint")), on_all(idle), on_all(writes)),
        (("SAVING", "saving for", 2), ("DEGRADED", "saving for .*usually 12s", 40)),
        "HEALTHY",
        180,
    ),
    Situation(
        "one rank stays in a save",
        both(
            on_all(stands),
            on_all(idle),
            on(SICK, lambda frame, t: beats(frame, RANK, phase="checkpoint", phase_since=simulate.BEGIN + BEGIN_S)),
        ),
        (
            ("SAVING", "saving for", 2),
            ("DEGRADED", "saving for", 40),
            ("HUNG", "gpu-3: rank 21: saving for .*, usually 12s", 124),
        ),
        "HUNG, another rank",
        130,
        culprit=SICK,
    ),
    Situation(
        "an evaluation hangs",
        both(on_all(phase("eval")), on_all(idle)),
        (
            ("EVALUATING", "evaluating for", 2),
            ("DEGRADED", "evaluating for", 184),
            ("HUNG", "64 of 64 ranks: evaluating for", 604),
        ),
        "HEALTHY for ever",
        610,
    ),
    Situation(
        "loading hangs",
        both(on_all(phase("load", done_bytes=6 * 10**9, total_bytes=12 * 10**9)), on_all(idle)),
        (("LOADING", "loading for", 2), ("DEGRADED", "loading for", 184), ("HUNG", "64 of 64 ranks: loading for", 604)),
        "HEALTHY for ever",
        610,
    ),
    Situation(
        "the guard is killed",
        on_all(lambda frame, t: None),
        (("DEGRADED", "its guard is gone", 2),),
        "right: 4 s",
        guard=GuardShown.GONE,
    ),
    Situation(
        "a host is not heard, and the others wait",
        both(on_all(stands), on_all(idle), on("gpu-5", lost)),
        (("DEGRADED", "", 8), ("HUNG", "gpu-5: no frame for", 66)),
        "right: STALE 5 s, HUNG 60 s",
        72,
        culprit="gpu-5",
    ),
    Situation(
        "rank 0's host is not heard, the run goes on",
        on(HEAD, lost),
        (("DEGRADED", "gpu-1: STALE", 8),),
        "old numbers in plain white",
        60,
        check=lambda pic: pic.training.is_stale and pic.training.step > STEP + 5,
    ),
    Situation(
        "an InfiniBand port is down",
        on(SICK, lambda frame, t: frame["ib"][3].update(state="1: DOWN")),
        (("DEGRADED", "gpu-3: mlx5_3/1 is down", 2),),
        "right: 1 s",
    ),
    Situation(
        "a port runs at 100 of 400 Gb/s",
        on(SICK, lambda frame, t: frame["ib"][3].update(rate="100 Gb/sec (4X EDR)")),
        (("DEGRADED", "gpu-3: mlx5_3/1 runs at 100 Gb/s, and ran at 400", 2),),
        "never",
    ),
    Situation(
        "the traffic of all links falls",
        on_all(
            lambda frame, t: [
                port["counters"].update(port_rcv_data=10**9, port_xmit_data=10**9) for port in frame["ib"]
            ]
        ),
        (("DEGRADED", "the RDMA traffic of all 8 hosts fell from", 8),),
        "never",
    ),
    Situation(
        "the run is finished",
        on_all(
            lambda frame, t: (
                frame["run"].update(max_steps=STEP, checkpoint_step=STEP),
                no_more_metrics(frame, t),
                ended(frame, exit_code=0),
            )
        ),
        (("DONE", "1,197 steps", 2),),
        "DONE ● HEALTHY",
    ),
    Situation(
        "the guard ends a hung attempt",
        ended_by_guard,
        (("RESTARTING", "attempt 1 was ended .gpu-3: hung: rank 21", 2),),
        "STOPPED ● HEALTHY",
        guard=GuardShown.RECOVERING,
    ),
    Situation(
        "a restart that somebody asked for",
        ended_for_a_restart,
        (("RESTARTING", "^asked for by ann@desk", 2),),
        "FAILED, and blamed hosts in turn",
        30,
        guard=GuardShown.WATCHING,
        check=lambda pic: pic.training.phase == "STOPPED" and not any(row.notes or row.why for row in pic.hosts),
    ),
    Situation(
        "an attempt was ended, and nobody restarts it",
        ended_by_guard,
        (("FAILED", "gpu-3: hung: rank 21", 2),),
        "STOPPED ● HEALTHY",
        culprit="",
    ),
    Situation(
        "another run is live on the hosts",
        on_all(lambda frame, t: frame["run"].update(others=["live2"])),
        (("HEALTHY", "", 0),),
        "silent with --run",
        check=lambda pic: pic.training.others == ("live2",) and "live2" in pic.events[-1].text,
    ),
    Situation(
        "another program on a GPU",
        on(SICK, foreign),
        (("DEGRADED", "gpu-3: gpu 5: 8.8 GiB of another program, bob: python other.py", 2),),
        "never",
    ),
    Situation(
        "a rank is killed",
        killed,
        (
            ("FAILED", "which one failed first is not known yet", 2),
            ("FAILED", "gpu-3: exited 1: rank 21 was killed by SIGKILL", 6),
        ),
        "FAILED 2 s, first blames another host",
        culprit=SICK,
    ),
    Situation(
        "nvidia-smi hangs",
        on(SICK, lambda frame, t: frame["smi"].update(text=None, hung_s=t)),
        (("DEGRADED", "gpu-3: SMI-HUNG", 14),),
        "right: 10 s",
    ),
    Situation(
        "the kernel kills a process for want of memory",
        on(SICK, lambda frame, t: frame["memory"].update(oom_kills=1, available=10 << 30)),
        (("DEGRADED", "gpu-3: out-of-memory kills: 1", 2),),
        "right",
    ),
    Situation(
        "in a container, a hang",
        both(on_all(without_apps), on_all(stands), on_all(idle)),
        (("HUNG", HUNG_21, 64),),
        "HUNG 60 s, no GPU marked",
        70,
        culprit=SICK,
        check=lambda pic: [(row.name, gpu.index) for row in pic.hosts for gpu in row.gpus if gpu.odd] == [(SICK, 5)],
    ),
    Situation("in a container with pids of its own", on_all(other_pids), (("HEALTHY", "", 0),), "right"),
    Situation(
        "NCCL uses TCP",
        on_all(lambda frame, t: frame["run"].update(net="SOCKET")),
        (("DEGRADED", "TCP sockets", 2),),
        "right",
    ),
)
