"""RunState: all attributes of a run. `composerlite.core.state.state` saves and restores them."""

from __future__ import annotations

import math
import operator
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
from composerlite.core.state.resumed import Resumed, Script
from composerlite.core.time import MICROSECONDS, Time, TimeInput, Timestamp, TimeUnit
from composerlite.devices import Device, Devices, this_machine
from composerlite.errors import ConfigError, naming
from composerlite.types import Batch, Lineage, StateDict, Stateful

if TYPE_CHECKING:
    from torchmetrics import Metric

    from composerlite.core.state.loss_reading import LossReading

__all__ = ["RunState", "SavedAlgorithm", "SavedCallback", "by_class", "by_key"]

T = TypeVar("T")
K = TypeVar("K", bound="SavedCallback")


class SavedCallback(Protocol):
    """The part of a :class:`Callback` that a state needs to save and restore its progress."""

    @property
    def state_key(self) -> str: ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state_dict: StateDict) -> None: ...


class SavedAlgorithm(SavedCallback, Protocol):
    """The part of an :class:`Algorithm` that a state needs to save, restore and rebuild the algorithm."""

    @staticmethod
    def required_on_load() -> bool: ...

    def config(self) -> dict[str, Any]: ...

    def state_like(self, state: Any) -> dict[str, Any]: ...

    def apply_before_load(self, state: Any) -> None: ...


def _list_of(name: str) -> Any:
    """Make a property that holds a list. Assign a sequence, a single item, or ``None`` for an empty list."""

    def assign(state: RunState, given: object) -> None:
        items = cast("Sequence[Any]", given) if isinstance(given, Sequence) else () if given is None else (given,)
        vars(state)[f"_{name}"] = list(items)

    return property(operator.attrgetter(f"_{name}"), assign)


