"""Features of a run, alone and in combinations: what the rules refuse, and what trains by the trainer's own code as plain FSDP does."""

import contextlib
import dataclasses
import io
import itertools
import json
import sys
from typing import NamedTuple

import offered
import torch

from llama405b.data.demo_model import make_demo
from llama405b.settings.axes import Axes, MicrobatchSplit
from llama405b.settings.rules import find_faults
from llama405b.settings.schema import Config, Data, Model, Optimizer, Parallel, Training
from llama405b.spec.models import parse_llama
from llama405b.spec.rules import find_mesh_faults
from ranks_rig import run_program, run_ranks
from tiny_models import write_llama

# The settings of each feature; those that set one setting differently exclude each other.
FEATURES = {
    "compile": {"model.compile": True},
    "fused": {"model.fused": "true"},
    "fp8": {"parallel.numerics": "fp8"},
    "stochastic": {"parallel.numerics": "bf16-stochastic"},
    "pure-bf16": {"parallel.numerics": "pure-bf16"},
    "lora": {"adapter.kind": "lora", "adapter.rank": 2},
    "chunked loss": {"model.loss": "chunked"},
    "host inputs": {"model.activations": "host"},
    "packing": {},
    "prefetch": {"parallel.prefetch": 2},
    "reshard 2": {"parallel.reshard_after_forward": 2},
    "sublayer units": {"parallel.fsdp_unit": "sublayer"},
    "every:2": {"model.activation_checkpointing": "every:2"},
    "operators": {"model.activation_checkpointing": "operators"},
    "no recompute": {"model.activation_checkpointing": "none"},
    "offload optimizer": {"parallel.offload": "optimizer"},
    "offload all": {"parallel.offload": "all"},
    "zero2": {"parallel.strategy": "zero2"},
    "hsdp": {"parallel.dp_replicate": 2},
    "tp": {"parallel.tp": 2},
    "cp": {"parallel.cp": 2},
    "1f1b": {"parallel.pp": 2},
    "gpipe": {"parallel.pp": 2, "parallel.pp_schedule": "gpipe"},
    "interleaved": {"parallel.pp": 2, "parallel.pp_schedule": "interleaved"},
}  # fmt: skip
NUMERICS = ("fp8", "stochastic", "pure-bf16")
SEQ, BATCH, STEPS, VOCABULARY = 16, 8, 3, 64
SHAPE = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
# Relative differences from plain FSDP in eager layers, of losses and norms, and of the change of each parameter. The second ones are of
# small gradients beside weights of 1 (of norms), and of FP8's and BF16's rounding, which follows the order of a mesh's sums.
BOUNDS = {"fp32": (1e-5, 2e-3), "bf16": (3e-2, 0.2)}


def settings_of(names):
    """Return the settings of a combination of features; masters need numerics that have them."""
    settings = {"parallel.numerics": "fp32-master"} if "offload optimizer" in names else {}
    for name in names:
        settings |= FEATURES[name]
    return settings


def config_of(names):
    """Return the configuration of a combination of features; FP32 unless one of them has other numerics."""
    sections = {
        "model": Model(path="any", attention="sdpa", fused="false"),
        "data": Data(paths=("any",), seq_len=SEQ),
        "training": Training(global_batch_size=BATCH, micro_batch_size=1),
        # With an eps of 1 AdamW's update is about lr times the gradient's mean: it shows each gradient's size.
        "optimizer": Optimizer(lr=1.0, eps=1.0, weight_decay=0.0),
        "parallel": Parallel(device="cpu", tp_across_hosts=True, numerics="fp32"),
        "adapter": Config().adapter,
    }
    for key, value in settings_of(names).items():
        section, _, field = key.partition(".")
        sections[section] = dataclasses.replace(sections[section], **{field: value})
    return Config(**sections)


def contradict(names):
    """Return whether features set one setting differently."""
    settings = [FEATURES[name] for name in names]
    return any(
        one[key] != other[key]
        for one, other in itertools.combinations(settings, 2)
        for key in one.keys() & other.keys()
    )


