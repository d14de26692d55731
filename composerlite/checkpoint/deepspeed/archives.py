"""The archives of a checkpoint of DeepSpeed, one for each rank, and how one is read: in place, nothing is extracted.

Each holds ``composer_states.pt``, the same in all, and below ``deepspeed/`` the files that DeepSpeed writes on that
rank, as it writes them: what was extracted from the archives of all ranks is a folder that DeepSpeed's tools read.

Pickles in them go through the restricted reader: beside what every checkpoint may hold they hold a few classes of
DeepSpeed, which are its own or, where it is not installed, plain placeholders.
"""

from __future__ import annotations

import contextlib
import logging
import re
import tarfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from composerlite.checkpoint.format.archive import DEEPSPEED, STATES, is_tar_header, next_member, stand_ins
from composerlite.checkpoint.format.compression import codec_of
from composerlite.checkpoint.format.packing import is_packed, unpacked
from composerlite.checkpoint.format.torch_reader import ByteSource, TorchFile, UnverifiedFile, Window
from composerlite.checkpoint.load.reader import readable, validate
from composerlite.checkpoint.load.resolve import (
    engine_folder,
    fetched,
    followed,
    resolved,
    transferring,
    what_is_there,
)
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import Catalog, home_of
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.checkpoint.record.naming import FIRST_RANK, format_name_with_dist, variables_in
from composerlite.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from composerlite.storage import FileDigest, ObjectStore, ParallelReader, is_uri, parse_uri, verify_file
from composerlite.types import StateDict

__all__ = [
    "MODEL_STATES",
    "Archives",
    "RankFiles",
    "find_archives",
    "holds_deepspeed",
    "model_states",
    "the_file",
]

log = logging.getLogger(__name__)

_FILE = re.compile(rf"{DEEPSPEED}/([A-Za-z0-9_-][A-Za-z0-9_.-]*\.pt)")
_HEAD_BYTES = 512


def _all(contents: StateDict) -> StateDict:
    return contents


@final
class RankFiles:
    """The files in the archive of a rank.

    Attributes:
        names: of DeepSpeed's files in it.
        check_sums: whether nothing but sums in the files verifies them.

    Args:
        source: the archive, out of its compression.
        size_bytes: of it.
        path: of it, for messages.

    Raises:
        CorruptCheckpointError: it is damaged, or holds something else than files.
        IncompatibleCheckpointError: it is no archive of DeepSpeed.
    """

    def __init__(self, source: ByteSource, size_bytes: int, path: Path, *, check_sums: bool) -> None:
        self.path = path
        self.check_sums = check_sums
        if size_bytes < _HEAD_BYTES or not is_tar_header(source.read(0, _HEAD_BYTES)):
            raise IncompatibleCheckpointError(
                f"checkpoint {str(path)!r} was saved without DeepSpeed: it is no archive."
            )
        self._members = dict(_members(source, size_bytes))
        self.names = sorted(match[1] for name in self._members if (match := _FILE.fullmatch(name)) is not None)
        if not self.names:
            raise IncompatibleCheckpointError(
                f"checkpoint {str(path)!r} was saved without DeepSpeed: it has no {DEEPSPEED!r} in it."
            )

    def member(self, name: str) -> Window:
        """One of DeepSpeed's files."""
        return self._members[f"{DEEPSPEED}/{name}"]

    def contents(
        self,
        name: str,
        types: Mapping[str, type] | None = None,
        *,
        trust: bool = False,
        prune: Callable[[StateDict], StateDict] = _all,
    ) -> StateDict:
        """Read one of DeepSpeed's files.

        Args:
            name: of the file.
            types: the classes that it may hold; by default placeholders for them.
            trust: load any type, **running whatever code the file holds**.
            prune: is given what it holds, and gives what of it is wanted: only that is read.

        Raises:
            CorruptCheckpointError, RefusedError: as :class:`TorchFile`.
        """
        return self._read(f"{DEEPSPEED}/{name}", stand_ins() if types is None else types, trust, prune)

    def states(self, *, trust: bool = False) -> StateDict:
        """Read ``composer_states.pt``.

        Raises:
            CorruptCheckpointError, RefusedError: as :class:`TorchFile`.
        """
        return self._read(STATES, {}, trust, _all)

    def _read(
        self, name: str, types: Mapping[str, type], trust: bool, prune: Callable[[StateDict], StateDict]
    ) -> StateDict:
        member = self._members.get(name)
        if member is None:
            raise CorruptCheckpointError(f"it has no {name!r} in it")
        try:
            file = TorchFile(
                member,
                member.size_bytes,
                peek=member.read,
                trust=trust,
                check_sums=self.check_sums,
                types=types,
            )
            file.contents = prune(file.contents)
            file.read()
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"its {name!r}: {e}") from e
        return file.contents


