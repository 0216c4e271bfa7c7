"""The loss on held-out data: the same for any number of ranks and any batch, and where it is told."""

import json
import re
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from llama405b.contract.paths import RunDir
from llama405b.contract.records import Metrics, Phase
from llama405b.data.batches import Batches
from llama405b.data.encode import DOCUMENT_START, NOT_TRAINED
from llama405b.data.sources import Mixture, Source
from llama405b.distributed.ranks import Rank
from llama405b.parallel.passes import MicrobatchLoop
from llama405b.training.journal import Journal, read_metrics
from ranks_rig import run_program, run_ranks

SEQ = 16
CASES = [(1, 0), (3, 0), (4, 5), (20, 0)]  # sequences at a time, and at most


def _batches():
    draw = np.random.default_rng(4)
    tokens_N = draw.integers(0, 131, 11 * SEQ + 1).astype(np.uint32)
    tokens_N[draw.random(len(tokens_N)) < 0.3] |= NOT_TRAINED
    tokens_N[::7] |= DOCUMENT_START
    return Batches(Mixture.from_weights([Source(tokens_N, SEQ)], 0))


def _evaluate(me, directory):
    from llama405b.training.evaluate import evaluate
    from update_rig import build, take

    module, updater = build(me, directory, overlap=True)
    found = [evaluate(MicrobatchLoop(module, me.dp.size), _batches(), me, micro, most) for micro, most in CASES]
    for step in range(2):  # the next one waits for an update that is hidden under its forward
        take(me, module, updater, step)
        found.append(evaluate(MicrobatchLoop(module, me.dp.size), _batches(), me, 2))
    loss = take(me, module, updater, 2)[0]
    updater.wait()
    return [(each.loss, each.n_targets, each.n_sequences) for each in found], loss


def _plainly(directory, n_sequences):
    model, batches = LlamaForCausalLM.from_pretrained(directory), _batches()
    nats, n_targets = 0.0, 0
    for sequence in [i * 11 // n_sequences for i in range(n_sequences)]:
        batch = batches.read_unshuffled([sequence])
        with torch.no_grad():
            logits = model(input_ids=batch.ids_BS, position_ids=batch.positions_BS, use_cache=False).logits
        nats += float(F.cross_entropy(logits[0], batch.targets_BS[0], ignore_index=-100, reduction="sum"))
        n_targets += int((batch.targets_BS != -100).sum())
    return nats / n_targets, n_targets, n_sequences


def test_it_does_not_depend_on_ranks_or_batches(tiny):
    trained = []
    for world in (1, 2, 3):
        for found, loss in run_ranks(world, _evaluate, tiny):
            for (_, most), (value, *counts) in zip(CASES, found, strict=False):
                expected, *wanted = _plainly(tiny, most or 11)
                assert value == pytest.approx(expected, rel=1e-6)
                assert counts == wanted
            trained.append([value for value, *_ in found[len(CASES) :]] + [loss])
    assert all(each == pytest.approx(trained[0], rel=1e-5) for each in trained)
    assert trained[0][0] != trained[0][1]


def _gathered_in_a_step(me, directory, evaluates):
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as of_torch

    from llama405b.training.evaluate import evaluate
    from update_rig import build, take

    module, updater = build(me, directory, overlap=True)
    take(me, module, updater, 0)
    if evaluates:
        evaluate(MicrobatchLoop(module, me.dp.size), _batches(), me, 2)
    gather, found = of_torch.foreach_all_gather, []

    def note(parameters, *args):
        found.append(parameters[-1]._param_fqn)
        return gather(parameters, *args)

    of_torch.foreach_all_gather = note
    take(me, module, updater, 1)
    updater.wait()
    return found


def test_the_step_after_an_evaluation_gathers_nothing_for_nobody(tiny):
    usual, _ = run_ranks(2, _gathered_in_a_step, tiny, False)
    after, _ = run_ranks(2, _gathered_in_a_step, tiny, True)
    assert usual.count("lm_head.weight") == 1
    assert after == [name for name in usual if name != "lm_head.weight"]  # the evaluation left it gathered


def _train(work, demo, *settings, world=1):
    flags = {
        "model.path": demo, "data.paths": "corpus", "data.seq_len": 32, "training.global_batch_size": 4, "training.max_steps": 5,
        "parallel.device": "cpu", "parallel.numerics": "fp32", "checkpoint.every": 0,
    }  # fmt: skip
    typed = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    return run_program("llama405b.train:run_and_exit", "--run-dir", "runs/r", *typed, *settings, cwd=work, world=world)


@pytest.mark.parametrize("how", [("--evaluation.fraction", "0.1"), ("--evaluation.paths", "held.txt")])
def test_a_run_tells_it(demo, corpus, tmp_path, how):
    (tmp_path / "corpus").symlink_to(corpus)
    (tmp_path / "held.txt").write_text("".join(file.read_text() for file in sorted(corpus.rglob("*.py")))[:9000])
    done = _train(tmp_path, demo, "--evaluation.every", "2", *how)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("evaluation after step ")]
    assert [line.split()[3] for line in lines] == ["2:", "4:", "5:"]
    before, *metrics = [json.loads(line) for line in (tmp_path / "runs/r/metrics.jsonl").read_text().splitlines()]
    found = [each.get("evaluation_loss") for each in metrics]
    assert [value is not None for value in found] == [False, True, False, True, True]
    assert f"loss {found[1]:.4f}, perplexity" in lines[0]
    assert found[4] < found[1] < before["evaluation_loss"]


