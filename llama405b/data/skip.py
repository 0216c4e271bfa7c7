"""Documents that are not to be learnt: a list of token ranges, whose targets are masked in place; all else stays as it was.

A range is of a token file, so a document is masked wherever it comes in the order, in later epochs too. Knows token files' places.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.errors import UserError
from llama405b.contract.phrases import counted, reason_of
from llama405b.contract.reader import MalformedError
from llama405b.data.sources import Masked, Mixture


@dataclasses.dataclass(frozen=True, slots=True)
class Skipped:
    """A line of a skip list."""

    source: int  # of the run's, from 0
    n_tokens: int  # of that source's token file: a list is of one data set
    begin: int
    end: int
    document: str = ""  # for people
    why: str = ""


def read_skips(path: Path) -> tuple[Skipped, ...]:
    """Read a skip list.

    Raises:
        UserError: It cannot be read, or is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return tuple(
            reader.loads(Skipped, line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()
        )
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--data.skip: {path}: cannot be read ({reason_of(error)}); name a list that `llama405b blame` wrote"
        ) from None
    except MalformedError as error:
        raise UserError(f"--data.skip: {error}; name a list that `llama405b blame` wrote") from None


def without(mixture: Mixture, skips: Sequence[Skipped]) -> Mixture:
    """Return a mixture whose targets in these ranges are masked.

    Raises:
        UserError: They are of other data.
    """
    sources = list(mixture.sources)
    for number, source in enumerate(sources):
        own = [skip for skip in skips if skip.source == number]
        if any(
            skip.n_tokens != len(source.tokens_N) or not 0 <= skip.begin < skip.end <= skip.n_tokens for skip in own
        ):
            raise UserError(
                "--data.skip: the list is of other data (its token file has another length); name that of this run's data"
            )
        sources[number] = dataclasses.replace(source, masked=Masked.of((skip.begin, skip.end) for skip in own))
    if any(skip.source >= len(sources) for skip in skips):
        raise UserError("--data.skip: the list is of other data (which has more sources); name that of this run's data")
    return dataclasses.replace(mixture, sources=tuple(sources))


def words_of(skips: Sequence[Skipped]) -> str:
    """Say what is skipped."""
    n_tokens = sum(skip.end - skip.begin for skip in skips)
    return f"data: {counted(len(skips), 'range')} of {counted(n_tokens, 'token', grouped=True)} not learnt, as data.skip lists them"
