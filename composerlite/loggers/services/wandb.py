"""WandBLogger: a run as a run of Weights & Biases."""

from __future__ import annotations

import contextlib
import copy
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from composerlite import dist
from composerlite.errors import ConfigError, checked_arguments
from composerlite.loggers.services.service import ServiceLogger, need_package, pictures
from composerlite.loggers.values import jsonable, plain
from composerlite.storage.sdk import isolate_sdk_rng

if TYPE_CHECKING:
    import wandb

    from composerlite.core import Logger, State

_BATCH = "trainer/batch"
"""The x-axis. W&B's own step only increases, and a resumed run goes back to the batch of its checkpoint."""
_LONGEST_NAME = 128
_FLUSH_SECONDS = 1.0


@final
class WandBLogger(ServiceLogger["wandb.Run"]):
    """Logs to a run of Weights & Biases, and continues the W&B run when the run resumes.

    The id of the W&B run is in each checkpoint. A resumed run of the same ``run_name`` continues the W&B run. Charts
    have the x-axis ``trainer/batch``, so a resumed run can go back to an earlier batch; batches that are trained again
    are logged again. W&B sends the values in a process of its own. A run that ends with an error is marked as failed.

    With ``log_artifacts=True`` the files of ``Logger.upload_file`` are uploaded as artifacts in the background, each
    upload as a new version. An error is raised at the next batch, or when the trainer closes. Checkpoints are not
    uploaded: use a bucket as ``save_folder``.

    If a W&B run is open already, as in a sweep, values go to this W&B run, and the logger does not finish it.

    Args:
        project: project of the W&B run, as in ``wandb.init``.
        group: group of the W&B run.
        name: name of the W&B run; by default the ``run_name``.
        entity: entity of the W&B run.
        tags: tags of the W&B run.
        log_artifacts: upload files.
        rank_zero_only: only global rank 0 logs. Otherwise each rank has a W&B run with ``-rank<N>`` after its name, in
            one group.
        init_kwargs: further arguments of ``wandb.init``, such as ``{'mode': 'offline', 'dir': 'logs', 'notes': '…'}``.
        timeout: seconds to wait for W&B when the trainer closes. Values that are not sent by then stay on the disk.

    Attributes:
        run_id: id of the W&B run, from ``AFTER_LOAD`` on; ``None`` on ranks that do not log.

    Raises:
        ConfigError: wandb is not installed, or an argument is invalid.
        wandb.Error: at ``AFTER_LOAD`` W&B cannot be reached, or refuses.

    Example:
        .. code-block:: python

            Trainer(model=model, loggers=WandBLogger(project="demo", init_kwargs={"mode": "offline"}))
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
        self._id: str | None = None  # of the checkpoint
        self._is_own = True  # this logger has started the W&B run
        self._row: dict[str, Any] = {}

    @property
    def place(self) -> str | None:
        """Address of the W&B run, or its folder if it is offline; ``None`` if this rank does not log."""
        return None if self._run is None else self._run.url or str(Path(self._run.dir).parent)

    def init(self, state: State, logger: Logger) -> None:
        if self._run_name != state.run_name:
            self._run_name, self._id = state.run_name, None

    def after_load(self, state: State, logger: Logger) -> None:
        """Continue the W&B run of the checkpoint, or start one."""
        self._batch = int(state.timestamp.batch)
        known = self._init_kwargs.get("id", self._id)
        choice = (secrets.token_hex(4), False) if known is None else (str(known), True)
        group = dist.get_group()
        self._id, may_exist = group.from_first("choosing the id of the W&B run", lambda: choice)
        with group.all_or_none("starting the run of W&B"):
            if not self._is_silent and self._run is None:
                self._start(state.run_name, may_exist=may_exist)
        self._write_early()

    def _start(self, run_name: str, *, may_exist: bool) -> None:
        import wandb  # a slow import

        isolate_sdk_rng("wandb", "requests", "urllib3")
        arguments: dict[str, Any] = {"name": run_name, **self._init_kwargs, "id": self._id}
        if not self._rank_zero_only:
            rank = dist.get_global_rank()
            arguments.setdefault("group", arguments["name"])
            arguments["name"] = f"{arguments['name']}-rank{rank}"
            arguments["id"] = f"{self._id}-rank{rank}"
        if may_exist:
            arguments.setdefault("resume", "allow")
        if wandb.run is not None and "reinit" not in arguments:
            self._run, self._is_own = wandb.run, False
            self._id = self.run_id = self._run.id
            return
        given = arguments.pop("settings", None)
        settings = wandb.Settings(**given) if isinstance(given, Mapping) else copy.copy(given) or wandb.Settings()
        if not settings.finish_timeout:
            settings.finish_timeout, settings.finish_timeout_raises = self._timeout, True
        if "x_transaction_log_flush_interval" not in settings.model_fields_set:
            settings.x_transaction_log_flush_interval = _FLUSH_SECONDS  # a kill loses values that are not on the disk
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

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        values = jsonable(hyperparameters)
        self._write(lambda run, _: run.config.update(values, allow_val_change=True), None)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        values = {name: plain(value) for name, value in metrics.items()}
        self._write(lambda _, batch: self._add(values, batch), step)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        data = jsonable(rows)

        def write(_: wandb.Run, batch: int) -> None:
            import wandb

            self._add({name: wandb.Table(columns=list(columns), data=data)}, batch)

        self._write(write, step)

    def log_images(
        self, images: Any, name: str = "Images", channels_last: bool = False, step: int | None = None
    ) -> None:
        arrays = pictures(images, channels_last=channels_last)

        def write(_: wandb.Run, batch: int) -> None:
            import wandb

            self._add({name: [wandb.Image(array) for array in arrays]}, batch)

        self._write(write, step)

    def _add(self, values: dict[str, Any], batch: int) -> None:
        """Add values to the row of their batch: W&B has one row per batch."""
        if batch != self._batch:
            self._send()
            self._batch = batch
        self._row.update(values)

    def _send(self) -> None:
        row, self._row = self._row, {}
        if row and self._run is not None:
            self._run.log({**row, _BATCH: self._batch})

    def can_upload_files(self) -> bool:
        """Return true with ``log_artifacts=True``, on all ranks."""
        return self._log_artifacts

    def _send_file(self, run: wandb.Run, name: str, staged: Path, batch: int, *, overwrite: bool) -> None:
        import wandb

        allowed = re.sub(r"[^\w.-]", ".", name, flags=re.ASCII)[-_LONGEST_NAME:].lstrip(".")
        artifact = wandb.Artifact(allowed, type="file", metadata={"name": name, "batch": batch})
        artifact.add_file(str(staged), name=staged.name, skip_cache=True)
        logged = run.log_artifact(artifact, aliases=["latest", f"ba{batch}"])
        if not run.offline:
            logged.wait(timeout=int(max(1.0, self._timeout)))

    def batch_end(self, state: State, logger: Logger) -> None:
        self._send()
        self._background.raise_failures()

    def post_close(self) -> None:
        """Finish the W&B run, after the ``close`` of all callbacks.

        Raises:
            TimeoutError: W&B did not accept everything in time. A note has the folder with the values.
            Exception: error of background work.
        """
        code = self._exit_code()
        with contextlib.ExitStack() as stack:  # each step runs also if an earlier one fails
            stack.callback(self._finish, code)
            stack.callback(self._files.remove)
            stack.callback(self._background.close)
            self._send()

    def _finish(self, code: int) -> None:
        run, self._run = self._run, None
        if run is not None and self._is_own:
            try:
                run.finish(exit_code=code)
            except Exception as e:
                folder = Path(run.dir).parent
                e.add_note(f"WandBLogger: the values are in {folder}; 'wandb sync' with this folder sends the rest.")
                raise

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the W&B run, and pass the waiting values to W&B: a resumed run does not log them again."""
        self._send()
        return {"run_name": self._run_name, "id": self._id}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the W&B run of the checkpoint, if the run has the same name. Composer's state has no ``id``."""
        saved = state_dict.get("id")
        if state_dict.get("run_name") == self._run_name and isinstance(saved, str):
            self._id = saved
