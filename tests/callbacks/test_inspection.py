"""ActivationMonitor, SystemMetricsMonitor, and what is for GPUs alone on a machine without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Trainer
from composerlite.callbacks import ActivationMonitor, MemorySnapshot, OOMObserver, SystemMetricsMonitor
from composerlite.errors import ConfigError
from composerlite.loggers import InMemoryLogger
from composerlite.models import ComposerClassifier


def run(callback: Any, **arguments: Any) -> InMemoryLogger:
    """Six batches of training with ``callback``, and what was logged."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 8), torch.randint(3, (24,)))
    model = ComposerClassifier(nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3)), num_classes=3)
    logged = InMemoryLogger()
    with Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=4),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="1ep",
        callbacks=[callback],
        loggers=[logged],
        seed=1,
        progress_bar=False,
        **arguments,
    ) as trainer:
        trainer.fit()
        hooks = [hook for module in trainer.state.model.modules() for hook in module._forward_hooks]
    assert hooks == []
    return logged


def test_activations_of_every_module_are_logged() -> None:
    """Inputs and outputs, over the last dimension, at the first microbatch of every so many batches."""
    logged = run(ActivationMonitor("3ba"), device_train_microbatch_size=2)
    names = {name for name in logged.data if name.startswith("activations/")}
    modules = ("module.0", "module.1", "module.2", "module", "")
    kinds = ("l2_norm", "average", "max", "kurtosis")
    expected = {f"activations/{kind}/{m}_{way}.0" for kind in kinds for m in modules for way in ("input", "output")}
    # The whole model's input is the batch, a pair whose first part is the images.
    expected = {name.replace("/_input.0", "/_input.0.0") for name in expected}
    assert names == expected
    times = [int(stamp.batch) for stamp, _ in logged.data["activations/l2_norm/module.1_output.0"]]
    assert times == [0, 3]


def test_statistics_are_what_they_are_called() -> None:
    """Computed by hand for the first linear layer's input: the first microbatch of the run."""
    logged = run(ActivationMonitor("100ba", ignore_module_types=["1", "2"]))
    torch.manual_seed(0)
    x = torch.randn(24, 8)[:4]
    found = {kind: logged.data[f"activations/{kind}/module.0_input.0"][0][1] for kind in ("l2_norm", "average", "max")}
    assert found["l2_norm"] == pytest.approx(x.norm(dim=1).mean().item())
    assert found["average"] == pytest.approx(x.mean().item(), abs=1e-6)
    assert found["max"] == pytest.approx(x.amax(dim=1).mean().item())
    centered = x - x.mean(dim=1, keepdim=True)
    kurtosis = ((centered**4).mean(1) / (centered**2).mean(1) ** 2).mean().item()
    assert logged.data["activations/kurtosis/module.0_input.0"][0][1] == pytest.approx(kurtosis, rel=1e-4)
    assert not [name for name in logged.data if "module.1" in name]


def test_training_is_not_changed_by_looking() -> None:
    """The losses are the same to the last bit."""
    runs = [run(MemorySnapshot()), run(ActivationMonitor("1ba"))]
    losses = [[value for _, value in logged.data["loss/train/total"]] for logged in runs]
    assert losses[0] == losses[1]


def test_the_machine_is_logged() -> None:
    """Processor, memory, disk and network, at each batch or every so many."""
    pytest.importorskip("psutil")
    logged = run(SystemMetricsMonitor(batch_log_interval=2))
    for name in ("cpu_percentage", "cpu_memory_percent", "disk_memory_used", "network_bytes_sent"):
        values = [value for _, value in logged.data[name]]
        assert len(values) == 3
        assert all(value >= 0 for value in values)
    assert logged.data["cpu_memory_total"][0][1] > 1e6
    assert not [name for name in logged.data if "gpu" in name]


@pytest.mark.parametrize("callback", [MemorySnapshot(), OOMObserver()], ids=["MemorySnapshot", "OOMObserver"])
def test_without_a_gpu_there_is_a_warning_and_training_goes_on(callback: Any, caplog: pytest.LogCaptureFixture) -> None:
    """They look into the memory of GPUs."""
    logged = run(callback)
    said = [record.getMessage() for record in caplog.records if "GPUs" in record.getMessage()]
    assert said == [f"{type(callback).__name__} records CUDA GPUs only, and the model is on the cpu"]
    assert len(logged.data["loss/train/total"]) == 6


def test_bad_arguments_are_refused() -> None:
    """At once, with the rule."""
    for make, message in (
        (lambda: ActivationMonitor("3s"), "expected batches or epochs"),
        (lambda: MemorySnapshot(interval="0ba"), "interval='0ba'"),
        (lambda: MemorySnapshot(skip_batches=-1), "skip_batches=-1"),
        (lambda: MemorySnapshot(filename="{bach}"), "Did you mean 'batch'"),
        (lambda: OOMObserver(max_entries=0), "max_entries=0"),
        (lambda: SystemMetricsMonitor(batch_log_interval=0), "batch_log_interval=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()
