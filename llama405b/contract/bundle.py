"""One file with what ``bench`` found, which a stranger can send: figures, versions, allocator statistics, and what failed.

It has no secret: no environment is read, and of texts what other programs said (``fault``), in which the operator's host names, user,
home directory and network addresses are replaced, and whatever looks like a token. Names of hosts stay if they are asked for.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from llama405b.contract.code_version import code_version
from llama405b.contract.errors import UserError
from llama405b.contract.files import write_json
from llama405b.contract.phrases import reason_of
from llama405b.contract.probes import OPEN, Probe, ProbeResult
from llama405b.contract.reader import Json

FORMAT = 1
Covers = Sequence[tuple[re.Pattern[str], str]]  # what is replaced, by what
ALWAYS: Covers = (
    # Tokens of Hugging Face, GitHub and others, keys of Weights & Biases, and whatever follows a word for one.
    (
        re.compile(r"\b(?:hf_|ghp_|sk-)[\w-]{8,}|\b[0-9a-f]{40}\b|(?i:(?<=token=)|(?<=password=)|(?<=key=))[^\s,;&]+"),
        "[secret]",
    ),
    (re.compile(r"/(?:home|Users)/[^/\s:'\"]+"), "/home/[user]"),
    (re.compile(r"\b[\w.-]+@(?=\w)"), "[user]@"),
)
ADDRESSES: Covers = (
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b"), "[address]"),
    (re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{0,4}:){3,7}[0-9a-fA-F]{1,4}(?![\w:])"), "[address]"),
)


def check_bundle(path: Path | None, *, with_host_names: bool) -> None:
    """Refuse at once what could not be written at the end."""
    if path is None:
        if with_host_names:
            raise UserError("--with-host-names is for --bundle; add --bundle FILE")
        return
    try:
        write_json(path, {"format": FORMAT})
    except OSError as error:
        raise _unwritable(path, error) from None


def write_bundle(
    path: Path, results: Sequence[ProbeResult], tests: Sequence[Probe], date: str, hosts: Sequence[str], *, named: bool
) -> None:
    """Write the file; ``hosts``: names that become ``host-1`` and so on, unless ``named``.

    Raises:
        UserError: It cannot be written.
    """
    known = {result.probe for result in results}
    content: dict[str, Json] = {
        "format": FORMAT,
        "llama405b": code_version(),
        "date": date,
        "without_result": [probe.value for probe in tests if probe not in known],
        "expected": {probe.value: OPEN[probe].expected for probe in tests if probe in OPEN},
        "results": [json.loads(json.dumps(dataclasses.asdict(result))) for result in results],
    }
    nodes = [result.software.node for result in results if result.software]
    covers = ALWAYS if named else [*ALWAYS, *covers_of_names([*hosts, *nodes]), *ADDRESSES]
    try:
        write_json(path, {key: covered(value, covers) for key, value in content.items()})
    except OSError as error:
        raise _unwritable(path, error) from None


def covers_of_names(hosts: Iterable[str]) -> Covers:
    """Return what makes ``host-1`` and so on of each name; one that is part of another comes after it."""
    names = list(dict.fromkeys(name for name in hosts if name))
    aliases = {name: f"host-{number}" for number, name in enumerate(names, 1)}
    longest_first = sorted(aliases, key=len, reverse=True)
    return [(re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])"), aliases[name]) for name in longest_first]


def covered(value: Json, covers: Covers) -> Json:
    """Return a value in whose texts nothing tells whose machines these are; keys stay as they are."""
    if isinstance(value, str):
        for pattern, instead in covers:
            value = pattern.sub(instead, value)
        return value
    if isinstance(value, Mapping):
        return {key: covered(each, covers) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [covered(each, covers) for each in value]
    return value


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"--bundle: {path} cannot be written ({reason_of(error)}); name another file")
