"""What a saver has to do with buckets: hands committed checkpoints to uploaders, and takes note of how uploads went."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

from composerlite import dist
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.node_disks import ONE_DISK, Disks
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.checkpoint.record.naming import NamedState
from composerlite.checkpoint.save.publishing import Publication, Publisher, RemoteSaving
from composerlite.checkpoint.save.publishing_together import Shares
from composerlite.checkpoint.save.saver_outcomes import FailuresInARow, RunLogger, SaveNews
from composerlite.errors import CheckpointError, ConfigError

__all__ = ["SavePublishing"]


@final
class SavePublishing:
    """Publishes a saver's checkpoints behind training, from rank 0, or from a rank of each node that has its own disk.

    How uploads went is taken note of on the training thread, by all ranks at the same batch.

    Args:
        remote: where to.
        news: whom to tell how it went.
        failure_limit: so many uploads in a row may fail.
        keeps_none: what is published is deleted from the folder.
        gone: called with the name of each checkpoint that was deleted for it.
    """

    def __init__(
        self,
        remote: RemoteSaving,
        news: SaveNews,
        *,
        failure_limit: int,
        keeps_none: bool,
        gone: Callable[[str], None],
    ) -> None:
        self._remote = remote
        self._news = news
        self._tell_gone = gone
        self._keeps_none = keeps_none
        self._failures = FailuresInARow(failure_limit, "published")
        self._has_places = False
        self._disks = ONE_DISK
        self._roots: list[str] = []
        self._folder = ""
        self._logger: RunLogger | None = None
        self._gone: deque[str] = deque()
        self._outcomes: list[Publication] = []
        # What the ranks tell each other rides on what they reduce in a batch.
        self.ranks_with_news = dist.PiggybackCounter(lambda: int(self._has_news()))

    def open(self, state: NamedState, logger: RunLogger) -> None:
        """Find the buckets; on rank 0, before :meth:`begin`.

        Raises:
            ConfigError: there is none, and the folder is to keep no checkpoints.
            PermissionError: one cannot be written to. FileNotFoundError: there is no such bucket.
        """
        self._remote.open(state, logger)
        if self._keeps_none and not self.publishers:
            raise ConfigError(
                "num_checkpoints_to_keep=0 keeps none in the folder, and there is no bucket to keep them in: give "
                "save_folder a URI, or the Trainer a RemoteUploaderDownloader, or keep 1 or more."
            )

    def begin(self, folder: str, logger: RunLogger) -> None:
        """Publish what is in ``folder``, as the user wrote it; on every rank."""
        self._folder, self._logger = folder, logger
        self._has_places = dist.get_group().from_first("finding buckets", lambda: bool(self.publishers))

    def use_disks(self, disks: Disks, state: NamedState, logger: RunLogger) -> None:
        """Have a rank of each node upload what is on its disk, where they are several."""
        group = dist.get_group()
        self._disks = disks
        if disks.are_several:
            self._roots = group.from_first("finding buckets", lambda: self._remote.roots)
            with group.all_or_none("finding buckets"):
                if disks.is_keeper and not group.is_first:
                    self._remote.follow(state, logger, self._roots)

    @property
    def has_places(self) -> bool:
        """Whether there is anywhere to publish to; the same on every rank."""
        return self._has_places

    @property
    def publishers(self) -> list[Publisher]:
        """One for each bucket, on the ranks that publish."""
        return self._remote.publishers

    # ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────
    def shares(self, name: str) -> Shares | None:
        """How ranks publish a checkpoint together; ``None`` where rank 0 has all files."""
        return Shares.planned(f"checkpoint {name!r}") if self._disks.are_several else None

    def shares_of_all(self, name: str) -> list[Shares | None]:
        """The same for each bucket, where several ranks publish."""
        return [self.shares(name) for _ in self._roots]

    def behind(self, manifests: Sequence[Manifest], run_name: str) -> list[tuple[int, str]]:
        """Which of a run's checkpoints, oldest first, are to be published again: the number of the bucket, the name."""
        behind: list[tuple[int, str]] = []
        for number, publisher in enumerate(self.publishers):
            if self._keeps_none:  # what was fetched, or was not uploaded when the run died: none of it stays
                behind += [(number, manifest.name) for manifest in manifests]
            elif manifests and publisher.is_behind(manifests[-1], run_name):
                behind.append((number, manifests[-1].name))  # a kill came before the end of its upload
        return behind

    def publish(self, manifest: Manifest, run_name: str, shares: Sequence[Shares | None], *, overwrite: bool) -> None:
        """Hand a checkpoint that was committed to all uploaders; called behind training."""
        if not self._disks.are_several:
            for publisher in self.publishers:
                self._hand_over(publisher, manifest, run_name, None, overwrite=overwrite)
        for number, its in enumerate(shares):
            self.publish_again(number, manifest.name, run_name, its, overwrite=overwrite)

    def publish_again(self, number: int, name: str, run_name: str, shares: Shares | None, *, overwrite: bool) -> None:
        """Hand what is in the folder to one uploader; of what each node has, on a rank of it.

        Raises:
            CheckpointError: it is gone.
        """
        if self._disks.is_keeper:
            manifest = self._catalog.manifest_of(name)
            if manifest is None:
                raise CheckpointError(
                    f"checkpoint {name!r} is gone from {self._folder!r} while it was to be published."
                )
            self._hand_over(self.publishers[number], manifest, run_name, shares, overwrite=overwrite)
        elif shares is not None:
            shares.stay_out()

    def _hand_over(
        self, publisher: Publisher, manifest: Manifest, run_name: str, shares: Shares | None, *, overwrite: bool
    ) -> None:
        publisher.publish(
            manifest,
            self._catalog,
            run_name,
            overwrite=overwrite,
            afterwards=functools.partial(self._delete_local, manifest) if self._keeps_none else None,
            shares=shares,
        )

    def _delete_local(self, manifest: Manifest) -> None:
        """Called when a checkpoint is published of which nothing is to stay here."""
        self._catalog.delete(manifest)
        self._gone.append(manifest.name)

    @property
    def _catalog(self) -> Catalog:
        return Catalog(self._folder)

    # ── how it went ──────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def has_news(self) -> bool:
        """Whether uploads had ended on any rank when the ranks last reduced something; the same on every rank."""
        return bool(self.ranks_with_news.total)

    def take_note_together(self) -> None:
        """:meth:`take_note` on every rank, of the uploads of all."""
        every = dist.get_group().gather(self._take_news())
        self._note([name for gone, _ in every for name in gone], [one for _, ones in every for one in ones])

    def take_note(self) -> None:
        """Tell how uploads of this rank went.

        Raises:
            Exception: what made one fail, unless that is tolerated.
        """
        self._note(*self._take_news())

    def _has_news(self) -> bool:
        """Whether uploads have ended on this rank since :meth:`_take_news`."""
        if self._has_places:
            self._outcomes += self._remote.outcomes()
        return bool(self._gone or self._outcomes)

    def _take_news(self) -> tuple[list[str], list[Publication]]:
        """What is gone from the folder, and how uploads went."""
        self._has_news()
        outcomes, self._outcomes = self._outcomes, []
        return [self._gone.popleft() for _ in range(len(self._gone))], outcomes

    def _note(self, gone: list[str], outcomes: list[Publication]) -> None:
        self._news.deleted(gone, self._folder)
        for name in gone:
            self._tell_gone(name)
        for outcome in outcomes:
            self._news.published(outcome)
            if outcome.error is None:
                self._failures.succeeded()
            else:
                self._failures.failed(outcome.error, self._logger)

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────
    def wait(self) -> None:
        """Wait until everything of this rank is published, well or not."""
        self._remote.wait()

    def wait_together(self) -> None:
        """:meth:`wait` on every rank for all."""
        self._remote.wait_together()

    def published(self, seconds: float) -> bool | None:
        """Wait on every rank until all is published, ``seconds`` at most; whether it is; ``None``: nowhere to."""
        return self._remote.published_together(seconds) if self._has_places else None

    def close(self) -> None:
        """Wait for what is being published and let go of the stores."""
        self._remote.close()
