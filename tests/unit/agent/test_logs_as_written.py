"""Logs as programs write them, beside a plain reading of the same bytes: 20 of each kind, 100 with --soak."""

import random
import re

import pytest

from llama405b.contract.paths import RunDir
from llama405b.contract.reader import dumps
from llama405b_tools.agent import evidence, streaming
from llama405b_tools.agent.messages import StreamRequest
from llama405b_tools.agent.streaming import REWRITTEN_NOTICE, HostLogs
from llama405b_tools.hosts.transport import MAX_LINE
from llama405b_tools.text.words import (
    BAR_MARK,
    CUT_NOTE,
    MAX_LINE_BYTES,
    UNENDED_MARK,
    _decode_lines,
    split_mark,
    state_letters,
)

SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(20, 100))]


@pytest.fixture
def logs_of(tmp_path, monkeypatch):
    """Return a reader of a file, and the file."""
    monkeypatch.setattr(streaming, "read_plan", lambda _: type("Plan", (), {"attempt": 0}))
    path = tmp_path / "logs/a/j-0-12345678_x/attempt_0/0/stdout.log"
    path.parent.mkdir(parents=True)

    def make(**how):
        return HostLogs(RunDir(tmp_path), "a", StreamRequest("r", "a", **how))

    return make, path


def texts(logs, *, final):
    """The texts that a reader's messages have; each message is one that the other end reads."""
    found = []
    for message in logs.poll(final=final):
        assert len(dumps(message)) < MAX_LINE
        found += [text for _, _, text in message.entries]
    return found


def written(draw):
    """What a program writes: lines, bars, long lines, holes, characters of several bytes and bytes that are no text."""
    for _ in range(draw.randint(1, 30)):
        kind = draw.choice(("line", "line", "bar", "long", "traceback", "hole", "odd", "windows"))
        if kind == "line":
            yield f"step {draw.randint(0, 999)} {'é中😀x' * draw.randint(0, 9)}\n".encode()
        elif kind == "bar":
            states = [
                f"Loading {i}%|{'█' * (i // 10)}| {i}/100 [00:{i:02}<00:{99 - i}, {draw.random():.2f}it/s]"
                for i in range(100)
            ]
            if draw.random() < 0.5:
                states.insert(50, "WARNING: shard 10 is corrupt")
            yield ("\r" + "\r".join(states * draw.choice((1, 1, 300))) + "\n").encode()
        elif kind == "long":
            yield ("中😀" * draw.choice((1, 9000, 20_000, 400_000))).encode() + b"\n"
        elif kind == "traceback":
            yield b"Traceback (most recent call last):\n  File x\n    y\nValueError: z\n"
        elif kind == "hole":
            yield bytes(draw.choice((3, 100, 3_000_000))) + b"after a hole\n"
        elif kind == "odd":
            yield b"caf\xe9 \x1b[31mred\x1b[0m \x07\n"
        else:
            yield b"a line\r\n"


