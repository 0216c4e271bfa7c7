"""Parse data from other processes and machines: JSON in, a frozen dataclass or an error message out.

Knows types, not meanings. msgspec converts by type hints; this adds limits on depth, sizes and numbers, paths, and fields whose
malformed items are dropped. Unknown keys are ignored, so that records of a newer version can be read; missing keys take their
defaults.
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
MAX_NUMBER = 1e18  # largest number accepted
MAX_DEPTH = 12
MAX_ITEMS = 100_000  # of one list or object
MAX_TEXT = 1 << 26  # characters of one message
DECODER_LOCK = threading.Lock()  # held while msgspec builds the decoder of a type
LINES: Mapping[str, bool] = {"lines": True}  # metadata of a field of text that may have line breaks
AS_WRITTEN: Mapping[str, bool] = {
    "as_written": True
}  # metadata of a text that is compared, sent back, or cleaned later
DECODERS: dict[
    Any, msgspec.json.Decoder[Any]
] = {}  # one per type, kept so that msgspec's information on the type stays alive


class MalformedError(ValueError):
    """A value is not of its type; the message says where."""


if TYPE_CHECKING:
    Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
    SoundOnly: TypeAlias = Annotated[T, "sound"]
    FirstOf: TypeAlias = T | S
else:
    Json = Any  # in type hints: any JSON value

    class _Hint(type):
        """Accept every instance check, as msgspec checks what ``_convert`` returns for unknown types."""

        def __instancecheck__(cls, value: object) -> bool:
            return True

    class SoundOnly(Generic[T], metaclass=_Hint):
        """In type hints: malformed items of a tuple are dropped, and a malformed ``X | None`` becomes None."""

    class FirstOf(Generic[T, S], metaclass=_Hint):
        """In type hints: the first of two dataclasses that matches; msgspec has no unions of dataclasses."""


def loads(kind: type[T], text: str | bytes, source: str) -> T:
    """Parse JSON text as a dataclass (or any other type that hints may name).

    Raises:
        MalformedError: The text is not JSON, too large, or not of the type.
    """
    if len(text) > MAX_TEXT:
        raise MalformedError(f"{source} is larger than {MAX_TEXT >> 20} MiB")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{source} is not JSON ({' '.join(str(error).split())[:100]})") from None
    return build_record(kind, value, source)


def build_record(kind: type[T], value: Json, source: str) -> T:
    """Build a dataclass from a parsed JSON value, in which numbers out of range become null.

    Raises:
        MalformedError: The value is not of the type.
    """
    root: list[Any] = [value]
    try:
        _clear_out_of_range(root, MAX_DEPTH)
        return _convert(kind, root[0])
    except ValueError as error:
        clause, _, path = str(error).partition(" - at `$")
        raise MalformedError(f"{source}{path.rstrip('`')}: {clause[:1].lower()}{clause[1:]}") from None


def dumps(record: object) -> str:
    """Return a dataclass, or plain values with dataclasses in them, as one line of JSON for ``loads``."""
    return json.dumps(record, default=_non_default_fields, separators=(",", ":"))


def dumps_all_fields(record: object) -> str:
    """Return a dataclass as one line of JSON with all its fields; many times faster than ``asdict``."""
    return json.dumps(record, default=_all_fields)


def _all_fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _non_default_fields(record: Any) -> dict[str, Any] | str:
    """Return the fields of a dataclass that differ from their defaults."""
    if isinstance(record, PurePath):
        return str(record)
    values = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.default is dataclasses.MISSING or value is not field.default:
            values[field.name] = value
    return values


def _clear_out_of_range(value: Any, depth: int) -> None:
    """Replace numbers that are out of range (and NaN) by null, and check depth and sizes."""
    if depth < 0:
        raise ValueError("nested too deeply")
    if len(value) > MAX_ITEMS:
        raise ValueError(f"more than {MAX_ITEMS} items")
    for key, item in value.items() if type(value) is dict else enumerate(value):
        kind = type(item)
        if kind is dict or kind is list:
            _clear_out_of_range(item, depth - 1)
        elif (kind is int or kind is float) and not -MAX_NUMBER < item < MAX_NUMBER:
            value[key] = None


def _convert(kind: Any, value: Any) -> Any:
    """Convert a value to a type; msgspec calls this again for types that it does not know."""
    if kind is Path:
        return Path(value)
    origin = typing.get_origin(kind)
    if origin is FirstOf:
        return _convert_first_of(typing.get_args(kind), value)
    if origin is SoundOnly:
        return _convert_sound(typing.get_args(kind)[0], value)
    if kind not in DECODERS:
        _build_decoder(kind)
    return msgspec.convert(value, kind, dec_hook=_convert)


def _build_decoder(kind: Any) -> None:
    """Have msgspec build the information on a type, and all types in it, under a lock.

    msgspec 0.22 builds it at the first use of a class, and another thread that sees it half-built crashes the interpreter.
    One lock serves all types, because different types may contain the same class.
    """
    with DECODER_LOCK:
        if kind not in DECODERS:
            DECODERS[kind] = msgspec.json.Decoder(kind, dec_hook=_convert)


def _convert_first_of(kinds: tuple[Any, ...], value: Any) -> Any:
    first_kind, second_kind = kinds
    try:
        return _convert(first_kind, value)
    except msgspec.ValidationError:
        return _convert(second_kind, value)


def _convert_sound(kind: Any, value: Any) -> Any:
    try:
        return _convert(kind, value)  # nearly always the full value is valid
    except msgspec.ValidationError:
        if typing.get_origin(kind) is not tuple:
            return None
    return tuple(_sound_items(typing.get_args(kind)[0], msgspec.convert(value, list[Any])))


def _sound_items(kind: Any, values: list[Any]) -> Iterator[Any]:
    for value in values:
        with contextlib.suppress(msgspec.ValidationError):
            yield _convert(kind, value)
