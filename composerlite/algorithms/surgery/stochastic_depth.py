"""StochasticDepth: leave residual blocks out at random while training."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from composerlite.core import Algorithm, Event, Logger, State, Time, TimeUnit, read_time, span
from composerlite.errors import ConfigError, checked_arguments, did_you_mean

log = logging.getLogger(__name__)

_CONVOLUTIONS = {"ResNetBottleneck": ("Bottleneck", 3), "ResNetBasicBlock": ("BasicBlock", 2)}
_METHODS = ("block", "sample")
_DISTRIBUTIONS = ("linear", "uniform")


def apply_stochastic_depth(
    model: nn.Module,
    target_layer_name: str,
    stochastic_method: str = "block",
    drop_rate: float = 0.2,
    drop_distribution: str = "linear",
) -> nn.Module:
    """Skip residual blocks of ``model`` at random (`Huang et al. 2016 <https://arxiv.org/abs/1603.09382>`_).

    While training, ``x + f(x)`` is ``x`` with the block's drop rate; in evaluation it is ``x + (1 - rate) f(x)``. Names
    and parameters stay.

    Args:
        model: with residual blocks whose parts are called as torchvision calls them: ``conv1``, ``bn1``, …, ``relu``,
            ``downsample``.
        target_layer_name: ``'ResNetBottleneck'`` or ``'ResNetBasicBlock'``: blocks of the class ``Bottleneck`` or
            ``BasicBlock``.
        stochastic_method: ``'block'`` leaves a block out for all samples of a microbatch, and does not compute it;
            ``'sample'`` draws for every sample.
        drop_rate: from 0 to 1, of the last block.
        drop_distribution: ``'linear'`` grows from the first block to the last, ``'uniform'`` is the same for all.

    Returns:
        ``model``.

    Raises:
        ConfigError: values that mean nothing.
    """
    _check("apply_stochastic_depth", target_layer_name, stochastic_method, drop_rate, drop_distribution)
    blocks = _blocks(model, target_layer_name)
    for block in blocks:
        # A partial, not a method of a class made here: it can be copied and pickled with the model.
        block.forward = functools.partial(_forward, block, by_sample=stochastic_method == "sample")
    _set_rates(blocks, drop_rate, drop_distribution)
    return model


@final
class StochasticDepth(Algorithm):
    """Leaves residual blocks out at random while training (`Huang et al. 2016 <https://arxiv.org/abs/1603.09382>`_).

    Applied when the trainer is built. A model that was trained so evaluates with the blocks weighted by the
    probability that they are there: loading its checkpoint applies the algorithm first if it has to. Whole models on
    several ranks average their gradients with ``'forced_sync'`` by default, since a rank may leave out what another
    computes; for models that are sharded over ranks there is ``stochastic_method='sample'`` only.

    Args:
        target_layer_name: ``'ResNetBottleneck'`` or ``'ResNetBasicBlock'``, with parts called as in torchvision.
        stochastic_method: ``'block'`` leaves a block out for all samples of a microbatch, and does not compute it;
            ``'sample'`` draws for every sample.
        drop_rate: from 0 to 1, of the last block.
        drop_distribution: ``'linear'`` grows from the first block to the last, ``'uniform'`` is the same for all.
        drop_warmup: the rate grows linearly from 0 on over this time; a number is a part of training.

    Raises:
        ConfigError: values that mean nothing.
    """

    @checked_arguments
    def __init__(
        self,
        target_layer_name: str,
        stochastic_method: str = "block",
        drop_rate: float = 0.2,
        drop_distribution: str = "linear",
        drop_warmup: float | Time | str = 0.0,
    ) -> None:
        _check("StochasticDepth", target_layer_name, stochastic_method, drop_rate, drop_distribution)
        self.target_layer_name = target_layer_name
        self.stochastic_method = stochastic_method
        self.drop_rate = drop_rate
        self.drop_distribution = drop_distribution
        if isinstance(drop_warmup, int | float):
            drop_warmup = Time(float(drop_warmup), TimeUnit.DURATION)
        self.drop_warmup = read_time("drop_warmup", drop_warmup)

    @staticmethod
    def required_on_load() -> bool:
        """Yes: a block counts less in evaluation."""
        return True

    @property
    def find_unused_parameters(self) -> bool:
        """True where a block may be left out for all samples."""
        return self.stochastic_method == "block"

    def config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {**self._arguments(), "drop_warmup": str(self.drop_warmup)}

    def match(self, event: Event, state: State) -> bool:
        """Return true at ``INIT``, and with a warmup when a batch begins."""
        return event is Event.INIT or (event is Event.BATCH_START and bool(self.drop_warmup.value))

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Change the blocks, or their rates.

        Raises:
            ConfigError: the model is sharded over ranks, which all need to compute every block.
        """
        blocks = _blocks(state.model, self.target_layer_name)
        if event is Event.BATCH_START:
            rate = self.drop_rate * span(self.drop_warmup, state).fraction
            _set_rates(blocks, rate, self.drop_distribution)
            logger.log_metrics({"stochastic_depth/drop_rate": rate})
            return
        if self.stochastic_method == "block" and (state.parallelism is not None or state.deepspeed_enabled):
            raise ConfigError(
                "StochasticDepth(stochastic_method='block'): the model is sharded over ranks, which all need "
                "each other in every block. Pass stochastic_method='sample'."
            )
        if not blocks:
            log.warning("%r changes nothing: the model has no block of that kind", self)
        apply_stochastic_depth(
            state.model, self.target_layer_name, self.stochastic_method, self.drop_rate, self.drop_distribution
        )
        logger.log_hyperparameters({"stochastic_depth/num_stochastic_layers": len(blocks)})


