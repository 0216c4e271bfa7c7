"""One host in detail, one of its ranks, and all ranks. Pure."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from rich.text import Text

from llama405b.contract.mesh import Axes
from llama405b.contract.phrases import given
from llama405b.contract.records import Phase
from llama405b_tools.text.figures import bar, gbit, gib, number, reading, share, span
from llama405b_tools.top.draw import heat
from llama405b_tools.top.draw.blocks import gauge, rule, runs
from llama405b_tools.top.draw.chart import LABEL, Axis, time_axis
from llama405b_tools.top.draw.lines import LogLine, log_pane
from llama405b_tools.top.draw.marks import pieced, style_of
from llama405b_tools.top.draw.ui import Ui
from llama405b_tools.top.state.picture import GpuCell, HostRow, Picture, ProcessRow, RankRow
from llama405b_tools.top.state.quantities import QUANTITIES, n_units, rank_at
from llama405b_tools.top.state.series import UNKNOWN
from llama405b_tools.top.state.trends import Trends


def selected_rank(row: HostRow, ui: Ui) -> RankRow | None:
    """Return the selected rank of a host: unless one is chosen, the one that stands out, else the first."""
    chosen = next((rank for rank in row.ranks if rank.rank == ui.rank), None)
    odd = next((rank for rank in row.ranks if rank.odd), None)
    return chosen or odd or next(iter(row.ranks), None)


def detail(row: HostRow, ui: Ui, logs: Sequence[LogLine], width: int, room: int) -> list[Text]:
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
    lines += [Text(f"  ! {note}", "warn") for note in row.notes]
    lines += gpu_lines(row, width) or [Text("  no GPU" if row.has_gpu is False else "  its GPUs are unknown", "old")]
    chosen = selected_rank(row, ui)
    lines += [rule("RANKS", width), *(_rank_line(row, rank, is_selected=rank is chosen) for rank in row.ranks)]
    lines += [rule("PROCESSES", width), *(_process_line(row, process) for process in row.processes)]
    mine = [line for line in logs if row.name in line.hosts]
    return lines + _newest(mine, ui, max(3, room - len(lines)), width)


def rank_page(
    row: HostRow,
    rank: RankRow,
    mesh: Axes | None,
    logs: Sequence[LogLine],
    trends: Trends,
    axis: Axis,
    ui: Ui,
    width: int,
    room: int,
) -> list[Text]:
    """Draw one rank: its process and GPU, how each quantity went, and its log lines."""
    place = given(": {}", mesh.where(rank.rank) if mesh else "")
    lines = [rule(f"rank {rank.rank} on {row.name}{place}", width), _rank_line(row, rank)]
    at = next((i for i in range(n_units(row)) if rank_at(row, i) is rank), None)
    if at is not None and at < len(row.gpus):
        lines += _gpu(row, row.gpus[at], width)
    lines += [_process_line(row, process) for process in row.processes if process.rank == rank.rank]
    if at is not None:
        lines += _histories(row, at, trends, axis, ui, width)
    if stack := ui.stacks.get(rank.rank):
        lines += [rule(f"as the autopsy of {ui.stacks_of} saw it", width), *(Text(f"  {line}") for line in stack)]
    else:
        lines.append(Text("  a takes an autopsy, which shows its stack here", "old"))
    mine = [line for line in logs if rank.rank in line.ranks or (row.name in line.hosts and -1 in line.ranks)]
    return lines + _newest(mine, ui, max(3, room - len(lines)), width)


def _newest(lines: Sequence[LogLine], ui: Ui, room: int, width: int) -> list[Text]:
    return log_pane(lines, dataclasses.replace(ui.log, at=None), room, width)


def _histories(row: HostRow, at: int, trends: Trends, axis: Axis, ui: Ui, width: int) -> list[Text]:
    """Draw a line per quantity over time, for a host's GPU (else rank)."""
    before = itertools.takewhile(lambda entry: entry[0] != row.name, trends.layout)
    unit, n = at + sum(size for _, size in before), max(4, width - 30)
    lines = [rule("over time", width)]
    for index, quantity in enumerate(QUANTITIES):
        values = [
            column[unit] if column else UNKNOWN for column in trends.heat(index, ui.window, axis.begin, axis.end, n)
        ]
        known = [value for value in values if value != UNKNOWN]
        if known:
            by = heat.Scaled(quantity, *quantity.scale(known))
            name = f"  {quantity.name} {reading(known[-1])} {quantity.unit}"
            lines.append(Text().append(f"{name:30}"[:30], "title").append_text(runs(map(by.cell, values))))
    return [*lines, Text(" " * 30).append_text(time_axis(axis, n)[LABEL:])]


