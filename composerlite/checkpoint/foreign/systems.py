"""The systems whose checkpoints are read. The first system that recognises the contents takes the parts for a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast, final

from composerlite.checkpoint.foreign.deepspeed import is_deepspeed, taken_from_deepspeed
from composerlite.checkpoint.foreign.huggingface import (
    is_accelerate,
    is_transformers,
    taken_from_accelerate,
    taken_from_transformers,
)
from composerlite.checkpoint.foreign.keys import KeyMap
from composerlite.checkpoint.foreign.lightning import is_lightning, taken_from_lightning
from composerlite.checkpoint.foreign.olmo_core import is_olmo_core, taken_from_olmo_core
from composerlite.checkpoint.foreign.taken import Run, Taken, state_of
from composerlite.checkpoint.foreign.torch_dicts import (
    is_state_dict,
    is_torch_dict,
    is_torchtitan,
    taken_by_map,
    taken_from_state_dict,
    taken_from_torch_dict,
    taken_from_torchtitan,
)
from composerlite.errors import IncompatibleCheckpointError
from composerlite.types import StateDict, items_of


@final
class System(NamedTuple):
    """A system that saves checkpoints.

    Attributes:
        name: for messages.
        is_one: returns true for contents of this system; tensors need not have been read.
        take: selects the parts for a run. Arguments: the contents, and the checkpoint for messages.
    """

    name: str
    is_one: Callable[[StateDict], bool]
    take: Callable[[StateDict, str], Taken]


SYSTEMS = (
    System("Lightning (.ckpt)", is_lightning, taken_from_lightning),
    System("transformers (checkpoint-N)", is_transformers, taken_from_transformers),
    System("accelerate (save_state)", is_accelerate, taken_from_accelerate),
    System("DeepSpeed (global_step…)", is_deepspeed, taken_from_deepspeed),
    System("OLMo-core (step…)", is_olmo_core, taken_from_olmo_core),
    System("torchtitan", is_torchtitan, taken_from_torchtitan),
    System("torch, a dict with a model", is_torch_dict, taken_from_torch_dict),
    System("torch or safetensors, a state dict of a model", is_state_dict, taken_from_state_dict),
)


def as_of_a_run(contents: Any, run: Callable[[], Run], *, key_map: KeyMap | None, source: str) -> StateDict:
    """Return ``contents`` of another system in the form of our checkpoints.

    Args:
        contents: of the checkpoint; tensors need not have been read.
        run: returns the run to load into.
        key_map: keys of the parts; ``None``: the system is recognised by the contents.
        source: the checkpoint, for messages.

    Raises:
        IncompatibleCheckpointError: no system recognises the contents, or they do not fit the run; or the checkpoint
            has counts of training without an optimizer, or several optimizers.
        ConfigError: ``key_map`` has a key that is missing.
    """
    if key_map is not None:
        return state_of(taken_by_map(contents, key_map, source), run(), "the keys in load_key_map")
    system = system_of(contents)
    if system is None:
        keys = ", ".join(map(repr, list(contents)[:8])) if isinstance(contents, dict) else type(contents).__name__
        raise IncompatibleCheckpointError(
            f"{source} is not a checkpoint of a run: it holds {keys or 'nothing'} and no 'state'. "
            f"{what_is_recognised()} For other files of torch say where the parts are: "
            "load_key_map={'model': 'net.*', 'optimizer': 'optim'}; or load the model with "
            "model.load_state_dict(torch.load(path))."
        )
    taken, live = system.take(cast("StateDict", contents), source), run()
    if live.optimizers and (lack := _lack_of_optimizer(cast("StateDict", contents), taken)):
        raise IncompatibleCheckpointError(
            f"{source} {lack}: a run would continue without its moments. load_weights_only=True takes the model alone, "
            "load_ignore_keys=['state/optimizers'] all but the optimizer, and load_key_map={'model': …, "
            "'optimizer': …, 'batch': …} what it names."
        )
    return state_of(taken, live, system.name)


def _lack_of_optimizer(contents: StateDict, taken: Taken) -> str:
    """Describe the optimizer that is missing in ``taken``; empty if none is."""
    others = [key for key, value in _optimizers_in(contents) if value is not taken.optimizer]
    if others:
        which = "an" if taken.optimizer is None else "another"
        return f"holds {which} optimizer, {others[0]!r}, that is not taken over"
    of_runs = {
        "says how far training was": taken.progress,
        "holds a scheduler": taken.scheduler,
        "holds random states of a run": taken.rng,
    }
    part = next((what for what, part in of_runs.items() if part is not None), "")
    return f"{part} and holds no optimizer" if part and taken.optimizer is None else ""


def _optimizers_in(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and state of each optimizer of torch at the top level or one level below."""
    for key, value in items_of(node):
        if isinstance(value, Mapping) and "state" in value and isinstance(value.get("param_groups"), list):
            yield f"{prefix}{key}", value
        elif not prefix:
            yield from _optimizers_in(value, f"{key}.")


def recognised(contents: Any) -> str | None:
    """Return the name of the system that saved ``contents``; ``None`` if no system recognises them."""
    state: Any = contents.get("state") if isinstance(contents, dict) else None  # pyright: ignore[reportUnknownMemberType]
    if isinstance(state, Mapping) and "model" in state:
        return "composerlite or Composer"
    steps: Any = contents.get("model_and_optim") if isinstance(contents, dict) else None  # pyright: ignore[reportUnknownMemberType]
    if steps is not None:
        return "OLMo-core (step…)"
    system = system_of(contents)
    return None if system is None else system.name


def no_model_error(source: str) -> IncompatibleCheckpointError:
    """Return the error for a checkpoint without a model."""
    hint = "'composerlite checkpoint inspect' shows what"
    return IncompatibleCheckpointError(f"{source!r} holds no model: {hint}. {what_is_recognised()}")


def what_is_recognised() -> str:
    """Return a sentence for messages that lists the systems."""
    return f"Recognised are, besides ours and Composer's: {'; '.join(system.name for system in SYSTEMS)}."


def model_in(contents: Any) -> Any:
    """Return the model in ``contents`` of any system; ``contents`` itself if no system recognises them."""
    for keys in (("state", "model"), ("model",)):
        inner = contents
        for key in keys:
            inner = cast("Mapping[Any, Any]", inner).get(key) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping):
            return cast("Any", inner)
    system = system_of(contents)
    return contents if system is None else system.take(cast("StateDict", contents), "it").model


def system_of(contents: Any) -> System | None:
    """Return the system that saved ``contents``; ``None`` if no system recognises them."""
    if not isinstance(contents, dict):
        return None
    return next((one for one in SYSTEMS if one.is_one(cast("StateDict", contents))), None)
