"""Many hosts at once: the hosts file, connections, and sessions with the agents on the hosts. Makes no decisions.

- one connection and one agent call per host, with bounded concurrency;
- a running program on a host: its replies, lines of JSON with a time limit each, or its output as it comes;
- parts of commands that are printed for the user to type;
- the hosts file, and what ``setup`` recorded about each host.
"""

import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import getpass
import os
import queue
import re
import shlex
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ParamSpec, TypeVar

from llama405b.contract import reader
from llama405b.contract.errors import RunError, UserError, fmt_if, last_or, reason_of
from llama405b.contract.files import check_only_owner_writes, write_json
from llama405b.contract.software import code_version
from llama405b_tools import parsers
from llama405b_tools.hosts import calls
from llama405b_tools.hosts.inventory import Host, parse_hosts
from llama405b_tools.hosts.transport import (
    Connection,
    HostError,
    Local,
    Stream,
    load_ssh_options,
    module_line,
    read_message,
    shell_path,
)
from llama405b_tools.text.words import clean

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M")
AGENT, CLI = "llama405b_tools.agent.agent", "llama405b_tools.cli"
VERSION_TIMEOUT_S = 30.0  # for a host to say which code it has
EXIT_CODE_PREFIX = "llama405b-exit-code "  # after the output
# All that the line starts is in this shell's process group, whose other processes end with standard input. On one line, for csh.
RUN_WHILE_OPEN = (
    "trap : TERM; exec 3<&0 </dev/null 2>&1; {{ while read -r _; do :; done <&3; kill 0; }} >/dev/null 2>&1 & watcher=$!; "
    "({line}) 3<&-; code=$?; exec 2>/dev/null; kill $watcher; echo; echo {end}$code"
)


def _default_fault(last_output: str) -> HostError:
    return HostError(
        f"the connection was lost or the program on the host failed before it answered{fmt_if(' ({})', last_output)}"
    )


class StreamEndedError(HostError):
    """A program on a host ended, although it was to go on; the connection is good."""


class JsonSession:
    """Exchanges JSON lines with a program over a stream."""

    def __init__(
        self,
        stream: Stream,
        explain_fault: Callable[[str], HostError] = _default_fault,
        read: Callable[[type[Any], str], Any] = read_message,
    ) -> None:
        """``explain_fault``: says why the program ended, from its last words; ``read``: builds a message from a line."""
        self.stream, self.explain_fault, self.read = stream, explain_fault, read
        self.replies: queue.Queue[tuple[str, float] | None] = queue.Queue()
        self.replied_at = 0.0  # when the last answer arrived, by this machine's clock
        self.last_output = ""  # its last output that was not an answer
        threading.Thread(target=self._read, daemon=True).start()

    def receive(self, reply_type: type[T], timeout_s: float) -> T:
        """Return the next reply.

        Raises:
            HostError: It does not come within ``timeout_s``, the stream ends, or it is malformed.
        """
        try:
            reply = self.replies.get(timeout=timeout_s)
        except queue.Empty:
            raise HostError(f"did not answer within {timeout_s:.0f} s") from None
        if reply is None:
            raise self.explain_fault(self.last_output)
        text, self.replied_at = reply
        message: T = self.read(reply_type, text)
        return message

    def send(self, text: str) -> None:
        """Write to its standard input.

        Raises:
            HostError: The program is gone.
        """
        self.stream.send(text)

    def end_input(self) -> None:
        """Close its standard input, which ends it."""
        self.stream.end_input()

    def close(self, within_s: float = 15.0) -> None:
        """Wait for it to end after ``end_input``; give up after ``within_s``."""
        deadline = time.monotonic() + max(0.0, within_s)
        with contextlib.suppress(queue.Empty):
            while self.replies.get(timeout=max(0.0, deadline - time.monotonic())) is not None:
                pass
        self.stream.close()

    def _read(self) -> None:
        for line in self.stream:
            if line.startswith("{"):
                self.replies.put((line, time.time()))
            else:
                self.last_output = line.strip()[:200] or self.last_output
        self.replies.put(None)


