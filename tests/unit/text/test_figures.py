"""Numbers and durations as people read them."""

import pytest

from llama405b_tools.text.figures import format_duration


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.84, "0.8s"), (12, "12s"), (119, "119s"), (180, "3m"), (5 * 3600 + 2 * 60, "5h02m"), (31 * 3600, "1d7h")],
)
def test_a_duration_has_two_parts_at_most(seconds, words):
    assert format_duration(seconds) == words
