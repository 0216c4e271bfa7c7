"""Ask plan, launch and torch's allocator whether random settings fit into GPUs: docs/measurements/plan-verdicts.md.

    .venv/bin/python scripts/verdicts.py [NUMBER] [--write]

The allocator is measured on the stand-in, as in reserved.py; each setting is held against every kind of GPU.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import random
import sys

from llama405b.contract.errors import UserError
from llama405b.predict.estimate import RUNTIME_BYTES, Cluster
from llama405b.predict.hardware import GIB, read_gpus
from llama405b.predict.memory import find_peak
from llama405b.predict.search import Fit, Prediction, is_runnable
from llama405b_tools.launch.start import refuse_misfit
from reserved import L1, L8, L70, L405, ROOT, Setting, measure

PAGE = ROOT / "docs/measurements/plan-verdicts.md"
BEGIN = "<!-- the table: written by scripts/verdicts.py -->"
SEED = 20261130
LARGEST, LARGEST_OF_HOST = 550e9, 113e9  # bytes of a rank: a host's memory is really asked for
NAMES = {Fit.YES: "fits", Fit.RETRIES: "retries", Fit.NO: "no"}
EDGE = 0.02  # of a GPU's memory: what both agree on less closely, and both may say either


def draw(dice):
    """A random setting that the trainer takes, and that the stand-in has memory for."""
    while True:
        setting = Setting(
            dice.choice((L1, L8, L8, L70, L405)),
            dice.choice((1, 2, 4, 8, 16, 32, 64, 128)),
            dice.choice(("none", "none", "optimizer", "all")),
            dice.choice(("fp32-master", "fp32-master", "pure-bf16")),
            dice.choice(("layer", "sublayer")),
            True,
            dice.choice((1024, 2048, 4096, 8192, 16_384)),
            dice.choice((1, 1, 2, 4)),
            dice.choice((1, 1, 2, 3)),
            dice.choice(("full", "chunked")),
            dice.choice(("full", "full", "none", "operators", "every:2")),
            dice.choice(("device", "device", "host")),
            dice.choice((0, 0, 2)),
            0,
            lora := dice.choice((0, 0, 0, 16)),
            dice.choice((False, False, True)) and not lora,
            dice.choice(("", "q v")) if lora else "",
            dice.choice((1, 1, 2)),
            dice.choice((1, 1, 1, 2, 8)),
            dice.choice((1, 1, 1, 2)),
            dice.choice((False, False, False, True)),
        )
        run = setting.run
        if setting.world % (setting.replicas * setting.tp * setting.cp) or not is_runnable(run, Cluster()):
            continue
        of_host = sum(run.host_bytes.values()) / min(run.world, run.ranks_per_host)
        if find_peak(run).total < LARGEST and of_host < LARGEST_OF_HOST:
            return setting


def seeded(number):
    """So many settings, the same each time."""
    dice = random.Random(SEED)
    return [draw(dice) for _ in range(number)]


def verdict(allocated, reserved, has):
    """Whether bytes fit into a GPU, as the allocator would find."""
    if allocated > has:
        return Fit.NO
    return Fit.YES if reserved <= has else Fit.RETRIES


@dataclasses.dataclass(frozen=True)
class Answers:
    """What plan, launch and the allocator say of a setting and a kind of GPU."""

    gpu: str
    plan: Fit
    is_refused: bool  # by launch
    allocator: Fit
    is_known: bool  # whether plan knows what is reserved
    is_at_the_edge: bool

    @property
    def agree(self):
        """Whether all three say the same; where plan does not know what is reserved, its bound may be the more careful."""
        bounded = not self.is_known and self.plan is Fit.RETRIES and self.allocator is Fit.YES
        is_same = self.plan is self.allocator or bounded or self.is_at_the_edge
        return is_same and self.is_refused == (self.plan is Fit.NO)


def ask(setting):
    """Measure a setting, and ask all of every kind of GPU."""
    measured, answers = measure(setting), []
    allocated, reserved = (measured[name] + RUNTIME_BYTES for name in ("allocated", "reserved"))
    for gpu in read_gpus().values():
        prediction = Prediction.from_run(setting.run, Cluster(gpu))
        refused = UserError("")
        with contextlib.suppress(UserError):
            refused = refuse_misfit(prediction)
        has = gpu.memory_bytes
        at_edge = min(abs(allocated / has - 1), abs(reserved / has - 1)) < EDGE
        known = bool(prediction.needs.reserved_by_pool)
        answers.append(
            Answers(
                gpu.name, prediction.gpu_fit, refused is not None, verdict(allocated, reserved, has), known, at_edge
            )
        )
    return measured, answers


def row(setting, measured, answers):
    """A line of the table."""
    usual = dataclasses.asdict(Setting("", 0, ""))
    told = [f"{name} {value}" for name, value in dataclasses.asdict(setting).items() if value != usual[name]]
    sizes = f"{measured['allocated'] / GIB:.1f} / {measured['reserved'] / GIB:.1f}"
    expected = Prediction.from_run(setting.run, Cluster()).needs
    known = sum(expected.reserved_by_pool.values())
    planned = (
        f"{expected.peak.total / GIB:.1f} / {known / GIB:.1f}" if known else f"{expected.peak.total / GIB:.1f} / ?"
    )
    wrong = [f"{each.gpu}: {NAMES[each.plan]}, {NAMES[each.allocator]}" for each in answers if not each.agree]
    return f"| {', '.join(told)} | {planned} | {sizes} | {'; '.join(wrong) or 'all agree'} |"


def main():
    words = [word for word in sys.argv[1:] if word.isdecimal()]
    lines, n_agree, n_all = [], 0, 0
    settings = seeded(int(words[0]) if words else 60)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for setting, (measured, answers) in zip(settings, pool.map(ask, settings), strict=True):
            lines.append(row(setting, measured, answers))
            n_agree, n_all = n_agree + sum(each.agree for each in answers), n_all + len(answers)
            print(lines[-1], flush=True)
    summary = f"{n_agree} of {n_all} verdicts agree, of {len(lines)} settings."
    print(summary)
    if "--write" in sys.argv:
        head = "| setting | plan: allocated / reserved, GiB | allocator | verdicts |\n|---|---|---|---|\n"
        PAGE.write_text(
            PAGE.read_text().partition(BEGIN)[0] + f"{BEGIN}\n{summary}\n\n{head}" + "\n".join(lines) + "\n"
        )


if __name__ == "__main__":
    sys.exit(main())
