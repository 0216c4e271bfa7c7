"""The screen of cluster-top: a picture in, lines of rich text out. Pure; used by the app, ``--once`` and the tests.

One row per host, worst first. High power is good and is not colored; deviations are colored, and also have a sign.
"""

import dataclasses
from collections.abc import Callable, Sequence

from rich.text import Text

from llama405b.contract.phrases import given
from llama405b_tools.text.clean import printable
from llama405b_tools.text.figures import DASH, WIDE, bar, first_known, gbit, middle, number, share, span, sparkline
from llama405b_tools.top.draw.detail import detail, gpu_lines
from llama405b_tools.top.draw.headline import headline
from llama405b_tools.top.draw.lines import LogLine, event_line, log_pane, rule, wrapped
from llama405b_tools.top.draw.marks import ODD, OLD, pieced, row_style, style_of
from llama405b_tools.top.state.picture import LINK_STATES, HostRow, HostState, Picture, known

SORT_KEYS: dict[str, Callable[[HostRow], tuple[float, ...]]] = {  # unknown values come last
    "worst": lambda row: (not row.is_culprit, -row.severity, -len(row.notes)),
    "name": lambda _: (),
    "power": lambda row: (row.power_pct is None, row.power_pct or 0.0),
    "step": lambda row: (row.step is None, row.step or 0, -(row.step_age_s or 0.0)),
    "temperature": lambda row: (row.temperature_c is None, -(row.temperature_c or 0)),
}
SORTS = tuple(SORT_KEYS)
VERDICT_LINES = 2  # on a screen
MAX_CELLS = 8  # GPUs shown as numbers; more are shown as bars
WITHOUT_GPUS = {False: "no GPU", True: "unknown", None: "— GPU"}  # by whether the host has any
KEYS = "↑↓ host  ⏎ detail  / filter  s sort  o odd ones  l logs  v events  e first error  ? help  q quit"
SHORT_KEYS, BACK_KEYS = "↑↓ ⏎ / s o l v e ? q", "Esc q back  ↑↓ PgUp PgDn"
HELP = """cluster-top: every host, every GPU, every rank, the training and its logs

  ↑ ↓ j k      choose a host          PgUp PgDn  a page of hosts (of logs, in the log view)
  Enter        the host in detail: GPUs, ranks, processes, network, its log lines
  /            show only hosts whose name, state or notes contain a text; Esc ends it
  s            sort: worst first, name, power, step, temperature
  o            only hosts that stand out
  l            the logs on the whole screen; again: back
  v            all events on the whole screen; again: back
  e            the first error across all hosts, with its traceback; again: back
  ? h          this page              q Ctrl-C  back, or quit (Ctrl-C: quit); nothing is left on any host

Cells are power in percent of the limit (u: utilization, where power is not told). — is unknown, never 0.
Gb/s: InfiniBand and RoCE, all ports, both ways; without them the busiest interface. STEP and AGE: of the slowest rank.
Where the run failed or hangs: ✖ before the name; hosts that only lost contact are dim.
Many hosts share a line: a bar a GPU, the least power, the hottest GPU, ! where something stands out (H hung, F failed), STEP.
  !  the GPU deviates from the median of all GPUs, has an error or a throttle reason, or its rank delays the others
Bold yellow or red: what stands out, and where it shows. Dim: the last values of a host that is not heard.
States: OK, STALE (no frame for 3 intervals), AUTH, REFUSED, TIMEOUT, DOWN (no connection, and why),
  NO-DRIVER, SMI-HUNG (nvidia-smi does not answer), HUNG (its rank is the one the others wait for), FAILED.
"at risk": the steps since the newest checkpoint, and their hours summed over all ranks, lost if the run died now."""


@dataclasses.dataclass(slots=True)
class Ui:
    """The user's choices."""

    mode: str = "cluster"  # cluster | host | logs | events | text
    selected: str = ""
    sort: str = SORTS[0]
    odd_only: bool = False
    filter: str = ""
    typing: bool = False
    page: int = 0
    back: int = 0  # lines scrolled: up from the newest in the logs and events, else down from the beginning
    title: str = ""
    lines: Sequence[str] = ()  # in mode "text"


