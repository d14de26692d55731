"""ExportForInferenceCallback and export_for_inference: write the model as a file for serving."""

from __future__ import annotations

import copy
import inspect
import logging
import tempfile
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from composerlite import dist
from composerlite._torch_compat import map_leaves
from composerlite.checkpoint import load_checkpoint
from composerlite.checkpoint.save.plain_file import write_safetensors
from composerlite.core import Callback, Logger, State, move_to_device
from composerlite.errors import ConfigError, checked_arguments, did_you_mean
from composerlite.storage import ObjectStore, atomic_write, is_uri, make_folder, open_store, parse_uri

log = logging.getLogger(__name__)

_Transform = Callable[[nn.Module], nn.Module]
_UNSUPPORTED = {
    "torchscript": "torch.export has replaced TorchScript: save_format='torch_export' writes a program for "
    "torch.export.load and torch._inductor.aoti_compile_and_package",
    "onnx": "save_format='torch_export' writes a program for torch.onnx.export (with the package onnxscript)",
}


class ExportFormat(StrEnum):
    """Formats of an exported model.

    ``TORCH_EXPORT`` is a program of ``torch.export.save``, which runs without the code of the model. ``SAFETENSORS``
    has the weights only, and reading the file executes no code.
    """

    TORCH_EXPORT = "torch_export"
    SAFETENSORS = "safetensors"

    @classmethod
    def _missing_(cls, value: object) -> ExportFormat:
        name = str(value).lower()
        found = next((one for one in cls if one.value == name), None)
        if found is None:
            hint = f" {_UNSUPPORTED[name]}." if name in _UNSUPPORTED else did_you_mean(name, [one.value for one in cls])
            raise ConfigError(f"save_format={value!r} does not exist.{hint}")
        return found


def export_for_inference(
    model: nn.Module,
    save_format: str | ExportFormat,
    save_path: str | Path,
    save_object_store: ObjectStore | None = None,
    sample_input: Any = None,
    surgery_algs: _Transform | Sequence[_Transform] | None = None,
    transforms: _Transform | Sequence[_Transform] | None = None,
    load_path: str | Path | None = None,
    load_object_store: ObjectStore | None = None,
    load_strict: bool = False,
) -> None:
    """Write a copy of ``model``, on the CPU and in evaluation mode, to a file for serving.

    The program accepts batches of any size: the first dimension of the tensors in ``sample_input`` may change, unless
    the size is 1.

    Args:
        model: the model; stays unchanged.
        save_format: ``'torch_export'`` or ``'safetensors'``; see :class:`ExportFormat`.
        save_path: a path, a URI, or a name in ``save_object_store``.
        save_object_store: store for the file.
        sample_input: a tuple with the arguments of the model, as ``(batch,)``, with a dict of keyword arguments as the
            last item, as ``(batch, {})``; another value is the only argument. Required for ``'torch_export'``.
        surgery_algs: functions that change the model before the load, such as ``apply_blurpool``.
        transforms: functions that change the model before the export.
        load_path: a checkpoint with the weights for the copy.
        load_object_store: store with the checkpoint.
        load_strict: the names of weights must agree exactly.

    Raises:
        ConfigError: the format is unknown, ``sample_input`` or a package is missing, or the model is sharded.
        CheckpointError: ``load_path`` is missing, damaged or does not fit.
        torch._dynamo.exc.Unsupported: ``torch.export`` cannot trace the code of the model.

    Example:
        .. code-block:: python

            export_for_inference(model, "torch_export", "model.pt2", sample_input=(batch, {}))
    """
    form = ExportFormat(save_format)
    if form is ExportFormat.TORCH_EXPORT and sample_input is None:
        raise ConfigError(
            "export_for_inference(save_format='torch_export') traces a call of the model: pass sample_input=…."
        )
    if any(dist.is_distributed_tensor(parameter) for parameter in model.parameters()):
        raise ConfigError(
            "export_for_inference: the model is sharded over ranks. Export an unsharded model, with load_path=… of a "
            "checkpoint."
        )
    exported = copy.deepcopy(model).cpu()
    for change in _several(surgery_algs):
        exported = change(exported)
    if load_path is not None:
        state: Any = State(exported, rank_zero_seed=0, run_name="export", device=torch.device("cpu"))
        load_checkpoint(
            load_path, state, object_store=load_object_store, load_weights_only=True, strict_model_weights=load_strict
        )
    exported.eval()
    for change in _several(transforms):
        exported = change(exported)
    store, name = save_object_store, str(save_path)
    if store is None and is_uri(name):
        store, name = open_store(name), parse_uri(name)[2]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt2" if store is not None else Path(name)
        make_folder(path.parent)
        if form is ExportFormat.SAFETENSORS:
            write_safetensors(path, dict(exported.state_dict()))
        else:
            _write_program(exported, sample_input, path)
        if store is not None:
            store.upload_object(name, path)
    log.info("exported the model to %s", save_path)


