"""Draw one host or rank in detail, the list of ranks, and the graphs. Pure.

Graphs: loss, tokens per second, parts of a step, power, network and memory.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.text import Text

from llama405b.contract.errors import fmt_if
from llama405b.contract.records import Phase
from llama405b.settings.axes import Axes
from llama405b_tools.text.figures import (
    DASH,
    bar_char,
    fmt_or_dash,
    format_amount,
    format_duration,
    format_gbit,
    format_gib,
    format_number,
    percent_of,
)
from llama405b_tools.top.draw import charts, hosts
from llama405b_tools.top.draw.charts import (
    LABEL_COLUMNS,
    STALE_STYLE,
    TimeAxis,
    bucket_means,
    draw_heading,
    draw_time_axis,
    fit_height,
    gauge,
    join_fields,
    join_styled,
    scale_around,
    scale_from_zero,
    side_by_side,
    split_width,
    value_style,
)
from llama405b_tools.top.draw.hosts import format_bit_rate
from llama405b_tools.top.draw.ui import LogLine, Ui, draw_log_pane
from llama405b_tools.top.state.picture import (
    MIN_GBIT,
    QUANTITIES,
    ClusterView,
    GpuCell,
    HostRow,
    ProcessRow,
    RankRow,
    RunPhase,
    TrainingStatus,
    n_units,
    not_none,
    rank_at,
)
from llama405b_tools.top.state.trends import UNKNOWN, Bucket, Series, Trends


def selected_rank(row: HostRow, ui: Ui) -> RankRow | None:
    """Return a host's selected rank; without a selection, its first unusual rank, else its first."""
    selected = next((rank for rank in row.ranks if rank.rank == ui.rank), None)
    odd = next((rank for rank in row.ranks if rank.odd), None)
    return selected or odd or next(iter(row.ranks), None)


def draw_host(row: HostRow, ui: Ui, logs: Sequence[LogLine], width: int, room: int) -> list[Text]:
    """Draw one host: its GPUs, ranks, processes, network and log lines."""
    lines = [draw_heading(f"{row.name}  {row.state} {row.why}", width)]
    pieces = (
        (
            f"  last frame {format_duration(row.age_s)} ago │ {fmt_or_dash(row.cores, 'd')} cores at {fmt_or_dash(row.cpu_pct, '.0f')}% │ ",
            "",
        ),
        (f"RAM {format_gib(row.ram_used_bytes)}/{format_gib(row.ram_bytes)} GiB", "ram_used_bytes"),
        (" │ ", ""),
        (f"disk {format_gib(row.disk_free_bytes)} GiB free", "disk_free_bytes"),
        (f" │ net {format_gbit(row.net_bytes_per_s)} Gb/s │ ", ""),
        (f"RDMA {format_gbit(row.ib_bytes_per_s)} Gb/s", "ib_bytes_per_s"),
    )
    lines.append(join_fields(row, pieces, row.odd_in))
    lines += [Text(f"  ! {note}", "warn") for note in row.notes]
    lines += draw_gpus(row, width) or [Text("  no GPU" if row.has_gpu is False else "  its GPUs are unknown", "old")]
    selected = selected_rank(row, ui)
    lines += [
        draw_heading("RANKS", width),
        *(_rank_line(row, rank, is_selected=rank is selected) for rank in row.ranks),
    ]
    lines += [draw_heading("PROCESSES", width), *(_process_line(row, process) for process in row.processes)]
    host_log = [line for line in logs if row.name in line.hosts]
    return lines + _draw_log(host_log, ui, max(3, room - len(lines)), width)


