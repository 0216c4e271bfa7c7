"""Connections by SSH, configured and checked as ssh does it. The only module that imports paramiko.

ssh's own ssh-keygen reads known_hosts (patterns, hashed names, several keys, revoked keys, authorities), and checks the signature of a
host's certificate.

Honors ~/.ssh/config (``transport.load_ssh_options``); also the agent and known_hosts. Checks the host key of every jump host, too.
Never prompts, unlike ssh: a login that needs a password fails in seconds.
"""

import base64
import contextlib
import dataclasses
import functools
import getpass
import hashlib
import hmac
import logging
import os
import random
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import paramiko

from llama405b.contract.errors import fmt_if, last_or, pluralize, reason_of
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import (
    MAX_LINE,
    MAX_STARTUP_BYTES,
    READY_LINE,
    CommandResult,
    HostError,
    SshOptions,
    Stream,
    Tunnel,
    command_line,
    load_ssh_options,
    recv_before,
    wait_for_shell,
)

KEYGEN_TIMEOUT_S = 30.0
REVOKED, AUTHORITY = "@revoked", "@cert-authority"
CERTIFICATE = re.compile(  # its key ID, between signer and dates, is printed as it is: it may look like any of these lines
    r"\A\S+\n\s*Type: \S+ host certificate\n[^\n]*\n\s*Signing CA: \S+ (?P<signer>\S+) \(using (?!ssh-rsa\))\S+\)\n.*"
    r"Valid: (?:forever|(?:from |after )?(?P<begin>\d\S+)?(?: to |before )?(?P<end>\d\S+)?)\n\s*"
    r"Principals: (?:\(none\))?\n(?P<names>.*?)\s*Critical Options: \(none\)\n",
    re.DOTALL,
)


@dataclasses.dataclass(frozen=True, slots=True)
class KnownKey:
    """A line of known_hosts that names a host."""

    path: Path
    marker: str  # "", REVOKED or AUTHORITY
    kind: str  # ssh-ed25519, …
    key: str  # base64
    matches_port: bool = True  # it is of the host's name with its port, if that is not 22


