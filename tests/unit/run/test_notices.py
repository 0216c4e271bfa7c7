"""What a guard pages of disks, as their hosts report them."""

import pytest

from llama405b_tools.agent.messages import DiskSpace
from llama405b_tools.run.query import disk_words

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "total", "full"),
    [(GIB // 4, 900 * GIB, True), (100 * GIB, 9000 * GIB, True), (50 * GIB, 900 * GIB, False), (GIB // 2, GIB, True)],
)
def test_a_disk_is_full_before_nothing_fits(free, total, full):
    said = disk_words({"a": (DiskSpace("/c", free, total),), "b": ()})
    assert said == (f"a: {free / GIB:.1f} GiB left at /c; make room there" if full else "")


def test_a_disk_that_hosts_share_is_told_once():
    noted = (DiskSpace("/c", GIB // 4, 900 * GIB),)
    assert disk_words({"n1": noted, "n2": noted, "n3": noted, "b": ()}) == "n[1-3]: 0.2 GiB left at /c; make room there"
