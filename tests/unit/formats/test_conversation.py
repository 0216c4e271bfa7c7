"""Records as people have them: what each says is in the conversation, or one clause says why it cannot be."""

import json

import pytest

from llama405b.formats.conversation import Chat, UnusableRecordError
from llama405b.formats.document import ALPACA, Text, parse_document, parse_record

USER, YES = {"role": "user", "content": "A?"}, {"role": "assistant", "content": "B"}
TOOL = {"name": "f", "parameters": {"type": "object"}}
OBJECT = {"city": "Oslo", "n": None}


def turn(role, value, **more):
    return {"from": role, "value": value} | more


def calls(*arguments, **more):
    return [{"function": {"name": "f", "arguments": each}} | more for each in arguments]


def said(record, names=()):
    """Its messages without what is usual, and the tools."""
    chat = parse_document(record, names)
    return [(m["role"], m["content"], m.get("tool_calls"), m.get("weight")) for m in chat.messages], chat.tools


def plain(*pairs):
    return [(role, content, None, None) for role, content in pairs]


ASKED = plain(("user", "A?"), ("assistant", "B"))
CALLED = ("assistant", "", calls(OBJECT), None)
FLAT = ("assistant", "", [{"type": "function", "function": {"name": "f", "arguments": OBJECT}}], None)


@pytest.mark.parametrize(
    ("record", "messages", "tools"),
    [
        (
            {"conversations": [turn("human", "A?"), turn("gpt", "B")], "system": "You add.", "tools": "[]"},
            plain(("system", "You add.")) + ASKED,
            None,
        ),
        (
            {"conversations": [turn("system", "S"), turn("human", "A?"), turn("gpt", "B")], "system": "S"},
            plain(("system", "S")) + ASKED,
            None,
        ),
        (
            {"conversations": [turn("human", "A?"), turn("gpt", "B", weight=0)]},
            [*ASKED[:1], ("assistant", "B", None, 0)],
            None,
        ),
        (
            {
                "conversations": [turn(a, "A?") for a in ("human", "user", "User")]
                + [turn(b, "B") for b in ("gpt", "chatgpt", "bing", "bard", "model", "Assistant")]
            },
            plain(*[("user", "A?")] * 3, *[("assistant", "B")] * 6),
            None,
        ),
        (
            {
                "conversations": [
                    turn("human", "A?"),
                    turn("function_call", json.dumps({"name": "f", "arguments": OBJECT})),
                    turn("observation", "3"),
                    turn("gpt", "B"),
                ],
                "tools": json.dumps([TOOL]),
            },
            [*ASKED[:1], FLAT, ("tool", "3", None, None), *ASKED[1:]],
            [TOOL],
        ),
        (
            {"conversation": [{"role": "human", "content": "A?"}, {"role": "gpt", "content": "B"}], "system": None},
            ASKED,
            None,
        ),
        ({"messages": [{"role": "developer", "content": "S"}, USER, YES]}, plain(("system", "S")) + ASKED, None),
        ({"messages": json.dumps([USER, YES]), "tools": None}, ASKED, None),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": calls(json.dumps(OBJECT))}]},
            [*ASKED[:1], CALLED],
            None,
        ),
        ({"messages": [USER, {"role": "assistant", "tool_calls": calls(OBJECT)}]}, [*ASKED[:1], CALLED], None),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": calls("")}]},
            [*ASKED[:1], ("assistant", "", calls({}), None)],
            None,
        ),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": None,
                        "function_call": {"name": "f", "arguments": json.dumps(OBJECT)},
                    },
                    {"role": "function", "name": "f", "content": "3"},
                ],
                "functions": [TOOL],
            },
            [*ASKED[:1], FLAT, ("tool", "3", None, None)],
            [{"type": "function", "function": TOOL}],
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "tool", "content": {"é": [1]}},
                    {"role": "tool", "content": [1, 2]},
                    {"role": "tool", "content": [{"type": "text", "text": "x"}]},
                ]
            },
            [*ASKED[:1], ("tool", '{"é": [1]}', None, None), ("tool", "[1, 2]", None, None), ("tool", "x", None, None)],
            None,
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "input_text", "text": "?"}]},
                    YES,
                ]
            },
            ASKED,
            None,
        ),
        ({"prompt": [USER], "completion": [YES]}, ASKED, None),
        ({"prompt": [USER, YES, USER], "completion": [YES]}, [*ASKED[:1], ("assistant", "B", None, 0), *ASKED], None),
    ],
)
def test_what_a_conversation_says_is_in_it(record, messages, tools):
    found, its_tools = said(record)
    read = [(role, content, its, weight if role == "assistant" else None) for role, content, its, weight in found]
    assert (read, its_tools) == (messages, tools)


def test_a_conversation_of_another_name_has_its_system_and_tools():
    record = {"dialog": [turn("human", "A?"), turn("gpt", "B")], "system": "S", "tools": [TOOL], "id": 7}
    assert said(record, ("messages=dialog",)) == (plain(("system", "S")) + ASKED, [TOOL])
    assert parse_record(record, ("messages=dialog",)).unread == ("id",)


def test_what_else_a_message_has_reaches_the_template():
    message = {"role": "assistant", "content": "B", "reasoning_content": "r", "name": "n"}
    assert parse_document({"messages": [USER, message]}) == Chat((USER, message))


