"""Recipes of other programs: every key is known, and what it says is what we would train, or is named."""

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest
from transformers import training_args

from conftest import ROOT
from llama405b.contract.errors import UserError
from llama405b.settings import command
from llama405b.settings.foreign import PROGRAM_TABLES, find_recipe_key, foreign_keys
from llama405b_tools.verbs import recipes

PUBLISHED = json.loads((ROOT / "tests/data/recipes/published.json").read_text())
KEYS = {name: [key for group in groups for key in group["keys"]] for name, groups in PUBLISHED.items()}
ARGUMENTS = [field.name for field in dataclasses.fields(training_args.TrainingArguments)]


def test_every_key_of_published_recipes_and_of_trainers_is_known():
    assert (
        sum(len(group["recipes"]) for name, groups in PUBLISHED.items() if name != "deepspeed" for group in groups) > 60
    )
    for program, keys in {**KEYS, "transformers": ARGUMENTS}.items():
        assert not [key for key in keys if find_recipe_key(key, program) is None], program
    assert find_recipe_key("frobnicate", "axolotl") is None


@pytest.mark.parametrize("program", [name for name in PUBLISHED if name in PROGRAM_TABLES])
def test_a_recipe_is_known_by_its_keys(program):
    for group in PUBLISHED[program]:
        recipe = {}
        for key in group["keys"]:
            *parts, last = key.replace("[]", "").split(".")
            place = recipe
            for part in parts:
                place = place.setdefault(part, {}) if isinstance(place, dict) else {}
            if isinstance(place, dict):
                place.setdefault(last, 1)
        assert recipes.detect_program(recipe, Path("r.yaml")) == program, group["recipes"]


@pytest.fixture
def imported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(text, name="recipe.yaml", *more):
        (tmp_path / name).write_text(text)
        code = recipes.main([name, *more])
        out = capsys.readouterr().out
        found = tomllib.loads(out)
        (tmp_path / "ours.toml").write_text(out)
        model = found.get("model", {}).get("path", "m")
        command.parse(["--config", "ours.toml", "--model.path", model, "--data.paths", "x"])  # it is a file of settings
        return (
            code,
            {f"{section}.{key}": value for section, table in found.items() for key, value in table.items()},
            out,
        )

    return run


def test_axolotl(imported):
    code, found, out = imported("""
base_model: NousResearch/Meta-Llama-3.1-8B
liger_rms_norm: true
liger_glu_activation: false
datasets:
  - {path: mlabonne/FineTome-100k, type: chat_template, field_messages: conversations}
  - {path: ./mine.jsonl, type: chat_template}
val_set_size: 0.02
sequence_len: 4096
adapter:
lora_r:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 2e-5
bf16: auto
gradient_checkpointing: true
warmup_ratio: 0.1
evals_per_epoch: 2
fsdp: [full_shard, auto_wrap]
fsdp_config: {fsdp_offload_params: true}
""")
    assert code == 0
    assert found == {
        "model.path": "models/Meta-Llama-3.1-8B", "model.fused": "true", "model.activation_checkpointing": "full",
        "data.paths": ["hf://datasets/mlabonne/FineTome-100k", "./mine.jsonl"], "data.seq_len": 4096,
        "evaluation.fraction": 0.02, "evaluation.every": "epoch", "training.micro_batch_size": 2, "training.global_batch_size": 64,
        "training.epochs": 1.0, "optimizer.decay": "cosine", "optimizer.lr": 2e-5, "optimizer.warmup": 0.1,
        "optimizer.betas": [0.9, 0.999], "optimizer.weight_decay": 0.0, "parallel.numerics": "fp32-master",
        "parallel.strategy": "fsdp2", "parallel.offload": "all",
    }  # fmt: skip
    assert 'path = "models/Meta-Llama-3.1-8B"  # base_model "NousResearch/Meta-Llama-3.1-8B"\n' in out
    assert "lr = 2e-05  # learning_rate\n" in out
    assert "weight_decay = 0.0  # default of axolotl\n" in out
    assert "global_batch_size = 64  # 2 x 4 on 8 GPUs (--gpus)\n" in out


