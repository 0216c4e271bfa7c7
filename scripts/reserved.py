"""Measure what torch's allocator allocates and reserves in steps of true shapes, without a GPU: tests/data/reserved.csv.

    .venv/bin/python scripts/reserved.py [WORD …] [--write]

On the stand-in for CUDA (`bash tests/run.sh --standin` builds it). No kernel runs and nothing large is copied, so steps of 405B
take seconds; FSDP2, streams and the allocator are torch's own. Each setting runs in a process of its own, as rank 0 of its ranks, and is
printed beside the prediction. With words: those settings alone that have them all. ``--write`` replaces the table.
"""

import contextlib
import csv
import dataclasses
import functools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

from llama405b.predict.memory import find_peak
from llama405b.predict.reserved import predict_reserved
from llama405b.predict.run_shape import PredictedRun
from llama405b.settings.axes import Recompute
from llama405b.settings.config import PRESET_DIR
from llama405b.settings.schema import ADAPTER_TARGETS, Adapter
from llama405b.spec.models import parse_llama

ROOT = Path(__file__).resolve().parents[1]
STANDIN = ROOT / "tests/standin/device"
TABLE = ROOT / "tests/data/reserved.csv"
ARCHITECTURES = json.loads((PRESET_DIR / "architectures.json").read_text())
STEPS = 3
TIMEOUT_S = 600
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Setting:
    """A run, as far as memory depends on it."""

    model: str
    world: int
    offload: str
    numerics: str = "fp32-master"
    unit: str = "layer"
    embedding: bool = True
    seq_len: int = 4096
    micro_batch: int = 1
    micro_batches: int = 1
    loss: str = "full"
    recompute: str = "full"
    activations: str = "device"
    prefetch: int = 0
    reshard_after_forward: int = 0
    lora: int = 0  # rank of adapters beside all matrices; 0: there are none
    fused: bool = False
    targets: str = ""  # beginnings of the names of the matrices that have adapters; "": all
    replicas: int = 1  # copies of the model: HSDP
    tp: int = 1
    cp: int = 1
    zero2: bool = False

    @property
    def adapter(self):
        """As settings have it."""
        if not self.lora:
            return Adapter()
        targets = tuple(f"{name}_proj" for name in self.targets.split()) or ADAPTER_TARGETS
        return Adapter("lora", rank=self.lora, targets=targets)

    @property
    def run(self):
        """As the plan takes it."""
        llama = parse_llama(ARCHITECTURES[self.model], self.model)
        batch = self.micro_batches * self.micro_batch * self.world // (self.tp * self.cp)
        shape = PredictedRun(llama, self.numerics, self.offload, self.world, self.seq_len, self.micro_batch, batch)
        return dataclasses.replace(
            shape,
            fsdp_unit=self.unit,
            fsdp_embedding=self.embedding,
            loss=self.loss,
            recompute=Recompute.parse(self.recompute),
            activations=self.activations,
            prefetch=self.prefetch,
            kept_by=self.reshard_after_forward,
            adapter=self.adapter,
            fused=self.fused,
            dp_shard=self.world // (self.replicas * self.tp * self.cp) if self.replicas > 1 else 0,
            tp=self.tp,
            cp=self.cp,
            keeps_weights=self.zero2,
        )


