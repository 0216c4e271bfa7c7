"""Twenty random kills: the run resumes right every time. Run by ``tests/run.sh --soak`` alone; it takes a quarter of an hour."""

import random
import re
import time

import pytest

from ops_rig import wait_for

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
SEED, KILLS, STEPS = 20261122, 20, 400  # more than are taken between the kills
FLAGS = [
    "--preset", "demo", "--training.global_batch_size", "12", "--data.max_bytes", "400000", "--data.seq_len", "64",
    "--training.max_steps", STEPS, "--checkpoint.every", 4, "--checkpoint.storage", "local",
]  # fmt: skip


def _losses(done):
    return [line.split()[3] for line in done.stdout.splitlines() if line.startswith("step ")]


def _kill(hosts, kind, i):
    if kind == "a host":
        hosts.crash(i)
        hosts.boot(i)
        hosts._wait()
    elif kind == "all ranks":
        for each in range(1, hosts.count + 1):
            hosts.exec(each, "pkill", "-9", "-f", "llama405b.train", check=False)
    else:
        what = {"a rank": "llama405b.train", "a node runner": "agent.node", "what copies": "agent.relay"}[kind]
        hosts.exec(i, "pkill", "-9", "-f", what, check=False)


def test_a_run_survives_twenty_random_kills(hosts, operator, capsys):
    hosts.hosts_file(operator.path / "hosts")
    whole = operator("launch", "--run", "whole", "--follow", *FLAGS, timeout=900)
    assert whole.returncode == 0, whole.stderr
    chance, story = random.Random(SEED), []

    def copied():
        found = re.search(r"copied to the next host: step (\d+)", operator("status", "--run", "soak").stdout)
        return int(found[1]) if found else 0

    def said():
        return f"{story} {operator('status', '--run', 'soak').stdout}"

    def pass_on(step):
        wait_for(lambda: copied() > step, 90, said)

    for number in range(KILLS):
        more = ["--resume", "auto"] if number else []
        started = operator("launch", "--run", "soak", *more, *FLAGS)
        assert started.returncode == 0, (story, started.stderr)
        pass_on(copied())
        time.sleep(chance.uniform(0, 3))
        kind, i = chance.choice(["a rank", "a node runner", "what copies", "a host", "all ranks"]), chance.randint(1, 3)
        _kill(hosts, kind, i)
        if kind == "what copies":  # which is started again, and training goes on
            pass_on(copied())
            hosts.exec(i, "pkill", "-9", "-f", "llama405b.train", check=False)
        story.append(f"{kind} of node-{i}")
        wait_for(lambda: operator("status", "--run", "soak").returncode == 1, 90, said)
        operator("stop", "--run", "soak", "--grace", "0")
        story[-1] += f" after step {copied()}"
    last = operator("launch", "--run", "soak", "--resume", "auto", "--follow", *FLAGS, timeout=900)
    assert last.returncode == 0, (story, last.stderr)
    rest = _losses(last)
    assert rest
    assert rest == _losses(whole)[-len(rest) :]
    with capsys.disabled():
        print(f"\nseed {SEED}: {len(story)} kills, then {len(rest)} steps to the same losses\n" + "\n".join(story))
