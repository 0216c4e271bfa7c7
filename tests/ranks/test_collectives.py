"""The collectives of a step are those that docs/parallel.md says."""

import collections
import datetime
import functools
import re

import mesh_rig
import pytest
import torch

from conftest import ROOT
from ranks_rig import run_ranks

LAYERS, MICRO = 4, 3
GATHER, SCATTER, REDUCE, EXCHANGE = "all-gathers", "reduce-scatters", "all-reduces", "all-to-alls"
NAMES = {
    "_allgather_base_": GATHER, "all_gather_into_tensor": GATHER, "_reduce_scatter_base_": SCATTER, "reduce_scatter_tensor": SCATTER,
    "allreduce_": REDUCE, "all_reduce": REDUCE, "alltoall_base_": EXCHANGE, "send": "sends",
}  # fmt: skip
CASES = {
    "fsdp2": (2, {}), "zero2": (2, {"strategy": "zero2"}), "zero1": (2, {"strategy": "zero1"}), "ddp": (2, {"strategy": "ddp"}),
    "hsdp": (4, {"dp_replicate": 2}), "tp": (2, {"tp": 2}), "cp": (2, {"cp": 2}), "pp": (2, {"pp": 2}),
}  # fmt: skip


def _count(me, directory, settings):
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    from llama405b.distributed import ranks
    from llama405b.distributed.ranks import with_mesh
    from llama405b.optim.step import train_step
    from llama405b.settings.schema import Optimizer, Parallel

    found = collections.Counter()
    beside = dist.new_group(timeout=datetime.timedelta(seconds=99), group_desc=ranks.BACKGROUND_GROUP)

    def timeouts():
        groups = [group for group in dist.distributed_c10d._world.pg_map if group is not beside]
        return {group._get_backend(me.device).options._timeout.total_seconds() for group in groups}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = NAMES.get(func._schema.name.rpartition("::")[2])
            if func.namespace in ("c10d", "_c10d_functional") and name:
                found[name] += 1
            return func(*args, **(kwargs or {}))

    parallel = Parallel(numerics="fp32", **settings)
    me = with_mesh(me, parallel)
    _, passes, updater = mesh_rig.build(me, directory, parallel, Optimizer(), torch.float32)
    each = mesh_rig.BATCH // (MICRO * me.dp.size)
    for step in range(2):  # the first one sets up
        found.clear()
        micro = mesh_rig.micro_batches(step, me, each)
        assert len(micro) == MICRO
        with Counting():
            train_step(passes, updater, micro, max_norm=1.0)
    asked = timeouts()
    ranks.set_timeout(120)
    timeouts_s = asked, timeouts(), beside._get_backend(me.device).options._timeout.total_seconds()
    return dict(found), timeouts_s


def said(axis):
    """What the page's table says of an axis, with that of ``always``."""
    page = (ROOT / "docs/parallel.md").read_text().partition("## Collectives of a step")[2]
    table = dict(re.findall(r"^\| `?(\w+)`? \| (.+) \|$", page, re.MULTILINE))
    counts = collections.Counter()
    rows = [table["always"], table[axis]] + [table["fsdp2"]] * (axis in ("hsdp", "cp"))
    for row in rows:
        for number, what in re.findall(
            r"(\d+|\d* ?M? ?(?:\([^)]+\)|U|L|M L)) (all-gathers|reduce-scatters|all-reduces|all-to-alls)", row
        ):
            terms = re.findall(r"\d+L|\([^)]*\)|\d+|[MUL]", number)
            product = 1
            for term in terms:
                value = (
                    term.strip("()").replace("L", f"*{LAYERS}").replace("M", str(MICRO)).replace("U", str(LAYERS + 2))
                )
                product *= sum(eval(part.strip().lstrip("*"), {}) for part in value.split("+"))
            counts[what] += product
        counts["sends"] += MICRO * bool(re.search("sends", row))
    return {what: n for what, n in counts.items() if n}


@pytest.mark.parametrize("axis", CASES)
def test_a_step_has_the_collectives_that_the_page_says(axis, tmp_path):
    world, settings = CASES[axis]
    model = mesh_rig.write_model(tmp_path / "model", layers=LAYERS)
    for found, timeouts_s in run_ranks(world, functools.partial(_count, settings=settings), model):
        assert found == said(axis)
        assert timeouts_s == ({60.0}, {120.0}, 99.0)  # groups of the mesh have the default group's


def test_a_pipeline_gathers_no_unit_for_nobody(tmp_path):
    """Both stages together gather what one rank with all layers would."""
    model = mesh_rig.write_model(tmp_path / "model", layers=LAYERS)
    found = [each for each, _ in run_ranks(4, functools.partial(_count, settings={"pp": 2}), model)]
    for first, last in (found[0::2], found[1::2]):
        assert first[GATHER] + last[GATHER] == said("fsdp2")[GATHER]
        assert first[SCATTER] + last[SCATTER] == said("fsdp2")[SCATTER]
