"""What runs on each of several ranks that keep tensors of all kinds."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from tensor_kinds_parts import Eight, Scaled, kinds, same, zeros_like
from tiny_training import Classifier, trainer

from composerlite import Callback
from composerlite.errors import ConfigError

SENDABLE = ("bool", "uint8", "bfloat16", "no dimensions", "empty", "columns", "transposed", "complex")


def sendable(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t for name, t in tensors.items() if name in SENDABLE}


class WithAll(Classifier):
    """Has a buffer of every kind that torch can send to other ranks."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(7)
        for name, tensor in sendable(tensors).items():
            self.register_buffer("kind_" + name.replace(" ", "_"), tensor)


class KeepsAll(Callback):
    """Has all kinds, by themselves and in tuples."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.kept: Any = {"by name": tensors, "inside": tuple(tensors.values())}

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict


def save_and_resume(folder: Path) -> list[str]:
    """The names of those that are others after a resume."""
    warnings.simplefilter("ignore")
    expected = kinds()
    how: dict[str, Any] = {"parallelism_config": {"fsdp": {}}, "autoresume": True}
    how |= {"save_folder": folder, "save_interval": "1ba"}
    with torch.serialization.safe_globals([Scaled]):
        with trainer(model=WithAll(kinds()), callbacks=[KeepsAll(kinds())], max_duration="1ep", **how) as run:
            run.fit()
        others = [{name: zeros_like(tensor) for name, tensor in expected.items()} for _ in range(2)]
        with trainer(model=WithAll(others[0]), callbacks=[KeepsAll(others[1])], max_duration="2ep", **how) as run:
            kept = next(callback for callback in run.state.callbacks if isinstance(callback, KeepsAll)).kept
            buffers = dict(run.state.model.named_buffers())
            wrong = [
                f"buffer {n}"
                for n, t in sendable(expected).items()
                if not same(buffers["kind_" + n.replace(" ", "_")], t)
            ]
            wrong += [f"kept {name}" for name, tensor in expected.items() if not same(kept["by name"][name], tensor)]
            inside = zip(expected.items(), kept["inside"], strict=True)
            wrong += [f"inside {name}" for (name, tensor), found in inside if not same(found, tensor)]
            run.fit()
    return wrong


def eight_bits_sharded(folder: Path) -> str:
    """What is said where an optimizer of eight bits has shards."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = Classifier(8)
    with (
        torch.serialization.safe_globals([Scaled]),
        trainer(
            model=model,
            optimizers=Eight(model.parameters(), lr=0.05),
            parallelism_config={"fsdp": {}},
            save_folder=folder,
            save_interval="100ba",
        ) as run,
    ):
        try:
            run.fit()
        except ConfigError as e:
            return str(e)
    return "nothing"
