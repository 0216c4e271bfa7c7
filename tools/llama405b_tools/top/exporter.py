"""Serves what cluster-top knows to Prometheus."""

import contextlib
import re
from collections.abc import Iterable
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from llama405b.contract.errors import UserError
from llama405b.contract.phrases import reason_of
from llama405b_tools.top.state.exported import METRICS, samples
from llama405b_tools.top.state.picture import Picture

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
