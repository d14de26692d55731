"""ProgressiveResizing and SeqLengthWarmup: inputs that grow while training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_training import assert_resumes_bit_for_bit, new_trainer
from torch import Tensor, nn
from torch.utils.data import Dataset

from composerlite import Callback, ComposerModel, Logger, State
from composerlite.algorithms import ProgressiveResizing, SeqLengthWarmup, resize_batch, set_batch_sequence_length
from composerlite.errors import ConfigError, TrainingError
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


@pytest.mark.parametrize("mode", ["resize", "crop"])
def test_a_resized_run_resumes_bit_for_bit(mode: str, tmp_path: Path) -> None:
    """The sizes after the resume are those that would have been, and so are the places of crops."""
    assert_resumes_bit_for_bit(
        lambda: [ProgressiveResizing(mode, delay_fraction=0.2, finetune_fraction=0.2, size_increment=1)],
        tmp_path,
        device_train_microbatch_size=3,
    )


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
        ({"input_ids": TOKENS}, {"preserve_end_of_sequence": True}, "no attention_mask"),
    ):
        with pytest.raises(TrainingError, match=message):
            set_batch_sequence_length(batch, 3, **arguments)  # type: ignore[arg-type]


class Sequences(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.arange(index, index + 16) % 11, "labels": torch.arange(index + 1, index + 17) % 11}


class LanguageModel(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Embedding(11, 8), nn.Dropout(0.1), nn.Linear(8, 11))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net(batch["input_ids"])

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def test_lengths_grow_in_steps() -> None:
    """Linearly over ``duration``, in steps; then the whole length."""
    seen = Seen()
    algorithm = SeqLengthWarmup(duration=0.5, min_seq_length=4, max_seq_length=16, step_size=4)
    with new_trainer(
        [algorithm], model=LanguageModel, data=Sequences, callbacks=[seen], max_duration="12ba"
    ) as trainer:
        trainer.fit()
    assert [shape[1] for shape in seen.shapes] == [4, 4, 8, 8, 12, 12, 16, 16, 16, 16, 16, 16]


@pytest.mark.parametrize("truncate", [True, False])
def test_a_warmed_up_run_resumes_bit_for_bit(truncate: bool, tmp_path: Path) -> None:
    """The lengths after the resume are those that would have been."""
    assert_resumes_bit_for_bit(
        lambda: [SeqLengthWarmup(duration=0.9, min_seq_length=3, max_seq_length=16, step_size=1, truncate=truncate)],
        tmp_path,
        model=LanguageModel,
        data=Sequences,
        device_train_microbatch_size=3,
    )


def test_bad_arguments_are_refused() -> None:
    """Values that mean nothing; modes that do not exist."""
    for make, message in (
        (lambda: ProgressiveResizing("reisze"), "Did you mean 'resize'"),
        (lambda: ProgressiveResizing(initial_scale=2.0), r"initial_scale=2\.0"),
        (lambda: ProgressiveResizing(delay_fraction=0.7, finetune_fraction=0.7), "more than the whole of training"),
        (lambda: ProgressiveResizing(size_increment=0), "size_increment=0"),
        (lambda: resize_batch(IMAGES, torch.ones(1), 0.5, resize_targets=True), "no height and width"),
        (lambda: SeqLengthWarmup(duration=2.0), r"duration=2\.0"),
        (lambda: SeqLengthWarmup(min_seq_length=9, max_seq_length=8), "not less than the first"),
        (lambda: SeqLengthWarmup(step_size=0), "step_size=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()
