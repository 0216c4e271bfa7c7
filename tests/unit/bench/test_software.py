"""Versions for a bundle; the texts are in the form that NVIDIA's kernel modules have."""

import platform

import pytest
import torch

from llama405b.bench.runs import allocator_stats, describe_machine, driver_version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version:",
            "550.54.15",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build  (root@x)\n", "580.82.07"),
        ("something else\n", ""),
    ],
)
def test_the_drivers_version(tmp_path, text, version):
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version") == version
    assert driver_version(tmp_path / "none") == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="NOT RUN: there is a GPU")
def test_without_a_gpu():
    found = describe_machine()
    assert (found.python, found.node, found.gpus, found.nccl) == (platform.python_version(), platform.node(), (), "")
    assert allocator_stats(on_gpu=False) == {}
