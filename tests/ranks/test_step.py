"""The numerics and communication of a step, on real ranks."""

import json
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from llama405b.data.batch import Batch
from ranks_rig import run_program, run_ranks

STEPS, GLOBAL_BATCH, SEQ = 10, 6, 16


def _batches():
    generator = torch.Generator().manual_seed(7)
    batches = []
    for _ in range(STEPS):
        first = torch.randint(0, 131, (GLOBAL_BATCH, 1), generator=generator)
        ids = (first + torch.arange(SEQ + 1)) % 131  # each token foretells the next
        x, y = ids[:, :-1], ids[:, 1:].clone()
        y[::2, : SEQ // 2] = -100  # ranks hold different numbers of targets
        batches.append((x, y))
    return batches


def _sharded(me, directory, *, offload=False, checkpointing=True, numerics="fp32"):
    from llama405b.model import llama
    from llama405b.model.llama import checkpoint_activations
    from llama405b.parallel import fsdp as shard
    from llama405b.parallel import load_weights
    from llama405b.settings.schema import Parallel

    parallel = Parallel(numerics=numerics, offload="all" if offload else "none")
    module = llama.build_on_meta(llama.read_hf_config(directory), "sdpa", shard.shard_dtype(parallel))
    shard.shard_model(module, parallel, me.device)
    load_weights.load(module, directory, "rank0", me, lambda *_: None, offload=offload)
    if checkpointing:
        checkpoint_activations(module)
    return module


def _losses(me, directory, micro=None, offload=False, tied_fsdp1=False, kind="fsdp2", numerics="fp32", overlap=False):
    from llama405b.optim.build_updater import build_updater
    from llama405b.optim.step import train_step
    from llama405b.parallel.passes import MicrobatchLoop
    from llama405b.settings.schema import Optimizer, Parallel

    if kind == "fsdp1":
        import torch.distributed.fsdp._init_utils as init_utils

        from llama405b.model import llama
        from llama405b.model.llama import checkpoint_activations
        from llama405b.parallel import fsdp

        init_utils._check_module_states_for_sync_module_states = lambda _states: None  # torch's refusal on CPU
        module = fsdp.load_fsdp1(
            directory, llama.read_hf_config(directory), "sdpa", Parallel(numerics="fp32", strategy="fsdp1"), me
        )
        checkpoint_activations(module)
    else:
        module = _sharded(me, directory, offload=offload, numerics=numerics)
    parallel = Parallel(strategy=kind, offload="all" if offload else "none", overlap=overlap)
    updater = build_updater(module, Optimizer(lr=3e-3), parallel, me.device)
    each = GLOBAL_BATCH // me.world_size
    losses, norms = [], []
    for x, y in _batches():
        x, y = x[me.index * each :][:each], y[me.index * each :][:each]
        size = micro or each
        parts = Batch(x, y).split(size)
        result = train_step(MicrobatchLoop(module, me.dp.size), updater, parts, max_norm=1.0)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return losses, norms


def _plain(directory):
    """The loop anyone would write, on the Hugging Face model."""
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(directory, attn_implementation="sdpa")
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for x, y in _batches():
        loss = F.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def plain(tiny):
    return _plain(tiny)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_losses_equal_a_plain_loop(tiny, plain, world):
    for losses, _ in run_ranks(world, _losses, tiny):
        assert losses == pytest.approx(plain, abs=1e-3)
        assert losses[0] != pytest.approx(losses[-1], abs=1e-2)  # it learns


def test_tied_embeddings_train_like_a_plain_loop(tiny_tied):
    for losses, _ in run_ranks(2, _losses, tiny_tied):
        assert losses == pytest.approx(_plain(tiny_tied), abs=1e-3)


def test_accumulation_changes_nothing(tiny):
    whole, parts = run_ranks(2, _losses, tiny)[0], run_ranks(2, _losses, tiny, 1)[0]
    assert parts[0] == pytest.approx(whole[0], rel=1e-5)
    assert parts[1][0] == pytest.approx(whole[1][0], rel=1e-5)  # later ones differ as rounding grows


def test_fsdp1_equals_fsdp2(tiny, tiny_tied):
    for directory in (tiny, tiny_tied):
        fsdp1 = run_ranks(2, _losses, directory, None, False, False, "fsdp1")[0]
        fsdp2 = run_ranks(2, _losses, directory)[0]
        assert fsdp1[0] == pytest.approx(fsdp2[0], abs=1e-3)
        assert fsdp1[1][0] == pytest.approx(fsdp2[1][0], rel=1e-5)


def test_offload_runs_on_cpu(tiny, plain):
    losses = run_ranks(2, _losses, tiny, None, True)[0][0]
    assert losses == pytest.approx(plain, abs=1e-3)


@pytest.mark.parametrize("numerics", ["fp32-master", "pure-bf16"])
def test_bf16_numerics_learn(tiny, plain, numerics):
    losses = run_ranks(2, _losses, tiny, None, False, False, "fsdp2", numerics)[0][0]
    assert losses == pytest.approx(plain, abs=0.2)
    assert losses[-1] < losses[0]


def _count(me, directory):
    from torch.distributed.tensor.debug import CommDebugMode

    from llama405b.optim.build_updater import build_updater
    from llama405b.optim.step import train_step
    from llama405b.parallel.passes import MicrobatchLoop
    from llama405b.settings.schema import Optimizer, Parallel

    module = _sharded(me, directory)
    updater = build_updater(module, Optimizer(), Parallel(), me.device)
    x, y = _batches()[0]
    counts = []
    for _ in range(2):
        with CommDebugMode() as comm:
            train_step(MicrobatchLoop(module, me.dp.size), updater, [Batch(x[:3], y[:3])], max_norm=1.0)
        by_name = {str(op): n for op, n in comm.get_comm_counts().items()}
        counts.append(
            (
                sum(n for op, n in by_name.items() if "all_gather" in op or "allgather" in op),
                sum(n for op, n in by_name.items() if "reduce_scatter" in op),
            )
        )
    return counts


def test_each_unit_costs_what_it_must(tiny, tiny_tied):
    # 4 layers x 2 all-gathers and 1 reduce-scatter, the head 1 and 1, the embedding 1 and 1
    assert run_ranks(2, _count, tiny) == [[(10, 6)] * 2] * 2
    # embedding, norm and head are one unit: gathered once, kept for the backward
    assert run_ranks(2, _count, tiny_tied) == [[(9, 5)] * 2] * 2


def _poison(me, directory, factor, where):
    from llama405b.optim.build_updater import build_updater
    from llama405b.optim.step import NoGradientError, NonFiniteError, train_step
    from llama405b.parallel.passes import MicrobatchLoop
    from llama405b.settings.schema import Optimizer, Parallel

    module = _sharded(me, directory)
    updater = build_updater(module, Optimizer(), Parallel(), me.device)
    before = [p.to_local().clone() for p in module.parameters()]
    if me.index in where:
        module.model.norm.register_forward_hook(lambda *args: args[2] * factor)
    x, y = _batches()[0]
    try:
        train_step(MicrobatchLoop(module, me.dp.size), updater, [Batch(x[:3], y[:3])], max_norm=1.0)
    except (NonFiniteError, NoGradientError) as error:
        same = all(torch.equal(b, p.to_local()) for b, p in zip(before, module.parameters(), strict=True))
        return str(error), same
    return "went on"


@pytest.mark.parametrize(
    ("factor", "where", "said"),
    [
        (float("nan"), [1], "loss nan, gradient norm nan"),
        (0.0, [0, 1], "has a gradient of exactly 0: .* trained; see loss\\(\\) in --extend, and the model's code"),
    ],
)
def test_nan_on_one_rank_or_no_gradient_stops_all_before_the_weights_change(tiny, factor, where, said):
    for words, same in run_ranks(2, _poison, tiny, factor, where):
        assert re.search(said, words)
        assert same


def _masked(me, directory):
    from llama405b.optim.build_updater import build_updater
    from llama405b.optim.step import train_step
    from llama405b.parallel.passes import MicrobatchLoop
    from llama405b.settings.schema import Optimizer, Parallel

    module = _sharded(me, directory)
    updater = build_updater(module, Optimizer(), Parallel(), me.device)
    before = [p.to_local().clone() for p in module.parameters()]
    x, y = (each[:3] for each in _batches()[0])
    nothing = train_step(
        MicrobatchLoop(module, me.dp.size), updater, [Batch(x, torch.full_like(y, -100))], max_norm=1.0
    )
    same = all(torch.equal(b, p.to_local()) for b, p in zip(before, module.parameters(), strict=True))
    mine = y if me.index == 1 else torch.full_like(y, -100)
    one_rank = train_step(MicrobatchLoop(module, me.dp.size), updater, [Batch(x, mine)], max_norm=1.0)
    return nothing, same, one_rank.n_targets


def test_a_step_in_which_nothing_is_to_be_learned_changes_nothing(tiny):
    [(nothing, same, targets), other] = run_ranks(2, _masked, tiny)
    assert (nothing, same, targets, other) == (None, True, targets, (None, True, targets))
    assert targets > 0


def train(demo, place, prompt, steps):
    """Train on documents of a prompt and a completion; returns the exit code and what the run directory says."""
    lines = [json.dumps({"prompt": prompt, "completion": f"{i} " * 40}) for i in range(300)]
    (place / "d.jsonl").write_text("\n".join(lines))
    flags = {"model.path": demo, "data.paths": place / "d.jsonl", "data.seq_len": 8, "training.global_batch_size": 1,
             "training.micro_batch_size": 1, "training.max_steps": steps, "checkpoint.every": 0}  # fmt: skip
    words = [f"--{key}={value}" for key, value in flags.items()]
    done = run_program("llama405b.train:run_and_exit", "--preset", "demo", "--run-dir", "x", *words, cwd=place)
    events = [json.loads(line) for line in (place / "x/events/rank-0.jsonl").read_text().splitlines()]
    metrics = place / "x/metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    taken = [line["step"] for line in lines if "loss" in line]
    return done, [event for event in events if event["kind"] == "skipped"], taken


def test_steps_with_nothing_to_learn_are_skipped_counted_and_said(demo, tmp_path):
    done, skipped, taken = train(demo, tmp_path, "a long question " * 8, 40)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [event["step"] for event in skipped]
    assert 0 < len(steps) < 20
    assert [event["count"] for event in skipped] == list(range(1, len(steps) + 1))
    assert sorted([*steps, *taken]) == list(range(1, 41))
    assert f"step {steps[0]}/40  skipped: every target is masked" in done.stdout


def test_a_run_with_nothing_to_learn_in_most_steps_is_refused(demo, tmp_path):
    done, skipped, _ = train(demo, tmp_path, "a very long question " * 400, 400)
    assert done.returncode == 2
    assert "steps have no target token; " in done.stderr
    assert len(skipped) < 30


def test_a_stop_that_comes_at_the_very_end_does_not_kill():
    """The interpreter gives a signal its default back before it clears modules: SIGUSR1 then would end a good rank."""
    code = (
        "import os, runpy, signal, sys\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, me=os.getpid(), number=signal.SIGUSR1):\n"
        "        kill(me, number)\n"
        "late = Late()\n"
        "sys.argv[1:] = ['--schema']\n"
        "runpy.run_module('llama405b.train', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _rotary_dtypes(me, directory):
    import torch.distributed.fsdp._init_utils as init_utils

    from llama405b.model import llama
    from llama405b.parallel import fsdp
    from llama405b.settings.schema import Parallel

    init_utils._check_module_states_for_sync_module_states = lambda _states: None  # torch's refusal on CPU
    parallel = Parallel(numerics="pure-bf16", strategy="fsdp1")
    module = fsdp.load_fsdp1(directory, llama.read_hf_config(directory), "sdpa", parallel, me)
    weights = {parameter.dtype for parameter in module.parameters()}
    return weights, {buffer.dtype for name, buffer in module.named_buffers() if "inv_freq" in name}


def test_fsdp1_in_bf16_leaves_the_rotary_frequencies_in_fp32_on_every_rank(tiny):
    assert run_ranks(2, _rotary_dtypes, tiny) == [({torch.bfloat16}, {torch.float32})] * 2
