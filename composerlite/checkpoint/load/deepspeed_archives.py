"""The archives that make up a checkpoint of DeepSpeed, wherever they are."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from composerlite.checkpoint.format.deepspeed import RankFiles, opened_archive
from composerlite.checkpoint.format.deepspeed_weights import number_of_ranks
from composerlite.checkpoint.load.download import fetched, followed, manifest_at, resolved, transferring
from composerlite.checkpoint.load.reading import home_of, readable, what_is_there
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.checkpoint.record.naming import format_name_with_dist, variables_in
from composerlite.checkpoint.trust.validation import validate
from composerlite.errors import CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError
from composerlite.storage import ObjectStore, is_uri, parse_uri

__all__ = ["Archives", "find_archives"]

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Archives:
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
            CheckpointError: as :func:`~composerlite.checkpoint.format.deepspeed.opened_archive`.
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

    @contextlib.contextmanager
    def all_opened(self, object_store: ObjectStore | None) -> Generator[list[RankFiles]]:
        """Those of all ranks. Raises what :meth:`opened` does."""
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(self.opened(rank, object_store)) for rank in range(len(self.names))]


def find_archives(template: str, run_name: str, object_store: ObjectStore | None, *, argument: str) -> Archives:
    """The archives that ``template`` means: the name of that of rank 0, or of all with ``{rank}`` in it.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        IncompatibleCheckpointError: it is of another kind.
        ConfigError: the name is that of one file, and nothing tells those of the other ranks; ``argument`` is named.
    """
    first = format_name_with_dist(template, run_name, rank=0, local_rank=0, node_rank=0)
    if object_store is None and not is_uri(first):
        path = resolved(Path(parse_uri(first)[2]))
        if not path.is_file():
            raise CheckpointNotFoundError(f"there is no checkpoint file {str(path)!r}.{what_is_there(path)}")
        catalog, name = home_of(path.resolve())
        manifest = catalog.manifest_of(name)
        if manifest is not None and manifest.kind == "deepspeed":
            return Archives([str(catalog.folder / record.path) for record in manifest.files], manifest)
    else:
        with transferring(first, object_store) as (transfer, wanted):
            home, manifest = manifest_at(transfer, followed(transfer, wanted))
            if home is not None and manifest is not None and manifest.kind == "deepspeed":
                keys = [home.name_of(record.path) for record in manifest.files]
                return Archives(
                    keys if object_store is not None else [transfer.store.get_uri(key) for key in keys], manifest
                )
    if manifest is not None:
        raise IncompatibleCheckpointError(f"checkpoint {first!r} was saved without DeepSpeed.")
    if "rank" not in variables_in(template, f"{argument}={template!r}"):
        raise ConfigError(
            f"{argument}={template!r}: each rank of DeepSpeed has a file of its own, and this names one, which no "
            "manifest tells the others of. Put '{rank}' into it, as in 'ep1-rank{rank}.tar'."
        )
    with Archives([first], None).opened(0, object_store) as archive:
        ranks = range(number_of_ranks(archive))
    log.warning("checkpoint %s has no manifest: it is loaded unverified", first)
    return Archives([format_name_with_dist(template, run_name, rank=rank) for rank in ranks], None)
