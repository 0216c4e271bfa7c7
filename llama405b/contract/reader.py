"""The one parser for data from other processes and machines: JSON in, a frozen dataclass or an error message out.

Knows types, not meanings. msgspec reads what type hints say; what it lacks is here: bounds on depth, sizes and numbers, paths, and
fields of which only what is sound is read. Unknown keys are ignored, so that records of a newer version can be read; missing keys
take their defaults.
"""

import contextlib
import dataclasses
import json
import threading
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec

T = TypeVar("T")
S = TypeVar("S")
MOST = 1e18  # largest number accepted
MAX_DEPTH = 12
MAX_ITEMS = 100_000  # of one list or object
MAX_TEXT = 1 << 26  # characters of one message
BUILDING = threading.Lock()  # held while msgspec learns a type; see _learn
LINES: Mapping[str, bool] = {"lines": True}  # metadata of a field of text that may have line breaks
AS_WRITTEN: Mapping[str, bool] = {"as_written": True}  # metadata of one that is compared, sent back, or cleaned later
LEARNED: dict[Any, msgspec.json.Decoder[Any]] = {}  # one per type; kept, so that what it learned is kept


class MalformedError(ValueError):
    """A value is not of its type; the message says where."""


if TYPE_CHECKING:
    Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
    SoundOnly: TypeAlias = Annotated[T, "sound"]
    FirstOf: TypeAlias = T | S
else:
    Json = Any  # in type hints: any JSON value

    class _Hint(type):
        """msgspec leaves to ``_convert`` what it does not know, and checks that the result is an instance."""

        def __instancecheck__(cls, value: object) -> bool:
            return True

    class SoundOnly(Generic[T], metaclass=_Hint):
        """In type hints: malformed items of a tuple are dropped, and a malformed ``X | None`` becomes None."""

    class FirstOf(Generic[T, S], metaclass=_Hint):
        """In type hints: the first of two dataclasses that the value is; msgspec has no unions of them."""


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
    """Build a dataclass from a parsed JSON value, in which numbers out of range become null.

    Raises:
        MalformedError: The value is not of the type.
    """
    whole: list[Any] = [value]
    try:
        _bound(whole, MAX_DEPTH)
        return _convert(kind, whole[0])
    except ValueError as error:
        clause, _, path = str(error).partition(" - at `$")
        raise MalformedError(f"{where}{path.rstrip('`')}: {clause[:1].lower()}{clause[1:]}") from None


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


def _bound(value: Any, depth: int) -> None:
    """Put null where a number in an object or list is out of range (NaN, too)."""
    if depth < 0:
        raise ValueError("nested too deeply")
    if len(value) > MAX_ITEMS:
        raise ValueError(f"more than {MAX_ITEMS} items")
    for key, each in value.items() if type(value) is dict else enumerate(value):
        kind = type(each)
        if kind is dict or kind is list:
            _bound(each, depth - 1)
        elif (kind is int or kind is float) and not -MOST < each < MOST:
            value[key] = None


def _convert(kind: Any, value: Any) -> Any:
    """``msgspec.convert``, and what it calls for the types that it does not know."""
    if kind is Path:
        return Path(value)
    origin = typing.get_origin(kind)
    if origin is FirstOf:
        return _first(typing.get_args(kind), value)
    if origin is SoundOnly:
        return _sound(typing.get_args(kind)[0], value)
    if kind not in LEARNED:
        _learn(kind)
    return msgspec.convert(value, kind, dec_hook=_convert)


def _learn(kind: Any) -> None:
    """Have msgspec learn a type, and all within it, while no other thread does.

    It does so at the first use of a class and shows other threads what is half done: with 0.22, they crash the interpreter.
    One lock for all types, because different ones may have the same class within them.
    """
    with BUILDING:
        if kind not in LEARNED:
            LEARNED[kind] = msgspec.json.Decoder(kind, dec_hook=_convert)


def _first(kinds: tuple[Any, ...], value: Any) -> Any:
    first, other = kinds
    try:
        return _convert(first, value)
    except msgspec.ValidationError:
        return _convert(other, value)


def _sound(kind: Any, value: Any) -> Any:
    try:
        return _convert(kind, value)  # nearly always all of it is
    except msgspec.ValidationError:
        if typing.get_origin(kind) is not tuple:
            return None
    return tuple(_each_sound(typing.get_args(kind)[0], msgspec.convert(value, list[Any])))


def _each_sound(kind: Any, values: list[Any]) -> Iterator[Any]:
    for value in values:
        with contextlib.suppress(msgspec.ValidationError):
            yield _convert(kind, value)