def test_several_ranks_keep_the_best_beside_the_newest_and_know_it_after_a_resume(demo, corpus, tmp_path):
    (tmp_path / "corpus").symlink_to(corpus)
    settings = {
        "evaluation.every": 1, "evaluation.fraction": 0.1, "checkpoint.every": 4, "checkpoint.keep_best": "true",
        "optimizer.lr": 1.0, "optimizer.warmup": 40, "training.max_steps": 12,
    }  # fmt: skip
    typed = [word for key, value in settings.items() for word in (f"--{key}", str(value))]

    def losses_of(steps):
        done = _train(tmp_path, demo, *typed, "--training.max_steps", str(steps), "--resume", "auto", world=2)
        assert done.returncode == 0, done.stderr
        metrics = [json.loads(line) for line in (tmp_path / "runs/r/metrics.jsonl").read_text().splitlines()]
        master = sorted(int(path.name.partition("-")[2]) for path in (tmp_path / "runs/r/checkpoints").glob("step-*"))
        assert [each["step"] for each in metrics] == list(range(steps + 1))
        assert ("evaluation before step 1" in done.stdout) == (steps == 12)  # not where it goes on
        return {each["step"]: each["evaluation_loss"] for each in metrics if each["step"]}, master

    for steps in (12, 16):
        losses, master = losses_of(steps)
        best = min(losses, key=losses.get)
        assert best < 8  # the learning rate has grown beyond what is good
        assert master == [best, steps - 4, steps]


class Reads:
    """Steps in place of a reader's, and where it stands."""

    position = 0

    def __init__(self, steps):
        self.steps = iter(steps)

    def __next__(self):
        return next(self.steps)


def _takes_steps(me, directory, kind, evaluates):
    """Losses and norms of a trainer's first steps, and what it logs and how it is seen meanwhile."""
    from llama405b.settings.schema import Config, Evaluation
    from llama405b.training.context import RankContext
    from llama405b.training.evaluate import Evaluator
    from llama405b.training.guards import BadSteps, SpikeDetector
    from llama405b.training.loop import Trainer
    from llama405b.training.requests import Requests
    from update_rig import batch, build

    settings = {"all": {"overlap": True}, "optimizer": {"overlap": True, "offload": "optimizer"}}
    module, updater = _fsdp1(me, directory) if kind == "fsdp1" else build(me, directory, **settings[kind])
    for layer in module.modules():
        if hasattr(layer, "attention_dropout"):
            layer.attention_dropout = 0.1  # the steps draw random numbers
    torch.manual_seed(me.index)
    logged, taken, phases = [], [], []
    steps = [batch(step, me, 2) for step in range(3)]
    nothing = types.SimpleNamespace
    journal = nothing(
        log=logged.append, write_evaluation=lambda *found: logged.append(found), write_metrics=taken.append, steps=3
    )
    memory = nothing(show_step=lambda _: None, show_unit=lambda _: None)
    heartbeat = nothing(
        enter_phase=phases.append, record_alive=lambda: None, record_step=lambda *_, **__: None, live_progress=memory
    )
    context = RankContext(me, RunDir(Path()), journal, heartbeat)
    compared = []  # with the best loss that was saved
    saver = nothing(
        saving_step=0, save_s=0.0, new_checkpoints=[], cadence=nothing(is_enabled=False), saving=nothing(is_busy=False),
        is_due=lambda _: False,
        is_best=lambda loss: bool(compared.append(loss)),
        after_step=lambda *_, **__: None, local_failed_rank=0, report_after_save=lambda _: None,
        wait_for_after_save=lambda *_: None,
    )  # fmt: skip
    bad_steps = BadSteps(Config().training, SpikeDetector(3.0), None, journal, 1)
    passes = MicrobatchLoop(module, me.dp.size)
    budget = nothing(after_step=lambda *_: False, write=lambda: None)
    evaluator = Evaluator(Evaluation(every="2", micro_batch_size=2), 1, passes, _batches(), context)
    trainer = Trainer(
        Config(), context, passes, updater, Reads(steps), range(1, 4), 0, bad_steps, saver,
        Requests(context, nothing(is_received=False)), budget, nothing(close=lambda: None), evaluator,
        evaluate_first=evaluates,
    )  # fmt: skip
    trainer.run_steps()
    return [(each.loss, each.grad_norm) for each in taken], logged, phases, compared


