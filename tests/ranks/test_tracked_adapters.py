"""The plan's memory of runs with adapters against what torch's memory tracker counts of the trainer's own modules: peaks within 2 %."""

import json

import pytest

from llama405b.predict.memory import find_stage_peak
from llama405b.predict.run_shape import PredictedRun
from llama405b.settings.axes import Axes, Recompute
from llama405b.settings.config import PRESET_DIR
from llama405b.settings.schema import Adapter, Parallel
from llama405b.spec.models import parse_llama
from tracked import track

PRESETS = json.loads((PRESET_DIR / "architectures.json").read_text())
ALL, FEW = Adapter("lora"), Adapter("lora", 64, 16.0, ("q_proj", "v_proj"))
CASES = {  # preset, layers, ranks, tokens, adapter, settings, recomputation
    "405B": ("llama3.1-405b", 3, 64, 4096, ALL, {}, "full"),
    "tied": ("llama3.2-1b", 4, 3, 8192, FEW, {}, "full"),
    "offload": ("llama3.1-405b", 3, 16, 8192, FEW, {"offload": "all", "loss": "chunked"}, "full"),
    "halves": ("llama3.1-8b", 4, 8, 4096, FEW, {"fsdp_unit": "sublayer", "numerics": "pure-bf16"}, "full"),
    "fp32": ("llama3.1-8b", 4, 8, 4096, ALL, {"numerics": "fp32", "loss": "chunked"}, "full"),
    "none": ("llama3.1-8b", 4, 8, 8192, FEW, {"loss": "chunked"}, "none"),
    "operators": ("llama3.1-8b", 4, 8, 8192, ALL, {"loss": "chunked"}, "operators"),
    "tp": ("llama3.1-70b", 4, 8, 8192, ALL, {"loss": "chunked", "tp": 4}, "full"),
    "cp": ("llama3.1-8b", 4, 8, 8192, ALL, {"loss": "chunked", "cp": 2}, "full"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_takes_what_torch_tracks(case):
    name, layers, world, seq_len, adapter, settings, kind = CASES[case]
    settings = dict(settings)
    loss = settings.pop("loss", "full")
    config, recompute = PRESETS[name] | {"num_hidden_layers": layers}, Recompute.parse(kind)
    parallel = Parallel(**{"numerics": "fp32-master"} | settings)
    axes = Axes.from_parallel(parallel, world, 8)
    tracked = track(config, parallel, world, seq_len, 1, axes, recompute=recompute, adapter=adapter, loss=loss)
    run = PredictedRun(
        parse_llama(config, name), parallel.numerics, parallel.offload, world, seq_len, 1, axes.size(("dp_shard",)),
        fsdp_unit=parallel.fsdp_unit, loss=loss, recompute=recompute, adapter=adapter, tp=axes.tp, cp=axes.cp,
    )  # fmt: skip
    found = find_stage_peak(run, 0)
    assert found.total - found.bytes_by_kind.get("moments", 0) == pytest.approx(tracked.peak, rel=0.02)
