"""Training with DeepSpeed's ZeRO: optimizer state, gradients and, in stage 3, weights are sharded over the ranks.

DeepSpeed's engine owns the backward pass and the optimizer's step; all else stays with the trainer. What the engine
would write to files and read from them goes through a :class:`_Shelf`, so that its checkpoints are written, verified
and read as all others are.
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
from composerlite.trainer.ranks.zero_config import check_algorithms, engine_config
from composerlite.types import StateDict

__all__ = ["ZeRO"]

log = logging.getLogger(__name__)
_TAG: Final = "deepspeed"
_SHORT = {Precision.AMP_BF16: torch.bfloat16, Precision.AMP_FP16: torch.float16}
_FOR_CONVERSION = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
"""What DeepSpeed's conversion of checkpoints for other numbers of ranks looks for."""


@final
class ZeRO(Parallel):
    """DeepSpeed's engine around the model of ``state``, which it changes in place.

    All ranks begin with the parameters and buffers of rank 0, and after each batch they get its buffers.

    Args:
        state: its model and optimizer.
        config: of DeepSpeed, as :func:`~composerlite.trainer.ranks.zero_config.read_config` gave it.
        batch_size: samples per batch and rank, if that is known.

    Raises:
        ConfigError: DeepSpeed is not installed, or ``config`` contradicts the run.
    """

    passes_are_shared = True
    steps_itself = True

    def __init__(self, state: State, config: Mapping[str, Any], batch_size: int | None) -> None:
        self.data_rank, self.data_ranks = dist.get_global_rank(), dist.get_world_size()
        self._stage: int = config["zero_optimization"]["stage"]
        self.forward_is_shared = self._stage == 3
        check_algorithms(state, self._stage)
        check_spreadable(state, "deepspeed_config")
        if state.world_size > 1:
            check_same_model(state.model)
        config = engine_config(config, state, batch_size)
        send_tensors(itertools.chain(state.model.parameters(), state.model.buffers()))
        self._model, self._device = state.model, state.device
        self._deepspeed = _deepspeed(state.device)
        # Its own copy would wait for half an hour for a rank that is late.
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

    # ── training ─────────────────────────────────────────────────────────────────────────────────────────────────
    def trained(self, model: nn.Module) -> Callable[..., Any]:
        return self._engine

    def before_microbatch(self, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)

    def reduce(self, model: nn.Module) -> None:
        send_tensors(self._buffers)

    def step(self) -> None:
        self._engine.step()

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def types(self) -> dict[str, type]:
        """The classes that its files hold, by full name."""
        found: dict[str, type] = {}
        for full in DEEPSPEED_TYPES:
            module, _, name = full.rpartition(".")
            if isinstance(kind := getattr(importlib.import_module(module), name, None), type):
                found[full] = kind
        return found

    def saved(self) -> dict[str, StateDict]:
        """Return the contents of this rank's files, by name. Tensors are those in use."""
        shelf = _Shelf()
        with tempfile.TemporaryDirectory(prefix="composerlite-") as folder, self._with(shelf):
            # It writes scripts to the folder, and nothing else.
            self._engine.save_checkpoint(folder, tag=_TAG, client_state=_FOR_CONVERSION, save_latest=False)
        return {name: _plain(contents) for name, contents in shelf.files.items()}

    def load_checkpoint(
        self, template: str, plan: RestorePlan, object_store: ObjectStore | None, *, trust: bool
    ) -> list[dict[str, Any]] | None:
        """Restore the state that this engine trains: see :func:`load_archives`."""
        return load_archives(self, template, plan, object_store, trust=trust)

    def load(self, files: Mapping[str, StateDict], *, source: str) -> None:
        """Restore the model and the optimizer from what this rank's files hold, by name.

        Raises:
            IncompatibleCheckpointError: as :meth:`check_fits`.
        """
        self.check_fits(files[next(name for name in files if "model_states" in name)], source=source)
        with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
            self._load(Path(folder), files)

    def _load(self, folder: Path, files: Mapping[str, StateDict]) -> None:
        """Let the engine load ``files``, whose names it looks up in ``folder``."""
        place = folder / _TAG
        place.mkdir(exist_ok=True)
        for name in files:
            (place / name).touch()
        with self._with(_Shelf(files)):
            self._engine.load_checkpoint(str(folder), tag=_TAG, load_lr_scheduler_states=False)

    def check_fits(self, model: StateDict, *, source: str) -> None:
        """Compare names and shapes of what is trained, group by group, before anything is changed.

        Raises:
            IncompatibleCheckpointError: they differ; all of it is in the message.
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
        if problems:
            raise _misfit(source, problems, "Build the model and the optimizer of that run.")

    def convert(self, folder: Path, *, source: str) -> None:
        """Make a universal checkpoint of the files of all ranks in ``folder``. On one rank.

        Raises:
            IncompatibleCheckpointError: DeepSpeed cannot.
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
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                conversion.main(arguments)
        except (AssertionError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, IndexError) as e:
            raise IncompatibleCheckpointError(
                f"{source} was saved by another number of ranks, and DeepSpeed cannot convert it: {e!r} (it converts "
                "what Adam and AdamW keep). Load it with the number of ranks that saved it, or its weights alone: "
                "load_weights_only=True."
            ) from e

    def load_converted(self, folder: Path, files: Mapping[str, StateDict], *, source: str) -> None:
        """Restore trained weights and the optimizer from what :meth:`convert` made; ``files`` are model states."""
        config = self._engine._config
        before, config.load_universal_checkpoint = config.load_universal_checkpoint, True
        try:
            self._load(folder, files)
        finally:
            config.load_universal_checkpoint = before
        log.debug("%s was converted and loaded", source)

    def load_weights(self, weights: Mapping[str, Tensor] | None, *, strict: bool, source: str) -> None:
        """Set the tensors of the model, which rank 0 has, by name; the others give ``None``.

        Raises:
            IncompatibleCheckpointError: names differ and ``strict`` is true, or shapes differ; all of it is in the
                message.
        """
        shapes = dist.get_group().broadcast(
            None if weights is None else {n: tuple(t.shape) for n, t in weights.items()}
        )
        assert shapes is not None
        parameters = dict(self._model.named_parameters())
        buffers = dict(self._model.named_buffers())
        own = {n: tuple(getattr(t, "ds_shape", t.shape)) for n, t in self._model.state_dict(keep_vars=True).items()}
        problems = _differences(own, shapes, names=strict)
        if problems:
            raise _misfit(source, problems, "Build the model of that run, or pass load_strict_model_weights=False.")
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
        """Set a parameter or a buffer, and the number that the optimizer has of it, to the same value on every rank."""
        with self._deepspeed.zero.GatheredParameters([target], modifier_rank=0, enabled=hasattr(target, "ds_id")):
            if not hasattr(target, "ds_id") or dist.get_global_rank() == 0:
                target.data.copy_(value)
        if not target.requires_grad:
            return
        utils = importlib.import_module("deepspeed.utils")
        if not hasattr(target, "ds_id"):
            utils.safe_set_full_fp32_param(target, value)
            return
        ranks = dist.get_world_size()  # each has a piece of one size, and that of the last is filled up
        pieces = nn.functional.pad(value.flatten(), (0, -value.numel() % ranks)).view(ranks, -1)
        utils.safe_set_local_fp32_param(target, pieces[dist.get_global_rank()])

    @contextlib.contextmanager
    def _with(self, shelf: _Shelf) -> Generator[None]:
        """Let the engine read and write its files in ``shelf`` within the block."""
        before, self._engine.checkpoint_engine = self._engine.checkpoint_engine, shelf
        try:
            yield
        finally:
            self._engine.checkpoint_engine = before

    def close(self) -> None:
        """Release the engine: what it has started must not outlive the process group."""
        self._finalizer()
        self._engine = None


