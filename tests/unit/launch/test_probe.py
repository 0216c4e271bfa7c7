"""What doctor's probe reads of a host's environment."""

import sys

from llama405b_tools.agent import hostprobe


def test_the_setting_of_the_allocator_is_the_one_that_pytorch_reads(monkeypatch, tmp_path):
    def allocator():
        return hostprobe.read_environment({"workdir": str(tmp_path), "python": sys.executable})["allocator"]

    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert allocator() == ""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert allocator() == "max_split_size_mb:512"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert allocator() == "expandable_segments:True"
