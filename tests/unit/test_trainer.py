"""The step loop around a step: what a skipped one does, and does not."""

import dataclasses
import types

import pytest
import torch

from llama405b import ranks
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Metrics
from llama405b.contract.schema import Config
from llama405b.heartbeat import Pulse
from llama405b.ranks import Ranks
from llama405b.trainer import Trainer

TAKEN = Metrics(0, 0.0, 5.0, 1.0, 1e-5, 8, 8.0, 1.0, 0.1, 0.5, 0.3, 0.1)


class Script:
    """Steps in place of a reader's."""

    def __init__(self, steps):
        self.steps = iter(steps)

    def __next__(self):
        return next(self.steps)


class Scripted(Trainer):
    """Takes the steps of a script, where None is one that is skipped."""

    def one_step(self, step):
        return next(self.reader)

    def obey(self, step, metrics):
        return False


@pytest.fixture
def take(tmp_path, monkeypatch):
    """Take a script's steps; returns the timeouts that were set and the heartbeat."""
    timeouts = []
    monkeypatch.setattr(ranks, "set_timeout", timeouts.append)

    def run(*script):
        me = Ranks(0, 1, 0, "a", torch.device("cpu"))
        journal = types.SimpleNamespace(
            metrics=lambda _: None, log=lambda _: None, event=lambda *_, **__: None, steps=9
        )
        pulse = Pulse(RunDir(tmp_path), me)
        parts = {field.name: None for field in dataclasses.fields(Trainer) if field.default is dataclasses.MISSING}
        parts["saver"] = types.SimpleNamespace(step=0)
        parts["updater"] = types.SimpleNamespace(drain=lambda: None)
        parts |= {"config": Config(), "me": me, "reader": Script(script), "steps": range(1, 1 + len(script))}
        trainer = Scripted(**parts | {"journal": journal, "pulse": pulse})
        trainer.take_steps()
        return timeouts, pulse.record

    return run


def test_the_long_timeout_lasts_until_a_step_was_taken(take):
    short = Config().timeouts.step
    assert take(None, None)[0] == []
    assert take(None, TAKEN, None)[0] == [short]


def test_how_long_a_skipped_step_took_is_not_known(take):
    _, beat = take(TAKEN)
    assert (beat.step, beat.data_s, beat.optimizer_s) == (1, 0.1, 0.1)
    _, beat = take(TAKEN, None)
    assert (beat.step, beat.data_s, beat.optimizer_s) == (2, None, None)
