"""Contents of a checkpoint: the parts of a state for a save, and the selected parts of a load."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import logging
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, SupportsInt, TypeAlias, final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from composerlite import dist
from composerlite.checkpoint.format.torch_file import check_savable
from composerlite.checkpoint.record.naming import TimestampLike
from composerlite.dist import is_dense
from composerlite.errors import ConfigError, CorruptCheckpointError, IncompatibleCheckpointError, SaveError
from composerlite.storage import ObjectStore
from composerlite.types import Lineage, StateDict, items_of, with_items

log = logging.getLogger(__name__)


IgnoreKeys: TypeAlias = "Sequence[str] | Callable[[StateDict], None] | None"
"""Globs over '/'-joined paths such as ``'state/model/head.*'``, or a function that removes keys in place."""


class DeepSpeedEngine(Protocol):
    """Interface of DeepSpeed's engine for saves and loads. Every method except ``convert`` is collective."""

    def saved(self) -> dict[str, StateDict]:
        """Return the contents of each file of this rank, by file name. Tensors are live, not copies."""
        ...

    def load_checkpoint(
        self, template: str, plan: RestorePlan, object_store: ObjectStore | None, *, trust: bool
    ) -> list[dict[str, Any]] | None:
        """Restore the engine and the rest of the state, and return the states of the random generators, if any.

        Args:
            template: name of the archive of rank 0, or of all archives with ``{rank}`` in the name.
            plan: parts of the state to restore.
            object_store: the store with the archives; ``None``: ``template`` is a path or a URI.
            trust: load any type, **running any code in the files**.
        """

    def check_fits(self, model: StateDict, *, source: str) -> None:
        """Compare the model of a checkpoint with the model in training.

        Args:
            model: contents of a file of model states.
            source: the checkpoint, for messages.

        Raises:
            IncompatibleCheckpointError: names or shapes of trained parameters differ; lists all of them.
        """

    def load(self, files: Mapping[str, StateDict], *, source: str) -> None:
        """Restore the model and the optimizer from this rank's ``files``, by name, with classes of ``types``.

        Raises:
            IncompatibleCheckpointError: as :meth:`check_fits`.
        """

    def convert(self, folder: Path, *, source: str) -> None:
        """Convert the files of all ranks in ``folder`` for :meth:`load_converted`. Call on one rank.

        Raises:
            IncompatibleCheckpointError: DeepSpeed cannot convert the files.
        """

    def load_converted(self, folder: Path, files: Mapping[str, StateDict], *, source: str) -> None:
        """Restore trained weights and the optimizer from the result of :meth:`convert`; ``files`` are model states."""

    def load_weights(self, weights: Mapping[str, Tensor] | None, *, strict: bool, source: str) -> None:
        """Set the tensors of the model from the ``weights`` of rank 0, by name; other ranks pass ``None``.

        Raises:
            IncompatibleCheckpointError: names differ and ``strict`` is true, or shapes differ; lists all of them.
        """

    @property
    def types(self) -> dict[str, type]:
        """Classes in DeepSpeed's files, by full name."""
        ...


