"""Which checkpoint is brought together, and from where."""

import pytest

from llama405b.contract.errors import UserError
from llama405b_tools.agent.messages import CheckpointPart, PartsReply
from llama405b_tools.deliver.push import choose_step

NEEDED = ("a", "b", "manifest.json")


def _pieces(*found):
    """``found``: (step, files here) or (step, files here, digest)."""
    return PartsReply(
        "/c",
        tuple(
            CheckpointPart(step, *(more or ("d",)), f"/c/{step}", tuple(here), NEEDED) for step, here, *more in found
        ),
    )


M = "manifest.json"


@pytest.mark.parametrize(
    ("one", "two", "chosen"),
    [
        ([(4, ["a", M])], [(4, ["b", M])], (4, {"a": "one", "b": "two", M: "one"})),
        ([(4, ["a", "b", M]), (8, ["a", M])], [(4, ["b", M])], (4, {"a": "one", "b": "one", M: "one"})),
        ([(4, ["a", M]), (4, ["b", M])], [], (4, {"a": "one", "b": "one", M: "one"})),  # a copy
        (
            [(8, ["a", M], "x"), (4, ["a", M])],
            [(8, ["b", M], "y"), (4, ["b", M])],
            (4, {"a": "one", "b": "two", M: "one"}),
        ),
    ],
)
def test_the_newest_step_of_which_everything_is_somewhere(one, two, chosen):
    step, places, note = choose_step({"one": _pieces(*one), "two": _pieces(*two)}, "r", None)
    assert (step, {name: host for name, (host, _) in places.items()}) == chosen
    newest = max(step for step, *_ in (*one, *two))
    assert bool(note) == (step < newest)
    assert not note or (note.startswith(f"r: step {newest} lacks ") and note.endswith(f" taking step {step}"))


def test_a_step_that_was_saved_twice_is_not_chosen_by_chance():
    found = {"one": _pieces((4, NEEDED, "x")), "two": _pieces((4, NEEDED, "y")), "three": _pieces((4, ["a"], "x"))}
    with pytest.raises(UserError, match=r"r: step 4 was saved twice, and two and one have different saves; omit"):
        choose_step(found, "r", None)
    assert choose_step({name: found[name] for name in ("one", "three")}, "r", None)[0] == 4


def test_what_is_missing_is_named():
    found = {"one": _pieces((4, ["a", M]), (8, ["a", "b", M]))}
    assert choose_step(found, "r", 8)[0] == 8
    with pytest.raises(UserError, match="r: step 4 lacks b on these hosts; add the host that has them"):
        choose_step(found, "r", 4)
    with pytest.raises(UserError, match="--step: these hosts have no step 5 of r; choose from 4, 8"):
        choose_step(found, "r", 5)
