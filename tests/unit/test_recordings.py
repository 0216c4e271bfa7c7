"""Recordings: what comes back from the file, whole or cut short."""

import pytest

from llama405b_tools.sources import Recorder, replay


@pytest.mark.parametrize("name", ["r.jsonl", "r.gz"])
@pytest.mark.parametrize("cut", [0, 30])
def test_a_recording_says_whether_it_is_whole(tmp_path, name, cut):
    path, source = tmp_path / name, replay("demo", 1.0)
    recorder, written = Recorder(path, source), list(source.to_the_end())[:-1]
    for event in written:
        recorder.write(event)
    recorder.close()
    path.write_bytes(path.read_bytes()[: -cut or None])
    *events, last = replay(str(path), 1.0).to_the_end()
    if cut:
        assert written[: len(events)] == events
        assert "cut short" in last["note"]
    else:
        assert events == written
        assert last["note"] == "the recording ends"
    assert last["t"] == events[-1]["t"]
