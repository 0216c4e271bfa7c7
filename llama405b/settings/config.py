"""Read the configuration: ``schema``'s dataclasses, filled from a preset, TOML files and flags, in that order.

Knows how settings are written and which values are compatible. Does not use torch, so the operator's tools can
check a training command before any host starts it. A flag is the TOML path: ``--optimizer.lr 3e-5``.
"""

import collections
import contextlib
import dataclasses
import json
import math
import operator
import re
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from llama405b.contract.errors import UserError, did_you_mean, last_of, reason_of, staging_bytes
from llama405b.contract.files import refuse_others_writing
from llama405b.contract.reader import Json
from llama405b.settings.axes import DP, Axes, Dealing, Recompute
from llama405b.settings.rules import EPOCHS, OF_VALUES, RENAMED, STEPS, faults_of, group_text, instead_of, suggestion
from llama405b.settings.schema import ONE_PER_FLAG, PAIRS, TYPES, Cadence, Config, Parallel, read_evaluations

MAX_INT = 2**31 - 1  # of any setting: no number of steps, bytes or seconds needs more
DEMO_MODEL = "models/demo"  # rank 0 creates it if it is missing
PRESET_DIR = Path(__file__).parent / "presets"
# Settings with a syntax of their own.
READERS: dict[str, Callable[[str], object]] = {
    "checkpoint.every": Cadence.read,
    "evaluation.every": read_evaluations,
    "checkpoint.staging": staging_bytes,
    "model.activation_checkpointing": Recompute.read,
}
NAMES = {  # for messages: singular and plural
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "switches"),
    str: ("text", "texts"),
}
SWITCHES = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}
MESH_SETTINGS = ("strategy", "dp_replicate", "tp", "cp", "pp", "pp_schedule")
Setting = tuple[Json, str]  # a value, and where it was set: "my.toml:7", "--optimizer.lr" or "preset demo"


def preset_names() -> list[str]:
    """Return the names that ``--preset`` accepts."""
    return sorted(path.stem for path in PRESET_DIR.glob("*.toml"))


def read_preset(name: str) -> dict[str, Setting]:
    """Read a preset's settings; none for ''.

    Raises:
        UserError: There is no preset of that name.
    """
    known = preset_names()
    if not name:
        return {}
    if name not in known:
        raise UserError(f"--preset: {name!r} is not a preset{did_you_mean(name, known)}; use one of {', '.join(known)}")
    return {key: (value, f"preset {name}") for key, (value, _) in read_toml(PRESET_DIR / f"{name}.toml").items()}


def read_files(paths: Sequence[Path]) -> dict[str, Setting]:
    """Read TOML files of settings; later files win."""
    return merged(*map(read_toml, paths))


def merged(*sources: Mapping[str, Setting]) -> dict[str, Setting]:
    """Merge sources of settings; later ones win.

    ``epochs`` in a later source also clears ``max_steps`` of an earlier one.
    """
    settings = dict[str, Setting]()
    for source in sources:
        settings |= source
        if EPOCHS in source and settings.get(STEPS, (0, ""))[0] and not source.get(STEPS, (0, ""))[0]:
            settings[STEPS] = 0, source[EPOCHS][1]
    return settings


def unused_length(*sources: Mapping[str, Setting]) -> list[str]:
    """Return a line for each place where both max_steps and epochs are set and one of them is ignored."""
    lines, last = list[str](), dict[str, Setting]()
    for source in sources:
        named = [key for key in (EPOCHS, STEPS) if source.get(key, (0, ""))[0]]  # of both in one source the last counts
        last |= {key: source[key] for key in named}
        if named and len(last) > 1:
            [unused] = {EPOCHS, STEPS} - {named[-1]}
            (value, where), (before, there) = last[named[-1]], last.pop(unused)
            lines.append(f"{where}: {named[-1]} is {value}, so {unused} ({before} in {there}) is ignored")
    return lines


