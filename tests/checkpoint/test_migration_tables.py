"""The tables of docs/migration: each cell is what a load finds, or names the test that shows it."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_composer_files import resumed
from test_other_systems import DATA, SAVED, WHOLE, bin_folder, halves, of_deepspeed, plain_contents, trainer, weights

from composerlite.checkpoint.tools.reading import whole_contents
from composerlite.checkpoint.tools.surveying import pointed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
PAGES = Path(__file__).parents[2] / "docs/migration"
TESTS = Path(__file__).parent
YES, NO, STEP, SAME_CLASS, MAP = "yes", "", "step", "of the same class", "with `load_key_map`"

ROWS: dict[str, tuple[str, ...]] = {
    "Composer": ("composer/ep1-ba6-rank0.pt", "composer/packed.tar.bz2"),
    "OLMo-core 3.0 `step…`": ("olmo_core/step6",),
    "OLMo-core 3.0 `model_and_optim`": ("olmo_core/step6/model_and_optim", "olmo_core/flat"),
    "Lightning": ("lightning/step6.ckpt",),
    "torch, a dict": ("torch/checkpoint.pt",),
    "torch, a state dict": ("torch/weights.pt", "olmo_core/unsharded/model.pt"),
    "transformers": ("transformers/checkpoint-6",),
    "accelerate": ("accelerate/state",),
    "DeepSpeed": ("deepspeed/zero0", "deepspeed/zero1", "deepspeed/zero2", "deepspeed/zero3"),
    "torchtitan": ("dcp/torchtitan",),
    "DCP, a model and an optimizer": ("dcp/nested",),
    "safetensors": ("safetensors/model.safetensors", "safetensors/sharded", "dcp/safetensors"),
    "`pytorch_model.bin`": ("made/one_file", "made/folder"),
}
"""Rows of the table of ``load_path`` by how they begin, and the checkpoints that show them."""

SYSTEM = "test_other_systems.py::test_a_run_continues_as_the_system_itself"
NAMED: dict[tuple[str, str], str] = {
    ("Composer", "weights"): "test_composer_files.py::test_a_directory_of_composers_fsdp_continues",
    ("Composer", "not restored"): "test_composer_files.py::test_what_cannot_be_matched_is_listed",
    (
        "safetensors: a file, a folder with an index",
        "*",
    ): "test_going_out.py::test_weights_go_from_any_form_to_any_other",
    ("a state dict for", "*"): "test_going_out.py::test_weights_go_from_any_form_to_any_other",
    ("weights, optimizer, schedulers", "*"): "test_composer_files.py::test_a_run_of_composer_continues_exactly",
    ("epoch, batch, sample, token", "*"): "test_composer_files.py::test_a_run_of_composer_continues_exactly",
    ("random generators, seed", "*"): "test_composer_files.py::test_a_run_of_composer_continues_exactly",
    ("position in the data", "*"): "test_composer_files.py::test_a_run_of_composer_continues_exactly",
    ("state of callbacks", "*"): "test_composer_files.py::test_callbacks_are_matched_by_the_name_of_their_class",
    ("averages of", "*"): "test_composer_files.py::test_the_average_of_ema_is_restored",
    ("objects of Composer's", "*"): (
        "test_composer_files.py::test_classes_of_composer_are_taken_by_name_and_never_imported"
    ),
}
"""Tests of cells that a load does not show: those of Composer, and of what is written for others."""


def table(page: str, header: str) -> dict[str, dict[str, str]]:
    """Cells of the table below ``header``, by the first cell of the row and the head of the column."""
    lines = (PAGES / page).read_text().splitlines()
    start = lines.index(next(line for line in lines if line.startswith(header)))
    columns = [cell.strip() for cell in lines[start].strip("|").split("|")]
    rows: dict[str, dict[str, str]] = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[first] = dict(zip(columns[1:], cells, strict=True))
    return rows


IN = table("README.md", "| checkpoint |")


def _path(name: str, folder: Path) -> Path:
    """The checkpoint ``name``, which is made in ``folder`` where no fixture is one."""
    if name == "made/one_file":
        (folder / "one").mkdir()
        torch.save(weights(), folder / "one/pytorch_model.bin")
        return folder / "one"
    if name == "made/folder":
        return bin_folder(folder / "several", halves())
    return DATA / name


@pytest.mark.parametrize("row", IN)
def test_a_load_finds_what_the_table_says(row: str, tmp_path: Path) -> None:
    """Weights, optimizer, scheduler, epoch and step, random state: there where the cell says so, and not elsewhere."""
    cells = IN[row]
    (names,) = (names for begins, names in ROWS.items() if row.startswith(begins))
    for name in names:
        if name.startswith("composer"):
            with resumed(DATA / name) as run:
                found = _found(run)
        else:
            arguments = {key: value for key, value in _arguments(name).items() if key != "load_key_map"}
            with trainer(_path(name, tmp_path), **arguments) as run:
                found = _found(run)
                if not name.startswith(("transformers", "olmo")):  # other rates, other weights
                    saved = of_deepspeed() if name.startswith("deepspeed") else weights()
                    assert all(torch.equal(run.state.model.state_dict()[key], one) for key, one in saved.items())
        has_scheduler = cells["scheduler"].startswith(("yes", SAME_CLASS))
        by_map = cells["epoch, step"] == MAP
        assert cells["weights"].startswith("yes")
        assert found == {
            "optimizer": cells["optimizer"] not in ("", "no"),
            "scheduler": has_scheduler,
            "batch": SAVED if cells["epoch, step"] and not by_map else 0,
            "generators": cells["random state"] == "yes",
        }, name


@pytest.mark.parametrize("row", [row for row, cells in IN.items() if cells["epoch, step"] == MAP])
def test_a_key_map_tells_the_step(row: str, tmp_path: Path) -> None:
    """Where the table says that it is needed."""
    (names,) = (names for begins, names in ROWS.items() if row.startswith(begins))
    key_map = {"model": "model", "optimizer": "optimizer", "batch": "step"}
    key_map |= _arguments(names[0]).get("load_key_map", {})
    path = _with(names[0], tmp_path, step=SAVED) if names[0].startswith("dcp") else _path(names[0], tmp_path)
    with trainer(path, **_arguments(names[0]) | {"load_key_map": key_map}) as run:
        assert int(run.state.timestamp.batch) == SAVED


@pytest.mark.parametrize("row", [row for row, cells in IN.items() if cells["scheduler"] == SAME_CLASS])
def test_a_scheduler_of_another_class_is_not_restored(
    row: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It begins anew, which is logged."""
    (names,) = (names for begins, names in ROWS.items() if row.startswith(begins))
    arguments = {key: value for key, value in _arguments(names[0]).items() if key != "load_key_map"}
    arguments["scheduler"] = lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    with caplog.at_level("INFO", logger="composerlite"), trainer(_path(names[0], tmp_path), **arguments) as run:
        assert run.state.schedulers[0].last_epoch == 0
    assert "the scheduler, which is of another kind than that of the run" in caplog.text