L405, L70, L8, L1 = "llama3.1-405b", "llama3.1-70b", "llama3.1-8b", "llama3.2-1b"
SETTINGS = [
    Setting(L405, 64, "optimizer"),
    Setting(L405, 64, "all"),
    Setting(L405, 64, "none", "pure-bf16"),
    Setting(L405, 64, "all", "pure-bf16"),
    Setting(L405, 64, "all", micro_batches=2),
    Setting(L405, 64, "optimizer", micro_batches=4),
    Setting(L405, 64, "all", micro_batch=2),
    Setting(L405, 64, "all", seq_len=8192),
    Setting(L405, 64, "optimizer", seq_len=2048),
    Setting(L405, 64, "all", unit="sublayer"),
    Setting(L405, 64, "none", "pure-bf16", unit="sublayer"),
    Setting(L405, 64, "optimizer", embedding=False),
    Setting(L405, 128, "none"),
    Setting(L405, 32, "all"),
    Setting(L70, 8, "all"),
    Setting(L70, 8, "all", micro_batch=2, micro_batches=4),
    Setting(L70, 16, "optimizer", micro_batches=2),
    Setting(L70, 32, "none"),
    Setting(L70, 32, "none", micro_batches=2, seq_len=8192),
    Setting(L70, 64, "none", "pure-bf16", micro_batch=2),
    Setting(L70, 16, "none", "pure-bf16", unit="sublayer", micro_batches=2),
    Setting(L8, 8, "none"),
    Setting(L8, 8, "none", micro_batch=4),
    Setting(L8, 8, "none", "pure-bf16", micro_batch=2, micro_batches=2),
    Setting(L8, 8, "all", seq_len=8192, micro_batch=2),
    Setting(L8, 2, "optimizer", unit="sublayer"),
    Setting(L1, 4, "none", micro_batch=4, micro_batches=2),
    Setting(L8, 1, "optimizer", micro_batch=2),
    Setting(L70, 1, "optimizer", seq_len=512),
    Setting(L1, 1, "none"),
    Setting(L1, 1, "all", micro_batches=2),
    Setting(L1, 2, "all", unit="sublayer"),
    Setting(L405, 64, "optimizer", loss="chunked"),
    Setting(L8, 8, "none", micro_batch=4, loss="chunked"),
    Setting(L1, 4, "none", micro_batch=4, micro_batches=2, loss="chunked"),
    Setting(L8, 8, "all", seq_len=8192, unit="sublayer", loss="chunked"),
    Setting(L405, 64, "optimizer", recompute="operators:16"),
    Setting(L405, 64, "all", unit="sublayer", recompute="every:64"),
    Setting(L70, 32, "none", recompute="operators:40"),
    Setting(L8, 8, "none", recompute="none"),
    Setting(L8, 8, "none", "pure-bf16", micro_batch=2, micro_batches=2, recompute="operators"),
    Setting(L8, 8, "all", seq_len=8192, unit="sublayer", recompute="none"),
    Setting(L1, 1, "none", recompute="every:2"),
    Setting(L405, 64, "optimizer", activations="host"),
    Setting(L405, 16, "all", unit="sublayer", activations="host"),
    Setting(L8, 8, "none", micro_batch=4, recompute="operators", activations="host"),
    Setting(L1, 4, "none", micro_batch=4, micro_batches=2, recompute="every:2", activations="host"),
    Setting(L405, 64, "optimizer", prefetch=2),
    Setting(L70, 16, "all", micro_batches=2, prefetch=3),
    Setting(L1, 4, "none", micro_batches=2, prefetch=1),
    Setting(L70, 64, "none", reshard_after_forward=8),
    Setting(L8, 8, "all", micro_batches=2, prefetch=2, reshard_after_forward=4),
    Setting(L8, 8, "none", unit="sublayer", reshard_after_forward=2),
    Setting("qwen3-8b", 8, "none"),
    Setting("qwen2.5-7b", 8, "all", micro_batch=2),
    Setting("mistral-7b", 8, "none", unit="sublayer"),
    Setting("olmo2-7b", 8, "none", recompute="operators"),
    Setting(L8, 8, "none", lora=16),
    Setting(L8, 8, "none", micro_batch=4, loss="chunked", lora=16),
    Setting(L405, 16, "none", loss="chunked", activations="host", lora=16),
    Setting(L405, 8, "all", loss="chunked", lora=16),
    Setting(L405, 32, "none", lora=16),
    Setting(L1, 4, "all", micro_batch=4, micro_batches=2, lora=16),
    Setting(L70, 8, "none", micro_batches=2, recompute="operators:20", lora=64),
    Setting(L8, 8, "none", "pure-bf16", micro_batch=2, recompute="none", lora=16),
    Setting(L70, 8, "none", recompute="every:2", lora=16),
    Setting(L8, 1, "none", lora=16),
    Setting(L405, 64, "optimizer", fused=True),
    Setting(L405, 64, "all", activations="host", recompute="operators:24", fused=True),
    Setting(L405, 64, "all", loss="chunked", micro_batches=2, fused=True),
    Setting(L8, 8, "none", unit="sublayer", fused=True),
    Setting(L8, 8, "none", "pure-bf16", micro_batch=2, recompute="none", fused=True),
    Setting(L1, 4, "none", micro_batch=4, recompute="every:2", fused=True),
    Setting(L8, 8, "all", unit="sublayer", recompute="none", fused=True),
    Setting(L8, 8, "none", lora=16, targets="q v"),
    Setting(L70, 16, "all", micro_batch=2, lora=16, targets="q v"),
    Setting(L405, 16, "none", lora=16, targets="q v"),
    Setting(L405, 32, "none", seq_len=8192, micro_batch=2, lora=16, targets="q k v o"),
    Setting(L8, 16, "none", replicas=2),
    Setting(L70, 64, "none", replicas=2),
    Setting(L70, 32, "none", "pure-bf16", recompute="operators:20", replicas=4),
    Setting(L8, 4, "none", unit="sublayer", replicas=2),
    Setting(L405, 128, "none", "pure-bf16", seq_len=2048, replicas=2),
    Setting(L8, 16, "none", micro_batches=2, replicas=2),
    Setting(L70, 64, "none", "pure-bf16", micro_batches=3, unit="sublayer", replicas=4),
    Setting(L8, 8, "none", unit="sublayer", lora=16),
    Setting(L405, 16, "none", unit="sublayer", loss="chunked", activations="host", lora=16),
    Setting(L70, 16, "all", unit="sublayer", lora=16, targets="q v"),
    Setting(L8, 8, "none", unit="sublayer", micro_batch=4, recompute="operators", lora=16, targets="q v"),
    Setting(L8, 8, "none", micro_batch=2, recompute="none", lora=16, targets="q v"),
    Setting(L70, 16, "none", recompute="operators:20", lora=64, targets="q k v o"),
    Setting(L8, 8, "none", tp=2),
    Setting(L8, 8, "none", micro_batch=4, tp=8),
    Setting(L405, 64, "all", tp=2),
    Setting(L405, 64, "optimizer", tp=8),
    Setting(L70, 32, "none", micro_batches=2, seq_len=8192, tp=4),
    Setting(L70, 16, "none", "pure-bf16", recompute="none", tp=8),
    Setting(L70, 32, "none", recompute="operators:40", tp=2),
    Setting(L405, 64, "all", activations="host", tp=4),
    Setting(L8, 16, "none", replicas=2, tp=2),
    Setting(L8, 8, "none", fused=True, tp=2),
    Setting(L405, 64, "all", loss="chunked", fused=True, tp=8),
    Setting(L70, 32, "none", micro_batch=2, loss="chunked", tp=4),
    Setting(L405, 64, "optimizer", activations="host", fused=True, tp=2),
    Setting(L70, 32, "none", recompute="operators:40", fused=True, tp=2),
    Setting(L8, 8, "none", seq_len=16_384, cp=2),
    Setting(L405, 64, "all", seq_len=32_768, cp=2),
    Setting(L70, 32, "none", seq_len=16_384, loss="chunked", recompute="operators:20", cp=4),
    Setting(L8, 16, "optimizer", micro_batches=2, seq_len=8192, recompute="none", cp=8),
    Setting(L8, 8, "none", zero2=True),
    Setting(L8, 8, "none", "pure-bf16", micro_batches=2, zero2=True),
    Setting(L8, 16, "all", unit="sublayer", micro_batches=3, zero2=True),
    Setting(L1, 4, "none", micro_batches=2, zero2=True),
    Setting(L8, 8, "none", "pure-bf16", micro_batch=2, micro_batches=2, recompute="operators", tp=2, zero2=True),
    Setting(L1, 4, "none", seq_len=8192, cp=2),
    Setting(L1, 4, "none", replicas=4, zero2=True),
    Setting(L8, 8, "none", zero2=True, lora=16),
    Setting(L1, 4, "none", micro_batches=2, lora=16),
    Setting(L8, 8, "none", seq_len=16_384, fused=True, cp=2),
    Setting(L405, 64, "all", seq_len=32_768, fused=True, cp=2),
    Setting(L70, 32, "none", seq_len=16_384, loss="chunked", recompute="operators:20", fused=True, cp=4),
    Setting(L8, 16, "optimizer", micro_batches=2, seq_len=8192, recompute="none", fused=True, cp=8),
    Setting(L1, 4, "none", seq_len=8192, fused=True, cp=2),
    Setting(L405, 64, "all", fused=True),
    Setting(L8, 16, "optimizer", micro_batches=2, fused=True),
    Setting(L8, 8, "none", prefetch=2, fused=True),
    Setting(L8, 16, "none", reshard_after_forward=8, fused=True),
    Setting(L8, 16, "none", micro_batches=2, replicas=2, fused=True),
    Setting(L8, 16, "all", micro_batches=3, zero2=True, fused=True),
    Setting(L8, 8, "none", micro_batches=2, recompute="none", fused=True),
    Setting(L1, 4, "none", micro_batches=2, replicas=4, zero2=True, fused=True),
]