def world_of(names):
    """Return the smallest number of ranks, at least 2, on which each feature does what it is for."""
    config = config_of(names)
    parallel = config.parallel
    shards = max(parallel.cp, 4 if parallel.reshard_after_forward else 1)
    return max(2, parallel.tp * parallel.pp * max(1, parallel.dp_replicate) * shards)


def refusal(names):
    """Return the rules' first sentence against a combination, or ''."""
    config, world = config_of(names), world_of(names)
    faults = [*find_faults(config)]
    if not faults:
        axes = Axes.from_parallel(config.parallel, world, 8)
        faults = [*find_mesh_faults(axes, config.parallel, parse_llama(SHAPE, "small"), SEQ, 8)]
    return ": ".join(faults[0]) if faults else ""


def pair_refusals():
    """Return ``refusal`` of each pair of features that do not contradict each other."""
    pairs = itertools.combinations(FEATURES, 2)
    return {names: refusal(names) for names in pairs if not contradict(names)}


def refusal_table(refusals):
    """Return a table in Markdown of what pairs are refused for."""
    pairs_by_fault = {}
    for (one, other), fault in refusals.items():
        if fault:
            pairs_by_fault.setdefault(fault, {}).setdefault(one, []).append(other)
    rows = []
    for fault, pairs in pairs_by_fault.items():
        key, _, sentence = fault.partition(": ")
        named = "; ".join(f"{one} with {', '.join(others)}" for one, others in pairs.items())
        rows.append(f"| {named} | `{key}`: {sentence} |")
    return "\n".join(["| refused | why |", "|---|---|", *rows, ""])


def reference_of(names):
    """Return the combination of plain FSDP in eager layers that a combination is held to: with its data and numerics."""
    kept = tuple(name for name in names if name in (*NUMERICS, "lora", "packing"))
    return kept if "offload optimizer" not in names or {*NUMERICS} & {*kept} else (*kept, "offload optimizer")


def precision_of(names):
    """Return the key of ``BOUNDS``."""
    return "fp32" if config_of(names).parallel.numerics == "fp32" else "bf16"


def draw(count, generator):
    """Draw combinations of three to five features that the rules take."""
    drawn = set()
    while len(drawn) < count:
        chosen = generator.sample([*FEATURES], generator.randint(3, 5))
        names = tuple(name for name in FEATURES if name in chosen)
        if not contradict(names) and not refusal(names):
            drawn.add(names)
    return sorted(drawn)


def write_model(root):
    """Write the model that combinations train."""
    write_llama(root / "model", vocab=VOCABULARY, **{key: SHAPE[key] for key in SIZES})


def check_all(root, chosen, group_size, report):
    """Train combinations, and hold each to its reference; return what is wrong, by combination, as it is found."""
    write_model(root)
    references = sorted({reference_of(names) for names in chosen})
    expected = run_ranks(2, train_all, root, references)[0]
    faults = {}
    for world in sorted({world_of(names) for names in chosen}):
        of_world = [names for names in chosen if world_of(names) == world]
        for begin in range(0, len(of_world), group_size):
            group = of_world[begin : begin + group_size]
            found = run_ranks(world, train_all, root, group, timeout_s=60 * len(group))
            for names in group:
                fault = max(fault_of(names, results[names], expected[reference_of(names)]) for results in found)
                report(f"{' + '.join(names)}: {fault or 'as plain FSDP'}")
                if fault:
                    faults[names] = fault
    return faults


def fault_of(names, result, expected):
    """Return what is wrong with a result, or ''."""
    if isinstance(result, str):
        return result
    # One graph serves all layers. With adapters the first layer's input takes no gradient; an evaluation takes none at all.
    n_graphs = ("compile" in names) * (1 + ("lora" in names))
    if result.graphs != [n_graphs] * STEPS + [n_graphs + ("compile" in names)]:
        return f"graphs after each step: {result.graphs}"
    precision = precision_of(names)
    measured, (of_steps, of_changes) = differences(result, expected, precision), BOUNDS[precision]
    allowed = (
        of_steps * (10 if "lora" in names else 1),
        of_changes,
    )  # new adapters multiply differences, as B begins at 0
    return (
        "" if all(value <= bound for value, bound in zip(measured, allowed, strict=True)) else f"differs by {measured}"
    )


