"""The digest of a file is that of its bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

from composerlite.storage import digest_file


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    """A file of several pieces of reading, and an empty one."""
    data = np.random.default_rng(0).bytes((2 << 20) + 17)
    (tmp_path / "large").write_bytes(data)
    (tmp_path / "empty").touch()
    assert digest_file(tmp_path / "large") == (len(data), xxhash.xxh3_128_hexdigest(data))
    assert digest_file(tmp_path / "empty") == (0, xxhash.xxh3_128_hexdigest(b""))
