"""Loading: find the file, verify it, read it, restore the state."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from composerlite.checkpoint.catalog import Catalog
from composerlite.checkpoint.contents import IgnoreKeys, TrainingState, check_ignore_keys, without
from composerlite.checkpoint.naming import format_name_with_dist
from composerlite.checkpoint.trusted import safe_torch_load
from composerlite.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError
from composerlite.types import StateDict

__all__ = ["load_checkpoint", "read_checkpoint"]

log = logging.getLogger(__name__)
_LARGE_BYTES = 1 << 28
_WEIGHTS_ONLY = {"model", "integrations", "metadata", "algorithms"}
"""What a checkpoint holds at most that was saved for its weights."""


def read_checkpoint(path: str | Path, *, trust_checkpoint: bool = False, progress_bar: bool = False) -> StateDict:
    """The contents of the checkpoint file ``path``, verified against its manifest where it has one.

    ``progress_bar`` shows one on a terminal while a large file is verified.

    Raises:
        CheckpointNotFoundError: there is no such file; the message lists what the folder has.
        CorruptCheckpointError: the bytes are not those that were saved.
        UntrustedCheckpointError: it holds a type that is not known to be safe.
        IncompatibleCheckpointError: a torch file, but not a checkpoint.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointNotFoundError(f"there is no checkpoint file {str(path)!r}.{_what_is_there(path)}")
    path = path.resolve()
    catalog, name = _home(path)
    manifest = catalog.manifest_of(name)
    if manifest is None:
        log.warning("checkpoint %s has no manifest: it is loaded unverified", path)
    else:
        with _progress(f"verifying {path.name}", manifest.size_bytes, progress_bar) as progress:
            try:
                catalog.verify(manifest, progress)
            except CorruptCheckpointError:
                if not catalog.is_replaced(manifest):
                    raise
    contents = safe_torch_load(path, trust_checkpoint=trust_checkpoint)
    if not isinstance(contents, dict) or not isinstance(contents.get("state"), dict):
        found = ", ".join(map(repr, list(contents)[:8])) if isinstance(contents, dict) else type(contents).__name__
        raise IncompatibleCheckpointError(
            f"{str(path)!r} is not a checkpoint of a run: it holds {found or 'nothing'} and no 'state'. If it is "
            "a bare state dict of a model, load it with model.load_state_dict(torch.load(path))."
        )
    return contents


def load_checkpoint(
    path: str | Path,
    state: TrainingState,
    logger: object = None,
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

    Args:
        path: a file; format variables of ranks (``{run_name}``, ``{rank}``) are filled in, links are followed.
        state: what to restore.
        logger: not used; accepted because Composer's function has it.
        load_weights_only: restore the model alone.
        strict_model_weights: parameter names must agree exactly; shapes must agree in any case.
        progress_bar: show one on a terminal while a large file is verified.
        ignore_keys: leave these keys as they are in ``state``.
        exclude_algorithms: names of algorithms whose state is not restored and which are not rebuilt.
        trust_checkpoint: load any type, **running whatever code the file holds**.

    Returns:
        The generator states, or ``None`` where weights only were loaded or saved.

    Raises:
        CheckpointError: see :func:`read_checkpoint`; or the checkpoint does not fit, with all that differs.
    """
    path = format_name_with_dist(str(path), state.run_name)
    contents = read_checkpoint(path, trust_checkpoint=trust_checkpoint, progress_bar=progress_bar)
    saved_weights_only = set(contents["state"]) <= _WEIGHTS_ONLY
    contents = without(contents, check_ignore_keys(ignore_keys, argument="load_ignore_keys"))
    saved = contents.get("state", {})
    exclude = list(exclude_algorithms or ())
    source = f"checkpoint {path!r}"
    if load_weights_only or saved_weights_only:
        state.load_model_state(saved, strict=strict_model_weights, exclude_algorithms=exclude, source=source)
        log.info("loaded the weights of %s", path)
        return None
    state.load_state_dict(saved, strict=strict_model_weights, exclude_algorithms=exclude, source=source)
    log.info("loaded %s", path)
    return contents.get("rng")


@contextlib.contextmanager
def _progress(what: str, total_bytes: int, wanted: bool) -> Generator[Callable[[int], object]]:
    if not wanted or total_bytes < _LARGE_BYTES or not sys.stderr.isatty():
        yield int
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda done: bar.advance(task, done)


def _home(path: Path) -> tuple[Catalog, str]:
    """The catalog that knows ``path`` and the name it has there: its folder, or one above for names with folders."""
    for folder in path.parents:
        if (folder / ".manifest" / f"{path.relative_to(folder)}.json").is_file():
            return Catalog(folder), str(path.relative_to(folder))
    return Catalog(path.parent), path.name


def _what_is_there(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return f" The folder {str(folder)!r} does not exist either."
    names = [manifest.name for manifest in Catalog(folder).manifests()]
    if not names:
        return f" The folder {str(folder)!r} holds no checkpoint."
    kind = "is a folder that holds" if path.is_dir() else "does not exist; the folder holds"
    return f" {str(path)!r} {kind}: {', '.join(names[-8:])}. Give one of these files."
