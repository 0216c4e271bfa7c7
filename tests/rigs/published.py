"""Published measurements, as settings of the plan's model, and how wrong it is about them.

tests/data/published.csv: those that were fitted, and others that were looked at then. tests/data/unseen.csv: those that were found
when all was fitted. tests/data/meshes.csv: those with tensor, pipeline or context parallelism, none of which was fitted.
"""

import csv
import dataclasses
import json
import math
from pathlib import Path

from llama405b.predict.hardware import GIB, ModelShape, Rates, TrainingSetup, read_gpus
from llama405b.predict.run_shape import layers_per_stage
from llama405b.predict.step_time import step_time
from llama405b.settings.axes import Recompute
from llama405b.settings.config import PRESET_DIR
from llama405b.spec.models import parse_llama

DATA = Path(__file__).parent.parent / "data"
ROWS, UNSEEN, MESHES = DATA / "published.csv", DATA / "unseen.csv", DATA / "meshes.csv"
OTHER_GPUS = DATA / "unseen_gpus.toml"
PROGRAMS = {  # by how a source begins
    "MosaicML": "llm-foundry", "torchtitan": "torchtitan", "Trainy": "torchtitan", "Lambda": "Lambda", "ATorch": "ATorch",
    "IBM fms-fsdp": "fms-fsdp", "IBM and Meta": "IBM and Meta", "torchtune": "torchtune", "prime-rl": "prime-rl",
    "KempnerForge": "KempnerForge", "NeMo": "NeMo Automodel", "NVIDIA NeMo": "NeMo Automodel", "NVIDIA Megatron": "Megatron-Bridge",
}  # fmt: skip
RECOMPUTED = {  # and which share of products is kept; op: every second, layer: all in every second layer
    "full": (Recompute(), 1.0), "layer": (Recompute(every=2), 1.0), "op": (Recompute("operators"), 0.5), "none": (Recompute("none"), 1.0),
}  # fmt: skip
PRESETS = json.loads((PRESET_DIR / "architectures.json").read_text())
LLAMA3 = {f"llama3-{size}": PRESETS[f"llama3.1-{size}"] for size in ("8b", "70b", "405b")}
OTHERS = {  # hidden, intermediate, layers, heads, heads of keys, vocabulary, and whether the embedding is the head
    "llama3.2-3b": (3072, 8192, 28, 24, 8, 128_256, True), "kempnerforge-15b": (5120, 17_920, 40, 40, 8, 128_256, False),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 151_936, True), "qwen3-0.6b": (1024, 3072, 28, 16, 8, 151_936, True),
}  # fmt: skip
HEAD_DIM = 128  # of all these
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
        """Whether it tells how far off a time may be: it is of time in BF16, can be predicted, and was not fitted."""
        return not (self.not_modelled or self.train or self.metric in BYTES or self.setting.fp8)

    def slowness(self, rates: Rates) -> float:
        """How long it took, of the time that is predicted, as a logarithm."""
        is_time = self.metric.endswith("_s") and not self.metric.startswith("tokens")
        return math.log(1 + self.error(rates)) * (-1 if is_time else 1)

    def error(self, rates: Rates) -> float:
        """How far the prediction is from the measurement, as a share of that."""
        return self.predicted(rates) / self.value - 1


def shape_of(model):
    """The shape of a model by its name in the table."""
    if model in MPT:
        hidden, layers = MPT[model]
        layer = 12 * hidden * hidden + 2 * hidden  # no biases
        n = layers * layer + (MPT_VOCAB + MPT_POSITIONS + 1) * hidden
        return ModelShape(layers, hidden, hidden, hidden, 4 * hidden, False, MPT_VOCAB, n)
    if model in LLAMA3:
        return ModelShape.from_llama(parse_llama(LLAMA3[model], model))
    known = OTHERS.get(model) or (*LLAMA2[model], 32_000, False)
    hidden, intermediate, layers, heads, kv_heads, vocab, tied = known
    shape = {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "tie_word_embeddings": tied, "head_dim": HEAD_DIM,
    }  # fmt: skip
    return ModelShape.from_llama(parse_llama(LLAMA3["llama3-8b"] | shape, model))


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
    setting = TrainingSetup(
        shape_of(cells["model"]), gpus[cells["gpu"]], int(cells["gpus"]), int(cells["gpus_per_node"]),
        float(cells["nic_gbit_per_node"]) * 1e9 / 8, int(cells["seq_len"]), int(cells["micro_batch"]), int(cells["grad_accum"]),
        int(cells["reduce_bytes"]), *RECOMPUTED[cells["checkpointing"]], cells["reshard"] == "1", cells["compile"] == "1",
        cells["model"] in MPT,
    )  # fmt: skip
    return _told(setting, cells)


def _told(setting, cells):
    """What only rows of other files tell: axes of a mesh; copies of the weights, and the update of BF16 states, and where it is."""
    if cells.get("tp"):
        pp, chunks, once = int(cells["pp"]), int(cells["chunks"]), cells["once"] == "1"
        llama = parse_llama(LLAMA3[cells["model"]], cells["model"])
        stages = layers_per_stage(llama, pp * chunks) if pp > 1 else ()
        return dataclasses.replace(
            setting,
            tp=int(cells["tp"]),
            cp=int(cells["cp"]),
            stages=stages,
            chunks=chunks,
            gathers_once=once,
            reduces_once=once,
        )
    setting = dataclasses.replace(
        setting, sharded_over=int(cells.get("sharded_over") or 0), fp8=cells.get("fp8") == "1"
    )
    if not cells.get("update_bytes"):
        return setting
    setting = dataclasses.replace(setting, update_bytes=float(cells["update_bytes"]))
    if cells["offload"] == "none":
        return setting
    weight = gradient = 2
    return dataclasses.replace(setting, updates_on_host=True, copied_up=weight, copied_down=gradient)
