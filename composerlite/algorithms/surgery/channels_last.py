"""ChannelsLast: store the weights of convolutions in the memory format of tensor cores."""

from __future__ import annotations

from typing import final

import torch
from torch import nn

from composerlite.core import Algorithm, Event, Logger, State


def apply_channels_last(model: nn.Module) -> nn.Module:
    """Convert the four-dimensional weights of ``model`` to the memory format channels-last, in place.

    Activations follow the `memory format
    <https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html>`_ of the weights. Names, shapes and
    values do not change.

    Returns:
        ``model``.
    """
    return model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] - missing in the stub of torch


@final
class ChannelsLast(Algorithm):
    """Converts the weights of the model to the memory format channels-last, at the construction of the trainer.

    Convolutions on GPUs become faster, mainly in mixed precision (`PyTorch's tutorial
    <https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html>`_). Checkpoints fit models with and
    without this algorithm.
    """

    def match(self, event: Event, state: State) -> bool:
        """Return true at ``INIT``."""
        return event is Event.INIT

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Convert the weights."""
        apply_channels_last(state.model)
