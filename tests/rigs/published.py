"""Published measurements, as settings of the plan's model, and how wrong it is about them.

tests/data/published.csv: those that were fitted, and others that were looked at then. tests/data/unseen.csv: those that were found
when all was fitted, with tensor, pipeline or context parallelism, FP8, adapters and updates on hosts among them.
"""

import csv
import dataclasses
import json
import math
from pathlib import Path

from llama405b.contract import reader
from llama405b.predict.estimate import Cluster, training_setup
from llama405b.predict.hardware import GIB, ModelShape, Rates, TrainingSetup, match_gpu, read_gpus
from llama405b.predict.run_shape import PredictedRun, layers_per_stage
from llama405b.predict.step_time import step_time
from llama405b.settings.axes import Recompute
from llama405b.settings.config import PRESET_DIR
from llama405b.settings.schema import Adapter
from llama405b.spec.adapters import adapted_features, n_adapter_parameters
from llama405b.spec.models import parse_llama

DATA = Path(__file__).parent.parent / "data"
ROWS, UNSEEN, BUNDLES = DATA / "published.csv", DATA / "unseen.csv", DATA / "bundles"
OTHER_GPUS = DATA / "unseen_gpus.toml"
PROGRAMS = {  # by how a source begins
    "MosaicML": "llm-foundry", "torchtitan": "torchtitan", "Trainy": "torchtitan", "Lambda": "Lambda", "ATorch": "ATorch",
    "IBM fms-fsdp": "fms-fsdp", "IBM and Meta": "IBM and Meta", "torchtune": "torchtune", "prime-rl": "prime-rl",
    "KempnerForge": "KempnerForge", "NeMo": "NeMo Automodel", "NVIDIA NeMo": "NeMo Automodel", "NVIDIA Megatron": "Megatron",
    "DeepSpeed": "DeepSpeed", "Meta": "Llama 3", "OLMo-core": "OLMo-core", "vectorlm": "vectorlm", "TinyLlama": "TinyLlama",
    "AMD Primus": "Primus",
}  # fmt: skip
RECOMPUTED = {  # and which share of products is kept; op: every second, layer: all in every second layer
    "full": (Recompute(), 1.0), "layer": (Recompute(every=2), 1.0), "op": (Recompute("operators"), 0.5), "none": (Recompute("none"), 1.0),
}  # fmt: skip
PRESETS = json.loads((PRESET_DIR / "architectures.json").read_text())
LLAMA3 = {f"llama3-{size}": PRESETS[f"llama3.1-{size}"] for size in ("8b", "70b", "405b")}
OTHERS = {  # of a preset: hidden, intermediate, layers, heads, heads of keys, vocabulary, and whether the embedding is the head
    "llama3.2-3b": ("llama3.1-8b", 3072, 8192, 28, 24, 8, 128_256, True),
    "kempnerforge-15b": ("llama3.1-8b", 5120, 17_920, 40, 40, 8, 128_256, False),
    "llama3-8b-100k": ("llama3.1-8b", 4096, 14_336, 32, 32, 8, 100_352, False),
    "tinyllama-1.1b": ("llama3.1-8b", 2048, 5632, 22, 32, 4, 32_000, False, 64),
    "qwen3-4b": ("llama3.1-8b", 2560, 9728, 36, 32, 8, 151_936, True),
    "qwen3-0.6b": ("llama3.1-8b", 1024, 3072, 28, 16, 8, 151_936, True),
    "qwen2.5-7b": ("qwen2.5-7b", 3584, 18_944, 28, 28, 4, 152_064, False),
    "qwen2.5-32b": ("qwen2.5-7b", 5120, 27_648, 64, 40, 8, 152_064, False),
    "olmo2-1b": ("olmo2-7b", 2048, 8192, 16, 16, 16, 100_352, False),
    "olmo2-7b": ("olmo2-7b", 4096, 11_008, 32, 32, 32, 100_352, False),
    "olmo2-13b": ("olmo2-7b", 5120, 13_824, 40, 40, 40, 100_352, False),
}
HEAD_DIM = 128  # where nothing else stands above
LLAMA2 = {  # hidden, intermediate, layers, heads, heads of keys
    "llama2-7b": (4096, 11_008, 32, 32, 32), "llama2-13b": (5120, 13_824, 40, 40, 40), "llama2-70b": (8192, 28_672, 80, 64, 8),
    "llama2-34b": (8192, 22_016, 48, 64, 8),
}  # fmt: skip
MPT = {
    "mpt-3b": (2560, 32),
    "mpt-7b": (4096, 32),
    "mpt-13b": (5120, 40),
    "mpt-30b": (7168, 48),
    "mpt-70b": (8192, 80),
}  # hidden, layers
MPT_VOCAB, MPT_POSITIONS = 50_368, 2048
BYTES = {"allocated_gib": GIB, "allocated_mib": 1 << 20, "allocated_gb": 1e9}
MASTER_BYTES = 4  # a weight in FP32, beside the moments


