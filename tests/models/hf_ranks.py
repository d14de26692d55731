"""What each of several ranks does in the tests of models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models.hf_parts import causal_model, lora, tokenizer, trainer_of
from torch.distributed.tensor import DTensor

from composerlite.models import HuggingFaceModel


def train_sharded(folder: Path, kind: str, with_adapters: bool, max_duration: str = "2ep") -> dict[str, Any]:
    """Train with FSDP, from the newest checkpoint on: the weights in the end."""
    model = HuggingFaceModel(causal_model(kind), tokenizer(), peft_config=lora() if with_adapters else None)
    settings = {"parallelism_config": {"fsdp": {}}, "save_interval": "3ba", "autoresume": True}
    with trainer_of(model, folder, max_duration=max_duration, **settings) as trainer:
        trainer.fit()
    weights = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in model.state_dict().items()}
    return {name: tensor.detach().numpy().copy() for name, tensor in weights.items()}


def generated() -> str:
    """What a model that is spread over ranks says to being asked for text."""
    model = HuggingFaceModel(causal_model(), tokenizer())
    with trainer_of(model, None, parallelism_config={"fsdp": {}}):
        try:
            model.generate(torch.ones(1, 2, dtype=torch.int64))
        except RuntimeError as e:
            return str(e)
    return "no error"


def train_with_cache(kind: str, fsdp: dict[str, Any]) -> dict[str, Any]:
    """Train a model with ``use_cache=True``; the weights."""
    model = causal_model(kind)
    model.config.use_cache = True
    with trainer_of(HuggingFaceModel(model, tokenizer()), None, parallelism_config={"fsdp": fsdp}) as trainer:
        trainer.fit()
    assert model.config.use_cache
    return {name: t.full_tensor().detach().numpy().copy() for name, t in model.state_dict().items()}
