"""What people type who know other programs, and what they are told."""

import pytest

from llama405b.contract.errors import UserError
from llama405b.settings import config
from llama405b.settings.foreign import FLAG_TABLE, PROGRAM_TABLES, TABLE_DIR, foreign_keys
from llama405b.settings.schema import SETTING_TYPES
from llama405b_tools.launch import request


def refusal(*words):
    with pytest.raises(UserError) as refused:
        request.parse_launch(["--preset", "demo", *words], 0.0)
    return str(refused.value)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--lr", "did you mean 'optimizer.lr'?"),
        ("--training.lr", "did you mean 'optimizer.lr'?"),
        ("--learning-rate", "did you mean 'optimizer.lr'?"),
        ("--optimiser.lr", "did you mean 'optimizer.lr'?"),
        ("--dataset", "did you mean 'data.paths'?"),
        ("--data.seq_length", "did you mean 'data.seq_len'?"),
        ("--bs", "did you mean 'training.global_batch_size'?"),
        ("--epochs", "did you mean 'training.epochs'?"),
        ("--seed", "did you mean 'data.seed' or 'training.seed'?"),
        ("--folow", "did you mean '--follow'?"),
        ("--dry_run", "did you mean '--dry-run'?"),
        ("--gradient_accumulation_steps", "gradient accumulation follows from --training.global_batch_size"),
        ("--nproc_per_node", "slots= in the hosts file says how many ranks a host has"),
        ("--nnodes", "the hosts file, HOSTS, says it"),
        ("--master_addr", "launch finds where the hosts meet"),
        ("--bf16", "BF16 compute with FP32 master weights is the default"),
        ("--resume_from_checkpoint", "write --resume auto"),
        ("--report_to", "did you mean 'tracking.to'?"),
        ("--use_wandb", "write --tracking.to wandb"),
        ("--mlflow", "MLflow is not offered; see docs/faq.md"),
        ("--use_lora", "write --adapter.kind lora"),
        ("--lora_r", "did you mean 'adapter.rank'?"),
        ("--load_in_4bit", "QLoRA is not offered; see docs/faq.md"),
        ("--deepspeed", "write --parallel.strategy zero1, zero2 or zero3, without DeepSpeed"),
    ],
)
def test_what_other_programs_call_it_is_told_in_our_words(typed, said):
    assert said in refusal(typed, "1")


@pytest.mark.parametrize("typed", ["--foo", "--hidden", "--optimizer.nesterov"])
def test_what_is_like_nothing_is_not_guessed_at(typed):
    assert "did you mean" not in refusal(typed, "1")


def test_every_row_says_what_becomes_of_its_key():
    assert {path.stem for path in TABLE_DIR.iterdir()} == {FLAG_TABLE, *PROGRAM_TABLES}
    for name in (FLAG_TABLE, *PROGRAM_TABLES):
        for row in foreign_keys(name).values():
            assert row.setting in SETTING_TYPES or row.setting.startswith("@") or row.why, (name, row)
    assert not {key.rpartition(".")[2] for key in SETTING_TYPES} & {*foreign_keys(FLAG_TABLE)}
    assert len(foreign_keys(FLAG_TABLE)) > 200


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--tensor-model-parallel-size", "did you mean 'parallel.tp'?"),  # Megatron's
        ("--pipeline_model_parallel_size", "did you mean 'parallel.pp'?"),
        ("--train-iters", "did you mean 'training.max_steps'?"),
        ("--use-distributed-optimizer", "states are sharded: --parallel.strategy fsdp2"),
        ("--no_fsdp", "write --parallel.strategy ddp"),
        ("--strategy", "did you mean 'parallel.strategy'?"),
        ("--parallelism.tensor_parallel_degree", "did you mean 'parallel.tp'?"),  # torchtitan's
        ("--lr_scheduler.warmup_steps", "did you mean 'optimizer.warmup'?"),
        ("--step_scheduler.local_batch_size", "did you mean 'training.micro_batch_size'?"),  # Automodel's
        ("--zero_optimization.stage", "did you mean 'parallel.strategy'?"),  # DeepSpeed's
        ("--fsdp_offload_params", "did you mean 'parallel.offload'?"),  # accelerate's
        ("--clip_grad_norm", "did you mean 'optimizer.max_norm'?"),  # torchtune's
        ("--group_by_length", "sequences are packed, and in random order"),
        ("--label_smoothing_factor", "the loss is cross-entropy; a loss of your own: docs/extending.md"),
    ],
)
def test_words_of_programs_that_have_recipes_are_known_as_flags_too(typed, said):
    assert said in refusal(typed, "1")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("--training.max_steps=ten", "training.max_steps is 'ten'; use a whole number"),
        ("--optimizer.lr=fast", "optimizer.lr is 'fast'; use a number"),
        ("--parallel.overlap=maybe", "parallel.overlap is 'maybe'; use true or false"),
        ("--optimizer.betas=0.9", "optimizer.betas is [0.9]; use 2 numbers"),
        ("--data.weights=a", "data.weights is ['a']; use a list of numbers"),
    ],
)
def test_types_are_named_in_words(setting, said):
    with pytest.raises(UserError, match="--") as refused:
        config.read_flags([setting])
    assert str(refused.value).endswith(said)