def overridden(paths: Sequence[Path]) -> list[str]:
    """Return a line for each setting of a file that a later file replaces."""
    settings, lines = dict[str, Setting](), list[str]()
    for path in paths:
        for key, (value, where) in read_toml(path).items():
            before, there = settings.get(key, (value, ""))
            if before != value:
                lines.append(f"{where}: {key} is {value}; it was {before} in {there}")
            settings[key] = value, where
    return lines


def read_toml(path: Path) -> dict[str, Setting]:
    """Read ``[section] key = value`` pairs as dotted keys, each with its file and line.

    Raises:
        UserError: The file cannot be read, is not TOML, or holds an unknown key or an invalid value.
    """
    try:
        refuse_others_writing(path)
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({reason_of(error)}); check the path") from None
    except tomllib.TOMLDecodeError as error:
        line = last_of(re.findall(r"at line (\d+)", str(error)), "1")
        remedy = (
            "correct it"
            if path.suffix == ".toml"
            else f"convert another program's recipe with `llama405b import {path}`"
        )
        raise UserError(f"{path}:{line}: not valid TOML ({error}); {remedy}") from None
    except (ValueError, RecursionError) as error:  # numbers or nesting beyond what Python reads
        raise UserError(f"{path}: cannot be read as TOML ({' '.join(str(error).split())}); correct it") from None
    settings: dict[str, Setting] = {}
    for section, table in tables.items():
        where = f"{path}:{_line_of(text, section)}"
        if not isinstance(table, dict):
            sections = ", ".join(f"[{field.name}]" for field in dataclasses.fields(Config))
            raise UserError(f"{where}: {section!r} is outside a section; move it under one of {sections}")
        for key, value in _spelt_out(section, table, f"{path}:{_line_of(text, 'data', 'sources')}"):
            where = f"{path}:{_line_of(text, section, key)}"
            dotted = known_key(f"{section}.{key}", where)
            settings[dotted] = convert(dotted, value, where), where
    return settings


def _spelt_out(section: str, table: Mapping[str, Json], where: str) -> Iterator[tuple[str, Json]]:
    """Yield a section's settings, with tables rewritten as plain values.

    ``[[data.sources]]`` becomes data.paths and data.weights; data.fields, data.template_arguments and optimizer.groups may be tables.
    """
    for key, value in table.items():
        if f"{section}.{key}" in PAIRS and isinstance(value, dict):
            yield key, [f"{name}={each if isinstance(each, str) else json.dumps(each)}" for name, each in value.items()]
            continue
        if (section, key) == ("optimizer", "groups") and isinstance(value, list):
            yield key, [group_text(each) if isinstance(each, dict) else each for each in value]
            continue
        if (section, key) != ("data", "sources"):
            yield key, value
            continue
        paths, weights = list[Json](), list[Json]()
        for each in value if isinstance(value, list) else [value]:
            match each:
                case {"path": str(path), "weight": int() | float() as weight, **others} if not others:
                    paths.append(path)
                    weights.append(weight)
                case _:
                    raise UserError(
                        f'{where}: a source is {each!r}; write path = "…" and weight = 0.5, and nothing else'
                    )
        yield "paths", paths
        yield "weights", weights


