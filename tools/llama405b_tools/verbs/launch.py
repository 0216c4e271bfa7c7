"""Start a run on all hosts or on none, and follow or guard it."""

import contextlib
import dataclasses
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.errors import EXIT_DETACHED, EXIT_OK, RunError, UserError
from llama405b.contract.paths import RunDir
from llama405b.settings import command, config
from llama405b.spec import models
from llama405b.spec.plan import Node, Plan
from llama405b_tools.agent.processes import dismiss_guard, setup_argv, torchrun_argv
from llama405b_tools.guard import guard, process
from llama405b_tools.guard.guard import GuardInput, run_follow_up
from llama405b_tools.guard.process import begin_guard_on, check_guard_host
from llama405b_tools.hosts.fleet import Fleet, command_to_type, program_name
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.launch import slurm
from llama405b_tools.launch.placement import first_ranks, places_env
from llama405b_tools.launch.probes import rehearse
from llama405b_tools.launch.request import LaunchRequest, parse_launch
from llama405b_tools.launch.start import check_and_plan, launch
from llama405b_tools.run import backends
from llama405b_tools.run.follow import EndKind, follow
from llama405b_tools.run.screen import show
from llama405b_tools.text.words import fold_ranks
from llama405b_tools.verbs.arguments import resolve_hosts
from llama405b_tools.verbs.tune import tune


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    now = time.time()
    request = parse_launch(argv, now)
    for line in request.overridden:
        show(line)
    if request.slurm is not None:
        return submit_job(request, request.slurm)
    hosts = resolve_hosts(request.hosts_file)
    if request.dry_run:
        print_dry_run(request, hosts)
        return EXIT_OK
    with Fleet(hosts) as fleet:
        if request.rehearse:
            return rehearse(request, hosts, fleet)
        if request.guard_on:
            check_guard_host(request.guard_on, request, fleet)
        elif request.restart:
            process.check_guard_directory(request.run)
        if request.tune:
            request = tune_first(argv, now, request, hosts, fleet)
        plan, lines = launch_or_adopt(request, hosts, fleet)
        lines += next_commands(request.hosts_file, plan.run, saves=request.saves)
        guard_process = None
        try:
            if request.restart:  # before printing anything, which fails if the terminal is gone
                guard_line, guard_process = launch_guard(request, hosts, plan, fleet)
                lines.append(guard_line)
        finally:
            for line in lines:
                show(line)
        if request.follow and not request.restart:
            return follow_to_end(request, fleet, plan)
    if request.follow and guard_process:
        return guard_process.follow(request.hosts_file, plain=request.plain)
    return EXIT_OK


def tune_first(
    argv: Sequence[str], now: float, request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet
) -> LaunchRequest:
    """Find the fastest settings, unless that was done; return the request with them. What else is wrong is refused before."""
    check_and_plan(dataclasses.replace(request, force_fit=True), hosts, fleet, is_restart=False)
    if not tune(request, hosts, once=True):
        raise UserError("--tune: no settings were found that have room; nothing was started")
    tuned = parse_launch([word for word in argv if word != "--tune"], now)
    answers = check_and_plan(dataclasses.replace(tuned, force_fit=True), hosts, fleet, is_restart=False).answers
    if left := sorted({run for facts in answers.values() for run in facts.others if run.startswith("tune-")}):
        command = fleet.command_to_type("stop", left[0])
        raise RunError(f"--tune: {left[0]} is still alive; `{command}` ends it; nothing was started")
    return tuned


def follow_to_end(request: LaunchRequest, fleet: Fleet, plan: Plan) -> int:
    """Follow the run, then run the actions after a successful end; return the exit code."""
    ending = follow(fleet, plan, plain=request.plain)
    fault, words = run_follow_up(request, ending, plan, fleet, show)
    if fault:
        raise RunError(fault)
    if words:
        show(words, error=ending.kind is not EndKind.WELL)
    return ending.code


def launch_or_adopt(request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet) -> tuple[Plan, list[str]]:
    """Launch the run or adopt one that lost its guard (``--restart``); return its plan and lines to print."""
    lines: list[str] = []
    if request.restart and (plan := guard.adopt_run(request, fleet)):
        lines.append(f"{plan.run}: its guard is gone; guarding it from now on")
    else:
        plan = launch(request, hosts, fleet, on_line=lines.append)
        dismiss_guard(RunDir.from_name(plan.run))  # the guard of an earlier launch with this name
    with contextlib.suppress(
        OSError
    ):  # a stale file of an earlier guard; the run is up, so failing to delete it must not matter
        RunDir.from_name(plan.run).guard.unlink()
    return plan, lines


