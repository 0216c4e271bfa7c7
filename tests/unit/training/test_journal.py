"""What rank 0 prints and keeps of a step."""

import dataclasses

import pytest
import torch

from llama405b.contract import reader
from llama405b.contract.paths import RunDir
from llama405b.contract.records import METRICS_LINE, Metrics
from llama405b.distributed.ranks import Rank
from llama405b.training.journal import Journal, read_metrics

TAKEN = Metrics(1, 0.0, 5.0, 1.0, 1e-5, 8, 8.0, 1.0, 0.1, 0.5, 0.3, 0.1, peak_bytes=69, peak_allocated_bytes=58)


@pytest.fixture
def journal(tmp_path):
    return Journal(RunDir(tmp_path), Rank(0, 1, 0, "a", torch.device("cpu")))


def test_a_step_warns_when_its_allocator_had_to_try_again(journal, capsys):
    for step, retries in enumerate((0, 1, 28, 28), 1):
        journal.metrics(dataclasses.replace(TAKEN, step=step, num_alloc_retries=retries))
    ends = [line.partition(" s  ")[2] for line in capsys.readouterr().out.splitlines()]
    assert ends == ["", "1 allocator retry: GPU memory is short", "27 allocator retries: GPU memory is short", ""]
    assert [line.num_alloc_retries for line in read_metrics(journal.run.metrics)] == [0, 1, 28, 28]


def test_metrics_of_earlier_versions_are_read(journal):
    added = {"peak_allocated_bytes", "num_alloc_retries", "num_ooms"}
    old = {name: value for name, value in dataclasses.asdict(TAKEN).items() if name not in added}
    journal.run.metrics.write_text(reader.dumps(old) + "\n")
    assert read_metrics(journal.run.metrics) == [dataclasses.replace(TAKEN, peak_allocated_bytes=0)]
    assert reader.loads(METRICS_LINE, reader.dumps(TAKEN), "metrics.jsonl") == TAKEN
