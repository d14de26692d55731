"""From a checkpoint to a model of transformers, and its tokenizer, without the script that saved it."""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from composerlite.checkpoint.tools.huggingface import kept_by_huggingface, write_huggingface
from composerlite.checkpoint.tools.huggingface import write_tokenizer as write_files
from composerlite.checkpoint.tools.whole import model_and_integrations, weights_of
from composerlite.errors import ConfigError, IncompatibleCheckpointError
from composerlite.models.hf_libraries import peft_library, transformers_library
from composerlite.types import StateDict

__all__ = ["from_checkpoint"]

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
    """See ``HuggingFaceModel.hf_from_composer_checkpoint``."""
    transformers = transformers_library(_WANTED_BY)
    if keep_at is not None:
        from composerlite.checkpoint.load.resolve import get_file

        get_file(path, keep_at)
        path = str(keep_at)
    contents = model_and_integrations(path)
    kept = kept_by_huggingface(contents, path)
    tokenizer = _tokenizer(transformers, kept, path, trust_remote_code=trust_remote_code)
    weights = {name.removeprefix(_PREFIX): tensor for name, tensor in weights_of(contents, path).items()}
    adapter = kept["model"].get("peft_config")
    if isinstance(adapter, dict):
        weights = _of_base(weights, cast("StateDict", adapter))
    model = base_model
    if weights and base_model is None:
        model = _model(
            transformers, weights, kept, path, model_class, config_changes, trust_remote_code=trust_remote_code
        )
    elif base_model is None:
        model = _named_base(transformers, kept, path, trust_remote_code=trust_remote_code)
    return (_with_adapters(model, contents, path) if isinstance(adapter, dict) else model), tokenizer


def _model(
    transformers: Any,
    weights: Mapping[str, Tensor],
    kept: StateDict,
    source: str,
    model_class: type[Any] | str | None,
    config_changes: StateDict,
    *,
    trust_remote_code: bool,
) -> Any:
    config = _config(transformers, kept, config_changes, source, trust_remote_code=trust_remote_code)
    chosen = _class(transformers, kept, source) if model_class is None else _imported(model_class)
    if not issubclass(chosen, transformers.PreTrainedModel):
        with torch.device("meta"):  # an auto class: it knows the class of a config
            chosen = type(chosen.from_config(config, trust_remote_code=trust_remote_code))
    dtype = next((tensor.dtype for tensor in weights.values() if tensor.is_floating_point()), None)
    model, report = chosen.from_pretrained(
        None, config=config, state_dict=dict(weights), dtype=dtype, output_loading_info=True
    )
    _check_whole(report, source, may_lack=model_class is not None or bool(config_changes))
    generation = kept["model"].get("generation_config")
    if isinstance(generation, Mapping) and model.can_generate():
        content = cast("Any", generation)["content"]
        model.generation_config = transformers.GenerationConfig.from_dict(content)
    return model


def _check_whole(report: Mapping[str, Any], source: str, *, may_lack: bool) -> None:
    """A weight that the checkpoint does not have would be a random number; where the user wants another model it is."""
    missing = [] if may_lack else sorted(map(str, report.get("missing_keys", ())))
    other = sorted(map(str, report.get("mismatched_keys", ())))
    if missing or other:
        what = [*(f"missing: {name}" for name in missing), *(f"of another shape: {name}" for name in other)]
        raise IncompatibleCheckpointError(f"{source!r}: its weights do not fit its config: {'; '.join(what[:10])}.")


def _config(transformers: Any, kept: StateDict, changes: StateDict, source: str, *, trust_remote_code: bool) -> Any:
    content = {**kept["model"]["config"]["content"], **changes}
    with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(content))
        try:
            return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise IncompatibleCheckpointError(
                f"{source!r}: transformers {transformers.__version__} makes no config of the one in it: {e}"
            ) from e


def _class(transformers: Any, kept: StateDict, source: str) -> type[Any]:
    """The class that the checkpoint names, if it is a model of transformers: no other name is looked up."""
    record = kept["model"]["config"]
    package, _, name = str(record.get("class", "")).rpartition(".")
    names = [name] if package.partition(".")[0] == "transformers" else []
    listed = record["content"].get("architectures")
    names += map(str, cast("list[Any]", listed) if isinstance(listed, list) else [])
    for one in names:
        found = getattr(transformers, one, None) if one.isidentifier() and not one.startswith("_") else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return cast("type[Any]", found)
    raise IncompatibleCheckpointError(
        f"{source!r}: its model is a {record.get('class')!r}, which is none of transformers' own: pass "
        "model_instantiation_class=…, the class."
    )


def _imported(model_class: type[Any] | str) -> type[Any]:
    """The class that the user has named."""
    if isinstance(model_class, type):
        return model_class
    module, _, name = model_class.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module or "transformers"), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(
            f"model_instantiation_class={model_class!r} cannot be imported: {e}. Want 'package.module.Class'."
        ) from e
    return cast("type[Any]", found)


def _tokenizer(transformers: Any, kept: StateDict, source: str, *, trust_remote_code: bool) -> Any:
    with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
        if not write_files(kept, Path(folder), source=source):
            return None
        (Path(folder) / "config.json").write_text(json.dumps(kept["model"]["config"]["content"]))
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


# ── adapters ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _of_base(weights: Mapping[str, Tensor], adapter: StateDict) -> dict[str, Tensor]:
    """Those of the base model, by its own names; none where adapters were saved alone."""
    names = adapter.get("base_shapes")
    base = names if isinstance(names, Mapping) else {name for name in weights if ".default" not in name}
    return {
        name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", "."): tensor
        for name, tensor in weights.items()
        if name in base
    }


def _named_base(transformers: Any, kept: StateDict, source: str, *, trust_remote_code: bool) -> Any:
    """What PEFT's config names, if it is there."""
    name = kept["model"]["peft_config"]["content"].get("base_model_name_or_path")
    if not name:
        raise ConfigError(
            f"{source!r} has adapters alone, and does not name their base model: pass base_model=…, the model of "
            "transformers that they were trained on."
        )
    chosen = _class(transformers, kept, source)
    return chosen.from_pretrained(name, trust_remote_code=trust_remote_code)


def _with_adapters(base: Any, contents: StateDict, source: str) -> Any:
    """``base`` with the adapters, as PEFT loads a folder."""
    peft = peft_library(_WANTED_BY)
    with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
        write_huggingface(contents, Path(folder), source=source)
        return peft.PeftModel.from_pretrained(base, folder)