def _fsdp1(me, directory):
    import torch.distributed.fsdp._init_utils as init_utils

    from llama405b.model import llama
    from llama405b.model.llama import checkpoint_activations
    from llama405b.optim.build_updater import build_updater
    from llama405b.parallel import fsdp
    from llama405b.settings.schema import Optimizer, Parallel

    init_utils._check_module_states_for_sync_module_states = lambda _states: None  # torch's refusal on CPU
    parallel = Parallel(numerics="fp32", strategy="fsdp1")
    module = fsdp.load_fsdp1(directory, llama.read_hf_config(directory), "sdpa", parallel, me)
    checkpoint_activations(module)
    return module, build_updater(module, Optimizer(lr=3e-3), parallel, me.device)


def _with_and_without(me, directory):
    return {
        kind: [_takes_steps(me, directory, kind, evaluates) for evaluates in (False, True)]
        for kind in ("all", "optimizer", "fsdp1")
    }


def test_an_evaluation_before_the_first_step_changes_no_step(tiny):
    expected, *_ = _plainly(tiny, 11)
    for found in run_ranks(2, _with_and_without, tiny):
        for kind, [(without, quiet, *_), (evaluated, logged, phases, compared)] in found.items():
            assert evaluated == without, kind  # bit for bit
            assert len(evaluated) == 3
            line, (step, loss), *after = logged
            assert (step, loss) == (0, pytest.approx(expected, rel=1e-3 if kind == "optimizer" else 1e-6))
            assert line.startswith(f"evaluation before step 1: loss {loss:.4f}, perplexity ")
            assert [words.partition(":")[0] for words in after] == [words.partition(":")[0] for words in quiet]
            assert phases[:2] == [Phase.EVAL, Phase.TRAIN]
            assert len(compared) == 3  # no checkpoint has the weights of before
            assert loss not in compared


@pytest.fixture(scope="module")
def trained(demo, corpus, tmp_path_factory):
    """A directory with a run of two ranks whose learning rate only harms; its evaluation losses by step, and what it printed."""
    place = tmp_path_factory.mktemp("trained")
    (place / "corpus").symlink_to(corpus)
    (place / "held.txt").write_text("".join(file.read_text() for file in sorted(corpus.rglob("*.py")))[:9000])
    settings = {
        "evaluation.every": 1, "evaluation.paths": "held.txt", "checkpoint.every": 100, "checkpoint.keep_best": "true",
        "optimizer.lr": 3.0, "optimizer.decay": "constant", "training.max_steps": 3,
    }  # fmt: skip
    done = _train(place, demo, *(word for key, value in settings.items() for word in (f"--{key}", str(value))), world=2)
    assert done.returncode == 0, done.stderr
    return place, _evaluated(place / "runs/r"), done.stdout


