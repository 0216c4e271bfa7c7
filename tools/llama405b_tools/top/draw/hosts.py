"""Draw hosts one per line or in columns with a heat cell per GPU, and the heat map. Pure.

A heat cell stands for a GPU (or a rank without GPUs). It is a bar whose height is the value, so it is readable without color.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.text import Text

from llama405b.contract.errors import fmt_if, pluralize
from llama405b.contract.records import Phase
from llama405b_tools.text.figures import (
    BARS,
    DASH,
    WIDE_COLUMNS,
    first_not_none,
    fmt_or_dash,
    format_duration,
    format_gbit,
    percent_of,
    shorten_middle,
    sparkline,
)
from llama405b_tools.top.draw.charts import (
    LABEL_COLUMNS,
    ODD_STYLE,
    STALE_STYLE,
    TimeAxis,
    draw_heading,
    draw_time_axis,
    host_style,
    join_fields,
    join_styled,
    value_style,
)
from llama405b_tools.top.draw.ui import COLUMNS, Ui
from llama405b_tools.top.state.picture import (
    LINK_STATES,
    NETWORK,
    QUANTITIES,
    ClusterView,
    GpuCell,
    HostRow,
    HostState,
    Quantity,
    n_units,
    network_gbps,
    not_none,
)
from llama405b_tools.top.state.trends import UNKNOWN, Layout, Trends

NO_VALUE = ("·", STALE_STYLE)
NAME_WIDTH = 14  # columns of a map row's name
Cell = tuple[str, str]  # character, style
CELLS: list[Cell] = [(char, f"heat.{level}") for level, char in enumerate(BARS)]
MAX_LEVEL = len(BARS) - 1  # the hottest


class HeatScale(NamedTuple):
    """A quantity with the values of its coldest and hottest cell."""

    quantity: Quantity
    low: float
    high: float

    def level(self, value: float | None) -> int | None:
        """Return 0 (cold) to 7 (hot)."""
        if value is None or value == UNKNOWN:
            return None
        if self.high <= self.low or value <= self.low:
            return 0
        return MAX_LEVEL if value >= self.high else int(len(BARS) * (value - self.low) / (self.high - self.low))

    def cell(self, value: float | None) -> Cell:
        """Return the cell of a value."""
        level = self.level(value)
        return NO_VALUE if level is None else CELLS[level]


def heat_scale(index: int, rows: Sequence[HostRow]) -> HeatScale:
    """Return a quantity on the scale of all hosts' values."""
    quantity = QUANTITIES[index]
    values = [quantity.value_of(row, i) for row in rows for i in range(n_units(row))]
    return HeatScale(quantity, *quantity.scale([value for value in values if value is not None]))


def draw_cells(row: HostRow, scale: HeatScale, n_columns: int = 1) -> Text:
    """Draw one cell per GPU (or rank) of a host, ``n_columns`` wide; an unusual GPU is ``!``."""
    drawn = [scale.cell(scale.quantity.value_of(row, i)) for i in range(n_units(row))]
    for i, gpu in enumerate(row.gpus):
        if gpu.odd and row.is_heard:
            drawn[i] = ("!", _odd_style(row, gpu))
    if not row.is_heard:
        drawn = [(char, STALE_STYLE) for char, _ in drawn]
    return join_styled((char * n_columns, style) for char, style in drawn)


def draw_numbers(row: HostRow, scale: HeatScale) -> Text:
    """Draw a number per GPU, four columns wide, on its color; ``!`` marks unusual GPUs."""
    line = Text()
    for i, gpu in enumerate(row.gpus):
        value = scale.quantity.value_of(row, i)
        level = scale.level(value)
        style = STALE_STYLE if level is None or not row.is_heard else f"cell.{level}"
        if gpu.odd and row.is_heard:
            style = _odd_style(row, gpu)
        line.append(f"{format_in_3_columns(value)}{'!' if gpu.odd else ' '}", style)
    return line


def _odd_style(row: HostRow, gpu: GpuCell) -> str:
    style = value_style(row, odd=bool(gpu.odd))
    return {ODD_STYLE: "heat.odd", "warn": "heat.odd", "bad": "heat.bad"}.get(style, style)


def format_in_3_columns(value: float | None) -> str:
    """Format a number in three columns."""
    if value is None:
        return "  —"
    if value < 9.95:
        return f"{value:3.1f}"
    return f"{value:3.0f}" if value < 999.5 else f"{value / 1000:2.0f}k"


