"""Learning rates and decays of their own, on any mesh and in any place of the states, are those of one process."""

import contextlib
import functools
import json
import shutil

import mesh_rig
import pytest
import torch

from ranks_rig import run_program, run_ranks

GROUPS = (
    "model.embed_tokens.* lr_factor=0.25 weight_decay=0",
    "model.layers.1.* lr_factor=0",
    "*layernorm* weight_decay=0.5",
)
CASES = {
    "dp": (3, {}),
    "offload": (2, {"offload": "all"}),
    "tp": (2, {"tp": 2}),
    "pp": (2, {"pp": 2, "offload": "all"}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return mesh_rig.write_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def alone(model):
    [(results, weights)] = run_ranks(1, _train, model, {})
    return results, weights


def _train(me, directory, settings):
    return mesh_rig.train(me, directory, steps=3, settings=settings, groups=GROUPS)


@pytest.mark.parametrize("name", CASES)
def test_they_train_as_one_process_does(name, model, alone):
    from safetensors.torch import load_file

    world, settings = CASES[name]
    before = {key: value for file in model.glob("*.safetensors") for key, value in load_file(file).items()}
    right, whole = alone
    for results, weights in run_ranks(world, _train, model, settings):
        for (loss, norm), (expected, its) in zip(results, right, strict=True):
            assert (loss, norm) == (pytest.approx(expected, rel=1e-9), pytest.approx(its, rel=1e-9))
        for key, weight in weights.items():
            torch.testing.assert_close(weight, whole[key], rtol=1e-9, atol=1e-9)
            assert torch.equal(weight, before[key].to(weight.dtype)) == ("layers.1." in key), key


FROZEN = (
    "model.embed_tokens.* frozen=true",
    "model.layers.1.* frozen=1",
    "*.q_proj.weight frozen=true",
    "*layernorm* frozen=true",
)
PLACES = {
    "alone": (1, {}),
    "dp": (3, {}),
    "offload": (2, {"offload": "all"}),
    "in turn": (2, {"offload": "all", "overlap": False}),
    "zero1": (2, {"strategy": "zero1"}),
    "pp": (2, {"pp": 2}),
    "interleaved": (2, {"pp": 2, "pp_schedule": "interleaved"}),
}
LONG = {"alone", "in turn", "interleaved"}


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({"tp": 2}, ("model.embed_tokens.* frozen=true", "*.q_proj.weight frozen=true", "*norm* frozen=true")),
        ({"pp": 2}, ("model.embed_tokens.* frozen=true", "model.layers.[01].* frozen=true")),  # the whole first stage
    ],
)
def test_matrices_are_frozen_with_tp_and_whole_stages_with_pp(model, settings, groups):
    from llama405b.settings.rules import is_frozen

    right = mesh_rig.single(model, steps=3, frozen=lambda name: is_frozen(groups, name))
    found = run_ranks(2, functools.partial(mesh_rig.train, steps=3, settings=settings, groups=groups), model)
    weights = {name: tensor for _, own in found for name, tensor in own.items()}
    assert max(mesh_rig.difference((found[0][0], weights), right)) < 1e-9


def _freeze(me, directory, settings):
    kept = {}

    def before(model, _, updater):
        kept["moments"] = len(updater.optimizer.state)
        kept["trained"] = sum(p.requires_grad for p in updater.master.parameters())

    results, weights = mesh_rig.train(
        me, directory, steps=3, settings=settings, groups=FROZEN, before=before, recompute="every:2"
    )
    return results, weights, kept


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=pytest.mark.soak if place in LONG else ()) for place in PLACES]
)
def test_what_is_frozen_takes_no_gradient_and_no_moments(place, model):
    from safetensors.torch import load_file

    from llama405b.settings.rules import is_frozen

    world, settings = PLACES[place]
    before = {key: value for file in model.glob("*.safetensors") for key, value in load_file(file).items()}
    right = mesh_rig.single(model, steps=3, frozen=lambda name: is_frozen(FROZEN, name))
    found = run_ranks(world, _freeze, model, settings)
    weights = {name: tensor for _, own, _ in found for name, tensor in own.items()}
    for results, _, kept in found:
        assert kept["moments"] == kept["trained"] < len(before)
        assert max(mesh_rig.difference((results, weights), right)) < 1e-9
    for name, weight in weights.items():
        assert torch.equal(weight, before[name].to(weight.dtype)) == is_frozen(FROZEN, name), name


@pytest.mark.parametrize(
    ("groups", "settings", "why"),
    [
        (["* frozen=true"], {}, "every parameter is frozen, so nothing would be trained; leave out a pattern"),
        (["*q_proj* frozen=true"], {"strategy": "fsdp1"}, "cannot freeze some of them; use fsdp2"),
        (["*norm* frozen=true", "*q_proj* frozen=true"], {"tp": 2}, ""),
        (["*q_proj* frozen=false"], {}, "optimizer.groups has"),
        (["*q_proj* frozen=true lr_factor=1"], {}, "optimizer.groups has"),
    ],
)
def test_what_cannot_be_frozen_is_refused(groups, settings, why):
    from llama405b.contract.errors import UserError
    from llama405b.settings.rules import check_groups
    from llama405b.settings.schema import Parallel

    names = ["model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"]
    with pytest.raises(UserError, match=why) if why else contextlib.nullcontext():
        check_groups(groups, names, Parallel(**settings))


FLAGS = (
    "--preset", "demo", "--training.max_steps", 4, "--training.micro_batch_size", 2, "--training.global_batch_size", 8,
    "--data.seq_len", 64, "--data.max_bytes", 300_000, "--optimizer.lr", "3e-3", "--optimizer.warmup", 0, "--evaluation.every", 0,
    "--checkpoint.every", 2, "--parallel.device", "cpu", "--optimizer.groups",
    "model.layers.1.* frozen=true,*.k_proj.weight frozen=true,*layernorm* frozen=true",
)  # fmt: skip


@pytest.mark.parametrize("numerics", ["fp32-master", "pure-bf16"])
def test_places_agree_and_a_resumed_run_goes_on(demo, tmp_path, numerics):
    losses = {}
    for offload in ("none", "optimizer", "all") if numerics == "fp32-master" else ("none", "all"):
        run = tmp_path / offload
        for resumed in (False, True):
            saved = ("--checkpoint.dir", run / "checkpoints", "--resume", "auto") if resumed else ()
            where = run / "resumed" if resumed else run
            place = ("--run-dir", where, "--parallel.offload", offload, "--parallel.numerics", numerics)
            argv = [*FLAGS, "--model.path", demo, *place]
            done = run_program("llama405b.train:run_and_exit", *argv, *saved, cwd=tmp_path, world=2, timeout_s=200)
            assert done.returncode == 0, done.stdout + done.stderr
            rows = [json.loads(row) for row in (where / "metrics.jsonl").read_text().splitlines()]
            losses[offload, resumed] = [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]
            shutil.rmtree(run / "checkpoints/step-00000004")
    whole = losses["none", False]
    assert whole[-1][0] < whole[0][0]
    for (_, resumed), found in losses.items():
        assert found == whole[2 * resumed :]
