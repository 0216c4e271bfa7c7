"""Runs as jobs of a real Slurm: slurmctld on node-1, slurmd on four hosts, munge on all, a shared directory."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from conftest import ROOT
from llama405b_tools.agent import processes
from ops_rig import FAKE_TRAINER as FLAGS
from ops_rig import wait_for

pytestmark = pytest.mark.timeout(400)
N_HOSTS, HOST_USERS = 4, ("root",)
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
DEMO = "--preset demo --data.seq_len 64 --training.global_batch_size 8 --training.micro_batch_size 2"
FAKE_TRAINER = " ".join(FLAGS)
CONF = """
ClusterName=rig
SlurmctldHost=node-1
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
StateSaveLocation=/var/spool/rig-ctld
SlurmdSpoolDir=/var/spool/rig-slurmd
SlurmctldLogFile=/var/log/rig-ctld.log
SlurmdLogFile=/var/log/rig-slurmd.log
SlurmctldPidFile=/run/rig-ctld.pid
SlurmdPidFile=/run/rig-slurmd.pid
KillWait=5
SlurmdTimeout=60
AccountingStorageType=accounting_storage/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node-[1-4] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=node-[1-4] Default=YES MaxTime=INFINITE State=UP GraceTime=60
PartitionName=urgent Nodes=node-[1-4] MaxTime=INFINITE State=UP PriorityTier=9
"""


def until(command):
    """In a shell: wait for a daemon on which the next one depends, for a minute."""
    return f"for _ in $(seq 300); do {command} >/dev/null 2>&1 && break; sleep 0.2; done"


@pytest.fixture(scope="module")
def cluster(hosts):
    missing = [p for p in PROGRAMS if not (shutil.which(p) or os.path.exists(f"/usr/sbin/{p}"))]  # noqa: PTH110
    if missing:
        if os.environ.get("LLAMA405B_NOTHING_SKIPPED"):
            pytest.fail(f"NOT RUN: Slurm: needs {', '.join(missing)}")
        pytest.skip(f"NOT RUN: Slurm: needs {', '.join(missing)}")
    key = os.urandom(64).hex()
    for i in range(1, 5):
        line = (
            f"mkdir -p /run/munge /var/lib/munge /var/log/munge /etc/munge /etc/slurm /var/spool/rig-ctld /var/spool/rig-slurmd; "
            f"printf %s {key} >/etc/munge/munge.key; chmod 400 /etc/munge/munge.key; chmod 755 /run/munge; "
            f"chown -R munge:munge /run/munge /var/lib/munge /var/log/munge /etc/munge; "
            f"cat >/etc/slurm/slurm.conf <<'EOF'\n{CONF}\nEOF\n"
            "setsid setpriv --reuid=munge --regid=munge --clear-groups /usr/sbin/munged --force >/dev/null 2>&1; "
            f"{until('munge -n')}; "
            + (f"setsid /usr/sbin/slurmctld >/dev/null 2>&1; {until('scontrol ping | grep -q UP')}; " if i == 1 else "")
            + "setsid /usr/sbin/slurmd >/dev/null 2>&1"
        )
        hosts.exec(i, "sh", "-c", line)

    def idle():
        return hosts.exec(1, "sinfo", "-h", "-o", "%T %D", check=False).stdout.split() == ["idle", "4"]

    wait_for(idle, 40)
    return hosts


@pytest.fixture
def type_in(cluster):
    """The front door on the login node, in a directory that all nodes share."""
    place = cluster.shared / "work"
    place.mkdir(exist_ok=True)
    runs = []

    def call(line, timeout=150):
        runs.extend(re.findall(r"launch .*--run (\S+)", line))
        shell = f"cd {place} && COLUMNS=120 PYTHONPATH={ROOT}:{ROOT}/tools exec {sys.executable} -m llama405b_tools.cli {line}"
        return cluster.exec(1, "sh", "-c", shell, check=False, timeout=timeout)

    call.place = place
    call.exec = lambda *command: cluster.exec(1, *command, check=False)
    yield call
    for run in runs:
        call(f"stop --run {run} --grace 0")
    wait_for(lambda: cluster.exec(1, "squeue", "-h").stdout == "", 60)
    for i in range(1, 5):
        assert "llama405b" not in cluster.exec(i, "ps", "-eo", "args").stdout


def test_a_job_trains_on_three_nodes(type_in):
    places = "--cache '$HOME/hf' --scratch '/tmp/job-$SLURM_JOB_ID'"
    done = type_in(
        f"launch --run j --slurm '-N 3' {places} --follow {DEMO} --training.max_steps 4 --checkpoint.every 2 --parallel.pp 3"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^j: job \d+$", done.stdout, re.MULTILINE)
    assert "3 ranks of 3 hosts" in done.stdout
    assert "(pp 3): " in done.stdout
    plan = json.loads((type_in.place / "runs/j/plan.json").read_text())
    assert [node["name"] for node in plan["nodes"]] == ["node-1", "node-2", "node-3"]
    for node in plan["nodes"]:  # each expanded what was given, and made it
        assert node["env"]["HF_HOME"] == f"{Path.home()}/hf"
        assert re.fullmatch(r"/tmp/job-\d+", node["env"]["TMPDIR"])
    state = type_in("status --run j")
    assert state.returncode == 0, state.stdout
    assert state.stdout.count("finished") == 3
    assert "step 4/4" in type_in("logs --run j").stdout
    refused = type_in(f"launch --run j --slurm '-N 4' {DEMO}")
    assert refused.returncode == 2
    assert "--run: 'j' exists here" in refused.stderr


def test_status_logs_and_a_stop_that_saves(type_in):
    started = type_in(
        f"launch --run s --slurm '-N 2' {FAKE_TRAINER} {DEMO} --training.max_steps 100000 --checkpoint.every 50000"
    )
    assert started.returncode == 0, started.stderr
    assert "attach" not in started.stdout
    wait_for(lambda: "step 3/" in type_in("logs --run s", 60).stdout, 90)
    state = type_in("status")  # no hosts file here: the newest job
    assert state.returncode == 0, state.stdout
    assert state.stdout.count("running") == 2
    top = type_in("top --once")
    assert top.returncode == 0, top.stdout + top.stderr
    assert re.search(r"(?m)^s TRAINING .* hosts 2/2 ", top.stdout)
    assert re.search(r"^step \d+/100000 .* loss \d", top.stdout, re.MULTILINE)
    assert len(re.findall(r"^  node-\d +OK +— GPU +(— +){5}\S+ +\d+ +— +\d", top.stdout, re.MULTILINE)) == 2, top.stdout
    stopped = type_in("stop --run s")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert stopped.stdout.count("no process left") == 2
    assert re.search(r"newest checkpoint: .*/step-\d{8}$", stopped.stdout, re.MULTILINE), stopped.stdout
    report = type_in("report --run s")
    assert report.returncode == 0, report.stdout + report.stderr
    assert re.search(r"(?m)^run s: ended after step \d+ of 100000", report.stdout)
    assert "steps earlier" not in stopped.stdout
    after = type_in("status --run s")
    assert after.returncode == 0, after.stdout
    assert after.stdout.count("stopped") >= 2
    again = type_in(
        f"launch --run s --slurm '-N 2' --resume auto {FAKE_TRAINER} {DEMO} --training.max_steps 100000 --checkpoint.every 50000"
    )
    assert again.returncode == 0, again.stderr
    wait_for(lambda: "resumed from runs/s/checkpoints/step-" in type_in("logs --run s", 60).stdout, 90)


def test_a_failing_rank_ends_the_job(type_in):
    (type_in.place / "bad.py").write_text(
        "import os, time\nif os.environ['LLAMA405B_HOST'] == 'node-2': raise SystemExit(7)\ntime.sleep(9999)\n"
    )
    done = type_in(f"launch --run b --slurm '-N 3' --follow {FAKE_TRAINER} -- bad.py")
    assert done.returncode == 1
    assert "FAILED  node-2: exited 1: rank 1 exited with 7" in done.stderr, done.stdout + done.stderr


def test_a_secret_and_bad_options(type_in, cluster):
    (type_in.place / "tell.py").write_text("import os; print('length', len(os.environ['HF_TOKEN']), flush=True)\n")
    place, canary = type_in.place, "hf_canary-in-a-job"
    shell = f"cd {place} && HF_TOKEN={canary} PYTHONPATH={ROOT}:{ROOT}/tools {sys.executable} -m llama405b_tools.cli launch --run k"
    # the job inherits what sbatch sees, as Slurm does; what matters is that no file of ours keeps it
    done = cluster.exec(
        1,
        "sh",
        "-c",
        f"{shell} --slurm '-N 2 --export=NONE' --secret HF_TOKEN --follow {FAKE_TRAINER} -- tell.py",
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"length {len(canary)}" in type_in("logs --run k").stdout
    assert cluster.exec(1, "grep", "-rl", canary, str(place / "runs"), check=False).stdout == ""
    refused = type_in(f"launch --run z --slurm '-N 4 --no-such' {FAKE_TRAINER} {DEMO}")
    assert refused.returncode == 2
    assert "--slurm: sbatch refused" in refused.stderr
    waits = type_in(f"launch --run w --slurm '-N 4 --begin=now+1hour' {FAKE_TRAINER} {DEMO}")
    assert waits.returncode == 0
    pending = type_in("status --run w")
    assert re.search(r"run w: job \d+ is PENDING \(BeginTime\)", pending.stdout)
    assert type_in("stop --run w").returncode == 0
    assert type_in("launch --run q --slurm '-N 2' --restart 3 -- x.py").returncode == 2


@pytest.mark.parametrize("fake", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_job_that_is_preempted_saves_first_and_goes_on_afterwards(type_in, fake):
    """Slurm sends SIGTERM to all processes of its steps, and SIGKILL when the partition's GraceTime is over."""
    run = "preempted" if fake else "really-preempted"
    flags = f"{FAKE_TRAINER if fake else ''} {DEMO} --training.max_steps 100000 --checkpoint.every 50000"
    assert type_in(f"launch --run {run} --slurm '-N 2' {flags}").returncode == 0
    wait_for(lambda: "step 3/" in type_in(f"logs --run {run}", 60).stdout, 150, lambda: said_of(type_in, run))
    job = job_of(type_in, run)
    asked = type_in.exec("sh", "-c", "cd / && sbatch -p urgent -N 4 -o /dev/null --wrap true")
    assert asked.returncode == 0, asked.stderr
    waiting = wait_for(lambda: "PENDING" in (words := type_in(f"status --run {run}").stdout) and words, 90)
    assert re.match(rf"run {run}: job {job} is PENDING", waiting)
    [end] = (type_in.place / f"runs/{run}/status/node-2.ends.jsonl").read_text().splitlines()
    assert (json.loads(end)["state"], json.loads(end)["cause"]["by"]) == ("stopped", "Slurm (SIGTERM)")
    assert f"job {job} was preempted; requeueing it" in (type_in.place / f"runs/{run}/slurm-{job}.log").read_text()
    assert type_in.exec("scontrol", "update", f"jobid={job}", "starttime=now").returncode == 0
    wait_for(
        lambda: re.search(rf"resumed from runs/{run}/checkpoints/step-\d+", type_in(f"logs --run {run}", 60).stdout),
        150,
        lambda: said_of(type_in, run),
    )
    plan = json.loads((type_in.place / f"runs/{run}/plan.json").read_text())
    assert (plan["owner"], plan["attempt"]) == (f"job {job}, requeued 1 x", 2)
    state = type_in(f"status --run {run}")
    assert state.stdout.count("running") == 2, state.stdout


