"""What a checkpoint cannot hold is refused before training starts, or as soon as it is there; nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kind_ranks
import pytest
import torch
from tensor_kinds_parts import Eight, Scaled, refused
from test_tensor_kinds import Keeps, With
from tiny_training import Classifier, CrashError, Record, StopAt, trainer

from composerlite.checkpoint import save_state_dict
from composerlite.errors import ConfigError, SaveError
from composerlite.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*")


@pytest.mark.parametrize("name", list(refused()))
def test_a_model_with_such_a_buffer_does_not_start(tmp_path: Path, name: str) -> None:
    """The message says which one, of which kind, and what to do; nothing is trained, and left out it is trained."""
    record = Record()
    how: dict[str, Any] = {"save_folder": tmp_path, "save_interval": "1ba", "max_duration": "1ep"}
    with (
        trainer(model=With(refused()[name]), callbacks=[record], **how) as run,
        pytest.raises(ConfigError, match=r"'state/model/kept': a .*tensor"),
    ):
        run.fit()
    assert record.batches == []
    ignoring = ["state/model/kept"]
    with trainer(
        model=With(refused()[name]), **{**how, "save_folder": tmp_path / "2"}, save_ignore_keys=ignoring
    ) as run:
        run.fit()


@pytest.mark.parametrize("name", list(refused()))
def test_a_callback_that_keeps_one_ends_the_run_at_the_first_batch(tmp_path: Path, name: str) -> None:
    """Not an hour later, when a checkpoint is due."""
    record = Record()
    with trainer(callbacks=[record, Keeps(refused()[name])], save_folder=tmp_path, save_interval="100ba") as run:  # noqa: SIM117
        with pytest.raises(ConfigError, match=r"'state/callbacks/Keeps/itself': a .*tensor"):
            run.fit()
    assert record.batches == [1]


@pytest.mark.parametrize("name", list(refused()))
def test_functions_refuse_it(tmp_path: Path, name: str) -> None:
    """By the place in the state; nothing is left."""
    for state in ({"part": {"itself": refused()[name]}}, {"part": {"itself": (refused()[name],)}}):
        with pytest.raises(SaveError, match=r"part\.itself(/0)?'?:? .*a .*tensor"):
            save_state_dict(tmp_path / "state", state)
    assert not list(tmp_path.iterdir())


def eight_bits(folder: Path, **arguments: Any) -> Any:
    torch.manual_seed(0)
    model = Classifier(7)
    how: dict[str, Any] = {"save_folder": folder, "save_interval": "1ba", "max_duration": "2ep", "autoresume": True}
    return trainer(model=model, optimizers=Eight(model.parameters(), lr=0.05), **{**how, **arguments})


def test_an_optimizer_of_eight_bits_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    """Its state is of a class of its own, which the script allows as torch's own reader asks it to."""
    with torch.serialization.safe_globals([Scaled]):
        with eight_bits(tmp_path / "straight") as run:
            run.fit()
            expected = run.state.model.state_dict()
        with eight_bits(tmp_path / "killed", callbacks=[StopAt(5)]) as run, pytest.raises(CrashError):
            run.fit()
        with eight_bits(tmp_path / "killed") as run:
            assert int(run.state.timestamp.batch) == 5
            assert all(type(state["avg"]) is Scaled for state in run.state.optimizers[0].state.values())
            run.fit()
            for name, tensor in run.state.model.state_dict().items():
                assert torch.equal(tensor, expected[name])
        torch.load(run.saved_checkpoints[-1], weights_only=True)


def test_a_class_that_nobody_has_allowed_is_refused_at_the_first_batch(tmp_path: Path) -> None:
    """Before it is in a checkpoint from which no run could go on."""
    record = Record()
    with eight_bits(tmp_path, callbacks=[record], save_interval="100ba") as run:  # noqa: SIM117
        with pytest.raises(ConfigError, match=r"avg.*Scaled.*add_safe_globals\(\[Scaled\]\)"):
            run.fit()
    assert record.batches == [1]


def test_every_kind_is_restored_on_several_ranks(tmp_path: Path) -> None:
    """Sharded over two ranks, callbacks keep theirs, and the model those that torch can send to other ranks."""
    assert run_ranks(kind_ranks.save_and_resume, 2, tmp_path, timeout=240) == [[], []]


def test_an_optimizer_of_eight_bits_is_refused_with_shards(tmp_path: Path) -> None:
    """Parts of tensors that are no plain numbers cannot be put together again on other ranks: it is said at once."""
    for message in run_ranks(kind_ranks.eight_bits_sharded, 2, tmp_path, timeout=240):
        assert "Scaled" in message, message
        assert "distributed tensor" in message, message