@dataclasses.dataclass(frozen=True)
class Row:
    """A measurement."""

    train: bool
    source: str
    model: str
    metric: str
    value: float
    not_modelled: str  # why there is no prediction; '' if there is
    setting: TrainingSetup | None
    state_bytes: int  # of a parameter, sharded over the GPUs
    anchor: "Row | None"  # of memory: the row of the same software on 8 GPUs
    cells: dict[str, str]

    def predicted(self, rates: Rates) -> float:
        """What the model says."""
        setting = self.setting
        if self.metric in BYTES:
            shards = 1 / self.anchor.setting.gpus - 1 / setting.gpus
            return self.anchor.value - self.state_bytes * setting.shape.parameters * shards / BYTES[self.metric]
        time, shape = step_time(setting, rates), setting.shape
        tokens = setting.step_tokens
        if self.metric == "hardware_tflops":  # four thirds of the model's, with all of the attention matrix
            flops = 8 * (shape.layers * (shape.matrices + 2 * shape.width * setting.seq_len) + shape.head)
            return flops * tokens / time.step_s / 1e12
        known = {"forward_s": time.forward_s, "backward_s": time.backward_s, "step_s": time.step_s}
        return known.get(self.metric, tokens / time.step_s)

    @property
    def program(self) -> str:
        """What was run: rows of one program are not independent."""
        return next(PROGRAMS[begins] for begins in PROGRAMS if self.source.startswith(begins))

    @property
    def is_evidence(self) -> bool:
        """Whether it tells how far off a time may be: it is of time, can be predicted, and was not fitted."""
        return not (self.not_modelled or self.train or self.metric in BYTES)

    def slowness(self, rates: Rates) -> float:
        """How long it took, of the time that is predicted, as a logarithm."""
        is_time = self.metric.endswith("_s") and not self.metric.startswith("tokens")
        return math.log(1 + self.error(rates)) * (-1 if is_time else 1)

    def error(self, rates: Rates) -> float:
        """How far the prediction is from the measurement, as a share of that."""
        return self.predicted(rates) / self.value - 1


@dataclasses.dataclass(frozen=True)
class BenchStep:
    """A step of this trainer that `llama405b bench` timed."""

    setting: TrainingSetup
    step_s: float
    program: str = "llama405b"
    is_evidence: bool = True

    def slowness(self, rates: Rates) -> float:
        """As that of a row."""
        return math.log(self.step_s / step_time(self.setting, rates).step_s)


def read_bundles(directory=BUNDLES):
    """The steps in all bundles."""
    return [step for file in sorted(directory.glob("*.json")) for step in read_bundle(file)]


def read_bundle(file):
    """The steps in a bundle of `llama405b bench`, on GPUs that are known."""
    found = []
    for result in json.loads(file.read_text())["results"]:
        name, _, gib = next(iter((result["software"] or {}).get("gpus", ())), "").rpartition(", ")
        gpu = match_gpu(name, float(gib.removesuffix(" GiB")) * GIB, read_gpus()) if name else None
        for figure in result["figures"] if gpu else ():
            if figure.get("run"):
                run = reader.loads(PredictedRun, figure["run"], "a run")
                found.append(BenchStep(training_setup(run, Cluster(gpu)), figure["value"]))
    return found


