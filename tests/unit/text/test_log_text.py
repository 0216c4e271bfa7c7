"""Blocks, times, merging, folding and cleaning of log text: pure."""

import datetime
import json
import random

import pytest

from llama405b.contract.records import QUOTE_PREFIX
from llama405b_tools.text.figures import format_columns
from llama405b_tools.text.words import (
    BlockSplitter,
    LogEntry,
    LogFolder,
    LogMerger,
    clean,
    common_text,
    fold_names,
    format_hosts_and_ranks,
    hide_secrets,
    hide_secrets_in_json,
    parse_log_time,
    secret_lines,
)

TRACE = """Traceback (most recent call last):
  File "x.py", line 1, in <module>
    main()

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "y.py", line 2
ValueError: no
"""
RANK_TRACE = "".join(f"[rank3]: {line}\n" for line in TRACE.splitlines())


@pytest.mark.parametrize("trace", [TRACE, RANK_TRACE])
@pytest.mark.parametrize("seed", range(5))
def test_a_traceback_stays_whole_however_it_arrives(trace, seed):
    data = f"before\n{trace}after\n".encode()
    lines = data.splitlines(keepends=True)
    blocks, cut = BlockSplitter(), random.Random(seed)
    found, begin = [], 0
    while lines:
        count = cut.randint(1, len(lines))
        piece, lines = b"".join(lines[:count]), lines[count:]
        found += blocks.feed(begin, piece)
        begin += len(piece)
    found += blocks.flush()
    texts = [block.text for block in found]
    assert texts[0] == "before"
    assert texts[-1] == "after"
    assert "".join(data[block.begin : block.end].decode() for block in found) == data.decode()
    assert any(text.strip().endswith("ValueError: no") and text.count("\n") >= 2 for text in texts)
    assert not any(text.lstrip("[rank3]: ").startswith("ValueError") for text in texts)


def test_a_traceback_in_training_text_begins_no_block():
    quoted = "".join(f"{QUOTE_PREFIX}{line}\n" for line in f"⟦text\n{TRACE}⟧".splitlines())
    data = f"before\n{quoted}step 1\n{TRACE}after\n".encode()
    blocks = BlockSplitter()
    texts = [block.text for block in (*blocks.feed(0, data), *blocks.flush())]
    assert texts[:2] == [f"before\n{quoted}".rstrip("\n"), "step 1"]
    assert texts[-1] == "after"
    assert texts[2].startswith("Traceback")


def test_times_in_lines():
    zone = datetime.timezone(datetime.timedelta(hours=2))
    at = datetime.datetime(2026, 11, 21, 8, 30, 15, 250000, tzinfo=zone).timestamp()
    for text in (
        "2026-11-21 08:30:15,250 INFO x",
        "[2026-11-21T06:30:15.25Z] x",
        "2026-11-21T08:30:15.250+02:00 x",
        "W1121 08:30:15.250000 4711 x.cpp:3] y",
    ):
        assert parse_log_time(text, at + 3, 7200.0) == pytest.approx(at, abs=1e-3), text
    assert (
        parse_log_time("2026-11-21 08:30:15,250", at + 7200, 7200.0) == at + 7200
    )  # not credible: it is about something else
    assert parse_log_time("2026-99-99 08:30:15", at, 0.0) == at
    assert parse_log_time("no time", at, 0.0) == at


def entry(time, host="a", text="x", rank=0):
    return LogEntry(time, host, "f", text, rank=rank, stream="out")


def test_merge_waits_for_who_may_say_something_older():
    merge = LogMerger()
    merge.begin("a")
    merge.begin("b")
    merge.push("a", [entry(1.0), entry(3.0), entry(2.0)])  # a source's own order stands
    assert list(merge.pop()) == []
    merge.push("b", [entry(2.5, "b")])
    assert [(e.host, e.time) for e in merge.pop()] == [("a", 1.0), ("b", 2.5)]
    assert [(e.host, e.time) for e in merge.pop(3.0)] == [("a", 3.0), ("a", 3.0)]
    merge.push("a", [entry(4.0)])
    merge.end("b")
    assert [e.time for e in merge.pop()] == [4.0]


def test_merge_drops_the_oldest_and_counts():
    merge = LogMerger(max_waiting=10)
    merge.begin("a")
    merge.push("a", [entry(float(i)) for i in range(25)])
    assert merge.dropped == {"a": 15}
    assert [e.time for e in merge.pop()] == [float(i) for i in range(15, 25)]


def test_many_sources_come_out_in_order():
    draw = random.Random(0)
    merge, everything = LogMerger(), []
    for source in "abcde":
        merge.begin(source)
    for _ in range(200):
        source = draw.choice("abcde")
        new = [entry(merge.last_times.get(source, 0.0) + draw.random(), source) for _ in range(draw.randint(0, 5))]
        merge.push(source, sorted(new, key=lambda e: e.time))
        everything += merge.pop()
    for source in "abcde":
        merge.end(source)
    everything += merge.pop()
    assert [e.time for e in everything] == sorted(e.time for e in everything)
    assert len(everything) == sum(1 for _ in everything)