class TrainingState(Protocol):
    """Interface of a training state for saves and loads. The Trainer, or a loop without a Trainer, has the state.

    Attributes:
        run_name: name of the run.
        lineage: attempt of the run.
        not_finite: names of losses and gradient norms of the last batch with NaN or infinite values.
    """

    run_name: str
    lineage: Lineage
    not_finite: tuple[str, ...]

    @property
    def timestamp(self) -> TimestampLike: ...

    @property
    def fit_starts(self) -> Sequence[TimestampLike]:
        """Timestamp of the run at each call of ``fit``, also of calls before a resume. Empty without a Trainer."""
        ...

    @property
    def sharding(self) -> str | None:
        """``'sharded'``: every rank writes its part of a directory; ``'full'``: distributed tensors are gathered;
        ``'deepspeed'``: every rank writes an archive.

        ``None``: every rank has the whole state.
        """

    @property
    def deepspeed(self) -> DeepSpeedEngine | None:
        """DeepSpeed's engine, if the engine has the model and the optimizer."""

    @property
    def optimizers(self) -> Sequence[Optimizer]: ...

    @property
    def schedulers(self) -> Sequence[LRScheduler]: ...

    @property
    def algorithms(self) -> Sequence[object]:
        """Algorithms, such as changes of the model. A load may add algorithms from the checkpoint."""
        ...

    @property
    def dataloader_len(self) -> SupportsInt | None:
        """Batches of an epoch, if known."""

    def get_optim_state_dict(self) -> StateDict:
        """Return the state of each optimizer, with the names of parameters, by the name of the optimizer's class."""
        ...

    def state_dict(self) -> StateDict:
        """Return the contents of a checkpoint, with live tensors: copy or write these before training continues."""
        ...

    def weights_state_dict(self) -> StateDict:
        """Return the contents of a checkpoint with the weights alone, with live tensors."""
        ...

    def places_for(
        self, state_dict: StateDict, *, weights_only: bool, strict: bool, exclude_algorithms: Sequence[str], source: str
    ) -> StateDict:
        """Return the live tensors to load ``state_dict`` into. Keys without a live tensor are absent.

        Args:
            state_dict: contents of a checkpoint.
            weights_only: tensors of the model alone.
            strict: missing and unexpected weights are an error.
            exclude_algorithms: names of algorithms whose state is ignored.
            source: path or URI of the checkpoint, for errors.

        Returns:
            Live tensors by the keys of ``state_dict``.

        Raises:
            IncompatibleCheckpointError: ``state_dict`` does not fit.
        """
        ...

    def load_state_dict(
        self, state_dict: StateDict, *, weights_only: bool, strict: bool, exclude_algorithms: Sequence[str], source: str
    ) -> None:
        """Restore the whole state from ``state_dict``, or the model alone.

        Args:
            state_dict: contents of a checkpoint.
            weights_only: restore the model alone.
            strict: missing and unexpected weights are an error.
            exclude_algorithms: names of algorithms whose state is ignored.
            source: path or URI of the checkpoint, for errors.
        """


def check_kinds(state_dict: StateDict, ignore_keys: IgnoreKeys) -> None:
    """Check that every tensor in ``state_dict`` can be saved and loaded. Tensors of ``ignore_keys`` may be of any kind.

    Raises:
        ConfigError: some tensors cannot be saved; lists every such tensor and the remedy.
    """
    contents = {"state": state_dict}
    problems = list(_of_no_kind(contents, ""))
    if problems and ignore_keys is not None:
        problems = list(_of_no_kind(without(contents, ignore_keys), ""))
    if problems:
        raise ConfigError(
            f"a checkpoint cannot save these tensors. {' '.join(problems)} Or exclude them with save_ignore_keys."
        )


def _of_no_kind(node: Any, path: str) -> Iterator[str]:
    """List the unsupported tensors in ``node``, each with the reason."""
    if isinstance(node, Tensor) and not is_dense(node):
        try:
            check_savable(node)
        except SaveError as e:
            yield f"{path!r}: {e}"
    for key, value in items_of(node):
        yield from _of_no_kind(value, f"{path}/{key}" if path else str(key))


def check_ignore_keys(ignore_keys: IgnoreKeys, *, argument: str) -> IgnoreKeys:
    """Check that ``ignore_keys`` are ``None``, globs or a function, and return the keys: globs as a new list.

    Raises:
        ConfigError: ``ignore_keys`` are neither globs nor a function.
    """
    if ignore_keys is None or callable(ignore_keys):
        return ignore_keys
    iterable = isinstance(ignore_keys, Iterable) and not isinstance(ignore_keys, str)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not iterable or not all(isinstance(glob, str) for glob in ignore_keys):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"{argument}={ignore_keys!r}: expected a list of globs such as ['state/optimizers/*'], or a function."
        )
    return list(ignore_keys)


def without(contents: StateDict, ignore_keys: IgnoreKeys) -> StateDict:
    """Return a copy of ``contents`` without ``ignore_keys``, or ``contents`` if ``ignore_keys`` are ``None``.

    Tensors are shared. Logs a warning for each glob without a match. If globs remove all items of a container, the
    empty container is removed from a dict, and stays in a list, so the next items of the list keep their numbers.
    Containers that are empty in ``contents`` stay.
    """
    if ignore_keys is None:
        return contents
    if callable(ignore_keys):
        copy = with_tensors(contents, {})
        ignore_keys(copy)
        return copy
    used: set[str] = set()
    kept = _filtered(contents, tuple(ignore_keys), used, "")
    for glob in ignore_keys:
        if glob not in used:
            log.warning("ignore_keys: %r matches nothing in the checkpoint", glob)
    return kept


