"""The autopsy asks NCCL's flight recorder by the pipe that a rank's environment names; torch is played by a thread."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from llama405b.contract.paths import RunDir
from llama405b.distributed import ranks
from llama405b_tools.agent.evidence import dump_flight_records

NAMES = ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE")


@pytest.fixture
def record(tmp_path, monkeypatch):
    for name in (*NAMES, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.setenv(name, "unset")
        monkeypatch.delenv(name)
    monkeypatch.setenv("RANK", "13")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return RunDir(tmp_path / "x").flight(13)


def test_a_rank_that_is_asked_writes_its_record_into_the_run_s_directory(record):
    ranks.enable_flight_recorder(record)
    pipe, file = (Path(f"{os.environ[name]}13{end}") for name, end in zip(NAMES, (".pipe", ""), strict=True))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def recorder():
        while not os.read(reader, 1):  # nobody has it open
            time.sleep(0.01)
        file.write_bytes(b"the last collectives")

    thread = threading.Thread(target=recorder, daemon=True)
    os.set_blocking(reader, True)
    thread.start()
    gone = record.with_name("rank-14")
    assert dump_flight_records([record, gone], time.time() - 60) == (str(file),)
    assert file.parent == record.parent
    thread.join()
    os.close(reader)
    assert (
        dump_flight_records([record, gone], time.time() + 60) == ()
    )  # of an earlier attempt; and nobody reads the pipe


def test_what_the_user_has_set_is_left_and_a_filesystem_without_pipes_is_no_fault(record, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/elsewhere/rank_")
    ranks.enable_flight_recorder(record)
    assert {name: os.environ.get(name) for name in NAMES} == {NAMES[0]: str(record)[:-2], NAMES[1]: None}
    monkeypatch.delenv(NAMES[0])

    def refused(_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "mkfifo", refused)
    ranks.enable_flight_recorder(record)
    assert NAMES[0] not in os.environ
