import dataclasses
import json
import os
import subprocess

import pytest

from llama405b.contract import reader
from llama405b.contract.errors import UserError
from llama405b.contract.software import LOADER
from llama405b.spec.plan import OWN_THREADS, Node, Plan, check_run_name
from llama405b_tools.agent.processes import node_env, tmux_session, torchrun_argv
from llama405b_tools.hosts import transport
from llama405b_tools.hosts.fleet import AGENT, Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import list_disagreements
from llama405b_tools.launch import request
from llama405b_tools.launch.placement import HostSpec, LaunchSpec, RunSpec, build_plan, first_ranks
from llama405b_tools.parsers import Rdma, RdmaPort

NASTY = ("a b", "$HOME", "it's", '"q"', "semi;", "new\nline", "ü", "", "*", "-x", "`id`", "\\")


def plan(program=("-m", "llama405b.train")):
    nodes = tuple(
        Node(name, slots, first, "/w", "/py", f"10.0.0.{i}", "eth0", {"A": "1"})
        for i, (name, slots, first) in enumerate((("a", 8, 0), ("b", 4, 8)))
    )
    return Plan("r", 1, 0.0, "r-1-x", "10.0.0.0:2000", tuple(program), ("HF_TOKEN",), nodes)


def test_plan_survives_json():
    before = plan(NASTY)
    for text in (json.dumps(dataclasses.asdict(before)), reader.dumps(before)):
        assert reader.loads(Plan, text, "plan.json") == before


def test_only_the_head_hosts_the_store_and_the_program_is_unchanged():
    head, other = (torchrun_argv(plan(NASTY), name, "/logs") for name in "ab")
    assert "--rdzv-conf=is_host=1,read_timeout=120" in head
    assert "--rdzv-conf=is_host=0,read_timeout=120" in other
    assert "--nproc-per-node=8" in head
    assert tuple(head[-len(NASTY) :]) == NASTY


@pytest.mark.parametrize("before", [(), ("-m",), ("--no-python",)])
def test_no_flag_of_torchruns_own_and_no_beginning_of_one_is_taken_from_a_program(before):
    from torch.distributed.run import get_args_parser

    def parsed(*own):
        found = vars(get_args_parser().parse_args(torchrun_argv(plan((*before, "its.name", *own)), "b", "/logs")[4:]))
        return found.pop("training_script"), found.pop("training_script_args"), found

    flags = {flag for action in get_args_parser()._actions for flag in action.option_strings}
    begun = {flag[:n] for flag in flags for n in range(2, len(flag) + 1)}
    assert {"--", "--run", "--log", "--master", "--start", "--nnodes", "-m", "-h"} <= begun
    _, _, alone = parsed()
    assert [flag for flag in sorted(begun) if parsed(flag, "x", "--") != ("its.name", [flag, "x", "--"], alone)] == []
    both = [word for flag in sorted(flags) for word in (f"{flag}=x", flag)]
    assert parsed(*both) == ("its.name", both, alone)


def test_the_users_own_cache_of_models_is_left_alone():
    assert "HF_HOME" not in node_env(plan(), "a", "/w/runs/r")
    places = dataclasses.replace(plan().nodes[0], env={"HF_HOME": "/nvme/hf"})  # cache= in the hosts file
    assert node_env(dataclasses.replace(plan(), nodes=(places,)), "a", "/w/runs/r")["HF_HOME"] == "/nvme/hf"
    assert "HF_HOME" in transport.INHERITED_VARIABLES  # what reaches a host that is this machine


def test_torchrun_takes_the_arguments():
    """torchrun's own parser reads what is planned."""
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(torchrun_argv(plan(("-m", "pkg.mod", "--its-own", "x y")), "b", "/logs")[4:])
    assert args.module
    assert (args.training_script, args.training_script_args) == ("pkg.mod", ["--its-own", "x y"])
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend, args.max_restarts) == ("2", "4", "c10d", 0)
    its_own = (
        "--monitor-interval",
        "5",
        "-m",
        "pkg.mod",
        "--more",
        "x",
    )  # torchrun's flags before the program stay its own
    assert tuple(torchrun_argv(plan(its_own), "b", "/logs")[-len(its_own) - 1 :]) == ("--redirects=3", *its_own)


def test_torchrun_starts_our_modules_as_we_do_and_other_programs_as_they_are():
    from torch.distributed.run import get_args_parser

    def parsed(*program):
        args = get_args_parser().parse_args(torchrun_argv(plan(program), "b", "/logs")[4:])
        return args.no_python, args.module, args.training_script, args.training_script_args

    ours = ["-P", "-c", LOADER, "llama405b.train", "--run", "x"]
    assert parsed("-m", "llama405b.train", "--run", "x") == (True, False, "/py", ours)
    assert parsed("-m", "mine.train", "x") == (False, True, "mine.train", ["x"])
    assert parsed("random.py") == (False, False, "random.py", [])


