"""All that is used of FSDP2 beyond torch's public interface does what it is used for, with the torch that is installed."""

from ranks_rig import run_ranks
from update_rig import build, take


def _used(me, directory):
    import torch
    from torch.distributed.fsdp import FSDPModule, fully_shard

    from llama405b.parallel import fsdp_internals as internals

    module, updater = build(me, directory, offload="none", overlap=False, prefetch=1, numerics="fp32-master")
    units = [part for part in module.modules() if isinstance(part, FSDPModule)]
    _, embedding, first, second, *_ = units
    called = []

    def note(function):
        return lambda *args: (called.append(function.__name__), function(*args))[-1]

    internals.wrap_backward(module, note, lambda: called.append("end"))
    with torch.no_grad():
        module(torch.zeros(1, 8, dtype=torch.long, device=me.device), use_cache=False)
    order = internals.pop_prefetch_order(module)
    internals.restore_prefetch_order(module, order)
    restored, left = internals.pop_prefetch_order(module), internals.pop_prefetch_order(module)
    take(me, module, updater, 1, 1)
    updater.wait()
    return {
        "dtype": internals.compute_dtype(module),
        "ahead": [state is fully_shard.state(second) for state in internals.forward_prefetched(first)],
        "gathers": [internals.gathers_and_sizes(part)[0] for part in (first, embedding)],
        "sizes": internals.gathers_and_sizes(first)[1] == tuple(p.to_local().numel() for p in first.parameters()),
        "order": [group is internals.param_group(part) for group, part in zip(order, units[1:], strict=False)],
        "restored": restored == order,
        "left": left,
        "groups": len({id(group) for group in internals.param_groups(module)}),
        "called": {name: called.count(name) for name in called},
    }


def test_what_is_used_of_fsdp_is_there(tiny):
    import torch

    for found in run_ranks(2, _used, tiny):
        assert found["dtype"] == torch.bfloat16
        assert found["ahead"] == [True]
        assert found["gathers"] == [2, 1]  # the embedding is not gathered again
        assert found["sizes"]
        assert found["order"] == [True] * 6  # the embedding, four layers, and the head with its norm
        assert found["restored"]
        assert found["left"] == []
        assert found["groups"] == 6
        assert found["called"] == {"pre_backward": 6, "post_backward": 6, "end": 1}
