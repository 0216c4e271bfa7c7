"""Every run that auto, --search, would help and --what-if can name over families and clusters; each kind, built and stepped in small."""

import contextlib
import dataclasses
import io
import itertools
import json
import random
import sys
from pathlib import Path

import torch

from llama405b.contract.errors import UserError
from llama405b.predict.estimate import Cluster
from llama405b.predict.hardware import read_gpus
from llama405b.predict.run_shape import PredictedRun
from llama405b.predict.search import Prediction, rank_variants, remedies, resolve_auto
from llama405b.settings.axes import Axes
from llama405b.settings.config import PRESET_DIR, with_global_batch
from llama405b.settings.rules import find_faults
from llama405b.settings.schema import Adapter, Config, Data, Model, Optimizer, Parallel, Training
from llama405b.spec.models import parse_llama
from llama405b.spec.rules import find_mesh_faults

SHAPES = json.loads((PRESET_DIR / "architectures.json").read_text())
GEMMA = {
    "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
    "num_key_value_heads": 1, "vocab_size": 262_144, "sliding_window": 512, "max_position_embeddings": 32_768,
}  # fmt: skip
PHI = {
    "model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17_920, "num_hidden_layers": 40, "num_attention_heads": 40,
    "num_key_value_heads": 10, "vocab_size": 100_352, "max_position_embeddings": 16_384,
}  # fmt: skip
MODELS = {
    name: SHAPES[name] for name in ("llama3.1-405b", "llama3.1-8b", "llama3.2-1b", "qwen2.5-7b", "qwen3-8b", "olmo2-7b")
}
MODELS |= {"gemma3": GEMMA, "phi4": PHI}
CLUSTERS = [(8, "h100-80"), (64, "h100-80"), (128, "a100-80")]  # ranks of hosts of 8, and their GPUs
LORA = Adapter("lora")
ASKED = [  # settings, by section
    {},
    {"parallel": {"offload": "optimizer"}},
    {"parallel": {"numerics": "pure-bf16"}},
    {"parallel": {"numerics": "fp8"}, "model": {"compile": True}},
    {"parallel": {"numerics": "bf16-stochastic", "fsdp_unit": "sublayer"}},
    {"parallel": {"strategy": "zero2"}},
    {"parallel": {"strategy": "hsdp"}},
    {"parallel": {"strategy": "ddp"}},
    {"parallel": {"prefetch": 2}},
    {"adapter": LORA},
    {"adapter": LORA, "model": {"fused": "true"}},
    {"model": {"fused": "false"}},
    {"model": {"compile": True}},
    {"model": {"activations": "host"}},
    {"optimizer": {"kind": "lion"}},
    {"optimizer": {"kind": "muon"}},
]
SEQ, BATCH = 16, 8
TORCHAO = Path(__file__).parents[2] / ".venv/torchao"  # apart, since transformers imports it wherever it is installed


def asked_config(settings, seq_len, batch):
    """A configuration as a user asks for it."""
    sections = {"model": Model(path="any"), "parallel": Parallel(), "optimizer": Optimizer()}
    changed = {
        name: value if isinstance(value, Adapter) else dataclasses.replace(sections[name], **value)
        for name, value in settings.items()
    }
    training = Training(global_batch_size=batch, micro_batch_size=1)
    return dataclasses.replace(Config(Model(path="any"), Data(paths=("any",), seq_len=seq_len), training), **changed)


def offered(model, world, gpu, settings):
    """Yield the configuration of everything that is offered for a model, a cluster and what was asked for."""
    llama, cluster, batch = parse_llama(MODELS[model], model), Cluster(read_gpus()[gpu]), 2 * world
    config = asked_config(settings, min(4096, llama.window or 4096), batch)
    if [*find_faults(config)] or (config.parallel.numerics == "fp8" and not cluster.gpu.fp8_flops):
        return  # no user gets that far
    for strategy, again in itertools.product(("auto", "3d"), ("auto", "full")):
        asked = dataclasses.replace(
            config,
            parallel=dataclasses.replace(config.parallel, strategy=strategy),
            model=dataclasses.replace(config.model, activation_checkpointing=again),
        )
        if config.parallel.strategy_spec != Parallel().strategy_spec or [*find_faults(asked)]:
            continue
        try:
            yield resolve_auto(asked, llama, world, 8, cluster, 2e12), llama
        except UserError:
            continue
    axes = Axes.from_parallel(config.parallel, world, 8)
    run = PredictedRun.from_config(llama, with_global_batch(config, axes), world)
    prediction = Prediction.from_run(run, cluster, 2e12)
    others = [*rank_variants(prediction, ("fp32", "bf16")), *(other for _, other in remedies(prediction))]
    for other in others:
        yield (
            dataclasses.replace(
                other.run.apply_to(config),
                training=dataclasses.replace(
                    config.training, micro_batch_size=other.run.micro_batch, global_batch_size=other.run.global_batch
                ),
            ),
            llama,
        )


def every_offer():
    """Yield all that is offered: model, ranks, configuration and shape."""
    for model, (world, gpu), settings in itertools.product(MODELS, CLUSTERS, ASKED):
        for config, llama in offered(model, world, gpu, settings):
            yield model, world, config, llama


def faults(config, llama, world):
    """What the trainer has against a configuration."""
    axes = Axes.from_parallel(config.parallel, world, 8)
    return [
        *find_faults(config),
        *find_mesh_faults(axes, config.parallel, llama, config.data.seq_len, 8),
    ]


