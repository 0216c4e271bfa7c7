"""Recordings: what is read back from a file, complete or cut short."""

import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest
import simulate

from llama405b_tools.top.event_sources import DEMO_RECORDING, Recorder, open_replay


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cut"),
    [*((f"r.{kind}", 0) for kind in ("jsonl", "gz", "xz")), ("r.jsonl", 30), ("r.gz", 30), ("r.xz", 3000)],
)
def test_a_recording_says_whether_it_is_whole(tmp_path, name, cut):
    path, source = tmp_path / name, open_replay("demo", 1.0)
    recorder, written = Recorder(path, source), list(source.remaining_events())[:-1]
    for event in written:
        recorder.write(event)
    recorder.close()
    path.write_bytes(path.read_bytes()[: -cut or None])
    *events, last = open_replay(str(path), 1.0).remaining_events()
    if cut:
        assert written[: len(events)] == events
        assert "truncated" in last.note
    else:
        assert events == written
        assert last.note == "the recording ends"
    assert last.t == events[-1].t


@pytest.mark.slow
def test_the_demo_is_the_simulated_incident(tmp_path):
    simulate.write_recording(tmp_path / "r.xz")
    assert lzma.decompress((tmp_path / "r.xz").read_bytes()) == lzma.decompress(DEMO_RECORDING.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("form", [["--once"], ["--json"], pytest.param(["--watch", "0.2"], marks=pytest.mark.slow)])
def test_output_that_nobody_reads_or_that_has_no_room(form):
    demo = [sys.executable, "-m", "llama405b_tools.cli", "top", "--replay", "demo", *form]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(demo, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert "cannot write to standard output (No space left on device)" in done.stderr
    theirs, ours = os.pipe()
    os.close(theirs)
    gone = subprocess.run(demo, stdout=ours, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(ours)
    assert (gone.returncode, gone.stderr) == (0, "")
