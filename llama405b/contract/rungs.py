"""The tests of ``bench``: rank 0 prints a line of ``SIGN`` and a result as JSON for each."""

import argparse
import dataclasses
import enum
from collections.abc import Iterable
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.errors import UserError
from llama405b.contract.files import write_json
from llama405b.contract.phrases import counted, did_you_mean, reason_of
from llama405b.contract.reader import MalformedError
from llama405b.contract.units import seconds

SIGN = "rung "


class Rung(enum.StrEnum):
    """A test, from what needs the least to what needs the most."""

    START = "start"
    COLLECTIVES = "collectives"
    COPIES = "copies"
    UPDATE = "update"
    LAYER_NONE = "layer-none"
    LAYER_STATES = "layer-states"
    LAYER_FULL = "layer-full"
    HIDING = "hiding"
    EXACT = "exact"


ONE_RANK_ONLY = (Rung.UPDATE, Rung.LAYER_NONE, Rung.LAYER_STATES, Rung.LAYER_FULL)
MANY_RANKS_ONLY = (Rung.COLLECTIVES,)
# What a rehearsal tests; if one fails, nothing after it makes sense.
LINKS = (Rung.START, Rung.COLLECTIVES, Rung.COPIES)
ABOUT_S = {  # on a GPU; a test is not started if less time is left
    Rung.START: 15, Rung.COLLECTIVES: 20, Rung.COPIES: 20, Rung.UPDATE: 60, Rung.LAYER_NONE: 60, Rung.LAYER_STATES: 120,
    Rung.LAYER_FULL: 120, Rung.HIDING: 120, Rung.EXACT: 60,
}  # fmt: skip
ONE_HOLDS_ALL = "here one rank holds all states of a layer; in a run each has a part, so that this alone stops nothing"
REMEDIES = {
    Rung.START: "run `llama405b doctor` on these hosts; NCCL_DEBUG=INFO shows what NCCL tries",
    Rung.COLLECTIVES: "run `llama405b doctor --deep` on these hosts, and compare their links",
    Rung.COPIES: "raise the limit of locked memory (ulimit -l) or the container's memory",
    Rung.UPDATE: "use more of the CPU's cores, or --parallel.offload none",
    Rung.LAYER_NONE: ONE_HOLDS_ALL,
    Rung.LAYER_STATES: ONE_HOLDS_ALL,
    Rung.LAYER_FULL: ONE_HOLDS_ALL,
    Rung.HIDING: "use --parallel.overlap false until this is understood, and report it",
    Rung.EXACT: "use --parallel.overlap false until this is understood, and report it",
}
PROVES = {  # features of docs/proof.md
    Rung.START: "the first step over NCCL",
    Rung.COLLECTIVES: "collectives over NCCL give what they should",
    Rung.COPIES: "copies between GPU and CPU memory, pinned and not",
    Rung.UPDATE: "the update and the norm on the GPU host's cores, the norm against FP64",
    Rung.LAYER_NONE: "a layer of the 405B shape, offload none",
    Rung.LAYER_STATES: "a layer of the 405B shape, offload optimizer",
    Rung.LAYER_FULL: "a layer of the 405B shape, offload all",
    Rung.HIDING: "the update hidden under the next forward",
    Rung.EXACT: "hidden equals sequential, bit for bit",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One number."""

    name: str
    value: float
    unit: str


@dataclasses.dataclass(frozen=True, slots=True)
class RungResult:
    """What a test found, on how many ranks."""

    rung: Rung
    ranks: int
    hosts: int
    device: str = ""  # its name, or "cpu"; "": unknown
    torch: str = ""
    seconds: float = 0.0
    figures: tuple[Figure, ...] = ()
    fault: str = ""  # why it failed
    skipped: bool = False  # there was no time left

    @property
    def good(self) -> bool:
        """Whether it passed."""
        return not (self.fault or self.skipped)


def line_of(result: RungResult) -> str:
    """Say what a test found in one line, with the cause and the remedy if it failed."""
    if result.skipped:
        return f"{result.rung:13} skipped: not enough time left; run it alone with --tests {result.rung}"
    if result.fault:
        return f"{result.rung:13} FAILED after {result.seconds:.0f} s: {result.fault}; {REMEDIES[result.rung]}"
    found = ", ".join(f"{each.name} {each.value:.3g} {each.unit}".rstrip() for each in result.figures)
    return f"{result.rung:13} passed, {result.seconds:.0f} s: {found}"


def proof_rows(results: Iterable[RungResult], date: str) -> list[str]:
    """Return rows for docs/proof.md: one GPU, and several nodes."""
    rows, gpus = [], [each for each in results if each.good and each.device != "cpu"]
    for rung, feature in PROVES.items():
        one = [f"{date} ({each.device})" for each in gpus if each.rung is rung and each.ranks == 1]
        many = [f"{date} ({each.hosts} hosts)" for each in gpus if each.rung is rung and each.hosts > 1]
        if one or many:
            rows.append(f"| {feature} | | {(*one, 'never run')[0]} | {(*many, 'never run')[0]} |")
    return rows


class Log:
    """Results in a directory, those of earlier calls among them: the tests may be run in parts."""

    def __init__(self, out: Path) -> None:
        """Create the directory.

        Raises:
            UserError: It cannot be written, or has results that cannot be read.
        """
        self.out = out
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / ".writable").touch()
            (out / ".writable").unlink()
        except OSError as error:
            raise self._unwritable(error) from None
        self.results()  # found out now, and not after an hour

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"--out: {self.out} cannot be written ({reason_of(error)}); name another directory")

    def add(self, result: RungResult) -> None:
        """Write a result, in place of an earlier one of that test on as many ranks; one that was skipped is none.

        Raises:
            UserError: It cannot be written.
        """
        if result.skipped:
            return
        try:
            write_json(self.out / f"{result.hosts:03}-{result.ranks:04}-{result.rung}.json", result)
        except OSError as error:
            raise self._unwritable(error) from None

    def results(self) -> list[RungResult]:
        """Return all results, from few ranks to many.

        Raises:
            UserError: A file holds something else.
        """
        try:
            found = [
                reader.loads(RungResult, file.read_text(encoding="utf-8"), str(file))
                for file in sorted(self.out.glob("*-*-*.json"))
            ]
        except (OSError, MalformedError) as error:
            raise UserError(f"--out: {error}; delete that file, or name another directory") from None
        order = list(Rung)
        return sorted(found, key=lambda each: (each.hosts, each.ranks, order.index(each.rung)))

    def block(self, date: str) -> str:
        """Return all results as text to paste, with rows for docs/proof.md."""
        results = self.results()
        lines = [f"--- paste from here: llama405b bench, {date} ---"]
        place = ""
        for result in results:
            here = f"{counted(result.hosts, 'host')}, {result.ranks} x {result.device or 'unknown'}, torch {result.torch or 'unknown'}"
            if here != place:
                lines.append(here)
            place = here
            lines.append(f"  {line_of(result)}")
        rows = proof_rows(results, date) or ["(no GPU: nothing for docs/proof.md)"]
        return "\n".join([*lines, *rows, "--- to here ---"])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bench``."""
    parser.add_argument("--tests", default=",".join(Rung), help=f"which to run, in this order: {', '.join(Rung)} [all]")
    parser.add_argument("--out", type=Path, default=Path("bench-gpu"), help="directory of the results [bench-gpu]")
    parser.add_argument(
        "--within",
        type=lambda text: seconds(text, "--within"),
        default=540.0,
        metavar="TIME",
        help="total time limit; a test is not started if it would exceed it [9m]",
    )


def chosen(text: str) -> list[Rung]:
    """Return the tests that ``--tests`` names, in their order.

    Raises:
        UserError: One is unknown, or none is named.
    """
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in list(Rung):
            raise UserError(f"--tests: {name!r} is not a test{did_you_mean(name, list(Rung))}; use {', '.join(Rung)}")
    if not names:
        raise UserError(f"--tests: none is named; use {', '.join(Rung)}")
    return [rung for rung in Rung if rung in names]
