"""What launch refuses and what doctor lists are the same findings, in the same words."""

import dataclasses
from pathlib import Path

import pytest

from llama405b.contract.checkpoints import is_nearly_full
from llama405b.settings import command
from llama405b_tools.agent.launch_facts import LaunchFacts
from llama405b_tools.agent.machine import DirectoryCheck, DirectoryFault
from llama405b_tools.agent.messages import DiskSpace
from llama405b_tools.hosts.fleet import Fleet, command_to_type, program_name
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.launch import host_rules, preflight
from llama405b_tools.launch.findings import BAD, Finding, full_disk
from llama405b_tools.launch.host_facts import (
    UNKNOWN_ENVIRONMENT,
    UNKNOWN_IDENTITY,
    Disks,
    Filesystem,
    HostFacts,
    TmuxLimits,
)
from llama405b_tools.launch.host_rules import Requirements
from llama405b_tools.launch.request import parse_launch
from llama405b_tools.parsers import Rdma, SmiAnswer, parse_smi
from llama405b_tools.run.query import disk_words
from llama405b_tools.top.state import verdicts
from llama405b_tools.top.state.frames import NO_FRAME

GOOD = LaunchFacts(
    versions={}, tmux=True, tmux_fault="", ip=True, run_exists=False, attempt=0, owner="", alive=False, others=(), leftovers=(),
    machine="m", gpus=0, rdma=Rdma(), cores=2, port_fault="", port_in_use=False, own=(), head={}, workdir="/w",
    run_place=DirectoryCheck("/w"), places={}, free_bytes=1 << 40, free_files=None, input_fault="",
)  # fmt: skip
GPUS = "".join(f"{i}, H100\n" for i in range(7))
BROKEN = GPUS.replace("6, H100", "6, [Unknown Error]")
FAULT = parse_smi(BROKEN, ("index", "name"))[0][6].fault


def smi(text):
    return {"gpus": SmiAnswer(smi=text, fields=("index", "name"), dmesg_readable=True), "slots": 8}


def disks(**more):
    return {"disks": Disks((Filesystem(**{"free": 1 << 40, "path": "/w"} | more),), ())}


def tools(**has):
    return {"identity": dataclasses.replace(UNKNOWN_IDENTITY, tools=has)}


def packages(**versions):
    versions = {"torch": "2.13.0", "transformers": "5.23.0", "llama405b": "1"} | versions
    return {"environment": dataclasses.replace(UNKNOWN_ENVIRONMENT, workdir_exists=True, packages=versions)}


def place(fault, **more):
    return {"run_place": DirectoryCheck("/w", fault, "/w", **more)}


@pytest.mark.parametrize(
    ("to_launch", "to_doctor"),
    [
        ({"tmux": False}, tools(tmux=False)),
        ({"ip": False}, tools(ip=False)),
        ({"versions": {"torch": "missing"}}, packages(torch="missing")),
        ({"free_bytes": 63 << 20}, disks(free=63 << 20)),
        ({"free_files": 999}, disks(free_files=999)),
        ({"gpus": 7}, smi(GPUS)),
        ({"gpus": 6, "gpu_fault": f"GPU 6: {FAULT}"}, smi(BROKEN)),
    ],
)
def test_doctor_and_launch_say_the_same(to_launch, to_doctor):
    request = parse_launch(["hosts", "--run", "r", "--model.path", "m", "--data.paths", "x"], 0.0)
    refused = preflight.unfit_hosts(
        request, [Host("a", "hosts:1", slots=8)], {"a": dataclasses.replace(GOOD, **to_launch)}
    )
    needs = Requirements(settings=command.parse(["--preset", "demo"]).config, command_format=f"{program_name()} {{}}")
    listed = host_rules.host_findings(HostFacts(**to_doctor), needs, is_head=False)
    assert refused["a"] in [str(each) for each in listed if each.level == BAD]


@pytest.mark.parametrize(
    ("to_launch", "to_doctor"),
    [
        ({"tmux_fault": "exit code 1"}, {"tmux": TmuxLimits(failed="exit code 1")}),
        (place(DirectoryFault.READ_ONLY), disks(read_only=True, writable=False)),
        (place(DirectoryFault.DENIED), disks(writable=False)),
        (place(DirectoryFault.REFUSES, why="rename files"), disks(refuses="rename files")),
    ],
)
def test_what_differs_is_what_was_asked_for_and_what_can_be_chosen(to_launch, to_doctor):
    request = parse_launch(["--run", "r", "--", "x.py"], 0.0)
    [refused] = preflight.host_findings(request, Host("a", "h:1"), dataclasses.replace(GOOD, **to_launch))
    [listed] = host_rules.host_findings(HostFacts(**to_doctor), Requirements(), is_head=False)
    assert refused.level == listed.level == BAD
    assert refused.what.replace("`tmux -V`: ", "") == listed.what


@pytest.mark.parametrize(
    ("free", "levels"),
    [(None, []), ((64 << 20) - 1, ["bad"]), (64 << 20, ["warning"]), ((1 << 30) - 1, ["warning"]), (1 << 30, [])],
)
def test_a_disk_that_launch_takes_is_not_bad(free, levels):
    assert [finding.level for finding in full_disk("/w", free, None)] == levels


@pytest.mark.parametrize(("free_gib", "total_gib"), [(0.9, 10), (1, 10), (19, 1000), (21, 1000)])
def test_doctor_the_guard_and_cluster_top_call_the_same_disks_nearly_full(free_gib, total_gib):
    free, total = int(free_gib * (1 << 30)), total_gib << 30
    listed = host_rules.host_findings(HostFacts(**disks(free=free, size=total)), Requirements(), is_head=False)
    guard = disk_words({"a": [DiskSpace("/w", free, total)]})
    frame = dataclasses.replace(NO_FRAME, disks=(("/w", free, total),))
    assert bool([*listed]) == bool(guard) == bool(verdicts.full_disks(frame)) == is_nearly_full(free, total)


def test_doctor_names_a_missing_directory_as_every_other_verb_does():
    gone = dataclasses.replace(UNKNOWN_ENVIRONMENT, workdir="/w")
    needs = Requirements(command_format=command_to_type("{}", Path("h")))
    listed = [str(each) for each in host_rules.host_findings(HostFacts(environment=gone), needs, is_head=False)]
    fault = Fleet([Host("a", "h:1", workdir="/w")]).explain_fault("a", "sh: 1: cd: can't cd to /w")
    assert str(fault) in listed


def test_a_finding_reads_as_a_clause():
    assert str(Finding(BAD, "what", "do it")) == "what; do it"
    assert str(Finding(BAD, "what, and what to do", "")) == "what, and what to do"
