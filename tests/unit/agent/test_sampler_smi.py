"""How the sampler and the probe bear with an nvidia-smi that misbehaves: bounded in size, time and number of processes."""

import json

import pytest

from llama405b_tools.agent import hostprobe, sampler
from llama405b_tools.parsers import parse_smi
from ops_rig import wait_for

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
    return wait_for(lambda: condition(state := frame(smi)) and state)


def frame(smi):
    smi.start_query(True)
    return smi.state()


def test_an_answer_without_end_is_cut_and_named(smi):
    smi("endless")
    asked = sampler.Smi(RETRY_S)
    state = until(asked, lambda state: state["text"])
    assert (state["hung_s"], len(json.dumps(state)) < 1000) == (0.0, True)
    assert parse_smi(state["text"], state["fields"]) == ([], "nvidia-smi: printed more than 256 KiB")
    smi("ok")
    assert len(parse_smi(*_answer(until(asked, lambda state: state["fields"])))[0]) == 1
    asked.end()


def _answer(state):
    return state["text"], state["fields"]


@pytest.mark.slow
def test_one_that_hangs_is_replaced_when_it_is_well_again(smi, tmp_path):
    smi("hang")
    asked = sampler.Smi(RETRY_S)
    state = until(asked, lambda _: begun(tmp_path) > 1)  # the first was replaced
    assert state["hung_s"] >= RETRY_S
    smi("ok")
    state = until(asked, lambda state: state["text"])
    assert (state["hung_s"], len(parse_smi(*_answer(state))[0])) == (0.0, 1)
    asked.end()


def begun(tmp_path):
    """How many processes began."""
    return len((tmp_path / "pids").read_text().split()) if (tmp_path / "pids").exists() else 0


def test_a_query_that_was_killed_asks_nothing_more(monkeypatch):
    asked = []

    def run(query, args):
        asked.append(args)
        query.kill()
        return ""

    monkeypatch.setattr(sampler.SmiQuery, "_run", run)
    assert sampler.SmiQuery(list(sampler.REASONS), True).done.wait(60)
    assert len(asked) == 1


@pytest.mark.slow
def test_processes_that_cannot_be_killed_do_not_pile_up(smi, tmp_path, monkeypatch):
    smi("hang")
    monkeypatch.setattr(sampler.SmiQuery, "kill", lambda query: None)  # the driver does not let go
    asked = sampler.Smi(RETRY_S)
    until(asked, lambda _: len(asked.stuck_queries) == sampler.MAX_STUCK)
    wait_for(lambda: begun(tmp_path) == sampler.MAX_STUCK)
    frame(asked)
    assert (len(asked.stuck_queries), asked.query) == (sampler.MAX_STUCK, None)
    monkeypatch.undo()
    for query in asked.stuck_queries:
        query.kill()


def test_the_probe_bounds_every_command(smi):
    smi("endless")
    assert len(hostprobe.run(["nvidia-smi"])) == hostprobe.MAX_OUTPUT_BYTES
    smi("hang")
    assert hostprobe.run(["nvidia-smi"], 0.5) == "TIMEOUT"