def run_streaming(
    connection: Connection,
    line: str,
    on_line: Callable[[str], object],
    on_start: Callable[[Stream], object] = lambda _stream: None,
) -> str:
    """Run a shell line while the connection holds; return its exit code, '' if the connection broke.

    The command and its children that honor SIGTERM end when its standard input closes or the connection breaks.

    ``on_line``: gets each line of its output that is not empty, cleaned; ``on_start``: gets its stream.

    Raises:
        HostError: It cannot be run.
    """
    code = ""
    stream = connection.stream(RUN_WHILE_OPEN.format(line=line, end=EXIT_CODE_PREFIX), "")
    on_start(stream)
    for raw_line in stream:
        text = clean(raw_line.rstrip())
        if text.startswith(EXIT_CODE_PREFIX):
            code = text.removeprefix(EXIT_CODE_PREFIX)
        elif text:
            on_line(text)
    return code


def program_name() -> str:
    """Return the program's name as this terminal finds it, for commands to type."""
    if shutil.which("llama405b"):
        return "llama405b"
    script = Path(sys.executable).parent / "llama405b"
    if not script.exists():
        return f"{sys.executable} -m llama405b_tools.cli"
    with contextlib.suppress(ValueError):  # it is not below the current directory
        script = script.relative_to(Path.cwd())
    return str(script)


def command_to_type(verb: str, hosts_file: Path | None, run_name: str = "") -> str:
    """Return a command to type here: the program, the hosts file (None for a Slurm job) and the run."""
    hosts_arg = hosts_argument(hosts_file) if hosts_file else ""
    return f"{program_name()} {verb}{hosts_arg}{fmt_if(' --run {}', run_name)}"


def find_hosts_file(host: Host) -> Path | None:
    """Return the hosts file that a host is from; None for the node of a Slurm job."""
    file = host.where.rpartition(":")[0]
    return Path(file) if file else None


def hosts_argument(hosts_file: Path) -> str:
    """Return the argument with which a printed command finds the hosts file."""
    return "" if hosts_file == Path("hosts") else f" {shlex.quote(str(hosts_file))}"


MAX_AT_ONCE = 64
TOO_OLD = re.compile(r"LLAMA405B_PYTHON_TOO_OLD (\S+)")  # from the agent


@functools.cache
def is_local(host: Host) -> bool:
    """Return whether a host's line names this machine, so that it needs neither sshd nor a key to itself.

    Another user or a port in the line means SSH. ``ssh.SameMachine`` detects all other ways to this machine.
    """
    if host.user not in ("", getpass.getuser()) or host.port:
        return False
    if host.is_loopback or host.name == socket.gethostname():
        return True
    with contextlib.suppress(OSError), socket.socket() as sock:  # only this machine's addresses can be bound
        sock.bind((host.address, 0))
        return bool(host.address)
    return False


