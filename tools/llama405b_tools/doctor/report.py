"""What doctor prints: problems first, then all hosts side by side."""

from collections.abc import Sequence

from llama405b_tools.doctor.rules import findings
from llama405b_tools.doctor.rules.findings import Finding
from llama405b_tools.doctor.rules.of_host import BAD, GIB, WARN
from llama405b_tools.doctor.visit import Visit
from llama405b_tools.machine import fabric, gpus
from llama405b_tools.machine.fabric import Rdma
from llama405b_tools.text.clean import clean
from llama405b_tools.text.fold import fold_names
from llama405b_tools.text.tables import table


def report(visit: Visit, found: Sequence[Finding], names: Sequence[str], *, deep: bool) -> None:
    """Print problems first, then all hosts side by side."""
    for finding in found:
        where = "all hosts" if len(finding.hosts) == len(names) > 1 else fold_names(finding.hosts)
        print(clean(f"{finding.level.upper() if finding.level == BAD else finding.level}  {where}: {finding.what}"))
        print(clean(f"     → {finding.remedy}"))
    if found:
        print()
    headings = (
        "host",
        "fit",
        "address",
        "ssh",
        "clock",
        "GPUs",
        "RDMA",
        "RAM",
        "workdir free",
        "write",
        "python",
        "torch",
    )
    print(table(headings, [_row(name, visit, found) for name in names]), flush=True)
    bad, warnings = (sum(finding.level == level for finding in found) for level in (BAD, WARN))
    verdict = f"fit, with {warnings} warnings" if warnings else "fit"
    if bad:
        verdict = f"not fit: {bad} problems"
    never = "" if deep else "; links and GPUs were not loaded: --deep does that"
    print(f"\n{len(names)} hosts: {verdict}{never}")


def _row(name: str, visit: Visit, found: Sequence[Finding]) -> tuple[str, ...]:
    levels = {finding.level for finding in found if name in finding.hosts}
    fit = "warn" if WARN in levels else "yes"
    if BAD in levels:
        fit = "NO"
    if name in visit.lost:
        return (name, "NO", *["—"] * 10)
    facts = visit.facts[name]
    all_gpus = gpus.read(facts.gpus.smi, facts.gpus.fields)[0] if facts.gpus else []
    ports = [port for port in fabric.read(facts.rdma or Rdma()) if port.up]
    packages = (facts.environment.packages if facts.environment else None) or {}
    filesystems = facts.disks.filesystems if facts.disks else ()
    work = next((entry for entry in filesystems if entry.path), None)
    write_per_s = work.write_per_s if work else None
    return (
        name,
        fit,
        findings.training_address(name, visit.peers) or "—",
        f"{visit.latency_ms[name]:.0f} ms",
        f"{visit.skew_s[name]:+.1f} s",
        f"{len(all_gpus)} {all_gpus[0].name.removeprefix('NVIDIA ')}" if all_gpus else "none",
        f"{len(ports)} x {ports[0].gbit:g} Gb/s" if ports else "none",
        f"{facts.memory.total / GIB if facts.memory else 0:.0f} GiB",
        f"{work.free / 1e9 if work else 0:,.0f} GB",
        f"{write_per_s / 1e9:.1f} GB/s" if write_per_s else "—",
        packages.get("python", "—"),
        packages.get("torch", "—"),
    )
