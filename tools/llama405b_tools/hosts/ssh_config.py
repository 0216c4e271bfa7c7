"""What ~/.ssh/config says about a host. OpenSSH itself reads it (``ssh -G``): Include, Match, canonical names and all."""

import dataclasses
import getpass
import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from llama405b.contract.errors import UserError
from llama405b.contract.trust import refuse_others_writing
from llama405b_tools.hosts.transport import HostError

# as ssh without IdentityFile
KEYS = [f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ecdsa_sk", "ed25519", "ed25519_sk")]
READ_WITHIN_S = 30.0  # it may look names up, and run what `Match exec` says
Said = Mapping[str, Sequence[str]]  # by option, in small letters: its values


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
    records: Path | None = None  # the one that new hosts are added to
    hashes: bool = False  # HashKnownHosts: those
    strict: str = "ask"  # StrictHostKeyChecking: true, false, accept-new, or ask, which is refused: nobody is asked
    keys: tuple[Path, ...] = ()  # IdentityFile
    only_these: bool = False  # IdentitiesOnly
    agent: str = ""  # IdentityAgent: its socket


def config_path() -> Path:
    """Return the configuration that is read."""
    return Path(os.environ.get("LLAMA405B_SSH_CONFIG", "~/.ssh/config")).expanduser()


def options_of(name: str, user: str = "", port: int = 0) -> SshOptions:
    """Return how to reach a host; ``user`` and ``port`` take precedence over the configuration."""
    path = config_path()
    said = _ask_ssh(path, name, user, port) if path.is_file() else {}
    return _options(said, name, user or getpass.getuser(), port or 22)


def _options(said: Said, name: str, user: str, port: int) -> SshOptions:
    def one(key: str, default: str) -> str:
        return said.get(key, [default])[0]

    def paths(words: Sequence[str]) -> tuple[Path, ...]:
        full = [re.sub("%(.)", lambda match: tokens.get(match[1], match[0]), word) for word in words if word != "none"]
        return tuple(Path(path).expanduser() for path in full)

    hostname = one("hostname", name)
    user = one("user", user)
    port = int(one("port", str(port)))
    alias, here = one("hostkeyalias", ""), socket.gethostname()
    tokens = {"%": "%", "d": str(Path.home()), "h": hostname, "i": str(os.getuid()), "k": alias or name, "l": here}
    tokens |= {"L": here.partition(".")[0], "n": name, "p": str(port), "r": user, "u": getpass.getuser()}
    known = paths(one("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2").split())
    known_to_all = paths(one("globalknownhostsfile", "/etc/ssh/ssh_known_hosts").split())
    agent = one("identityagent", "SSH_AUTH_SOCK")
    if agent == "SSH_AUTH_SOCK" or agent.startswith("$"):
        agent = os.environ.get(agent.strip("${}")) or "none"
    return SshOptions(
        hostname,
        user,
        port,
        one("proxyjump", "none"),
        one("proxycommand", "none"),
        alias,
        (*known, *known_to_all),
        next(iter(known), None),
        one("hashknownhosts", "no") == "yes",
        one("stricthostkeychecking", "ask"),
        paths(said.get("identityfile", KEYS)),
        one("identitiesonly", "no") == "yes",
        "".join(map(str, paths([agent]))),
    )


def _ask_ssh(path: Path, name: str, user: str, port: int) -> Said:
    """Ask ssh what it would do, without connecting."""
    argv = ["ssh", "-F", str(path), "-T", "-G", *(["-l", user] if user else []), *(["-p", str(port)] if port else [])]
    try:
        refuse_others_writing(path)  # `Match exec` runs commands
        done = subprocess.run(
            [*argv, "--", name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=READ_WITHIN_S,
            check=False,
        )
    except UserError as error:
        raise HostError(str(error)) from None
    except FileNotFoundError:
        need = "is read by the `ssh` program, which is not installed on this machine"
        raise HostError(f"{path} {need}; install it (apt-get install openssh-client)") from None
    except subprocess.TimeoutExpired:
        words = f"`ssh -F {path} -G {name}` does not end within {READ_WITHIN_S:.0f} s"
        raise HostError(f"{words}; correct what {path} looks up or executes", "TIMEOUT") from None
    if done.returncode:
        why = "; ".join(line.rstrip(".") for line in done.stderr.splitlines() if ": terminating, " not in line)
        raise HostError(f"ssh does not accept {path} ({why}); correct it")
    said: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        said.setdefault(key.lower(), []).append(value)
    return said
