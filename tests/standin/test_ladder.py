"""The tests of ``llama405b bench``, on shapes that a CPU computes; ``update`` is left out, since it uses no device."""

import pytest

from llama405b.spec.probes import BENCH_PROBES, FULL_RUN_PROBES, KNOB_PROBES, MANY_RANKS_ONLY, ONE_RANK_ONLY, Probe
from standin_rig import NOTHING

ALONE = [
    *(probe for probe in BENCH_PROBES if probe not in (*MANY_RANKS_ONLY, *FULL_RUN_PROBES, Probe.UPDATE)),
    *KNOB_PROBES,
]
TOGETHER = [*(probe for probe in BENCH_PROBES if probe not in ONE_RANK_ONLY), *KNOB_PROBES]
ONLY_TOGETHER = [probe for probe in BENCH_PROBES if probe in MANY_RANKS_ONLY]


@pytest.mark.parametrize(
    ("world", "probes"), [(1, ALONE), (2, ONLY_TOGETHER), pytest.param(2, TOGETHER, marks=pytest.mark.soak)]
)
def test_each_passes(standin, world, probes):
    ranks = standin.climb(probes, world)
    assert len(ranks) == world
    for each in ranks:
        assert each["faults"] == {}
        assert sorted(each["figures"]) == sorted(probes)
        assert all(each["figures"].values())
        assert each["found"] == NOTHING, each
        allocator = each["allocator"]  # what a bundle tells of it
        assert 0 < allocator["allocated_bytes_peak"] <= allocator["reserved_bytes_peak"]
        assert (allocator["num_ooms"], allocator["num_alloc_retries"]) == (0, 0)


@pytest.mark.parametrize("probe", FULL_RUN_PROBES)
def test_whole_runs_agree(standin, probe):
    [each] = standin.climb([probe], 1)
    assert each["faults"] == {}
    assert each["figures"][probe] == 2  # how many agree, and how well
