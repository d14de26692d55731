"""The archives of a checkpoint of DeepSpeed, an archive for each rank, read in place, without extraction.

Each archive holds ``composer_states.pt``, equal in all, and below ``deepspeed/`` the files of DeepSpeed for the rank,
unchanged: the archives of all ranks, extracted to one folder, are a checkpoint for DeepSpeed's tools.

The restricted reader loads the pickles. Pickles may hold a few classes of DeepSpeed: the reader makes placeholders, or
objects of DeepSpeed's own classes where DeepSpeed is installed.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from composerlite.checkpoint.foreign.deepspeed import by_rank
from composerlite.checkpoint.format.archive import DEEPSPEED, STATES, is_tar_header, members_of, stand_ins
from composerlite.checkpoint.format.byte_sources import Window
from composerlite.checkpoint.format.compression import codec_of
from composerlite.checkpoint.format.packing import unpacked
from composerlite.checkpoint.format.torch_reader import TorchFile
from composerlite.checkpoint.format.weight_files import MODEL_STATES
from composerlite.checkpoint.load.deepspeed_folder import read_states
from composerlite.checkpoint.load.reader import checkpoints_near, readable, validate
from composerlite.checkpoint.load.resolve import engine_folder, fetched, place_of
from composerlite.checkpoint.place.catalog import Catalog, home_of
from composerlite.checkpoint.record.naming import FIRST_RANK, format_name_with_dist, variables_in
from composerlite.checkpoint.record.record import Manifest
from composerlite.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from composerlite.storage import FileDigest, ObjectStore, ParallelReader, verify_file
from composerlite.types import StateDict

log = logging.getLogger(__name__)

_FILE = re.compile(rf"{DEEPSPEED}/([A-Za-z0-9_-][A-Za-z0-9_.-]*\.pt)")
_HEAD_BYTES = 512


@final
@dataclass(frozen=True)
class RankFiles:
    """The files in the archive of a rank.

    Attributes:
        path: path of the archive, for messages.
        check_sums: compare the files with their own checksums, since there is no record.
        files: DeepSpeed's files, and ``composer_states.pt``, by name.
    """

    path: Path
    check_sums: bool
    files: Mapping[str, Window]

    @property
    def names(self) -> list[str]:
        """Names of DeepSpeed's files."""
        return sorted(set(self.files) - {STATES})

    @property
    def model_states(self) -> str:
        """Name of the file with the model states of the first rank.

        Raises:
            CorruptCheckpointError: there is no such file.
            IncompatibleCheckpointError: layers or experts are split over ranks.
        """
        return by_rank(self.names, MODEL_STATES, f"checkpoint {str(self.path)!r}").get(0, "model states")

    def member(self, name: str) -> Window:
        """Return one of DeepSpeed's files, or ``composer_states.pt``.

        Raises:
            CorruptCheckpointError: there is no such file.
        """
        if name not in self.files:
            raise CorruptCheckpointError(f"it has no {name!r} in it")
        return self.files[name]

    def contents(
        self,
        name: str,
        types: Mapping[str, type] | None = None,
        *,
        trust: bool = False,
        prune: Callable[[StateDict], StateDict] | None = None,
    ) -> StateDict:
        """Read one of DeepSpeed's files, or ``composer_states.pt``.

        Args:
            name: of the file.
            types: allowed classes; ``None``: placeholders for the classes of DeepSpeed.
            trust: load any type, **running any code in the file**.
            prune: selects the parts of the contents to read.

        Raises:
            CorruptCheckpointError, RefusedError: as :class:`TorchFile`.
        """
        member, types = self.member(name), stand_ins() if types is None else types
        try:
            file = TorchFile(member, member.size_bytes, trust=trust, check_sums=self.check_sums, types=types)
            return read_states(file, prune)
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"its {name!r}: {e}") from e


@contextlib.contextmanager
def opened_archive(path: Path, digest: FileDigest | None = None, *, unpacked_bytes: int = 0) -> Generator[RankFiles]:
    """Open the archive ``path``, compressed or not.

    Args:
        path: path of the archive.
        digest: digest of the archive in the record; ``None``: the checksums in the files verify the files.
        unpacked_bytes: an archive of up to this size is decompressed at any ratio.

    Raises:
        CorruptCheckpointError: the bytes differ from the saved bytes, or the archive holds links or devices.
        IncompatibleCheckpointError: the file is no archive of DeepSpeed.
        OSError: the file is missing or cannot be read, or there is no space to decompress the file.
    """
    with contextlib.ExitStack() as stack:
        with path.open("rb") as file:
            is_compressed = codec_of(file.read(_HEAD_BYTES)) is not None
        if not is_compressed:
            source = stack.enter_context(ParallelReader(path, digest))
        else:
            if digest is not None:
                verify_file(path, digest)
            source = stack.enter_context(unpacked(path, keep_archive=True, most_bytes=unpacked_bytes))
        found: dict[str, Window] = {}
        if source.size_bytes >= _HEAD_BYTES and is_tar_header(source.read(0, _HEAD_BYTES)):
            found = members_of(source, source.size_bytes)
        files = {match[1]: member for name, member in found.items() if (match := _FILE.fullmatch(name)) is not None}
        if not files:
            lack = f"it has no {DEEPSPEED!r} in it" if found else "it is no archive"
            raise IncompatibleCheckpointError(f"checkpoint {str(path)!r} was saved without DeepSpeed: {lack}.")
        files |= {STATES: found[STATES]} if STATES in found else {}
        yield RankFiles(path, digest is None, files)


