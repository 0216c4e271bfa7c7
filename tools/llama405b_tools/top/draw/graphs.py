"""The graphs: loss, tokens per second, the parts of a step, power, network and memory. Pure."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.text import Text

from llama405b.contract.phrases import given
from llama405b_tools.text.figures import DASH, amount, number
from llama405b_tools.top.draw import chart
from llama405b_tools.top.draw.blocks import beside, divided, gauge, rule, tall
from llama405b_tools.top.draw.chart import LABEL, Axis, around, from_zero, means
from llama405b_tools.top.draw.hosts import gbits
from llama405b_tools.top.draw.marks import OLD
from llama405b_tools.top.state.picture import Picture, RunPhase, TrainingStatus, known
from llama405b_tools.top.state.quantities import LEAST_GBIT
from llama405b_tools.top.state.series import Bucket, Series
from llama405b_tools.top.state.trends import Trends

LEAST = 7  # lines of a graph
LEAST_KW = 0.001  # that a graph of power goes up to
OTHER = 0.05  # of a step: what is told if its parts do not explain it
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
    """What there is to draw at a moment."""

    pic: Picture
    trends: Trends
    window: int
    steps: Axis
    seen: Axis

    def known(self) -> list[Graph]:
        """Return the graphs of what is known, the most important first."""
        run = self.pic.training
        graphs = []
        if run and run.step is not None and run.step_s:
            graphs = [Graph(self._loss(run)), Graph(self._rate(run)), Graph(self._step(run))]
        return [*graphs, *self.hardware()]

    def hardware(self) -> list[Graph]:
        """Return the graphs of what the hosts tell of their hardware."""
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
        """Draw as many graphs as fit, one above the other, over exactly ``height`` lines."""
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
        """Draw the graph that matters most if there is room for one."""
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
            return chart.chart(
                title, evaluated, columns, around(found, "{:.2f}".format), self.steps, height, style=_style(run)
            )

        return draw

    def _rate(self, run: TrainingStatus) -> Drawn:
        def draw(width: int, height: int) -> list[Text]:
            columns = self._columns(self.trends.steps.get("tokens_per_s"), self.steps, width)
            found = [*means(columns)]
            planned = self._planned(run, found)
            now = f"tokens/s {number(run.tokens_per_s, ',.0f')}"
            if run.tokens_per_s is None and found:
                now += f", was {found[-1]:,.0f}"
            right = "  ".join(filter(None, (given("plan {:,.0f} ┄", planned), given("MFU {:.0f}%", run.mfu_pct))))
            scale = from_zero([*found, planned or 0.0], amount)
            return chart.chart(now, right, columns, scale, self.steps, height, plan=planned, style=_style(run))

        return draw

    @staticmethod
    def _planned(run: TrainingStatus, rates: Sequence[float]) -> float | None:
        """Return the tokens per second of a step as planned."""
        rate = run.tokens_per_s or (statistics.median(rates) if rates else None)
        return rate * run.step_s / run.expected_step_s if rate and run.step_s and run.expected_step_s else None

    def _step(self, run: TrainingStatus) -> Drawn:
        """Draw the parts of a step now, and if there is room how long steps took."""

        def draw(width: int, height: int) -> list[Text]:
            plan = given(" (plan {:.1f})", run.expected_step_s)
            parts = [*self._parts(run, width)][: height - 1]
            lines = [rule(f"a step {number(run.step_s, '.2f')} s{plan}", width, right=self._slowest()), *parts]
            if height - len(lines) < chart.LEAST_LINES:
                return tall(lines, height)
            columns = self._columns(self.trends.steps.get("step_s"), self.steps, width)
            scale = from_zero([*means(columns), run.expected_step_s or 0.0], "{:.3g}s".format)
            rest, planned = height - len(lines) + 1, run.expected_step_s
            drawn = chart.chart("", "", columns, scale, self.steps, rest, plan=planned, style=_style(run))
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
        """Name the rank that computes longest, and by how much."""
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
        return chart.chart(
            f"power {number(total, '.1f')} kW, limit {limit:.1f}", right, columns, scale, self.seen, height
        )

    def network(self, width: int, height: int) -> list[Text]:
        """Draw what all hosts send and receive together."""
        columns = self._columns(self.trends.sums["network_gbit"], self.seen, width)
        found = [*means(columns)]
        run = self.pic.training
        by = "RDMA" if any(row.ib_bytes_per_s is not None for row in self.pic.hosts) else "network"
        title = f"{by}, all hosts {gbits(found[-1]) if found else DASH}"
        scale = from_zero(
            [*found, LEAST_GBIT], lambda value: f"{value / 1e3:.3g}T" if value >= 1000 else f"{value:.3g}G"
        )
        return chart.chart(title, run.network if run else "", columns, scale, self.seen, height)

    def _percent(self, name: str, title: str) -> Drawn:
        def draw(width: int, height: int) -> list[Text]:
            columns = self._columns(self.trends.sums[name], self.seen, width)
            found = [*means(columns)]
            scale = from_zero(found, "{:.0f}%".format)
            return chart.chart(
                f"{title} {number(found[-1] if found else None, '.0f')}%", "", columns, scale, self.seen, height
            )

        return draw


def _style(run: TrainingStatus) -> str:
    """Return the style of what the steps told: dim, if there are no steps now."""
    return OLD if run.is_stale or run.phase not in STEPPING else "chart"


def axes_of(trends: Trends, window: int, now: float) -> tuple[Axis, Axis]:
    """Return the time that graphs show, up to the moment of the picture: of the steps, and of what was seen by cluster-top."""
    marks = [mark for mark in trends.marks if mark.time <= now]
    steps, seen = trends.begins(window, now)
    return Axis(steps, now, marks), Axis(seen, now, marks)