def shape_of(model):
    """The shape of a model by its name in the table."""
    if model not in MPT:
        return ModelShape.from_llama(llama_of(model))
    hidden, layers = MPT[model]
    layer = 12 * hidden * hidden + 2 * hidden  # no biases
    n = layers * layer + (MPT_VOCAB + MPT_POSITIONS + 1) * hidden
    return ModelShape(layers, hidden, hidden, hidden, 4 * hidden, False, MPT_VOCAB, n)


def llama_of(model):
    """A model of the table that is no MPT."""
    if model in LLAMA3:
        return parse_llama(LLAMA3[model], model)
    kin, *known = OTHERS.get(model) or ("llama3.1-8b", *LLAMA2[model], 32_000, False)
    hidden, intermediate, layers, heads, kv_heads, vocab, tied, head_dim = [*known, HEAD_DIM][:8]
    shape = {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "tie_word_embeddings": tied, "head_dim": head_dim,
    }  # fmt: skip
    return parse_llama(PRESETS[kin] | shape, model)


def read_rows(file=ROWS):
    """All rows of the table."""
    gpus, found, anchors = read_gpus(OTHER_GPUS), [], {}
    for cells in csv.DictReader(file.read_text().splitlines()):
        setting = _setting(cells, gpus) if cells["micro_batch"] else None
        software = (cells["source"], cells["metric"], cells["compile"])
        state_bytes = MASTER_BYTES + int(cells["optimizer_bytes"] or 0)
        row = Row(
            cells["subset"] == "train", cells["source"], cells["model"], cells["metric"], float(cells["value"]),
            cells["not_modelled"], setting, state_bytes, anchors.get(software), cells,
        )  # fmt: skip
        anchors.setdefault(software, row)
        found.append(row)
    return found


def _setting(cells, gpus):
    """A row's setting; what it leaves out is as the trainer does without being asked."""

    def number(name, default):
        return type(default)(cells.get(name) or default)

    pp, chunks, once = number("pp", 1), number("chunks", 1), cells.get("once") == "1"
    on_host, weight, gradient = cells["offload"] != "none", 2, 2
    return TrainingSetup(
        shape_of(cells["model"]), gpus[cells["gpu"]], int(cells["gpus"]), int(cells["gpus_per_node"]),
        float(cells["nic_gbit_per_node"]) * 1e9 / 8, int(cells["seq_len"]), int(cells["micro_batch"]), int(cells["grad_accum"]),
        int(cells["reduce_bytes"]), *RECOMPUTED[cells["checkpointing"]], cells["reshard"] == "1", cells["compile"] == "1",
        "triton" if cells["model"] in MPT else cells.get("attention", ""), fused=cells["compile"] == "fused",
        tp=number("tp", 1), cp=number("cp", 1), chunks=chunks, gathers_once=once, reduces_once=once,
        stages=layers_per_stage(llama_of(cells["model"]), pp * chunks) if pp > 1 else (),
        sharded_over=number("sharded_over", 0), fp8=cells.get("fp8") == "1", update_bytes=number("update_bytes", 28.0),
        updates_on_host=on_host, copied_up=weight * on_host, copied_down=gradient * on_host,
        **_adapted(cells),
    )  # fmt: skip


def _adapted(cells):
    """What of a model takes gradients: ``adapter`` is a rank, and the matrices that have it by the beginnings of their names."""
    if not cells.get("adapter"):
        return {}
    rank, matrices = cells["adapter"].split()
    llama = llama_of(cells["model"])
    adapter = Adapter(kind="lora", rank=int(rank), targets=tuple(f"{name}_proj" for name in matrices.split(",")))
    return {
        "trained_share": n_adapter_parameters(llama, adapter) / llama.parameters,
        "adapted_features": adapted_features(llama, adapter),
        "adapter_rank": adapter.rank,
    }
