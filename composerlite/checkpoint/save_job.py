"""What is left of a save after the snapshot: write, commit, point ``latest``, give older checkpoints up."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from composerlite.checkpoint.catalog import Catalog
from composerlite.checkpoint.formats import format_of
from composerlite.checkpoint.formats.torch_file import TorchImage
from composerlite.checkpoint.manifest import FileRecord, Manifest
from composerlite.checkpoint.snapshot import Snapshot
from composerlite.errors import SaveError
from composerlite.storage import FileDigest, HostMemory, Sink, StagedFile

__all__ = ["SaveJob", "SaveReport"]

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save did and what it cost.

    Attributes:
        path: the checkpoint.
        batch: optimizer steps done when it was saved.
        size_bytes: of its data.
        seconds: by name. ``stall``: the training thread was kept from training. ``snapshot``: copying, behind training
            in part. ``waiting``: for the save before this one. ``hash``, ``write``, ``flush``: of the writing threads.
            ``commit``: from durable data to a checkpoint that exists. ``total``: from the call until then.
        weights_crc: CRC-32 of each storage of the model.
        deleted: names of the checkpoints that were given up for it.
    """

    path: Path
    batch: int
    size_bytes: int
    seconds: Mapping[str, float]
    weights_crc: Sequence[int] = ()
    deleted: Sequence[str] = ()


@final
@dataclass(kw_only=True)
class SaveJob:
    """A save whose contents are known: in memory that does not change, or to be read while training waits.

    Attributes:
        manifest: what will be committed, but for its files.
        image: the file to write.
        weights: numbers of the image's storages that belong to the model.
        memory: where the snapshot is; ``None`` to read from the tensors themselves.
        snapshot: the copy.
        ring_bytes: memory to write with where there is no snapshot.
        latest: name of the link to point to it.
        publish: is given the manifest after the commit, before anything is given up.
        give_up: which checkpoints to delete after that.
        started: when the save was called for. waiting_seconds: how long it waited for the one before it.
        stall_seconds: how long it has kept training besides the snapshot. blocking: training waits until the end.
    """

    manifest: Manifest
    catalog: Catalog
    path: Path
    image: TorchImage
    weights: Sequence[int]
    started: float
    waiting_seconds: float
    memory: HostMemory | None = None
    snapshot: Snapshot | None = None
    ring_bytes: int = 32 << 20
    latest: str | None = None
    publish: Callable[[Manifest], object] | None = None
    give_up: Callable[[], Sequence[Manifest]] | None = None
    stall_seconds: float = 0.0
    blocking: bool = False

    def __post_init__(self) -> None:
        self._stack = ExitStack()
        self._data: StagedFile | None = None
        self._sink: Sink | None = None
        self._crcs: list[int] = []

    def write(self) -> None:
        """Hand all bytes to the file's writer, which may still be writing when this returns.

        Raises:
            OSError: no space, no permission, and the like. Nothing is left behind.
        """
        with ExitStack() as stack:
            self._data = stack.enter_context(StagedFile(self.path))
            file_format = format_of(self.manifest.template)
            self._sink = stack.enter_context(
                file_format.open_sink(
                    self._data.temporary, self.image.size_bytes, memory=self.memory, ring_bytes=self.ring_bytes
                )
            )
            with _named(self.path):
                self._crcs = self.image.write(self._sink)
            self._stack = stack.pop_all()

    def run(self) -> SaveReport:
        """Write what is not written, make it durable and commit it.

        Raises:
            SaveError: the snapshot changed while it was taken.
            OSError: no space, no permission, and the like. Nothing is left behind.
        """
        if self.snapshot is not None:
            self.snapshot.wait()
        if self._sink is None:
            self.write()
        assert self._sink is not None
        assert self._data is not None
        with self._stack:
            with _named(self.path):
                digest = self._sink.finish()
            seconds = self._seconds()
            before_commit = time.perf_counter()
            record = _record(self.manifest.name, digest)
            manifest = dataclasses.replace(
                self.manifest, files=(record,), timings=seconds, unpacked_bytes=self.image.size_bytes
            )
            self.catalog.commit(manifest, self._data)
        if self.latest is not None and self.latest != manifest.name:
            self.catalog.point_latest(self.latest, manifest.name)
        now = time.perf_counter()
        seconds = {**seconds, "commit": now - before_commit, "total": now - self.started}
        if self.blocking:
            seconds["stall"] = seconds["total"]
        log.info("saved checkpoint %s (%.1f MB in %.2f s)", self.path, digest.size_bytes / 1e6, seconds["total"])
        if self.publish is not None:
            self.publish(manifest)
        deleted: list[str] = []
        for old in self.give_up() if self.give_up is not None else ():
            self.catalog.delete(old)
            deleted.append(old.name)
        return SaveReport(
            path=self.path,
            batch=manifest.batch,
            size_bytes=digest.size_bytes,
            seconds=seconds,
            weights_crc=[self._crcs[number] for number in self.weights],
            deleted=deleted,
        )

    def _seconds(self) -> dict[str, float]:
        """What was spent until the data were durable."""
        snapshot = self.snapshot
        seconds = {
            "stall": self.stall_seconds if snapshot is None else self.stall_seconds + snapshot.stall_seconds,
            "snapshot": 0.0 if snapshot is None else snapshot.seconds,
            "waiting": self.waiting_seconds,
        }
        return {**seconds, **({} if self._sink is None else self._sink.seconds)}


@contextmanager
def _named(path: Path) -> Generator[None]:
    """Name the checkpoint in an error of what compresses it."""
    try:
        yield
    except SaveError as e:
        raise SaveError(f"checkpoint {str(path)!r}: {e}") from e


def _record(name: str, digest: FileDigest) -> FileRecord:
    return FileRecord(
        path=name,
        size_bytes=digest.size_bytes,
        xxh3_128=digest.xxh3_128,
        chunk_bytes=digest.chunk_bytes,
        chunks=digest.chunks,
    )
