import dataclasses
import json
import os
import subprocess

import pytest

from llama405b.contract.errors import UserError
from llama405b.contract.plan import Node, Plan, check_run_name, plan_from_json
from llama405b_tools.hosts.fleet import agent_command
from llama405b_tools.machine.sameness import disagreements
from llama405b_tools.remote.tmux import tmux_session
from llama405b_tools.remote.torchrun import torchrun_argv
from llama405b_tools.run.plan import device_env, first_ranks

NASTY = ("a b", "$HOME", "it's", '"q"', "semi;", "new\nline", "ü", "", "*", "-x", "`id`", "\\")


def plan(program=("-m", "llama405b.train")):
    nodes = tuple(
        Node(name, slots, first, "/w", "/py", f"10.0.0.{i}", "eth0", {"A": "1"})
        for i, (name, slots, first) in enumerate((("a", 8, 0), ("b", 4, 8)))
    )
    return Plan("r", 1, 0.0, "r-1-x", "10.0.0.0:2000", tuple(program), ("HF_TOKEN",), nodes)


def test_plan_survives_json():
    before = plan(NASTY)
    assert plan_from_json(json.loads(json.dumps(dataclasses.asdict(before)))) == before


def test_only_the_head_hosts_the_store_and_the_program_is_unchanged():
    head, other = (torchrun_argv(plan(NASTY), name, "/logs") for name in "ab")
    assert "--rdzv-conf=is_host=1,read_timeout=120" in head
    assert "--rdzv-conf=is_host=0,read_timeout=120" in other
    assert "--nproc-per-node=8" in head
    assert tuple(head[-len(NASTY) :]) == NASTY


def test_torchrun_takes_the_arguments():
    """torchrun's own parser reads what is planned."""
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(torchrun_argv(plan(("-m", "pkg.mod", "--its-own", "x y")), "b", "/logs")[3:])
    assert args.module
    assert (args.training_script, args.training_script_args) == ("pkg.mod", ["--its-own", "x y"])
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend, args.max_restarts) == ("2", "4", "c10d", 0)


def test_agent_command_survives_a_real_shell(tmp_path):
    directory = tmp_path / "it's a dir; $HOME"
    directory.mkdir()
    fake = directory / "py thon"
    fake.write_text('#!/bin/sh\npwd\nprintf "%s|" "$@" "$PYTHONPATH"\n')
    fake.chmod(0o755)
    line = agent_command(str(fake), str(directory), "probe")
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == f"{directory}\n-m|llama405b_tools.remote.agent|probe|tools|"
    home = subprocess.run(
        ["sh", "-c", agent_command("pwd", "~/x y", "p").replace("exec pwd", "pwd;:")],
        capture_output=True,
        text=True,
        env=os.environ | {"HOME": str(tmp_path)},
        check=False,
    )
    assert "x y" in home.stderr  # ~ was expanded, and cd tried


def test_disjoint_devices_on_one_machine():
    nodes = [("m1", 2), ("m1", 2), ("m2", 4)]
    assert device_env(nodes, [4, 4, 4]) == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
        {},
    ]
    assert device_env([("m", 1), ("m", 1)], [0, 0]) == [{}, {}]
    with pytest.raises(UserError, match="5 ranks on a machine with 4 GPUs"):
        device_env([("m", 4), ("m", 1)], [4, 4])


def test_who_differs_from_the_majority():
    facts = {"a": {"torch": "2.13"}, "b": {"torch": "2.12"}, "c": {"torch": "2.13"}}
    assert disagreements(facts) == ["torch is 2.13 on most hosts, but b has 2.12"]
    assert disagreements({"a": {"x": "1"}, "b": {"x": "1"}}) == []


def test_names():
    assert tmux_session("10.0.0.1") == "10_0_0_1"
    assert first_ranks([8, 4, 8]) == [0, 8, 12]
    for bad in ("", "a/b", "-a", "a b", ".x", "x" * 101):
        with pytest.raises(UserError, match="--run: "):
            check_run_name(bad)
