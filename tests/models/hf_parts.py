"""Small models of transformers, a tokenizer, and runs of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from composerlite import Trainer
from composerlite.models import HuggingFaceModel

VOCABULARY = 96
TEXTS = ("the quick brown fox jumps over the lazy dog", "hello world, hello checkpoint", "a run that is never lost")


def causal_model(kind: str = "llama", *, seed: int = 3, vocabulary: int = VOCABULARY, width: int = 32) -> Any:
    """A model that predicts the next token: of two layers, with random weights."""
    import transformers

    torch.manual_seed(seed)
    if kind == "gpt2":  # the embedding is the last layer, too
        config = transformers.GPT2Config(
            n_embd=width, n_layer=2, n_head=2, vocab_size=vocabulary, n_positions=32, bos_token_id=2, eos_token_id=3
        )
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=32,
        tie_word_embeddings=kind == "tied-llama",
    )
    return transformers.LlamaForCausalLM(config).eval()


@functools.cache
def tokenizer() -> Any:
    """One that was trained on TEXTS: 90 tokens at most."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = ["<unk>", "<pad>", "<s>", "</s>"]
    raw.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=90, special_tokens=special, show_progress=False))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
    )


class Tokens(Dataset[Any]):
    """Rows of random tokens; the numbers follow from the index."""

    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(4, 80, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids, "index": torch.tensor(index)}


def lora(**settings: Any) -> Any:
    """A config of adapters for attention."""
    import peft

    return peft.LoraConfig(
        **{"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1, **settings}
    )


def trainer_of(model: HuggingFaceModel, folder: Path | str | None, **arguments: Any) -> Trainer:
    """A run of six batches in an epoch, two epochs."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings: dict[str, Any] = {
        "train_dataloader": DataLoader(Tokens(), batch_size=4, shuffle=True),
        "optimizers": torch.optim.AdamW(trained, lr=0.01),
        "max_duration": 2,
        "seed": 11,
        "run_name": "tokens",
        "save_folder": None if folder is None else str(folder),
        "save_interval": "1ep",
        "progress_bar": False,
        **arguments,
    }
    return Trainer(model=model, **settings)


def train(model: HuggingFaceModel, folder: Path | str | None, **arguments: Any) -> None:
    """Such a run, to its end."""
    with trainer_of(model, folder, **arguments) as trainer:
        trainer.fit()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """What ``model`` answers to some tokens, in evaluation mode."""
    was_training = model.training
    ids = torch.randint(4, 80, (2, 9), generator=torch.Generator().manual_seed(0))
    answer = model.eval()(input_ids=ids).logits
    model.train(was_training)
    return answer


def same(a: Iterable[torch.Tensor], b: Iterable[torch.Tensor]) -> bool:
    """Whether they are equal, bit for bit."""
    return all(x.dtype is y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))
