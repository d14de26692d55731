"""The digest of a file is that of its bytes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import xxhash

from composerlite.errors import CorruptCheckpointError
from composerlite.storage import FileDigest, chunk_bytes_for, verify_file
from composerlite.storage.disk.writer import Digester


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    """A file of several pieces of reading, and an empty one: as they are, and not with their last byte changed."""
    data = np.random.default_rng(0).bytes((2 << 20) + 17)
    for content in (data, b""):
        path, digest = tmp_path / "file", FileDigest(len(content), xxhash.xxh3_128_hexdigest(content))
        path.write_bytes(content)
        verify_file(path, digest)
        path.write_bytes(content[:-1] + b"x")
        with pytest.raises(CorruptCheckpointError, match="file"):
            verify_file(path, digest)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 4096, 1 << 20, 5 << 20])
def test_digests_do_not_depend_on_how_the_bytes_come(chunk_bytes: int) -> None:
    """All at once, one by one, in pieces of any size: one of the whole and one of each chunk, as plain means give."""
    data = random.Random(chunk_bytes).randbytes(min((2 << 20) + 17, chunk_bytes * 3000 + 3))
    expected = [xxhash.xxh3_64_hexdigest(data[at : at + chunk_bytes]) for at in range(0, len(data), chunk_bytes)]
    for pieces in ([data], cut(data, 1 << 18), cut(data, 100_003), [*cut(data[:999], 1), data[999:], b""]):
        digester = Digester(chunk_bytes)
        for piece in pieces:
            digester.update(piece)
        digest = digester.finish()
        assert (digest.size_bytes, digest.xxh3_128) == (len(data), xxhash.xxh3_128_hexdigest(data))
        assert digest.chunk_digests("a file") == expected


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize(
    ("size", "chunk"), [(0, 1 << 20), (2048 << 20, 1 << 20), ((2048 << 20) + 1, 2 << 20), (10**12, 512 << 20)]
)
def test_a_file_has_at_most_two_thousand_chunks(size: int, chunk: int) -> None:
    """Of 1 MiB, or so much larger that a manifest stays small."""
    assert chunk_bytes_for(size) == chunk
    assert -(-size // chunk) <= 2048
