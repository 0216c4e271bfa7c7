"""Helpers for tests of complete runs on this machine."""

import json
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
    """The condition's value once it is true; ``says``: what else to print where it does not become so."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s, too long\n{says()}"
        time.sleep(0.1)
    return value


def heartbeat(work, run, rank):
    try:
        return json.loads((work / "runs" / run / "heartbeat" / f"rank-{rank}.json").read_text())
    except OSError:
        return {"step": -1}
