"""All that a report of a run shows, from the files of its head. Standard library."""

import contextlib
import time

from llama405b.contract.checkpoints import newest_complete
from llama405b.contract.events import RunEvent
from llama405b.contract.files import EVERY, read_records
from llama405b.contract.plan import read_plan
from llama405b.contract.records import METRICS_LINE, Metrics, Sample
from llama405b_tools.remote.accounts import account_of_attempts, attempts_of
from llama405b_tools.remote.describe import checkpoints_of, lives, manifest_of
from llama405b_tools.remote.launch_facts import first_gpu, gpus
from llama405b_tools.remote.locks import run_of
from llama405b_tools.remote.messages.account_request import HeadRequest
from llama405b_tools.remote.messages.report import MOST_SAMPLES, ReportReply, evaluations_of, points_of


def report_of(request: HeadRequest) -> ReportReply:
    """Return what the run's files say, its curves as far as a screen can show them."""
    run = run_of(request.run)
    plan = read_plan(run)
    lines, alive = read_records(METRICS_LINE, run.metrics, EVERY), lives(run, plan, request.host)
    steps = [line for line in lines if isinstance(line, Metrics)]
    attempts = attempts_of(run, request.host, plan.attempt, steps, alive=alive)
    saved, settings = None, ""
    with contextlib.suppress(OSError):
        saved = newest_complete(checkpoints_of(run, plan))
    manifest = manifest_of(saved) if saved else None
    with contextlib.suppress(OSError):
        settings = run.config.read_text(encoding="utf-8")
    return ReportReply(
        now=time.time(),
        created=plan.created,
        owner=plan.owner,
        attempt=plan.attempt,
        hosts=tuple((node.name, node.slots) for node in plan.nodes),
        mesh=plan.mesh,
        expected_step_s=plan.expected_step_s,
        alive=alive,
        attempts=tuple(attempts),
        account=account_of_attempts(run, request.host, attempts, steps, plan.world),
        points=tuple(points_of(steps)),
        last=steps[-1] if steps else None,
        evaluations=tuple(evaluations_of(lines)),
        events=tuple(read_records(RunEvent, run.events("rank-0"), EVERY)),
        samples=tuple(read_records(Sample, run.samples, MOST_SAMPLES)),
        settings=settings,
        gpu="" if plan.slurm_job else first_gpu(gpus()[0])[0],  # a job's files are read on another machine
        checkpoint=str(saved or ""),
        versions=dict(manifest.versions) if manifest else {},
        learns=manifest.identity if manifest else None,
    )
