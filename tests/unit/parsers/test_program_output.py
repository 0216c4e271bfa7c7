"""The output of macOS's ps, written in the form that its manual describes: it has not been recorded there yet."""

import os

import pytest

from llama405b_tools import parsers
from llama405b_tools.agent import processes

RUNNING, NEXT_SECOND = "Ss   Sun Nov  9 08:01:33 2026    \n", "S+   Sun Nov  9 08:01:34 2026    \n"


@pytest.mark.parametrize("text", ["", "\n", "Z    Sun Nov  9 08:01:33 2026\n", "ps: illegal option -- x\n"])
def test_a_process_that_is_gone_has_no_start_time(text):
    assert parsers.parse_ps_start(text) is None


def test_a_start_time_tells_processes_apart():
    assert parsers.parse_ps_start(NEXT_SECOND) - parsers.parse_ps_start(RUNNING) == 1


def test_a_mac_knows_its_processes_from_ps(tmp_path, monkeypatch):
    (tmp_path / "ps").write_text(f'#!/bin/sh\n[ "$*" = "-o stat=,lstart= -p 7" ] && echo "{RUNNING.strip()}"\n')
    (tmp_path / "ps").chmod(0o755)
    monkeypatch.setattr(processes.sys, "platform", "darwin")
    monkeypatch.setattr(os, "defpath", str(tmp_path))
    assert processes.is_same_process(7, parsers.parse_ps_start(RUNNING))
    assert processes.start_time(8) is None


@pytest.mark.parametrize(
    ("text", "load"),
    [("3.0 2.0 1.0 1/99 7\n2\n", 1.5), ("", 1.0), ("cat: /proc/loadavg: No such file\n", 1.0), ("3.0\n0\n", 1.0)],
)
def test_an_odd_load_is_taken_for_none(text, load):
    assert parsers.load_per_core(text) == load
