"""What an autopsy says, word by word."""

from test_diagnose import cluster, of


def test_that_every_rank_moved_during_the_look_is_said_and_not_how_long_ago():
    steady = of(cluster(age_s=2.7, step_s=0.3, moved=True))
    assert steady.words == "making progress (phase train): every rank advanced during the sample"
    one = of(cluster({5: {"moved": False}}, age_s=2.7, step_s=0.3, moved=True))
    assert "a rank last advanced 2.7s ago" in one.words
