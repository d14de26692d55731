"""Loading: find the file, see what it holds, see that it fits, read its tensors to where they belong."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from composerlite.checkpoint.contents import IgnoreKeys, TrainingState, check_ignore_keys, without
from composerlite.checkpoint.download import fetched
from composerlite.checkpoint.formats.torch_reader import MapLocation, TorchFile
from composerlite.checkpoint.in_place import placed
from composerlite.checkpoint.naming import format_name_with_dist
from composerlite.checkpoint.progress import Progress
from composerlite.checkpoint.reading import opened, readable
from composerlite.errors import CorruptCheckpointError, IncompatibleCheckpointError
from composerlite.storage import ObjectStore
from composerlite.types import StateDict

__all__ = ["load_checkpoint", "read_checkpoint"]

log = logging.getLogger(__name__)
_WEIGHTS_ONLY = {"model", "integrations", "metadata", "algorithms"}
"""What a checkpoint holds at most that was saved for its weights."""


def read_checkpoint(
    path: str | Path,
    *,
    trust_checkpoint: bool = False,
    progress_bar: bool = False,
    map_location: MapLocation = "cpu",
    ignore_keys: IgnoreKeys = None,
) -> StateDict:
    """The contents of the checkpoint file ``path``, verified against its manifest where it has one.

    Args:
        path: a file; compressed or in an archive, too.
        trust_checkpoint: load any type, **running whatever code the file holds**.
        progress_bar: show one on a terminal while a large file is read.
        map_location: where tensors go, as ``torch.load`` takes it.
        ignore_keys: leave these out; the bytes of their tensors are not read.

    Raises:
        CheckpointNotFoundError: there is no such file; the message lists what the folder has.
        CorruptCheckpointError: the bytes are not those that were saved.
        UntrustedCheckpointError: it holds a type that is not known to be safe.
        IncompatibleCheckpointError: a torch file, but not a checkpoint.
    """
    path = Path(path)
    ignore_keys = check_ignore_keys(ignore_keys, argument="ignore_keys")
    with opened(path, map_location=map_location, trust=trust_checkpoint, progress_bar=progress_bar) as (file, progress):
        _check_kind(file.contents, path)
        file.contents = without(file.contents, ignore_keys)
        file.read(progress=progress)
        return file.contents


def load_checkpoint(
    path: str | Path,
    state: TrainingState,
    logger: object = None,
    object_store: ObjectStore | None = None,
    *,
    load_weights_only: bool = False,
    strict_model_weights: bool = True,
    progress_bar: bool = True,
    ignore_keys: IgnoreKeys = None,
    exclude_algorithms: Sequence[str] | None = None,
    trust_checkpoint: bool = False,
) -> list[dict[str, Any]] | None:
    """Restore ``state`` from the checkpoint ``path`` and return the states of the random generators, one per rank.

    The generators are not touched: apply them with ``composerlite.checkpoint.rng.restore`` when training starts.

    What does not fit is said, whole, before anything in ``state`` is changed. Tensors that are on the CPU and have the
    form of the saved ones are then read in place, and verified as they are: a file whose damage shows only there leaves
    ``state`` unusable, and the error says so. Autoresume verifies a file first.

    Args:
        path: a file, a URI, or a name in ``object_store``; format variables of ranks (``{run_name}``, ``{rank}``) are
            filled in, links are followed. What is elsewhere is downloaded first.
        state: what to restore.
        logger: not used; accepted because Composer's function has it.
        object_store: the store that ``path`` is a name in.
        load_weights_only: restore the model alone.
        strict_model_weights: parameter names must agree exactly; shapes must agree in any case.
        progress_bar: show one on a terminal while a large file is downloaded or read.
        ignore_keys: leave these keys as they are in ``state``; the bytes of their tensors are not read.
        exclude_algorithms: names of algorithms whose state is not restored and which are not rebuilt.
        trust_checkpoint: load any type, **running whatever code the file holds**.

    Returns:
        The generator states, or ``None`` where weights only were loaded or saved.

    Raises:
        CheckpointError: see :func:`read_checkpoint`; or the checkpoint does not fit, with all that differs.
    """
    name = format_name_with_dist(str(path), state.run_name)
    ignore_keys = check_ignore_keys(ignore_keys, argument="load_ignore_keys")
    with fetched(name, object_store, progress_bar=progress_bar) as file:
        return _load(
            file,
            state,
            load_weights_only=load_weights_only,
            strict=strict_model_weights,
            progress_bar=progress_bar,
            ignore_keys=ignore_keys,
            exclude_algorithms=list(exclude_algorithms or ()),
            trust=trust_checkpoint,
            source=f"checkpoint {name!r}",
        )


def _load(
    path: Path,
    state: TrainingState,
    *,
    load_weights_only: bool,
    strict: bool,
    progress_bar: bool,
    ignore_keys: IgnoreKeys,
    exclude_algorithms: Sequence[str],
    trust: bool,
    source: str,
) -> list[dict[str, Any]] | None:
    """Load a file of this machine."""
    with opened(path, trust=trust, progress_bar=progress_bar) as (file, progress):
        _check_kind(file.contents, path)
        weights_only = load_weights_only or set(file.contents["state"]) <= _WEIGHTS_ONLY
        file.contents = without(file.contents, ignore_keys)
        wanted: StateDict = {"state": file.contents.get("state", {})}
        if weights_only:
            wanted["state"] = {key: value for key, value in wanted["state"].items() if key in _WEIGHTS_ONLY}
        else:
            wanted["rng"] = file.contents.get("rng")
        file.contents = wanted
        del wanted
        live = state.places_for(
            file.contents["state"],
            weights_only=weights_only,
            strict=strict,
            exclude_algorithms=exclude_algorithms,
            source=source,
        )
        _read_in_place(file, {"state": live}, progress, path)
        contents = file.contents
    if weights_only:
        state.load_model_state(contents["state"], strict=strict, exclude_algorithms=exclude_algorithms, source=source)
        log.info("loaded the weights of %s", source)
        return None
    state.load_state_dict(contents["state"], strict=strict, exclude_algorithms=exclude_algorithms, source=source)
    log.info("loaded %s", source)
    return contents["rng"]


def _read_in_place(file: TorchFile, live: StateDict, progress: Progress, path: Path) -> None:
    """Read the tensors of ``file``, those that can into ``live`` ones, which then are in the contents instead."""
    file.contents, places = placed(file.contents, live, file.unread())
    with readable(path.resolve()), _half_loaded(bool(places)):
        file.read(places=places, progress=progress)


@contextlib.contextmanager
def _half_loaded(in_place: bool) -> Generator[None]:
    try:
        yield
    except CorruptCheckpointError as e:
        if not in_place:
            raise
        raise CorruptCheckpointError(
            f"{e} The state that it was being loaded into holds a part of it now and must not be used: build it anew, "
            "or load another checkpoint into it."
        ) from e


def _check_kind(contents: Any, path: Path) -> None:
    if isinstance(contents, dict) and isinstance(contents.get("state"), dict):
        return
    found = ", ".join(map(repr, list(contents)[:8])) if isinstance(contents, dict) else type(contents).__name__
    raise IncompatibleCheckpointError(
        f"{str(path)!r} is not a checkpoint of a run: it holds {found or 'nothing'} and no 'state'. If it is "
        "a bare state dict of a model, load it with model.load_state_dict(torch.load(path))."
    )
