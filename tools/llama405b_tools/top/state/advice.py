"""What to do next, in one line, for whoever has read the verdict. Pure."""

import math
import shlex
from collections.abc import Sequence

from llama405b.contract.phrases import given
from llama405b.contract.records import Phase
from llama405b_tools.machine.gpus import THERMAL
from llama405b_tools.run import judge
from llama405b_tools.text.figures import stopwatch
from llama405b_tools.top.state.hostview import NOT_ODD, HostView
from llama405b_tools.top.state.moment import Moment
from llama405b_tools.top.state.picture import (
    GUARDED,
    LINK_STATES,
    HostRow,
    HostState,
    RunPhase,
    TrainingStatus,
    Verdict,
    known,
)
from llama405b_tools.top.state.run_notes import UNSAVED
from llama405b_tools.top.state.verdicts import BEHIND, FREE, HALTED, HEAT, Note, full_disks

LESS_POWER = 0.8  # of its limit, for a GPU that is too hot
ABOUT_HOSTS = {
    HostState.AUTH: "check its user and key with `ssh {host}`; cluster-top tries again every few seconds",
    HostState.REFUSED: "start sshd on {host}, or correct its port in the hosts file; cluster-top tries again by itself",
    HostState.TIMEOUT: "see whether {host} is up, in your provider's console; cluster-top tries again by itself",
    HostState.DOWN: "`{doctor}` says what is wrong with {host}; cluster-top tries again by itself",
    HostState.STALE: "see whether {host} answers `ssh {host}`; a frozen host may need a restart from your provider's console",
    HostState.SMI_HUNG: "a GPU or the driver of {host} hangs: `dmesg` there says which; only a restart of the host helps",
    HostState.NO_DRIVER: "`{doctor}` says what is wrong with the driver of {host}",
}
ABOUT_NOTES = {  # by the beginning of a note's key
    UNSAVED: "make room where the checkpoints go: the next save tries again, and until then the steps are at risk",
    "loss": "if it does not come down again, stop, and resume from a checkpoint before it with a lower learning rate",
    "stall": "wait: it is a hang if it lasts; 3 shows the ranks, and which one is behind",
    "step_s": "2, 3 and 4 show GPUs, ranks and network: one that is slower delays all; a step's parts tell what takes longer",
    "retries": "a smaller batch or sequence, or more offload, makes room: `{plan}` says what fits",
    "power fell": "wait for a step: if none comes, a rank waits for something; 3 shows which is behind",
    "rdma fell": "wait for a step: if none comes, a rank waits for something; 4 shows the network",
    "metrics": "the log of rank 0 (5) may say why it writes no metrics",
    "long": "wait, or look at the disks: what it reads or writes is slow; 5 shows the log",
}


def advice(
    found: Moment,
    notes: Sequence[Note],
    rows: Sequence[HostRow],
    run: TrainingStatus | None,
    verdict: Verdict,
    about: str,
    form: str,
) -> str:
    """Return what to do; "" if there is nothing.

    ``about``: the host that the verdict is about. ``form``: of a command, with ``{}`` for the verb.
    """
    commands = {verb: form.format(verb) for verb in ("doctor", "plan", "stop", "status")}
    of_run = given(" --run {}", run.run if run else "")
    again = f"launch it again with `--resume auto`{given(', from step {:,}', run.checkpoint_step if run else None)}"
    checked = f"check {found.culprit} (`{commands['doctor']}`), then {again}" if found.culprit else again
    guarded = run is not None and run.guard in GUARDED
    if verdict is Verdict.HUNG:
        woken = given("{}; ", _wake(found))
        if guarded:
            soon = guard_acts_in_s(found)
            when = "" if soon is None else f" in {stopwatch(soon)}"
            return woken + (
                f"its guard ends it{when}, and starts it again from the newest checkpoint; a says what hangs, and why"
            )
        return f"{woken}a says why; `{commands['stop']}{of_run}` ends it; {checked}"
    if verdict is Verdict.FAILED:
        first = judge.first_failure(found.failures) if found.failures and not found.is_unblamed else None
        log = judge.log_words(first, f"{form.format('logs')}{of_run}")
        return f"e shows the first error; {'its guard starts it again' if guarded else checked}{log}"
    if verdict is Verdict.RESTARTING and found.restart_by:
        return "nothing: its guard starts the next attempt from the newest checkpoint"
    if verdict is Verdict.RESTARTING:
        return "nothing: its guard starts the next attempt; e shows the first error"
    if verdict is Verdict.LOST:
        return f"make room where the checkpoints go; {again}"
    if verdict is Verdict.STOPPED and run and run.phase is RunPhase.STOPPED:
        return again
    if verdict not in (Verdict.DOWN, Verdict.DEGRADED):
        return ""
    worst = next((row for row in rows if row.name == (about or _worst(rows))), None)
    return _about(found, notes, worst, run).format(**commands, host=worst.name if worst else "")


