"""Meshes on one GPU that all ranks share: its kernels and streams, with collectives over gloo, which NCCL would refuse there."""

import dataclasses
import json
import sys

import pytest
import torch

from ranks_rig import run_program

STEPS = 3
FLAGS = (
    "--preset", "demo", "--model.attention", "sdpa", "--training.max_steps", STEPS, "--training.micro_batch_size", 2,
    "--training.global_batch_size", 8, "--data.seq_len", 64, "--data.max_bytes", 300_000, "--optimizer.lr", "3e-3",
    "--optimizer.warmup", 0, "--evaluation.every", 0, "--checkpoint.every", 0, "--parallel.device", "cuda",
    "--parallel.numa", "off", "--parallel.numerics", "fp32-master",
)  # fmt: skip
# A pipeline sends, and gloo sends no CUDA tensor; of tensor parallelism's collectives one on CUDA tensors ends the process (SIGSEGV).
MESHES = {"dp": (), "cp": ("--parallel.cp", 2)}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT RUN: no GPU"),
    pytest.mark.timeout(300),
]


def trainer():
    """Be the trainer on one of the ranks."""
    import torch.distributed as dist

    from llama405b import train as program
    from llama405b.distributed import ranks

    place, init = ranks.rank_from_environment, dist.init_process_group

    def on_first(*, cuda=False):
        return dataclasses.replace(place(cuda=cuda), device=torch.device("cuda", 0))

    def over_gloo(_, **rest):
        return init("cpu:gloo,cuda:gloo", **rest | {"device_id": None})

    ranks.rank_from_environment, dist.init_process_group = on_first, over_gloo
    return program.main(sys.argv[1:])


def _losses(model, directory, world, flags):
    directory.mkdir()
    argv = [*FLAGS, "--model.path", model, "--run-dir", directory / "run", *flags]
    done = run_program("test_shared_gpu:trainer", *argv, cwd=directory, world=world, timeout_s=140)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(row)["loss"] for row in (directory / "run/metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def of_one(demo, tmp_path_factory):
    return _losses(demo, tmp_path_factory.mktemp("one") / "run", 1, ())


@pytest.mark.parametrize("mesh", MESHES)
def test_two_ranks_learn_as_one(demo, of_one, tmp_path, mesh):
    assert len(of_one) == STEPS
    assert of_one[-1] < of_one[0]
    assert _losses(demo, tmp_path / mesh, 2, MESHES[mesh]) == pytest.approx(of_one, rel=1e-3)
