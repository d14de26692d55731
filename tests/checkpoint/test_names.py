"""Names of checkpoints: every variable, and what a folder holds that a run would overwrite later."""

from __future__ import annotations

from pathlib import Path

import pytest
from parts import new_state

from composerlite.checkpoint.record.naming import (
    PartialFilePath,
    check_template,
    format_name_with_dist_and_time,
    get_save_filename,
    names_ahead,
)
from composerlite.checkpoint.save.options import SaveOptions
from composerlite.checkpoint.save.run_folder import RunFolder
from composerlite.core import Timestamp
from composerlite.errors import CheckpointExistsError, ConfigError

RANKS = {"rank": 5, "local_rank": 1, "world_size": 8, "local_world_size": 4, "node_rank": 2}
COUNTS = {
    "epoch": 3,
    "batch": 42,
    "batch_in_epoch": 2,
    "sample": 420,
    "sample_in_epoch": 20,
    "token": 4200,
    "token_in_epoch": 200,
}
CLOCKS = {"total_wct": 90.75, "epoch_wct": 5.25, "batch_wct": 0.5}
NOW = Timestamp(**COUNTS, **CLOCKS)
VALUES = {"run_name": "my-run", **RANKS, **COUNTS, **CLOCKS}


@pytest.fixture
def _ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a launcher sets them."""
    for name, value in RANKS.items():
        monkeypatch.setenv(name.upper() if name != "node_rank" else "NODE_RANK", str(value))


@pytest.mark.usefixtures("_ranks")
@pytest.mark.parametrize(("variable", "value"), VALUES.items())
def test_every_variable_is_filled_in(variable: str, value: object) -> None:
    """Ranks, counts, and clocks in seconds; twice where it is there twice, with a format of one's own too."""
    template = f"a{{{variable}}}-{{{variable}}}.pt"
    assert format_name_with_dist_and_time(template, "my-run", NOW) == f"a{value}-{value}.pt"
    assert format_name_with_dist_and_time(f"{{{variable}:>6}}", "my-run", NOW) == f"{value:>6}"


def test_a_state_has_a_name() -> None:
    """Composer's function and its class give the same name, with Composer's default."""
    state = new_state(batch=7)
    assert get_save_filename(state) == "ep0-ba7-rank0"
    assert get_save_filename(state, "{run_name}/ba{batch}.pt") == "run/ba7.pt"
    assert PartialFilePath("ba{batch}.pt", folder="{run_name}/checkpoints").format(state) == "run/checkpoints/ba7.pt"


def test_an_unknown_variable_lists_the_known_ones() -> None:
    """The message names the argument, the variable, the nearest one and all others."""
    with pytest.raises(ConfigError) as e:
        check_template("ep{epcoh}.pt", argument="save_filename")
    message = str(e.value)
    assert "save_filename='ep{epcoh}.pt'" in message
    assert "Did you mean 'epoch'?" in message
    assert [name for name in VALUES if name not in message] == []


@pytest.mark.parametrize(
    "template",
    [
        "ep{epoch",  # a brace that is not closed
        "ep}.pt",
        "ep{}.pt",
        "ep{0}.pt",
        "ep{epoch.real}.pt",
        "ep{epoch:nonsense}.pt",  # formats nothing
        "ep{run_name:d}.pt",
        "../ep{epoch}.pt",
        "sub/../../ep{epoch}.pt",
        "/tmp/ep{epoch}.pt",
        "",
        "ep{epoch}/",
        "ep{epoch}.zip",
        "ep{epoch}.pt.foo",
        "ep{epoch}.tar.zst",
    ],
)
def test_names_that_cannot_be_used_are_refused_at_once(template: str) -> None:
    """A name that cannot be formatted, leaves the folder, is no file or asks for a format there is not: an error."""
    with pytest.raises(ConfigError, match="save_filename="):
        check_template(template, argument="save_filename")


def conflict(name: str, template: str, now: Timestamp, run_name: str = "my-run") -> bool:
    """Whether a file ``name`` keeps a run that stands at ``now`` from starting."""
    return names_ahead([name], template, run_name, now) == [name]


def later(**counts: float) -> Timestamp:
    return NOW.copy(**counts)


@pytest.mark.parametrize(
    ("template", "name", "expected"),
    [
        ("ep{epoch}.pt", "ep4.pt", True),
        ("ep{epoch}.pt", "ep3.pt", False),
        ("ep{epoch}.pt", "ep4xpt", False),  # a dot is a dot
        ("ep{epoch}.pt", "ep4.pt.bak", False),
        ("ep{epoch:03d}.pt", "ep004.pt", True),
        ("{run_name}-ep{epoch}.pt", "my-run-ep4.pt", True),
        ("{run_name}-ep{epoch}.pt", "another-ep4.pt", False),
        ("{run_name}/ep{epoch}.pt", "my-run/ep4.pt", True),
        ("sub/ep{epoch}/ba{batch}.pt", "sub/ep3/ba43.pt", True),
        ("sub/ep{epoch}/ba{batch}.pt", "ep3/ba43.pt", False),
        ("ep{epoch}-{total_wct}.pt", "ep4-91.25.pt", True),
        ("ep{epoch}-{total_wct}.pt", "ep3-91.0.pt", True),
        ("ep{epoch}-{total_wct}.pt", "ep2-9000.0.pt", False),
        ("{total_wct}.pt", "90.75.pt", False),
        ("{total_wct}.pt", "91.0.pt", True),
        ("{total_wct:.0f}.pt", "91.pt", False),  # the run's own name, rounded
        ("{total_wct:.0f}.pt", "92.pt", True),
        ("ep{epoch}-{batch_wct}.pt", "ep4-5e-05.pt", True),  # how python writes a fast batch
        ("ep{epoch}-ba{batch_in_epoch}.pt", "ep3-ba3.pt", True),
        ("ep{epoch}-ba{batch_in_epoch}.pt", "ep3-ba2.pt", False),
        ("ep{epoch}-ba{batch_in_epoch}.pt", "ep2-ba9.pt", False),
        ("ba{batch}-{batch_in_epoch}.pt", "ba40-14.pt", False),  # of an epoch before
        ("ep{epoch}-rank{rank}.pt", "ep4-rank7.pt", True),  # other ranks are this run as well
        ("{batch}-{batch}.pt", "43-43.pt", True),
        ("{batch:03d}/{batch}.pt", "043/43.pt", True),
        ("final.pt", "final.pt", False),  # no time in it: nothing is known before the save
    ],
)
def test_files_ahead_of_the_run_are_in_conflict(template: str, name: str, expected: bool) -> None:
    """Only names that this run will give, and not yet has given."""
    assert conflict(name, template, NOW) == expected


def test_the_error_says_what_is_there_and_what_to_do(tmp_path: Path) -> None:
    """The file, the folder, where the run stands, and every way out. What is looked at are the files below the folder,
    whoever wrote them."""
    (tmp_path / "ep4").mkdir()
    (tmp_path / "ep4" / "ba50.pt").touch()
    folder = RunFolder(SaveOptions({"folder": tmp_path, "filename": "ep{epoch}/ba{batch}.pt"}))
    with pytest.raises(CheckpointExistsError) as e:
        folder.refuse_conflicts(new_state(batch=42), [])
    for part in ("'ep4/ba50.pt'", f"{str(tmp_path)!r}", "epoch 0", "batch 42", "load_path", "autoresume"):
        assert part in str(e.value)
    assert "save_overwrite=True" in str(e.value)