def main():
    words = [each for each in sys.argv[1:] if each != "--write"]
    rows = []
    for setting in SETTINGS:
        values = dataclasses.asdict(setting)
        line = [str(value) for value in values.values()]
        if not {*words} <= {*line}:
            continue
        measured = measure(setting)
        expected = find_peak(setting.run).total, sum(predict_reserved(setting.run).values())
        beside = zip(("allocated", "reserved"), expected, strict=True)
        print(*line, *(f"{name} {measured[name] / GIB:.2f} GiB ({n / measured[name] - 1:+.1%})" for name, n in beside))
        rows.append(values | measured)
    if "--write" in sys.argv:
        with TABLE.open("w", newline="", encoding="ascii") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return 0


def measure(setting, config=None, history=""):
    """Measure a setting in a process of its own; ``config``: in place of its model's; ``history``: where to write that of one more step."""
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": setting.world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    more = {"STANDIN_KERNELS": "none", "STANDIN_GB": 600, "PYTHONPATH": ROOT}
    checks = ("STANDIN_CHECK", "STANDIN_AGE_MS")  # of when things happen, which is no matter here
    env = {name: value for name, value in os.environ.items() if name not in checks}
    env |= {name: str(value) for name, value in (place | more).items()}
    asked = json.dumps([dataclasses.asdict(setting), config or ARCHITECTURES[setting.model], str(history)])
    command = [STANDIN / "run.sh", sys.executable, __file__, "--one", asked]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def one(setting, config, history):
    """Take some steps in this process, and print the peaks."""
    import torch

    me = dataclasses.replace(join_alone(), mesh=setting.run.axes)
    _, update, passes = build(setting, config, me)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        take_step(setting, passes, update, me)
    stats = torch.cuda.memory_stats()
    pools = {}
    for segment in torch.cuda.memory_snapshot():
        pools[segment["stream"]] = pools.get(segment["stream"], 0) + segment["total_size"]
    if history:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=1 << 20)
        take_step(setting, passes, update, me)
        Path(history).write_bytes(pickle.dumps(torch.cuda.memory._snapshot()["device_traces"][0]))
    sizes = {"allocated": stats["allocated_bytes.all.peak"], "reserved": stats["reserved_bytes.all.peak"]}
    print(json.dumps(sizes | {"pools": " ".join(map(str, sorted(pools.values(), reverse=True)))}), flush=True)
    os._exit(0)


