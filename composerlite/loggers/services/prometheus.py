"""PrometheusLogger: an HTTP server with the newest metrics, for Prometheus."""

from __future__ import annotations

import errno
import re
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

from composerlite import dist
from composerlite.core import LoggerDestination
from composerlite.errors import ConfigError, checked_arguments
from composerlite.loggers.services.service import need_package, scalars

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import Metric

    from composerlite.core import Logger, State


@final
class PrometheusLogger(LoggerDestination):
    """Serves metrics at ``http://<address>:<port>/metrics`` for Prometheus, OpenTelemetry's Collector and others.

    ``checkpoint/stall_seconds`` is served as ``composerlite_checkpoint_stall_seconds``, with the labels ``run`` and
    ``rank``. Metrics are gauges with the newest value. Seconds and bytes of ``checkpoint/…`` are summaries: ``_sum``
    and ``_count`` cover all saves of this process, also saves between two scrapes.

    Args:
        port: the port; 0 selects a free port, see ``place``.
        address: address of a network of this machine; by default all networks.
        rank_zero_only: only global rank 0 serves metrics. Otherwise each rank of a node has a port, counted from
            ``port`` on.
        timeout: seconds to wait for a port in use, such as the port of a killed run that this run resumes.

    Raises:
        ConfigError: prometheus-client is not installed, or the port is invalid; at ``INIT`` the port is in use or
            forbidden.

    Example:
        .. code-block:: python

            Trainer(model=model, loggers=PrometheusLogger(port=9464))
    """

    @checked_arguments
    def __init__(
        self, port: int = 9464, address: str = "0.0.0.0", rank_zero_only: bool = True, timeout: float = 30.0
    ) -> None:
        if not 0 <= port < 65536:
            raise ConfigError(f"PrometheusLogger(port={port}): expected a port, 0 to 65535.")
        need_package("prometheus_client", who="PrometheusLogger", extra="prometheus")
        self._is_silent = rank_zero_only and dist.get_global_rank() != 0
        self._address, self._timeout = address, timeout
        self._port = port + dist.get_local_rank() if port and not rank_zero_only else port
        self._server: WSGIServer | None = None
        self._run_name = ""
        self._lock = threading.Lock()
        self._gauges: dict[str, float] = {}
        self._summaries: dict[str, tuple[int, float]] = {}

    @property
    def place(self) -> str | None:
        return None if self._server is None else f"http://{self._address}:{self._server.server_port}/metrics"

    def init(self, state: State, logger: Logger) -> None:
        if self._is_silent or self._server is not None:
            return
        from prometheus_client import CollectorRegistry, start_http_server

        self._run_name = state.run_name
        registry = CollectorRegistry()
        registry.register(self)  # pyright: ignore[reportArgumentType]
        end = time.monotonic() + self._timeout
        while self._server is None:
            try:
                self._server, _ = start_http_server(self._port, self._address, registry)
            except OSError as e:
                if e.errno == errno.EADDRINUSE and time.monotonic() < end:
                    time.sleep(0.1)
                    continue
                raise ConfigError(
                    f"PrometheusLogger: cannot serve on port {self._port} of {self._address}: {e.strerror}. "
                    "Give another port, or 0 for a free port."
                ) from e

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if self._is_silent:
            return
        with self._lock:
            for name, value in scalars(metrics).items():
                served = "composerlite_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
                if name.startswith("checkpoint/") and name.endswith(("_seconds", "bytes")):
                    count, total = self._summaries.get(served, (0, 0.0))
                    self._summaries[served] = count + 1, total + value
                else:
                    self._gauges[served] = value

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of a scrape. The server calls this method in a thread."""
        from prometheus_client.core import GaugeMetricFamily, SummaryMetricFamily

        with self._lock:
            gauges, summaries = dict(self._gauges), dict(self._summaries)
        names, labels = ("run", "rank"), (self._run_name, str(dist.get_global_rank()))
        for name, value in gauges.items():
            gauge = GaugeMetricFamily(name, "Newest value", labels=names)
            gauge.add_metric(labels, value)
            yield gauge
        for name, (count, total) in summaries.items():
            summary = SummaryMetricFamily(name, "Sum over all saves", labels=names)
            summary.add_metric(labels, count, total)
            yield summary

    def post_close(self) -> None:
        if self._server is not None:  # not in close(): other callbacks may log in their close()
            self._server.shutdown()
            self._server.server_close()
            self._server = None
