"""Draw one host or rank in detail, the list of ranks, and the graphs. Pure.

Graphs: loss, tokens per second, parts of a step, power, network and memory.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.text import Text

from llama405b.contract.errors import given
from llama405b.contract.records import Phase
from llama405b.settings.axes import Axes
from llama405b_tools.text.figures import DASH, amount, bar, gbit, gib, number, reading, share, span
from llama405b_tools.top.draw import charts, hosts
from llama405b_tools.top.draw.charts import (
    LABEL,
    OLD,
    Axis,
    around,
    beside,
    divided,
    from_zero,
    gauge,
    means,
    pieced,
    rule,
    runs,
    style_of,
    tall,
    time_axis,
)
from llama405b_tools.top.draw.hosts import gbits
from llama405b_tools.top.draw.ui import LogLine, Ui, log_pane
from llama405b_tools.top.state.picture import (
    LEAST_GBIT,
    QUANTITIES,
    GpuCell,
    HostRow,
    Picture,
    ProcessRow,
    RankRow,
    RunPhase,
    TrainingStatus,
    known,
    n_units,
    rank_at,
)
from llama405b_tools.top.state.trends import UNKNOWN, Bucket, Series, Trends


def selected_rank(row: HostRow, ui: Ui) -> RankRow | None:
    """Return a host's selected rank; without a selection, its first unusual rank, else its first."""
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
    """Draw one rank: its process and GPU, each quantity over time, and its log lines."""
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
    """Draw each quantity of a host's GPU (or rank) as a line over time."""
    before = itertools.takewhile(lambda entry: entry[0] != row.name, trends.layout)
    unit, n = at + sum(size for _, size in before), max(4, width - 30)
    lines = [rule("over time", width)]
    for index, quantity in enumerate(QUANTITIES):
        values = [
            column[unit] if column else UNKNOWN for column in trends.heat(index, ui.window, axis.begin, axis.end, n)
        ]
        known = [value for value in values if value != UNKNOWN]
        if known:
            by = hosts.Scaled(quantity, *quantity.scale(known))
            name = f"  {quantity.name} {reading(known[-1])} {quantity.unit}"
            lines.append(Text().append(f"{name:30}"[:30], "title").append_text(runs(map(by.cell, values))))
    return [*lines, Text(" " * 30).append_text(time_axis(axis, n)[LABEL:])]


def rank_table(pic: Picture, rows: Sequence[HostRow], ui: Ui, width: int, room: int) -> list[Text]:
    """Draw the ranks of all hosts, unusual ones first, scrolled to the selected one."""
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
    """Return the ranks of all hosts, unusual ones first."""
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
    """Draw a host's GPUs, one per line, with their ranks and what is unusual about them."""
    if not row.gpus:
        return []
    return [
        rule(f"{row.name}  {row.gpus[0].name}", width),
        *(line for gpu in row.gpus for line in _gpu(row, gpu, width)),
    ]


def _gauge(percent: float | None, width: int) -> str:
    return gauge(None if percent is None else percent / 100, width)


def _gpu(row: HostRow, gpu: GpuCell, width: int) -> Iterator[Text]:
    """Yield a GPU's line, and a second with its note if the first has no room."""
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


LEAST = 7  # lines of a graph
LEAST_KW = 0.001  # least top of the power graph's scale
OTHER = 0.05  # share of a step not explained by its parts, from which it is shown as "else"
STEPPING = (RunPhase.TRAINING, RunPhase.SAVING, RunPhase.EVALUATING)
PARTS = (("data", "data_s"), ("fwd", "forward_s"), ("bwd", "backward_s"), ("opt", "optimizer_s"))
PERCENTS = {"memory_pct": "GPU memory, the fullest", "ram_pct": "RAM, the fullest host", "cpu_pct": "CPU, all hosts"}
Drawn = Callable[[int, int], list[Text]]  # width and height


