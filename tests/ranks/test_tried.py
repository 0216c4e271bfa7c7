"""The program that tries settings one after the other, on ranks of this machine."""

import pytest

from llama405b.contract import reader
from llama405b.predict.tuning import Candidate, Trial, Trials
from llama405b.spec.probes import decode_results
from ranks_rig import run_program

FLAGS = (
    "--preset=demo", "--data.paths=stdlib", "--data.max_bytes=200000", "--data.seq_len=64", "--training.global_batch_size=4",
    "--training.micro_batch_size=2", "--model.weights=random", "--checkpoint.every=0", "--evaluation.every=0",
    "--evaluation.fraction=0", "--parallel.device=cpu", "--training.max_steps=100",
)  # fmt: skip


@pytest.mark.parametrize("world", [1, 2])
def test_each_trial_begins_anew_and_the_first_that_fails_ends_all(demo, tmp_path, world):
    no_such = ("--training.extend=nosuch.py",)
    split = ("--parallel.tp=2",) if world == 2 else ("--model.loss=chunked",)
    settings = {
        "as set": (),
        "split": split,
        "one": ("--training.micro_batch_size=1",),
        "no such": no_such,
        "never": (),
    }
    candidates = [Candidate(label, flags, {}, 0.0, (1, 2)) for label, flags in settings.items()]
    trials = Trials((*FLAGS, f"--model.path={demo}"), tuple(candidates), 2, 2)
    words = [
        "--probes",
        "trials",
        "--time-limit",
        "100",
        "--device",
        "cpu",
        "--trials",
        reader.dumps(trials),
        "--run-dir",
        "r",
    ]
    done = run_program("llama405b.bench.__main__:main", *words, cwd=tmp_path, world=world, timeout_s=200)
    assert done.returncode == 1
    results = [*decode_results(done.stdout.splitlines())]
    found = {each.trial: reader.loads(Trial, each.outcome, "it") for each in results if each.outcome and not each.fault}
    assert [*found] == ["as set", "split", "one"]
    for trial in found.values():
        assert [point.layers for point in trial.points] == [1, 2]
        assert all(point.forward_s > 0 and point.optimizer_s > 0 for point in trial.points)
    for name in ("split", "one"):
        assert found[name].first_steps == pytest.approx(found["as set"].first_steps, rel=1e-3)
    assert {point.micro_batch for point in found["one"].points} == {1}
    begun = dict.fromkeys(result.trial for result in results if result.trial)
    assert [*begun] == ["as set", "split", "one", "no such"]
    faults = [result.fault for result in results if result.fault and result.trial]
    assert [("nosuch" in fault) for fault in faults] == [True] * (world == 1)
    assert "nosuch" in done.stderr
