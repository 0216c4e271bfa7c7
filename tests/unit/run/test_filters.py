"""Filters of logs that nothing can match are refused with what there is, and a flood is told."""

import contextlib
import dataclasses
import io
import itertools
import re
import types

import pytest
from fakes import running_fleet
from run_rig import plan

from llama405b.contract.errors import UserError
from llama405b.contract.paths import RunDir
from llama405b_tools.agent import streaming
from llama405b_tools.agent.streaming import HostLogs
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.run import log_reader
from llama405b_tools.text.words import BAR_MARK, UNENDED_MARK, LogEntry
from llama405b_tools.verbs import logs


@pytest.fixture
def fleet(monkeypatch, tmp_path):
    """A run of three attempts, with ranks 0 and 1 on a and ranks 2 and 3 on b; c is in the hosts file alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a\nb\nc\n")
    with running_fleet(("a", "b", "c"), plan("-m", "mine", attempt=3, created=1.0)) as found:
        found.fakes["c"].plan = None
        for rank, name in ((0, "a"), (2, "b")):
            host = found.fakes[name]
            run = dataclasses.replace(host.run(), first_rank=rank, world=4)
            monkeypatch.setattr(host, "run", lambda run=run: run)
        monkeypatch.setattr(logs, "Fleet", lambda hosts: contextlib.nullcontext(found))
        yield found


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--attempt", "99"], "--attempt: run r has attempts 1 to 3, not 99"),
        (["--attempt", "4", "--first-error"], "--attempt: run r has attempts 1 to 3, not 4"),
        (["--attempt", "4", "-f"], "--attempt: run r has attempts 1 to 3, not 4"),
        (["--host", "c"], "--host: c has no part of run r; use one of a, b"),
        (["--host", "b", "--rank", "0-1"], "--rank: b has only ranks 2-3 of run r; correct --host or --rank"),
        (["--host", "b", "--rank", "3", "--attempt", "4"], "--attempt: run r has attempts 1 to 3, not 4"),
    ],
)
def test_a_filter_that_nothing_can_match_is_refused_with_what_there_is(fleet, flags, said):
    with pytest.raises(UserError) as refused:
        logs.main(["--run", "r", *flags])
    assert (str(refused.value), refused.value.exit_code) == (said, 2)


def test_only_a_filter_that_nothing_can_match_is_refused(fleet):
    for flags in ([], ["--attempt", "3"], ["--attempt", "all"], ["--host", "b", "--rank", "1,2"]):
        assert logs.main(["--run", "r", *flags]) == 0
    fleet.fakes["a"].faults["status"] = HostError("gone")
    assert logs.main(["--run", "r", "--host", "b", "--rank", "0"]) == 1  # whose it is, is not known now
    with pytest.raises(UserError):
        logs.main(["--run", "r", "--attempt", "4"])


def _request(*flags):
    args = logs._parser().parse([*flags])
    return log_reader.LogPrinter(args).request("r", follow=args.follow, forever=False)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["-f"], ["-f", "--tail", "100"]])
def test_what_waits_for_a_follower_is_bounded_and_counted(tmp_path, monkeypatch, flags):
    monkeypatch.setattr(streaming, "read_plan", lambda _: types.SimpleNamespace(attempt=1))
    run = RunDir(tmp_path)
    log = run.logs("a") / "r-1-12345678_x/attempt_0/0/stdout.log"
    log.parent.mkdir(parents=True)
    numbers = itertools.count()

    def write(lines):
        with log.open("a") as file:
            file.writelines(f"line {next(numbers):90}\n" for _ in range(lines))

    write(30_000)  # 3 MB before anybody follows
    reader = HostLogs(run, "a", dataclasses.replace(_request(*flags), host="a"))
    before = [text for news in reader.poll(final=False) for _, _, text in news.entries]
    while more := [text for news in reader.poll(final=False) for _, _, text in news.entries]:
        before += more
    history = 100 if "--tail" in flags else 30_000
    assert len(before) >= history - 1  # the last one may continue
    write(100_000)  # 10 MB while this terminal shows those
    news = list(reader.poll(final=True))
    after, skipped = [text for each in news for _, _, text in each.entries], sum(each.skipped for each in news)
    assert sum(map(len, after)) < 2 << 20
    assert after[-1].split() == ["line", "129999"]
    assert len(before) + len(after) + skipped == history + 100_000


def test_how_much_was_left_out_is_said_now_and_then_and_at_the_end(capsys):
    show = log_reader.LogPrinter(logs._parser().parse(["-f"]))
    for count in range(1, 2000):
        show.dropped({"a": count})
    show.close()
    said = capsys.readouterr().err.splitlines()
    words = "left out: they come faster than they can be shown here; `logs` without -f shows them all"
    assert said == [f"- a: 1 line {words}", f"- a: 1998 lines {words}"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_in_its_place_on_a_terminal_and_once_a_minute_elsewhere(monkeypatch, tmp_path, terminal):
    out = io.StringIO()
    out.isatty = lambda: terminal
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    show = log_reader.LogPrinter(logs._parser().parse(["--save", str(tmp_path)]))
    said = [
        (0.0, "Loading 1%", BAR_MARK),
        (2.0, "Loading 2%", BAR_MARK),
        (4.0, "WARNING: x", ""),
        (59.0, "Loading 8%", BAR_MARK),
        (61.0, "Loading 9%", BAR_MARK),
    ]
    said += [(62.0, "Loading 100%", ""), (63.0, "Go on? ", UNENDED_MARK), (70.0, "Go on? y", "")]
    show.entries(
        LogEntry(1000.0 + moment, "a", "x/0/stdout.log", text, rank=0, stream="out", mark=how)
        for moment, text, how in said
    )
    show.close()
    shown = [line.rpartition(" │ ")[2] for line in re.split(r"\n|\r\x1b\[K", out.getvalue())]
    whole = ["Loading 1%", "Loading 2%", "WARNING: x", "Loading 8%", "Loading 9%", "Loading 100%"]
    expected = whole if terminal else [line for line in whole if line not in ("Loading 2%", "Loading 8%")]
    assert shown == [*expected, f"Go on? {log_reader.NOT_ENDED}", "Go on? y", ""]
    assert (tmp_path / "a/rank-0.out.log").read_text() == "WARNING: x\nLoading 100%\nGo on? y\n"
