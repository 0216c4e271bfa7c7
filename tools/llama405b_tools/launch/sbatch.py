"""Which options and variables of sbatch are passed on, and which are refused, and why. Pure.

An option is refused if it would change what a run is. Source: sbatch(1) of Slurm 22.05. Other options are passed on; sbatch refuses what
it does not know.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from llama405b.contract.errors import UserError

# As name/letter, with a colon if a value follows as the next word.
ALLOWED = """
    account/A: acctg-freq: batch: bb: bbf: begin/b: cluster-constraint: comment: constraint/C: container: contiguous core-spec/S:
    cores-per-socket: cpu-freq: cpus-per-gpu: cpus-per-task/c: deadline: delay-boot: dependency/d: distribution/m: exclude/x:
    exclusive export: export-file: extra-node-info/B: get-user-env gid: gpu-freq: gpus/G: gpus-per-node: gpus-per-socket: gres:
    gres-flags: hint: hold/H ignore-pbs job-name/J: kill-on-invalid-dep: licenses/L: mail-type: mail-user: mcs-label: mem: mem-bind:
    mem-per-cpu: mem-per-gpu: mincpus: network: nice no-kill/k no-requeue nodefile/F: nodelist/w: nodes/N: oversubscribe/s parsable
    partition/p: power: prefer: priority: profile: propagate qos/q: quiet/Q reboot requeue reservation: sockets-per-node: spread-job
    switches: thread-spec: threads-per-core: time/t: time-min: tmp: uid: use-min-nodes verbose/v wait-all-nodes: wckey:
"""
REFUSED = {  # and what to do instead
    "array/a:": "a run is one job; launch each run by itself",
    "chdir/D:": "a run belongs to the directory it is launched in; launch from that one",
    "clusters/M:": "status and stop would ask this cluster; set SLURM_CLUSTERS, which they read as well",
    "error/e: open-mode: output/o:": "the job's log is runs/<run>/slurm-<job>.log; leave it out",
    "gpu-bind:": "the one task of a node needs all of the job's GPUs there; leave it out",
    "gpus-per-task: ntasks/n: ntasks-per-core: ntasks-per-gpu: ntasks-per-node: ntasks-per-socket: overcommit/O": (
        "each node runs one task, which starts one rank per GPU; use --nodes, --gpus-per-node and --cpus-per-task"
    ),
    "help/h test-only usage version/V": "it submits no job; run sbatch yourself for that",
    "input/i: wrap:": "launch writes the job's script; give the program after --",
    "signal:": (
        "launch sets the signal at which a run saves; set --time instead: a tenth of it, at most 5 minutes, is left for the save"
    ),
    "wait/W": "launch does not wait for the job's end; use --follow",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """An option of sbatch."""

    name: str
    letter: str = ""
    takes_value: bool = False  # a value follows, as the next word if not by an equals sign
    refusal: str = ""  # it is refused; "": it is kept


def _option(word: str, why: str = "") -> Option:
    name, _, letter = word.rstrip(":").partition("/")
    return Option(name, letter, word.endswith(":"), why)


_ALL = [(word, "") for word in ALLOWED.split()] + [
    (word, why) for words, why in REFUSED.items() for word in words.split()
]
OPTIONS: Mapping[str, Option] = {
    option.name: option for option in sorted((_option(*entry) for entry in _ALL), key=lambda option: option.name)
}
LETTERS = {option.letter: option for option in OPTIONS.values() if option.letter}


def parse_options(arguments: Sequence[str]) -> list[tuple[Option, str]]:
    """Return the options in words, each with its value, as getopt_long(3) reads them; unknown ones are passed on to sbatch.

    Raises:
        UserError: An option is refused, or a word is not an option.
    """
    parsed, remaining = list[tuple[Option, str]](), list(arguments)
    while remaining:
        word = remaining.pop(0)
        name, has_value, value = word.partition("=")
        if word.startswith("--") and len(word) > 2:
            matching = [candidate for candidate in OPTIONS if candidate.startswith(name[2:])]
            option = OPTIONS.get(name[2:]) or (OPTIONS[matching[0]] if len(matching) == 1 else Option(name[2:]))
            if option.takes_value and not has_value:
                value = _pop_value(option, remaining)
            elif option.name not in OPTIONS and not has_value and remaining and not remaining[0].startswith("-"):
                raise UserError(
                    f"--slurm: {word} is not in the manual of Slurm 22.05; write {word}={remaining[0]} if it takes a value"
                )
            parsed.append((option, value))
        elif word.startswith("-") and len(word) > 1:
            option, value = LETTERS.get(word[1], Option(word[1])), word[2:].removeprefix("=")
            if option.takes_value and not value:
                value = _pop_value(option, remaining)
            elif not option.takes_value and value:
                remaining.insert(0, f"-{value}")
                value = ""
            parsed.append((option, value))
        else:
            raise UserError(f"--slurm: {word!r} is not an option of sbatch; give the program after --")
    for option, value in parsed:
        if option.refusal and not (option.name == "ntasks-per-node" and value == "1"):
            raise UserError(f"--slurm: --{option.name}: {option.refusal}")
    return parsed


def _pop_value(option: Option, remaining: list[str]) -> str:
    if not remaining:
        raise UserError(f"--slurm: --{option.name} needs a value; give one")
    return remaining.pop(0)


def refused_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the SBATCH_ variables that stand for a refused option, each with the reason."""
    reasons = {}
    for variable in environment:
        if variable.startswith("SBATCH_"):
            name = variable.removeprefix("SBATCH_")
            option = OPTIONS.get("array" if name == "ARRAY_INX" else name.lower().replace("_", "-"))
            if option and option.refusal:
                reasons[variable] = option.refusal
    return reasons


def time_limit_s(text: str) -> float | None:
    """Parse a time limit as sbatch(1) writes it into seconds; None if it is no time, or no limit.

    The forms are minutes, M:S, H:M:S, D-H, D-H:M and D-H:M:S.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not match:
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is not None:
        return ((days * 24 + first) * 60 + second) * 60 + third
    if match[4] is not None:
        return (first * 60 + second) * 60 + third
    return first * 60 + second