def test_llama_factory_with_adapters_and_a_file_of_deepspeed(imported, tmp_path):
    (tmp_path / "z3.json").write_text(
        '{"zero_optimization": {"stage": 3, "overlap_comm": true}, "bf16": {"enabled": "auto"}, "odd": 1}'
    )
    text = """
model_name_or_path: ./mine
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: all
lora_dropout: 0.05
deepspeed: z3.json
dataset: a.json,b.json
cutoff_len: 1024
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-4
lr_scheduler_type: polynomial
warmup_steps: 20
bf16: true
frobnicate: 3
"""
    code, found, out = imported(text, "recipe.yaml", "--gpus", "16")
    assert code == 1
    assert (found["adapter.kind"], found["adapter.rank"], len(found["adapter.targets"])) == ("lora", 8, 7)
    assert (found["parallel.strategy"], found["data.paths"], found["training.global_batch_size"]) == (
        "zero3",
        ["a.json", "b.json"],
        32,
    )
    assert (found["optimizer.decay"], found["training.epochs"]) == ("linear", 3.0)  # its defaults
    assert "#   lora_dropout = 0.05: adapters have no dropout; 0 trains alike\n" in out
    assert '#   lr_scheduler_type = "polynomial": schedules are cosine, linear, constant and wsd\n' in out
    assert "# not known:\n#   deepspeed: odd\n#   frobnicate\n" in out
    assert "#   deepspeed: zero_optimization.overlap_comm: FSDP2 decides sizes of its communication\n" in out
    code, _, out = imported(text.replace("z3.json", "there/is/none.json"))
    assert "#   deepspeed = there/is/none.json: no such file; copy it there, or import it separately\n" in out


def test_a_shell_line(imported):
    code, found, out = imported(
        "#!/bin/bash\n# --learning_rate 9\naccelerate launch --num_processes 16 \\\n  sft.py --model_name_or_path Qwen/Qwen2.5-7B "
        "--dataset_name=trl-lib/Capybara --learning_rate 2.0e-5 --num_train_epochs 2 --per-device-train-batch-size 2 "
        "\\\n  --gradient_accumulation_steps=8 --gradient_checkpointing --eval_strategy no --max_length 2048 "
        "--adam_beta2 0.95 --use_peft false\n",
        "run.sh",
    )
    assert code == 0
    assert found == {
        "model.path": "models/Qwen2.5-7B", "model.activation_checkpointing": "full", "data.paths": ["hf://datasets/trl-lib/Capybara"],
        "data.train_on": ["assistant", "user", "system", "tool"], "data.seq_len": 2048,
        "optimizer.lr": 2e-5, "optimizer.betas": [0.9, 0.95], "optimizer.decay": "linear",
        "optimizer.weight_decay": 0.0, "training.epochs": 2.0, "training.micro_batch_size": 2, "training.global_batch_size": 256,
    }  # fmt: skip
    assert "#   eval_strategy = false: part of what stands above\n" in out