@contextlib.contextmanager
def opened_archive(path: Path, digest: FileDigest | None = None, *, unpacked_bytes: int = 0) -> Generator[RankFiles]:
    """The archive ``path``, compressed or not.

    Args:
        path: of it.
        digest: what it must contain; ``None``: only the sums in it say that.
        unpacked_bytes: what it may unpack to in any case.

    Raises:
        CorruptCheckpointError: its bytes are not those that were saved, or it is damaged.
        IncompatibleCheckpointError: it is no archive of DeepSpeed.
        OSError: it is not there, cannot be read, or there is no space to unpack it.
    """
    with path.open("rb") as file:
        is_compressed = codec_of(file.read(_HEAD_BYTES)) is not None
    with contextlib.ExitStack() as stack:
        if is_compressed:
            if digest is not None:
                verify_file(path, digest)
            file = stack.enter_context(unpacked(path, keep_archive=True, most_bytes=unpacked_bytes))
            size_bytes = file.seek(0, 2)
            source: ByteSource = UnverifiedFile(file)
        else:
            reader = stack.enter_context(ParallelReader(path, digest))
            source, size_bytes = reader, reader.size_bytes
        yield RankFiles(source, size_bytes, path, check_sums=digest is None)


def holds_deepspeed(path: Path) -> bool:
    """Check whether the file ``path`` is an archive with files of DeepSpeed in it.

    Raises:
        CorruptCheckpointError: it is an archive, and damaged.
        OSError: it is not there or cannot be read.
    """
    if not is_packed(path):
        return False
    with contextlib.suppress(IncompatibleCheckpointError), opened_archive(path):
        return True
    return False


def _members(source: ByteSource, size_bytes: int) -> Iterator[tuple[str, Window]]:
    """Files in an archive by their names, each once. Folders are skipped; there is nothing else in it."""
    position = 0

    def read(size: int) -> bytes:
        nonlocal position
        size = max(0, min(size, size_bytes - position))
        data = source.read(position, size) if size else b""
        position += size
        return data

    seen: set[str] = set()
    while (member := next_member(read)) is not None:
        if member.isdir():
            continue
        name = member.name.removeprefix("./")
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or name in seen:
            what = "twice" if name in seen else "as a link, a device or a sparse file"
            raise CorruptCheckpointError(f"it is an archive that holds {member.name!r} {what}")
        seen.add(name)
        if position + member.size > size_bytes:
            raise CorruptCheckpointError("it is an archive that is cut off")
        yield name, Window(source, position, member.size)
        position += member.size + -member.size % tarfile.BLOCKSIZE


# ── the state of the model ───────────────────────────────────────────────────────────────────────────────────────────
MODEL_STATES = "model_states.pt"
"""The end of the name of the file in which a rank has what it says of the model."""


def model_states(archive: RankFiles, *, prune: Callable[[StateDict], StateDict] = _all) -> StateDict:
    """Read a rank's model states; ``prune`` selects the parts to read.

    Raises:
        IncompatibleCheckpointError: there is not one such file.
    """
    return archive.contents(the_file(archive, MODEL_STATES), prune=prune)


