"""Adapters of a PEFT model: their weights, their names in PEFT files, and the base model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import xxhash
from torch import Tensor, nn

from composerlite.errors import ConfigError
from composerlite.models.hf_record import library
from composerlite.types import StateDict

_SAMPLES = 16
"""Number of samples of each frozen weight in the digest of a base model."""


@final
@dataclass(frozen=True)
class Adapters:
    """The adapters of a model.

    Attributes:
        name: name of the trained adapter.
        kept: names of weights in the state dict of the model, without the frozen base.
        files: names of the weights of the trained adapter in PEFT files, by their names in the state dict.
        base_shapes: shapes of the frozen weights, by name.
        base_digest: digest of samples of the frozen weights; ``None`` for weights without values.
        config: config of the adapter, as plain values.
        class_name: class name of the model with adapters.
    """

    name: str
    kept: frozenset[str]
    files: Mapping[str, str]
    base_shapes: Mapping[str, tuple[int, ...]]
    base_digest: str | None
    config: StateDict
    class_name: str

    def record(self) -> StateDict:
        """Return the record of the adapters for checkpoints."""
        return {
            "file_extension": ".json",
            "content": self.config,
            "class": self.class_name,
            "adapter": self.name,
            "files": dict(self.files),
            "base_shapes": {name: list(shape) for name, shape in self.base_shapes.items()},
            "base_digest": self.base_digest,
        }

    def wrong_shapes(self, saved: StateDict) -> list[str]:
        """List differences in shape between the base model and the base model of the record ``saved``."""
        shapes = saved.get("base_shapes") or {}
        own = {name: tuple(shape) for name, shape in self.base_shapes.items()}
        then = {str(name): tuple(shape) for name, shape in shapes.items()}
        if not then:
            return []
        other = [f"{n}: {then[n]} then, {own[n]} now" for n in then if n in own and then[n] != own[n]]
        gone = [f"{name}: {then[name]} then, missing now" for name in then if name not in own]
        return other + gone + [f"{name}: missing then, {own[name]} now" for name in own if name not in then]

    def is_other_base(self, saved: StateDict) -> bool:
        """Return true if the base model of ``saved`` had other weights."""
        then = saved.get("base_digest")
        return then is not None and self.base_digest is not None and then != self.base_digest


def with_adapters(model: nn.Module, config: Any) -> nn.Module:
    """Return ``model`` with new adapters of the PEFT config ``config``.

    Raises:
        ConfigError: the model already has adapters, or PEFT is not installed.
    """
    peft = library("peft", wanted_by="HuggingFaceModel(peft_config=…)")
    if isinstance(model, peft.PeftModel):
        raise ConfigError(
            f"HuggingFaceModel: model is a {type(model).__name__} and already has adapters. Remove peft_config, or "
            "pass the model without adapters."
        )
    return peft.get_peft_model(model, config)


def adapters_of(model: Any, *, with_embeddings: bool) -> Adapters:
    """Describe the adapters of a PEFT model.

    Args:
        model: a PEFT model.
        with_embeddings: save the embeddings with the adapters, since they have new rows.

    Returns:
        The adapters.

    Raises:
        ConfigError: the adapters learn inputs (prompts) instead of weights of layers.
    """
    peft = library("peft", wanted_by="HuggingFaceModel")
    active = model.active_adapter
    name = active if isinstance(active, str) else active[0]
    config = model.peft_config[name]
    if config.is_prompt_learning:
        raise ConfigError(
            f"HuggingFaceModel: {config.peft_type.value} learns a part of the input, which cannot be saved here. Use "
            "adapters of layers, such as LoraConfig."
        )
    every = model.state_dict()
    named = {adapter: _names_in_files(peft, model, every, adapter, with_embeddings) for adapter in model.peft_config}
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    kept = frozenset(trained.union(*named.values()))
    base = {key: tensor for key, tensor in every.items() if key not in kept and isinstance(tensor, Tensor)}
    return Adapters(
        name=name,
        kept=kept,
        files=named[name],
        base_shapes={key: tuple(tensor.shape) for key, tensor in base.items()},
        base_digest=_digest(base),
        config=_as_json(config.to_dict()),
        class_name=f"{type(model).__module__}.{type(model).__qualname__}",
    )


def _names_in_files(
    peft: Any, model: nn.Module, every: StateDict, adapter: str, with_embeddings: bool
) -> dict[str, str]:
    """Return the names in PEFT files by names in the state dict. PEFT renames weights; tensors identify them."""
    picked = peft.get_peft_model_state_dict(
        model, state_dict=every, adapter_name=adapter, save_embedding_layers=with_embeddings
    )
    new_name = {id(tensor): key for key, tensor in picked.items()}
    return {key: new_name[id(tensor)] for key, tensor in every.items() if id(tensor) in new_name}


def _digest(tensors: Mapping[str, Tensor]) -> str | None:
    if any(tensor.is_meta for tensor in tensors.values()):
        return None
    digest = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        flat = tensor.detach().reshape(-1)
        samples = flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES]
        digest.update(f"{name} {tensor.dtype} {samples.tolist()}".encode())
    return digest.hexdigest()


def _as_json(content: StateDict) -> StateDict:
    """Return plain values. Sets are sorted, so that the order is the same in every process."""
    return json.loads(json.dumps(content, default=lambda value: sorted(value, key=str), sort_keys=True))