class RunState:
    """Everything that training changes. Algorithms, callbacks and loggers get the subclass :class:`State`.

    :attr:`serialized_attributes` lists the attributes that checkpoints hold. All others describe the moment.

    Attributes:
        device: device of this rank.
        batch: current batch, on the device; inside a microbatch, the microbatch.
        outputs: output of the model for ``batch``.
        loss: loss of the current microbatch.
        total_loss_dict: mean losses of the last batch, by the logged names.
        loss_reading: losses of the last batch on their way from the device; ``None`` on the CPU.
        devices: reads losses while training continues; ``None`` on the CPU.
        not_finite: names of the losses and gradient norms of the last batch that are NaN or infinite, if any code has
            read their values. Checkpoints are marked with these names.
        timestamp: progress of training.
        previous_timestamp: progress one batch or epoch before; ``None`` before the first batch.
        eval_timestamp, predict_timestamp: progress of the current evaluation and prediction.
        fit_starts: timestamp at each call of ``fit``, including the calls before a resume.
        evaluated_at: batch count of the last evaluation, by label of the evaluator.
        lineage: attempt of the run, and the attempts before.
        script: settings of the script.
        resumed: parts of the loaded checkpoint that are needed after the load.
        train_metrics: metrics by name. eval_metrics: metrics by label of the evaluator and name.
        train_metric_values, eval_metric_values: last computed values, by name of the metric.
        save_metrics: save the states of all metrics.
        needs_train_metrics: save the states of train metrics even without ``save_metrics``.
        dataloader, dataloader_label, dataloader_len: the current loader.
        data_position: source of ``dataset_state`` during training.
        device_train_microbatch_size: samples of a forward pass; ``None`` for a whole batch.
        parallelism: configuration of FSDP and tensor parallelism; ``None`` for a replica on each rank.
        deepspeed_config: configuration of DeepSpeed; ``None`` if DeepSpeed does not train the model.
        deepspeed: saves and loads the files of DeepSpeed; ``None`` without DeepSpeed.
        piggyback: counters that are summed over the ranks with each batch.
        interruption: request from outside to end the process.
        stop_requested: this rank called :meth:`stop_training`, and the other ranks do not know yet.
        stopped: ``max_duration`` at the time of :meth:`stop_training`; ``None`` if the run was not stopped.
        load_path: path or URI of the loaded checkpoint.
        profiler: :class:`Profiler` of the trainer; ``None`` without a profiler.
    """

    optimizers: list[torch.optim.Optimizer] = _list_of("optimizers")
    """Optimizers; at most a single optimizer."""
    schedulers: list[LRScheduler] = _list_of("schedulers")
    """Schedulers of the learning rate."""
    algorithms: list[SavedAlgorithm] = _list_of("algorithms")
    """Algorithms, in the order of their calls."""
    callbacks: list[SavedCallback] = _list_of("callbacks")
    """Callbacks and loggers."""
    evaluators: list[Evaluator] = _list_of("evaluators")
    """Evaluators of the trainer."""

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
        algorithms: SavedAlgorithm | Sequence[SavedAlgorithm] | None = None,
        callbacks: SavedCallback | Sequence[SavedCallback] | None = None,
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
        self.script = Script()
        self.resumed = Resumed()
        self.device = Device(device)
        self.precision = Precision(precision)
        lists = {"optimizers": optimizers, "algorithms": algorithms, "callbacks": callbacks, "evaluators": evaluators}
        for name, given in {**lists, "schedulers": None}.items():
            setattr(self, name, given)
        self.scaler = scaler
        self.train_dataloader = train_dataloader
        self.device_train_microbatch_size = device_train_microbatch_size
        self.auto_microbatching = auto_microbatching
        self.save_metrics = save_metrics
        self.needs_train_metrics = False
        self.rank = rank
        self.world_size = world_size
        self.parallelism = parallelism
        self.deepspeed_config = deepspeed_config
        self.deepspeed: Any = None
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

    @property
    def max_duration(self) -> Time | None:
        """End of training; a number counts epochs."""
        return self._max_duration

    @max_duration.setter
    def max_duration(self, value: TimeInput | None) -> None:
        with naming("max_duration", value):
            time = None if value is None else Time.from_input(value, TimeUnit.EPOCH)
        if time is not None and time.unit is TimeUnit.DURATION:
            raise ConfigError(
                f"max_duration={str(value)!r}: 'dur' is a fraction of max_duration itself. Use another unit."
            )
        self._max_duration = time
        # Plain numbers, since training_is_over is read several times per step.
        self._end = math.inf if time is None else time.value
        if time is not None and time.unit is TimeUnit.SECOND:
            self._end *= MICROSECONDS
        self._end_field = Timestamp.field_of(TimeUnit.BATCH if time is None else time.unit)

    @property
    def iteration_length(self) -> Time:
        """Length of an iteration, in epochs or tokens; a number counts epochs."""
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
        """Return the completed fraction of training in ``dur``; ``None`` without a ``max_duration``."""
        end = self._max_duration
        if end is None:
            return None
        return Time(self.timestamp.count(end.unit) / end.value if end.value else 1.0, TimeUnit.DURATION)

    def stop_training(self) -> None:
        """End training after the current batch, by setting ``max_duration``.

        A call on a single rank is enough: all ranks end after the same batch. Checkpoints record the stop, so that a
        relaunch trains no further unless the script has a later ``max_duration``.
        """
        if self.world_size > 1:
            self.stop_requested = True
        else:
            self.apply_stop()

    def apply_stop(self) -> None:
        """Apply a :meth:`stop_training`. Every rank must call this method after the same batch."""
        if self.stopped is None:
            self.stopped = self._max_duration
        self.stop_requested = False
        self.max_duration = self.timestamp.batch

    @property
    def sharding(self) -> str | None:
        """Layout of checkpoints of a distributed model: 'sharded', 'full' or 'deepspeed'; ``None`` for replicas."""
        if self.deepspeed_enabled:
            return "deepspeed"
        if self.parallelism is None:
            return None
        return "sharded" if self.parallelism.fsdp is None else self.parallelism.fsdp.state_dict_type

    @property
    def deepspeed_enabled(self) -> bool:
        """True if DeepSpeed trains the model."""
        return self.deepspeed_config is not None

    @property
    def seed(self) -> int:
        """The seed of this rank: ``rank_zero_seed`` plus its rank."""
        return seed_of_rank(self.rank_zero_seed, self.rank)

    @property
    def dataloader_len(self) -> Time | None:
        """Number of batches in :attr:`dataloader`; ``None`` for a loader without a length."""
        return None if self._dataloader_len is None else Time.from_batch(self._dataloader_len)

    def set_dataloader(
        self, dataloader: Iterable[Batch] | None, label: str | None = None, num_batches: int | None = None
    ) -> None:
        """Set the current loader.

        Args:
            dataloader: the loader.
            label: name of the loader in logs.
            num_batches: largest number of batches; ``None`` or -1 for no limit.
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
            key: index, key, attribute name or function, as in :func:`~composerlite.core.data.batch_set`.
            value: the new item.
        """
        self.batch = batch_set(self.batch, key, value)


def _stable_names(items: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Make names unique: the second item of a name gets ``:1``, the third ``:2``, …"""
    named: dict[str, T] = {}
    count: dict[str, int] = {}
    for name, item in items:
        number = count.get(name, 0)
        count[name] = number + 1
        named[name if number == 0 else f"{name}:{number}"] = item
    return named


def by_class(items: Iterable[T]) -> dict[str, T]:
    """Return optimizers or schedulers by class name."""
    return _stable_names((type(item).__qualname__, item) for item in items)


def by_key(items: Iterable[K]) -> dict[str, K]:
    """Return callbacks or algorithms by state key."""
    return _stable_names((item.state_key, item) for item in items)
