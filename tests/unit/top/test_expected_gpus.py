"""How many GPUs a host is expected to have: what is really there, not what was once said."""

import pytest
import simulate

from llama405b_tools.top.state.cluster import ClusterState
from llama405b_tools.top.state.picture import HostState

T0 = simulate.BEGIN
FRAME = next(event["frame"] for event in simulate.simulate_incident(1) if "frame" in event)
LINES = FRAME["smi"]["text"].splitlines(keepends=True)


def many(count, own=LINES):
    """nvidia-smi's answer with this many valid lines, the first of them those of the host's own GPUs."""
    words = LINES[0].split(", ", 2)[2]
    return "".join([*own, *(f"{i % 10_000}, GPU-false-{i}, {words}" for i in range(count - len(own)))])


def seen(*answers, pci_gpus=(8,), machines=(), slots=0):
    """The picture after frames with these answers; of ``pci_gpus`` the last holds on."""
    cluster = ClusterState(["gpu-1"], 2.0)
    for i, text in enumerate(answers):
        machine = machines[i] if machines else "m"
        smi = {"smi": FRAME["smi"] | {"text": text}, "slots": slots}
        cluster.take_frame("gpu-1", FRAME | smi | {"pci_gpus": pci_gpus[: i + 1][-1], "machine": machine}, T0 + 2 * i)
        cluster.advance(T0 + 2 * i)
    return cluster.make_view()


def test_megabytes_of_valid_lines_are_not_believed_and_leave_nothing():
    flood = many(39_086)
    pic = seen(*["".join(LINES)] * 2, flood)
    assert (pic.gpus_seen, pic.gpus_expected, pic.hosts[0].state) == (0, 8, HostState.NO_DRIVER)
    pic = seen(*["".join(LINES)] * 2, flood, flood, "".join(LINES))
    assert (pic.gpus_seen, pic.gpus_expected, pic.hosts[0].notes) == (8, 8, ())


@pytest.mark.parametrize(("count", "pci_gpus", "answers"), [(40, (0,), 1), (40, (8,), 3), (200, (0,), 3)])
def test_false_gpus_are_forgotten(count, pci_gpus, answers):
    pic = seen(*["".join(LINES)] * 2, *[many(count)] * answers, "".join(LINES), pci_gpus=pci_gpus)
    assert (pic.gpus_seen, pic.gpus_expected, pic.hosts[0].notes) == (8, 8, ())


@pytest.mark.parametrize(
    ("text", "slots", "pci_gpus", "seen_gpus", "expected", "state"),
    [
        ("".join(LINES[:7]), 8, 7, 7, 8, HostState.OK),
        ("".join(LINES[:7]), 0, 7, 7, 7, HostState.OK),
        ("", 8, 0, 0, 8, HostState.NO_DRIVER),
        (None, 8, 0, 0, 0, HostState.OK),  # it trains on CPUs
    ],
)
def test_a_host_should_have_as_many_gpus_as_slots_if_it_has_any(text, slots, pci_gpus, seen_gpus, expected, state):
    pic = seen(text, text, pci_gpus=(pci_gpus,), slots=slots)
    assert (pic.gpus_seen, pic.gpus_expected, pic.hosts[0].state) == (seen_gpus, expected, state)
    assert ("1 of 8 GPUs are lost" in pic.hosts[0].notes) == (seen_gpus < expected and seen_gpus > 0)


def test_gpus_are_known_by_their_uuids():
    pic = seen("".join(LINES * 3))
    assert (pic.gpus_seen, pic.gpus_expected) == (8, 8)
    pic = seen(*["".join(LINES)] * 2, *[many(8, own=[])] * 2)  # others replace them
    assert (pic.gpus_seen, pic.gpus_expected, pic.hosts[0].notes) == (8, 8, ())


@pytest.mark.parametrize("pci_gpus", [(0,), (8,), (8, 8, 7)])
def test_a_lost_gpu_is_missed_until_the_machine_starts_again_without_it(pci_gpus):
    rest = "".join(LINES[:7])
    pic = seen("".join(LINES), "".join(LINES), *[rest] * 9, pci_gpus=pci_gpus)
    assert pic.hosts[0].notes == ("1 of 8 GPUs are lost",)
    pic = seen("".join(LINES), "".join(LINES), rest, rest, pci_gpus=(0, 0, 7), machines="mmnn")
    assert (pic.gpus_seen, pic.gpus_expected, pic.hosts[0].notes) == (7, 7, ())
