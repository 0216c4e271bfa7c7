"""Draw hosts one per line or in columns with a heat cell per GPU, and the heat map. Pure.

A heat cell stands for a GPU (or a rank without GPUs). It is a bar whose height is the value, so it is readable without color.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.text import Text

from llama405b.contract.errors import counted, given
from llama405b.contract.records import Phase
from llama405b_tools.text.figures import BARS, DASH, WIDE, first_known, gbit, middle, number, share, span, sparkline
from llama405b_tools.top.draw.charts import LABEL, ODD, OLD, Axis, pieced, row_style, rule, runs, style_of, time_axis
from llama405b_tools.top.draw.ui import COLUMNS, Ui
from llama405b_tools.top.state.picture import (
    LINK_STATES,
    NETWORK,
    QUANTITIES,
    GpuCell,
    HostRow,
    HostState,
    Picture,
    Quantity,
    known,
    n_units,
    network,
)
from llama405b_tools.top.state.trends import UNKNOWN, Layout, Trends

NO_VALUE = ("·", OLD)
NAME = 14  # columns of a map row's name
Cell = tuple[str, str]  # character, style
CELLS: list[Cell] = [(char, f"heat.{level}") for level, char in enumerate(BARS)]
LEVELS = len(BARS) - 1  # the hottest


class Scaled(NamedTuple):
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
        return LEVELS if value >= self.high else int(len(BARS) * (value - self.low) / (self.high - self.low))

    def cell(self, value: float | None) -> Cell:
        """Return the cell of a value."""
        level = self.level(value)
        return NO_VALUE if level is None else CELLS[level]


def scaled(index: int, rows: Sequence[HostRow]) -> Scaled:
    """Return a quantity on the scale of all hosts' values."""
    quantity = QUANTITIES[index]
    values = [quantity.of(row, i) for row in rows for i in range(n_units(row))]
    return Scaled(quantity, *quantity.scale([value for value in values if value is not None]))


def cells(row: HostRow, by: Scaled, n_columns: int = 1) -> Text:
    """Draw one cell per GPU (or rank) of a host, ``n_columns`` wide; an unusual GPU is ``!``."""
    drawn = [by.cell(by.quantity.of(row, i)) for i in range(n_units(row))]
    for i, gpu in enumerate(row.gpus):
        if gpu.odd and row.is_heard:
            drawn[i] = ("!", _odd_style(row, gpu))
    if not row.is_heard:
        drawn = [(char, OLD) for char, _ in drawn]
    return runs((char * n_columns, style) for char, style in drawn)


def numbers(row: HostRow, by: Scaled) -> Text:
    """Draw a number per GPU, four columns wide, on its color; ``!`` marks unusual GPUs."""
    line = Text()
    for i, gpu in enumerate(row.gpus):
        value = by.quantity.of(row, i)
        level = by.level(value)
        style = OLD if level is None or not row.is_heard else f"cell.{level}"
        if gpu.odd and row.is_heard:
            style = _odd_style(row, gpu)
        line.append(f"{three(value)}{'!' if gpu.odd else ' '}", style)
    return line


def _odd_style(row: HostRow, gpu: GpuCell) -> str:
    style = style_of(row, odd=bool(gpu.odd))
    return {ODD: "heat.odd", "warn": "heat.odd", "bad": "heat.bad"}.get(style, style)


def three(value: float | None) -> str:
    """Format a number in three columns."""
    if value is None:
        return "  —"
    if value < 9.95:
        return f"{value:3.1f}"
    return f"{value:3.0f}" if value < 999.5 else f"{value / 1000:2.0f}k"


class Row(NamedTuple):
    """The GPUs that share one line of the heat map."""

    name: str
    hosts: Sequence[str]
    begin: int  # index among all GPUs, in the order of the layout
    end: int
    first: int = 0  # index within the host, if the line shows one host


