"""What cluster-top derives from frames: states, what stands out, hangs, freshness, rates; never a number that is unknown."""

import dataclasses
import json
import queue
import re
import shlex

import pytest
import simulate
from fakes import FakeFleet
from situations import CLOCK, POWER, as_sent, gpus

from conftest import ROOT
from llama405b_tools.agent import sampler
from llama405b_tools.text.words import CONTROLS
from llama405b_tools.top.draw import panels
from llama405b_tools.top.draw.ui import VIEWS, Ui
from llama405b_tools.top.event_sources import LiveSource
from llama405b_tools.top.state import picture
from llama405b_tools.top.state.cluster import ClusterState, VerdictReason, advice
from llama405b_tools.top.state.picture import ClusterVerdict, GuardShown, HostState
from llama405b_tools.top.state.trends import Trends

T0, NAN, INF = simulate.BEGIN, float("nan"), float("inf")


def play(n_hosts=4, seconds=100.0, change=None, **more):
    """Play the incident so far; ``change``: edits or drops (None) an event before it is taken."""
    cluster = ClusterState(simulate.host_names(n_hosts), 2.0, **more)
    last = T0
    for event in simulate.simulate_incident(n_hosts, seconds=seconds):
        event = change(as_sent(event)) if change else event
        if event and "frame" in event:
            cluster.take_frame(event["host"], event["frame"], event["t"])
            last = event["t"]
            if event["host"] == simulate.host_names(n_hosts)[-1]:
                cluster.advance(last)
    return cluster, look(cluster, last)


def look(cluster, now):
    """Go on to a moment, and look."""
    cluster.advance(now)
    return cluster.make_view()


def test_it_stays_with_its_run_and_says_so_when_it_goes_over():
    cluster, _ = play(2, 60.0)
    other = {
        "name": "other",
        "created": T0 + 50,
        "attempt": 1,
        "beats": [],
        "log_age_s": None,
        "net": "",
        "status": None,
    }

    def send(host, seconds, **run):
        frame = next(simulate.simulate_incident(2, seconds=2.0))["frame"] | {"run": run or None, "now": T0 + seconds}
        cluster.take_frame(host, frame, T0 + seconds)
        return look(cluster, T0 + seconds)

    assert send("gpu-1", 61, **other, alive=True).training.run == "llama-405b"
    assert send("gpu-2", 61, **other, alive=True).training.run == "other"
    assert [event.text for event in cluster.events][-1] == "now showing run other instead of llama-405b"


def test_a_run_that_died_is_left_after_a_minute_where_another_lives_on_few_hosts():
    cluster, _ = play(4, 60.0)
    for event in simulate.simulate_incident(4, seconds=2.0):
        if "frame" in event:
            dead = event["frame"]["run"] | {"alive": False, "beats": [], "name": "llama-405b"}
            new = dead | {"name": "new", "alive": True, "created": T0 + 55, "status": None}
            run = new if event["host"] == "gpu-4" else dead
            cluster.take_frame(event["host"], event["frame"] | {"run": run, "now": T0 + 62}, T0 + 62)
    assert look(cluster, T0 + 63).training.run == "llama-405b"
    assert look(cluster, T0 + 63 + 60).training.run == "new"


OUT_OF_MEMORY = {"kind": "rank exit", "rank": 11, "detail": "CUDA out of memory"}


def test_a_stopped_rank_is_named_at_once_and_a_failed_one_is_never_healthy():
    def change(event, **new):
        for beat in event["frame"]["run"]["beats"] if "frame" in event and event["host"] == "gpu-2" else ():
            beat.update({"rank": beat["rank"], **new} if beat["rank"] == 11 else {})
        return event

    _, stopped = play(2, 60.0, change=lambda event: change(event, state="T"))
    assert (stopped.verdict, row(stopped, "gpu-2").notes) == ("DEGRADED", ("rank 11: it is stopped by a signal",))
    [pid] = [rank.pid for rank in row(stopped, "gpu-2").ranks if rank.rank == 11]
    assert (stopped.about, stopped.advice) == ("gpu-2", f"`kill -CONT {pid}` on gpu-2 lets rank 11 go on")
    _, failed = play(2, 60.0, change=lambda event: change(event, phase="failed", cause=OUT_OF_MEMORY))
    assert (failed.verdict, failed.exit_code, failed.training.phase) == ("FAILED", 3, "FAILED")
    assert failed.why == "gpu-2: rank 11 failed: CUDA out of memory"


