"""Objects to save and load with a :class:`Checkpointer`: a model, a model with an optimizer, or a train module."""

from __future__ import annotations

from typing import Any, Protocol, cast, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from composerlite.checkpoint.api.state_dict import model_and_optim_state
from composerlite.errors import ConfigError
from composerlite.types import StateDict


@runtime_checkable
class TrainModule(Protocol):
    """An object with functions for saving and loading, for several models and optimizers, for example.

    A method ``state_dict_to_load(metadata, *, optim)``, if there is one, returns the state to fill from a checkpoint
    with the index ``metadata``.
    """

    def state_dict_to_save(self) -> StateDict:
        """Return the state to save: ``{'model': …, 'optim': …}``. Tensors may be sharded."""
        ...

    def load_state_dict(self, state_dict: StateDict, /) -> object:
        """Restore the loaded state: the same keys, without ``'optim'`` if the optimizer is not loaded."""
        ...


TrainModuleLike = TrainModule | nn.Module | tuple[nn.Module, Optimizer | None]
"""A train module, a model, or a model and an optimizer."""


def model_and_optimizer(module: object) -> tuple[nn.Module, Optimizer | None]:
    """Return the model and the optimizer of ``module``, if ``module`` is no :class:`TrainModule`.

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
