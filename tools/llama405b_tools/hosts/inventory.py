"""The hosts file, parsed. Pure: text in, hosts out.

One host per line: ``[user@]host[:port] [slots=N] [address=A] [workdir=DIR] [python=PATH] [cache=DIR] [scratch=DIR]``.
``node[001-008]`` is eight hosts. ``#`` begins a comment. Rank order is line order; the first host is the head.
"""

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence

from llama405b.contract.errors import UserError, shorten
from llama405b_tools.text.words import CONTROLS

# '_' is no part of a host name by RFC 1123, but DNS, /etc/hosts and ssh know names with it, and clusters have them
TARGET = re.compile(
    r"(?:(?P<user>[A-Za-z_][A-Za-z0-9_.-]*)@)?(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[0-9]{1,9}-[0-9]{1,9}\])?[A-Za-z0-9._-]*?)(?::(?P<port>[0-9]{1,9}))?"
)
RANGE = re.compile(r"\[([0-9]+)-([0-9]+)\]")
OPTION_KEYS = ("slots", "address", "workdir", "python", "cache", "scratch")
FULL_PATH = (re.compile(r"~?/.*"), "is relative; write a full path")
ADDRESS_FAULT = "is not a valid address; write an IP address or a host name"
ADDRESS = (re.compile("[A-Za-z0-9][A-Za-z0-9._-]*|[0-9A-Fa-f:]+"), ADDRESS_FAULT)
# the valid form of a value, and the message for any other
FORMS = {"address": ADDRESS, "workdir": FULL_PATH, "cache": FULL_PATH, "scratch": FULL_PATH}
IPV6 = re.compile(r"\[?[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(%\w+)?\]?")
MAX_SLOTS, MAX_WORD, MAX_LINE = 1024, 1000, 4096
MAX_RANKS_AS_PORT = 128  # as other programs write them, host:8; below it, only port 22 is an sshd's
MAX_HOSTS = 4096
LOOPBACK_ADDRESS = "127.0.0.1"  # for every name of loopback, whatever /etc/hosts says of it
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
    def is_loopback(self) -> bool:
        """Whether its training address is a loopback address, which other machines cannot reach."""
        return LOOPBACK.fullmatch(self.address or self.name) is not None


def parse_hosts(text: str, source: str) -> tuple[Host, ...]:
    """Parse a hosts file.

    Raises:
        UserError: A line is invalid or repeats a host, or there are no hosts; names file and line.
    """
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = _split_words(line, f"{source}:{number}")
        if not words:
            continue
        if match := CONTROLS.search(line):
            raise UserError(f"{source}:{number}: contains the control character {match[0]!r}; delete it")
        for host in _parse_line(words, f"{source}:{number}"):
            if host.name in hosts:
                first_line = hosts[host.name].where.rpartition(":")[2]
                raise UserError(f"{host.where}: {host.name!r} repeats line {first_line}; delete one")
            hosts[host.name] = host
            if len(hosts) > MAX_HOSTS:
                raise UserError(f"{host.where}: more than {MAX_HOSTS} hosts; split the file")
    if not hosts:
        raise UserError(f"{source}: contains no hosts; write one per line, like 'gpu-01 slots=8'")
    parsed_hosts = tuple(hosts.values())
    _check_loopback(parsed_hosts)
    return tuple(
        dataclasses.replace(host, address=LOOPBACK_ADDRESS) if host.is_loopback else host for host in parsed_hosts
    )


def _split_words(line: str, location: str) -> list[str]:
    """Split a line as a shell does: quotes keep the spaces of a path."""
    if len(line) > MAX_LINE:  # shlex takes the square of a word's length
        raise UserError(f"{location}: {shorten(line)!r} is too long ({len(line)} characters); shorten it")
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        raise UserError(f"{location}: a quote is not closed; close it, or delete it") from None


