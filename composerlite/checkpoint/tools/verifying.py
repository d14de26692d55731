"""Verification of a checkpoint that has no record, by what its own files say of themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from isal import isal_zlib

from composerlite.checkpoint.foreign.systems import recognised
from composerlite.checkpoint.format import TRAIN
from composerlite.checkpoint.format.packing import is_packed, unpacked
from composerlite.checkpoint.format.sharded_index import untrusted
from composerlite.checkpoint.format.torch_reader import TorchFile, UnverifiedFile, Window
from composerlite.checkpoint.format.weight_files import TORCH_SUFFIX, WEIGHTS_SUFFIX
from composerlite.checkpoint.format.zip_file import entries
from composerlite.checkpoint.load.reader import readable
from composerlite.checkpoint.load.sharded_reader import RemoteFileSystemReader, safe_contents
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.checkpoint.place.place import Place
from composerlite.checkpoint.tools.inspecting import contents_of, deepspeed_in, model_directory
from composerlite.checkpoint.tools.surveying import Found
from composerlite.checkpoint.trust.trusted import RefusedError
from composerlite.errors import CorruptCheckpointError

__all__ = ["compared_with_itself"]

_BLOCK_BYTES = 16 << 20


def compared_with_itself(place: Place, found: Found, progress: Callable[[int], object] = int) -> str:
    """Read all of a checkpoint without a record, and compare it with the checksums that its files hold.

    Args:
        place: has the checkpoint.
        found: the checkpoint.
        progress: is called with each number of bytes.

    Returns:
        Of which system it is, and what was compared.

    Raises:
        CheckpointNotFoundError: its files are gone.
        CorruptCheckpointError: something in it contradicts the rest.
        UntrustedCheckpointError: it holds a type that is not known to be safe.
    """
    system = recognised(contents_of(place, found)) or "of no system that is recognised"
    save = deepspeed_in(place, found)
    directory = None if save is not None else model_directory(place, found)
    sums = 0
    if directory is not None:
        for name, window in _items(directory):
            sums += _compare(name, window, directory.uri, progress)
    for file in found.files:
        if save is not None and not (file.path.startswith(f"{save}/") and file.path.endswith(".pt")):
            continue  # scripts of DeepSpeed beside it, and other saves
        if directory is None or (found.kind == "step" and f"{found.name}/{TRAIN}/" in file.path):
            sums += _compare_file(place, file.path, file.size_bytes, progress)
    compared = f"{sums} checksums in its files match" if sums else "sizes are right, and its files have no checksums"
    return f"{system}; it has no record: {compared}"


def _items(directory: ShardedDirectory) -> Iterator[tuple[str, Window]]:
    """Yield each item of a directory that is a file of its own; numbers in safetensors are none."""
    with RemoteFileSystemReader(directory) as reader:
        reader.warns = False
        whole: set[str] = set()
        for index, stored in reader.read_metadata().storage_data.items():
            name: str = stored.relative_path
            of_torch = name.endswith(TORCH_SUFFIX) and index.fqn != name  # weights, and not a value
            if name.endswith(WEIGHTS_SUFFIX) or name in whole:
                continue
            try:
                with directory.place.opened(directory.at(name), None, threads=1) as source:
                    if of_torch:
                        whole.add(name)
                        yield name, Window(source, 0, directory.place.size(directory.at(name)))
                    else:
                        yield index.fqn, Window(source, stored.offset, stored.length)
            except FileNotFoundError as e:
                raise CorruptCheckpointError(f"checkpoint {directory.uri!r}: its file {name!r} is gone.") from e


def _compare_file(place: Place, path: str, size: int, progress: Callable[[int], object]) -> int:
    uri = place.uri(path)
    if (here := place.path_of(path)) is not None and is_packed(here):
        with readable(here), unpacked(here) as file:
            return _compare(path, Window(UnverifiedFile(file), 0, file.seek(0, 2)), uri, progress)
    with place.opened(path, None) as source:
        return _compare(path, Window(source, 0, size), uri, progress)


def _compare(name: str, window: Window, uri: str, progress: Callable[[int], object]) -> int:
    """Compare the records of a torch file, whose types are safe, with their CRC-32, and return their number; 0 for a
    file of another form, which is read."""
    if window.size_bytes < 4 or window.read(0, 4) != b"PK\3\4":
        safe_contents(window.read(0, window.size_bytes), name, uri)
        return 0
    try:
        TorchFile(window, window.size_bytes, peek=window.read, map_location="meta")
    except RefusedError as e:
        raise untrusted(uri, name, e) from e
    records = entries(window.size_bytes, window.read, window.read)
    for record, entry in records.items():
        crc = 0
        for start in range(0, entry.size, _BLOCK_BYTES):
            data = window.read(entry.offset + start, min(_BLOCK_BYTES, entry.size - start))
            crc = isal_zlib.crc32(data, crc)
            progress(len(data))
        if crc != entry.crc:
            raise CorruptCheckpointError(f"{uri!r}: {name!r}: the bytes of its record {record!r} have another CRC-32")
    return len(records)
