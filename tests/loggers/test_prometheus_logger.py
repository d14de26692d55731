"""PrometheusLogger: scraped over HTTP and read with Prometheus' own parser."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from logged_run import build

pytest.importorskip("prometheus_client", reason="pip install 'composerlite[prometheus]'")
from prometheus_client.parser import text_string_to_metric_families

from composerlite.errors import ConfigError
from composerlite.loggers import PrometheusLogger

LOCAL: dict[str, Any] = {"port": 0, "address": "127.0.0.1"}


def scrape(logger: PrometheusLogger) -> dict[str, float]:
    """Return the samples of run 'fox' on rank 0 by name."""
    assert logger.place is not None
    with urllib.request.urlopen(logger.place, timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels == {"run": "fox", "rank": "0"} for sample in samples)
    return {sample.name: sample.value for sample in samples}


def test_a_scrape_has_the_newest_values(run: Any) -> None:
    """Under names that Prometheus allows. Only numbers are served, and after the end nothing."""
    logger = PrometheusLogger(**LOCAL)
    training = run(logger).batches(2)
    assert scrape(logger) == {"composerlite_loss_train_total": 0.5, "composerlite_time_batch": 2}
    training.logger.log_metrics({"note": "text", "lr-AdamW/group0": torch.tensor(0.25), "on": torch.ones(2)})
    training.batches(2)
    assert scrape(logger) == {
        "composerlite_loss_train_total": 0.25,
        "composerlite_time_batch": 4,
        "composerlite_lr_AdamW_group0": 0.25,
    }
    place = logger.place
    training.finish()
    assert logger.place is None
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(place, timeout=60)


def test_a_scrape_has_the_costs_of_all_saves(tmp_path: Path) -> None:
    """Sums and counts cover all eight saves, not only the last one before the scrape."""
    logger = PrometheusLogger(**LOCAL)
    with build(save_folder=tmp_path, save_interval="1ba", loggers=logger) as trainer:
        trainer.fit()
        seen = scrape(logger)
    assert seen["composerlite_checkpoint_batch"] == 8
    for cost in ("stall_seconds", "total_seconds", "bytes"):
        assert seen[f"composerlite_checkpoint_{cost}_count"] == 8
        assert seen[f"composerlite_checkpoint_{cost}_sum"] > 0
    sizes = sum(Path(path).stat().st_size for path in trainer.saved_checkpoints)
    assert seen["composerlite_checkpoint_bytes_sum"] == pytest.approx(sizes, rel=0.2)


def test_a_port_in_use(run: Any) -> None:
    """The logger waits for ``timeout`` seconds, for the port of a killed run; then the port is an error."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot serve on port {port} of 127.0.0.1: .*free port"):
            run(PrometheusLogger(port, "127.0.0.1", timeout=0.5))
    training = run(logger := PrometheusLogger(port, "127.0.0.1"))
    assert logger.place == f"http://127.0.0.1:{port}/metrics"
    training.finish()
