import pytest

from llama405b.contract.schema import Optimizer
from llama405b.optim.adamw import lr_at


def test_schedule():
    config = Optimizer(lr=1.0, min_lr=0.1, warmup=10, decay="cosine")
    assert lr_at(1, 110, config) == pytest.approx(0.1)
    assert lr_at(10, 110, config) == pytest.approx(1.0)
    assert lr_at(60, 110, config) == pytest.approx(0.55)
    assert lr_at(110, 110, config) == pytest.approx(0.1)
    assert lr_at(200, 110, config) == pytest.approx(0.1)


def test_linear_and_constant():
    assert lr_at(50, 100, Optimizer(lr=1.0, decay="linear")) == pytest.approx(0.5)
    assert lr_at(99, 100, Optimizer(lr=1.0, decay="constant")) == 1.0
