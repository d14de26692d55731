"""Training with DeepSpeed's ZeRO: optimizer state, gradients and, in stage 3, weights are sharded over the ranks.

DeepSpeed's engine runs the backward pass and the optimizer's step. The engine saves and loads "files" in memory (see
:class:`_MemoryFiles`), so that checkpoints are written, verified and read like all other checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import itertools
import logging
import os
import sys
import tempfile
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final, final

import torch
import torch.distributed
from torch import Tensor, nn

from composerlite import dist
from composerlite.checkpoint.contents import RestorePlan
from composerlite.checkpoint.deepspeed.archives import load_archives
from composerlite.checkpoint.format.archive import DEEPSPEED_TYPES
from composerlite.core import Precision, State
from composerlite.devices import Device
from composerlite.errors import ConfigError, IncompatibleCheckpointError
from composerlite.storage import ObjectStore
from composerlite.trainer.ranks.parallel import (
    Parallel,
    check_same_model,
    check_spreadable,
    saved_buffers,
    send_tensors,
)
from composerlite.trainer.ranks.zero_config import engine_config
from composerlite.types import StateDict

__all__ = ["ZeRO"]

log = logging.getLogger(__name__)
_TAG: Final = "deepspeed"
_SHORT = {Precision.AMP_BF16: torch.bfloat16, Precision.AMP_FP16: torch.float16}
_FOR_CONVERSION = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
"""Required by DeepSpeed's conversion of checkpoints for another number of ranks."""


