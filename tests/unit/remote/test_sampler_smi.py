"""How the sampler and the probe bear with an nvidia-smi that misbehaves: bounded in size, time and number of processes."""

import json
import time

import pytest

from llama405b_tools.machine.gpus import read_smi
from llama405b_tools.remote import hostprobe, sampler

RETRY_S = 0.5
SHIM = """#!/bin/sh
echo $$ >>{here}/pids
case "$(cat {here}/mode) $*" in
endless*) exec yes "0, GPU-0, NVIDIA H100" ;;
hang*) sleep 600 & wait ;;
*compute-apps*) exit 0 ;;
*) echo "0, GPU-0, NVIDIA H100, 0:1:0.0, 1, 2, 3, 4, 5, 6, 7, 0, 570, 0x0" ;;
esac
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A function that puts nvidia-smi into a mode."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SHIM.format(here=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sampler, "SMI_WAIT_S", 0.1)
    return (tmp_path / "mode").write_text


def until(smi, condition):
    """Frames, until one is as wanted."""
    deadline = time.monotonic() + 60
    while not condition(state := frame(smi)):
        assert time.monotonic() < deadline, state
    return state


def frame(smi):
    smi.ask(True)
    return smi.state()


def test_an_answer_without_end_is_cut_and_named(smi):
    smi("endless")
    asked = sampler.Smi(RETRY_S)
    state = until(asked, lambda state: state["text"])
    assert (state["hung_s"], len(json.dumps(state)) < 1000) == (0.0, True)
    assert read_smi(state["text"], state["fields"]) == ([], "nvidia-smi: it prints more than 256 KiB")
    smi("ok")
    assert len(read_smi(*_answer(until(asked, lambda state: state["fields"])))[0]) == 1
    asked.end()


def _answer(state):
    return state["text"], state["fields"]


@pytest.mark.slow
def test_one_that_hangs_is_replaced_when_it_is_well_again(smi, tmp_path):
    smi("hang")
    asked = sampler.Smi(RETRY_S)
    until(asked, lambda state: state["hung_s"] > 1.5)  # through several queries
    assert len((tmp_path / "pids").read_text().split()) >= 2
    smi("ok")
    state = until(asked, lambda state: state["text"])
    assert (state["hung_s"], len(read_smi(*_answer(state))[0])) == (0.0, 1)
    asked.end()


@pytest.mark.slow
def test_processes_that_cannot_be_killed_do_not_pile_up(smi, tmp_path, monkeypatch):
    smi("hang")
    monkeypatch.setattr(sampler.Query, "kill", lambda query: None)  # the driver does not let go
    asked = sampler.Smi(RETRY_S)
    until(asked, lambda state: state["hung_s"] > 4 * RETRY_S + 0.5)
    assert (len(asked.stuck), asked.query) == (sampler.MOST_STUCK, None)
    assert len((tmp_path / "pids").read_text().split()) == sampler.MOST_STUCK
    monkeypatch.undo()
    for query in asked.stuck:
        query.kill()


def test_the_probe_bounds_every_command(smi):
    smi("endless")
    assert len(hostprobe.run(["nvidia-smi"])) == hostprobe.MOST_BYTES
    smi("hang")
    assert hostprobe.run(["nvidia-smi"], 0.5) == "TIMEOUT"
