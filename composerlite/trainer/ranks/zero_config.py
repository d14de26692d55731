"""DeepSpeed's configuration by the user, checked against what the trainer knows already."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from composerlite.algorithms import EMA, SWA, GradientClipping
from composerlite.core import Precision, State
from composerlite.errors import ConfigError

__all__ = ["check_batches", "engine_config", "read_config"]

DeepSpeedConfig = Mapping[str, Any] | str | Path
_STAGES = (1, 2, 3)
_OWN_SECTIONS = {
    "optimizer": "optimizers=…",
    "scheduler": "schedulers=…",
    "amp": "precision=…",
    "torch_autocast": "precision=…",
}
"""Sections of DeepSpeed's configuration for what the trainer has an argument of its own."""
_OTHER_RANKS = {
    "tensor_parallel": "autotp_size",
    "sequence_parallel_size": "",
    "pipeline": "",
    "hybrid_engine": "enabled",
}
"""Sections that make ranks share something else than the state of the optimizer, gradients and weights."""
_AUTO = "auto"


def read_config(value: DeepSpeedConfig | None) -> dict[str, Any] | None:
    """DeepSpeed's configuration as a dict of one's own: ``value``, or what the JSON file of that name holds.

    What does not depend on the rest of the run is checked.

    Raises:
        ConfigError: it cannot be read, or says what the trainer does not do with DeepSpeed.
    """
    if value is None:
        return None
    config = _read_file(Path(value)) if isinstance(value, str | Path) else value
    if not isinstance(config, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"deepspeed_config={value!r}: expected a dict, or the path of a JSON file that holds one.")
    config = copy.deepcopy(dict(config))
    zero = config.get("zero_optimization", {})
    stage: Any = cast("dict[str, Any]", zero).get("stage") if isinstance(zero, Mapping) else None
    if isinstance(stage, bool) or stage not in _STAGES:
        raise ConfigError(
            f"deepspeed_config['zero_optimization']={zero!r}: expected {{'stage': 1}}, 2 or 3. Without ZeRO nothing of "
            "the training is sharded over ranks: leave deepspeed_config out, and each rank has a replica."
        )
    for section, argument in _OWN_SECTIONS.items():
        if config.get(section) not in (None, {}) and not _is_off(config[section]):
            raise ConfigError(
                f"deepspeed_config[{section!r}]={config[section]!r} contradicts the trainer's own: leave it out, and "
                f"pass {argument} to the Trainer."
            )
        config.pop(section, None)
    for section, key in _OTHER_RANKS.items():
        given: Any = config.get(section)
        given = given.get(key) if key and isinstance(given, Mapping) else given  # pyright: ignore[reportUnknownVariableType]
        if given and given != 1:
            raise ConfigError(
                f"deepspeed_config[{section!r}]={config[section]!r}: the trainer uses DeepSpeed for ZeRO only."
            )
    for part in ("offload_optimizer", "offload_param"):
        target: Any = zero.get(part)
        if isinstance(target, Mapping) and target.get("device") == "nvme":  # pyright: ignore[reportUnknownMemberType]
            raise ConfigError(
                f"deepspeed_config['zero_optimization'][{part!r}]={target!r}: what is on another disk does not get "
                "into checkpoints. Use {'device': 'cpu'}."
            )
    return config


def engine_config(given: Mapping[str, Any], state: State, batch_size: int | None) -> dict[str, Any]:
    """Return the configuration of DeepSpeed's engine: ``given``, with all that follows from the run.

    Args:
        given: as :func:`read_config` gave it.
        state: of the run.
        batch_size: samples per batch and rank, if that is known.

    Raises:
        ConfigError: it contradicts the run.
    """
    check_batches(given, state, batch_size)
    config = copy.deepcopy(dict(given))
    micro, pieces = _batches(state, batch_size)
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        config.pop(name, None)
    config.update(train_micro_batch_size_per_gpu=micro or 1, gradient_accumulation_steps=pieces or 2)
    for section, its in (("fp16", Precision.AMP_FP16), ("bf16", Precision.AMP_BF16)):
        config[section] = {**_section(config, section), "enabled": state.precision is its}
    config["gradient_clipping"] = _clipping(config, state)
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    config.setdefault("steps_per_print", None)
    return config