RUN_FLAGS = (
    "--preset", "demo", "--training.max_steps", 4, "--training.micro_batch_size", 1, "--training.global_batch_size", 8,
    "--data.seq_len", 64, "--data.max_bytes", 300_000, "--optimizer.lr", "1e-3", "--optimizer.warmup", 0, "--evaluation.every", 0,
    "--checkpoint.every", 2, "--parallel.device", "cpu", "--parallel.numerics", "fp32", "--model.attention", "sdpa",
    "--parallel.tp_across_hosts", "true",
)  # fmt: skip
MESHES = ("zero2", "hsdp", "tp", "cp", "1f1b", "gpipe", "interleaved")
RUN_BOUNDS = {"fp32": (1e-4, 1e-3), "bf16": (3e-2, 0.1)}  # of losses and norms, and of logits


def elsewhere(names, generator):
    """Return the same features on another mesh."""
    rest = [name for name in names if name not in MESHES]
    others = [tuple(name for name in FEATURES if name in (*rest, mesh)) for mesh in MESHES if mesh not in names]
    return generator.choice([other for other in others if not contradict(other) and not refusal(other)])


def write_demo(root):
    """Write the model that whole runs train, and have them find torchao."""
    make_demo(root / "model", layers=4)
    (root / "torchao").symlink_to(offered.TORCHAO / "torchao")


def run_fault(root, number, names, other):
    """Train, resume half-way on another mesh, and export both, by the programs; return what is wrong, or ''."""
    runs = root / f"{number}", root / f"{number}-elsewhere"
    checkpoints = ("--checkpoint.dir", runs[0] / "checkpoints")
    for run, features, more in ((runs[0], names, ()), (runs[1], other, ("--resume", checkpoints[1] / "step-00000002"))):
        settings = settings_of(features) | {"data.packing": "isolated" if "packing" in features else "concatenated"}
        flags = [word for key, value in settings.items() for word in (f"--{key}", str(value).lower())]
        argv = [*RUN_FLAGS, "--model.path", root / "model", "--run-dir", run, *flags, *more]
        done = run_program("llama405b.train:run_and_exit", *argv, cwd=root, world=world_of(features), timeout_s=300)
        if done.returncode:
            return f"{' + '.join(features)}: {done.stdout[-500:]} {done.stderr[-1500:]}"
    steps = [_read_steps(run) for run in runs]
    logits = run_ranks(1, _export_and_compute, root, runs, timeout_s=300)[0]
    of_steps = max(
        abs(a - b) / abs(b)
        for one, two in zip(steps[1], steps[0][2:], strict=True)
        for a, b in zip(one, two, strict=True)
    )
    of_logits = float((logits[1] - logits[0]).norm() / logits[0].norm())
    bounds = RUN_BOUNDS[precision_of(names)]
    return "" if of_steps <= bounds[0] and of_logits <= bounds[1] else f"differs by {of_steps}, logits by {of_logits}"


def _read_steps(run):
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def _export_and_compute(_, root, runs):
    """Export each run, and compute logits by transformers alone."""
    from transformers import AutoModelForCausalLM

    from llama405b_tools.verbs import export

    logits = []
    for run in runs:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = export.main([str(run), str(run / "exported"), "--dtype", "fp32", "--model", str(root / "model")])
        assert code == 0, run
        model = AutoModelForCausalLM.from_pretrained(run / "exported", dtype=torch.float32)
        with torch.no_grad():
            logits.append(model(input_ids=torch.arange(40)[None]).logits)
    return logits


