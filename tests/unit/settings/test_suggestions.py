"""What people type who know other programs, and what they are told."""

import pytest

from llama405b.contract.errors import UserError
from llama405b.settings import config
from llama405b.settings.rules import ABSENT, ADVICE, SETTINGS
from llama405b.settings.schema import TYPES
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


@pytest.mark.parametrize("typed", ["--foo", "--hidden", "--optimizer.momentum"])
def test_what_is_like_nothing_is_not_guessed_at(typed):
    assert "did you mean" not in refusal(typed, "1")


def test_every_suggestion_is_a_setting_and_no_setting_is_in_the_tables():
    assert set(SETTINGS.values()) <= set(TYPES)
    ours = {key.rpartition(".")[2] for key in TYPES}
    assert not ours & (set(ADVICE) | set(ABSENT) | set(SETTINGS))
    assert len(SETTINGS) + len(ADVICE) > 40


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
