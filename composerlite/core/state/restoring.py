"""Checkpoint contents back into a state: what does not fit is said before anything is changed."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, final, runtime_checkable

from composerlite import dist
from composerlite.core.event import Event
from composerlite.core.state.metric_states import load_metric_states
from composerlite.core.state.model_state import load_model, model_places, model_problems
from composerlite.core.state.optimizer_state import load_named_optimizer_state, optimizer_places, optimizer_problems
from composerlite.core.state.resumed import LoadedSchedulers, restoring
from composerlite.core.state.run_state import KeptAlgorithm, RunState, by_class, by_key
from composerlite.core.time import Time, Timestamp
from composerlite.errors import IncompatibleCheckpointError, did_you_mean
from composerlite.on_demand import ALGORITHM_PACKAGES, ALGORITHMS
from composerlite.types import StateDict

__all__ = ["Integrated", "StateLoader", "rebuilt"]

log = logging.getLogger(__name__)

_EVALUATED = {"model", "integrations", "metadata", "algorithms", "timestamp"}
"""What evaluation needs of a checkpoint: the weights, their averages and their moment."""
T = TypeVar("T")


@runtime_checkable
class Integrated(Protocol):
    """A model that has something to keep: every ``ComposerModel`` is one, and most keep nothing."""

    def integrations(self) -> StateDict:
        """The record that goes into checkpoints, under the name of each library: plain values. Called at every save."""
        ...

    def integration_problems(self, saved: StateDict, *, source: str) -> list[str]:
        """List the reasons not to load a checkpoint with ``saved`` in it. Harmless differences are logged.

        Called before anything of the checkpoint is loaded.
        """
        ...


@final
@dataclass(frozen=True)
class StateLoader:
    """One load of checkpoint contents into a state.

    Attributes:
        state: is restored.
        contents: what the checkpoint holds under ``state``.
        strict: parameter names must agree exactly.
        exclude_algorithms: names of those that are not restored.
        source: the checkpoint, for messages.
    """

    state: RunState
    contents: StateDict
    strict: bool
    exclude_algorithms: Sequence[str]
    source: str
    _unmatched: list[str] = field(default_factory=list[str], init=False)

    def places(self, *, weights_only: bool) -> StateDict:
        """Say everything that keeps the contents from being loaded, or give the tensors that they are loaded into.

        Those are found under the same keys as in the contents. The numbers in the tensors of the contents are not
        looked at. Algorithms that changed the structure of the saved model are applied; nothing else is changed.

        Raises:
            IncompatibleCheckpointError: names, shapes, kinds or groups of parameters differ, or the contents have
                another form than a checkpoint's; all of it is in the message.
        """
        self._check_form()
        self._apply_required_algorithms()
        state, contents, source = self.state, self.contents, self.source
        problems: list[str] = []
        places: StateDict = {}
        if "model" in contents:
            problems += model_problems(state.model, contents["model"], strict=self.strict, source=source)
            places["model"] = model_places(state.model, contents["model"])
            if contents.get("integrations") and isinstance(state.model, Integrated):
                with self._restoring("integrations"):
                    problems += state.model.integration_problems(contents["integrations"], source=source)
        if not weights_only and "optimizers" in contents:
            problems += self._kind_problems()
            places["optimizers"] = {}
            for name, optimizer in by_class(state.optimizers).items():
                saved = contents["optimizers"].get(name)
                if saved is not None:
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
            IncompatibleCheckpointError: names or shapes differ; all differences are in the message. With
                ``strict=False`` only shapes must agree.
        """
        self._check_form()
        self._apply_required_algorithms()
        if "model" not in self.contents:
            log.warning(
                "%s holds no model weights, or load_ignore_keys leaves them all out: the model stays as it is",
                self.source,
            )
            return
        with self._restoring("model"):
            load_model(self.state.model, self.contents["model"], strict=self.strict, source=self.source)

    def load_all(self) -> None:
        """Restore the model and everything else that the contents hold.

        What is there on one side only is said, all of it in one warning: a part that the checkpoint lacks stays as it
        is.

        Raises:
            IncompatibleCheckpointError: the model or an optimizer does not fit.
        """
        if not self.state.deepspeed_enabled:  # which has loaded them from its own files
            self.load_weights()
            self._load_optimizers()
        self._load_parts()
        with self._restoring("timestamp"):
            self._load_time()
        with self._restoring("train_metrics"):
            self._load_metrics()
        if self._unmatched:
            log.warning("%s does not match the run in all its parts: %s", self.source, "; ".join(self._unmatched))

    @property
    def _has_training(self) -> bool:
        """Return true if there is more than evaluation needs: then a missing part is warned of."""
        return not self.contents.keys() <= _EVALUATED

    # ── the parts ────────────────────────────────────────────────────────────────────────────────────────────────
    def _distributed_parts(self) -> StateDict:
        """New tensors for those of algorithms and callbacks that are distributed over ranks."""
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
                log.warning("%s holds no optimizer state: the optimizer starts fresh", self.source)
            return
        for name, optimizer in by_class(self.state.optimizers).items():
            with self._restoring(f"optimizers/{name}"):
                saved = self.contents["optimizers"][name]
                load_named_optimizer_state(optimizer, self.state.model, saved, source=self.source)

    def _load_parts(self) -> None:
        """Schedulers, algorithms, callbacks, scaler: whatever keeps a state of its own."""
        state, contents = self.state, self.contents
        if state.script.schedulers_in_fit and "schedulers" in contents:
            with self._restoring("schedulers"):
                state.resumed.schedulers = LoadedSchedulers(dict(contents["schedulers"]), self.source)
            state.resumed.schedulers.restore(by_class(state.schedulers))
        else:
            for saved, scheduler in self._matching(by_class(state.schedulers), contents, "schedulers"):
                with self._restoring(f"schedulers/{type(scheduler).__qualname__}"):
                    scheduler.load_state_dict(saved)
        algorithms = {
            name: saved
            for name, saved in contents.get("algorithms", ())
            if name.split(":")[0] not in self.exclude_algorithms
        }
        own = by_key(state.algorithms)
        rebuilt = [name for name, algorithm in own.items() if algorithm.required_on_load()]
        for saved, algorithm in self._matching(own, {"algorithms": algorithms}, "algorithms", rebuilt):
            with self._restoring(f"algorithms/{algorithm.state_key}"):
                algorithm.load_state_dict(saved.get("state", saved))  # Composer stores the state itself
        for saved, callback in self._matching(by_key(state.callbacks), contents, "callbacks"):
            with self._restoring(f"callbacks/{callback.state_key}"):
                callback.load_state_dict(saved)
        if state.scaler is not None and contents.get("scaler"):
            with self._restoring("scaler"):
                state.scaler.load_state_dict(next(iter(contents["scaler"].values())))

    def _load_time(self) -> None:
        """Restore the position of the run, and what belongs to it."""
        state, contents = self.state, self.contents
        metadata = contents.get("metadata", {})
        if "timestamp" in contents:
            state.timestamp = Timestamp.from_state_dict(contents["timestamp"]["Timestamp"])
            state.previous_timestamp = None
        if self._continues():  # its calls of fit count from where they did
            state.fit_starts = [Timestamp.from_state_dict(start) for start in metadata.get("fit_starts", ())]
            state.resumed.metadata = metadata
            stopped = metadata.get("stopped")
            state.stopped = None if stopped is None else Time.from_input(stopped)
            state.evaluated_at = {str(label): int(batch) for label, batch in metadata.get("evaluated_at", {}).items()}
            if evaluation := metadata.get("interrupted_evaluation"):
                state.interruption.evaluation = Event(evaluation["event"]), tuple(map(str, evaluation["labels"]))
        if "rank_zero_seed" in contents:
            state.rank_zero_seed = int(contents["rank_zero_seed"])
        if "dataset_state" in contents and "timestamp" in contents:  # the epoch of a new count is a whole one
            state.dataset_state = contents["dataset_state"]
        if state.auto_microbatching and (size := metadata.get("device_train_microbatch_size")):
            state.device_train_microbatch_size = size

    def _continues(self) -> bool:
        """Return true if the run is that of the checkpoint: by its name or, where nobody has named it, by its training.

        A call of ``fit`` that was interrupted is continued; one that was finished is followed by others. What is loaded
        without its timestamp is another run, which counts from zero.
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
            log.warning(
                "train metrics were not saved (save_metrics=False): those of this epoch count from the resume on"
            )

    def _apply_required_algorithms(self) -> None:
        """Rebuild and apply the algorithms that changed the structure of the saved model and are not in this run."""
        present = {type(algorithm).__qualname__ for algorithm in self.state.algorithms}
        for name, saved in self.contents.get("algorithms", ()):
            name = name.split(":")[0]
            if name in present or name in self.exclude_algorithms:
                continue
            with self._restoring("algorithms"):
                if not saved.get("required", False):
                    continue
                if self.state.deepspeed_enabled:
                    raise IncompatibleCheckpointError(
                        f"the checkpoint's model was changed by the algorithm {name!r}, and DeepSpeed has the model "
                        f"already: pass it to the Trainer, algorithms=[{name}(…)]."
                    )
                algorithm = rebuilt(name, saved.get("config", {}))
                algorithm.apply_before_load(self.state)
                self.state.algorithms.append(algorithm)
                log.info("the checkpoint's model was changed by %r: applied before loading", algorithm)

    # ── what fits ────────────────────────────────────────────────────────────────────────────────────────────────
    def _restoring(self, part: str) -> AbstractContextManager[None]:
        """Within it, an error that the saved ``part`` leads to names the part."""
        return restoring(part, source=self.source)

    def _kind_problems(self) -> list[str]:
        """An optimizer of another kind has nothing to take from the checkpoint's: say so rather than train without."""
        have, saved = list(by_class(self.state.optimizers)), list(self.contents.get("optimizers", ()))
        missing = [name for name in have if name not in saved]
        if "optimizers" not in self.contents or not missing:
            return []
        return [
            f"{self.source} was saved with the optimizer {', '.join(map(str, saved)) or 'none'} and the run has "
            f"{', '.join(missing)}. Use that optimizer, or load_ignore_keys=['state/optimizers', 'state/schedulers'] "
            "to start fresh."
        ]

    def _matching(
        self, own: Mapping[str, T], contents: StateDict, part: str, may_lack: Sequence[str] = ()
    ) -> Iterable[tuple[Any, T]]:
        """(saved state, object) of each object that has a saved state; notes each state that has no partner.

        None for objects named in ``may_lack``, which need no saved state.
        """
        if part not in contents:
            if own and self._has_training:
                self._unmatched.append(f"the checkpoint has no {part}; not restored: {', '.join(own)}")
            return
        saved = contents[part]
        for name, thing in own.items():
            if name in saved:
                yield saved[name], thing
            elif name not in may_lack and _keeps_state(thing):
                self._unmatched.append(f"the checkpoint has no state of {name!r} in {part}: {name} starts fresh")
        for name in saved:
            if name not in own and saved[name]:
                self._unmatched.append(f"the checkpoint has a state of {name!r} in {part}, and the run has no {name}")

    def _check_form(self) -> None:
        """Check that the parts which are read here have the form that they have in every checkpoint."""
        contents = self.contents
        mappings = ("model", "optimizers", "schedulers", "callbacks", "scaler", "timestamp", "metadata", "integrations")
        wrong = [part for part in mappings if not isinstance(contents.get(part, {}), Mapping)]
        if not wrong:
            optimizers = contents.get("optimizers", {})
            wrong += [f"optimizers/{name}" for name, saved in optimizers.items() if not _is_optimizer(saved)]
            wrong += ["model" for name in contents.get("model", ()) if not isinstance(name, str)][:1]
        algorithms: Any = contents.get("algorithms", ())
        if not isinstance(algorithms, list | tuple) or not all(map(_is_named_state, algorithms)):  # pyright: ignore[reportUnknownArgumentType]
            wrong.append("algorithms")
        if wrong:
            raise IncompatibleCheckpointError(
                f"{self.source} is damaged or of another kind: {', '.join(wrong)} in it is not what it is in a "
                "checkpoint."
            )


