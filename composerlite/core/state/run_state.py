"""RunState: everything that training changes, in one place. How it is saved is in ``composerlite.core.state.state``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from composerlite import dist
from composerlite.core.data import Evaluator, batch_get, batch_set, length_of
from composerlite.core.interruption import Interruption
from composerlite.core.numerics import Precision, seed_of_rank
from composerlite.core.parallelism import ParallelismConfig
from composerlite.core.time import MICROSECONDS, Time, TimeInput, Timestamp, TimeUnit
from composerlite.devices import Device, Devices, this_machine
from composerlite.errors import ConfigError, naming
from composerlite.types import Batch, Lineage, StateDict, Stateful

if TYPE_CHECKING:
    from torchmetrics import Metric

    from composerlite.core.state.loaded_schedulers import LoadedSchedulers
    from composerlite.core.state.loss_reading import LossReading

__all__ = ["KeptAlgorithm", "KeptCallback", "RunState", "by_class", "by_key"]

T = TypeVar("T")
K = TypeVar("K", bound="KeptCallback")


class KeptCallback(Protocol):
    """A :class:`Callback` as a state sees it: its progress is saved. Callbacks know the state, not it them."""

    @property
    def state_key(self) -> str: ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state_dict: StateDict) -> None: ...


class KeptAlgorithm(KeptCallback, Protocol):
    """An :class:`Algorithm` as a state sees it: its progress is saved, and how to build it again."""

    @staticmethod
    def required_on_load() -> bool: ...

    def config(self) -> dict[str, Any]: ...

    def state_like(self, state: Any) -> dict[str, Any]: ...

    def apply_before_load(self, state: Any) -> None: ...


def _several(given: T | Sequence[T] | None) -> Sequence[T]:
    """Sequence of the items that ``given`` stands for: one item, several, or ``None`` for none."""
    if isinstance(given, Sequence):
        return cast("Sequence[T]", given)
    return () if given is None else (given,)


class RunState:
    """Everything that training changes. Algorithms, callbacks and loggers read and write it, as :class:`State`.

    What is saved in a checkpoint is listed in :attr:`serialized_attributes`. The rest belongs to the moment:

    Attributes:
        device: the device of this rank.
        optimizers: the one optimizer, in a tuple. schedulers, algorithms, callbacks, evaluators: lists. One item may be
            assigned to each.
        batch: the current batch, on the device; within a microbatch, that microbatch.
        outputs: what the model returned for it.
        loss: the loss of the current microbatch.
        total_loss_dict: mean losses of the last batch by name, as logged.
        loss_reading: of these, where they are on their way from a device.
        devices: reads them while training continues; ``None`` on the CPU, where they are there.
        not_finite: names of the losses and gradient norms of the last batch that are no finite numbers, where anybody
            has read them: checkpoints are marked with them.
        timestamp: where the run stands.
        previous_timestamp: where it stood one batch (or epoch) before; ``None`` before the first.
        fit_starts: where the run stood at each call of ``fit``, those before a resume included.
        lineage: the attempt of the run whose checkpoints are saved, and those that it came from.
        evaluated_at: the batch count of the last evaluation, by the evaluator's label: there is one at most for each.
        learning_rates: of the optimizer's groups, as the script has given them.
        settings: plain values that a resume compares with those of its script; in checkpoints.
        resumed_metadata: ``metadata`` of the checkpoint of the run that this one continues; empty: it continues none.
        eval_timestamp, predict_timestamp: progress of the current evaluation and prediction.
        train_metrics: metrics by name. eval_metrics: metrics by evaluator label and name.
        needs_train_metrics: somebody decides by those of whole epochs: checkpoints have their state in any case.
        train_metric_values, eval_metric_values: last computed values by metric name.
        dataloader, dataloader_label, dataloader_len: the loader in use now.
        data_position: gives ``dataset_state`` while training; set by the training loop.
        device_train_microbatch_size: samples per forward pass; ``None`` for a whole batch.
        parallelism: how the model is sharded over ranks; ``None`` for a replica on each rank.
        deepspeed_config: the configuration of DeepSpeed, which trains the model; ``None`` without it.
        deepspeed: what DeepSpeed saves and loads, once it has the model. Else ``None``.
        piggyback: numbers that are added up over the ranks in each batch.
        interruption: whether the process was asked from outside to end.
        noted_states: what checkpoints hold of callbacks and algorithms, by ``id``, in place of what they say now:
            that of before a batch that was given up.
        stop_requested: with several ranks, :meth:`stop_training` was called on this one and the others do not know yet.
        profiler: the :class:`Profiler` that the trainer was given; else ``None``.
        is_named: somebody gave the run its name. Where nobody has, that in a checkpoint does not tell whose it is.
        brings_schedulers: a call of ``fit`` may bring other schedulers than there are when a checkpoint is loaded.
        loaded_schedulers: what the checkpoint holds of schedulers, until it has; else ``None``.
        loaded_generators: states of the random generators, one for each rank, that the next ``fit`` begins with;
            ``None``: as they are.
        stopped: the ``max_duration`` that the run had when it was stopped; ``None`` if it was not. In checkpoints.
    """

    serialized_attributes = (
        "model",
        "optimizers",
        "schedulers",
        "algorithms",
        "callbacks",
        "scaler",
        "timestamp",
        "rank_zero_seed",
        "train_metrics",
        "eval_metrics",
        "run_name",
        "dataset_state",
    )

    def __init__(
        self,
        model: nn.Module,
        *,
        rank_zero_seed: int,
        run_name: str,
        device: str | torch.device,
        max_duration: TimeInput | None = None,
        precision: str | Precision = Precision.FP32,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        algorithms: KeptAlgorithm | Sequence[KeptAlgorithm] | None = None,
        callbacks: KeptCallback | Sequence[KeptCallback] | None = None,
        train_dataloader: Iterable[Batch] | None = None,
        dataloader: Iterable[Batch] | None = None,
        dataloader_label: str | None = None,
        evaluators: Evaluator | Sequence[Evaluator] | None = None,
        device_train_microbatch_size: int | None = None,
        auto_microbatching: bool = False,
        save_metrics: bool = False,
        rank: int = 0,
        world_size: int = 1,
        parallelism: ParallelismConfig | None = None,
        deepspeed_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.rank_zero_seed = rank_zero_seed
        self.run_name = run_name
        self.is_named = True
        self.brings_schedulers = False
        self.loaded_schedulers: LoadedSchedulers | None = None
        self.loaded_generators: list[dict[str, Any]] | None = None
        self.device = Device(device)
        self.precision = Precision(precision)
        self.optimizers = optimizers
        self.schedulers = None
        self.scaler = scaler
        self.algorithms = algorithms
        self.callbacks = callbacks
        self.train_dataloader = train_dataloader
        self.evaluators = evaluators
        self.device_train_microbatch_size = device_train_microbatch_size
        self.auto_microbatching = auto_microbatching
        self.save_metrics = save_metrics
        self.needs_train_metrics = False
        self.rank = rank
        self.world_size = world_size
        self.parallelism = parallelism
        self.deepspeed_config = deepspeed_config
        self.deepspeed: Any = None
        self.noted_states: dict[int, StateDict] = {}
        self.stop_requested = False
        self.stopped: Time | None = None
        self.piggyback: list[dist.PiggybackCounter] = []
        self.interruption = Interruption(self.piggyback)

        self._max_duration: Time | None = None
        self.max_duration = max_duration
        self._iteration_length = Time.from_epoch(1)

        self.timestamp = Timestamp()
        self.previous_timestamp: Timestamp | None = None
        self.fit_starts: list[Timestamp] = []
        self.evaluated_at: dict[str, int] = {}
        self.learning_rates: tuple[float, ...] = ()
        self.settings: StateDict = {}
        self.resumed_metadata: StateDict = {}
        self.eval_timestamp = Timestamp()
        self.predict_timestamp = Timestamp()

        self.batch: Batch = None
        self.outputs: Any = None
        self.loss: Any = None
        self.total_loss_dict: dict[str, Any] = {}
        self.loss_reading: LossReading | None = None
        self.devices: Devices | None = None if self.device.type == "cpu" else this_machine
        self.not_finite: tuple[str, ...] = ()
        self.train_metrics: dict[str, Metric] = {}
        self.eval_metrics: dict[str, dict[str, Metric]] = {}
        self.train_metric_values: dict[str, float] = {}
        self.eval_metric_values: dict[str, float] = {}

        self.set_dataloader(dataloader, dataloader_label)
        self.data_position: Stateful | None = None
        self.dataset_state: StateDict = {"train": None, "eval": {}}
        self.load_path: str | None = None
        self.profiler: Any = None
        self.lineage = Lineage()

    # ── what there are several of: one may be assigned alone ─────────────────────────────────────────────────────
    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return self._optimizers

    @optimizers.setter
    def optimizers(self, given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None) -> None:
        self._optimizers = tuple(_several(given))

    @property
    def schedulers(self) -> list[LRScheduler]:
        return self._schedulers

    @schedulers.setter
    def schedulers(self, given: LRScheduler | Sequence[LRScheduler] | None) -> None:
        self._schedulers = list(_several(given))

    @property
    def algorithms(self) -> list[KeptAlgorithm]:
        return self._algorithms

    @algorithms.setter
    def algorithms(self, given: KeptAlgorithm | Sequence[KeptAlgorithm] | None) -> None:
        self._algorithms = list(_several(given))

    @property
    def callbacks(self) -> list[KeptCallback]:
        return self._callbacks

    @callbacks.setter
    def callbacks(self, given: KeptCallback | Sequence[KeptCallback] | None) -> None:
        self._callbacks = list(_several(given))

    @property
    def evaluators(self) -> list[Evaluator]:
        return self._evaluators

    @evaluators.setter
    def evaluators(self, given: Evaluator | Sequence[Evaluator] | None) -> None:
        self._evaluators = list(_several(given))

    # ── how long ─────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def max_duration(self) -> Time | None:
        """End of training; a plain number counts epochs."""
        return self._max_duration

    @max_duration.setter
    def max_duration(self, value: TimeInput | None) -> None:
        with naming("max_duration", value):
            time = None if value is None else Time.from_input(value, TimeUnit.EPOCH)
        if time is not None and time.unit is TimeUnit.DURATION:
            raise ConfigError(
                f"max_duration={str(value)!r}: 'dur' is a fraction of max_duration itself; use another unit."
            )
        self._max_duration = time
        # Looked at several times per step: kept ready as bare numbers.
        self._end = math.inf if time is None else time.value
        if time is not None and time.unit is TimeUnit.SECOND:
            self._end *= MICROSECONDS
        self._end_field = Timestamp.field_of(TimeUnit.BATCH if time is None else time.unit)

    @property
    def iteration_length(self) -> Time:
        """Length of an iteration, in epochs or tokens; a plain number counts epochs."""
        return self._iteration_length

    @iteration_length.setter
    def iteration_length(self, value: TimeInput) -> None:
        time = Time.from_input(value, TimeUnit.EPOCH)
        if time.unit not in (TimeUnit.EPOCH, TimeUnit.TOKEN) or time.value <= 0:
            raise ConfigError(f"iteration_length={str(value)!r}: expected a positive number of epochs or tokens.")
        self._iteration_length = time

    @property
    def training_is_over(self) -> bool:
        """True if the run has reached ``max_duration``."""
        return self.timestamp.fields[self._end_field] >= self._end

    def get_elapsed_duration(self) -> Time | None:
        """The fraction of training that is done, in ``dur``; ``None`` without a ``max_duration``."""
        end = self._max_duration
        if end is None:
            return None
        return Time(self.timestamp.count(end.unit) / end.value if end.value else 1.0, TimeUnit.DURATION)

    def stop_training(self) -> None:
        """End training after the current batch: ``max_duration`` becomes now.

        With several ranks one of them is enough: all end after the same batch, the first at whose end they can agree.
        Checkpoints say so: the run has ended when it is launched again, too, unless it is given a later end.
        """
        if self.world_size > 1:
            self.stop_requested = True
        else:
            self.apply_stop()

    def apply_stop(self) -> None:
        """Carry out a :meth:`stop_training`. Every rank calls it after the same batch."""
        if self.stopped is None:
            self.stopped = self._max_duration
        self.stop_requested = False
        self.max_duration = self.timestamp.batch

    @property
    def sharding(self) -> str | None:
        """Layout of a checkpoint of a model that is distributed over ranks: 'sharded', 'full' or 'deepspeed'.

        ``None`` where every rank has the whole model.
        """
        if self.deepspeed_enabled:
            return "deepspeed"
        if self.parallelism is None:
            return None
        return "sharded" if self.parallelism.fsdp is None else self.parallelism.fsdp.state_dict_type

    @property
    def deepspeed_enabled(self) -> bool:
        """True if DeepSpeed trains the model."""
        return self.deepspeed_config is not None

    # ── identity ─────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def seed(self) -> int:
        """The seed of this rank: ``rank_zero_seed`` plus its rank."""
        return seed_of_rank(self.rank_zero_seed, self.rank)

    # ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def dataloader_len(self) -> Time | None:
        """Batches of one iteration of :attr:`dataloader`; ``None`` where it has no length."""
        return None if self._dataloader_len is None else Time.from_batch(self._dataloader_len)

    def set_dataloader(
        self, dataloader: Iterable[Batch] | None, label: str | None = None, num_batches: int | None = None
    ) -> None:
        """Make ``dataloader`` the one in use. ``num_batches`` limits its length; ``None`` or -1 takes all.

        Args:
            dataloader: the loader.
            label: its name in logs.
            num_batches: limit of its length; ``None`` or -1 for none.
        """
        self.dataloader: Iterable[Batch] | None = dataloader
        self.dataloader_label: str | None = label
        length = length_of(dataloader)
        if num_batches is not None and num_batches >= 0:
            length = num_batches if length is None else min(length, num_batches)
        self._dataloader_len: int | None = length

    def batch_get_item(self, key: Any) -> Any:
        """Return one item of the batch; see :func:`~composerlite.core.data.batch_get`."""
        return batch_get(self.batch, key)

    def batch_set_item(self, key: Any, value: Any) -> None:
        """Replace one item of the batch; see :func:`~composerlite.core.data.batch_set`.

        Args:
            key: index, key, attribute name or function, as :func:`~composerlite.core.data.batch_set` takes it.
            value: the new item.
        """
        self.batch = batch_set(self.batch, key, value)


# ── names in checkpoints ────────────────────────────────────────────────────────────────────────────────────────────
def _stable_names(items: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Name each item: the first of a name keeps it, the next ones get ``:1``, ``:2``, … in order."""
    named: dict[str, T] = {}
    count: dict[str, int] = {}
    for name, item in items:
        number = count.get(name, 0)
        count[name] = number + 1
        named[name if number == 0 else f"{name}:{number}"] = item
    return named


def by_class(items: Iterable[T]) -> dict[str, T]:
    """Optimizers and schedulers by the names of their classes."""
    return _stable_names((type(item).__qualname__, item) for item in items)


def by_key(items: Iterable[K]) -> dict[str, K]:
    """Callbacks and algorithms by their state keys."""
    return _stable_names((item.state_key, item) for item in items)
