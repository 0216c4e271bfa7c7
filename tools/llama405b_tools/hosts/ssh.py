"""Connections by SSH, configured and checked as ssh does it. The only module that imports paramiko.

ssh's own ssh-keygen reads known_hosts (patterns, hashed names, several keys, revoked keys, authorities), and checks the signature of a
host's certificate.

Honors ~/.ssh/config (``transport.options_of``); also the agent and known_hosts. Checks the host key of every jump host, too. Never prompts,
unlike ssh: a login that needs a password fails in seconds.
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

from llama405b.contract.errors import counted, given, last_of, reason_of
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import (
    MAX_LINE,
    MOST_BYTES,
    READY,
    HostError,
    Result,
    SshOptions,
    Stream,
    Tunnel,
    await_sh,
    command_line,
    options_of,
    recv_by,
)

WITHIN_S = 30.0
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
    mark: str  # "", REVOKED or AUTHORITY
    kind: str  # ssh-ed25519, …
    key: str  # base64
    is_own: bool = True  # it is of the host's name with its port, if that is not 22


def ssh_keygen(*words: str, stdin: str = "") -> str:
    """Return what ssh-keygen prints; "" if it finds or accepts nothing."""
    try:
        done = subprocess.run(
            ["ssh-keygen", *words], input=stdin, capture_output=True, encoding="utf-8", timeout=WITHIN_S, check=False
        )
    except FileNotFoundError:
        why = "host keys are read with `ssh-keygen`, but it is not installed on this machine"
        raise HostError(f"{why}; install it (apt-get install openssh-client)") from None
    except subprocess.TimeoutExpired:
        raise HostError(f"`{shlex.join(['ssh-keygen', *words])}` did not finish within {WITHIN_S:.0f} s") from None
    return "" if done.returncode else done.stdout


def fingerprint(key: str) -> str:
    """Return the fingerprint of a public key in base64, as ssh-keygen prints it; "" if that is none."""
    with contextlib.suppress(ValueError):
        digest = hashlib.sha256(base64.b64decode(key)).digest()
        return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"
    return ""


def name_of(options: SshOptions) -> str:
    """Return what known_hosts calls a host."""
    name = options.alias or options.hostname.lower()
    return name if options.alias or options.port == 22 else f"[{name}]:{options.port}"


def known_keys(options: SshOptions) -> list[KnownKey]:
    """Return the keys of a host, and those of its name without the port."""
    found: list[KnownKey] = []
    own = name_of(options)
    for name in dict.fromkeys((own, options.alias or options.hostname.lower())):
        for path in filter(Path.is_file, options.known_hosts):
            for line in ssh_keygen("-F", name, "-f", str(path)).splitlines():
                mark, *words = line.split() if line.startswith("@") else ("", *line.split())
                if len(words) > 2 and words[0] != "#" and _is_key(words[1], words[2]):
                    found.append(KnownKey(path, mark, words[1], words[2], name == own))
    return found


def _is_key(kind: str, key: str) -> bool:
    """Return whether a line has a key; ssh skips lines without one."""
    with contextlib.suppress(ValueError):
        return base64.b64decode(key, validate=True)[4 : 4 + len(kind)] == kind.encode()
    return False


def check_host_key(name: str, options: SshOptions, known: Sequence[KnownKey], shown: str, cert: str = "") -> None:
    """Check the key that a host presents, as type and base64; ``cert``: its certificate in the same form."""
    kind, key = shown.split()
    plain = [each for each in known if not each.mark]
    own = [each for each in plain if each.is_own and each.kind == kind]
    revoked = [each.key for each in known if each.mark == REVOKED]
    said = CERTIFICATE.search(ssh_keygen("-L", "-f", "-", stdin=f"{cert}\n")) if cert else None
    if key in revoked or (said and said["signer"] in map(fingerprint, revoked)):
        if options.strict == "false":
            return
        raise HostError("its host key is revoked in known_hosts (@revoked); give the host a new key", "AUTH")
    if any(each.key == key for each in own or plain) or (said and _vouches(known, options, said)):
        return
    keeps_none = cert and not options.records  # then ssh takes a host with a certificate on no terms
    if (options.strict == "false" and (own or not keeps_none)) or (
        options.strict == "accept-new" and not own and options.records
    ):
        if not own:
            _record(options, shown)
        return
    if own:
        remove = shlex.join(["ssh-keygen", "-f", str(own[0].path), "-R", name_of(options)])
        raise HostError(
            f"its host key has CHANGED: known_hosts does not have {fingerprint(key)}; if the machine was "
            f"reinstalled, run `{remove}` and `ssh {name}` once; else someone may be eavesdropping",
            "AUTH",
        )
    if not options.records or (options.records.exists() and not options.records.is_file()):
        keeps = f"UserKnownHostsFile {options.records or 'none'} stores no keys; name a file in ~/.ssh/config"
        accept = given(", or set StrictHostKeyChecking accept-new there", str(options.records or ""))
        raise HostError(f"its host key is not in known_hosts; {keeps}{accept}", "AUTH")
    vouched = " and it has no valid certificate of a @cert-authority there" if len(plain) < len(known) else ""
    raise HostError(f"its host key is not in known_hosts{vouched}; run `ssh {name}` once and verify it", "AUTH")


def _vouches(known: Sequence[KnownKey], options: SshOptions, said: re.Match[str]) -> bool:
    """Return whether a certificate is this host's, valid now, and signed by a trusted authority."""
    signers = {fingerprint(each.key) for each in known if each.mark == AUTHORITY}
    names, now = said["names"].split(), time.strftime("%Y-%m-%dT%H:%M:%S")  # in local time, as it prints them
    return (
        said["signer"] in signers
        and (said["begin"] or now) <= now < (said["end"] or "9")
        and (not names or (options.alias or options.hostname.lower()) in names)  # ssh takes no patterns here
    )