def test_the_others(imported):
    _, found, out = imported("""
model:
  {_component_: torchtune.models.llama3_1.lora, lora_attn_modules: [q_proj, output_proj], apply_lora_to_mlp: true, lora_rank: 8}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: null}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /m, model_type: LLAMA3}
dataset: {_component_: torchtune.datasets.alpaca_dataset, packed: false}
batch_size: 2
epochs: 1
gradient_accumulation_steps: 4
optimizer: {_component_: torch.optim.AdamW, lr: 3e-4, weight_decay: 0.02}
clip_grad_norm: null
dtype: bf16
tensor_parallel_dim: 2
""")
    assert found["adapter.targets"] == ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert (found["training.global_batch_size"], found["optimizer.max_norm"], found["parallel.tp"]) == (32, 0.0, 2)
    assert (found["optimizer.decay"], found["optimizer.weight_decay"], found["parallel.numerics"]) == (
        "constant",
        0.02,
        "pure-bf16",
    )
    assert (
        "#   the data of torchtune.datasets.alpaca_dataset: name files, or hf://datasets/OWNER/NAME, in data.paths\n"
        in out
    )
    _, found, _ = imported(
        '[model]\nname = "llama3"\nconverters = ["float8"]\n[optimizer]\nname = "AdamW"\nlr = 8e-5\n[training]\nlocal_batch_size = 2\n'
        'seq_len = 8192\nsteps = 3000\n[parallelism]\ntensor_parallel_degree = 8\n[activation_checkpoint]\nmode = "full"\n'
        "[checkpoint]\nenable = true\ninterval = 500\n[lr_scheduler]\nwarmup_steps = 600\n",
        "t.toml",
    )
    assert (found["training.max_steps"], found["optimizer.warmup"], found["checkpoint.every"]) == (3000, 600.0, "500")
    assert (found["parallel.tp"], found["training.global_batch_size"]) == (8, 2)
    _, found, _ = imported("""
step_scheduler: {global_batch_size: 8, local_batch_size: 1, max_steps: 13, val_every_steps: 12, ckpt_every_steps: 12}
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: meta-llama/Llama-3.1-8B}
distributed: {strategy: fsdp2, tp_size: 2, cp_size: 1, dp_size: none}
optimizer: {_target_: torch.optim.AdamW, lr: 5.0e-06, betas: [0.9, 0.999], eps: 1.0e-08}
dataset: {path_or_dataset_id: ./train.jsonl, seq_length: 2048}
validation_dataset: {path_or_dataset_id: ./validation.jsonl}
""")
    assert (found["training.global_batch_size"], found["evaluation.every"], found["evaluation.paths"]) == (
        8,
        "12",
        ["./validation.jsonl"],
    )
    assert (found["parallel.tp"], found["optimizer.betas"], found["model.path"]) == (
        2,
        [0.9, 0.999],
        "models/Llama-3.1-8B",
    )
    _, found, _ = imported(
        "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config: {fsdp_version: 2, fsdp_offload_params: true}\n"
    )
    assert found == {"parallel.numerics": "fp32-master", "parallel.offload": "all"}


def test_flags_with_several_words_and_variables(imported):
    _, found, _ = imported(
        "MODEL=./mine\ntorchrun --nnodes 2 --nproc_per_node=4 sft.py --model_name_or_path $MODEL --use_peft "
        "--lora_target_modules q_proj v_proj --report_to wandb tensorboard --train_file *.jsonl --gradient_accumulation_steps '4' "
        "--per_device_train_batch_size 1 --run_name x\n",
        "run.sh",
    )
    assert (found["model.path"], found["adapter.targets"], found["tracking.to"]) == (
        "./mine",
        ["q_proj", "v_proj"],
        ["wandb", "tensorboard"],
    )
    assert (found["training.global_batch_size"], found["data.paths"]) == (32, ["*.jsonl"])
    _, _, out = imported("train.py --model_name_or_path ${NOWHERE}/x --learning_rate 1e-4\n", "run.sh")
    assert '#   model_name_or_path = "${NOWHERE}/x": is a shell variable; replace it by its value\n' in out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("base_model: ./m\nmicro_batch_size: 1\nadapter:\nlora_r: 32\n", {"adapter.kind": None, "adapter.rank": None}),
        (
            "base_model: ./m\nmicro_batch_size: 1\nval_set_size: 0\n",
            {"evaluation.every": None, "evaluation.fraction": None},
        ),
        ("base_model: ./m\nmicro_batch_size: 1\nfp8: true\nbf16: auto\n", {"parallel.numerics": "fp8"}),
        (
            "base_model: ./m\nmicro_batch_size: 1\nwandb_project: p\n",
            {"tracking.to": ["wandb"], "tracking.project": "p"},
        ),
        ("base_model: ./m\nmicro_batch_size: 1\nfsdp: [full_shard, offload]\n", {"parallel.offload": "all"}),
        ("base_model: ./m\ndatasets: [{path: json, data_files: x.jsonl}]\n", {"data.paths": ["x.jsonl"]}),
        (
            "base_model: ./m\ndatasets: [{path: teknium/OpenHermes-2.5}]\n",
            {"data.paths": ["hf://datasets/teknium/OpenHermes-2.5"]},
        ),
        (
            "finetuning_type: lora\nlora_rank: 64\ntemplate: x\ncutoff_len: 64\n",
            {"adapter.alpha": 128.0, "data.prompts": "chat"},
        ),
        (
            "stage: sft\ntemplate: x\ngradient_accumulation_steps: 4\n",
            {"training.global_batch_size": 256, "data.seq_len": 2048},
        ),
        ("warmup_ratio: 0.1\nwarmup_steps: 0\nlearning_rate: 1\n", {"optimizer.warmup": 0.1}),
        ("save_total_limit: 1\nlearning_rate: 1\nbf16: true\n", {"checkpoint.keep": 2}),
        ("max_steps: .nan\nlearning_rate: 1\nbf16: true\n", {"training.max_steps": None}),
        (
            "batch_size: 2\nepochs: 3\nmax_steps_per_epoch: 100\ncheckpointer: {checkpoint_dir: /m}\n",
            {"training.max_steps": 300},
        ),
        (
            "assistant_only_loss: true\nmax_length: 9\npadding_free: true\n",
            {"data.train_on": ["assistant"], "optimizer.lr": 2e-5},
        ),
    ],
)
def test_what_was_read_otherwise_before(imported, text, expected):
    _, found, _ = imported(text)
    assert {name: found.get(name) for name in expected} == expected