class Fleet:
    """Connections to hosts, opened on first use and kept."""

    def __init__(self, hosts: Iterable[Host]) -> None:
        self.hosts = {host.name: host for host in hosts}
        self.connections: dict[str, Connection] = {}
        self.pending_connections: dict[str, concurrent.futures.Future[Connection]] = {}
        self.pool = concurrent.futures.ThreadPoolExecutor(MAX_AT_ONCE, "host")

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *exc: object) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        for connection in list(self.connections.values()):
            connection.close()

    def add_hosts(self, hosts: Iterable[Host]) -> None:
        """Add hosts, each reached by its name, or else by its address on the training network."""
        added_hosts = {host.name: host for host in hosts}
        self.hosts |= added_hosts
        for name, outcome in self.call_each(self.connection, added_hosts).items():
            if isinstance(outcome, HostError) and added_hosts[name].address:
                self.hosts[name] = dataclasses.replace(added_hosts[name], name=added_hosts[name].address)

    def subset(self, names: Collection[str]) -> "Fleet":
        """Return the same fleet with only some of its hosts. It shares the connections and must not be closed."""
        subset = copy.copy(self)
        subset.hosts = {name: host for name, host in self.hosts.items() if name in names}
        return subset

    def expected_gpus(self, name: str) -> int:
        """Return how many GPUs a host should have; 0: unknown.

        It is unknown for several names of this machine, which share its GPUs.
        """
        return 0 if self.hosts[name].is_loopback and len(self.hosts) > 1 else self.hosts[name].slots

    def call_each(self, function: Callable[[str], T], names: Iterable[str] | None = None) -> dict[str, T | HostError]:
        """Call ``function`` for all hosts in parallel; a failing host does not delay the others' results."""
        futures = {name: self.pool.submit(function, name) for name in (self.hosts if names is None else names)}
        outcomes: dict[str, T | HostError] = {}
        for name, future in futures.items():
            try:
                outcomes[name] = future.result()
            except HostError as error:
                outcomes[name] = error
            except BaseException:  # Ctrl-C: start nothing that has not started
                for other in futures.values():
                    other.cancel()
                raise
        return outcomes

    def call_all(
        self, function: Callable[P, T], timeout_s: float, *args: P.args, **kwargs: P.kwargs
    ) -> dict[str, T | HostError]:
        """Call a function with the same arguments on every host; see ``call``."""
        return self.call_each(lambda name: self.call(name, function, timeout_s, *args, **kwargs))

    def call(self, name: str, function: Callable[P, T], timeout_s: float, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a function of ``agent.MODULES`` returns on a host.

        Raises:
            HostError: The host cannot be reached, the agent cannot run on it, or its answer is malformed.
        """
        connection = self.connection(name)
        try:
            line = calls.encode_arguments(function, *args, **kwargs)
            output = connection.run(self.command(name, AGENT, [function.__name__]), f"{line}\n", timeout_s)
        except HostError:
            self.forget(name)
            raise
        final_line = last_or(output.out.splitlines())
        if output.code or not final_line.startswith("{"):
            last_output = last_or(output.err.strip().splitlines(), f"exit code {output.code}")
            raise self.explain_fault(name, last_output, cannot_run=output.code in (126, 127))
        reply: calls.Reply[T] = self.read_message(name, calls.reply_type(function), final_line)
        return reply.result

    def stream(self, name: str, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> Stream:
        """Call a function that prints messages until its standard input is closed.

        Raises:
            HostError: The host cannot be reached.
        """
        command = f"exec 2>&1; {self.command(name, AGENT, [function.__name__])}"  # so that its last words can be told
        return self.connection(name).stream(command, f"{calls.encode_arguments(function, *args, **kwargs)}\n")

    def open_session(self, name: str, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> JsonSession:
        """Call a function that prints messages and accepts further ones.

        Raises:
            HostError: The host cannot be reached.
        """
        stream = self.stream(name, function, *args, **kwargs)
        return JsonSession(
            stream, functools.partial(self.explain_fault, name), functools.partial(self.read_message, name)
        )

    def read_message(self, name: str, message_type: type[M], line: str) -> M:
        """Build a message from a line that a host's agent sent; its text is cleaned here, once for all displays.

        Raises:
            HostError: It is malformed.
        """
        try:
            return read_message(message_type, line)
        except HostError as error:
            raise HostError(f"{error}{self._version_difference(name)}") from None

    def _version_difference(self, name: str) -> str:
        """Return, as a clause, how the code on a host differs from that here; '' if it does not, or cannot be told."""
        connection = self.connections.get(name)
        if connection is None or not connection.is_open():
            return ""
        with contextlib.suppress(HostError):
            output = connection.run(self.command(name, CLI, ["--version"]), "", VERSION_TIMEOUT_S)
            version = re.search(r"^llama405b (\S+)", output.out, re.MULTILINE)
            if version and version[1] != code_version():
                setup = self.command_to_type("setup")
                return f"; it runs llama405b {version[1]}, this machine {code_version()}: run `{setup}`"
        return ""

    def keep_listening(
        self,
        name: str,
        listen: Callable[[str], None],
        on_break: Callable[[str, HostError], None],
        closing: threading.Event,
        retry_s: float,
    ) -> None:
        """Call ``listen`` in a thread, again and again, until it returns or ``closing`` is set.

        ``on_break`` takes why it failed: the connection broke, the program on the host ended (``StreamEndedError``), or anything
        else, which is shown rather than ending the thread.
        """

        def pump() -> None:
            while not closing.is_set():
                try:
                    listen(name)
                    return
                except HostError as error:
                    fault = error
                    if not closing.is_set():  # else others may be using it
                        self.forget(name, unless_open=isinstance(error, StreamEndedError))
                except Exception as error:  # noqa: BLE001 - shown, and tried again
                    fault = HostError(str(error) or type(error).__name__)
                if closing.is_set():
                    return
                on_break(name, fault)
                closing.wait(retry_s)

        threading.Thread(target=pump, daemon=True).start()

    def explain_fault(self, name: str, last_output: str, *, cannot_run: bool = False) -> HostError:
        """Explain why the agent did not run on a host, from the last line that the shell or Python wrote there."""
        python = self.python(name)
        workdir = self.workdir(name)
        setup = self.command_to_type("setup")
        if version_match := TOO_OLD.search(last_output):
            return HostError(
                f"{python} is Python {version_match[1]}, but llama405b needs 3.11 or newer; run `{setup}`, or set python="
            )
        if (module_match := parsers.NO_MODULE.search(last_output)) and not module_match[1].startswith("llama405b"):
            return HostError(f"{python} has no {module_match[1]}; this version needs it: run `{setup}` again")
        if module_match:
            return HostError(f"{python} has no llama405b in {workdir}; run `{setup}`, or set workdir= or python=")
        if parsers.NO_DIRECTORY.search(last_output):
            return HostError("; ".join(missing_workdir(workdir, f"`{setup}`")))
        if last_output.startswith(calls.MALFORMED):
            return HostError(f"{last_output.removeprefix(calls.MALFORMED).strip()}{self._version_difference(name)}")
        if cannot_run or re.match(
            rf"\S*sh:.*{re.escape(PurePosixPath(python).name)}\s?: ", last_output
        ):  # in any language
            return HostError(f"{python} cannot be run; run `{setup}`, or set python=")
        if not last_output:
            return HostError("the connection was lost or the program on the host ended")
        return HostError(f"the agent failed ({last_output}){self._version_difference(name)}")

    def connection(self, name: str) -> Connection:
        """Return the open connection to a host, or open one; concurrent callers wait for the same one.

        Raises:
            HostError: It cannot be opened.
        """
        own_future = concurrent.futures.Future[Connection]()
        future = self.pending_connections.setdefault(name, own_future)
        if future is own_future:
            try:
                connection = self.connections.get(name)
                if connection is None or not connection.is_open():  # its sshd may close idle ones
                    self.forget(name)  # those to its jump hosts may be open
                    connection = self.connections[name] = _connect(self.hosts[name])
                own_future.set_result(connection)
            except BaseException as error:  # noqa: BLE001 - raised below, in each that waits
                own_future.set_exception(error)
            del self.pending_connections[name]
        return future.result()

    def forget(self, name: str, *, unless_open: bool = False) -> None:
        """Close a broken connection; the next call opens a new one. ``unless_open``: others may still be using it."""
        if unless_open and name in self.connections and self.connections[name].is_open():
            return
        if connection := self.connections.pop(name, None):
            connection.close()

    def command_to_type(self, verb: str, run_name: str = "") -> str:
        """Return a command about these hosts, to be typed by the user."""
        return command_to_type(verb, self.hosts_file, run_name)

    @property
    def hosts_file(self) -> Path | None:
        """The hosts file that names these hosts; None for the nodes of a Slurm job."""
        return find_hosts_file(next(iter(self.hosts.values())))

    def command(self, name: str, module: str, arguments: Sequence[str], setup: str = "") -> str:
        """Return the shell line that starts a module of ours on a host, in its working directory; ``setup``: a line before."""
        host = self.hosts[name]
        lines = [host.prefix, f"cd {shell_path(self.workdir(name))}", setup]
        start = module_line(shell_path(self.python(name)), module)
        return " && ".join([*filter(None, lines), f"{start} {shlex.join(arguments)}"])

    def python(self, name: str) -> str:
        """Return the path of the interpreter on a host."""
        return self.hosts[name].python or sys.executable

    def workdir(self, name: str) -> str:
        """Return the working directory on a host."""
        return self.hosts[name].workdir or os.getcwd()  # noqa: PTH109


def missing_workdir(workdir: str, setup: str) -> tuple[str, str]:
    """Return what is wrong with a host without its working directory, and what to do. ``setup``: the command to type."""
    return f"there is no directory {workdir}", f"run {setup}, or set workdir="


def _connect(host: Host) -> Connection:
    if is_local(host):
        return Local()
    from llama405b_tools.hosts.ssh import SameMachine, Ssh  # paramiko takes a while to import

    try:
        return Ssh(host)
    except SameMachine:
        return Local()


def ssh_user(host: Host) -> str:
    """Return the user that SSH logs in as: of the hosts file, of ~/.ssh/config, or this process's."""
    if host.user or is_local(host):
        return host.user or getpass.getuser()
    return load_ssh_options(host.name, port=host.port).user


def ssh_address(host: Host) -> str:
    """Return the address that SSH uses for a host."""
    if host.is_loopback or is_local(host):
        return host.name
    return load_ssh_options(host.name, host.user, host.port).hostname


MAX_CHARACTERS = 4 << 20


DEFAULT_HOSTS_FILE = Path("hosts")


def read_hosts(path: Path) -> tuple[Host, ...]:
    """Read a hosts file.

    Raises:
        UserError: It cannot be read, or a line is invalid.
    """
    if not str(path).isprintable():
        raise UserError(f"{str(path)!r}: the name of a hosts file cannot contain control characters; rename it")
    try:
        check_only_owner_writes(path)
        if not path.is_file():  # the later commands read it again, and opening a FIFO waits for its writer
            raise UserError(f"{path}: is a directory, FIFO or device; name a file with one host per line")
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = reason_of(error)
        raise UserError(
            f"{path}: cannot be read ({reason}); pass the path of a hosts file (one host per line), or cd to its directory; "
            "a run is named with --run"
        ) from None
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"{path}: is too large for a hosts file; name a file with one host per line")
    installations = read_installations()
    return tuple(_find_installation(host, installations).apply_to(host) for host in parse_hosts(text, str(path)))


