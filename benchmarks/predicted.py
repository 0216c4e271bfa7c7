"""What a calibrated plan predicts for the demo on these hosts, beside what its runs take."""

import time
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.errors import EXIT_OK, RunError
from llama405b.predict.calibration import MeasuredStep
from llama405b.predict.estimate import Cluster, Estimate
from llama405b.predict.hardware import Gpu
from llama405b.predict.run_shape import PredictedRun
from llama405b.predict.search import Prediction, find_model_shape
from llama405b.predict.tuning import Candidate, Trials
from llama405b.settings.axes import Axes
from llama405b.settings.config import with_global_batch
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.launch import request as asked
from llama405b_tools.launch.probes import calibrate, run_trials, trial_flags
from llama405b_tools.launch.request import LaunchRequest

GB = 1e9
TIMES = ("forward_s", "backward_s", "optimizer_s", "step_s")
LIMIT_S = 1800.0
SETTINGS = {  # what is predicted from measurements of the first with few layers
    "as set": (),
    "micro-batch 2": ("--training.micro_batch_size=2",),
    "halves": ("--parallel.fsdp_unit=sublayer",),
    "micro-batch 8": ("--training.micro_batch_size=8", "--training.global_batch_size=16"),
    "micro-batch 1": ("--training.micro_batch_size=1",),
    "both": ("--training.micro_batch_size=2", "--parallel.fsdp_unit=sublayer"),
}


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
            request = _request(file)
            plan = _uncalibrated(request, world)
            found = calibrate(request, hosts, fleet, plan.run, plan.cluster.gpu, "")
            n_layers = plan.run.llama.layers
            candidates = {name: Candidate(name, flags, {}, 0.0, (n_layers,)) for name, flags in SETTINGS.items()}
            trials = Trials(trial_flags(request), tuple(candidates.values()), n_layers)
            _, measured = run_trials(_request(file), hosts, fleet, trials, LIMIT_S, plan.run)
            for name, candidate in candidates.items():
                needs = _uncalibrated(_request(file, *candidate.flags), world).with_calibration(found).needs
                [whole] = measured[name].points
                _tell(f"{number}  {name}", needs, whole)
    return EXIT_OK


def _request(file: Path, *flags: str) -> LaunchRequest:
    run = f"bench-{time.strftime('%Y%m%d-%H%M%S')}"
    return asked.parse_launch([str(file), "--run", run, "--preset", "demo", *flags], time.time())


def _uncalibrated(request: LaunchRequest, world: int) -> Prediction:
    assert request.config
    if (llama := find_model_shape(request.config, "demo")) is None:
        raise RunError("the demo's model is not on this machine; run this where the first host runs")
    cluster = Cluster(Gpu.for_cpu(0.0)) if request.on_cpu else Cluster()
    return Prediction.from_run(
        PredictedRun.from_config(llama, with_global_batch(request.config, Axes(dp_shard=world)), world), cluster
    )


def _tell(what: str, needs: Estimate, whole: MeasuredStep) -> None:
    assert needs.time
    pairs = [(name, getattr(needs.time, name), getattr(whole, name)) for name in TIMES]
    pairs.append(("memory_gb", (needs.gpu_reserved_bytes or needs.gpu_bytes) / GB, whole.peak_bytes / GB))
    for name, predicted, measured in pairs:
        print(
            f"{what}  {name:11}  predicted {predicted:7.4f}  measured {measured:7.4f}  ratio {predicted / measured:.2f}",
            flush=True,
        )