def _evaluated(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {each["step"]: each["evaluation_loss"] for each in lines}


def test_the_weights_that_a_run_begins_with_are_never_the_best_checkpoint(trained):
    place, losses, said = trained
    assert said.count("evaluation before step 1: loss ") == 1
    assert min(losses, key=losses.get) == 0
    best = min((1, 2, 3), key=losses.get)
    assert sorted(path.name for path in (place / "runs/r/checkpoints").glob("step-*")) == [
        f"step-{step:08}" for step in sorted({best, 2, 3})
    ]


def test_a_checkpoint_is_evaluated_without_training(demo, trained):
    place, losses, _ = trained
    run = place / "runs/r"
    first = min(run.glob("checkpoints/step-*"))  # there are later ones
    files = {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in run.rglob("*")}
    step = int(first.name.partition("-")[2])
    only = ["--evaluate-only", "--evaluation.paths", "held.txt", "--data.paths", "gone", "--checkpoint.every", "1"]
    only += ["--training.global_batch_size", "512", "--training.micro_batch_size", "3"]  # which no step could have
    named = first.relative_to(place)
    done = _train(place, demo, *only, "--run-dir", "runs/alone", "--optimizer.lr", "7", "--resume", named)
    assert done.returncode == 0, done.stderr
    assert _evaluated(place / "runs/alone") == {step: pytest.approx(losses[step], rel=1e-6)}
    said = re.search(rf"^evaluation of {named}: loss ([\d.]+), perplexity ", done.stdout, re.MULTILINE)
    assert float(said[1]) == pytest.approx(losses[step], rel=1e-6, abs=1e-4)  # sums of other micro-batches
    assert not (place / "runs/alone/checkpoints").exists()
    mixed = _train(place, demo, *only, "--resume", named)
    assert mixed.returncode == 2
    assert "--run-dir: runs/r is the directory of a run that trained; name another one" in mixed.stderr
    assert {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in run.rglob("*")} == files


def test_an_attempt_that_saved_nothing_has_evaluated_for_those_after_it(tmp_path):
    run, me = RunDir(tmp_path), Rank(0, 1, 0, "a", torch.device("cpu"))
    Journal(run, me).write_evaluation(0, 7.5)
    Journal(run, me).write_metrics(Metrics(1, 0.0, 5.0, 1.0, 1e-5, 8, 8.0, 1.0, 0.1, 0.5, 0.3, 0.1))
    for anew, left in ((False, 1), (True, 0)):
        journal = Journal(run, me)
        journal.resume_after(0, 9, restart=anew)
        assert (journal.evaluated_at_start, journal.losses, journal.tokens) == (not anew, (), 0)
        assert len(read_metrics(run.metrics)) == left


def _evaluated_from(me, directory, root):
    """By engine: the loss after two steps, and that of the weights alone, loaded from a checkpoint of it; and moments made."""
    from llama405b.optim.build_updater import OnDeviceUpdate
    from llama405b.training.evaluate import evaluate
    from update_rig import build, dcp_save, restore, take

    engines = {
        "all": lambda **more: build(me, directory, overlap=True, **more),
        "optimizer": lambda **more: build(me, directory, overlap=True, offload="optimizer", **more),
        "pure-bf16": lambda **more: build(me, directory, overlap=False, offload="none", numerics="pure-bf16", **more),
        "fsdp1": lambda: _fsdp1(me, directory),
    }
    found = {}
    for name, make in engines.items():
        module, updater = make()
        for step in range(2):
            take(me, module, updater, step)
        path = Path(root) / name / "step-00000002"
        updater.wait()
        trained = evaluate(MicrobatchLoop(module, me.dp.size), _batches(), me, 2).loss
        dcp_save(updater, me, path)
        fresh, other = make()
        alone = OnDeviceUpdate(fresh, other.master, other.optimizer)
        alone.optimizer.state.clear()
        done = restore(path, fresh, alone, me, weights_only=True)
        found[name] = (
            trained,
            evaluate(MicrobatchLoop(fresh, me.dp.size), _batches(), me, 2).loss,
            done,
            len(alone.optimizer.state),
        )
    return found


def test_the_weights_of_a_checkpoint_are_evaluated_without_moments(tiny, tmp_path):
    for found in run_ranks(2, _evaluated_from, tiny, str(tmp_path)):
        for name, (trained, loaded, done, moments) in found.items():
            assert (loaded, done, moments) == (trained, 2, 0), name


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--checkpoint.keep_best", "true"], "the run would not evaluate, or not save; set evaluation.every"),
        (["--evaluation.every", "2"], "no data to evaluate on; set evaluation.paths or evaluation.fraction"),
        (["--evaluation.paths", "a"], "evaluation.every is 0, so evaluation.paths would not be used"),
        (["--evaluation.every", "2", "--evaluation.fraction", "0.6"], "fraction is 0.6; use at most 0.5"),
    ],
)
def test_bad_input(demo, tmp_path, settings, words):
    done = _train(tmp_path, demo, *settings)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
