"""The interface between the tools and a machine: run a shell line on it, or stream its output.

The verbs only know ``Connection``; ``Local`` is this machine, ``ssh.Ssh`` is another.
"""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from typing import Protocol, TypeVar

from llama405b.contract import reader
from llama405b.contract.errors import RunError
from llama405b.contract.phrases import short
from llama405b_tools.text.clean import printable, tidy

MAX_LINE = 1 << 24  # of a stream, in case a host never ends its line
# All that a run inherits from its launcher's environment; everything else, above all secrets, is passed explicitly.
ENV = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TMPDIR", "XDG_RUNTIME_DIR", "LD_LIBRARY_PATH", "HF_HOME",
)  # fmt: skip


NOT_PLAIN = re.compile(r"\\[bfnrtu]|[^ -~\n]")  # of a line of JSON: there may be control characters in it
T = TypeVar("T")
MOST = 1000  # characters of an error
ENDS_WITHIN_S = 2.0  # once its stream is closed; then a local command is killed


class HostError(RunError):
    """A host could not be reached, or did not do what was requested; the message does not name the host.

    ``kind``: AUTH (login or host key), REFUSED, TIMEOUT, or DOWN for everything else.
    """

    def __init__(self, message: str, kind: str = "DOWN") -> None:
        super().__init__(printable(short(message, MOST)))  # parts of it may come from the host
        self.kind = kind


def read_message(kind: type[T], line: str, where: str) -> T:
    """Build a message from a line that a host sent; its text is cleaned here, for all who show it.

    Raises:
        HostError: It is malformed.
    """
    try:
        message = reader.loads(kind, line, where)
        return tidy(message) if NOT_PLAIN.search(line) else message
    except ValueError as error:
        raise HostError(f"{error}; do both ends run the same version?") from None


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Result of a command."""

    code: int
    out: str
    err: str


class Stream(Protocol):
    """Lines of a running command."""

    def __iter__(self) -> Iterator[str]:
        """Yield lines until the command ends."""

    def send(self, text: str) -> None:
        """Write to the command's standard input.

        Raises:
            HostError: The connection was lost, or the command ended.
        """

    def end_input(self) -> None:
        """Close the command's standard input; its output can still be read, and it may take as long as it needs."""

    def close(self) -> None:
        """Close the command's standard input, which ends it, and soon its output; safe from another thread."""


class Tunnel(Protocol):
    """Bytes in both directions: a socket, or a channel through SSH."""

    def sendall(self, data: bytes, /) -> object:
        """Send everything."""

    def recv(self, size: int, /) -> bytes:
        """Receive at most ``size`` bytes."""

    def close(self) -> object:
        """End it."""


class Connection(Protocol):
    """A way to run commands on one machine."""

    def run(self, command: str, stdin: str, timeout_s: float) -> Result:
        """Run a shell line to completion.

        Raises:
            HostError: It cannot be run, or takes longer than ``timeout_s``.
        """

    def stream(self, command: str, stdin: str) -> Stream:
        """Start a shell line whose standard input stays open.

        Raises:
            HostError: It cannot be run.
        """

    def tunnel(self, port: int) -> Tunnel:
        """Connect to a port on the machine's loopback.

        Raises:
            HostError: Nothing answers on the port, or the machine forbids it.
        """

    def is_open(self) -> bool:
        """Return whether the connection is still open, as far as is known."""

    def close(self) -> None:
        """Close the connection."""


class Local:
    """This machine, without sshd."""

    def run(self, command: str, stdin: str, timeout_s: float) -> Result:
        """See ``Connection``."""
        with _start(command) as child:
            try:
                out, err = child.communicate(stdin, timeout_s)
            except BaseException as error:  # Ctrl-C too: the command must not outlive us
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise HostError(f"did not answer within {timeout_s:.0f} s") from None
                raise
            return Result(child.returncode, out, err)

    def stream(self, command: str, stdin: str) -> Stream:
        """See ``Connection``."""
        return _LocalStream(_start(command, stderr=subprocess.DEVNULL), stdin)  # a full pipe would stop it

    def tunnel(self, port: int) -> Tunnel:
        """See ``Connection``."""
        try:
            return socket.create_connection(("127.0.0.1", port), 10)
        except OSError as error:
            raise HostError(f"port {port} does not answer ({error.strerror})") from None

    def is_open(self) -> bool:
        """See ``Connection``."""
        return True

    def close(self) -> None:
        """Nothing is kept open."""


class _LocalStream:
    def __init__(self, child: "subprocess.Popen[str]", stdin: str) -> None:
        assert child.stdin
        assert child.stdout
        self.child = child
        self.stdin = child.stdin
        self.stdout = child.stdout
        with contextlib.suppress(OSError):  # the command ended before it read this: its output says why
            self._write(stdin)

    def __iter__(self) -> Iterator[str]:
        while line := self.stdout.readline(MAX_LINE):
            yield line
        self.child.wait()

    def send(self, text: str) -> None:
        try:
            self._write(text)
        except (OSError, ValueError):
            raise HostError("the command ended before it read the answer") from None

    def end_input(self) -> None:
        with contextlib.suppress(OSError):
            self.stdin.close()

    def close(self) -> None:
        if self.stdin.closed:  # it was told to end before, and may have something to finish
            return
        self.end_input()
        # Not a daemon: this process must not end before the command has, or has been killed.
        threading.Thread(target=self._see_to_its_end).start()

    def _see_to_its_end(self) -> None:
        """Kill the command if it does not end: one that is stopped never notices that its input was closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(ENDS_WITHIN_S)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)

    def _write(self, text: str) -> None:
        self.stdin.write(text)
        self.stdin.flush()


def _start(command: str, stderr: int = subprocess.PIPE) -> "subprocess.Popen[str]":
    env = {name: os.environ[name] for name in ENV if name in os.environ}
    return subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        encoding="utf-8",
        errors="replace",
        env=env,
        start_new_session=True,
    )
