"""``push --shards``: which settings say how a run splits the model, and which are refused."""

import pytest

from llama405b.contract.errors import UserError
from llama405b.settings.schema import Parallel
from llama405b_tools.verbs.push import parse_parallel


def test_settings_of_the_mesh_are_taken():
    assert parse_parallel(["--parallel.tp", "8", "--parallel.pp=4"], shards=True) == Parallel(tp=8, pp=4)


@pytest.mark.parametrize(
    ("flags", "shards"),
    [
        (["--parallel.tp", "0"], True),
        (["--parallel.cp", "-1"], True),
        (["--parallel.pp_schedule", "gpipe"], True),
        (["--data.seq_len", "8"], True),
        (["--parallel.tp", "8"], False),
    ],
)
def test_what_no_run_could_have_is_refused_with_its_flag(flags, shards):
    with pytest.raises(UserError) as refused:
        parse_parallel(flags, shards=shards)
    assert str(refused.value).startswith(f"{flags[0]}: ")