def launch_guard(
    request: LaunchRequest, hosts: Sequence[Host], plan: Plan, fleet: Fleet
) -> tuple[str, process.GuardProcess | None]:
    """Start the guard of a live run, here or on a host; return a line that says where, and the process here."""
    try:
        if request.guard_on:
            return f"guard running {begin_guard_on(request.guard_on, request, plan, fleet)}", None
        guard_process = process.start_guard(GuardInput(request, tuple(hosts), plan))
    except RunError as error:
        command = f"`{program_name()} launch {request.resume_arguments}`"
        raise RunError(f"the run started, but its guard did not: {error}; to guard the run, use {command}") from None
    note = f"guard running as pid {guard_process.pid}; you can close this terminal; its log: {guard_process.log}"
    return note, guard_process


def submit_job(request: LaunchRequest, options: str) -> int:
    """Submit the run as a Slurm job; follow it if requested."""
    if request.dry_run:
        slurm.parse_sbatch_options(request, options)
        print(slurm.job_script(request.run, Path.cwd() / "runs" / request.run))
        print(f"sbatch {options}  # nothing was submitted")
        print_model_download(request)
        return EXIT_OK
    for line in [
        f"{request.run}: job {slurm.submit(request, options)}",
        *next_commands(Path("hosts"), request.run, saves=request.saves, attach=False),
    ]:
        show(line)
    if not request.follow:
        return EXIT_OK
    try:
        plan = slurm.await_plan(request.run)
    except KeyboardInterrupt:
        print("\ndetached; the job continues")
        return EXIT_DETACHED
    with Fleet(backends.job_hosts(request.run)) as fleet:
        return follow(fleet, plan, plain=request.plain).code


def print_dry_run(request: LaunchRequest, hosts: Sequence[Host]) -> None:
    """Print what would run on each host, with <...> for values that only the hosts know."""
    plan = _provisional_plan(request, hosts)
    has_slots = all(host.slots for host in hosts)
    if request.config:
        command.parse(plan.program[2:])
    for node in plan.nodes:
        span = fold_ranks(node.ranks) if has_slots else "one rank per GPU"
        print(f"{node.name}  ({span}, in {node.workdir})")
        argv = torchrun_argv(plan, node.name, f"runs/{plan.run}/logs/{node.name}")
        command_text = shlex.join(setup_argv(plan.setup, argv))
        env = "".join(f"{name}={shlex.quote(value)} " for name, value in sorted(node.env.items()))
        print(f"  {env}{command_text.replace('--nproc-per-node=0', '--nproc-per-node=<GPUs>')}")
    if request.config and has_slots and not request.evaluates:
        config.check_ranks(request.config, plan.axes(request.config.parallel))
    print_model_download(request)
    print("nothing was started and no connection was opened")


def print_model_download(request: LaunchRequest) -> None:
    """Print how to download a model given by its Hub name, unless it is a local directory."""
    model = Path(request.config.model.path) if request.config else None
    if model and models.is_hub_name(model) and not model.is_dir():
        print(
            f"{model}: no such directory on this machine; unless the first host has it, {models.download_hint(model)}"
        )


def _provisional_plan(request: LaunchRequest, hosts: Sequence[Host]) -> Plan:
    """Return the plan as far as it is known without contacting a host."""
    slots = [host.slots for host in hosts]
    nodes = tuple(
        Node(
            name=host.name,
            slots=host.slots,
            first_rank=first,
            workdir=host.workdir or str(Path.cwd()),
            python=host.python or sys.executable,
            address=host.address or "<route to the head>",
            interface="<interface>",
            env=places_env(host.places) | dict(request.env),
        )
        for host, first in zip(hosts, first_ranks(slots), strict=True)
    )
    head = hosts[0].address or "<measured>"
    return Plan(
        run=request.run,
        attempt=1,
        created=0.0,
        rdzv_id=f"{request.run}-<attempt>-<random>",
        endpoint=f"{head}:{request.port or '<free port>'}",
        program=request.training_program(),
        secrets=tuple(request.secrets),
        nodes=nodes,
        setup=request.setup,
    )


def next_commands(hosts_file: Path, run: str, *, saves: bool, attach: bool = True) -> list[str]:
    """Return the commands to use next, each with its purpose."""
    verbs = {
        "top": "hosts, GPUs, training and logs on one screen",
        "logs": "every rank's log (-f follows)",
        "attach": "tmux on every host",
        "stop": "save, then stop" if saves else "end it on every host",
    }
    if not attach:
        del verbs["attach"]
    return [f"  {command_to_type(verb, hosts_file, run)}   # {purpose}" for verb, purpose in verbs.items()]
