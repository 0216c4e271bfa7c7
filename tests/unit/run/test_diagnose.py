"""Who holds up a run, from what its hosts saw: values in, values out."""

import dataclasses
import re

import pytest

from llama405b.contract.records import Cause, CauseKind, Phase, TrainingPosition
from llama405b_tools.agent.evidence import (
    DiskEvidence,
    HostConditions,
    HostEvidence,
    ProcessActivity,
    RankEvidence,
    RunProgress,
    StalledConnection,
)
from llama405b_tools.agent.messages import RankHeartbeat
from llama405b_tools.parsers import StackFrame, Thread
from llama405b_tools.run import hang
from llama405b_tools.run.diagnosis import (
    DiagnosisKind,
    FaultKind,
    RankActivity,
    diagnose_run,
    frame_words,
    rank_positions,
)

NOW = 10_000.0
C10D = "/v/site-packages/torch/distributed/distributed_c10d.py"
FSDP = "/v/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"
STEP = StackFrame("/w/llama405b/optim/step.py", 70, "train_step", "loss.backward()")
GATHER = (StackFrame(C10D, 4394, "all_gather_single", "work.wait()"), StackFrame(FSDP, 119, "__call__"), STEP)
REDUCE = (StackFrame(C10D, 3100, "all_reduce", "work.wait()"), STEP)
READS = (StackFrame("/w/llama405b/data/documents.py", 88, "rows", "rows = file.read(n)"), STEP)
SLEEPS = (StackFrame("/home/ann/hooks.py", 7, "wait", "time.sleep(60)"), STEP)
WAITS = (StackFrame("/usr/lib/python3.11/threading.py", 331, "wait"), STEP)
IDLE = Thread("pool", (StackFrame("/usr/lib/python3.11/concurrent/futures/thread.py", 81, "_worker"),))


def rank(
    n, frames=GATHER, *, age_s=70.0, step=71, unit="layers.3 forward", phase=Phase.TRAIN, since_s=700.0, threads=(), cause=None,
    **more,
):  # fmt: skip
    beat = RankHeartbeat(n, "", 100 + n, NOW - age_s, step - 1, phase, NOW - since_s, cause=cause)
    main = (Thread("main", frames, is_main=True), *threads, IDLE) if frames else ()
    values = {"pid": 100 + n, "state": "S", "threads": main, "place": TrainingPosition(step, unit), "beat": beat}
    return RankEvidence(n, **values | more)


def cluster(odd=None, n_hosts=4, step_s=2.0, lost=(), **more):
    """Hosts of two ranks each, all of which wait in one gather, but for the odd ones: by rank, what to call ``rank`` with."""
    hosts = {}
    for h in range(n_hosts):
        ranks = tuple(rank(n, **{**more, **(odd or {}).get(n, {})}) for n in (2 * h, 2 * h + 1))
        progress = RunProgress(step_s, 10.0) if h == 0 else RunProgress()
        hosts[f"gpu-{h}"] = HostEvidence(
            f"gpu-{h}",
            NOW,
            1,
            alive=True,
            address=f"10.0.0.{h}",
            interface="eth0",
            window_s=1.5,
            ranks=ranks,
            progress=progress,
        )
    return {name: host for name, host in hosts.items() if name not in lost}


def of(hosts, lost=None):
    return diagnose_run(hosts, lost or {})


@pytest.mark.parametrize(
    ("fault", "odd"),
    [
        (FaultKind.ELSEWHERE, {"frames": SLEEPS}),
        (FaultKind.BLOCKED, {"frames": READS, "waits_in": "read of /data/a", "state": "D"}),
        (FaultKind.BLOCKED, {"state": "D", "kernel_wait": "io_schedule"}),  # although its stack is that of the others
        (FaultKind.STOPPED, {"state": "T"}),
        (FaultKind.STOPPED, {"state": "Z"}),
        (FaultKind.RANK_GONE, {"pid": 0, "frames": ()}),
        (FaultKind.MISMATCH, {"frames": REDUCE}),
        (FaultKind.MISMATCH, {"unit": "layers.2 forward"}),
        (FaultKind.MISMATCH, {"step": 70}),
        (FaultKind.STARVED, {"frames": SLEEPS, "doing": ProcessActivity(waited_s=1.4)}),
        (FaultKind.STARVED, {"frames": SLEEPS, "doing": ProcessActivity(major_faults=9000), "swapped_bytes": 3 << 30}),
        (FaultKind.STARVED, {"doing": ProcessActivity(throttled_s=1.3)}),  # although its stack is that of the others
        (FaultKind.ELSEWHERE, {"threads": (Thread("holder", SLEEPS, has_gil=True),)}),
        (FaultKind.ELSEWHERE, {"frames": WAITS, "threads": (Thread("writer", SLEEPS),)}),
        (FaultKind.ELSEWHERE, {"frames": (), "no_stacks": "py-spy: Permission denied"}),
    ],
)
def test_one_rank_that_does_something_else_is_named(fault, odd):
    found = of(cluster({5: odd}))
    assert found.verdict is DiagnosisKind.HANGS
    assert (found.culprit.fault, found.culprit.hosts, found.culprit.ranks) == (fault, ("gpu-2",), (5,))