def export_with_logger(
    model: nn.Module,
    save_format: str | ExportFormat,
    save_path: str,
    logger: Logger,
    save_object_store: ObjectStore | None = None,
    sample_input: Any = None,
    transforms: _Transform | Sequence[_Transform] | None = None,
) -> None:
    """Export the model, and upload the file with the loggers that upload files.

    With ``save_object_store``, a URI, or without such loggers, this is :func:`export_for_inference`.

    Args:
        model: the model; stays unchanged.
        save_format: ``'torch_export'`` or ``'safetensors'``; see :class:`ExportFormat`.
        save_path: name of the upload, or a path or URI.
        logger: uploads the file.
        save_object_store: store for the file.
        sample_input: arguments of the model; see :func:`export_for_inference`.
        transforms: functions that change the model before the export.

    Raises:
        ConfigError: see :func:`export_for_inference`.
    """
    if save_object_store is not None or not logger.has_file_upload_destination() or is_uri(save_path):
        export_for_inference(
            model, save_format, save_path, save_object_store, sample_input=sample_input, transforms=transforms
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / Path(save_path).name
        export_for_inference(model, save_format, path, sample_input=sample_input, transforms=transforms)
        logger.upload_file(save_path.lstrip("/"), path, overwrite=True)


@final
class ExportForInferenceCallback(Callback):
    """Exports the model when training ends, on rank 0. See :func:`export_with_logger`.

    Args:
        save_format: ``'torch_export'``, a program that runs without the code of the model, or ``'safetensors'``, the
            weights only.
        save_path: a path or a URI, a name in ``save_object_store``, or the name of the upload.
        save_object_store: store for the file.
        sample_input: the batch to trace the model with; by default the first batch of training.
        transforms: functions that change the model before the export.

    Raises:
        ConfigError: the format is unknown; at ``INIT`` the model is sharded over ranks.

    Example:
        .. code-block:: python

            Trainer(model=model, callbacks=ExportForInferenceCallback("torch_export", "model.pt2"))
    """

    @checked_arguments
    def __init__(
        self,
        save_format: str | ExportFormat,
        save_path: str,
        save_object_store: ObjectStore | None = None,
        sample_input: Any = None,
        transforms: Sequence[_Transform] | None = None,
    ) -> None:
        self.save_format = ExportFormat(save_format)
        self.save_path = save_path
        self.save_object_store = save_object_store
        self.sample_input = sample_input
        self.transforms = transforms

    def init(self, state: State, logger: Logger) -> None:
        if state.parallelism is not None or state.deepspeed_enabled:
            raise ConfigError(
                "ExportForInferenceCallback: the model is sharded over ranks. Leave the callback out, and call "
                "export_for_inference(model, …, load_path=…) with the last checkpoint."
            )

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if self.sample_input is None and self.save_format is ExportFormat.TORCH_EXPORT and state.rank == 0:
            self.sample_input = copy.deepcopy(state.batch)

    def fit_end(self, state: State, logger: Logger) -> None:
        if state.rank == 0:
            export_with_logger(
                state.model,
                self.save_format,
                self.save_path,
                logger,
                self.save_object_store,
                sample_input=(self.sample_input, {}),
                transforms=self.transforms,
            )


def _several(changes: _Transform | Sequence[_Transform] | None) -> Sequence[_Transform]:
    if changes is None:
        return ()
    return changes if isinstance(changes, Sequence) else (changes,)


def _write_program(model: nn.Module, sample_input: Any, path: Path) -> None:
    given: tuple[Any, ...] = sample_input if isinstance(sample_input, tuple) else (sample_input,)
    named: dict[str, Any] = {}
    if len(given) > 1 and isinstance(given[-1], dict):
        given, named = given[:-1], given[-1]
    given, named = move_to_device((given, named), torch.device("cpu"))
    arguments = inspect.signature(model.forward).bind(*given, **named).arguments

    def any_size(value: Any) -> dict[int, Any] | None:
        return {0: torch.export.Dim.AUTO} if isinstance(value, torch.Tensor) and value.ndim else None

    shapes = map_leaves(any_size, dict(arguments))
    program = torch.export.export(model, given, named, dynamic_shapes=shapes)
    with atomic_write(path) as file:
        torch.export.save(program, file)
