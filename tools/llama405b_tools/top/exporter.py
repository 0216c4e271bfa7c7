"""What cluster-top tells others: Prometheus, and a command, bell or title when the verdict changes.

Serves what cluster-top knows to Prometheus.

Tells that the verdict has changed: a command of the user's, the terminal's bell, its notifications and its title.
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
    """Answers each scrape with the newest picture."""

    def __init__(self, where: str) -> None:
        """Serve at ``[ADDR:]PORT``; without ADDR only to this machine.

        Raises:
            UserError: It is no address, or cannot be listened on.
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
        """See ``Collector.collect``."""
        families = {
            name: GaugeMetricFamily(f"llama405b_{name}", words, labels=labels.split())
            for name, (labels, words) in METRICS.items()
        }
        for sample in samples(self.pic) if self.pic else ():
            families[sample.name].add_metric(sample.labels, sample.value)
        return [family for family in families.values() if family.samples]

    def close(self) -> None:
        """Answer no longer."""
        with contextlib.suppress(OSError):
            self.server.shutdown()
            self.server.server_close()


def split(flag: str, where: str) -> tuple[str, int]:
    """Return address and port of ``[ADDR:]PORT``; an IPv6 address stands in brackets.

    Raises:
        UserError: It is something else.
    """
    found = re.fullmatch(r"(?:(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]+)):)?(\d{1,5})", where)
    if not found or not 0 < int(found[3]) < 1 << 16:
        raise UserError(
            f"{flag}: {where!r} is no [ADDR:]PORT; use a port, such as 9405, or 0.0.0.0:9405 for all who reach this machine"
        )
    return found[1] or found[2] or LOOPBACK, int(found[3])


CALM_S = 30.0  # a verdict that is no worse than before is told after it has lasted so long
RUNS = (
    Verdict.HEALTHY, Verdict.TRAINING, Verdict.RUNNING, Verdict.STARTING, Verdict.LOADING, Verdict.SAVING, Verdict.EVALUATING,
)  # fmt: skip
PUSH_TITLE, POP_TITLE = "\x1b[22;2t", "\x1b[23;2t"  # xterm's control sequences


class Changes:
    """Sees every picture, and tells what is new; phases of a run that goes well are not."""

    def __init__(
        self,
        command: str = "",
        write: Callable[[str], object] = lambda _: None,
        complain: Callable[[str], object] = lambda _: None,
    ) -> None:
        """``command``: for ``/bin/sh``; '': none. ``write``: to the terminal. ``complain``: if the command fails."""
        self.command, self.write, self.complain = command, write, complain
        self.told: Verdict | None = None  # the last one
        self.since: tuple[Verdict, float] | None = None  # what is given now
        self.title = ""

    def see(self, pic: Picture) -> Verdict | None:
        """Take a picture; returns the verdict that was told because of it."""
        self._entitle(pic)
        verdict = Verdict.HEALTHY if pic.verdict in RUNS else pic.verdict
        if verdict is Verdict.CONNECTING:
            return None
        if self.since is None or self.since[0] is not verdict:
            self.since = verdict, pic.time
        if self.told is None:  # how it was found is no change
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
        if verdict.exit_code:
            self.write("\a")
        self.write(f"\x1b]9;{words}\x1b\\\x1b]777;notify;cluster-top;{words.replace(';', ',')}\x1b\\")
        if self.command:
            threading.Thread(target=self._run, args=(str(pic.verdict), run, pic.why), daemon=True).start()

    def _run(self, verdict: str, run: str, why: str) -> None:
        if fault := run_command(self.command, verdict, run, why):
            self.complain(f"--on-change failed ({fault})")

    def _entitle(self, pic: Picture) -> None:
        """Give the terminal's window a title: the verdict, the run and its step."""
        sign, _ = VERDICTS.get(pic.verdict, ("✖", ""))
        run = pic.training
        title = without_controls(f"{sign} {pic.verdict}" + (f" {run.run}{given(' {}', run.step)}" if run else ""))
        if title != self.title:
            self.title = title
            self.write(f"\x1b]2;{title}\x1b\\")
