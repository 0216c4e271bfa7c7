"""Which host keys are known. ssh's own ssh-keygen reads known_hosts: patterns, hashed names, several keys, revoked ones, authorities.

It also checks the signature of a host's certificate. What follows is as in ssh, too, except that nobody is asked.
"""

import base64
import contextlib
import dataclasses
import fnmatch
import hashlib
import hmac
import os
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.phrases import given
from llama405b_tools.hosts.ssh_config import SshOptions
from llama405b_tools.hosts.transport import HostError

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
        why = "keys are read by the `ssh-keygen` program, which is not installed on this machine"
        raise HostError(f"{why}; install it (apt-get install openssh-client)") from None
    except subprocess.TimeoutExpired:
        raise HostError(f"`{shlex.join(['ssh-keygen', *words])}` does not end within {WITHIN_S:.0f} s") from None
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
                if len(words) > 2 and words[0] != "#":
                    found.append(KnownKey(path, mark, words[1], words[2], name == own))
    return found


def check_host_key(name: str, options: SshOptions, known: Sequence[KnownKey], shown: str, cert: str = "") -> None:
    """Check the key that a host shows, as its kind and base64; ``cert``: its certificate in the same form."""
    kind, key = shown.split()
    plain = [each for each in known if not each.mark]
    own = [each for each in plain if each.is_own and each.kind == kind]
    if any(each.key == key for each in known if each.mark == REVOKED):
        raise HostError("its host key is revoked in known_hosts (@revoked); give it a new one", "AUTH")
    if any(each.key == key for each in own or plain) or (cert and _vouches(known, options, cert)):
        return
    if options.strict == "false" or (options.strict == "accept-new" and not own and options.records):
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
        keeps = f"UserKnownHostsFile {options.records or 'none'} keeps none; name a file in ~/.ssh/config"
        accept = given(", or set StrictHostKeyChecking accept-new there", str(options.records or ""))
        raise HostError(f"its host key is not in known_hosts, and {keeps}{accept}", "AUTH")
    vouched = ", nor has it a valid certificate of a @cert-authority there" if len(plain) < len(known) else ""
    raise HostError(f"its host key is not in known_hosts{vouched}; run `ssh {name}` once and verify it", "AUTH")


def _vouches(known: Sequence[KnownKey], options: SshOptions, cert: str) -> bool:
    """Whether a certificate is this host's, valid now, and signed by an authority that is known for it."""
    said = CERTIFICATE.search(ssh_keygen("-L", "-f", "-", stdin=f"{cert}\n"))
    if not said:
        return False
    signers = {mark: {fingerprint(each.key) for each in known if each.mark == mark} for mark in (AUTHORITY, REVOKED)}
    names, now = said["names"].split(), time.strftime("%Y-%m-%dT%H:%M:%S")  # in local time, as it prints them
    return (
        said["signer"] in signers[AUTHORITY] - signers[REVOKED]
        and (said["begin"] or now) <= now < (said["end"] or "9")
        and (not names or any(fnmatch.fnmatchcase(options.alias or options.hostname.lower(), each) for each in names))
    )


def _record(options: SshOptions, key: str) -> None:
    """Add a new host's key, as ssh does; where it cannot be written, the host stays new."""
    name = name_of(options)
    if options.hashes:
        salt = os.urandom(20)
        digest = hmac.digest(salt, name.encode(), "sha1")
        name = "|".join(["", "1", *(base64.b64encode(each).decode() for each in (salt, digest))])
    if path := options.records:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with path.open("a+b") as file:
                file.seek(0)
                begin = "" if file.read()[-1:] in (b"", b"\n") else "\n"
                file.write(f"{begin}{name} {key}\n".encode())