def _record(options: SshOptions, key: str) -> None:
    """Add a new host's key to known_hosts, as ssh does; if that fails, the host stays unknown."""
    name = name_of(options)
    if options.hashes:
        salt = os.urandom(20)
        digest = hmac.digest(salt, name.encode(), "sha1")
        name = "|".join(["", "1", *(base64.b64encode(each).decode() for each in (salt, digest))])
    if path := options.records:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            # Append mode: another ssh may add a line at the same time.
            with path.open("a+b") as file:
                file.seek(0)
                begin = "" if file.read()[-1:] in (b"", b"\n") else "\n"
                file.write(f"{begin}{name} {key}\n".encode())


logging.getLogger("paramiko").addHandler(logging.NullHandler())  # our own messages say what went wrong
logging.getLogger("paramiko").propagate = False
CONNECT_TIMEOUT_S = 10.0
MAX_JUMPS = 8
MOST_CONNECTIONS = 10  # to one host
LOGINS = threading.BoundedSemaphore(64)  # at the same time: one that waits too long for its turn on the CPU fails
MOST_BEGINNING = 10  # at one address; sshd drops others at random (sshd_config, MaxStartups)
DEAD_AFTER_S = 30  # without an acknowledgment of sent data, keepalives included
AGAIN_AFTER_S = (0.5, 1.0, 2.0, 4.0)  # if a server drops what begins
ANSWER_WITHIN_S = 2.0  # for another shell that is suspected
MOST_OUTPUT = 1 << 26  # bytes of a command's
WAKE_S = 2.0  # how often a connection's thread wakes up for its own work: paramiko's 0.1 s is costly for 256 hosts
BROKEN = (paramiko.SSHException, OSError, EOFError)
Socket: TypeAlias = socket.socket | paramiko.Channel
HOP = re.compile(r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?P<host>[A-Za-z0-9][A-Za-z0-9._-]*)(?::(?P<port>\d{1,5}))?/?")


class SameMachine(HostError):  # noqa: N818 - not an error but a finding
    """The host is this machine and user, so no login is needed, and a key for it may be missing."""


