"""Numbers that cannot be true are unknown, never shown as they were said."""

import pytest
import simulate
from situations import as_sent

from llama405b.contract import reader
from llama405b.contract.reader import MalformedError
from llama405b.contract.records import Heartbeat, Metrics
from llama405b_tools.top.state.cluster import ClusterState

T0 = simulate.BEGIN


def play(change, seconds=50.0):
    """The first host, and the run, after so much of the incident; ``change`` edits the host's frames."""
    cluster = ClusterState(["gpu-1"], 2.0)
    for event in simulate.simulate_incident(1, seconds=seconds):
        if "frame" in event:
            frame = as_sent(event["frame"])
            change(frame)
            cluster.take_frame("gpu-1", frame, event["t"])
            last = event["t"]
    cluster.advance(last)
    pic = cluster.make_view()
    return pic.hosts[0], pic.training


def metrics(frame, **new):
    for each in frame["run"]["metrics"]:
        each |= new


@pytest.mark.parametrize("new", [{"step": -5}, {"step_s": -6.0}, {"data_s": -1.0}, {"tokens_per_s": -1.0}])
def test_steps_that_cannot_be(new):
    _, run = play(lambda frame: metrics(frame, **new))
    assert (run.step, run.losses, run.step_s) == (None, (), None)


@pytest.mark.parametrize("max_steps", [-5, 10])
def test_a_run_is_never_further_than_its_end(max_steps):
    _, run = play(lambda frame: frame["run"].update(max_steps=max_steps))
    assert (run.step, run.steps, run.eta_s) == (1184, None, None)


def test_more_flops_than_the_gpus_have():
    _, run = play(lambda frame: metrics(frame, tokens_per_s=1e6))
    assert run.mfu_pct is None


def test_a_rank_at_a_negative_step():
    host, _ = play(lambda frame: [beat.update(step=-5) for beat in frame["run"]["beats"] if beat["rank"] == 3])
    assert [rank.rank for rank in host.ranks] == [0, 1, 2, 4, 5, 6, 7]


def test_more_weights_than_there_are():
    def change(frame):
        for beat in frame["run"]["beats"]:
            beat["done_bytes"] = 10 * beat["total_bytes"]

    _, run = play(change, 14)
    assert (run.done_bytes, run.total_bytes) == (None, None)


GPU = "0, GPU-0, NVIDIA H100 80GB HBM3, 0:1:0.0, {util}, {used}, 81559, {temperature}, {power}, 700.00, {clock}, 0, 570, 0x0\n"
WELL = {"util": "99", "used": "70112", "temperature": "64", "power": "671.28", "clock": "1980"}


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"util": "1000"}, "utilization"),
        ({"util": "-1"}, "utilization"),
        ({"used": "99999"}, "used_mib"),
        ({"temperature": "-40"}, "temperature_c"),
        ({"temperature": "4000"}, "temperature_c"),
        ({"power": "7000.00"}, "power_w"),
        ({"power": "-3"}, "power_w"),
        ({"clock": "-1"}, "clock_mhz"),
    ],
)
def test_a_gpu_that_says_so(said, field):
    host, _ = play(lambda frame: frame["smi"].update(text=GPU.format(**WELL | said)))
    assert getattr(host.gpus[0], field) is None
    others = {"utilization", "used_mib", "temperature_c", "power_w", "clock_mhz"} - {field}
    assert None not in {getattr(host.gpus[0], each) for each in others}


def test_a_processor_and_its_memory():
    def change(frame):
        frame["cpu"]["idle"] = -10 * frame["cpu"]["total"]
        frame["memory"]["available"] = 10 * frame["memory"]["total"]

    host, _ = play(change)
    assert (host.cpu_pct, host.ram_used_bytes) == (None, None)


def test_a_process_that_used_less_than_before_or_more_than_all_cores():
    def change(frame):
        for i, process in enumerate(frame.get("procs") or ()):
            process[2] = [-1, 10**7][i % 2] * int(frame["now"] - T0)

    host, _ = play(change)
    assert {process.cpu_pct for process in host.processes} == {None}


@pytest.mark.parametrize("kind", [Heartbeat, Metrics])
def test_the_records_themselves(kind):
    sound = {
        Heartbeat: Heartbeat(0, "a", 1, 0.0, 7, "train", 0.0),
        Metrics: Metrics(7, 0.0, 2.0, 1.0, 1e-5, 8, 8.0, 1.0, 0.0, 0.5, 0.4, 0.1),
    }[kind]
    text = reader.dumps(sound)
    assert reader.loads(kind, text, "it").step == 7
    with pytest.raises(MalformedError, match="negative"):
        reader.loads(kind, text.replace('"step":7', '"step":-5'), "it")
