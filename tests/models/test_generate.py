"""Generate: what a language model writes while it is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from models.hf_parts import causal_model, tokenizer, trainer_of

from composerlite.callbacks import Generate
from composerlite.errors import ConfigError
from composerlite.loggers import LoggerDestination
from composerlite.models import HuggingFaceModel

PROMPTS = ["hello", "the quick brown fox"]


class Tables(LoggerDestination):
    """The tables that are logged, by batch."""

    def __init__(self) -> None:
        self.tables: dict[int, list[list[Any]]] = {}

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        assert (columns, name) == (["prompt", "generation"], "generations")
        assert step is not None
        self.tables[step] = rows


def run(*callbacks: Any, **arguments: Any) -> tuple[Tables, dict[str, torch.Tensor]]:
    """The tables, and the weights at the end."""
    tables = Tables()
    model = HuggingFaceModel(causal_model("gpt2"), tokenizer(), use_logits=True)
    with trainer_of(model, None, callbacks=list(callbacks), loggers=[tables], **arguments) as trainer:
        trainer.fit()
        assert trainer.state.model.training
        return tables, dict(trainer.state.model.state_dict())


@pytest.mark.parametrize("batch_size", [None, 1])
def test_prompts_are_continued_at_intervals_and_at_the_end(batch_size: int | None) -> None:
    """One row for each prompt, in their order, whatever the number that is continued at once."""
    tables, _ = run(Generate(PROMPTS, "2ba", batch_size=batch_size, max_new_tokens=4, do_sample=False))
    assert len(tables.tables) >= 2
    assert all(step % 2 == 0 for step in list(tables.tables)[:-1])
    for rows in tables.tables.values():
        assert [row[0] for row in rows] == PROMPTS
        assert all(isinstance(row[1], str) and row[0] not in row[1] for row in rows)


def test_training_is_the_same_with_and_without_it() -> None:
    """Also where texts are drawn at random: to the last bit."""
    tables, weights = run(Generate(PROMPTS, "1ba", max_new_tokens=4, do_sample=True))
    _, plain = run()
    assert tables.tables
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


def test_the_tokenizer_is_as_it_was() -> None:
    """Prompts are padded on the left, and nothing else is."""
    own = tokenizer()
    side, pad = own.padding_side, own.pad_token
    model = HuggingFaceModel(causal_model("gpt2"), own, use_logits=True)
    with trainer_of(model, None, callbacks=[Generate(PROMPTS, "1ba", max_new_tokens=2)]) as trainer:
        trainer.fit()
    assert (own.padding_side, own.pad_token) == (side, pad)


def test_what_cannot_generate_is_refused() -> None:
    """Before training: a model without a tokenizer, and prompts that are none."""
    model = HuggingFaceModel(causal_model("gpt2"), use_logits=True)
    with pytest.raises(ConfigError, match="has no tokenizer, or no generate"):
        trainer_of(model, None, callbacks=[Generate(PROMPTS, "1ba")])
    with pytest.raises(ConfigError, match="expected a list of texts"):
        Generate("hello", "1ba")
    with pytest.raises(ConfigError, match="batch_size=0"):
        Generate(PROMPTS, "1ba", batch_size=0)