def job_of(type_in, run):
    return json.loads((type_in.place / f"runs/{run}/slurm.json").read_text())["job"]


def said_of(type_in, run):
    """All that may tell why a job does not do what is waited for."""
    files = f"runs/{run}/slurm-*.log runs/{run}/status/* runs/{run}/status/.[a-z]* runs/{run}/heartbeat/*"
    logs = f"runs/{run}/logs/*/*.log runs/{run}/logs/*/*/*/*/*"
    tails = type_in.exec("sh", "-c", f"cd {type_in.place} && tail -n 30 {files} {logs} /var/log/rig-ctld.log 2>&1")
    return "\n".join(type_in.exec(*c).stdout for c in (("squeue",), ("sinfo",), ("ps", "-ef"))) + tails.stdout


def test_a_job_whose_time_is_over_saves_first(type_in):
    """Slurm's minutes are long: 'its time is nearly over' is said by the same signal to the batch script."""
    flags = f"{FAKE_TRAINER} {DEMO} --training.max_steps 100000 --checkpoint.every 50000"
    assert type_in(f"launch --run t --slurm '-N 2' {flags}").returncode == 0
    wait_for(lambda: "step 3/" in type_in("logs --run t", 60).stdout, 90)
    job = job_of(type_in, "t")
    assert type_in.exec("scancel", "--batch", "--signal=USR1", job).returncode == 0

    def over():
        return type_in.exec("squeue", "-h", "-j", job, "-o", "%T").stdout.strip() in ("", *processes.JOB_END_STATES)

    wait_for(over, 150, lambda: said_of(type_in, "t"))
    state = type_in("status --run t")
    assert re.search(r"newest checkpoint: .*/step-\d{8}$", state.stdout, re.MULTILINE), state.stdout
    assert state.stdout.count("stopped") >= 2


