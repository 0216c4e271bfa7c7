"""Take the steps that docs/measurements/predicted-h200.md predicted: layers of Llama 3.1 405B on one GPU.

    .venv/bin/python scripts/predicted.py [ROW …]

Prints a table to paste beside the predictions. Random weights are made on the GPU. Each row runs in a process of its own, since pinned
memory is given back only when a process ends, and one that takes too long is ended; rows are numbered from 1, as there.
"""

import multiprocessing
import sys

import torch

from llama405b.bench.steps import STEPS, Workload, take_steps
from llama405b.distributed import ranks
from llama405b.settings.schema import Parallel

TIMEOUT_S = 120
GIB = 1 << 30
PARTS = ("forward", "backward", "optimizer")
# Layers, S, settings.
ROWS = (
    (2, 8192, Parallel(numerics="pure-bf16")),
    (2, 8192, Parallel(numerics="pure-bf16", fsdp_unit="sublayer")),
    (2, 8192, Parallel(numerics="pure-bf16", fsdp_unit="sublayer", offload="all")),
    (1, 8192, Parallel(fsdp_unit="sublayer", offload="optimizer")),
    (1, 8192, Parallel(fsdp_unit="sublayer", offload="all")),
    (1, 4096, Parallel(numerics="pure-bf16")),
)


def measure(layers, seq_len, parallel):
    """Print what one row's steps took, and their memory."""
    me = ranks.join_process_group("cuda", TIMEOUT_S)
    what = Workload("llama3.1-405b", layers, batch=1, seq_len=seq_len, vocab=128_256)
    _, timed = take_steps(what, parallel, me, 1 + STEPS)
    stats = torch.cuda.memory_stats()
    times = [f"{timed.seconds[part] * 1e3:,.0f}" for part in PARTS]
    waited = f"{timed.work.exposed_s * 1e3:,.0f}" if timed.work else "—"
    memory = [f"{stats[f'{kind}_bytes.all.peak'] / GIB:.1f}" for kind in ("allocated", "reserved")]
    place = [
        layers,
        seq_len,
        parallel.numerics,
        parallel.offload,
        f"{parallel.fsdp_unit}s",
    ]
    print(f"| {' | '.join(map(str, [*place, *times, waited, *memory]))} |", flush=True)
    ranks.leave_process_group()


def main(words):
    """Run the rows that are asked for, or all."""
    columns = ("layers", "S", "numerics", "offload", "units", "forward ms", "backward ms", "optimizer ms", "of it waited ms",
               "peak GiB", "reserved GiB")  # fmt: skip
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|"
    )
    context = multiprocessing.get_context("spawn")
    for row in map(int, words or range(1, 1 + len(ROWS))):
        child = context.Process(target=measure, args=ROWS[row - 1])
        child.start()
        child.join(TIMEOUT_S)
        if child.exitcode != 0:
            print(f"row {row}: exit code {child.exitcode} (None: not done after {TIMEOUT_S} s)", flush=True)
        child.kill()
        child.join()


if __name__ == "__main__":
    main(sys.argv[1:])
