"""What tune refuses, what it chooses of what was measured, and how it changes a settings file."""

import dataclasses
import time
import tomllib

import pytest

from llama405b.contract.errors import RunError, UserError
from llama405b.predict.calibration import Calibration, MeasuredStep, StandaloneRates
from llama405b.predict.estimate import Cluster
from llama405b.predict.hardware import GIB, read_gpus
from llama405b.predict.run_shape import PredictedRun
from llama405b.predict.search import Prediction
from llama405b.spec.models import Llama
from llama405b_tools.launch.request import parse_launch
from llama405b_tools.launch.start import read_calibration
from llama405b_tools.verbs import launch, tune

LLAMA = Llama(32, 4096, 14336, 32, 8, 128, 128256, False, False, False, 8192)
RATES = StandaloneRates(0.02, 2e12, 150e9, 40e9, 150e9, 120e9, 2e-5, 4e9)
FILE = """# ours
[data]
paths = ["stdlib"]   # for now

[training]
micro_batch_size = 1 # small
global_batch_size = 64
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text(FILE)
    (tmp_path / "hosts").write_text("a slots=8\n")
    return tmp_path


def request(*words):
    return parse_launch(["hosts", "--preset", "llama3.1-8b", "--config", "my.toml", *words], time.time())


def outcomes(*measured):
    """Of the settings as asked, and others: (change, step in s, GiB reserved at few layers, first steps)."""
    asked = request()
    run = PredictedRun.from_config(LLAMA, asked.settings, 8)
    base = Prediction.from_run(run, Cluster(read_gpus()["h100-80"]), 2 << 40)
    found = []
    for change, step_s, gib, first_steps in measured:
        changed = base.with_run(dataclasses.replace(run, **change))
        option = tune.make_option(changed, asked.settings, asked.settings, base, 3)
        # a line through nothing but layers
        few, more = (
            MeasuredStep(
                n, option.prediction.run.micro_batch, 64, 0, step_s * n / 96, step_s * n / 48, 0, int(gib * GIB)
            )
            for n in (1, 3)
        )
        made = Calibration(option.prediction.run, few, more, None, RATES, ("a",), "h100-80", "2026-11-30", tuned=True)
        found.append(tune.Outcome(option, first_steps, made))
    return asked, found


STEPS = (11.8, 11.7, 3.0, 2.9)


def test_the_fastest_goes_into_the_file_with_what_it_was(here, capsys):
    asked, found = outcomes(
        ({}, 10.0, 20, STEPS), ({"micro_batch": 2}, 8.0, 20, STEPS), ({"micro_batch": 4}, 9.0, 20, STEPS)
    )
    assert tune.keep_best(asked, found)
    assert (here / "my.toml").read_text() == FILE.replace(
        "micro_batch_size = 1 # small", "micro_batch_size = 2 # tuned 2026-11-30: 8 s a step, 10 s before"
    )
    said = capsys.readouterr().out
    assert "fastest with room: --training.micro_batch_size 2: 8 s a step, 1.25 x as fast as set; " in said
    assert "wrote training.micro_batch_size into my.toml" in said
    kept = read_calibration(here / "hosts", [type("Host", (), {"name": "a"})])
    assert (kept.load.micro_batch, kept.few.micro_batch, kept.tuned) == (2, 2, True)
    assert tune.Outcome(found[1].option, STEPS, kept).step_s == pytest.approx(8.0)


def test_a_gain_that_is_noise_changes_nothing(here, capsys):
    asked, found = outcomes(({}, 10.0, 20, STEPS), ({"micro_batch": 2}, 9.95, 20, STEPS))
    assert tune.keep_best(asked, found)
    assert (here / "my.toml").read_text() == FILE
    assert "nothing to change in my.toml" in capsys.readouterr().out


def test_what_has_no_room_or_computes_something_else_is_not_chosen(here, capsys):
    half = (11.8, 11.7, 1.5, 1.4)
    asked, found = outcomes(
        ({}, 10.0, 20, STEPS), ({"micro_batch": 2}, 7.0, 70, STEPS), ({"micro_batch": 4}, 8.0, 20, half),
        ({"fsdp_unit": "sublayer"}, 9.0, 20, STEPS),
    )  # fmt: skip
    assert tune.keep_best(asked, found)
    said = capsys.readouterr().out
    assert said.startswith(
        "left out: its first losses and gradient norms (11.8, 11.7, 1.5, 1.4) are not those of the others; --tr"
    )
    assert "fastest with room: --parallel.fsdp_unit sublayer: 9 s" in said
    assert tomllib.loads((here / "my.toml").read_text())["parallel"] == {"fsdp_unit": "sublayer"}


def test_where_nothing_has_room_nothing_is_written(here, capsys):
    asked, found = outcomes(({}, 10.0, 90, STEPS), ({"micro_batch": 2}, 7.0, 95, STEPS))
    assert not tune.keep_best(asked, found)
    assert (here / "my.toml").read_text() == FILE
    assert not (here / "hosts.calibration.json").exists()
    assert capsys.readouterr().out.startswith("none has room with all layers; nothing was written; the nearest: ")


def test_the_table_has_what_was_predicted_beside_what_was_measured(here):
    _, found = outcomes(({}, 10.0, 20, STEPS), ({"micro_batch": 2}, 8.0, 20, STEPS))
    header, rows = tune.outcome_table(found, None)
    assert header == ["a step", "predicted", "of 79.1 GiB", "predicted", "settings"]
    assert [row[0] for row in rows] == ["8 s", "10 s"]
    assert [row[-1] for row in rows] == ["--training.micro_batch_size 2", "as set"]
    predicted_s = found[0].option.prediction.needs.step_s
    assert rows[1][1] == f"{predicted_s:.3g} s ({10 / predicted_s:.2f})"


@pytest.mark.parametrize(
    ("before", "values"),
    [
        ("", {"parallel.tp": 2}),
        ("[parallel]\noffload = 'all'\n", {"parallel.offload": "none", "model.compile": True}),
        ("parallel.offload = 'all' # x\n", {"parallel.offload": "none"}),
        ("parallel = {offload = 'all', tp = 2}\n", {"parallel.offload": "none"}),
        ("[data]\npaths = [\n  'a', # one\n]\n[model]\n\n", {"model.loss": "chunked", "parallel.prefetch": 0}),
        ("[data]\r\nseq_len = 64 # short\r\n[parallel]\r\ntp = 2\r\n", {"parallel.tp": 1}),
    ],
)
def test_settings_are_written_and_all_else_stays(tmp_path, before, values):
    path = tmp_path / "s.toml"
    path.write_bytes(before.encode())
    tune.write_settings(path, values, "why")
    text = path.read_bytes().decode()
    expected = tomllib.loads(before)
    for name, value in values.items():
        section, _, key = name.partition(".")
        expected.setdefault(section, {})[key] = value
    assert tomllib.loads(text) == expected
    assert text.count("# why") == (0 if "{" in before else len(values))  # an inline table has no room for one
    kept = [line for line in before.splitlines(True) if not any(name.partition(".")[2] in line for name in values)]
    assert all(line in text.splitlines(True) for line in kept)


@pytest.mark.parametrize("before", ["[parallel\n", "parallel = 3\n"])
def test_a_file_in_an_odd_form_stays_and_the_settings_are_told(tmp_path, before):
    path = tmp_path / "s.toml"
    path.write_text(before)
    with pytest.raises(RunError, match=r"cannot be changed \(.*\); the fastest settings are --parallel.offload=none"):
        tune.write_settings(path, {"parallel.offload": "none"}, "why")
    assert path.read_text() == before


OURS = ["hosts", "--config", "my.toml", "--preset", "llama3.1-8b"]


def test_the_settings_as_asked_are_known_as_such_and_only_what_launch_takes_is_tried(here):
    """A form of a setting that the search writes otherwise is still the user's; prompts cannot be continued with tp."""
    (here / "my.toml").write_text(
        FILE + "[parallel]\nstrategy = 'hsdp'\n[evaluation]\nevery = 5\nfraction = 0.1\nprompts = ['a']\n"
    )
    asked = parse_launch(OURS, time.time())
    run = PredictedRun.from_config(LLAMA, asked.settings, 16)
    base = Prediction.from_run(run, Cluster(read_gpus()["h100-80"]), 2 << 40)
    options = tune.list_options(asked.settings, asked.settings, base)
    assert options[0].candidate.label == "as set"
    assert options[0].candidate.flags == ()
    assert len(options) > 8
    assert {(option.prediction.run.tp, option.prediction.run.pp) for option in options} == {(1, 1)}


