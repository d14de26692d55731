"""``composerlite checkpoint convert``: folders of Hugging Face from checkpoints, and checkpoints from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from commands import answer, composerlite
from models.hf_parts import causal_model, logits, lora, tokenizer, train, trainer_of

from composerlite.models import HuggingFaceModel

pytestmark = pytest.mark.filterwarnings(
    # peft asks transformers in a way that this calls old
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, HuggingFaceModel]:
    """A folder with the checkpoints of a run in ``run``, and its model."""
    folder = tmp_path_factory.mktemp("huggingface")
    model = HuggingFaceModel(causal_model("gpt2"), tokenizer())
    train(model, folder / "run", max_duration=1)
    return folder, model


def test_convert_to_huggingface_and_back(run: tuple[Path, HuggingFaceModel]) -> None:
    """transformers loads the folder; a file and a directory made of it load strictly into a model of a run."""
    folder, model = run
    told = answer("checkpoint", "convert", "run/latest-rank0.pt", "hf", "--to", "huggingface", cwd=folder)
    assert (told["form"], told["target"]) == ("huggingface", "hf")
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")), logits(model.model))
    for source, target in (("hf", "back.pt"), ("back.pt", "back")):
        done = composerlite("checkpoint", "convert", source, target, cwd=folder)
        assert done.returncode == 0, done.stderr
        twin = HuggingFaceModel(causal_model("gpt2", seed=77), tokenizer())
        with trainer_of(twin, None, load_path=str(folder / target)):
            assert torch.equal(logits(twin.model), logits(model.model))
        again, words = HuggingFaceModel.hf_from_composer_checkpoint(folder / target)
        assert torch.equal(logits(again), logits(model.model))
        assert words.get_vocab() == tokenizer().get_vocab()


def test_convert_in_another_type(run: tuple[Path, HuggingFaceModel]) -> None:
    """--dtype is the type of the weights; a folder with files in it is replaced with --overwrite alone."""
    folder, _ = run
    command = ("checkpoint", "convert", "run/latest-rank0.pt", "half", "--to", "huggingface", "--dtype", "bfloat16")
    assert composerlite(*command, cwd=folder).returncode == 0
    assert transformers.AutoModelForCausalLM.from_pretrained(folder / "half").dtype is torch.bfloat16
    refused = composerlite(*command, cwd=folder)
    assert refused.returncode == 1
    assert "not empty" in refused.stderr
    assert composerlite(*command, "--overwrite", cwd=folder).returncode == 0


def test_what_convert_cannot_do_is_said(run: tuple[Path, HuggingFaceModel]) -> None:
    """No target, an unknown form, a type where there is none: status 2, and the message says what."""
    folder, _ = run
    for arguments, message in (
        ([], "Missing argument 'TARGET'"),
        (["a", "--to", "gguf"], "'gguf' is not one of 'huggingface', 'safetensors', 'state_dict'"),
        (["a.pt", "--dtype", "bfloat16"], "only --to huggingface"),
        (["a", "--to", "huggingface", "--dtype", "bf17"], "bf17"),
    ):
        done = composerlite("checkpoint", "convert", "run/latest-rank0.pt", *arguments, cwd=folder)
        assert done.returncode == 2, done.stderr
        assert message in done.stderr
        assert not (folder / "a").exists()


def test_adapters_there_and_back(tmp_path: Path) -> None:
    """A folder of PEFT from a checkpoint of adapters alone, and a checkpoint from such a folder that names its base."""
    first: Any = HuggingFaceModel(causal_model(), tokenizer())
    train(first, tmp_path / "first", max_duration=1)
    composerlite("checkpoint", "convert", "first/latest-rank0.pt", "base", "--to", "huggingface", cwd=tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = HuggingFaceModel(base, tokenizer(), peft_config=lora())
    train(model, tmp_path / "run", max_duration=1)
    told = answer("checkpoint", "convert", "run/latest-rank0.pt", "hf", "--to", "huggingface", cwd=tmp_path)
    assert told["form"] == "huggingface"
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.equal(logits(peft.PeftModel.from_pretrained(base, tmp_path / "hf")), logits(model.model))
    done = composerlite("checkpoint", "convert", "hf", "back.pt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    twin = HuggingFaceModel(base, tokenizer(), peft_config=lora())
    with trainer_of(twin, None, load_path=str(tmp_path / "back.pt")):
        assert torch.equal(logits(twin.model), logits(model.model))
