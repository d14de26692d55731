"""HuggingFaceModel: a transformers model for the trainer."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from composerlite import dist
from composerlite.core import clean_name
from composerlite.errors import ConfigError, TrainingError, checked_arguments
from composerlite.models.adapters import adapters_of, with_adapters
from composerlite.models.base import ComposerModel, Metrics, by_name
from composerlite.models.hf_record import as_json, config_record, differences, library, tokenizer_record
from composerlite.types import Batch, StateDict

if TYPE_CHECKING:
    from torchmetrics import Metric

log = logging.getLogger(__name__)
_IGNORED = -100
_SHOWN = 10


class HuggingFaceModel(ComposerModel):
    """Train a transformers model. A batch is a mapping of arguments of the model, including ``labels``.

    Checkpoints hold the config and the tokenizer files, so that the model can be built from a checkpoint alone:
    :meth:`hf_from_composer_checkpoint`, :func:`write_huggingface_pretrained_from_composer_checkpoint`.

    Args:
        model: a ``PreTrainedModel``, or a ``PeftModel``.
        tokenizer: tokenizer of the data, saved in checkpoints.
        use_logits: metrics get the logits; if false, all outputs of the model.
        metrics: metrics of training, and of evaluation without ``eval_metrics``.
        eval_metrics: metrics of evaluation.
        shift_labels: metrics get the label of the next token; by default for models that predict the next token.
        allow_embedding_resizing: enlarge the embedding if the tokenizer has more tokens.
        peft_config: a PEFT config; the model gets adapters, and its own weights are frozen.
        should_save_peft_only: for a model with adapters, save only the adapters in checkpoints. The script must build
            the base model again.

    Attributes:
        config: config of the model.
        adapters: adapters of the model; ``None`` for a model without adapters.

    Raises:
        ConfigError: the tokenizer has more tokens than the embedding has rows, the model already has adapters, or a
            package is not installed.
    """

    @checked_arguments
    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        use_logits: bool = False,
        metrics: Metrics | None = None,
        eval_metrics: Metrics | None = None,
        shift_labels: bool | None = None,
        allow_embedding_resizing: bool = False,
        peft_config: Any = None,
        should_save_peft_only: bool = True,
    ) -> None:
        super().__init__()
        transformers = library("transformers", wanted_by="HuggingFaceModel")
        has_new_rows = tokenizer is not None and _fit_embedding(model, tokenizer, may_resize=allow_embedding_resizing)
        self.model: Any = model if peft_config is None else with_adapters(model, peft_config)
        self.tokenizer = tokenizer
        self.config: Any = self.model.config
        self.use_logits = use_logits
        base = self._base_model()
        self._model_class = f"{type(base).__module__}.{type(base).__qualname__}"
        self._takes = frozenset(inspect.signature(base.forward).parameters)
        predicts_next = (
            type(base).__name__ in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        )
        self.shift_labels = predicts_next if shift_labels is None else shift_labels
        if predicts_next and not self.shift_labels:
            log.warning(
                "shift_labels=False: %s predicts the next token, and metrics do not get the next label",
                self._model_class,
            )
        # In a dict, so that nn.Module does not register the metrics and save them with the weights.
        self._given_metrics: dict[bool, Metrics | None] = {
            True: metrics,
            False: metrics if eval_metrics is None else eval_metrics,
        }
        has_adapters = base is not self.model
        self.adapters = adapters_of(self.model, with_embeddings=has_new_rows) if has_adapters else None
        if has_adapters and should_save_peft_only:
            self.register_state_dict_post_hook(_keep_adapters)
            self.register_load_state_dict_post_hook(_base_is_not_missing)
        self._tokenizer_files: tuple[Any, StateDict] | None = None

    def _base_model(self) -> Any:
        """Return the transformers model, without adapters."""
        get_base = getattr(self.model, "get_base_model", None)
        return self.model if get_base is None else get_base()

    def forward(self, batch: Batch) -> Any:
        """Return the outputs of the model. Items of ``batch`` that are not arguments of the model are dropped."""
        if not isinstance(batch, Mapping):
            raise TrainingError(
                f"HuggingFaceModel: a batch is a {type(batch).__name__}: expected a mapping with the names of the "
                "model's arguments, such as {'input_ids': …, 'labels': …}. Use a collator of transformers."
            )
        items = cast("Mapping[str, Any]", batch).items()
        return self.model(**{key: value for key, value in items if key in self._takes})

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the loss of the model, computed from ``batch['labels']``.

        Args:
            outputs: result of :meth:`forward`.
            batch: a mapping with ``'labels'``.

        Returns:
            The loss, a scalar.
        """
        if isinstance(outputs, Tensor):
            raise TrainingError(
                "use_logits=True: eval_forward returns logits, which have no loss. Pass "
                "use_logits=False, or override HuggingFaceModel.loss."
            )
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0] if "labels" in batch else None  # pyright: ignore
        if loss is None:
            raise TrainingError(
                f"{self._model_class} returned no loss: the batch has {', '.join(map(str, batch))}. Add 'labels' to "
                "the batch, e.g. with DataCollatorForLanguageModeling, or override HuggingFaceModel.loss."
            )
        return cast("Tensor", loss)

    def eval_forward(self, batch: Batch, outputs: Any = None) -> Any:
        """Return the logits if ``use_logits`` is true, else all outputs of the model.

        Args:
            batch: an evaluation batch.
            outputs: outputs of the model for ``batch``, if already computed.

        Returns:
            Logits of shape (N, …, C), or the outputs.
        """
        if not self.use_logits:
            return super().eval_forward(batch, outputs)
        if outputs is None:
            has_decoder = bool(getattr(self.config, "is_encoder_decoder", False))  # the decoder reads the labels
            outputs = self({key: value for key, value in batch.items() if key != "labels" or has_decoder})
        logits: Tensor = outputs["logits"] if isinstance(outputs, Mapping) else outputs[1 if len(outputs) > 1 else 0]
        return logits.squeeze(1) if logits.dim() == 2 and logits.shape[1] == 1 else logits

    @property
    def has_eval_loss(self) -> bool:
        """True if the outputs of :meth:`eval_forward` include the loss of the model."""
        return type(self).eval_forward is HuggingFaceModel.eval_forward and not self.use_logits

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        """Return copies of the metrics by name; without names, by class name."""
        return {name: metric.clone() for name, metric in by_name(self._given_metrics[is_train]).items()}

    def update_metric(self, batch: Batch, outputs: Any, metric: Metric) -> None:
        """Update ``metric`` with outputs and labels. The label -100 is ignored.

        Args:
            batch: a mapping with ``'labels'``.
            outputs: result of :meth:`eval_forward`.
            metric: metric to update.
        """
        labels: Tensor = batch["labels"]
        if self.shift_labels:
            labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], _IGNORED)], dim=1)
        metric.update(outputs, labels)

    def generate(self, input_ids: Tensor, **arguments: Any) -> Any:
        """Continue ``input_ids`` with the ``generate`` of the model.

        Args:
            input_ids: token numbers of shape (N, T).
            **arguments: further arguments of ``generate``.

        Returns:
            Token numbers of shape (N, T + new tokens), by default.

        Raises:
            TrainingError: the model is sharded over ranks.
        """
        if any(map(dist.is_distributed_tensor, self.model.parameters())):
            raise TrainingError(
                "generate: the model is sharded over ranks. Build one from a checkpoint, with "
                "HuggingFaceModel.hf_from_composer_checkpoint, and let that generate."
            )
        if self.tokenizer is not None:
            arguments = {"pad_token_id": self.tokenizer.pad_token_id, **arguments}
        return self.model.generate(input_ids=input_ids, **arguments)

    def get_metadata(self) -> StateDict:
        """Return config and tokenizer in the format of Composer's checkpoints under ``integrations/huggingface``."""
        base = self._base_model()
        tied = {f"model.{name}": f"model.{other}" for name, other in _tied_weights(self.model).items()}
        generation = base.generation_config if base.can_generate() else None
        model = config_record(base.config, self._model_class, generation, tied)
        if self.adapters is not None:
            model["peft_config"] = self.adapters.record()
        return {"model": model, "tokenizer": self._tokenizer_record()}

    def _tokenizer_record(self) -> StateDict:
        """Return the record of the tokenizer, cached: a large vocabulary takes a second."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return {}
        key = id(tokenizer), len(tokenizer), str(tokenizer.special_tokens_map), tokenizer.chat_template
        if self._tokenizer_files is None or self._tokenizer_files[0] != key:
            self._tokenizer_files = key, tokenizer_record(tokenizer)
        return self._tokenizer_files[1]

    def integrations(self) -> StateDict:
        """Return the record for checkpoints: the result of :meth:`get_metadata` under ``'huggingface'``."""
        return {"huggingface": self.get_metadata()}

    def integration_problems(self, saved: StateDict, *, source: str) -> list[str]:
        """List base models of another shape as reasons. Another config or tokenizer is only logged.

        Args:
            saved: :meth:`integrations` of the saved model.
            source: path or URI of the checkpoint, for errors.

        Returns:
            One sentence for each reason.
        """
        record = cast("StateDict", (saved.get("huggingface") or {}).get("model") or {})
        content = (record.get("config") or {}).get("content")
        if changed := differences(content, as_json(self._base_model().config)):
            log.warning("%s: the config has changed; using the current one: %s", source, _first(changed))
        files = (saved.get("huggingface") or {}).get("tokenizer")
        if files and self.tokenizer is not None and _texts(files) != _texts(self._tokenizer_record()):
            log.warning("%s: the tokenizer has changed; using the current one", source)
        then = record.get("peft_config") or {}
        if self.adapters is None:
            return []
        if self.adapters.is_other_base(then):
            log.warning(
                "%s: the adapters were trained on a base model with other weights. The checkpoint has no weights of "
                "the base model; build the same base model as before",
                source,
            )
        if not (wrong := self.adapters.wrong_shapes(then)):
            return []
        return [
            f"{source}: the adapters were trained on a base model of another shape ({len(wrong)}): {_first(wrong)}. "
            "Build the base model of that run."
        ]

    @staticmethod
    def hf_from_composer_checkpoint(
        checkpoint_path: str | Path,
        model_instantiation_class: type[Any] | str | None = None,
        model_config_kwargs: Mapping[str, Any] | None = None,
        local_checkpoint_save_location: str | Path | None = None,
        trust_remote_code: bool = False,
        *,
        base_model: nn.Module | None = None,
    ) -> tuple[Any, Any]:
        """Load the transformers model and the tokenizer from a checkpoint, without the training script.

        Args:
            checkpoint_path: path or URI of a checkpoint.
            model_instantiation_class: class of the model, an auto class, or a full class name. By default the class in
                the checkpoint, if transformers has this class.
            model_config_kwargs: changes of the config.
            local_checkpoint_save_location: path for a local copy of a checkpoint in a single file.
            trust_remote_code: let transformers **run code** referenced by the config.
            base_model: base model for a checkpoint with adapters only. By default the base model in PEFT's config.

        Returns:
            The model with the weights of the checkpoint, in evaluation mode, and the tokenizer or ``None``.

        Raises:
            ConfigError: the class cannot be imported, or a base model is missing.
            IncompatibleCheckpointError: the checkpoint was not saved by a HuggingFaceModel, or the weights do not fit.
            CheckpointError: the checkpoint does not exist, is damaged, or has unknown types.
        """
        from composerlite.models.hf_loading import from_checkpoint

        return from_checkpoint(
            str(checkpoint_path),
            model_class=model_instantiation_class,
            config_changes=dict(model_config_kwargs or {}),
            keep_at=local_checkpoint_save_location,
            trust_remote_code=trust_remote_code,
            base_model=base_model,
        )


def _fit_embedding(model: Any, tokenizer: Any, *, may_resize: bool) -> bool:
    """Make the embedding have a row for each token. Return true if rows were added."""
    embedding = model.get_input_embeddings()
    rows, tokens = int(embedding.weight.shape[0]), len(tokenizer)
    if tokens <= rows:
        return False
    if not may_resize:
        raise ConfigError(
            f"HuggingFaceModel: the tokenizer has {tokens} tokens and the model's embedding {rows} rows. Build the "
            f"model with vocab_size={tokens}, or pass allow_embedding_resizing=True."
        )
    model.resize_token_embeddings(tokens)
    log.warning("enlarged the embedding to %d rows from %d: the tokenizer has %d tokens", tokens, rows, tokens)
    return True


def _tied_weights(model: nn.Module) -> dict[str, str]:
    """Return the first name of each tied weight by its second name."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    found = {name: first.setdefault(id(parameter), name) for name, parameter in named}
    return {name: other for name, other in found.items() if name != other}


