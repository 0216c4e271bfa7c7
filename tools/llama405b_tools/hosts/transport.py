"""Connections to hosts: the interface, this machine, shells with start-up files, ssh's configuration, and programs sent to hosts.

The verbs only know ``Connection``; ``Local`` is this machine, ``ssh.Ssh`` is another. Command lines are quoted so that all login
shells read them alike. Start-up files may print, read input, never end, or start another shell. OpenSSH itself reads ~/.ssh/config
(``ssh -G``). Programs are sent as one file each that imports nothing of ours, for any Python that the host has.
"""

import collections
import contextlib
import dataclasses
import functools
import getpass
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from llama405b.contract import disk, reader
from llama405b.contract.errors import RunError, UserError, fmt_if, last_or, shorten
from llama405b.contract.files import USERS_UMASK, check_only_owner_writes
from llama405b.contract.software import LOADER
from llama405b_tools.text.words import clean_value, mask_controls

MAX_LINE = 1 << 24  # of a stream, in case a host never ends its line
# All that a run inherits from its launcher's environment; everything else, above all secrets, is passed explicitly.
INHERITED_VARIABLES = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TMPDIR", "XDG_RUNTIME_DIR", "LD_LIBRARY_PATH", "HF_HOME",
    USERS_UMASK, "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS",  # of a Slurm that a module brings
)  # fmt: skip


NEEDS_CLEANING = re.compile(r"\\[bfnrtu]|[^ -~\n]")  # of a line of JSON: there may be control characters in it
T = TypeVar("T")
MAX_ERROR_CHARS = 1000  # characters of an error
CLOSE_TIMEOUT_S = 2.0  # once its stream is closed; then a local command is killed


class HostError(RunError):
    """A host cannot be reached or did not do what was requested; the message does not name the host.

    ``kind``: AUTH (login or host key), REFUSED, TIMEOUT, or DOWN for everything else.
    """

    def __init__(self, message: str, kind: str = "DOWN") -> None:
        super().__init__(mask_controls(shorten(message, MAX_ERROR_CHARS)))  # parts of it may come from the host
        self.kind = kind


def read_message(message_type: type[T], line: str) -> T:
    """Build a message from a line that a host sent; its text is cleaned here, once for all displays.

    Raises:
        HostError: It is malformed.
    """
    try:
        message = reader.loads(message_type, line, "its answer")
        return clean_value(message) if NEEDS_CLEANING.search(line) else message
    except ValueError as error:
        raise HostError(str(error)) from None


@dataclasses.dataclass(frozen=True, slots=True)
class CommandResult:
    """The exit code and output of a command."""

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
        """Close the command's standard input, which ends it and soon its output; safe from another thread."""


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

    def run(self, command: str, stdin: str, timeout_s: float) -> CommandResult:
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
        """Return whether the connection is still open, as far as this side knows."""

    def close(self) -> None:
        """Close the connection."""


class Local:
    """This machine, without sshd."""

    def run(self, command: str, stdin: str, timeout_s: float) -> CommandResult:
        with _start_shell(command) as child:
            try:
                out, err = child.communicate(stdin, timeout_s)
            except BaseException as error:  # Ctrl-C too: the command must not outlive us
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise HostError(f"did not answer within {timeout_s:.0f} s") from None
                raise
            return CommandResult(child.returncode, out, err)

    def stream(self, command: str, stdin: str) -> Stream:
        return _LocalStream(_start_shell(command, stderr=subprocess.DEVNULL), stdin)  # a full pipe would stop it

    def tunnel(self, port: int) -> Tunnel:
        try:
            return socket.create_connection(("127.0.0.1", port), 10)
        except OSError as error:
            raise HostError(f"port {port} does not answer ({error.strerror})") from None

    def is_open(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing: no connection is kept."""


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
            raise HostError("the command ended before it read its input") from None

    def end_input(self) -> None:
        with contextlib.suppress(OSError):
            self.stdin.close()

    def close(self) -> None:
        if self.stdin.closed:  # it was told to end before, and may have something to finish
            return
        self.end_input()
        # Not a daemon: this process must not end before the command has, or has been killed.
        threading.Thread(target=self._kill_if_running).start()

    def _kill_if_running(self) -> None:
        """Kill the command if it does not end: a stopped process never notices that its input was closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(CLOSE_TIMEOUT_S)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)

    def _write(self, text: str) -> None:
        self.stdin.write(text)
        self.stdin.flush()


