"""WandBLogger: a run as a run of Weights & Biases."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import secrets
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from composerlite import dist
from composerlite.errors import ConfigError, checked_arguments
from composerlite.loggers.services.service import ServiceLogger, exit_code, json_of, need_package, pictures
from composerlite.loggers.values import plain
from composerlite.storage.sdk import isolate_sdk_rng

if TYPE_CHECKING:
    import wandb

    from composerlite.core import Logger, State

log = logging.getLogger(__name__)
_BATCH = "trainer/batch"
"""The x-axis. W&B's own step only grows, and a resumed run goes back to the batch of its checkpoint."""
_LONGEST_NAME = 128
_FLUSH_SECONDS = 1.0


@final
class WandBLogger(ServiceLogger["wandb.Run"]):
    """Logs to a run of Weights & Biases, and continues it when the run is resumed.

    The id of the W&B run is in each checkpoint. A resumed run of the same ``run_name`` continues that W&B run, also
    where it goes back to an earlier batch: the charts are drawn over ``trainer/batch``, and batches that are trained
    again are logged again. W&B sends what is logged in the background. A run that ends with an error is marked as
    failed.

    Files that are handed to ``Logger.upload_file`` are kept as artifacts with ``log_artifacts=True``, each upload a new
    version. They are sent in the background; what fails is raised at the next batch or when the trainer closes.
    Checkpoints are no artifacts: they go to ``save_folder``, which may be a bucket.

    Where a W&B run is open already, as in a sweep, that one is logged to, and who has started it finishes it.

    Args:
        project: as in ``wandb.init``; by default what W&B takes then. group, entity, tags: the same.
        name: of the W&B run; the ``run_name`` by default.
        log_artifacts: keep files.
        rank_zero_only: only global rank 0 logs and keeps files. Otherwise each rank has a W&B run of its own, with
            ``-rank<N>`` after its name, in a group.
        init_kwargs: further arguments of ``wandb.init``, such as ``{'mode': 'offline', 'dir': 'logs', 'notes': '…'}``.
        timeout: seconds to wait for W&B to take everything when the trainer closes. What it has not taken then is on
            the disk.

    Attributes:
        run_id: of the W&B run, from ``AFTER_LOAD`` on; ``None`` on ranks that do not log.

    Raises:
        ConfigError: at construction wandb is not installed, or an argument is wrong.
        wandb.Error: at ``AFTER_LOAD``, before training: W&B cannot be reached or refuses.
    """

    @checked_arguments
    def __init__(
        self,
        project: str | None = None,
        group: str | None = None,
        name: str | None = None,
        entity: str | None = None,
        tags: Sequence[str] | None = None,
        log_artifacts: bool = False,
        rank_zero_only: bool = True,
        init_kwargs: Mapping[str, Any] | None = None,
        timeout: float = 600.0,
    ) -> None:
        need_package("wandb", who="WandBLogger", extra="wandb")
        if timeout <= 0:
            raise ConfigError(f"WandBLogger(timeout={timeout}): expected seconds, more than 0.")
        if isinstance(tags, str):
            raise ConfigError(f"WandBLogger(tags={tags!r}): expected a list of tags.")
        own = {"project": project, "group": group, "name": name, "entity": entity, "tags": tags}
        own = {key: value for key, value in own.items() if value is not None}
        given = dict(init_kwargs or {})
        if twice := sorted({*own} & {*given}):
            raise ConfigError(
                f"WandBLogger: {', '.join(twice)} is given as an argument and in init_kwargs. Leave one out."
            )
        self._init_kwargs = {**given, **own}
        self._log_artifacts = log_artifacts
        super().__init__("W&B", rank_zero_only=rank_zero_only, timeout=timeout)
        self._id: str | None = None
        self._is_resumed = False
        self._finishes = True
        self._row: dict[str, Any] = {}
        self._in_no_summary: set[str] = set()
        self._is_broken = False

    @property
    def place(self) -> str | None:
        """Address of the W&B run, or its folder where nothing is sent; ``None`` where this rank does not log."""
        return None if self._run is None else self._run.url or str(Path(self._run.dir).parent)

    # ── beginning ────────────────────────────────────────────────────────────────────────────────────────────────
    def init(self, state: State, logger: Logger) -> None:
        """Know the name of the run."""
        if self._run_name != state.run_name:
            self._run_name, self._id = state.run_name, None

    def after_load(self, state: State, logger: Logger) -> None:
        """Start the W&B run, or continue that of the checkpoint."""
        group = dist.get_group()
        self._batch = int(state.timestamp.batch)
        self._id, self._is_resumed = group.from_first("naming the run of W&B", self._choose_id)
        with group.all_or_none("starting the run of W&B"):
            if not self._is_silent and self._run is None:
                self._start(state.run_name)
        self._write_early()

    def _choose_id(self) -> tuple[str, bool]:
        """The id of the run, and whether there may be one of that id."""
        if (given := self._init_kwargs.get("id")) is not None:
            return str(given), True
        return (secrets.token_hex(4), False) if self._id is None else (self._id, True)

    def _start(self, run_name: str) -> None:
        import wandb  # imports slowly, and is not always there

        isolate_sdk_rng("wandb", "requests", "urllib3")
        self._in_no_summary.clear()
        arguments: dict[str, Any] = {"name": run_name, **self._init_kwargs, "id": self._id}
        if not self._rank_zero_only:
            rank = dist.get_global_rank()
            arguments.setdefault("group", arguments["name"])
            arguments["name"] = f"{arguments['name']}-rank{rank}"
            arguments["id"] = f"{self._id}-rank{rank}"
        if self._is_resumed:
            arguments.setdefault("resume", "allow")
        if wandb.run is not None and "reinit" not in arguments:
            self._run, self._finishes = wandb.run, False
            self._id = self.run_id = self._run.id
            return
        settings = self._settings(arguments.pop("settings", None))
        try:
            self._run = wandb.init(**arguments, settings=settings)
        except TypeError as e:
            raise ConfigError(f"WandBLogger(init_kwargs={self._init_kwargs!r}): {e}") from e
        except wandb.Error as e:
            e.add_note(
                f"WandBLogger could not start the run {run_name!r}. Log in with 'wandb login', or log to the disk with "
                "WANDB_MODE=offline."
            )
            raise
        self.run_id = self._run.id
        self._run.define_metric(_BATCH, hidden=True)
        self._run.define_metric("*", step_metric=_BATCH, step_sync=True)

    def _settings(self, given: Any) -> wandb.Settings:
        """Settings of the user, and those that are needed so that no wait is endless and no kill loses much."""
        import wandb

        settings = wandb.Settings(**given) if isinstance(given, Mapping) else copy.copy(given)
        settings = wandb.Settings() if settings is None else settings
        if not settings.finish_timeout:
            settings.finish_timeout, settings.finish_timeout_raises = self._timeout, True
        if "x_transaction_log_flush_interval" not in settings.model_fields_set:
            settings.x_transaction_log_flush_interval = _FLUSH_SECONDS  # a kill loses what is not on the disk
        return settings

    # ── logging ──────────────────────────────────────────────────────────────────────────────────────────────────
    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        values = {name: json_of(value) for name, value in hyperparameters.items()}
        self._write(lambda run, _: run.config.update(values, allow_val_change=True), None)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        values = {name: plain(value) for name, value in metrics.items()}

        def write(run: wandb.Run, step: int) -> None:
            self._leave_out_of_summary(run, values)
            self._add(values, step)

        self._write(write, step)

    def _leave_out_of_summary(self, run: wandb.Run, values: Mapping[str, Any]) -> None:
        """Keep the costs of checkpoints out of the summary, which is about training; they have their charts."""
        for name in values:
            if name.startswith("checkpoint/") and name not in self._in_no_summary:
                # By its name: of two globs that match one name, W&B takes either.
                run.define_metric(name, step_metric=_BATCH, step_sync=True, summary="none")
                self._in_no_summary.add(name)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        data = [[json_of(cell) for cell in row] for row in rows]

        def write(_: wandb.Run, step: int) -> None:
            import wandb

            self._add({name: wandb.Table(columns=list(columns), data=data)}, step)

        self._write(write, step)

    def log_images(
        self, images: Any, name: str = "Images", channels_last: bool = False, step: int | None = None
    ) -> None:
        arrays = pictures(images, channels_last=channels_last)

        def write(_: wandb.Run, step: int) -> None:
            import wandb

            self._add({name: [wandb.Image(array) for array in arrays]}, step)

        self._write(write, step)

    @contextlib.contextmanager
    def _reaching(self, run: wandb.Run) -> Generator[None]:
        """W&B hands everything to a process of its own, which may have been killed."""
        try:
            yield
        except OSError as e:
            if self._is_broken:
                raise
            self._is_broken = True
            raise ConnectionError(
                f"WandBLogger: the service process of W&B is gone ({e}): nothing can be logged any more. Resume the "
                f"run. What was logged until now is in {Path(run.dir).parent}; 'wandb sync' with that folder sends it."
            ) from e

    def _add(self, values: dict[str, Any], step: int) -> None:
        """Put values into the row of their batch; those of one batch are one row of W&B."""
        if step != self._batch:
            self._send()
            self._batch = step
        self._row.update(values)

    def _send(self) -> None:
        row, self._row = self._row, {}
        if row and self._run is not None:
            with self._reaching(self._run):
                self._run.log({**row, _BATCH: self._batch})

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────
    def can_upload_files(self) -> bool:
        """Return true if files become artifacts: on every rank the same, also where rank 0 alone logs."""
        return self._log_artifacts

    def _send_file(self, run: wandb.Run, name: str, staged: Path, batch: int, *, overwrite: bool) -> None:
        """Keep the file as an artifact; an older one of that name stays as an older version."""
        import wandb

        artifact = wandb.Artifact(_artifact_name(name), type="file", metadata={"name": name, "batch": batch})
        artifact.add_file(str(staged), name=staged.name, skip_cache=True)
        logged = run.log_artifact(artifact, aliases=["latest", f"ba{batch}"])
        if not run.offline:
            logged.wait(timeout=int(max(1.0, self._timeout)))

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────
    def batch_end(self, state: State, logger: Logger) -> None:
        self._send()
        self._background.raise_failures()

    def post_close(self) -> None:
        """Finish the W&B run; not in ``close``, where other callbacks may still log.

        Raises:
            TimeoutError: W&B did not take everything in time. The message says where it is.
            Exception: what went wrong with a file.
        """
        code = exit_code(training=self._is_training)
        run = self._run
        with contextlib.ExitStack() as stack:
            if run is not None:
                stack.callback(self._finish, run, code)
            stack.callback(self._files.remove)
            stack.callback(self._background.close)
            if not self._is_broken:
                self._send()

    def _finish(self, run: wandb.Run, code: int) -> None:
        self._run = None
        if not self._finishes:
            return
        folder = Path(run.dir).parent
        try:
            run.finish(exit_code=code)
        except TimeoutError as e:
            raise TimeoutError(
                f"WandBLogger: W&B did not take everything within {self._timeout:.0f} s. It is in {folder}; "
                "'wandb sync' with that folder sends the rest."
            ) from e
        except OSError as e:
            if not self._is_broken:
                raise
            log.warning("WandBLogger: could not finish the run of W&B in %s: %s", folder, e)  # training is over

    # ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────
    def state_dict(self) -> dict[str, Any]:
        """The id of the W&B run. What is logged up to here is not held back any longer: it is not logged again."""
        self._send()
        return {"run_name": self._run_name, "id": self._id}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue that W&B run, if it is of this run. Composer's state has no id that is one."""
        saved = state_dict.get("id")
        if state_dict.get("run_name") == self._run_name and isinstance(saved, str):
            self._id = saved


def _artifact_name(name: str) -> str:
    """``name`` as W&B allows it, without slashes; the end of one that is too long."""
    return re.sub(r"[^\w.-]", ".", name, flags=re.ASCII)[-_LONGEST_NAME:].lstrip(".")
