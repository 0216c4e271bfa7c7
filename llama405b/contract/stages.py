"""Which layers each pipeline stage has, by names and shapes alone. Pure.

A rank has one stage, or with the interleaved schedule two: stage k is on rank k modulo the ranks of a pipeline. The stages take about
equally long, and of the ways to do that have about equally many parameters: the embedding counts as its parameters, the head as
both.
"""

import collections
import math
import re
from collections.abc import Mapping, Sequence

LAYER = re.compile(r"model\.layers\.(\d+)\.")
FIRST = "model.embed_tokens."


def stages_of(shapes: Mapping[str, Sequence[int]], n_stages: int) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each stage, of a model with these parameters; a stage may have none."""
    sizes: dict[int, int] = collections.defaultdict(int)
    first = last = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        if found := LAYER.match(name):
            sizes[int(found[1])] += size
        elif name.startswith(FIRST):
            first += size
        else:
            last += size
    layer = max(1, max(sizes.values(), default=1))
    time = [0.0] * n_stages
    time[-1] = last / layer
    parameters = list(time)
    parameters[0] += first / layer
    counts = [0] * n_stages
    for _ in sizes:
        stage = min(range(n_stages), key=lambda each: (time[each], parameters[each]))
        counts[stage] += 1
        time[stage] += 1
        parameters[stage] += 1
    layers = iter(sorted(sizes))
    return tuple(tuple(next(layers) for _ in range(count)) for count in counts)


def stage_of(name: str, stages: Sequence[Sequence[int]]) -> int:
    """Return the stage that has a parameter."""
    if found := LAYER.match(name):
        return next(stage for stage, layers in enumerate(stages) if int(found[1]) in layers)
    return 0 if name.startswith(FIRST) else len(stages) - 1
