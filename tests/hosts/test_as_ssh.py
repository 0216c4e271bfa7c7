"""Whom ssh lets in and what it records, seeded: the same known_hosts, keys, agents and settings, by ssh and by us."""

import contextlib
import getpass
import os
import random
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ed448
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from llama405b_tools.hosts import ssh as ours
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.ssh import MAX_CONNECTIONS, Ssh
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.run.screen import terminal_command
from ops_rig import wait_for

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")
pytestmark = pytest.mark.skipif(not SSHD, reason="NOT RUN: needs openssh-server")
LINES = (
    "NAME HOST", "NAME OTHER", "NAME RSA", "* HOST", "*,!NAME HOST", "127.0.0.? HOST", "127.0.0.1 HOST",
    "127.0.0.1 OTHER", "the-alias HOST",
    "@cert-authority * CA", "@cert-authority NAME CA", "@cert-authority 127.* CA", "@cert-authority * OTHER",
    "@revoked * HOST", "@revoked * CA",
    "nonsense", "# NAME HOST", "NAME ssh-ed25519 AAAAbroken",
    "THE-ALIAS HOST", "the-* HOST", "the-*,!the-alias HOST", "other,NAME HOST", "NAME OTHER\nNAME HOST", "|1|bad|hash HOST",
)  # fmt: skip
SETTINGS = (
    "HostKeyAlias the-alias", "StrictHostKeyChecking accept-new", "StrictHostKeyChecking no", "StrictHostKeyChecking yes",
    "UserKnownHostsFile /dev/null", "UserKnownHostsFile none", "HashKnownHosts yes",
    "UserKnownHostsFile DIR/known DIR/second", "GlobalKnownHostsFile DIR/second",
)  # fmt: skip
CERTIFICATES = (
    "",
    "-n 127.0.0.1 -V always:forever",
    "-n 127.0.0.1 -V -2d:-1d",
    "-n other",
    "-n 127.*",
    "",
    "-n 127.0.0.1,the-alias",
)


