"""Trainer: builds all parts of a run from the arguments, and runs training, evaluation and prediction."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch.optim.lr_scheduler import LRScheduler

from composerlite import dist
from composerlite.core import (
    Algorithm,
    AlgorithmPass,
    Callback,
    DataSpec,
    Engine,
    Evaluator,
    Event,
    Logger,
    LoggerDestination,
    Precision,
    SchedulePredicate,
    State,
    Time,
    TimeInput,
    ensure_data_spec,
    seed_all,
)
from composerlite.core.numerics import (
    MAX_SEED,
    configure_deterministic_mode,
    ensure_precision,
    get_random_seed,
    seed_of_rank,
)
from composerlite.core.parallelism import ensure_parallelism
from composerlite.errors import ConfigError, checked_arguments
from composerlite.models import ComposerModel
from composerlite.optim import ComposerScheduler
from composerlite.storage import ObjectStore, leave_by, without_secrets
from composerlite.trainer import build, checks, messages
from composerlite.trainer.calls.numbered import Calls
from composerlite.trainer.calls.schedules import Schedules
from composerlite.trainer.data.dataloading import DataPosition, Share, batches_per_epoch, is_same_data, position_in
from composerlite.trainer.evaluate import EvaluationLoop
from composerlite.trainer.loop import Loop, lacks_epoch_end, run
from composerlite.trainer.ranks.communicator import Communicator, Membership, Ranks, failing_together
from composerlite.trainer.ranks.parallel import check_sync_strategy, copy_model, shard_model
from composerlite.trainer.settings import (
    RunSettings,
    changed_run,
    optimizer_settings,
    record_samples,
    warn_of_changes,
)
from composerlite.trainer.step import TrainStep
from composerlite.types import Batch

if TYPE_CHECKING:
    from composerlite.callbacks import CheckpointSaver
    from composerlite.checkpoint import IgnoreKeys
    from composerlite.core import ParallelismConfig
    from composerlite.loggers import RemoteUploaderDownloader
    from composerlite.profiler import Profiler

__all__ = ["Trainer"]

log = logging.getLogger(__name__)

Loader = Iterable[Batch] | DataSpec | Mapping[str, Any]
EvalLoader = Loader | Evaluator | Sequence[Evaluator | Loader]
Schedulers = ComposerScheduler | LRScheduler | Sequence[ComposerScheduler | LRScheduler]


@final
class Trainer:
    """Trains a :class:`ComposerModel`, saves checkpoints and resumes from checkpoints.

    An interrupted run that is resumed, with ``load_path`` or ``autoresume``, is bit for bit equal to an uninterrupted
    run: weights, optimizer state, random numbers and the order of samples.

    Use the trainer as a context manager, or call :meth:`close`, which flushes the last files and raises failures.

    Args:
        model: model to train.
        train_dataloader: an iterable of batches, a :class:`DataSpec`, or a dict of arguments of :class:`DataSpec`. May
            be passed to :meth:`fit` instead.
        train_dataloader_label: name of the training data in logs.
        train_subset_num_batches: batches per epoch; -1 for all.
        spin_dataloaders: after a resume, skip the batches of the epoch before the checkpoint. ``False`` starts the
            epoch's data again, and the resume is not exact.
        max_duration: end of training: a number of epochs, a time string (``'90ep'``, ``'500ba'``, ``'1e9tok'``,
            ``'36h'``) or a :class:`Time`.
        algorithms: changes of training. algorithm_passes: functions to reorder algorithms.
        optimizers: the optimizer; by default ``DecoupledSGDW(lr=0.1)``, with a warning.
        schedulers: learning rate schedules, Composer's or torch's. A ``ReduceLROnPlateau`` follows the loss of the
            first evaluator, or the metric of composerlite's subclass, and steps after each evaluation.
        scale_schedule_ratio: factor for ``max_duration`` and Composer's schedules.
        step_schedulers_every_batch: step schedulers after each batch instead of each epoch. By default true for
            Composer's schedulers and false for torch's.
        eval_dataloader: a loader, an :class:`Evaluator`, or a list of these. Loaders without a label are ``eval``,
            ``eval_1``, ``eval_2``, … in logs.
        eval_interval: when to evaluate: a number of epochs, a time string or a function ``(state, event) -> bool``.
        eval_subset_num_batches: batches per evaluation; -1 for all.
        callbacks: callbacks of training. loggers: destinations of metrics.
        run_name: name of the run; by default ``RUN_NAME`` of the environment, or a new name.
        progress_bar: show a progress bar on a terminal; in other output, a line per epoch and every 30 seconds.
        log_to_console: print metrics at ``console_log_interval`` to ``console_stream``.
        log_traces: log which algorithms ran. auto_log_hparams: log the plain arguments of this constructor.
        load_path: checkpoint to load at construction: a path, a URI such as ``'s3://bucket/run/ep1-ba10-rank0.pt'``, or
            a name in ``load_object_store``, a store or the logger that uploads to the store.
        load_weights_only: load only the model.
        load_strict_model_weights: names of weights must be equal. Shapes must always be equal.
        load_progress_bar: show a progress bar on a terminal while a large checkpoint is downloaded or read.
        load_ignore_keys: globs over ``state/…`` paths, or a function of the dict: parts of ``load_path`` to skip. A run
            that ``autoresume`` resumes restores everything, regardless of the ``load_…`` arguments.
        load_exclude_algorithms: names of algorithms in ``load_path`` to skip.
        load_key_map: keys of the parts in a file of another program, with dots between keys:
            ``{'model': 'net.*', 'batch': 'step'}``. Common formats are recognised without this map.
        trust_checkpoint: load checkpoints with any type, **running any code in the files**.
        save_folder: save checkpoints to this folder or bucket. The other ``save_…`` arguments are the arguments of
            :class:`CheckpointSaver`.
        save_memory_interval: save also to ``save_memory_folder`` at this interval, even every batch. If the process
            dies and the machine lives, the run resumes from there. The newest checkpoint is kept.
        save_memory_folder: folder in the machine's memory.
        save_memory_replication: also copy checkpoints in memory to the memory of another node, in the background, so
            that a run resumes from memory when a node is lost. Limit in GB/s for each node (1 GB is 10⁹ bytes).
        save_compat: ``'composer'``: save checkpoints that Composer can load. Times are then ``timedelta``.
        save_metrics: save the states of metrics, so that metrics of an epoch survive a resume within the epoch. The
            states of training metrics are always saved if a callback decides by them.
        autoresume: resume from the newest good checkpoint of this ``run_name``, if there is any. Needs a ``run_name``.
            A preempted run saves first: see :class:`PreemptionHandler`.
        autoresume_timeout: seconds to wait until another process that trains this run ends; then an error is raised.
        device: ``'cpu'``, ``'gpu'``, ``'mps'`` or ``'xpu'``; by default the GPU if there is one.
        precision: ``'fp32'``, ``'amp_bf16'``, ``'amp_fp16'``.
        device_train_microbatch_size: samples per forward pass, or ``'auto'`` to halve the size until the batch fits
            into memory.
        accumulate_train_batch_on_tokens: weight microbatches by tokens instead of samples.
        seed: seed of all random generators; by default random. deterministic_mode: use only deterministic kernels.
        dist_timeout: seconds that a rank waits for other ranks. The error then names the late ranks.
        ddp_sync_strategy: when ranks average gradients: ``'single_auto_sync'`` (default), in the backward pass of the
            last microbatch of a batch; ``'multi_auto_sync'``, in every microbatch, which may leave parameters unused;
            ``'forced_sync'``, after the last backward pass.
        parallelism_config: sharding of the model over ranks: a :class:`ParallelismConfig` or
            ``{'fsdp': {…}, 'tp': {…}}`` with the fields of :class:`FSDPConfig` and :class:`TPConfig`; ``None``: a
            replica on each rank.
        deepspeed_config: configuration of DeepSpeed's ZeRO, as a dict or the path of a JSON file: optimizer state,
            gradients and weights are sharded. Keys that follow from other arguments (batch sizes, precision, clipping)
            can be left out.
        profiler: a :class:`~composerlite.profiler.Profiler`, which records the batches of a schedule.
        python_log_level: log level of composerlite.
        compile_config: arguments of ``torch.compile``; ``None``: do not compile the model.

    Raises:
        ConfigError: an argument is wrong. Raised before training starts.
        CheckpointError: ``load_path`` is missing, damaged or does not fit.

    Example::

        with Trainer(model=model, train_dataloader=loader, max_duration="2ep", save_folder="runs") as trainer:
            trainer.fit()
    """

    @checked_arguments
    def __init__(
        self,
        *,
        model: ComposerModel,
        train_dataloader: Loader | None = None,
        train_dataloader_label: str = "train",
        train_subset_num_batches: int = -1,
        spin_dataloaders: bool = True,
        max_duration: TimeInput | None = None,
        algorithms: Algorithm | Sequence[Algorithm] | None = None,
        algorithm_passes: AlgorithmPass | Sequence[AlgorithmPass] | None = None,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        schedulers: Schedulers | None = None,
        scale_schedule_ratio: float = 1.0,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: EvalLoader | None = None,
        eval_interval: TimeInput | SchedulePredicate = 1,
        eval_subset_num_batches: int = -1,
        callbacks: Callback | Sequence[Callback] | None = None,
        loggers: LoggerDestination | Sequence[LoggerDestination] | None = None,
        run_name: str | None = None,
        progress_bar: bool = True,
        log_to_console: bool = False,
        console_stream: str = "stderr",
        console_log_interval: TimeInput | SchedulePredicate = "1ba",
        log_traces: bool = False,
        auto_log_hparams: bool = False,
        load_path: str | Path | None = None,
        load_object_store: ObjectStore | RemoteUploaderDownloader | None = None,
        load_weights_only: bool = False,
        load_strict_model_weights: bool = True,
        load_progress_bar: bool = True,
        load_ignore_keys: IgnoreKeys = None,
        load_exclude_algorithms: Sequence[str] | None = None,
        load_key_map: Mapping[str, str] | None = None,
        trust_checkpoint: bool = False,
        save_folder: str | Path | None = None,
        save_filename: str | Path = "ep{epoch}-ba{batch}-rank{rank}.pt",
        save_remote_file_name: str | Path | None = None,
        save_latest_filename: str | Path | None = "latest-rank{rank}.pt",
        save_overwrite: bool = False,
        save_interval: TimeInput | SchedulePredicate = "1ep",
        save_weights_only: bool = False,
        save_ignore_keys: IgnoreKeys = None,
        save_compat: str | None = None,
        save_num_checkpoints_to_keep: int = -1,
        save_metrics: bool = False,
        save_async: bool = True,
        save_staging_bytes: int | None = None,
        save_lazy: bool | None = None,
        save_on_exception: bool = False,
        save_failure_limit: int = 0,
        save_ephemeral_interval: TimeInput | SchedulePredicate | None = None,
        save_keep_every: TimeInput | None = None,
        save_best_k: int | None = None,
        save_best_metric: str | None = None,
        save_best_mode: str = "max",
        save_staging_folder: str | Path | None = None,
        save_num_remote_checkpoints_to_keep: int = -1,
        save_memory_interval: TimeInput | SchedulePredicate | None = None,
        save_memory_folder: str | Path = "/dev/shm",
        save_memory_replication: float | None = None,
        autoresume: bool = False,
        autoresume_timeout: float = 60.0,
        device: str | torch.device | None = None,
        precision: str | Precision | None = None,
        device_train_microbatch_size: int | str | None = None,
        accumulate_train_batch_on_tokens: bool = False,
        seed: int | None = None,
        deterministic_mode: bool = False,
        dist_timeout: float = 300.0,
        ddp_sync_strategy: str | None = None,
        parallelism_config: Mapping[str, Any] | ParallelismConfig | None = None,
        deepspeed_config: Mapping[str, Any] | str | Path | None = None,
        profiler: Profiler | None = None,
        python_log_level: str | None = None,
        compile_config: dict[str, Any] | None = None,
    ) -> None:
        arguments = dict(locals())

        from composerlite.trainer.resuming import LoadSettings, load_or_resume  # takes long to import

        alone = parallelism_config is not None or deepspeed_config is not None
        self._membership = Membership(device, dist_timeout, alone=alone)
        with self._membership.building():
            messages.show_messages()
            checks.check_flags(type(self).__init__, arguments)
            if python_log_level is not None:
                level = logging.getLevelNamesMapping().get(str(python_log_level).upper(), 0)
                checks.require(level > 0, f"python_log_level={python_log_level!r} does not exist.")
                logging.getLogger("composerlite").setLevel(level)
            zero_config = build.deepspeed_config(arguments)
            ddp_sync_strategy = check_sync_strategy(ddp_sync_strategy)
            parallelism = None if parallelism_config is None else ensure_parallelism(parallelism_config)
            if parallelism is not None:
                parallelism.degrees(dist.get_world_size())  # raises if the ranks do not allow these degrees
            self._accumulate_on_tokens = accumulate_train_batch_on_tokens
            self._settings = checks.FitSettings.of(arguments)
            checks.check_interval(console_log_interval, argument="console_log_interval")
            compile_arguments: Any = compile_config
            is_dict = compile_arguments is None or isinstance(compile_arguments, dict)
            checks.require(is_dict, f"compile_config={compile_config!r}: expected a dict of arguments, or None.")
            load = LoadSettings.of(arguments)
            self._start_logged = False
            self._may_lack_end = False
            self._autoresume = autoresume
            self._position: DataPosition | None = None

            # First of all: everything below may draw random numbers.
            if deterministic_mode:
                configure_deterministic_mode()
            self._given_seed = seed
            is_seed = seed is None or (checks.is_whole(seed) and 0 <= seed <= MAX_SEED)
            checks.require(is_seed, f"seed={seed!r}: expected a whole number from 0 to {MAX_SEED}.")
            seed = dist.get_group().broadcast(get_random_seed() if seed is None else seed)
            seed_all(seed)

            chosen_device = dist.get_device(device)
            dist.env.claim_device(chosen_device)
            chosen_precision = ensure_precision(precision, chosen_device)
            model = checks.check_model(model)
            if parallelism is None or parallelism.fsdp is None:  # FSDP moves the model in pieces
                model = model.to(chosen_device)
            size, auto = checks.microbatch_size(device_train_microbatch_size)
            user_algorithms, user_callbacks, user_loggers = build.build_parts(arguments)
            name, is_named = dist.get_group().broadcast(build.resolve_run_name(run_name, autoresume=autoresume))
            self.state = State(
                model,
                rank_zero_seed=seed,
                run_name=name,
                device=chosen_device,
                max_duration=build.given_duration(max_duration, scale_schedule_ratio),
                optimizers=build.build_optimizer(optimizers, model),
                algorithms=user_algorithms,
                device_train_microbatch_size=size,
                auto_microbatching=auto,
                save_metrics=save_metrics,
                rank=dist.get_global_rank(),
                world_size=dist.get_world_size(),
                parallelism=parallelism,
                deepspeed_config=zero_config,
            )
            self.state.script.names_run = is_named
            self.state.profiler = profiler
            self._set_precision(chosen_precision)
            self.state.callbacks = [*user_loggers, *user_callbacks]
            self.logger = Logger(self.state, user_loggers)
            model.logger = self.logger
            passes: Any = [] if algorithm_passes is None else algorithm_passes
            passes = list(passes) if isinstance(passes, list | tuple) else [passes]  # pyright: ignore[reportUnknownArgumentType]
            is_callable = all(callable(item) for item in passes)
            checks.require(is_callable, f"algorithm_passes={passes!r}: expected functions of (algorithms, event).")
            self.engine = Engine(self.state, self.logger, passes)
            if auto_log_hparams:
                self.logger.log_hyperparameters(_plain(arguments))

            self._calls = Calls(self.state)
            self._train_spec: DataSpec | None = None
            try:
                self.engine.run_event(Event.INIT)
                _check_files(user_loggers)
                if train_dataloader is not None:
                    self._set_train_data(train_dataloader)
                self._evaluators(eval_dataloader)
                self._add_metrics()
                self._schedules = Schedules(self.state, schedulers)
                if self.state.max_duration is not None or self._schedules.need_no_end:
                    self._schedules.build(scale_schedule_ratio, keep_rates=False)

                sharded = build.zero(self.state, self._train_spec) or shard_model(self.state)
                if sharded is not None and zero_config is None:
                    self._membership.stay()

                groups = self.state.optimizers[0].param_groups
                rates = [float(group.get("initial_lr", group["lr"])) for group in groups]  # before any schedule
                self.state.script.learning_rates = tuple(rates)
                self.state.script.settings["optimizer"] = optimizer_settings(self.state.optimizers[0])
                self._run_settings = RunSettings(self.state)

                # The load comes last, when all parts with a state exist.
                self.engine.run_event(Event.BEFORE_LOAD)
                self._start = load_or_resume(self.state, load, self._savers, self.logger.destinations)
                self._schedules.record_loaded()
                self.engine.run_event(Event.AFTER_LOAD)
                parallel = copy_model(self.state, ddp_sync_strategy) if sharded is None else sharded
                communicator = Communicator(dist.get_group(), counts=parallel.counts)
                self._ranks = Ranks(parallel, communicator, self._share)
                self._evaluation = EvaluationLoop(self.state, self.engine, self.logger, self._ranks)
                seed_all(seed_of_rank(self.state.rank_zero_seed, parallel.data_rank))
                given = compile_config or {}
                if compile_config is not None:
                    self.state.model.compile(**given)
                self._replays_graphs = given.get("mode") in ("reduce-overhead", "max-autotune")
                self._replays_graphs |= bool((given.get("options") or {}).get("triton.cudagraphs"))
                self._run_settings.end_call()
            except BaseException:
                self.engine.close()
                if self.state.deepspeed is not None:
                    self.state.deepspeed.close()
                raise

    @checked_arguments
    @failing_together("training")
    def fit(
        self,
        *,
        train_dataloader: Loader | None = None,
        train_dataloader_label: str | None = None,
        train_subset_num_batches: int | None = None,
        spin_dataloaders: bool | None = None,
        duration: TimeInput | None = None,
        reset_time: bool = False,
        schedulers: Schedulers | None = None,
        scale_schedule_ratio: float | None = None,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: EvalLoader | None = None,
        eval_subset_num_batches: int | None = None,
        eval_interval: TimeInput | SchedulePredicate | None = None,
        device_train_microbatch_size: int | str | None = None,
        precision: str | Precision | None = None,
    ) -> None:
        """Train until ``max_duration``, or for ``duration`` more.

        Arguments that are ``None`` keep the value of the previous call, or of the constructor.

        The calls of ``fit`` in a run are numbered. When a resumed run repeats a call, the call ends at the same time as
        without the interruption: ``duration`` is not added twice, ``reset_time`` does not reset twice, and a finished
        call does nothing. After a call that raised, the next call continues it.

        Args:
            duration: how long to train from now on (an int counts epochs), instead of ``max_duration``.
            reset_time: start counting from zero.
            scale_schedule_ratio: factor for ``duration`` or, without ``duration``, for ``max_duration``, and for
                Composer's schedules.
            eval_subset_num_batches, eval_interval: defaults of the evaluators, from here or from the constructor. An
                :class:`Evaluator` keeps its own values.
            train_dataloader, train_dataloader_label, train_subset_num_batches, spin_dataloaders, schedulers,
                step_schedulers_every_batch, eval_dataloader, device_train_microbatch_size, precision: as in the
                constructor.

        Raises:
            ConfigError: there is no training data or no ``max_duration``, or ``max_duration`` has been reached.
            Exception: raised by the model, an algorithm or a callback.
        """
        given = locals()
        self._end_previous_call()
        self._settings = self._settings.replaced(given)
        state = self.state
        if train_dataloader is not None:
            self._set_train_data(train_dataloader)
        if self._train_spec is None:
            raise ConfigError("there is no train_dataloader: pass it to Trainer or to fit.")
        if eval_dataloader is not None:
            self._evaluators(eval_dataloader)
            self._add_metrics()
        elif eval_interval is not None or eval_subset_num_batches is not None:
            self._set_evaluators()
        if device_train_microbatch_size is not None:
            size, auto = checks.microbatch_size(device_train_microbatch_size)
            state.device_train_microbatch_size, state.auto_microbatching = size, auto
        if precision is not None and (new := ensure_precision(precision, state.device)) is not state.precision:
            self._set_precision(new)

        self._schedules.give(schedulers, scale_schedule_ratio)
        calls = self._calls
        has_end = calls.set_end(duration, scale_schedule_ratio, reset_time=reset_time)
        self._run_settings.record_given(
            max_duration=True if has_end else None,
            device_train_microbatch_size=device_train_microbatch_size,
            precision=precision,
        )
        if calls.is_finished:
            log.info("call %d of fit was finished before the run was interrupted", calls.number + 1)
            calls.finish()
            return
        begun_before = calls.has_begun
        changes = self._run_settings.restore() if begun_before else []
        calls.begin(reset_time=reset_time)
        ratio, are_given = self._settings.scale_schedule_ratio, schedulers is not None
        if begun_before:
            self._schedules.begin(ratio, begun_before=True, are_given=are_given)
        if state.training_is_over and state.interruption.evaluation is None and not calls.only_ends:
            if self._start.resumed or (begun_before and not calls.is_retried):
                messages.log_result(state, self._savers, {}, trained=False)
                calls.record_start()
                calls.finish()
                self._may_lack_end = True
                return
            raise ConfigError(
                f"max_duration={state.max_duration} has been reached: the run is at epoch {int(state.timestamp.epoch)}"
                f", batch {int(state.timestamp.batch)}. Give a later max_duration, a duration to fit, or "
                "reset_time=True."
            )
        if not begun_before:
            self._schedules.begin(ratio, begun_before=False, are_given=are_given)

        self._schedules.check_plateau()
        self._use_train_data(self._train_spec)
        if not self._start_logged:
            messages.log_start(state, self._savers, self.logger.destinations, autoresume=self._autoresume)
            self._start_logged = True
        record_samples(state)
        if begun_before:
            changes += changed_run(state, seed=self._given_seed)
        warn_of_changes(state, [*self._start.changes, *changes])
        self._start, state.resumed.metadata = self._start._replace(changes=[]), {}
        loop = self._loop(self._train_spec)
        calls.record_start()
        try:
            self._run(loop)
        except BaseException:
            calls.fail(begun_before=begun_before, reset_time=reset_time)
            raise
        calls.finish()
        messages.log_result(state, self._savers, state.total_loss_dict, trained=True)

    @property
    def result(self) -> str:
        """One-line summary of the run, as logged at the end of ``fit``: progress, last values, last checkpoint."""
        losses = self.state.total_loss_dict
        return messages.result(self.state, self._savers, losses, trained=bool(losses))

    def _loop(self, spec: DataSpec) -> Loop:
        """Return the loop of this call of ``fit``, on the data ``spec``."""
        every_batch = self._settings.step_schedulers_every_batch
        step = TrainStep(
            self.state,
            self.engine,
            spec,
            weight_by_tokens=self._accumulate_on_tokens,
            ranks=self._ranks,
            replays_graphs=self._replays_graphs,
        )
        return Loop(
            state=self.state,
            engine=self.engine,
            logger=self.logger,
            spec=spec,
            position=self._position_in(spec),
            step=step,
            evaluation=self._evaluation,
            subset_num_batches=self._settings.train_subset_num_batches,
            step_schedulers_every_batch=self._schedules.step_every_batch() if every_batch is None else every_batch,
            spin_dataloaders=self._settings.spin_dataloaders,
            ranks=self._ranks,
        )

    def _run(self, loop: Loop) -> None:
        """Run the loop. If the loop raises, the savers with ``on_exception`` save."""
        try:
            with build.bars_stopped_by_errors(self.logger):
                run(loop)
        except BaseException as e:
            if isinstance(e, Exception):
                for saver in self._savers:
                    if saver.options.on_exception:
                        saver.manager.save_after_exception(e)
            self._ranks.parallel.disconnect()
            raise
        finally:
            self.state.interruption.unwatch()
            self._run_settings.end_call()

    def _end_previous_call(self) -> None:
        """Run the epoch's end of the previous call of ``fit``, if the interrupted run had not reached that end."""
        spec = self._train_spec
        if self._may_lack_end and spec is not None:
            self._use_train_data(spec)
            if lacks_epoch_end(self.state):
                self._run(self._loop(spec))
        self._may_lack_end = False

    def _position_in(self, spec: DataSpec) -> DataPosition:
        """Return the position in the training data: of the last ``fit``, of the checkpoint, or the start."""
        state = self.state
        loaded = state.dataset_state.get("train") is not None  # a load since the last fit
        if self._position is None or loaded:
            self._forget_position()
            self._position = position_in(
                spec,
                seed=state.rank_zero_seed,
                timestamp=lambda: state.timestamp,
                share=self._share,
                saved=state.dataset_state["train"] if self._settings.spin_dataloaders else None,
            )
            state.dataset_state = {"train": None, "eval": {}}
            state.data_position = self._position
        return self._position

    @failing_together("evaluation")
    def eval(self, eval_dataloader: EvalLoader | None = None, subset_num_batches: int = -1) -> None:
        """Evaluate the model. The values of the metrics are in ``state.eval_metric_values``.

        Args:
            eval_dataloader: loaders or evaluators; ``None``: those of the constructor.
            subset_num_batches: batches of each evaluator; -1 for all.

        Raises:
            ConfigError: there is no evaluator.
        """
        subset = checks.check_subset(subset_num_batches, argument="subset_num_batches")
        evaluators = self.state.evaluators
        if eval_dataloader is not None:
            evaluators = build.build_evaluators(eval_dataloader, eval_interval=0, subset_num_batches=subset)
            for evaluator in evaluators:
                metrics = build.eval_metrics(self._model, evaluator, self.state.device)
                self.state.eval_metrics[evaluator.label] = metrics
            if self._position is not None and self._position.is_in_epoch:
                self._check_evaluators(evaluators)
        elif subset != -1:
            evaluators = [copy.copy(evaluator) for evaluator in evaluators]
            for evaluator in evaluators:
                evaluator.subset_num_batches = subset
        if not evaluators:
            raise ConfigError("there is no eval_dataloader: pass it to Trainer or to eval.")
        self.engine.run_event(Event.EVAL_STANDALONE_START)
        with build.bars_stopped_by_errors(self.logger):
            self._evaluation.run(evaluators)
        self.engine.run_event(Event.EVAL_STANDALONE_END)

    @failing_together("prediction")
    def predict(self, dataloader: Loader, subset_num_batches: int = -1, *, return_outputs: bool = True) -> list[Any]:
        """Predict with the model.

        Args:
            dataloader: a loader or a ``DataSpec``.
            subset_num_batches: number of batches; -1 for all.
            return_outputs: ``False`` keeps no outputs, so memory is bounded: callbacks read ``state.outputs``.

        Returns:
            Output for each batch, on the CPU, in order; empty if ``return_outputs`` is false.
        """
        subset = checks.check_subset(subset_num_batches, argument="subset_num_batches")
        spec = ensure_data_spec(dataloader)
        if self._position is not None and self._position.is_in_epoch:
            checks.check_apart(spec, self._train_spec, argument="dataloader")
        with build.bars_stopped_by_errors(self.logger):
            return self._evaluation.predict(spec, subset_num_batches=subset, return_outputs=return_outputs)

    @property
    def saved_checkpoints(self) -> list[str]:
        """Paths of the checkpoints of the first saver, oldest first."""
        return [path for saver in self._savers[:1] for path in saver.saved_checkpoints]

    def save_checkpoint(self, name: str = "ep{epoch}-ba{batch}-rank{rank}", *, weights_only: bool = False) -> str:
        """Save a checkpoint to the path ``name`` now. An existing file is replaced.

        Args:
            name: path, with format variables such as ``{epoch}``.
            weights_only: save only the weights of the model.

        Returns:
            Path of the checkpoint.
        """
        from composerlite.checkpoint import save_checkpoint

        return save_checkpoint(self.state, name, weights_only=weights_only)  # pyright: ignore[reportArgumentType]

    def save_checkpoint_to_save_folder(self) -> str:
        """Save a checkpoint with the first saver now: to its folder, with its names, ``latest`` and retention.

        Returns:
            Path of the checkpoint.

        Raises:
            ConfigError: there is no saver.
        """
        if not self._savers:
            raise ConfigError("there is no save_folder: pass it to Trainer, or use save_checkpoint(name).")
        leave_by()  # the grace period of an earlier preemption does not apply any more
        return self._savers[0].save(self.state)

    def export_for_inference(
        self,
        save_format: str,
        save_path: str,
        save_object_store: ObjectStore | None = None,
        sample_input: Any = None,
        transforms: Sequence[Callable[[torch.nn.Module], torch.nn.Module]] | None = None,
    ) -> None:
        """Export the model for inference on rank 0; see :func:`composerlite.utils.export_with_logger`.

        Args:
            save_format, save_path, save_object_store, sample_input, transforms: as in
                :func:`composerlite.utils.export_for_inference`.
        """
        if self.state.rank == 0:
            from composerlite.callbacks.export_for_inference import export_with_logger

            export_with_logger(
                self.state.model,
                save_format,
                save_path,
                self.logger,
                save_object_store,
                sample_input=sample_input,
                transforms=transforms,
            )

    def close(self) -> None:
        """Close all callbacks and loggers. May be called twice. With several ranks every rank calls this.

        Raises:
            Exception: raised by a callback or logger, after all have been closed.
        """
        self._forget_position()
        try:
            with failing_together("closing the trainer"):
                self.engine.close()
                self._ranks.parallel.close()
        finally:
            self._ranks.parallel.disconnect()
            self._membership.leave()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _model(self) -> ComposerModel:
        return cast("ComposerModel", self.state.model)  # checked in __init__; NoOpModel only imitates a ComposerModel

    @property
    def _savers(self) -> list[CheckpointSaver]:
        from composerlite.callbacks import CheckpointSaver

        return [callback for callback in self.state.callbacks if isinstance(callback, CheckpointSaver)]

    def _set_precision(self, precision: Precision) -> None:
        if self.state.deepspeed is not None:
            raise ConfigError(
                f"precision={precision.value!r}: DeepSpeed has converted the weights for "
                f"{self.state.precision.value!r}. Pass precision to Trainer."
            )
        self.state.precision = precision
        scales = precision is Precision.AMP_FP16 and not self.state.deepspeed_enabled  # DeepSpeed has its own scaler
        self.state.scaler = torch.amp.GradScaler() if scales else None

    def _set_train_data(self, train_dataloader: Loader) -> None:
        """Set the training data. New data start at their first batch, with a new epoch.

        A loaded position belongs to the data of the last call of ``fit`` before the checkpoint.
        """
        before, self._train_spec = self._train_spec, ensure_data_spec(train_dataloader)
        checks.check_data(self._train_spec, argument="train_dataloader")
        if before is None or not is_same_data(before, self._train_spec):
            is_used = self._position is not None
            self._forget_position()
            if is_used or self._calls.number >= max(1, len(self.state.fit_starts)):
                self.state.dataset_state = {"train": None, "eval": {}}
                self.state.timestamp = self.state.timestamp.at_start_of_epoch()
        self._check_evaluators(self.state.evaluators)
        self.state.train_dataloader = self._train_spec.dataloader
        self._use_train_data(self._train_spec)

    def _use_train_data(self, spec: DataSpec) -> None:
        batches = batches_per_epoch(spec, self._share, subset=self._settings.train_subset_num_batches)
        self.state.set_dataloader(spec.dataloader, self._settings.train_dataloader_label, batches)

    @property
    def _share(self) -> Share:
        """This rank's share of the data. Ranks that split layers with each other have the same share."""
        state = self.state
        together = 1 if state.parallelism is None else state.parallelism.tensor_parallel_degree
        return Share(state.rank // together, state.world_size // together)

    def _forget_position(self) -> None:
        if self._position is not None:
            self._position.close()
        self._position = None

    def _evaluators(self, eval_dataloader: EvalLoader | None) -> None:
        self._eval_given = eval_dataloader
        self.state.evaluators = self._built_evaluators()
        self._check_evaluators(self.state.evaluators)

    def _set_evaluators(self) -> None:
        """Apply changed defaults of ``fit`` to the existing evaluators."""
        built = {evaluator.label: evaluator for evaluator in self._built_evaluators()}
        for evaluator in self.state.evaluators:
            if (like := built.get(evaluator.label)) is not None:
                evaluator.eval_interval, evaluator.subset_num_batches = like.eval_interval, like.subset_num_batches

    def _built_evaluators(self) -> list[Evaluator]:
        return build.build_evaluators(
            self._eval_given,
            eval_interval=self._settings.eval_interval,
            subset_num_batches=self._settings.eval_subset_num_batches,
        )

    def _check_evaluators(self, evaluators: Iterable[Evaluator]) -> None:
        for evaluator in evaluators:
            argument = f"eval_dataloader {evaluator.label!r}"
            checks.check_apart(evaluator.dataloader, self._train_spec, argument=argument)

    def _add_metrics(self) -> None:
        state = self.state
        if not state.train_metrics:
            metrics = self._model.get_metrics(is_train=True)
            state.train_metrics = {name: metric.to(state.device) for name, metric in metrics.items()}
        for evaluator in state.evaluators:
            state.eval_metrics[evaluator.label] = build.eval_metrics(self._model, evaluator, state.device)


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are plain values and can be logged."""
    plain = (str, int, float, bool, Path, Time)
    return {
        name: value if isinstance(value, int | float) else without_secrets(str(value))
        for name, value in arguments.items()
        if isinstance(value, plain)
    }


def _check_files(loggers: Iterable[LoggerDestination]) -> None:
    """Check that each logger writes its own file. Call after ``INIT``.

    Raises:
        ConfigError: two loggers write the same file.
    """
    owners: dict[str, LoggerDestination] = {}
    for logger in loggers:
        other = logger if logger.place is None else owners.setdefault(logger.place, logger)
        checks.require(
            other is logger,
            f"loggers: {type(other).__name__} and {type(logger).__name__} both write {logger.place!r}. Give each a "
            "filename of its own.",
        )
