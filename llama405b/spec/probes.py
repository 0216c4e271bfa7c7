"""Probes that measure hosts, the lines in which rank 0 prints results, and the bundle file.

The bundle holds the figures that ``bench`` found, versions, allocator statistics, and what failed; it can be sent to strangers. It has no
secret: no environment is read, and in the output of other programs (``fault``) the operator's host names, user, home directory and
network addresses are replaced, and whatever looks like a token. Host names stay if the user asks for them.
"""

import argparse
import dataclasses
import enum
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.errors import UserError, did_you_mean, fmt_if, parse_seconds, pluralize, reason_of
from llama405b.contract.files import write_json
from llama405b.contract.reader import Json, MalformedError
from llama405b.contract.software import code_version

LINE_PREFIX = "probe "
FIGURES_PER_LINE = 500
MEMORY_IS_FULL = "memory is full"  # a figure of `trials`: new processes are to go on


class Probe(enum.StrEnum):
    """A measurement: first those of ``bench``, by what they need, the least first."""

    START = "start"
    COLLECTIVES = "collectives"
    COPIES = "copies"
    UPDATE = "update"
    LAYER_NONE = "layer-none"
    LAYER_OPTIMIZER = "layer-optimizer"
    LAYER_ALL = "layer-all"
    HIDING = "hiding"
    EXACT = "exact"
    TP = "tp"
    CP = "cp"
    PP = "pp"
    HSDP = "hsdp"
    ACCUMULATION = "accumulation"
    RESUME = "resume"
    PACKED = "packed"
    RANK0 = "rank0"
    FSDP1 = "fsdp1"
    EVALUATION = "evaluation"
    PRODUCTS = "products"
    HOST_LINKS = "host-links"
    RATES = "rates"
    TRIALS = "trials"
    KNOBS = "knobs"
    KNOBS_2 = "knobs-2"
    COMMS = "comms"
    FSDP_COPIES = "fsdp-copies"
    ROUNDING = "rounding"
    TOKENS = "tokens"
    HOG = "hog"
    PACKED_FAST = "packed-fast"
    PLANNING = "planning"
    STREAMS = "streams"
    HANG = "hang"


@dataclasses.dataclass(frozen=True, slots=True)
class OpenQuestion:
    """A question that a run on one GPU can settle."""

    limit_s: int  # of its process
    expected: str  # on an H100 of 80 GB, written on 2026-11-27, before any GPU ran it
    decides: str
    not_on_cpu: str  # what a CPU does not show of it


