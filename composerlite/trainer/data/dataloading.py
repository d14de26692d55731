"""Choose the position for a loader, so that a resumed run sees exactly the remaining batches.

* a plain ``DataLoader`` over a map-style data set: :class:`MapStylePosition` draws the same order and skips samples;
* a loader with ``state_dict``, or over a streaming data set: :class:`StatefulPosition` lets the loader restore itself;
* any other iterable: :class:`ReplayPosition` loads the trained batches again and discards them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

from torch.utils.data import DataLoader, IterableDataset

from composerlite import dist
from composerlite.core import DataSpec, Timestamp
from composerlite.errors import ConfigError
from composerlite.trainer.data.held import Held, apart, is_streaming, without_persistent_workers
from composerlite.trainer.data.map_style import MapStylePosition
from composerlite.trainer.data.position import DataPosition
from composerlite.trainer.data.samplers import GlobalSampler, Share, divides_by_itself
from composerlite.trainer.data.streams import ReplayPosition, StatefulPosition
from composerlite.types import Batch, StateDict, Stateful

__all__ = ["DataPosition", "EvaluationBatches", "Share", "batches_per_epoch", "is_same_data", "position_in"]


def position_in(
    spec: DataSpec,
    *,
    seed: int,
    timestamp: Callable[[], Timestamp],
    share: Share | None = None,
    saved: StateDict | None = None,
) -> DataPosition:
    """Return the position in ``spec.dataloader``. Collective.

    Args:
        spec: training data.
        seed: seed of rank 0, for worker processes.
        timestamp: returns the current training time.
        share: part of the data for this rank; by default one part for each rank.
        saved: ``state_dict()`` of the position to resume from.

    Raises:
        ConfigError: the ranks have different loaders, or a loader that gives every rank all of the data.
        IncompatibleCheckpointError: this loader, or this number of ranks, cannot resume from ``saved``.
    """
    if share is None:
        share = Share(dist.get_global_rank(), dist.get_world_size())
    if _is_shared_out(share):
        _check_loaders_agree(spec, share)
    loader: Any = spec.dataloader
    if _is_map_style(spec):
        is_shared = _is_shared_out(share) and not divides_by_itself(loader)
        own_seed = seed if is_shared else seed + share.rank
        position = MapStylePosition(loader, timestamp, seed=own_seed, share=share, is_shared=is_shared)
    else:
        loader = without_persistent_workers(loader)
        dataset = getattr(loader, "dataset", None)
        stateful = loader if isinstance(spec.dataloader, Stateful) else dataset if is_streaming(dataset) else None
        if stateful is not None:
            held = Held(loader, with_states=False)
            position = StatefulPosition(loader, held, timestamp, share, stateful=stateful)
        else:
            position = ReplayPosition(loader, Held(loader), timestamp, share)
    if saved is not None:
        position.load_state_dict(saved)
    return position


def is_same_data(one: DataSpec, other: DataSpec) -> bool:
    """Return true if training on ``other`` continues the epoch begun on ``one``."""
    return one.dataloader is other.dataloader and one.replay_on_resume == other.replay_on_resume


def batches_per_epoch(spec: DataSpec, share: Share, *, subset: int) -> int:
    """Return the limit of batches per epoch that the loader's own length does not show; -1 for no limit.

    Args:
        spec: data.
        share: part of the data for this rank. The trainer divides map-style data among the ranks.
        subset: limit of the user; -1 for no limit.
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
    """Iterator over this rank's batches of the evaluation data. Over all ranks each sample is given once.

    All ranks get the same number of batches. A loader that the trainer cannot divide is iterated as it is.

    Args:
        spec: data to evaluate on.
        share: part of the data for this rank.
        is_trained_on: the loader is also the training loader, and keeps its position.

    Attributes:
        is_padding: the last batch repeats a sample of another rank, and metrics must leave it out.
    """

    def __init__(self, spec: DataSpec, share: Share, *, is_trained_on: bool = False) -> None:
        self._position: DataPosition | None = None
        loader: Any = spec.dataloader
        if not _is_shared_out(share) or not _is_partitioned(spec):
            self._batches: Iterator[Batch] = iter(apart(loader) if is_trained_on else loader)
        else:
            self._position = MapStylePosition(loader, Timestamp, seed=None, share=share, is_shared=True)
            self._batches = self._position.epoch(0, 0)

    @property
    def is_padding(self) -> bool:
        return self._position is not None and self._position.is_padding

    def __iter__(self) -> Iterator[Batch]:
        return self._batches


def _is_shared_out(share: Share) -> bool:
    """Return true if several ranks draw the same order, also if tensor-parallel ranks have the same share."""
    return share.world_size > 1 or dist.get_world_size() > 1


def _is_map_style(spec: DataSpec) -> bool:
    loader: Any = spec.dataloader
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if not plain or isinstance(loader, Stateful) or is_streaming(loader.dataset):
        return False
    return not isinstance(loader.dataset, IterableDataset) and not spec.replay_on_resume


def _is_partitioned(spec: DataSpec) -> bool:
    loader: Any = spec.dataloader
    return _is_map_style(spec) and not divides_by_itself(loader)


def _check_loaders_agree(spec: DataSpec, share: Share) -> None:
    """Check that all ranks have the same data in batches of the same size."""
    loader: Any = spec.dataloader
    text = type(loader).__name__
    if _is_map_style(spec):
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
    samplers = ("RandomSampler", "SequentialSampler")  # torchdata has classes with these names
    is_for_itself = isinstance(spec.dataloader, DataLoader) and not _is_map_style(spec)
    if share.world_size > 1 and is_for_itself and type(loader.sampler).__name__ in samplers:
        raise ConfigError(
            f"train_dataloader: each of {share.world_size} ranks would train on all samples of this {text}. Give it "
            "sampler=composerlite.utils.dist.get_sampler(dataset, shuffle=…), or use a plain DataLoader, which the "
            "trainer partitions by itself."
        )
