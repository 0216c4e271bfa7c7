"""A diagnosis that could not be written whole is an error, whatever the program that writes it says."""

import resource

import pytest
import torch

from llama405b.contract.paths import RunDir
from llama405b.distributed.ranks import Rank
from llama405b.training.requests import Profile, write_memory, write_stacks


def profile(run, me, step):
    recorded = Profile(run, me, "id", step, 1)
    torch.ones(8) @ torch.ones(8)
    return recorded.finish()


@pytest.mark.parametrize("room", [0, 100])  # bytes
def test_a_file_that_has_no_room(tmp_path, room):
    for write in (write_stacks, write_memory, profile):
        run, me = RunDir(tmp_path / write.__name__), Rank(0, 1, 0, "a", torch.device("cpu"))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            with pytest.raises(OSError):
                write(run, me, 3)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        path = write(run, me, 3)
        assert path.stat().st_size > 100
        assert list(path.parent.iterdir()) == [path]
