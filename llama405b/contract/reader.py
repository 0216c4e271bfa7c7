"""The one parser for data from other processes and machines: JSON in, a frozen dataclass or an error message out.

Knows types, not meanings. Type hints say what is accepted: ``int``, ``float`` (whole numbers too), ``str``, ``bool``, ``Path``,
enums of strings, ``Literal``, other dataclasses, ``X | None``, tuples and mappings of any of these; ``Any`` is any JSON.
Unknown keys are ignored, so that records of a newer version can be read; missing keys take their defaults. Depth and
size are bounded.
"""

import collections.abc
import dataclasses
import enum
import functools
import json
import operator
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
else:
    Json = Any  # in type hints: any JSON value

T = TypeVar("T")
Parser: TypeAlias = Callable[[Json], T]  # a value; returns it as its type
AnyParser: TypeAlias = Parser[Any]
Hints: TypeAlias = tuple[Any, ...]  # a type's arguments, in brackets
MOST = 1e18  # largest number accepted
MAX_DEPTH = 12
MAX_ITEMS = 100_000  # of one tuple or mapping
MAX_TEXT = 1 << 26  # characters of one message


class MalformedError(ValueError):
    """A value is not of its type; the message says where."""


class _MisfitError(Exception):
    """A clause on what is wrong, and the path to it, which grows on the way out of nested parsers."""

    def __init__(self, clause: str, way: str = "") -> None:
        self.clause, self.way = clause, way

    def below(self, step: str) -> "_MisfitError":
        return _MisfitError(self.clause, step + self.way)


class SoundOnly:
    """In ``Annotated``: malformed items of a tuple are dropped, and a malformed ``X | None`` becomes None."""


def loads(kind: type[T], text: str | bytes, where: str) -> T:
    """Parse JSON text as a dataclass (or any other type that hints may name).

    Raises:
        MalformedError: The text is not JSON, too large, or not of the type.
    """
    if len(text) > MAX_TEXT:
        raise MalformedError(f"{where} is larger than {MAX_TEXT >> 20} MiB")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{where} is not JSON ({' '.join(str(error).split())[:100]})") from None
    return read(kind, value, where)


def read(kind: type[T], value: Json, where: str) -> T:
    """Build a dataclass from a parsed JSON value.

    Raises:
        MalformedError: The value is not of the type.
    """
    parser: Parser[T] = _parser(kind, MAX_DEPTH)  # type: ignore[arg-type]  # types can be hashed
    try:
        return parser(value)
    except _MisfitError as misfit:
        raise MalformedError(f"{where}{misfit.way}{misfit.clause}") from None


def dumps(record: object) -> str:
    """Write a dataclass, or plain values that contain dataclasses, as one line of JSON that ``loads`` reads."""
    return json.dumps(record, default=_members, separators=(",", ":"))


def dumps_whole(record: object) -> str:
    """Write a dataclass as one line of JSON with all its members, for other programs: many times faster than ``asdict``."""
    return json.dumps(record, default=_all_members)


def _all_members(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _members(record: Any) -> dict[str, Any] | str:
    """The members of a dataclass, without those that have their default."""
    if isinstance(record, PurePath):
        return str(record)
    found = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.default is dataclasses.MISSING or value is not field.default:
            found[field.name] = value
    return found


@functools.cache
def _parser(hint: Any, depth: int) -> AnyParser:
    """The function that parses a type, made once per type."""
    if depth == 0:
        return _refuse_depth
    if origin := typing.get_origin(hint):
        return _GENERIC[origin](typing.get_args(hint), depth)
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint, depth - 1)
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return _word({member.value: member for member in hint})
    return _PLAIN[hint]


def _dataclass(kind: Any, depth: int) -> AnyParser:
    hints = typing.get_type_hints(kind, include_extras=True)
    absent = dataclasses.MISSING
    needed = {f.name for f in dataclasses.fields(kind) if f.default is absent and f.default_factory is absent}
    parsers: dict[str, AnyParser] = {}

    def parse(value: Json) -> Any:
        if not parsers:  # not while the type's own parser is being made: a type may contain itself
            parsers.update({field.name: _parser(hints[field.name], depth) for field in dataclasses.fields(kind)})
        if not isinstance(value, dict):
            raise _MisfitError(" is not an object")
        found, name = {}, ""
        try:
            for name, parser in parsers.items():
                if name in value:
                    found[name] = parser(value[name])
                elif name in needed:
                    raise _MisfitError(" is missing")
            return kind(**found)
        except _MisfitError as misfit:
            raise misfit.below(f".{name}") from None
        except ValueError as error:  # of its own __post_init__
            raise _MisfitError(f": {error}") from None

    return parse


