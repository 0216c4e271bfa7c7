"""The hosts file, parsed. Pure: text in, hosts out.

One host per line: ``[user@]host[:port] [slots=N] [address=A] [workdir=DIR] [python=PATH] [cache=DIR] [scratch=DIR]``.
``node[001-008]`` is eight hosts. ``#`` begins a comment. Rank order is line order; the first host is the head.
"""

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence

from llama405b.contract.errors import UserError, short
from llama405b_tools.text.words import CONTROLS

# '_' is no part of a host name by RFC 1123, but DNS, /etc/hosts and ssh know names with it, and clusters have them
TARGET = re.compile(
    r"(?:(?P<user>[A-Za-z_][A-Za-z0-9_.-]*)@)?(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[0-9]{1,9}-[0-9]{1,9}\])?[A-Za-z0-9._-]*?)(?::(?P<port>[0-9]{1,9}))?"
)
RANGE = re.compile(r"\[([0-9]+)-([0-9]+)\]")
KEYS = ("slots", "address", "workdir", "python", "cache", "scratch")
FULL_PATH = (re.compile(r"~?/.*"), "is relative; write a full path")
ADDRESS_WORDS = "is not a valid address; write an IP address or a host name"
ADDRESS = (re.compile("[A-Za-z0-9][A-Za-z0-9._-]*|[0-9A-Fa-f:]+"), ADDRESS_WORDS)
# the valid form of a value, and the message for any other
FORMS = {"address": ADDRESS, "workdir": FULL_PATH, "cache": FULL_PATH, "scratch": FULL_PATH}
IPV6 = re.compile(r"\[?[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(%\w+)?\]?")
MAX_SLOTS, MAX_WORD, MAX_LINE = 1024, 1000, 4096
MOST_RANKS = 128  # as other programs write them, host:8; below it, only port 22 is an sshd's
MAX_HOSTS = 4096
LOCAL = "127.0.0.1"  # for every name of loopback, whatever /etc/hosts says of it
LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """One line of the hosts file."""

    name: str  # also passed to ssh
    where: str  # "hosts:7"
    user: str = ""
    port: int = 0  # 0: from ~/.ssh/config, else 22
    slots: int = 0  # ranks on this host; 0: one per GPU, or 1 without GPUs
    address: str = ""  # on the training network; "": the address that ssh uses
    workdir: str = ""  # "": the operator's
    python: str = ""  # "": the operator's
    cache: str = ""  # HF_HOME of the ranks; "": the user's own
    scratch: str = ""  # TMPDIR of the ranks, on a fast disk; "": the host's own
    prefix: str = ""  # a shell line that runs before everything else; from setup --module

    @property
    def places(self) -> dict[str, str]:
        """Directories that the line sets for files outside the run's own directory, by key."""
        return {key: path for key, path in (("cache", self.cache), ("scratch", self.scratch)) if path}

    @property
    def loopback(self) -> bool:
        """Whether its training address is a loopback address, which other machines cannot reach."""
        return LOOPBACK.fullmatch(self.address or self.name) is not None


def parse_hosts(text: str, source: str) -> tuple[Host, ...]:
    """Parse a hosts file.

    Raises:
        UserError: A line is invalid or repeats a host, or there are no hosts; names file and line.
    """
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = _words(line, f"{source}:{number}")
        if not words:
            continue
        if bad := CONTROLS.search(line):
            raise UserError(f"{source}:{number}: contains the control character {bad[0]!r}; delete it")
        for host in _parse_line(words, f"{source}:{number}"):
            if host.name in hosts:
                first = hosts[host.name].where.rpartition(":")[2]
                raise UserError(f"{host.where}: {host.name!r} repeats line {first}; delete one")
            hosts[host.name] = host
            if len(hosts) > MAX_HOSTS:
                raise UserError(f"{host.where}: more than {MAX_HOSTS} hosts; split the file")
    if not hosts:
        raise UserError(f"{source}: contains no hosts; write one per line, like 'gpu-01 slots=8'")
    found = tuple(hosts.values())
    _check_loopback(found)
    return tuple(dataclasses.replace(host, address=LOCAL) if host.loopback else host for host in found)


