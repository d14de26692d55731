"""What loggers to services share: packages that may be missing, values as services take them, how a run ends."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from composerlite.errors import ConfigError
from composerlite.loggers.values import plain, to_json

__all__ = ["exit_code", "json_of", "need_package", "pictures", "scalars"]


def need_package(package: str, *, who: str, extra: str) -> None:
    """See that ``package`` is installed, without importing it.

    Raises:
        ConfigError: it is not.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # a folder of that name in the current one is found as well
        raise ConfigError(
            f"{who} needs the package {package}, which is not installed: pip install 'composerlite[{extra}]'"
        )


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those of ``metrics`` that are numbers."""
    values = {name: plain(value) for name, value in metrics.items()}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def json_of(value: Any) -> Any:
    """``value`` as JSON has it: dicts, lists, numbers and strings; of other things their text."""
    return json.loads(to_json(value))


def pictures(images: Any, *, channels_last: bool) -> list[npt.NDArray[Any]]:
    """A batch of images, or one, as arrays of shape (H, W, C) or (H, W)."""
    array = images.detach().cpu() if isinstance(images, torch.Tensor) else np.asarray(images)
    if isinstance(array, torch.Tensor):
        array = (array.float() if array.dtype == torch.bfloat16 else array).numpy()
    if array.ndim not in (2, 3, 4):
        raise ConfigError(f"log_images: the shape is {array.shape}: want (N, C, H, W), or (N, H, W, C).")
    if array.ndim == 2:
        return [array]
    batch = array[None] if array.ndim == 3 else array
    if not channels_last:
        batch = batch.transpose(0, 2, 3, 1)
    return [image[..., 0] if image.shape[-1] == 1 else image for image in batch]


def exit_code(*, training: bool) -> int:
    """How the process of a run that closes now is about to end: 0, 1 after an error, or the code of its ``SystemExit``.

    Args:
        training: ``fit`` began and did not come to its end. That is an error also where nobody handles it any more.
    """
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):  # a run that is asked to end ends with 128 and the number of the signal
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return int(training or error is not None)
