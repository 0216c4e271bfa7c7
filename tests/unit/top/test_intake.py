"""What waits for the screen is bounded per host, and whoever sends most delays nobody else."""

import dataclasses
import threading

from llama405b_tools.text.words import LogEntry
from llama405b_tools.top import event_sources
from llama405b_tools.top.event_sources import EventQueue, SourceEvent
from llama405b_tools.top.session import MAX_LINES, MIN_HOST_LINES, LogPane


def block(host, moment, text="x"):
    return LogEntry(float(moment), host, "a/0/out.log", text)


def test_of_a_flood_the_newest_lines_are_kept_and_the_others_counted():
    box = EventQueue()
    for i in range(event_sources.MAX_WAITING_BLOCKS + 70):
        box.put_block(block("loud", i))
    box.put_block(block("quiet", 10_000))
    *blocks, dropped = box.take(0)
    assert [event.entries[0][0] for event in blocks] == [*range(70, event_sources.MAX_WAITING_BLOCKS + 70), 10_000]
    assert (dropped.host, dropped.dropped) == ("loud", 70)
    assert box.take(0) == []


def test_what_is_taken_at_once_is_bounded_however_many_hosts_talk():
    box = EventQueue()
    for host in range(5):
        for i in range(event_sources.MAX_WAITING_BLOCKS):
            box.put_block(block(f"h{host}", i))
    taken = box.take(0)
    assert len(taken) == event_sources.MAX_BLOCKS_TAKEN
    assert {event.host for event in taken} == {f"h{host}" for host in range(5)}


def test_a_host_that_sends_too_much_waits_and_the_others_do_not():
    box = EventQueue()

    def send():
        for i in range(3 * event_sources.MAX_WAITING_NEWS):
            box.put(SourceEvent(float(i), "loud", frame=i))

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    seen = []
    while len(seen) < 3 * event_sources.MAX_WAITING_NEWS:
        box.put(SourceEvent(0.0, "quiet", frame="q"))  # never waits
        taken = box.take(10)
        assert sum(event.host == "loud" for event in taken) <= event_sources.MAX_WAITING_NEWS
        seen += [event.frame for event in taken if event.host == "loud"]
    assert seen == [*range(3 * event_sources.MAX_WAITING_NEWS)]
    sender.join(10)
    assert not sender.is_alive()


def test_nobody_waits_for_a_closed_one():
    box = EventQueue()
    sender = threading.Thread(
        target=lambda: [box.put(SourceEvent(0.0, "a", note="n")) for _ in range(2 * event_sources.MAX_WAITING_NEWS)],
        daemon=True,
    )
    sender.start()
    box.close()
    sender.join(10)
    assert not sender.is_alive()


def test_the_pane_says_how_many_lines_are_missing_and_keeps_some_of_every_host():
    pane = LogPane()
    pane.command = "llama405b logs my-hosts"
    pane.take("quiet", [(float(i), "f", f"calm {'x' * i}") for i in range(MIN_HOST_LINES)], 0)
    pane.add_complete(100.0)
    pane.take("loud", [(200.0, "f", "y" * (i % 90)) for i in range(2 * MAX_LINES)], 0)
    pane.drop("loud", 1_234_567, 200.0)
    last = pane.shown_lines()[-1]
    assert (last.where, last.hosts) == ("loud", {"loud"})
    assert last.text.startswith("1,234,567 lines came too fast to be shown; `llama405b logs my-hosts`")
    pane.add_complete(300.0)
    assert len(pane.lines) == MAX_LINES + MIN_HOST_LINES
    assert sum("quiet" in line.hosts for line in pane.lines) == MIN_HOST_LINES
    assert dataclasses.replace(pane.shown_lines()[-1], number=last.number) == last  # where they are missing
    pane.take("loud", [(400.0, "f", "z")], 0)
    pane.add_complete(500.0)
    assert pane.shown_lines()[-1].text == "z"
