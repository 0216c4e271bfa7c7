"""Parse conversations: OpenAI messages, ShareGPT turns, TRL prompts and completions.

All become messages for a chat template, with a role that templates know, text, and tool calls whose arguments are objects.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from llama405b.contract.errors import short

ROLES = {  # role in a record -> role in a chat template
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "function_call": "assistant",
    "system": "system", "developer": "system",
    "tool": "tool", "observation": "tool", "function": "tool", "ipython": "tool",
}  # fmt: skip
# Fields of tools, tool calls and JSON schemas, in the order in which servers write them.
IN_ORDER = (
    "id", "type", "function", "name", "description", "arguments", "title", "enum", "const", "default", "items", "properties",
    "required", "additionalProperties", "parameters", "strict",
)  # fmt: skip
CALLS = "function_call"  # ShareGPT's role of a turn with tool calls in JSON, and OpenAI's older field
TEXTS = ("text", "input_text", "output_text")  # types of a message part that hold text


class UnusableRecordError(ValueError):
    """A record that cannot be used as a document; the message is a clause."""


class UnknownFormError(UnusableRecordError):
    """A record without known fields."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """A conversation for the chat template: messages with roles, and the tools that it may call."""

    messages: tuple[Mapping[str, Any], ...]
    tools: Any = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # further variables of the template

    @property
    def n_chars(self) -> int:
        """Characters of content, without roles."""
        return sum(len(str(message.get("content") or "")) for message in self.messages)


def chat_of(turns: Sequence[Any], record: Mapping[str, Any], n_read: int = 0) -> Chat:
    """Parse messages or turns; the first ``n_read`` of them are not trained on.

    ``record``: the fields system, tools, functions and chat_template_kwargs.

    Raises:
        UnusableRecordError: A message, or one of these fields, cannot be given to a template.
    """
    if not turns:
        raise UnusableRecordError("it has no messages")
    messages = [_message(turn, number) for number, turn in enumerate(turns, 1)]
    for message in messages[:n_read]:
        message["weight"] = 0
    if system := record.get("system"):
        if not isinstance(system, str):
            raise UnusableRecordError(f"its 'system' is {short(str(system))}, not a text")
        first = messages[0]
        if first["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        elif first["content"] != system:
            raise UnusableRecordError("its 'system' differs from its first message; keep one of them")
    arguments = record.get("chat_template_kwargs") or {}
    if not isinstance(arguments, dict):
        raise UnusableRecordError(f"its 'chat_template_kwargs' is {short(str(arguments))}, not an object")
    return Chat(tuple(messages), _tools(record), arguments)


def list_of(value: Any) -> list[Any] | None:
    """Return a list, also from a JSON string, as tables store it; None if it is not a list."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, list) else None


def _tools(record: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools in the form that templates expect."""
    for name in ("tools", "functions"):
        if not (value := record.get(name)):
            continue
        tools = list_of(value)
        if tools is None or not all(isinstance(tool, dict) for tool in tools):
            raise UnusableRecordError(f"its {name!r} is {short(str(value))}, not a list of objects")
        if name == "functions":
            tools = [{"type": "function", "function": tool} for tool in tools]
        return [_function_in_order(tool) for tool in tools] or None
    return None


def in_order(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null, known ones first in their usual order."""
    usual = {name: fields[name] for name in IN_ORDER if fields.get(name) is not None}
    return usual | {name: value for name, value in fields.items() if value is not None}


def _function_in_order(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Sort the fields of a tool or call, so that all file formats give one text; parameters stay as is."""
    ordered = in_order(tool)
    return {
        name: in_order(value) if name == "function" and isinstance(value, dict) else value
        for name, value in ordered.items()
    }


def _message(turn: Any, number: int) -> dict[str, Any]:
    """Return a message in the form that templates expect."""
    if not isinstance(turn, dict):
        raise UnusableRecordError(f"message {number} is {short(str(turn))}, not an object with a role and content")
    named = turn.get("role", turn.get("from"))
    if not isinstance(named, str):
        raise UnusableRecordError(f"message {number} has no role")
    where = f"message {number} ({named})"
    role = ROLES.get(named.lower())
    if role is None:
        raise UnusableRecordError(f"message {number} has the role {named!r}; known roles are {', '.join(ROLES)}")
    if turn.get("weight") not in (None, 0, 1):
        raise UnusableRecordError(f"{where}: its weight is {turn['weight']!r}; only 0 and 1 are supported")
    if turn.get("train", turn.get("training")) is False:
        turn = {**turn, "weight": 0}
    content = turn.get("content", turn.get("value"))
    calls = _calls(turn, content if named.lower() == CALLS else None, where)
    if named.lower() == CALLS:
        content = ""
    message = {key: value for key, value in turn.items() if key not in ("from", "value", CALLS, "tool_calls")}
    message |= {"role": role, "content": _text(content, role, where, needed=not calls)}
    return message | ({"tool_calls": calls} if calls else {})


def _text(content: Any, role: str, where: str, *, needed: bool) -> str:
    """Return a message's content as text."""
    match content:
        case str():
            return content
        case None if not needed:
            return ""
        case None:
            raise UnusableRecordError(f"{where}: no content and no tool_calls")
        case [_, *_] if all(isinstance(part, dict) and "type" in part for part in content) or role != "tool":
            if other := next((part for part in content if not _is_text(part)), None):
                kind = other.get("type") if isinstance(other, dict) else type(other).__name__
                raise UnusableRecordError(f"{where}: a part of type {kind!r}, but only text can be trained on")
            return "".join(part["text"] for part in content)
    if role == "tool":  # the result of a tool
        return json.dumps(content, ensure_ascii=False)
    raise UnusableRecordError(f"{where}: its content is {short(str(content))}, not text")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") in TEXTS


def _calls(turn: Mapping[str, Any], written: Any, where: str) -> list[dict[str, Any]]:
    """Return the tool calls of a message; ``written``: its content, if that holds the calls."""
    found = turn.get("tool_calls")
    if written is not None:
        found = _parsed(written, f"{where}: its call")
        found = [{"type": "function", "function": call} for call in (found if isinstance(found, list) else [found])]
    elif found is None and turn.get(CALLS) is not None:
        found = [{"type": "function", "function": turn[CALLS]}]
    if found is None:
        return []
    calls = list_of(found)
    if calls is None:
        raise UnusableRecordError(f"{where}: its tool_calls are {short(str(found))}, not a list")
    return [_call(call, f"{where}: tool call {number}") for number, call in enumerate(calls, 1)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableRecordError(f"{where} is {short(str(call))}, not an object with a name and arguments")
    arguments = function.get("arguments", {})  # a table has no empty object
    if isinstance(arguments, str):
        arguments = _parsed(arguments or "{}", f"{where}: its arguments")
    if not isinstance(arguments, dict):
        raise UnusableRecordError(f"{where}: its arguments are {short(json.dumps(arguments))}, not an object")
    function = {**function, "arguments": arguments}
    return _function_in_order({**call, "function": function} if "function" in call else function)


def _parsed(text: Any, what: str) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        raise UnusableRecordError(f"{what} {short(text)!r} cannot be read as JSON") from None
