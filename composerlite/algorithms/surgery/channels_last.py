"""ChannelsLast: keep the weights of convolutions in the order of memory that tensor cores want."""

from __future__ import annotations

from typing import final

import torch
from torch import nn

from composerlite.core import Algorithm, Event, Logger, State


def apply_channels_last(model: nn.Module) -> nn.Module:
    """Convert the four-dimensional weights of ``model`` to the memory format channels-last, in place.

    Activations take the format of the weights: `memory format
    <https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html>`_. Names, shapes and numbers stay.

    Returns:
        ``model``.
    """
    return model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] - torch's stub lacks it


@final
class ChannelsLast(Algorithm):
    """Converts the model's weights to the memory format channels-last, when the trainer is built.

    Convolutions on GPUs are then faster, in mixed precision above all (`PyTorch's tutorial
    <https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html>`_). Checkpoints fit models with and
    without it.
    """

    def match(self, event: Event, state: State) -> bool:
        """Return true at ``INIT``."""
        return event is Event.INIT

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Change the order of memory."""
        apply_channels_last(state.model)