def screen(pic: Picture, ui: Ui, logs: Sequence[LogLine], width: int, height: int) -> list[Text]:
    """Draw exactly ``height`` lines of ``width`` columns."""
    top = headline(pic, width, VERDICT_LINES)
    room = height - len(top) - 1
    if ui.mode in ("text", "events"):
        body = _words(pic, ui, width, room)
    elif ui.mode == "logs":
        body = log_pane(logs, room, width, ui.back)
    elif ui.mode == "host":
        row = selected_row(ordered(pic, ui), ui)
        body = detail(row, logs, width, room)[ui.back :] if row else [Text("no host", "dim")]
    else:
        body = _cluster(pic, ui, logs, width, room)
    shown = [*top, *body[:room]]
    shown += [Text() for _ in range(height - 1 - len(shown))]
    shown.append(_footer(ui, width))
    for line in shown:
        line.plain = printable(line.plain)
        line.truncate(width, overflow="ellipsis", pad=True)
    return shown[:height]


def whole_text(pic: Picture, ui: Ui, width: int) -> list[str]:
    """Return all lines of mode "text" or "events", wrapped to this width."""
    lines = ui.lines
    if ui.mode != "text":
        lines = [event_line(event).plain for event in pic.events]
    return [part for line in lines for part in wrapped(line, width)]


def _words(pic: Picture, ui: Ui, width: int, room: int) -> list[Text]:
    """Draw a text from its beginning, or the events up to the newest."""
    lines = whole_text(pic, ui, width)
    title = ui.title
    begin = ui.back
    end = ui.back + room - 1
    if ui.mode == "events":
        end = max(0, len(lines) - ui.back)
        title, begin = "EVENTS", max(0, end - room + 1)
    return [rule(title, width), *map(Text, lines[begin:end])]


def listed(pic: Picture, ui: Ui, width: int) -> list[Text]:
    """Draw everything, without a screen's limit: every host, what stands out, and the events."""
    rows = ordered(pic, ui)
    if not rows:
        return [*headline(pic, width), Text(_none(ui))]
    lines = [*headline(pic, width), *_grid(pic, ui, rows, None, width, len(rows))]
    for row in rows:
        if row.why:
            lines.append(Text(f"! {row.name}: {row.state} {row.why}"))
        lines += [Text(f"! {row.name}: {note}") for note in row.notes]
    lines += [event_line(event) for event in pic.events]
    for line in lines:
        line.plain = printable(line.plain)
        line.rstrip()
    return lines


def ordered(pic: Picture, ui: Ui) -> list[HostRow]:
    """Return the hosts to show, in order."""
    words = ui.filter.lower()
    rows = [row for row in pic.hosts if words in f"{row.name} {row.state} {row.why} {' '.join(row.notes)}".lower()]
    if ui.odd_only:
        rows = [row for row in rows if row.notes or row.severity]
    return sorted(rows, key=SORT_KEYS[ui.sort])


def _cluster(pic: Picture, ui: Ui, logs: Sequence[LogLine], width: int, room: int) -> list[Text]:
    rows = ordered(pic, ui)
    selected = selected_row(rows, ui)
    for_hosts, n_events = _rooms(pic, room)
    lines = _grid(pic, ui, rows, selected, width, for_hosts)
    if not rows:
        lines = [Text(f"{_none(ui)}; Esc shows all", "dim")]
    rest = room - len(lines) - 1 - n_events
    if selected and width >= WIDE and selected.gpus and rest - len(selected.gpus) - 1 >= 8:
        lines += gpu_lines(selected, width)
        rest -= len(selected.gpus) + 1
    lines.append(rule("EVENTS", width))
    lines += [event_line(event) for event in pic.events[len(pic.events) - n_events :]]
    return lines + log_pane(logs, rest, width, 0)


def _none(ui: Ui) -> str:
    return f"no host{given(' that stands out', ui.odd_only)}{given(' matches {!r}', ui.filter)}"


def selected_row(rows: Sequence[HostRow], ui: Ui) -> HostRow | None:
    """Return the selected host; the first if none is selected."""
    return next((row for row in rows if row.name == ui.selected), next(iter(rows), None))


