"""BF16 weights stay on the device; FP32 masters, moments and the sum of gradients live in CPU memory (``offload = optimizer``).

No weight crosses PCIe in the forward or the backward. FSDP2 hands over each unit's gradient in FP32, before it is cast to the
weights' dtype: 4 bytes per parameter come down for each micro-batch. After its update a unit's weights go up in BF16, 2 bytes
per parameter and step. So the result is that of FP32 masters on the device, bit for bit.

Only the gradient sums, one slot for gradients to be added, and one stage for weights cross PCIe: only they are pinned.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor, nn

from llama405b.contract.schema import Moments
from llama405b.distributed.host_memory import Progress, allocate
from llama405b.distributed.transfer import Arrived, copy, nothing
from llama405b.model.checkpointing import unwrapped
from llama405b.optim.norm import local
from llama405b.optim.offload_all import OffloadedAll, OnLongWait, UnitState
from llama405b.parallel.fsdp2 import FsdpUnit, fsdp_units


@dataclasses.dataclass(slots=True)
class Member:
    """One parameter of a unit."""

    weight: nn.Parameter  # in the model, in BF16
    master: nn.Parameter
    begin: int  # of this rank's elements in the unit's flat gradient

    def of(self, flat: Tensor) -> Tensor:
        """Return this parameter's part of a flat tensor."""
        shape = local(self.master).shape
        return flat[self.begin : self.begin + shape.numel()].view(shape)


@dataclasses.dataclass(slots=True)
class Landing:
    """Where a unit's gradients come down, and its weights go up."""

    members: dict[int, Member]  # by the master's identity
    total: Tensor  # of the flat gradients of the micro-batches so far, in FP32 and with FSDP's padding
    sums: list[list[Tensor]]  # parts of it, by parameter group
    unchecked: int  # of those that are trained, whose place in the flat gradient has not been compared with FSDP's
    came: Arrived
    uploaded: Arrived


