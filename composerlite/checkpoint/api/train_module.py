"""Objects to save and load with a :class:`Checkpointer`: a model, a model with its optimizer, or a train module."""

from __future__ import annotations

from typing import Any, Protocol, cast, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from composerlite.checkpoint.api.state_dict import model_and_optim_state
from composerlite.checkpoint.load import sharded
from composerlite.errors import ConfigError
from composerlite.types import StateDict

__all__ = [
    "ChoosesWhatToLoad",
    "TrainModule",
    "TrainModuleLike",
    "model_and_optimizer",
    "state_to_load",
    "state_to_save",
]


@runtime_checkable
class TrainModule(Protocol):
    """An object with its own functions for saving and loading, for several models and optimizers, for example."""

    def state_dict_to_save(self) -> StateDict:
        """Return the state to save: ``{'model': …, 'optim': …}``. Tensors may be sharded."""
        ...

    def load_state_dict(self, state_dict: StateDict, /) -> object:
        """Restore the loaded state: the same keys, without ``'optim'`` if the optimizer is not loaded."""
        ...


@runtime_checkable
class ChoosesWhatToLoad(Protocol):
    """A :class:`TrainModule` that selects the state to load by the index of the checkpoint."""

    def state_dict_to_load(self, metadata: sharded.Metadata, /, *, optim: bool | None = None) -> StateDict:
        """Return the state to fill from a checkpoint with the index ``metadata``."""
        ...


TrainModuleLike = TrainModule | nn.Module | tuple[nn.Module, Optimizer | None]
"""A train module, a model, or a model and its optimizer."""


def model_and_optimizer(module: object) -> tuple[nn.Module, Optimizer | None]:
    """Return the model and the optimizer of ``module``, unless that is a :class:`TrainModule`.

    Raises:
        ConfigError: ``module`` is neither a model nor a model and an optimizer.
    """
    pair = cast("tuple[Any, ...]", module) if isinstance(module, tuple) else (module, None)
    if (
        len(pair) != 2
        or not isinstance(pair[0], nn.Module)
        or not (pair[1] is None or hasattr(pair[1], "param_groups"))
    ):
        kinds = ", ".join(type(one).__name__ for one in pair)
        shown = f"({kinds})" if isinstance(module, tuple) else type(module).__name__
        raise ConfigError(
            f"train_module is {shown}: expected a model, (model, optimizer), or an object with state_dict_to_save() "
            "and load_state_dict(), which may save several models and optimizers."
        )
    return pair[0], pair[1]


def state_to_save(module: TrainModuleLike) -> StateDict:
    """Return the state of ``module`` to save, below ``model`` and ``optim``."""
    if isinstance(module, TrainModule):
        return module.state_dict_to_save()
    return model_and_optim_state(*model_and_optimizer(module), flatten=False)


def state_to_load(module: TrainModule, metadata: sharded.Metadata, optim: bool | None, wants_optim: bool) -> StateDict:
    """Return the state of ``module`` to fill from a checkpoint with the index ``metadata``.

    Args:
        module: to load into.
        metadata: of the checkpoint.
        optim: the user's ``load_optim_state``.
        wants_optim: whether the optimizer is loaded, from ``optim`` and the checkpoint.
    """
    if isinstance(module, ChoosesWhatToLoad):
        return module.state_dict_to_load(metadata, optim=optim)
    state = dict(module.state_dict_to_save())
    if not wants_optim:
        state.pop("optim", None)
    return state
