"""How the first node of a Slurm job builds the plan from what all nodes report."""

import dataclasses

import pytest

from llama405b.contract.errors import UserError
from llama405b.contract.files import write_json
from llama405b.contract.paths import RunDir
from llama405b.spec.plan import read_plan
from llama405b_tools.agent.machine import DirectoryCheck, check_writable_directory
from llama405b_tools.launch import slurm
from llama405b_tools.launch.placement import HostSpec, RunSpec
from llama405b_tools.launch.request import parse_launch
from llama405b_tools.launch.slurm import JobRequest, NodeReport
from llama405b_tools.parsers import Address, Rdma

THIS = "job 7"
TERMS = RunSpec("r", ("-m", "mine"), {}, ())


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(slurm, "RENDEZVOUS_S", 0.3)
    return RunDir(tmp_path / "runs/r")


def meet(run, **nodes):
    """All nodes say where they are; the first makes the plan."""
    for name, where in nodes.items():
        spec = where.spec and dataclasses.replace(where.spec, name=name)
        write_json(run.where(name), dataclasses.replace(where, spec=spec))
    slurm._make_plan(run, JobRequest(TERMS, ("-m", "mine", "again"), 240.0), list(nodes), THIS)
    return read_plan(run)


def where(mine, *, head="10.0.0.1", **more):
    paths = {key: place.path for key, place in more.get("places", {}).items()}
    spec = HostSpec("", 0, mine, 2, 8, Rdma(), "/w", "/py", mine, "eth0", paths)
    return NodeReport(THIS, spec=spec, head=head, own=(Address("eth0", mine, ""),), **more)


def test_the_nodes_meet_where_the_others_see_the_first_one(run):
    plan = meet(run, a=where("192.168.0.1", head="127.0.1.1"), b=where("10.0.0.2"))
    assert plan.endpoint.startswith("10.0.0.1:")
    assert [(node.address, node.first_rank, node.slots) for node in plan.nodes] == [
        ("10.0.0.1", 0, 2),
        ("10.0.0.2", 2, 2),
    ]
    assert (plan.slurm_job, plan.owner, plan.attempt, plan.grace_s) == ("7", THIS, 1, 240.0)


def test_cache_and_scratch_are_each_nodes_own(run, monkeypatch):
    places = {"cache": DirectoryCheck("/nvme/hf"), "scratch": DirectoryCheck("/nvme/7")}
    plan = meet(run, a=where("10.0.0.1", places=places), b=where("10.0.0.2"))
    assert plan.node("a").env["HF_HOME"] == "/nvme/hf"
    assert plan.node("a").env["TMPDIR"] == "/nvme/7"
    assert "TMPDIR" not in plan.node("b").env


def test_a_place_that_cannot_be_written_is_refused(run):
    with pytest.raises(SystemExit, match="b: --cache=/etc/passwd/hf cannot be created or written"):
        meet(
            run, a=where("10.0.0.1"), b=where("10.0.0.2", places={"cache": check_writable_directory("/etc/passwd/hf")})
        )


@pytest.mark.parametrize(("path", "there"), [("$NOPE", "$NOPE"), ("/nvme/${NOPE}", "/nvme/${NOPE}"), ("$EMPTY", ".")])
def test_a_place_whose_variable_is_not_set_is_refused(run, monkeypatch, path, there):
    monkeypatch.delenv("NOPE", raising=False)
    monkeypatch.setenv("EMPTY", "")
    found = slurm._node_report("a", "localhost", THIS, {"scratch": path})
    with pytest.raises(SystemExit) as refused:
        meet(run, a=found)
    assert str(refused.value).startswith(f"a: --scratch: {there!r} is not a full path on that node;")
    assert not read_plan(run).nodes


def test_a_requeued_job_goes_on_with_the_next_attempt(run, monkeypatch):
    meet(run, a=where("10.0.0.1"))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    plan = meet(run, a=where("10.0.0.1"))
    assert (plan.attempt, plan.program) == (2, ("-m", "mine", "again"))


def test_a_job_onto_another_s_checkpoints_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm.shutil, "which", lambda _: "/usr/bin/sbatch")
    (tmp_path / "c/step-00000040").mkdir(parents=True)
    request = parse_launch(["--run", "r", "--slurm", "-N 2", "--preset", "demo", "--checkpoint.dir", "c"], 0.0)
    with pytest.raises(UserError, match=r"--checkpoint\.dir: c holds checkpoints up to step-00000040"):
        slurm.submit(request, "-N 2")
    assert not run.path.exists()


def test_a_job_from_a_directory_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm.shutil, "which", lambda _: "/usr/bin/sbatch")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    with pytest.raises(UserError, match=r"--slurm: .*/runs/new cannot be written: .*/runs is not a directory"):
        slurm.submit(parse_launch(["--run", "new", "--slurm", "-N 2", "--preset", "demo"], 0.0), "-N 2")


def test_nodes_that_differ_or_do_not_come_make_no_plan(run):
    for what in ("torch", "llama405b"):
        with pytest.raises(SystemExit, match="the nodes differ"):
            meet(run, a=where("10.0.0.1", versions={what: "2.13.0"}), b=where("10.0.0.2", versions={what: "2.12.0"}))
    with pytest.raises(SystemExit, match="not all nodes appeared"):
        meet(run, a=where("10.0.0.1"), b=NodeReport("job 6"))
    assert not read_plan(run).nodes
