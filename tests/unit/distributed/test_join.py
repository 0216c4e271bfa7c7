"""How a rank joins on CUDA, without a GPU: what it sets before torch reads it, and what it asks of the process group."""

import os

import torch

from llama405b.distributed import ranks
from llama405b.settings.schema import Parallel


def test_a_rank_on_cuda_shares_one_communicator_and_sets_what_the_user_has_not(monkeypatch):
    asked = {}

    def init(backend, **more):
        asked.update(
            more, backend=backend, conf=os.environ["PYTORCH_ALLOC_CONF"], ring=os.environ["TORCH_FR_BUFFER_SIZE"]
        )

    for name in (*ranks.CUDA_ENV, "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.setenv(name, "unset")
        monkeypatch.delenv(name)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "5")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(ranks.dist, "init_process_group", init)
    ranks.join_process_group("cuda", 60)
    assert (asked["backend"], asked["device_id"]) == ("cpu:gloo,cuda:nccl", torch.device("cuda", 3))
    assert (asked["conf"], asked["ring"]) == ("expandable_segments:True", "5")
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ  # its older name, of which torch warns


def test_settings_of_cuda_and_nccl_are_in_the_environment_where_they_are_given(monkeypatch):
    names = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_MAX_CTAS")
    for name in names:
        monkeypatch.setenv(name, "4")  # the user's
    ranks.set_gpu_env(Parallel())
    assert [os.environ[name] for name in names] == ["4", "4"]
    ranks.set_gpu_env(Parallel(cuda_connections=32, nccl_ctas=16))
    assert [os.environ[name] for name in names] == ["32", "16"]


def test_without_torchrun_a_host_has_one_rank(monkeypatch):
    monkeypatch.setattr(ranks.collectives, "all_reduce_max", lambda values: values)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks.ranks_per_host() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert ranks.ranks_per_host() == 8
