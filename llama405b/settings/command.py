"""The training command line: ``llama405b train``, and the command that launch plans for every rank.

Also prints the settings as help (``--help``: the usual ones first, then section by section) and as a JSON Schema for editors
(``--schema``).

Needs no torch: launch checks the ranks' command with ``parse`` before any host starts. Nobody would see the trainer refuse a flag
inside a detached tmux session.
"""

import argparse
import dataclasses
import json
import re
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llama405b.contract.errors import UserError
from llama405b.contract.reader import Json
from llama405b.settings import config
from llama405b.settings.config import SourcedValue, preset_names
from llama405b.settings.parser import HELP_WIDTH, OneLineParser
from llama405b.settings.schema import ONE_PER_FLAG, SETTING_TYPES, Config, setting_fields

COMMON_SETTINGS = (
    "model.path", "data.paths", "data.seq_len", "training.global_batch_size", "training.max_steps", "optimizer.lr",
    "parallel.offload", "checkpoint.dir",
)  # fmt: skip
INDENT = " " * 6
VALUE_FORMS = {int: "N", float: "X", bool: "true|false", str: "TEXT"}


def settings_help() -> str:
    """Return the help text of every setting: values, meaning and default; the usual ones first."""
    all_fields = {key: _format_setting(key, type_, default, text) for key, type_, default, text in setting_fields()}
    lines = [_fill(f"presets: {', '.join(preset_names())}", ""), "", "the usual settings:"]
    lines += [all_fields.pop(key) for key in COMMON_SETTINGS]
    for section, cls in typing.get_type_hints(Config).items():
        first_sentence = (cls.__doc__ or "").partition("\n")[0]
        lines += ["", f"[{section}] {first_sentence}"]
        lines += [entry for key, entry in all_fields.items() if key.startswith(f"{section}.")]
    lines += ["", "In a TOML file, write --optimizer.lr 2e-5 as lr = 2e-5 under [optimizer]"]
    return "\n".join(lines)


def _format_setting(key: str, type_: Any, default: Any, text: str) -> str:
    default_note = "" if default in ("", ()) else f" [{format_default(default)}]"
    head = f"  --{key} {value_form(key)}"
    if len(head) > HELP_WIDTH:
        head, text = f"  --{key} NAME", f"{', '.join(typing.get_args(type_))}; {text}"
    return f"{head}\n{_fill(text + default_note, INDENT)}"


def value_form(key: str) -> str:
    """Return a setting's value placeholder: ``N``, ``none|all``, ``A,B,…``."""
    type_ = SETTING_TYPES[key]
    if key in ONE_PER_FLAG:
        return VALUE_FORMS[str]
    if typing.get_origin(type_) is Literal:
        return "|".join(typing.get_args(type_))
    if typing.get_origin(type_) is tuple:
        item_type, *more_types = typing.get_args(type_)
        return (
            ",".join([VALUE_FORMS[item_type]] * (1 + len(more_types)))
            .replace("TEXT,TEXT", "A,B,…")
            .replace("X,X", "X,Y")
        )
    return VALUE_FORMS[type_]


def format_default(default: Any) -> str:
    """Format a default value as on the command line."""
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return default if isinstance(default, str) else json.dumps(default)


def _fill(text: str, indent: str) -> str:
    return textwrap.fill(text, HELP_WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


SCHEMA_DRAFT = "https://json-schema.org/draft/2020-12/schema"
JSON_TYPES: dict[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}
GROUP_SCHEMA: dict[str, Json] = {
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
SOURCES_SCHEMA: dict[str, Json] = {
    "description": "data.paths and data.weights in one: [[data.sources]]",
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "weight": {"type": "number"}},
        "required": ["path", "weight"],
        "additionalProperties": False,
    },
}


def json_schema() -> dict[str, Json]:
    """Return the JSON Schema of the TOML file: type, default and meaning of each key of each section."""
    sections: dict[str, Any] = {}
    for name, cls in typing.get_type_hints(Config).items():
        description = (cls.__doc__ or "").partition("\n")[0]
        sections[name] = {"type": "object", "description": description, "properties": {}, "additionalProperties": False}
    for key, type_, default, text in setting_fields():
        section, _, name = key.partition(".")
        property_schema = _type_schema(type_) | {
            "description": text,
            "default": list(default) if isinstance(default, tuple) else default,
        }
        sections[section]["properties"][name] = property_schema
    data, optimizer = (sections[name]["properties"] for name in ("data", "optimizer"))
    data["sources"] = SOURCES_SCHEMA
    for name, item_schema in (("fields", {"type": "string"}), ("template_arguments", True)):
        table: Json = {"type": "object", "additionalProperties": item_schema}
        data[name] = {"anyOf": [_type_schema(tuple[str, ...]), table]} | {
            key: data[name][key] for key in ("description", "default")
        }
    optimizer["groups"]["items"] = {"anyOf": [{"type": "string"}, GROUP_SCHEMA]}
    for section in ("checkpoint", "evaluation"):
        sections[section]["properties"]["every"]["type"] = ["string", "integer"]  # of steps
    return {
        "$schema": SCHEMA_DRAFT,
        "title": "Settings of llama405b",
        "type": "object",
        "properties": sections,
        "additionalProperties": False,
    }


