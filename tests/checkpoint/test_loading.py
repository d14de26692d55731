"""Loading restores exactly what was saved, or says what is wrong before anything is changed."""

from __future__ import annotations

import logging
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from parts import Remember, new_state, save_batch, tree, value_in
from sealed_files import damage, remove_record

from composerlite.checkpoint import Catalog, IgnoreKeys, load_checkpoint, read_checkpoint, save_checkpoint
from composerlite.checkpoint.format import TAIL_START
from composerlite.checkpoint.save.form import SaveRequest
from composerlite.checkpoint.save.save import save
from composerlite.core import State
from composerlite.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)


def weights(state: State) -> float:
    return value_in({"state": {"model": state.model.state_dict()}})


# ── integrity ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_flipped_bit_anywhere_is_detected(tmp_path: Path) -> None:
    """Fifty places: header, pickle, tensors, checksums, padding, directory, record. The state stays as it was."""
    path = save_batch(tmp_path, 3)
    whole = path.read_bytes()
    state = new_state(value=0.25)
    record = whole.rindex(TAIL_START)
    places = random.Random(0).sample(range(len(whole)), 42)
    for place in [0, 1, len(whole) // 2, record - 1, record, record + 9, len(whole) - 60, len(whole) - 1, *places]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        said = "differ from the saved bytes" if place < record else r"record of .*ba3\.pt' cannot be read"
        with pytest.raises(CorruptCheckpointError, match=said):
            load_checkpoint(path, state)
    assert weights(state) == 0.25
    path.write_bytes(whole)
    load_checkpoint(path, state)
    assert weights(state) == 3


def test_a_damaged_checkpoint_is_not_loaded_by_any_way(tmp_path: Path) -> None:
    """Through the link, for its weights alone, or with trust: what was damaged is not what was saved."""
    path = save_batch(tmp_path, 3)
    path.write_bytes(path.read_bytes() + b"more")
    for way in (path, tmp_path / "latest.pt"):
        with pytest.raises(CorruptCheckpointError):
            load_checkpoint(way, new_state())
        with pytest.raises(CorruptCheckpointError):
            load_checkpoint(way, new_state(), load_weights_only=True, trust_checkpoint=True)


def test_a_damaged_record_stops_loading(tmp_path: Path) -> None:
    """A damaged record is not taken for a missing one."""
    path = save_batch(tmp_path, 3)
    damage(path, "tail")
    torch.load(path, weights_only=True)  # its contents are good
    with pytest.raises(CorruptCheckpointError, match=r"record of .*ba3\.pt' cannot be read"):
        read_checkpoint(path)


def test_a_file_without_a_record_is_loaded_and_called_unverified(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As those of Composer and plain torch are."""
    path = save_batch(tmp_path, 3)
    elsewhere = remove_record(path).rename(tmp_path / "copy.pt")
    state = new_state()
    load_checkpoint(elsewhere, state)
    assert weights(state) == 3
    assert "copy.pt has no record: loading it unverified" in caplog.text


def test_a_verified_file_is_not_called_unverified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the folder, in a subfolder, by a link, and as a copy under another name."""
    caplog.set_level(logging.INFO)
    for template in ("ba{batch}.pt", "sub/deeper/ba{batch}.pt"):
        save_batch(tmp_path / "runs", 3, template=template, latest="links/latest.pt")
        (tmp_path / "outside.pt").unlink(missing_ok=True)
        (tmp_path / "outside.pt").symlink_to(tmp_path / "runs" / "links" / "latest.pt")
        for path in (tmp_path / "runs" / template.format(batch=3), tmp_path / "outside.pt"):
            assert value_in(read_checkpoint(path)) == 3
        copy = shutil.copy(path, tmp_path / "copy.pt")
        assert value_in(read_checkpoint(copy)) == 3
    assert "unverified" not in caplog.text


# ── finding the file ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_latest_link_is_followed(tmp_path: Path) -> None:
    """It is the newest checkpoint."""
    for batch in (1, 2):
        save_batch(tmp_path, batch)
    state = new_state()
    load_checkpoint(tmp_path / "latest.pt", state)
    assert (weights(state), int(state.timestamp.batch)) == (2, 2)


def test_variables_in_a_path_are_filled_in(tmp_path: Path) -> None:
    """Those of the run and of ranks."""
    save_batch(tmp_path / "run", 1, template="rank{rank}.pt")
    state = new_state()
    load_checkpoint(f"{tmp_path}/{{run_name}}/rank{{rank}}.pt", state)
    assert weights(state) == 1
    with pytest.raises(ConfigError, match=r"\{epoch\} is not a variable"):
        load_checkpoint(f"{tmp_path}/ep{{epoch}}.pt", state)


def test_a_missing_checkpoint_is_said_with_the_way_to_list_what_is_there(tmp_path: Path) -> None:
    """A typo in the path, a folder of checkpoints, and a missing folder."""
    save_batch(tmp_path, 1)
    for path in (tmp_path / "ba3.pt", tmp_path, tmp_path / "none" / "ba1.pt"):
        found = rf"no checkpoint file '{re.escape(str(path))}'\. 'composerlite checkpoint ls' lists"
        with pytest.raises(CheckpointNotFoundError, match=found):
            load_checkpoint(path, new_state())


def test_a_link_to_nothing_is_a_missing_checkpoint(tmp_path: Path) -> None:
    """Its target was deleted by hand."""
    save_batch(tmp_path, 1).unlink()
    with pytest.raises(CheckpointNotFoundError):
        load_checkpoint(tmp_path / "latest.pt", new_state())


# ── what is restored ─────────────────────────────────────────────────────────────────────────────────────────────────
def saved(folder: Path, *, weights_only: bool = False, ignore_keys: IgnoreKeys = None) -> Path:
    """A checkpoint of batch 5, whose optimizer has stepped and whose callback remembers something."""
    state = new_state(5, callbacks=[Remember("something")], value=2.0)
    state.model(torch.zeros(1, 2)).sum().backward()
    state.optimizers[0].step()
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.fill_(2.0)
    return save(
        SaveRequest(
            state=state,
            catalog=Catalog(folder),
            template="saved.pt",
            weights_only=weights_only,
            ignore_keys=ignore_keys,
        )
    )


def fresh() -> tuple[State, Remember]:
    callback = Remember("nothing")
    return new_state(callbacks=[callback]), callback


def has_momentum(state: State) -> bool:
    return bool(state.optimizers[0].state)


def test_a_full_checkpoint_restores_everything(tmp_path: Path) -> None:
    """Weights, optimizer, callbacks, time; and it gives the generators' states, one per rank, for later."""
    path = saved(tmp_path)
    before = torch.get_rng_state()
    state, callback = fresh()
    rng = load_checkpoint(path, state)
    assert (weights(state), int(state.timestamp.batch), callback.what) == (2, 5, "something")
    assert has_momentum(state)
    assert rng is not None
    assert len(rng) == 1
    assert torch.equal(rng[0]["torch"], before)


@pytest.mark.parametrize(("save_weights_only", "load_weights_only"), [(True, False), (False, True), (True, True)])
def test_weights_alone_restore_the_model_and_nothing_else(
    tmp_path: Path, save_weights_only: bool, load_weights_only: bool
) -> None:
    """Whether they were saved alone or are loaded alone: training starts afresh from them."""
    path = saved(tmp_path, weights_only=save_weights_only)
    state, callback = fresh()
    assert load_checkpoint(path, state, load_weights_only=load_weights_only) is None
    assert (weights(state), int(state.timestamp.batch), callback.what) == (2, 0, "nothing")
    assert not has_momentum(state)


def ignore_time(contents: dict[str, Any]) -> None:
    del contents["state"]["timestamp"]


Restored = tuple[float, int, str, bool]  # weights, batch, what the callback remembers, whether there is momentum
PARTS: list[tuple[IgnoreKeys, Restored]] = [
    (["state/model"], (0, 5, "something", True)),
    (["state/model/*"], (0, 5, "something", True)),
    (["state/optimizers"], (2, 5, "something", False)),
    (["state/optimizers/*"], (2, 5, "something", False)),
    (["state/callbacks/Remember"], (2, 5, "nothing", True)),
    (["state/timestamp"], (2, 0, "something", True)),
    (ignore_time, (2, 0, "something", True)),
    (["state/timestamp", "state/optimizers"], (2, 0, "something", False)),
]
ALL: list[tuple[IgnoreKeys, Restored]] = [([glob], (0, 0, "nothing", False)) for glob in ("state", "state/*", "*")]


@pytest.mark.parametrize(
    ("when", "ignore", "restored"),
    [*(("saving", *case) for case in PARTS), *(("loading", *case) for case in [*PARTS, *ALL])],
)
def test_ignored_keys_stay_as_they_are(tmp_path: Path, when: str, ignore: IgnoreKeys, restored: Restored) -> None:
    """Everything else is restored. What was left out when saving counts as what is left out when loading."""
    path = saved(tmp_path, ignore_keys=ignore if when == "saving" else None)
    state, callback = fresh()
    load_checkpoint(path, state, ignore_keys=ignore if when == "loading" else None)
    assert (weights(state), int(state.timestamp.batch), callback.what, has_momentum(state)) == restored


def test_ignoring_the_generators_leaves_them_alone(tmp_path: Path) -> None:
    """No states come back that could be applied."""
    state, _ = fresh()
    assert load_checkpoint(saved(tmp_path), state, ignore_keys=["rng"]) is None
    assert int(state.timestamp.batch) == 5


@pytest.mark.parametrize("ignore", ["state/model", 5])
def test_what_are_no_globs_is_refused(tmp_path: Path, ignore: Any) -> None:
    """Before anything is restored."""
    state, _ = fresh()
    with pytest.raises(ConfigError, match="load_ignore_keys"):
        load_checkpoint(saved(tmp_path), state, ignore_keys=ignore)
    assert weights(state) == 0


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_model_that_does_not_fit_is_refused_whole(tmp_path: Path, weights_only: bool) -> None:
    """Names missing on both sides and shapes in one message; not one weight is changed."""
    path = saved(tmp_path)
    state = new_state(width=3)
    state.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    state.model.register_parameter("bias", None)
    with pytest.raises(IncompatibleCheckpointError) as e:
        load_checkpoint(path, state, load_weights_only=weights_only)
    for part in ("extra", "bias", "weight: (2, 2) in the checkpoint, (2, 3) in the model"):
        assert part in str(e.value)
    assert weights(state) == 0


@pytest.mark.parametrize("weights_only", [False, True])
def test_strictness_is_honoured_on_every_load(tmp_path: Path, weights_only: bool) -> None:
    """Of a full checkpoint as of weights alone: strict refuses other names, not strict loads those that agree."""
    path = saved(tmp_path)
    state = new_state()
    state.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    arguments: dict[str, Any] = {"load_weights_only": weights_only, "ignore_keys": ["state/optimizers"]}
    with pytest.raises(IncompatibleCheckpointError, match="extra"):
        load_checkpoint(path, state, **arguments)
    load_checkpoint(path, state, strict_model_weights=False, **arguments)
    assert state.model.get_parameter("weight").unique().tolist() == [2.0]
    assert state.model.get_parameter("extra").item() == 0


def test_loading_changes_no_file(tmp_path: Path) -> None:
    """It only reads."""
    path = saved(tmp_path)
    before = tree(tmp_path)
    load_checkpoint(path, new_state())
    assert tree(tmp_path) == before


def test_a_checkpoint_by_name_alone_is_loaded_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``save_checkpoint`` in the current folder, with Composer's default name."""
    monkeypatch.chdir(tmp_path)
    path = save_checkpoint(new_state(4, value=1.0))
    assert path == "ep0-ba4-rank0"
    assert value_in(read_checkpoint(path)) == 1
