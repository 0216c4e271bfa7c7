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

from llama405b.contract.errors import UserError, did_you_mean, last_or, parse_staging_bytes, reason_of
from llama405b.contract.files import check_only_owner_writes
from llama405b.contract.reader import Json
from llama405b.settings.axes import DP_AXES, Axes, MicrobatchSplit, Recompute
from llama405b.settings.renamed import RENAMED, WRAP, translate_setting
from llama405b.settings.rules import (
    EPOCHS,
    STEPS,
    VALUE_ADVICE,
    find_faults,
    foreign_advice,
    format_group,
    suggest_setting,
)
from llama405b.settings.schema import (
    ONE_PER_FLAG,
    PAIR_SETTINGS,
    SETTING_TYPES,
    Cadence,
    Config,
    Parallel,
    parse_evaluation_interval,
)

MAX_INT = 2**31 - 1  # of any setting: no number of steps, bytes or seconds needs more
DEMO_MODEL = "models/demo"  # rank 0 creates it if it is missing
PRESET_DIR = Path(__file__).parent / "presets"
# Settings with a syntax of their own.
PARSERS: dict[str, Callable[[str], object]] = {
    "checkpoint.every": Cadence.parse,
    "evaluation.every": parse_evaluation_interval,
    "checkpoint.staging": parse_staging_bytes,
    "model.activation_checkpointing": Recompute.parse,
}
TYPE_NAMES = {  # for messages: singular and plural
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "switches"),
    str: ("text", "texts"),
}
SWITCHES = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}
MESH_SETTINGS = ("strategy", "dp_replicate", "tp", "cp", "pp", "pp_schedule")
SourcedValue = tuple[Json, str]  # a value, and where it was set: "my.toml:7", "--optimizer.lr" or "preset demo"


def preset_names() -> list[str]:
    """Return the names that ``--preset`` accepts."""
    return sorted(path.stem for path in PRESET_DIR.glob("*.toml"))


def read_preset(name: str) -> dict[str, SourcedValue]:
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


def read_toml_files(paths: Sequence[Path]) -> dict[str, SourcedValue]:
    """Read TOML files of settings; later files win."""
    return merge_sources(*map(read_toml, paths))


