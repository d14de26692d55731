"""State: everything that training changes, and how it is saved and restored.

The shape is Composer's: a dict with the keys of ``State.serialized_attributes`` plus ``integrations`` and ``metadata``;
``model`` loads into the bare model, optimizer state is keyed by parameter name, schedulers, callbacks and algorithms by
class name (``EarlyStopper``, ``EarlyStopper:1``, …). Only plain types and tensors are produced here, so that
``torch.load(weights_only=True)`` opens the file anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from composerlite._version import VERSION
from composerlite.core.state.composer_names import ComposerNames
from composerlite.core.state.metric_states import metric_states
from composerlite.core.state.model_state import frozen_parameters, model_state
from composerlite.core.state.optimizer_state import lost_parameters, named_optimizer_state
from composerlite.core.state.restoring import Integrated, StateLoader
from composerlite.core.state.run_state import KeptAlgorithm, KeptCallback, by_class, by_key
from composerlite.errors import SaveError
from composerlite.types import StateDict

__all__ = ["State"]


class State(ComposerNames):
    """Everything that training changes. Algorithms, callbacks and loggers read and write it.

    It has the attributes of :class:`RunState` and adds how they are saved in checkpoints and restored.
    """

    # ── saving ───────────────────────────────────────────────────────────────────────────────────────────────────
    def state_dict(self) -> StateDict:
        """Everything a full checkpoint holds of this state. Tensors are those in use: copy them before training on."""
        position = self.data_position
        metrics: StateDict = {"train_metrics": {}, "eval_metrics": {}}
        if self.save_metrics or self.needs_train_metrics:
            metrics["train_metrics"] = metric_states(self.train_metrics)
        if self.save_metrics:
            metrics["eval_metrics"] = {label: metric_states(of_label) for label, of_label in self.eval_metrics.items()}
        return {
            **self._trained(),
            "schedulers": self._of_schedulers(),
            "algorithms": [(name, self._of_algorithm(a)) for name, a in by_key(self.algorithms).items()],
            "callbacks": {name: self._own_state(callback) for name, callback in by_key(self.callbacks).items()},
            "scaler": {} if self.scaler is None else {type(self.scaler).__qualname__: self.scaler.state_dict()},
            "timestamp": {"Timestamp": self.timestamp.plain()},
            "rank_zero_seed": self.rank_zero_seed,
            **metrics,
            "run_name": self.run_name,
            "dataset_state": (
                self.dataset_state if position is None else {**self.dataset_state, "train": position.state_dict()}
            ),
            "integrations": _integrations(self.model),
            "metadata": self._metadata(),
        }

    def weights_state_dict(self) -> StateDict:
        """Contents of a weights-only checkpoint: model, integrations, metadata, algorithms that the weights need."""
        required = [(a.state_key, _described(a, {})) for a in self.algorithms if a.required_on_load()]
        contents: StateDict = {
            "model": model_state(self.model),
            "integrations": _integrations(self.model),
            "metadata": self._metadata(),
        }
        return {**contents, "algorithms": required} if required else contents

    def _trained(self) -> StateDict:
        """Model and optimizers; nothing with DeepSpeed, which has both and saves them in its own files.

        Raises:
            SaveError: an optimizer trains a parameter that is not the model's.
        """
        if self.deepspeed_enabled:
            return {}
        for optimizer in self.optimizers:
            if lost := lost_parameters(optimizer, self.model):
                raise SaveError(
                    f"the optimizer trains what is not the model's and in no checkpoint: {'; '.join(lost)}. Make it a "
                    "parameter of the model before it is added to the optimizer."
                )
        named = {name: named_optimizer_state(one, self.model) for name, one in by_class(self.optimizers).items()}
        return {"model": model_state(self.model), "optimizers": named}

    def _of_schedulers(self) -> StateDict:
        kept = {} if self.loaded_schedulers is None else self.loaded_schedulers.saved
        return {**kept, **{name: scheduler.state_dict() for name, scheduler in by_class(self.schedulers).items()}}

    def _own_state(self, part: KeptCallback) -> StateDict:
        noted = self.noted_states.get(id(part))
        return part.state_dict() if noted is None else noted

    def _of_algorithm(self, algorithm: KeptAlgorithm) -> StateDict:
        return _described(algorithm, self._own_state(algorithm))

    def _metadata(self) -> StateDict:
        metadata: StateDict = {
            "composerlite_version": VERSION,
            "torch_version": str(torch.__version__),
            "device": self.device.type,
            "precision": self.precision.value,
            "world_size": self.world_size,
            "device_train_microbatch_size": self.device_train_microbatch_size,
            "iteration_length": str(self.iteration_length),
            "frozen": frozen_parameters(self.model),
            "fit_starts": [start.plain() for start in self.fit_starts],
            "evaluated_at": dict(self.evaluated_at),
            "learning_rates": list(self.learning_rates),
            "settings": self.settings,
        }
        if self.interruption.evaluation is not None:
            event, labels = self.interruption.evaluation
            metadata["interrupted_evaluation"] = {"event": event.value, "labels": list(labels)}
        if self.fit_starts and self.max_duration is not None:
            metadata["max_duration"] = str(self.max_duration)
        if self.stopped is not None:
            metadata["stopped"] = str(self.stopped)
        batch_size = getattr(self.train_dataloader, "batch_size", None)
        return metadata if batch_size is None else {**metadata, "train_dataloader_batch_size": batch_size}

    # ── restoring ────────────────────────────────────────────────────────────────────────────────────────────────
    def places_for(
        self,
        state_dict: StateDict,
        *,
        weights_only: bool = False,
        strict: bool = True,
        exclude_algorithms: Sequence[str] = (),
        source: str = "state",
    ) -> StateDict:
        """The tensors that ``state_dict`` is to be loaded into; see :meth:`StateLoader.places`.

        Args:
            state_dict: contents of a checkpoint, or a part of them.
            weights_only: the model's tensors only.
            strict: whether missing and unexpected weights are an error.
            exclude_algorithms: names of algorithms whose state is ignored.
            source: path or URI of the checkpoint, for errors.

        Returns:
            Live tensors by the keys of ``state_dict``.
        """
        return StateLoader(self, state_dict, strict, exclude_algorithms, source).places(weights_only=weights_only)

    def load_state_dict(
        self,
        state_dict: StateDict,
        *,
        weights_only: bool = False,
        strict: bool = True,
        exclude_algorithms: Sequence[str] = (),
        source: str = "state",
    ) -> None:
        """Restore a result of :meth:`state_dict`, or its weights.

        Args:
            state_dict: result of :meth:`state_dict` or :meth:`weights_state_dict`.
            weights_only: restore the model alone.
            strict: whether missing and unexpected weights are an error.
            exclude_algorithms: names of algorithms whose state is ignored.
            source: path or URI of the checkpoint, for errors.
        """
        loader = StateLoader(self, state_dict, strict, exclude_algorithms, source)
        if weights_only:
            loader.load_weights()
        else:
            loader.load_all()


def _described(algorithm: KeptAlgorithm, state: StateDict) -> StateDict:
    """Record of ``algorithm`` in a checkpoint. ``repr`` is for people: nothing evaluates it."""
    return {
        "repr": repr(algorithm),
        "required": algorithm.required_on_load(),
        "config": algorithm.config(),
        "state": state,
    }


def _integrations(model: nn.Module) -> StateDict:
    return model.integrations() if isinstance(model, Integrated) else {}
