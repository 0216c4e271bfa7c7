"""The one reader of what another process or machine wrote: JSON in, a frozen dataclass out, or a clause on what is wrong.

Knows types, not meanings. A type's hints say what is taken: ``int``, ``float`` (whole numbers too), ``str``, ``bool``, ``Path``,
enums of strings, ``Literal``, other dataclasses, ``X | None``, tuples and mappings of any of these; ``Any`` is JSON as it is. A
key that is not known is passed over, so that a newer writer can be read; one that is missing takes its default. Depth and
size are bounded.
"""

import collections.abc
import dataclasses
import enum
import functools
import json
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any, TypeVar

T = TypeVar("T")
Parser = Callable[[Any, str], Any]  # a value and where it stands; returns it as its type
MOST = 1e18  # of a number
MAX_DEPTH = 12
MAX_ITEMS = 100_000  # of one tuple or mapping
MAX_TEXT = 1 << 26  # characters of one message


class MalformedError(ValueError):
    """A value that is not of its type; the message says where it stands."""


class SoundOnly:
    """In ``Annotated``: of a tuple items that are malformed are left out, and ``X | None`` is None rather than refused."""


def loads(kind: type[T], text: str | bytes, where: str) -> T:
    """Parse JSON text as a dataclass.

    Raises:
        MalformedError: It is not JSON, too large, or not of the type.
    """
    if len(text) > MAX_TEXT:
        raise MalformedError(f"{where} is larger than {MAX_TEXT >> 20} MiB")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{where} is not JSON ({' '.join(str(error).split())[:100]})") from None
    return read(kind, value, where)


def read(kind: type[T], value: Any, where: str) -> T:
    """Build a dataclass from a parsed JSON value.

    Raises:
        MalformedError: The value is not of the type.
    """
    found: T = _parser(kind, MAX_DEPTH)(value, where)  # type: ignore[arg-type]  # types can be hashed
    return found


def dumps(record: Any) -> str:
    """Write a dataclass as one line of JSON, as ``loads`` reads it."""
    return json.dumps(record, default=_members, separators=(",", ":"))


def _members(record: Any) -> dict[str, Any] | str:
    """The members of a dataclass; those that have their default go without saying."""
    if isinstance(record, PurePath):
        return str(record)
    found = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.default is dataclasses.MISSING or value is not field.default:
            found[field.name] = value
    return found


@functools.cache
def _parser(hint: Any, depth: int) -> Parser:
    """The function that reads a type, made once for each."""
    if depth == 0:
        return _refuse_depth
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _sound_only(arguments[0], depth)
    if origin in (typing.Union, types.UnionType):
        return _any_of([_parser(each, depth) for each in arguments])
    if origin is typing.Literal:
        return _word(set(arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        return _tuple_of(_parser(arguments[0], depth - 1))
    if origin is tuple:
        return _row([_parser(each, depth - 1) for each in arguments])
    if origin in (dict, collections.abc.Mapping):
        return _mapping(_parser(arguments[1], depth - 1))
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return _enum(hint)
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint, depth - 1)
    if hint is Any:
        return _as_it_is
    return {str: _text, Path: _path, bool: _truth, int: _whole, float: _number, type(None): _nothing}[hint]


def _dataclass(kind: Any, depth: int) -> Parser:
    hints = typing.get_type_hints(kind, include_extras=True)
    absent = dataclasses.MISSING
    needed = {f.name for f in dataclasses.fields(kind) if f.default is absent and f.default_factory is absent}
    parsers: dict[str, Parser] = {}

    def parse(value: Any, where: str) -> Any:
        if not parsers:  # not while the type's own parser is being made: a type may hold itself
            parsers.update({field.name: _parser(hints[field.name], depth) for field in dataclasses.fields(kind)})
        if not isinstance(value, dict):
            raise MalformedError(f"{where} is not an object")
        if missing := needed - value.keys():
            raise MalformedError(f"{where}.{min(missing)} is missing")
        found = {name: parsers[name](value[name], f"{where}.{name}") for name in parsers.keys() & value.keys()}
        try:
            return kind(**found)
        except MalformedError:
            raise
        except ValueError as error:  # of its own __post_init__
            raise MalformedError(f"{where}: {error}") from None

    return parse


def _tuple_of(item: Parser) -> Parser:
    def parse(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) > MAX_ITEMS:
            raise MalformedError(f"{where} is not a list of at most {MAX_ITEMS}")
        return tuple(item(each, f"{where}[{i}]") for i, each in enumerate(value))

    return parse


def _sound_only(hint: Any, depth: int) -> Parser:
    """See ``SoundOnly``."""
    if typing.get_origin(hint) is not tuple:
        one = _parser(hint, depth)
        return lambda value, where: next(iter(_sound([value], one, where)), None)
    item = _parser(typing.get_args(hint)[0], depth - 1)

    def parse(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) > MAX_ITEMS:
            raise MalformedError(f"{where} is not a list of at most {MAX_ITEMS}")
        return tuple(_sound(value, item, where))

    return parse


def _sound(values: list[Any], item: Parser, where: str) -> Iterator[Any]:
    """Those that are of the type."""
    for value in values:
        try:
            yield item(value, where)
        except MalformedError:
            continue


def _row(items: list[Parser]) -> Parser:
    def parse(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(items):
            raise MalformedError(f"{where} is not a list of {len(items)}")
        return tuple(item(each, f"{where}[{i}]") for i, (item, each) in enumerate(zip(items, value, strict=True)))

    return parse


def _mapping(item: Parser) -> Parser:
    def parse(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > MAX_ITEMS:
            raise MalformedError(f"{where} is not an object of at most {MAX_ITEMS} keys")
        return {key: item(each, f"{where}.{key}") for key, each in value.items()}

    return parse


def _any_of(parsers: list[Parser]) -> Parser:
    def parse(value: Any, where: str) -> Any:
        faults = []
        for parser in parsers:
            try:
                return parser(value, where)
            except MalformedError as error:
                faults.append(error)
        raise faults[0]

    return parse


def _word(words: set[Any]) -> Parser:
    def parse(value: Any, where: str) -> Any:
        if not isinstance(value, str | int) or value not in words:
            raise MalformedError(f"{where} is not one of {', '.join(sorted(map(str, words)))}")
        return value

    return parse


def _enum(kind: type[enum.StrEnum]) -> Parser:
    known = {member.value: member for member in kind}

    def parse(value: Any, where: str) -> enum.StrEnum:
        if not isinstance(value, str) or value not in known:
            raise MalformedError(f"{where} is not one of {', '.join(known)}")
        return known[value]

    return parse


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise MalformedError(f"{where} is not text")
    return value


def _as_it_is(value: Any, _where: str) -> Any:
    return value


def _path(value: Any, where: str) -> Path:
    return Path(_text(value, where))


def _truth(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise MalformedError(f"{where} is not true or false")
    return value


def _whole(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -MOST < value < MOST:
        raise MalformedError(f"{where} is not a whole number")
    return value


def _number(value: Any, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise MalformedError(f"{where} is not a number")
    if not -MOST < value < MOST:  # nor is NaN
        raise MalformedError(f"{where} is out of range")
    return float(value)


def _nothing(value: Any, where: str) -> None:
    if value is not None:
        raise MalformedError(f"{where} is not null")


def _refuse_depth(_value: Any, where: str) -> Any:
    raise MalformedError(f"{where} is nested too deeply")