def _start_shell(command: str, stderr: int = subprocess.PIPE) -> "subprocess.Popen[str]":
    env = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    return subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        encoding="utf-8",
        errors="replace",
        env=env,
        # A process group of its own: Ctrl-C does not reach it, and killpg ends it with its children.
        start_new_session=True,
    )


Outcomes = Mapping[str, T | HostError]  # by host


def replies(outcomes: Outcomes[T]) -> dict[str, T]:
    """Return the replies, by host."""
    return {name: outcome for name, outcome in outcomes.items() if not isinstance(outcome, HostError)}


def failure_texts(outcomes: Outcomes[T]) -> dict[str, str]:
    """Return why hosts failed, by host."""
    return {name: str(outcome) for name, outcome in outcomes.items() if isinstance(outcome, HostError)}


def list_disagreements(facts: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return which hosts differ from the majority: one clause per differing fact."""
    names = next(iter(facts.values()), {})
    differences = [
        find_disagreement(name, {host: host_facts.get(name, "missing") for host, host_facts in facts.items()})
        for name in names
    ]
    return [clause for clause, odd_hosts in differences if odd_hosts]


def find_disagreement(name: str, values: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return a clause on which hosts differ from the majority in a fact, and those hosts; () if none do."""
    counts = collections.Counter(values.values())
    majority = max(counts, key=lambda value: counts[value], default="")
    differing = {host: value for host, value in values.items() if value != majority}
    clause = ", ".join(f"{host} has {value}" for host, value in differing.items())
    return f"{name} is {majority} on most hosts, but {clause}", tuple(differing)


def group_same_machine(machines: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return groups of names that are the same machine, from each name's machine ID ("": unknown)."""
    names: dict[str, tuple[str, ...]] = {}
    for name, machine in machines.items():
        names[machine] = (*names.get(machine, ()), name)
    return [group for machine, group in names.items() if machine and len(group) > 1]


SHELL_TIMEOUT_S = 30.0  # for the start-up files, which may load modules
SLOW_STARTUP_S = 5.0  # after this, it is found out whether they started another shell
MAX_STARTUP_BYTES = 1 << 16  # that they may print; they are read one by one
READY_LINE = b"llama405b: ready\n"  # printed between what they print and what the command prints
SECOND_SHELL = b"llama405b: another shell\n"
STARTUP_FILES = "its login shell's start-up files (such as ~/.bashrc)"
INTERACTIVE_ADVICE = "let them do that only in interactive shells"


class Channel(Protocol):
    """The methods of a command's channel that are needed here."""

    def settimeout(self, timeout: float | None, /) -> None:
        """Limit each call that reads."""

    def recv(self, nbytes: int, /) -> bytes:
        """Return available bytes, at least one; b'' at the end."""

    def recv_stderr(self, nbytes: int, /) -> bytes:
        """Return available bytes of standard error."""


def command_line(command: str) -> str:
    """Return the line that starts a command in sh and prints a ready line before it."""
    ready = READY_LINE.decode().strip()
    return wrap_in_sh(f"echo {ready}; echo {ready} >&2; {command}")


def recv_before(channel: Channel, size: int, deadline: float) -> bytes:
    """Receive at least one byte before the deadline; b'' at the end."""
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    channel.settimeout(remaining_s)
    return channel.recv(size)


def wait_for_shell(channel: Channel, name: str, probe_shell: Callable[[bytes], bytes]) -> None:
    """Read past what the start-up files print.

    ``probe_shell``: what another command that does nothing prints if it is given this input.
    """
    output, start = bytearray(), time.monotonic()
    try:
        try:
            _read_until_ready(channel, name, output, start + SLOW_STARTUP_S)
        except TimeoutError:
            if SECOND_SHELL in probe_shell(b"echo " + SECOND_SHELL + b"exit\n"):
                raise HostError(
                    f"{STARTUP_FILES} start another shell, so no command can run; {INTERACTIVE_ADVICE}"
                ) from None
            _read_until_ready(channel, name, output, start + SHELL_TIMEOUT_S)
    except TimeoutError:
        clause = f"read input or take more than {SHELL_TIMEOUT_S:.0f} s"
        raise HostError(f"{STARTUP_FILES} {clause}; {INTERACTIVE_ADVICE}", "TIMEOUT") from None


def _read_until_ready(channel: Channel, name: str, output: bytearray, deadline: float) -> None:
    """Read until the ready line."""
    while not output.endswith(READY_LINE):
        byte = recv_before(channel, 1, deadline)  # not one more: what follows belongs to the command
        if not byte:
            noise = output.strip() or channel.recv_stderr(MAX_STARTUP_BYTES).strip()
            final_line = last_or(noise.decode("utf-8", "replace").splitlines())
            raise HostError(
                f"{STARTUP_FILES} exit before the command runs{fmt_if(' ({})', final_line)}; try `ssh {name} true`"
            )
        output += byte
        if len(output) > MAX_STARTUP_BYTES:
            raise HostError(f"{STARTUP_FILES} print without end; {INTERACTIVE_ADVICE}")


def shell_path(path: str) -> str:
    """Quote a path for a shell line; the host expands ``~/``."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


def module_line(python: str, module: str) -> str:
    """Return a line of sh that starts a module of ours (``software.module_argv``); ``python`` is quoted already."""
    return f"unset PYTHONHOME PYTHONPATH && exec {python} -c {shlex.quote(LOADER)} {module}"


def wrap_in_sh(line: str) -> str:
    """Return a command that runs a line in sh, for any login shell: bash, zsh, csh, tcsh or fish.

    These shells agree on single quotes only if the quoted text has no quote, backslash or '!'.
    """
    quoted = re.sub(r"['\\!]", r"'\\\g<0>'", line)
    return f"exec sh -c '{quoted}'"


def standalone_command(name: str) -> str:
    """Return the shell command for a host; the program itself follows on standard input."""
    loader = f"import sys; f = sys.stdin.buffer; exec(compile(f.read(int(f.readline())), {name!r}, 'exec'))"
    return f"exec python3 -I -c {shlex.quote(loader)} 2>&1"


AGENT_DIRECTORY = Path(__file__).parents[1] / "agent"
PROGRAM_FILES = {  # of what travels to a host
    "sampler": (AGENT_DIRECTORY / "facts.py", AGENT_DIRECTORY / "sampler.py"),
    "hostprobe": (Path(disk.__file__), AGENT_DIRECTORY / "facts.py", AGENT_DIRECTORY / "hostprobe.py"),
}


@functools.cache
def program_text(name: str) -> str:
    """Return the source of ``sampler`` or ``hostprobe``: its files joined, without imports of ours."""
    texts = [file.read_text(encoding="utf-8") for file in PROGRAM_FILES[name]]
    return re.sub(r"^from llama405b\S* import (\([^)]*\)|[^(\n]*)\n", "", "\n".join(texts), flags=re.MULTILINE)


def standalone_input(name: str, request: Mapping[str, Any]) -> str:
    """Return the standard input of a program on a host: its source, and its request as a line of JSON."""
    return f"{len(program_text(name).encode())}\n{program_text(name)}{json.dumps(request)}\n"


# as ssh without IdentityFile
DEFAULT_KEYS = [f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ecdsa_sk", "ed25519", "ed25519_sk")]
SSH_CONFIG_TIMEOUT_S = 30.0  # it may look names up, and run what `Match exec` says
SshConfigValues = Mapping[str, Sequence[str]]  # by option, in small letters: its values


@dataclasses.dataclass(frozen=True, slots=True)
class SshOptions:
    """How to reach a host."""

    hostname: str
    user: str
    port: int = 22
    jumps: str = "none"  # ProxyJump
    command: str = "none"  # ProxyCommand
    alias: str = ""  # HostKeyAlias
    known_hosts: tuple[Path, ...] = ()
    record_path: Path | None = None  # the one that new hosts are added to
    hash_names: bool = False  # HashKnownHosts: those
    strict: str = "ask"  # StrictHostKeyChecking: true, false, accept-new, or ask, which is refused: nobody is asked
    keys: tuple[Path, ...] = ()  # IdentityFile
    identities_only: bool = False  # IdentitiesOnly
    agent: str = ""  # IdentityAgent: its socket


def ssh_config_path() -> Path:
    """Return the path of the ssh configuration file."""
    return Path(os.environ.get("LLAMA405B_SSH_CONFIG", "~/.ssh/config")).expanduser()


def load_ssh_options(name: str, user: str = "", port: int = 0) -> SshOptions:
    """Return how to reach a host; ``user`` and ``port`` take precedence over the configuration."""
    path = ssh_config_path()
    values = _read_ssh_config(path, name, user, port) if path.is_file() else {}
    return _build_options(values, name, user or getpass.getuser(), port or 22)


def _build_options(values: SshConfigValues, name: str, user: str, port: int) -> SshOptions:
    def first_value(key: str, default: str) -> str:
        return values.get(key, [default])[0]

    def expand_paths(words: Sequence[str]) -> tuple[Path, ...]:
        expanded = [
            re.sub("%(.)", lambda match: tokens.get(match[1], match[0]), word) for word in words if word != "none"
        ]
        return tuple(Path(path).expanduser() for path in expanded)

    hostname = first_value("hostname", name)
    user = first_value("user", user)
    port = int(first_value("port", str(port)))
    alias, local_name = first_value("hostkeyalias", ""), socket.gethostname()
    tokens = {
        "%": "%",
        "d": str(Path.home()),
        "h": hostname,
        "i": str(os.getuid()),
        "k": alias or name,
        "l": local_name,
    }
    tokens |= {"L": local_name.partition(".")[0], "n": name, "p": str(port), "r": user, "u": getpass.getuser()}
    user_files = expand_paths(first_value("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2").split())
    global_files = expand_paths(first_value("globalknownhostsfile", "/etc/ssh/ssh_known_hosts").split())
    agent = first_value("identityagent", "SSH_AUTH_SOCK")
    if agent == "SSH_AUTH_SOCK" or agent.startswith("$"):
        agent = os.environ.get(agent.strip("${}")) or "none"
    return SshOptions(
        hostname,
        user,
        port,
        first_value("proxyjump", "none"),
        first_value("proxycommand", "none"),
        alias,
        (*user_files, *global_files),
        next(iter(user_files), None),
        first_value("hashknownhosts", "no") == "yes",
        first_value("stricthostkeychecking", "ask"),
        expand_paths(values.get("identityfile", DEFAULT_KEYS)),
        first_value("identitiesonly", "no") == "yes",
        "".join(map(str, expand_paths([agent]))),
    )


def _read_ssh_config(path: Path, name: str, user: str, port: int) -> SshConfigValues:
    """Return the options ssh would use for a host, without connecting."""
    argv = ["ssh", "-F", str(path), "-T", "-G", *(["-l", user] if user else []), *(["-p", str(port)] if port else [])]
    try:
        check_only_owner_writes(path)  # `Match exec` runs commands
        result = subprocess.run(
            [*argv, "--", name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=SSH_CONFIG_TIMEOUT_S,
            check=False,
        )
    except UserError as error:
        raise HostError(str(error)) from None
    except FileNotFoundError:
        clause = "is read with `ssh`, but it is not installed on this machine"
        raise HostError(f"{path} {clause}; install it (apt-get install openssh-client)") from None
    except subprocess.TimeoutExpired:
        problem = f"`ssh -F {path} -G {name}` did not finish within {SSH_CONFIG_TIMEOUT_S:.0f} s"
        raise HostError(f"{problem}; correct what {path} looks up or executes", "TIMEOUT") from None
    if result.returncode:
        reason = "; ".join(line.rstrip(".") for line in result.stderr.splitlines() if ": terminating, " not in line)
        raise HostError(f"ssh does not accept {path} ({reason}); correct it")
    values: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key.lower(), []).append(value)
    return values
