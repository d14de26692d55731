"""A checkpoint that takes the place of another of the same name: there is the old one or the new one, always."""

from __future__ import annotations

from pathlib import Path

import pytest
import replacing_kills
from forked import run_forked
from replacing_kills import OF_THE_USER, SAVES, value_of

from composerlite.checkpoint import Catalog
from composerlite.errors import CheckpointNotFoundError


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "without-exchange"])
@pytest.mark.parametrize("kind", list(SAVES))
def test_a_kill_while_a_checkpoint_is_replaced_leaves_the_old_or_the_new(
    tmp_path: Path, kind: str, exchange: bool
) -> None:
    """At whatever file it came, on disks that can exchange two names and on those that cannot, such as NFS.

    The next start finds one of them, whole, and the files that the user keeps in its directory; nothing is left behind.
    """
    done = run_forked(replacing_kills.main, str(tmp_path), kind, "exchange" if exchange else "none", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    values: set[float] = set()
    for name in done.stdout.split():
        folder = tmp_path / name
        if exchange and kind != "archives":  # else a part may have no name until the next start
            assert value_of(folder, kind) in (1, 2), f"{name}: before the next start"
        Catalog(folder).recover()
        try:
            values.add(value_of(folder, kind))
        except CheckpointNotFoundError as e:
            raise AssertionError(f"{name}: neither the old one nor the new one is left") from e
        if kind in ("sharded", "step"):
            for path in OF_THE_USER:
                assert (folder / "c" / path).read_text() == "mine", f"{name}: {path}"
        names = {path.name for path in folder.iterdir()} - {".manifest", "c", "c-rank0.tar", "c-rank1.tar"}
        assert not names, f"{name}: {names} are left behind"
    assert values == {1, 2}
    assert len(done.stdout.split()) > 8