OPEN_QUESTIONS = {  # the most valuable first
    Probe.COMMS: OpenQuestion(30, "0.5 to 0.6 GB without a communicator, 0.1 to 0.6 more with each",
        "above 2 GB with four, `plan` counts communicators by mesh", "memory"),
    Probe.FSDP_COPIES: OpenQuestion(40, "copy out 4.2 ms, chunk cat 6.3 ms, of a step of 405B 1.9 s",
        "above 2.5 s, each parameter is gathered in place", "the GPU's rate"),
    Probe.ROUNDING: OpenQuestion(60, "on the GPU fp32 0.011, bf16 0.006, bf16-stochastic 0.4; on the CPU, over its cores, 0.22, 0.15, 2 "
        "to 5", "whether bf16-stochastic needs a kernel of its own", "the GPU's"),
    Probe.TOKENS: OpenQuestion(150, "forward and backward of bf16 with 8192 0.108 and 0.30, 4096 0.055 and 0.155, 2048 0.030 and 0.085; "
        "fused 4 % less; fp8 with 8192 0.070 and 0.21, 4096 0.042 and 0.12",
        "what FP8 costs beside tokens: above 4 ms, weights are gathered in FP8; the plan's FP8 at 4,096 tokens", "405B's width; FP8"),
    Probe.HOG: OpenQuestion(60, "13.5 ms; with 8 busy 6 % more, 16 13 %, 24 20 %, 32 27 %",
        "the plan's interference, 0.4 or 0.2; whether NCCL_MAX_CTAS of 8 or 16 is worth slower collectives", "anything busy"),
    Probe.PACKED_FAST: OpenQuestion(110, "losses within 1e-2, 1 to 3 recompilations each",
        "whether FP8, which needs compiled layers, starts with packed documents at all", "varlen attention; compiled layers; FP8"),
    Probe.PLANNING: OpenQuestion(60, "alone 0.5 s, beside it 1.5 to 10 times as long",
        "what `plan` says that a first save makes training wait", "64 ranks"),
    Probe.STREAMS: OpenQuestion(60, "8 and 32 within 2 %, 1 at least 15 % longer",
        "CUDA_DEVICE_MAX_CONNECTIONS, which the trainer would set, and of which doctor would warn", "queues"),
    Probe.HANG: OpenQuestion(40, "1 pipe, more than 10 kB within 5 s; py-spy: in the line of stuck() with float()",
        "whether the autopsy of a hang can name the collective", "NCCL"),
}  # fmt: skip
KNOB_PROBES = (Probe.KNOBS, Probe.KNOBS_2)  # halves of one table: a GPU may be there for the first alone
DEEP_PROBES = (Probe.PRODUCTS, Probe.HOST_LINKS, Probe.COLLECTIVES)  # those of doctor --deep
BENCH_PROBES = tuple(
    probe
    for probe in Probe
    if probe not in (Probe.PRODUCTS, Probe.HOST_LINKS, Probe.RATES, Probe.TRIALS, *KNOB_PROBES, *OPEN_QUESTIONS)
)
FULL_RUN_PROBES = (Probe.ACCUMULATION, Probe.RESUME, Probe.PACKED, Probe.RANK0, Probe.FSDP1, Probe.EVALUATION)
ONE_RANK_ONLY = (
    Probe.UPDATE,
    Probe.LAYER_NONE,
    Probe.LAYER_OPTIMIZER,
    Probe.LAYER_ALL,
    *FULL_RUN_PROBES,
    *OPEN_QUESTIONS,
)
GPU_ONLY = (Probe.FSDP1,)  # torch has none for the CPU
MESH_PROBES = (Probe.TP, Probe.CP, Probe.PP, Probe.HSDP)
MANY_RANKS_ONLY = (Probe.COLLECTIVES, *MESH_PROBES, Probe.HOST_LINKS)
# What a rehearsal tests; if one fails, nothing after it makes sense.
REHEARSAL_PROBES = (Probe.START, Probe.COLLECTIVES, Probe.COPIES)


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeInfo:
    """How long a probe takes, what it proves, and what to do if it fails."""

    usual_s: int  # on a GPU, its process's start with it; a probe is not started if less time is left
    proves: str = ""  # a feature of docs/proof.md
    advice: str = "report it"  # where it fails


