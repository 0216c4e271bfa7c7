"""What other programs call things: tables, a row for each key, of what becomes of it here. Knows files of this package alone.

``words`` has what people type as flags, whatever the program; the others are for recipes (``llama405b import``), and are looked into
after it.
"""

import csv
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

TABLES = Path(__file__).parent / "tables"
WORDS = "words"
# The tables in which a program's keys are looked up, its own first.
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
    """What becomes of a key: a setting, a part of some (@name), nothing (''), what cannot be done (!), or is otherwise (~)."""

    key: str
    setting: str
    how: str  # its value is read, as ``verbs.recipes`` knows
    why: str


@functools.cache
def table(name: str) -> Mapping[str, Row]:
    """Return a table, by key."""
    with (TABLES / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return {row["key"]: Row(**row) for row in csv.DictReader(file)}


def row_of(key: str, program: str) -> Row | None:
    """Return what becomes of a recipe's key, by itself or by the longest begin of it that ends in a star; None if it is not known."""
    for each in PROGRAMS[program]:
        if found := table(each).get(key):
            return found
    begins = [row for each in PROGRAMS[program] for row in table(each).values() if row.key.endswith("*")]
    return max(
        (row for row in begins if f"{key}.".startswith(row.key[:-1])), key=lambda row: len(row.key), default=None
    )


def word(flag: str) -> Row | None:
    """Return what becomes of a flag that people type: ``learning_rate``, ``optimizer.lr`` in a section of another program's."""
    last = flag.rpartition(".")[2]
    found = [table(WORDS).get(last), *(table(each).get(name) for name in (flag, last) for each in PROGRAMS)]
    return next((row for row in found if row and not row.setting.startswith("@")), None)
