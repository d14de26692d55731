"""Losses for class numbers or probabilities, and checks of the kind of targets."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from composerlite.errors import ConfigError
from composerlite.models.classifier import soft_cross_entropy


def check_for_index_targets(targets: Tensor) -> bool:
    """Return true if ``targets`` are class numbers: integers."""
    return not (targets.is_floating_point() or targets.is_complex())


def infer_target_type(input: Tensor, targets: Tensor) -> str:  # noqa: A002 - the name that torch's losses have
    """Return ``'indices'`` for class numbers, and ``'one_hot'`` for targets with the shape of ``input``.

    Args:
        input: logits of shape (N, C, …).
        targets: class numbers of shape (N, …), or probabilities of shape (N, C, …).

    Returns:
        ``'indices'`` or ``'one_hot'``.

    Raises:
        ConfigError: the shapes match neither kind.
    """
    if input.shape == targets.shape:
        return "one_hot"
    if input.dim() == targets.dim() + 1 and input.shape[0] == targets.shape[0]:
        return "indices"
    raise ConfigError(
        f"targets of shape {tuple(targets.shape)} do not fit logits of shape {tuple(input.shape)}: expected class "
        "numbers (N, …) or probabilities (N, C, …)."
    )


def ensure_targets_one_hot(input: Tensor, targets: Tensor, num_classes: float | None = None) -> Tensor:  # noqa: A002
    """Return ``targets`` as probabilities of shape (N, C, …). A class number below 0 becomes zeros.

    Args:
        input: logits of shape (N, C, …).
        targets: class numbers of shape (N, …), or probabilities of shape (N, C, …).
        num_classes: C; by default the number of classes in ``input``.

    Returns:
        Probabilities of shape (N, C, …).
    """
    if infer_target_type(input, targets) == "indices":
        classes = input.shape[1] if num_classes is None else int(num_classes)
        known = targets >= 0
        one_hot = F.one_hot(targets.clamp(min=0).long(), classes).movedim(-1, 1)
        targets = one_hot * known.unsqueeze(1)
    return targets.float()


def binary_cross_entropy_with_logits(
    input: Tensor,  # noqa: A002 - the name that torch's losses have
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "sum",
    pos_weight: Tensor | None = None,
    scale_by_batch_size: bool | None = True,
) -> Tensor:
    """Return the binary cross entropy of each class, summed and divided by the number of samples.

    Args:
        input: logits of shape (N, C, …).
        target: class numbers of shape (N, …), or probabilities of shape (N, C, …).
        weight: weight of each class.
        pos_weight: weight of positive targets of each class.
        reduction: ``'sum'``, ``'mean'`` or ``'none'``, before the division.
        scale_by_batch_size: divide by N.

    Returns:
        A scalar, or with ``reduction='none'`` a tensor of the shape of ``input``.
    """
    target = ensure_targets_one_hot(input, target)
    loss = F.binary_cross_entropy_with_logits(input, target, weight, reduction=reduction, pos_weight=pos_weight)
    return loss / input.shape[0] if scale_by_batch_size else loss


loss_registry: dict[str, Callable[..., Tensor]] = {
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
    "soft_cross_entropy": soft_cross_entropy,
}
"""Losses by name."""