ONE_RANK_ADVICE = (
    "one rank holds all states of a layer here; in a run they are sharded, so this failure alone blocks nothing"
)
LAST_SETTING_ADVICE = "report it, with the last setting that ran"
UNTIL_UNDERSTOOD = "until the cause is known, and report it"
# Those of one rank take what an H200 took, but for fsdp1 and evaluation.
PROBE_INFO = {
    Probe.START: ProbeInfo(15, "the first step over NCCL", "run `llama405b doctor` on these hosts; NCCL_DEBUG=INFO shows what NCCL tries"),
    Probe.COLLECTIVES: ProbeInfo(20, "collectives over NCCL give what they should",
        "run `llama405b doctor --deep` on these hosts, and compare their links"),
    Probe.COPIES: ProbeInfo(20, "copies between GPU and CPU memory, pinned and not",
        "raise the limit of locked memory (ulimit -l) or the container's memory"),
    Probe.UPDATE: ProbeInfo(35, "the update and the norm on the GPU host's cores, the norm against FP64",
        "use more of the CPU's cores, or --parallel.offload none"),
    Probe.LAYER_NONE: ProbeInfo(20, "a layer of the 405B shape, offload none", ONE_RANK_ADVICE),
    Probe.LAYER_OPTIMIZER: ProbeInfo(60, "a layer of the 405B shape, offload optimizer", ONE_RANK_ADVICE),
    Probe.LAYER_ALL: ProbeInfo(35, "a layer of the 405B shape, offload all", ONE_RANK_ADVICE),
    Probe.HIDING: ProbeInfo(95, "the update hidden under the next forward", f"use --parallel.overlap false {UNTIL_UNDERSTOOD}"),
    Probe.EXACT: ProbeInfo(55, "hidden equals sequential, bit for bit", f"use --parallel.overlap false {UNTIL_UNDERSTOOD}"),
    Probe.TP: ProbeInfo(40, "two ranks that split matrices (`tp`)", f"leave tp out {UNTIL_UNDERSTOOD}"),
    Probe.CP: ProbeInfo(40, "two ranks that split sequences (`cp`)", f"leave cp out {UNTIL_UNDERSTOOD}"),
    Probe.PP: ProbeInfo(40, "two pipeline stages (`pp`)", f"leave pp out {UNTIL_UNDERSTOOD}"),
    Probe.HSDP: ProbeInfo(40, "two copies of the weights (`hsdp`)", f"leave hsdp out {UNTIL_UNDERSTOOD}"),
    Probe.ACCUMULATION: ProbeInfo(30, "two micro-batches with offload none, optimizer and all",
        "set --training.micro_batch_size so that a step has one micro-batch, and report it"),
    Probe.RESUME: ProbeInfo(25, "a save beside training from pinned copies, and a resume",
        f"use --parallel.offload optimizer {UNTIL_UNDERSTOOD}"),
    Probe.PACKED: ProbeInfo(35, "packed documents by every kernel of attention", f"use --model.attention sdpa {UNTIL_UNDERSTOOD}"),
    Probe.RANK0: ProbeInfo(25, "weights that rank 0 reads and sends", f"use --model.load local {UNTIL_UNDERSTOOD}"),
    Probe.FSDP1: ProbeInfo(25, "FSDP1 beside FSDP2", "use --parallel.strategy fsdp2, and report it"),
    Probe.EVALUATION: ProbeInfo(25, "an evaluation between steps", f"use --evaluation.every 0 {UNTIL_UNDERSTOOD}"),
    Probe.PRODUCTS: ProbeInfo(25),
    Probe.HOST_LINKS: ProbeInfo(60),
    Probe.RATES: ProbeInfo(60),
    Probe.TRIALS: ProbeInfo(60),
    Probe.KNOBS: ProbeInfo(150, "the recipe's settings alone and together", LAST_SETTING_ADVICE),
    Probe.KNOBS_2: ProbeInfo(150, "settings that trade memory for speed", LAST_SETTING_ADVICE),
    **dict.fromkeys(OPEN_QUESTIONS, ProbeInfo(20)),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One measured number."""

    name: str
    value: float
    unit: str
    hosts: tuple[str, ...] = ()  # whose it is: one, or both ends of a link; (): all ranks'
    run: str = (
        ""  # of a step's seconds: what ``predict`` takes it to be, as JSON, so that predictions can be held to it
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Software:
    """The software that a probe ran with, on the host of rank 0."""

    node: str = ""  # the host's own name
    system: str = ""  # kernel and machine
    python: str = ""
    transformers: str = ""
    cuda: str = ""  # that torch was built for; "": none
    nccl: str = ""
    driver: str = ""  # NVIDIA's; "": unknown
    gpus: tuple[str, ...] = ()  # name and memory of each that the rank sees


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of a probe, and the number of ranks."""

    probe: Probe
    ranks: int
    hosts: int
    device: str = ""  # its name, or "cpu"; "": unknown
    torch: str = ""
    seconds: float = 0.0
    figures: tuple[Figure, ...] = ()
    fault: str = ""  # why it failed
    failed_on: str = ""  # the host; "": not one alone
    skipped: bool = False  # there was no time left
    more: bool = False  # of its figures follow
    trial: str = ""  # of `trials`, the settings that began or ended; "": the whole probe
    outcome: str = ""  # of settings that ended, as JSON
    software: Software | None = None
    allocator: dict[str, int] = dataclasses.field(default_factory=dict)  # torch's statistics of rank 0's GPU

    @property
    def passed(self) -> bool:
        """Whether it passed."""
        return not (self.fault or self.skipped)

    @property
    def failure_reason(self) -> str:
        """Why it did not pass, and where."""
        return fmt_if("{}: ", self.failed_on) + (self.fault or "not enough time left")


def supports_world_size(probe: Probe, world_size: int) -> bool:
    """Check whether a probe can run on so many ranks."""
    if world_size == 1:
        return probe not in MANY_RANKS_ONLY
    return probe not in ONE_RANK_ONLY and (probe not in MESH_PROBES or world_size % 2 == 0)


def encode_result(result: ProbeResult) -> Iterator[str]:
    """Yield the lines that encode a result; each has some of its figures."""
    figures = result.figures
    for begin in range(0, max(1, len(figures)), FIGURES_PER_LINE):
        end = begin + FIGURES_PER_LINE
        yield LINE_PREFIX + reader.dumps(
            dataclasses.replace(result, figures=figures[begin:end], more=end < len(figures))
        )


def decode_results(lines: Iterable[str]) -> Iterator[ProbeResult]:
    """Yield the complete results among the lines that rank 0 printed.

    Raises:
        MalformedError: A line of them holds something else.
    """
    figures: tuple[Figure, ...] = ()
    for line in lines:
        if line.startswith(LINE_PREFIX):
            part = reader.loads(ProbeResult, line.removeprefix(LINE_PREFIX), "a probe's result")
            figures += part.figures
            if not part.more:
                yield dataclasses.replace(part, figures=figures)
                figures = ()


def format_result(result: ProbeResult) -> str:
    """Format a test's result in one line, with the cause and the remedy if it failed."""
    if result.skipped:
        return f"{result.probe:13} skipped: {result.failure_reason}; run it alone with --tests {result.probe}"
    if result.fault:
        return f"{result.probe:13} FAILED after {result.seconds:.0f} s: {result.failure_reason}; {PROBE_INFO[result.probe].advice}"
    if result.probe in KNOB_PROBES:
        return (
            f"{result.probe:13} passed, {result.seconds:.0f} s\n\n"
            + "\n".join(format_figure_table(result.figures))
            + "\n"
        )
    figures = ", ".join(f"{figure.name} {figure.value:.3g} {figure.unit}".rstrip() for figure in result.figures)
    question, passed = OPEN_QUESTIONS.get(result.probe), f"{result.probe:13} passed, {result.seconds:.0f} s: {figures}"
    if question and result.device == "cpu":
        return f"{passed}; a CPU does not show: {question.not_on_cpu}"
    return f"{passed}; expected: {question.expected}; decides: {question.decides}" if question else passed


def format_figure_table(figures: Iterable[Figure]) -> list[str]:
    """Return figures as a Markdown table: a row per setting, a column per measurement."""
    cells: dict[str, dict[str, str]] = {}
    for figure in figures:
        setting, _, measurement = figure.name.partition(": ")
        cells.setdefault(setting, {})[f"{measurement}, {figure.unit}"] = f"{figure.value:.3g}"
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    rows = [[setting, *(row.get(column, "—") for column in columns)] for setting, row in cells.items()]
    return [f"| {' | '.join(row)} |" for row in (["setting", *columns], ["---"] * (1 + len(columns)), *rows)]


def proof_rows(results: Iterable[ProbeResult], date: str) -> list[str]:
    """Return rows for docs/proof.md; its last two columns are one GPU and several hosts."""
    rows, gpus = [], [result for result in results if result.passed and result.device != "cpu"]
    for probe, info in PROBE_INFO.items():
        single = [f"{date} ({result.device})" for result in gpus if result.probe is probe and result.ranks == 1]
        multi = [f"{date} ({result.hosts} hosts)" for result in gpus if result.probe is probe and result.hosts > 1]
        if info.proves and (single or multi):
            rows.append(f"| {info.proves} | | | {(*single, 'never run')[0]} | {(*multi, 'never run')[0]} |")
    return rows


class ResultDirectory:
    """A directory of results, which may be from several calls: the tests can be run in parts."""

    def __init__(self, out: Path) -> None:
        """Create the directory.

        Raises:
            UserError: It cannot be written, or has results that cannot be read.
        """
        self.path = out
        try:
            out.mkdir(parents=True, exist_ok=True)
            # Fail now rather than after the first test: an existing directory may be read-only.
            (out / ".writable").touch()
            (out / ".writable").unlink()
        except OSError as error:
            raise self._unwritable(error) from None
        self.results()  # found out now, and not after an hour

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"--out: {self.path} cannot be written ({reason_of(error)}); name another directory")

    def add(self, result: ProbeResult) -> None:
        """Write a result, replacing that of the test on as many ranks; a skipped test has none.

        Raises:
            UserError: It cannot be written.
        """
        if result.skipped:
            return
        try:
            write_json(self.path / f"{result.hosts:03}-{result.ranks:04}-{result.probe}.json", result)
        except OSError as error:
            raise self._unwritable(error) from None

    def results(self) -> list[ProbeResult]:
        """Return all results, from few ranks to many.

        Raises:
            UserError: A file holds something else.
        """
        try:
            results = [
                reader.loads(ProbeResult, file.read_text(encoding="utf-8"), str(file))
                for file in sorted(self.path.glob("*-*-*.json"))
            ]
        except (OSError, MalformedError) as error:
            raise UserError(f"--out: {error}; delete that file, or name another directory") from None
        order = list(Probe)
        return sorted(results, key=lambda result: (result.hosts, result.ranks, order.index(result.probe)))

    def format_report(self, date: str) -> str:
        """Return all results as text to paste, with rows for docs/proof.md."""
        results = self.results()
        lines = [f"--- paste from here: llama405b bench, {date} ---"]
        previous = ""
        for result in results:
            header = f"{pluralize(result.hosts, 'host')}, {result.ranks} x {result.device or 'unknown'}, torch {result.torch or 'unknown'}"
            if header != previous:
                lines.append(header)
            previous = header
            lines.append(f"  {format_result(result)}")
        rows = proof_rows(results, date) or ["(no GPU: nothing for docs/proof.md)"]
        return "\n".join([*lines, *rows, "--- to here ---"])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bench``."""
    parser.add_argument(
        "--tests",
        default=",".join(BENCH_PROBES),
        help=f"tests to run, in this order: {', '.join(BENCH_PROBES)} [all]; or knobs, or knobs-2 (its second half), or open, "
        f"what one GPU can still decide, most valuable first: {', '.join(OPEN_QUESTIONS)}",
    )
    parser.add_argument("--out", type=Path, default=Path("bench"), help="directory of the results [bench]")
    parser.add_argument(
        "--bundle", type=Path, metavar="FILE", help="write one file to send: figures, versions, what failed; no secret"
    )
    parser.add_argument("--with-host-names", action="store_true", help="keep host names and addresses in that file")
    parser.add_argument(
        "--time-limit",
        type=lambda text: parse_seconds(text, "--time-limit"),
        default=540.0,
        metavar="TIME",
        help="total time limit; a test is not started if it would exceed it [9m]",
    )


def select_tests(text: str) -> list[Probe]:
    """Parse ``--tests``; return the tests in their own order.

    Raises:
        UserError: One is unknown, or none is named.
    """
    groups = {"open": tuple(OPEN_QUESTIONS), "knobs": KNOB_PROBES}
    names = [name for part in text.split(",") for name in groups.get(part, (part,)) if name]
    for name in names:
        if name not in (*BENCH_PROBES, *KNOB_PROBES, *OPEN_QUESTIONS):
            raise UserError(
                f"--tests: {name!r} is not a test{did_you_mean(name, BENCH_PROBES)}; use {', '.join(BENCH_PROBES)}"
            )
    if not names:
        raise UserError(f"--tests: no test is named; use {', '.join(BENCH_PROBES)}")
    return [probe for probe in (*BENCH_PROBES, *KNOB_PROBES, *OPEN_QUESTIONS) if probe in names]


BUNDLE_FORMAT = 1
Redactions = Sequence[tuple[re.Pattern[str], str]]  # what is replaced, by what
SECRET_REDACTIONS: Redactions = (
    # Tokens of Hugging Face, GitHub and others, keys of Weights & Biases, and whatever follows a word for one.
    (
        re.compile(r"\b(?:hf_|ghp_|sk-)[\w-]{8,}|\b[0-9a-f]{40}\b|(?i:(?<=token=)|(?<=password=)|(?<=key=))[^\s,;&]+"),
        "[secret]",
    ),
    (re.compile(r"/(?:home|Users)/[^/\s:'\"]+"), "/home/[user]"),
    (re.compile(r"\b[\w.-]+@(?=\w)"), "[user]@"),
)
ADDRESS_REDACTIONS: Redactions = (
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b"), "[address]"),
    (re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{0,4}:){3,7}[0-9a-fA-F]{1,4}(?![\w:])"), "[address]"),
)


def check_bundle(path: Path | None, *, with_host_names: bool) -> None:
    """Refuse a bundle path that cannot be written, before the tests run."""
    if path is None:
        if with_host_names:
            raise UserError("--with-host-names is for --bundle; add --bundle FILE")
        return
    try:
        write_json(path, {"format": BUNDLE_FORMAT})
    except OSError as error:
        raise _unwritable(path, error) from None


def write_bundle(
    path: Path,
    results: Sequence[ProbeResult],
    tests: Sequence[Probe],
    date: str,
    hosts: Sequence[str],
    *,
    keep_names: bool,
) -> None:
    """Write the file; ``hosts``: names that become ``host-1`` and so on, unless ``keep_names``.

    Raises:
        UserError: It cannot be written.
    """
    measured = {result.probe for result in results}
    content: dict[str, Json] = {
        "format": BUNDLE_FORMAT,
        "llama405b": code_version(),
        "date": date,
        "without_result": [probe.value for probe in tests if probe not in measured],
        "expected": {probe.value: OPEN_QUESTIONS[probe].expected for probe in tests if probe in OPEN_QUESTIONS},
        "results": [json.loads(json.dumps(dataclasses.asdict(result))) for result in results],
    }
    nodes = [result.software.node for result in results if result.software]
    redactions = (
        SECRET_REDACTIONS
        if keep_names
        else [*SECRET_REDACTIONS, *host_name_redactions([*hosts, *nodes]), *ADDRESS_REDACTIONS]
    )
    try:
        write_json(path, {key: redact_values(value, redactions) for key, value in content.items()})
    except OSError as error:
        raise _unwritable(path, error) from None


def host_name_redactions(hosts: Iterable[str]) -> Redactions:
    """Return the replacements of host names by ``host-1`` and so on, the longest names first."""
    names = list(dict.fromkeys(name for name in hosts if name))
    aliases = {name: f"host-{number}" for number, name in enumerate(names, 1)}
    # A name may contain another one: replace the longer first.
    longest_first = sorted(aliases, key=len, reverse=True)
    return [(re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])"), aliases[name]) for name in longest_first]


def redact_values(value: Json, redactions: Redactions) -> Json:
    """Return a value with everything that identifies the machines replaced; keys stay."""
    if isinstance(value, str):
        for pattern, replacement in redactions:
            value = pattern.sub(replacement, value)
        return value
    if isinstance(value, Mapping):
        return {key: redact_values(item, redactions) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [redact_values(item, redactions) for item in value]
    return value


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"--bundle: {path} cannot be written ({reason_of(error)}); name another file")
