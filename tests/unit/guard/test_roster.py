"""Which hosts a guarded run uses while some are lost, and when it takes them back."""

from llama405b_tools.guard.guard import Roster
from llama405b_tools.hosts.inventory import Host

HOSTS = [Host(name, f"hosts:{number}") for number, name in enumerate("abcd", 1)]


def names(roster, now):
    return "".join(host.name for host in roster.choose_hosts(now))


def test_it_waits_for_all_unless_it_may_shrink():
    roster = Roster(HOSTS, 0, 60.0)
    roster.note_lost({"d"}, 0.0)
    assert names(roster, 1e9) == "abcd"


def test_a_host_that_stays_lost_is_left_out_while_enough_are_left():
    roster = Roster(HOSTS, 3, 60.0)
    roster.note_lost({"d"}, 0.0)
    assert names(roster, 59.0) == "abcd"
    roster.note_lost({"d"}, 60.0)
    assert names(roster, 60.0) == "abc"
    roster.note_lost({"c", "d"}, 60.0)
    assert names(roster, 200.0) == "abcd", "two are too few: it waits"


def test_a_host_that_comes_and_goes_is_not_lost():
    roster = Roster(HOSTS, 1, 60.0)
    for now, lost in ((0.0, {"d"}), (40.0, set()), (50.0, {"d"}), (100.0, {"d"})):
        roster.note_lost(lost, now)
        assert names(roster, now) == "abcd"


def shrunk():
    roster = Roster(HOSTS, 2, 60.0)
    roster.note_lost({"d"}, 0.0)
    roster.note_started(roster.choose_hosts(60.0))
    return roster


def test_it_grows_once_a_host_has_been_back_for_long_enough():
    roster = shrunk()
    assert roster.excluded == {"d"}
    roster.note_lost(set(), 100.0)  # the attempt failed for another reason
    assert names(roster, 100.0) == "abc", "nobody has seen it again"
    for now, found in ((110.0, {"d"}), (150.0, set()), (160.0, {"d"}), (219.0, {"d"})):
        roster.note_back(found, now)
        assert not roster.can_grow(now)
    roster.note_back({"d"}, 220.0)
    assert roster.can_grow(220.0)
    assert names(roster, 220.0) == "abcd"
    roster.note_started(roster.choose_hosts(220.0))
    assert (roster.excluded, roster.can_grow(500.0)) == (frozenset(), False)


def test_a_host_that_is_back_and_not_fit_does_not_hold_up_the_others():
    roster = shrunk()
    roster.note_back({"d"}, 100.0)
    roster.note_back({"d"}, 160.0)
    roster.note_not_started(roster.choose_hosts(160.0))
    assert names(roster, 161.0) == "abc"
