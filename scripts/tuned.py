"""Let tune search for the fastest settings on hosts whose links or ranks are slow, and compare with all settings.

    PYTHONPATH=tests/rigs .venv/bin/python scripts/tuned.py DIRECTORY even|links|rank|two [SEARCHES]

Makes four hosts of network namespaces (``two``: two hosts with two ranks each; ``rank``: two with one), slows their links to 500 Mbit/s
or the last host to 30 % of a core (``even``: neither), and tries all candidates, in a table that is written to the directory, unless it
has one; then lets the search choose ten, three times or as many as given. Needs root.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hosts_rig
from llama405b.contract import reader
from llama405b.data.demo_model import make_demo
from llama405b_tools.hosts.fleet import Fleet, read_hosts
from llama405b_tools.launch.probes import run_trials
from llama405b_tools.launch.request import parse_launch
from llama405b_tools.verbs import tune

SETTINGS = {
    "data.seq_len": 64, "data.max_bytes": 200_000, "training.micro_batch_size": 1, "training.global_batch_size": 8,
    "training.max_steps": 8, "parallel.device": "cpu",
}  # fmt: skip
TRIALS, LIMIT_S = 10, 1800.0
SHAPES = {
    "two": (2, 2),
    "rank": (2, 1),
}  # hosts, and ranks of each; a slow rank is seen only where the others have a core each
QUOTA_US, PERIOD_US = 3_000, 10_000  # much shorter than a step
LINK = ("tbf", "rate", "500mbit", "burst", "64kb", "latency", "50ms")


def slow_links(count):
    for i in range(1, count + 1):
        namespace = f"l4h{hosts_rig.KEY}-{i}"
        hosts_rig.run("ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", "eth0", "root", *LINK)
        hosts_rig.run("tc", "qdisc", "add", "dev", f"l4v{hosts_rig.KEY}-{i}", "root", *LINK)


def slow_rank(hosts):
    """Give all that runs on the last host a share of a core; returns the control group, which is to be removed."""
    is_v1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").exists()
    group = Path("/sys/fs/cgroup", *["cpu"] * is_v1, f"l4slow{hosts_rig.KEY}")
    group.mkdir()
    if is_v1:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
    else:
        (group / "cpu.max").write_text(f"{QUOTA_US} {PERIOD_US}")
    (first,) = _pids("-P", hosts.inits[max(hosts.inits)].pid)
    for pid in _pids("--nslist", "pid", "--ns", first):
        (group / "cgroup.procs").write_text(pid)
    return group


def _pids(*words):
    """Return what pgrep finds."""
    return subprocess.run(["pgrep", *map(str, words)], capture_output=True, text=True, check=True).stdout.split()


def search(base, hosts_file, asked, trials):
    """Run trials; returns the seconds of a step by label, 0 for what failed."""
    hosts = read_hosts(hosts_file)
    request = dataclasses.replace(base, run=f"tuned-{time.strftime('%H%M%S')}")
    with Fleet(hosts) as fleet:
        _, found = run_trials(
            request,
            hosts,
            fleet,
            trials,
            LIMIT_S,
            asked,
            lambda label, _: print(f"  {label}", flush=True),
        )
    return {label: trials.step_s(trial.points) if trial.points else 0.0 for label, trial in found.items()}


def main(directory, scenario, searches=3):
    count, slots = SHAPES.get(scenario, (4, 1))
    with hosts_rig.Hosts(count, users=("root",)) as hosts, tempfile.TemporaryDirectory(dir=hosts.shared) as home:
        os.environ |= hosts.env()
        os.chdir(home)
        make_demo(Path("m"), layers=5, hidden=128)
        hosts_file = hosts.hosts_file(Path("hosts"))
        hosts_file.write_text(hosts_file.read_text().replace("slots=1", f"slots={slots}"))
        if scenario == "links":
            slow_links(count)
        group = slow_rank(hosts) if scenario == "rank" else None
        try:
            measure(directory, scenario, hosts_file, int(searches))
        finally:
            for host in hosts.inits.values() if group else ():
                host.kill()
                host.wait(10)
            for pid in (group / "cgroup.procs").read_text().split() if group else ():
                os.kill(int(pid), signal.SIGKILL)
            time.sleep(1)
            if group:
                group.rmdir()


def measure(directory, scenario, hosts_file, searches):
    settings = SETTINGS | {"model.path": Path("m").resolve(), "data.paths": "stdlib"}
    flags = ["--config", "my.toml", *(f"--{name}={value}" for name, value in settings.items())]
    Path("my.toml").touch()
    base = parse_launch([str(hosts_file), *flags, "--env", "OMP_NUM_THREADS=1"], time.time())
    machines = tune.detect_machines(base, read_hosts(hosts_file))
    asked, prediction = tune.predict_asked(base, machines)
    options = tune.list_options(base.settings, asked, prediction)
    trials = tune.build_trials(base, options)
    unknown = tuple(dataclasses.replace(candidate, predicted_s=0.0) for candidate in trials.candidates)
    everything = dataclasses.replace(trials, candidates=unknown, at_most=len(unknown))
    path = Path(directory, f"{scenario}.json")
    if path.exists():
        table = json.loads(path.read_text())["seconds"]
    else:
        print(f"{scenario}: all {len(unknown)}", flush=True)
        table = search(base, hosts_file, prediction.run, everything)
    fields = [json.loads(reader.dumps(candidate)) for candidate in trials.candidates]
    path.write_text(json.dumps({"candidates": fields, "seconds": table}, indent=1) + "\n")
    ranking = sorted((seconds, label) for label, seconds in table.items() if seconds)
    print(*(f"{seconds:.3f} s  {label}" for seconds, label in ranking), sep="\n", flush=True)
    for number in range(1, searches + 1):
        found = search(base, hosts_file, prediction.run, dataclasses.replace(trials, at_most=TRIALS))
        chosen = min((seconds, label) for label, seconds in found.items() if seconds)[1]
        place = [label for _, label in ranking].index(chosen) + 1
        ratio = table[chosen] / ranking[0][0]
        print(
            f"search {number}: {len(found)} trials, number {place} of {len(ranking)}, {ratio:.3f} of the best: {chosen}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), *sys.argv[2:])
