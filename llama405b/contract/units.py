"""Durations and sizes as people write them. Pure."""

import re

from llama405b.contract.errors import UserError

SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)?")
SIZE = re.compile(r"(\d{1,9}(?:\.\d+)?)(MB|GB|TB)?")
SPARE = 0.8  # of the free memory may be taken for copies of what is saved
UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, None: 1}


def seconds(text: str, where: str) -> float:
    """Read ``30s``, ``10m``, ``1h`` or plain seconds.

    Raises:
        UserError: The text is none of them.
    """
    match = SPAN.fullmatch(text)
    if not match or len(match[1]) > 9:
        raise UserError(f"{where}: {text!r} is not a valid time; write 30s, 10m or 1h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, None: 1}[match[2]]


def n_bytes(text: str, where: str) -> int:
    """Read ``500MB``, ``40GB``, ``1.5TB`` or plain bytes.

    Raises:
        UserError: The text is none of them.
    """
    match = SIZE.fullmatch(text)
    if not match:
        raise UserError(f"{where}: {text!r} is not a valid size; write 500MB, 40GB or 1.5TB")
    return int(float(match[1]) * UNITS[match[2]])


def staging_bytes(text: str) -> int | None:
    """Read ``checkpoint.staging``: a size, or auto: None.

    Raises:
        UserError: It is neither.
    """
    return None if text == "auto" else n_bytes(text, "checkpoint.staging")


def size_words(n_bytes: float) -> str:
    """Write bytes as ``1.50 GB``, or as ``1.50 MB`` if they are few."""
    return f"{n_bytes / 1e9:,.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.2f} MB"