def test_a_guard_that_is_gone_is_not_healthy():
    cluster, _ = play(2, 60.0)
    cluster.guard = GuardShown.GONE
    assert look(cluster, T0 + 60.0).why == "its guard is gone, so nothing restarts this run"


def test_between_healthy_and_hung_the_silence_is_said():
    _, quiet = play(4, simulate.HUNG + 2)
    assert quiet.verdict == "HEALTHY"
    _, fallen = play(4, simulate.HUNG + 8)  # everybody at once, which is no deviation from the others
    assert (fallen.verdict, fallen.exit_code) == ("DEGRADED", 1)
    assert re.match(r"the power of all 32 GPUs fell from 21.5 to 4.\d kW, and 1 more", fallen.why)
    assert fallen.training.tokens_per_s is not None
    cluster, stalled = play(4, simulate.HUNG + 40)
    assert re.match(r"this step has run for \d\d s, usually 6.0 s, and 2 more", stalled.why)
    assert len([event for event in cluster.events if "this step has run" in event.text]) == 1
    run = stalled.training
    assert (run.is_stale, run.tokens_per_s, run.mfu_pct, run.eta_s) == (True, None, None, None)
    _, saving = play(4, simulate.HUNG + 40, change=lambda event: _in_phase(event, "checkpoint"))
    assert (saving.verdict, saving.why) == ("DEGRADED", "saving for 2m, usually 24s")


def _in_phase(event, phase):
    for beat in event["frame"]["run"]["beats"] if "frame" in event else ():
        beat["phase"] = phase
    return event


def row(pic, name):
    return next(row for row in pic.hosts if row.name == name)


def test_the_simulation_speaks_as_the_sampler_does():
    fields = [*sampler.FIELDS.split(","), sampler.REASONS[0]]
    assert list(simulate.FIELDS) == fields


def test_a_healthy_run():
    _, pic = play(seconds=50)
    assert (pic.verdict, pic.exit_code) == ("HEALTHY", 0)
    assert pic.why == "a step takes 6.00 s, 3% more than planned"
    assert (pic.fresh, pic.gpus_seen, pic.gpus_expected) == (4, 32, 32)
    run = pic.training
    assert (run.phase, run.step, run.steps, run.step_s, run.world, run.network) == (
        "TRAINING",
        1184,
        5000,
        6.0,
        32,
        "IB 8x400",
    )
    assert (run.checkpoint_step, run.lost_steps) == (1180, 4)
    assert run.lost_rank_hours == pytest.approx(4 * 6.0 * 32 / 3600)
    assert run.mfu_pct == pytest.approx(100 * 141 * 2.473e12 / 989e12, rel=1e-3)
    assert run.eta_s == pytest.approx((5000 - 1184) * 6.0)
    assert row(pic, "gpu-2").gpus[3].rank == 11
    assert row(pic, "gpu-2").cpu_pct == pytest.approx(9, abs=1)
    assert row(pic, "gpu-2").processes[3].gpu == 3
    json.dumps(dataclasses.asdict(pic))


def test_loading_tells_bytes_and_time():
    _, pic = play(seconds=14)
    assert pic.training.phase == "LOADING"
    assert pic.training.done_bytes == pytest.approx(812e9 * 12 / 24, rel=0.01)
    assert pic.training.eta_s == pytest.approx(12, rel=0.05)


def test_the_odd_gpu_is_named_with_its_reason():
    _, pic = play(seconds=80)
    assert (pic.verdict, pic.exit_code) == ("DEGRADED", 1)
    assert [gpu.index for gpu in row(pic, "gpu-3").gpus if gpu.odd] == [3]
    assert "slowed by hardware thermal slowdown; power 5" in row(pic, "gpu-3").notes[0]
    assert all(not host.notes for host in pic.hosts if host.name != "gpu-3")


def test_the_hung_rank_is_named_and_the_others_are_not():
    _, pic = play(seconds=simulate.HUNG + 75)
    assert (pic.verdict, pic.exit_code, pic.training.phase) == ("HUNG", 3, "HUNG")
    assert [host.name for host in pic.hosts if host.state == "HUNG"] == ["gpu-3"]
    assert "rank 21 is silent for" in pic.why
    assert "its GPU draws 20% of its power; no log line for" in pic.why
    texts = [event.text for event in pic.events if event.level == "bad"]
    assert len([text for text in texts if text.startswith("HUNG")]) == 1  # said once, not with every second


