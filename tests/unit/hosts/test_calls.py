"""A call as a line of JSON, and what is refused of one."""

import json

import pytest

from llama405b.contract.reader import MalformedError
from llama405b.contract.records import Cause, CauseKind, FailureRecord, RequestKind
from llama405b_tools.agent import describe, starting
from llama405b_tools.agent.messages import Orphan
from llama405b_tools.hosts import calls
from llama405b_tools.hosts.transport import read_message

BLAME = FailureRecord(3, "b", Cause(CauseKind.RANK_EXIT, "b", 1))


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "sent"),
    [
        (starting.stop, ("r", "a"), {}, {"run": "r", "host": "a"}),
        (starting.stop, ("r", "a"), {"by": "", "hard": True}, {"run": "r", "host": "a", "hard": True}),
        (starting.stop, ("r",), {"host": "a", "blame": BLAME, "grace_s": 2.5}, None),
        (describe.ask, ("r", RequestKind.SAVE, "me@here", 2), {}, None),
        (starting.orphans, (), {"end": True}, {"end": True}),
    ],
)
def test_arguments_arrive_as_they_were_given(function, args, kwargs, sent):
    line = calls.encode_arguments(function, *args, **kwargs)
    assert sent is None or json.loads(line) == sent
    expected = [*args, *kwargs.values()]
    arrived = calls.decode_arguments(function, line)
    assert all(value in arrived.values() for value in expected)
    assert calls.encode_arguments(function, **arrived) == line


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"run": "r", "hst": "a"}', r"stop\.hst: there is no such argument"),
        ('{"run": "r"}', "stop: object missing required field `host`"),
        ('{"run": "r", "host": 7}', r"stop\.host: expected `str`, got `int`"),
        ('{"run": "r", "host": "a", "blame": {"attempt": "x"}}', r"stop\.blame\.attempt: expected `int`, got `str`"),
        ("[]", "stop: expected `object`, got `array`"),
        ("", "stop is not JSON"),
    ],
)
def test_a_malformed_call_is_refused_with_the_place(line, why):
    with pytest.raises(MalformedError, match=f"^{why}"):
        calls.decode_arguments(starting.stop, line)


def test_a_call_with_an_argument_that_the_function_lacks_is_never_sent():
    with pytest.raises(TypeError, match="hst"):
        calls.encode_arguments(starting.stop, "r", "a", hst="b")


@pytest.mark.parametrize(
    ("function", "result"),
    [(starting.orphans, (Orphan("/runs/r:a", (1, 2), "python", ()),)), (describe.ask, "id"), (describe.ask, "")],
)
def test_a_result_arrives_as_it_was_returned(function, result):
    assert read_message(calls.reply_type(function), calls.encode_result(result)).result == result


def test_control_characters_of_a_result_are_removed():
    assert read_message(calls.reply_type(describe.ask), calls.encode_result("a\x1b[2Jb")).result == "ab"