def train_all(me, root, combinations):
    """Train each combination; return its ``Result``, or the text of an error, by combination."""
    sys.path.append(str(offered.TORCHAO))
    results = {}
    for names in combinations:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                results[names] = train(me, root, names)
        except Exception as error:
            results[names] = f"{type(error).__name__}: {error}"
    return results


class Result(NamedTuple):
    """What training did."""

    steps: list[
        tuple[float, float]
    ]  # losses and gradient norms; then an evaluation's loss and terms, and one more step
    changes: dict[str, torch.Tensor]  # of each parameter that the rank has, up to the evaluation
    graphs: list[int]  # compiled after each step, and after the evaluation


def train(me, root, names):
    """Train by the trainer's own code."""
    from mesh_rig import whole_weights
    from torch._dynamo.utils import counters

    from llama405b.distributed.collectives import all_reduce_sum
    from llama405b.optim.step import train_step

    torch._dynamo.reset()
    counters.clear()
    files, config = root / "model", config_of(names)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(files)))
    me, updater, passes = offered.build(me, root, config, files, isolated="packing" in names)
    master = updater.master
    before, steps, graphs = whole_weights(master), [], []
    for step in range(STEPS):
        batches = micro_batches(step, me, is_packed="packing" in names)
        result = train_step(passes, updater, batches, max_norm=1.0)
        steps.append((result.loss, result.grad_norm))
        graphs.append(counters["stats"]["unique_graphs"])
    updater.wait()
    after = whole_weights(master)  # an evaluation leaves weights gathered, in the dtype that computes
    with torch.no_grad():
        nll, count = (
            sum(values) for values in zip(*((passes.evaluate(b), passes.count(b)[0]) for b in batches), strict=True)
        )
    steps.append(tuple(all_reduce_sum(torch.stack([nll, count])).tolist()))
    graphs.append(counters["stats"]["unique_graphs"])
    result = train_step(passes, updater, micro_batches(STEPS, me, is_packed="packing" in names), max_norm=1.0)
    steps.append((result.loss, result.grad_norm))
    updater.wait()
    return Result(steps, {name: after[name].float() - value.float() for name, value in before.items()}, graphs)


def micro_batches(step, me, *, is_packed):
    """Return a rank's micro-batches of a batch that is the same on any mesh; of packed ones the third step has no boundary."""
    from llama405b.data.batch import Batch

    generator = torch.Generator().manual_seed(step)
    ids_BS = torch.randint(0, VOCABULARY, (BATCH, SEQ + 1), generator=generator)
    targets_BS, positions_BS = ids_BS[:, 1:].clone(), None
    if is_packed and step < 2:  # a batch without a boundary has no positions
        positions_BS = torch.arange(SEQ).repeat(BATCH, 1)
        for row in range(BATCH):
            cut = 1 + (3 * row + step) % (SEQ - 1)
            positions_BS[row, cut:] -= cut
            targets_BS[row, cut - 1] = -100
    first, n_local = MicrobatchSplit(BATCH, me.dp.size).first_and_count(me.dp.rank)
    rows = slice(first, first + n_local)
    batch = Batch(ids_BS[rows, :-1], targets_BS[rows], None if positions_BS is None else positions_BS[rows])
    return [part.to(me.device) for part in batch.split(1)]


def differences(result, expected, precision="fp32"):
    """Return the largest relative difference of losses and norms, and of the change of any parameter.

    Rounding to BF16 and FP8 grows from step to step in gradients, so that only the first step's norm counts there.
    """
    pairs = [
        (a, b)
        for number, (one, other) in enumerate(zip(result.steps, expected.steps, strict=True))
        for a, b in [*zip(one, other, strict=True)][: 2 if precision == "fp32" or not number else 1]
    ]
    of_steps = max(abs(a - b) / abs(b) for a, b in pairs)
    return of_steps, max(_difference(change, expected.changes[name]) for name, change in result.changes.items())


def _difference(change, expected):
    """Return the relative difference of two tensors; of what must not change, whether it did."""
    return float((change - expected).norm() / (expected.norm() if expected.any() else 1))
