"""A module of the user's own: what is read of it without running it, and what is said of it when it runs."""

import types

import pytest
import torch

from llama405b import extend
from llama405b.contract.errors import RunError, UserError
from llama405b.contract.extension import read_extension
from llama405b.data.batch import Batch
from llama405b.model.head import ModelOutput, UserLoss


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(extend, "_current", extend.Extension())

    def write(text):
        (tmp_path / "own.py").write_text(text)
        return "own.py"

    return write


def test_it_is_read_and_not_run(module):
    found = read_extension(
        module("raise SystemExit\nREADS: tuple = ['*.pgn', 'a-*']\ndef documents(path): yield ''\ndef other(): ...")
    )
    assert (found.functions, found.reads, found.every) == (("documents",), ("*.pgn", "a-*"), 0)
    assert [found.reads_file(f"x/{name}") for name in ("1.pgn", "a-b", "b")] == [True, True, False]
    assert found.identity_label == f"own.py {found.sha256[:12]}"
    assert read_extension("").path == ""


def test_only_what_decides_what_is_learnt_is_part_of_what_a_run_is(module):
    assert read_extension(module("def metrics(moment): return {}")).identity_label == "none"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def metrics(:", "own.py:1: is not valid Python (invalid syntax)"),
        ("def metric(moment): ...", "defines none of metrics, loss"),
        ("def loss(a, b): ...\nclass Loss: ...", "defines loss() and Loss; keep one of them"),
        ("from theirs import Loss\ndef metrics(m): ...", "Loss is imported; define the class in this file"),
        ("def every(moment): ...", "every() and EVERY belong together"),
        ("READS = ('a',)\ndef loss(a, b): ...", "documents() and READS belong together"),
        ("EVERY = 10 * 2\ndef every(moment): ...", "own.py:1: EVERY must be a number of steps"),
        ("EVERY = 0\ndef every(moment): ...", "EVERY must be a number of steps"),
        ("READS = 'a'\ndef documents(path): ...", "READS must be a list of patterns"),
        ("\0", "is not valid Python"),
    ],
)
def test_what_cannot_be_used_is_refused(module, text, why):
    with pytest.raises(UserError) as refused:
        read_extension(module(text))
    assert why in str(refused.value)


def test_an_installed_module_is_found_by_its_name(monkeypatch, tmp_path):
    (tmp_path / "theirs.py").write_text("def metrics(moment): return {}")
    monkeypatch.syspath_prepend(tmp_path)
    assert (read_extension("theirs").name, read_extension("theirs").module) == ("theirs.py", "theirs")
    with pytest.raises(UserError, match="no module named 'nobodys'"):
        read_extension("nobodys")


@pytest.mark.parametrize(
    ("returns", "why"),
    [
        ("3", "metrics() returned 3; return numbers by name"),
        ("{'a': 'b'}", "returned"),
        ("{'a': True}", "returned"),
        ("1 / 0", "own.py:2: metrics() raised ZeroDivisionError"),
        ("half(1)\ndef half(x):\n    return x / 0", "own.py:4: metrics() raised ZeroDivisionError"),
    ],
)
def test_what_it_does_wrong_names_it(module, returns, why):
    used = extend.use(module(f"def metrics(moment):\n    return {returns}"))
    with pytest.raises(RunError) as failed:
        used.metrics(None)
    assert why in str(failed.value)


def test_a_metric_that_is_not_finite_is_left_out_and_ends_nothing(module):
    used = extend.use(module("def metrics(moment):\n    return {'a': float('nan'), 'b': -float('inf'), 'c': 2}"))
    assert used.metrics(None) == {"c": 2.0}


def test_what_fails_at_its_import_is_refused_with_its_line(module):
    with pytest.raises(UserError, match=r"own.py:2: ModuleNotFoundError: No module named 'nobodys'"):
        extend.use(module("def metrics(moment): return {}\nimport nobodys"))


def test_a_loss_is_one_number(module):
    ids = torch.zeros(1, 2, dtype=torch.long)
    batch, output = Batch(ids, ids), ModelOutput(None, lambda: torch.zeros(1, 2, 3))
    loss = UserLoss(extend.use(module("def loss(logits, targets): return logits")))
    with pytest.raises(RunError, match=r"loss\(\) returned .*; return a tensor with one number"):
        loss.loss(output, batch)
    text = (
        "class Loss:\n    def count(self, batch): return batch.ids_BS\n    def loss(self, output, batch): return 1 / 0"
    )
    loss = UserLoss(extend.use(module(text)))
    with pytest.raises(RunError, match=r"Loss.count\(\) returned .*; return a tensor with one number"):
        loss.count(batch)
    with pytest.raises(RunError, match=r"own.py:3: Loss.loss\(\) raised ZeroDivisionError: division by zero"):
        loss.loss(output, batch)
    text = "class Loss:\n    def count(self, batch): ...\n    def loss(self, output, batch): return output.run().sum()"
    assert UserLoss(extend.use(module(text))).loss(output, batch) == 0
    gone = ModelOutput(None, lambda: (_ for _ in ()).throw(ConnectionError("remote process exited")))
    with pytest.raises(ConnectionError, match=r"^remote process exited$"):  # a lost peer, and not the module's fault
        UserLoss(extend.use(module(text))).loss(gone, batch)
    silent = UserLoss(extend.use(module(text.replace("output.run()", "batch.ids_BS.double()"))))
    with pytest.raises(
        RunError, match=r"own.py: Loss.loss\(\) did not call output.logits\(\); call it for every batch"
    ):
        silent.loss(ModelOutput(None, lambda: torch.zeros(1, 2, 3)), batch)
    with pytest.raises(UserError, match=r"own.py: Loss needs the methods count and loss; add them"):
        UserLoss(extend.use(module("class Loss: ...")))
    with pytest.raises(RunError, match=r"own.py: Loss\(\) raised TypeError"):
        UserLoss(extend.use(module("class Loss: __init__ = lambda self, model: None")))


def test_it_acts_every_so_many_steps_and_none_without_a_module(module):
    used = extend.use(module("EVERY = 3\nseen = []\ndef every(moment): seen.append(moment.step)"))
    for step in range(1, 8):
        used.after_step(types.SimpleNamespace(step=step))
    assert used.module.seen == [3, 6]
    nothing = extend.use("")
    nothing.after_step(types.SimpleNamespace(step=3))
    assert (nothing.metrics(None), nothing.has_loss) == ({}, False)
