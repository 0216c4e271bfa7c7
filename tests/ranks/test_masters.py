"""Pure BF16 at a small learning rate: norms learn all the same, wherever the states are, and through a checkpoint."""

import itertools

import pytest
import torch

from ranks_rig import run_ranks
from update_rig import batch, bits, build, dcp_save, same

LR, STEPS = 1e-5, 4
FORMS = {
    "none": {"offload": "none", "overlap": False},
    "all": {"offload": "all", "overlap": False},
    "hidden": {"offload": "all", "overlap": True},
}


def _steps(me, module, updater, steps):
    from llama405b.optim.optimizer import set_lr
    from llama405b.optim.step import train_step
    from llama405b.parallel.passes import MicrobatchLoop

    set_lr(updater.optimizer, LR)
    micro = [batch(step, me, 2) for step in steps]
    return [train_step(MicrobatchLoop(module, me.dp.size), updater, each, max_norm=0.5).loss for each in micro]


def _norms(updater):
    updater.wait()
    return {name: p.full_tensor() for name, p in updater.master.named_parameters() if "norm" in name}


def _learn(me, directory):
    found = []
    for form in FORMS.values():
        module, updater = build(me, directory, numerics="pure-bf16", **form)
        before = {name: norm.clone() for name, norm in _norms(updater).items()}
        losses = _steps(me, module, updater, range(STEPS))
        moved = [(norm - before[name]).abs().max().item() for name, norm in _norms(updater).items()]
        dtypes = {parameter.dtype for parameter in module.parameters()}
        found.append((losses, bits(module, updater), min(moved), max(moved), dtypes))
    return [(*each[2:], each[0] == found[0][0] and same(each[1], found[0][1])) for each in found]


def test_norms_learn_at_a_small_learning_rate_alike_in_every_place(tiny, tiny_tied):
    for directory, found in [(d, each) for d in (tiny, tiny_tied) for each in run_ranks(2, _learn, d)]:
        for least, most, dtypes, equal in found:
            assert 0.5 * LR < least <= most < 2 * STEPS * LR, directory
            assert dtypes == {torch.bfloat16}  # FSDP2 wants one in a unit
            assert equal


def _resume(me, directory, root, has_masters):
    from update_rig import restore

    found = []
    for saved, read in itertools.pairwise([*FORMS, "none"]):
        path = root / f"{saved}-{read}" / "step-00000002"
        module, updater = build(me, directory, numerics="pure-bf16", masters=has_masters, **FORMS[saved])
        _steps(me, module, updater, range(2))
        before = bits(module, updater)
        dcp_save(updater, me, path)
        module, updater = build(me, directory, numerics="pure-bf16", **FORMS[read])
        restore(path, module, updater, me)
        if has_masters:
            found += [
                same(before, bits(module, updater)),
                {n.dtype for n in _norms(updater).values()} == {torch.float32},
            ]
            continue
        found.append(all(torch.equal(before[name][0], tensors[0]) for name, tensors in bits(module, updater).items()))
        norms = {name: norm.clone() for name, norm in _norms(updater).items()}
        _steps(me, module, updater, range(2, 4))
        found.append(all((norm != norms[name]).any() for name, norm in _norms(updater).items()))
    return found


@pytest.mark.parametrize("has_masters", [True, False])
def test_a_checkpoint_restores_them_and_one_from_before_goes_on(tiny, tmp_path, has_masters):
    for found in run_ranks(2, _resume, tiny, tmp_path, has_masters):
        assert all(found)
