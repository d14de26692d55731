"""Checkpoints of single steps, for custom training loops.

A checkpoint is the directory ``step{step}``. The part ``model_and_optim/`` is a directory of
``torch.distributed.checkpoint``, and ``train/rank{rank}.pt`` has the train state of a rank. The file
``.metadata.json`` is written last: a directory without that file is no checkpoint.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, ClassVar, Protocol, final, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from composerlite.checkpoint.api.state_dict import (
    WorkDir,
    get_checkpoint_metadata,
    load_model_and_optim_state,
    load_state_dict,
    model_and_optim_state,
    task_of,
)
from composerlite.checkpoint.api.step_files import StepWriter, find_step, metadata_of, read_train_state
from composerlite.checkpoint.format import MARKER, MODEL, TRAIN
from composerlite.checkpoint.format.sharded_index import image_of
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.checkpoint.place.directory import ShardedDirectory, StepFolder
from composerlite.checkpoint.place.place import check_name
from composerlite.checkpoint.save.save import SaveTask
from composerlite.checkpoint.save.sharded_writer import ShardWriter, record_of_directory
from composerlite.checkpoint.save.snapshot import shared_staging
from composerlite.dist import Group, group_of
from composerlite.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from composerlite.storage import is_uri
from composerlite.types import StateDict

log = logging.getLogger(__name__)
_STEP = re.compile(r"step(0|[1-9]\d*)")


@runtime_checkable
class TrainModule(Protocol):
    """An object with methods to save and load, for example for several models and optimizers.

    The method ``state_dict_to_load(metadata, *, optim)`` is optional, and returns the state to fill from a checkpoint.
    ``metadata`` is the index of the checkpoint, and ``optim`` is ``load_optim_state`` of :meth:`Checkpointer.load`.
    """

    def state_dict_to_save(self) -> StateDict:
        """Return the state to save: ``{'model': …, 'optim': …}``. Tensors may be sharded."""
        ...

    def load_state_dict(self, state_dict: StateDict, /) -> object:
        """Restore the loaded state: the keys of the saved state, without ``'optim'`` if the optimizer is not loaded."""
        ...


TrainModuleLike = TrainModule | nn.Module | tuple[nn.Module, Optimizer | None]
"""A train module, a model, or a model and an optimizer."""


def model_and_optimizer(module: object) -> tuple[nn.Module, Optimizer | None]:
    """Return the model and the optimizer of ``module``, if ``module`` is no :class:`TrainModule`.

    Raises:
        ConfigError: ``module`` is neither a model nor a model and an optimizer.
    """
    pair: Any = module if isinstance(module, tuple) else (module, None)
    if len(pair) == 2 and isinstance(pair[0], nn.Module) and (pair[1] is None or hasattr(pair[1], "param_groups")):
        return pair
    kinds = ", ".join(type(one).__name__ for one in pair)
    raise ConfigError(
        f"train_module is ({kinds}): expected a model, (model, optimizer), or an object with state_dict_to_save() and "
        "load_state_dict(), which may save several models and optimizers."
    )


@final
@dataclass
class CheckpointerConfig:
    """Settings of a :class:`Checkpointer`, described there. ``dataclasses.asdict`` makes a dict of plain values.

    Args:
        work_dir, save_overwrite, pre_download, save_thread_count, load_thread_count, throttle_uploads: attributes of
            :class:`Checkpointer`.
    """

    work_dir: WorkDir = None
    save_overwrite: bool | None = None
    pre_download: bool = False
    save_thread_count: int | None = None
    load_thread_count: int | None = None
    throttle_uploads: bool = False

    def build(self, process_group: Any = None, **overrides: Any) -> Checkpointer:
        """Make the Checkpointer, with some fields replaced by ``overrides``.

        Args:
            process_group: the ranks that save and load together; ``None``: all ranks.
            **overrides: values of fields, in place of the values here.

        Returns:
            The Checkpointer.

        Raises:
            TypeError: there is no such field.
        """
        settings = dataclasses.asdict(dataclasses.replace(self, **overrides))
        settings["save_overwrite"] = bool(settings["save_overwrite"])
        return Checkpointer(**settings, process_group=process_group)


@final
@dataclass
class Checkpointer:
    """Saves and loads checkpoints of steps, on one process or several ranks, in a folder or at any URI.

    :meth:`save`, :meth:`save_async` and :meth:`load` are collective: all ranks of ``process_group`` call the method, in
    the main thread. If a rank fails, all ranks raise the error.

    Attributes:
        work_dir: with ``pre_download``: folder for the downloads, kept for later loads. ``None``: temporary.
        save_overwrite: replace a checkpoint in the directory. The old checkpoint is deleted first.
        pre_download: download the needed files to this machine before they are read.
        process_group: the ranks that save and load together. ``None``: all ranks, in a group separate from training.
        save_thread_count: number of files for a rank to write at the same time.
        load_thread_count: number of reading threads.
        throttle_uploads: to a URI, each rank uploads a single file at a time.
    """

    METADATA_FNAME: ClassVar[str] = MARKER
    CHECKPOINT_DIR: ClassVar[str] = "step{step}"

    work_dir: WorkDir = None
    save_overwrite: bool = False
    pre_download: bool = False
    process_group: Any = None
    save_thread_count: int | None = None
    load_thread_count: int | None = None
    throttle_uploads: bool = False
    _last: Future[None] | None = field(default=None, init=False, repr=False, compare=False)

    # ── save ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def save(
        self,
        dir: str | os.PathLike[str],
        train_module: TrainModuleLike,
        train_state: StateDict,
        ephemeral: bool = False,
    ) -> None:
        """Save to the directory ``dir``, usually ``step{step}`` in the folder of the run.

        The checkpoint is durable when the method returns. After an error there is no new checkpoint, and the directory
        can be saved to again. Other files in the directory stay.

        Args:
            dir: a path, or a URI of an object store.
            train_module: a :class:`TrainModule`, a model, or a model and an optimizer.
            train_state: further state of this rank, such as random numbers, the position in the data, the step.
            ephemeral: the checkpoint may be deleted once a newer checkpoint exists; see :meth:`find_checkpoints`.

        Raises:
            CheckpointExistsError: a FileExistsError: there is a checkpoint, and ``save_overwrite`` is false.
            RankError: a rank failed to write, or is late. Every rank raises this error, and the message names the rank.
                A single process raises the original error.
            ConfigError: ``train_module`` is of another type, or cannot be saved; the directory cannot have this name;
                the URI names no store; or a machine does not see the folder.
            SaveError: a value in ``train_state`` or the model cannot be saved, or would not be loaded; names the key.
        """
        self._begin(dir, train_module, train_state, ephemeral).run()

    def save_async(
        self,
        dir: str | os.PathLike[str],
        train_module: TrainModuleLike,
        train_state: StateDict,
        ephemeral: bool = False,
    ) -> Future[None]:
        """Copy the state, and save the copy in the background, as :meth:`save` does.

        Waits for the end of the previous save first.

        Returns:
            A future, done when the checkpoint is durable, or with the error of the save. The program waits for
            the future before it exits.

        Args:
            dir, train_module, train_state, ephemeral: as in :meth:`save`.

        Raises:
            CheckpointExistsError, ConfigError, SaveError: as :meth:`save`.
        """
        self._last = self._begin(dir, train_module, train_state, ephemeral).begin(shared_staging)
        return self._last

    def _begin(
        self, place: str | os.PathLike[str], train_module: TrainModuleLike, train_state: StateDict, ephemeral: bool
    ) -> SaveTask:
        """Claim the directory and plan the save, with all ranks."""
        if self._last is not None:
            concurrent.futures.wait([self._last])  # the caller has the future, with the error
        group = group_of(self.process_group)
        images: list[TorchImage] = []

        def state() -> StateDict:
            images.append(image_of(train_state, "train_state"))
            if isinstance(train_module, TrainModule):
                return train_module.state_dict_to_save()
            return model_and_optim_state(*model_and_optimizer(train_module), flatten=False)

        with contextlib.ExitStack() as resources:
            folder = resources.enter_context(StepFolder.of(place))
            what = "looking for an existing checkpoint"
            group.from_first(what, lambda: folder.check_free(overwrite=self.save_overwrite))
            shards = ShardWriter(
                state,
                folder.model(),
                group=group,
                overwrite=True,  # files of a killed save; check_free decides about a checkpoint
                threads=1 if self.throttle_uploads and is_uri(folder.uri) else self.save_thread_count,
            )
            resources.callback(shards.close, may_be_committed=False)
            # The new files have the names of the old files, so the old checkpoint is deleted here. All checks have
            # passed: from here on only the disk can fail.
            group.from_first("removing the replaced checkpoint", folder.uncommit)
            resources.pop_all()
        number = folder.name.rpartition("step")[2]
        batch = int(number) if number.isdecimal() else 0
        record = record_of_directory(folder.name or "step", group.size, kind="step", batch=batch)
        record = dataclasses.replace(record, form="step", template="step{step}", ephemeral=ephemeral)
        return task_of(record, folder.uri, StepWriter(folder, shards, images[0], group.rank), group)

    def write_file(self, dir: str | os.PathLike[str], fname: str, contents: str | bytes) -> str:
        """Write ``contents`` atomically to the file ``fname`` of the directory ``dir``, and return the path.

        Call on a single rank. Saves neither change nor remove the file.

        Args:
            dir: directory of the checkpoint, a path or a URI.
            fname: name of the file, relative to ``dir``.
            contents: text, written as UTF-8, or bytes.

        Returns:
            Path or URI of the file.

        Raises:
            FileExistsError: the file exists, and ``save_overwrite`` is false.
            ConfigError: ``fname`` leads out of the directory, or is a name of the checkpoint's own files.
        """
        parts = PurePosixPath(fname).parts
        own = (MARKER, MODEL, TRAIN)
        if not parts or fname.startswith("/") or ".." in parts or parts[0] in own:
            raise ConfigError(
                f"fname={fname!r}: expected a name in the directory that is not one of the checkpoint's own: {MARKER}, "
                f"{MODEL}, {TRAIN}."
            )
        data = contents.encode() if isinstance(contents, str) else contents
        with StepFolder.of(dir) as folder:
            path = folder.at(fname)
            check_name(folder.place, path)
            try:
                folder.place.put(path, data, create_only=not self.save_overwrite)
            except FileExistsError as e:
                raise FileExistsError(
                    f"{folder.place.uri(path)!r} exists already. Give another name, or set save_overwrite=True."
                ) from e
            return folder.place.uri(path)

    # ── load ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def load(
        self,
        dir: str | os.PathLike[str],
        train_module: TrainModuleLike,
        *,
        load_trainer_state: bool | None = None,
        load_optim_state: bool | None = None,
    ) -> StateDict | None:
        """Load the model, and the optimizer, in place, and return the ``train_state`` of this rank.

        The number of ranks may differ from the save. A rank without a saved train state gets the train state of rank 0,
        with a warning.

        Args:
            dir: a checkpoint, or a directory with the model and the optimizer alone.
            train_module: as for :meth:`save`.
            load_trainer_state: whether to read ``train_state``. ``None``: true if there is a train state.
            load_optim_state: whether to load the optimizer. ``None``: true if ``train_module`` and the checkpoint
                have an optimizer.

        Returns:
            ``train_state``; ``None`` if not read.

        Raises:
            CheckpointNotFoundError: there is no checkpoint, or ``load_trainer_state`` is true and there is no train
                state.
            IncompatibleCheckpointError: the checkpoint does not fit the model or the optimizer, or
                ``load_optim_state`` is true and the checkpoint has no optimizer.
            CorruptCheckpointError: the bytes differ from the saved bytes, or the checkpoint was replaced during the
                load. Tensors may have been filled.
            UntrustedCheckpointError: the checkpoint has types not known to be safe to load.
            ConfigError: ``train_module`` is of another type, or cannot be saved.
        """
        group = group_of(self.process_group)
        with StepFolder.of(dir) as folder:
            before: set[str] = group.all_reduce("comparing versions", folder.version, set)
            files = group.from_first("looking for a checkpoint", lambda: find_step(folder, load_trainer_state))
            train_state = None
            if files:
                train_state = group.agree("reading the train state", lambda: read_train_state(folder, files, group))
            self._load_model(folder.model(bare=files is None), group, train_module, load_optim_state)
            after: set[str] = group.all_reduce("comparing versions", folder.version, set)
            if len(before) > 1 or before != after:
                raise CorruptCheckpointError(
                    f"{folder.uri!r} was replaced while it was read: the model may have parts of both checkpoints. "
                    "Load it again, before training continues."
                )
            return train_state

    def _load_model(self, place: ShardedDirectory, group: Group, module: TrainModuleLike, optim: bool | None) -> None:
        metadata = group.agree("reading the index", lambda: get_checkpoint_metadata(place))
        has_optim = any(key.startswith("optim.") for key in metadata.state_dict_metadata)
        if optim and not has_optim:
            raise IncompatibleCheckpointError(
                f"load_optim_state=True: checkpoint {place.uri!r} has no optimizer. load_optim_state=None loads an "
                "optimizer only if the checkpoint has one."
            )
        wants = has_optim if optim is None else optim
        settings: dict[str, Any] = {
            "process_group": self.process_group,
            "pre_download": self.pre_download,
            "work_dir": self.work_dir,
            "thread_count": self.load_thread_count,
        }
        if not isinstance(module, TrainModule):
            model, optimizer = model_and_optimizer(module)
            load_model_and_optim_state(place, model, optimizer if wants else None, **settings)
            return
        if (to_load := getattr(module, "state_dict_to_load", None)) is not None:
            state = to_load(metadata, optim=optim)
        else:
            state = {key: value for key, value in module.state_dict_to_save().items() if wants or key != "optim"}
        load_state_dict(place, state, **settings)
        module.load_state_dict(state)

    # ── find ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @classmethod
    def checkpoint_dirname(cls, step: int) -> str:
        """Return the name of the directory of ``step``."""
        return cls.CHECKPOINT_DIR.format(step=step)

    @classmethod
    def dir_is_checkpoint(cls, dir: str | os.PathLike[str]) -> bool:
        """Return true if ``dir`` is a complete checkpoint, or a directory with the model and the optimizer alone."""
        with StepFolder.of(dir) as folder:
            return folder.is_checkpoint()

    @classmethod
    def find_checkpoints(cls, dir: str | os.PathLike[str], ephemeral: bool | None = None) -> Generator[tuple[int, str]]:
        """List the checkpoints in the folder ``dir``, by increasing step.

        A checkpoint with a damaged ``.metadata.json`` is skipped, with a warning, if other checkpoints are readable.

        Args:
            dir: a path, or a URI of an object store.
            ephemeral: true or false: only checkpoints saved with this value; ``None``: all.

        Yields:
            Step and path or URI of each checkpoint.

        Raises:
            CorruptCheckpointError: there are checkpoints, and all of them are damaged.
        """
        damaged, readable = list[str](), False
        with StepFolder.of(dir) as folder:
            matches = filter(None, map(_STEP.fullmatch, folder.place.names(folder.name)))
            marked = (match for match in matches if folder.has(f"{match[0]}/{MARKER}"))
            for match in sorted(marked, key=lambda match: int(match[1])):
                step = StepFolder(folder.place.inside(folder.name), match[0])
                try:
                    found = metadata_of(step) if step.is_checkpoint() else None
                except (CorruptCheckpointError, OSError) as e:
                    log.warning("skipped %s, which is damaged: %s", step.uri, e)
                    damaged.append(f"{step.uri}: {e}")
                    continue
                readable |= found is not None
                if found is not None and ephemeral in (None, found.ephemeral):
                    yield int(match[1]), step.uri
        if damaged and not readable:
            raise CorruptCheckpointError(
                f"checkpoints exist in {os.fspath(dir)!r}, but none can be read. Tried: {'; '.join(damaged)}. If "
                "the files are good on another machine, this machine reads them wrongly. Otherwise load a "
                "checkpoint from another folder, or start over in another folder."
            )

    @classmethod
    def contains_checkpoint(cls, dir: str | os.PathLike[str]) -> bool:
        """Return true if the folder ``dir`` is a checkpoint or contains checkpoints.

        Raises:
            CorruptCheckpointError: there are checkpoints, and all of them are damaged.
        """
        return cls.dir_is_checkpoint(dir) or any(True for _ in cls.find_checkpoints(dir))

    @classmethod
    def latest_checkpoint(cls, dir: str | os.PathLike[str]) -> str:
        """Return the path of the checkpoint of the last step in the folder ``dir``.

        Raises:
            CheckpointNotFoundError: a FileNotFoundError: there is no checkpoint.
            CorruptCheckpointError: there are checkpoints, and all of them are damaged.
        """
        found = list(cls.find_checkpoints(dir))
        if not found:
            raise CheckpointNotFoundError(
                f"there is no checkpoint in {os.fspath(dir)!r}: no directory step<number> with a {MARKER!r} in it."
            )
        return found[-1][1]