def test_what_is_otherwise_here_is_said(imported):
    _, _, out = imported(
        "base_model: ./m\nmicro_batch_size: 1\nsample_packing: false\nchat_template: chatml\nadapter: qlora\nlora_r: 8\n"
    )
    assert "# otherwise here:\n" in out
    assert (
        "#   batches of whole records: sequences are packed here, so a step has more records, and an epoch fewer steps"
        in out
    )
    assert (
        '#   chat_template = "chatml": the template is the tokenizer\'s own; --data.chat_template FILE takes another\n'
        in out
    )
    assert '#   adapter = "qlora": QLoRA is not offered: adapters are LoRA, of BF16 weights\n' in out


def test_it_is_written_once_and_planned(imported, demo, tmp_path, capsys):
    text = f"model_name_or_path: {demo}\nlearning_rate: 1e-4\nmax_steps: 5\nper_device_train_batch_size: 1\nmax_length: 64\n"
    (tmp_path / "r.yaml").write_text(text)
    assert recipes.main(["r.yaml", "-o", "my.toml", "--gpus", "1"]) == 0
    out = capsys.readouterr().out
    assert "my.toml: " in out
    assert "GPU memory " in out  # the plan
    assert tomllib.loads((tmp_path / "my.toml").read_text())["training"]["max_steps"] == 5
    with pytest.raises(UserError, match=r"--output: my\.toml exists; name another file"):
        recipes.main(["r.yaml", "-o", "my.toml"])
    (tmp_path / "r.yaml").write_text(text + "lora_r: 8\nfsdp_offload_params: true\nparallelism_config_tp_size: 3\n")
    assert recipes.main(["r.yaml", "-o", "bad.toml"]) == 0
    assert "no plan: --" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "a: [", "a.yaml: cannot be read as a recipe ("),
        ("a.yaml", "- 1\n- 2\n", "a.yaml: holds no settings; name a file in YAML, JSON or TOML, or a shell script"),
        ("a.toml", "a = ", "a.toml: cannot be read as a recipe ("),
        ("a.sh", "train 'unclosed", "a.sh: cannot be read as a recipe (No closing quotation)"),
        ("a.yaml", "a: 1\n", "a.yaml: no known program has the keys a; name it with --from"),
        ("a.yaml", None, "a.yaml: cannot be read as a recipe (No such file or directory)"),
    ],
)
def test_what_is_no_recipe(tmp_path, monkeypatch, name, text, words):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as refused:
        recipes.main([name])
    assert words in str(refused.value)


def test_the_page_counts_the_tables():
    page = (ROOT / "docs/import.md").read_text()
    for name in PROGRAM_TABLES:
        rows = [row for row in foreign_keys(name).values() if not row.key.startswith(recipes.DEFAULT_PREFIX)]
        kinds = (
            [row.setting not in ("", "!", "~") for row in rows],
            [not row.setting for row in rows],
            [row.setting in ("!", "~") for row in rows],
        )
        assert f"| {name} | {' | '.join(str(sum(kind)) for kind in kinds)} |" in page