def state_directory() -> Path:
    """Return where this machine keeps state across commands."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "llama405b"


def setup_path() -> Path:
    """Return the file in which ``setup`` records installations, whichever hosts file named the host."""
    return state_directory() / "setup.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Installation:
    """What ``setup`` installed on a host, for all later commands."""

    python: str
    workdir: str
    prefix: str  # a shell line that runs before everything else

    def apply_to(self, host: Host) -> Host:
        """Return the host with this installation's settings, except where its line sets its own."""
        python, workdir = host.python or self.python, host.workdir or self.workdir
        return dataclasses.replace(host, python=python, workdir=workdir, prefix=self.prefix)


NOT_SET_UP = Installation("", "", "")
WORKDIR = "~/llama405b"  # where setup puts the project on a host whose line does not say
Installations = Mapping[
    str, Sequence[Installation]
]  # by host and user, one per directory; the last one made comes last


@dataclasses.dataclass(frozen=True, slots=True)
class _InstallationFile:
    hosts: Mapping[str, tuple[Installation, ...]]


def _installation_key(host: Host) -> str:
    """Return a host as its line addresses it, with the user; this machine has one name."""
    name = host.name
    if host.is_loopback:
        name = "localhost"
    return f"{host.user}@{name}:{host.port or 22}"


