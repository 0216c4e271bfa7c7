"""Tables of other programs' keys and what each maps to here. Reads only files of this package.

``words`` has flags that people type, whatever the program; the others are for recipes (``llama405b import``) and are searched
after it.
"""

import csv
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

TABLES = Path(__file__).parent / "tables"
WORDS = "words"
# The tables to search for a program's keys, in order: its own first.
PROGRAMS = {
    "axolotl": ("axolotl", "accelerate", "transformers"),
    "llama-factory": ("llama-factory", "transformers", "accelerate"),
    "torchtune": ("torchtune",),
    "automodel": ("automodel",),
    "torchtitan": ("torchtitan",),
    "deepspeed": ("deepspeed",),
    "accelerate": ("accelerate",),
    "trl": ("trl", "transformers", "accelerate"),
    "transformers": ("transformers", "accelerate"),
}


class Row(NamedTuple):
    """What another program's key maps to.

    ``setting`` is a setting, part of one (@name), nothing (''), something unsupported (!) or something that differs here (~).
    """

    key: str
    setting: str
    how: str  # how ``verbs.recipes`` reads the value
    why: str


@functools.cache
def table(name: str) -> Mapping[str, Row]:
    """Return a table's rows by key."""
    with (TABLES / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return {row["key"]: Row(**row) for row in csv.DictReader(file)}


def row_of(key: str, program: str) -> Row | None:
    """Return the row of a recipe's key, else of its longest prefix that ends in a star; None if unknown."""
    for each in PROGRAMS[program]:
        if found := table(each).get(key):
            return found
    begins = [row for each in PROGRAMS[program] for row in table(each).values() if row.key.endswith("*")]
    return max(
        (row for row in begins if f"{key}.".startswith(row.key[:-1])), key=lambda row: len(row.key), default=None
    )


def word(flag: str) -> Row | None:
    """Return the row of a flag that people type, or None.

    Flags are like ``learning_rate``, or like another program's ``optimizer.lr``.
    """
    last = flag.rpartition(".")[2]
    found = [table(WORDS).get(last), *(table(each).get(name) for name in (flag, last) for each in PROGRAMS)]
    return next((row for row in found if row and not row.setting.startswith("@")), None)