def _first(things: list[str]) -> str:
    """Join the first of ``things``, and the number of further items."""
    more = f"; and {len(things) - _SHOWN} more" if len(things) > _SHOWN else ""
    return f"{'; '.join(things[:_SHOWN])}{more}"


def _texts(files: Any) -> dict[str, str]:
    return {str(name): repr(file.get("content")) for name, file in files.items() if isinstance(file, Mapping)}


def _keep_adapters(module: nn.Module, state_dict: StateDict, prefix: str, local_metadata: object) -> None:
    """Remove the frozen base from the state dict (a hook of ``state_dict``)."""
    assert isinstance(module, HuggingFaceModel)
    assert module.adapters is not None
    start = f"{prefix}model."
    for name in [name for name in state_dict if name.startswith(start)]:
        if clean_name(name.removeprefix(start)) not in module.adapters.kept:
            del state_dict[name]


def _base_is_not_missing(module: nn.Module, incompatible: Any) -> None:
    """Remove the frozen base from the missing keys (a hook of ``load_state_dict``)."""
    assert isinstance(module, HuggingFaceModel)
    assert module.adapters is not None
    kept = module.adapters.kept
    incompatible.missing_keys[:] = [
        key for key in incompatible.missing_keys if any(clean_name(key).endswith(f"model.{n}") for n in kept)
    ]