def nothing(*_, **__):
    """Do nothing."""


def join_alone():
    """Play rank 0 of all: the collectives of the CPU are torch's fake ones, and those of NCCL's stand-in have no peers."""
    import torch
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # registers "fake"

    from llama405b.distributed import ranks

    torch.backends.cuda.enable_cudnn_sdp(False)  # which builds a graph on the host
    dist.distributed_c10d._store_based_barrier = nothing
    join = dist.init_process_group

    def joined(backend, **more):
        more = {
            name: value for name, value in more.items() if name != "device_id"
        }  # whose groups are split, as no fake can be
        join(backend.replace("gloo", "fake"), **(more | {"store": dist.HashStore()}))

    dist.init_process_group = joined
    return ranks.join_process_group("cuda", TIMEOUT_S)


def build(setting, config, me):
    """Build the sharded model and what updates it, as the trainer does; what is in CPU memory is not touched: there is not so much."""
    import torch

    from llama405b.model import fused, llama
    from llama405b.model.host_inputs import offload_inputs
    from llama405b.model.llama import add_adapters, checkpoint_activations
    from llama405b.optim import build_updater, optimizer
    from llama405b.parallel import fsdp, load_weights, split
    from llama405b.parallel.passes import build_forward_backward
    from llama405b.settings.schema import Config, Model, Optimizer

    leave_out(on_host=setting.offload != "none")
    parallel = setting.run.apply_to(Config()).parallel
    kept = fsdp.shard_dtype(parallel)
    frozen = llama.compute_dtype(parallel.numerics) if setting.lora else kept
    module = llama.build_on_meta(llama.config_from_dict(config), "sdpa", frozen)
    llama.freeze(module, (), freeze_all=bool(setting.lora))
    adapt = functools.partial(add_adapters, adapter=setting.adapter, dtype=kept) if setting.lora else None
    module = split.split_model(module, parallel, me, adapt)
    if setting.run.reuses_gradient_memory:
        fsdp.allocate_grads_on_compute_stream(module)
    master = optimizer.master_model(module, parallel)
    load_weights.materialize(
        module, me, offload=parallel.offload == "all", on_pin_progress=nothing if parallel.offload == "all" else None
    )
    if master is not module:
        load_weights.materialize(master, me, offload=parallel.offload != "none")
    for name in fused.FORWARDS if setting.fused else ():
        fused.fuse(module, name)
    checkpoint_activations(module, Recompute.parse(setting.recompute))
    update = build_updater.build_updater(module, Optimizer(), parallel, me.device, master=master)
    for landing in getattr(update, "grad_buffers", {}).values():
        landing.n_unchecked = 0  # there is no gradient to compare
    if setting.activations == "host":
        run = setting.run
        offload_inputs(module, run.inputs_on_host(0), run.input_shape, torch.bfloat16, me.device, nothing)
    return module, update, build_forward_backward(parallel, module, me, Model(loss=setting.loss))