def split_flags(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into settings (``--section.key VALUE``) and all other arguments."""
    flags: list[str] = []
    others: list[str] = []
    pending = list(args)
    while pending:
        word = pending.pop(0)
        if re.match(r"--\w+\.", word):
            flags.append(word)
            if "=" not in word and pending and not pending[0].startswith("--"):
                flags.append(pending.pop(0))
        else:
            others.append(word)
    return flags, others


def read_flags(args: Sequence[str]) -> dict[str, Setting]:
    """Read ``--section.key VALUE`` and ``--section.key=VALUE``; repeated flags add to lists of texts.

    Raises:
        UserError: A flag is unknown, or its value is missing or of the wrong type.
    """
    settings: dict[str, Setting] = {}
    texts = collections.defaultdict[str, list[str]](list)
    rest = list(args)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        key = known_key(flag[2:], flag)
        if not equals:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif TYPES[key] is bool:
                value = "true"
            else:
                raise UserError(f"{flag}: no value given; write {flag} VALUE")
        if key in ONE_PER_FLAG:
            texts[key] += _texts_of(value)
        found: Json = [*texts[key]] if key in ONE_PER_FLAG else _from_text(value, TYPES[key], flag)
        settings[key] = convert(key, found, flag), flag
    return settings


def resolve(settings: Mapping[str, Setting]) -> Config:
    """Build the configuration and check its values.

    Raises:
        UserError: Values are out of range or incompatible.
    """
    chosen: dict[str, dict[str, Json]] = collections.defaultdict(dict)
    for key, (value, _) in settings.items():
        section, _, name = key.partition(".")
        chosen[section][name] = value
    config = Config(**{section: cls(**chosen[section]) for section, cls in typing.get_type_hints(Config).items()})
    for key, fault in faults_of(config):
        _, where = settings.get(key, (None, f"--{key}"))
        raise UserError(f"{where}: {fault}")
    return config


def to_flags(settings: Mapping[str, Setting]) -> list[str]:
    """Write settings as flags that ``read_flags`` reads back to the same values."""
    flags: list[str] = []
    for key, (value, _) in sorted(settings.items()):
        text = json.dumps(value) if isinstance(value, tuple | bool) else str(value)
        flags.append(f"--{key}={text}")
    return flags


def mesh_flags(parallel: Parallel) -> list[str]:
    """Return flags for the non-default settings that decide which part of the weights a rank owns."""
    usual = Parallel()
    return to_flags(
        {
            f"parallel.{name}": (getattr(parallel, name), "")
            for name in MESH_SETTINGS
            if getattr(parallel, name) != getattr(usual, name)
        }
    )


def split_flags_of(config: Config) -> list[str]:
    """Return flags for the mesh, the batch sizes and activation checkpointing, including defaults."""
    names = [f"parallel.{name}" for name in MESH_SETTINGS]
    names += ["training.micro_batch_size", "training.global_batch_size", "model.activation_checkpointing"]
    return [f"--{name}={operator.attrgetter(name)(config)}" for name in names]


def to_toml(config: Config) -> str:
    """Return every field as TOML, so that a run's settings can be read back and reused."""
    lines: list[str] = []
    for section, values in dataclasses.asdict(config).items():
        lines += [f"[{section}]", *(f"{key} = {_toml_value(value)}" for key, value in values.items()), ""]
    return "\n".join(lines)


def _toml_value(value: Json) -> str:
    """Format a value as TOML: as JSON, but without surrogate escapes and with DEL escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def refuse_unknown(words: Sequence[str], options: Sequence[str] = ()) -> None:
    """Refuse arguments that no parser accepted, all in one message; ``options``: the parser's options."""
    answers = dict[str, str]()
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("-"):
            near = suggestion(flag, TYPES, options) or "; settings are written like --optimizer.lr 1e-5"
            answers[flag] = instead_of(flag) or f"unknown option{near}"
        elif not answers:  # after an unknown flag, a bare word may be its value
            raise UserError(f"{word}: unexpected argument; settings are flags, like --optimizer.lr 1e-5")
    lines = [f"{flag}: {answer}" for flag, answer in answers.items()]
    if lines:
        raise UserError("\n  ".join([f"{len(lines)} unknown flags", *lines] if len(lines) > 1 else lines))


def check_ranks(config: Config, axes: Axes) -> Dealing:
    """Check a configuration against the mesh; return how a step's micro-batches are split over the ranks.

    Raises:
        UserError: The batch is not a multiple of the micro-batch, or accumulation would give wrong gradients.
    """
    dealing = Dealing.of(config.training, axes.size(DP))
    if config.parallel.reuses_gradients and dealing.rounds > 1:
        # torch's FSDP1 with offload uses the newest gradient instead of the sum.
        raise UserError(
            f"--parallel.strategy: fsdp1 with offload cannot accumulate {dealing.rounds} micro-batches; use fsdp2, or "
            f"--training.global_batch_size {config.training.micro_batch_size * dealing.n_ranks}"
        )
    return dealing


def on_ranks(config: Config, axes: Axes) -> Config:
    """Return the configuration with its global batch size filled in, if the number of ranks determines it."""
    batch = check_ranks(config, axes).n_micro * config.training.micro_batch_size
    return dataclasses.replace(config, training=dataclasses.replace(config.training, global_batch_size=batch))


def known_key(key: str, where: str) -> str:
    """Return ``key``; refuse it if it is not a setting, and name the nearest one."""
    if key in TYPES:
        return key
    if now := RENAMED.get(key):
        raise UserError(f"{where}: {key} was renamed; use {now}")
    if instead := instead_of(key):
        raise UserError(f"{where}: {instead}")
    raise UserError(f"{where}: {key!r} is not a setting{suggestion(key, TYPES)}; see `llama405b train --help`")


def convert(key: str, value: Json, where: str) -> Any:
    """Return ``value`` as the setting's type; refuse it if it does not fit."""
    type_ = TYPES[key]
    if typing.get_origin(type_) is tuple:
        return _convert_list(key, value, where)
    if typing.get_origin(type_) is Literal:
        words = typing.get_args(type_)
        if value in words:
            return value
        if now := RENAMED.get(f"{key} {value}"):
            raise UserError(f"{where}: {key} {value!r} was renamed; use {now}")
        advice = OF_VALUES.get(f"{key} {value}", f"use one of {', '.join(words)}")
        raise UserError(f"{where}: {key} is {value!r}; {advice}")
    if key in READERS:
        return _read_by(READERS[key], value, where)
    if _is(value, type_):
        return type_(value)
    raise UserError(f"{where}: {key} is {value!r}; use {NAMES[type_][0]}")


def _read_by(reads: Callable[[str], object], value: Json, where: str) -> str:
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else json.dumps(value)
    try:
        reads(text)
    except UserError as fault:
        raise UserError(f"{where}: {fault}") from None
    return text


def _convert_list(key: str, value: Json, where: str) -> tuple[Json, ...]:
    allowed = typing.get_args(TYPES[key])
    inner, is_free = allowed[0], allowed[-1] is Ellipsis
    if (
        isinstance(value, list | tuple)
        and (is_free or len(value) == len(allowed))
        and all(_is(each, inner) for each in value)
    ):
        return tuple(inner(each) for each in value)
    takes = "a list of" if is_free else str(len(allowed))
    raise UserError(f"{where}: {key} is {value!r}; use {takes} {NAMES[inner][1]}")


def _is(value: Json, type_: type) -> bool:
    if isinstance(value, int) and abs(value) > MAX_INT:
        return False
    if type_ is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, type_) and (type_ is bool or not isinstance(value, bool))


