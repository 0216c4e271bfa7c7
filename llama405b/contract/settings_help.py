"""The settings as ``llama405b train --help`` shows them: the usual ones first, then section by section."""

import json
import textwrap
import typing
from typing import Any, Literal

from llama405b.contract.config import preset_names
from llama405b.contract.schema import Config, fields

HELP_WIDTH = 80
USUAL = (
    "model.path", "data.paths", "data.seq_len", "training.global_batch_size", "training.max_steps", "optimizer.lr",
    "parallel.offload", "checkpoint.dir",
)  # fmt: skip
INDENT = " " * 6
VALUES = {int: "N", float: "X", bool: "true|false", str: "TEXT"}


def settings_help() -> str:
    """Return every setting with its values, meaning and default; the usual ones first."""
    all_fields = {key: _entry(key, type_, default, text) for key, type_, default, text in fields()}
    lines = [_filled(f"presets: {', '.join(preset_names())}", ""), "", "the usual settings:"]
    lines += [all_fields.pop(key) for key in USUAL]
    for section, cls in typing.get_type_hints(Config).items():
        first_sentence = (cls.__doc__ or "").partition("\n")[0]
        lines += ["", f"[{section}] {first_sentence}"]
        lines += [entry for key, entry in all_fields.items() if key.startswith(f"{section}.")]
    lines += ["", "In a TOML file, --optimizer.lr 2e-5 is: [optimizer] and below it lr = 2e-5"]
    return "\n".join(lines)


def _entry(key: str, type_: Any, default: Any, text: str) -> str:
    shown = "" if default in ("", ()) else f" [{written_default(default)}]"
    head = f"  --{key} {value_form(type_)}"
    if len(head) > HELP_WIDTH:
        head, text = f"  --{key} NAME", f"{', '.join(typing.get_args(type_))}; {text}"
    return f"{head}\n{_filled(text + shown, INDENT)}"


def value_form(type_: Any) -> str:
    """Return how a value is written: ``N``, ``none|all``, ``A,B,…``."""
    if typing.get_origin(type_) is Literal:
        return "|".join(typing.get_args(type_))
    if typing.get_origin(type_) is tuple:
        each, *others = typing.get_args(type_)
        return ",".join([VALUES[each]] * (1 + len(others))).replace("TEXT,TEXT", "A,B,…").replace("X,X", "X,Y")
    return VALUES[type_]


def written_default(default: Any) -> str:
    """Return a default as it is written on a command line."""
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return default if isinstance(default, str) else json.dumps(default)


def _filled(text: str, indent: str) -> str:
    return textwrap.fill(text, HELP_WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