@dataclasses.dataclass(frozen=True, order=True)
class Kind:
    """What matters for whether a run can be built and stepped."""

    model: str
    strategy: str
    tp: int
    cp: int
    pp: int
    copies: int
    pp_schedule: str
    numerics: str
    offload: str
    moments: str
    fsdp_unit: str
    fsdp_embedding: bool
    prefetch: bool
    reshard: bool
    recompute: str
    activations: str
    loss: str
    compile: bool
    fused: bool
    lora: bool
    optimizer: str

    @property
    def world(self):
        """The ranks that it takes in small."""
        split = self.tp * self.cp * self.pp * self.copies
        return split * (4 if self.reshard else 2 if split == 1 else 1)


def kind_of(model, config):
    """Return what a configuration is an example of; sizes above 1 are 2."""
    parallel, mode = config.parallel, config.model.activation_checkpointing
    recompute = "operators" if mode.startswith("operators") else "every:2" if mode.startswith("every") else mode
    copies = 2 if parallel.dp_replicate > 1 or parallel.strategy_spec.copies != "one" else 1
    return Kind(
        model, parallel.strategy, *(min(2, size) for size in (parallel.tp, parallel.cp, parallel.pp)), copies, parallel.pp_schedule,
        parallel.numerics, parallel.offload, parallel.moments, parallel.fsdp_unit, parallel.fsdp_embedding, parallel.prefetch > 0,
        parallel.reshard_after_forward > 0, recompute, config.model.activations, config.model.loss, config.model.compile,
        config.fuses(parse_llama(MODELS[model], model).is_fusible), config.adapter.is_enabled, config.optimizer.kind,
    )  # fmt: skip


def small_config(kind):
    """Return the settings of a kind, for a small model."""
    return Config(
        Model(
            weights="random", attention="sdpa", activation_checkpointing=kind.recompute, activations=kind.activations, loss=kind.loss,
            compile=kind.compile, fused="true" if kind.fused else "false",
        ),
        Data(paths=("any",), seq_len=SEQ),
        Training(global_batch_size=BATCH, micro_batch_size=1),
        parallel=Parallel(
            strategy=kind.strategy, dp_replicate=kind.copies if kind.copies > 1 and kind.strategy not in ("ddp", "hsdp") else 0,
            tp=kind.tp, cp=kind.cp, pp=kind.pp, pp_schedule=kind.pp_schedule, numerics=kind.numerics, offload=kind.offload,
            moments=kind.moments, fsdp_unit=kind.fsdp_unit, fsdp_embedding=kind.fsdp_embedding, prefetch=2 * kind.prefetch,
            reshard_after_forward=2 * kind.reshard, device="cpu", tp_across_hosts=True,
        ),
        adapter=Adapter("lora", rank=2) if kind.lora else Adapter(),
        optimizer=Optimizer(kind=kind.optimizer, lr=1e-3),
    )  # fmt: skip


def small_model(name, directory):
    """Write the config.json of a small model of a family; its weights are random."""
    described = {key: value for key, value in MODELS[name].items() if key not in ("rope_scaling", "head_dim")}
    described |= {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": None,
    }  # fmt: skip
    described |= {"head_dim": 8} if name in ("qwen3-8b", "gemma3") else {}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(described))


def step_all(me, root, kinds):
    """Build each kind by the trainer's own code and take two steps; return what went wrong, by kind."""
    sys.path.append(str(TORCHAO))
    wrong = {}
    for kind in kinds:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                loss = _step(me, root, kind)
        except Exception as error:
            wrong[kind] = f"{type(error).__name__}: {error}"
        else:
            if not 0 < loss < 20:
                wrong[kind] = f"loss {loss}"
    return wrong


def build(me, root, config, files, *, isolated=False):
    """Build a run by the trainer's own code; return the rank on its mesh, the updater, and what runs forwards and backwards."""
    from llama405b.contract.paths import RunDir
    from llama405b.distributed.ranks import with_mesh
    from llama405b.parallel.passes import build_forward_backward
    from llama405b.spec.models import read_llama
    from llama405b.training.build import build_host_inputs, build_model, build_pinned_updater
    from llama405b.training.context import RankContext
    from llama405b.training.journal import HeartbeatWriter

    me = with_mesh(me, config.parallel)
    context = RankContext.from_rank(me, HeartbeatWriter(RunDir(root / "run"), me))
    torch.manual_seed(0)
    module, master = build_model(config, files, context, from_checkpoint=False)
    updater = build_pinned_updater(config, module, master, context)
    passes = build_forward_backward(config.parallel, module, me, config.model, isolated=isolated)
    build_host_inputs(config, module, read_llama(files), context)
    return me, updater, passes


def _step(me, root, kind):
    from llama405b.data.batch import Batch
    from llama405b.optim.step import train_step

    me, updater, passes = build(me, root, small_config(kind), root / kind.model)
    generator = torch.Generator().manual_seed(me.dp.rank)
    n_local = BATCH // me.dp.size
    for _ in range(2):
        ids_BS = torch.randint(0, 64, (n_local, SEQ + 1), generator=generator)
        result = train_step(passes, updater, Batch(ids_BS[:, :-1], ids_BS[:, 1:]).split(1), max_norm=1.0)
    updater.wait()
    return result.loss


def sample(kinds, count, seed):
    """Draw kinds, each value of each field at least once where there are enough."""
    draw, chosen = random.Random(seed), []
    rest = sorted(kinds)
    draw.shuffle(rest)
    fields = [field.name for field in dataclasses.fields(Kind)]
    seen = set()
    for kind in rest:
        values = {(name, getattr(kind, name)) for name in fields}
        if values - seen:
            chosen.append(kind)
            seen |= values
    chosen = chosen[:count]
    return chosen + [kind for kind in rest if kind not in chosen][: count - len(chosen)]