def test_no_hang_while_logs_go_on_or_gpus_work_or_a_checkpoint_is_written():
    def logs_go_on(event):
        if "frame" in event:
            event["frame"]["run"]["log_age_s"] = 0.5
        return event

    def saves(event):
        for beat in event["frame"]["run"]["beats"] if "frame" in event else ():
            if beat["time"] > T0 + simulate.HUNG - 3:
                beat["phase"] = "checkpoint"
        return event

    def gpus_work(event):
        if "frame" in event:
            lines = event["frame"]["smi"]["text"].splitlines()
            values = [line.split(", ") for line in lines]
            event["frame"]["smi"]["text"] = "\n".join(", ".join([*v[:8], "650.00", *v[9:]]) for v in values)
        return event

    for change in (logs_go_on, saves, gpus_work):
        assert play(seconds=simulate.HUNG + 75, change=change)[1].verdict != "HUNG"


def test_a_stopped_process_is_a_hang_in_every_phase():
    def stopped(event):
        for beat in event["frame"]["run"]["beats"] if "frame" in event else ():
            beat["phase"] = "checkpoint"
            if beat["rank"] == 9 and beat["time"] > T0 + simulate.HUNG - 3:
                beat["state"] = "T"
        return event

    _, pic = play(seconds=simulate.HUNG + 75, change=stopped)
    assert pic.verdict == "HUNG"
    assert "gpu-2: rank 9 is silent" in pic.why
    assert "it is stopped by a signal" in pic.why


def test_a_host_is_stale_by_its_frames_and_an_average_says_so():
    cluster, pic = play(seconds=50, change=lambda e: None if e["host"] == "gpu-2" and e["t"] > T0 + 40 else e)
    assert row(pic, "gpu-2").state == HostState.STALE
    assert "no frame for" in row(pic, "gpu-2").why
    assert (pic.fresh, pic.gpus_seen, pic.gpus_expected, pic.exit_code) == (3, 24, 32, 1)
    late = look(cluster, T0 + 400)
    assert {host.state for host in late.hosts} == {HostState.STALE}


def test_links_that_are_not_made_say_why():
    cluster, _ = play(seconds=20)
    for host, state in zip(simulate.host_names(4), ("AUTH", "REFUSED", "TIMEOUT", "DOWN"), strict=True):
        cluster.set_link(host, state, f"why {state}", T0 + 21)
    pic = look(cluster, T0 + 21)
    assert [host.state for host in pic.hosts] == ["AUTH", "REFUSED", "TIMEOUT", "DOWN"]
    assert (pic.verdict, pic.exit_code) == ("DOWN", 3)
    assert pic.why == "gpu-1: AUTH why AUTH, and 3 more"
    assert [event.text for event in pic.events][-4:] == [
        "AUTH: why AUTH",
        "REFUSED: why REFUSED",
        "TIMEOUT: why TIMEOUT",
        "DOWN: why DOWN",
    ]


def edit_smi(host, edit):
    def change(event):
        if "frame" in event and event["host"] == host and event["t"] > T0 + 30:
            edit(event["frame"])
        return event

    return change


def test_what_nvidia_smi_does_not_tell_is_unknown():
    def not_available(frame):
        frame["smi"]["text"] = "".join(
            f"{i}, GPU-{i}, NVIDIA H100 80GB HBM3, 0:1:0.0, [N/A], [N/A], 81559, ERR!, [Not Supported], 700.00, [N/A], "
            "[N/A], 570, [N/A]\n"
            for i in range(8)
        )

    gpu = row(play(seconds=50, change=edit_smi("gpu-1", not_available))[1], "gpu-1").gpus[0]
    assert (gpu.utilization, gpu.used_mib, gpu.temperature_c, gpu.power_w, gpu.clock_mhz, gpu.power_pct) == (None,) * 6
    assert "temperature.gpu cannot be read" in gpu.odd


