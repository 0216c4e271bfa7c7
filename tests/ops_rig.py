"""Helpers for tests of complete runs on this machine."""

import json
import os
import time


def settings(demo, corpus, steps=12):
    return [
        "--preset", "demo", "--model.path", demo, "--data.paths", corpus, "--data.seq_len", 64,
        "--training.global_batch_size", 4, "--training.micro_batch_size", 2, "--training.max_steps", steps,
        "--checkpoint.every", 4,
    ]  # fmt: skip


def metrics(work, run):
    return {m["step"]: m for m in map(json.loads, (work / "runs" / run / "metrics.jsonl").read_text().splitlines())}


def wait_for(condition, seconds=60, says=lambda: ""):
    """The condition's value once it is true; ``says``: what else to print where it does not become so.

    A busy machine has longer: while N processes want each core, a second counts as 1/N.
    """
    left, at = seconds, time.monotonic()
    while not (value := condition()):
        assert left > 0, f"waited {seconds} s (more where the machine was busy), too long\n{says()}"
        time.sleep(0.1)
        left -= (time.monotonic() - at) / max(1.0, os.getloadavg()[0] / os.cpu_count())
        at = time.monotonic()
    return value


def heartbeat(work, run, rank):
    try:
        return json.loads((work / "runs" / run / "heartbeat" / f"rank-{rank}.json").read_text())
    except OSError:
        return {"step": -1}
