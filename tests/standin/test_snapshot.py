"""A state on the GPU that is saved at once: the loop has waited for the device before it saves, but nothing here relies on that."""

import torch

from standin_rig import FOUND, NOTHING, counts, in_fork

N = 1 << 20


def test_it_is_copied_after_its_update_and_before_the_next(standin):
    content, found = in_fork(_snapshot)
    assert content == 1.0
    assert found == NOTHING


def _snapshot():
    from llama405b.checkpoint.copy_on_update import CopyOnUpdate, Staging
    from llama405b.optim.updater import Unit

    weight = torch.zeros(N, device="cuda")
    weight.add_(1)
    state = CopyOnUpdate([Unit([weight], None)], Staging([weight.nbytes], 1 << 30, weight.device, lambda *_: None))
    state.plan([weight])
    state.before_update([weight])
    weight.add_(1)
    [content] = [float(tensor.mean()) for _, tensor in state.read()]
    torch.cuda.synchronize()
    return content, {kind: counts()[kind][0] for kind in FOUND}