def glob_filter(exclude_globs: Sequence[str]) -> Callable[[StateDict], None]:
    """Return a function for ``load_ignore_keys`` that removes all matching keys from a dict, in place."""
    return functools.partial(remove_keys, list(exclude_globs))


def remove_keys(ignore_keys: IgnoreKeys, contents: StateDict) -> None:
    """Remove ``ignore_keys`` from ``contents``, in place, as :func:`without` does."""
    kept = dict(without(contents, ignore_keys))
    contents.clear()
    contents.update(kept)


def _filtered(node: Any, globs: Sequence[str], used: set[str], path: str) -> Any:
    """Return a copy of ``node`` without paths that match ``globs``. Add the matching globs to ``used``."""
    if type(node) not in (dict, list):
        return node
    kept: list[tuple[Any, Any]] = []
    for key, value in items_of(node):
        child = f"{path}/{key}" if path else str(key)
        if hits := [glob for glob in globs if fnmatch.fnmatchcase(child, glob)]:
            used.update(hits)
            continue
        inner = _filtered(value, globs, used, child)
        is_emptied = type(inner) in (dict, list) and not inner and bool(value)
        if type(node) is list or not is_emptied:
            kept.append((key, inner))
    return dict(kept) if type(node) is dict else [value for _, value in kept]


# ── restoring a state ────────────────────────────────────────────────────────────────────────────────────────────────
WEIGHTS_ONLY = {"model", "integrations", "metadata", "algorithms"}
"""Keys of the state in a checkpoint of weights alone."""


@final
@dataclass
class RestorePlan:
    """One load of a checkpoint into a state: call :meth:`matched`, read the tensors, then call :meth:`restore`.

    Attributes:
        state: the state to restore.
        source: name of the checkpoint, for messages.
        weights_only: restore the model alone; set by :meth:`matched` for a checkpoint of weights.
        strict: parameter names must agree exactly.
        ignore_keys: keys not to restore.
        exclude_algorithms: names of algorithms not to restore.
        key_map: keys in a checkpoint of another program, by the part of a run, with dots between nested keys, such as
            ``{'model': 'net.*', 'batch': 'step'}``; ``None``: the program is recognised by the contents.
        is_foreign: another program saved the checkpoint; set by :meth:`in_our_form`.
        contents: the contents to restore, with all tensors read; set by the reader. The values of tensors may be in the
            state already; nothing else is restored yet.
        verified: indices of the chunks verified on this rank, by the name of the file; set by the reader.
    """

    state: TrainingState
    source: str
    weights_only: bool = False
    strict: bool = True
    ignore_keys: IgnoreKeys = None
    exclude_algorithms: Sequence[str] = ()
    key_map: Mapping[str, str] | None = None
    is_foreign: bool = False
    contents: StateDict = field(default_factory=dict[str, Any], init=False)
    verified: Mapping[str, Collection[int]] = field(default_factory=dict[str, Collection[int]], init=False)

    def matched(self, contents: Any) -> tuple[StateDict, StateDict]:
        """Return the parts of ``contents``, from any program, to load, and the live tensors to load these parts into.

        Values of tensors are not used. ``weights_only`` is set if ``contents`` has nothing but weights.

        Raises:
            IncompatibleCheckpointError: ``contents`` are no checkpoint, or do not fit.
            ConfigError: ``key_map`` names a missing key.
        """
        contents = self.in_our_form(contents)
        self.weights_only = self.weights_only or set(contents["state"]) <= WEIGHTS_ONLY
        contents = without(contents, self.ignore_keys)
        wanted: StateDict = {"state": contents.get("state", {}), "rng": contents.get("rng")}
        if self.weights_only:
            wanted = {"state": {key: value for key, value in wanted["state"].items() if key in WEIGHTS_ONLY}}
        return wanted, {"state": self.state.places_for(wanted["state"], **self._how)}

    def in_our_form(self, contents: Any) -> StateDict:
        """Return ``contents``, from any program, in the form of our checkpoints, with the names of the state.

        Values of tensors are not used. ``is_foreign`` is set if another program saved the checkpoint. Raises as
        :meth:`matched`.
        """
        # Readers of other formats are rarely needed.
        if self.key_map is not None or not is_of_a_run(contents):
            from composerlite.checkpoint.foreign.keys import Run
            from composerlite.checkpoint.foreign.systems import as_of_a_run

            self.is_foreign = True
            globs = () if self.ignore_keys is None or callable(self.ignore_keys) else self.ignore_keys
            left_out = self.weights_only or any(fnmatch.fnmatchcase("state/optimizers", glob) for glob in globs)
            run = Run(
                self.state.weights_state_dict()["model"],
                {} if left_out else self.state.get_optim_state_dict(),
                {type(one).__qualname__: one.state_dict() for one in self.state.schedulers},
                self.strict,
                self.source,
            )
            return as_of_a_run(contents, run, key_map=self.key_map)
        metadata = contents["state"].get("metadata")
        if not isinstance(metadata, Mapping) or "composerlite_version" not in metadata:
            from composerlite.checkpoint.foreign.systems import in_current_form

            return in_current_form(contents, source=self.source, weights_only=self.weights_only)
        return contents

    @property
    def _how(self) -> dict[str, Any]:
        how = {"weights_only": self.weights_only, "strict": self.strict, "source": self.source}
        return {**how, "exclude_algorithms": self.exclude_algorithms}

    def restore(self) -> list[dict[str, Any]] | None:
        """Restore everything except the tensors that are in the state already. Collective.

        Returns:
            States of the random generators; ``None`` if there are none, or only weights are restored.
        """
        with dist.get_group().all_or_none("restoring the run"):
            if self.is_foreign:
                from composerlite.checkpoint.foreign.keys import settle_time

                length = self.state.dataloader_len
                settle_time(self.contents["state"], None if length is None else int(length), self.source)
            self.state.load_state_dict(self.contents["state"], **self._how)
            log.debug("loaded %s", self.source)
            return self.contents.get("rng")


