"""A small Llama in FP64 on any mesh of real ranks, and steps that can be compared with those of a single process."""

import contextlib
import functools

import torch

from llama405b.data.batch import Batch

BATCH, MICRO, SEQ, VOCABULARY, STEPS = 12, 3, 16, 136, 3
SHAPE = {
    "hidden_size": 32, "intermediate_size": 56, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab": VOCABULARY,
}  # fmt: skip
MAX_NORM, LR = 0.8, 1e-2
WORDS = 29  # of a part of the vocabulary, where the loss is computed by parts


@contextlib.contextmanager
def in_dtype():
    """Have transformers' RMSNorm compute in the dtype it is given: in FP32 it would round what differs by 1e-16 to what differs by 1e-8."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    before, LlamaRMSNorm.forward = LlamaRMSNorm.forward, forward
    try:
        yield
    finally:
        LlamaRMSNorm.forward = before


def write_model(directory, *, tied=False, layers=4, **more):
    from tiny_models import write_llama

    return write_llama(directory, tied=tied, layers=layers, **SHAPE, **more)


def packed(step):
    """A batch: documents that share sequences, whose cut moves, and targets that do not count."""
    generator = torch.Generator().manual_seed(step)
    ids_BS = torch.randint(0, VOCABULARY, (BATCH, SEQ + 1), generator=generator)
    targets_BS = ids_BS[:, 1:].clone()
    positions_BS = torch.arange(SEQ).repeat(BATCH, 1)
    for row in range(BATCH):
        cut = 1 + (3 * row + step) % (SEQ - 1)
        positions_BS[row, cut:] -= cut
        targets_BS[row, cut - 1] = -100
    targets_BS[::2, : SEQ // 2] = -100
    return Batch(ids_BS[:, :-1], targets_BS, positions_BS)


def micro_batches(step, me, micro):
    """This rank's, as its reader deals them."""
    from llama405b.settings.axes import MicrobatchSplit

    dealing, batch = MicrobatchSplit(BATCH // micro, me.dp.size), packed(step)
    first, n_own = dealing.first_and_count(me.dp.rank)
    idle = dealing.grad_accum_steps - n_own
    rows = slice((first - idle) * micro, (first + n_own) * micro)
    own = Batch(batch.ids_BS[rows], batch.targets_BS[rows].clone(), batch.positions_BS[rows])
    own.targets_BS[: idle * micro] = -100
    return [part.to(me.device) for part in own.split(micro)]


def train(
    me,
    directory,
    *,
    micro=MICRO,
    steps=STEPS,
    dtype=torch.float64,
    settings=None,
    recompute="full",
    activations="device",
    before=None,
    lr=LR,
    groups=(),
    adapter=None,
    optimizer="adamw",
):
    """Train; returns each step's loss and norm, and the whole weights afterwards."""
    from llama405b.distributed.ranks import with_mesh
    from llama405b.model import head
    from llama405b.optim.step import train_step
    from llama405b.settings.schema import Optimizer, Parallel

    head.VOCAB_CHUNK = WORDS
    settings = dict(settings or {})
    loss = settings.pop("loss", "full")
    parallel = Parallel(numerics="fp32", **settings)
    me = with_mesh(me, parallel)
    settings_of = Optimizer(kind=optimizer, lr=lr, groups=groups)
    model, passes, updater = build(
        me, directory, parallel, settings_of, dtype, recompute=recompute, adapter=adapter, loss=loss
    )
    if activations == "host":
        keep_on_host(me, directory, model, parallel, recompute, micro, dtype)
    if before:
        before(model, passes, updater)
    results = []
    with in_dtype():
        for step in range(steps):
            result = train_step(passes, updater, micro_batches(step, me, micro), max_norm=MAX_NORM)
            results.append((result.loss, result.grad_norm))
        updater.wait()
    return results, whole_weights(updater.master)


def keep_on_host(me, directory, model, parallel, recompute, micro, dtype):
    from llama405b.model import host_inputs
    from llama405b.predict.run_shape import PredictedRun
    from llama405b.settings.schema import Config, Data, Model, Training
    from llama405b.spec.models import read_llama

    config = Config(
        Model(activation_checkpointing=recompute, activations="host"),
        Data(seq_len=SEQ),
        Training(global_batch_size=BATCH, micro_batch_size=micro),
        parallel=parallel,
    )
    run = PredictedRun.from_config(read_llama(directory), config, me.world_size, axes=me.axes)
    count = run.inputs_on_host(me.axes.coordinate(me.index, ("pp",)).rank)
    return host_inputs.offload_inputs(model, count, run.input_shape, dtype, me.device, lambda *_: None)


def build(
    me,
    directory,
    parallel,
    optimizer,
    dtype,
    *,
    recompute="full",
    how="rank0",
    compiles=False,
    adapter=None,
    loss="full",
):
    from llama405b.model import llama
    from llama405b.model.llama import add_adapters, checkpoint_activations, compile_layers
    from llama405b.optim.build_updater import build_updater
    from llama405b.parallel import load_weights
    from llama405b.parallel.passes import build_forward_backward
    from llama405b.parallel.split import shard_layout_of, split_model
    from llama405b.settings.axes import Recompute
    from llama405b.settings.schema import Model
    from llama405b.spec.models import read_llama

    config = llama.read_hf_config(directory)
    whole = llama.build_on_meta(config, "sdpa", dtype)
    llama.freeze(whole, optimizer.groups, freeze_all=bool(adapter))
    holdings = shard_layout_of(whole, parallel, me)
    adapt = functools.partial(add_adapters, adapter=adapter, dtype=dtype, groups=optimizer.groups)
    model = split_model(whole, parallel, me, adapt if adapter else None)
    load_weights.load(
        model, directory, how, me, lambda *_: None, offload=parallel.offload != "none", shard_layout=holdings
    )
    if adapter:
        load_weights.load_adapter(model, read_llama(directory), adapter, 0, me, holdings, lambda *_: None)
    if compiles:
        compile_layers(model)
    checkpoint_activations(model, Recompute.parse(recompute))
    updater = build_updater(model, optimizer, parallel, me.device)
    return model, build_forward_backward(parallel, model, me, Model(loss=loss, compile=compiles)), updater


def whole_weights(model):
    """Every weight in one piece, by its name in the file."""
    from torch.distributed.tensor import DTensor

    from llama405b.model.llama import strip_wrappers

    return {
        strip_wrappers(name): (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


@in_dtype()
def single(
    directory,
    *,
    micro=MICRO,
    steps=STEPS,
    dtype=torch.float64,
    lr=LR,
    frozen=lambda _: False,
    adapted=lambda model: model,
    optimizers=None,
):
    """The same steps in this process alone, by plain PyTorch. ``adapted``: returns the model to train instead.

    ``optimizers``: returns what updates it, by parameters' names and the learning rate; None: AdamW.
    """
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    model = adapted(AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa"))
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        parameter.requires_grad_(parameter.requires_grad and not frozen(name))
    vectors = [p for name, p in named.items() if "norm" in name or name.endswith(".bias")]
    matrices = [p for name, p in named.items() if "norm" not in name and not name.endswith(".bias")]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    updating = [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)]
    if optimizers:
        updating = optimizers(named, lr)
    results = []
    for step in range(steps):
        batch = packed(step)
        n_targets, loss = int((batch.targets_BS != -100).sum()), 0.0
        for part in batch.split(micro):
            logits = model(input_ids=part.ids_BS, position_ids=part.positions_BS, use_cache=False).logits
            nll = F.cross_entropy(logits.flatten(0, 1), part.targets_BS.flatten(), reduction="sum")
            (nll / n_targets).backward()
            loss += float(nll) / n_targets
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for optimizer in updating:
            optimizer.step()
        model.zero_grad()
        results.append((loss, float(norm)))
    return results, {name: p.detach().clone() for name, p in model.named_parameters()}


def difference(found, right):
    """The largest relative difference of losses and norms, and of weights."""
    (results, weights), (expected, whole) = found, right
    assert weights.keys() == whole.keys()
    of_steps = max(
        abs(a - b) / abs(b)
        for one, other in zip(results, expected, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    return of_steps, max(float((weights[name] - whole[name]).norm() / whole[name].norm()) for name in whole)
