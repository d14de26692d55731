"""Publishing a checkpoint whose files lie on several disks: a rank of each node sends what its node has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import final

from composerlite import dist
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.record.manifest import FileRecord, Manifest

__all__ = ["Shares"]

_LONGEST_UPLOAD = timedelta(hours=2)
"""A rank that sends for longer than that does not count as alive any more."""


@final
@dataclass(frozen=True)
class Shares:
    """The votes over one publication: that it begins, which rank 0 says, and that all have sent their files.

    Every rank calls :meth:`planned`, and then :meth:`publish` or :meth:`stay_out`.
    """

    begin: dist.Vote
    end: dist.Vote

    @classmethod
    def planned(cls, what: str) -> Shares:
        """The votes of all ranks over ``what``; in the main thread, in the same order on all."""
        group = dist.get_group()
        return cls(*(group.vote(f"publishing {what}", longest_work=_LONGEST_UPLOAD) for _ in range(2)))

    def stay_out(self) -> None:
        """On a rank that has nothing to send and need not know how it ends."""
        self.begin.pass_by()
        self.end.pass_by()

    def publish(
        self,
        remote: Catalog,
        manifest: Manifest,
        files: Sequence[tuple[FileRecord, Path]],
        *,
        link: str | None,
        overwrite: bool,
    ) -> None:
        """As :meth:`Catalog.publish`, with the ``files`` of this rank's node.

        Raises:
            RankError: what failed on one of the ranks; on all that publish.
        """
        try:
            is_there: bool = self.begin.run(
                lambda: None,
                lambda _: remote.begin(manifest, overwrite=overwrite),
            )
            self.end.run(
                lambda: None if is_there else remote.send(files),
                lambda _: remote.finish(manifest, link=link, is_there=is_there),
            )
        finally:
            remote.end(manifest.name)