def test_faults_of_the_driver():
    def hung(frame):
        frame["smi"] = {"text": None, "hung_s": 45.0}

    def failed(frame):
        frame["smi"]["text"] = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"

    def lost(frame):
        frame["smi"]["text"] = "".join(frame["smi"]["text"].splitlines(keepends=True)[:7])

    def none(frame):
        frame["smi"], frame["pci_gpus"] = {"text": None, "hung_s": 0.0}, 0

    found = row(play(seconds=50, change=edit_smi("gpu-1", hung))[1], "gpu-1")
    assert (found.state, found.why) == ("SMI-HUNG", "nvidia-smi has not answered for 45 s; a GPU or the driver hangs")
    assert found.cpu_pct is not None  # the rest goes on
    found = row(play(seconds=50, change=edit_smi("gpu-1", failed))[1], "gpu-1")
    assert found.state == "NO-DRIVER"
    assert "couldn't communicate with the NVIDIA driver" in found.why
    _, pic = play(seconds=50, change=edit_smi("gpu-1", lost))
    assert row(pic, "gpu-1").notes[0] == "1 of 8 GPUs are lost"
    assert (pic.gpus_seen, pic.gpus_expected, pic.verdict) == (31, 32, "DEGRADED")
    cluster = ClusterState(["gpu-1"], 2.0)
    frame = next(simulate.simulate_incident(1))["frame"]
    none(frame)
    cluster.take_frame("gpu-1", frame, T0)
    assert (look(cluster, T0).hosts[0].has_gpu, look(cluster, T0).hosts[0].state) == (False, "OK")


def another_model(frame):
    if frame["machine"] in ("gpu-3", "gpu-4"):
        gpus(frame, {2: "NVIDIA A100-SXM4-80GB", POWER: "200.00", 9: "400.00", CLOCK: "1155"})


def without_ranks(frame):
    run = frame["run"]
    gpus(frame, {POWER: "119.00", CLOCK: "345"}, 7)
    run["beats"] = run["beats"][:7]
    frame["smi"]["apps"] = "".join(frame["smi"]["apps"].splitlines(keepends=True)[:7])


def without_a_run(frame):
    frame["run"] = None
    if frame["machine"] == "gpu-3":
        gpus(frame, {POWER: "119.00", CLOCK: "345"})


@pytest.mark.parametrize("change", [another_model, without_ranks, without_a_run])
def test_gpus_are_compared_with_those_of_their_model_that_train(change):
    def edit(event):
        if "frame" in event:
            change(event["frame"])
        return event

    assert [gpu.odd for row in play(seconds=50, change=edit)[1].hosts for gpu in row.gpus if gpu.odd] == []


def test_older_field_names_of_nvidia_smi():
    def older(frame):
        frame["smi"]["fields"][-1] = "clocks_throttle_reasons.active"

    _, pic = play(seconds=80, change=edit_smi("gpu-3", older))
    assert "slowed by hardware thermal slowdown" in row(pic, "gpu-3").notes[0]


def test_what_stands_out_beside_gpus():
    def sick(frame):
        frame["memory"] |= {"available": 1 << 30, "oom_kills": 2}
        frame["disks"] = [["/w", 1 << 30, 7 << 40]]
        frame["ib"][0] |= {"state": "1: DOWN"}
        frame["ib"][1]["counters"]["symbol_error"] = 17
        frame["kernel"] = ["NVRM: Xid (PCI:0000:43:00): 79, pid=1234, GPU has fallen off the bus."]

    notes = row(play(seconds=50, change=edit_smi("gpu-4", sick))[1], "gpu-4").notes
    words = " | ".join(notes)
    for part in (
        "Xid 79",
        "fallen off the bus",
        "out-of-memory kills: 2",
        "RAM is full: 1.0 GiB",
        "disk is nearly full: 1.0 GiB left at /w",
    ):
        assert part in words
    assert "mlx5_0/1 is down" in words
    assert "mlx5_1/1: 17 symbol errors" in words


@pytest.mark.parametrize("path", ["/w", "/data/my {runs}"])
def test_what_to_do_about_a_full_disk_is_a_command_that_shows_what_fills_it(path):
    def full(frame):
        frame["disks"] = [["/other", 1 << 40, 7 << 40], [path, 1 << 30, 7 << 40]]

    pic = play(seconds=50, change=edit_smi("gpu-4", full))[1]
    assert pic.why == f"gpu-4: disk is nearly full: 1.0 GiB left at {path}"
    command = f"`du -xhd2 {shlex.quote(path)} | sort -h | tail` on gpu-4 shows what fills it"
    assert pic.advice == f"{command}; delete what is not needed, such as checkpoints of earlier runs"