def test_a_slurm_that_a_module_brings_in_a_step_s_shell_and_an_odd_directory(type_in, cluster):
    for i in range(1, 5):
        cluster.exec(i, "sh", "-c", "mkdir -p /opt/slurm && cp /etc/slurm/slurm.conf /opt/slurm/")
    cluster.exec(1, "mv", "/etc/slurm/slurm.conf", "/etc/slurm/away")
    place = cluster.shared / "run%x%A"
    place.mkdir()
    (place / "cpus.py").write_text(
        "import os, time; print(sorted(os.sched_getaffinity(0)), os.environ.get('SLURM_STEP_X'), flush=True)\n"
    )
    step = "SLURM_CONF=/opt/slurm/slurm.conf SLURM_CPUS_PER_TASK=1 SLURM_CPU_BIND=cores SLURM_STEP_X=1 SBATCH_WAIT=1"

    def call(line):
        cli = f"PYTHONPATH={ROOT}:{ROOT}/tools {sys.executable} -m llama405b_tools.cli"
        return cluster.exec(1, "sh", "-c", f"cd {place} && {step} {cli} {line}", check=False, timeout=60)

    try:
        done = call(f"launch --run m --slurm '-N 1 -w node-2 --time 30' --follow {FAKE_TRAINER} -- cpus.py")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SBATCH_WAIT is not used: launch does not wait for the job's end; use --follow" in done.stdout
        assert "[0, 1] None" in call("logs --run m").stdout
        job = json.loads((place / "runs/m/slurm.json").read_text())["job"]
        assert (place / f"runs/m/slurm-{job}.log").exists()
        waits = call(f"launch --run w --slurm '-N 1 -w node-2 --begin=now+1hour' {FAKE_TRAINER} -- cpus.py")
        assert waits.returncode == 0, waits.stderr
        assert "is PENDING" in call("status --run w").stdout
        assert call("stop --run w").returncode == 0
        assert cluster.exec(1, "sh", "-c", "SLURM_CONF=/opt/slurm/slurm.conf squeue -h").stdout == ""
        refused = call(f"launch --run a --slurm '-N 1 --array=0-1' {FAKE_TRAINER} -- cpus.py")
        assert (refused.returncode, "--array: a run is one job" in refused.stderr) == (2, True)
        assert not (place / "runs/a").exists()
    finally:
        cluster.exec(1, "mv", "/etc/slurm/away", "/etc/slurm/slurm.conf")