def _arguments(name: str) -> dict[str, Any]:
    return next((dict(arguments) for path, arguments in WHOLE.values() if path == name), {})


def _found(run: Any) -> dict[str, Any]:
    state = run.state
    return {
        "optimizer": bool(state.optimizers[0].state),
        "scheduler": state.schedulers[0].last_epoch == SAVED,
        "batch": int(state.timestamp.batch),
        "generators": bool(state.resumed.generators),
    }


def _lightning(folder: Path) -> Path:
    contents = torch.load(DATA / "lightning/step6.ckpt", weights_only=False)
    contents["lr_schedulers"].append(contents["lr_schedulers"][0])
    torch.save({**contents, "callbacks": {"ModelCheckpoint{}": {"best": 1.0}}}, folder / "other.ckpt")
    return folder / "other.ckpt"


def _olmo_core(folder: Path) -> Path:
    shutil.copytree(DATA / "olmo_core/step6", folder / "step6")
    train = torch.load(folder / "step6/train/rank0.pt", weights_only=False)
    train["data_loader"]["dataset_fingerprint"] = "x"
    torch.save(train, folder / "step6/train/rank0.pt")
    return folder / "step6"


def _accelerate(folder: Path) -> Path:
    shutil.copytree(DATA / "accelerate/state", folder / "state")
    torch.save({"scale": 2.0}, folder / "state/scaler.pt")
    (folder / "state/custom_checkpoint_0.pkl").write_bytes(b"cos\nabort\n(tR.")
    return folder / "state"


