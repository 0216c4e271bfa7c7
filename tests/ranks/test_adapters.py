"""LoRA: trained as peft does on any mesh, saved and resumed by itself, exported merged and for peft, which runs in a process apart."""

import json
import os
import shutil
import sys
from pathlib import Path

import mesh_rig
import pytest
import torch
from transformers import AutoTokenizer

from conftest import ROOT
from llama405b.contract.errors import UserError
from llama405b_tools.verbs import export
from ranks_rig import run_program, run_ranks

PEFT = ROOT / ".venv/peft"  # apart, since transformers imports it wherever it is installed
TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
RANK, ALPHA = 5, 7.0
PLACES = {
    "alone": (1, {}),
    "dp": (3, {}),
    "tp": (2, {"tp": 2}),
    "pp": (2, {"pp": 2, "pp_schedule": "interleaved"}),
    "cp": (2, {"cp": 2}),
    "offload": (2, {"offload": "all"}),
    "zero1": (2, {"strategy": "zero1"}),
    "tp and shards": (4, {"tp": 2}),
}
LONG = {"cp", "tp and shards"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return mesh_rig.write_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def pefts(model, tmp_path_factory):
    """An adapter that peft made, neither of whose factors is 0, and what its own training makes of it."""
    if not PEFT.exists():
        why = f"NOT RUN: pip install --no-deps --target {PEFT} peft accelerate psutil"
        pytest.fail(why) if os.environ.get("LLAMA405B_NOTHING_SKIPPED") else pytest.skip(why)
    directory = tmp_path_factory.mktemp("adapters") / "peft"
    [right] = run_ranks(1, _by_peft, model, directory)
    return directory, right


def _by_peft(_, model, directory):
    sys.path.append(str(PEFT))
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=[*TARGETS], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(directory)

    def adapted(whole):
        return PeftModel.from_pretrained(whole, directory, is_trainable=True, autocast_adapter_dtype=False).double()

    results, weights = mesh_rig.single(model, adapted=adapted)
    named = {name.removeprefix("base_model.model.").replace(".default", ""): each for name, each in weights.items()}
    return results, {name.replace(".base_layer", ""): each for name, each in named.items()}


def _adapter(path=""):
    from llama405b.settings.schema import Adapter

    return Adapter("lora", RANK, ALPHA, TARGETS, str(path))


def _train(me, model, path, settings):
    return mesh_rig.train(me, model, settings=settings, adapter=_adapter(path))


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=pytest.mark.soak if place in LONG else ()) for place in PLACES]
)
def test_they_train_as_pefts_do(place, model, pefts):
    from safetensors.torch import load_file

    path, right = pefts
    world, settings = PLACES[place]
    before = {key: value for file in model.glob("*.safetensors") for key, value in load_file(file).items()}
    found = run_ranks(world, _train, model, path, settings)
    weights = {name: tensor for _, own in found for name, tensor in own.items()}
    for results, _ in found:
        assert max(mesh_rig.difference((results, weights), right)) < 1e-9
    for name, weight in before.items():
        assert torch.equal(weights[name], weight.to(torch.float64)), name


FORMS = [("full", "device"), ("operators", "device"), ("every:2", "host"), ("none", "device")]


def _kept(me, model):
    return [
        mesh_rig.train(
            me,
            model,
            steps=2,
            settings={"loss": loss},
            recompute=recompute,
            activations=activations,
            adapter=_adapter(),
        )
        for recompute, activations, loss in [*((*form, "full") for form in FORMS), (*FORMS[0], "chunked")]
    ]


def test_what_is_kept_and_where_changes_no_bit(model):
    for found in run_ranks(2, _kept, model):
        (right, whole), *others, by_parts = found
        for form, (results, weights) in zip(FORMS[1:], others, strict=True):
            assert results == right, form
            assert all(torch.equal(weight, whole[name]) for name, weight in weights.items())
        assert max(mesh_rig.difference((by_parts[0], whole), (right, whole))) < 1e-9


def _new(me, model, _):
    loss = mesh_rig.train(me, model, steps=1, adapter=_adapter(), lr=0.0)
    return loss, mesh_rig.single(model, steps=1)[0] if me.index == 0 else None


def test_a_new_one_adds_nothing_and_is_the_same_for_any_number_of_ranks(model):
    (((loss, _),), alone), ((right, _),) = run_ranks(1, _new, model, None)[0]
    assert loss == pytest.approx(right, rel=1e-12)
    _, weights = run_ranks(3, _new, model, None)[0][0]
    for name, factor in weights.items():
        assert torch.equal(factor, alone[name]), name
        if name.endswith("lora_A.weight"):
            bound = factor.shape[1] ** -0.5
            assert 0.8 * bound < factor.abs().max() <= bound
            assert abs(float(factor.mean())) < 0.2 * bound
        elif name.endswith("lora_B.weight"):
            assert not factor.any()


FLAGS = (
    "--preset", "demo", "--training.max_steps", 4, "--training.micro_batch_size", 2, "--training.global_batch_size", 8,
    "--data.seq_len", 64, "--data.max_bytes", 300_000, "--optimizer.lr", "1e-2", "--optimizer.warmup", 0, "--evaluation.every", 0,
    "--checkpoint.every", 2, "--parallel.device", "cpu", "--adapter.kind", "lora", "--adapter.rank", 3,
)  # fmt: skip