def run_ssh_keygen(*words: str, stdin: str = "") -> str:
    """Return what ssh-keygen prints; "" if it finds or accepts nothing."""
    try:
        result = subprocess.run(
            ["ssh-keygen", *words],
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            timeout=KEYGEN_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        reason = "host keys are read with `ssh-keygen`, but it is not installed on this machine"
        raise HostError(f"{reason}; install it (apt-get install openssh-client)") from None
    except subprocess.TimeoutExpired:
        raise HostError(
            f"`{shlex.join(['ssh-keygen', *words])}` did not finish within {KEYGEN_TIMEOUT_S:.0f} s"
        ) from None
    return "" if result.returncode else result.stdout


def fingerprint(key: str) -> str:
    """Return the fingerprint of a public key in base64, as ssh-keygen prints it; "" if that is none."""
    with contextlib.suppress(ValueError):
        digest = hashlib.sha256(base64.b64decode(key)).digest()
        return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"
    return ""


def known_hosts_name(options: SshOptions) -> str:
    """Return what known_hosts calls a host."""
    name = options.alias or options.hostname.lower()
    return name if options.alias or options.port == 22 else f"[{name}]:{options.port}"


def find_known_keys(options: SshOptions) -> list[KnownKey]:
    """Return the keys of a host, and those of its name without the port."""
    keys: list[KnownKey] = []
    own_name = known_hosts_name(options)
    for name in dict.fromkeys((own_name, options.alias or options.hostname.lower())):
        for path in filter(Path.is_file, options.known_hosts):
            for line in run_ssh_keygen("-F", name, "-f", str(path)).splitlines():
                marker, *words = line.split() if line.startswith("@") else ("", *line.split())
                if len(words) > 2 and words[0] != "#" and _is_key(words[1], words[2]):
                    keys.append(KnownKey(path, marker, words[1], words[2], name == own_name))
    return keys


def _is_key(kind: str, key: str) -> bool:
    """Return whether a line has a key; ssh skips lines without one."""
    with contextlib.suppress(ValueError):
        return base64.b64decode(key, validate=True)[4 : 4 + len(kind)] == kind.encode()
    return False


def check_host_key(
    name: str, options: SshOptions, host_keys: Sequence[KnownKey], shown_key: str, cert: str = ""
) -> None:
    """Check the key that a host presents, as type and base64; ``cert``: its certificate in the same form."""
    kind, key = shown_key.split()
    plain_keys = [known_key for known_key in host_keys if not known_key.marker]
    own_keys = [known_key for known_key in plain_keys if known_key.matches_port and known_key.kind == kind]
    revoked_keys = [known_key.key for known_key in host_keys if known_key.marker == REVOKED]
    cert_match = CERTIFICATE.search(run_ssh_keygen("-L", "-f", "-", stdin=f"{cert}\n")) if cert else None
    if key in revoked_keys or (cert_match and cert_match["signer"] in map(fingerprint, revoked_keys)):
        if options.strict == "false":
            return
        raise HostError("its host key is revoked in known_hosts (@revoked); give the host a new key", "AUTH")
    if any(known_key.key == key for known_key in own_keys or plain_keys) or (
        cert_match and _is_certificate_valid(host_keys, options, cert_match)
    ):
        return
    refuses_new = cert and not options.record_path  # then ssh takes a host with a certificate on no terms
    if (options.strict == "false" and (own_keys or not refuses_new)) or (
        options.strict == "accept-new" and not own_keys and options.record_path
    ):
        if not own_keys:
            _record_key(options, shown_key)
        return
    if own_keys:
        remove_command = shlex.join(["ssh-keygen", "-f", str(own_keys[0].path), "-R", known_hosts_name(options)])
        raise HostError(
            f"its host key has CHANGED: known_hosts does not have {fingerprint(key)}; if the machine was "
            f"reinstalled, run `{remove_command}` and `ssh {name}` once; else someone may be eavesdropping",
            "AUTH",
        )
    if not options.record_path or (options.record_path.exists() and not options.record_path.is_file()):
        no_file_note = (
            f"UserKnownHostsFile {options.record_path or 'none'} stores no keys; name a file in ~/.ssh/config"
        )
        accept_note = fmt_if(", or set StrictHostKeyChecking accept-new there", str(options.record_path or ""))
        raise HostError(f"its host key is not in known_hosts; {no_file_note}{accept_note}", "AUTH")
    cert_note = (
        " and it has no valid certificate of a @cert-authority there" if len(plain_keys) < len(host_keys) else ""
    )
    raise HostError(f"its host key is not in known_hosts{cert_note}; run `ssh {name}` once and verify it", "AUTH")


def _is_certificate_valid(host_keys: Sequence[KnownKey], options: SshOptions, cert_match: re.Match[str]) -> bool:
    """Return whether a certificate is this host's, valid now, and signed by a trusted authority."""
    signers = {fingerprint(known_key.key) for known_key in host_keys if known_key.marker == AUTHORITY}
    names, now = cert_match["names"].split(), time.strftime("%Y-%m-%dT%H:%M:%S")  # in local time, as it prints them
    return (
        cert_match["signer"] in signers
        and (cert_match["begin"] or now) <= now < (cert_match["end"] or "9")
        and (not names or (options.alias or options.hostname.lower()) in names)  # ssh takes no patterns here
    )


def _record_key(options: SshOptions, key: str) -> None:
    """Add a new host's key to known_hosts, as ssh does; if that fails, the host stays unknown."""
    name = known_hosts_name(options)
    if options.hash_names:
        salt = os.urandom(20)
        digest = hmac.digest(salt, name.encode(), "sha1")
        name = "|".join(["", "1", *(base64.b64encode(part).decode() for part in (salt, digest))])
    if path := options.record_path:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            # Append mode: another ssh may add a line at the same time.
            with path.open("a+b") as file:
                file.seek(0)
                separator = "" if file.read()[-1:] in (b"", b"\n") else "\n"
                file.write(f"{separator}{name} {key}\n".encode())


logging.getLogger("paramiko").addHandler(logging.NullHandler())  # our own messages say what went wrong
logging.getLogger("paramiko").propagate = False
CONNECT_TIMEOUT_S = 10.0
MAX_JUMPS = 8
MAX_CONNECTIONS = 10  # to one host
LOGIN_SLOTS = threading.BoundedSemaphore(64)  # at the same time: one that waits too long for its turn on the CPU fails
MAX_CONNECTING = 10  # at one address; sshd drops others at random (sshd_config, MaxStartups)
DEAD_AFTER_S = 30  # without an acknowledgment of sent data, keepalives included
RETRY_DELAYS_S = (0.5, 1.0, 2.0, 4.0)  # if a server drops what begins
SHELL_PROBE_TIMEOUT_S = 2.0  # for another shell that is suspected
MAX_OUTPUT_BYTES = 1 << 26  # bytes of a command's
WAKE_INTERVAL_S = (
    2.0  # how often a connection's thread wakes up for its own work: paramiko's 0.1 s is costly for 256 hosts
)
BROKEN_ERRORS = (paramiko.SSHException, OSError, EOFError)
Socket: TypeAlias = socket.socket | paramiko.Channel
JUMP_HOST = re.compile(r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?P<host>[A-Za-z0-9][A-Za-z0-9._-]*)(?::(?P<port>\d{1,5}))?/?")


class SameMachine(HostError):  # noqa: N818 - not an error but a finding
    """The host is this machine and user, so no login is needed, and a key for it may be missing."""


class DroppedError(HostError):
    """The server closed a connection before login."""

    def __init__(self, name: str, greeting: str = "") -> None:
        clause = f"its sshd closed the connection before login{fmt_if(' ({})', greeting.strip())}, {1 + len(RETRY_DELAYS_S)} times"
        advice = "raise MaxStartups in its sshd_config, or check whether it blocks this address"
        super().__init__(f"{clause}; {advice}; try `ssh -v {name}`", "REFUSED")


class Ssh:
    """A connection to a host; several, if its sshd allows too few sessions (MaxSessions) on one."""

    def __init__(self, host: Host) -> None:
        """Connect through every ProxyJump on the way."""
        self.host, self.name, self.transports = host, host.name, list[paramiko.Transport]()
        self.add_lock = threading.Lock()
        try:
            self.transport = self._connect(host.name, host.user, host.port, None, MAX_JUMPS)
        except BaseException:
            self.close()
            raise
        self.session_transports = [self.transport]  # where sessions are opened

    def run(self, command: str, stdin: str, timeout_s: float) -> CommandResult:
        try:
            channel = self._start_command(command)
            channel.settimeout(timeout_s)
            with contextlib.suppress(OSError):  # the command ended before it read this: its output says why
                channel.sendall(stdin.encode())
                channel.shutdown_write()
            out = _read_all(channel, time.monotonic() + timeout_s, MAX_OUTPUT_BYTES)
            err = channel.makefile_stderr("r").read()
            if not channel.status_event.wait(timeout_s):
                raise TimeoutError
            code = channel.recv_exit_status()
            stderr_text = err.rpartition(READY_LINE)[2].decode("utf-8", "replace")
            if code < 0 and self.is_open():  # paramiko does not tell which signal
                final_line = last_or(stderr_text.strip().splitlines())
                raise HostError(
                    f"the command was killed on the host{fmt_if(': {}', final_line)}; run `dmesg | tail` there"
                )
            if code < 0:
                raise EOFError("no exit code received")
            return CommandResult(code, out.decode("utf-8", "replace"), stderr_text)
        except TimeoutError:
            raise HostError(f"did not answer within {timeout_s:.0f} s") from None
        except BROKEN_ERRORS as error:
            raise _connection_lost(error) from None

    def stream(self, command: str, stdin: str) -> Stream:
        try:
            channel = self._start_command(command)
            with contextlib.suppress(OSError):  # the command ended before it read this: its output says why
                channel.sendall(stdin.encode())
            return _SshStream(channel)
        except BROKEN_ERRORS as error:
            raise _connection_lost(error) from None

    def tunnel(self, port: int) -> Tunnel:
        try:
            return _open_tunnel(self.transport, "127.0.0.1", port)
        except BROKEN_ERRORS as error:
            raise HostError(f"its sshd refuses to forward to port {port} ({error})") from None

    def is_open(self) -> bool:
        return self.transport.is_active()

    def close(self) -> None:
        """Close the connection and the connections to its jump hosts."""
        for transport in reversed(self.transports):
            if isinstance(transport.sock, socket.socket):
                with contextlib.suppress(OSError):
                    transport.sock.shutdown(socket.SHUT_RDWR)  # wakes its thread, so that the host notices now
            transport.close()

    def _start_command(self, command: str) -> paramiko.Channel:
        """Start a command in sh, and wait until the login shell has passed control to it."""
        channel = self._open_session()
        channel.exec_command(command_line(command))
        try:
            wait_for_shell(channel, self.name, functools.partial(_probe_shell, self._open_session))
        except BaseException:
            channel.close()
            raise
        channel.settimeout(None)
        return channel

    def _open_session(self) -> paramiko.Channel:
        """Open a session; on a new connection if all have as many sessions as the host's sshd allows."""
        known_transports = list(self.session_transports)
        if channel := _open_first_session(
            transport for transport in known_transports if transport.is_active() or transport is self.transport
        ):
            return channel
        with self.add_lock:  # others wait for the new connection
            if channel := _open_first_session(
                transport
                for transport in self.session_transports
                if transport not in known_transports and transport.is_active()
            ):
                return channel
            self.session_transports = [
                transport
                for transport in self.session_transports
                if transport.is_active() or transport is self.transport
            ]
            if len(self.session_transports) == MAX_CONNECTIONS:
                reason = f"its sshd allows too few sessions on each of {MAX_CONNECTIONS} connections"
                raise HostError(f"{reason}; raise MaxSessions in its sshd_config")
            self.session_transports.append(
                self._connect(self.host.name, self.host.user, self.host.port, None, MAX_JUMPS)
            )
            if channel := _open_first_session(self.session_transports[-1:]):
                return channel
            raise HostError("its sshd allows no session; set MaxSessions in its sshd_config to 1 or more")

    def _connect(
        self, name: str, user: str, port: int, jump_transport: paramiko.Transport | None, jumps: int
    ) -> paramiko.Transport:
        """Connect to one host, through its jump hosts in order."""
        if jumps == 0:
            raise HostError(f"ProxyJump goes through more than {MAX_JUMPS} hosts; fix the loop in ~/.ssh/config")
        options = load_ssh_options(name, user, port)
        if options.command != "none":
            raise HostError("~/.ssh/config sets ProxyCommand for it, but only ProxyJump is supported; use ProxyJump")
        if jump_transport is None:
            jump_transport = self._connect_jump_hosts(options.jumps, jumps - 1)
        with _connecting_slots(options.hostname, options.port):
            for delay_s in RETRY_DELAYS_S:
                with contextlib.suppress(DroppedError):
                    return self._connect_once(name, options, jump_transport, may_be_local=jumps == MAX_JUMPS)
                time.sleep(delay_s * random.uniform(0.5, 1.5))  # those that were dropped together come back apart
            return self._connect_once(name, options, jump_transport, may_be_local=jumps == MAX_JUMPS)

    def _connect_jump_hosts(self, text: str, jumps: int) -> paramiko.Transport | None:
        """Connect to the jump hosts, each through the previous one; return the last."""
        jump_transport = None
        for jump_host, user, port in _parse_jump_hosts(text):
            try:
                jump_transport = self._connect(jump_host, user, port, jump_transport, jumps)
            except HostError as error:
                raise HostError(f"its jump host {jump_host}: {error}", error.kind) from None
        return jump_transport

    def _connect_once(
        self, name: str, options: SshOptions, jump_transport: paramiko.Transport | None, *, may_be_local: bool
    ) -> paramiko.Transport:
        """Connect and log in; try once."""
        sock = _open_socket(options.hostname, options.port, jump_transport)
        if may_be_local and _is_own_sshd(sock, options.user):
            sock.close()
            raise SameMachine("is this machine")
        greeting = _read_greeting(sock, name)
        transport = paramiko.Transport(sock)
        self.transports.append(transport)
        with LOGIN_SLOTS:
            _log_in(transport, name, options, greeting)
        return transport


def _open_first_session(transports: Iterable[paramiko.Transport]) -> paramiko.Channel | None:
    """Open a session on the first connection whose sshd allows another; None if none does."""
    for transport in transports:
        with contextlib.suppress(paramiko.ChannelException):
            return transport.open_session(timeout=CONNECT_TIMEOUT_S)
    return None


def _connection_lost(error: Exception) -> HostError:
    """Return the error for a broken connection; paramiko's errors may have no text."""
    return HostError(f"the connection was lost ({str(error) or type(error).__name__})")


@functools.cache
def _connecting_slots(_hostname: str, _port: int) -> threading.Semaphore:
    """Return the semaphore that limits how many connections start at one address at the same time.

    Many connections may start at one jump host.
    """
    return threading.Semaphore(MAX_CONNECTING)


def _read_greeting(sock: Socket, name: str) -> str:
    """Wait until the server speaks; return its first bytes, '' if unknown.

    Silent servers thus take no login slot from others.
    """
    if not isinstance(sock, socket.socket):
        return ""
    data = b""
    with contextlib.suppress(OSError):
        try:
            data = sock.recv(100, socket.MSG_PEEK)
        except TimeoutError:
            sock.close()
            raise _silent_server(name) from None
    if not data:
        sock.close()
        raise DroppedError(name)
    return data.decode("utf-8", "replace")


def _silent_server(name: str) -> HostError:
    clause = f"its sshd accepts the connection, but sends nothing within {CONNECT_TIMEOUT_S:.0f} s"
    return HostError(f"{clause}; try `ssh -v {name}`", "TIMEOUT")


def _probe_shell(session: Callable[[], paramiko.Channel], text: bytes) -> bytes:
    """Return what a no-op command prints if it is given this input; b'' if it does not end soon."""
    try:
        with contextlib.closing(session()) as channel:
            channel.exec_command("true")
            channel.sendall(text)
            channel.shutdown_write()
            return _read_all(channel, time.monotonic() + SHELL_PROBE_TIMEOUT_S, MAX_STARTUP_BYTES)
    except (HostError, *BROKEN_ERRORS):
        return b""


def _read_all(channel: paramiko.Channel, deadline: float, max_bytes: int) -> bytes:
    """Read a command's output to its end."""
    data = bytearray()
    while piece := recv_before(channel, 1 << 16, deadline):
        data += piece
        if len(data) > max_bytes:
            raise HostError("its output does not end; check what its start-up files (such as ~/.bashrc) leave running")
    return bytes(data)


def _parse_jump_hosts(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield host, user and port (0: unset) of each hop of a ProxyJump, in order."""
    for jump_host in text.split(",") if text.lower() != "none" else ():
        match = JUMP_HOST.fullmatch(jump_host.strip())
        if match is None:
            raise HostError(f"ProxyJump {jump_host.strip()!r} in ~/.ssh/config is not valid; write [user@]host[:port]")
        yield match["host"], match["user"] or "", int(match["port"] or 0)


def _is_own_sshd(sock: Socket, user: str) -> bool:
    """Return whether a connection is to this machine's own sshd, for this user."""
    if not isinstance(sock, socket.socket):
        return False
    return sock.getpeername()[:2] == (sock.getsockname()[0], 22) and user == getpass.getuser()


def _log_in(transport: paramiko.Transport, name: str, options: SshOptions, greeting: str) -> None:
    """Check the host's key and log in."""
    host_keys = find_known_keys(options)
    transport.banner_timeout = transport.auth_timeout = CONNECT_TIMEOUT_S
    _prefer_known_keys(transport, host_keys)
    try:
        transport.start_client(timeout=CONNECT_TIMEOUT_S)
        key = transport.get_remote_server_key()
        blob = key.public_blob
        cert = f"{blob.key_type} {base64.b64encode(blob.key_blob).decode()}" if blob else ""
        check_host_key(name, options, host_keys, f"{key.get_name()} {key.get_base64()}", cert)
        with _agent_keys(options.agent) as agent_keys:
            _authenticate(transport, options, agent_keys)
    except BROKEN_ERRORS as error:
        raise _explain_failure(error, name, greeting) from None
    transport.set_keepalive(DEAD_AFTER_S // 3)
    transport.sock.settimeout(WAKE_INTERVAL_S)


def _prefer_known_keys(transport: paramiko.Transport, host_keys: Sequence[KnownKey]) -> None:
    """Ask the host for its certificate, if it has one, else for a key of a known type."""
    security = transport.get_security_options()
    # without the two of the first release of SSH, which are broken
    kinds = [kind for kind in security.key_types if kind not in ("ssh-rsa", "ssh-dss")]
    families = {
        known_key.kind.rpartition("ssh-rsa")[1] or known_key.kind for known_key in host_keys if not known_key.marker
    }
    kinds.sort(key=lambda kind: ("ssh-rsa" if kind.startswith("rsa-") else kind) not in families)
    security.key_types = [*(f"{kind}-cert-v01@openssh.com" for kind in kinds), *kinds]


@contextlib.contextmanager
def _agent_keys(path: str) -> Iterator[Sequence[paramiko.AgentKey]]:
    """Yield the keys of an agent, which signs with them inside the context; none if it does not answer."""
    agent = paramiko.agent.AgentSSH()
    with socket.socket(socket.AF_UNIX) as sock:
        with contextlib.suppress(*BROKEN_ERRORS):
            sock.settimeout(CONNECT_TIMEOUT_S)
            sock.connect(path)
            agent._connect(sock)  # type: ignore[attr-defined]  # paramiko's own Agent knows no socket but $SSH_AUTH_SOCK
        yield agent.get_keys()


def _authenticate(transport: paramiko.Transport, options: SshOptions, agent_keys: Sequence[paramiko.AgentKey]) -> None:
    """Try one key after the other, as many as the server allows."""
    keys, locked_paths = _load_keys(options, agent_keys)
    n_tried = 0
    for key in keys:
        with contextlib.suppress(paramiko.SSHException):  # refused, or the agent does not sign
            n_tried += 1
            if not transport.auth_publickey(options.user, key):
                return
        if not transport.is_active() and n_tried < 2:
            raise paramiko.SSHException(f"the connection ended in the login as {options.user}")
        if not transport.is_active():
            raise HostError(
                f"its sshd ended the login as {options.user} after {pluralize(n_tried, 'key')} (MaxAuthTries), of {len(keys)}; name "
                "the right one with IdentityFile, and set IdentitiesOnly yes, in ~/.ssh/config",
                kind="AUTH",
            )
    if locked_paths:
        agent_hint = "" if options.agent else "start an agent, or name it with IdentityAgent, and "
        raise HostError(
            f"its private key {locked_paths[0]} needs a passphrase, and no agent has it; {agent_hint}run `ssh-add {locked_paths[0]}` first",
            "AUTH",
        )
    hint = (
        "install your public key on it" if keys else "there is no key to log in with: run `ssh-keygen`, and install it"
    )
    raise HostError(f"login as {options.user} was refused; {hint}", kind="AUTH")


def _load_keys(options: SshOptions, agent_keys: Sequence[paramiko.AgentKey]) -> tuple[list[paramiko.PKey], list[Path]]:
    """Return the keys to try, configured ones first, and the key files that are locked.

    Locked: the key needs a passphrase and is not in the agent.
    """
    keys_by_fingerprint: dict[str, paramiko.PKey] = {
        fingerprint(base64.b64encode(key.blob).decode()): key for key in agent_keys
    }
    keys, locked_paths = list[paramiko.PKey](), list[Path]()
    for path in options.keys:
        for file in [candidate for candidate in (path, path.with_name(f"{path.name}.pub")) if candidate.is_file()][:1]:
            with contextlib.suppress(Exception):  # whatever the libraries say of a file that is locked, odd or no key
                key = paramiko.PKey.from_path(file)
                keys_by_fingerprint.pop(fingerprint(key.get_base64()), None)
                keys.append(key)
                continue
            fields = run_ssh_keygen("-l", "-f", str(file)).split()
            if agent_key := keys_by_fingerprint.pop(fields[1] if fields else "", None):
                keys.append(agent_key)
            else:
                locked_paths.append(path)
    return [*keys, *(() if options.identities_only else keys_by_fingerprint.values())], locked_paths


def _explain_failure(error: Exception, name: str, greeting: str) -> HostError:
    """Return why a connection failed before login."""
    is_dropped = "reading SSH protocol banner" in str(error) and not isinstance(error.__context__, TimeoutError)
    if is_dropped or isinstance(error, (EOFError, ConnectionError)):
        return DroppedError(name, greeting)
    if "SSH protocol banner" in str(error) or "No existing session" in str(error):  # it connects, then stays silent
        return _silent_server(name)
    kind = "TIMEOUT" if isinstance(error, TimeoutError) else "DOWN"
    return HostError(f"SSH failed ({str(error) or type(error).__name__}); try `ssh -v {name}`", kind)


def _open_socket(hostname: str, port: int, jump_transport: paramiko.Transport | None) -> Socket:
    """Return a TCP connection, or a channel through a jump host."""
    try:
        if jump_transport is not None:
            return _open_tunnel(jump_transport, hostname, port)
        sock = socket.create_connection((hostname, port), timeout=CONNECT_TIMEOUT_S)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # notice a host without power instead of waiting for it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # 44 ms per command without it, 2 ms with it
        return sock
    except socket.gaierror:
        raise HostError(f"the name {hostname!r} does not resolve; correct it, or add it to ~/.ssh/config") from None
    except TimeoutError:
        clause = f"no answer from {hostname}:{port} within {CONNECT_TIMEOUT_S:.0f} s; is it up?"
        raise HostError(clause, kind="TIMEOUT") from None
    except (OSError, paramiko.SSHException, UnicodeError) as error:
        kind = "REFUSED" if isinstance(error, ConnectionRefusedError) else "DOWN"
        origin = " from its jump host" if jump_transport else ""
        raise HostError(f"cannot connect to {hostname}:{port}{origin} ({reason_of(error)})", kind) from None


def _open_tunnel(transport: paramiko.Transport, hostname: str, port: int) -> paramiko.Channel:
    """Open a channel from the remote host to an address."""
    return transport.open_channel("direct-tcpip", (hostname, port), ("127.0.0.1", 0), timeout=CONNECT_TIMEOUT_S)


class _SshStream:
    def __init__(self, channel: paramiko.Channel) -> None:
        self.channel = channel

    def __iter__(self) -> Iterator[str]:
        with contextlib.suppress(*BROKEN_ERRORS):
            file = self.channel.makefile("rb")
            while line := file.readline(MAX_LINE):
                yield line.decode("utf-8", "replace")

    def send(self, text: str) -> None:
        try:
            self.channel.sendall(text.encode())
        except BROKEN_ERRORS as error:
            raise _connection_lost(error) from None

    def end_input(self) -> None:
        with contextlib.suppress(*BROKEN_ERRORS):
            self.channel.shutdown_write()

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self.channel.close()