def test_agent_command_survives_a_real_shell(tmp_path):
    def command(python, workdir, name):
        return Fleet([Host("a", "hosts:1", python=python, workdir=workdir)]).command("a", AGENT, [name])

    directory = tmp_path / "it's a dir; $HOME"
    directory.mkdir()
    fake = directory / "py thon"
    fake.write_text('#!/bin/sh\npwd\nprintf "%s|" "$@" "$PYTHONPATH"\n')
    fake.chmod(0o755)
    line = command(str(fake), str(directory), "probe")
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == f"{directory}\n-c|{LOADER}|llama405b_tools.agent.agent|probe||"
    home = subprocess.run(
        ["sh", "-c", command("pwd", "~/x y", "p").replace("exec pwd", "pwd;:")],
        capture_output=True,
        text=True,
        env=os.environ | {"HOME": str(tmp_path)},
        check=False,
    )
    assert "x y" in home.stderr  # ~ was expanded, and cd tried


def part(name, slots, machine, gpus, **more):
    more = {"rdma": Rdma(), "interface": "eth0"} | more
    return HostSpec(name, slots, machine, gpus, 16, workdir="/w", python="/py", address=f"10.0.0.{name}", **more)


def built(*parts, **terms):
    named = {"run": "r", "program": ("-m", "llama405b.train"), "env": {}, "secrets": ()} | terms
    return build_plan(RunSpec(**named), parts, LaunchSpec(3, 0.0, "0123abcd", "10.0.0.1:2000", "me@here"))


def devices(plan):
    return [node.env.get("CUDA_VISIBLE_DEVICES") for node in plan.nodes]


def test_a_plan_says_how_long_the_run_may_take_to_load():
    asked = request.parse_launch(["--model.path", "m", "--data.paths", "d", "--timeouts.load", "7"], 0.0)
    assert build_plan(asked.spec(), [part("1", 1, "m", 0)], LaunchSpec(1, 0.0, "0", "a:1", "me")).load_s == 7


def test_disjoint_devices_on_one_machine():
    parts = [part("1", 2, "m1", 4), part("2", 2, "m1", 4), part("3", 4, "m2", 4)]
    assert devices(built(*parts)) == ["0,1", "2,3", None]
    assert devices(built(part("1", 1, "m", 0), part("2", 1, "m", 0))) == [None, None]
    assert devices(built(*parts, on_cpu=True)) == ["", "", ""]
    with pytest.raises(UserError, match=r"a-\[1-2\] are the same machine: 5 ranks on 4 GPUs; keep one of them"):
        built(part("a-1", 4, "m", 4), part("a-2", 1, "m", 4))
    with pytest.raises(UserError, match="slots: 1: 5 ranks on 4 GPUs; lower slots="):
        built(part("1", 5, "m", 4))


def test_ranks_threads_and_the_users_own_variables():
    plan = built(part("1", 0, "m1", 8), part("2", 0, "m2", 0), env={"OMP_NUM_THREADS": "3"})
    assert [(node.slots, node.first_rank) for node in plan.nodes] == [(8, 0), (1, 8)]
    assert [node.env["OMP_NUM_THREADS"] for node in plan.nodes] == ["3", "3"]
    assert plan.nodes[0].env[OWN_THREADS] == "1"
    ours = built(part("1", 4, "m", 0), part("2", 4, "m", 0)).nodes[0].env
    assert (ours["OMP_NUM_THREADS"], OWN_THREADS in ours) == ("2", False)
    assert (plan.rdzv_id, plan.attempt, plan.owner) == ("r-3-0123abcd", 3, "me@here")
    assert built(part("1", 0, "m", 1, places={"scratch": "/nvme"})).nodes[0].env["TMPDIR"] == "/nvme"


def test_a_run_with_rdma_everywhere_refuses_sockets():
    port = RdmaPort("mlx5_0", 1, "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand", (), ())
    fast = [part(str(i), 0, f"m{i}", 8, rdma=Rdma((port,))) for i in (1, 2)]
    plan = built(*fast)
    assert plan.refuse_sockets
    assert [node.env["NCCL_IB_HCA"] for node in plan.nodes] == ["=mlx5_0:1"] * 2 or plan.nodes[0].env["NCCL_IB_HCA"]
    assert not built(*fast, allow_sockets=True).refuse_sockets
    assert not built(fast[0], part("2", 0, "m2", 8)).refuse_sockets
    assert not built(*fast, on_cpu=True).refuse_sockets


def test_who_differs_from_the_majority():
    facts = {"a": {"torch": "2.13"}, "b": {"torch": "2.12"}, "c": {"torch": "2.13"}}
    assert list_disagreements(facts) == ["torch is 2.13 on most hosts, but b has 2.12"]
    assert list_disagreements({"a": {"x": "1"}, "b": {"x": "1"}}) == []


def test_names():
    assert tmux_session("10.0.0.1") == "10_0_0_1"
    assert first_ranks([8, 4, 8]) == [0, 8, 12]
    for bad in ("", "a/b", "-a", "a b", ".x", "x" * 101):
        with pytest.raises(UserError, match="--run: "):
            check_run_name(bad)