def check_batches(given: Mapping[str, Any], state: State, batch_size: int | None) -> None:
    """See that numbers of samples in ``given`` are those of the loader and of its microbatches.

    Raises:
        ConfigError: one is another. Both are in the message.
    """
    micro, pieces = _batches(state, batch_size)
    known = {
        "train_micro_batch_size_per_gpu": (micro, "device_train_microbatch_size, or else the loader's batch_size"),
        "gradient_accumulation_steps": (pieces, "the loader's batch_size / device_train_microbatch_size"),
        "train_batch_size": (
            None if batch_size is None else batch_size * state.world_size,
            f"the loader's batch_size × {state.world_size} ranks",
        ),
    }
    for name, (value, source) in known.items():
        said = given.get(name)
        if said is not None and said != _AUTO and value is not None and said != value:
            raise ConfigError(
                f"deepspeed_config[{name!r}]={said!r} contradicts {value}, which is {source}. Leave it out: it follows "
                "from those."
            )
    for section, its in (("fp16", Precision.AMP_FP16), ("bf16", Precision.AMP_BF16)):
        said = _section(given, section).get("enabled", _AUTO)
        if said != _AUTO and bool(said) is not (state.precision is its):
            raise ConfigError(
                f"deepspeed_config[{section!r}]['enabled']={said!r} contradicts precision={state.precision.value!r}. "
                f"Leave it out: it follows from that. {section} is precision={its.value!r}."
            )


def _batches(state: State, batch_size: int | None) -> tuple[int | None, int | None]:
    """Samples per forward pass, and forward passes per batch, as far as they are known."""
    micro = state.device_train_microbatch_size
    if batch_size is None:
        return micro, 1 if micro is None else None
    micro = batch_size if micro is None else min(micro, batch_size)
    return micro, -(-batch_size // micro)


def _clipping(given: Mapping[str, Any], state: State) -> float:
    """The norm that the engine clips gradients to; 0 for none. Nobody else sees them whole."""
    said = given.get("gradient_clipping")
    said = None if said == _AUTO else said
    ours = [algorithm for algorithm in state.algorithms if isinstance(algorithm, GradientClipping)]
    for clipping in ours:
        if clipping.clipping_type != "norm":
            raise ConfigError(f"{clipping!r}: with DeepSpeed gradients are clipped by their norm: use 'norm'.")
        if said is not None and said != clipping.clipping_threshold:
            raise ConfigError(
                f"deepspeed_config['gradient_clipping']={said!r} contradicts {clipping!r}: give one of the two."
            )
        said = clipping.clipping_threshold
    return 0.0 if said is None else float(said)


def check_algorithms(state: State, stage: int) -> None:
    """See that the algorithms find what they work on.

    Raises:
        ConfigError: one averages weights, of which stage 3 leaves no rank the whole.
    """
    for algorithm in state.algorithms:
        if stage == 3 and isinstance(algorithm, EMA | SWA):
            raise ConfigError(
                f"{algorithm!r} averages weights, and with DeepSpeed's ZeRO stage 3 no rank has them: use stage 1 or 2."
            )


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return dict(section) if isinstance(section, Mapping) else {}


def _is_off(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is False  # pyright: ignore[reportUnknownMemberType]


def _read_file(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as e:
        raise ConfigError(f"deepspeed_config={str(path)!r}: there is no such file. Give a dict, or a JSON file.") from e
    except (OSError, ValueError) as e:
        raise ConfigError(f"deepspeed_config={str(path)!r} cannot be read as JSON: {e}") from e
