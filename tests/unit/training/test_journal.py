"""What rank 0 prints and keeps of a step."""

import dataclasses

import pytest
import torch

from llama405b.contract import reader
from llama405b.contract.files import UNLIMITED, read_records
from llama405b.contract.paths import RunDir
from llama405b.contract.records import METRICS_LINE, EventKind, Metrics, RunEvent
from llama405b.distributed.ranks import Rank
from llama405b.training.journal import Journal, read_metrics

TAKEN = Metrics(1, 0.0, 5.0, 1.0, 1e-5, 8, 8.0, 1.0, 0.1, 0.5, 0.3, 0.1, peak_bytes=69, peak_allocated_bytes=58)


@pytest.fixture
def journal(tmp_path):
    return Journal(RunDir(tmp_path), Rank(0, 1, 0, "a", torch.device("cpu")))


def test_a_step_warns_when_its_allocator_had_to_try_again(journal, capsys):
    for step, retries in enumerate((0, 1, 28, 28), 1):
        journal.write_metrics(dataclasses.replace(TAKEN, step=step, num_alloc_retries=retries))
    ends = [line.partition(" s  ")[2] for line in capsys.readouterr().out.splitlines()]
    assert ends == ["", "1 allocator retry: GPU memory is short", "27 allocator retries: GPU memory is short", ""]
    assert [line.num_alloc_retries for line in read_metrics(journal.run.metrics)] == [0, 1, 28, 28]


def test_metrics_of_earlier_versions_are_read(journal):
    added = {"peak_allocated_bytes", "num_alloc_retries", "num_ooms"}
    old = {name: value for name, value in dataclasses.asdict(TAKEN).items() if name not in added}
    journal.run.metrics.write_text(reader.dumps(old) + "\n")
    assert read_metrics(journal.run.metrics) == [dataclasses.replace(TAKEN, peak_allocated_bytes=0)]
    assert reader.loads(METRICS_LINE, reader.dumps(TAKEN), "metrics.jsonl") == TAKEN


def test_numbers_that_cannot_be_written_are_lost_and_said_and_training_goes_on(journal, capsys):
    journal.write_metrics(TAKEN)
    before = journal.run.metrics.read_bytes()
    journal.run.metrics.unlink()
    journal.run.metrics.mkdir()  # no file can be written there
    for step in (2, 3):
        journal.write_metrics(dataclasses.replace(TAKEN, step=step))
    journal.write_evaluation(3, 4.0)
    journal.run.metrics.rmdir()
    journal.run.metrics.write_bytes(before)
    journal.write_metrics(dataclasses.replace(TAKEN, step=4))
    assert [line.step for line in read_metrics(journal.run.metrics)] == [1, 4]
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("step ")]
    where = journal.run.metrics
    assert said == [
        f"{where} cannot be written (Is a directory); training continues",
        f"{where} is writable again; 3 lines up to step 3 were lost",
    ]
    (event,) = read_records(RunEvent, journal.run.events("rank-0"), UNLIMITED)
    assert (event.kind, event.count, event.step, event.detail) == (
        EventKind.NOT_WRITTEN, 3, 3, f"{where}: Is a directory",
    )  # fmt: skip