def _forward(block: Any, x: Tensor, *, by_sample: bool) -> Tensor:
    shortcut = x if block.downsample is None else block.downsample(x)
    keep = 1.0 - float(block.drop_rate)
    if not block.training:
        return block.relu(_residual(block, x) * keep + shortcut)
    if by_sample:
        kept = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device) < keep
        return block.relu(_residual(block, x) * kept.to(x.dtype) + shortcut)
    if float(torch.rand(())) < keep:
        return block.relu(_residual(block, x) + shortcut)
    return block.relu(shortcut + 0)  # a copy: relu may work in place, and the shortcut may be the input of others


def _residual(block: Any, x: Tensor) -> Tensor:
    """Residual branch of ``block``: its convolutions, each with its norm, and ``relu`` between them."""
    count = next(count for name, count in _CONVOLUTIONS.values() if name == type(block).__name__)
    for number in range(1, count + 1):
        x = getattr(block, f"bn{number}")(getattr(block, f"conv{number}")(x))
        if number < count:
            x = block.relu(x)
    return x


def _blocks(model: nn.Module, target_layer_name: str) -> list[nn.Module]:
    name, count = _CONVOLUTIONS[target_layer_name]
    parts = ["relu", "downsample", *(f"{part}{n}" for n in range(1, count + 1) for part in ("conv", "bn"))]
    return [m for m in model.modules() if type(m).__name__ == name and all(hasattr(m, part) for part in parts)]


def _set_rates(blocks: Sequence[nn.Module], rate: float, distribution: str) -> None:
    for number, block in enumerate(blocks, 1):
        share = number / len(blocks) if distribution == "linear" else 1.0
        vars(block)["drop_rate"] = rate * share


def _check(owner: str, target: str, method: str, rate: float, distribution: str) -> None:
    for name, value, known in (
        ("target_layer_name", target, list(_CONVOLUTIONS)),
        ("stochastic_method", method, _METHODS),
        ("drop_distribution", distribution, _DISTRIBUTIONS),
    ):
        if value not in known:
            raise ConfigError(f"{owner}({name}={value!r}) does not exist.{did_you_mean(value, known)}")
    if not 0 <= rate <= 1:
        raise ConfigError(f"{owner}(drop_rate={rate}): expected a number from 0 to 1, such as 0.2.")