def guard_acts_in_s(found: Moment) -> float | None:
    """In how long the run's guard ends what hangs between steps, by what it told the hosts; None: unknown, or in another phase."""
    limits = [run.guard.hang_after_s for run in found.told.values() if run.guard and run.guard.hang_after_s]
    silent = judge.silent_rank(found.telling, 0.0, math.inf)
    if not (limits and silent) or silent.beat.phase is not Phase.TRAIN:
        return None
    longest_s = max((each.step_s for each in found.metrics if each.step_s), default=0.0)
    return max(0.0, judge.between_steps(longest_s, max(limits)).hang_s - silent.age_s)


def _wake(found: Moment) -> str:
    """Return what lets the first rank that is stopped by a signal go on; "" if none is."""
    for name, beat, note in found.halted[:1]:
        if note is HALTED["T"]:
            return f"`kill -CONT {beat.pid}` on {name} lets rank {beat.rank} go on"
    return ""


def _about(found: Moment, notes: Sequence[Note], worst: HostRow | None, run: TrainingStatus | None) -> str:
    """Return what to do about the first reason that the verdict gives; ``worst``: the host that it is about."""
    if found.halted:
        of_run = given(" --run {}", run.run if run else "")
        return _wake(found) or f"a says what the other ranks wait for; `{{stop}}{of_run}` ends it"
    if worst and worst.state in LINK_STATES:
        return ABOUT_HOSTS[worst.state]
    if notes and notes[0].key == UNSAVED:
        full = next((host for host in found.ours if full_disks(host.frame)), None)
        return ABOUT_NOTES[UNSAVED] + (f"; {_verbatim(_what_fills(full))}" if full else "")
    if run and run.network == "SOCKET":
        return "`{doctor}` says why the training does not use RDMA"
    if any(note.key == BEHIND for _, _, note in found.slow_ranks):
        return "look at the GPU of that rank (3, Enter): a slow one costs every step; replace its host if it stays so"
    for note in notes:
        for key, words in ABOUT_NOTES.items():
            if note.key.startswith(key):
                return words
    if run and run.is_unguarded:
        return "`{status}" + given(" --run {}", run.run) + "` prints the command that guards it again"
    if worst and worst.state in ABOUT_HOSTS:
        return ABOUT_HOSTS[worst.state]
    if worst and (words := _about_note(found, worst)):
        return _verbatim(words)
    return "Enter shows the host with everything that stands out; `{doctor}` tests it" if worst else ""


def _verbatim(words: str) -> str:
    """Return words without anything for ``format`` to fill in: a path may have braces."""
    return words.replace("{", "{{").replace("}", "}}")


def _about_note(found: Moment, row: HostRow) -> str:
    """Return what to do about the first thing that stands out on a host, if it is a hot GPU or a full disk."""
    host, note = found.hosts[row.name], next(iter(found.notes[row.name]), NOT_ODD)
    if FREE in note.fields:
        return f"{_what_fills(host)}; delete what is not needed, such as checkpoints of earlier runs"
    odd = [(gpu, found.odd[row.name, gpu.index]) for gpu in host.gpus if (row.name, gpu.index) in found.odd]
    hot = [gpu for gpu, why in odd if HEAT in why.fields or {*gpu.slowed} & {*THERMAL}]
    if not hot or odd[0][0] is not hot[0]:
        return ""
    words = f"check the fans and the inlet air of {row.name}"
    if limits_w := known(gpu.power_limit_w for gpu in hot):
        which = "" if len(hot) == len(host.gpus) else f" -i {','.join(str(gpu.index) for gpu in hot)}"
        command = f"sudo nvidia-smi{which} -pl {LESS_POWER * min(limits_w):.0f}"
        words += f"; until then, `{command}` there makes less heat (the limit is {min(limits_w):.0f} W)"
    return words


def _what_fills(host: HostView) -> str:
    """Name the command that shows what fills a host's disk."""
    path, _ = full_disks(host.frame)[0]
    return f"`du -xhd2 {shlex.quote(path)} | sort -h | tail` on {host.name} shows what fills it"


def _worst(rows: Sequence[HostRow]) -> str:
    """Name the host that is worst off; "" if all are well."""
    bad = [row for row in rows if row.severity or row.notes]
    return max(bad, key=lambda row: (row.severity, len(row.notes))).name if bad else ""