def draw_rank(
    row: HostRow,
    rank: RankRow,
    mesh: Axes | None,
    logs: Sequence[LogLine],
    trends: Trends,
    axis: TimeAxis,
    ui: Ui,
    width: int,
    room: int,
) -> list[Text]:
    """Draw one rank: its process and GPU, each quantity over time, and its log lines."""
    mesh_place = fmt_if(": {}", mesh.describe_rank(rank.rank) if mesh else "")
    lines = [draw_heading(f"rank {rank.rank} on {row.name}{mesh_place}", width), _rank_line(row, rank)]
    gpu_index = next((i for i in range(n_units(row)) if rank_at(row, i) is rank), None)
    if gpu_index is not None and gpu_index < len(row.gpus):
        lines += _draw_gpu(row, row.gpus[gpu_index], width)
    lines += [_process_line(row, process) for process in row.processes if process.rank == rank.rank]
    if gpu_index is not None:
        lines += _draw_histories(row, gpu_index, trends, axis, ui, width)
    if stack := ui.stacks.get(rank.rank):
        lines += [
            draw_heading(f"as the autopsy of {ui.stacks_time} saw it", width),
            *(Text(f"  {line}") for line in stack),
        ]
    else:
        lines.append(Text("  a takes an autopsy, which shows its stack here", "old"))
    rank_log = [line for line in logs if rank.rank in line.ranks or (row.name in line.hosts and -1 in line.ranks)]
    return lines + _draw_log(rank_log, ui, max(3, room - len(lines)), width)


def _draw_log(lines: Sequence[LogLine], ui: Ui, room: int, width: int) -> list[Text]:
    return draw_log_pane(lines, dataclasses.replace(ui.log, last_number=None), room, width)


def _draw_histories(row: HostRow, gpu_index: int, trends: Trends, axis: TimeAxis, ui: Ui, width: int) -> list[Text]:
    """Draw each quantity of a host's GPU (or rank) as a line over time."""
    earlier_hosts = itertools.takewhile(lambda entry: entry[0] != row.name, trends.layout)
    unit, n = gpu_index + sum(size for _, size in earlier_hosts), max(4, width - 30)
    lines = [draw_heading("over time", width)]
    for index, quantity in enumerate(QUANTITIES):
        values = [
            column[unit] if column else UNKNOWN for column in trends.heat(index, ui.window, axis.begin, axis.end, n)
        ]
        known_values = [value for value in values if value != UNKNOWN]
        if known_values:
            scale = hosts.HeatScale(quantity, *quantity.scale(known_values))
            name = f"  {quantity.name} {format_number(known_values[-1])} {quantity.unit}"
            lines.append(Text().append(f"{name:30}"[:30], "title").append_text(join_styled(map(scale.cell, values))))
    return [*lines, Text(" " * 30).append_text(draw_time_axis(axis, n)[LABEL_COLUMNS:])]


