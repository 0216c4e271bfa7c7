"""sbatch's options as people type them: each is kept, or refused in a sentence that says what to do instead."""

import json
import shlex
import types

import pytest

from conftest import ROOT
from llama405b.contract.errors import UserError
from llama405b_tools import cli
from llama405b_tools.agent.processes import slurm_environment
from llama405b_tools.launch import slurm
from llama405b_tools.launch.request import parse_launch
from llama405b_tools.launch.sbatch import OPTIONS, parse_options, refused_variables, time_limit_s

MANUAL = (ROOT / "tests/data/foreign/slurm/sbatch-22.05-options.txt").read_text().splitlines()


def test_every_option_of_the_manual_is_in_the_table_as_it_is_there():
    assert {(o.name, o.letter or "-", o.takes_value) for o in OPTIONS.values()} == {
        (name, letter, value == "value") for name, letter, value in map(str.split, MANUAL)
    }


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("-N 4 -p gpu --time 2-0", {"nodes": "4", "partition": "gpu", "time": "2-0"}),
        ("-N4 --part=gpu -HQ --nice=5", {"nodes": "4", "partition": "gpu", "hold": "", "quiet": "", "nice": "5"}),
        ("--gres gpu:8 --ntasks-per-node=1 -c 96", {"gres": "gpu:8", "ntasks-per-node": "1", "cpus-per-task": "96"}),
        ("--newer=yes -Z", {"newer": "yes", "Z": ""}),  # sbatch knows, or refuses
        ("--container-image=img.sqsh -N 2 --newer", {"container-image": "img.sqsh", "nodes": "2", "newer": ""}),
    ],
)  # fmt: skip
def test_options_are_read_as_sbatch_reads_them(words, found):
    assert {option.name: value for option, value in parse_options(shlex.split(words))} == found


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("-N 1 --array=0-1", "--array: a run is one job"),
        ("-a 0-1", "--array: a run is one job"),
        ("--arr 0-1", "--array: a run is one job"),
        (
            "-N 1 --ntasks-per-node=8",
            "--ntasks-per-node: each node runs one task, which starts one rank per GPU",
        ),
        ("-n32", "--ntasks: each node runs one task"),
        ("-N 2 -W", "--wait: launch does not wait for the job's end; use --follow"),
        ("-HW", "--wait: launch"),
        ("--test-only", "--test-only: it submits no job"),
        ("--wrap hostname", "--wrap: launch writes the job's script; give the program after --"),
        ("--signal=B:USR2@60", "--signal: launch sets the signal at which a run saves; set --time"),
        ("-o my.log", "--output: the job's log is runs/<run>/slurm-<job>.log"),
        ("-D /elsewhere", "--chdir: a run belongs to the directory it is launched in"),
        ("-M other", "--clusters: status and stop would ask this cluster"),
        ("-N 1 train.sh", "'train.sh' is not an option of sbatch; give the program after --"),
        ("-N 1 : -N 2", "':' is not an option of sbatch"),
        (
            "--stepmgr train.sh",
            "--stepmgr is not in the manual of Slurm 22.05; write --stepmgr=train.sh if it takes a value",
        ),
        ("-N 2 -J", "--job-name needs a value; give one"),
        ("-N 2 --time", "--time needs a value; give one"),
    ],
)
def test_what_would_change_a_run_is_refused(words, says):
    with pytest.raises(UserError, match="--slurm: ") as refused:
        parse_options(shlex.split(words))
    assert says in str(refused.value)


def test_variables_go_by_the_same_table():
    names = (
        "SBATCH_ACCOUNT",
        "SBATCH_ARRAY_INX",
        "SBATCH_WAIT",
        "SBATCH_OUTPUT",
        "SBATCH_PARTITION",
        "SBATCH_TIMELIMIT",
        "OTHER",
    )
    assert list(refused_variables(dict.fromkeys(names, "x"))) == ["SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_OUTPUT"]


