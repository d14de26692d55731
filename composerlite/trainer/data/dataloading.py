"""The training data and the position in it.

A resumed run must see exactly the batches that the interrupted one would have seen. What that takes depends on the
loader; :func:`position_in` chooses (``docs/adr/0010-data-position.md`` says why):

* a plain ``DataLoader`` over a map-style data set: :class:`IndexedPosition` puts the generators where they were when
  the epoch began, draws the same indices, and skips those already seen without loading them;
* the same on several ranks: :class:`DealtPosition` gives each rank its share of the samples, and resumes with another
  number of ranks (``docs/adr/0010-data-position.md``);
* a loader with ``state_dict`` and ``load_state_dict``, or over a streaming data set: :class:`StatefulPosition` lets it
  restore itself;
* anything else: :class:`ReplayPosition` asks it for the batches already seen and throws them away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

from torch.utils.data import DataLoader, IterableDataset

from composerlite import dist
from composerlite.core import DataSpec, Timestamp
from composerlite.errors import ConfigError
from composerlite.trainer.data.held import apart, is_streaming
from composerlite.trainer.data.map_style import DealtPosition, IndexedPosition
from composerlite.trainer.data.position import DataPosition
from composerlite.trainer.data.samplers import GlobalSampler, Share, deals_by_itself
from composerlite.trainer.data.streams import ReplayPosition, StatefulPosition
from composerlite.types import Batch, StateDict, Stateful

__all__ = [
    "DataPosition",
    "DealtPosition",
    "EvaluationBatches",
    "IndexedPosition",
    "ReplayPosition",
    "Share",
    "StatefulPosition",
    "batches_per_epoch",
    "is_same_data",
    "position_in",
]


def position_in(
    spec: DataSpec,
    *,
    seed: int,
    timestamp: Callable[[], Timestamp],
    share: Share | None = None,
    saved: StateDict | None = None,
) -> DataPosition:
    """Create the position that iterates over ``spec.dataloader`` and makes a resume exact. Collective.

    Args:
        spec: the training data.
        seed: of rank 0; seeds worker processes.
        timestamp: tells where training stands.
        share: which part of the data is this rank's; by default one for each rank.
        saved: the position to resume from, as ``state_dict`` of a position gave it.

    Raises:
        ConfigError: the ranks have different loaders, or one that would give every rank all of the data.
        IncompatibleCheckpointError: a run cannot resume from ``saved`` with this loader, or this number of ranks.
    """
    if share is None:
        share = Share(dist.get_global_rank(), dist.get_world_size())
    if _is_shared_out(share):
        _check_loaders_agree(spec, share)
    position = _choose(spec, seed, timestamp, share, saved)
    if saved is not None:
        position.load_state_dict(saved)
    return position


def is_same_data(one: DataSpec, other: DataSpec) -> bool:
    """Return true if training on ``other`` continues with the epoch that was begun on ``one``."""
    return one.dataloader is other.dataloader and one.replay_on_resume == other.replay_on_resume


def batches_per_epoch(spec: DataSpec, share: Share, *, subset: int) -> int:
    """Limit of the batches of an epoch besides the loader's length: ``subset``, and the shares of other ranks.

    -1 without a limit, as for ``subset``.
    """
    if not _is_shared_out(share) or not _is_partitioned(spec):
        return subset
    loader: Any = spec.dataloader
    try:
        batches = len(GlobalSampler(loader, share))
    except (TypeError, NotImplementedError):  # a sampler without a length
        return subset
    return batches if subset < 0 else min(subset, batches)


@final
class EvaluationBatches:
    """This rank's batches of the data to evaluate on; over all ranks each sample is given once.

    Every rank is given as many batches. A loader that the trainer cannot partition is iterated over as it is: apart
    from training, where that is torchdata's and trained on as well.

    Attributes:
        is_padding: see :class:`DataPosition`; such a batch is for no metric.
    """

    def __init__(self, spec: DataSpec, share: Share, *, is_trained_on: bool = False) -> None:
        self._position: DataPosition | None = None
        loader: Any = spec.dataloader
        if not _is_shared_out(share) or not _is_partitioned(spec):
            self._batches: Iterator[Batch] = iter(apart(loader) if is_trained_on else loader)
        else:
            self._position = DealtPosition(loader, Timestamp, seed=None, share=share)
            self._batches = self._position.epoch(0, 0)

    @property
    def is_padding(self) -> bool:
        return self._position is not None and self._position.is_padding

    def __iter__(self) -> Iterator[Batch]:
        return self._batches


def _choose(
    spec: DataSpec, seed: int, timestamp: Callable[[], Timestamp], share: Share, saved: StateDict | None
) -> DataPosition:
    loader: Any = spec.dataloader
    dataset = getattr(loader, "dataset", None)
    if isinstance(spec.dataloader, Stateful):
        return StatefulPosition(loader, loader, timestamp, seed=seed + share.rank, share=share)
    if is_streaming(dataset):
        return StatefulPosition(loader, dataset, timestamp, seed=seed + share.rank, share=share)
    was_partitioned = saved is not None and saved.get("kind") == DealtPosition.__name__
    if _is_partitioned(spec) and (_is_shared_out(share) or was_partitioned):
        return DealtPosition(loader, timestamp, seed=seed, share=share)
    if _is_indexed(spec):
        return IndexedPosition(loader, timestamp, seed=seed + share.rank, share=share)
    return ReplayPosition(loader, seed=seed + share.rank, share=share)


def _is_shared_out(share: Share) -> bool:
    """Return true if other ranks draw the same: to have other samples, or the same, with parts of one model."""
    return share.world_size > 1 or dist.get_world_size() > 1


def _is_indexed(spec: DataSpec) -> bool:
    loader: Any = spec.dataloader
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if not plain or isinstance(loader, Stateful) or is_streaming(loader.dataset):
        return False
    return not isinstance(loader.dataset, IterableDataset) and not spec.replay_on_resume


def _is_partitioned(spec: DataSpec) -> bool:
    loader: Any = spec.dataloader
    return _is_indexed(spec) and not deals_by_itself(loader)


def _check_loaders_agree(spec: DataSpec, share: Share) -> None:
    """Check that every rank has the same data, cut in the same way."""
    loader: Any = spec.dataloader
    text = type(loader).__name__
    if _is_indexed(spec):
        sampler: Any = loader.batch_sampler if loader.batch_size is None else loader.sampler
        how = f"{type(sampler).__name__}, seed={getattr(sampler, 'seed', None)}"
        text += f" over {spec.num_samples} samples, batch_size={loader.batch_size}, drop_last={loader.drop_last}, {how}"
    texts = dist.get_group().gather(text)
    for rank, other in enumerate(texts):
        if other != texts[0]:
            raise ConfigError(
                f"train_dataloader: rank 0 has {texts[0]} and rank {rank} has {other}. Give every rank the same loader "
                "over the same data: the trainer gives each rank its share."
            )
    samplers = ("RandomSampler", "SequentialSampler")  # torchdata has some of its own
    is_for_itself = isinstance(spec.dataloader, DataLoader) and not _is_indexed(spec)
    if share.world_size > 1 and is_for_itself and type(loader.sampler).__name__ in samplers:
        raise ConfigError(
            f"train_dataloader: each of {share.world_size} ranks would train on all samples of this {text}. Give it "
            "sampler=composerlite.utils.dist.get_sampler(dataset, shuffle=…), or use a plain DataLoader, which the "
            "trainer partitions by itself."
        )
