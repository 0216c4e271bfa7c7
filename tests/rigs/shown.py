"""What cluster-top shows of a simulated cluster: the picture, how things went before it, and the log."""

import dataclasses
import functools
import io

import simulate
from rich.console import Console
from situations import SITUATIONS, Situation, watch

from llama405b_tools.top.draw import panels
from llama405b_tools.top.draw.ui import LogLine, Ui, make_theme, styled_segments
from llama405b_tools.top.session import LogPane
from llama405b_tools.top.state.cluster import ClusterState
from llama405b_tools.top.state.picture import ClusterView
from llama405b_tools.top.state.trends import Trends

HOT, HUNG, LOADING = 84.0, simulate.HUNG + 80, 14.0


@dataclasses.dataclass(frozen=True)
class Shown:
    """All that the screen is drawn from."""

    pic: ClusterView
    trends: Trends
    logs: list[LogLine]

    def screen(self, width, height, ui=None, **new):
        """Draw it; ``new``: fields of the picture."""
        pic = dataclasses.replace(self.pic, **new)
        return panels.draw_screen(panels.render_context(pic, self.trends, ui or Ui(), self.logs), width, height)


@functools.cache
def played(n_hosts, seconds, script=simulate.INCIDENT):
    """Return what is shown of the simulated incident after some time."""
    names = simulate.host_names(n_hosts)
    cluster, logs, trends = ClusterState(names, 2.0, badge="SIMULATED"), LogPane(), Trends()
    for event in simulate.simulate_incident(n_hosts, seconds=seconds, script=script):
        if "frame" in event:
            cluster.take_frame(event["host"], event["frame"], event["t"])
            if event["host"] == names[-1]:
                cluster.advance(event["t"])
                trends.take(cluster.make_view(), cluster.steps())
        else:
            logs.take(event["host"], event["entries"], cluster.first_rank(event["host"]))
    logs.add_complete(event["t"] + 10)
    return Shown(cluster.make_view(), trends, list(logs.lines))


@functools.cache
def in_situation(name):
    """Return what is shown at the end of a situation."""
    situation: Situation = next(each for each in SITUATIONS if each.name == name)
    logs, trends = LogPane(), Trends()
    spoken = []  # until the situation begins; what is printed then is not simulated
    for t, cluster in watch(situation, spoken.append):
        if t < 0:
            for event in spoken:
                logs.take(event["host"], event["entries"], cluster.first_rank(event["host"]))
        spoken.clear()
        trends.take(cluster.make_view(), cluster.steps())
    logs.add_complete(cluster.snapshot.now + 10)
    return Shown(cluster.make_view(), trends, list(logs.lines))


def text_of(lines):
    """Return lines as text, without what is blank at their ends."""
    return "".join(f"{line.plain.rstrip()}\n" for line in lines)


def blank_share(lines, n_colors=256):
    """Return the share of cells in which nothing is drawn: a space without a background."""
    look = Console(file=io.StringIO(), theme=make_theme("dark", n_colors), color_system="256", legacy_windows=False)
    pieces = [part for line in lines for part in styled_segments(line, look)]
    cells = [(char, part.style) for part in pieces for char in part.text]
    blank = [char for char, style in cells if char == " " and not (style and (style.bgcolor or style.reverse))]
    return len(blank) / len(cells)
