"""``doctor --deep``: load every GPU and link, launched like any run, and name the outliers."""

import collections
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

from llama405b.contract import reader
from llama405b.contract.checkup import SIGN, Checkup
from llama405b.contract.errors import UserError
from llama405b_tools.doctor.rules.findings import Finding
from llama405b_tools.doctor.rules.of_host import BAD, NOTE, WARN
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.run import request as asked
from llama405b_tools.run.follow import watch_run
from llama405b_tools.run.judge import failure_words
from llama405b_tools.run.launch import launch
from llama405b_tools.run.start_everywhere import stop_launch

TOLERATED = {"cuda": (0.05, 0.3), "cpu": (0.5, 0.7)}  # tolerated below the median: device, link (CPUs are shared)


def check(hosts: Sequence[Host], fleet: Fleet) -> list[Finding]:
    """Run the checkup on all hosts, and judge the result."""
    run = f"doctor-{time.strftime('%Y%m%d-%H%M%S')}"
    request = asked.parse_launch(["--run", run, "--", "-m", "llama405b.commands.checkup"], time.time())
    everyone = tuple(host.name for host in hosts)
    with contextlib.redirect_stdout(sys.stderr):  # only the report goes to standard output
        try:
            plan = launch(request, hosts, fleet)
        except UserError as error:
            return [Finding(BAD, everyone, f"the checkup did not start: {error}", "fix that first")]
        try:
            watch = watch_run(fleet, plan, until=lambda watch: bool(_report(watch.said).devices))
        finally:
            stop_launch(plan, fleet)
    report = _report(watch.said)
    if report.devices:
        return list(judge(report))
    where, what = everyone, "it ended without a result"
    if worst := watch.worst():
        where, what = (worst.host,), failure_words(worst)
    return [
        Finding(
            BAD, where, f"the checkup failed: {what}", f"{fleet.command_to_type('logs', plan.run)} shows every rank"
        )
    ]


def _report(said: Iterable[str]) -> Checkup:
    """Put together what rank 0 has printed so far."""
    whole = Checkup()
    for line in said:
        if line.startswith(SIGN):
            part = reader.loads(Checkup, line.removeprefix(SIGN), "the checkup")
            whole = dataclasses.replace(part, links=whole.links + part.links)
    return whole


def judge(report: Checkup) -> Iterator[Finding]:
    """Yield findings on the measurements: what is slower than the median, and the measured rates."""
    yield from _slow_devices(report)
    yield from _slow_links(report)
    flops = [entry.tflops for entry in report.devices]
    said = f"measured: {min(flops):.3g} to {max(flops):.3g} TFLOP/s"
    if rates := [link.gb_per_s for link in report.links]:
        said += f", links {min(rates):.2f} to {max(rates):.2f} GB/s"
    said += f", all-gather {report.all_gather_gb_per_s:.2f} GB/s, all-reduce {report.all_reduce_gb_per_s:.2f} GB/s"
    hosts = tuple(dict.fromkeys(entry.host for entry in report.devices))
    yield Finding(NOTE, hosts, f"{said} (bus bandwidth)", "compare with the hardware's specification")


def _slow_devices(report: Checkup) -> Iterator[Finding]:
    middle = statistics.median(entry.tflops for entry in report.devices)
    tolerated, _ = TOLERATED[report.device]
    for entry in report.devices:
        if entry.tflops < (1 - tolerated) * middle:
            what = f"rank {entry.rank} ({report.device} {entry.local_rank}): {entry.tflops:.3g} TFLOP/s"
            what += f" where the median is {middle:.3g}"
            remedy = "look at its clocks, power and temperature; every rank waits for the slowest"
            yield Finding(WARN, (entry.host,), what, remedy)


def _slow_links(report: Checkup) -> Iterator[Finding]:
    """Blame each slow link on the end that has more slow links."""
    if not report.links:
        return
    usual = statistics.median(link.gb_per_s for link in report.links)
    _, tolerated = TOLERATED[report.device]
    slow = [link for link in report.links if link.gb_per_s < (1 - tolerated) * usual]
    counts = collections.Counter(end for link in slow for end in (link.a, link.b))
    for link in slow:
        odd = max((link.a, link.b), key=lambda end: counts[end])
        what = f"{link.a} - {link.b}: {link.gb_per_s:.2f} GB/s each way where the median is {usual:.2f}"
        yield Finding(WARN, (odd,), what, "look at its cable, port and NCCL_IB_HCA")