def number_of_ranks(archive: RankFiles) -> int:
    """Number of ranks that saved the checkpoint of which ``archive`` is that of the first."""
    ranks = model_states(archive, prune=lambda contents: {"ranks": contents.get("dp_world_size")})["ranks"]
    if not isinstance(ranks, int) or ranks < 1:
        raise CorruptCheckpointError("it does not say the number of ranks that saved it")
    return ranks


def the_file(archive: RankFiles, end: str) -> str:
    """The one file of the rank whose name ends so.

    Raises:
        IncompatibleCheckpointError: there is none, or there are several.
    """
    found = [name for name in archive.names if name.endswith(end)]
    if len(found) != 1:
        raise IncompatibleCheckpointError(
            f"checkpoint {str(archive.path)!r} has {len(found)} files *{end}; expected one. Those of models with "
            "experts, or with layers split over ranks, cannot be converted: use DeepSpeed's own tools."
        )
    return found[0]


# ── all of a checkpoint ──────────────────────────────────────────────────────────────────────────────────────────────


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
        """Open that of ``rank``, on this machine for as long as the block lasts.

        Raises:
            CheckpointNotFoundError: it is not there. The message names it.
            CheckpointError: as :func:`~composerlite.checkpoint.deepspeed.archives.opened_archive`.
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
        """Open those of all ranks. Raises what :meth:`opened` does."""
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(self.opened(rank, object_store)) for rank in range(len(self.names))]


def find_archives(template: str, run_name: str, object_store: ObjectStore | None, *, argument: str) -> Archives:
    """The archives that ``template`` means: the name of that of rank 0, or of all with ``{rank}`` in it.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        IncompatibleCheckpointError: it is of another kind.
        ConfigError: the name is that of one file, and nothing tells those of the other ranks; ``argument`` is named.
    """
    first = format_name_with_dist(template, run_name, **FIRST_RANK)
    with engine_folder(first, object_store) as found:
        if found is not None:
            raise IncompatibleCheckpointError(
                f"{argument}={template!r} is a folder of DeepSpeed's engine, without the archives that a run with "
                "deepspeed_config saves. Its weights load with load_weights_only=True; a run without deepspeed_config "
                "continues from all of it; 'composerlite checkpoint convert' writes its weights to a file."
            )
    if object_store is None and not is_uri(first):
        path = resolved(Path(parse_uri(first)[2]))
        if not path.is_file():
            raise CheckpointNotFoundError(f"there is no checkpoint file {str(path)!r}.{what_is_there(path)}")
        path = path.resolve()
        place, name = home_of(Folder(path.parent), path.name)
        manifest = Catalog(place).manifest_of(name)
        if manifest is not None and manifest.kind == "deepspeed":
            return Archives([place.uri(record.path) for record in manifest.files], manifest)
    else:
        with transferring(first, object_store) as (transfer, wanted):
            key = followed(transfer, wanted)
            folder, _, last = key.rpartition("/")
            place, name = home_of(Bucket(transfer, folder), last)
            manifest = Catalog(place).manifest_of(name)
            if manifest is not None and manifest.kind == "deepspeed":
                root = key.removesuffix(name)
                uris = [place.uri(record.path) for record in manifest.files]
                names = [root + record.path for record in manifest.files]
                return Archives(uris if object_store is None else names, manifest)
    if manifest is not None:
        raise IncompatibleCheckpointError(f"checkpoint {first!r} was saved without DeepSpeed.")
    if "rank" not in variables_in(template, f"{argument}={template!r}"):
        raise ConfigError(
            f"{argument}={template!r}: each rank of DeepSpeed has a file of its own, and this names one, without a "
            "record of the others. Put '{rank}' into it, as in 'ep1-rank{rank}.tar'."
        )
    with Archives([first], None).opened(0, object_store) as archive:
        ranks = range(number_of_ranks(archive))
    log.warning("checkpoint %s has no record: loading it unverified", first)
    return Archives([format_name_with_dist(template, run_name, rank=rank) for rank in ranks], None)
