"""Calls of functions on hosts, as messages: one line of JSON with the arguments, and one with the result.

Both forms are made from the function's signature. Arguments that equal their defaults are not sent, so that another version of
llama405b can answer whatever it knows; an argument that it does not know is refused, never dropped.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from llama405b.contract import reader
from llama405b.contract.reader import Json, MalformedError

T = TypeVar("T", covariant=True)
MALFORMED = "LLAMA405B_MALFORMED"  # begins the line in which an agent refuses a call


def encode_arguments(function: Callable[..., object], *args: object, **kwargs: object) -> str:
    """Return the line that calls a function with these arguments."""
    signature = inspect.signature(function)
    arguments = signature.bind(*args, **kwargs).arguments
    return reader.dumps(
        {name: value for name, value in arguments.items() if value != signature.parameters[name].default}
    )


def decode_arguments(function: Callable[..., object], line: str) -> dict[str, Any]:
    """Return the arguments of a call.

    Raises:
        MalformedError: The line is not JSON, or an argument is missing, unknown or of another type.
    """
    record_type = _arguments_type(function)
    names = [field.name for field in dataclasses.fields(record_type)]
    values = reader.loads(Mapping[str, Json], line, function.__name__)  # type: ignore[type-abstract]
    if unknown_names := sorted(values.keys() - set(names)):
        raise MalformedError(f"{function.__name__}.{unknown_names[0]}: there is no such argument")
    record: object = reader.build_record(record_type, values, function.__name__)
    return {name: getattr(record, name) for name in names}


def encode_result(result: object) -> str:
    """Return the line with a function's result."""
    return reader.dumps({"result": result})


def prints_messages(function: Callable[..., object]) -> bool:
    """Return whether a function has no result, but prints messages as it goes."""
    return typing.get_type_hints(function)["return"] is type(None)


class Reply(Protocol[T]):
    """The message with a function's result."""

    @property
    def result(self) -> T:
        """What the function returned."""


@functools.cache
def reply_type(function: Callable[..., T]) -> type[Reply[T]]:
    """Return the type of the message with a function's result."""
    return dataclasses.make_dataclass("Reply", [("result", typing.get_type_hints(function)["return"])], frozen=True)


@functools.cache
def _arguments_type(function: Callable[..., object]) -> type:
    hints = typing.get_type_hints(function)
    fields = [
        (name, hints[name])
        if parameter.default is parameter.empty
        else (name, hints[name], dataclasses.field(default=parameter.default))
        for name, parameter in inspect.signature(function).parameters.items()
    ]
    return dataclasses.make_dataclass(function.__name__, fields, frozen=True, kw_only=True)