def test_a_rank_that_waits_for_its_own_thread_which_waits_in_a_collective_waits_with_the_others():
    others = {n: {"frames": WAITS, "threads": (Thread("autograd", GATHER),)} for n in range(8)}
    hosts = cluster(others | {3: {"frames": SLEEPS}})
    assert [position.activity for position in rank_positions(hosts)].count(RankActivity.COLLECTIVE) == 7
    assert of(hosts).culprit.ranks == (3,)


def test_ranks_that_wait_for_their_gpu_wait_for_the_one_that_does_not():
    sync = (StackFrame("/w/llama405b/optim/step.py", 75, "train_step", "loss = float(all_reduce_sum(nll)) / n"),)
    native = (StackFrame("/usr/lib/libcuda.so.1", 0, "cuEventSynchronize"), STEP)
    hosts = cluster({2: {"frames": native}, 6: {"frames": READS}}, frames=sync)
    assert of(hosts).culprit.ranks == (6,)


def test_of_several_the_one_that_is_furthest_behind_is_named():
    found = of(cluster({1: {"frames": SLEEPS, "step": 72}, 6: {"frames": READS, "step": 70}}))
    assert found.culprit.ranks == (6,)


def test_those_at_the_same_place_are_named_together():
    found = of(cluster({n: {"frames": READS, "state": "D"} for n in (4, 5)}))
    assert (found.culprit.hosts, found.culprit.ranks) == (("gpu-2",), (4, 5))


def test_nobody_is_blamed_where_all_wait_alike_or_the_run_moves():
    alike = of(cluster())
    assert alike.verdict is DiagnosisKind.HANGS
    assert alike.culprit is None
    assert [len(group.positions) for group in alike.groups] == [8]
    moves = of(cluster({5: {"frames": SLEEPS}}, age_s=3.0))
    assert moves.verdict is DiagnosisKind.MOVES
    assert moves.culprit is None


def test_ranks_that_all_moved_during_the_look_move():
    assert of(cluster(age_s=2.7, step_s=0.3, moved=True)).verdict is DiagnosisKind.MOVES
    assert of(cluster({5: {"moved": False}}, age_s=2.7, step_s=0.3, moved=True)).verdict is DiagnosisKind.MOVES


def test_a_line_of_a_stack_is_without_its_comment_and_says_where_it_is_cut():
    assert frame_words(StackFrame("/w/a/b.py", 7, "f", "x = y[1]  # as long as it is")) == "a/b.py:7 (f): x = y[1]"
    assert frame_words(StackFrame("/w/a/b.py", 7, "f", "x" * 200)).endswith("xx…")


@pytest.mark.parametrize(("age_s", "step_s", "verdict"), [
    (9, 1.0, DiagnosisKind.MOVES), (59, 1.0, DiagnosisKind.UNCLEAR), (61, 1.0, DiagnosisKind.HANGS), (39, 20.0, DiagnosisKind.MOVES),
    (90, 20.0, DiagnosisKind.UNCLEAR), (110, 20.0, DiagnosisKind.HANGS), (70, None, DiagnosisKind.MOVES), (200, None,
    DiagnosisKind.UNCLEAR), (3659, None, DiagnosisKind.UNCLEAR), (3661, None, DiagnosisKind.HANGS),
])  # fmt: skip
def test_how_long_nothing_may_move_is_what_guard_and_cluster_top_go_by(age_s, step_s, verdict):
    hosts = cluster({5: {"frames": SLEEPS}}, age_s=age_s, step_s=step_s, since_s=age_s if step_s is None else 9000)
    found = of(hosts)
    assert found.verdict is verdict
    assert (found.culprit is None) is (verdict is DiagnosisKind.MOVES)
    beats = {name: [(rank.beat, age_s) for rank in host.ranks] for name, host in hosts.items()}
    hung = hang.find_silent_rank(beats, hang.Pace(step_s))
    assert (hung is None) is (verdict is not DiagnosisKind.HANGS)