def _parse_line(words: Sequence[str], location: str) -> list[Host]:
    if long_words := [word for word in words if len(word) > MAX_WORD]:
        raise UserError(
            f"{location}: {shorten(long_words[0])!r} is too long ({len(long_words[0])} characters); shorten it"
        )
    if IPV6.fullmatch(address := words[0].rpartition("@")[2]):
        advice = f"write a name here, and add `Host <name>` with `HostName {address.strip('[]')}` to ~/.ssh/config"
        raise UserError(
            f"{location}: {words[0]!r} is an IPv6 address, but a hosts file takes only names and IPv4; {advice}"
        )
    user, name, port = _parse_target(words[0], location)
    options = _parse_options(words[1:], location)
    slots = int(options.pop("slots", 0))
    return [Host(host_name, location, user, port, slots, **options) for host_name in _expand_range(name, location)]


def _parse_target(target: str, location: str) -> tuple[str, str, int]:
    """Return the user ('': not given), the name and the port (0: not given)."""
    match = TARGET.fullmatch(target)
    if not match:
        expected_form = "[user@]host[:port], with letters, digits, '.', '_' and '-'"
        raise UserError(f"{location}: {target!r} is not a valid host; write {expected_form}")
    port = int(match["port"] or 0)
    if match["port"] and not 0 < port < 65536:
        raise UserError(f"{location}: port {port} is out of range; use 1 to 65535")
    if match["port"] and port <= MAX_RANKS_AS_PORT and port != 22:
        raise UserError(
            f"{location}: {target!r} names port {port}; for {port} ranks, write '{match['name']} slots={port}'"
        )
    return match["user"] or "", match["name"], port


def _parse_options(words: Sequence[str], location: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in OPTION_KEYS or not equals or not value:
            advice = f"use {', '.join(f'{k}=' for k in OPTION_KEYS)}"
            if not equals and key not in OPTION_KEYS and TARGET.fullmatch(word):
                advice = f"for {word} ranks, write slots={word}" if word.isdecimal() else "write one host per line"
            raise UserError(f"{location}: {word!r} is not a valid option; {advice}")
        if key in options:
            raise UserError(f"{location}: {key}= is given twice; delete one")
        options[key] = value
    _check_options(options, location)
    return options


def _check_options(options: Mapping[str, str], location: str) -> None:
    slots = options.get("slots", "1")
    if not re.fullmatch("[0-9]{1,4}", slots) or not 0 < int(slots) <= MAX_SLOTS:
        raise UserError(f"{location}: slots={slots} is not a valid number of ranks; write slots=8")
    if IPV6.fullmatch(options.get("address", "")) and not LOOPBACK.fullmatch(options["address"]):
        problem = f"address={options['address']} is an IPv6 address, but the hosts meet over IPv4"
        raise UserError(
            f"{location}: {problem}; write the host's IPv4 address on the training network, or a name for it"
        )
    for key, (form, fault) in FORMS.items():
        if key in options and not form.fullmatch(options[key]):
            raise UserError(f"{location}: {key}={options[key]} {fault}")


def _expand_range(name: str, location: str) -> list[str]:
    """Return the names in a range: ``node[08-10]`` is node08, node09, node10."""
    match = RANGE.search(name)
    if not match:
        return [name]
    first, last = int(match[1]), int(match[2])
    if first > last or last - first >= MAX_HOSTS:
        raise UserError(f"{location}: range [{match[1]}-{match[2]}] is empty or too long; write it as [001-008]")
    width = len(match[1]) if match[1].startswith("0") else 0
    return [f"{name[: match.start()]}{i:0{width}d}{name[match.end() :]}" for i in range(first, last + 1)]


def _check_loopback(hosts: Sequence[Host]) -> None:
    """Refuse a loopback host among others: each other host would look for it on itself."""
    loopback_hosts = [host for host in hosts if host.is_loopback]
    if loopback_hosts and len(loopback_hosts) < len(hosts):
        first_host = loopback_hosts[0]
        problem = (
            f"{first_host.name!r} is at {first_host.address or first_host.name}, where the other hosts cannot reach it"
        )
        raise UserError(f"{first_host.where}: {problem}; set its address= on the training network")