class DroppedError(HostError):
    """The server closed a connection before login."""

    def __init__(self, name: str, said: str = "") -> None:
        words = (
            f"its sshd closed the connection before login{given(' ({})', said.strip())}, {1 + len(AGAIN_AFTER_S)} times"
        )
        why = "raise MaxStartups in its sshd_config, or check whether it blocks this address"
        super().__init__(f"{words}; {why}; try `ssh -v {name}`", "REFUSED")


class Ssh:
    """A connection to a host; several, if its sshd allows too few sessions (MaxSessions) on one."""

    def __init__(self, host: Host) -> None:
        """Connect through every ProxyJump on the way."""
        self.host, self.name, self.transports = host, host.name, list[paramiko.Transport]()
        self.adding = threading.Lock()
        try:
            self.transport = self._connect(host.name, host.user, host.port, None, MAX_JUMPS)
        except BaseException:
            self.close()
            raise
        self.ends = [self.transport]  # where sessions are opened

    def run(self, command: str, stdin: str, timeout_s: float) -> Result:
        try:
            channel = self._open(command)
            channel.settimeout(timeout_s)
            with contextlib.suppress(OSError):  # the command ended before it read this: its output says why
                channel.sendall(stdin.encode())
                channel.shutdown_write()
            out = _read_all(channel, time.monotonic() + timeout_s, MOST_OUTPUT)
            err = channel.makefile_stderr("r").read()
            if not channel.status_event.wait(timeout_s):
                raise TimeoutError
            code = channel.recv_exit_status()
            said = err.rpartition(READY)[2].decode("utf-8", "replace")
            if code < 0 and self.is_open():  # paramiko does not tell which signal
                last = last_of(said.strip().splitlines())
                raise HostError(f"the command was killed on the host{given(': {}', last)}; run `dmesg | tail` there")
            if code < 0:
                raise EOFError("no exit code received")
            return Result(code, out.decode("utf-8", "replace"), said)
        except TimeoutError:
            raise HostError(f"did not answer within {timeout_s:.0f} s") from None
        except BROKEN as error:
            raise _lost(error) from None

    def stream(self, command: str, stdin: str) -> Stream:
        try:
            channel = self._open(command)
            with contextlib.suppress(OSError):  # the command ended before it read this: its output says why
                channel.sendall(stdin.encode())
            return _SshStream(channel)
        except BROKEN as error:
            raise _lost(error) from None

    def tunnel(self, port: int) -> Tunnel:
        try:
            return _through(self.transport, "127.0.0.1", port)
        except BROKEN as error:
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

    def _open(self, command: str) -> paramiko.Channel:
        """Start a command in sh, and wait until the login shell has passed control to it."""
        channel = self._session()
        channel.exec_command(command_line(command))
        try:
            await_sh(channel, self.name, functools.partial(_answer_to, self._session))
        except BaseException:
            channel.close()
            raise
        channel.settimeout(None)
        return channel

    def _session(self) -> paramiko.Channel:
        """Open a session; on a new connection if all have as many sessions as the host's sshd allows."""
        known = list(self.ends)
        if channel := _first_session(each for each in known if each.is_active() or each is self.transport):
            return channel
        with self.adding:  # others wait for the new connection
            if channel := _first_session(each for each in self.ends if each not in known and each.is_active()):
                return channel
            self.ends = [each for each in self.ends if each.is_active() or each is self.transport]
            if len(self.ends) == MOST_CONNECTIONS:
                few = f"its sshd allows too few sessions on each of {MOST_CONNECTIONS} connections"
                raise HostError(f"{few}; raise MaxSessions in its sshd_config")
            self.ends.append(self._connect(self.host.name, self.host.user, self.host.port, None, MAX_JUMPS))
            if channel := _first_session(self.ends[-1:]):
                return channel
            raise HostError("its sshd allows no session; set MaxSessions in its sshd_config to 1 or more")

    def _connect(
        self, name: str, user: str, port: int, via: paramiko.Transport | None, jumps: int
    ) -> paramiko.Transport:
        """Connect to one host, through its jump hosts in order."""
        if jumps == 0:
            raise HostError(f"ProxyJump goes through more than {MAX_JUMPS} hosts; fix the loop in ~/.ssh/config")
        options = options_of(name, user, port)
        if options.command != "none":
            raise HostError("~/.ssh/config sets ProxyCommand for it, but only ProxyJump is supported; use ProxyJump")
        if via is None:
            via = self._connect_hops(options.jumps, jumps - 1)
        with _gate(options.hostname, options.port):
            for delay_s in AGAIN_AFTER_S:
                with contextlib.suppress(DroppedError):
                    return self._begin(name, options, via, may_be_here=jumps == MAX_JUMPS)
                time.sleep(delay_s * random.uniform(0.5, 1.5))  # those that were dropped together come back apart
            return self._begin(name, options, via, may_be_here=jumps == MAX_JUMPS)

    def _connect_hops(self, text: str, jumps: int) -> paramiko.Transport | None:
        """Connect to the jump hosts, each through the previous one; return the last."""
        via = None
        for hop, user, port in _hops(text):
            try:
                via = self._connect(hop, user, port, via, jumps)
            except HostError as error:
                raise HostError(f"its jump host {hop}: {error}", error.kind) from None
        return via

    def _begin(
        self, name: str, options: SshOptions, via: paramiko.Transport | None, *, may_be_here: bool
    ) -> paramiko.Transport:
        """Connect and log in; try once."""
        sock = _socket(options.hostname, options.port, via)
        if may_be_here and _leads_here(sock, options.user):
            sock.close()
            raise SameMachine("is this machine")
        greeting = _greeting(sock, name)
        transport = paramiko.Transport(sock)
        self.transports.append(transport)
        with LOGINS:
            _log_in(transport, name, options, greeting)
        return transport


