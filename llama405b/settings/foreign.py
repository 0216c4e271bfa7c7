"""Tables of other programs' keys and what each maps to here. Reads only files of this package.

``words`` has flags that people type, whatever the program; the others are for recipes (``llama405b import``) and are searched
after it.
"""

import csv
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

TABLE_DIR = Path(__file__).parent / "tables"
FLAG_TABLE = "words"
# The tables to search for a program's keys, in order: its own first.
PROGRAM_TABLES = {
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


class ForeignKey(NamedTuple):
    """What another program's key maps to.

    ``setting`` is a setting, part of one (@name), nothing (''), something unsupported (!) or something that differs here (~).
    """

    key: str
    setting: str
    how: str  # how ``verbs.recipes`` reads the value
    why: str


@functools.cache
def foreign_keys(name: str) -> Mapping[str, ForeignKey]:
    """Return a table's rows by key."""
    with (TABLE_DIR / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return {row["key"]: ForeignKey(**row) for row in csv.DictReader(file)}


def find_recipe_key(key: str, program: str) -> ForeignKey | None:
    """Return the row of a recipe's key, else of its longest prefix that ends in a star; None if unknown."""
    for table_name in PROGRAM_TABLES[program]:
        if match := foreign_keys(table_name).get(key):
            return match
    prefixes = [
        row
        for table_name in PROGRAM_TABLES[program]
        for row in foreign_keys(table_name).values()
        if row.key.endswith("*")
    ]
    return max(
        (row for row in prefixes if f"{key}.".startswith(row.key[:-1])), key=lambda row: len(row.key), default=None
    )


def find_flag(flag: str) -> ForeignKey | None:
    """Return the row of a flag that people type, or None.

    Flags are like ``learning_rate``, or like another program's ``optimizer.lr``.
    """
    leaf = flag.rpartition(".")[2]
    matches = [
        foreign_keys(FLAG_TABLE).get(leaf),
        *(foreign_keys(table_name).get(name) for name in (flag, leaf) for table_name in PROGRAM_TABLES),
    ]
    return next((row for row in matches if row and not row.setting.startswith("@")), None)