def _type_schema(type_: Any) -> dict[str, Any]:
    if typing.get_origin(type_) is Literal:
        choices = typing.get_args(type_)
        return {"enum": [*choices, *(value for value in (True, False) if json.dumps(value) in choices)]}
    if typing.get_origin(type_) is tuple:
        item_type, *more_types = typing.get_args(type_)
        array = {"type": "array", "items": {"type": JSON_TYPES[item_type]}}
        n = 1 + len(more_types)
        return array if Ellipsis in more_types else array | {"minItems": n, "maxItems": n}
    return {"type": JSON_TYPES[type_]}


EVALUATE_ONLY = "--evaluate-only"
TRAIN_DESCRIPTION = """\
Train a Llama: one process per rank, under torchrun. `llama405b launch` starts it on every host and takes the same settings.

  torchrun -m llama405b.train --preset llama3.2-1b --data.paths corpus
  llama405b launch hosts --config my.toml --optimizer.lr 2e-5"""


@dataclasses.dataclass(frozen=True, slots=True)
class TrainCommand:
    """A training command, parsed and checked."""

    config: Config
    preset: str
    run_dir: Path
    resume: str
    is_evaluation: bool  # without training
    blame_step: int = 0  # also without training: the step whose documents are measured; 0: none


class PrintSchema(argparse.Action):
    """Prints the JSON Schema of the settings and exits."""

    if not TYPE_CHECKING:  # as in OneLineParser

        def __init__(self, *args, **kwargs):
            super().__init__(*args, nargs=0, **kwargs)

        def __call__(self, *_):
            """See ``argparse``."""
            print(json.dumps(json_schema(), indent=2))
            raise SystemExit(0)


def add_config(add: Callable[..., object], text: str) -> None:
    """Add the repeatable option ``--config`` to a parser."""
    add("--config", type=Path, action="append", default=[], metavar="FILE", help=text)


def add_resume(add: Callable[..., object]) -> None:
    """Add ``--resume`` to a parser."""
    text = "no | auto (newest checkpoint that verifies) | STEP | PATH [no]; without a value: auto"
    add("--resume", nargs="?", default="no", const="auto", metavar="WHICH", help=text)


def add_evaluate_only(add: Callable[..., object]) -> None:
    """Add ``--evaluate-only`` to a parser."""
    text = "evaluate on the data of [evaluation] without training: the model itself, or any run's checkpoint with --resume PATH"
    add(EVALUATE_ONLY, action="store_true", help=text)


def add_blame(add: Callable[..., object]) -> None:
    """Add the hidden option ``--blame`` to a parser; `llama405b blame` starts runs with it."""
    add("--blame", type=int, default=0, metavar="STEP", help=argparse.SUPPRESS)


def check_resume(resume: str, *, is_evaluation: bool = False) -> None:
    """Refuse a value of --resume that is not no, auto, a step, or a path that ends in step-<8 digits>.

    ``is_evaluation``: the run only evaluates, so it has no checkpoints of its own.
    """
    if is_evaluation and re.fullmatch("auto|[0-9]{1,8}", resume):
        raise UserError(
            f"{EVALUATE_ONLY}: --resume is {resume!r}; name the checkpoint by its path, like --resume "
            "runs/RUN/checkpoints/step-00000100, or leave it out for the model itself"
        )
    if not re.fullmatch("no|auto|[0-9]{1,8}", resume) and not re.fullmatch("step-[0-9]{8}", Path(resume).name):
        raise UserError(
            f"--resume: {resume!r} is not a checkpoint; write no, auto, a step, or a path that ends in step-<8 digits>"
        )


def parse(argv: Sequence[str]) -> TrainCommand:
    """Parse a training command.

    Raises:
        UserError: Any part of it is invalid.
    """
    parser = OneLineParser(
        prog="llama405b train",
        usage="llama405b train [--preset NAME] [--config FILE] [--SECTION.KEY VALUE …]",
        description=TRAIN_DESCRIPTION,
        epilog=settings_help(),
    )
    parser.add_argument("--preset", default="", help="named settings to start from")
    add_config(parser.add_argument, "TOML file of settings; overrides the preset. May be repeated: later files win")
    parser.add_argument("--schema", action=PrintSchema, help="print a JSON Schema of that file, for editors")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/local"), help="where the run's files go [runs/local]"
    )
    add_resume(parser.add_argument)
    add_evaluate_only(parser.add_argument)
    add_blame(parser.add_argument)
    flags, other_args = config.split_flags(argv)
    parsed, rest = parser.parse_known_args(other_args)
    config.refuse_unknown(rest, parser.options)
    is_evaluation = parsed.evaluate_only or bool(parsed.blame)
    check_resume(parsed.resume, is_evaluation=is_evaluation)
    sources = [config.read_preset(parsed.preset), *map(config.read_toml, parsed.config), config.read_flags(flags)]
    settings = config.merge_sources(*sources)
    if parsed.evaluate_only:
        settings = evaluation_settings(settings)
    resolved = config.resolve(settings)
    return TrainCommand(resolved, parsed.preset, parsed.run_dir, parsed.resume, is_evaluation, parsed.blame)


def evaluation_settings(settings: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
    """Return the settings of an evaluation without training.

    An evaluation is always due; training data is read only if part of it is held out.
    """
    paths, fraction = (settings.get(f"evaluation.{name}", ((), ""))[0] for name in ("paths", "fraction"))
    placeholder = {"data.paths": (("none",), EVALUATE_ONLY)} if paths or not fraction else {}
    return placeholder | dict(settings) | {"evaluation.every": ("1", EVALUATE_ONLY)}