def _first_session(transports: Iterable[paramiko.Transport]) -> paramiko.Channel | None:
    """Open a session on the first connection whose sshd allows another; None if none does."""
    for transport in transports:
        with contextlib.suppress(paramiko.ChannelException):
            return transport.open_session(timeout=CONNECT_TIMEOUT_S)
    return None


def _lost(error: Exception) -> HostError:
    """Return the error for a broken connection; paramiko's errors may have no text."""
    return HostError(f"the connection was lost ({str(error) or type(error).__name__})")


@functools.cache
def _gate(_hostname: str, _port: int) -> threading.Semaphore:
    """Return the semaphore that limits how many connections start at one address at the same time.

    Many connections may start at one jump host.
    """
    return threading.Semaphore(MOST_BEGINNING)


def _greeting(sock: Socket, name: str) -> str:
    """Wait until the server speaks; return its first bytes, '' if unknown.

    Silent servers thus take no login slot from others.
    """
    if not isinstance(sock, socket.socket):
        return ""
    said = b""
    with contextlib.suppress(OSError):
        try:
            said = sock.recv(100, socket.MSG_PEEK)
        except TimeoutError:
            sock.close()
            raise _silent(name) from None
    if not said:
        sock.close()
        raise DroppedError(name)
    return said.decode("utf-8", "replace")


def _silent(name: str) -> HostError:
    words = f"its sshd accepts the connection, but sends nothing within {CONNECT_TIMEOUT_S:.0f} s"
    return HostError(f"{words}; try `ssh -v {name}`", "TIMEOUT")


def _answer_to(session: Callable[[], paramiko.Channel], text: bytes) -> bytes:
    """Return what a no-op command prints if it is given this input; b'' if it does not end soon."""
    try:
        with contextlib.closing(session()) as channel:
            channel.exec_command("true")
            channel.sendall(text)
            channel.shutdown_write()
            return _read_all(channel, time.monotonic() + ANSWER_WITHIN_S, MOST_BYTES)
    except (HostError, *BROKEN):
        return b""


def _read_all(channel: paramiko.Channel, deadline: float, most: int) -> bytes:
    """Read a command's output to its end."""
    data = bytearray()
    while piece := recv_by(channel, 1 << 16, deadline):
        data += piece
        if len(data) > most:
            raise HostError("its output does not end; check what its start-up files (such as ~/.bashrc) leave running")
    return bytes(data)


