"""Models with adapters: what is saved of them, and that it is enough."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from models.hf_parts import causal_model, logits, lora, same, tokenizer, train, trainer_of

from composerlite.checkpoint import read_checkpoint
from composerlite.errors import ConfigError, IncompatibleCheckpointError
from composerlite.models import HuggingFaceModel, write_huggingface_pretrained_from_composer_checkpoint

pytestmark = pytest.mark.filterwarnings(
    # peft asks transformers in a way that this calls old
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
LAST = "latest-rank0.pt"


def adapted(**settings: Any) -> HuggingFaceModel:
    """The base model with new adapters."""
    torch.manual_seed(21)
    base = causal_model(**{key: settings.pop(key) for key in ("seed", "vocabulary", "width") if key in settings})
    torch.manual_seed(22)
    return HuggingFaceModel(base, tokenizer(), peft_config=lora(**settings))


def test_checkpoints_have_adapters_alone(tmp_path: Path) -> None:
    """The weights of adapters and their state in the optimizer; a strict load does not ask for the base."""
    model = adapted()
    train(model, tmp_path)
    contents = read_checkpoint(tmp_path / LAST)["state"]
    assert len(contents["model"]) == 8
    assert all(".lora_A.default." in name or ".lora_B.default." in name for name in contents["model"])
    assert set(contents["optimizers"]["AdamW"]["state"]) == set(contents["model"])
    twin = adapted()
    assert twin.load_state_dict(contents["model"], strict=True) == ([], [])
    assert torch.equal(logits(twin.model), logits(model.model))
    half = dict(list(contents["model"].items())[1:])
    with pytest.raises(RuntimeError, match="Missing key"):
        twin.load_state_dict(half, strict=True)
    with pytest.raises(IncompatibleCheckpointError, match="missing in the checkpoint"):
        trainer_of(adapted(target_modules=["q_proj", "v_proj", "o_proj"]), None, load_path=str(tmp_path / LAST))


def test_all_weights_are_saved_if_asked_for(tmp_path: Path) -> None:
    """With should_save_peft_only=False the base model comes from the checkpoint, and no script is needed for it."""
    model = HuggingFaceModel(causal_model(), tokenizer(), peft_config=lora(), should_save_peft_only=False)
    train(model, tmp_path, max_duration=1)
    weights = read_checkpoint(tmp_path / LAST)["state"]["model"]
    assert "model.base_model.model.model.embed_tokens.weight" in weights
    loaded, words = HuggingFaceModel.hf_from_composer_checkpoint(tmp_path / LAST)
    assert torch.equal(logits(loaded), logits(model.model))
    assert len(words) == len(tokenizer())
    write_huggingface_pretrained_from_composer_checkpoint(tmp_path / LAST, tmp_path / "out")
    loaded = peft.PeftModel.from_pretrained(causal_model(), tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model.model))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]},
    ],
    ids=["lora", "dora", "modules_to_save", "tokens"],
)
def test_adapters_are_exported_as_peft_writes_them(settings: dict[str, Any], tmp_path: Path) -> None:
    """The files that PEFT's own save_pretrained makes, number for number; PeftModel loads them on the base model."""
    import safetensors.torch

    model = adapted(**settings)
    train(model, tmp_path / "run")
    write_huggingface_pretrained_from_composer_checkpoint(tmp_path / "run" / LAST, tmp_path / "out")
    model.model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        safetensors.torch.load_file(tmp_path / at / "adapter_model.safetensors") for at in ("out", "theirs")
    )
    assert ours.keys() == theirs.keys()
    assert same(ours.values(), [theirs[name] for name in ours])
    loaded = peft.PeftModel.from_pretrained(causal_model(), tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model.model))
    again, _ = HuggingFaceModel.hf_from_composer_checkpoint(tmp_path / "run" / LAST, base_model=causal_model())
    assert torch.equal(logits(again), logits(model.model))