@final
class _Shelf:
    """Files of the engine, in memory instead of on disk: its "checkpoint engine".

    Attributes:
        files: what each holds, by name.
    """

    def __init__(self, files: Mapping[str, StateDict] | None = None) -> None:
        self.name = "composerlite"
        self.files: dict[str, StateDict] = dict(files or {})

    def create(self, info: object) -> None:
        """A checkpoint begins."""

    def save(self, state_dict: StateDict, path: str) -> None:
        """Keep the contents of the file ``path``."""
        self.files[Path(path).name] = state_dict

    def load(self, path: str | Path, map_location: object = None) -> StateDict:
        """Return the contents of the file."""
        return self.files[Path(path).name]

    def commit(self, info: object) -> bool:
        """The checkpoint is complete."""
        return True

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: no file is written."""

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Rank 0 saves what all have."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Return true if it is written behind its back."""
        return False

    def preserves_storage_sharing(self) -> bool:
        """Return true if views of one tensor stay that."""
        return True

    def set_commit_info(self, info: object) -> None:
        """Accept the commit info of decoupled engines, which are not used."""

    def get_commit_info(self) -> None:
        """The same."""

    def cleanup(self) -> None:
        """Do nothing: there are no resources to release."""


def _plain(value: Any) -> Any:
    """``value`` with tensors that are nothing but tensors: DeepSpeed hangs things of its own on them."""
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
    groups._WORLD_GROUP = None  # a copy, which would be taken for that of the next process group


def _differences(
    own: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]], *, names: bool = True
) -> list[str]:
    """List where the shapes ``theirs`` differ from ``own``, by name; with ``names`` both must have the same names."""
    found: list[str] = []
    if names:
        found += [f"missing in the checkpoint: {name}" for name in own if name not in theirs]
        found += [f"not in the model: {name}" for name in theirs if name not in own]
    return found + [
        f"{name}: {theirs[name]} in the checkpoint, {shape} in the model"
        for name, shape in own.items()
        if theirs.get(name, shape) != shape
    ]


def _misfit(source: str, problems: list[str], way_out: str) -> IncompatibleCheckpointError:
    return IncompatibleCheckpointError(f"{source} does not fit the model.\n  {chr(10).join(problems)}\n{way_out}")


def _in_short_format(
    forward: Callable[..., Any], dtype: torch.dtype, device: str, *arguments: Any, **keywords: Any
) -> Any:
    """Call ``forward`` as DeepSpeed's weights need it: floating point numbers in their format, and no autocast."""
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
    """DeepSpeed, connected to the process group that there is.

    Raises:
        ConfigError: it is not installed.
    """
    if "deepspeed" not in sys.modules:
        os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(dist.get_local_rank()))  # what it looks for where nothing launched this
    # torch gives new names to what DeepSpeed calls in every batch.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            deepspeed = importlib.import_module("deepspeed")
        except ImportError as e:
            raise ConfigError(
                f"deepspeed_config: DeepSpeed cannot be imported ({e}): pip install 'composerlite[deepspeed]'"
            ) from e
        # It would be compiled on every machine that trains on its CPU, to be faster than gloo within a node.
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend=device.dist_backend or "gloo", auto_mpi_discovery=False, verbose=False)
    return deepspeed