def _words(line: str, where: str) -> list[str]:
    """Split a line as a shell does: quotes keep the spaces of a path."""
    if len(line) > MAX_LINE:  # shlex takes the square of a word's length
        raise UserError(f"{where}: {short(line)!r} is too long ({len(line)} characters); shorten it")
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        raise UserError(f"{where}: a quote is not closed; close it, or delete it") from None


def _parse_line(words: Sequence[str], where: str) -> list[Host]:
    if long := [word for word in words if len(word) > MAX_WORD]:
        raise UserError(f"{where}: {short(long[0])!r} is too long ({len(long[0])} characters); shorten it")
    if IPV6.fullmatch(address := words[0].rpartition("@")[2]):
        how = f"write a name here, and add `Host <name>` with `HostName {address.strip('[]')}` to ~/.ssh/config"
        raise UserError(f"{where}: {words[0]!r} is an IPv6 address, but a hosts file takes only names and IPv4; {how}")
    user, name, port = _parse_target(words[0], where)
    options = _parse_options(words[1:], where)
    slots = int(options.pop("slots", 0))
    return [Host(each, where, user, port, slots, **options) for each in _expand(name, where)]


def _parse_target(target: str, where: str) -> tuple[str, str, int]:
    """Return the user ('': not given), the name and the port (0: not given)."""
    match = TARGET.fullmatch(target)
    if not match:
        form = "[user@]host[:port], with letters, digits, '.', '_' and '-'"
        raise UserError(f"{where}: {target!r} is not a valid host; write {form}")
    port = int(match["port"] or 0)
    if match["port"] and not 0 < port < 65536:
        raise UserError(f"{where}: port {port} is out of range; use 1 to 65535")
    if match["port"] and port <= MOST_RANKS and port != 22:
        raise UserError(
            f"{where}: {target!r} names port {port}; for {port} ranks, write '{match['name']} slots={port}'"
        )
    return match["user"] or "", match["name"], port


def _parse_options(words: Sequence[str], where: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in KEYS or not equals or not value:
            use = f"use {', '.join(f'{k}=' for k in KEYS)}"
            if not equals and key not in KEYS and TARGET.fullmatch(word):
                use = f"for {word} ranks, write slots={word}" if word.isdecimal() else "write one host per line"
            raise UserError(f"{where}: {word!r} is not a valid option; {use}")
        if key in options:
            raise UserError(f"{where}: {key}= is given twice; delete one")
        options[key] = value
    _check_options(options, where)
    return options


def _check_options(options: Mapping[str, str], where: str) -> None:
    slots = options.get("slots", "1")
    if not re.fullmatch("[0-9]{1,4}", slots) or not 0 < int(slots) <= MAX_SLOTS:
        raise UserError(f"{where}: slots={slots} is not a valid number of ranks; write slots=8")
    if IPV6.fullmatch(options.get("address", "")) and not LOOPBACK.fullmatch(options["address"]):
        what = f"address={options['address']} is an IPv6 address, but the hosts meet over IPv4"
        raise UserError(f"{where}: {what}; write the host's IPv4 address on the training network, or a name for it")
    for key, (form, fault) in FORMS.items():
        if key in options and not form.fullmatch(options[key]):
            raise UserError(f"{where}: {key}={options[key]} {fault}")


def _expand(name: str, where: str) -> list[str]:
    """Return the names in a range: ``node[08-10]`` is node08, node09, node10."""
    span = RANGE.search(name)
    if not span:
        return [name]
    first, last = int(span[1]), int(span[2])
    if first > last or last - first >= MAX_HOSTS:
        raise UserError(f"{where}: range [{span[1]}-{span[2]}] is empty or too long; write it as [001-008]")
    width = len(span[1]) if span[1].startswith("0") else 0
    return [f"{name[: span.start()]}{i:0{width}d}{name[span.end() :]}" for i in range(first, last + 1)]


def _check_loopback(hosts: Sequence[Host]) -> None:
    """Refuse a loopback host among others: each other host would look for it on itself."""
    local = [host for host in hosts if host.loopback]
    if local and len(local) < len(hosts):
        first = local[0]
        what = f"{first.name!r} is at {first.address or first.name}, where the other hosts cannot reach it"
        raise UserError(f"{first.where}: {what}; set its address= on the training network")
