"""Models of transformers whose blocks are computed twice rather than kept."""

from __future__ import annotations

import numpy as np
import pytest
from models import hf_ranks
from models.hf_parts import causal_model, tokenizer, trainer_of

from composerlite.models import HuggingFaceModel
from composerlite.testing import run_ranks


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_activation_checkpointing_leaves_the_cache_of_keys_and_values_out(kind: str) -> None:
    """A model with use_cache=True, the default of transformers, trains as one whose activations are kept, and
    the model's configuration, which is exported, stays."""
    plain = run_ranks(hf_ranks.train_with_cache, 2, kind, {}, dist_timeout=None)
    again = run_ranks(hf_ranks.train_with_cache, 2, kind, {"activation_checkpointing": True}, dist_timeout=None)
    for expected, weights in zip(plain, again, strict=True):
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(weights[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_a_model_that_recomputes_by_itself_trains() -> None:
    """``gradient_checkpointing_enable`` of transformers with use_cache=True."""
    model = causal_model()
    model.config.use_cache = True
    model.gradient_checkpointing_enable()
    with trainer_of(HuggingFaceModel(model, tokenizer()), None) as trainer:
        trainer.fit()
        assert int(trainer.state.timestamp.batch) > 0
