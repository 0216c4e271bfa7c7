"""The settings as a JSON Schema, for editors: ``llama405b train --schema``."""

import typing
from typing import Any, Literal

from llama405b.contract.reader import Json
from llama405b.contract.schema import Config, fields

DRAFT = "https://json-schema.org/draft/2020-12/schema"
NAMES: dict[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}
GROUP: dict[str, Json] = {
    "type": "object",
    "properties": {
        "names": {"type": "string"},
        "lr_factor": {"type": "number"},
        "weight_decay": {"type": "number"},
        "frozen": {"type": "boolean"},
    },
    "required": ["names"],
    "additionalProperties": False,
}
SOURCES: dict[str, Json] = {
    "description": "data.paths and data.weights in one: [[data.sources]]",
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "weight": {"type": "number"}},
        "required": ["path", "weight"],
        "additionalProperties": False,
    },
}


def schema() -> dict[str, Json]:
    """Return a schema of the TOML file: every section, with the type, the default and the meaning of each key."""
    sections: dict[str, Any] = {}
    for name, cls in typing.get_type_hints(Config).items():
        description = (cls.__doc__ or "").partition("\n")[0]
        sections[name] = {"type": "object", "description": description, "properties": {}, "additionalProperties": False}
    for key, type_, default, text in fields():
        section, _, name = key.partition(".")
        found = _of_type(type_) | {
            "description": text,
            "default": list(default) if isinstance(default, tuple) else default,
        }
        sections[section]["properties"][name] = found
    data, optimizer, checkpoint = (sections[name]["properties"] for name in ("data", "optimizer", "checkpoint"))
    data["sources"] = SOURCES
    data["fields"] = {
        "anyOf": [_of_type(tuple[str, ...]), {"type": "object", "additionalProperties": {"type": "string"}}]
    } | {name: data["fields"][name] for name in ("description", "default")}
    optimizer["groups"]["items"] = {"anyOf": [{"type": "string"}, GROUP]}
    checkpoint["every"]["type"] = ["string", "integer"]  # of steps
    return {
        "$schema": DRAFT,
        "title": "Settings of llama405b",
        "type": "object",
        "properties": sections,
        "additionalProperties": False,
    }


def _of_type(type_: Any) -> dict[str, Any]:
    if typing.get_origin(type_) is Literal:
        return {"enum": list(typing.get_args(type_))}
    if typing.get_origin(type_) is tuple:
        each, *others = typing.get_args(type_)
        found = {"type": "array", "items": {"type": NAMES[each]}}
        n = 1 + len(others)
        return found if Ellipsis in others else found | {"minItems": n, "maxItems": n}
    return {"type": NAMES[type_]}
