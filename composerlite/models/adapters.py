"""Weights of adapters in a model of PEFT, and their names in PEFT's own files."""

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
"""So many numbers of each frozen weight tell one base model from another."""


@final
@dataclass(frozen=True)
class Adapters:
    """The adapters of a model, by what is saved of them.

    Attributes:
        name: of the one that is trained.
        kept: names of weights in the model's state dict that are not those of the frozen base.
        files: of the adapter ``name``: its weights' names in PEFT's own files, by those in the state dict.
        base_shapes: shapes of the frozen weights, by name.
        base_digest: of samples of the frozen weights; ``None`` where they have no numbers yet.
        config: of the adapter, as JSON has it.
        class_name: of the model with adapters.
    """

    name: str
    kept: frozenset[str]
    files: Mapping[str, str]
    base_shapes: Mapping[str, tuple[int, ...]]
    base_digest: str | None
    config: StateDict
    class_name: str

    def record(self) -> StateDict:
        """Record of the adapters in a checkpoint, beside their weights."""
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
        """Differences in shape between the base model and the one that was ``saved`` with :meth:`record`."""
        shapes = saved.get("base_shapes") or {}
        own = {name: tuple(shape) for name, shape in self.base_shapes.items()}
        then = {str(name): tuple(shape) for name, shape in shapes.items()}
        if not then:
            return []
        other = [f"{n}: {then[n]} then, {own[n]} now" for n in then if n in own and then[n] != own[n]]
        gone = [f"{name}: {then[name]} then, not there now" for name in then if name not in own]
        return other + gone + [f"{name}: not there then, {own[name]} now" for name in own if name not in then]

    def is_other_base(self, saved: StateDict) -> bool:
        """Return true if the numbers of the base model are known to be others than those then."""
        then = saved.get("base_digest")
        return then is not None and self.base_digest is not None and then != self.base_digest


def with_adapters(model: nn.Module, config: Any) -> nn.Module:
    """``model`` with new adapters as ``config`` of PEFT says.

    Raises:
        ConfigError: it has adapters already, or PEFT is not installed.
    """
    peft = library("peft", wanted_by="HuggingFaceModel(peft_config=…)")
    if isinstance(model, peft.PeftModel):
        raise ConfigError(
            f"HuggingFaceModel: model is a {type(model).__name__} and has adapters: leave peft_config out, or pass "
            "the model without them."
        )
    return peft.get_peft_model(model, config)


def adapters_of(model: Any, *, with_embeddings: bool) -> Adapters:
    """The adapters of a model of PEFT.

    Args:
        model: of PEFT.
        with_embeddings: the embeddings have rows of their own, and belong to what is saved of the adapters.

    Raises:
        ConfigError: what is learned are no weights of layers but the input.
    """
    peft = library("peft", wanted_by="HuggingFaceModel")
    active = model.active_adapter
    name = active if isinstance(active, str) else active[0]
    config = model.peft_config[name]
    if config.is_prompt_learning:
        raise ConfigError(
            f"HuggingFaceModel: {config.peft_type.value} learns a part of the input and no weights of layers, which "
            "cannot be saved and loaded here. Take adapters of layers, as LoraConfig."
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
    """PEFT picks from a state dict and renames what it picks: by the tensors themselves it is seen what became what."""
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
        some = flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES]
        digest.update(f"{name} {tensor.dtype} {some.tolist()}".encode())
    return digest.hexdigest()


def _as_json(content: StateDict) -> StateDict:
    """Plain values; sets in an order that is the same in every process."""
    return json.loads(json.dumps(content, default=lambda value: sorted(value, key=str), sort_keys=True))