@pytest.mark.parametrize("with_base", [False, True])
def test_adapters_of_composer_are_exported(with_base: bool, tmp_path: Path) -> None:
    """Composer keeps PEFT's config, and nothing that says which weights are whose: their names do."""
    model = HuggingFaceModel(causal_model(), tokenizer(), peft_config=lora(), should_save_peft_only=not with_base)
    train(model, tmp_path / "run", max_duration=1)
    contents = read_checkpoint(tmp_path / "run" / LAST)
    adapter = contents["state"]["integrations"]["huggingface"]["model"]["peft_config"]
    for key in ("adapter", "files", "base_shapes", "base_digest"):
        del adapter[key]
    torch.save(contents, tmp_path / "composer.pt")
    base = None if with_base else causal_model()
    loaded, _ = HuggingFaceModel.hf_from_composer_checkpoint(tmp_path / "composer.pt", base_model=base)
    assert torch.equal(logits(loaded), logits(model.model))
    write_huggingface_pretrained_from_composer_checkpoint(tmp_path / "composer.pt", tmp_path / "out")
    loaded = peft.PeftModel.from_pretrained(causal_model(), tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model.model))
    twin = HuggingFaceModel(causal_model(), peft_config=lora(), should_save_peft_only=not with_base)
    with trainer_of(twin, None, load_path=str(tmp_path / "composer.pt")):
        assert torch.equal(logits(twin.model), logits(model.model))


def test_the_base_model_is_found_or_asked_for(tmp_path: Path) -> None:
    """Where PEFT's config names a folder, it is taken; else the error says what to pass."""
    train(adapted(), tmp_path / "unnamed", max_duration=1)
    with pytest.raises(ConfigError, match="Pass base_model="):
        HuggingFaceModel.hf_from_composer_checkpoint(tmp_path / "unnamed" / LAST)
    import transformers

    train(HuggingFaceModel(causal_model(), tokenizer()), tmp_path / "first", max_duration=1)
    write_huggingface_pretrained_from_composer_checkpoint(tmp_path / "first" / LAST, tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = HuggingFaceModel(base, tokenizer(), peft_config=lora())
    train(model, tmp_path / "named", max_duration=1)
    loaded, _ = HuggingFaceModel.hf_from_composer_checkpoint(tmp_path / "named" / LAST)
    assert torch.equal(logits(loaded), logits(model.model))
    write_huggingface_pretrained_from_composer_checkpoint(tmp_path / "named" / LAST, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")  # it finds the base by its name, too
    assert torch.equal(logits(loaded), logits(model.model))


def test_another_base_model_is_refused_or_said(tmp_path: Path, caplog: Any) -> None:
    """One of another shape is an error before anything is loaded, even where the adapters fit; one with other weights
    is said."""
    train(adapted(), tmp_path, max_duration=1)
    wider = adapted(vocabulary=200)
    before = [tensor.clone() for tensor in wider.state_dict().values()]
    with pytest.raises(IncompatibleCheckpointError, match=r"embed_tokens.weight: \(96, 32\) then, \(200, 32\) now"):
        trainer_of(wider, None, load_path=str(tmp_path / LAST))
    assert same(before, wider.state_dict().values())
    with pytest.raises(IncompatibleCheckpointError, match="another shape"):
        trainer_of(adapted(width=64), None, load_path=str(tmp_path / LAST))
    with caplog.at_level(logging.WARNING), trainer_of(adapted(seed=99), None, load_path=str(tmp_path / LAST)):
        assert "a base model with other weights" in caplog.text
    caplog.clear()
    with trainer_of(adapted(), None, load_path=str(tmp_path / LAST)):
        assert "other weights" not in caplog.text


def test_new_rows_of_the_embedding_are_saved_with_the_adapters(tmp_path: Path) -> None:
    """Rows that were added for the tokenizer are random numbers that no script builds again."""
    few = causal_model(vocabulary=50)
    model = HuggingFaceModel(few, tokenizer(), allow_embedding_resizing=True, peft_config=lora())
    train(model, tmp_path, max_duration=1)
    weights = read_checkpoint(tmp_path / LAST)["state"]["model"]
    assert {name.split(".")[-2] for name in weights} == {"default", "embed_tokens", "lm_head"}
    torch.manual_seed(1000)
    twin = HuggingFaceModel(causal_model(vocabulary=50), tokenizer(), allow_embedding_resizing=True, peft_config=lora())
    with trainer_of(twin, None, load_path=str(tmp_path / LAST), load_weights_only=True):
        assert torch.equal(logits(twin.model), logits(model.model))


def test_what_cannot_be_adapted_is_refused() -> None:
    """A config for a model that has adapters, and adapters of the input."""
    with pytest.raises(ConfigError, match="Remove peft_config"):
        HuggingFaceModel(peft.get_peft_model(causal_model(), lora()), peft_config=lora())
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ConfigError, match="PROMPT_TUNING learns a part of the input"):
        HuggingFaceModel(causal_model(), peft_config=prompt)
