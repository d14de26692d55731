"""Start of a run: from its newest good checkpoint, from the checkpoint in ``load_path``, or from scratch."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint import Catalog, IgnoreKeys, load_checkpoint
from composerlite.checkpoint.contents import check_ignore_keys
from composerlite.checkpoint.load.resume import Choice, advising, choose
from composerlite.checkpoint.save.run_folder import begin_attempt
from composerlite.core import LoggerDestination, State
from composerlite.errors import ConfigError, naming
from composerlite.storage import ObjectStore, parse_uri, without_secrets
from composerlite.trainer.checks import Arguments, as_list, require
from composerlite.trainer.messages import log_loaded
from composerlite.trainer.settings import reconcile_optimizer

if TYPE_CHECKING:
    from composerlite.loggers import RemoteUploaderDownloader

__all__ = ["LoadSettings", "Start", "load_or_resume"]

log = logging.getLogger(__name__)


@final
@dataclass(slots=True, kw_only=True)
class LoadSettings(Arguments):
    """Arguments of the trainer for loading and resuming.

    Raises:
        ConfigError: an argument breaks its rule.
    """

    load_path: str | Path | None
    load_object_store: ObjectStore | RemoteUploaderDownloader | None
    load_weights_only: bool
    load_strict_model_weights: bool
    load_progress_bar: bool
    load_ignore_keys: IgnoreKeys
    load_exclude_algorithms: Sequence[str] | None
    load_key_map: Mapping[str, str] | None
    trust_checkpoint: bool
    autoresume: bool
    autoresume_timeout: float

    def __post_init__(self) -> None:
        self.load_exclude_algorithms = as_list(self.load_exclude_algorithms, str, argument="load_exclude_algorithms")
        self.load_ignore_keys = check_ignore_keys(self.load_ignore_keys, argument="load_ignore_keys")
        if self.load_key_map is not None:
            from composerlite.checkpoint.foreign.keys import check_key_map  # rarely needed

            self.load_key_map = check_key_map(self.load_key_map)
        seconds: Any = self.autoresume_timeout
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        require(
            not self.autoresume or (is_number and 0 <= seconds < math.inf),
            f"autoresume_timeout={seconds!r}: expected a number of seconds, 0 or more.",
        )


@final
class Start(NamedTuple):
    """The start of a run.

    Attributes:
        resumed: the run resumes from its own checkpoint.
        changes: differences between the optimizer settings of the checkpoint and of the script.
    """

    resumed: bool
    changes: list[str]


def load_or_resume(
    state: State, settings: LoadSettings, savers: Sequence[CheckpointSaver], loggers: Sequence[LoggerDestination]
) -> Start:
    """Load a checkpoint into ``state``, and begin an attempt of the run.

    With ``autoresume`` the newest good checkpoint of the run is loaded, otherwise ``load_path``.

    Args:
        state: complete training state.
        settings: arguments of the trainer.
        savers: their folders and buckets are searched for checkpoints of the run.
        loggers: a logger may upload checkpoints to a bucket, which is also searched.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or does not fit.
        RunInUseError: another process trains this run.
    """
    if settings.load_path is not None and settings.load_object_store is None:
        with naming("load_path", settings.load_path):
            parse_uri(str(settings.load_path))
    choice = _newest_checkpoint(state, settings, savers, loggers) if settings.autoresume else None
    path = settings.load_path if choice is None or choice.path is None else choice.path
    resumed = choice is not None and choice.path is not None
    if path is not None:
        state.load_path = without_secrets(str(path))  # logged, and saved in checkpoints
        if choice is None or choice.path is None:
            generators = _load(state, str(path), settings)
        else:
            with advising(str(choice.path)):
                if choice.loaded is not None:
                    generators = choice.loaded.restore()
                else:  # DeepSpeed reads and restores in a single step
                    generators = load_checkpoint(str(path), state, trust_checkpoint=settings.trust_checkpoint)
        state.resumed.generators = state.resumed.generators if generators is None else generators
        log_loaded(state, resumed=resumed, weights_only=settings.load_weights_only)
    changes = [] if state.deepspeed_enabled else reconcile_optimizer(state, script_wins=resumed)
    if choice is not None:
        state.lineage = choice.lineage
    elif savers:
        origin = None if settings.load_weights_only else state.load_path  # weights alone are not a continuation
        places = [saver.manager.place for saver in savers]
        folders: list[tuple[Catalog, str | None]] = [(place.catalog, None) for place in places]
        buckets = [(bucket.catalog, bucket.link) for place in places for bucket in place.buckets]
        state.lineage = begin_attempt([*folders, *buckets], state.run_name, origin=origin)
    return Start(resumed, changes)


def _load(state: State, name: str, settings: LoadSettings) -> list[dict[str, Any]] | None:
    """Load the checkpoint in ``load_path``; return the states of its random generators."""
    store = settings.load_object_store
    if store is not None and not isinstance(store, ObjectStore):
        name, store = store.object_name(name, state.run_name), store.object_store
    return load_checkpoint(
        name,
        state,
        object_store=store,
        load_weights_only=settings.load_weights_only,
        strict_model_weights=settings.load_strict_model_weights,
        progress_bar=settings.load_progress_bar,
        ignore_keys=settings.load_ignore_keys,
        exclude_algorithms=settings.load_exclude_algorithms,
        trust_checkpoint=settings.trust_checkpoint,
        key_map=settings.load_key_map,
    )


def _newest_checkpoint(
    state: State, settings: LoadSettings, savers: Sequence[CheckpointSaver], loggers: Sequence[LoggerDestination]
) -> Choice:
    """Take the lease of the run, and read its newest good checkpoint.

    No other process can train the run while this process holds the lease: see
    :mod:`composerlite.checkpoint.place.lease`.

    Raises:
        RunInUseError: another process trains the run.
        CheckpointError: there are checkpoints, and none is good.
        ConfigError: no saver saves more than weights.
    """
    savers = [saver for saver in savers if not saver.weights_only]
    if not savers:
        raise ConfigError(
            "autoresume=True needs checkpoints to resume from: pass save_folder, or a CheckpointSaver that saves "
            "more than weights."
        )
    for saver in savers:
        saver.manager.take_leases(settings.autoresume_timeout)
    places = [saver.manager.place for saver in savers]
    choice = choose(
        places,
        state.run_name,
        state if state.deepspeed is None else None,
        [logger.uploader.transfer.store for logger in loggers if logger.uploader is not None],
        trust=settings.trust_checkpoint,
        progress_bar=settings.load_progress_bar,
    )
    if choice.path is None:
        folders = ", ".join(saver.options.names.folder.replace("{run_name}", state.run_name) for saver in savers)
        log.info("autoresume: run %r has no checkpoint in %s yet", state.run_name, folders)
    return choice
