"""What parallel.strategy auto and 3d stand for: a mesh that suits the model and fits, and nothing else changed."""

import dataclasses
import json

import pytest

from llama405b.contract.errors import UserError
from llama405b.predict.estimate import Cluster
from llama405b.predict.hardware import read_gpus
from llama405b.predict.run_shape import PredictedRun
from llama405b.predict.search import Fit, Prediction, fastest_meshes, rank_variants, resolve_auto
from llama405b.settings.axes import Axes
from llama405b.settings.config import PRESET_DIR, layout_flags, with_global_batch
from llama405b.settings.rules import find_step_faults
from llama405b.settings.schema import Config
from llama405b.spec.models import parse_llama
from llama405b.spec.rules import check_mesh

SHAPES = json.loads((PRESET_DIR / "architectures.json").read_text())
LARGE, SMALL = (parse_llama(SHAPES[name], name) for name in ("llama3.1-405b", "llama3.1-8b"))
H100 = Cluster(read_gpus()["h100-80"])
RAM = 2e12


def asked(strategy, seq_len=4096, batch=64, **parallel):
    base = Config()
    return dataclasses.replace(
        base,
        parallel=dataclasses.replace(base.parallel, strategy=strategy, **parallel),
        data=dataclasses.replace(base.data, seq_len=seq_len),
        training=dataclasses.replace(base.training, global_batch_size=batch, micro_batch_size=1),
    )


def predicted(config, llama, world):
    load = PredictedRun.from_config(llama, config, world)
    return Prediction.from_run(load, H100, RAM)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "hsdp"])
def test_others_are_left_alone(strategy):
    config = asked(strategy)
    assert resolve_auto(config, LARGE, 64, 8, H100, RAM) is config


def test_auto_is_fsdp2_where_that_fits():
    config = asked("auto", offload="all")
    assert resolve_auto(config, LARGE, 64, 8, H100, RAM) == dataclasses.replace(
        config, parallel=dataclasses.replace(config.parallel, strategy="fsdp2")
    )


def test_auto_is_the_fastest_mesh_that_fits_where_fsdp2_does_not():
    plain = asked("fsdp2", 32_768, 32)
    assert predicted(plain, LARGE, 128).fit < Fit.RETRIES
    mesh = resolve_auto(asked("auto", 32_768, 32), LARGE, 128, 8, H100, RAM)
    assert mesh.parallel.tp * mesh.parallel.cp > 1
    assert predicted(mesh, LARGE, 128).fit is Fit.YES
    assert mesh.training.global_batch_size == 32


@pytest.mark.parametrize(("llama", "world"), [(LARGE, 64), (SMALL, 8), (SMALL, 16)])
def test_3d_splits_matrices_and_layers_so_that_it_suits_the_model(llama, world):
    mesh = resolve_auto(asked("3d", numerics="pure-bf16"), llama, world, 8, H100, RAM)
    axes = Axes.from_parallel(mesh.parallel, world, 8)
    assert min(axes.tp, axes.pp) > 1
    check_mesh(axes, mesh.parallel, llama, mesh.data.seq_len, 8)
    assert with_global_batch(mesh, axes) == mesh


@pytest.mark.parametrize(
    ("more", "taken"),
    [({}, "none"), ({"activations": "host"}, "operators"), ({"compile": True}, "none")],
    ids=["plain", "inputs on the host", "compiled"],
)
def test_auto_keeps_no_activations_in_a_way_that_the_trainer_refuses(more, taken):
    config = asked("fsdp2", 1024)
    model = dataclasses.replace(config.model, activation_checkpointing="auto", path="any", **more)
    chosen = resolve_auto(dataclasses.replace(config, model=model), SMALL, 64, 8, H100, RAM)
    assert chosen.model.activation_checkpointing == taken
    assert [*find_step_faults(chosen)] == []


def test_3d_of_too_few_ranks_is_refused():
    for world in (1, 2):
        with pytest.raises(UserError):
            resolve_auto(asked("3d"), SMALL, world, 8, H100, RAM)


def test_where_nothing_fits_it_is_what_a_gpu_holds_least_of():
    mesh = resolve_auto(asked("auto"), LARGE, 8, 8, H100, RAM)
    assert predicted(mesh, LARGE, 8).fit < Fit.RETRIES


def test_fp32_and_a_batch_of_one_each():
    """Of which nothing is predicted, and which depends on the mesh."""
    mesh = resolve_auto(asked("3d", batch=0, numerics="fp32"), SMALL, 8, 8)
    assert mesh.parallel.numerics == "fp32"
    assert mesh.training.global_batch_size % mesh.training.micro_batch_size == 0 < mesh.training.global_batch_size


def test_the_choice_is_the_same_once_it_is_made():
    mesh = resolve_auto(asked("3d", numerics="pure-bf16"), LARGE, 64, 8, H100, RAM)
    assert resolve_auto(mesh, LARGE, 64, 8, H100, RAM) is mesh
    flags = dict(flag.removeprefix("--").split("=") for flag in layout_flags(mesh))
    assert flags["parallel.strategy"] == mesh.parallel.strategy != "3d"
    for name in ("tp", "cp", "pp", "dp_replicate", "pp_schedule"):
        assert flags[f"parallel.{name}"] == str(getattr(mesh.parallel, name))
    assert flags["training.micro_batch_size"] == str(mesh.training.micro_batch_size)


def test_auto_and_a_search_find_the_same_where_plain_fsdp_does_not_fit():
    cluster = Cluster(read_gpus()["a100-40"])
    config = asked("auto", 8192, 48, offload="all")
    mesh = resolve_auto(config, LARGE, 48, 4, cluster, RAM)
    run = PredictedRun.from_config(LARGE, mesh, 48, 4)
    plain = Prediction.from_run(PredictedRun.from_config(LARGE, asked("fsdp2", 8192, 48), 48, 4), cluster, RAM)
    best = rank_variants(plain)[0]
    assert (best.fit, best.run) == (Fit.YES, run)


def test_a_mesh_that_fits_comes_before_a_faster_one_that_frees_memory_in_each_step():
    prediction = predicted(asked("fsdp2", 32_768, 32), LARGE, 128)
    assert {each.fit for each in fastest_meshes(prediction, at_most=20)} == {Fit.YES}
