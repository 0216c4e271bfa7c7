"""Which versions of packages are known to go wrong, and with which settings: ``known_bugs.toml``."""

import dataclasses
import functools
import operator
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from llama405b.contract import reader
from llama405b.contract.phrases import given
from llama405b.contract.schema import Config

TABLE = Path(__file__).with_name("known_bugs.toml")


@dataclasses.dataclass(frozen=True, slots=True)
class KnownBug:
    """A fault of some versions of a package."""

    package: str
    since: str  # the first version that has it
    level: Literal["warn", "refuse"]
    what: str  # as a clause about that version
    remedy: str
    until: str = ""  # the first version that has it no more; "": none yet
    link: str = ""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # with these values alone

    @property
    def cure(self) -> str:
        """What to do, and where to read about it."""
        return f"{self.remedy}{given(' ({})', self.link)}"

    def concerns(self, config: Config | None, versions: Mapping[str, str]) -> bool:
        """Whether these versions with these settings have it."""
        version, until = parsed(versions.get(self.package, "")), parsed(self.until)
        if not version or version < parsed(self.since) or (until and version >= until):
            return False
        return all(config and operator.attrgetter(key)(config) == value for key, value in self.settings.items())


def known_bugs(config: Config | None, versions: Mapping[str, str]) -> dict[str, KnownBug]:
    """Return the known bugs of these versions with these settings (None: unknown), by what to say of each."""
    return {
        f"{bug.package} {versions[bug.package]} {bug.what}": bug for bug in table() if bug.concerns(config, versions)
    }


def parsed(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (2, 13, 0) of ``2.13.0+cpu``; () if it begins with none."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


@functools.cache
def table() -> tuple[KnownBug, ...]:
    """Return all known bugs."""
    return reader.read(tuple[KnownBug, ...], tomllib.loads(TABLE.read_text(encoding="utf-8"))["bug"], TABLE.name)