@pytest.mark.parametrize(
    ("load_s", "verdict"), [(60.0, DiagnosisKind.HANGS), (300.0, DiagnosisKind.UNCLEAR), (0.0, DiagnosisKind.UNCLEAR)]
)
def test_the_first_step_may_take_as_long_as_the_run_allows(load_s, verdict):
    hosts = cluster({5: {"frames": SLEEPS}}, age_s=200, step_s=None, since_s=200)
    hosts["gpu-0"] = dataclasses.replace(hosts["gpu-0"], progress=RunProgress(load_s=load_s))
    assert of(hosts).verdict is verdict


def test_a_user_who_does_not_want_to_wait_says_so():
    assert diagnose_run(cluster({5: {"frames": SLEEPS}}, age_s=30), {}, 20.0).verdict is DiagnosisKind.HANGS


@pytest.mark.parametrize(("phase", "frames", "doing", "age_s", "verdict"), [
    (Phase.TRAIN, READS, ProcessActivity(moved_bytes=1 << 20), 70, DiagnosisKind.MOVES),
    (Phase.TRAIN, SLEEPS, ProcessActivity(moved_bytes=1 << 20), 70, DiagnosisKind.HANGS),  # it writes its log
    (Phase.TRAIN, SLEEPS, ProcessActivity(cpu_s=1.5), 70, DiagnosisKind.HANGS),  # an endless loop
    (Phase.LOAD, READS, ProcessActivity(moved_bytes=1 << 20), 90, DiagnosisKind.MOVES),
    (Phase.LOAD, READS, ProcessActivity(), 59, DiagnosisKind.MOVES),
    (Phase.LOAD, READS, ProcessActivity(), 90, DiagnosisKind.HANGS),
    (Phase.CHECKPOINT, READS, ProcessActivity(), 90, DiagnosisKind.HANGS),  # usually 10 s
    (Phase.DATA, SLEEPS, ProcessActivity(cpu_s=1.5), 90, DiagnosisKind.MOVES),  # it tokenizes
    (Phase.DATA, SLEEPS, ProcessActivity(cpu_s=1.5), 1900, DiagnosisKind.HANGS),  # for ever
])  # fmt: skip
def test_what_takes_its_time_is_told_from_what_hangs(phase, frames, doing, age_s, verdict):
    odd = {"frames": frames, "phase": phase, "doing": doing}
    assert of(cluster({5: odd}, age_s=age_s, phase=phase, since_s=max(age_s, 700))).verdict is verdict


def test_a_host_that_does_not_answer_is_named_if_the_run_hangs():
    found = of(cluster(lost=("gpu-3",)), {"gpu-3": "timed out"})
    assert (found.culprit.fault, found.culprit.hosts) == (FaultKind.HOST_LOST, ("gpu-3",))
    assert found.verdict is DiagnosisKind.UNCLEAR  # it may have much to do
    assert of(cluster(lost=("gpu-3",), age_s=1.0), {"gpu-3": "timed out"}).verdict is DiagnosisKind.MOVES


def test_where_no_host_answers_that_is_said_and_nobody_is_blamed():
    found = of({}, {"gpu-0": "did not answer within 9 s", "gpu-1": "the same"})
    assert (found.verdict, found.culprit) == (DiagnosisKind.UNCLEAR, None)
    assert found.words.endswith("gpu-0: did not answer within 9 s")


@pytest.mark.parametrize(("free_bytes", "n_more"), [(0, 1), (1 << 30, 0), (None, 0)])
def test_only_a_disk_that_is_known_to_be_full_is_full(free_bytes, n_more):
    odd = {5: {"frames": READS, "state": "D"}}
    hosts = cluster(odd)
    around = HostConditions(disks=(DiskEvidence("/data", answers=True, free_bytes=free_bytes),))
    hosts["gpu-2"] = dataclasses.replace(hosts["gpu-2"], around=around)
    assert len(of(hosts).culprit.evidence) == len(of(cluster(odd)).culprit.evidence) + n_more


