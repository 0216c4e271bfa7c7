"""One host in detail. Pure."""

from collections.abc import Sequence

from rich.text import Text

from llama405b.contract.phrases import given
from llama405b.contract.records import Phase
from llama405b_tools.text.figures import bar, gbit, gib, number, span
from llama405b_tools.top.draw.lines import LogLine, log_pane, rule
from llama405b_tools.top.draw.marks import pieced, style_of
from llama405b_tools.top.state.picture import HostRow, ProcessRow, RankRow


def detail(row: HostRow, logs: Sequence[LogLine], width: int, room: int) -> list[Text]:
    """Draw one host: its GPUs, ranks, processes, network and log lines."""
    lines = [rule(f"{row.name}  {row.state} {row.why}", width)]
    pieces = (
        (
            f"  last frame {span(row.age_s)} ago │ {number(row.cores, 'd')} cores at {number(row.cpu_pct, '.0f')}% │ ",
            "",
        ),
        (f"RAM {gib(row.ram_used_bytes)}/{gib(row.ram_bytes)} GiB", "ram_used_bytes"),
        (" │ ", ""),
        (f"disk {gib(row.disk_free_bytes)} GiB free", "disk_free_bytes"),
        (f" │ net {gbit(row.net_bytes_per_s)} Gb/s │ ", ""),
        (f"RDMA {gbit(row.ib_bytes_per_s)} Gb/s", "ib_bytes_per_s"),
    )
    lines.append(pieced(row, pieces, row.odd_in))
    lines += [Text(f"  ! {note}", "yellow") for note in row.notes]
    lines += gpu_lines(row, width) or [Text("  no GPU" if row.has_gpu is False else "  its GPUs are unknown", "dim")]
    lines += [rule("RANKS", width), *(_rank_line(row, rank) for rank in row.ranks)]
    lines += [rule("PROCESSES", width), *(_process_line(row, process) for process in row.processes)]
    mine = [line for line in logs if row.name in line.hosts]
    return lines + log_pane(mine, max(3, room - len(lines)), width, 0)


def _rank_line(row: HostRow, rank: RankRow) -> Text:
    pieces = [
        (f"  rank {rank.rank:>4}  ", ""),
        (f"{rank.phase:10}", "phase"),
        (f" step {rank.step:>6}", "step"),
        (f"  heard {span(rank.age_s):>5} ago", "age_s"),
        (f"  {rank.state or 'gone'}", "state"),
        (f"  batch {number(rank.data_s, '.2f')} s", "data_s"),
        (f"  update {number(rank.optimizer_s, '.2f')} s", "optimizer_s"),
    ]
    if rank.phase in (Phase.DATA, Phase.LOAD, Phase.PIN) and rank.total_bytes:
        pieces.append((f"  {rank.done_bytes / 1e9:.1f} of {rank.total_bytes / 1e9:.1f} GB", ""))
    return pieced(row, pieces, rank.odd_in).append(given("  ! {}", rank.odd), style_of(row, odd=True))


def _process_line(row: HostRow, process: ProcessRow) -> Text:
    where = f"rank {number(process.rank, 'd'):>4} gpu {number(process.gpu, 'd'):>2}"
    used = f"{number(process.cpu_pct, '.0f'):>4}% {process.rss_bytes / (1 << 30):6.1f} GiB"
    return Text(f"  {process.pid:>8} {process.state} {where} {used}  {process.command}", style_of(row, odd=False))


def gpu_lines(row: HostRow, width: int) -> list[Text]:
    """Draw the GPUs of a host, one per line."""
    if not row.gpus:
        return []
    lines = [rule(f"{row.name}  {row.gpus[0].name}", width)]
    for gpu in row.gpus:
        pieces = (
            (f"  gpu {gpu.index}  rank {number(gpu.rank, 'd'):>4}  {bar(gpu.power_pct)} ", ""),
            (f"{number(gpu.power_w, '.0f'):>4}/{number(gpu.power_limit_w, '.0f')} W", "power_w"),
            (f"  util {number(gpu.utilization, 'd'):>3}%  ", ""),
            (f"{number(gpu.temperature_c, 'd'):>3} °C", "temperature_c"),
            (f"  {number(gpu.clock_mhz, 'd'):>4} MHz", "clock_mhz"),
            (f"  {number(gpu.used_mib, ',d'):>7}/{number(gpu.memory_mib, ',d')} MiB  ", ""),
        )
        line = pieced(row, pieces, gpu.odd_in)
        line.append(given("! {}", gpu.odd), style_of(row, odd=True))
        lines.append(line)
    return lines
