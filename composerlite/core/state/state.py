"""State: everything that training changes, and how checkpoints save and restore it.

The format is Composer's: the keys of ``State.serialized_attributes``, ``integrations`` and ``metadata``.
``model`` loads into the bare model. Optimizer state is keyed by parameter name; schedulers, callbacks and algorithms by
class name (``EarlyStopper``, ``EarlyStopper:1``, …). All values are tensors and plain types, so
``torch.load(weights_only=True)`` opens the file anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from composerlite import dist
from composerlite._version import VERSION
from composerlite.core.parallelism import FSDPConfig, TPConfig
from composerlite.core.state.metric_states import metric_states
from composerlite.core.state.model_state import frozen_parameters, model_state
from composerlite.core.state.optimizer_state import lost_parameters, named_optimizer_state
from composerlite.core.state.restoring import Integrated, StateLoader
from composerlite.core.state.run_state import RunState, SavedAlgorithm, by_class, by_key
from composerlite.errors import SaveError
from composerlite.types import StateDict

__all__ = ["State"]


class State(RunState):
    """Everything that training changes. Algorithms, callbacks and loggers read and write the state.

    The attributes are described in :class:`RunState`. This class adds saving and restoring, and properties with the
    names of Composer's state.
    """

    precision_config = None
    """Always ``None``: FP8 is not supported."""

    @property
    def is_model_ddp(self) -> bool:
        """Always false: the trainer keeps the ``DistributedDataParallel`` wrapper, and ``model`` is the bare model."""
        return False

    @property
    def fsdp_config(self) -> FSDPConfig | None:
        """Configuration of FSDP; ``None`` without FSDP."""
        return None if self.parallelism is None else self.parallelism.fsdp

    @property
    def tp_config(self) -> TPConfig | None:
        """Configuration of tensor parallelism; ``None`` without tensor parallelism."""
        return None if self.parallelism is None else self.parallelism.tp

    @property
    def fsdp_config_version(self) -> int:
        """2 with FSDP, which is torch's ``fully_shard``; 0 without FSDP."""
        return 0 if self.fsdp_config is None else 2

    @property
    def fsdp_enabled(self) -> bool:
        """True if the parameters of the model are distributed over the ranks."""
        return self.fsdp_config is not None and any(map(dist.is_distributed_tensor, self.model.parameters()))

    @property
    def fsdp_state_dict_type(self) -> str | None:
        """Layout of checkpoints with FSDP, ``'full'`` or ``'sharded'``; ``None`` without FSDP."""
        return self.sharding if self.fsdp_enabled else None

    @property
    def fsdp_sharded_state_dict_enabled(self) -> bool:
        """True if each checkpoint is a directory with a part from every rank."""
        return self.fsdp_state_dict_type == "sharded"

    @property
    def load_monolith_rank0_only(self) -> bool:
        """True if only global rank 0 reads checkpoints in a single file."""
        return self.fsdp_config is not None and self.fsdp_config.load_monolith_rank0_only

    def get_model_state_dict(self) -> StateDict:
        """Return the weights by name, as in checkpoints under ``state/model``."""
        return model_state(self.model)

    def get_optim_state_dict(self) -> StateDict:
        """Return the state of the optimizer by class name, as in checkpoints under ``state/optimizers``."""
        named = by_class(self.optimizers)
        return {name: named_optimizer_state(optimizer, self.model) for name, optimizer in named.items()}

    def state_dict(self) -> StateDict:
        """Return the contents of a full checkpoint. The tensors are not copied; copy them before the next step.

        Raises:
            SaveError: an optimizer trains a parameter that is not in the model.
        """
        contents: StateDict = {}
        if not self.deepspeed_enabled:  # DeepSpeed saves model and optimizer in its own files
            lost = [text for optimizer in self.optimizers for text in lost_parameters(optimizer, self.model)]
            if lost:
                raise SaveError(
                    f"the optimizer trains parameters that are not in the model, so no checkpoint would have them: "
                    f"{'; '.join(lost)}. Register them in the model before you build the optimizer."
                )
            contents = {"model": self.get_model_state_dict(), "optimizers": self.get_optim_state_dict()}
        schedulers = {name: scheduler.state_dict() for name, scheduler in by_class(self.schedulers).items()}
        if self.resumed.schedulers is not None:
            schedulers = {**self.resumed.schedulers.saved, **schedulers}
        train, evaluation = self.save_metrics or self.needs_train_metrics, self.save_metrics
        position, labelled = self.data_position, self.eval_metrics.items()
        return {
            **contents,
            "schedulers": schedulers,
            "algorithms": [(name, _described(a, a.state_dict())) for name, a in by_key(self.algorithms).items()],
            "callbacks": {name: callback.state_dict() for name, callback in by_key(self.callbacks).items()},
            "scaler": {} if self.scaler is None else {type(self.scaler).__qualname__: self.scaler.state_dict()},
            "timestamp": {"Timestamp": self.timestamp.plain()},
            "rank_zero_seed": self.rank_zero_seed,
            "train_metrics": metric_states(self.train_metrics) if train else {},
            "eval_metrics": {label: metric_states(metrics) for label, metrics in labelled} if evaluation else {},
            "run_name": self.run_name,
            "dataset_state": (
                self.dataset_state if position is None else {**self.dataset_state, "train": position.state_dict()}
            ),
            "integrations": _integrations(self.model),
            "metadata": self._metadata(),
        }

    def weights_state_dict(self) -> StateDict:
        """Return the contents of a weights-only checkpoint: model, integrations, metadata, and required algorithms."""
        required = [(a.state_key, _described(a, {})) for a in self.algorithms if a.required_on_load()]
        contents: StateDict = {
            "model": model_state(self.model),
            "integrations": _integrations(self.model),
            "metadata": self._metadata(),
        }
        return {**contents, "algorithms": required} if required else contents

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
            "learning_rates": list(self.script.learning_rates),
            "settings": self.script.settings,
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

    def places_for(
        self,
        state_dict: StateDict,
        *,
        weights_only: bool = False,
        strict: bool = True,
        exclude_algorithms: Sequence[str] = (),
        source: str = "state",
    ) -> StateDict:
        """Return the live tensors that a load of ``state_dict`` fills; see :meth:`StateLoader.places`.

        Args:
            state_dict: contents of a checkpoint, or a part of them.
            weights_only: return the tensors of the model only.
            strict: missing and unexpected weights are an error.
            exclude_algorithms: names of algorithms to ignore.
            source: path or URI of the checkpoint, for errors.

        Returns:
            Live tensors, under the keys of ``state_dict``.
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
        """Restore a result of :meth:`state_dict`, or only its weights.

        Args:
            state_dict: result of :meth:`state_dict` or :meth:`weights_state_dict`.
            weights_only: restore the model only.
            strict: missing and unexpected weights are an error.
            exclude_algorithms: names of algorithms to ignore.
            source: path or URI of the checkpoint, for errors.
        """
        loader = StateLoader(self, state_dict, strict, exclude_algorithms, source)
        if weights_only:
            loader.load_weights()
        else:
            loader.load_all()


def _described(algorithm: SavedAlgorithm, state: StateDict) -> StateDict:
    """Return the record of ``algorithm`` in a checkpoint. ``repr`` is for readers; no code evaluates this text."""
    return {
        "repr": repr(algorithm),
        "required": algorithm.required_on_load(),
        "config": algorithm.config(),
        "state": state,
    }


def _integrations(model: nn.Module) -> StateDict:
    return model.integrations() if isinstance(model, Integrated) else {}
