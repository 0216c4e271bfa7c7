"""Export cluster-top's view to Prometheus, and report changes of the verdict.

A change runs the user's command, rings the terminal's bell, sends a terminal notification and updates the window title.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Iterable
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from llama405b.contract.errors import UserError, given, reason_of
from llama405b_tools.run.query import run_command
from llama405b_tools.text.words import without_controls
from llama405b_tools.top.draw.panels import VERDICTS
from llama405b_tools.top.state.picture import METRICS, Picture, Verdict, samples

LOOPBACK = "127.0.0.1"


class Exporter(Collector):
    """Answers each Prometheus scrape from the newest view."""

    def __init__(self, where: str) -> None:
        """Serve at ``[ADDR:]PORT``; without ADDR only to this machine.

        Raises:
            UserError: It is not an address, or listening fails.
        """
        self.pic: Picture | None = None
        address, port = split("--metrics", where)
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self.server: WSGIServer = start_http_server(port, address, registry)[0]
        except OSError as error:
            raise UserError(
                f"--metrics: {address}:{port} cannot be listened on ({reason_of(error)}); use another port"
            ) from None

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of the newest view; see ``Collector.collect``."""
        families = {
            name: GaugeMetricFamily(f"llama405b_{name}", words, labels=labels.split())
            for name, (labels, words) in METRICS.items()
        }
        for sample in samples(self.pic) if self.pic else ():
            families[sample.name].add_metric(sample.labels, sample.value)
        return [family for family in families.values() if family.samples]

    def close(self) -> None:
        """Stop the server."""
        with contextlib.suppress(OSError):
            self.server.shutdown()
            self.server.server_close()


def split(flag: str, where: str) -> tuple[str, int]:
    """Parse ``[ADDR:]PORT`` into address and port; an IPv6 address is in brackets.

    Raises:
        UserError: It is something else.
    """
    found = re.fullmatch(r"(?:(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]+)):)?(\d{1,5})", where)
    if not found or not 0 < int(found[3]) < 1 << 16:
        raise UserError(
            f"{flag}: {where!r} is not [ADDR:]PORT; use a port, such as 9405, or 0.0.0.0:9405 to listen on all interfaces"
        )
    return found[1] or found[2] or LOOPBACK, int(found[3])


CALM_S = 30.0  # a verdict that is not worse is reported after it has lasted this long
RUNS = (
    Verdict.HEALTHY, Verdict.TRAINING, Verdict.RUNNING, Verdict.STARTING, Verdict.LOADING, Verdict.SAVING, Verdict.EVALUATING,
)  # fmt: skip
PUSH_TITLE, POP_TITLE = "\x1b[22;2t", "\x1b[23;2t"  # xterm's control sequences


class Changes:
    """Reports changes of the verdict; phases of a healthy run count as one verdict."""

    def __init__(
        self,
        command: str = "",
        write: Callable[[str], object] = lambda _: None,
        complain: Callable[[str], object] = lambda _: None,
    ) -> None:
        """``command``: for ``/bin/sh``; '': none. ``write``: to the terminal. ``complain``: if the command fails."""
        self.command, self.write, self.complain = command, write, complain
        self.told: Verdict | None = None  # the last verdict reported
        self.since: tuple[Verdict, float] | None = None  # the current verdict and since when
        self.title = ""

    def see(self, pic: Picture) -> Verdict | None:
        """Process a view; return the verdict if a change was reported."""
        self._entitle(pic)
        verdict = Verdict.HEALTHY if pic.verdict in RUNS else pic.verdict
        if verdict is Verdict.CONNECTING:
            return None
        if self.since is None or self.since[0] is not verdict:
            self.since = verdict, pic.time
        if self.told is None:  # the first verdict is not a change
            self.told = verdict
        worse = verdict.exit_code > self.told.exit_code
        if verdict is self.told or not (worse or pic.time - self.since[1] >= CALM_S):
            return None
        self.told = verdict
        self._tell(pic, verdict)
        return verdict

    def _tell(self, pic: Picture, verdict: Verdict) -> None:
        run = pic.training.run if pic.training else ""
        words = without_controls(f"{given('{}: ', run)}{pic.verdict}{given(': {}', pic.why)}").replace("\n", " ")
        # BEL for a bad verdict; then OSC 9 and OSC 777, the two common sequences for notifications
        if verdict.exit_code:
            self.write("\a")
        self.write(f"\x1b]9;{words}\x1b\\\x1b]777;notify;cluster-top;{words.replace(';', ',')}\x1b\\")
        if self.command:
            threading.Thread(target=self._run, args=(str(pic.verdict), run, pic.why), daemon=True).start()

    def _run(self, verdict: str, run: str, why: str) -> None:
        if fault := run_command(self.command, verdict, run, why):
            self.complain(f"--on-change failed ({fault})")

    def _entitle(self, pic: Picture) -> None:
        """Set the window title: the verdict, the run and its step."""
        sign, _ = VERDICTS.get(pic.verdict, ("✖", ""))
        run = pic.training
        title = without_controls(f"{sign} {pic.verdict}" + (f" {run.run}{given(' {}', run.step)}" if run else ""))
        if title != self.title:
            self.title = title
            self.write(f"\x1b]2;{title}\x1b\\")