def _deepspeed(folder: Path) -> Path:
    shutil.copytree(DATA / "deepspeed/zero1", folder / "run")
    path = folder / "run/global_step6/mp_rank_00_model_states.pt"
    torch.save({**plain_contents(path), "client": {"at": 1}}, path)
    return folder / "run"


def _with(name: str, folder: Path, **more: Any) -> Path:
    """A directory of DCP with more in it."""
    with pointed(str(DATA / name)) as target:
        contents = whole_contents(target.the_one())
    dcp.save({**contents, **more}, checkpoint_id=folder / "more", no_dist=True)
    return folder / "more"


LEFT: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "OLMo-core 3.0 `step…`": (_olmo_core, ("train/callbacks",)),
    "Lightning": (_lightning, ("callbacks", "loops", "hyper_parameters", "lr_schedulers[1:]")),
    "torch, a dict": (lambda _: DATA / "torch/checkpoint.pt", ("epoch", "step")),
    "transformers": (lambda _: DATA / "transformers/checkpoint-6", ("log_history in trainer_state.json",)),
    "accelerate": (_accelerate, ("scaler.pt",)),
    "DeepSpeed": (_deepspeed, ("client",)),
    "torchtitan": (lambda folder: _with("dcp/torchtitan", folder, dataloader={"at": 6}), ("dataloader",)),
    "DCP, a model and an optimizer": (lambda folder: _with("dcp/nested", folder, step=6), ("step",)),
}
"""Of each row a checkpoint that has what its last cell names, and the words for that in the log.

What a system keeps in files of its own that are not named here is not opened: ``training_args.bin``, custom objects.
"""


@pytest.mark.parametrize("row", [row for row, cells in IN.items() if cells["not restored"]])
def test_what_is_not_restored_is_logged(row: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log lists it, and nothing of it runs."""
    if row.startswith("Composer"):
        pytest.skip("its own tests show it: NAMED")
    ((make, words),) = (value for begins, value in LEFT.items() if row.startswith(begins))
    path = make(tmp_path)
    arguments = _arguments(str(path.relative_to(DATA)) if path.is_relative_to(DATA) else f"made/{path.name}")
    arguments.pop("load_key_map", None)
    with caplog.at_level("INFO", logger="composerlite"), trainer(path, **arguments) as run:
        assert run.state.dataset_state is None or not any(run.state.dataset_state.values())
    (line,) = (line for line in caplog.text.splitlines() if "Loaded: " in line)
    left = line.partition(". Not loaded: ")[2].split(", ")
    assert set(words) <= set(left), line


def test_every_cell_has_a_test() -> None:
    """Every row and column of the tables is checked above or names a test that exists."""
    for row in IN:
        assert len([begins for begins in ROWS if row.startswith(begins)]) == 1, row
    assert {column for cells in IN.values() for column in cells} == {
        *("weights", "optimizer", "scheduler", "epoch, step", "random state", "not restored")
    }
    for page, header in (("README.md", "| written |"), ("composer.md", "| in the file |")):
        for row, cells in table(page, header).items():
            for column, cell in cells.items():
                named = [key for key in NAMED if row.startswith(key[0]) and key[1] in ("*", column)]
                assert named or not cell or column == "not written", (row, column)
    for test in {*NAMED.values(), SYSTEM}:
        file, _, name = test.partition("::")
        functions = [one.name for one in ast.parse((TESTS / file).read_text()).body if isinstance(one, ast.FunctionDef)]
        assert name in functions, test
