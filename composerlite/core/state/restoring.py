"""Restoring a state from checkpoint contents. All misfits of model and optimizer are reported before any change."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, final, runtime_checkable

from composerlite import dist
from composerlite.core.event import Event
from composerlite.core.state.metric_states import load_metric_states
from composerlite.core.state.model_state import load_model, model_places, model_problems
from composerlite.core.state.optimizer_state import load_named_optimizer_state, optimizer_places, optimizer_problems
from composerlite.core.state.resumed import LoadedSchedulers, restoring
from composerlite.core.state.run_state import RunState, SavedAlgorithm, by_class, by_key
from composerlite.core.time import Time, Timestamp
from composerlite.errors import IncompatibleCheckpointError, did_you_mean
from composerlite.on_demand import ALGORITHM_PACKAGES, ALGORITHMS
from composerlite.types import StateDict

__all__ = ["Integrated", "StateLoader", "rebuilt"]

log = logging.getLogger(__name__)

_EVALUATED = {"model", "integrations", "metadata", "algorithms", "timestamp"}
"""The parts of a checkpoint that evaluation loads."""


@runtime_checkable
class Integrated(Protocol):
    """A model with a record of its own in checkpoints. Every ``ComposerModel`` is ``Integrated``."""

    def integrations(self) -> StateDict:
        """Return the record for checkpoints: plain values by name of a library. Called at every save."""
        ...

    def integration_problems(self, saved: StateDict, *, source: str) -> list[str]:
        """List the reasons not to load a checkpoint with the record ``saved``. Called before the load.

        Log harmless differences.
        """
        ...


@final
@dataclass(frozen=True)
class StateLoader:
    """Load of checkpoint contents into a state.

    Attributes:
        state: the state to restore.
        contents: the part of the checkpoint under ``state``.
        strict: the weights must have the same names.
        exclude_algorithms: names of algorithms to ignore.
        source: path or URI of the checkpoint, for messages.
    """

    state: RunState
    contents: StateDict
    strict: bool
    exclude_algorithms: Sequence[str]
    source: str
    _unmatched: list[str] = field(default_factory=list[str], init=False)

    def places(self, *, weights_only: bool) -> StateDict:
        """Return the live tensors that a load fills, under the keys of the contents.

        The values of the tensors in the contents are not read. Algorithms that changed the structure of the saved model
        are applied. Nothing else is changed.

        Args:
            weights_only: return the tensors of the model only.

        Raises:
            IncompatibleCheckpointError: names, shapes, kinds or groups of parameters differ, or the contents are not of
                a checkpoint. The message lists all differences.
        """
        self._apply_required_algorithms()
        state, contents, source = self.state, self.contents, self.source
        problems: list[str] = []
        places: StateDict = {}
        if "model" in contents:
            with self._restoring("model"):
                problems += model_problems(state.model, contents["model"], strict=self.strict, source=source)
                places["model"] = model_places(state.model, contents["model"])
            if contents.get("integrations") and isinstance(state.model, Integrated):
                with self._restoring("integrations"):
                    problems += state.model.integration_problems(contents["integrations"], source=source)
        if not weights_only and "optimizers" in contents:
            problems += self._kind_problems()
            places["optimizers"] = {}
            for name, optimizer in by_class(state.optimizers).items():
                saved = dict(contents["optimizers"]).get(name)
                if saved is None:
                    continue
                with self._restoring(f"optimizers/{name}"):
                    problems += optimizer_problems(optimizer, state.model, saved, source=source)
                    places["optimizers"][name] = {"state": optimizer_places(optimizer, state.model, saved["state"])}
        if problems:
            raise IncompatibleCheckpointError("\n".join(problems))
        if not weights_only and any(map(dist.is_distributed_tensor, state.model.parameters())):
            places |= self._distributed_parts()
        return places

    def load_weights(self) -> None:
        """Restore the model. Algorithms that changed its structure are applied first.

        Raises:
            IncompatibleCheckpointError: names or shapes differ; the message lists all differences. With
                ``strict=False`` only the shapes must be the same.
        """
        self._apply_required_algorithms()
        if "model" not in self.contents:
            log.warning(
                "%s has no model weights, or load_ignore_keys skips all weights: the model is unchanged",
                self.source,
            )
            return
        with self._restoring("model"):
            load_model(self.state.model, self.contents["model"], strict=self.strict, source=self.source)

    def load_all(self) -> None:
        """Restore the model and all other parts in the contents.

        Parts without a counterpart are listed in one warning and stay unchanged.

        Raises:
            IncompatibleCheckpointError: the model or an optimizer does not fit.
        """
        if not self.state.deepspeed_enabled:  # DeepSpeed has loaded model and optimizer from its own files
            self.load_weights()
            self._load_optimizers()
        self._load_parts()
        with self._restoring("timestamp"):
            self._load_time()
        with self._restoring("train_metrics"):
            self._load_metrics()
        if self._unmatched:
            log.warning("%s does not match the run in all parts: %s", self.source, "; ".join(self._unmatched))

    @property
    def _has_training(self) -> bool:
        """Return true if the contents have parts of training, so that a missing part deserves a warning."""
        return not self.contents.keys() <= _EVALUATED

    def _distributed_parts(self) -> StateDict:
        """Allocate tensors for the states of algorithms and callbacks that are distributed over ranks."""
        algorithms, callbacks = by_key(self.state.algorithms), by_key(self.state.callbacks)
        made: StateDict = {"algorithms": [], "callbacks": {}}
        for name, saved in self.contents.get("algorithms", ()):
            like: Any = None
            if name in algorithms and "state" in saved:
                with self._restoring(f"algorithms/{name}"):
                    like = {"state": algorithms[name].state_like(self.state)}
            made["algorithms"].append((name, dist.shards.shards_like(saved, like)))
        for name, saved in self.contents.get("callbacks", {}).items():
            if name in callbacks and saved:
                with self._restoring(f"callbacks/{name}"):
                    made["callbacks"][name] = dist.shards.shards_like(saved, callbacks[name].state_dict())
        return made

    def _load_optimizers(self) -> None:
        if problems := self._kind_problems():
            raise IncompatibleCheckpointError("\n".join(problems))
        if "optimizers" not in self.contents:
            if self.state.optimizers and self._has_training:
                log.warning("%s has no optimizer state: the optimizer starts fresh", self.source)
            return
        for name, optimizer in by_class(self.state.optimizers).items():
            with self._restoring(f"optimizers/{name}"):
                saved = self.contents["optimizers"][name]
                load_named_optimizer_state(optimizer, self.state.model, saved, source=self.source)

    def _load_parts(self) -> None:
        """Restore schedulers, algorithms, callbacks and scaler."""
        state, contents = self.state, self.contents
        if state.script.schedulers_in_fit and "schedulers" in contents:
            with self._restoring("schedulers"):
                state.resumed.schedulers = LoadedSchedulers(dict(contents["schedulers"]), self.source)
            state.resumed.schedulers.restore(by_class(state.schedulers))
        else:
            self._load_each("schedulers", by_class(state.schedulers), contents.get("schedulers"))
        algorithms: StateDict | None = None
        if "algorithms" in contents:
            with self._restoring("algorithms"):
                algorithms = {
                    name: saved.get("state", saved)  # Composer stores the state itself
                    for name, saved in contents["algorithms"]
                    if name.split(":")[0] not in self.exclude_algorithms
                }
        own = by_key(state.algorithms)
        rebuilt = [name for name, algorithm in own.items() if algorithm.required_on_load()]
        self._load_each("algorithms", own, algorithms, may_lack=rebuilt)
        self._load_each("callbacks", by_key(state.callbacks), contents.get("callbacks"))
        if state.scaler is not None and contents.get("scaler"):
            with self._restoring("scaler"):
                state.scaler.load_state_dict(next(iter(contents["scaler"].values())))

    def _load_time(self) -> None:
        """Restore the timestamp, and the metadata of the run."""
        state, contents = self.state, self.contents
        metadata = contents.get("metadata", {})
        if "timestamp" in contents:
            state.timestamp = Timestamp.from_state_dict(contents["timestamp"]["Timestamp"])
            state.previous_timestamp = None
        if self._continues():
            state.fit_starts = [Timestamp.from_state_dict(start) for start in metadata.get("fit_starts", ())]
            state.resumed.metadata = metadata
            stopped = metadata.get("stopped")
            state.stopped = None if stopped is None else Time.from_input(stopped)
            state.evaluated_at = {str(label): int(batch) for label, batch in metadata.get("evaluated_at", {}).items()}
            if evaluation := metadata.get("interrupted_evaluation"):
                state.interruption.evaluation = Event(evaluation["event"]), tuple(map(str, evaluation["labels"]))
        if "rank_zero_seed" in contents:
            state.rank_zero_seed = int(contents["rank_zero_seed"])
        if "dataset_state" in contents and "timestamp" in contents:  # a run from batch 0 starts with a whole epoch
            state.dataset_state = contents["dataset_state"]
        if state.auto_microbatching and (size := metadata.get("device_train_microbatch_size")):
            state.device_train_microbatch_size = size

    def _continues(self) -> bool:
        """Return true if the run continues the run of the checkpoint.

        The names must be the same. Without a ``run_name`` in the script, a checkpoint from the middle of a call of
        ``fit`` is continued. A load without the timestamp starts a new run.
        """
        state, contents = self.state, self.contents
        if "timestamp" not in contents:
            return False
        if contents.get("run_name") == state.run_name:
            return True
        metadata = contents.get("metadata", {})
        if state.script.names_run or "stopped" in metadata:
            return False
        if metadata.get("interrupted_evaluation"):
            return True
        end = metadata.get("max_duration")
        return end is not None and state.timestamp.get((until := Time.from_input(end)).unit) < until

    def _load_metrics(self) -> None:
        state, contents = self.state, self.contents
        saved_world_size = int(contents.get("metadata", {}).get("world_size", 1))
        ranks = {"rank": state.rank, "world_size": state.world_size, "saved_world_size": saved_world_size}
        load_metric_states(state.train_metrics, contents.get("train_metrics") or {}, **ranks)
        for label, saved in (contents.get("eval_metrics") or {}).items():
            load_metric_states(state.eval_metrics.get(label, {}), saved, **ranks)
        in_epoch = int(state.timestamp.batch_in_epoch) > 0 and self._has_training
        if state.train_metrics and in_epoch and not contents.get("train_metrics"):
            log.warning("train metrics were not saved (save_metrics=False): the metrics of this epoch start fresh")

    def _apply_required_algorithms(self) -> None:
        """Apply the algorithms that changed the structure of the saved model, except algorithms of this run."""
        present = {type(algorithm).__qualname__ for algorithm in self.state.algorithms}
        with self._restoring("algorithms"):
            for saved_name, saved in self.contents.get("algorithms", ()):
                name = saved_name.split(":")[0]
                if name in present or name in self.exclude_algorithms or not saved.get("required", False):
                    continue
                if self.state.deepspeed_enabled:
                    raise IncompatibleCheckpointError(
                        f"the algorithm {name!r} changed the model of the checkpoint, and cannot change a model that "
                        f"DeepSpeed has initialized. Pass algorithms=[{name}(…)] to the Trainer."
                    )
                algorithm = rebuilt(name, saved.get("config", {}))
                algorithm.apply_before_load(self.state)
                self.state.algorithms.append(algorithm)
                log.info("applied %r before the load: the model of the checkpoint was changed by %s", algorithm, name)

    def _restoring(self, part: str) -> AbstractContextManager[None]:
        """Name the saved ``part`` in errors of the block."""
        return restoring(part, source=self.source)

    def _kind_problems(self) -> list[str]:
        """Report optimizers without a saved state: the checkpoint has the state of another kind of optimizer."""
        with self._restoring("optimizers"):
            saved = list(dict(self.contents.get("optimizers", {})))
        have = list(by_class(self.state.optimizers))
        missing = [name for name in have if name not in saved]
        if "optimizers" not in self.contents or not missing:
            return []
        return [
            f"{self.source} was saved with the optimizer {', '.join(map(str, saved)) or 'none'} and the run has "
            f"{', '.join(missing)}. Use the saved kind, or start fresh with load_ignore_keys=['state/optimizers', "
            "'state/schedulers']."
        ]

    def _load_each(
        self, part: str, own: Mapping[str, Any], states: StateDict | None, may_lack: Sequence[str] = ()
    ) -> None:
        """Restore the objects with a saved state. Add objects and states without a counterpart to the warning.

        Args:
            part: key of the part in the contents.
            own: objects of the run by name.
            states: saved states by name; ``None`` if the checkpoint lacks the part.
            may_lack: names of objects that need no saved state.
        """
        if states is None:
            if own and self._has_training:
                self._unmatched.append(f"the checkpoint has no {part}; not restored: {', '.join(own)}")
            return
        with self._restoring(part):
            states = dict(states)
        for name, thing in own.items():
            if name in states:
                with self._restoring(f"{part}/{name}"):
                    thing.load_state_dict(states[name])
            elif name not in may_lack and _keeps_state(thing):
                self._unmatched.append(f"the checkpoint has no state of {name!r} in {part}: {name} starts fresh")
        for name in states:
            if name not in own and states[name]:
                self._unmatched.append(f"the checkpoint has a state of {name!r} in {part}, and the run has no {name}")


def _keeps_state(thing: object) -> bool:
    """Return false for a callback or an algorithm with the empty ``state_dict`` of the base class."""
    owner = next((kind for kind in type(thing).__mro__ if "state_dict" in vars(kind)), object)
    return not owner.__module__.startswith("composerlite.core.")


def rebuilt(name: str, config: dict[str, Any]) -> SavedAlgorithm:
    """Build the algorithm class ``name`` with the arguments ``config``. No text is evaluated.

    Raises:
        IncompatibleCheckpointError: no class of this name is imported and required on load, or the class rejects
            ``config``.
    """
    for package in ALGORITHM_PACKAGES:
        if name not in ALGORITHMS:
            importlib.import_module(package)
    known = {key: cls for key, cls in ALGORITHMS.items() if cls.required_on_load()}
    if name not in known:
        raise IncompatibleCheckpointError(
            f"the checkpoint needs the algorithm {name!r}, and no such class is imported.{did_you_mean(name, known)} "
            f"Import the module of the class, pass algorithms=[{name}(…)], or skip the algorithm with "
            f"load_exclude_algorithms=[{name!r}]."
        )
    try:
        return known[name](**config)
    except TypeError as e:
        raise IncompatibleCheckpointError(f"cannot rebuild the algorithm {name!r} of the checkpoint: {e}") from e
