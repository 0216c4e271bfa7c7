"""The shape of a sampler's frame, checked where one arrives: a host may be broken, and a recording be anything. Pure.

A shape is a type, a tuple of shapes (any of them), a list of one shape (of every item) or of several (of each in turn), or
a dict of shapes by key: ``key?`` need not be there, ``*`` stands for every key.
"""

from collections.abc import Mapping
from typing import Any

MOST = 1e18
NUMBER, NONE = (int, float), type(None)
BEAT = {
    "rank": int,
    "pid": int,
    "time": NUMBER,
    "step": int,
    "phase": str,
    "phase_since": NUMBER,
    "done_bytes": int,
    "total_bytes": int,
    "state": str,
    "data_s?": (*NUMBER, NONE),
    "optimizer_s?": (*NUMBER, NONE),
    "message?": str,
}
METRICS = {
    "step": int,
    "loss": NUMBER,
    "step_s": NUMBER,
    **dict.fromkeys(
        ("data_s?", "forward_s?", "backward_s?", "optimizer_s?", "tokens_per_s?", "flops_per_token?"), (*NUMBER, NONE)
    ),
}
RUN = {
    "name": str,
    "created": NUMBER,
    "attempt": int,
    "alive": bool,
    "status": ({"state": str, "exit_code?": (int, NONE), "signal?": (int, NONE), "reason?": str}, NONE),
    "beats": list,
    "log_age_s": (*NUMBER, NONE),
    "net": str,
    "others?": [str],
    "nodes?": [[str, int, int]],
    "nccl?": {"*": str},
    "metrics?": list,
    "max_steps?": (int, NONE),
    "checkpoint_step?": (int, NONE),
}
FRAME = {
    "now": NUMBER,
    "machine": str,
    "cwd?": str,
    "pci_gpus": (int, NONE),  # None: its files are here, but it is another machine
    "cpu": {"total": int, "idle": int, "cores": (int, NONE)},
    "memory": {"total": (int, NONE), "available": (int, NONE), "oom_kills": (int, NONE)},
    "disks": [[str, int, int]],
    "net": {"*": [int, int]},
    "ib": [{"device": str, "port": str, "state": str, "rate": str, "counters": {"*": int}}],
    "kernel": ([str], NONE),
    "smi": {"text": (str, NONE), "hung_s": NUMBER, "fields?": [str], "apps?": (str, NONE)},
    "own?": [NUMBER, int],  # the sampler's own CPU seconds (without nvidia-smi's) and most resident bytes
    "procs?": ([[int, str, int, int, str, str]], NONE),
    "run": (RUN, NONE),
}
EVENT = {"t": float, "host": str, "entries?": [[NUMBER, str, str]], "link?": [str, str], "note?": str}


def fault(value: Any, shape: Any, where: str) -> str:
    """Where a value is not of a shape; "" where it is."""
    if isinstance(shape, tuple):
        faults = [fault(value, each, where) for each in shape]
        return "" if "" in faults else faults[0]
    if isinstance(value, int | float) and not -MOST < value < MOST:  # nor is NaN
        return where
    if not isinstance(shape, dict | list):
        return "" if isinstance(value, shape) and (shape is bool or not isinstance(value, bool)) else where
    if isinstance(shape, list):
        if not isinstance(value, list):
            return where
        each = shape if len(shape) > 1 else shape * len(value)
        inside = (fault(item, one, where) for item, one in zip(value, each, strict=False))
        return where if len(each) != len(value) else next(filter(None, inside), "")
    if not isinstance(value, dict):
        return where
    for key, expected in (dict.fromkeys(value, shape["*"]) if "*" in shape else shape).items():
        name = key.rstrip("?")
        if name not in value and name == key:
            return f"{where}.{name}"
        if name in value and (wrong := fault(value[name], expected, f"{where}.{name}")):
            return wrong
    return ""


def read(frame: Any) -> tuple[Mapping[str, Any] | None, str]:
    """A frame that can be relied on, or None and what is wrong; heartbeats and metrics that are none are left out."""
    wrong = fault(frame, FRAME, "frame")
    if wrong or not frame["run"]:
        return (None if wrong else frame), wrong
    run = dict(frame["run"])
    run["beats"] = [beat for beat in run["beats"] if not fault(beat, BEAT, "beat")]
    if "metrics" in run:
        run["metrics"] = [each for each in run["metrics"] if not fault(each, METRICS, "metrics")]
    return frame | {"run": run}, ""
