"""Runs on disks that refuse a call or say what is not so: what a run needs is tried before it starts, the rest it does otherwise."""

import os
from pathlib import Path

import pytest

from llama405b.contract.disk import disk_free_bytes, disk_free_files, sync, unsupported_operation
from llama405b_tools.agent import hostprobe, processes

pytest.importorskip("fuse", reason="NOT RUN: needs fusepy and libfuse2")
from disk_cells import Cell
from odd_disk import ODDS, STRANGERS, odd_disk

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.getuid() != 0 or not Path("/dev/fuse").exists(), reason="NOT RUN: needs root and FUSE"),
]
REFUSED = {
    "no append": "append to files (Operation not supported)",
    "no rename": "rename files over others (Function not implemented)",
    "no rename of directories": "rename directories (Operation not supported)",
    "quota": "write and fsync files (Disk quota exceeded)",
    "read-only": "make directories (Read-only file system)",
}


def test_a_disk_is_tried_with_the_calls_of_a_run(tmp_path):
    disk = tmp_path / "disk"
    with odd_disk(disk) as become:
        for odd in ODDS:
            become(odd)
            said = unsupported_operation(str(disk))
            assert said == REFUSED.get(odd, ""), odd
            without_saves = "" if odd == "no rename of directories" else said
            assert unsupported_operation(str(disk), saves=False) == without_saves, odd
            of_export = "" if odd == "no append" else without_saves
            assert unsupported_operation(str(disk), saves=False, appends=False) == of_export, odd
            assert (disk_free_bytes(str(disk)) is None) == (odd == "no size")
            assert (disk_free_files(str(disk)) is None) == (odd in ("no size", "no inodes left"))
            sync(str(disk))
            seen = hostprobe.read_directory_facts(str(disk), True, True)
            assert (seen.get("refuses", said), seen["read_only"]) == (said, False), odd
            assert [each.total_bytes > 0 for each in processes.list_disks(disk)] == [True] * (odd != "no size")
            become()
            left = [name for path in disk.iterdir() for name in path.iterdir()]
            assert {name.name for name in left} <= {STRANGERS[0]}, odd


long = pytest.mark.soak


@pytest.mark.parametrize(
    ("use", "odd", "words"),
    [
        ("working directory", "no append", "in DISK/work a run cannot append to files (Operation not supported); fix that, or set"),
        ("working directory", "no rename", "in DISK/work a run cannot rename files over others (Function not implemented); fix that, or"),
        ("working directory", "no rename of directories", "; fix that, or set workdir= or, if it is only for saves, --checkpoint.dir."),
        ("checkpoints, shared", "no rename of directories", "--checkpoint.dir=DISK/c cannot be created or written: in DISK a run cannot r"),
        ("checkpoints, shared", "quota", "in DISK a run cannot write and fsync files (Disk quota exceeded); name another directory"),
        ("checkpoints, local", "no links", ""),
        ("working directory", "quota, later", ""),
        ("checkpoints, shared", "read-only, later", "was not saved: DISK/c/step-"),
        ("checkpoints, shared", "strangers' files", ""),
        ("export", "no rename", "DISK/out: an export there cannot rename files over others (Function not implemented); name another"),
        pytest.param("checkpoints, shared", "no fsync of directories", "", marks=long),
        pytest.param("working directory", "no inodes left", "", marks=long),
        pytest.param("working directory", "no size", "", marks=long),
        pytest.param("export", "no rename of directories", "", marks=long),
        pytest.param("cache", "no links", "", marks=long),
    ],
)  # fmt: skip
def test_a_run_does_without_what_its_disk_refuses_or_does_not_start(demo, corpus, tmp_path, use, odd, words):
    outcomes = Cell(use, odd, tmp_path, demo, corpus).run()
    said = "\n".join(each.log for each in outcomes)
    assert "Traceback" not in said
    assert words.replace("DISK", str(tmp_path / "disk")) in said + outcomes[0].words
    if outcomes[0].code:
        assert "Nothing was started" in said
    else:
        refused = 2 if use == "export" and words else 0
        assert [each.code for each in outcomes] == [0] * (len(outcomes) - 1) + [refused], said
        assert outcomes[-1].phase == "export"
