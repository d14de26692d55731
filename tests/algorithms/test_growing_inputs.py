"""ProgressiveResizing and SeqLengthWarmup: inputs that grow while training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from resumed_training import LanguageModel, Sequences, new_trainer

from composerlite import Callback, Logger, State
from composerlite.algorithms import ProgressiveResizing, SeqLengthWarmup, resize_batch, set_batch_sequence_length
from composerlite.errors import TrainingError
from composerlite.loggers import InMemoryLogger

IMAGES = torch.arange(2 * 8 * 8.0).reshape(1, 2, 8, 8)


class Seen(Callback):
    """Shapes of the batches that the model gets."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def before_forward(self, state: State, logger: Logger) -> None:
        batch: Any = state.batch
        self.shapes.append(tuple((batch["input_ids"] if isinstance(batch, dict) else batch[0]).shape))


# ── images ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_resizing_takes_the_nearest_pixels() -> None:
    """Half the size is every second pixel; masks are resized in the same way if they are to be."""
    masks = IMAGES[:, 0].long()
    small, targets = resize_batch(IMAGES, masks, 0.5)
    assert torch.equal(small, IMAGES[:, :, ::2, ::2])
    assert targets is masks
    _, targets = resize_batch(IMAGES, masks, 0.5, resize_targets=True)
    assert torch.equal(targets, masks[:, ::2, ::2])
    assert targets.dtype == torch.long
    assert resize_batch(IMAGES, masks, 1.0)[0] is IMAGES


def test_cropping_takes_the_same_part_of_image_and_mask() -> None:
    """The place is drawn, and every place is possible."""
    corners = set()
    for _ in range(300):
        small, mask = resize_batch(IMAGES, IMAGES[:, 0], 0.75, mode="crop", resize_targets=True)
        assert small.shape == (1, 2, 6, 6)
        assert torch.equal(small[:, 0], mask)
        corners.add(int(mask[0, 0, 0]))
    assert corners == {row * 8 + column for row in range(3) for column in range(3)}


def test_sizes_grow_linearly_between_the_two_fractions() -> None:
    """The first size until delay_fraction, the full one from finetune_fraction before the end; multiples in between."""
    log, seen = InMemoryLogger(), Seen()
    algorithm = ProgressiveResizing(initial_scale=0.5, delay_fraction=0.25, finetune_fraction=0.25, size_increment=2)
    with new_trainer([algorithm], callbacks=[seen], loggers=[log], max_duration="12ba") as trainer:
        trainer.fit()
    assert [shape[-1] for shape in seen.shapes] == [4, 4, 4, 4, 4, 6, 6, 6, 8, 8, 8, 8]
    scales = [float(value) for _, value in log.data["progressive_resizing/scale_factor"]]
    assert scales == pytest.approx([0.5] * 4 + [0.5 + n / 12 for n in range(1, 6)] + [1.0] * 3)
    assert [value for _, value in log.data["progressive_resizing/width"]] == [shape[-1] for shape in seen.shapes]


# ── sequences ────────────────────────────────────────────────────────────────────────────────────────────────────────
TOKENS = torch.arange(10, 22).reshape(2, 6)


def test_sequences_are_cut_off() -> None:
    """Every tensor of the batch, which itself stays as it is; a batch that is short enough is given back."""
    batch = {"input_ids": TOKENS, "labels": TOKENS + 1}
    short = set_batch_sequence_length(batch, 4)
    assert torch.equal(short["input_ids"], TOKENS[:, :4])
    assert torch.equal(short["labels"], TOKENS[:, :4] + 1)
    assert batch["input_ids"] is TOKENS
    assert set_batch_sequence_length(batch, 6) is batch


def test_the_end_of_a_sequence_can_be_kept() -> None:
    """The last token that the mask shows, in each sequence; one that is short enough stays as it is."""
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
    short = set_batch_sequence_length({"input_ids": TOKENS, "attention_mask": mask}, 3, preserve_end_of_sequence=True)
    assert short["input_ids"].tolist() == [[10, 11, 15], [16, 17, 18]]
    assert short["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_sequences_can_become_more() -> None:
    """No token is lost but what is left over at the end."""
    short = set_batch_sequence_length({"input_ids": TOKENS}, 5, truncate=False)
    assert short["input_ids"].tolist() == [[10, 11, 12, 13, 14], [15, 16, 17, 18, 19]]


def test_batches_without_sequences_are_refused() -> None:
    """The error names what is in the way."""
    for batch, arguments, message in (
        ([TOKENS], {}, "the batch is a list"),
        ({"input_ids": TOKENS, "n": torch.ones(2)}, {}, r"batch\['n'\] has the shape \(2,\)"),
        ({"input_ids": TOKENS, "n": "text"}, {}, r"batch\['n'\] is a str"),
        ({"input_ids": TOKENS}, {"preserve_end_of_sequence": True}, "needs attention_mask"),
    ):
        with pytest.raises(TrainingError, match=message):
            set_batch_sequence_length(batch, 3, **arguments)  # type: ignore[arg-type]


def test_lengths_grow_in_steps() -> None:
    """Linearly over ``duration``, in steps; then the whole length."""
    seen = Seen()
    algorithm = SeqLengthWarmup(duration=0.5, min_seq_length=4, max_seq_length=16, step_size=4)
    with new_trainer(
        [algorithm], model=LanguageModel, data=Sequences, callbacks=[seen], max_duration="12ba"
    ) as trainer:
        trainer.fit()
    assert [shape[1] for shape in seen.shapes] == [4, 4, 8, 8, 12, 12, 16, 16, 16, 16, 16, 16]
