"""What must hold before anything else is believed: a device computes what the CPU does, and each kind of mistake is found."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from standin_rig import FOUND, NOTHING, counts, in_fork

N = 1 << 20


def _gradients(device):
    """Loss and gradients of a small model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    x_BD = torch.randn(16, 64)
    loss = model.to(device)(x_BD.to(device)).square().mean()
    loss.backward()
    return [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]


def _attention(device):
    torch.manual_seed(0)
    q_BHSD = torch.randn(2, 4, 32, 16).to(device)
    return [F.scaled_dot_product_attention(q_BHSD, q_BHSD, q_BHSD, is_causal=causal).cpu() for causal in (False, True)]


@pytest.mark.parametrize("compute", [_gradients, _attention])
def test_it_computes_what_the_cpu_does(standin, compute):
    found, expected = in_fork(_computed, compute)
    assert all(map(torch.equal, found, expected))


def _computed(compute):
    assert torch.version.cuda
    assert torch.cuda.get_device_name() == "Stand-in H100"
    return compute("cuda"), compute("cpu")


def _download(right):
    """Use what a copy brings, with and without waiting for it."""
    pinned = torch.zeros(N, pin_memory=True)
    pinned.copy_(torch.ones(N, device="cuda"), non_blocking=True)
    if right:
        torch.cuda.current_stream().synchronize()
    float(pinned.sum())


def _download_that_came(right):
    """The same, where a kernel came after the copy, which has therefore been made: the CPU does not know that."""
    pinned, made = torch.zeros(N, pin_memory=True), torch.ones(N, device="cuda")
    pinned.copy_(made, non_blocking=True)
    made.add_(1)
    if right:
        torch.cuda.current_stream().synchronize()
    float(pinned.sum())


def _upload(right):
    """Overwrite what is being copied."""
    pinned = torch.zeros(N, pin_memory=True)
    torch.empty(N, device="cuda").copy_(pinned, non_blocking=True)
    if right:
        torch.cuda.current_stream().synchronize()
    pinned.add_(1)


def _streams(right):
    """Use on one stream what another makes."""
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        made = torch.ones(1000, device="cuda")
    if right:
        main.wait_stream(side)
    made.sum()


def _reuse(right):
    """Free memory that another stream still reads."""
    side = torch.cuda.Stream()
    made = torch.ones(1000, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made.sum()
        if right:
            made.record_stream(side)
    del made
    torch.zeros(1000, device="cuda")


def _collective(right):
    """Use what a collective makes."""
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    x = torch.ones(1000, device="cuda")
    work = dist.all_reduce(x, async_op=True)
    if right:
        work.wait()
    x.sum()


@pytest.mark.parametrize(
    ("use", "kinds"),
    [
        (_download, {"touched"}),
        (_download_that_came, {"touched"}),
        (_upload, {"touched", "changed"}),
        (_streams, {"race"}),
        (_reuse, {"race"}),
        (_collective, {"race"}),
    ],
)
def test_a_mistake_is_found_and_what_is_right_is_not(standin, use, kinds):
    assert in_fork(_found, use, True) == NOTHING
    found = in_fork(_found, use, False)
    assert {kind for kind, n in found.items() if n} == kinds


def _found(use, right):
    use(right)
    torch.cuda.synchronize()
    return {kind: counts()[kind][0] for kind in FOUND}
