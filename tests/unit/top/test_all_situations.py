"""What cluster-top says of each situation, and how soon; scripts/situations.py prints the table of it."""

import re

import pytest
from situations import BEGIN_S, SITUATIONS, play, said


@pytest.mark.slow
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name)
def test_a_situation_is_told_right_and_in_time(situation):
    pictures = play(situation)
    assert {str(pic.verdict) for t, pic in pictures if BEGIN_S - 40 < t + BEGIN_S < BEGIN_S} == {"HEALTHY"}
    times = said(situation, pictures)
    shown = [(round(t), str(pic.verdict), pic.why) for t, pic in pictures if t >= 0]
    for (verdict, pattern, within_s), found_s in zip(situation.says, times, strict=True):
        assert found_s is not None, (verdict, pattern, shown)
        assert found_s <= within_s + 1, (verdict, shown)
    if situation.says[0][1].startswith("^"):  # a cause, which no symptom of it may hide
        reasons = [pic.why for t, pic in pictures if t >= times[0] and pic.verdict == situation.says[0][0]]
        assert [why for why in reasons if not re.search(situation.says[0][1], why)] == []
    assert situation.check(pictures[-1][1]), pictures[-1][1]
    if not {"HUNG", "FAILED"} & {
        verdict for verdict, _, _ in situation.says
    }:  # what is only slow is not told worse than it is
        assert max(pic.exit_code for _, pic in pictures) < 3
    blamed = {row.name for _, pic in pictures for row in pic.hosts if row.is_culprit}
    assert blamed <= {situation.culprit} or not situation.culprit
