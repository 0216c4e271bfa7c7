"""Parts of sentences."""

import errno
import os

import numpy as np
import pytest

from llama405b.contract.errors import (
    EXIT_FAILED,
    EXIT_OK,
    UserError,
    and_more,
    exit_code_for,
    fmt_if,
    last_or,
    pluralize,
    reason_of,
)
from llama405b.data.batches import Batches, describe_epoch
from llama405b.data.sources import Mixture, Source
from llama405b.settings.axes import MicrobatchSplit
from llama405b.settings.schema import Data, Training
from llama405b.training.evaluate import EvaluationResult


@pytest.mark.parametrize(("value", "text"), [("why", " (why)"), ("", ""), (None, ""), (0, ""), (3, " (3)")])
def test_a_form_is_left_out_where_there_is_nothing_to_say(value: str | int | None, text: str) -> None:
    assert fmt_if(" ({})", value) == text


def test_a_count_has_the_right_plural() -> None:
    assert [pluralize(n, "host") for n in (0, 1, 2)] == ["0 hosts", "1 host", "2 hosts"]
    assert pluralize(2, "leftover process", "leftover processes") == "2 leftover processes"


def test_and_more_counts_those_not_shown() -> None:
    assert [and_more("abcd"[:n]) for n in range(4)] == ["", "", " and 1 more", " and 2 more"]
    assert and_more("abcd", n_shown=3) == " and 1 more"


def test_last_of_says_otherwise_where_there_is_no_line() -> None:
    assert last_or(["a", "b"]) == "b"
    assert last_or([], "nothing said") == "nothing said"


def test_the_reason_of_an_error_does_not_repeat_the_path() -> None:
    assert reason_of(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/x")) == "No such file or directory"
    assert reason_of(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")) == "it is not UTF-8 text"
    assert reason_of(ValueError("cut short")) == "cut short"


def test_an_exit_code_says_whether_there_were_faults() -> None:
    assert [exit_code_for([]), exit_code_for(["a"]), exit_code_for(False), exit_code_for({"a": 1})] == [
        EXIT_OK,
        EXIT_FAILED,
        EXIT_OK,
        EXIT_FAILED,
    ]


def test_one_sequence_is_singular_wherever_it_is_told():
    assert str(EvaluationResult(1.0, 1, 1)) == "loss 1.0000, perplexity 2.72 (1 target in 1 sequence)"
    assert str(EvaluationResult(1.0, 8192, 32)).endswith("(8,192 targets in 32 sequences)")
    one = Batches(Mixture.from_weights([Source(np.arange(17, dtype=np.uint32), 16)], 0))
    assert describe_epoch(Data(), one)[0].startswith("data: 1 sequence of 16 tokens")
    with pytest.raises(UserError, match="global_batch_size: 1 sequence cannot be divided into"):
        MicrobatchSplit.from_training(Training(global_batch_size=1, micro_batch_size=2), 2)