def test_nothing_of_a_step_reaches_slurm_s_programs(monkeypatch):
    kept = {"SLURM_CONF": "/c", "SLURM_CLUSTERS": "a", "SBATCH_ACCOUNT": "b"}
    of_step = dict.fromkeys(
        ("SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "SLURM_CPU_BIND", "SRUN_CPUS_PER_TASK", "PMI_RANK"), "1"
    )
    for name, value in (kept | of_step).items():
        monkeypatch.setenv(name, value)
    given_to_slurm = slurm_environment()
    assert kept.items() <= given_to_slurm.items()
    assert not of_step.keys() & given_to_slurm.keys()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("4", 240), ("1:30", 90), ("2:00:05", 7205), ("2-0", 172_800), ("1-2:30", 95_400), ("1-2:30:10", 95_410),
        ("UNLIMITED", None), ("", None),
    ],
)  # fmt: skip
def test_time_limits(text, seconds):
    assert time_limit_s(text) == seconds


@pytest.mark.parametrize(
    ("limit_s", "lead_s"), [(240, 24), (60, 20), (30, 15), (3000, 300), (172_800, 300), (None, 300)]
)
def test_a_job_is_told_to_save_a_tenth_of_its_time_before_its_end(limit_s, lead_s):
    request = parse_launch(["--slurm", "-N 1", "--run", "r", "--", "x.py"], 0.0)
    assert slurm._lead_s(request, limit_s, "1") == lead_s


def test_a_large_model_has_the_time_that_its_save_takes(monkeypatch, tmp_path):
    model = tmp_path / "models/Llama-3.1-405B"
    model.mkdir(parents=True)
    shapes = (ROOT / "llama405b/settings/presets/architectures.json").read_text()
    (model / "config.json").write_text(json.dumps(json.loads(shapes)["llama3.1-405b"]))
    monkeypatch.chdir(tmp_path)
    request = parse_launch(
        ["--slurm", "-N 8", "--run", "r", "--preset", "llama3.1-405b", "--data.paths", "stdlib"], 0.0
    )
    n_bytes = 12 * 405_853_388_800  # what its FP32 masters and moments take
    leads = [slurm._lead_s(request, 86_400, nodes) for nodes in ("2", "4-16", "64", "")]
    assert leads == [int(2 * n_bytes / 5e9 / 2), int(2 * n_bytes / 5e9 / 4), 300, 300]


@pytest.mark.parametrize("options", ["-N 2 --array=0-3", "-N 2 --requeue", "-N '2"])
def test_a_dry_run_refuses_what_a_launch_would(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN", "x")
    argv = ["launch", "--run", "r", "--slurm", options, "--dry-run", "--secret", "TOKEN", "--preset", "demo"]
    assert cli.main(argv) == 2
    assert capsys.readouterr().err.startswith("llama405b: --slurm: ")
    assert cli.main([*argv[:4], "-N 2", *argv[5:]]) == 0


@pytest.mark.parametrize(
    ("state", "requeues"),
    [
        ("StartTime=2026-11-28T18:24:11 PreemptTime=2026-11-28T18:24:14", True),
        ("StartTime=2026-11-28T18:24:11 PreemptTime=2026-11-28T18:24:11", True),
        ("StartTime=2026-11-28T18:24:11 PreemptTime=None", False),
        ("StartTime=2026-11-28T18:30:00 PreemptTime=2026-11-28T18:24:14", False),  # of an earlier start
        ("StartTime=2026-11-28T18:30:00", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("refused", ["", "Requested operation is presently disabled for job 7"])
def test_a_job_that_was_preempted_is_requeued(monkeypatch, capsys, state, requeues, refused):
    asked = []

    def call(argv):
        asked.append(argv[1])
        is_requeue = argv[1] == "requeue"
        return types.SimpleNamespace(
            stdout=f"JobId=7 {state} Deadline=N/A", stderr=refused, returncode=int(is_requeue and bool(refused))
        )

    monkeypatch.setattr(slurm.processes, "call_slurm", call)
    slurm._requeue_if_preempted("7")
    assert asked == ["show", *["requeue"] * requeues]
    said = capsys.readouterr().out
    assert ("job 7 was preempted; requeueing it" in said) == requeues
    assert (f"Slurm does not requeue it ({refused}); to continue, repeat the launch with --resume auto" in said) == (
        requeues and bool(refused)
    )
