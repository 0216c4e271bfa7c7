"""Login shells: lines that all of them read alike, and what their start-up files do before a command runs.

These may print, read, never end, or start another shell.
"""

import re
import shlex
import time
from collections.abc import Callable
from typing import Protocol

from llama405b.contract.own_python import LOADER
from llama405b.contract.phrases import given, last_of
from llama405b_tools.hosts.transport import HostError

SHELL_TIMEOUT_S = 30.0  # for the start-up files, which may load modules
SLOW_S = 5.0  # after this, it is found out whether they started another shell
MOST_BYTES = 1 << 16  # that they may print; they are read one by one
READY = b"llama405b: ready\n"  # printed between what they print and what the command prints
ANOTHER = b"llama405b: another shell\n"
FILES = "its login shell's start-up files (such as ~/.bashrc)"
INTERACTIVE = "let them do that only in interactive shells"


class Channel(Protocol):
    """As much of a command's channel as is needed here."""

    def settimeout(self, timeout: float | None, /) -> None:
        """Limit each call that reads."""

    def recv(self, nbytes: int, /) -> bytes:
        """Return what is there, at least one byte; b'' at the end."""

    def recv_stderr(self, nbytes: int, /) -> bytes:
        """Return what is there of standard error."""


def command_line(command: str) -> str:
    """Return what starts a command in sh, which says when it begins."""
    ready = READY.decode().strip()
    return in_sh(f"echo {ready}; echo {ready} >&2; {command}")


def recv_by(channel: Channel, size: int, deadline: float) -> bytes:
    """Receive at least a byte; b'' at the end.

    Raises:
        TimeoutError: The deadline (monotonic) has passed, even if there would be more to read.
    """
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    channel.settimeout(left_s)
    return channel.recv(size)


def await_sh(channel: Channel, name: str, answer_to: Callable[[bytes], bytes]) -> None:
    """Read past what the start-up files print.

    ``answer_to``: what another command that does nothing prints if it is given this input.
    """
    said, began = bytearray(), time.monotonic()
    try:
        try:
            _read_on(channel, name, said, began + SLOW_S)
        except TimeoutError:
            if ANOTHER in answer_to(b"echo " + ANOTHER + b"exit\n"):
                raise HostError(f"{FILES} start another shell, which runs no command; {INTERACTIVE}") from None
            _read_on(channel, name, said, began + SHELL_TIMEOUT_S)
    except TimeoutError:
        words = f"read input or take more than {SHELL_TIMEOUT_S:.0f} s"
        raise HostError(f"{FILES} {words}; {INTERACTIVE}", "TIMEOUT") from None


def _read_on(channel: Channel, name: str, said: bytearray, deadline: float) -> None:
    """Read until the command begins."""
    while not said.endswith(READY):
        byte = recv_by(channel, 1, deadline)  # not one more: what follows belongs to the command
        if not byte:
            noise = said.strip() or channel.recv_stderr(MOST_BYTES).strip()
            last = last_of(noise.decode("utf-8", "replace").splitlines())
            raise HostError(f"{FILES} end it before it runs a command{given(' ({})', last)}; try `ssh {name} true`")
        said += byte
        if len(said) > MOST_BYTES:
            raise HostError(f"{FILES} print without end; {INTERACTIVE}")


def shell_path(path: str) -> str:
    """Quote a path for a shell line; the host expands ``~/``."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


def own_line(python: str, module: str) -> str:
    """Return a line of sh that starts a module of ours (``own_python``); ``python`` is quoted already."""
    return f"unset PYTHONHOME PYTHONPATH && exec {python} -c {shlex.quote(LOADER)} {module}"


def in_sh(line: str) -> str:
    """Return a command that runs a line in sh, whatever the login shell is that reads it: bash, zsh, csh, tcsh or fish.

    They agree on single quotes only where those hold no quote, backslash or '!'.
    """
    quoted = re.sub(r"['\\!]", r"'\\\g<0>'", line)
    return f"exec sh -c '{quoted}'"
