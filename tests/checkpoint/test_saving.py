"""A save makes one whole checkpoint with its record, or nothing."""

from __future__ import annotations

import errno
import logging
import re
import resource
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import xxhash
from forked import run_forked
from parts import Remember, new_state, save_batch, tree, value_in

from composerlite.checkpoint import Catalog, read_checkpoint, save_checkpoint
from composerlite.checkpoint.save.form import SaveRequest
from composerlite.checkpoint.save.save import save
from composerlite.errors import ConfigError, SaveError


def test_a_save_is_a_file_and_a_link(tmp_path: Path) -> None:
    """And nothing else."""
    assert save_batch(tmp_path, 3) == tmp_path / "ba3.pt"
    assert sorted(tree(tmp_path)) == ["ba3.pt", "latest.pt"]
    assert tree(tmp_path)["latest.pt"] == "ba3.pt"


def test_the_record_says_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, run, moment, files with their digests."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    path = save_batch(tmp_path, 3, run_name="my-run", ignore_keys=["rng"])
    (manifest,) = Catalog(tmp_path).manifests()
    assert (manifest.name, manifest.template, manifest.run_name) == ("ba3.pt", "ba{batch}.pt", "my-run")
    assert (manifest.kind, manifest.run.world_size, manifest.left_out) == ("monolithic", 1, ("rng",))
    assert (manifest.batch, manifest.timestamp["sample"], manifest.timestamp["total_wct"]) == (3, 12, 1.5)
    data = path.read_bytes()
    (record,) = manifest.files
    assert (record.path, record.size_bytes) == ("ba3.pt", len(data))
    assert record.xxh3_128 == xxhash.xxh3_128_hexdigest(data[: -record.tail_bytes])
    assert record.tail_xxh3_128 == xxhash.xxh3_128_hexdigest(data[-record.tail_bytes :])
    assert (datetime.now(UTC) - datetime.fromisoformat(manifest.saved_at)).total_seconds() < 60


@pytest.mark.parametrize(
    ("arguments", "kind", "left_out"),
    [
        ({"weights_only": True}, "weights", ()),
        ({"ignore_keys": lambda contents: None}, "monolithic", ("<function>",)),  # pyright: ignore[reportUnknownLambdaType]
        ({}, "monolithic", ()),
    ],
)
def test_the_record_says_what_was_left_out(
    tmp_path: Path, arguments: dict[str, Any], kind: str, left_out: tuple[str, ...]
) -> None:
    """Weights alone, and what was ignored."""
    save_batch(tmp_path, 1, **arguments)
    (manifest,) = Catalog(tmp_path).manifests()
    assert (manifest.kind, manifest.left_out) == (kind, left_out)


def test_weights_alone_are_small(tmp_path: Path) -> None:
    """The model and what explains it; no optimizer, no time, no generators."""
    contents = read_checkpoint(save_batch(tmp_path, 1, weights_only=True))
    assert list(contents) == ["state"]
    assert set(contents["state"]) == {"model", "integrations", "metadata"}


def test_a_link_may_have_a_time_and_a_folder(tmp_path: Path) -> None:
    """It is a name like others, and points from where it is."""
    save_batch(tmp_path, 3, template="a/b/ba{batch}.pt", latest="c/{run_name}/latest{batch}.pt")
    link = tmp_path / "c" / "run" / "latest3.pt"
    assert str(link.readlink()) == "../../a/b/ba3.pt"
    assert value_in(read_checkpoint(link)) == 3


def test_a_link_of_the_same_name_is_not_needed(tmp_path: Path) -> None:
    """Where the checkpoint has one fixed name it is the latest by itself."""
    path = save_batch(tmp_path, 3, template="latest.pt", latest="latest.pt")
    assert path.is_file()
    assert not path.is_symlink()


