"""``doctor --deep``: load every GPU and link by probes, and name the outliers."""

import collections
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

from llama405b.contract.errors import UserError
from llama405b.contract.probes import DEEP, Figure, Probe, ProbeResult
from llama405b_tools.doctor.rules.findings import Finding
from llama405b_tools.doctor.rules.of_host import BAD, NOTE, WARN
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.run import request as asked
from llama405b_tools.run.probes import run_probes

DEVICE_TOLERANCE, CPU_TOLERANCE = 0.05, 0.5  # below the median; CPUs are shared
LINK_TOLERANCE, CPU_LINK_TOLERANCE = 0.3, 0.7
WITHIN_S = 1800.0


def check(hosts: Sequence[Host], fleet: Fleet) -> list[Finding]:
    """Run the probes on all hosts, and judge the results."""
    run = f"doctor-{time.strftime('%Y%m%d-%H%M%S')}"
    request = asked.parse_launch(["--run", run, "--", "true"], time.time())
    everyone = tuple(host.name for host in hosts)
    try:
        results = run_probes(
            request,
            hosts,
            fleet,
            DEEP,
            WITHIN_S,
            lambda result: print(f"{result.probe}: {result.seconds:.0f} s", file=sys.stderr, flush=True),
        )
    except UserError as error:
        return [Finding(BAD, everyone, f"the deep check did not start: {error}", "fix that first")]
    for result in results:
        if not result.good:
            where = (result.failed_on,) if result.failed_on else everyone
            what = f"the deep check failed: {result.probe}: {result.fault or result.why}"
            return [Finding(BAD, where, what, f"{fleet.command_to_type('logs', run)} shows every rank")]
    return list(judge(results))


def judge(results: Sequence[ProbeResult]) -> Iterator[Finding]:
    """Yield findings on the measurements: what is slower than the median, and the measured rates."""
    figures = {result.probe: result.figures for result in results}
    on_cpu = results[0].device == "cpu"
    devices, links = figures[Probe.PRODUCTS], figures.get(Probe.HOST_LINKS, ())
    yield from _slow_devices(devices, CPU_TOLERANCE if on_cpu else DEVICE_TOLERANCE)
    yield from _slow_links(links, CPU_LINK_TOLERANCE if on_cpu else LINK_TOLERANCE)
    flops = [device.value for device in devices]
    said = f"measured: {min(flops):.3g} to {max(flops):.3g} TFLOP/s"
    if rates := [link.value for link in links]:
        said += f", links {min(rates):.2f} to {max(rates):.2f} GB/s"
    if bandwidth := {figure.name: figure.value for figure in figures.get(Probe.COLLECTIVES, ())}:  # the largest size's
        said += f", all-gather {bandwidth['all-gather']:.2f} GB/s, all-reduce {bandwidth['all-reduce']:.2f} GB/s"
        said += " (bus bandwidth)"
    hosts = tuple(dict.fromkeys(host for device in devices for host in device.hosts))
    yield Finding(NOTE, hosts, said, "compare with the hardware's specification")


def _slow_devices(devices: Sequence[Figure], tolerated: float) -> Iterator[Finding]:
    middle = statistics.median(device.value for device in devices)
    for device in devices:
        if device.value < (1 - tolerated) * middle:
            what = f"{device.name}: {device.value:.3g} TFLOP/s where the median is {middle:.3g}"
            remedy = "look at its clocks, power and temperature; every rank waits for the slowest"
            yield Finding(WARN, device.hosts, what, remedy)


def _slow_links(links: Sequence[Figure], tolerated: float) -> Iterator[Finding]:
    """Blame each slow link on the end that has more slow links."""
    if not links:
        return
    usual = statistics.median(link.value for link in links)
    slow = [link for link in links if link.value < (1 - tolerated) * usual]
    counts = collections.Counter(end for link in slow for end in link.hosts)
    for link in slow:
        odd = max(link.hosts, key=lambda end: counts[end])
        what = f"{link.name}: {link.value:.2f} GB/s each way where the median is {usual:.2f}"
        yield Finding(WARN, (odd,), what, "look at its cable, port and NCCL_IB_HCA")
