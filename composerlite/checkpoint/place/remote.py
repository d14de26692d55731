"""The checkpoints in a bucket: how one is published, found and fetched.

Data objects come first, then the manifest, which makes the checkpoint exist, and ``latest`` at last. A bucket has no
renames and no links: ``latest`` is an object that holds the name of another, with ``.symlink`` after its own name.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, final

from composerlite.checkpoint.place.bucket import LINK_SUFFIX, Bucket
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import MANIFESTS
from composerlite.checkpoint.place.lease import HeartbeatLease, Lease, take_leases
from composerlite.checkpoint.record.manifest import FileRecord, Manifest
from composerlite.errors import CheckpointExistsError, ConfigError, CorruptCheckpointError, RunInUseError
from composerlite.storage import Helpers, check_name, verify_file

if TYPE_CHECKING:
    from composerlite.storage import Transfer

__all__ = ["LINK_SUFFIX", "RemoteCatalog"]

log = logging.getLogger(__name__)
_MOST_LINK_BYTES, _MOST_MANIFEST_BYTES = 4096, 64 << 20
_READERS = 16
_DEAD_SECONDS = 30.0
"""For so long a save waits for another of the same name, whose process may be dead."""
_saving: set[str] = set()
"""The checkpoints that this process is saving: a lease tells processes apart, and not the threads of one."""
_saving_lock = threading.Lock()


@final
class RemoteCatalog:
    """The checkpoints below ``root`` in a bucket.

    Every method raises what :class:`~composerlite.storage.ObjectStore` raises, after it was tried again where that may
    help. Only "not found" is taken for absence.

    Args:
        transfer: moves the bytes.
        root: what stands before the names of checkpoints, without a slash at its end; may be empty.
    """

    def __init__(self, transfer: Transfer, root: str) -> None:
        self.transfer = transfer
        self.root = root.strip("/")
        self.place = Bucket(transfer, root)
        self._claims: dict[str, Lease] = {}
        self._replaced: dict[str, Manifest] = {}

    def uri(self, name: str = "") -> str:
        """Where ``name`` is, or the root, for messages and for loading."""
        if name or self.root:
            return self.transfer.store.get_uri(self.name_of(name) if name else self.root)
        return self.transfer.store.get_uri("x").removesuffix("x")

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def latest(self, link: str) -> Manifest | None:
        """The newest checkpoint, if its data are there: three requests. ``None`` if there is none.

        It is the one that was being published last, or, where that has not come to exist, the one that the object
        ``link`` leads to, a full name without ``.symlink``. A checkpoint that does not hold is logged and is ``None``,
        too: :meth:`manifests` tells what else there is.
        """
        for pointer in (self._intention(link), link + LINK_SUFFIX):
            uri = self.transfer.store.get_uri(pointer)
            try:
                target = self.transfer.read_all(pointer, most_bytes=_MOST_LINK_BYTES).decode()
                return self._complete(target.strip().removeprefix(f"{self.root}/" if self.root else ""))
            except FileNotFoundError as e:
                log.debug("no checkpoint is behind %s: %s", uri, e)
            except (CorruptCheckpointError, ConfigError, UnicodeDecodeError) as e:
                log.warning("%s does not lead to a checkpoint: %s", uri, e)
        return None

    def _complete(self, name: str) -> Manifest:
        """The manifest of the checkpoint ``name``, whose data are there."""
        manifest = self.manifest_of(name)
        if manifest is None:
            raise FileNotFoundError(f"{self.uri(name)} has no manifest")
        try:
            return self._with_data(manifest)
        except (FileNotFoundError, CorruptCheckpointError):
            for begun in self.begun(name):
                return self._with_data(begun)
            raise

    def _with_data(self, manifest: Manifest) -> Manifest:
        for record in manifest.files:
            size = self.transfer.size(self.name_of(record.path))
            if size != record.size_bytes:
                raise CorruptCheckpointError(f"{record.path!r} has {size} bytes and not {record.size_bytes}")
        return manifest

    def names(self) -> Iterator[str]:
        """The names of all committed checkpoints."""
        prefix = self.name_of(MANIFESTS) + "/"
        for info in self.transfer.list(prefix):
            if info.name.endswith(".json"):
                yield info.name.removeprefix(prefix).removesuffix(".json")

    def manifests(self) -> list[Manifest]:
        """Every committed checkpoint, oldest first. A damaged manifest is logged and left out.

        Raises:
            IncompatibleCheckpointError: one was written by a newer version.
        """
        with Helpers(_READERS, name="manifests") as pool:
            reading = [pool.submit(functools.partial(self._readable_manifest, name)) for name in self.names()]
            found = [future.result() for future in reading]
        return sorted((manifest for manifest in found if manifest is not None), key=lambda manifest: manifest.order)

    def manifest_of(self, name: str) -> Manifest | None:
        """The manifest of the checkpoint ``name``; ``None`` if it has none.

        Raises:
            CorruptCheckpointError: it has a damaged one.
        """
        path = self._manifest(name)
        try:
            data = self.transfer.read_all(path, most_bytes=_MOST_MANIFEST_BYTES)
        except FileNotFoundError:
            return None
        manifest = Manifest.from_json(data, self.transfer.store.get_uri(path))
        if manifest.name != name:
            raise CorruptCheckpointError(f"the manifest of {self.uri(name)!r} is that of {manifest.name!r}.")
        return manifest

    def _readable_manifest(self, name: str) -> Manifest | None:
        try:
            return self.manifest_of(name)
        except CorruptCheckpointError as e:
            log.warning("left out: %s", e)
            return None

    def fetch(self, manifest: Manifest, catalog: Catalog, progress: Callable[[int, int], object] | None = None) -> None:
        """Bring a checkpoint to the folder of ``catalog``, verified, and commit it there.

        Raises:
            CorruptCheckpointError: an object is missing or its bytes are not those that were saved. There is no
                checkpoint of that name in the folder then, unless there was one.
        """
        home = PurePosixPath(manifest.name).parent
        strange = [record.path for record in manifest.files if PurePosixPath(record.path).parent != home]
        if strange or not manifest.files or ".." in home.parts:
            raise CorruptCheckpointError(
                f"checkpoint {self.uri(manifest.name)!r} has {len(manifest.files)} files, which are not all beside it: "
                f"{', '.join(strange)}"
            )
        try:
            self._fetch_all(manifest, catalog, progress)
        except CorruptCheckpointError:
            for begun in self.begun(manifest.name):
                if begun.files != manifest.files:
                    self._fetch_all(begun, catalog, progress)
                    return
            raise

    def _fetch_all(self, manifest: Manifest, catalog: Catalog, progress: Callable[[int, int], object] | None) -> None:
        catalog.reserve(manifest.name, overwrite=True)  # what is there stays until what comes was verified
        done = 0
        for record in manifest.files:

            def tell(so_far: int, _: int, before: int = done) -> None:
                if progress is not None:
                    progress(before + so_far, manifest.size_bytes)

            self.fetch_file(record, catalog.folder / record.path, tell)
            done += record.size_bytes
        catalog.adopt(manifest)

    def fetch_file(self, record: FileRecord, path: Path, progress: Callable[[int, int], object] | None = None) -> None:
        """Bring one file of a checkpoint to ``path``, verified.

        Raises:
            CorruptCheckpointError: it is missing, or its bytes are not those that were saved.
        """
        name = self.name_of(record.path)
        log.info("fetching %s (%.1f MB) to %s", self.transfer.store.get_uri(name), record.size_bytes / 1e6, path)
        try:
            self.transfer.download(
                name,
                path,
                overwrite=True,
                size_bytes=record.size_bytes,
                callback=progress,
                check=lambda file: verify_file(file, record.digest),
            )
        except FileNotFoundError as e:
            uri = self.transfer.store.get_uri(name)
            raise CorruptCheckpointError(f"checkpoint file {uri!r} is gone: {e}") from e

    # ── changing ─────────────────────────────────────────────────────────────────────────────────────────────────
    def publish(
        self,
        manifest: Manifest,
        files: Sequence[Path],
        *,
        link: str | None = None,
        links: Mapping[str, str] | None = None,
        overwrite: bool = False,
    ) -> None:
        """Make a checkpoint exist in the bucket, and point ``link`` to it.

        A kill at any moment leaves it out of the listing or complete, and ``link`` on a complete one. What the store
        has of it from an earlier try is not sent again.

        Args:
            manifest: its commit record.
            files: its data on this machine, in the order of ``manifest.files``.
            link: full name of the link, without ``.symlink``.
            links: full names of further ones, and the file that each leads to.
            overwrite: replace a checkpoint of the same name. One of the same moment of the same run is replaced in any
                case: a run that was interrupted does it again. What is there already is not sent again.

        Raises:
            CheckpointExistsError: there is another checkpoint of that name.
        """
        try:
            is_there = self.begin(manifest, overwrite=overwrite)
            if not is_there:
                self.send(zip(manifest.files, files, strict=True))
            self.finish(manifest, link=link, links=links, is_there=is_there)
        finally:
            self.end(manifest.name)

    def send(self, files: Iterable[tuple[FileRecord, Path]]) -> None:
        """Upload files of a checkpoint that does not exist yet, after :meth:`begin`: each where it belongs."""
        named = [(self.name_of(record.path), path) for record, path in files]
        for name, path in sorted(named, key=lambda pair: pair[0].endswith("/.metadata")):  # that is an index
            self.transfer.upload(name, path)

    def finish(
        self, manifest: Manifest, *, link: str | None, links: Mapping[str, str] | None = None, is_there: bool
    ) -> None:
        """Make the checkpoint exist whose files are all there, and point ``link`` to it.

        Args:
            manifest: its commit record.
            link: full name of the link, without ``.symlink``.
            links: full names of further ones, and the file that each leads to.
            is_there: what :meth:`begin` said.

        Raises:
            CheckpointExistsError: there is another checkpoint of that name by now.
        """
        if not is_there:
            if link is not None:  # a kill before the link is moved: the next start looks here first
                self.transfer.put_bytes(self._intention(link), self.name_of(manifest.name).encode())
            self.commit(manifest)
        for other, name in (links or {}).items():
            if other != link:
                self.transfer.put_bytes(check_name(other + LINK_SUFFIX), self.name_of(name).encode())
        if link is not None:
            self.transfer.put_bytes(check_name(link + LINK_SUFFIX), self.name_of(manifest.name).encode())
        log.info("published checkpoint %s", self.uri(manifest.name))

    # ── the commit ───────────────────────────────────────────────────────────────────────────────────────────────
    def claim(self, name: str) -> None:
        """Begin a save of the checkpoint ``name``, which no other process does until :meth:`end`. Twice is fine.

        Raises:
            CheckpointExistsError: another process saves it.
        """
        if name in self._claims:
            return
        with _saving_lock:
            if self.uri(name) in _saving:
                raise CheckpointExistsError(f"checkpoint {self.uri(name)!r} is being saved in this process already.")
            _saving.add(self.uri(name))
        lease = HeartbeatLease(self.transfer, self.name_of(f"{MANIFESTS}/.{name.replace('/', '%2F')}.saving"))
        try:
            take_leases(
                [lease], f"checkpoint {self.uri(name)!r}", _DEAD_SECONDS, "one of them would replace the other."
            )
        except BaseException as e:
            _saving.discard(self.uri(name))
            if isinstance(e, RunInUseError):
                raise CheckpointExistsError(str(e)) from e
            raise
        self._claims[name] = lease

    def begin(self, manifest: Manifest, *, overwrite: bool) -> bool:
        """Begin to publish, until :meth:`end`; whether the bucket has just this checkpoint.

        What it has of that name stays until the new one is committed. Where its files are replaced one by one before
        that, which those with names of their own are not, the announced manifest tells readers what they are.

        Raises:
            CheckpointExistsError: as :meth:`publish`.
        """
        self.claim(manifest.name)
        there = self._readable_manifest(manifest.name)
        if there is None:
            return False
        if there.files == manifest.files:
            with contextlib.suppress(FileNotFoundError, CorruptCheckpointError):
                self._complete(manifest.name)
                return True
        elif not overwrite and (there.run_name, there.moment) != (manifest.run_name, manifest.moment):
            raise self._exists(there)
        self.announce(manifest, there)
        return False

    def announce(self, manifest: Manifest, there: Manifest) -> None:
        """Say what the checkpoint will be that is about to take the place of ``there``: see :meth:`begun`."""
        self._replaced[manifest.name] = there
        self.transfer.put_bytes(self._announced(manifest.name), manifest.to_json())

    def begun(self, name: str) -> Iterator[Manifest]:
        """The manifest of a save of ``name`` that has begun to replace it and not ended, if there is one."""
        with contextlib.suppress(FileNotFoundError, CorruptCheckpointError):
            data = self.transfer.read_all(self._announced(name), most_bytes=_MOST_MANIFEST_BYTES)
            manifest = Manifest.from_json(data, self.transfer.store.get_uri(self._announced(name)))
            if manifest.name == name:
                yield manifest

    def commit(self, manifest: Manifest) -> None:
        """Make the checkpoint exist whose files are all there, after :meth:`claim`; those it replaces go.

        Raises:
            CheckpointExistsError: another process, which knows of no claims, was first.
        """
        name = self._manifest(manifest.name)
        there = self._replaced.get(manifest.name)
        try:
            self.transfer.put_bytes(name, manifest.to_json(), create_only=there is None)
        except FileExistsError as e:
            found = self._readable_manifest(manifest.name)
            if found is not None and found.files != manifest.files:
                raise self._exists(found) from e
            if found is None:  # what is there is damaged
                self.transfer.put_bytes(name, manifest.to_json())
        if there is not None:
            kept = {record.path for record in manifest.files}
            for record in there.files:
                if record.path not in kept:
                    self.transfer.delete(self.name_of(record.path))
            self.withdraw(manifest.name)

    def withdraw(self, name: str) -> None:
        """Take back what :meth:`announce` said: the manifest says what there is."""
        if self._replaced.pop(name, None) is not None:
            self.transfer.delete(self._announced(name))

    def end(self, name: str) -> None:
        """End a save, well or not: others may save that name. Twice is fine."""
        if self._replaced.pop(name, None) is not None:
            log.warning("the save that was to replace %s did not end", self.uri(name))
        lease = self._claims.pop(name, None)
        if lease is not None:
            lease.release()
            _saving.discard(self.uri(name))

    def _exists(self, there: Manifest | None) -> CheckpointExistsError:
        name = "" if there is None else there.name
        what = "" if there is None else f", of run {there.run_name!r} at batch {there.batch}"
        return CheckpointExistsError(
            f"checkpoint {self.uri(name)!r} exists{what}. Give names that differ, as with '{{run_name}}' or "
            "'{batch}' in them, delete it, or pass overwrite=True (save_overwrite=True in the Trainer)."
        )

    def leads(self, link: str, name: str) -> bool:
        """Whether the object ``link``, a full name without ``.symlink``, leads to the checkpoint ``name``."""
        try:
            target = self.transfer.read_all(link + LINK_SUFFIX, most_bytes=_MOST_LINK_BYTES)
        except FileNotFoundError:
            return False
        return target.strip() == self.name_of(name).encode()

    def delete(self, manifest: Manifest) -> None:
        """Remove a checkpoint, its manifest first. What is gone already is not an error."""
        self.transfer.delete(self._manifest(manifest.name))
        for record in manifest.files:
            self.transfer.delete(self.name_of(record.path))
        log.info("deleted checkpoint %s", self.uri(manifest.name))

    def _intention(self, link: str) -> str:
        """The object that holds the name of the checkpoint that ``link`` is about to lead to."""
        return self.name_of(f"{MANIFESTS}/{link.rpartition('/')[2]}.next")

    def _manifest(self, name: str) -> str:
        return self.name_of(f"{MANIFESTS}/{name}.json")

    def _announced(self, name: str) -> str:
        return self.name_of(f"{MANIFESTS}/{name}.json.next")

    def name_of(self, name: str) -> str:
        """The full name of the object ``name`` below the root."""
        return check_name(f"{self.root}/{name}" if self.root else name)