@pytest.mark.parametrize(
    ("record", "document"),
    [
        ({"Question": "q", "Answer": "a"}, Text("q\n\n", "a")),
        (
            {"instruction": "Do.", "context": "C", "response": "r", "category": "x"},
            Text(ALPACA[1].format("Do.", "C"), "r"),
        ),
        ({"instruction": "Do.", "context": "", "response": "r"}, Text(ALPACA[0].format("Do."), "r")),
        ({"system_prompt": "S", "question": "q", "response": "r", "id": "1"}, Text("S\n\nq\n\n", "r")),
        ({"system_prompt": "", "question": "q", "response": "r"}, Text("q\n\n", "r")),
        ({"system": "S", "prompt": "p", "completion": "c"}, Text("S\n\np", "c")),
        (
            {"instruction": "Do.", "input": "", "output": "o", "system": "S", "history": [["q", "a"]]},
            Text("S\n\n### Instruction:\nq\n\n### Response:\na\n\n### Instruction:\nDo.\n\n### Response:\n", "o"),
        ),
        (
            {"instruction": "Do.", "input": "I", "output": "o", "history": '[["q", "a"]]'},
            Text(
                ALPACA[1].partition("\n\n")[0]
                + "\n\n### Instruction:\nq\n\n### Response:\na\n\n### Instruction:\nDo.\n\n### Input:\nI\n\n### Response:\n",
                "o",
            ),
        ),
        ({"TEXT": "t"}, Text("", "t")),
    ],
)
def test_columns_of_questions_and_instructions(record, document):
    assert parse_document(record) == document


@pytest.mark.parametrize(
    ("record", "unread"),
    [
        ({"messages": [USER, YES], "topic": "x", "source": None, "tools": None}, ("topic", "source")),
        ({"instruction": "Do.", "context": "", "response": "r", "category": "x"}, ("category",)),
        ({"Text": "t", "meta": {}, "": 1}, ("meta",)),
        ({"text": "t"}, ()),
        ({"messages": [USER, YES], "prompt": "A?", "parallel_tool_calls": False}, ("prompt",)),
    ],
)
def test_fields_that_are_not_read_are_known(record, unread):
    assert parse_record(record).unread == unread


def of(*messages, **more):
    return {"messages": [*messages]} | more


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (of(), "it has no messages"),
        (
            of(USER, {"role": "critic", "content": "x"}),
            "message 2 has the role 'critic'; known roles are user, human, assistant, gpt, chatgpt, bing, ",
        ),
        (of({"role": 1, "content": "a"}), "message 1 has no role"),
        (of("hi"), "message 1 is hi, not an object with a role and content"),
        (of(USER, {"role": "assistant"}), "message 2 (assistant): no content and no tool_calls"),
        ({"conversations": [{"from": "human"}]}, "message 1 (human): no content and no tool_calls"),
        (of({"role": "user", "content": 3}), "message 1 (user): its content is 3, not text"),
        (
            of({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image", "text": "a cat"}]}),
            "message 1 (user): a part of type 'image', but only text can be trained on",
        ),
        (
            of({"role": "tool", "content": [{"type": "image_url"}]}),
            "message 1 (tool): a part of type 'image_url', but only text",
        ),
        (of(USER, YES | {"weight": 0.5}), "message 2 (assistant): its weight is 0.5; only 0 and 1 are supported"),
        (
            of(USER, {"role": "assistant", "tool_calls": calls("{city")}),
            "message 2 (assistant): tool call 1: its arguments '{city' cannot be read as JSON",
        ),
        (
            of(USER, {"role": "assistant", "tool_calls": calls({}, "[1]")}),
            "message 2 (assistant): tool call 2: its arguments are [1], not an object",
        ),
        (
            of(USER, {"role": "assistant", "tool_calls": calls(None)}),
            "message 2 (assistant): tool call 1: its arguments are null, not an object",
        ),
        (
            of(USER, {"role": "assistant", "tool_calls": calls("3")}),
            "message 2 (assistant): tool call 1: its arguments are 3, not an object",
        ),
        (
            of(USER, {"role": "assistant", "tool_calls": ["f"]}),
            "message 2 (assistant): tool call 1 is f, not an object with a name and arguments",
        ),
        (
            of(USER, {"role": "assistant", "tool_calls": {"name": "f"}}),
            "message 2 (assistant): its tool_calls are {'name': 'f'}, not a list",
        ),
        (
            {"conversations": [turn("human", "A?"), turn("function_call", "f(1)")]},
            "message 2 (function_call): its call 'f(1)' cannot be read as JSON",
        ),
        (of(USER, YES, tools="f"), "its 'tools' is f, not a list of objects"),
        (of(USER, YES, functions=["f"]), "its 'functions' is ['f'], not a list of objects"),
        (of(USER, YES, system=3), "its 'system' is 3, not a text"),
        (
            of({"role": "system", "content": "S"}, USER, YES, system="T"),
            "its 'system' differs from its first message; keep one of them",
        ),
        (
            {"prompt": "p", "chosen": "c", "rejected": "r"},
            "it has 'chosen' and 'rejected', but preference pairs are not supported; keep one answer",
        ),
        (of(USER, YES, images=["a.png"]), "it has 'images', but only text can be trained on"),
        ({"instruction": "Do.", "output": "o", "history": [["q"]]}, "its history is not a list of pairs of texts"),
        ({"instruction": "Do.", "input": 3, "output": "o"}, "its input is 3, not text"),
        ({"prompt": "a"}, "but its fields are 'prompt'"),
        ({"messages": "a"}, "but its fields are 'messages'"),
        ([], "but it is not a JSON object"),
        (None, "but it is not a JSON object"),
    ],
)
def test_what_cannot_be_trained_on_is_said(record, why):
    assert parse_document(record) is None
    with pytest.raises(UnusableRecordError) as refused:
        parse_record(record)
    assert why in str(refused.value)
