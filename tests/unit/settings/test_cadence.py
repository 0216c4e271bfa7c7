import math

import pytest

from llama405b.contract.errors import UserError
from llama405b.settings import config
from llama405b.settings.schema import FIRST_INTERVAL_S, Cadence, best_interval_s, useful_fraction


@pytest.mark.parametrize(
    ("text", "cadence"),
    [
        ("100", Cadence(steps=100)),
        ("10m", Cadence(seconds=600)),
        ("90s", Cadence(seconds=90)),
        ("auto", Cadence(auto=True)),
        ("0", Cadence()),
    ],
)
def test_steps_times_and_auto_are_read(text, cadence, tmp_path):
    assert Cadence.parse(text) == cadence
    assert cadence.is_enabled == (text != "0")
    flag = config.read_flags(["--checkpoint.every", text])
    (tmp_path / "c.toml").write_text(f'[checkpoint]\nevery = "{text}"\n')
    assert config.read_toml(tmp_path / "c.toml")["checkpoint.every"][0] == flag["checkpoint.every"][0] == text


def test_a_number_in_a_file_is_steps(tmp_path):
    (tmp_path / "c.toml").write_text("[checkpoint]\nevery = 7\n")
    assert config.read_toml(tmp_path / "c.toml")["checkpoint.every"][0] == "7"


@pytest.mark.parametrize("value", ["-1", "ten", "1.5", "0m", "", "true", "10d", "99999999999"])
def test_anything_else_is_refused(value):
    with pytest.raises(UserError, match="write a number of steps, a time like 10m, or auto"):
        config.read_flags([f"--checkpoint.every={value}"])


def test_it_is_due_by_steps_or_by_time():
    assert [step for step in range(1, 10) if Cadence(steps=4).is_due(step, 1e9, 0)] == [4, 8]
    assert [s for s in (0, 599, 600, 900) if Cadence(seconds=600).is_due(3, s, 0)] == [600, 900]
    assert [s for s in (0, 599, 600, 900) if Cadence(auto=True).is_due(3, s, 599.5)] == [600, 900]
    assert not Cadence().is_due(4, 1e9, 0)


def test_the_best_interval_loses_the_least():
    cost_s, restart_s, mtbf_s = 60.0, 600.0, 12 * 3600.0

    def lost(interval_s):
        """Of the time: to saving, and on average to half an interval and a restart at each failure."""
        return cost_s / (interval_s + cost_s) + (interval_s / 2 + restart_s) / mtbf_s

    best_s = best_interval_s(cost_s, restart_s, mtbf_s)
    assert lost(best_s) < min(lost(0.8 * best_s), lost(1.25 * best_s))
    assert best_s == pytest.approx(math.sqrt(2 * cost_s * mtbf_s), rel=0.05)
    assert best_interval_s(None, restart_s, mtbf_s) == FIRST_INTERVAL_S


def test_the_best_interval_leaves_the_most_time_for_steps():
    cost_s, restart_s, mtbf_s = 60.0, 600.0, 12 * 3600.0
    best_s = best_interval_s(cost_s, restart_s, mtbf_s)
    shares = [useful_fraction(factor * best_s, cost_s, restart_s, mtbf_s) for factor in (0.8, 1.0, 1.25)]
    assert max(shares) == shares[1]
    lost = cost_s / (best_s + cost_s) + (best_s / 2 + restart_s) / mtbf_s
    assert shares[1] == pytest.approx(1 - lost, abs=0.005)


def test_without_failures_only_saves_take_time():
    assert useful_fraction(900.0, 100.0, 600.0, 1e12) == pytest.approx(0.9)
    assert useful_fraction(1e6, 0.0, 0.0, 1e3) == 0.0