@final
@dataclass(frozen=True)
class Archives:
    """The archives of a checkpoint.

    Attributes:
        names: in the order of the ranks: paths, URIs, or names in the store of the caller.
        manifest: the record; ``None``: the archives have none.
    """

    names: Sequence[str]
    manifest: Manifest | None

    @contextlib.contextmanager
    def opened(self, rank: int, object_store: ObjectStore | None) -> Generator[RankFiles]:
        """Open the archive of ``rank``. An archive in a store is downloaded for the duration of the block.

        Raises:
            CheckpointNotFoundError: the archive is missing. The message names the archive.
            CheckpointError: as :func:`opened_archive`.
        """
        with fetched(self.names[rank], object_store) as path:
            if not path.is_file():
                raise CheckpointNotFoundError(
                    f"checkpoint {self.names[0]!r} is not whole: {self.names[rank]!r}, the file of rank {rank}, is "
                    f"missing.{checkpoints_near(path)}"
                )
            validate(path)
            digest = None if self.manifest is None else self.manifest.files[rank].digest
            most = 0 if self.manifest is None else self.manifest.unpacked_bytes
            with readable(path), opened_archive(path, digest, unpacked_bytes=most) as archive:
                yield archive

    @contextlib.contextmanager
    def all_opened(self, object_store: ObjectStore | None) -> Generator[list[RankFiles]]:
        """Open the archives of all ranks. Raises as :meth:`opened`."""
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(self.opened(rank, object_store)) for rank in range(len(self.names))]


def find_archives(template: str, run_name: str, object_store: ObjectStore | None, *, argument: str) -> Archives:
    """Find the archives of all ranks.

    Args:
        template: the name of the archive of rank 0, or of all archives with ``{rank}`` in the name.
        run_name: for ``{run_name}`` in ``template``.
        object_store: the store with the archives; ``None``: ``template`` is a path or a URI.
        argument: name of the user's argument, for messages.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        IncompatibleCheckpointError: the checkpoint was saved without DeepSpeed.
        ConfigError: ``template`` names a file without a record, so the names of the other ranks are unknown.
    """
    first = format_name_with_dist(template, run_name, **FIRST_RANK)
    with engine_folder(first, object_store) as found:
        if found is not None:
            raise IncompatibleCheckpointError(
                f"{argument}={template!r} is a folder of DeepSpeed's engine, without the archives that a run with "
                "deepspeed_config saves. Its weights load with load_weights_only=True; a run without deepspeed_config "
                "continues from all of it; 'composerlite checkpoint convert' writes its weights to a file."
            )
    with place_of(first, object_store) as (place, last):
        if (path := place.path_of(last)) is not None and not path.is_file():
            raise CheckpointNotFoundError(f"there is no checkpoint file {str(path)!r}.{checkpoints_near(path)}")
        home, name = home_of(place, last)
        manifest = Catalog(home).manifest_of(name)
        paths = [] if manifest is None else [record.path for record in manifest.files]
        names = [home.uri(path) if object_store is None else home.name_of(path) for path in paths]
    if manifest is not None and manifest.kind == "deepspeed":
        return Archives(names, manifest)
    if manifest is not None:
        raise IncompatibleCheckpointError(f"checkpoint {first!r} was saved without DeepSpeed.")
    if "rank" not in variables_in(template, f"{argument}={template!r}"):
        raise ConfigError(
            f"{argument}={template!r}: each rank of DeepSpeed has a file of its own, and this names one, without a "
            "record of the others. Put '{rank}' into it, as in 'ep1-rank{rank}.tar'."
        )
    with Archives([first], None).opened(0, object_store) as archive:
        states = archive.contents(archive.model_states, prune=lambda states: {"ranks": states.get("dp_world_size")})
        ranks = states["ranks"]
    if not isinstance(ranks, int) or ranks < 1:
        raise CorruptCheckpointError(f"checkpoint {first!r} does not say the number of ranks that saved it")
    log.warning("checkpoint %s has no record: loading it unverified", first)
    return Archives([format_name_with_dist(template, run_name, rank=rank) for rank in range(ranks)], None)
