"""Durations as people write them. Pure."""

import re

from llama405b.contract.errors import UserError

SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)?")


def seconds(text: str, where: str) -> float:
    """Read ``30s``, ``10m``, ``1h`` or plain seconds.

    Raises:
        UserError: The text is none of them.
    """
    match = SPAN.fullmatch(text)
    if not match or len(match[1]) > 9:
        raise UserError(f"{where}: {text!r} is not a valid time; write 30s, 10m or 1h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, None: 1}[match[2]]
