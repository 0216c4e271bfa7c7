"""Published measurements (tests/data/published.csv), as settings of the plan's model, and how wrong it is about them."""

import csv
import dataclasses
import json
from pathlib import Path

from llama405b.capacity.hardware import GIB, read_gpus
from llama405b.capacity.setting import Setting, Shape
from llama405b.capacity.step_time import Rates, step_time
from llama405b.contract.config import PRESET_DIR
from llama405b.contract.weights import parse_llama

ROWS = Path(__file__).parent.parent / "data/published.csv"
PRESETS = json.loads((PRESET_DIR / "architectures.json").read_text())
LLAMA3 = {f"llama3-{size}": PRESETS[f"llama3.1-{size}"] for size in ("8b", "70b", "405b")}
LLAMA2 = {  # hidden, intermediate, layers, heads, heads of keys
    "llama2-7b": (4096, 11_008, 32, 32, 32), "llama2-13b": (5120, 13_824, 40, 40, 40), "llama2-70b": (8192, 28_672, 80, 64, 8),
}  # fmt: skip
MPT = {"mpt-3b": (2560, 32), "mpt-7b": (4096, 32), "mpt-30b": (7168, 48)}  # hidden, layers
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
    setting: Setting | None
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
        tokens = setting.tokens * setting.accumulate
        if self.metric == "hardware_tflops":  # four thirds of the model's, with all of the attention matrix
            flops = 8 * (shape.layers * (shape.matrices + 2 * shape.width * setting.seq_len) + shape.head)
            return flops * tokens / time.step_s / 1e12
        known = {"forward_s": time.forward_s, "backward_s": time.backward_s, "step_s": time.step_s}
        return known.get(self.metric, tokens / time.step_s)

    def error(self, rates: Rates) -> float:
        """How far the prediction is from the measurement, as a share of that."""
        return self.predicted(rates) / self.value - 1


def shape_of(model):
    """The shape of a model by its name in the table."""
    if model in MPT:
        hidden, layers = MPT[model]
        layer = 12 * hidden * hidden + 2 * hidden  # no biases
        n = layers * layer + (MPT_VOCAB + MPT_POSITIONS + 1) * hidden
        return Shape(layers, hidden, hidden, hidden, 4 * hidden, False, MPT_VOCAB, n, layer)
    if model in LLAMA3:
        return Shape.of(parse_llama(LLAMA3[model], model))
    hidden, intermediate, layers, heads, kv_heads = LLAMA2[model]
    shape = {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": 32_000,
    }  # fmt: skip
    return Shape.of(parse_llama(LLAMA3["llama3-8b"] | shape, model))


def read_rows(file=ROWS):
    """All rows of the table."""
    gpus, found, anchors = read_gpus(), [], {}
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
    return Setting(
        shape_of(cells["model"]), gpus[cells["gpu"]], int(cells["gpus"]), int(cells["gpus_per_node"]),
        float(cells["nic_gbit_per_node"]) * 1e9 / 8, int(cells["seq_len"]), int(cells["micro_batch"]), int(cells["grad_accum"]),
        int(cells["reduce_bytes"]), cells["checkpointing"], cells["reshard"] == "1", cells["compile"] == "1",
        cells["model"] in MPT,
    )  # fmt: skip
