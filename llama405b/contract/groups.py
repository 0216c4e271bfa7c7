"""Parameters with a learning rate or weight decay of their own, or that are not trained: ``optimizer.groups``. Pure."""

import dataclasses
import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence

from llama405b.contract.errors import UserError
from llama405b.contract.schema import Parallel

WAY = (
    'write "model.embed_tokens.* lr_factor=0.1 weight_decay=0", a pattern of names and one of these or both, or '
    '"model.embed_tokens.* frozen=true"'
)
KEYS = ("lr_factor", "weight_decay")


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Parameters whose names, as in the model's files, match a pattern of the shell's."""

    pattern: str
    lr_factor: float = 1.0  # times the learning rate of the step
    weight_decay: float | None = None  # None: as all others, so none of vectors
    frozen: bool = False  # it takes no gradient and no moments

    @classmethod
    def read(cls, text: str) -> "Group":
        """Read ``PATTERN lr_factor=X weight_decay=Y``, or ``PATTERN frozen=true``.

        Raises:
            UserError: It is something else.
        """
        pattern, *pairs = text.split() or [""]
        values: dict[str, float] = {}
        if pattern and [pair.lower() for pair in pairs] in (["frozen=true"], ["frozen=1"]):
            return cls(pattern, frozen=True)
        for pair in pairs:
            name, _, number = pair.partition("=")
            values[name] = _number(number)
        if not (
            pattern and values.keys() <= {*KEYS} and values and all(0 <= each < math.inf for each in values.values())
        ):
            raise UserError(f"optimizer.groups has {text!r}; {WAY}")
        return cls(pattern, values.get("lr_factor", 1.0), values.get("weight_decay"))

    def has(self, name: str) -> bool:
        """Whether a parameter is in it."""
        return fnmatch.fnmatchcase(name, self.pattern)


def group_of(groups: Iterable[Group], name: str) -> Group | None:
    """Return the first group that has a parameter; None: none does."""
    return next((group for group in groups if group.has(name)), None)


def is_frozen(texts: Sequence[str], name: str) -> bool:
    """Whether the groups that are written so freeze a parameter."""
    return bool(texts) and (group_of(map(Group.read, texts), name) or Group(name)).frozen


def check_groups(texts: Sequence[str], names: Iterable[str], parallel: Parallel) -> None:
    """Refuse groups that do not suit the model, or cannot be frozen as it is split.

    Raises:
        UserError: One has none of its parameters, all are frozen, or FSDP1 is to freeze some.
    """
    known = list(names)
    frozen = [name for name in known if is_frozen(texts, name)]
    why = ""
    if len(frozen) == len(known):
        why = "every parameter is frozen, and nothing would be trained; leave out a pattern"
    elif frozen and parallel.by_fsdp1:
        why = "fsdp1 keeps a unit's parameters in one piece, of which none is frozen alone; use fsdp2"
    if why:
        raise UserError(f"--optimizer.groups: {why}")
    for group in map(Group.read, texts):
        if not any(map(group.has, known)):
            raise UserError(
                f"--optimizer.groups: {group.pattern!r} matches no parameter; they are named like {known[0]}, {known[-1]}"
            )


def group_text(table: Mapping[str, object]) -> str:
    """Write a table of ``[[optimizer.groups]]`` as ``Group.read`` reads it."""
    return " ".join(
        [str(table.get("names", "")), *(f"{key}={value}" for key, value in table.items() if key != "names")]
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
