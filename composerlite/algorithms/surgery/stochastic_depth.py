"""StochasticDepth: skip residual blocks at random in training."""

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

    In training, ``x + f(x)`` becomes ``x`` with the probability ``rate`` of the block; in evaluation
    ``x + (1 - rate) f(x)``. Names and parameters do not change.

    Args:
        model: a model with residual blocks, with the names of torchvision: ``conv1``, ``bn1``, …, ``relu``,
            ``downsample``.
        target_layer_name: ``'ResNetBottleneck'`` or ``'ResNetBasicBlock'``: blocks of the class ``Bottleneck`` or
            ``BasicBlock``.
        stochastic_method: ``'block'`` skips the computation of a block for all samples of a microbatch; ``'sample'``
            draws for each sample.
        drop_rate: rate of the last block, from 0 to 1.
        drop_distribution: ``'linear'`` grows from the first block to the last, ``'uniform'`` is equal for all blocks.

    Returns:
        ``model``.

    Raises:
        ConfigError: an argument is unknown or out of range.
    """
    _check("apply_stochastic_depth", target_layer_name, stochastic_method, drop_rate, drop_distribution)
    blocks = _blocks(model, target_layer_name)
    for block in blocks:
        # A partial of a module function can be copied and pickled with the model.
        block.forward = functools.partial(_forward, block, by_sample=stochastic_method == "sample")
    _set_rates(blocks, drop_rate, drop_distribution)
    return model


@final
class StochasticDepth(Algorithm):
    """Skips residual blocks at random in training (`Huang et al. 2016 <https://arxiv.org/abs/1603.09382>`_).

    The model is changed at the construction of the trainer. In evaluation, blocks are weighted by the probability of
    training; loading a checkpoint saved with StochasticDepth applies StochasticDepth first if necessary. On several
    ranks, gradients are averaged with ``'forced_sync'`` by default, since ranks skip different blocks. Models sharded
    over ranks need ``stochastic_method='sample'``.

    Args:
        target_layer_name: ``'ResNetBottleneck'`` or ``'ResNetBasicBlock'``, with the names of torchvision.
        stochastic_method: ``'block'`` skips the computation of a block for all samples of a microbatch; ``'sample'``
            draws for each sample.
        drop_rate: rate of the last block, from 0 to 1.
        drop_distribution: ``'linear'`` grows from the first block to the last, ``'uniform'`` is equal for all blocks.
        drop_warmup: time in which the rate grows linearly from 0; a number is a fraction of training.

    Raises:
        ConfigError: an argument is unknown or out of range.
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
        """Return true: blocks are weighted in evaluation."""
        return True

    @property
    def find_unused_parameters(self) -> bool:
        """True if a block may be skipped for all samples."""
        return self.stochastic_method == "block"

    def config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {**self._arguments(), "drop_warmup": str(self.drop_warmup)}

    def match(self, event: Event, state: State) -> bool:
        """Return true at ``INIT``, and with a warmup at ``BATCH_START``."""
        return event is Event.INIT or (event is Event.BATCH_START and bool(self.drop_warmup.value))

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Change the blocks or their rates.

        Raises:
            ConfigError: the model is sharded over ranks, and the method is ``'block'``.
        """
        blocks = _blocks(state.model, self.target_layer_name)
        if event is Event.BATCH_START:
            rate = self.drop_rate * span(self.drop_warmup, state).fraction
            _set_rates(blocks, rate, self.drop_distribution)
            logger.log_metrics({"stochastic_depth/drop_rate": rate})
            return
        if self.stochastic_method == "block" and (state.parallelism is not None or state.deepspeed_enabled):
            raise ConfigError(
                "StochasticDepth(stochastic_method='block') does not support models sharded over ranks. Pass "
                "stochastic_method='sample'."
            )
        if not blocks:
            log.warning("%r has no effect: the model has no such blocks", self)
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
    return block.relu(shortcut + 0)  # a copy: relu may work in place, and the shortcut may be used elsewhere


def _residual(block: Any, x: Tensor) -> Tensor:
    """Compute the residual branch of ``block``: convolutions with norms, and ``relu`` between."""
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
            raise ConfigError(f"{owner}({name}={value!r}) is unknown.{did_you_mean(value, known)}")
    if not 0 <= rate <= 1:
        raise ConfigError(f"{owner}(drop_rate={rate}): expected a number from 0 to 1, such as 0.2.")