def test_what_cannot_be_tuned_is_refused(here):
    for words, why in (
        (["hosts", "--preset", "demo"], "--config FILE, which may be empty"),
        (["hosts", "--config", "my.toml", "--minutes", "0"], "--minutes: 0 is out of range"),
        (["hosts", "--config", "my.toml", "--minutes", "nan"], "--minutes: nan is out of range"),
        (
            [*OURS, "--training.micro_batch_size", "2"],
            "--training.micro_batch_size: tune chooses it",
        ),
        ([*OURS, "--parallel.strategy", "fsdp1"], "--parallel.strategy: tune chooses it"),
        ([*OURS, "--restart", "2"], "--restart: "),
        ([*OURS, "--training.global_batch_size", "0"], "--training.global_batch_size: tune chooses it"),
        (["nohosts", *OURS[1:]], "nohosts"),
        (["hosts", "--config", "other.toml"], "other.toml"),
    ):
        with pytest.raises(UserError) as found:
            tune.main(words)
        assert why in str(found.value), words
    (here / "my.toml").write_text(FILE + "[parallel]\nstrategy = 'fsdp1'\n")
    with pytest.raises(UserError, match=r"does not try fsdp1; set parallel.strategy in my.toml"):
        tune.main(OURS)
    for words in (["--resume"], ["--rehearse"], ["--slurm", "-N 2"]):
        with pytest.raises(UserError, match="--tune: "):
            launch.main(["hosts", "--config", "my.toml", "--preset", "llama3.1-8b", "--tune", "--run", "r", *words])
    with pytest.raises(UserError, match="--tune"):
        launch.main(["hosts", "--tune", "--", "my.py"])
