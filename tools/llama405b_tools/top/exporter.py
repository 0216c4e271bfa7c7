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

from llama405b.contract.errors import UserError, fmt_if, reason_of
from llama405b_tools.run.query import run_notify_command
from llama405b_tools.text.words import strip_controls
from llama405b_tools.top.draw.panels import VERDICTS
from llama405b_tools.top.state.picture import METRICS, ClusterVerdict, ClusterView, metric_samples

LOOPBACK = "127.0.0.1"


class Exporter(Collector):
    """Answers each Prometheus scrape from the newest view."""

    def __init__(self, listen_address: str) -> None:
        """Serve at ``[ADDR:]PORT``; without ADDR only to this machine.

        Raises:
            UserError: It is not an address, or listening fails.
        """
        self.view: ClusterView | None = None
        address, port = parse_listen_address("--metrics", listen_address)
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self.server: WSGIServer = start_http_server(port, address, registry)[0]
        except OSError as error:
            raise UserError(
                f"--metrics: {address}:{port} cannot be listened on ({reason_of(error)}); use another port"
            ) from None

    def show(self, view: ClusterView) -> None:
        """Answer from this view."""
        self.view = view

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of the newest view; see ``Collector.collect``."""
        families = {
            name: GaugeMetricFamily(f"llama405b_{name}", words, labels=labels.split())
            for name, (labels, words) in METRICS.items()
        }
        for sample in metric_samples(self.view) if self.view else ():
            families[sample.name].add_metric(sample.labels, sample.value)
        return [family for family in families.values() if family.samples]

    def close(self) -> None:
        """Stop the server."""
        with contextlib.suppress(OSError):
            self.server.shutdown()
            self.server.server_close()


def parse_listen_address(flag: str, listen_address: str) -> tuple[str, int]:
    """Parse ``[ADDR:]PORT`` into address and port; an IPv6 address is in brackets.

    Raises:
        UserError: It is something else.
    """
    match = re.fullmatch(r"(?:(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]+)):)?(\d{1,5})", listen_address)
    if not match or not 0 < int(match[3]) < 1 << 16:
        raise UserError(
            f"{flag}: {listen_address!r} is not [ADDR:]PORT; use a port, such as 9405, or 0.0.0.0:9405 to listen on all interfaces"
        )
    return match[1] or match[2] or LOOPBACK, int(match[3])


SETTLE_S = 30.0  # a verdict that is not worse is reported after it has lasted this long
HEALTHY_VERDICTS = (
    ClusterVerdict.HEALTHY, ClusterVerdict.TRAINING, ClusterVerdict.RUNNING, ClusterVerdict.STARTING, ClusterVerdict.LOADING,
    ClusterVerdict.SAVING, ClusterVerdict.EVALUATING,
)  # fmt: skip
PUSH_TITLE, POP_TITLE = "\x1b[22;2t", "\x1b[23;2t"  # xterm's control sequences


class VerdictNotifier:
    """Reports changes of the verdict; phases of a healthy run count as one verdict."""

    def __init__(
        self,
        command: str = "",
        write: Callable[[str], object] = lambda _: None,
        on_error: Callable[[str], object] = lambda _: None,
    ) -> None:
        """``command``: for ``/bin/sh``; '': none. ``write``: to the terminal. ``on_error``: if the command fails."""
        self.command, self.write, self.on_error = command, write, on_error
        self.last_verdict: ClusterVerdict | None = None  # the last verdict reported
        self.current: tuple[ClusterVerdict, float] | None = None  # the current verdict and since when
        self.title = ""

    def update(self, view: ClusterView) -> ClusterVerdict | None:
        """Process a view; return the verdict if a change was reported."""
        self._set_title(view)
        verdict = ClusterVerdict.HEALTHY if view.verdict in HEALTHY_VERDICTS else view.verdict
        if verdict is ClusterVerdict.CONNECTING:
            return None
        if self.current is None or self.current[0] is not verdict:
            self.current = verdict, view.time
        if self.last_verdict is None:  # the first verdict is not a change
            self.last_verdict = verdict
        is_worse = verdict.exit_code > self.last_verdict.exit_code
        if verdict is self.last_verdict or not (is_worse or view.time - self.current[1] >= SETTLE_S):
            return None
        self.last_verdict = verdict
        self._notify(view, verdict)
        return verdict

    def _notify(self, view: ClusterView, verdict: ClusterVerdict) -> None:
        run = view.training.run if view.training else ""
        words = strip_controls(f"{fmt_if('{}: ', run)}{view.verdict}{fmt_if(': {}', view.why)}").replace("\n", " ")
        # BEL for a bad verdict; then OSC 9 and OSC 777, the two common sequences for notifications
        if verdict.exit_code:
            self.write("\a")
        self.write(f"\x1b]9;{words}\x1b\\\x1b]777;notify;cluster-top;{words.replace(';', ',')}\x1b\\")
        if self.command:
            threading.Thread(target=self._run_command, args=(str(view.verdict), run, view.why), daemon=True).start()

    def _run_command(self, verdict: str, run: str, why: str) -> None:
        if fault := run_notify_command(self.command, verdict, run, why):
            self.on_error(f"--on-change failed ({fault})")

    def _set_title(self, view: ClusterView) -> None:
        """Set the window title: the verdict, the run and its step."""
        sign, _ = VERDICTS.get(view.verdict, ("✖", ""))
        run = view.training
        title = strip_controls(f"{sign} {view.verdict}" + (f" {run.run}{fmt_if(' {}', run.step)}" if run else ""))
        if title != self.title:
            self.title = title
            self.write(f"\x1b]2;{title}\x1b\\")