def _run(model, run, *flags, world=2):
    argv = [*FLAGS, "--model.path", model, "--run-dir", run, *flags]
    return run_program("llama405b.train:run_and_exit", *argv, cwd=run.parent, world=world, timeout_s=200)


def _steps(run):
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


@pytest.mark.parametrize(
    "numerics", ["fp32-master", pytest.param("pure-bf16", marks=pytest.mark.soak), "bf16-stochastic"]
)
def test_it_alone_is_saved_and_a_resumed_run_goes_on(demo, tmp_path, numerics):
    found = {}
    for offload in ("none", "all"):
        run, flags = tmp_path / offload, ("--parallel.offload", offload, "--parallel.numerics", numerics)
        done = _run(demo, run, *flags)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "of lora of rank 3, alpha 32, beside all matrices" in done.stdout
        saved = run / "checkpoints"
        names = json.loads((saved / "step-00000004/index.json").read_text())["tensors"]
        kept = [name for name in names if name.startswith(("model.", "optimizer.state."))]
        assert len(kept) == 2 * 7 * 2 * 4, kept
        assert all("lora_" in name for name in kept)
        shutil.rmtree(saved / "step-00000004")
        done = _run(demo, run / "resumed", *flags, "--checkpoint.dir", saved, "--resume", "auto")
        assert done.returncode == 0, done.stdout + done.stderr
        found[offload] = _steps(run)
        assert _steps(run / "resumed") == found[offload][2:]
    assert found["none"] == found["all"]
    assert found["none"][-1][0] < found["none"][0][0]


def _logits(_, model, adapter):
    sys.path.append(str(PEFT))
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter:
        whole = PeftModel.from_pretrained(whole, adapter)
    with torch.no_grad():
        return whole(input_ids=torch.arange(40)[None]).logits


def test_peft_loads_what_is_exported_and_merging_computes_the_same(demo, tmp_path, pefts, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    assert _run(demo, run, "--parallel.numerics", "fp32").returncode == 0
    exported = {"merged": ("--dtype", "fp32"), "adapter": ("--adapter",)}
    for name, flags in exported.items():
        assert export.main([str(run), name, *flags]) == 0
    [usual], [merged], [adapted] = (
        run_ranks(1, _logits, model, adapter) for model, adapter in ((demo, ""), ("merged", ""), (demo, "adapter"))
    )
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)
    assert float((usual - adapted).abs().max()) > 0.1
    more = ("--adapter.path", tmp_path / "adapter", "--parallel.numerics", "fp32")
    assert _run(demo, tmp_path / "on", *more).returncode == 0
    assert _steps(tmp_path / "on")[0][0] < _steps(run)[0][0] - 0.1
    wrong = _run(demo, tmp_path / "wrong", *more, "--adapter.rank", 4)
    assert wrong.returncode == 2
    assert "--adapter.path: " in wrong.stderr
    assert "use --adapter.rank 3 --adapter.alpha 32.0 --adapter.targets q_proj,k_proj,v_proj" in wrong.stderr


def test_what_is_merged_into_other_weights_is_refused_and_its_own_files_are_kept(demo, tmp_path, monkeypatch):
    run, template = tmp_path / "run", tmp_path / "own.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    monkeypatch.chdir(tmp_path)
    here = Path(os.path.relpath(demo, tmp_path))
    assert _run(here, run, "--data.chat_template", template, world=1).returncode == 0
    assert export.main([str(run), str(tmp_path / "adapter"), "--adapter"]) == 0
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == str(demo)
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").chat_template == template.read_text()
    other = _changed(demo, tmp_path / "model")
    refused = {
        str(other): r"is not the base model of .*step-00000004; pass it",
        str(tmp_path / "nowhere"): "nowhere: no such directory; pass the base model of .* with --model",
    }
    for model, why in refused.items():
        with pytest.raises(UserError, match=why):
            export.main([str(run), str(tmp_path / "out"), "--model", model])
    shutil.copytree(demo, tmp_path / "less")
    index = json.loads((tmp_path / "less/model.safetensors.index.json").read_text())
    _, file = index["weight_map"].popitem()
    index["weight_map"] = {each: where for each, where in index["weight_map"].items() if where != file}
    (tmp_path / "less/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"less: .* is missing or incomplete; pass a directory "):
        export.main([str(run), str(tmp_path / "out"), "--model", str(tmp_path / "less")])
    assert export.main([str(run), str(tmp_path / "merged")]) == 0
    assert (tmp_path / "merged/chat_template.jinja").read_text() == template.read_text()


def _changed(model, to):
    shutil.copytree(model, to)
    for file in to.glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    return to


def test_a_resume_beside_other_weights_or_with_another_adapter_is_refused(demo, tmp_path):
    run = tmp_path / "run"
    assert _run(demo, run, world=1).returncode == 0
    more = ("--checkpoint.dir", run / "checkpoints", "--resume", "auto")
    done = _run(demo, tmp_path / "other", *more, "--adapter.alpha", 8, world=1)
    assert done.returncode == 2
    assert (
        "alpha 32, beside all matrices -> lora of rank 3, alpha 8, beside all matrices; set --adapter.kind, .rank, .alpha and .targets back"
        in done.stderr
    )
    done = _run(_changed(demo, tmp_path / "model"), tmp_path / "third", *more, world=1)
    assert done.returncode == 2
    assert "(model config" in done.stderr
