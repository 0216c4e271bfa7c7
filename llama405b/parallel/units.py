"""Show which of FSDP's units a rank is in, so that somebody who looks at a hang can tell whose weights it waits for."""

import functools
from collections.abc import Callable

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

from llama405b.model.checkpointing import unwrapped

Show = Callable[[str, str], Callable[[], None]]  # a unit's name and way -> what shows it


class UnitTracker:
    """Shows each unit as its forward begins, and as its backward does; what is recomputed belongs to the backward."""

    def __init__(self, show: Show) -> None:
        self.show = show
        self.in_backward = False

    def attach(self, model: nn.Module) -> None:
        """Track a model that FSDP has sharded; of FSDP1, and where torch has changed, the forward alone."""
        for name, module in model.named_modules():
            if not isinstance(module, FSDPModule | FullyShardedDataParallel):
                continue
            path = unwrapped(f"{name}.").removeprefix("model.")
            short = path.rstrip(".") or "the model"
            forward, backward = self.show(short, "forward"), self.show(short, "backward")
            module.register_forward_pre_hook(
                functools.partial(self._forward, forward, backward, module is model), prepend=True
            )
            state = fully_shard.state(module) if isinstance(module, FSDPModule) else None
            group = getattr(state, "_fsdp_param_group", None)
            if group and not isinstance(group.pre_backward, functools.partial):  # one of several modules with one group
                group.pre_backward = functools.partial(self._backward, backward, group.pre_backward)

    def _forward(self, forward: Callable[[], None], backward: Callable[[], None], is_root: bool, *_: object) -> None:
        self.in_backward = self.in_backward and not is_root
        (backward if self.in_backward else forward)()

    def _backward(self, show: Callable[[], None], part: Callable[..., None], *args: object) -> None:
        self.in_backward = True
        show()
        part(*args)
