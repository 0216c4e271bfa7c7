"""The step loop around a step: what a skipped one does, and does not."""

import dataclasses
import itertools
import types

import pytest
import torch

from llama405b.contract.paths import RunDir
from llama405b.contract.records import EventKind, Metrics
from llama405b.distributed import ranks
from llama405b.distributed.host_memory import StepTimer
from llama405b.distributed.ranks import Rank
from llama405b.optim.step import NonFiniteError, StepResult
from llama405b.settings.schema import Config
from llama405b.training.context import RankContext
from llama405b.training.evaluate import EvaluationResult, Evaluator
from llama405b.training.guards import MAX_SKIPPED, BadSteps, SpikeDetector
from llama405b.training.journal import HeartbeatWriter
from llama405b.training.loop import Trainer
from llama405b.training.requests import Stop

TAKEN = Metrics(0, 0.0, 5.0, 1.0, 1e-5, 8, 8.0, 1.0, 0.1, 0.5, 0.3, 0.1)


class Script:
    """Steps in place of a reader's."""

    def __init__(self, steps):
        self.steps = iter(steps)

    def __next__(self):
        return next(self.steps)


class Scripted(Trainer):
    """Takes the steps of a script, where None is one that is skipped."""

    def run_step(self, step):
        return next(self.reader)

    def after_step(self, step, metrics):
        return Stop.NO


@pytest.fixture
def take(tmp_path, monkeypatch):
    """Take a script's steps; returns the timeouts that were set and the heartbeat."""
    timeouts = []
    monkeypatch.setattr(ranks, "set_timeout", timeouts.append)

    def run(*script, **more):
        me = Rank(0, 1, 0, "a", torch.device("cpu"))
        journal = types.SimpleNamespace(
            write_metrics=lambda _: None, log=lambda _: None, write_event=lambda *_, **__: None, steps=9
        )
        heartbeat = HeartbeatWriter(RunDir(tmp_path), me)
        parts = {field.name: None for field in dataclasses.fields(Trainer) if field.default is dataclasses.MISSING}
        parts["checkpointer"] = types.SimpleNamespace(
            saving_step=0, wait_for_after_save=lambda *_: None, new_checkpoints=[]
        )
        parts["forward_backward"] = types.SimpleNamespace(model=None)
        parts["updater"] = types.SimpleNamespace(wait=lambda: None)
        parts["evaluator"] = None
        context = RankContext(me, RunDir(tmp_path), more.pop("journal", journal), heartbeat)
        parts |= {"config": Config(), "context": context, "reader": Script(script), "steps": range(1, 1 + len(script))}
        if settings := more.pop("evaluation", None):
            more["evaluator"] = Evaluator(settings, 1, None, None, context)
        trainer = Scripted(**parts | more)
        trainer.run_steps()
        return timeouts, heartbeat.record

    return run


def test_an_evaluation_is_told_after_its_step(take, monkeypatch):
    monkeypatch.setattr("llama405b.training.evaluate.evaluate", lambda *_: EvaluationResult(1.5, 8, 1))
    logged = []
    journal = types.SimpleNamespace(
        write_metrics=lambda metrics: logged.append(f"step {metrics.step}, {metrics.evaluation_loss}"),
        log=logged.append,
    )
    evaluation = dataclasses.replace(Config().evaluation, every=2)
    take(dataclasses.replace(TAKEN, step=2), journal=journal, evaluation=evaluation)
    assert logged[0] == "step 2, 1.5"
    assert logged[1].startswith("evaluation after step 2: loss 1.5000")


def test_the_long_timeout_lasts_until_a_step_was_taken(take):
    short = Config().timeouts.step
    assert take(None, None)[0] == []
    assert take(None, TAKEN, None)[0] == [short]


def _meets(monkeypatch, *outcomes, **choices):
    """A trainer whose steps come out so: a loss, or "nan"; returns it, what it logs, and its events."""
    script, logged, events = iter(outcomes), [], []

    def train_step(*_, refuses_loss, **__):
        outcome = next(script)
        if outcome == "nan":
            raise NonFiniteError("loss nan, gradient norm nan")
        return StepResult(outcome, 1.0, 8, updated=not refuses_loss(outcome))

    monkeypatch.setattr("llama405b.training.loop.train_step", train_step)
    monkeypatch.setattr("llama405b.training.guards.document_names_at", lambda *_: ["d.jsonl 7"])
    me = Rank(0, 1, 0, "a", torch.device("cpu"))
    journal = types.SimpleNamespace(
        rank=me, log=logged.append, write_event=lambda kind, **more: events.append((kind, more["step"])), steps=9
    )
    parts = {field.name: None for field in dataclasses.fields(Trainer) if field.default is dataclasses.MISSING}
    reader = Script(itertools.repeat([]))
    reader.position, reader.global_batch, reader.batches = 2, 2, types.SimpleNamespace(mixture=None)
    training = dataclasses.replace(Config().training, on_loss_spike="skip", **choices)
    parts |= {
        "config": Config(),
        "context": RankContext(me, None, journal, None),
        "reader": reader,
        "bad_steps": BadSteps(training, SpikeDetector(3.0, [2.0] * 20), reader, journal, 1),
    }
    trainer = Trainer(**parts)
    return trainer, logged, events


def test_a_step_that_is_not_finite_ends_the_run_with_its_documents(monkeypatch):
    trainer, logged, events = _meets(monkeypatch, "nan")
    with pytest.raises(NonFiniteError, match=r"step 4: loss nan, .* with --training\.on_nonfinite skip"):
        trainer.train_batch(4, StepTimer(trainer.context.rank.device))
    assert logged == [
        "step 4/9  loss nan, gradient norm nan; the weights are still those of step 3; its documents: d.jsonl 7"
    ]
    assert events == [(EventKind.NOT_FINITE, 4)]


def test_a_step_that_is_not_finite_can_be_left_out(monkeypatch):
    trainer, _, events = _meets(monkeypatch, 2.0, "nan", 2.5, on_nonfinite="skip")
    results = [trainer.train_batch(step, StepTimer(trainer.context.rank.device)) for step in (1, 2, 3)]
    assert [result and result.loss for result in results] == [2.0, None, 2.5]
    assert events == [(EventKind.NOT_FINITE, 2)]
    assert trainer.bad_steps.n_empty == 0


def test_not_one_step_after_another_is_left_out_spikes_included(monkeypatch):
    outcomes = ["nan", 50.0] * (MAX_SKIPPED // 2)
    trainer, _, _ = _meets(monkeypatch, "nan", 2.0, *outcomes[::-1], on_nonfinite="skip")

    def take(step):
        if result := trainer.train_batch(step, StepTimer(trainer.context.rank.device)):
            trainer.bad_steps.check_spike(step, result)

    for step in range(1, MAX_SKIPPED + 2):
        take(step)
    with pytest.raises(NonFiniteError, match=f"{MAX_SKIPPED} steps in a row were skipped, the last one for: loss nan"):
        take(MAX_SKIPPED + 2)


def test_how_long_a_skipped_step_took_is_not_known(take):
    _, beat = take(TAKEN)
    assert (beat.step, beat.data_s, beat.optimizer_s) == (1, 0.1, 0.1)
    _, beat = take(TAKEN, None)
    assert (beat.step, beat.data_s, beat.optimizer_s) == (2, None, None)