def _wide(rows: Sequence[HostRow], selected: HostRow | None) -> list[Text]:
    """Draw one line per host."""
    numbers, area, what = _gpu_columns(rows)
    name_width = _name_width(rows, 22)
    columns = f"{'MEM%':>4} {'TEMP':>4} {'Gb/s':>6} {'CPU%':>4} {'RAM%':>4} {'STEP':>6} {'AGE':>5}"
    lines = [Text(f"  {'HOST':{name_width}} {'STATE':11}{numbers:{area}} {columns}  {what}", "bold")]
    for row in rows:
        line = _named(row, name_width, is_selected=row is selected)
        line.append(f"{row.state:11}", row_style(row))
        before = line.cell_len
        line.append_text(_cells(row, area))
        line.append(" " * (before + area - line.cell_len))
        line.append_text(_figures(row)).append("  ")
        line.append(row.why or next(iter(row.notes), ""), row_style(row) or "yellow")
        lines.append(line)
    return lines


def _gpu_columns(rows: Sequence[HostRow]) -> tuple[str, int, str]:
    """Return the heading and width of the wide grid's GPU columns, and what their numbers mean."""
    n_gpus = _most_gpus(rows)
    numbers = "CPU"
    what = ""
    area = max(8, n_gpus)
    if n_gpus:
        numbers, what = "GPU", "util %"
    if any(gpu.power_pct is not None for row in rows for gpu in row.gpus):
        what = "power %"
    if 0 < n_gpus <= MAX_CELLS:
        numbers, area = "".join(f"{i:>3} " for i in range(n_gpus)), max(8, 4 * n_gpus)
    return numbers, area, what


def _most_gpus(rows: Sequence[HostRow]) -> int:
    return max((len(row.gpus) for row in rows), default=0)


def _name_width(rows: Sequence[HostRow], most: int) -> int:
    return min(max([4, *(len(row.name) for row in rows)]), most)


def _named(row: HostRow, name_width: int, *, is_selected: bool) -> Text:
    """Begin a host's line, up to its name."""
    style = style_of(row, odd=bool(row.severity or row.notes))
    line = Text().append("▶" if is_selected else " ", "bold cyan")
    line.append("✖" if row.is_culprit else " ", "bold red")
    line.append(f"{middle(row.name, name_width):{name_width}}", style or ("bold" if is_selected else ""))
    return line.append(" ")


def _figures(row: HostRow) -> Text:
    memory = known(share(gpu.used_mib, gpu.memory_mib) for gpu in row.gpus)
    figures = (
        (number(max(memory, default=None), ".0f"), 4, ""),
        (number(row.temperature_c, "d"), 4, "temperature_c"),
        (gbit(first_known(row.ib_bytes_per_s, row.net_bytes_per_s)), 6, "ib_bytes_per_s"),
        (number(row.cpu_pct, ".0f"), 4, ""),
        (number(share(row.ram_used_bytes, row.ram_bytes), ".0f"), 4, "ram_used_bytes"),
        (number(row.step, "d"), 6, "step"),
        (span(row.step_age_s), 5, "step_age_s"),
    )
    return pieced(row, ((f" {text:>{columns}}", field) for text, columns, field in figures), row.odd_in)


def _cells(row: HostRow, area: int) -> Text:
    """Draw a number per GPU; bars if there are many; the CPU's history if there is none."""
    if row.state in (HostState.CONNECTING, *LINK_STATES):
        return Text(DASH, OLD)
    if not row.gpus:
        history = sparkline(row.history, max(0, area - 8), 100.0)
        return Text(f"{WITHOUT_GPUS[row.has_gpu]:7} {history}", style_of(row, odd=False))
    if 4 * len(row.gpus) > area:
        return _bars(row)
    line = Text()
    for gpu in row.gpus:
        value = f"  {DASH}"
        if gpu.power_pct is not None:
            value = f"{gpu.power_pct:3.0f}"
        elif gpu.utilization is not None:
            value = f"{gpu.utilization:2d}u"
        line.append(f"{value}{'!' if gpu.odd else ' '}", style_of(row, odd=bool(gpu.odd)))
    return line


def _bars(row: HostRow) -> Text:
    line = Text()
    for gpu in row.gpus:
        line.append(bar(first_known(gpu.power_pct, gpu.utilization)), style_of(row, odd=bool(gpu.odd)))
    return line