def test_a_save_is_logged_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where, how much, how long."""
    caplog.set_level(logging.INFO, "composerlite")
    path = save_batch(tmp_path, 3)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert re.fullmatch(rf"saved checkpoint {path} \(\d+\.\d kB in \d+\.\d\d s\)", record.getMessage())


def test_a_run_without_an_optimizer_is_saved(tmp_path: Path) -> None:
    """There is nothing to save of it, and that is no error."""
    state = new_state(1)
    state.optimizers = ()
    path = save(SaveRequest(state=state, catalog=Catalog(tmp_path), template="x.pt"))
    assert read_checkpoint(path)["state"]["optimizers"] == {}


# ── saves that fail ──────────────────────────────────────────────────────────────────────────────────────────────────
def unpicklable() -> dict[str, Any]:
    class Local:
        pass

    return {
        "lambda": lambda: None,
        "local class": Local(),
        "generator": (number for number in range(3)),
        "module": sys,
        "open file": sys.__stdin__,
        "class without a home": type("Homeless", (), {})(),
    }


@pytest.mark.parametrize("what", unpicklable().values(), ids=unpicklable())
def test_contents_that_cannot_be_written_are_an_error_and_leave_nothing(tmp_path: Path, what: Any) -> None:
    """The message names the checkpoint and the culprit; the older one, its link, and the folder are as they were."""
    save_batch(tmp_path, 1)
    before = tree(tmp_path)
    rule = r"ba2\.pt': its state cannot be written: .*([Pp]ickle|serialize|get local object)"
    with pytest.raises(SaveError, match=rule):
        save(
            SaveRequest(
                state=new_state(2, callbacks=[Remember(what)]), catalog=Catalog(tmp_path), template="ba{batch}.pt"
            )
        )
    assert tree(tmp_path) == before


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a save."""

    class Interrupt:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    save_batch(tmp_path, 1)
    before = tree(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        save(
            SaveRequest(
                state=new_state(2, callbacks=[Remember(Interrupt())]),
                catalog=Catalog(tmp_path),
                template="ba{batch}.pt",
            )
        )
    assert tree(tmp_path) == before


def save_where_files_may_not_be_larger(folder: str, *limits: str) -> None:
    """Prints the error of a save for each of ``limits``, which a process can only make smaller for itself."""
    said: list[str] = []
    for limit in map(int, limits):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            save_batch(Path(folder), 2)
        except OSError as e:
            said.append(f"{e.errno} {e.filename}\n")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    sys.stdout.writelines(said)


def test_a_save_that_does_not_fit_is_the_systems_error_and_leaves_nothing(tmp_path: Path) -> None:
    """Whichever write fails: the error is the system's, names the file, and the rest is as it was."""
    size = save_batch(tmp_path, 1).stat().st_size
    before = tree(tmp_path)
    limits = [0, 100, size // 2, size * 9 // 10]
    done = run_forked(save_where_files_may_not_be_larger, str(tmp_path), *map(str, limits), cwd=tmp_path)
    assert done.stdout.splitlines() == [f"{errno.EFBIG} {tmp_path / 'ba2.pt'}"] * len(limits), done.stderr
    assert tree(tmp_path) == before


# ── by path ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_checkpoint_is_saved_to_any_path(tmp_path: Path) -> None:
    """Variables in folders and name are filled in; what is there is replaced; the path is given back."""
    for value in (1.0, 2.0):
        state = new_state(3, value=value, run_name="my-run")
        path = save_checkpoint(state, f"{tmp_path}/{{run_name}}/ba{{batch}}/final.pt")
        assert path == f"{tmp_path}/my-run/ba3/final.pt"
        assert value_in(read_checkpoint(path)) == value


def test_a_path_with_a_typo_is_an_error(tmp_path: Path) -> None:
    """In the folder or in the name."""
    for path in ("{run_nam}/final.pt", "ba{bathc}.pt"):
        with pytest.raises(ConfigError, match="is not a variable"):
            save_checkpoint(new_state(), tmp_path / path)
    assert tree(tmp_path) == {}