class MapRow(NamedTuple):
    """The GPUs that share one line of the heat map."""

    name: str
    hosts: Sequence[str]
    begin: int  # index among all GPUs, in the order of the layout
    end: int
    first: int = 0  # index within the host, if the line shows one host


def split_map_rows(layout: Layout, n_lines: int) -> list[MapRow]:
    """Divide the GPUs among at most ``n_lines`` lines: several lines per host, else several hosts per line."""
    begins = list(itertools.accumulate((n for _, n in layout), initial=0))
    for per_line in range(1, 17):
        if sum(-(-n // per_line) for _, n in layout) <= n_lines:
            return [*_split_hosts(layout, begins, per_line)]
    hosts_per_line = -(-len(layout) // max(1, n_lines))
    rows = []
    for i in range(0, len(layout), hosts_per_line):
        names = [name for name, _ in layout[i : i + hosts_per_line]]
        words = names[0] if len(names) == 1 else f"{names[0]}…{names[-1]}"
        rows.append(MapRow(words, names, begins[i], begins[min(i + hosts_per_line, len(layout))]))
    return rows


def _split_hosts(layout: Layout, begins: Sequence[int], per_line: int) -> Iterator[MapRow]:
    for (name, n), begin in zip(layout, begins, strict=False):
        for i in range(0, n, per_line):
            end = min(n, i + per_line)
            words = f"{name} {i}" if end == i + 1 else f"{name} {i}-{end - 1}"
            yield MapRow(name if n <= per_line else words, [name], begin + i, begin + end, i)


def draw_heat_map(
    hosts: Sequence[HostRow], trends: Trends, index: int, window: int, axis: TimeAxis, width: int, height: int
) -> list[Text]:
    """Draw a quantity of every GPU (or rank) over time: a bad GPU shows as a line, a slow switch as a block."""
    quantity = QUANTITIES[index]
    groups = split_map_rows(trends.layout, height - 2)
    n = width - NAME_WIDTH - 2
    columns = trends.heat(index, window, axis.begin, axis.end, n)
    scale = HeatScale(quantity, *quantity.scale(_scale_values(quantity, columns)))
    max_gpus = max((group.end - group.begin for group in groups), default=1)
    worst_note = f", {quantity.worst_name} of {max_gpus}" if max_gpus > 1 else ""
    title = f"every {'GPU' if any(row.gpus for row in hosts) else 'rank'} over time: {quantity.name}, {quantity.unit}{worst_note}"
    legend = _legend(scale)
    lines = [draw_heading(title, width - legend.cell_len).append_text(legend)]
    shown = {row.name: row for row in hosts}
    for group in groups:
        line = _map_row_name(group, [shown[name] for name in group.hosts if name in shown])
        values = [_worst_value(quantity, column[group.begin : group.end]) if column else None for column in columns]
        lines.append(line.append_text(join_styled(map(scale.cell, values))))
    axis_line = draw_time_axis(axis, n)
    return [*lines, Text(" " * (NAME_WIDTH + 2)).append_text(axis_line[LABEL_COLUMNS:])]


def _is_in_row(row: HostRow, group: MapRow) -> bool:
    """Return whether this map row shows a host's unusual GPUs; True if none of them is unusual."""
    indices = [i for i, gpu in enumerate(row.gpus) if gpu.odd]
    return (
        not indices
        or len(group.hosts) > 1
        or any(group.first <= i < group.first + group.end - group.begin for i in indices)
    )


def _worst_value(quantity: Quantity, values: Sequence[float]) -> float | None:
    if UNKNOWN in values:
        values = [value for value in values if value != UNKNOWN]
    return quantity.worst_of(values) if values else None


def _legend(scale: HeatScale) -> Text:
    """Draw the color legend, from the coldest to the hottest value."""
    words = [f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.2g}" for value in (scale.low, scale.high)]
    return (
        Text()
        .append(f" {words[0]} ", "title")
        .append_text(join_styled(CELLS))
        .append(f" {words[1]}  m: other ", "title")
    )


def _scale_values(quantity: Quantity, columns: Sequence[Sequence[float] | None]) -> list[float]:
    """Return the values that define a map's scale: the maxima over time, or all current values."""
    known_columns = [column for column in columns if column]
    if quantity.is_centered:
        return [value for column in known_columns[-1:] for value in column if value != UNKNOWN]
    return [maximum for column in known_columns if (maximum := max(column)) != UNKNOWN]


def _map_row_name(group: MapRow, hosts: Sequence[HostRow]) -> Text:
    """Start a map row with its sign and name."""
    sign, style = " ", ""
    odd = [row for row in hosts if (row.notes or row.severity or row.is_culprit) and _is_in_row(row, group)]
    if any(row.is_culprit for row in odd):
        sign, style = "✖", "bad"
    elif odd:
        sign, style = "!", "warn"
    return (
        Text().append(sign, style).append(f"{shorten_middle(group.name, NAME_WIDTH):{NAME_WIDTH}} ", style or "title")
    )


SORT_KEYS: dict[str, Callable[[HostRow], tuple[float, ...]]] = {  # unknown values come last
    "worst": lambda row: (not row.is_culprit, -row.severity, -len(row.notes)),
    "name": lambda _: (),
    "power": lambda row: (row.power_pct is None, row.power_pct or 0.0),
    "step": lambda row: (row.step is None, row.step or 0, -(row.step_age_s or 0.0)),
    "temperature": lambda row: (row.temperature_c is None, -(row.temperature_c or 0)),
}
MAX_CELLS = 8  # GPUs shown as numbers; more are shown as cells
NO_GPU_TEXT = {False: "no GPU", True: "unknown", None: "— GPU"}  # by whether the host has any
FIGURES_WIDTH, STEP_WIDTH = 16, 7  # columns for power, temperature and step; for the step only
HISTORY_WIDTH = 10  # columns of a host's history
MIN_NOTE_WIDTH = 30  # least columns for a host's note


class HostGrid(NamedTuple):
    """Everything needed to draw the hosts."""

    view: ClusterView
    ui: Ui
    trends: Trends
    axis: TimeAxis
    quantity: int  # index of the quantity that the cells show
    focused: bool = True
    is_text: bool = False  # printed as text: every host's state is shown, including OK


def shown_hosts(view: ClusterView, ui: Ui) -> list[HostRow]:
    """Return the hosts that pass the filter, sorted."""
    needle = ui.filter.lower()
    rows = [row for row in view.hosts if needle in f"{row.name} {row.state} {row.why} {' '.join(row.notes)}".lower()]
    if ui.odd_only:
        rows = [row for row in rows if row.notes or row.severity]
    return sorted(rows, key=SORT_KEYS[ui.sort])


def selected_row(rows: Sequence[HostRow], ui: Ui, subject_host: str) -> HostRow | None:
    """Return the selected host; without a selection, the verdict's host, else the first."""
    name = ui.selected or subject_host
    return next((row for row in rows if row.name == name), next(iter(rows), None))


def no_host_text(ui: Ui) -> str:
    """Return the message that no host is shown, and why."""
    return f"no host{fmt_if(' that stands out', ui.odd_only)}{fmt_if(' matches {!r}', ui.filter)}"


def draw_hosts(grid: HostGrid, rows: Sequence[HostRow], width: int, room: int) -> list[Text]:
    """Draw a page of hosts in at most ``room`` lines below the heading: one per line if they fit, else in columns."""
    if width >= WIDE_COLUMNS and len(rows) + 1 <= room:
        return _draw_rows(grid, rows, width)
    return _draw_columns(grid, rows, width, room)


def _title(grid: HostGrid, rows: Sequence[HostRow], pages: int, page: int) -> str:
    order = {"worst": "worst first"}.get(grid.ui.sort, f"by {grid.ui.sort}")
    quantity = QUANTITIES[grid.quantity]
    quantity_text = f" · {quantity.name}, {quantity.unit}" if any(row.gpus for row in rows) else ""
    page_text = f" · page {page + 1} of {pages}, PgDn: more" if pages > 1 else ""
    return f"HOSTS {len(rows)} of {len(grid.view.hosts)}, {order}{quantity_text}{page_text}"


def _draw_rows(grid: HostGrid, rows: Sequence[HostRow], width: int) -> list[Text]:
    """Draw one line per host, and a summary line."""
    scale = heat_scale(grid.quantity, grid.view.hosts)
    n_gpus, name_width = max((len(row.gpus) for row in rows), default=0), _name_width(rows, 22)
    gpu_width = (4 * n_gpus if n_gpus <= MAX_CELLS else n_gpus) or 8
    shown_states = [row.state for row in rows if grid.is_text or row.state is not HostState.OK]
    state_width = max(map(len, [*shown_states, "STATE"])) + 1 if shown_states else 0
    columns = COLUMNS[grid.ui.hidden :]
    figures = "MEM% TEMP   Gb/s" + "".join(f"{HEADINGS[name]:>{WIDTHS[name]}}" for name in columns)
    spare = width - (2 + name_width + 1 + state_width + gpu_width + 1 + len(figures) + 1)
    own_quantity = grid.quantity if n_gpus else -1
    histories = [] if grid.is_text else [own_quantity, NETWORK]
    has_notes = any(row.why or row.notes for row in rows) and spare >= MIN_NOTE_WIDTH + len(histories) * HISTORY_WIDTH
    spark = min(30, max(0, (spare - (MIN_NOTE_WIDTH if has_notes else 0)) // 2 - 1))
    sparklines = [_draw_histories(grid, index, spark) for index in histories]
    numbers = "".join(f"{i:>3} " for i in range(n_gpus)) if 0 < n_gpus <= MAX_CELLS else "GPU"
    heading = Text().append(
        f"  {'HOST':{name_width}} {'STATE':{state_width}}"[: 3 + name_width + state_width] + f"{numbers:{gpu_width}} ",
        "strong",
    )
    window_text = format_duration(grid.axis.end - grid.axis.begin)
    for index in histories:
        name = QUANTITIES[index].name if index >= 0 else "cpu"
        heading.append(f"{f'{name} {window_text}'[:spark]:{spark}} ", "strong")
    heading.append(figures, "strong")
    lines = [draw_heading(_title(grid, rows, 1, 0), width, focused=grid.focused), heading]
    for row in rows:
        line = _row_start(
            row, name_width, is_selected=not grid.is_text and row is selected_row(rows, grid.ui, grid.view.about)
        )
        if state_width:
            line.append(f"{row.state if row.state in shown_states else '':{state_width}}", host_style(row))
        area_begin = line.cell_len
        line.append_text(_gpu_area(row, scale, gpu_width))
        line.append(" " * (area_begin + gpu_width + 1 - line.cell_len))
        for history in sparklines:
            line.append_text(history.get(row.name, Text(" " * spark))).append(" ")
        line.append_text(_host_figures(row, columns)).append(" ")
        if has_notes:
            line.append(row.why or next(iter(row.notes), ""), host_style(row) or "warn")
        lines.append(line)
    return [*lines, _summary_line(rows, scale, 2 + name_width + 1 + state_width, gpu_width)]


def _draw_histories(grid: HostGrid, index: int, width: int) -> dict[str, Text]:
    """Draw each host's history of a quantity (-1: CPU), on a common scale."""
    if width < 1:
        return {}
    if index < 0:
        return {row.name: Text(f"{sparkline(row.history, width, 100.0):{width}}", "chart") for row in grid.view.hosts}
    values_of = dict(grid.trends.host_heat(index, grid.ui.window, grid.axis.begin, grid.axis.end, width))
    known_values = [value for values in values_of.values() for value in values if value != UNKNOWN]
    scale = HeatScale(QUANTITIES[index], *QUANTITIES[index].scale(known_values))
    drawn = {name: map(scale.cell, values) for name, values in values_of.items()}
    return {
        name: join_styled((char, STALE_STYLE if style == STALE_STYLE else "chart") for char, style in styled_cells)
        for name, styled_cells in drawn.items()
    }


STARTUP_PHASES = (
    Phase.START,
    Phase.DATA,
    Phase.LOAD,
    Phase.PIN,
    Phase.RESUME,
)  # phases of a rank before its first step
HEADINGS = {"cpu_pct": "CPU%", "ram_pct": "RAM%", "disk": "DISK", "step": "STEP", "busy": "BUSY", "age": "AGE"}
WIDTHS = {"cpu_pct": 5, "ram_pct": 5, "disk": 6, "step": 7, "busy": 6, "age": 6}


def _host_figures(row: HostRow, columns: Sequence[str]) -> Text:
    memory = not_none(percent_of(gpu.used_mib, gpu.memory_mib) for gpu in row.gpus)
    busy = max(not_none(rank.busy_s for rank in row.ranks if rank.phase not in STARTUP_PHASES), default=None)
    disk = DASH if row.disk_free_bytes is None else f"{row.disk_free_bytes / 1e12:.1f}T"
    figures = {
        "cpu_pct": (fmt_or_dash(row.cpu_pct, ".0f"), ""),
        "ram_pct": (fmt_or_dash(percent_of(row.ram_used_bytes, row.ram_bytes), ".0f"), "ram_used_bytes"),
        "disk": (disk, "disk_free_bytes"),
        "step": (fmt_or_dash(row.step, "d"), "step"),
        "busy": (format_duration(busy), "busy_s"),
        "age": (format_duration(row.step_age_s), "step_age_s"),
    }
    fixed = (
        (f"{fmt_or_dash(max(memory, default=None), '.0f'):>4}", ""),
        (f" {fmt_or_dash(row.temperature_c, 'd'):>4}", "temperature_c"),
        (f" {format_gbit(first_not_none(row.ib_bytes_per_s, row.net_bytes_per_s)):>6}", "ib_bytes_per_s"),
    )
    optional = ((f"{figures[name][0]:>{WIDTHS[name]}}", figures[name][1]) for name in columns)
    return join_fields(row, (*fixed, *optional), {*row.odd_in, *(field for rank in row.ranks for field in rank.odd_in)})


def _gpu_area(row: HostRow, scale: HeatScale, width: int) -> Text:
    """Draw a host's GPUs: as numbers, as cells if there are many, or a text if there are none."""
    if row.state in (HostState.CONNECTING, *LINK_STATES):
        return Text(DASH, STALE_STYLE)
    if not row.gpus:
        return Text(NO_GPU_TEXT[row.has_gpu], value_style(row, odd=False) or "title")
    return draw_cells(row, scale) if 4 * len(row.gpus) > width else draw_numbers(row, scale)


def _summary_line(rows: Sequence[HostRow], scale: HeatScale, indent: int, area: int) -> Text:
    """Draw the summary line: medians, totals, and the spread of the ranks."""
    heard_rows = [row for row in rows if row.is_heard]
    line = Text().append(f"  {'median':{indent - 2}}", "title")
    medians = ""
    for i in range(max((len(row.gpus) for row in heard_rows), default=0)):
        values = not_none(scale.quantity.value_of(row, i) for row in heard_rows)
        medians += f"{format_in_3_columns(statistics.median(values) if values else None)} "
    line.append(f"{medians if len(medians) <= area else '':{area}} ", "title")
    powers = not_none(gpu.power_w for row in heard_rows for gpu in row.gpus)
    rates = not_none(map(network_gbps, heard_rows))
    steps = not_none(row.step for row in heard_rows)
    busy = not_none(rank.busy_s for row in heard_rows for rank in row.ranks if rank.phase not in STARTUP_PHASES)
    parts = [f"{pluralize(len(powers), 'GPU')} {sum(powers) / 1e3:.1f} kW"] if powers else []
    if busy and statistics.median(busy):
        spread = (max(busy) - statistics.median(busy)) / statistics.median(busy)
        parts.append(f"slowest rank {spread:+.1%}")
    if rates:
        parts.append(format_bit_rate(sum(rates)))
    if steps:
        parts.append(f"steps {min(steps):,}-{max(steps):,}" if min(steps) < max(steps) else f"step {min(steps):,}")
    return line.append(" · ".join(parts), "title")


def format_bit_rate(value: float) -> str:
    """Format a rate in Gb/s or Tb/s with its unit."""
    if value >= 1000:
        return f"{value / 1e3:.1f} Tb/s"
    return f"{value:.{2 if value < 10 else 0}f} Gb/s"


def _name_width(rows: Sequence[HostRow], max_width: int) -> int:
    return min(max([4, *(len(row.name) for row in rows)]), max_width)


def _row_start(row: HostRow, name_width: int, *, is_selected: bool) -> Text:
    """Start a host's line with its markers and name."""
    style = value_style(row, odd=bool(row.severity or row.notes))
    line = Text().append("▶" if is_selected else " ", "focus")
    sign = "!" if row.notes or row.severity else " "
    line.append("✖" if row.is_culprit else sign, style or "bad")
    line.append(f"{shorten_middle(row.name, name_width):{name_width}}", style or ("strong" if is_selected else ""))
    return line.append(" ")


def draw_network_line(row: HostRow, *, is_selected: bool) -> Text:
    """Draw a host's network rates and its first note."""
    line = _row_start(row, 22, is_selected=is_selected)
    rates = f"RDMA {format_gbit(row.ib_bytes_per_s):>8}  interface {format_gbit(row.net_bytes_per_s):>8}  "
    line.append_text(join_fields(row, [(rates, "ib_bytes_per_s")], row.odd_in))
    return line.append(row.why or next(iter(row.notes), ""), host_style(row) or "warn")


class _ColumnLayout(NamedTuple):
    """The layout of hosts in columns."""

    name_width: int  # columns of a name
    cells_width: int  # of a host's GPUs
    cell_width: int  # of each
    history_width: int  # of what the cells show, over time
    figures_width: int  # for power and temperature, and the step if hosts differ in it
    host_width: int  # of a host
    hosts_per_line: int


def _lay_out_columns(rows: Sequence[HostRow], width: int, room: int) -> _ColumnLayout:
    """Compute the column layout; figures are included if all hosts then fit in ``room`` lines."""
    cells, name = max([7, *map(n_units, rows)]), _name_width(rows, 16)
    min_width = 2 + name + 1 + cells + 1 + 1  # a sign, and a gap
    per_line_with_figures = max(1, width // (min_width + FIGURES_WIDTH))
    figures = 0
    if -(-len(rows) // per_line_with_figures) <= room and width >= min_width + FIGURES_WIDTH:
        figures = FIGURES_WIDTH if len({row.step for row in rows}) > 1 else FIGURES_WIDTH - STEP_WIDTH
    per_line = min(len(rows), per_line_with_figures if figures else max(1, width // min_width))
    room = width // per_line - min_width - figures
    of_cell = min(2, 1 + room // cells)
    history = min(20, room - cells * (of_cell - 1) - 1)
    return _ColumnLayout(
        name, cells * of_cell, of_cell, history if history >= 3 else 0, figures, width // per_line, per_line
    )


def _draw_columns(grid: HostGrid, rows: Sequence[HostRow], width: int, room: int) -> list[Text]:
    """Draw hosts in columns, in at most ``room`` lines below the heading."""
    scale, columns = heat_scale(grid.quantity, grid.view.hosts), _lay_out_columns(rows, width, room)
    per_page = columns.hosts_per_line * max(1, room)
    pages = max(1, -(-len(rows) // per_page))
    selected = selected_row(rows, grid.ui, grid.view.about)
    page = rows.index(selected) // per_page if selected else 0  # the selected host is always on the screen
    page_rows = rows[page * per_page : (page + 1) * per_page]
    height = max(1, min(room, -(-len(page_rows) // columns.hosts_per_line)))
    lines = [Text() for _ in range(height)]
    histories = _draw_histories(grid, grid.quantity, columns.history_width)
    for i, row in enumerate(page_rows):
        line = lines[i % height]
        line.append(" " * ((i // height) * columns.host_width - line.cell_len))
        line.append_text(_draw_short_row(row, scale, columns, histories.get(row.name), is_selected=row is selected))
    return [draw_heading(_title(grid, rows, pages, page), width, focused=grid.focused), *lines]


def _draw_short_row(
    row: HostRow, scale: HeatScale, columns: _ColumnLayout, history: Text | None, *, is_selected: bool
) -> Text:
    """Draw a host in its column: its name, a cell per GPU, a sign; power, temperature and step if there is room."""
    line, style = _row_start(row, columns.name_width, is_selected=is_selected), host_style(row)
    if row.state not in (HostState.OK, HostState.HUNG, HostState.FAILED):
        words = f"{row.state}{fmt_if(' {}', format_duration(row.age_s) if row.state is HostState.STALE else '')}"
        line.append(words, style)
        line.truncate(columns.host_width - 1)
        return line
    cells_begin = line.cell_len
    if row.gpus:
        line.append_text(draw_cells(row, scale, columns.cell_width))
    else:
        line.append(f"cpu{fmt_or_dash(row.cpu_pct, '3.0f'):>3}%"[: columns.cells_width])
    line.append(" " * (cells_begin + columns.cells_width - line.cell_len))
    if history:
        line.append(" ").append_text(history)
    sign = " "
    if row.state is not HostState.OK:
        sign = row.state[0]
    elif row.notes:
        sign = "!"
    line.append(sign, style or ODD_STYLE)
    if columns.figures_width:
        power_text, temperature_text = (
            f"{fmt_or_dash(row.power_pct, '3.0f'):>3}%",
            f" {fmt_or_dash(row.temperature_c, 'd'):>2}°",
        )
        figures = ((power_text, "power_w"), (temperature_text, "temperature_c")) if row.gpus else ()
        line.append_text(join_fields(row, figures, row.odd_in))
        if columns.figures_width == FIGURES_WIDTH:
            line.append(f" {fmt_or_dash(row.step, 'd'):>6}", value_style(row, odd="step" in row.odd_in))
    return line