def _columns(rows: Sequence[HostRow], width: int) -> tuple[int, int, int, int]:
    """Lay out the compact grid: GPUs shown, width of a name, width of a host, hosts per line."""
    n_gpus, name_width = _most_gpus(rows), _name_width(rows, 16)
    cell = 2 + name_width + 1 + max(n_gpus, 7) + 1 + 18
    return n_gpus, name_width, cell, max(1, (width + 2) // (cell + 2))


def page_of(pic: Picture, ui: Ui, width: int, height: int) -> int:
    """Return the page on which the selected host is."""
    rows, (room, _) = ordered(pic, ui), _rooms(pic, height - len(headline(pic, width, VERDICT_LINES)) - 1)
    row = selected_row(rows, ui)
    return rows.index(row) // (_columns(rows, width)[3] * room) if row else 0


def n_pages(pic: Picture, ui: Ui, width: int, height: int) -> int:
    """Return how many pages the hosts take."""
    rows, (room, _) = ordered(pic, ui), _rooms(pic, height - len(headline(pic, width, VERDICT_LINES)) - 1)
    if width >= WIDE and len(rows) <= room:
        return 1
    return max(1, -(-len(rows) // (_columns(rows, width)[3] * room)))


def _rooms(pic: Picture, room: int) -> tuple[int, int]:
    """Return the lines for hosts, below their heading, and for events."""
    most = next((lines for least, lines in ((45, 8), (24, 4)) if room > least), 2)
    n_events = min(len(pic.events), most)
    return max(4, room - 1 - n_events - 4 - 1), n_events


def _grid(pic: Picture, ui: Ui, rows: Sequence[HostRow], selected: HostRow | None, width: int, room: int) -> list[Text]:
    """Draw a page of hosts: one per line if there is room, else several per line, in columns."""
    if width >= WIDE and len(rows) <= room:
        return _wide(rows, selected)
    n_gpus, name_width, cell, columns = _columns(rows, width)
    per_page = columns * room
    pages = max(1, -(-len(rows) // per_page))
    page = min(ui.page, pages - 1)
    shown = rows[page * per_page : (page + 1) * per_page]
    height = min(room, -(-len(shown) // columns))
    lines = [Text() for _ in range(height)]
    for i, row in enumerate(shown):
        line = lines[i % height]
        line.append(" " * ((i // height) * (cell + 2) - line.cell_len))
        line.append_text(_short(row, name_width, max(n_gpus, 7), is_selected=row is selected))
    order = {"worst": "worst first"}.get(ui.sort, f"by {ui.sort}")
    title = f"HOSTS {len(rows)} of {len(pic.hosts)}, {order}"
    if pages > 1:
        title += f"  page {page + 1} of {pages}, PgDn: more"
    return [rule(title, width), *lines]


def _short(row: HostRow, name_width: int, n_gpus: int, *, is_selected: bool) -> Text:
    """``gpu-03 ▇▇▇▂▇▇▇▇ min 12% 84C ! 1204``."""
    line, style = _named(row, name_width, is_selected=is_selected), row_style(row)
    if row.state is HostState.STALE:
        line.append(f"{row.state} {span(row.age_s)}", style)
        return line
    if row.state not in (HostState.OK, HostState.HUNG, HostState.FAILED):
        line.append(f"{row.state} ", style)
        return line
    if row.gpus:
        bars = _bars(row)
        line.append_text(bars)
        line.append(" " * (n_gpus - bars.cell_len))
        least, hottest = f" {number(row.power_pct, '3.0f'):>3}%", f" {number(row.temperature_c, 'd'):>2}C"
        line.append_text(pieced(row, ((least, "power_w"), (hottest, "temperature_c")), row.odd_in))
    else:
        line.append(f"{WITHOUT_GPUS[row.has_gpu][:n_gpus]:{n_gpus}} cpu {number(row.cpu_pct, '3.0f'):>3}%")
    sign = " "
    if row.state is not HostState.OK:
        sign = row.state[0]
    elif row.notes:
        sign = "!"
    line.append(f" {sign}", style or ODD)
    line.append(f" {number(row.step, 'd'):>6}", style_of(row, odd="step" in row.odd_in))
    return line


def _footer(ui: Ui, width: int) -> Text:
    if ui.typing:
        return Text(f"/{ui.filter}█  Enter keeps it, Esc shows all", "bold")
    keys = KEYS
    if ui.mode != "cluster":
        keys = BACK_KEYS
    elif width < len(KEYS):
        keys = SHORT_KEYS
    extra = {
        f"filter {ui.filter!r}": bool(ui.filter), "odd ones only": ui.odd_only, f"by {ui.sort}": ui.sort != SORTS[0]
    }  # fmt: skip
    if any(extra.values()):
        keys += f"  [{','.join(words for words, on in extra.items() if on)}]"
    return Text(keys, "reverse")