def _keeps_state(thing: object) -> bool:
    """Return false for a callback or an algorithm with the ``state_dict`` of its base class, which is empty."""
    owner = next((kind for kind in type(thing).__mro__ if "state_dict" in vars(kind)), object)
    return not owner.__module__.startswith("composerlite.core.")


def _is_optimizer(saved: Any) -> bool:
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None  # pyright: ignore
    return (
        isinstance(groups, list)
        and isinstance(saved.get("state"), Mapping)
        and all(isinstance(group, dict) and _are_names(group.get("params")) for group in groups)  # pyright: ignore
        and _are_names(list(saved["state"]))
        and all(isinstance(value, Mapping) for value in saved["state"].values())
    )


def _are_names(names: Any) -> bool:
    return isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)  # pyright: ignore[reportUnknownVariableType]


def _is_named_state(item: Any) -> bool:
    return (
        isinstance(item, list | tuple)
        and len(item) == 2  # pyright: ignore[reportUnknownArgumentType]
        and isinstance(item[0], str)
        and isinstance(item[1], Mapping)
    )


def rebuilt(name: str, config: dict[str, Any]) -> KeptAlgorithm:
    """The algorithm class ``name`` built with ``config``; no text is evaluated.

    Raises:
        IncompatibleCheckpointError: no algorithm of that name is known and required on load, or ``config`` does not
            fit it.
    """
    for package in ALGORITHM_PACKAGES:
        if name not in ALGORITHMS:
            importlib.import_module(package)
    known = {key: cls for key, cls in ALGORITHMS.items() if cls.required_on_load()}
    if name not in known:
        raise IncompatibleCheckpointError(
            f"the checkpoint needs the algorithm {name!r}, which is not known here.{did_you_mean(name, known)} "
            "Import the module that defines it, pass it as algorithms=[…], or leave it out with "
            f"load_exclude_algorithms=[{name!r}]."
        )
    try:
        return known[name](**config)
    except TypeError as e:
        raise IncompatibleCheckpointError(f"the checkpoint's algorithm {name!r} cannot be rebuilt: {e}") from e
