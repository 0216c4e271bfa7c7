"""What a resume changes is told, and allowed by name."""

import dataclasses

import pytest
from manifests import MANIFEST

from llama405b.contract.checkpoints import RunIdentity, read_manifest, write_manifest
from llama405b.contract.errors import UserError
from llama405b.settings import config
from llama405b.settings.schema import Config, Optimizer
from llama405b.spec.rules import check_resume_changes, update_settings, with_config

PATH = "c/step-00000004"


def before(steps=120, **optimizer):
    settings = update_settings(Optimizer(**optimizer), steps)
    identity = RunIdentity("config 1", "900 tokens 2", 4096, 64, "fp32-master", 0, 0, "isolated", settings)
    return read_manifest(write_manifest(dataclasses.replace(MANIFEST, identity=identity))[0])[0].identity


def under(**changes):
    """What a resume with these settings changes."""
    flags = ["--model.path=m", "--data.paths=d", "--training.max_steps=120"]
    flags += [f"--{key.replace('__', '.')}={value}" for key, value in changes.items()]
    settings = config.resolve(config.read_flags(flags))
    return check_resume_changes(PATH, before(), with_config(before(), settings), settings.checkpoint.allow_changes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer__lr": 3e-5}, "optimizer.lr 1e-05 -> 3e-05"),
        ({"optimizer__betas": "0.9,0.99"}, "optimizer.betas [0.9, 0.95] -> [0.9, 0.99]"),
        ({"optimizer__decay": "linear"}, "optimizer.decay cosine -> linear"),
        ({"optimizer__weight_decay": 0}, "optimizer.weight_decay 0.1 -> 0.0"),
        ({"training__max_steps": 200}, "training.max_steps 120 -> 200"),
        ({"training__global_batch_size": 32}, "training.global_batch_size 64 -> 32"),
    ],
)
def test_a_change_is_refused_and_accepted_by_its_name(change, words):
    with pytest.raises(UserError) as refused:
        under(**change)
    assert str(refused.value).startswith(f"--resume: {PATH} was saved with other settings ({words}); ")
    name = words.partition(" ")[0]
    assert str(refused.value).endswith(f"accept this with --checkpoint.allow_changes {name}")
    assert words in under(**change, checkpoint__allow_changes=name)
    assert words in under(**change, checkpoint__allow_changes="all")
    with pytest.raises(UserError):
        under(**change, checkpoint__allow_changes="model,data")


def test_another_adapter_cannot_be_accepted():
    for allowed in ((), ("all",)):
        now = dataclasses.replace(before(), adapter="lora of rank 8")
        with pytest.raises(UserError, match=r"was saved with adapter none -> lora of rank 8; set --adapter\.kind"):
            check_resume_changes(PATH, before(), now, allowed)
    with pytest.raises(
        UserError, match=r"adapter none -> lora of rank 4, alpha 32, beside q_proj,v_proj; set --adapter\.kind"
    ):
        under(adapter__kind="lora", adapter__rank=4, adapter__targets="v_proj,q_proj")


def test_nothing_is_said_of_what_stays():
    assert under() == under(checkpoint__allow_changes="all") == ""


@pytest.mark.parametrize("same", [{"decay": "constant"}, {"min_lr": 1e-5}, {"warmup": 300}])
def test_more_steps_of_the_same_schedule_are_ordinary(same):
    optimizer = Optimizer(**same)
    now = dataclasses.replace(before(), settings=update_settings(optimizer, 200))
    assert before(**same).changes(now) == {}


def test_what_an_older_checkpoint_does_not_record_is_not_compared():
    old = dataclasses.replace(before(), settings={})
    assert check_resume_changes(PATH, old, with_config(old, Config()), ()) == ""


def test_a_name_that_no_resume_compares_is_refused():
    with pytest.raises(
        UserError, match=r"'optimizer\.lrs' is not a setting that a resume compares \(did you mean 'optimizer\.lr'\?\)"
    ):
        under(checkpoint__allow_changes="optimizer.lrs")