def draw_ranks(view: ClusterView, rows: Sequence[HostRow], ui: Ui, width: int, room: int) -> list[Text]:
    """Draw the ranks of all hosts, unusual ones first, scrolled to the selected one."""
    ranks = ranks_in_order(rows)
    selected_index = next(
        (i for i, (row, rank) in enumerate(ranks) if row.name == ui.selected and rank.rank == ui.rank), 0
    )
    begin = max(0, min(selected_index - (room - 2) // 2, len(ranks) - room + 1))
    world = f" of {view.training.world}" if view.training and view.training.world else ""
    name_width = max((len(row.name) for row in rows), default=0)
    lines = [draw_heading(f"RANKS {len(ranks)}{world}, what stands out first", width)]
    for i, (row, rank) in enumerate(ranks[begin : begin + room - 1], begin):
        lines.append(_rank_line(row, rank, is_selected=i == selected_index, name_width=name_width))
    return lines if ranks else [*lines, Text("  no rank reports", "old")]


def ranks_in_order(rows: Sequence[HostRow]) -> list[tuple[HostRow, RankRow]]:
    """Return the ranks of all hosts, unusual ones first."""
    ranks = [(row, rank) for row in rows for rank in row.ranks]
    return sorted(ranks, key=lambda entry: (not entry[1].odd, entry[1].rank))


def _rank_line(row: HostRow, rank: RankRow, *, is_selected: bool = False, name_width: int = 0) -> Text:
    pieces = [
        (f"rank {rank.rank:>4}  {f'{row.name:{name_width}}  ' if name_width else ''}", ""),
        (f"{rank.phase:10}", "phase"),
        (f" step {rank.step:>6}", "step"),
        (f"  heard {format_duration(rank.age_s):>5} ago", "age_s"),
        (f"  {rank.state or 'gone'}", "state"),
        (f"  busy {fmt_or_dash(rank.busy_s, '.2f')} s", "busy_s"),
        (f"  batch {fmt_or_dash(rank.data_s, '.2f')} s", "data_s"),
        (f"  update {fmt_or_dash(rank.optimizer_s, '.2f')} s", "optimizer_s"),
    ]
    if rank.phase in (Phase.DATA, Phase.LOAD, Phase.PIN) and rank.total_bytes:
        progress = gauge(rank.done_bytes / rank.total_bytes, 20)
        pieces.append((f"  {progress} {rank.done_bytes / 1e9:.1f} of {rank.total_bytes / 1e9:.1f} GB", ""))
    line = Text().append("▶ " if is_selected else "  ", "focus").append_text(join_fields(row, pieces, rank.odd_in))
    return line.append(fmt_if("  ! {}", rank.odd), value_style(row, odd=True))


def _process_line(row: HostRow, process: ProcessRow) -> Text:
    rank_and_gpu = f"rank {fmt_or_dash(process.rank, 'd'):>4} gpu {fmt_or_dash(process.gpu, 'd'):>2}"
    usage = f"{fmt_or_dash(process.cpu_pct, '.0f'):>4}% {process.rss_bytes / (1 << 30):6.1f} GiB"
    return Text(
        f"  {process.pid:>8} {process.state} {rank_and_gpu} {usage}  {process.command}", value_style(row, odd=False)
    )


def draw_gpus(row: HostRow, width: int) -> list[Text]:
    """Draw a host's GPUs, one per line, with their ranks and what is unusual about them."""
    if not row.gpus:
        return []
    return [
        draw_heading(f"{row.name}  {row.gpus[0].name}", width),
        *(line for gpu in row.gpus for line in _draw_gpu(row, gpu, width)),
    ]


def _gauge(percent: float | None, width: int) -> str:
    return gauge(None if percent is None else percent / 100, width)


def _draw_gpu(row: HostRow, gpu: GpuCell, width: int) -> Iterator[Text]:
    """Yield a GPU's line, and a second with its note if the first has no room."""
    rank = next((rank for rank in row.ranks if rank.rank == gpu.rank), None)
    bars = max(0, min(24, (width - 88) // 2)) if width >= 100 else 0
    memory = percent_of(gpu.used_mib, gpu.memory_mib)
    power = _gauge(gpu.power_pct, bars) if bars else bar_char(gpu.power_pct)
    line = join_fields(row, [(f"  gpu {gpu.index} rank {fmt_or_dash(gpu.rank, 'd'):>4}  ", "")], ())
    line.append(power, value_style(row, odd="power_w" in gpu.odd_in) or "chart")
    readings = (
        (f" {fmt_or_dash(gpu.power_w, '.0f'):>4}/{fmt_or_dash(gpu.power_limit_w, '.0f')} W", "power_w"),
        (f" util {fmt_or_dash(gpu.utilization, 'd'):>3}%", ""),
        (f" {fmt_or_dash(gpu.temperature_c, 'd'):>3} °C", "temperature_c"),
        (f" {fmt_or_dash(gpu.clock_mhz, 'd'):>4} MHz ", "clock_mhz"),
    )
    line.append_text(join_fields(row, readings, gpu.odd_in))
    line.append(_gauge(memory, bars), value_style(row, odd=False) or "chart")
    busy = f" busy {rank.busy_s:.2f} s" if rank and rank.busy_s is not None else ""
    used = f" {fmt_or_dash(gpu.used_mib, ',d'):>6}/{fmt_or_dash(gpu.memory_mib, ',d')} MiB{busy}"
    line.append_text(join_fields(row, [(used, "")], ()))
    why = Text(fmt_if("  ! {}", gpu.odd), value_style(row, odd=True))
    if line.cell_len + why.cell_len <= width or not gpu.odd:
        yield line.append_text(why)
    else:
        yield line
        yield Text("     ").append_text(why)


MIN_GRAPH_LINES = 7  # lines of a graph
MIN_POWER_KW = 0.001  # least top of the power graph's scale
MIN_OTHER_SHARE = 0.05  # share of a step not explained by its parts, from which it is shown as "else"
STEPPING_PHASES = (RunPhase.TRAINING, RunPhase.SAVING, RunPhase.EVALUATING)
STEP_PARTS = (("data", "data_s"), ("fwd", "forward_s"), ("bwd", "backward_s"), ("opt", "optimizer_s"))
PERCENT_TITLES = {
    "memory_pct": "GPU memory, the fullest",
    "ram_pct": "RAM, the fullest host",
    "cpu_pct": "CPU, all hosts",
}
DrawFunction = Callable[[int, int], list[Text]]  # width and height


class Graph(NamedTuple):
    """A graph that can be drawn."""

    draw: DrawFunction
    max_lines: int = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Graphs:
    """The data of all graphs at one moment."""

    view: ClusterView
    trends: Trends
    window: int
    step_axis: TimeAxis
    sampled_axis: TimeAxis

    def available_graphs(self) -> list[Graph]:
        """Return the graphs that have data, most important first."""
        run = self.view.training
        graphs = []
        if run and run.step is not None and run.step_s:
            graphs = [Graph(self._loss_graph(run)), Graph(self._rate_graph(run)), Graph(self._step_graph(run))]
        return [*graphs, *self.hardware_graphs()]

    def hardware_graphs(self) -> list[Graph]:
        """Return the hardware graphs that have data."""
        graphs = []
        sums = self.trends.sums
        if "power_kw" in sums:
            graphs.append(Graph(self._draw_power))
        if "network_gbit" in sums:
            graphs.append(Graph(self.draw_network))
        for name, title in PERCENT_TITLES.items():
            if name in sums:
                graphs.append(Graph(self._percent_graph(name, title)))
        return graphs

    def draw_column(self, width: int, height: int) -> list[Text]:
        """Draw as many graphs as fit, stacked, in exactly ``height`` lines."""
        shown = self.available_graphs()[: max(1, height // MIN_GRAPH_LINES)]
        heights = [MIN_GRAPH_LINES] * len(shown)
        spare_lines = height - MIN_GRAPH_LINES * len(shown)
        while spare_lines > 0 and any(h < graph.max_lines for h, graph in zip(heights, shown, strict=True)):
            i = min((i for i, graph in enumerate(shown) if heights[i] < graph.max_lines), key=heights.__getitem__)
            heights[i] += 1
            spare_lines -= 1
        lines = [line for graph, lines in zip(shown, heights, strict=True) for line in graph.draw(width, lines)]
        return fit_height(lines, height)

    @staticmethod
    def draw_row(shown: Sequence[Graph], width: int, height: int) -> list[Text]:
        """Draw graphs side by side."""
        return side_by_side(
            [(graph.draw(w, height), w) for graph, w in zip(shown, split_width(width, len(shown)), strict=True)]
        )

    def draw_main(self, width: int, height: int) -> list[Text]:
        """Draw the most important graph, for a screen with room for one."""
        shown = self.available_graphs()
        return shown[min(1, len(shown) - 1)].draw(width, height) if shown else []

    def _columns(self, series: Series | None, axis: TimeAxis, width: int) -> list[Bucket | None]:
        n = max(4, width - LABEL_COLUMNS)
        return series.columns(self.window, axis.begin, axis.end, n) if series else [None] * n

    def _loss_graph(self, run: TrainingStatus) -> DrawFunction:
        def draw(width: int, height: int) -> list[Text]:
            columns = self._columns(self.trends.steps.get("loss"), self.step_axis, width)
            values = [*bucket_means(columns)]
            change = values[-1] - values[0] if len(values) > 1 else 0.0
            change_text = fmt_if(f" {'▼' if change < 0 else '▲'}{{:.3f}}", abs(change))
            evaluation_text = (
                ""
                if run.evaluated_step is None
                else f"eval {fmt_or_dash(run.evaluation_loss, '.4f')} @{run.evaluated_step}"
            )
            title = f"loss {fmt_or_dash(run.loss, '.4f')}{change_text}"
            return charts.draw_chart(
                title,
                evaluation_text,
                columns,
                scale_around(values, "{:.2f}".format),
                self.step_axis,
                height,
                style=_step_style(run),
            )

        return draw

    def _rate_graph(self, run: TrainingStatus) -> DrawFunction:
        def draw(width: int, height: int) -> list[Text]:
            columns = self._columns(self.trends.steps.get("rate"), self.step_axis, width)
            values = [*bucket_means(columns)]
            planned_rate = self._planned_rate(run, values)
            title = f"tokens/s {fmt_or_dash(run.all_tokens_per_s, ',.0f')}"
            if run.all_tokens_per_s is None and values:
                title += f", was {values[-1]:,.0f}"
            right = "  ".join(
                filter(None, (fmt_if("plan {:,.0f} ┄", planned_rate), fmt_if("MFU {:.0f}%", run.mfu_pct)))
            )
            scale = scale_from_zero([*values, planned_rate or 0.0], format_amount)
            return charts.draw_chart(
                title, right, columns, scale, self.step_axis, height, plan=planned_rate, style=_step_style(run)
            )

        return draw

    @staticmethod
    def _planned_rate(run: TrainingStatus, rates: Sequence[float]) -> float | None:
        """Return the tokens per second that the plan predicts; None without a plan."""
        rate = run.all_tokens_per_s or (statistics.median(rates) if rates else None)
        return rate * run.step_s / run.expected_step_s if rate and run.step_s and run.expected_step_s else None

    def _step_graph(self, run: TrainingStatus) -> DrawFunction:
        """Return a function that draws the parts of a step and, with room, step times."""

        def draw(width: int, height: int) -> list[Text]:
            plan = fmt_if(" (plan {:.1f})", run.expected_step_s)
            parts = [*self._part_lines(run, width)][: height - 1]
            lines = [
                draw_heading(f"a step {fmt_or_dash(run.step_s, '.2f')} s{plan}", width, right=self._slowest_rank()),
                *parts,
            ]
            if height - len(lines) < charts.MIN_CHART_LINES:
                return fit_height(lines, height)
            columns = self._columns(self.trends.steps.get("step_s"), self.step_axis, width)
            scale = scale_from_zero([*bucket_means(columns), run.expected_step_s or 0.0], "{:.3g}s".format)
            chart_height, planned_s = height - len(lines) + 1, run.expected_step_s
            chart_lines = charts.draw_chart(
                "", "", columns, scale, self.step_axis, chart_height, plan=planned_s, style=_step_style(run)
            )
            return [*lines, *chart_lines[1:]]

        return draw

    def _part_lines(self, run: TrainingStatus, width: int) -> Iterator[Text]:
        step_s = run.step_s or 1.0
        parts = [(name, getattr(run, field), f"part.{i}") for i, (name, field) in enumerate(STEP_PARTS)]
        if run.update_s is not None and run.exposed_s is not None:
            parts.append(("wait", run.exposed_s, "part.3"))
        other_s = step_s - sum(not_none(value for _, value, _ in parts[: len(STEP_PARTS)]))
        if other_s > MIN_OTHER_SHARE * step_s:
            parts.append(("else", other_s, "warn"))
        if _step_style(run) == STALE_STYLE:
            parts = [(name, value, STALE_STYLE) for name, value, _ in parts]
        for name, value, style in parts:
            bar = gauge(None if value is None else value / step_s, max(4, width - 16))
            yield (
                Text()
                .append(f" {name:4} ", "title")
                .append(bar, style)
                .append(f" {fmt_or_dash(value, '.2f'):>6} s ", "title")
            )

    def _slowest_rank(self) -> str:
        """Return the slowest rank and by how much it exceeds the median; "" with fewer than two ranks."""
        busy = [(rank.busy_s, rank.rank) for row in self.view.hosts for rank in row.ranks if rank.busy_s is not None]
        if len(busy) < 2:
            return ""
        max_s, rank = max(busy)
        return f"slowest r{rank} +{max_s - statistics.median(value for value, _ in busy):.2f} s"

    def _draw_power(self, width: int, height: int) -> list[Text]:
        gpus = [gpu for row in self.view.hosts if row.is_heard for gpu in row.gpus]
        shares = sorted(not_none(gpu.power_pct for gpu in gpus))
        limit = sum(not_none(gpu.power_limit_w for gpu in gpus)) / 1e3
        columns = self._columns(self.trends.sums["power_kw"], self.sampled_axis, width)
        summary = (
            f"min {shares[0]:.0f}  median {statistics.median(shares):.0f}  max {shares[-1]:.0f}%" if shares else ""
        )
        total = sum(not_none(gpu.power_w for gpu in gpus)) / 1e3 if shares else None
        scale = scale_from_zero([*bucket_means(columns), MIN_POWER_KW], "{:.3g}k".format)
        if limit:
            scale = scale._replace(high=max(limit, *bucket_means(columns), 0.1))
        return charts.draw_chart(
            f"power {fmt_or_dash(total, '.1f')} kW, limit {limit:.1f}",
            summary,
            columns,
            scale,
            self.sampled_axis,
            height,
        )

    def draw_network(self, width: int, height: int) -> list[Text]:
        """Draw the total traffic of all hosts."""
        columns = self._columns(self.trends.sums["network_gbit"], self.sampled_axis, width)
        values = [*bucket_means(columns)]
        run = self.view.training
        source = "RDMA" if any(row.ib_bytes_per_s is not None for row in self.view.hosts) else "network"
        title = f"{source}, all hosts {format_bit_rate(values[-1]) if values else DASH}"
        scale = scale_from_zero(
            [*values, MIN_GBIT], lambda value: f"{value / 1e3:.3g}T" if value >= 1000 else f"{value:.3g}G"
        )
        return charts.draw_chart(title, run.network if run else "", columns, scale, self.sampled_axis, height)

    def _percent_graph(self, name: str, title: str) -> DrawFunction:
        def draw(width: int, height: int) -> list[Text]:
            columns = self._columns(self.trends.sums[name], self.sampled_axis, width)
            values = [*bucket_means(columns)]
            scale = scale_from_zero(values, "{:.0f}%".format)
            return charts.draw_chart(
                f"{title} {fmt_or_dash(values[-1] if values else None, '.0f')}%",
                "",
                columns,
                scale,
                self.sampled_axis,
                height,
            )

        return draw


def _step_style(run: TrainingStatus) -> str:
    """Return the style of step metrics: dim if no steps are being taken."""
    return STALE_STYLE if run.is_stale or run.phase not in STEPPING_PHASES else "chart"


def time_axes(trends: Trends, window: int, now: float) -> tuple[TimeAxis, TimeAxis]:
    """Return the time axes up to the view's moment: of the steps, and of the samples."""
    marks = [mark for mark in trends.marks if mark.time <= now]
    steps_begin, sampled_begin = trends.window_begins(window, now)
    return TimeAxis(steps_begin, now, marks), TimeAxis(sampled_begin, now, marks)
