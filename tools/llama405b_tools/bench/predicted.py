"""``llama405b bench plan``: what a calibrated plan predicts for the demo on these hosts, beside what its run takes."""

import time
from collections.abc import Sequence
from pathlib import Path

from llama405b.capacity.calibration import Point
from llama405b.capacity.estimate import Estimate, Load, estimate
from llama405b.capacity.known import known_shape
from llama405b.contract.config import on_ranks
from llama405b.contract.errors import GOOD, RunError
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.run import request as asked
from llama405b_tools.run.calibrate import calibrate, point

GB = 1e9
TIMES = ("forward_s", "backward_s", "optimizer_s", "step_s")


def predicted(hosts: Sequence[Host], file: Path, repeat: int) -> int:
    """Compare, so many times; returns the exit code.

    Raises:
        UserError: The demo cannot be launched on these hosts.
        RunError: It fails there, or its model is on another machine.
    """
    world = sum(host.slots or 1 for host in hosts)
    print(f"the demo on {len(hosts)} hosts, {world} ranks; with few of its layers, predicted for all of them")
    with Fleet(hosts) as fleet:
        for number in range(1, repeat + 1):
            run = f"bench-{time.strftime('%Y%m%d-%H%M%S')}"
            request = asked.parse([str(file), "--run", run, "--preset", "demo"], time.time())
            assert request.config
            whole = point(request, hosts, fleet, 0)
            if (llama := known_shape(request.config, "demo")) is None:
                raise RunError("the demo's model is not on this machine; run this where the first host runs")
            load = Load.of(llama, on_ranks(request.config, world), world)
            _tell(number, calibrate(request, hosts, fleet, load, "").applied(estimate(load)), whole)
    return GOOD


def _tell(number: int, needs: Estimate, whole: Point) -> None:
    assert needs.time
    pairs = [(name, getattr(needs.time, name), getattr(whole, name)) for name in TIMES]
    pairs.append(("memory_gb", needs.gpu_bytes / GB, whole.peak_bytes / GB))
    for name, predicted, measured in pairs:
        print(
            f"{number}  {name:11}  predicted {predicted:7.4f}  measured {measured:7.4f}  ratio {predicted / measured:.2f}",
            flush=True,
        )
