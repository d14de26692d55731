"""Convert checkpoints of other systems. The first system that recognises the contents selects the parts to load."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast, final

from torch import Tensor

from composerlite.checkpoint.foreign.deepspeed import taken_from_deepspeed
from composerlite.checkpoint.foreign.keys import Counts, KeyMap, Run, Taken, as_tensor, is_weight, picked, state_of
from composerlite.errors import IncompatibleCheckpointError
from composerlite.types import StateDict, items_of

_TRAINER_STATE = "trainer_state.json"
_OF_RANK = re.compile(r"(?:rng_state|random_states)(?:_(\d+))?\.(?:pth|pkl)")
_OF_LIGHTNING = ("optimizer_states", "lr_schedulers", "state_dict", "epoch", "global_step", "pytorch-lightning_version")
_OF_OLMO_CORE = ("global_step", "global_train_tokens_seen", "data_loader", "epoch", "world_size", "rng", "max_steps")
_OF_TORCHTITAN = ("optimizer", "lr_scheduler", "train_state", "dataloader")
_RNG_OF_ACCELERATE = ("random_state", "numpy_random_seed", "torch_manual_seed", "torch_cuda_manual_seed")
_MODELS = ("model", "state_dict", "model_state_dict", "model_state")
_OPTIMIZERS = ("optimizer", "optim", "optimizer_state_dict", "optimizer_state")
_WRAPPED_BY_DDP = "module."
_SCHEDULERS = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict")


# ── the parts of each system's checkpoints ───────────────────────────────────────────────────────────────────────────
def _from_lightning(contents: StateDict, source: str) -> Taken:
    """Take weights, the first optimizer and its scheduler, epoch and step of a ``.ckpt``."""
    left = [key for key in contents if key not in _OF_LIGHTNING and contents[key]]
    lists: list[Any] = [one if isinstance(one := contents.get(key), list) else [] for key in _OF_LIGHTNING[:2]]
    left += [f"{key}[1:]" for key, listed in zip(_OF_LIGHTNING, lists, strict=False) if len(listed) > 1]
    optimizer, scheduler = (next(iter(listed), None) for listed in lists)
    return Taken(contents["state_dict"], optimizer, scheduler, _progress_of_lightning(contents), left=left)


def _progress_of_lightning(contents: StateDict) -> Counts | None:
    """Return completed epochs and steps. Lightning keeps the batch count of an epoch after the epoch's end."""
    if "epoch" not in contents or "global_step" not in contents:
        return None
    progress = Counts(contents["global_step"], contents["epoch"])
    try:
        batches: Any = contents["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        done, in_all = batches["current"]["processed"], batches["total"]["processed"]
        if not done or batches["is_last_batch"]:
            return progress._replace(epoch=progress.epoch + bool(done), batch_in_epoch=0)
        return progress._replace(batch_in_epoch=done * progress.batch // in_all)  # several batches may make a step
    except (KeyError, TypeError, ArithmeticError):
        return progress


def _from_transformers(contents: StateDict, source: str) -> Taken:
    """Take weights, optimizer, scheduler, step and generators of a folder ``checkpoint-N``."""
    counts: Counts | None = None
    if _TRAINER_STATE in contents:
        state = contents[_TRAINER_STATE]
        if not isinstance(state, Mapping) or "global_step" not in state:
            raise IncompatibleCheckpointError(f"{source}: its {_TRAINER_STATE} has no 'global_step'.")
        epoch: Any = cast("StateDict", state).get("epoch")
        whole = int(epoch) if isinstance(epoch, int | float) and 0 <= epoch < 1 << 53 else None
        counts = Counts(state["global_step"], whole)
    taken = _from_folder(contents, source, ("python", "numpy", "cpu", "cuda"))
    return taken._replace(progress=counts, left=[f"log_history in {_TRAINER_STATE}", *taken.left])


def _from_folder(contents: StateDict, source: str, keys: tuple[str, ...]) -> Taken:
    """Take the parts in a folder with a file for each part; ``keys``: of the generators, as in :func:`_generators`."""
    ranks: dict[int, StateDict] = {}
    for name, value in contents.items():
        if (match := _OF_RANK.fullmatch(str(name))) is not None:
            ranks[int(match[1] or 0)] = _generators(value, keys, f"{source}: {name}")
    optimizer, scheduler = (contents.get(f"{one}.pt", contents.get(f"{one}.bin")) for one in ("optimizer", "scheduler"))
    rng = [ranks[rank] for rank in sorted(ranks)] if ranks and len(ranks) == max(ranks) + 1 else None
    left = ["scaler.pt"] if "scaler.pt" in contents else []
    return Taken(contents.get("model"), optimizer, scheduler, rng=rng, left=left)


def _generators(saved: Any, keys: tuple[str, ...], source: str) -> StateDict:
    """Return one rank's entry of ``rng``. ``keys``: of Python, NumPy, torch and CUDA; the first CUDA device is used."""
    try:
        values = (saved.get(key) for key in keys)
        python, numpy, cpu, cuda = (one["state"] if isinstance(one, Mapping) else one for one in values)
        kind, *position = numpy
        several = isinstance(cuda, list | tuple)
        of_cuda = {} if cuda is None or not len(cuda) else {"cuda": cuda[0] if several else cuda}
        return {"python": python, "numpy": (str(kind), *position), "torch": cpu, **of_cuda}
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise IncompatibleCheckpointError(f"{source} has no states of generators: {e}") from e


def _is_olmo_core(contents: StateDict) -> bool:
    """Return true for a step of OLMo-core: each rank saved a ``global_step``."""
    ranks = contents.get("train")
    return (
        isinstance(ranks, list)
        and bool(ranks)
        and all(isinstance(one, Mapping) and "global_step" in one for one in ranks)
    )


def _from_olmo_core(contents: StateDict, source: str) -> Taken:
    """Take weights, optimizer, step, epoch, tokens and generators. OLMo-core saves no scheduler."""
    ranks = cast("list[StateDict]", contents["train"])
    first = ranks[0]
    loader: Any = first.get("data_loader")
    seen = cast("StateDict", loader).get("batches_processed") if isinstance(loader, Mapping) else None
    epoch = first.get("epoch")  # counted from one
    epoch = epoch - 1 if isinstance(epoch, int) else None
    progress = Counts(first["global_step"], epoch, seen, first.get("global_train_tokens_seen", 0))
    keys = ("python", "numpy", "torch", "cuda")
    has_rng = all("rng" in one for one in ranks)
    rng = [_generators(one["rng"], keys, f"{source}: its 'train'") for one in ranks] if has_rng else None
    left = [f"train/{key}" for key in first if key not in _OF_OLMO_CORE and first[key]]
    return Taken(contents.get("model"), contents.get("optim"), None, progress, rng, left)


def _from_torchtitan(contents: StateDict, source: str) -> Taken:
    """Take weights (all other keys of the top level), optimizer, scheduler and step."""
    weights = {key: value for key, value in contents.items() if key not in _OF_TORCHTITAN}
    optimizer, scheduler = (contents.get(key) for key in _OF_TORCHTITAN[:2])
    left = [key for key in _OF_TORCHTITAN[3:] if key in contents]
    return Taken(weights, optimizer, scheduler, Counts(contents["train_state"]["step"]), left=left)


def _from_torch_dict(contents: StateDict, source: str) -> Taken:
    """Take the model, one optimizer and one scheduler. Step counts have no common key: use ``load_key_map``."""
    parts = [_under(contents, names) for names in (_MODELS, _OPTIMIZERS, _SCHEDULERS)]
    model, optimizer, scheduler = (next(iter(part.values())) if len(part) == 1 else None for part in parts)
    used = {key for part in parts if len(part) == 1 for key in part}
    return Taken(model, optimizer, scheduler, left=[key for key in contents if key not in used])


def _under(contents: StateDict, names: tuple[str, ...]) -> StateDict:
    return {name: contents[name] for name in names if isinstance(contents.get(name), Mapping) and contents[name]}


def _is_state_dict(contents: StateDict) -> bool:
    """Return true for a state dict: tensors or NumPy arrays by name, perhaps with extra state."""
    values = {str(name): as_tensor(value) for name, value in contents.items()}
    return any(isinstance(value, Tensor) for value in values.values()) and all(
        is_weight(name, value) for name, value in values.items()
    )


# ── all systems ──────────────────────────────────────────────────────────────────────────────────────────────────────
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
    System(
        "Lightning (.ckpt)", lambda c: "pytorch-lightning_version" in c and _has_dict(c, "state_dict"), _from_lightning
    ),
    System("transformers (checkpoint-N)", lambda c: _TRAINER_STATE in c or "optimizer.pt" in c, _from_transformers),
    System(
        "accelerate (save_state)",
        lambda c: "optimizer.bin" in c or any(str(key).startswith("random_states_") for key in c),
        lambda c, source: _from_folder(c, source, _RNG_OF_ACCELERATE),  # the folder has no counts of steps
    ),
    System("DeepSpeed (global_step…)", lambda c: "ds_version" in c and _has_dict(c, "module"), taken_from_deepspeed),
    System("OLMo-core (step…)", _is_olmo_core, _from_olmo_core),
    System("torchtitan", lambda c: _has_dict(c, "train_state") and "step" in c["train_state"], _from_torchtitan),
    System("torch, a dict with a model", lambda c: len(_under(c, _MODELS)) == 1, _from_torch_dict),
    System("torch or safetensors, a state dict of a model", _is_state_dict, lambda c, source: Taken(c)),
)


def _has_dict(contents: StateDict, key: str) -> bool:
    return isinstance(contents.get(key), Mapping)


def as_of_a_run(contents: Any, run: Run, *, key_map: KeyMap | None) -> StateDict:
    """Return ``contents`` of another system in the form of our checkpoints.

    Args:
        contents: of the checkpoint; tensors need not have been read.
        run: the run to load into.
        key_map: keys of the parts; ``None``: the system is recognised by the contents.

    Raises:
        IncompatibleCheckpointError: no system recognises the contents; or the contents do not fit the run; or the run
            has an optimizer, and the checkpoint of a run has no optimizer, or has an optimizer that cannot be loaded.
        ConfigError: ``key_map`` has a key that is missing.
    """
    source = run.source
    if key_map is not None:
        parts = picked(contents, key_map, source)
        progress = Counts(parts.get("batch", 0), parts.get("epoch")) if parts.keys() & {"epoch", "batch"} else None
        taken = Taken(parts.get("model", {}), parts.get("optimizer"), parts.get("scheduler"), progress)
        return state_of(taken, run, "the keys in load_key_map")
    system = system_of(contents)
    if system is None:
        keys = ", ".join(map(repr, list(contents)[:8])) if isinstance(contents, dict) else type(contents).__name__
        raise IncompatibleCheckpointError(
            f"{source} is not a checkpoint of a run: it holds {keys or 'nothing'} and no 'state'. "
            f"{what_is_recognised()} For other files of torch say where the parts are: "
            "load_key_map={'model': 'net.*', 'optimizer': 'optim'}; or load the model with "
            "model.load_state_dict(torch.load(path))."
        )
    taken = system.take(cast("StateDict", contents), source)
    if run.optimizers and (lack := _lack_of_optimizer(cast("StateDict", contents), taken)):
        raise IncompatibleCheckpointError(
            f"{source} {lack}: a run would continue without its moments. load_weights_only=True loads only the "
            "model, load_ignore_keys=['state/optimizers'] everything but the optimizer, and "
            f"load_key_map={{'model': …, 'optimizer': …, 'batch': …}} what it names."
        )
    return state_of(taken, run, system.name)


def _lack_of_optimizer(contents: StateDict, taken: Taken) -> str:
    """Describe the optimizer that is missing in ``taken``; empty if no optimizer is missing."""
    for key, value in _optimizers_in(contents):
        if value is not taken.optimizer:
            return f"holds an optimizer, {key!r}, that cannot be loaded"
    is_of_run = any(part is not None for part in (taken.progress, taken.scheduler, taken.rng))
    return "is of a run and holds no optimizer" if is_of_run and taken.optimizer is None else ""


def _optimizers_in(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and state of each optimizer of torch at the top level or one level below."""
    for key, value in items_of(node):
        if isinstance(value, Mapping) and "state" in value and isinstance(value.get("param_groups"), list):
            yield f"{prefix}{key}", value
        elif not prefix:
            yield from _optimizers_in(value, f"{key}.")


def recognised(contents: Any) -> str | None:
    """Return the name of the system that saved ``contents``; ``None`` if no system recognises them."""
    if isinstance(contents, dict):
        if _has_dict(cast("StateDict", contents), "state") and "model" in contents["state"]:
            return "composerlite or Composer"
        if "model_and_optim" in contents:
            return "OLMo-core (step…)"
    system = system_of(contents)
    return None if system is None else system.name


def what_is_recognised() -> str:
    """Return a sentence for messages that lists the systems."""
    return f"Supported besides composerlite and Composer: {'; '.join(system.name for system in SYSTEMS)}."


def model_in(contents: Any) -> Any:
    """Return the model in ``contents`` of any system; ``contents`` itself if no system recognises them."""
    for holder in (contents.get("state"), contents) if isinstance(contents, dict) else ():
        model: Any = cast("StateDict", holder).get("model") if isinstance(holder, Mapping) else None
        if isinstance(model, Mapping):
            return cast("Any", model)
    system = system_of(contents)
    return contents if system is None else system.take(cast("StateDict", contents), "it").model


def system_of(contents: Any) -> System | None:
    """Return the system that saved ``contents``; ``None`` if no system recognises them."""
    if not isinstance(contents, dict):
        return None
    return next((one for one in SYSTEMS if one.is_one(cast("StateDict", contents))), None)


# ── Composer, whose checkpoints are in our form but for a few parts ──────────────────────────────────────────────────
def in_current_form(contents: StateDict, *, source: str, weights_only: bool = False) -> StateDict:
    """Return ``contents`` of a checkpoint of Composer, with the averages of ``EMA`` and ``SWA`` in our form.

    Args:
        contents: of the checkpoint; tensors need not have been read.
        source: the checkpoint, for messages.
        weights_only: keep Composer's model unchanged: with ``EMA`` this model holds the average, not the trained
            weights.

    Raises:
        IncompatibleCheckpointError: Composer before 0.14 saved the checkpoint.
    """
    state = dict(cast("StateDict", contents["state"]))
    algorithms = state.get("algorithms")
    if isinstance(algorithms, Mapping) or any(str(key).startswith("_") for key in state):
        raise IncompatibleCheckpointError(
            f"{source} has the form of Composer before 0.14. Load it with Composer 0.14 to 0.32, save it there, and "
            "load that checkpoint."
        )
    if isinstance(algorithms, list) and isinstance(state.get("model"), Mapping):
        pairs = cast("list[tuple[str, Any]]", algorithms)
        state["algorithms"] = [(name, _average(saved, state, weights_only)) for name, saved in pairs]
    return {**contents, "state": state}


def _average(saved: Any, state: StateDict, weights_only: bool) -> Any:
    """Return the state of ``EMA`` or ``SWA`` in our form, and the state of any other algorithm unchanged.

    If the model in ``state`` holds the average of ``EMA``, put the trained weights there, unless ``weights_only``.
    """
    average: StateDict = cast("StateDict", saved) if isinstance(saved, Mapping) else {}
    model: StateDict = state["model"]
    swa_model = average.get("swa_model")
    if average.get("swa_started") and isinstance(swa_model, Mapping) and average.get("swa_scheduler") is None:
        named = cast("StateDict", swa_model).items()
        tensors = _weights_in(model, {name.removeprefix(_WRAPPED_BY_DDP): value for name, value in named})
        clock: Any = state.get("timestamp")
        sampled_at = clock["Timestamp"]["batch"] if isinstance(clock, Mapping) else -1
        more = {"start_lrs": [], "sampled_at": sampled_at, "completed": bool(average.get("swa_completed"))}
        return {"state": {"count": average.get("step_counter", 1), "tensors": tensors, **more}}
    if not average.get("ema_started", True):
        return {"state": {"count": 0, "tensors": {}}}
    active = average.get("ema_weights_active")
    beside: Any = average.get("ema_model")
    if not isinstance(beside, Mapping):
        return saved
    parts = [cast("Any", beside).get(key, {}) for key in ("named_parameters_dict", "named_buffers_dict")]
    tensors = _weights_in(model, {**parts[0], **parts[1]})
    ema = {name: model[name] for name in tensors} if active else tensors
    if active and not weights_only:  # the model holds the average, and the trained weights are beside the model
        state["model"] = {**model, **tensors}
    return {"state": {"count": 1, "tensors": ema}} if ema else saved


def _weights_in(model: StateDict, tensors: StateDict) -> StateDict:
    """Return the floating-point ``tensors`` in ``model``, by the names there: without ``module.`` of DDP if needed."""
    named = {name if name in model else name.removeprefix(_WRAPPED_BY_DDP): tensor for name, tensor in tensors.items()}
    return {
        name: tensor
        for name, tensor in named.items()
        if name in model and isinstance(tensor, Tensor) and tensor.is_floating_point()
    }


def make_loadable_in_composer(contents: StateDict) -> None:
    """Change ``contents`` of a checkpoint of ours, in place, so that Composer loads the checkpoint, too.

    Composer needs times as ``timedelta``, a computed value beside the state of each metric, and other keys of
    ``SpeedMonitor``.

    Args:
        contents: of the checkpoint, or a part of them. Dicts and lists are changed, tensors are not.
    """
    state: StateDict = contents.get("state", {})
    time: StateDict = state.get("timestamp", {}).get("Timestamp", {})
    for key, value in time.items():
        if key.endswith("_wct") and not isinstance(value, datetime.timedelta):
            time[key] = datetime.timedelta(seconds=value)
    for metrics in (state.get("train_metrics") or {}, *(state.get("eval_metrics") or {}).values()):
        for metric in metrics.values():
            metric.setdefault("_computed", None)
    if "eval_seconds" in (speed := state.get("callbacks", {}).get("SpeedMonitor", {})):
        state["callbacks"]["SpeedMonitor"] = {"total_eval_wct": speed["eval_seconds"]}