def _tuple(arguments: Hints, depth: int) -> AnyParser:
    if arguments[-1] is not Ellipsis:
        return _row([_parser(each, depth - 1) for each in arguments])
    item = _parser(arguments[0], depth - 1)

    def parse(value: Json) -> tuple[Any, ...]:
        found: list[Any] = []
        items = _items(value)
        try:
            found.extend(map(item, items))
        except _MisfitError as misfit:
            raise misfit.below(f"[{len(found)}]") from None
        return tuple(found)

    return parse


def _items(value: Json) -> list[Json]:
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        raise _MisfitError(f" is not a list of at most {MAX_ITEMS}")
    return value


def _sound_only(arguments: Hints, depth: int) -> AnyParser:
    """See ``SoundOnly``."""
    hint: Any = arguments[0]
    if typing.get_origin(hint) is not tuple:
        one = _parser(hint, depth)
        return lambda value: next(_sound([value], one), None)
    item = _parser(typing.get_args(hint)[0], depth - 1)
    return lambda value: tuple(_sound(_items(value), item))


def _sound(values: list[Json], item: Parser[T]) -> Iterator[T]:
    """The values that are of the type."""
    for value in values:
        try:
            yield item(value)
        except _MisfitError:
            continue


def _row(items: list[AnyParser]) -> AnyParser:
    def parse(value: Json) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(items):
            raise _MisfitError(f" is not a list of {len(items)}")
        found: list[Any] = []
        try:
            found.extend(map(operator.call, items, value))
        except _MisfitError as misfit:
            raise misfit.below(f"[{len(found)}]") from None
        return tuple(found)

    return parse


def _mapping(arguments: Hints, depth: int) -> AnyParser:
    item = _parser(arguments[1], depth - 1)

    def parse(value: Json) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > MAX_ITEMS:
            raise _MisfitError(f" is not an object of at most {MAX_ITEMS} keys")
        found, key = {}, ""
        try:
            for key, each in value.items():
                found[key] = item(each)
        except _MisfitError as misfit:
            raise misfit.below(f".{key}") from None
        return found

    return parse


def _any_of(arguments: Hints, depth: int) -> AnyParser:
    or_null = types.NoneType in arguments
    parsers = [_parser(each, depth) for each in arguments if each is not types.NoneType]

    def parse(value: Json) -> Any:
        if value is None and or_null:
            return None
        faults = []
        for parser in parsers:
            try:
                return parser(value)
            except _MisfitError as misfit:
                faults.append(misfit)
        raise faults[0]

    return parse


def _word(known: Mapping[Json, T]) -> Parser[T]:
    def parse(value: Json) -> T:
        if not isinstance(value, str | int) or value not in known:
            raise _MisfitError(f" is not one of {', '.join(map(str, known))}")
        return known[value]

    return parse


def _text(value: Json) -> str:
    if not isinstance(value, str):
        raise _MisfitError(" is not text")
    return value


def _as_it_is(value: Json) -> Json:
    return value


def _path(value: Json) -> Path:
    return Path(_text(value))


def _truth(value: Json) -> bool:
    if not isinstance(value, bool):
        raise _MisfitError(" is not true or false")
    return value


def _whole(value: Json) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -MOST < value < MOST:
        raise _MisfitError(" is not a whole number")
    return value


def _number(value: Json) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _MisfitError(" is not a number")
    if not -MOST < value < MOST:  # nor is NaN
        raise _MisfitError(" is out of range")
    return float(value)


def _refuse_depth(_value: Json) -> typing.Never:
    raise _MisfitError(" is nested too deeply")


_PLAIN: dict[Any, AnyParser] = {str: _text, Path: _path, bool: _truth, int: _whole, float: _number, Any: _as_it_is}
_GENERIC: dict[Any, Callable[[Hints, int], AnyParser]] = {  # by origin; called with its arguments
    tuple: _tuple,
    dict: _mapping,
    collections.abc.Mapping: _mapping,
    typing.Union: _any_of,
    types.UnionType: _any_of,
    typing.Annotated: _sound_only,
    typing.Literal: lambda arguments, _depth: _word({word: word for word in arguments}),
}