def _find_installation(host: Host, installations: Installations) -> Installation:
    """Return what setup installed on a host.

    In the line's directory; if the line has none, in the default one, else in any other.
    """
    by_workdir = {installation.workdir: installation for installation in installations.get(_installation_key(host), ())}
    if host.workdir or is_local(host):
        return by_workdir.get(host.workdir or str(Path.cwd()), NOT_SET_UP)
    return by_workdir.get(WORKDIR) or next(reversed(by_workdir.values()), NOT_SET_UP)


def read_installations() -> Installations:
    """Read what ``setup`` recorded."""
    path = setup_path()
    if not path.is_file():
        return {}
    check_only_owner_writes(path)
    try:
        return reader.loads(_InstallationFile, path.read_text(encoding="utf-8"), path.name).hosts
    except (OSError, ValueError):
        raise UserError(f"{path}: not written by setup; delete it, and run `{program_name()} setup` again") from None


def write_installations(new_installations: Iterable[tuple[Host, Installation]]) -> None:
    """Add new installations to the records of ``setup``.

    Raises:
        RunError: The file cannot be written.
    """
    installations = {key: list(entries) for key, entries in read_installations().items()}
    for host, installation in new_installations:
        previous = [
            entry for entry in installations.get(_installation_key(host), ()) if entry.workdir != installation.workdir
        ]
        installations[_installation_key(host)] = [*previous, installation]
    try:
        write_json(setup_path(), _InstallationFile({key: tuple(entries) for key, entries in installations.items()}))
    except OSError as error:
        raise RunError(
            f"{setup_path()}: cannot be written ({reason_of(error)}); make it writable, and run setup again"
        ) from None
