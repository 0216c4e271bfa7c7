"""Whether plan, launch and torch's allocator agree on what fits: six of the settings of scripts/verdicts.py, in steps of true shapes."""

import pytest
from verdicts import ask, seeded

from reserved import L1, L8

SETTINGS = [setting for setting in seeded(60) if setting.model in (L1, L8)][:6]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_plan_launch_and_the_allocator_say_the_same(setting):
    _, answers = ask(setting)
    assert len(answers) >= 8
    assert [each for each in answers if not each.agree] == []
