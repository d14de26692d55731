"""What Composer's documentation of checkpointing shows runs with the package renamed.

Each test is a script as a reader of that documentation would write it: its arguments, paths and expected values are
those shown there. What concerns object stores is in test_composer_object_stores.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import Classifier
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Event, State, Trainer
from composerlite.algorithms import EMA
from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint import save_checkpoint
from composerlite.checkpoint.record.naming import get_save_filename
from composerlite.loggers import InMemoryLogger

CHECKPOINTS = Path("path/to/checkpoints")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """The scripts write below the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model() -> Classifier:
    return Classifier()


@pytest.fixture
def train_dataloader() -> DataLoader[Any]:
    """Two batches in an epoch."""
    return DataLoader(TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,))), batch_size=4)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_checkpoints_are_saved_with_names_of_ones_own(model: Classifier, train_dataloader: DataLoader[Any]) -> None:
    """The first example: folder, file name, name of the link."""
    trainer = Trainer(
        model=model,
        train_dataloader=train_dataloader,
        max_duration="2ep",
        save_folder="./path/to/checkpoints",
        save_filename="ep{epoch}",
        save_latest_filename="latest",
        save_overwrite=True,
    )
    trainer.fit()
    assert names(CHECKPOINTS) == ["ep1", "ep2", "latest"]
    assert (CHECKPOINTS / "latest").resolve() == (CHECKPOINTS / "ep2").resolve()
    trainer.close()


def test_by_default_names_have_epoch_batch_and_rank(model: Classifier, train_dataloader: DataLoader[Any]) -> None:
    """As the text says of file and link."""
    trainer = Trainer(model=model, train_dataloader=train_dataloader, max_duration="1ep", save_folder="checkpoints")
    trainer.fit()
    assert names(Path("checkpoints")) == ["ep1-ba2-rank0.pt", "latest-rank0.pt"]
    trainer.close()


@pytest.mark.parametrize(
    ("save_interval", "max_duration", "epochs"),
    [
        (1, "3ep", [1, 2, 3]),
        ("10ep", "25ep", [10, 20, 25]),
        ("50ba", "30ep", [25, 30]),
        (lambda state, event: state.timestamp.epoch > 50 and event == Event.EPOCH_CHECKPOINT, "53ep", [51, 52, 53]),  # pyright: ignore
    ],
    ids=["every epoch", "every 10 epochs", "every 50 batches", "every epoch after the 50th"],
)
def test_the_interval_has_many_forms(
    model: Classifier, train_dataloader: DataLoader[Any], save_interval: Any, max_duration: str, epochs: list[int]
) -> None:
    """A number, a time, a function of state and event."""
    trainer = Trainer(
        model=model,
        train_dataloader=train_dataloader,
        max_duration=max_duration,
        save_folder="checkpoints",
        save_filename="ba{batch}.pt",
        save_latest_filename=None,
        save_interval=save_interval,
        progress_bar=False,
    )
    trainer.fit()
    assert names(Path("checkpoints")) == sorted(f"ba{2 * epoch}.pt" for epoch in epochs)
    trainer.close()


def test_the_anatomy_of_a_checkpoint(model: Classifier, train_dataloader: DataLoader[Any]) -> None:
    """The session that is shown, line by line."""
    trainer = Trainer(
        model=model,
        train_dataloader=train_dataloader,
        max_duration="1ep",
        save_filename="ep{epoch}.pt",
        save_folder="./path/to/checkpoints",
        save_overwrite=True,
        save_interval="1ep",
    )
    trainer.fit()
    assert trainer.saved_checkpoints == ["./path/to/checkpoints/ep1.pt"]
    latest_checkpoint = trainer.saved_checkpoints[-1]
    state_dict = torch.load(latest_checkpoint)
    assert list(state_dict) == ["state", "rng"]
    assert list(state_dict["state"].keys()) == [
        *("model", "optimizers", "schedulers", "algorithms", "callbacks", "scaler", "timestamp", "rank_zero_seed"),
        *("train_metrics", "eval_metrics", "run_name", "dataset_state", "integrations", "metadata"),
    ]
    trainer.close()


def test_what_is_saved_is_listed() -> None:
    """The table of serialized attributes."""
    assert list(State.serialized_attributes) == [
        *("model", "optimizers", "schedulers", "algorithms", "callbacks", "scaler", "timestamp", "rank_zero_seed"),
        *("train_metrics", "eval_metrics", "run_name", "dataset_state"),
    ]