@final
class ZeRO(Parallel):
    """DeepSpeed's engine around the model of ``state``. Changes the model in place.

    All ranks start with the parameters and buffers of rank 0, and get its buffers after each batch.

    Args:
        state: state with the model and the optimizer.
        config: result of :func:`~composerlite.trainer.ranks.zero_config.read_config`.
        batch_size: samples per batch and rank; ``None`` if unknown.

    Raises:
        ConfigError: DeepSpeed is not installed, or ``config`` contradicts the trainer's arguments.
    """

    passes_are_shared = True
    steps_itself = True

    def __init__(self, state: State, config: Mapping[str, Any], batch_size: int | None) -> None:
        self.data_rank, self.data_ranks = dist.get_global_rank(), dist.get_world_size()
        self._stage: int = config["zero_optimization"]["stage"]
        self.forward_is_shared = self._stage == 3
        check_spreadable(state, "deepspeed_config")
        if state.world_size > 1:
            check_same_model(state.model)
        config = engine_config(config, state, batch_size)
        send_tensors(itertools.chain(state.model.parameters(), state.model.buffers()))
        self._model, self._device = state.model, state.device
        self._deepspeed = _deepspeed(state.device)
        # DeepSpeed's default timeout is half an hour.
        groups: Any = importlib.import_module("deepspeed.utils.groups")
        groups._WORLD_GROUP = torch.distributed.new_group(timeout=dist.get_group().timeout)
        self._engine: Any = self._deepspeed.initialize(
            model=state.model, optimizer=state.optimizers[0], config=config, dist_init_required=False
        )[0]
        state.deepspeed = self
        self._buffers = saved_buffers(state.model)
        self._finalizer = weakref.finalize(self, _release, self._engine, state.model)
        if (short := _SHORT.get(state.precision)) is not None:
            state.model.forward = functools.partial(_in_short_format, state.model.forward, short, state.device.type)

    def training_module(self, model: nn.Module) -> Callable[..., Any]:
        return self._engine

    def before_microbatch(self, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)

    def reduce(self, model: nn.Module) -> None:
        send_tensors(self._buffers)

    def step(self) -> None:
        self._engine.step()

    @property
    def types(self) -> dict[str, type]:
        """Classes in the engine's files, by full name."""
        found: dict[str, type] = {}
        for full in DEEPSPEED_TYPES:
            module, _, name = full.rpartition(".")
            if isinstance(kind := getattr(importlib.import_module(module), name, None), type):
                found[full] = kind
        return found

    def saved(self) -> dict[str, StateDict]:
        """Return the contents of this rank's files, by name. Tensors are live, not copied."""
        with tempfile.TemporaryDirectory(prefix="composerlite-") as folder, self._files_in_memory({}) as files:
            # The engine copies scripts into the folder, and nothing else.
            self._engine.save_checkpoint(folder, tag=_TAG, client_state=_FOR_CONVERSION, save_latest=False)
        return {name: _plain(contents) for name, contents in files.items()}

    def load_checkpoint(
        self, template: str, plan: RestorePlan, object_store: ObjectStore | None, *, trust: bool
    ) -> list[dict[str, Any]] | None:
        """Restore the engine and the rest of the state; see :func:`load_archives`."""
        return load_archives(self, template, plan, object_store, trust=trust)

    def load(self, files: Mapping[str, StateDict], *, source: str) -> None:
        """Restore the model and the optimizer from this rank's ``files``, by name.

        Raises:
            IncompatibleCheckpointError: names or shapes of trained parameters differ.
        """
        self.check_fits(files[next(name for name in files if "model_states" in name)], source=source)
        with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
            self._load(Path(folder), files)

    def _load(self, folder: Path, files: Mapping[str, StateDict]) -> None:
        """Load ``files`` into the engine, which looks for their names in ``folder``."""
        place = folder / _TAG
        place.mkdir(exist_ok=True)
        for name in files:
            (place / name).touch()
        with self._files_in_memory(files):
            self._engine.load_checkpoint(str(folder), tag=_TAG, load_lr_scheduler_states=False)

    def check_fits(self, model: StateDict, *, source: str) -> None:
        """Compare the parameters of a checkpoint with the trained parameters, group by group.

        Args:
            model: contents of a file of model states.
            source: the checkpoint, for messages.

        Raises:
            IncompatibleCheckpointError: names or shapes differ; lists all differences.
        """
        own: list[dict[str, Any]] = self._engine._get_zero_param_shapes()
        theirs: list[dict[str, Any]] = model.get("param_shapes") or []
        problems: list[str] = []
        if len(own) != len(theirs):
            problems.append(f"{len(theirs)} groups of parameters in the checkpoint, {len(own)} in the optimizer")
        for mine, other in zip(own, theirs, strict=False):
            problems += _differences({n: tuple(s) for n, s in mine.items()}, {n: tuple(s) for n, s in other.items()})
            if not problems and list(mine) != list(other):
                problems.append("the same parameters in another order")
        _raise_if(problems, source, "Build the model and the optimizer of that run.")

    def convert(self, folder: Path, *, source: str) -> None:
        """Convert the files of all ranks in ``folder`` to DeepSpeed's universal checkpoint. Call on one rank.

        Raises:
            IncompatibleCheckpointError: DeepSpeed cannot convert the files.
        """
        conversion = importlib.import_module("deepspeed.checkpoint.ds_to_universal")
        arguments = SimpleNamespace(
            input_folder=str(folder),
            output_folder=str(folder / _TAG),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                conversion.main(arguments)
        except (AssertionError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, IndexError) as e:
            raise IncompatibleCheckpointError(
                f"{source} was saved by another number of ranks, and DeepSpeed cannot convert it: {e!r} (DeepSpeed "
                "converts the state of Adam and AdamW). Use the number of ranks that saved the checkpoint, or load "
                "the weights alone: load_weights_only=True."
            ) from e

    def load_converted(self, folder: Path, files: Mapping[str, StateDict], *, source: str) -> None:
        """Restore trained weights and the optimizer from the result of :meth:`convert`; ``files`` are model states."""
        config = self._engine._config
        before, config.load_universal_checkpoint = config.load_universal_checkpoint, True
        try:
            self._load(folder, files)
        finally:
            config.load_universal_checkpoint = before
        log.debug("%s was converted and loaded", source)

    def load_weights(self, weights: Mapping[str, Tensor] | None, *, strict: bool, source: str) -> None:
        """Set the tensors of the model from the ``weights`` of rank 0, by name; other ranks pass ``None``.

        Raises:
            IncompatibleCheckpointError: names differ and ``strict`` is true, or shapes differ; lists all differences.
        """
        shapes = dist.get_group().broadcast(
            None if weights is None else {n: tuple(t.shape) for n, t in weights.items()}
        )
        assert shapes is not None
        parameters = dict(self._model.named_parameters())
        buffers = dict(self._model.named_buffers())
        own = {n: tuple(getattr(t, "ds_shape", t.shape)) for n, t in self._model.state_dict(keep_vars=True).items()}
        problems = _differences(own, shapes, names=strict)
        _raise_if(problems, source, "Build the model of that run, or pass load_strict_model_weights=False.")
        for name, shape in shapes.items():
            target = parameters.get(name, buffers.get(name))
            if target is not None:
                value = torch.empty(
                    shape, dtype=torch.float32 if name in parameters else target.dtype, device=self._device
                )
                if weights is not None:
                    value.copy_(weights[name])
                torch.distributed.broadcast(value, 0)
                self._set(target, value)

    @torch.no_grad()
    def _set(self, target: Tensor, value: Tensor) -> None:
        """Set a parameter or a buffer on every rank, and the optimizer's fp32 copy of a parameter."""
        with self._deepspeed.zero.GatheredParameters([target], modifier_rank=0, enabled=hasattr(target, "ds_id")):
            if not hasattr(target, "ds_id") or dist.get_global_rank() == 0:
                target.data.copy_(value)
        if not target.requires_grad:
            return
        utils = importlib.import_module("deepspeed.utils")
        if not hasattr(target, "ds_id"):
            utils.safe_set_full_fp32_param(target, value)
            return
        ranks = dist.get_world_size()  # pieces of equal size; the last is padded
        pieces = nn.functional.pad(value.flatten(), (0, -value.numel() % ranks)).view(ranks, -1)
        utils.safe_set_local_fp32_param(target, pieces[dist.get_global_rank()])

    @contextlib.contextmanager
    def _files_in_memory(self, files: Mapping[str, StateDict]) -> Generator[dict[str, StateDict]]:
        """Let the engine load ``files``, or save new files, in memory. Yields the files."""
        base = importlib.import_module("deepspeed.runtime.checkpoint_engine.checkpoint_engine").CheckpointEngine
        storage = type("MemoryFiles", (_MemoryFiles, base), {})()
        storage.files = dict(files)
        before, self._engine.checkpoint_engine = self._engine.checkpoint_engine, storage
        try:
            yield storage.files
        finally:
            self._engine.checkpoint_engine = before

    def close(self) -> None:
        """Destroy the engine, whose threads must end before the process group."""
        self._finalizer()
        self._engine = None


class _MemoryFiles:
    """DeepSpeed's "checkpoint engine" with files in memory; mixed into DeepSpeed's base class.

    Attributes:
        files: contents by name.
    """

    files: dict[str, StateDict]

    def create(self, info: object) -> None:
        """Called at the start of a checkpoint."""

    def save(self, state_dict: StateDict, path: str) -> None:
        """Keep the contents of the file ``path``."""
        self.files[Path(path).name] = state_dict

    def load(self, path: str | Path, map_location: object = None) -> StateDict:
        """Return the contents of the file ``path``."""
        return self.files[Path(path).name]

    def commit(self, info: object) -> bool:
        """Called at the end of a checkpoint."""
        return True

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: no file is written."""


def _plain(value: Any) -> Any:
    """Return ``value`` with detached tensors, without the attributes that DeepSpeed sets on tensors."""
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad or vars(value) else value
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _plain(item)) for key, item in value.items())
    return type(value)(_plain(item) for item in value) if type(value) in (list, tuple) else value


def _release(engine: Any, model: nn.Module) -> None:
    vars(model).pop("forward", None)
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    if torch.distributed.is_initialized():
        engine.destroy()
        if groups._WORLD_GROUP is not None:
            torch.distributed.destroy_process_group(groups._WORLD_GROUP)
    groups._WORLD_GROUP = None  # else the next process group would use this copy


def _differences(
    own: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]], *, names: bool = True
) -> list[str]:
    """List the differences between the shapes of the model and of a checkpoint; with ``names`` also missing names."""
    found: list[str] = []
    if names:
        found += [f"missing in the checkpoint: {name}" for name in own if name not in theirs]
        found += [f"not in the model: {name}" for name in theirs if name not in own]
    return found + [
        f"{name}: {theirs[name]} in the checkpoint, {shape} in the model"
        for name, shape in own.items()
        if theirs.get(name, shape) != shape
    ]


def _raise_if(problems: list[str], source: str, fix: str) -> None:
    if problems:
        raise IncompatibleCheckpointError(f"{source} does not fit the model.\n  {chr(10).join(problems)}\n{fix}")


def _in_short_format(
    forward: Callable[..., Any], dtype: torch.dtype, device: str, *arguments: Any, **keywords: Any
) -> Any:
    """Call ``forward`` with floating point tensors of type ``dtype``, the type of DeepSpeed's weights, no autocast."""
    with torch.autocast(device, enabled=False):
        return forward(*_cast(arguments, dtype), **_cast(keywords, dtype))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        kind: Any = type(value)
        return kind({key: _cast(item, dtype) for key, item in value.items()})
    if isinstance(value, tuple):
        items = [_cast(item, dtype) for item in value]
        kind: Any = type(value)
        return kind(*items) if hasattr(value, "_fields") else tuple(items)
    return [_cast(item, dtype) for item in value] if isinstance(value, list) else value


def _deepspeed(device: Device) -> ModuleType:
    """Import DeepSpeed, and connect it to the existing process group.

    Raises:
        ConfigError: DeepSpeed cannot be imported.
    """
    if "deepspeed" not in sys.modules:
        os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(dist.get_local_rank()))  # DeepSpeed reads this also without a launcher
    # DeepSpeed calls deprecated functions of torch in every batch.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            deepspeed = importlib.import_module("deepspeed")
        except ImportError as e:
            raise ConfigError(
                f"deepspeed_config: DeepSpeed cannot be imported ({e}): pip install 'composerlite[deepspeed]'"
            ) from e
        # Without this, DeepSpeed compiles a CPU extension at the first use.
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend=device.dist_backend or "gloo", auto_mpi_discovery=False, verbose=False)
    return deepspeed