def _hops(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield host, user and port (0: unset) of each hop of a ProxyJump, in order."""
    for hop in text.split(",") if text.lower() != "none" else ():
        parsed = HOP.fullmatch(hop.strip())
        if parsed is None:
            raise HostError(f"ProxyJump {hop.strip()!r} in ~/.ssh/config is not valid; write [user@]host[:port]")
        yield parsed["host"], parsed["user"] or "", int(parsed["port"] or 0)


def _leads_here(sock: Socket, user: str) -> bool:
    """Return whether a connection is to this machine's own sshd, for this user."""
    if not isinstance(sock, socket.socket):
        return False
    return sock.getpeername()[:2] == (sock.getsockname()[0], 22) and user == getpass.getuser()


def _log_in(transport: paramiko.Transport, name: str, options: SshOptions, greeting: str) -> None:
    """Check the host's key and log in."""
    known = known_keys(options)
    transport.banner_timeout = transport.auth_timeout = CONNECT_TIMEOUT_S
    _prefer(transport, known)
    try:
        transport.start_client(timeout=CONNECT_TIMEOUT_S)
        key = transport.get_remote_server_key()
        blob = key.public_blob
        cert = f"{blob.key_type} {base64.b64encode(blob.key_blob).decode()}" if blob else ""
        check_host_key(name, options, known, f"{key.get_name()} {key.get_base64()}", cert)
        with _agent_keys(options.agent) as agent_keys:
            _authenticate(transport, options, agent_keys)
    except BROKEN as error:
        raise _refusal(error, name, greeting) from None
    transport.set_keepalive(DEAD_AFTER_S // 3)
    transport.sock.settimeout(WAKE_S)


def _prefer(transport: paramiko.Transport, known: Sequence[KnownKey]) -> None:
    """Ask the host for its certificate, if it has one, else for a key of a known type."""
    security = transport.get_security_options()
    # without the two of the first release of SSH, which are broken
    kinds = [kind for kind in security.key_types if kind not in ("ssh-rsa", "ssh-dss")]
    families = {each.kind.rpartition("ssh-rsa")[1] or each.kind for each in known if not each.mark}
    kinds.sort(key=lambda kind: ("ssh-rsa" if kind.startswith("rsa-") else kind) not in families)
    security.key_types = [*(f"{kind}-cert-v01@openssh.com" for kind in kinds), *kinds]


@contextlib.contextmanager
def _agent_keys(path: str) -> Iterator[Sequence[paramiko.AgentKey]]:
    """Yield the keys of an agent, which signs with them inside the context; none if it does not answer."""
    agent = paramiko.agent.AgentSSH()
    with socket.socket(socket.AF_UNIX) as sock:
        with contextlib.suppress(*BROKEN):
            sock.settimeout(CONNECT_TIMEOUT_S)
            sock.connect(path)
            agent._connect(sock)  # type: ignore[attr-defined]  # paramiko's own Agent knows no socket but $SSH_AUTH_SOCK
        yield agent.get_keys()


def _authenticate(transport: paramiko.Transport, options: SshOptions, agent_keys: Sequence[paramiko.AgentKey]) -> None:
    """Try one key after the other, as many as the server allows."""
    keys, locked = _keys(options, agent_keys)
    tried = 0
    for key in keys:
        with contextlib.suppress(paramiko.SSHException):  # refused, or the agent does not sign
            tried += 1
            if not transport.auth_publickey(options.user, key):
                return
        if not transport.is_active() and tried < 2:
            raise paramiko.SSHException(f"the connection ended in the login as {options.user}")
        if not transport.is_active():
            raise HostError(
                f"its sshd ended the login as {options.user} after {counted(tried, 'key')} (MaxAuthTries), of {len(keys)}; name "
                "the right one with IdentityFile, and set IdentitiesOnly yes, in ~/.ssh/config",
                kind="AUTH",
            )
    if locked:
        start = "" if options.agent else "start an agent, or name it with IdentityAgent, and "
        raise HostError(
            f"its private key {locked[0]} needs a passphrase, and no agent has it; {start}run `ssh-add {locked[0]}` first",
            "AUTH",
        )
    install = (
        "install your public key on it" if keys else "there is no key to log in with: run `ssh-keygen`, and install it"
    )
    raise HostError(f"login as {options.user} was refused; {install}", kind="AUTH")


def _keys(options: SshOptions, agent_keys: Sequence[paramiko.AgentKey]) -> tuple[list[paramiko.PKey], list[Path]]:
    """Return the keys to try, configured ones first, and the key files that are locked.

    Locked: the key needs a passphrase and is not in the agent.
    """
    of_agent: dict[str, paramiko.PKey] = {fingerprint(base64.b64encode(key.blob).decode()): key for key in agent_keys}
    keys, locked = list[paramiko.PKey](), list[Path]()
    for path in options.keys:
        for file in [each for each in (path, path.with_name(f"{path.name}.pub")) if each.is_file()][:1]:
            with contextlib.suppress(Exception):  # whatever the libraries say of a file that is locked, odd or no key
                key = paramiko.PKey.from_path(file)
                of_agent.pop(fingerprint(key.get_base64()), None)
                keys.append(key)
                continue
            words = ssh_keygen("-l", "-f", str(file)).split()
            if key_of_agent := of_agent.pop(words[1] if words else "", None):
                keys.append(key_of_agent)
            else:
                locked.append(path)
    return [*keys, *(() if options.only_these else of_agent.values())], locked


def _refusal(error: Exception, name: str, greeting: str) -> HostError:
    """Return why a connection failed before login."""
    no_banner = "reading SSH protocol banner" in str(error) and not isinstance(error.__context__, TimeoutError)
    if no_banner or isinstance(error, (EOFError, ConnectionError)):
        return DroppedError(name, greeting)
    if "SSH protocol banner" in str(error) or "No existing session" in str(error):  # it connects, then stays silent
        return _silent(name)
    kind = "TIMEOUT" if isinstance(error, TimeoutError) else "DOWN"
    return HostError(f"SSH failed ({str(error) or type(error).__name__}); try `ssh -v {name}`", kind)


def _socket(hostname: str, port: int, via: paramiko.Transport | None) -> Socket:
    """Return a TCP connection, or a channel through a jump host."""
    try:
        if via is not None:
            return _through(via, hostname, port)
        sock = socket.create_connection((hostname, port), timeout=CONNECT_TIMEOUT_S)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # notice a host without power instead of waiting for it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # 44 ms per command without it, 2 ms with it
        return sock
    except socket.gaierror:
        raise HostError(f"the name {hostname!r} does not resolve; correct it, or add it to ~/.ssh/config") from None
    except TimeoutError:
        words = f"no answer from {hostname}:{port} within {CONNECT_TIMEOUT_S:.0f} s; is it up?"
        raise HostError(words, kind="TIMEOUT") from None
    except (OSError, paramiko.SSHException, UnicodeError) as error:
        kind = "REFUSED" if isinstance(error, ConnectionRefusedError) else "DOWN"
        origin = " from its jump host" if via else ""
        raise HostError(f"cannot connect to {hostname}:{port}{origin} ({reason_of(error)})", kind) from None


def _through(transport: paramiko.Transport, hostname: str, port: int) -> paramiko.Channel:
    """Open a channel from the remote host to an address."""
    return transport.open_channel("direct-tcpip", (hostname, port), ("127.0.0.1", 0), timeout=CONNECT_TIMEOUT_S)


class _SshStream:
    def __init__(self, channel: paramiko.Channel) -> None:
        self.channel = channel

    def __iter__(self) -> Iterator[str]:
        with contextlib.suppress(*BROKEN):
            file = self.channel.makefile("rb")
            while line := file.readline(MAX_LINE):
                yield line.decode("utf-8", "replace")

    def send(self, text: str) -> None:
        try:
            self.channel.sendall(text.encode())
        except BROKEN as error:
            raise _lost(error) from None

    def end_input(self) -> None:
        with contextlib.suppress(*BROKEN):
            self.channel.shutdown_write()

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self.channel.close()