class Graph(NamedTuple):
    """A graph that can be drawn."""

    draw: Drawn
    most_lines: int = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Graphs:
    """The data of all graphs at one moment."""

    pic: Picture
    trends: Trends
    window: int
    steps: Axis
    seen: Axis

    def known(self) -> list[Graph]:
        """Return the graphs that have data, most important first."""
        run = self.pic.training
        graphs = []
        if run and run.step is not None and run.step_s:
            graphs = [Graph(self._loss(run)), Graph(self._rate(run)), Graph(self._step(run))]
        return [*graphs, *self.hardware()]

    def hardware(self) -> list[Graph]:
        """Return the hardware graphs that have data."""
        graphs = []
        sums = self.trends.sums
        if "power_kw" in sums:
            graphs.append(Graph(self._power))
        if "network_gbit" in sums:
            graphs.append(Graph(self.network))
        for name, title in PERCENTS.items():
            if name in sums:
                graphs.append(Graph(self._percent(name, title)))
        return graphs

    def column(self, width: int, height: int) -> list[Text]:
        """Draw as many graphs as fit, stacked, in exactly ``height`` lines."""
        shown = self.known()[: max(1, height // LEAST)]
        heights = [LEAST] * len(shown)
        rest = height - LEAST * len(shown)
        while rest > 0 and any(h < graph.most_lines for h, graph in zip(heights, shown, strict=True)):
            i = min((i for i, graph in enumerate(shown) if heights[i] < graph.most_lines), key=heights.__getitem__)
            heights[i] += 1
            rest -= 1
        lines = [line for graph, lines in zip(shown, heights, strict=True) for line in graph.draw(width, lines)]
        return tall(lines, height)

    @staticmethod
    def row(shown: Sequence[Graph], width: int, height: int) -> list[Text]:
        """Draw graphs side by side."""
        return beside([(graph.draw(w, height), w) for graph, w in zip(shown, divided(width, len(shown)), strict=True)])

    def rate(self, width: int, height: int) -> list[Text]:
        """Draw the most important graph, for a screen with room for one."""
        shown = self.known()
        return shown[min(1, len(shown) - 1)].draw(width, height) if shown else []

    def _columns(self, series: Series | None, axis: Axis, width: int) -> list[Bucket | None]:
        n = max(4, width - LABEL)
        return series.columns(self.window, axis.begin, axis.end, n) if series else [None] * n

    def _loss(self, run: TrainingStatus) -> Drawn:
        def draw(width: int, height: int) -> list[Text]:
            columns = self._columns(self.trends.steps.get("loss"), self.steps, width)
            found = [*means(columns)]
            change = found[-1] - found[0] if len(found) > 1 else 0.0
            changed = given(f" {'▼' if change < 0 else '▲'}{{:.3f}}", abs(change))
            evaluated = (
                "" if run.evaluated_step is None else f"eval {number(run.evaluation_loss, '.4f')} @{run.evaluated_step}"
            )
            title = f"loss {number(run.loss, '.4f')}{changed}"
            return charts.chart(
                title, evaluated, columns, around(found, "{:.2f}".format), self.steps, height, style=_style(run)
            )

        return draw

    def _rate(self, run: TrainingStatus) -> Drawn:
        def draw(width: int, height: int) -> list[Text]:
            columns = self._columns(self.trends.steps.get("rate"), self.steps, width)
            found = [*means(columns)]
            planned = self._planned(run, found)
            now = f"tokens/s {number(run.all_tokens_per_s, ',.0f')}"
            if run.all_tokens_per_s is None and found:
                now += f", was {found[-1]:,.0f}"
            right = "  ".join(filter(None, (given("plan {:,.0f} ┄", planned), given("MFU {:.0f}%", run.mfu_pct))))
            scale = from_zero([*found, planned or 0.0], amount)
            return charts.chart(now, right, columns, scale, self.steps, height, plan=planned, style=_style(run))

        return draw

    @staticmethod
    def _planned(run: TrainingStatus, rates: Sequence[float]) -> float | None:
        """Return the tokens per second that the plan predicts; None without a plan."""
        rate = run.all_tokens_per_s or (statistics.median(rates) if rates else None)
        return rate * run.step_s / run.expected_step_s if rate and run.step_s and run.expected_step_s else None

    def _step(self, run: TrainingStatus) -> Drawn:
        """Return a function that draws the parts of a step and, with room, step times."""

        def draw(width: int, height: int) -> list[Text]:
            plan = given(" (plan {:.1f})", run.expected_step_s)
            parts = [*self._parts(run, width)][: height - 1]
            lines = [rule(f"a step {number(run.step_s, '.2f')} s{plan}", width, right=self._slowest()), *parts]
            if height - len(lines) < charts.LEAST_LINES:
                return tall(lines, height)
            columns = self._columns(self.trends.steps.get("step_s"), self.steps, width)
            scale = from_zero([*means(columns), run.expected_step_s or 0.0], "{:.3g}s".format)
            rest, planned = height - len(lines) + 1, run.expected_step_s
            drawn = charts.chart("", "", columns, scale, self.steps, rest, plan=planned, style=_style(run))
            return [*lines, *drawn[1:]]

        return draw

    def _parts(self, run: TrainingStatus, width: int) -> Iterator[Text]:
        whole = run.step_s or 1.0
        parts = [(name, getattr(run, field), f"part.{i}") for i, (name, field) in enumerate(PARTS)]
        if run.update_s is not None and run.exposed_s is not None:
            parts.append(("wait", run.exposed_s, "part.3"))
        other_s = whole - sum(known(value for _, value, _ in parts[: len(PARTS)]))
        if other_s > OTHER * whole:
            parts.append(("else", other_s, "warn"))
        if _style(run) == OLD:
            parts = [(name, value, OLD) for name, value, _ in parts]
        for name, value, style in parts:
            bar = gauge(None if value is None else value / whole, max(4, width - 16))
            yield (
                Text()
                .append(f" {name:4} ", "title")
                .append(bar, style)
                .append(f" {number(value, '.2f'):>6} s ", "title")
            )

    def _slowest(self) -> str:
        """Return the slowest rank and by how much it exceeds the median; "" with fewer than two ranks."""
        busy = [(rank.busy_s, rank.rank) for row in self.pic.hosts for rank in row.ranks if rank.busy_s is not None]
        if len(busy) < 2:
            return ""
        most, rank = max(busy)
        return f"slowest r{rank} +{most - statistics.median(value for value, _ in busy):.2f} s"

    def _power(self, width: int, height: int) -> list[Text]:
        gpus = [gpu for row in self.pic.hosts if row.is_heard for gpu in row.gpus]
        shares = sorted(known(gpu.power_pct for gpu in gpus))
        limit = sum(known(gpu.power_limit_w for gpu in gpus)) / 1e3
        columns = self._columns(self.trends.sums["power_kw"], self.seen, width)
        right = f"min {shares[0]:.0f}  median {statistics.median(shares):.0f}  max {shares[-1]:.0f}%" if shares else ""
        total = sum(known(gpu.power_w for gpu in gpus)) / 1e3 if shares else None
        scale = from_zero([*means(columns), LEAST_KW], "{:.3g}k".format)
        if limit:
            scale = scale._replace(high=max(limit, *means(columns), 0.1))
        return charts.chart(
            f"power {number(total, '.1f')} kW, limit {limit:.1f}", right, columns, scale, self.seen, height
        )

    def network(self, width: int, height: int) -> list[Text]:
        """Draw the total traffic of all hosts."""
        columns = self._columns(self.trends.sums["network_gbit"], self.seen, width)
        found = [*means(columns)]
        run = self.pic.training
        by = "RDMA" if any(row.ib_bytes_per_s is not None for row in self.pic.hosts) else "network"
        title = f"{by}, all hosts {gbits(found[-1]) if found else DASH}"
        scale = from_zero(
            [*found, LEAST_GBIT], lambda value: f"{value / 1e3:.3g}T" if value >= 1000 else f"{value:.3g}G"
        )
        return charts.chart(title, run.network if run else "", columns, scale, self.seen, height)

    def _percent(self, name: str, title: str) -> Drawn:
        def draw(width: int, height: int) -> list[Text]:
            columns = self._columns(self.trends.sums[name], self.seen, width)
            found = [*means(columns)]
            scale = from_zero(found, "{:.0f}%".format)
            return charts.chart(
                f"{title} {number(found[-1] if found else None, '.0f')}%", "", columns, scale, self.seen, height
            )

        return draw


def _style(run: TrainingStatus) -> str:
    """Return the style of step metrics: dim if no steps are being taken."""
    return OLD if run.is_stale or run.phase not in STEPPING else "chart"


def axes_of(trends: Trends, window: int, now: float) -> tuple[Axis, Axis]:
    """Return the time axes up to the view's moment: of the steps, and of the samples."""
    marks = [mark for mark in trends.marks if mark.time <= now]
    steps, seen = trends.begins(window, now)
    return Axis(steps, now, marks), Axis(seen, now, marks)