def merge_sources(*sources: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
    """Merge sources of settings; later ones win.

    ``epochs`` in a later source also clears ``max_steps`` of an earlier one.
    """
    settings = dict[str, SourcedValue]()
    for source in sources:
        settings |= source
        if EPOCHS in source and settings.get(STEPS, (0, ""))[0] and not source.get(STEPS, (0, ""))[0]:
            settings[STEPS] = 0, source[EPOCHS][1]
    return settings


def describe_unused_length(*sources: Mapping[str, SourcedValue]) -> list[str]:
    """Return a line for each place where both max_steps and epochs are set and one of them is ignored."""
    lines, latest = list[str](), dict[str, SourcedValue]()
    for source in sources:
        given_keys = [
            key for key in (EPOCHS, STEPS) if source.get(key, (0, ""))[0]
        ]  # of both in one source the last counts
        latest |= {key: source[key] for key in given_keys}
        if given_keys and len(latest) > 1:
            [unused] = {EPOCHS, STEPS} - {given_keys[-1]}
            (value, origin), (previous, previous_origin) = latest[given_keys[-1]], latest.pop(unused)
            lines.append(
                f"{origin}: {given_keys[-1]} is {value}, so {unused} ({previous} in {previous_origin}) is ignored"
            )
    return lines


def describe_overrides(paths: Sequence[Path]) -> list[str]:
    """Return a line for each setting of a file that a later file replaces."""
    settings, lines = dict[str, SourcedValue](), list[str]()
    for path in paths:
        for key, (value, origin) in read_toml(path).items():
            previous, previous_origin = settings.get(key, (value, ""))
            if previous != value:
                lines.append(f"{origin}: {key} is {value}; it was {previous} in {previous_origin}")
            settings[key] = value, origin
    return lines


def read_toml(path: Path) -> dict[str, SourcedValue]:
    """Read ``[section] key = value`` pairs as dotted keys, each with its file and line.

    A file that ``to_toml`` wrote may be of an earlier version, and have earlier names.

    Raises:
        UserError: The file cannot be read, is not TOML, or holds an unknown key or an invalid value.
    """
    try:
        check_only_owner_writes(path)
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({reason_of(error)}); check the path") from None
    except tomllib.TOMLDecodeError as error:
        line = last_or(re.findall(r"at line (\d+)", str(error)), "1")
        remedy = (
            "correct it"
            if path.suffix == ".toml"
            else f"convert another program's recipe with `llama405b import {path}`"
        )
        raise UserError(f"{path}:{line}: not valid TOML ({error}); {remedy}") from None
    except (ValueError, RecursionError) as error:  # numbers or nesting beyond what Python reads
        raise UserError(f"{path}: cannot be read as TOML ({' '.join(str(error).split())}); correct it") from None
    settings: dict[str, SourcedValue] = {}
    is_own = {field.name for field in dataclasses.fields(Config)} <= {*tables}  # only ``to_toml`` writes every section
    for section, table in tables.items():
        origin = f"{path}:{_find_line(text, section)}"
        if not isinstance(table, dict):
            sections = ", ".join(f"[{field.name}]" for field in dataclasses.fields(Config))
            raise UserError(f"{origin}: {section!r} is outside a section; move it under one of {sections}")
        for key, value in _expand_tables(section, table, f"{path}:{_find_line(text, 'data', 'sources')}"):
            origin = f"{path}:{_find_line(text, section, key)}"
            settings |= _as_settings(f"{section}.{key}", value, origin, is_own=is_own)
    return settings


def _as_settings(key: str, value: Json, origin: str, *, is_own: bool = False) -> dict[str, SourcedValue]:
    """Return a setting with its origin; ``parallel.wrap`` becomes two. ``is_own``: the name may be an earlier one."""
    try:
        pairs = translate_setting(key, value) if is_own or key == WRAP else {key: value}
    except UserError as fault:
        raise UserError(f"{origin}: {fault}") from None
    return {name: (coerce(check_key(name, origin), item, origin), origin) for name, item in pairs.items()}


def _expand_tables(section: str, table: Mapping[str, Json], origin: str) -> Iterator[tuple[str, Json]]:
    """Yield a section's settings, with tables rewritten as plain values.

    ``[[data.sources]]`` becomes data.paths and data.weights; data.fields, data.template_arguments and optimizer.groups may be tables.
    """
    for key, value in table.items():
        if f"{section}.{key}" in PAIR_SETTINGS and isinstance(value, dict):
            yield key, [f"{name}={item if isinstance(item, str) else json.dumps(item)}" for name, item in value.items()]
            continue
        if (section, key) == ("optimizer", "groups") and isinstance(value, list):
            yield key, [format_group(item) if isinstance(item, dict) else item for item in value]
            continue
        if (section, key) != ("data", "sources"):
            yield key, value
            continue
        paths, weights = list[Json](), list[Json]()
        for item in value if isinstance(value, list) else [value]:
            match item:
                case {"path": str(path), "weight": int() | float() as weight, **others} if not others:
                    paths.append(path)
                    weights.append(weight)
                case _:
                    raise UserError(
                        f'{origin}: a source is {item!r}; write path = "…" and weight = 0.5, and nothing else'
                    )
        yield "paths", paths
        yield "weights", weights


def split_flags(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into settings (``--section.key VALUE``) and all other arguments."""
    flags: list[str] = []
    other_args: list[str] = []
    pending = list(args)
    while pending:
        word = pending.pop(0)
        if re.match(r"--\w+\.", word):
            flags.append(word)
            if "=" not in word and pending and not pending[0].startswith("--"):
                flags.append(pending.pop(0))
        else:
            other_args.append(word)
    return flags, other_args


def read_flags(args: Sequence[str]) -> dict[str, SourcedValue]:
    """Read ``--section.key VALUE`` and ``--section.key=VALUE``; repeated flags add to lists of texts.

    Raises:
        UserError: A flag is unknown, or its value is missing or of the wrong type.
    """
    settings: dict[str, SourcedValue] = {}
    texts = collections.defaultdict[str, list[str]](list)
    rest = list(args)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        key = flag[2:] if flag[2:] == WRAP else check_key(flag[2:], flag)
        type_ = tuple[str, ...] if key == WRAP else SETTING_TYPES[key]
        if not equals:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif _is_switch(type_):
                value = "true"
            else:
                raise UserError(f"{flag}: no value given; write {flag} VALUE")
        if key in ONE_PER_FLAG:
            texts[key] += _parse_texts(value)
        parsed: Json = [*texts[key]] if key in ONE_PER_FLAG else _parse_flag(value, type_, flag)
        settings |= _as_settings(key, parsed, flag)
    return settings


def resolve(settings: Mapping[str, SourcedValue]) -> Config:
    """Build the configuration and check its values.

    Raises:
        UserError: Values are out of range or incompatible.
    """
    by_section: dict[str, dict[str, Json]] = collections.defaultdict(dict)
    for key, (value, _) in settings.items():
        section, _, name = key.partition(".")
        by_section[section][name] = value
    config = Config(**{section: cls(**by_section[section]) for section, cls in typing.get_type_hints(Config).items()})
    for key, fault in find_faults(config):
        _, origin = settings.get(key, (None, f"--{key}"))
        raise UserError(f"{origin}: {fault}")
    return config


def to_flags(settings: Mapping[str, SourcedValue]) -> list[str]:
    """Write settings as flags that ``read_flags`` reads back to the same values."""
    flags: list[str] = []
    for key, (value, _) in sorted(settings.items()):
        text = json.dumps(value) if isinstance(value, tuple | bool) else str(value)
        flags.append(f"--{key}={text}")
    return flags


def changed_settings(config: Config, before: Config) -> dict[str, SourcedValue]:
    """Return the settings in which two configurations differ, as the first has them."""
    values = {key: operator.attrgetter(key)(config) for key in SETTING_TYPES}
    return {key: (value, "") for key, value in values.items() if value != operator.attrgetter(key)(before)}


def mesh_flags(parallel: Parallel) -> list[str]:
    """Return flags for the non-default settings that decide which part of the weights a rank owns."""
    defaults = Parallel()
    return to_flags(
        {
            f"parallel.{name}": (getattr(parallel, name), "")
            for name in MESH_SETTINGS
            if getattr(parallel, name) != getattr(defaults, name)
        }
    )


def layout_flags(config: Config) -> list[str]:
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
            hint = suggest_setting(flag, SETTING_TYPES, options) or "; settings are written like --optimizer.lr 1e-5"
            answers[flag] = foreign_advice(flag) or f"unknown option{hint}"
        elif not answers:  # after an unknown flag, a bare word may be its value
            raise UserError(f"{word}: unexpected argument; settings are flags, like --optimizer.lr 1e-5")
    lines = [f"{flag}: {answer}" for flag, answer in answers.items()]
    if lines:
        raise UserError("\n  ".join([f"{len(lines)} unknown flags", *lines] if len(lines) > 1 else lines))


def check_ranks(config: Config, axes: Axes) -> MicrobatchSplit:
    """Check a configuration against the mesh; return how a step's micro-batches are split over the ranks.

    Raises:
        UserError: The batch is not a multiple of the micro-batch, or accumulation would give wrong gradients.
    """
    microbatches = MicrobatchSplit.from_training(config.training, axes.size(DP_AXES))
    if config.parallel.reuses_gradients and microbatches.grad_accum_steps > 1:
        # torch's FSDP1 with offload uses the newest gradient instead of the sum.
        raise UserError(
            f"--parallel.strategy: fsdp1 with offload cannot accumulate {microbatches.grad_accum_steps} micro-batches; use fsdp2, or "
            f"--training.global_batch_size {config.training.micro_batch_size * microbatches.n_ranks}"
        )
    return microbatches


def with_global_batch(config: Config, axes: Axes) -> Config:
    """Return the configuration with its global batch size filled in, if the number of ranks determines it."""
    batch = check_ranks(config, axes).n_microbatches * config.training.micro_batch_size
    return dataclasses.replace(config, training=dataclasses.replace(config.training, global_batch_size=batch))


def check_key(key: str, origin: str) -> str:
    """Return ``key``; refuse it if it is not a setting, and name the nearest one."""
    if key in SETTING_TYPES:
        return key
    if new_name := RENAMED.get(key):
        is_choice = typing.get_origin(SETTING_TYPES[new_name]) is Literal
        choices = f" ({', '.join(typing.get_args(SETTING_TYPES[new_name]))})" if is_choice else ""
        raise UserError(f"{origin}: {key} was renamed; use {new_name}{choices}")
    if advice := foreign_advice(key):
        raise UserError(f"{origin}: {advice}")
    raise UserError(
        f"{origin}: {key!r} is not a setting{suggest_setting(key, SETTING_TYPES)}; see `llama405b train --help`"
    )


def coerce(key: str, value: Json, origin: str) -> Any:
    """Return ``value`` as the setting's type; refuse it if it does not fit."""
    type_ = SETTING_TYPES[key]
    if typing.get_origin(type_) is tuple:
        return _coerce_list(key, value, origin)
    if typing.get_origin(type_) is Literal:
        choices = typing.get_args(type_)
        if isinstance(value, bool):
            value = json.dumps(value)
        if value in choices:
            return value
        if new_name := RENAMED.get(f"{key} {value}"):
            raise UserError(f"{origin}: {key} {value!r} was renamed; use {new_name}")
        advice = VALUE_ADVICE.get(f"{key} {value}", f"use one of {', '.join(choices)}")
        raise UserError(f"{origin}: {key} is {value!r}; {advice}")
    if key in PARSERS:
        return _parse_with(PARSERS[key], value, origin)
    if _has_type(value, type_):
        return type_(value)
    raise UserError(f"{origin}: {key} is {value!r}; use {TYPE_NAMES[type_][0]}")


def _parse_with(parser: Callable[[str], object], value: Json, origin: str) -> str:
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else json.dumps(value)
    try:
        parser(text)
    except UserError as fault:
        raise UserError(f"{origin}: {fault}") from None
    return text


def _coerce_list(key: str, value: Json, origin: str) -> tuple[Json, ...]:
    item_types = typing.get_args(SETTING_TYPES[key])
    item_type, is_any_length = item_types[0], item_types[-1] is Ellipsis
    if (
        isinstance(value, list | tuple)
        and (is_any_length or len(value) == len(item_types))
        and all(_has_type(item, item_type) for item in value)
    ):
        return tuple(item_type(item) for item in value)
    expected = "a list of" if is_any_length else str(len(item_types))
    raise UserError(f"{origin}: {key} is {value!r}; use {expected} {TYPE_NAMES[item_type][1]}")


def _has_type(value: Json, type_: type) -> bool:
    if isinstance(value, int) and abs(value) > MAX_INT:
        return False
    if type_ is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, type_) and (type_ is bool or not isinstance(value, bool))


def _is_switch(type_: Any) -> bool:
    """Check whether a setting can be turned on and off: a bool, or a choice of more than that."""
    return type_ is bool or "true" in typing.get_args(type_)


def _parse_flag(text: str, type_: Any, flag: str) -> Json:
    """Parse a flag's text as its setting's type; return text that does not parse unchanged."""
    if typing.get_origin(type_) is tuple:
        if text.startswith("["):
            try:
                return json.loads(text)
            except (ValueError, RecursionError):
                raise UserError(f'{flag}: {text!r} is not a list; write it as a,b or ["a", "b"]') from None
        item_type = typing.get_args(type_)[0]
        return [_parse_flag(part, item_type, flag) for part in text.split(",") if part]
    if _is_switch(type_):
        return SWITCHES.get(text.lower(), text)
    if type_ in (int, float):
        with contextlib.suppress(ValueError):
            return type_(text.replace("_", ""))
    return text


def _parse_texts(text: str) -> list[str]:
    """Parse a flag's value as texts: one per line, or a JSON list.

    Commas and brackets are part of a text: "[INST] Hi, you".
    """
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(parsed := json.loads(text), list) and all(isinstance(item, str) for item in parsed):
            return parsed
    return [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()] or [text]


def _find_line(text: str, section: str, key: str | None = None) -> int:
    """Return the number of the line that holds a key; tomllib does not report it."""
    targets = {(section, key), ("", section), ("", f"{section}.{key}"), (f"{section}.{key}", None)}
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        name = None  # a heading: the section itself
        if heading := re.match(r"\s*\[{1,2}\s*([\w.\"'-]+)\s*\]", line):
            current = heading[1].strip("\"'")
        elif assignment := re.match(r"\s*[\"']?([\w.-]+?)[\"']?\s*=", line):
            name = assignment[1]
        else:
            continue
        if (current, name) in targets:
            return number
    return 1
