"""The commit of a checkpoint, the same in every place: it appears atomically.

begin → stage → prepare → commit → recover. What is written lies under names of its own, durable, before anything that
is there is touched. To prepare is to *announce* the manifest, under another name. To commit is to give all of it its
names, the manifest last. What had these names before is there until then, is given them back if the commit fails, and
goes when there is the manifest. A kill before the first name is given leaves nothing that counts; a kill after it
leaves all that the next start or the next save of that name needs to complete the commit.

What differs lies in the verbs of a place: a folder exchanges names at one instant, a bucket puts small objects which
decide what others mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

from composerlite.checkpoint.record.manifest import Manifest

__all__ = ["Commit"]


class Commit(ABC):
    """The commit of one checkpoint. Used as a context manager, which ends it: prepared and not committed, it is undone.

    A place makes one, which says how each step is done there.
    """

    @final
    def prepare(self, manifest: Manifest) -> None:
        """Make it durable what is to be committed: nothing is left but to give names."""
        self.announce(manifest.to_json())

    @final
    def commit(self) -> None:
        """Make the checkpoint exist.

        Raises:
            CheckpointExistsError: there is one by now, and it is not to be replaced.
            OSError, ObjectStoreError: it does not, and what was there before has its names again.
        """
        try:
            self.take_names()
            self.publish()
        except BaseException:
            self.undo()
            raise
        self.discard()

    @abstractmethod
    def announce(self, manifest: bytes) -> None:
        """Make the manifest durable under another name: it tells what is about to get its names."""

    @abstractmethod
    def take_names(self) -> None:
        """Give each part its name. From the first one on a kill leaves what completes the commit."""

    @abstractmethod
    def publish(self) -> None:
        """Give the manifest its name: the checkpoint exists."""

    @abstractmethod
    def undo(self) -> None:
        """Give the names back to what had them before."""

    @abstractmethod
    def discard(self) -> None:
        """Remove the replaced files. A failure is logged: they are no checkpoint."""

    def leave(self) -> None:
        """End without knowing whether it is to be committed: the next start finds out."""

    def close(self, error: BaseException | None) -> None:
        """Withdraw names that were announced and not published, unless the files were left. May be called twice."""

    def __enter__(self) -> Commit:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)
