"""Loading of a transformers model and its tokenizer from a checkpoint, without the training script."""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from composerlite.checkpoint.tools.reading import model_and_integrations, weights_of
from composerlite.errors import ConfigError, IncompatibleCheckpointError
from composerlite.models.hf_folder import kept_by_huggingface, write_huggingface, write_tokenizer
from composerlite.models.hf_record import library
from composerlite.types import StateDict

_WANTED_BY = "hf_from_composer_checkpoint"
_PREFIX = "model."


def from_checkpoint(
    path: str,
    *,
    model_class: type[Any] | str | None,
    config_changes: StateDict,
    keep_at: str | Path | None,
    trust_remote_code: bool,
    base_model: nn.Module | None,
) -> tuple[Any, Any]:
    """Load the model and the tokenizer. Arguments as in ``HuggingFaceModel.hf_from_composer_checkpoint``."""
    transformers = library("transformers", wanted_by=_WANTED_BY)
    path = kept_at(path, keep_at)
    contents = model_and_integrations(path)
    record = _ModelRecord(transformers, kept_by_huggingface(contents, path), path, trust_remote_code)
    tokenizer = record.tokenizer()
    weights = {
        name.removeprefix(_PREFIX): tensor
        for name, tensor in weights_of(contents, path).items()
        if isinstance(tensor, Tensor)
    }
    adapter = record.kept["model"].get("peft_config")
    if isinstance(adapter, dict):
        weights = _of_base(weights, cast("StateDict", adapter))
    if base_model is not None:
        model: Any = base_model
    elif weights:
        model = record.model(weights, model_class, config_changes)
    else:
        model = record.named_base()
    return (_with_adapters(model, contents, path) if isinstance(adapter, dict) else model), tokenizer


def kept_at(source: str, location: str | Path | None) -> str:
    """Return ``source``; with a ``location``, download the file and return ``location``."""
    if location is None:
        return source
    from composerlite.checkpoint.load.resolve import get_file

    get_file(source, location)
    return str(location)


def model_class_of(transformers: Any, names: Iterable[str]) -> type[Any] | None:
    """Return the first of ``names`` that is a model class of transformers."""
    for name in names:
        found = getattr(transformers, name, None) if name.isidentifier() and not name.startswith("_") else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return cast("type[Any]", found)
    return None


@final
@dataclass(frozen=True)
class _ModelRecord:
    """Record of a model of transformers in a checkpoint."""

    transformers: Any
    kept: StateDict
    source: str
    trust_remote_code: bool

    def model(self, weights: Mapping[str, Tensor], model_class: type[Any] | str | None, changes: StateDict) -> Any:
        """Build a model with ``weights``, of ``model_class`` or else of the class in the checkpoint."""
        config = self._config(changes)
        chosen = self._class() if model_class is None else _imported(model_class)
        if not issubclass(chosen, self.transformers.PreTrainedModel):
            with torch.device("meta"):  # an auto class maps a config to a class
                chosen = type(chosen.from_config(config, trust_remote_code=self.trust_remote_code))
        dtype = next((tensor.dtype for tensor in weights.values() if tensor.is_floating_point()), None)
        model, report = chosen.from_pretrained(
            None, config=config, state_dict=dict(weights), dtype=dtype, output_loading_info=True
        )
        self._check_whole(report, may_lack=model_class is not None or bool(changes))
        generation = self.kept["model"].get("generation_config")
        if isinstance(generation, Mapping) and model.can_generate():
            content = cast("Any", generation)["content"]
            model.generation_config = self.transformers.GenerationConfig.from_dict(content)
        return model

    def tokenizer(self) -> Any:
        """Return the tokenizer; ``None`` if the checkpoint has none."""
        with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
            if not write_tokenizer(self.kept, Path(folder), source=self.source):
                return None
            (Path(folder) / "config.json").write_text(json.dumps(self.kept["model"]["config"]["content"]))
            return self.transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=self.trust_remote_code)

    def named_base(self) -> Any:
        """Load the base model in PEFT's config."""
        name = self.kept["model"]["peft_config"]["content"].get("base_model_name_or_path")
        if not name:
            raise ConfigError(
                f"{self.source!r} has only adapters, and no name of their base model. Pass base_model=…, the "
                "transformers model of that run."
            )
        return self._class().from_pretrained(name, trust_remote_code=self.trust_remote_code)

    def _check_whole(self, report: Mapping[str, Any], *, may_lack: bool) -> None:
        """Raise if weights are missing: they would be random. Allowed if the user asks for another model."""
        missing = [] if may_lack else sorted(map(str, report.get("missing_keys", ())))
        other = sorted(map(str, report.get("mismatched_keys", ())))
        if missing or other:
            what = [*(f"missing: {name}" for name in missing), *(f"of another shape: {name}" for name in other)]
            raise IncompatibleCheckpointError(
                f"{self.source!r}: the weights do not fit the config: {'; '.join(what[:10])}."
            )

    def _config(self, changes: StateDict) -> Any:
        content = {**self.kept["model"]["config"]["content"], **changes}
        with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(content))
            try:
                return self.transformers.AutoConfig.from_pretrained(folder, trust_remote_code=self.trust_remote_code)
            except (ValueError, KeyError, TypeError, AttributeError) as e:
                raise IncompatibleCheckpointError(
                    f"{self.source!r}: transformers {self.transformers.__version__} cannot read the config: {e}"
                ) from e

    def _class(self) -> type[Any]:
        """Return the class named in the checkpoint, if transformers has this class."""
        record = self.kept["model"]["config"]
        package, _, name = str(record.get("class", "")).rpartition(".")
        names = [name] if package.partition(".")[0] == "transformers" else []
        listed = record["content"].get("architectures")
        names += map(str, cast("list[Any]", listed) if isinstance(listed, list) else [])
        if (found := model_class_of(self.transformers, names)) is None:
            raise IncompatibleCheckpointError(
                f"{self.source!r}: the model class {record.get('class')!r} is not in transformers. Pass the class as "
                "model_instantiation_class=…."
            )
        return found


def _imported(model_class: type[Any] | str) -> type[Any]:
    """Import the class that the user has named."""
    if isinstance(model_class, type):
        return model_class
    module, _, name = model_class.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module or "transformers"), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(
            f"model_instantiation_class={model_class!r} cannot be imported: {e}. Expected 'package.module.Class'."
        ) from e
    return cast("type[Any]", found)


def _of_base(weights: Mapping[str, Tensor], adapter: StateDict) -> dict[str, Tensor]:
    """Return the weights of the base model, by its own names; empty if only adapters were saved."""
    names = adapter.get("base_shapes")
    base = names if isinstance(names, Mapping) else {name for name in weights if ".default" not in name}
    return {
        name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", "."): tensor
        for name, tensor in weights.items()
        if name in base
    }


def _with_adapters(base: Any, contents: StateDict, source: str) -> Any:
    """Add the adapters in ``contents`` to ``base``."""
    peft = library("peft", wanted_by=_WANTED_BY)
    with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
        write_huggingface(contents, Path(folder), source=source)
        return peft.PeftModel.from_pretrained(base, folder)