@pytest.mark.parametrize(
    ("around", "values"),
    [
        (HostConditions(load=300.0, cores=128), ["300", "128"]),
        (HostConditions(load=200.0, cores=128, swap_used_bytes=1 << 29), []),
        (HostConditions(swap_used_bytes=9_000_000_000, available_bytes=256_000_000), ["9.0", "256.0"]),
    ],
)
def test_a_host_without_memory_or_cores_says_so_under_its_culprit(around, values):
    hosts = cluster({5: {"frames": READS, "state": "D"}})
    hosts["gpu-2"] = dataclasses.replace(hosts["gpu-2"], around=around)
    notes = [line for line in of(hosts).culprit.evidence if line.startswith("gpu-2: ")]
    assert [value for line in notes for value in re.findall(r"[\d.]+", line.removeprefix("gpu-2: "))] == values


def test_of_a_run_that_moves_it_is_said_that_its_checkpoint_is_late():
    hosts = cluster(age_s=3.0)
    late = dataclasses.replace(hosts["gpu-0"].progress, unsaved="for 282 s, usually every 60 s")
    hosts["gpu-0"] = dataclasses.replace(hosts["gpu-0"], progress=late)
    found = of(hosts)
    assert found.verdict is DiagnosisKind.MOVES
    assert found.words.endswith(": for 282 s, usually every 60 s")


def test_a_link_that_passes_nothing_or_is_down():
    cut = {n: {"unsent": (StalledConnection("10.0.0.2", 5000, 7),)} for n in (2, 6)}
    found = of(cluster(cut | {4: {"unsent": (StalledConnection("10.0.0.1", 5000, 7),)}}))
    assert (found.culprit.fault, found.culprit.hosts) == (FaultKind.LINK, ("gpu-2",))
    hosts = cluster()
    hosts["gpu-1"] = dataclasses.replace(hosts["gpu-1"], around=HostConditions(link_up=False))
    assert of(hosts).culprit.hosts == ("gpu-1",)
    one_pair = of(cluster({0: {"unsent": (StalledConnection("10.0.0.2", 5000, 7),)}}))
    assert one_pair.culprit.hosts == ("gpu-0", "gpu-2")


def test_of_ranks_that_are_gone_the_one_that_said_why_is_named():
    lost_peer = Cause(CauseKind.LOST_PEER, rank=0, phase="train")
    own = Cause(CauseKind.RANK_EXIT, rank=5, detail="ValueError: no such column")
    gone = {n: {"pid": 0, "frames": (), "phase": Phase.FAILED, "cause": lost_peer} for n in range(8)}
    found = of(cluster(gone | {5: gone[5] | {"cause": own}}))
    assert found.verdict is DiagnosisKind.OVER
    assert found.culprit.ranks == (5,)
    killed = of(cluster(gone | {5: {"pid": 0, "frames": ()}}))
    assert killed.culprit.ranks == (5,)
    assert of(cluster({n: {"pid": 0, "frames": (), "phase": Phase.DONE} for n in range(8)})).culprit is None


def test_whether_a_foreign_program_hangs_is_not_claimed():
    found = of(cluster({5: {"frames": SLEEPS, "beat": None, "place": None}}, beat=None, place=None, unit=""))
    assert found.verdict is DiagnosisKind.UNCLEAR
    assert found.culprit.ranks == (5,)


def test_of_a_program_that_may_be_well_nobody_is_blamed_where_all_do_the_same():
    foreign = {"beat": None, "place": None, "unit": "", "frames": SLEEPS}
    assert of(cluster(**foreign)).culprit is None
    hangs = of(cluster(frames=READS, waits_in="read of /data/a"))
    assert hangs.culprit.ranks == tuple(range(8))


def test_a_hanging_disk_and_the_kernel_are_evidence():
    hosts = cluster({5: {"frames": READS, "state": "D"}})
    around = HostConditions(
        disks=(DiskEvidence("/data", answers=False),), kernel=("3 s ago: nfs: server x not responding",)
    )
    hosts["gpu-2"] = dataclasses.replace(hosts["gpu-2"], around=around)
    plain = len(of(cluster({5: {"frames": READS, "state": "D"}})).culprit.evidence)
    assert len(of(hosts).culprit.evidence) == plain + 2
