"""What a launch says of what no GPU has run."""

import dataclasses

import pytest
from run_rig import plan

from llama405b.settings import command
from llama405b_tools.launch.start import mesh_notes

UNEVEN = ["--training.global_batch_size", "3", "--training.micro_batch_size", "1"]


@pytest.mark.parametrize(("slots", "flags", "told"), [
    (2, [], []),
    (2, ["--parallel.tp", "2"], ["mesh: dp_shard 2 x tp 2, ranks along tp are on one host; untested"]),
    (1, ["--parallel.pp", "2"], ["mesh: pp 2, ranks along pp are on several hosts; untested"]),
    (2, ["--parallel.prefetch", "2", *UNEVEN], ["prefetch 2: untested", "note: "]),
], ids=str)  # fmt: skip
def test_what_no_gpu_has_run_is_said(slots, flags, told):
    asked = command.parse(["--preset", "demo", "--data.paths", "stdlib", *flags]).config
    whole = plan("-m", "llama405b.train")
    nodes = tuple(dataclasses.replace(node, slots=slots) for node in whole.nodes[:2])
    said = list(mesh_notes(asked, dataclasses.replace(whole, nodes=nodes)))
    assert len(said) == len(told)
    assert all(line.startswith(begin) for line, begin in zip(said, told, strict=True)), said
