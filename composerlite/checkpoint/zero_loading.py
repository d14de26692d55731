"""Loading a checkpoint of DeepSpeed: each rank reads its own archive, and rank 0 what is the same for all."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from composerlite import dist
from composerlite.checkpoint.contents import TrainingState
from composerlite.checkpoint.download import fetched, followed, manifest_at, resolved, transferring
from composerlite.checkpoint.formats.deepspeed import RankFiles, opened_archive
from composerlite.checkpoint.formats.stored_item import item_contents
from composerlite.checkpoint.manifest import Manifest
from composerlite.checkpoint.naming import format_name_with_dist, variables_in
from composerlite.checkpoint.reading import RawFile, home_of, readable, what_is_there
from composerlite.checkpoint.restoring import Restoring, half_loaded
from composerlite.checkpoint.shared_file import spread_file
from composerlite.checkpoint.together import from_first_rank, together
from composerlite.checkpoint.validation import validate
from composerlite.errors import CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError
from composerlite.storage import ObjectStore, is_uri, parse_uri
from composerlite.types import StateDict

__all__ = ["load_archives"]

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class _Archives:
    """The archives of a checkpoint.

    Attributes:
        names: of all, in the order of the ranks that saved them: paths, URIs, or names in the store that was given.
        manifest: their commit record, if they have one.
    """

    names: Sequence[str]
    manifest: Manifest | None

    @contextlib.contextmanager
    def opened(self, rank: int, object_store: ObjectStore | None) -> Generator[RankFiles]:
        """That of ``rank``, on this machine for as long as the block lasts.

        Raises:
            CheckpointNotFoundError: it is not there. The message names it.
            CheckpointError: as :func:`~composerlite.checkpoint.formats.deepspeed.opened_archive`.
        """
        with fetched(self.names[rank], object_store) as path:
            if not path.is_file():
                raise CheckpointNotFoundError(
                    f"checkpoint {self.names[0]!r} is not whole: {self.names[rank]!r}, the file of rank {rank}, is "
                    f"missing.{what_is_there(path)}"
                )
            validate(path)
            digest = None if self.manifest is None else self.manifest.files[rank].digest
            most = 0 if self.manifest is None else self.manifest.unpacked_bytes
            with readable(path), opened_archive(path, digest, unpacked_bytes=most) as archive:
                yield archive


def load_archives(
    template: str, state: TrainingState, restoring: Restoring, object_store: ObjectStore | None, *, trust: bool
) -> list[dict[str, Any]] | None:
    """Restore ``state``, which DeepSpeed trains, on every rank; the states of the random generators, if any.

    Args:
        template: the name of one of the archives, or of all with ``{rank}`` in it.
        state: what to restore. restoring: how.
        object_store: the store that ``template`` is a name in.
        trust: load any type, **running whatever code the files hold**.

    Raises:
        CheckpointError: as :func:`composerlite.checkpoint.load_checkpoint`, on every rank.
    """
    engine = state.deepspeed
    assert engine is not None, "its engine is made before anything is loaded"
    archives = from_first_rank("looking for the checkpoint", lambda: _found(template, state.run_name, object_store))
    saved, now = len(archives.names), dist.get_world_size()
    if saved != now:
        raise IncompatibleCheckpointError(f"{restoring.source} was saved by {saved} ranks")
    rank = dist.get_global_rank()
    with contextlib.ExitStack() as stack:
        with together(f"opening {restoring.source}"):
            own = stack.enter_context(archives.opened(rank, object_store))
        wanted = _states(own, restoring, trust=trust)
        files = _read(own, restoring.source, engine.types, trust=trust)
        with together("restoring the run"), half_loaded(True):
            engine.load(sorted(files), lambda name: files[name], source=restoring.source)
    with together("restoring the run"):
        return restoring.load(wanted)


def _states(archive: RankFiles, restoring: Restoring, *, trust: bool) -> StateDict:
    """What of ``composer_states.pt`` is wanted; read by rank 0."""

    def packed() -> bytes:
        with readable(archive.path):
            buffer = io.BytesIO()
            torch.save(archive.states(trust=trust), buffer)
            return buffer.getvalue()

    data = from_first_rank(f"reading {restoring.source}", packed)
    contents = torch.load(io.BytesIO(data), weights_only=False) if trust else item_contents(data)
    with together("comparing the checkpoint with the run"):
        wanted = restoring.wanted(contents)
        restoring.places(wanted)
    return wanted


def _read(archive: RankFiles, source: str, types: dict[str, type], *, trust: bool) -> dict[str, StateDict]:
    """What DeepSpeed's files hold that this rank needs: its own, and those of rank 0 that no other has."""
    everywhere = [archive.names] if dist.get_world_size() == 1 else dist.all_gather_object(archive.names)
    shared = [name for name in everywhere[0] if name.startswith("mp_rank_") and len(everywhere) > 1]
    files: dict[str, StateDict] = {}
    for name in shared:
        raw = None
        if dist.get_global_rank() == 0:
            member = archive.member(name)
            raw = RawFile(member, member.size_bytes, member.read, archive.check_sums)
        files[name] = spread_file(raw, f"{name} of {source}", trust=trust)
    with together(f"reading {source}"), readable(archive.path):
        for name in archive.names:
            if name not in files:
                files[name] = archive.contents(name, types, trust=trust)
    return files


def _found(template: str, run_name: str, object_store: ObjectStore | None) -> _Archives:
    """The archives that ``template`` means. On rank 0.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        ConfigError: the name is that of one file, and nothing tells those of the other ranks.
    """
    first = format_name_with_dist(template, run_name, rank=0, local_rank=0, node_rank=0)
    if object_store is None and not is_uri(first):
        path = resolved(Path(parse_uri(first)[2]))
        if not path.is_file():
            raise CheckpointNotFoundError(f"there is no checkpoint file {str(path)!r}.{what_is_there(path)}")
        catalog, name = home_of(path.resolve())
        manifest = catalog.manifest_of(name)
        if manifest is not None and manifest.kind == "deepspeed":
            return _Archives([str(catalog.folder / record.path) for record in manifest.files], manifest)
    else:
        with transferring(first, object_store) as (transfer, wanted):
            home, manifest = manifest_at(transfer, followed(transfer, wanted))
            if home is not None and manifest is not None and manifest.kind == "deepspeed":
                keys = [home.name_of(record.path) for record in manifest.files]
                uris = keys if object_store is not None else [transfer.store.get_uri(key) for key in keys]
                return _Archives(uris, manifest)
    if "rank" not in variables_in(template, f"load_path={template!r}"):
        raise ConfigError(
            f"load_path={template!r}: with deepspeed_config each rank loads a file of its own, and this names one, "
            "which no manifest tells the others of. Put '{rank}' into it, as in 'ep1-rank{rank}.tar'."
        )
    log.warning("checkpoint %s has no manifest: it is loaded unverified", first)
    ranks = range(dist.get_world_size())
    return _Archives([format_name_with_dist(template, run_name, rank=rank) for rank in ranks], None)