def leave_out(*, on_host):
    """Leave out what needs values, and with states in CPU memory all work on them."""
    import torch

    from llama405b.model import host_inputs
    from llama405b.optim import build_updater, offload, step
    from llama405b.parallel import load_weights

    def untouched(blocks, *_):
        return [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in blocks]

    def no_moments(optimizer, parameter, _):
        optimizer.state[parameter] = {"step": torch.zeros(()), "exp_avg": torch.empty(0), "exp_avg_sq": torch.empty(0)}

    norm_over_ranks = build_updater.norm_over_ranks

    def any_norm(squares, device):
        with contextlib.suppress(ValueError):  # the root of a negative number
            norm_over_ranks(squares, device)
        return 1.0

    host_inputs.allocate_blocks = untouched
    step.all_reduce_sum = torch.ones_like
    build_updater.norm_over_ranks = any_norm
    if not on_host:
        return
    offload.init_moments, offload.norm_over_ranks = no_moments, lambda *_: 1.0
    offload.square_sums = lambda _: []
    load_weights.allocate_blocks = offload.allocate_blocks = untouched
    offload.HostUpdater._update_unit = nothing
    offload.OptimizerOffload._sync_unit = nothing
    offload._add_gradients = nothing
    offload._add_slot = nothing


def take_step(setting, passes, update, me):
    """Take one step of the trainer's own."""
    import torch

    from llama405b.data.batch import Batch
    from llama405b.optim.step import train_step

    ids = torch.zeros(setting.micro_batch * setting.micro_batches, setting.seq_len, dtype=torch.int64)
    batches = [batch.to(me.device) for batch in Batch(ids, ids).split(setting.micro_batch)]
    train_step(passes, update, batches, max_norm=1.0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        asked, config, history = json.loads(sys.argv[2])
        one(Setting(**asked), config, history)
    sys.exit(main())
