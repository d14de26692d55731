"""Trainer: the arguments become objects here, and the objects do the work."""

from __future__ import annotations

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
from composerlite.core.numerics import configure_deterministic_mode, ensure_precision, get_random_seed, seed_of_rank
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
    """Trains a :class:`ComposerModel`, saves checkpoints and resumes from them.

    A run that is interrupted and resumed, from ``load_path`` or with ``autoresume``, is bit for bit the run that was
    not interrupted: weights, optimizer state, random numbers and the order of samples.

    Use it as a context manager, or call :meth:`close`: that is where the last files are flushed and failures raised.

    Args:
        model: what is trained.
        train_dataloader: any iterable of batches, a :class:`DataSpec`, or its arguments as a dict. May come with
            :meth:`fit`.
        train_dataloader_label: its name in logs.
        train_subset_num_batches: batches per epoch; -1 for all.
        spin_dataloaders: after a resume leave out the batches of the epoch that were seen; ``False`` starts the epoch's
            data afresh and is not exact.
        max_duration: when training ends: a number of epochs, a time string (``'90ep'``, ``'500ba'``, ``'1e9tok'``,
            ``'36h'``) or a :class:`Time`.
        algorithms: changes to training. algorithm_passes: reorder them.
        optimizers: the optimizer; ``DecoupledSGDW(lr=0.1)`` with a warning if none is given.
        schedulers: learning rate schedules, Composer's or torch's. A ``ReduceLROnPlateau`` follows the loss of the
            first evaluator or, composerlite's, the metric that it names, and steps each time it is measured.
        scale_schedule_ratio: scales ``max_duration`` and Composer schedules.
        step_schedulers_every_batch: whether schedulers step each batch, as Composer's do by default, or each epoch, as
            torch's do.
        eval_dataloader: a loader, or an :class:`Evaluator`, or a list of these. Loaders without a label are ``eval``,
            ``eval_1``, ``eval_2``, … in logs.
        eval_interval: when to evaluate: a number of epochs, a time string or a function ``(state, event) -> bool``.
        eval_subset_num_batches: batches per evaluation; -1 for all.
        callbacks: take part in training. loggers: where metrics go.
        run_name: names the run; by default ``RUN_NAME`` of the environment, or a new name.
        progress_bar: show one; where the output is no terminal, a line per epoch and every 30 seconds.
        log_to_console: print metrics at ``console_log_interval`` to ``console_stream``.
        log_traces: log which algorithms ran. auto_log_hparams: log the plain arguments of this constructor.
        load_path: a checkpoint to load, here and now: a path, a URI such as ``'s3://bucket/run/ep1-ba10-rank0.pt'``, or
            a name in ``load_object_store``, a store or the logger that uploads to it.
        load_weights_only: load the model alone.
        load_strict_model_weights: parameter names must agree exactly; shapes must in any case.
        load_progress_bar: show one on a terminal while a large checkpoint is downloaded or read.
        load_ignore_keys: globs over ``state/…`` paths, or a function of the dict, of what is not loaded from
            ``load_path``. A run that ``autoresume`` resumes takes back all that it has saved, whatever the ``load_…``
            arguments leave out.
        load_exclude_algorithms: names of algorithms that are not restored from ``load_path``.
        load_key_map: where the parts of a run are in a file of another program, with dots between keys:
            ``{'model': 'net.*', 'batch': 'step'}``. Common formats are recognised without it.
        trust_checkpoint: load checkpoints with any type in them, **running whatever code they hold**.
        save_folder: save checkpoints there: in a folder or, as a URI, in a bucket. The other ``save_…`` arguments are
            those of :class:`CheckpointSaver`.
        save_memory_interval: save also into ``save_memory_folder`` at these times, as often as every batch: a run whose
            process dies resumes from there, if the machine lives. The newest one is kept.
        save_memory_folder: a folder that the machine keeps in memory.
        save_memory_replication: also replicate checkpoints in memory to that of another node, in the background, so
            that a run resumes from memory when a node is lost. GB/s that each node sends at most (1 GB is 10⁹ bytes).
        save_compat: ``'composer'``: save what Composer loads, too. Times are then ``timedelta``.
        save_metrics: put the state of metrics into checkpoints, so that those of an epoch survive a resume within it.
            Those of training are saved in any case where a callback decides by them.
        autoresume: resume from the newest good checkpoint of this ``run_name``, if there is one. Needs a ``run_name``.
            A run that is preempted saves first: see :class:`PreemptionHandler`.
        autoresume_timeout: seconds to wait for the end of another process that has this run; after that it is an error.
        device: ``'cpu'``, ``'gpu'``, ``'mps'`` or ``'xpu'``; the GPU by default if there is one.
        precision: ``'fp32'``, ``'amp_bf16'``, ``'amp_fp16'``.
        device_train_microbatch_size: samples per forward pass, or ``'auto'`` to halve it until it fits into memory.
        accumulate_train_batch_on_tokens: weigh microbatches by tokens rather than samples.
        seed: of all random generators; a random one by default. deterministic_mode: use deterministic kernels only.
        dist_timeout: seconds that a rank waits for the others before it raises an error that names those who are late.
        ddp_sync_strategy: when ranks average their gradients: ``'single_auto_sync'``, in the backward pass of a batch's
            last microbatch, the default; ``'multi_auto_sync'``, in that of every microbatch, and a parameter may be
            unused in it; ``'forced_sync'``, after the last backward pass.
        parallelism_config: how the model is sharded over ranks: a :class:`ParallelismConfig` or
            ``{'fsdp': {…}, 'tp': {…}}`` with the fields of :class:`FSDPConfig` and :class:`TPConfig`; ``None`` for a
            replica on each rank.
        deepspeed_config: have DeepSpeed's ZeRO spread the state of the optimizer, gradients and weights over the ranks:
            its configuration, as a dict or the path of a JSON file. What follows from the other arguments (batch sizes,
            precision, clipping) need not be in it.
        profiler: a :class:`~composerlite.profiler.Profiler`, which records what the batches of a schedule do.
        python_log_level: log level of composerlite.
        compile_config: arguments of ``torch.compile``, with which the model is compiled; ``None`` for not at all.

    Raises:
        ConfigError: whatever cannot work, before training starts.
        CheckpointError: ``load_path`` is missing, damaged or does not fit.
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

        from composerlite.trainer.resuming import LoadSettings, load_or_resume  # and with it most of checkpoint

        alone = parallelism_config is not None or deepspeed_config is not None
        self._membership = Membership(device, dist_timeout, alone=alone)
        with self._membership.building():
            messages.show_messages()
            checks.check_flags(type(self).__init__, arguments)
            if python_log_level is not None:
                logging.getLogger("composerlite").setLevel(checks.check_log_level(python_log_level))
            zero_config = build.deepspeed_config(arguments)
            ddp_sync_strategy = check_sync_strategy(ddp_sync_strategy)
            parallelism = build.parallelism(parallelism_config)
            self._accumulate_on_tokens = accumulate_train_batch_on_tokens
            self._settings = checks.FitSettings.of(arguments)
            checks.check_interval(console_log_interval, argument="console_log_interval")
            compile_config = checks.check_compile_config(compile_config)
            load = LoadSettings.of(arguments)
            self._has_told_start = False
            self._may_lack_end = False
            self._autoresume = autoresume
            self._position: DataPosition | None = None

            # Reproducibility first: whatever draws random numbers from here on does so from the seed.
            if deterministic_mode:
                configure_deterministic_mode()
            self._given_seed = seed
            seed = dist.get_group().broadcast(get_random_seed() if seed is None else checks.check_seed(seed))
            seed_all(seed)

            # The parts of the run.
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
            self.engine = Engine(self.state, self.logger, checks.check_passes(algorithm_passes))
            if auto_log_hparams:
                self.logger.log_hyperparameters(_plain(arguments))

            self._calls = Calls(self.state)
            self._train_spec: DataSpec | None = None
            try:
                self.engine.run_event(Event.INIT)
                checks.check_own_files(user_loggers)
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

                self.state.script.learning_rates = build.given_rates(self.state.optimizers[0])
                self.state.script.settings["optimizer"] = optimizer_settings(self.state.optimizers[0])
                self._run_settings = RunSettings(self.state)

                # Loading comes last: everything that has a state is there to take it.
                self.engine.run_event(Event.BEFORE_LOAD)
                self._start = load_or_resume(self.state, load, self._savers, self.logger.destinations)
                self._schedules.note_loaded()
                self.engine.run_event(Event.AFTER_LOAD)
                parallel = copy_model(self.state, ddp_sync_strategy) if sharded is None else sharded
                communicator = Communicator(dist.get_group(), counts=parallel.counts)
                self._ranks = Ranks(parallel, communicator, self._share)
                self._evaluation = EvaluationLoop(self.state, self.engine, self.logger, self._ranks)
                seed_all(seed_of_rank(self.state.rank_zero_seed, parallel.data_rank))
                if compile_config is not None:
                    self.state.model.compile(**compile_config)
                self._replays_graphs = checks.uses_cuda_graphs(compile_config)
                self._run_settings.end_call()
            except BaseException:
                self.engine.close()
                if self.state.deepspeed is not None:
                    self.state.deepspeed.close()
                raise

    # ── training ─────────────────────────────────────────────────────────────────────────────────────────────────
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

        What is not given is as in the call before, and as in the constructor at first: ``train_subset_num_batches`` of
        one call holds in the next ones, too.

        Each call of ``fit`` in a run is known by its number. Where a resumed run calls ``fit`` again, the call ends
        where it would have ended without the interruption: ``duration`` is not added twice, ``reset_time`` does not
        reset twice, and a call that was finished does nothing. A call that raised is not finished: the next one
        continues it, in the same process as in a resumed run.

        Args:
            duration: how much to train from here (an int counts epochs), in place of ``max_duration``.
            reset_time: start counting from zero.
            scale_schedule_ratio: scales ``duration`` or, without one, ``max_duration``, and Composer schedules.
            eval_subset_num_batches, eval_interval: of ``eval_dataloader``, here or in the constructor; an
                :class:`Evaluator` keeps what it has been given itself.
            train_dataloader, train_dataloader_label, train_subset_num_batches, spin_dataloaders, schedulers,
                step_schedulers_every_batch, eval_dataloader, device_train_microbatch_size, precision: see the
                constructor.

        Raises:
            ConfigError: there is nothing to train on, or no end, or the end is behind.
            Exception: whatever the model, an algorithm or a callback raises.
        """
        given = locals()
        self._end_call_before()
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
        build.check_zero(state, self._train_spec)

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
        if begun_before:
            self._begin_schedules(schedulers, begun_before=True)
        if state.training_is_over and state.interruption.evaluation is None and not calls.only_ends:
            if self._start.resumed or (begun_before and not calls.is_retried):
                messages.tell_result(state, self._savers, {}, trained=False)
                calls.note_start()
                calls.finish()
                self._may_lack_end = True
                return
            raise ConfigError(
                f"max_duration={state.max_duration} has been reached: the run is at epoch {int(state.timestamp.epoch)}"
                f", batch {int(state.timestamp.batch)}. Give a later max_duration, a duration to fit, or "
                "reset_time=True."
            )
        if not begun_before:
            self._begin_schedules(schedulers, begun_before=False)

        checks.check_plateau(state)
        self._use_train_data(self._train_spec)
        if not self._has_told_start:
            messages.tell_start(state, self._savers, self.logger.destinations, autoresume=self._autoresume)
            self._has_told_start = True
        record_samples(state)
        if begun_before:
            changes += changed_run(state, seed=self._given_seed)
        warn_of_changes(state, [*self._start.changes, *changes])
        self._start, state.resumed.metadata = self._start._replace(changes=[]), {}
        loop = self._loop(self._train_spec)
        calls.note_start()
        try:
            self._run(loop)
        except BaseException:
            calls.fail(begun_before=begun_before, reset_time=reset_time)
            raise
        calls.finish()
        messages.tell_result(state, self._savers, state.total_loss_dict, trained=True)

    @property
    def result(self) -> str:
        """Summary of training on a line, as ``fit`` prints it at its end: duration, last values, last checkpoint."""
        losses = self.state.total_loss_dict
        return messages.result(self.state, self._savers, losses, trained=bool(losses))

    def _loop(self, spec: DataSpec) -> Loop:
        """The loop of this call of ``fit``, on the data ``spec``."""
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
            position=self._place_in(spec),
            step=step,
            evaluation=self._evaluation,
            subset_num_batches=self._settings.train_subset_num_batches,
            step_schedulers_every_batch=self._schedulers_step_every_batch(),
            spin_dataloaders=self._settings.spin_dataloaders,
            ranks=self._ranks,
        )

    def _run(self, loop: Loop) -> None:
        try:
            with build.bars_stopped_by_errors(self.logger):
                run(loop)
        except BaseException as e:
            if isinstance(e, Exception):
                for saver in self._savers:
                    if saver.options.on_exception:
                        saver.manager.save_after_exception(e)
            self._ranks.parallel.give_up()
            raise
        finally:
            self.state.interruption.unwatch()
            self._run_settings.end_call()

    def _end_call_before(self) -> None:
        """Run the end of the call before, where the interrupted run had not come to it: this call begins after that."""
        spec = self._train_spec
        if self._may_lack_end and spec is not None:
            self._use_train_data(spec)
            if lacks_epoch_end(self.state):
                self._run(self._loop(spec))
        self._may_lack_end = False

    def _place_in(self, spec: DataSpec) -> DataPosition:
        """The position in the training data: that of the last ``fit`` on it, of the checkpoint, or its start."""
        state = self.state
        loaded = state.dataset_state.get("train") is not None  # since the last fit: by this trainer, or into its state
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

    # ── evaluation, prediction ───────────────────────────────────────────────────────────────────────────────────
    @failing_together("evaluation")
    def eval(self, eval_dataloader: EvalLoader | None = None, subset_num_batches: int = -1) -> None:
        """Evaluate now, on ``eval_dataloader`` or on the constructor's. Values are in ``state.eval_metric_values``.

        Args:
            eval_dataloader: loaders or evaluators; ``None``: the constructor's.
            subset_num_batches: batches of each; -1 for all.

        Raises:
            ConfigError: there is nothing to evaluate on.
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
            evaluators = [build.limited(evaluator, subset) for evaluator in evaluators]
        if not evaluators:
            raise ConfigError("there is no eval_dataloader: pass it to Trainer or to eval.")
        self.engine.run_event(Event.EVAL_STANDALONE_START)
        with build.bars_stopped_by_errors(self.logger):
            self._evaluation.run(evaluators)
        self.engine.run_event(Event.EVAL_STANDALONE_END)

    @failing_together("prediction")
    def predict(self, dataloader: Loader, subset_num_batches: int = -1, *, return_outputs: bool = True) -> list[Any]:
        """The model's outputs for each batch of ``dataloader``, on the CPU, in order.

        With ``return_outputs=False`` the list is empty and memory bounded; callbacks see each in ``state.outputs``.

        Args:
            dataloader: a loader or a ``DataSpec``.
            subset_num_batches: batches; -1 for all.
            return_outputs: ``False`` keeps no outputs: callbacks see them in ``state.outputs``.

        Returns:
            One item for each batch; empty if ``return_outputs`` is false.
        """
        subset = checks.check_subset(subset_num_batches, argument="subset_num_batches")
        spec = ensure_data_spec(dataloader)
        if self._position is not None and self._position.is_in_epoch:
            checks.check_apart(spec, self._train_spec, argument="dataloader")
        with build.bars_stopped_by_errors(self.logger):
            return self._evaluation.predict(spec, subset_num_batches=subset, return_outputs=return_outputs)

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def saved_checkpoints(self) -> list[str]:
        """Paths of the checkpoints that the first saver keeps, oldest first."""
        return [path for saver in self._savers[:1] for path in saver.saved_checkpoints]

    def save_checkpoint(self, name: str = "ep{epoch}-ba{batch}-rank{rank}", *, weights_only: bool = False) -> str:
        """Save a checkpoint to the path ``name`` now, replacing what is there; the path.

        Args:
            name: path, with format variables such as ``{epoch}``.
            weights_only: save the model's weights only.

        Returns:
            Path of the checkpoint.
        """
        from composerlite.checkpoint import save_checkpoint

        return save_checkpoint(self.state, name, weights_only=weights_only)  # pyright: ignore[reportArgumentType]

    def save_checkpoint_to_save_folder(self) -> str:
        """Save through the first saver now: its folder, names, ``latest`` and retention; the path.

        Raises:
            ConfigError: there is no saver.
        """
        if not self._savers:
            raise ConfigError("there is no save_folder: pass it to Trainer, or use save_checkpoint(name).")
        leave_by()  # a grace period of a run before is over: this process has outlived it
        return self._savers[0].save(self.state)

    def export_for_inference(
        self,
        save_format: str,
        save_path: str,
        save_object_store: ObjectStore | None = None,
        sample_input: Any = None,
        transforms: Sequence[Callable[[torch.nn.Module], torch.nn.Module]] | None = None,
    ) -> None:
        """Write the model to a file that serves it: :func:`composerlite.utils.export_with_logger`. Rank 0 does it.

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

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Close all callbacks and loggers. Safe to call twice.

        With several ranks every rank calls it; the trainer that connected them releases the connection.

        Raises:
            Exception: what one of them raised, after all were closed.
        """
        self._forget_position()
        try:
            with failing_together("closing the trainer"):
                self.engine.close()
                self._ranks.parallel.close()
        finally:
            self._ranks.parallel.give_up()
            self._membership.leave()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def _model(self) -> ComposerModel:
        return cast("ComposerModel", self.state.model)  # checked when it was given; NoOpModel's only looks like one

    @property
    def _savers(self) -> list[CheckpointSaver]:
        from composerlite.callbacks import CheckpointSaver

        return [callback for callback in self.state.callbacks if isinstance(callback, CheckpointSaver)]

    def _set_precision(self, precision: Precision) -> None:
        if self.state.deepspeed is not None:
            raise ConfigError(
                f"precision={precision.value!r}: DeepSpeed has made the weights for {self.state.precision.value!r}. "
                "Pass it to Trainer."
            )
        self.state.precision = precision
        scales = precision is Precision.AMP_FP16 and not self.state.deepspeed_enabled  # it has a scaler of its own
        self.state.scaler = torch.amp.GradScaler() if scales else None

    def _set_train_data(self, train_dataloader: Loader) -> None:
        """Train on these from here on. Other data than before begin at their beginning, which begins an epoch.

        What was loaded is the position in the data of the last call of ``fit`` that the checkpoint knows of.
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
        """Return this rank's share of the data: ranks that share layers have the same."""
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
        """Apply the settings of now to the evaluators that there are, where they have none of their own."""
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

    def _begin_schedules(self, given: Schedulers | None, *, begun_before: bool) -> None:
        ratio = self._settings.scale_schedule_ratio
        self._schedules.begin(ratio, begun_before=begun_before, are_given=given is not None)

    def _schedulers_step_every_batch(self) -> bool:
        if self._settings.step_schedulers_every_batch is not None:
            return self._settings.step_schedulers_every_batch
        return self._schedules.step_every_batch()


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are plain values: what can be logged."""
    plain = (str, int, float, bool, Path, Time)
    return {
        name: value if isinstance(value, int | float) else without_secrets(str(value))
        for name, value in arguments.items()
        if isinstance(value, plain)
    }
