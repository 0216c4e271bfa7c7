"""Make text safe for a terminal: no escape sequences, no tokens, no characters that it lacks. Pure."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

LEAST_SECRET, HIDDEN = 6, "…REDACTED"
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[PX^_][^\x1b]*\x1b\\|[ -/]*[0-~])")
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
LINE_CONTROLS = re.compile(f"[\t\n]|{CONTROLS.pattern}")
BREAKS = re.compile(r"[\t\n]+")
TOKENS = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16}"
    r"|xox[abp]-[A-Za-z0-9-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
)
NAMED = re.compile(
    r"(\b[A-Z0-9_]{0,40}(?:TOKEN|SECRET|PASSWORD|API_?KEY|ACCESS_?KEY)[\"']?\s{0,3}[=:]\s{0,3}[\"']?|\bBearer\s)([^\s\"',;]{8,})",
    re.IGNORECASE,
)
PLAIN = str.maketrans("│─└┤┄▶◀●◐■▲▼✖·…—–→←↑↓⏎°×░▏▎▍▌▋▊▉▁▂▃▄▅▆▇█", "|-`+~><*o#^vx.~--><^v<ox....::::.:-=+*#@")


def clean(text: str) -> str:
    """Clean one log block for a terminal: the last state of a progress bar, no control characters, no tokens."""
    lines = [_last_written(line) for line in text.split("\n")]
    return redact(without_controls("\n".join(lines)).expandtabs())


def without_controls(text: str) -> str:
    """Remove escape sequences, and replace the other control characters, except line breaks and tabs."""
    return CONTROLS.sub("�", ESCAPES.sub("", text))


def printable(line: str) -> str:
    """Replace the control characters of a line; its length stays the same."""
    return LINE_CONTROLS.sub("�", line)


def tidy(value: Any, *, lines: bool = False) -> Any:
    """Clean all text within a value that a host sent: no control characters, and line breaks only in fields that may have them."""
    if type(value) is str:
        text = without_controls(value)
        return text if lines else BREAKS.sub(" ", text)
    if type(value) in (tuple, list):
        return type(value)(tidy(each, lines=lines) for each in value)
    if isinstance(value, Mapping):
        return {tidy(key): tidy(each, lines=lines) for key, each in value.items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = [each for each in dataclasses.fields(value) if not each.metadata.get("as_written")]
    tidied = {each.name: tidy(getattr(value, each.name), lines="lines" in each.metadata) for each in fields}
    return dataclasses.replace(value, **tidied)


def redact(text: str) -> str:
    """Remove what looks like a token from ``text``, except its first letters, which tell which one it was."""
    text = TOKENS.sub(lambda match: f"{match[0][:4]}…REDACTED", text)
    return NAMED.sub(lambda match: match[0] if "REDACTED" in match[0] else f"{match[1]}…REDACTED", text)


def pieces_of(secrets: Iterable[str]) -> list[str]:
    """Return what to hide of secret values: each of their lines that is not too short to tell, the longest first."""
    lines = {line.strip() for secret in secrets for line in secret.splitlines()}
    return sorted((line for line in lines if len(line) >= LEAST_SECRET), key=len, reverse=True)


def hide(text: str, pieces: Iterable[str]) -> str:
    """Replace the pieces of secret values."""
    for piece in pieces:
        text = text.replace(piece, HIDDEN)
    return text


def hide_in_json(line: str, pieces: Iterable[str]) -> str:
    """Replace the pieces of secret values in a line of JSON, where they are escaped."""
    for piece in pieces:
        line = line.replace(json.dumps(piece)[1:-1], json.dumps(HIDDEN)[1:-1])
    return line


def _last_written(line: str) -> str:
    """Return a line as it looks after its carriage returns: the last non-empty piece."""
    return next((piece for piece in reversed(line.split("\r")) if piece.strip()), "")


def substitute(error: UnicodeError) -> tuple[str, int]:
    """Replace what a stream cannot encode; see ``codecs.register_error``."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    plain = error.object[error.start : error.end].translate(PLAIN)
    return "".join(char if char.isascii() else "?" for char in plain), error.end