def folded(entries):
    fold, groups = LogFolder(), []
    for each in entries:
        groups += fold.push(each)
    groups += fold.flush()
    return [
        (format_hosts_and_ranks(group), common_text(group) if len(group) > 1 else group[0].text) for group in groups
    ]


def test_the_same_line_of_many_ranks_is_one():
    lines = [entry(1.0 + i / 100, f"gpu-{1 + i // 2:02d}", f"step 12 loss 4.0{i} lr 1e-05", rank=i) for i in range(8)]
    assert folded(lines) == [("gpu-[01-04] r0-7", "step 12 loss 4.00–4.07 lr 1e-05")]
    assert (
        len(folded([*lines, entry(1.2, "gpu-01", "step 13 loss 4 lr 1e-05")])) == 2
    )  # the same rank again: a new line
    assert len(folded([lines[0], lines[1].with_time(99.0)])) == 2  # long after


def test_errors_are_never_folded():
    lines = [entry(1.0, f"h{i}", "RuntimeError: CUDA error 700", rank=i) for i in range(3)]
    assert [where for where, _ in folded(lines)] == ["h0 r0", "h1 r1", "h2 r2"]
    assert len(folded([entry(1.0, f"h{i}", TRACE, rank=i) for i in range(3)])) == 3


def test_what_only_looks_alike_is_not_folded():
    assert len(folded([entry(1.0, "a", "item #", rank=0), entry(1.0, "b", "item 5", rank=1)])) == 2


def test_a_progress_bar_is_one_line():
    bar = b"Loading: 10%\rLoading: 20%\rLoading: 30%\n"
    blocks = BlockSplitter()
    found = [*blocks.feed(0, bar), *blocks.flush()]
    assert [clean(block.text) for block in found] == ["Loading: 30%"]


def test_merge_gives_back_memory_while_a_source_is_never_empty():
    merge = LogMerger()
    merge.begin("a")
    merge.begin("quiet")
    for i in range(5000):
        merge.push("a", [entry(float(i))])
        list(merge.pop(i - 5.0))
    assert len(merge.waiting["a"]) < 1100


def test_names_are_folded_as_they_are_written():
    assert fold_names(["n01", "n02", "n03", "n10"]) == "n[01-03,10]"
    assert fold_names(["n8", "n9", "n10", "head"]) == "head,n[8-10]"
    assert fold_names(["10.0.0.1", "10.0.0.2"]) == "10.0.0.[1-2]"
    assert fold_names(["n1", "n01"]) in ("n1,n01", "n01,n1")


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m \x1b]0;title\x07x", "red x"),
        ("\x1b]52;c;ZXZpbA==\x1b\\y\x1b[2J\x1b[H", "y"),
        (" 10%|#\r 50%|##\r100%|###\r", "100%|###"),
        ("a\x07b\x9bc\x00", "a�b�c�"),
        ("evil\u202etxt", "evil�txt"),
        ("one\n\ttwo", "one\n        two"),
        ("use hf_abcdefghijklmnopqrstuvwxyz now", "use hf_a…REDACTED now"),
        ("WANDB_API_KEY=0123456789abcdef", "WANDB_API_KEY=…REDACTED"),
        ("'HF_TOKEN': 'hf_abcdefghijklmnopqrstuvwxyz'", "'HF_TOKEN': 'hf_a…REDACTED'"),
        ("Authorization: Bearer abcdefghijk", "Authorization: Bearer …REDACTED"),
        ("2,048 tokens/s", "2,048 tokens/s"),
        ("api_key=abcdefgh12345", "api_key=…REDACTED"),
        ("password: hunter2hunter2", "password: …REDACTED"),
        ("BOS_TOKEN embedding", "BOS_TOKEN embedding"),
        ("max_tokens=4096000000", "max_tokens=4096000000"),
    ],
)
def test_nothing_a_terminal_would_obey_and_no_token(raw, shown):
    assert clean(raw) == shown


def test_a_flood_of_one_kind_folds_line_by_line():
    folding = LogFolder(60.0)
    for step in range(5000):
        for rank in range(4):
            assert list(folding.push(LogEntry(0.0, "a", "f", f"step {step}", rank=rank))) == []
    groups = list(folding.flush())
    assert [common_text(group) for group in groups] == [f"step {step}" for step in range(5000)]
    assert {len(group) for group in groups} == {4}
    assert folding.kinds == {}


def test_secrets_are_hidden_by_their_value_and_every_line_of_it():
    pieces = secret_lines(["correct horse", '-----KEY-----\nzürich "q"\n', "abc", "correct horse battery"])
    text = 'correct horse battery, correct horse; -----KEY-----\n  zürich "q" abc'
    hidden = "…REDACTED, …REDACTED; …REDACTED\n  …REDACTED abc"  # what is shorter than 6 letters could be anything
    assert hide_secrets(text, pieces) == hidden
    assert json.loads(hide_secrets_in_json(json.dumps([text, 7]), pieces)) == [hidden, 7]
    assert [secret_lines([word]) for word in ("sixsix", "five5")] == [["sixsix"], []]


def test_a_table_shows_no_control_characters():
    assert format_columns(("host", "now"), [("a", "\x1b[31mred\n")]) == "host  now\na     �[31mred�"