def plain(data):
    """The lines that text mode shows, by a reading of the whole."""
    found = []
    for line in data.removesuffix(b"\n").split(b"\n"):
        states = [state for state in line.removesuffix(b"\r").split(b"\r") if state.strip()] or [b""]
        kept = []
        for state in states:
            text = _decode_lines([state])
            if kept and state_letters(kept[-1]) == state_letters(text):
                kept.pop()
            kept.append(text)
        found += kept
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_raw_has_every_byte_once_and_in_order(seed, logs_of):
    make, path = logs_of
    draw = random.Random(seed)
    data = b"".join(written(draw)) + draw.choice((b"", b"Overwrite? [y/N] "))
    path.write_bytes(data)
    found = texts(make(whole=True), final=True)
    ends = ["" if text.endswith(UNENDED_MARK) else "\n" for text in found]
    assert "".join(text.removesuffix(UNENDED_MARK) + end for text, end in zip(found, ends, strict=True)) == data.decode(
        "utf-8", "replace"
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_text_has_every_line_once_and_in_order_or_says_what_is_left_out(seed, logs_of):
    make, path = logs_of
    data = b"".join(written(random.Random(seed)))
    path.write_bytes(data)
    found = [line for text in texts(make(), final=True) for line in text.split("\n")]
    assert found == plain(data)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_followed_is_each_line_once_whatever_is_done_to_the_file(seed, logs_of, monkeypatch):
    monkeypatch.setattr(streaming, "STALE_LINE_S", 0.0)
    monkeypatch.setattr(streaming, "BAR_INTERVAL_S", 0.0)
    monkeypatch.setattr(streaming, "LONG_POLL_S", 0.0)
    make, path = logs_of
    draw, lines, found = random.Random(seed), [], []
    logs = make(follow=True)
    file = path.open("wb", buffering=0)
    for number in range(60):
        what = draw.choice(("line", "line", "line", "part", "truncate", "sparse", "rename"))
        if what == "part":  # it is told as it is, and again when it has ended
            file.write(f"{number} Overwrite? ".encode())
            for _ in range(4):
                found += texts(logs, final=False)
            file.write(b"y\n")
            lines += [f"{number} Overwrite? ", f"{number} Overwrite? y"]
        elif what == "line":
            file.write(f"{number} line\n".encode())
            lines.append(f"{number} line")
        for _ in range(4):
            found += texts(logs, final=False)
        if what == "truncate":  # by whoever has it open for appending
            path.write_bytes(b"")
            file = path.open("ab", buffering=0)
        elif what == "rename":
            path.rename(path.with_suffix(".1"))
            file = path.open("wb", buffering=0)
        elif what == "sparse":  # under a writer that goes on where it was
            file.truncate(0)
            found += texts(logs, final=False)
            file.write(b"\nafter a hole\n")
        found += texts(logs, final=False)
    for _ in range(4):
        found += texts(logs, final=False)
    said = [line for text in found for line in split_mark(text)[0].split("\n")]
    odd = [line for line in said if line not in lines]
    assert [line for line in said if line in lines] == lines
    assert all(
        line in ("", REWRITTEN_NOTICE, "after a hole") or re.fullmatch(r"\0*|\[[\d,]+ NUL bytes\]", line)
        for line in odd
    )


def test_a_bar_is_told_as_it_goes_and_what_is_no_state_of_it_is_a_line(logs_of, monkeypatch):
    monkeypatch.setattr(streaming, "LONG_POLL_S", 0.0)
    make, path = logs_of
    logs = make(follow=True)
    with path.open("wb", buffering=0) as file:
        file.write(b"start\n\rLoading 1%|#  |\rLoading 2%|#  |")
        found = texts(logs, final=False) + texts(logs, final=False)
        assert [text for text in found if text != "start"] == [f"Loading 1%|#  |{BAR_MARK}"]
        file.write(b"\rERROR: x\rLoading 3%|## |\rLoading 4")
        assert texts(logs, final=False) == ["Loading 2%|#  |", "ERROR: x"]
        logs.state_sent_at.clear()
        file.write(b"%|## |\r\n")
        assert [text for _ in range(3) for text in texts(logs, final=False)] == ["Loading 4%|## |"]


def test_a_slow_bar_is_a_bar_and_who_returns_has_an_open_line_whole(logs_of, monkeypatch):
    for name in ("STALE_LINE_S", "BAR_INTERVAL_S", "LONG_POLL_S"):
        monkeypatch.setattr(streaming, name, 0.0)
    make, path = logs_of
    logs, found = make(follow=True), []
    with path.open("wb", buffering=0) as file:
        for state in range(5):
            file.write(b"\rstep %d" % state)
            for _ in range(3):
                found += texts(logs, final=False)
        assert found == [f"step 0{UNENDED_MARK}", *(f"step {state}{BAR_MARK}" for state in range(1, 5))]
        file.write(b"\r\nhello wor")
        [*_, message] = [message for _ in range(4) for message in logs.poll(final=False)]
        assert [text for _, _, text in message.entries] == ["step 4", f"hello wor{UNENDED_MARK}"]
        file.write(b"ld\n")
        assert texts(make(marks=message.marks), final=True) == ["hello world"]


@pytest.mark.parametrize("whole", [False, True])
def test_no_end_of_a_line_is_taken_for_another_s(logs_of, whole):
    make, path = logs_of
    path.write_bytes(b"one\r\ntwo\f\nthree\r\r\n")
    found = texts(make(whole=whole), final=True)
    assert not any(split_mark(text)[1] for text in found)
    assert [text.rstrip("\r") for text in found] == ["one", "two\f", "three", *[""] * (not whole)]


def test_of_a_log_s_end_no_more_is_read_than_is_asked_for(logs_of):
    make, path = logs_of
    path.write_bytes(b"".join(b"line %05d\n" % i for i in range(40_000)))
    logs = make(most_bytes=1000)
    messages = list(logs.poll(final=True))
    assert sum(len(message.entries) for message in messages) < 100
    assert sum(message.skipped for message in messages) > 39_800


def test_a_long_line_is_cut_once(logs_of):
    make, path = logs_of
    path.write_bytes(b"a" * (25 << 20) + b"\nthe real reason\n")
    assert texts(make(), final=True) == ["a" * MAX_LINE_BYTES + CUT_NOTE, "the real reason"]


def test_an_autopsy_has_a_bar_s_last_state_and_what_was_said_before(logs_of):
    _, path = logs_of
    path.write_bytes(b"loaded\n" + b"".join(b"\rLoading %d%%" % i for i in range(3000)) + b"\rWARNING: x\rLoading 99%")
    [said] = evidence._last_lines(RunDir(path.parents[5]), "a", 0).values()
    assert said[-3:] == ("Loading 2999%", "WARNING: x", "Loading 99%")
