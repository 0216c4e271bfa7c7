"""What doctor prints: problems first, then all hosts side by side, those that are alike in one line."""

from collections.abc import Sequence

from llama405b.contract.phrases import counted, given
from llama405b_tools.doctor.host_facts import HostFacts
from llama405b_tools.doctor.rules.findings import Finding
from llama405b_tools.doctor.rules.of_host import BAD, GIB, WARN
from llama405b_tools.doctor.visit import Visit
from llama405b_tools.text.clean import clean
from llama405b_tools.text.figures import DASH, format_table
from llama405b_tools.text.fold import fold_names

HEADINGS = ("host", "fit", "address", "ssh", "clock", "GPUs", "RDMA", "RAM", "workdir free", "write", "python", "torch")


def print_report(visit: Visit, found: Sequence[Finding], names: Sequence[str], *, deep: bool, mesh: str = "") -> None:
    """Print problems first, then all hosts side by side, and the mesh that their ranks would make."""
    for finding in found:
        where = "all hosts" if len(finding.hosts) == len(names) > 1 else fold_names(finding.hosts)
        print(clean(f"{finding.level.replace(BAD, BAD.upper())}  {where}: {finding.what}"))
        print(clean(f"     → {finding.remedy}"))
    if found:
        print()
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        rows.setdefault(_row(name, visit, found), []).append(name)
    print(format_table(HEADINGS, [(fold_names(alike), *row) for row, alike in rows.items()]), flush=True)
    never = "" if deep else "; links and GPUs were not tested under load: add --deep"
    split = given("; ranks as {}", mesh)
    print(f"\n{counted(len(names), 'host')}: {_verdict([finding.level for finding in found])}{split}{never}")


def _verdict(levels: Sequence[str]) -> str:
    if BAD in levels:
        return f"not fit: {counted(levels.count(BAD), 'problem')}"
    if WARN in levels:
        return f"fit, with {counted(levels.count(WARN), 'warning')}"
    return "fit"


def _row(name: str, visit: Visit, found: Sequence[Finding]) -> tuple[str, ...]:
    if name in visit.lost:
        return ("NO", *[DASH] * 10)
    levels = {finding.level for finding in found if name in finding.hosts}
    fit = next((word for level, word in ((BAD, "NO"), (WARN, "warn")) if level in levels), "yes")
    facts = visit.facts[name]
    return (
        fit,
        visit.peers.training_address(name) or DASH,
        f"{visit.latency_ms[name]:.0f} ms",
        f"{visit.skew_s[name]:+z.1f} s",
        _counted([gpu.name.removeprefix("NVIDIA ") for gpu in facts.devices]),
        _counted([f"x {port.gbit:g} Gb/s" for port in facts.rdma_ports if port.up]),
        *_room(facts),
        facts.packages.get("python", DASH),
        facts.packages.get("torch", DASH),
    )


def _room(facts: HostFacts) -> tuple[str, str, str]:
    """RAM, and the free space and write rate of the working directory's disk."""
    memory, work = facts.memory, facts.working_disk
    ram = free = rate = DASH
    if memory:
        ram = f"{memory.total / GIB:.0f} GiB"
    if work:
        free = f"{work.free / 1e9:,.0f} GB"
    if work and work.write_per_s:
        rate = f"{work.write_per_s / 1e9:.1f} GB/s"
    return ram, free, rate


def _counted(names: Sequence[str]) -> str:
    """Their number, and the first one's name."""
    return f"{len(names)} {names[0]}" if names else "none"
