"""DeepSpeed's configuration: the user's keys, and the keys that follow from the trainer's arguments."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composerlite.algorithms import EMA, SWA, GradientClipping
from composerlite.core import Precision, State
from composerlite.errors import ConfigError

__all__ = ["check_config", "engine_config", "read_config"]

_STAGES = (1, 2, 3)
_ARGUMENTS = {
    "optimizer": "optimizers",
    "scheduler": "schedulers",
    "amp": "precision",
    "torch_autocast": "precision",
}
"""Keys of DeepSpeed that the trainer has an argument for."""


def read_config(value: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Return a copy of DeepSpeed's configuration.

    Args:
        value: configuration, or the path of a JSON file.

    Raises:
        ConfigError: the configuration cannot be read, has no ZeRO stage, or has a key that the trainer does not allow.
    """
    given: Any = value
    if isinstance(value, str | Path):
        try:
            given = json.loads(Path(value).read_text())
        except FileNotFoundError as e:
            raise ConfigError(f"deepspeed_config={str(value)!r}: no such file. Give a dict, or a JSON file.") from e
        except (OSError, ValueError) as e:
            raise ConfigError(f"deepspeed_config={str(value)!r} cannot be read as JSON: {e}") from e
    if not isinstance(given, Mapping):
        raise ConfigError(f"deepspeed_config={value!r}: expected a dict, or the path of a JSON file with a dict.")
    config: dict[str, Any] = copy.deepcopy(dict(given))  # pyright: ignore[reportUnknownArgumentType]
    zero: Any = config.get("zero_optimization", {})
    stage = zero.get("stage") if isinstance(zero, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if isinstance(stage, bool) or stage not in _STAGES:
        raise ConfigError(
            f"deepspeed_config['zero_optimization']={zero!r}: expected {{'stage': 1}}, 2 or 3. Without ZeRO nothing is "
            "sharded: leave deepspeed_config out to train a replica on each rank."
        )
    for key, argument in _ARGUMENTS.items():
        section: Any = config.pop(key, None)
        if section and not (isinstance(section, dict) and section.get("enabled") is False):  # pyright: ignore[reportUnknownMemberType]
            raise ConfigError(
                f"deepspeed_config[{key!r}]={section!r} contradicts the trainer's argument: leave this key out, and "
                f"pass {argument}=… to the Trainer."
            )
    for key in ("offload_optimizer", "offload_param"):
        target: Any = zero.get(key)  # pyright: ignore[reportUnknownMemberType]
        if isinstance(target, dict) and target.get("device") == "nvme":  # pyright: ignore[reportUnknownMemberType]
            raise ConfigError(
                f"deepspeed_config['zero_optimization'][{key!r}]={target!r}: checkpoints do not include values on "
                "another disk. Use {'device': 'cpu'}."
            )
    return config


def engine_config(given: Mapping[str, Any], state: State, batch_size: int | None) -> dict[str, Any]:
    """Return the complete configuration of DeepSpeed's engine.

    Args:
        given: result of :func:`read_config`.
        state: training state.
        batch_size: samples per batch and rank; ``None`` if unknown.

    Raises:
        ConfigError: ``given`` contradicts the trainer's arguments.
    """
    check_config(given, state, batch_size)
    config = copy.deepcopy(dict(given))
    config.pop("train_batch_size", None)
    derived = _derived(state, batch_size)
    config["train_micro_batch_size_per_gpu"] = derived["train_micro_batch_size_per_gpu"][0] or 1
    config["gradient_accumulation_steps"] = derived["gradient_accumulation_steps"][0] or 2
    for section in ("bf16", "fp16"):
        config[section] = {**(config.get(section) or {}), "enabled": derived[f"{section}.enabled"][0]}
    clipping = derived["gradient_clipping"][0]
    if clipping is None and config.get("gradient_clipping") in (None, "auto"):
        clipping = 0.0
    if clipping is not None:
        config["gradient_clipping"] = clipping
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    config.setdefault("steps_per_print", None)
    return config


def check_config(given: Mapping[str, Any], state: State, batch_size: int | None) -> None:
    """Compare ``given`` with the values that follow from the trainer's arguments.

    Args:
        given: result of :func:`read_config`.
        state: training state.
        batch_size: samples per batch and rank; ``None`` if unknown.

    Raises:
        ConfigError: a value differs, or an algorithm does not work with DeepSpeed.
    """
    for algorithm in state.algorithms:
        if isinstance(algorithm, GradientClipping) and algorithm.clipping_type != "norm":
            raise ConfigError(f"{algorithm!r}: with DeepSpeed gradients are clipped by their norm: use 'norm'.")
        if given["zero_optimization"]["stage"] == 3 and isinstance(algorithm, EMA | SWA):
            raise ConfigError(
                f"{algorithm!r} averages weights, and with DeepSpeed's ZeRO stage 3 no rank has all weights: use stage "
                "1 or 2."
            )
    for key, (value, source) in _derived(state, batch_size).items():
        section, _, name = key.rpartition(".")
        own = ((given.get(section) or {}) if section else given).get(name)
        if own not in (None, "auto") and value is not None and own != value:
            raise ConfigError(
                f"deepspeed_config: {key}={own!r} contradicts {value!r}, which follows from {source}. Leave {key} out."
            )


def _derived(state: State, batch_size: int | None) -> dict[str, tuple[Any, str]]:
    """Return the values that follow from the trainer's arguments, by DeepSpeed's key, each with the arguments' names.

    A value is ``None`` if unknown.
    """
    micro = state.device_train_microbatch_size
    pieces = 1 if micro is None else None
    if batch_size is not None:
        micro = batch_size if micro is None else min(micro, batch_size)
        pieces = -(-batch_size // micro)
    clipping = [a.clipping_threshold for a in state.algorithms if isinstance(a, GradientClipping)]
    precision = f"precision={state.precision.value!r}"
    return {
        "train_micro_batch_size_per_gpu": (micro, "device_train_microbatch_size or the loader's batch_size"),
        "gradient_accumulation_steps": (pieces, "the loader's batch_size / device_train_microbatch_size"),
        "train_batch_size": (
            None if batch_size is None else batch_size * state.world_size,
            f"the loader's batch_size × {state.world_size} ranks",
        ),
        "gradient_clipping": (float(clipping[-1]) if clipping else None, "GradientClipping"),
        "bf16.enabled": (state.precision is Precision.AMP_BF16, precision),
        "fp16.enabled": (state.precision is Precision.AMP_FP16, precision),
    }