def test_a_save_that_failed_on_a_full_disk_says_what_fills_it():
    def full(frame):
        frame["disks"] = [["/w", 1 << 30, 7 << 40]]
        frame["run"]["unsaved"] = "step 7: No space left on device"

    pic = play(seconds=80, change=edit_smi("gpu-1", full))[1]
    assert pic.advice.startswith("make room where the checkpoints go: ")
    assert pic.advice.endswith("; `du -xhd2 /w | sort -h | tail` on gpu-1 shows what fills it")


def test_what_to_do_about_a_hot_gpu_is_to_cool_it():
    assert play(seconds=84)[1].advice.startswith(
        "check the fans and the inlet air of gpu-3; until then, `sudo nvidia-smi -i 3 -pl 560` there"
    )


def test_the_advice_is_about_the_first_reason():
    snapshot = play(seconds=50)[0].snapshot
    slow, lost = VerdictReason("", "a step is slow", "ask `{doctor}`"), VerdictReason("x", "x: AUTH", "look at {host}")
    for reasons, words in (([slow, lost], "ask `l doctor my{1}hosts`"), ([lost, slow], "look at x"), ([], "")):
        assert advice(snapshot, reasons, None, ClusterVerdict.DEGRADED, "l {} my{1}hosts") == words
    odd = [VerdictReason("y", "y: odd"), lost]
    assert advice(snapshot, odd, None, ClusterVerdict.DEGRADED, "l {}").startswith(
        "Enter shows the host with everything"
    )


def test_a_host_where_no_agent_runs_is_not_what_the_others_wait_for():
    def blind(event):
        if event["host"] == "gpu-4" and "frame" in event and event["t"] > T0 + 20:
            event["frame"] |= {"run": None, "run_fault": "its python cannot be run"}
        return event

    pictures = [play(seconds=220, change=change)[1] for change in (None, blind)]
    assert [(picture.verdict, picture.about) for picture in pictures] == [(ClusterVerdict.HUNG, "gpu-3")] * 2


NODE = {"host": "h", "state": "exited", "attempt": 1, "pid": 1, "pid_start": 1, "exit_code": 1}


def test_a_failure_says_its_gpu_its_log_and_since_when():
    cause = {"kind": "rank killed", "rank": 9, "signal": 9, "gpu": "1", "host": "gpu-2"}
    blame = {"attempt": 1, "host": "gpu-2", "cause": cause, "time": T0 + 41}

    def killed(event):
        if "frame" in event:
            event["frame"]["run"] |= {
                "alive": False,
                "status": NODE | {"cause": cause, "time": T0 + 30},
                "blame": blame,
            }
        return event

    _, pic = play(seconds=50, change=killed)
    assert pic.why == "gpu-2: exited 1: rank 9 (GPU 1) was killed by SIGKILL"
    assert re.fullmatch(r"e shows the first error; .*; `\S+ logs --run \S+ --rank 9` shows its log", pic.advice)
    failed_at = 50 - pic.training.phase_s
    assert failed_at == pytest.approx(41, abs=2)  # as it was decided, not when the parts of other hosts ended


def test_a_failed_host_and_a_restart():
    def killed(event):
        if "frame" in event and event["t"] > T0 + 60:
            mine = {"kind": "rank killed", "rank": 9, "signal": 9}
            lost = {"kind": "lost peer", "rank": 0, "exit_code": 1, "phase": "train"}
            status = NODE | {"cause": mine if event["host"] == "gpu-2" else lost}
            event["frame"]["run"] |= {"alive": False, "status": status}
        return event

    _, pic = play(seconds=70, change=killed)
    assert (pic.verdict, pic.exit_code, pic.training.phase) == ("FAILED", 3, "FAILED")
    assert pic.why == "gpu-2: exited 1: rank 9 was killed by SIGKILL"
    _, whole = play(seconds=simulate.LENGTH_S)
    assert (whole.training.attempt, whole.training.phase, whole.verdict) == (2, "TRAINING", "HEALTHY")
    assert whole.training.step == 1209
    assert "llama-405b: attempt 2 began" in [event.text for event in whole.events]


def test_sockets_are_said():
    def socket(event):
        if "frame" in event:
            event["frame"]["run"]["net"] = "SOCKET"
        return event

    _, pic = play(seconds=50, change=socket)
    assert (pic.training.network, pic.verdict, pic.why) == ("SOCKET", "DEGRADED", "training runs over TCP sockets")