def rows_of(layout: Layout, n_lines: int) -> list[Row]:
    """Divide the GPUs among at most ``n_lines`` lines: several lines per host, else several hosts per line."""
    begins = list(itertools.accumulate((n for _, n in layout), initial=0))
    for per_line in range(1, 17):
        if sum(-(-n // per_line) for _, n in layout) <= n_lines:
            return [*_parts(layout, begins, per_line)]
    each = -(-len(layout) // max(1, n_lines))
    found = []
    for i in range(0, len(layout), each):
        names = [name for name, _ in layout[i : i + each]]
        words = names[0] if len(names) == 1 else f"{names[0]}…{names[-1]}"
        found.append(Row(words, names, begins[i], begins[min(i + each, len(layout))]))
    return found


def _parts(layout: Layout, begins: Sequence[int], per_line: int) -> Iterator[Row]:
    for (name, n), begin in zip(layout, begins, strict=False):
        for i in range(0, n, per_line):
            end = min(n, i + per_line)
            words = f"{name} {i}" if end == i + 1 else f"{name} {i}-{end - 1}"
            yield Row(name if n <= per_line else words, [name], begin + i, begin + end, i)


def heat_map(
    hosts: Sequence[HostRow], trends: Trends, index: int, window: int, axis: Axis, width: int, height: int
) -> list[Text]:
    """Draw a quantity of every GPU (or rank) over time: a bad GPU shows as a line, a slow switch as a block."""
    quantity = QUANTITIES[index]
    groups = rows_of(trends.layout, height - 2)
    n = width - NAME - 2
    columns = trends.heat(index, window, axis.begin, axis.end, n)
    by = Scaled(quantity, *quantity.scale(_scaled_by(quantity, columns)))
    most = max((group.end - group.begin for group in groups), default=1)
    each = f", {quantity.worst_name} of {most}" if most > 1 else ""
    title = (
        f"every {'GPU' if any(row.gpus for row in hosts) else 'rank'} over time: {quantity.name}, {quantity.unit}{each}"
    )
    legend = _legend(by)
    lines = [rule(title, width - legend.cell_len).append_text(legend)]
    shown = {row.name: row for row in hosts}
    for group in groups:
        line = _name(group, [shown[name] for name in group.hosts if name in shown])
        values = [_worst(quantity, column[group.begin : group.end]) if column else None for column in columns]
        lines.append(line.append_text(runs(map(by.cell, values))))
    axis_line = time_axis(axis, n)
    return [*lines, Text(" " * (NAME + 2)).append_text(axis_line[LABEL:])]


def _shows(row: HostRow, group: Row) -> bool:
    """Return whether this map row shows a host's unusual GPUs; True if none of them is unusual."""
    indices = [i for i, gpu in enumerate(row.gpus) if gpu.odd]
    return (
        not indices
        or len(group.hosts) > 1
        or any(group.first <= i < group.first + group.end - group.begin for i in indices)
    )


def _worst(quantity: Quantity, values: Sequence[float]) -> float | None:
    if UNKNOWN in values:
        values = [value for value in values if value != UNKNOWN]
    return quantity.worst(values) if values else None


def _legend(by: Scaled) -> Text:
    """Draw the color legend, from the coldest to the hottest value."""
    words = [f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.2g}" for value in (by.low, by.high)]
    return Text().append(f" {words[0]} ", "title").append_text(runs(CELLS)).append(f" {words[1]}  m: other ", "title")


def _scaled_by(quantity: Quantity, columns: Sequence[Sequence[float] | None]) -> list[float]:
    """Return the values that define a map's scale: the maxima over time, or all current values."""
    known = [column for column in columns if column]
    if quantity.around:
        return [value for column in known[-1:] for value in column if value != UNKNOWN]
    return [most for column in known if (most := max(column)) != UNKNOWN]


def _name(group: Row, hosts: Sequence[HostRow]) -> Text:
    """Start a map row with its sign and name."""
    sign, style = " ", ""
    odd = [row for row in hosts if (row.notes or row.severity or row.is_culprit) and _shows(row, group)]
    if any(row.is_culprit for row in odd):
        sign, style = "✖", "bad"
    elif odd:
        sign, style = "!", "warn"
    return Text().append(sign, style).append(f"{middle(group.name, NAME):{NAME}} ", style or "title")


SORT_KEYS: dict[str, Callable[[HostRow], tuple[float, ...]]] = {  # unknown values come last
    "worst": lambda row: (not row.is_culprit, -row.severity, -len(row.notes)),
    "name": lambda _: (),
    "power": lambda row: (row.power_pct is None, row.power_pct or 0.0),
    "step": lambda row: (row.step is None, row.step or 0, -(row.step_age_s or 0.0)),
    "temperature": lambda row: (row.temperature_c is None, -(row.temperature_c or 0)),
}
MAX_CELLS = 8  # GPUs shown as numbers; more are shown as cells
WITHOUT_GPUS = {False: "no GPU", True: "unknown", None: "— GPU"}  # by whether the host has any
FIGURES, STEP = 16, 7  # columns for power, temperature and step; for the step only
SPARK = 10  # columns of a host's history
ROOM = 30  # least columns for a host's note


class Grid(NamedTuple):
    """Everything needed to draw the hosts."""

    pic: Picture
    ui: Ui
    trends: Trends
    axis: Axis
    quantity: int  # index of the quantity that the cells show
    focused: bool = True
    is_text: bool = False  # printed as text: every host's state is shown, including OK


def ordered(pic: Picture, ui: Ui) -> list[HostRow]:
    """Return the hosts that pass the filter, sorted."""
    words = ui.filter.lower()
    rows = [row for row in pic.hosts if words in f"{row.name} {row.state} {row.why} {' '.join(row.notes)}".lower()]
    if ui.odd_only:
        rows = [row for row in rows if row.notes or row.severity]
    return sorted(rows, key=SORT_KEYS[ui.sort])


def selected_row(rows: Sequence[HostRow], ui: Ui, about: str) -> HostRow | None:
    """Return the selected host; without a selection, the verdict's host, else the first."""
    wanted = ui.selected or about
    return next((row for row in rows if row.name == wanted), next(iter(rows), None))


def none_shown(ui: Ui) -> str:
    """Return the message that no host is shown, and why."""
    return f"no host{given(' that stands out', ui.odd_only)}{given(' matches {!r}', ui.filter)}"


def grid(of: Grid, rows: Sequence[HostRow], width: int, room: int) -> list[Text]:
    """Draw a page of hosts in at most ``room`` lines below the heading: one per line if they fit, else in columns."""
    if width >= WIDE and len(rows) + 1 <= room:
        return _wide(of, rows, width)
    return _in_columns(of, rows, width, room)


def _title(of: Grid, rows: Sequence[HostRow], pages: int, page: int) -> str:
    order = {"worst": "worst first"}.get(of.ui.sort, f"by {of.ui.sort}")
    quantity = QUANTITIES[of.quantity]
    what = f" · {quantity.name}, {quantity.unit}" if any(row.gpus for row in rows) else ""
    more = f" · page {page + 1} of {pages}, PgDn: more" if pages > 1 else ""
    return f"HOSTS {len(rows)} of {len(of.pic.hosts)}, {order}{what}{more}"


def _wide(of: Grid, rows: Sequence[HostRow], width: int) -> list[Text]:
    """Draw one line per host, and a summary line."""
    by = scaled(of.quantity, of.pic.hosts)
    n_gpus, names = max((len(row.gpus) for row in rows), default=0), _name_width(rows, 22)
    area = (4 * n_gpus if n_gpus <= MAX_CELLS else n_gpus) or 8
    told = [row.state for row in rows if of.is_text or row.state is not HostState.OK]
    states = max(map(len, [*told, "STATE"])) + 1 if told else 0
    columns = COLUMNS[of.ui.hidden :]
    figures = "MEM% TEMP   Gb/s" + "".join(f"{HEADINGS[name]:>{WIDTHS[name]}}" for name in columns)
    rest = width - (2 + names + 1 + states + area + 1 + len(figures) + 1)
    own = of.quantity if n_gpus else -1
    histories = [] if of.is_text else [own, NETWORK]
    says = any(row.why or row.notes for row in rows) and rest >= ROOM + len(histories) * SPARK
    spark = min(30, max(0, (rest - (ROOM if says else 0)) // 2 - 1))
    shown = [_sparks(of, index, spark) for index in histories]
    numbers = "".join(f"{i:>3} " for i in range(n_gpus)) if 0 < n_gpus <= MAX_CELLS else "GPU"
    heading = Text().append(
        f"  {'HOST':{names}} {'STATE':{states}}"[: 3 + names + states] + f"{numbers:{area}} ", "strong"
    )
    ago = span(of.axis.end - of.axis.begin)
    for index in histories:
        name = QUANTITIES[index].name if index >= 0 else "cpu"
        heading.append(f"{f'{name} {ago}'[:spark]:{spark}} ", "strong")
    heading.append(figures, "strong")
    lines = [rule(_title(of, rows, 1, 0), width, focused=of.focused), heading]
    for row in rows:
        line = _named(row, names, is_selected=not of.is_text and row is selected_row(rows, of.ui, of.pic.about))
        if states:
            line.append(f"{row.state if row.state in told else '':{states}}", row_style(row))
        before = line.cell_len
        line.append_text(_area(row, by, area))
        line.append(" " * (before + area + 1 - line.cell_len))
        for history in shown:
            line.append_text(history.get(row.name, Text(" " * spark))).append(" ")
        line.append_text(_figures(row, columns)).append(" ")
        if says:
            line.append(row.why or next(iter(row.notes), ""), row_style(row) or "warn")
        lines.append(line)
    return [*lines, _summary(rows, by, 2 + names + 1 + states, area)]


def _sparks(of: Grid, index: int, width: int) -> dict[str, Text]:
    """Draw each host's history of a quantity (-1: CPU), on a common scale."""
    if width < 1:
        return {}
    if index < 0:
        return {row.name: Text(f"{sparkline(row.history, width, 100.0):{width}}", "chart") for row in of.pic.hosts}
    found = dict(of.trends.host_heat(index, of.ui.window, of.axis.begin, of.axis.end, width))
    known = [value for values in found.values() for value in values if value != UNKNOWN]
    by = Scaled(QUANTITIES[index], *QUANTITIES[index].scale(known))
    drawn = {name: map(by.cell, values) for name, values in found.items()}
    return {
        name: runs((char, OLD if style == OLD else "chart") for char, style in each) for name, each in drawn.items()
    }


BEFORE = (Phase.START, Phase.DATA, Phase.LOAD, Phase.PIN, Phase.RESUME)  # phases of a rank before its first step
HEADINGS = {"cpu_pct": "CPU%", "ram_pct": "RAM%", "disk": "DISK", "step": "STEP", "busy": "BUSY", "age": "AGE"}
WIDTHS = {"cpu_pct": 5, "ram_pct": 5, "disk": 6, "step": 7, "busy": 6, "age": 6}


def _figures(row: HostRow, columns: Sequence[str]) -> Text:
    memory = known(share(gpu.used_mib, gpu.memory_mib) for gpu in row.gpus)
    busy = max(known(rank.busy_s for rank in row.ranks if rank.phase not in BEFORE), default=None)
    disk = DASH if row.disk_free_bytes is None else f"{row.disk_free_bytes / 1e12:.1f}T"
    figures = {
        "cpu_pct": (number(row.cpu_pct, ".0f"), ""),
        "ram_pct": (number(share(row.ram_used_bytes, row.ram_bytes), ".0f"), "ram_used_bytes"),
        "disk": (disk, "disk_free_bytes"),
        "step": (number(row.step, "d"), "step"),
        "busy": (span(busy), "busy_s"),
        "age": (span(row.step_age_s), "step_age_s"),
    }
    first = (
        (f"{number(max(memory, default=None), '.0f'):>4}", ""),
        (f" {number(row.temperature_c, 'd'):>4}", "temperature_c"),
        (f" {gbit(first_known(row.ib_bytes_per_s, row.net_bytes_per_s)):>6}", "ib_bytes_per_s"),
    )
    rest = ((f"{figures[name][0]:>{WIDTHS[name]}}", figures[name][1]) for name in columns)
    return pieced(row, (*first, *rest), {*row.odd_in, *(field for rank in row.ranks for field in rank.odd_in)})


def _area(row: HostRow, by: Scaled, width: int) -> Text:
    """Draw a host's GPUs: as numbers, as cells if there are many, or a text if there are none."""
    if row.state in (HostState.CONNECTING, *LINK_STATES):
        return Text(DASH, OLD)
    if not row.gpus:
        return Text(WITHOUT_GPUS[row.has_gpu], style_of(row, odd=False) or "title")
    return cells(row, by) if 4 * len(row.gpus) > width else numbers(row, by)


def _summary(rows: Sequence[HostRow], by: Scaled, indent: int, area: int) -> Text:
    """Draw the summary line: medians, totals, and the spread of the ranks."""
    heard = [row for row in rows if row.is_heard]
    line = Text().append(f"  {'median':{indent - 2}}", "title")
    medians = ""
    for i in range(max((len(row.gpus) for row in heard), default=0)):
        values = known(by.quantity.of(row, i) for row in heard)
        medians += f"{three(statistics.median(values) if values else None)} "
    line.append(f"{medians if len(medians) <= area else '':{area}} ", "title")
    powers = known(gpu.power_w for row in heard for gpu in row.gpus)
    flows = known(map(network, heard))
    steps = known(row.step for row in heard)
    busy = known(rank.busy_s for row in heard for rank in row.ranks if rank.phase not in BEFORE)
    parts = [f"{counted(len(powers), 'GPU')} {sum(powers) / 1e3:.1f} kW"] if powers else []
    if busy and statistics.median(busy):
        spread = (max(busy) - statistics.median(busy)) / statistics.median(busy)
        parts.append(f"slowest rank {spread:+.1%}")
    if flows:
        parts.append(gbits(sum(flows)))
    if steps:
        parts.append(f"steps {min(steps):,}-{max(steps):,}" if min(steps) < max(steps) else f"step {min(steps):,}")
    return line.append(" · ".join(parts), "title")


def gbits(value: float) -> str:
    """Format a rate in Gb/s or Tb/s with its unit."""
    if value >= 1000:
        return f"{value / 1e3:.1f} Tb/s"
    return f"{value:.{2 if value < 10 else 0}f} Gb/s"


def _name_width(rows: Sequence[HostRow], most: int) -> int:
    return min(max([4, *(len(row.name) for row in rows)]), most)


def _named(row: HostRow, name_width: int, *, is_selected: bool) -> Text:
    """Start a host's line with its markers and name."""
    style = style_of(row, odd=bool(row.severity or row.notes))
    line = Text().append("▶" if is_selected else " ", "focus")
    odd = "!" if row.notes or row.severity else " "
    line.append("✖" if row.is_culprit else odd, style or "bad")
    line.append(f"{middle(row.name, name_width):{name_width}}", style or ("strong" if is_selected else ""))
    return line.append(" ")


def network_line(row: HostRow, *, is_selected: bool) -> Text:
    """Draw a host's network rates and its first note."""
    line = _named(row, 22, is_selected=is_selected)
    rates = f"RDMA {gbit(row.ib_bytes_per_s):>8}  interface {gbit(row.net_bytes_per_s):>8}  "
    line.append_text(pieced(row, [(rates, "ib_bytes_per_s")], row.odd_in))
    return line.append(row.why or next(iter(row.notes), ""), row_style(row) or "warn")


class _Columns(NamedTuple):
    """The layout of hosts in columns."""

    name: int  # columns of a name
    cells: int  # of a host's GPUs
    of_cell: int  # of each
    history: int  # of what the cells show, over time
    figures: int  # for power and temperature, and the step if hosts differ in it
    width: int  # of a host
    per_line: int


def _columns(rows: Sequence[HostRow], width: int, room: int) -> _Columns:
    """Compute the column layout; figures are included if all hosts then fit in ``room`` lines."""
    cells, name = max([7, *map(n_units, rows)]), _name_width(rows, 16)
    least = 2 + name + 1 + cells + 1 + 1  # a sign, and a gap
    with_figures = max(1, width // (least + FIGURES))
    figures = 0
    if -(-len(rows) // with_figures) <= room and width >= least + FIGURES:
        figures = FIGURES if len({row.step for row in rows}) > 1 else FIGURES - STEP
    per_line = min(len(rows), with_figures if figures else max(1, width // least))
    room = width // per_line - least - figures
    of_cell = min(2, 1 + room // cells)
    history = min(20, room - cells * (of_cell - 1) - 1)
    return _Columns(
        name, cells * of_cell, of_cell, history if history >= 3 else 0, figures, width // per_line, per_line
    )


def _in_columns(of: Grid, rows: Sequence[HostRow], width: int, room: int) -> list[Text]:
    """Draw hosts in columns, in at most ``room`` lines below the heading."""
    by, columns = scaled(of.quantity, of.pic.hosts), _columns(rows, width, room)
    per_page = columns.per_line * max(1, room)
    pages = max(1, -(-len(rows) // per_page))
    selected = selected_row(rows, of.ui, of.pic.about)
    page = rows.index(selected) // per_page if selected else 0  # the selected host is always on the screen
    shown = rows[page * per_page : (page + 1) * per_page]
    height = max(1, min(room, -(-len(shown) // columns.per_line)))
    lines = [Text() for _ in range(height)]
    histories = _sparks(of, of.quantity, columns.history)
    for i, row in enumerate(shown):
        line = lines[i % height]
        line.append(" " * ((i // height) * columns.width - line.cell_len))
        line.append_text(_short(row, by, columns, histories.get(row.name), is_selected=row is selected))
    return [rule(_title(of, rows, pages, page), width, focused=of.focused), *lines]


def _short(row: HostRow, by: Scaled, columns: _Columns, history: Text | None, *, is_selected: bool) -> Text:
    """Draw a host in its column: its name, a cell per GPU, a sign; power, temperature and step if there is room."""
    line, style = _named(row, columns.name, is_selected=is_selected), row_style(row)
    if row.state not in (HostState.OK, HostState.HUNG, HostState.FAILED):
        words = f"{row.state}{given(' {}', span(row.age_s) if row.state is HostState.STALE else '')}"
        line.append(words, style)
        line.truncate(columns.width - 1)
        return line
    before = line.cell_len
    if row.gpus:
        line.append_text(cells(row, by, columns.of_cell))
    else:
        line.append(f"cpu{number(row.cpu_pct, '3.0f'):>3}%"[: columns.cells])
    line.append(" " * (before + columns.cells - line.cell_len))
    if history:
        line.append(" ").append_text(history)
    sign = " "
    if row.state is not HostState.OK:
        sign = row.state[0]
    elif row.notes:
        sign = "!"
    line.append(sign, style or ODD)
    if columns.figures:
        least, hottest = f"{number(row.power_pct, '3.0f'):>3}%", f" {number(row.temperature_c, 'd'):>2}°"
        figures = ((least, "power_w"), (hottest, "temperature_c")) if row.gpus else ()
        line.append_text(pieced(row, figures, row.odd_in))
        if columns.figures == FIGURES:
            line.append(f" {number(row.step, 'd'):>6}", style_of(row, odd="step" in row.odd_in))
    return line