def rank_table(pic: Picture, rows: Sequence[HostRow], ui: Ui, width: int, room: int) -> list[Text]:
    """Draw the ranks of all hosts, the worst first, around the selected one."""
    ranks = ranks_in_order(rows)
    at = next((i for i, (row, rank) in enumerate(ranks) if row.name == ui.selected and rank.rank == ui.rank), 0)
    begin = max(0, min(at - (room - 2) // 2, len(ranks) - room + 1))
    world = f" of {pic.training.world}" if pic.training and pic.training.world else ""
    names = max((len(row.name) for row in rows), default=0)
    lines = [rule(f"RANKS {len(ranks)}{world}, what stands out first", width)]
    for i, (row, rank) in enumerate(ranks[begin : begin + room - 1], begin):
        lines.append(_rank_line(row, rank, is_selected=i == at, names=names))
    return lines if ranks else [*lines, Text("  no rank reports", "old")]


def ranks_in_order(rows: Sequence[HostRow]) -> list[tuple[HostRow, RankRow]]:
    """Return the ranks of all hosts, what stands out first."""
    ranks = [(row, rank) for row in rows for rank in row.ranks]
    return sorted(ranks, key=lambda entry: (not entry[1].odd, entry[1].rank))


def _rank_line(row: HostRow, rank: RankRow, *, is_selected: bool = False, names: int = 0) -> Text:
    pieces = [
        (f"rank {rank.rank:>4}  {f'{row.name:{names}}  ' if names else ''}", ""),
        (f"{rank.phase:10}", "phase"),
        (f" step {rank.step:>6}", "step"),
        (f"  heard {span(rank.age_s):>5} ago", "age_s"),
        (f"  {rank.state or 'gone'}", "state"),
        (f"  busy {number(rank.busy_s, '.2f')} s", "busy_s"),
        (f"  batch {number(rank.data_s, '.2f')} s", "data_s"),
        (f"  update {number(rank.optimizer_s, '.2f')} s", "optimizer_s"),
    ]
    if rank.phase in (Phase.DATA, Phase.LOAD, Phase.PIN) and rank.total_bytes:
        done = gauge(rank.done_bytes / rank.total_bytes, 20)
        pieces.append((f"  {done} {rank.done_bytes / 1e9:.1f} of {rank.total_bytes / 1e9:.1f} GB", ""))
    line = Text().append("▶ " if is_selected else "  ", "focus").append_text(pieced(row, pieces, rank.odd_in))
    return line.append(given("  ! {}", rank.odd), style_of(row, odd=True))


def _process_line(row: HostRow, process: ProcessRow) -> Text:
    where = f"rank {number(process.rank, 'd'):>4} gpu {number(process.gpu, 'd'):>2}"
    used = f"{number(process.cpu_pct, '.0f'):>4}% {process.rss_bytes / (1 << 30):6.1f} GiB"
    return Text(f"  {process.pid:>8} {process.state} {where} {used}  {process.command}", style_of(row, odd=False))


def gpu_lines(row: HostRow, width: int) -> list[Text]:
    """Draw the GPUs of a host, one per line, with their ranks; why one stands out is below it if there is no room."""
    if not row.gpus:
        return []
    return [
        rule(f"{row.name}  {row.gpus[0].name}", width),
        *(line for gpu in row.gpus for line in _gpu(row, gpu, width)),
    ]


def _gauge(percent: float | None, width: int) -> str:
    return gauge(None if percent is None else percent / 100, width)


def _gpu(row: HostRow, gpu: GpuCell, width: int) -> Iterator[Text]:
    """Yield a GPU's line, and a second one for why it stands out if the first has no room for it."""
    rank = next((rank for rank in row.ranks if rank.rank == gpu.rank), None)
    bars = max(0, min(24, (width - 88) // 2)) if width >= 100 else 0
    memory = share(gpu.used_mib, gpu.memory_mib)
    power = _gauge(gpu.power_pct, bars) if bars else bar(gpu.power_pct)
    line = pieced(row, [(f"  gpu {gpu.index} rank {number(gpu.rank, 'd'):>4}  ", "")], ())
    line.append(power, style_of(row, odd="power_w" in gpu.odd_in) or "chart")
    readings = (
        (f" {number(gpu.power_w, '.0f'):>4}/{number(gpu.power_limit_w, '.0f')} W", "power_w"),
        (f" util {number(gpu.utilization, 'd'):>3}%", ""),
        (f" {number(gpu.temperature_c, 'd'):>3} °C", "temperature_c"),
        (f" {number(gpu.clock_mhz, 'd'):>4} MHz ", "clock_mhz"),
    )
    line.append_text(pieced(row, readings, gpu.odd_in))
    line.append(_gauge(memory, bars), style_of(row, odd=False) or "chart")
    busy = f" busy {rank.busy_s:.2f} s" if rank and rank.busy_s is not None else ""
    used = f" {number(gpu.used_mib, ',d'):>6}/{number(gpu.memory_mib, ',d')} MiB{busy}"
    line.append_text(pieced(row, [(used, "")], ()))
    why = Text(given("  ! {}", gpu.odd), style_of(row, odd=True))
    if line.cell_len + why.cell_len <= width or not gpu.odd:
        yield line.append_text(why)
    else:
        yield line
        yield Text("     ").append_text(why)
