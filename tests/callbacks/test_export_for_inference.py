"""export_for_inference and its callback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Trainer
from composerlite.algorithms import apply_channels_last
from composerlite.callbacks import ExportForInferenceCallback
from composerlite.errors import ConfigError
from composerlite.loggers import RemoteUploaderDownloader
from composerlite.models import ComposerClassifier
from composerlite.storage import open_store
from composerlite.utils import ExportFormat, export_for_inference

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(6, dtype=torch.long)


def model() -> ComposerClassifier:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
    return ComposerClassifier(net, num_classes=3)


def trainer_with(*callbacks: Any, **arguments: Any) -> Trainer:
    built = model()
    return Trainer(
        model=built,
        train_dataloader=DataLoader(TensorDataset(X, Y), batch_size=3),
        optimizers=torch.optim.SGD(built.parameters(), lr=0.1),
        max_duration="2ep",
        callbacks=list(callbacks),
        run_name="run",
        seed=1,
        progress_bar=False,
        **arguments,
    )


def test_a_program_runs_without_the_code_of_the_model(tmp_path: Path) -> None:
    """In another process, which imports torch alone, on another number of samples, as the model evaluates."""
    trained, path = model(), tmp_path / "models" / "model.pt2"
    export_for_inference(trained, "torch_export", path, sample_input=((X, Y), {}))
    assert trained.training  # what was exported is a copy
    expected = trained.eval()((X[:5], Y[:5]))
    torch.save((X[:5], Y[:5]), tmp_path / "batch.pt")
    program = (
        "import sys, torch\n"
        f"run = torch.export.load({str(path)!r}).module()\n"
        f"print(run(torch.load({str(tmp_path / 'batch.pt')!r})).tolist())\n"
        "assert 'composerlite' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.tensor(eval(done.stdout)), expected)


def test_weights_alone_can_be_written(tmp_path: Path) -> None:
    """As a file of safetensors, with the names of the model."""
    safetensors = pytest.importorskip("safetensors.torch")
    trained = model()
    export_for_inference(trained, ExportFormat.SAFETENSORS, tmp_path / "model.safetensors")
    weights = safetensors.load_file(tmp_path / "model.safetensors")
    assert weights.keys() == trained.state_dict().keys()
    assert all(torch.equal(weights[name], weight) for name, weight in trained.state_dict().items())


def test_weights_come_from_a_checkpoint_and_changes_before_and_after(tmp_path: Path) -> None:
    """Surgery before the weights are loaded, transforms after it."""
    pytest.importorskip("safetensors.torch")
    with trainer_with(save_folder=tmp_path / "run") as trainer:
        trainer.fit()
    order: list[str] = []

    def zero(module: nn.Module) -> nn.Module:
        order.append(f"transform of a model with {float(module.get_parameter('module.0.weight').detach().sum()):.3f}")
        return module

    def surgery(module: nn.Module) -> nn.Module:
        order.append("surgery")
        return apply_channels_last(module)

    out = tmp_path / "model.safetensors"
    export_for_inference(
        model(), "safetensors", out, load_path=trainer.saved_checkpoints[-1], surgery_algs=surgery, transforms=[zero]
    )
    trained = float(trainer.state.model.get_parameter("module.0.weight").detach().sum())
    assert order == ["surgery", f"transform of a model with {trained:.3f}"]


def test_the_callback_exports_the_trained_model(tmp_path: Path) -> None:
    """When training ends, with a batch that it has seen; training is the same with it."""
    path = tmp_path / "model.pt2"
    with trainer_with(ExportForInferenceCallback("torch_export", str(path))) as trainer:
        trainer.fit()
        trained = trainer.state.model.eval()
    batch = [X[:2], Y[:2]]  # a list, as the loader gives it
    torch.testing.assert_close(torch.export.load(path).module()(batch), trained(batch))
    with trainer_with() as plain:
        plain.fit()
    for name, weight in plain.state.model.state_dict().items():
        assert torch.equal(weight, trained.state_dict()[name])


def test_the_trainer_exports_when_it_is_asked(tmp_path: Path) -> None:
    """As Composer's does."""
    with trainer_with() as trainer:
        trainer.fit()
        trainer.export_for_inference("torch_export", str(tmp_path / "model.pt2"), sample_input=((X, Y), {}))
        trained = trainer.state.model.eval()
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program((X[:4], Y[:4])), trained((X[:4], Y[:4])))


def test_loggers_and_buckets_get_the_file(s3_server: Any, tmp_path: Path) -> None:
    """A logger that keeps files gets it under its name; a URI is a place of its own."""
    pytest.importorskip("safetensors.torch")
    bucket = f"s3://{s3_server.new_bucket()}"
    uploader = RemoteUploaderDownloader(bucket, backend_kwargs=s3_server.store_kwargs)
    with open_store(bucket, **s3_server.store_kwargs) as store:
        kept = ExportForInferenceCallback("safetensors", "models/kept.safetensors")
        stored = ExportForInferenceCallback("safetensors", "models/stored.safetensors", save_object_store=store)
        with trainer_with(kept, stored, loggers=[uploader]) as trainer:
            trainer.fit()
        assert sorted(found.name for found in store.list_objects()) == [
            "models/kept.safetensors",
            "models/stored.safetensors",
        ]


def test_what_cannot_be_exported_is_refused() -> None:
    """With the way out: what torch has given up, and what needs an input."""
    for make, message in (
        (lambda: ExportForInferenceCallback("torchscript", "m.pt"), "has replaced TorchScript.*'torch_export'"),
        (lambda: ExportForInferenceCallback("onnx", "m.onnx"), "a program for torch.onnx.export"),
        (lambda: ExportForInferenceCallback("torch_exprot", "m"), "Did you mean 'torch_export'"),
        (lambda: export_for_inference(model(), "torch_export", "m.pt2"), "pass sample_input"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()