def _from_text(text: str, type_: Any, flag: str) -> Json:
    """Parse a flag's text as its setting's type; return text that does not parse unchanged."""
    if typing.get_origin(type_) is tuple:
        if text.startswith("["):
            try:
                return json.loads(text)
            except (ValueError, RecursionError):
                raise UserError(f'{flag}: {text!r} is not a list; write it as a,b or ["a", "b"]') from None
        inner = typing.get_args(type_)[0]
        return [_from_text(part, inner, flag) for part in text.split(",") if part]
    if type_ is bool:
        return SWITCHES.get(text.lower(), text)
    if type_ in (int, float):
        with contextlib.suppress(ValueError):
            return type_(text.replace("_", ""))
    return text


def _texts_of(text: str) -> list[str]:
    """Parse a flag's value as texts: one per line, or a JSON list.

    Commas and brackets are part of a text: "[INST] Hi, you".
    """
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(text), list) and all(isinstance(each, str) for each in found):
            return found
    return [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()] or [text]


def _line_of(text: str, section: str, key: str | None = None) -> int:
    """Return the number of the line that holds a key; tomllib does not report it."""
    wanted = {(section, key), ("", section), ("", f"{section}.{key}"), (f"{section}.{key}", None)}
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        name = None  # a heading: the section itself
        if heading := re.match(r"\s*\[{1,2}\s*([\w.\"'-]+)\s*\]", line):
            current = heading[1].strip("\"'")
        elif named := re.match(r"\s*[\"']?([\w.-]+?)[\"']?\s*=", line):
            name = named[1]
        else:
            continue
        if (current, name) in wanted:
            return number
    return 1