def test_two_names_of_one_machine_count_its_gpus_once():
    def one(event):
        event["frame"]["machine"] = "m"
        return event

    _, pic = play(2, seconds=3, change=one)
    assert (pic.gpus_seen, pic.gpus_expected) == (8, 8)


def test_the_schema_is_documented():
    text = (ROOT / "docs/cluster-top-json.md").read_text()
    for kind in (
        picture.ClusterView,
        picture.HostRow,
        picture.GpuCell,
        picture.RankRow,
        picture.ProcessRow,
        picture.TrainingStatus,
        picture.ClusterEvent,
    ):
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in text, f"{kind.__name__}.{field.name}"


def leaves(value, path=()):
    """The path of everything inside a frame; of a list its first item."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in inside:
        yield from leaves(item, (*path, key))


def broken(frame, path, value):
    """A copy with another value at a path; DROP: without it."""
    frame = at = as_sent(frame)
    if not path:
        return value
    for key in path[:-1]:
        at = at[key]
    if value == "DROP":
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return frame


@pytest.mark.parametrize(("told", "shown"), [(5.5, 5.5), (0.0, None), (-1.0, None)])
def test_the_plan_tells_what_a_step_was_expected_to_take(told, shown):
    def change(event):
        if "nodes" in (event.get("frame", {}).get("run") or {}):
            event["frame"]["run"]["expected_step_s"] = told
        return event

    assert play(change=change)[1].training.expected_step_s == shown


@pytest.mark.slow
def test_no_frame_however_broken_ends_it():
    events = [event for event in simulate.simulate_incident(2, seconds=60) if "frame" in event]
    full, after = events[-4]["frame"], events[-2]["frame"]
    full["run"] |= {"nccl": {"NCCL_IB_HCA": "mlx5"}, "nodes": [["gpu-1", 0, 8], ["gpu-2", 8, 8]]}
    paths = list(leaves(full))
    assert len(paths) > 60
    refused = 0
    for number, path in enumerate(paths):
        for place, value in enumerate(
            (
                None,
                "x",
                " ",
                "²",
                "9" * 5000,
                "\x1b]2;x\x07\n",
                -1,
                0,
                1e300,
                NAN,
                -INF,
                True,
                [],
                {},
                [[]],
                "DROP",
            )
        ):
            cluster = ClusterState(["gpu-1"], 2.0)
            cluster.take_frame("gpu-1", broken(full, path, value), T0)
            first = look(cluster, T0)
            opened = ["all", (*VIEWS[1:], "host", "rank")[(number + place) % 7]]
            trends = Trends()
            trends.take(first, cluster.steps())
            context = panels.render_context(first, trends, Ui(path=opened[: 1 + place % 2]), [])
            lines = panels.draw_screen(context, 120, 40) + panels.draw_listing(first, Ui(), 120)
            assert not any(CONTROLS.search(line.plain) or "\n" in line.plain for line in lines)
            json.dumps(dataclasses.asdict(first), allow_nan=False)
            cluster.take_frame("gpu-1", after, T0 + 2)
            assert look(cluster, T0 + 2).hosts[0].state == HostState.OK
            refused += first.hosts[0].state == HostState.DOWN
            assert first.hosts[0].state in picture.SEVERITY, path
    assert refused > len(paths)


def test_a_frame_that_cannot_be_read_is_named():
    cluster = ClusterState(["a"], 2.0)
    cluster.take_frame("a", {"now": "soon"}, T0)
    assert (
        look(cluster, T0).why
        == "a: DOWN its sampler sends frames that cannot be read (frame.now: expected `float`, got `str`)"
    )


def test_a_hang_is_seen_where_nvidia_smi_hangs_too():
    def hangs(event):
        if "frame" in event and event["host"] == "gpu-3" and event["t"] > T0 + simulate.HUNG:
            event["frame"]["smi"] |= {
                "text": event["frame"]["smi"]["text"].replace(" 13", " 67"),
                "hung_s": event["t"] - T0 - simulate.HUNG,
            }
        return event

    _, pic = play(seconds=simulate.HUNG + 75, change=hangs)
    assert (pic.verdict, row(pic, "gpu-3").state) == ("HUNG", "HUNG")
    assert row(pic, "gpu-3").gpus[0].power_w is None  # what it said before it hung is not what is


def test_who_waits_for_a_frozen_host_is_not_the_one_that_hangs():
    def frozen(event):
        return None if event["host"] == "gpu-3" and event["t"] > T0 + simulate.HUNG - 2 else event

    _, pic = play(seconds=simulate.HUNG + 80, change=frozen)
    assert pic.verdict == "HUNG"
    assert re.match(r"gpu-3: no frame for \d+ s; the others wait for it, as gpu-1 does: rank 1 is silent", pic.why)
    assert row(pic, "gpu-3").state == HostState.STALE
    assert row(pic, "gpu-1").state == HostState.OK


def test_a_log_line_now_and_then_does_not_end_a_hang():
    def talks(event):
        if "frame" in event and event["t"] > T0 + simulate.HUNG:
            event["frame"]["run"]["log_age_s"] = (event["t"] - T0) % 60
        return event

    _, pic = play(seconds=simulate.HUNG + 99, change=talks)
    assert pic.verdict == "HUNG"
    told = [event.text for event in pic.events if "HUNG" in event.text]
    assert len(told) == 1  # and it does not come and go


def test_a_slow_nvidia_smi_is_not_a_missing_driver():
    cluster = ClusterState(["a"], 2.0)
    frames = [event["frame"] for event in simulate.simulate_incident(1, seconds=50) if "frame" in event]
    cluster.take_frame("a", frames[0] | {"smi": {"text": None, "hung_s": 1.0}}, T0)
    first = look(cluster, T0)
    assert (first.hosts[0].state, first.hosts[0].has_gpu, first.hosts[0].notes) == (HostState.OK, True, ())
    cluster.take_frame("a", frames[1], T0 + 2)
    assert look(cluster, T0 + 2).gpus_seen == 8
    cluster.take_frame("a", frames[2] | {"smi": {"text": None, "hung_s": 3.0}}, T0 + 4)
    assert look(cluster, T0 + 4).gpus_seen == 8
    cluster.take_frame("a", frames[3] | {"smi": {"text": None, "hung_s": 0.0}}, T0 + 6)
    assert look(cluster, T0 + 6).hosts[0].state == HostState.NO_DRIVER


def test_a_port_that_went_down_stays_down():
    cluster = ClusterState(["a"], 2.0)
    frame = next(event["frame"] for event in simulate.simulate_incident(1) if "frame" in event)
    down = as_sent(frame)
    down["ib"][3]["state"] = "1: DOWN"
    cluster.take_frame("a", frame, T0)
    for moment in range(2, 2000, 50):
        cluster.take_frame("a", down, T0 + moment)
    assert look(cluster, T0 + 1953).hosts[0].notes == ("mlx5_3/1 is down",)


def test_the_run_that_lives_is_shown_and_stays_when_it_fails():
    cluster = ClusterState(["a", "b"], 2.0)
    frame = next(event["frame"] for event in simulate.simulate_incident(1) if "frame" in event)
    lives = frame["run"] | {"name": "A", "created": 10.0, "nodes": [["a", 0, 8]]}
    ended = {"alive": False, "status": NODE}
    dead = frame["run"] | ended | {"name": "B", "created": 20.0, "nodes": [["b", 0, 24]], "beats": []}
    cluster.take_frame("a", frame | {"run": lives}, T0)
    cluster.take_frame("b", frame | {"run": dead}, T0)
    shown = look(cluster, T0).training
    assert (shown.run, shown.world) == ("A", 8)
    cluster.take_frame("a", frame | {"run": lives | ended}, T0 + 2)
    cluster.take_frame("b", frame | {"run": dead}, T0 + 2)
    shown = look(cluster, T0 + 2).training
    assert (shown.run, shown.world, shown.phase) == ("A", 8, "FAILED")


def test_nobody_heard_is_nothing_known():
    cluster, _ = play(seconds=50)
    run = look(cluster, T0 + 400).training
    assert (run.phase, run.eta_s, run.tokens_per_s, run.mfu_pct) == ("UNKNOWN", None, None, None)
    cluster = ClusterState(["a"], 2.0)
    cluster.set_link("a", "OK", "", T0)
    assert look(cluster, T0 + 5).hosts[0].state == HostState.CONNECTING
    assert look(cluster, T0 + 60).hosts[0].why == "no frame since it was reached 60 s ago"
    cluster.requested_run = "nosuch"
    cluster.set_link("a", "OK", "", T0)
    cluster.take_frame("a", next(simulate.simulate_incident(1))["frame"] | {"run": None}, T0 + 61)
    assert look(cluster, T0 + 61).why == "no host knows a run 'nosuch'"


def test_the_time_that_loading_takes_again_is_counted_anew():
    _, pic = play(seconds=simulate.RESTARTED + 12)
    assert pic.training.phase == "LOADING"
    assert pic.training.eta_s == pytest.approx(10, abs=2)


def test_tokenizing_tells_how_far_it_is_and_the_time_of_loading_is_counted_from_its_own_beginning():
    def first_data(event):
        for beat in event["frame"]["run"]["beats"] if "frame" in event else ():
            if event["t"] < T0 + 8:
                done = 0.3e9 + 0.1e9 * (event["t"] - T0)
                beat |= {"phase": "data", "done_bytes": 0, "total_bytes": 0}
                if beat["rank"] == 0:
                    beat |= {"done_bytes": int(done), "total_bytes": int(3e9)}
            elif beat["phase"] == "load":  # it takes 24 s
                beat["done_bytes"] = int(beat["total_bytes"] * (event["t"] - T0 - 8) / 24)
        return event

    _, pic = play(seconds=7, change=first_data)
    run = pic.training
    assert (run.phase, run.total_bytes) == ("LOADING", 3e9)
    assert run.eta_s == pytest.approx((run.total_bytes - run.done_bytes) / 0.1e9, rel=0.05)
    _, pic = play(seconds=14, change=first_data)
    assert pic.training.eta_s == pytest.approx(24 - (pic.time - T0 - 8), rel=0.05)


def test_the_rank_that_keeps_the_others_waiting_is_named():
    def slow(event):
        for beat in event["frame"]["run"]["beats"] if "frame" in event else ():
            if beat["rank"] == 19:
                beat["optimizer_s"] = 2.4
        return event

    _, pic = play(seconds=50, change=slow)
    assert row(pic, "gpu-3").notes == ("rank 19: clipping and update took 2.40 s (median 0.60)",)
    assert [host.name for host in pic.hosts if host.notes] == ["gpu-3"]

    def unknown(event):
        for beat in event["frame"]["run"]["beats"] if "frame" in event else ():
            del beat["data_s"], beat["optimizer_s"]
        return event

    _, pic = play(seconds=50, change=unknown)
    assert (pic.verdict, row(pic, "gpu-1").ranks[0].data_s) == ("HEALTHY", None)


def test_hosts_are_told_with_which_run_to_stay_until_it_is_over():
    frame = next(event["frame"] for event in simulate.simulate_incident(1) if "frame" in event)
    run = frame["run"] | {"name": "A", "created": 10.0, "nodes": [["a", 0, 8]], "others": ["B"]}

    def stay(seconds, **now):
        cluster.take_frame("a", frame | {"run": run | now}, T0 + seconds)
        cluster.advance(T0 + seconds)
        return cluster.run, cluster.followed_run

    for end in (NODE, None):  # it failed, or its host lost it: its guard may bring it back
        cluster = ClusterState(["a"], 2.0)
        stay(0)
        assert stay(2) == ("A", "A")
        assert stay(40, alive=False, status=end) == ("A", "A")
        assert stay(80, alive=False, status=end) == ("A", "")
        assert stay(82, name="B", created=20.0, alive=True, others=[]) == ("B", "")
        assert stay(84, name="B", created=20.0, alive=True, others=[]) == ("B", "B")
    cluster = ClusterState(["a"], 2.0)
    stay(0)
    ended = {"alive": False, "status": NODE | {"state": "exited", "exit_code": 0, "cause": None}}
    assert stay(2, **ended, others=[]) == ("A", "A")  # nothing else lives
    assert stay(4, **ended) == ("A", "")
    assert stay(6) == ("A", "A")  # it was launched again


def test_what_is_stayed_with_is_said_to_every_sampler_at_once():
    said = queue.Queue()

    class Stream:
        def __iter__(self):
            yield from ()

        def send(self, text):
            said.put(text)

        def close(self):
            pass

    with FakeFleet(("a",)) as fleet:
        live = LiveSource(fleet, None, 2.0)
        live.streams["a"] = Stream()
        live.follow_run("A")
        assert said.get(timeout=120) == '{"stay": "A"}\n'
        live.follow_run("A")
        live.follow_run("")
        assert said.get(timeout=120) == '{"stay": ""}\n'
        live.close()