class OffloadedOptimizer(OffloadedAll):
    """See the module; the update itself is ``OffloadedAll``'s."""

    def __init__(
        self,
        model: nn.Module,
        master: nn.Module,
        optimizer: torch.optim.AdamW,
        device: torch.device,
        on_long_wait: OnLongWait,
        *,
        overlap: bool,
        moments: Moments,
        pinning: Progress,
    ) -> None:
        """Allocate what crosses PCIe, and have FSDP hand over the gradients.

        ``pinning`` hears of the progress; all else: see ``OffloadedAll``.

        Raises:
            UserError: CUDA cannot pin that much.
        """
        super().__init__(model, master, optimizer, device, on_long_wait, overlap=overlap, moments=moments)
        self.landings: dict[str, Landing] = {}
        self.adding: Future[list[float]] | None = None
        self.device, self.uploads = device, torch.cuda.Stream(device) if device.type == "cuda" else None
        weights, masters = ({unwrapped(name): p for name, p in module.named_parameters()} for module in (model, master))
        units = fsdp_units(model)
        laid_out = [_lay_out(unit, weights, masters) for unit in units]
        sizes, most = [numel for _, numel, _ in laid_out], max(whole for *_, whole in laid_out)
        *totals, slot, stage = allocate([4 * n for n in (*sizes, max(sizes))] + [2 * most], device, pinning)
        self.slot, self.stage = slot.view(torch.float32), stage.view(torch.bfloat16)
        self.staged: Arrived = nothing
        self.landed: tuple[Arrived, Arrived] = (nothing, nothing)  # of the last two units
        for part, unit, (members, *_), total in zip(self.parts, units, laid_out, totals, strict=True):
            flat = total.view(torch.float32)
            sums = [[members[id(master)].of(flat) for master in group] for group in part.trained]
            of_trained = [members[id(master)] for group in part.trained for master in group]
            self.landings[part.name] = Landing(members, flat, sums, len(of_trained), nothing, nothing)
            unit.modules[0].set_all_reduce_hook(functools.partial(self._land, part))
            for member in of_trained:
                member.weight.register_post_accumulate_grad_hook(functools.partial(self._drop, part, member))

    def accumulate(self) -> None:
        """The gradients came during the backward."""

    def _land(self, part: UnitState, flat: Tensor) -> None:
        """Take a unit's gradient, in FP32 and reduced, from FSDP."""
        landing = self.landings[part.name]
        if flat.dtype != torch.float32 or flat.numel() != landing.total.numel():
            raise RuntimeError(f"{part.name}: FSDP's gradient is {flat.dtype} of {flat.numel()}, not as expected")
        self.done.down_bytes += flat.nbytes
        stream = torch.cuda.current_stream(self.device) if flat.is_cuda else None
        if not part.sums:
            self.wait_unit(part)
            self.landed[0]()  # of the unit before the last one: or flat gradients would fill the device
            part.sums, landing.came = landing.sums, copy([(landing.total, flat)], stream)
            self.landed = (self.landed[1], landing.came)
            self._gather(part, landing.came, lambda: None)
            return
        if self.adding:
            self.adding.result()  # which frees the slot
        slot = self.slot[: flat.numel()]
        came = copy([(slot, flat)], stream)
        self._gather(part, came, lambda: _add(landing.total, slot))
        self.adding = part.adding

    def _drop(self, part: UnitState, member: Member, weight: nn.Parameter) -> None:
        """Drop the BF16 gradient that FSDP makes of the flat one; the first shows whether that was understood."""
        gradient, weight.grad = weight.grad, None
        landing = self.landings[part.name]
        if not landing.unchecked:
            return
        landing.unchecked -= 1
        landing.came()
        expected = member.of(landing.total).to(weight.dtype)
        if gradient is None or not torch.equal(local(gradient).cpu().nan_to_num(), expected.nan_to_num()):
            raise RuntimeError(
                f"{part.name}: FSDP's gradients are not laid out as expected; use --parallel.offload all"
            )

    def wait_unit(self, part: UnitState) -> None:
        """Wait for what is pending for one unit, until its weights are on the device.

        Raises:
            Exception: It failed; the worker's own.
        """
        super().wait_unit(part)
        began = time.perf_counter()
        self.landings[part.name].uploaded()
        self.done.exposed_s += time.perf_counter() - began

    def sync_weights(self) -> None:
        """See ``Updater``."""
        if self.uploads:  # what made the weights' memory may still be writing it
            self.uploads.wait_stream(torch.cuda.current_stream(self.device))
        super().sync_weights()
        self.wait()
        self.told = dataclasses.replace(self.done)  # no step's work

    @torch.no_grad()
    def _sync_unit(self, part: UnitState, changed: Iterable[Sequence[nn.Parameter]]) -> None:
        """Round some of a unit's masters to BF16, and begin to copy them to the device."""
        self.staged()  # the unit before
        landing = self.landings[part.name]
        pairs = []
        for member in (landing.members[id(master)] for master in itertools.chain(*changed)):
            staged = member.of(self.stage)
            staged.copy_(local(member.master))
            pairs.append((local(member.weight), staged))
            self.done.up_bytes += staged.nbytes
        self.staged = landing.uploaded = copy(pairs, self.uploads)


def _lay_out(
    unit: FsdpUnit, weights: Mapping[str, nn.Parameter], masters: Mapping[str, nn.Parameter]
) -> tuple[dict[int, Member], int, int]:
    """Return a unit's parameters, the length of its flat gradient, in which each begins at a multiple of the largest shard, and of all.

    Those that are frozen follow: they have no gradient.
    """
    sized = zip((unwrapped(each) for each in unit.parameters), unit.padded_sizes, strict=True)
    members, begin, of_gradient = {}, 0, 0
    for name, size in sorted(sized, key=lambda each: not masters[each[0]].requires_grad):
        members[id(masters[name])] = Member(weights[name], masters[name], begin)
        begin += size
        of_gradient += size * masters[name].requires_grad
    return members, of_gradient, begin


def _add(total: Tensor, slot: Tensor) -> None:
    total.add_(slot)
