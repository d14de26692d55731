"""PrometheusLogger: scraped over HTTP and read with Prometheus' own parser."""

from __future__ import annotations

import logging
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
    """What a scrape gets now: the samples of run 'fox' on rank 0."""
    assert logger.place is not None
    with urllib.request.urlopen(logger.place, timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels == {"run": "fox", "rank": "0"} for sample in samples)
    return {sample.name: sample.value for sample in samples}


def test_a_scrape_has_the_newest_values(run: Any) -> None:
    """Under names that Prometheus takes; what is no number is not served; after the end nothing is."""
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


def test_costs_of_all_saves_are_in_a_scrape(tmp_path: Path) -> None:
    """Of a real training with eight saves: the sums and counts have each of them, whenever the scrape was."""
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


def test_two_metrics_of_one_name_are_not_mixed(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The first is served, and of the other there is one warning."""
    logger = PrometheusLogger(**LOCAL)
    training = run(logger)
    with caplog.at_level(logging.WARNING):
        for value in (1.0, 2.0):
            training.logger.log_metrics({"loss/a": value, "loss-a": 7.0})
    assert scrape(logger) == {"composerlite_loss_a": 2.0}
    assert [record.getMessage() for record in caplog.records] == [
        "PrometheusLogger: both metrics 'loss/a' and 'loss-a' would be composerlite_loss_a: the second is not served. "
        "Rename one."
    ]
    training.finish()


def test_a_port_that_another_has_is_waited_for_and_then_refused(run: Any) -> None:
    """A run that takes over from a killed one waits for its port; a port of somebody else is an error at the start."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"nothing can be served on port {port} of 127.0.0.1: .*free one"):
            run(PrometheusLogger(port, "127.0.0.1", timeout=0.5))
    training = run(logger := PrometheusLogger(port, "127.0.0.1"))
    assert logger.place == f"http://127.0.0.1:{port}/metrics"
    training.finish()
    with pytest.raises(ConfigError, match="expected a port, 0 to 65535"):
        PrometheusLogger(port=70000)