def keygen(*words):
    return subprocess.run(["ssh-keygen", "-q", *map(str, words)], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Keys by name, as (kind and base64); and their directory."""
    place = tmp_path_factory.mktemp("keys")
    for name in ("HOST", "OTHER", "CA", "good", *(f"bad{i}" for i in range(7))):
        keygen("-t", "ed25519", "-N", "", "-f", place / name)
    keygen("-t", "rsa", "-N", "", "-f", place / "RSA")
    shutil.copy(place / "good", place / "locked")
    keygen("-p", "-P", "", "-N", "secret", "-f", place / "locked")
    odd = ed448.Ed448PrivateKey.generate()
    (place / "odd").write_bytes(odd.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (place / "odd").chmod(0o600)
    (place / "authorized").write_text((place / "good.pub").read_text())
    return place


@contextlib.contextmanager
def sshd(place, *more):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    settings = (
        f"HostKey {place}/HOST", f"AuthorizedKeysFile {place}/authorized", "StrictModes no", "PidFile none", "UsePAM no",
        "ListenAddress 127.0.0.1", "MaxAuthTries 6", *more,
    )  # fmt: skip
    (place / "sshd_config").write_text("\n".join(settings))
    child = subprocess.Popen([SSHD, "-D", "-q", "-f", place / "sshd_config", "-p", str(port)])
    try:
        wait_for(lambda: not socket.socket().connect_ex(("127.0.0.1", port)))
        yield port
    finally:
        child.terminate()
        child.wait(20)


@pytest.fixture
def both(keys, tmp_path, monkeypatch):
    """Have ssh and this program log in with the same files; returns what each did: whether it came in, and recorded what."""
    monkeypatch.setattr(ours, "RETRY_DELAYS_S", ())
    monkeypatch.setenv("LLAMA405B_SSH_CONFIG", str(tmp_path / "config"))

    def logs_in(port, settings, known=""):
        text = f"Host h\n  HostName 127.0.0.1\n  Port {port}\n  BatchMode yes\n"
        defaults = [f"UserKnownHostsFile {tmp_path}/known", "GlobalKnownHostsFile none"]
        if not any("IdentityFile" in line for line in settings):
            defaults.append(f"IdentityFile {keys}/good")
        (tmp_path / "config").write_text(text + "".join(f"  {line}\n" for line in (*settings, *defaults)))
        for name in ("HOST", "OTHER", "RSA", "CA"):
            known = known.replace(name, " ".join((keys / f"{name}.pub").read_text().split()[:2]))
        known = known.replace("NAME", f"[127.0.0.1]:{port}")
        found = []
        for log_in in (_ssh, _ours):
            (tmp_path / "known").write_text(known)
            came_in = log_in(tmp_path / "config")
            added = (tmp_path / "known").read_text().removeprefix(known).split()
            found.append((came_in, added and [added[0][:3], *added[1:]]))
        return found

    return logs_in


def _ssh(config):
    command = ["ssh", "-F", config, "-o", "UpdateHostKeys no", "h", "true"]
    return (
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60).returncode == 0
    )


def _ours(_config):
    try:
        Ssh(Host("h", "hosts:1")).close()
    except HostError as error:
        _ours.said = str(error)
        return False
    return True


@pytest.mark.parametrize("cases", [12, pytest.param(50, marks=pytest.mark.soak)])
@pytest.mark.parametrize("certificate", range(len(CERTIFICATES)))
def test_a_host_key_is_accepted_where_ssh_accepts_it(both, keys, tmp_path, certificate, cases):
    words, chance = CERTIFICATES[certificate], random.Random(2026 + certificate)
    if words:
        keygen("-s", keys / "CA", "-h", "-I", "x", *words.split(), keys / "HOST.pub")
    more = [f"HostCertificate {keys}/HOST-cert.pub"] * bool(words)
    with sshd(keys, *more) as port:
        second = f"[127.0.0.1]:{port} {(keys / 'HOST.pub').read_text()}"
        for _ in range(cases):
            (tmp_path / "second").write_text(second)
            known = "\n".join(chance.sample(LINES, chance.choice((0, 1, 1, 2, 3)))) + "\n" * chance.choice((0, 1))
            settings = chance.sample(SETTINGS, chance.choice((0, 0, 1, 2)))
            settings = [each.replace("DIR", str(tmp_path)) for each in settings]
            by_ssh, by_us = both(port, settings, known)
            assert by_us == by_ssh, (known, settings, words)


@pytest.fixture
def agent(keys, tmp_path, monkeypatch):
    """An agent with keys, at AGENT; and another, without any, at EMPTY."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    children = []

    def start(names):
        for place, held in (("AGENT", names), ("EMPTY", ())):
            children.append(subprocess.Popen(["ssh-agent", "-D", "-a", tmp_path / place], stdout=subprocess.DEVNULL))
            wait_for((tmp_path / place).exists)
            for name in held:
                env = os.environ | {"SSH_AUTH_SOCK": str(tmp_path / place), "SSH_ASKPASS": str(tmp_path / "ask")}
                (tmp_path / "ask").write_text("#!/bin/sh\necho secret\n")
                (tmp_path / "ask").chmod(0o755)
                env |= {"SSH_ASKPASS_REQUIRE": "force"}
                subprocess.run(["ssh-add", "-q", keys / name], env=env, check=True, stdin=subprocess.DEVNULL)

    yield start
    for child in children:
        child.terminate()
        child.wait(20)


BAD = tuple(f"bad{i}" for i in range(7))
MINE = ["IdentitiesOnly yes", "IdentityFile KEYS/locked"]
WHERE = {"SSH_AUTH_SOCK": "DIR/AGENT"}


@pytest.mark.parametrize(
    ("held", "env", "settings", "comes_in", "words"),
    [
        ((*BAD, "locked"), WHERE, MINE, True, ""),
        ((*BAD, "good"), WHERE, ["IdentitiesOnly yes", "IdentityFile KEYS/good.pub"], True, ""),
        ((*BAD, "good"), WHERE, ["IdentitiesOnly yes", "IdentityFile KEYS/only"], True, ""),
        ((), {}, ["IdentityFile KEYS/odd", "IdentityFile KEYS/sshd_config", "IdentityFile KEYS/good"], True, ""),
        (("good",), {}, ["IdentityAgent DIR/AGENT", *MINE], True, ""),
        (("good",), {"MINE": "DIR/AGENT", "SSH_AUTH_SOCK": "DIR/EMPTY"}, ["IdentityAgent $MINE", *MINE], True, ""),
        (("good",), WHERE, ["IdentityAgent none", *MINE], False, "start an agent, or name it with IdentityAgent, and run `ssh-add "),
        (("bad1",), WHERE, MINE, False, "its private key KEYS/locked needs a passphrase, and no agent has it; run `ssh-add KEYS/locked`"),
        ((*BAD, "good"), WHERE, ["IdentityFile none"], False, "after 6 keys (MaxAuthTries), of 8; name the right one with IdentityFile"),
        (("bad1",), WHERE, ["IdentityFile KEYS/bad2"], False, "login as ME was refused; install your public key on it"),
        ((), {}, ["IdentityFile none"], False, "login as ME was refused; there is no key to log in with: run `ssh-keygen`"),
    ],
    ids=["in the agent", ".pub", "its .pub", "odd files", "IdentityAgent", "$", "none", "locked", "too many", "refused", "no key"],
)  # fmt: skip
def test_a_key_is_found_where_ssh_finds_it(
    both, keys, agent, tmp_path, monkeypatch, held, env, settings, comes_in, words
):
    def filled(text):
        return text.replace("DIR", str(tmp_path)).replace("KEYS", str(keys)).replace("ME", getpass.getuser())

    shutil.copy(keys / "good.pub", keys / "only.pub")
    agent(held)
    for name, value in env.items():
        monkeypatch.setenv(name, filled(value))
    with sshd(keys) as port:
        assert both(port, [*map(filled, settings)], "NAME HOST\n") == [(comes_in, []), (comes_in, [])]
    assert comes_in or filled(words) in _ours.said


@pytest.mark.parametrize("most", [1, 2, 4])
def test_where_sshd_allows_few_sessions_on_a_connection_there_are_several(both, keys, most):
    with sshd(keys, f"MaxSessions {most}") as port:
        assert both(port, [], "NAME HOST\n") == [(True, []), (True, [])]
        connection = Ssh(Host("h", "hosts:1"))
        with contextlib.closing(connection):
            streams = [connection.stream("cat", f"{i}\n") for i in range(5)]
            assert [next(iter(stream)) for stream in streams] == [f"{i}\n" for i in range(5)]
            assert connection.run("echo more", "", 30.0).out == "more\n"
            assert len(connection.transports) == -(-6 // most)
            for _ in range(MAX_CONNECTIONS if most == 1 else 1):  # as a firewall does, again and again
                for transport in connection.session_transports[1:]:
                    transport.close()
                assert connection.run("echo more", "", 30.0).out == "more\n"
                assert len(connection.session_transports) == 2
            for stream in streams:
                stream.close()
            # sshd confirms the end of a channel after it has released its session.
            wait_for(lambda: connection.transport._channels.get(streams[0].channel.chanid) is None)
            assert connection.run("echo again", "", 30.0).out == "again\n"
            assert len(connection.session_transports) == 2


def test_what_a_user_s_config_says_keeps_no_command_from_running(both, keys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken, sshd(keys) as port:
        local = taken.getsockname()[1]
        (tmp_path / "known").write_text(f"[127.0.0.1]:{port} {(keys / 'HOST.pub').read_text()}")
        lines = [
            "Host h",
            "HostName 127.0.0.1",
            f"Port {port}",
            f"IdentityFile {keys}/good",
            f"UserKnownHostsFile {tmp_path}/known",
        ]
        for settings in (
            ["RemoteCommand tmux new -A -s main", "RequestTTY yes"],
            [f"LocalForward {local} 127.0.0.1:1", "ExitOnForwardFailure yes"],
            ["SessionType none", "StdinNull yes", "ForkAfterAuthentication yes"],
            ["RequestTTY no", "ControlMaster auto", f"ControlPath {tmp_path}/dead"],
        ):
            (tmp_path / "dead").unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(tmp_path / "dead"))
            (tmp_path / "config").write_text("".join(f"{line}\n" for line in (*lines, *settings)))
            with contextlib.closing(Ssh(Host("h", "hosts:1"))) as connection:
                assert connection.run("echo it ran", "", 30.0).out == "it ran\n"
            done = subprocess.run(
                terminal_command(Host("h", "hosts:1"), "echo it ran"),
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert (done.returncode, done.stdout.strip()) == (0, "it ran"), (settings, done.stderr)
