"""Parse conversations: OpenAI messages, ShareGPT turns, TRL prompts and completions.

All become messages for a chat template, with a role that templates know, text, and tool calls whose arguments are objects.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from llama405b.contract.errors import shorten

ROLES = {  # role in a record -> role in a chat template
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "function_call": "assistant",
    "system": "system", "developer": "system",
    "tool": "tool", "observation": "tool", "function": "tool", "ipython": "tool",
}  # fmt: skip
# Fields of tools, tool calls and JSON schemas, in the order in which servers write them.
FIELD_ORDER = (
    "id", "type", "function", "name", "description", "arguments", "title", "enum", "const", "default", "items", "properties",
    "required", "additionalProperties", "parameters", "strict",
)  # fmt: skip
FUNCTION_CALL = "function_call"  # ShareGPT's role of a turn with tool calls in JSON, and OpenAI's older field
TEXT_TYPES = ("text", "input_text", "output_text")  # types of a message part that hold text


class UnusableRecordError(ValueError):
    """A record that cannot be used as a document; the message is a clause."""


class UnknownFormatError(UnusableRecordError):
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


def parse_chat(turns: Sequence[Any], record: Mapping[str, Any], n_untrained: int = 0) -> Chat:
    """Parse messages or turns; the first ``n_untrained`` of them are not trained on.

    ``record``: the fields system, tools, functions and chat_template_kwargs.

    Raises:
        UnusableRecordError: A message, or one of these fields, cannot be given to a template.
    """
    if not turns:
        raise UnusableRecordError("it has no messages")
    messages = [_parse_message(turn, number) for number, turn in enumerate(turns, 1)]
    for message in messages[:n_untrained]:
        message["weight"] = 0
    if system := record.get("system"):
        if not isinstance(system, str):
            raise UnusableRecordError(f"its 'system' is {shorten(str(system))}, not a text")
        first = messages[0]
        if first["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        elif first["content"] != system:
            raise UnusableRecordError("its 'system' differs from its first message; keep one of them")
    arguments = record.get("chat_template_kwargs") or {}
    if not isinstance(arguments, dict):
        raise UnusableRecordError(f"its 'chat_template_kwargs' is {shorten(str(arguments))}, not an object")
    return Chat(tuple(messages), _parse_tools(record), arguments)


def parse_list(value: Any) -> list[Any] | None:
    """Return a list, also from a JSON string, as tables store it; None if it is not a list."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, list) else None


def _parse_tools(record: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools in the form that templates expect."""
    for name in ("tools", "functions"):
        if not (value := record.get(name)):
            continue
        tools = parse_list(value)
        if tools is None or not all(isinstance(tool, dict) for tool in tools):
            raise UnusableRecordError(f"its {name!r} is {shorten(str(value))}, not a list of objects")
        if name == "functions":
            tools = [{"type": "function", "function": tool} for tool in tools]
        return [_sort_function(tool) for tool in tools] or None
    return None


def sort_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null, known ones first in their usual order."""
    usual = {name: fields[name] for name in FIELD_ORDER if fields.get(name) is not None}
    return usual | {name: value for name, value in fields.items() if value is not None}


def _sort_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Sort the fields of a tool or call, so that all file formats give one text; parameters stay as is."""
    fields = sort_fields(tool)
    return {
        name: sort_fields(value) if name == "function" and isinstance(value, dict) else value
        for name, value in fields.items()
    }


def _parse_message(turn: Any, number: int) -> dict[str, Any]:
    """Return a message in the form that templates expect."""
    if not isinstance(turn, dict):
        raise UnusableRecordError(f"message {number} is {shorten(str(turn))}, not an object with a role and content")
    role_name = turn.get("role", turn.get("from"))
    if not isinstance(role_name, str):
        raise UnusableRecordError(f"message {number} has no role")
    label = f"message {number} ({role_name})"
    role = ROLES.get(role_name.lower())
    if role is None:
        raise UnusableRecordError(f"message {number} has the role {role_name!r}; known roles are {', '.join(ROLES)}")
    if turn.get("weight") not in (None, 0, 1):
        raise UnusableRecordError(f"{label}: its weight is {turn['weight']!r}; only 0 and 1 are supported")
    if turn.get("train", turn.get("training")) is False:
        turn = {**turn, "weight": 0}
    content = turn.get("content", turn.get("value"))
    calls = _parse_calls(turn, content if role_name.lower() == FUNCTION_CALL else None, label)
    if role_name.lower() == FUNCTION_CALL:
        content = ""
    message = {key: value for key, value in turn.items() if key not in ("from", "value", FUNCTION_CALL, "tool_calls")}
    message |= {"role": role, "content": _parse_content(content, role, label, is_required=not calls)}
    return message | ({"tool_calls": calls} if calls else {})


def _parse_content(content: Any, role: str, label: str, *, is_required: bool) -> str:
    """Return a message's content as text."""
    match content:
        case str():
            return content
        case None if not is_required:
            return ""
        case None:
            raise UnusableRecordError(f"{label}: no content and no tool_calls")
        case [_, *_] if all(isinstance(part, dict) and "type" in part for part in content) or role != "tool":
            if bad_part := next((part for part in content if not _is_text(part)), None):
                kind = bad_part.get("type") if isinstance(bad_part, dict) else type(bad_part).__name__
                raise UnusableRecordError(f"{label}: a part of type {kind!r}, but only text can be trained on")
            return "".join(part["text"] for part in content)
    if role == "tool":  # the result of a tool
        return json.dumps(content, ensure_ascii=False)
    raise UnusableRecordError(f"{label}: its content is {shorten(str(content))}, not text")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") in TEXT_TYPES


def _parse_calls(turn: Mapping[str, Any], call_content: Any, label: str) -> list[dict[str, Any]]:
    """Return the tool calls of a message; ``call_content``: its content, if that holds the calls."""
    value = turn.get("tool_calls")
    if call_content is not None:
        value = _parse_json(call_content, f"{label}: its call")
        value = [{"type": "function", "function": call} for call in (value if isinstance(value, list) else [value])]
    elif value is None and turn.get(FUNCTION_CALL) is not None:
        value = [{"type": "function", "function": turn[FUNCTION_CALL]}]
    if value is None:
        return []
    calls = parse_list(value)
    if calls is None:
        raise UnusableRecordError(f"{label}: its tool_calls are {shorten(str(value))}, not a list")
    return [_parse_call(call, f"{label}: tool call {number}") for number, call in enumerate(calls, 1)]


def _parse_call(call: Any, label: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableRecordError(f"{label} is {shorten(str(call))}, not an object with a name and arguments")
    arguments = function.get("arguments", {})  # a table has no empty object
    if isinstance(arguments, str):
        arguments = _parse_json(arguments or "{}", f"{label}: its arguments")
    if not isinstance(arguments, dict):
        raise UnusableRecordError(f"{label}: its arguments are {shorten(json.dumps(arguments))}, not an object")
    function = {**function, "arguments": arguments}
    return _sort_function({**call, "function": function} if "function" in call else function)


def _parse_json(text: Any, label: str) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        raise UnusableRecordError(f"{label} {shorten(text)!r} cannot be read as JSON") from None