@contextlib.contextmanager
def half_loaded(in_place: bool) -> Generator[None]:
    """Add a warning about a partly overwritten state to each CorruptCheckpointError of the block, if ``in_place``."""
    try:
        yield
    except CorruptCheckpointError as e:
        if in_place:
            lost = "This load has partly overwritten the training state, which must not be used"
            e.args = (f"{e} {lost}: build it anew, or load another checkpoint into it.",)
        raise


def tensor_pairs(saved: Any, live: Any) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield each tensor in nested contents, and the live tensor at the same path of keys, if there is one."""
    if isinstance(saved, Tensor):
        yield saved, live if isinstance(live, Tensor) else None
        return
    lives = dict(items_of(live))
    for key, value in items_of(saved):
        if isinstance(value, Tensor | dict | list | tuple | deque):
            yield from tensor_pairs(value, lives.get(key))


def with_tensors(node: Any, replaced: Mapping[int, Tensor]) -> Any:
    """Return a copy of nested contents. ``replaced`` has the new tensors, by the ``id`` of the old tensor."""
    if isinstance(node, Tensor):
        return replaced.get(id(node), node)
    return with_items(node, lambda _, value: with_tensors(value, replaced))


def is_of_a_run(contents: Any) -> bool:
    """Return true for contents of a checkpoint of ours or Composer's."""
    if not isinstance(contents, dict):
        return False
    return isinstance(contents.get("state"), dict) and "param_groups" not in contents  # pyright: ignore[reportUnknownMemberType]


def check_kind(contents: Any, source: str) -> None:
    """Check that ``contents`` are a checkpoint of ours or Composer's.

    Raises:
        IncompatibleCheckpointError: ``contents`` are something else.
    """
    if is_of_a_run(contents):
        return
    found = ", ".join(map(repr, list(contents)[:8])) if isinstance(contents, dict) else type(contents).__name__  # pyright: ignore
    raise IncompatibleCheckpointError(
        f"{source} is not a checkpoint of a run: it holds {found or 'nothing'}, and no 'state' of a run. If it is "
        "a bare state dict of a model, load it with model.load_state_dict(torch.load(path))."
    )