def test_training_is_resumed_from_a_path(train_dataloader: DataLoader[Any]) -> None:
    """From epoch 25, for another 65 epochs."""
    Trainer(
        model=Classifier(),
        train_dataloader=train_dataloader,
        max_duration="25ep",
        save_folder="./path/to/checkpoints",
        save_filename="ep{epoch}.pt",
        save_interval="25ep",
        progress_bar=False,
    ).fit()

    logger = InMemoryLogger()
    trainer = Trainer(
        model=Classifier(),
        train_dataloader=train_dataloader,
        max_duration="90ep",
        save_overwrite=True,
        load_path="./path/to/checkpoints/ep25.pt",
        loggers=[logger],
        progress_bar=False,
    )
    assert trainer.state.timestamp.epoch == 25
    trainer.fit()
    assert trainer.state.timestamp == "90ep"
    assert len(logger.get_timeseries("loss/train/total")["loss/train/total"]) == 65 * 2
    trainer.close()


def test_weights_are_saved_for_inference(model: Classifier, train_dataloader: DataLoader[Any]) -> None:
    """And loaded into the bare model outside of a trainer."""
    trainer = Trainer(
        model=model,
        train_dataloader=train_dataloader,
        max_duration="1ep",
        save_folder="checkpoints",
        save_weights_only=True,
        save_overwrite=True,
    )
    trainer.fit()
    state_dict = torch.load(trainer.saved_checkpoints[-1])
    assert "optimizers" not in state_dict["state"]
    bare = Classifier()
    bare.load_state_dict(state_dict["state"]["model"])
    assert torch.equal(bare.head.weight, model.head.weight)
    trainer.close()


def test_several_types_of_checkpoints_are_saved(model: Classifier, train_dataloader: DataLoader[Any]) -> None:
    """Two savers as callbacks: the newest full one, and the weights of every epoch."""
    trainer = Trainer(
        model=model,
        train_dataloader=train_dataloader,
        max_duration="10ep",
        callbacks=[
            CheckpointSaver(
                folder="full_checkpoints",
                save_interval="5ep",
                overwrite=True,
                num_checkpoints_to_keep=1,
            ),
            CheckpointSaver(
                folder="weights_only_checkpoints",
                weights_only=True,
                overwrite=True,
            ),
        ],
    )
    trainer.fit()
    assert names(Path("full_checkpoints")) == ["ep10-ba20-rank0.pt", "latest-rank0.pt"]
    assert len(names(Path("weights_only_checkpoints"))) == 11
    assert set(torch.load("weights_only_checkpoints/ep5-ba10-rank0.pt")) == {"state"}
    trainer.close()


def test_a_model_with_other_names_is_fine_tuned(train_dataloader: DataLoader[Any]) -> None:
    """Parameters of the same name are restored, others ignored; training starts afresh."""
    pretrained = Classifier()
    Trainer(
        model=pretrained,
        train_dataloader=train_dataloader,
        max_duration="50ep",
        save_folder="./path/to/checkpoints",
        save_filename="ep{epoch}.pt",
        save_interval="50ep",
        algorithms=[EMA(half_life="5ba")],
        progress_bar=False,
    ).fit()

    class WithAnotherHead(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.new_head = self.head
            del self.head

        def forward(self, batch: Any) -> torch.Tensor:
            return self.new_head(self.body(batch[0]).relu())

    finetune_model = WithAnotherHead()
    new_head = finetune_model.new_head.weight.clone()
    ft_trainer = Trainer(
        model=finetune_model,
        train_dataloader=train_dataloader,
        max_duration="10ep",
        load_path="./path/to/checkpoints/ep50.pt",
        load_weights_only=True,
        load_strict_model_weights=False,
        progress_bar=False,
    )
    saved = torch.load("./path/to/checkpoints/ep50.pt")["state"]["model"]
    assert torch.equal(finetune_model.body.weight, saved["body.weight"])
    assert torch.equal(finetune_model.new_head.weight, new_head)
    ft_trainer.fit()
    assert ft_trainer.state.timestamp.epoch == 10
    ft_trainer.close()


def test_the_state_is_saved_by_a_function(model: Classifier, train_dataloader: DataLoader[Any]) -> None:
    """``save_checkpoint(state)``: the scenario of epoch 1, batch 42, with the default name."""
    trainer = Trainer(model=model, train_dataloader=train_dataloader, max_duration="1ep")
    trainer.fit()
    trainer.state.timestamp = trainer.state.timestamp.copy(batch=42)
    assert get_save_filename(trainer.state) == "ep1-ba42-rank0"
    assert Path(save_checkpoint(trainer.state)) == Path("ep1-ba42-rank0")
    assert list(torch.load("ep1-ba42-rank0")) == ["state", "rng"]
    assert save_checkpoint(trainer.state, "{run_name}/weights-{sample}", weights_only=True).endswith("weights-8")
    trainer.close()
