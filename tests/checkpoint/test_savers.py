"""Savers of a run: what they save, what is in their way, and how two of them share a folder."""

from __future__ import annotations

import copy
import errno
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from forked import run_forked
from parts import Remember, new_state, save_batch, temporaries, tree, value_in
from tiny_training import Classifier, CrashError, Record, StopAt, saved_batches, train, trainer

from composerlite import Callback, Event, Logger, State
from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint import Catalog, load_checkpoint, read_checkpoint, save_checkpoint
from composerlite.checkpoint.save.form import SaveRequest
from composerlite.checkpoint.save.save import save
from composerlite.errors import CheckpointExistsError, ConfigError, SaveError
from composerlite.storage import StagedFile

Mount = Callable[[str], Path]


def test_a_full_disk_stops_the_training_and_harms_nothing(mount: Mount) -> None:
    """The system's error, with the file; older checkpoints and ``latest`` stay, the space is given back."""
    disk = mount("size=512k")
    record = Record()
    run = trainer(model=Classifier(width=1000), callbacks=[record], save_folder=disk, save_interval="1ba")
    with run, pytest.raises(OSError, match="No space left on device") as e:
        run.fit()
    assert e.value.errno == errno.ENOSPC
    assert str(e.value.filename).startswith(str(disk))

    kept = saved_batches(disk)
    assert len(kept) >= 2
    assert kept == record.batches[: len(kept)]
    assert len(record.batches) <= len(kept) + 2, "training went on for more than a batch after a save had failed"
    assert f"ba{kept[-1]}-" in str((disk / "latest-rank0.pt").readlink())
    assert temporaries(disk) == []
    files = sum(-(-path.stat().st_size // 4096) * 4096 for path in disk.rglob("*") if path.is_file())
    assert shutil.disk_usage(disk).used <= files


def test_a_folder_that_cannot_be_made_is_an_error_at_construction(tmp_path: Path) -> None:
    """Below a file, for one. The message names the folder; there is no training to lose."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"save_folder='.*/file/checkpoints' cannot be written to"):
        trainer(save_folder=tmp_path / "file" / "checkpoints")


def test_a_read_only_disk_is_an_error_at_construction(mount: Mount) -> None:
    """Whether the folder is there or not."""
    disk = mount("size=64k,ro")
    for folder in (disk, disk / "checkpoints"):
        with pytest.raises(ConfigError, match=r"cannot be written to: .*Read-only file system"):
            trainer(save_folder=folder)


@pytest.mark.parametrize(
    "filename",
    [
        "ep{epoch}-ba{batch}-rank{rank}.pt",
        "ep{epoch}.pt",
        "{run_name}-ba{batch}.pt",
        "ba{batch}-{total_wct}.pt",
        "{batch}/of/{run_name}.pt",
        "ep{epoch}-{batch_in_epoch}",
        "{sample}-{token}.ckpt",
    ],
)
def test_a_run_does_not_start_over_other_checkpoints(tmp_path: Path, filename: str) -> None:
    """The error comes before the first batch, whatever the names are made of, and nothing is changed."""
    train(save_folder=tmp_path, save_filename=filename, save_latest_filename=None)
    before = tree(tmp_path)
    record = Record()
    run = trainer(callbacks=[record], save_folder=tmp_path, save_filename=filename)
    with run, pytest.raises(CheckpointExistsError, match="save_overwrite=True"):
        run.fit()
    assert record.batches == []
    assert tree(tmp_path) == before


def test_a_run_starts_over_other_checkpoints_when_told_to(tmp_path: Path) -> None:
    """It writes what it would have written into an empty folder."""
    train(save_folder=tmp_path)
    run = train(save_folder=tmp_path, save_overwrite=True)
    assert run.saved_checkpoints == [str(tmp_path / f"ep{n}-ba{4 * n}-rank0.pt") for n in (1, 2, 3)]
    assert saved_batches(tmp_path) == [4, 8, 12]


def test_retention_survives_a_resume(tmp_path: Path) -> None:
    """The checkpoints of before count: in the end there are so many, not so many of each start."""
    common: dict[str, Any] = {"save_folder": tmp_path, "save_interval": "1ba", "save_num_checkpoints_to_keep": 3}
    with trainer(callbacks=[StopAt(5)], **common) as run, pytest.raises(CrashError):
        run.fit()
    assert saved_batches(tmp_path) == [3, 4, 5]
    run = train(autoresume=True, max_duration="7ba", **common)
    assert saved_batches(tmp_path) == [5, 6, 7]
    assert [Path(path).name for path in run.saved_checkpoints] == [f"ep1-ba{n}-rank0.pt" for n in (5, 6, 7)]


def test_a_run_in_the_same_folder_does_not_touch_a_save_in_progress(tmp_path: Path) -> None:
    """Another run starts, trains and saves there while a checkpoint of this one is being written."""
    with StagedFile(tmp_path / "this.pt") as in_progress:
        train(run_name="another", save_folder=tmp_path, save_filename="another{batch}.pt")
        assert temporaries(tmp_path) == [in_progress.temporary.name]
    assert saved_batches(tmp_path) == [4, 8, 12]


def test_training_is_the_same_with_and_without_checkpoints(tmp_path: Path) -> None:
    """Saving moves no random generator and changes no weight."""
    model = Classifier()
    plain = train(model=copy.deepcopy(model))
    saving = train(model=model, save_folder=tmp_path, save_interval="1ba")
    for a, b in zip(plain.state.model.parameters(), saving.state.model.parameters(), strict=True):
        assert torch.equal(a, b)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_ignored_keys_are_not_saved(tmp_path: Path) -> None:
    """The file is smaller, the manifest says what it lacks, and the training is not harmed."""
    run = train(save_folder=tmp_path, save_ignore_keys=["state/optimizers/*", "rng"])
    contents = read_checkpoint(run.saved_checkpoints[-1])
    assert "optimizers" not in contents["state"]
    assert "rng" not in contents
    assert Catalog(tmp_path).manifests()[-1].left_out == ("state/optimizers/*", "rng")
    assert len(run.state.optimizers[0].state) == 4


@pytest.mark.parametrize("how", [{"save_weights_only": True}, {"load_weights_only": True}])
def test_another_training_begins_from_the_weights(tmp_path: Path, how: dict[str, Any]) -> None:
    """Saved alone or loaded alone: time, optimizer and names of the other run do not come along."""
    saving = {name: value for name, value in how.items() if name.startswith("save")}
    loading = {name: value for name, value in how.items() if name.startswith("load")}
    first = train(save_folder=tmp_path, **saving)
    run = trainer(run_name="tuned", load_path=tmp_path / "latest-rank0.pt", **loading)
    with run:
        assert equal(run.state.model.state_dict(), first.state.model.state_dict())
        assert int(run.state.timestamp.batch) == 0
        assert (run.state.run_name, len(run.state.optimizers[0].state)) == ("tuned", 0)
        run.fit()


def test_a_checkpoint_can_be_saved_at_any_time(tmp_path: Path) -> None:
    """To a path of one's own, or where the saver saves."""
    with trainer(save_folder=tmp_path / "folder", save_interval="100ep") as run:
        run.fit(duration="2ba")
        path = run.save_checkpoint(f"{tmp_path}/{{run_name}}-{{batch}}.pt")
        assert path == f"{tmp_path}/run-2.pt"
        assert set(read_checkpoint(run.save_checkpoint(f"{tmp_path}/weights.pt", weights_only=True))) == {"state"}
        run.fit(duration="1ba")
        assert run.saved_checkpoints[-1] == str(tmp_path / "folder" / "ep0-ba3-rank0.pt")
    with trainer() as fresh:
        load_checkpoint(path, fresh.state)
        assert int(fresh.state.timestamp.batch) == 2


def test_saving_to_the_folder_by_hand_follows_the_saver(tmp_path: Path) -> None:
    """Its names, its link, its retention; without a saver it is an error that says what to pass."""
    with trainer(save_folder=tmp_path, save_interval=lambda state, event: False) as run:
        run.fit(duration="2ba")
        path = run.save_checkpoint_to_save_folder()
    assert path == run.saved_checkpoints[-1] == str(tmp_path / "ep0-ba2-rank0.pt")
    assert str((tmp_path / "latest-rank0.pt").readlink()) == "ep0-ba2-rank0.pt"
    with trainer() as run, pytest.raises(ConfigError, match="save_folder"):
        run.save_checkpoint_to_save_folder()


def test_a_saver_may_save_at_a_moment_of_ones_own(tmp_path: Path) -> None:
    """A function of state and event; it is asked at checkpoint events."""
    asked: set[Event] = set()

    def when(state: Any, event: Event) -> bool:
        asked.add(event)
        return event is Event.EPOCH_CHECKPOINT and int(state.timestamp.epoch) > 1

    train(save_folder=tmp_path, save_interval=when)
    assert saved_batches(tmp_path) == [8, 12]
    assert asked == {Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {}),
        ({"latest_filename": "latest-rank0.pt"}, {}),
        ({"latest_filename": "{run_name}.pt"}, {"latest_filename": "run.pt"}),
        ({"latest_filename": "inner/last.pt"}, {"folder": "saves/inner", "latest_filename": "last.pt"}),
        ({}, {"folder": "./saves/"}),
        ({}, {"folder": "other/../saves"}),
        ({}, {"folder": "same"}),
        ({"latest_filename": "a.pt"}, {"latest_filename": "b.pt", "filename": "full/ep{epoch}.pt"}),
    ],
)
def test_two_savers_never_share_a_link_or_a_file(
    first: dict[str, Any], second: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the folder is written: the trainer is not built, and the message names both ways out."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saves").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "same").symlink_to("saves")
    savers = [
        CheckpointSaver(**{"folder": "saves", "filename": "full/ep{epoch}.pt", **first}),
        CheckpointSaver(**{"folder": "saves", "filename": "weights/ep{epoch}.pt", "weights_only": True, **second}),
    ]
    with pytest.raises(ConfigError, match=r"two CheckpointSavers, .* Give one of them another .*, or another folder"):
        trainer(callbacks=savers)


def test_two_savers_with_links_of_their_own_share_a_folder(tmp_path: Path) -> None:
    """Each link leads to the newest of its own saver, and a resume goes on from the whole state."""
    folder = tmp_path / "saves"

    def savers() -> list[CheckpointSaver]:
        return [
            CheckpointSaver(folder, filename="full/ep{epoch}.pt", latest_filename="latest.pt"),
            CheckpointSaver(
                folder,
                filename="weights/ba{batch}.pt",
                latest_filename="weights.pt",
                save_interval="2ba",
                weights_only=True,
            ),
            CheckpointSaver(folder, filename="third/ba{batch}.pt", latest_filename=None, save_interval="6ba"),
        ]

    train(callbacks=savers(), max_duration="1ep", autoresume=True, save_folder=tmp_path / "main")
    train(callbacks=savers(), max_duration="3ep", autoresume=True, save_folder=tmp_path / "main")
    assert str((folder / "latest.pt").readlink()) == "full/ep3.pt"
    assert str((folder / "weights.pt").readlink()) == "weights/ba12.pt"
    assert len(saved_batches(folder)) == 3 + 6 + 3


class FailAt(Callback):
    """Raises in the forward pass of a batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def after_forward(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == self.batch:
            raise ValueError("no such label")


def test_a_failed_run_leaves_a_checkpoint_marked_as_such(tmp_path: Path) -> None:
    """The error says where; the weights are those of the last step; ``latest`` and the list of checkpoints are as
    before; retention does not count it."""
    with trainer(
        save_folder=tmp_path,
        save_interval="2ba",
        save_num_checkpoints_to_keep=1,
        save_on_exception=True,
        callbacks=[FailAt(5)],
    ) as run:
        with pytest.raises(ValueError, match="no such label") as error:
            run.fit()
        expected = {name: tensor.clone() for name, tensor in run.state.model.state_dict().items()}
    assert run.saved_checkpoints == [f"{tmp_path}/ep0-ba4-rank0.pt"]
    path = tmp_path / "crash-ep1-ba5-rank0.pt"
    assert f"The state of training was saved as {str(path)!r}." in error.value.__notes__
    found = torch.load(path, weights_only=True)["state"]["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert {m.name: m.kind for m in Catalog(tmp_path).manifests()} == {
        "ep0-ba4-rank0.pt": "monolithic",
        "crash-ep1-ba5-rank0.pt": "crash",
    }
    assert (tmp_path / "latest-rank0.pt").resolve().name == "ep0-ba4-rank0.pt"


def test_autoresume_passes_over_it_and_load_path_takes_it(tmp_path: Path) -> None:
    """Where it is all there is, the run begins anew."""
    with (
        trainer(save_folder=tmp_path, save_on_exception=True, autoresume=True, callbacks=[FailAt(3)]) as run,
        pytest.raises(ValueError, match="no such label"),
    ):
        run.fit()
    (manifest,) = Catalog(tmp_path).manifests()
    again, beyond = Record(), Record()
    with trainer(save_folder=tmp_path, autoresume=True, callbacks=[again], max_duration="2ba") as run:
        run.fit()
    assert again.batches == [1, 2]
    with trainer(load_path=tmp_path / manifest.name, callbacks=[beyond], max_duration="5ba") as run:
        run.fit()
    assert beyond.batches == [4, 5]


def test_a_disk_that_is_gone_does_not_hide_the_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What training failed with is raised; that nothing could be saved is a note, and in the log."""

    class Remove(FailAt):
        def batch_end(self, state: State, logger: Logger) -> None:
            folder = tmp_path / "saves"
            folder.rename(tmp_path / "gone")
            folder.write_text("a file in its place")

    with caplog.at_level(logging.ERROR):
        run = trainer(save_folder=tmp_path / "saves", save_on_exception=True, callbacks=[Remove(1)])
        with pytest.raises(ValueError, match="no such label") as error:
            run.fit()
        run.close()
    assert any("could not be saved" in note for note in error.value.__notes__)
    assert "could not save the state of training" in caplog.text


def test_several_ranks_are_told_that_they_cannot(tmp_path: Path) -> None:
    """Before training."""
    with pytest.raises(ConfigError, match="save_on_exception=True with several ranks"):
        trainer(save_folder=tmp_path, save_on_exception=True, parallelism_config={"fsdp": {}})


class Times(Callback):
    """Prints when the first and the last batch of the third epoch begin."""

    def batch_start(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) in (8, 11):
            sys.stdout.write(f"{time.monotonic()}\n")


def program(folder: str, how: str, failures: str = "0", save_async: str = "True") -> None:
    """Train four epochs, save each and keep one checkpoint, whose deletion takes ``how`` seconds, or fails."""

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.remove" and (name := Path(arguments[0]).name).startswith("ep") and ".json" not in name:
            os.write(2, b"deleting\n")
            if how == "fail":
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(arguments[0]))
            time.sleep(float(how))

    sys.addaudithook(look)
    torch.set_num_threads(1)
    torch.manual_seed(7)
    arguments: dict[str, Any] = {"save_num_checkpoints_to_keep": 1, "save_failure_limit": int(failures)}
    arguments["save_async"] = save_async == "True"
    with trainer(callbacks=[Times()], save_folder=folder, max_duration="4ep", **arguments) as run:
        run.fit()
        sys.stdout.write("ended\n")


def launch(folder: Path, how: str, failures: int = 0, *, save_async: bool = True) -> subprocess.CompletedProcess[str]:
    return run_forked(program, str(folder), how, str(failures), str(save_async), cwd=Path.cwd())


def test_a_slow_deletion_does_not_hold_up_training(tmp_path: Path) -> None:
    """The deletion takes four seconds; when training has ended only the newest checkpoint is there."""
    run = launch(tmp_path, "4")
    assert run.returncode == 0, run.stderr
    before, after = (float(line) for line in run.stdout.split()[:2])
    assert after - before < 2, "training waited until the first checkpoint was deleted"
    assert saved_batches(tmp_path) == [16]
    assert [path.name for path in tmp_path.glob("ep*")] == ["ep4-ba16-rank0.pt"]


def test_a_deletion_that_fails_is_an_error_and_the_newest_is_there(tmp_path: Path) -> None:
    """The system's error, with the file, as for a save that fails."""
    run = launch(tmp_path, "fail")
    assert run.returncode == 1
    assert "ended" not in run.stdout
    assert "OSError: [Errno 5] Input/output error" in run.stderr
    assert "ep1-ba4-rank0.pt" in run.stderr
    newest = saved_batches(tmp_path)[-1]
    assert newest >= 8
    assert f"ba{newest}-" in str((tmp_path / "latest-rank0.pt").readlink())


@pytest.mark.parametrize("save_async", [True, False])
def test_deletions_that_fail_are_counted_where_failures_are_tolerated(tmp_path: Path, save_async: bool) -> None:
    """A warning for each with the number in a row, and training ends; one too many in a row is an error. No save failed
    with it."""
    run = launch(tmp_path / "many", "fail", failures=10, save_async=save_async)
    assert run.returncode == 0, run.stderr
    assert "ended" in run.stdout
    for number in (1, 2, 3):
        assert f"a checkpoint could not be deleted ({number} in a row, save_failure_limit=10): OSError" in run.stderr
    assert "could not be saved" not in run.stderr
    assert saved_batches(tmp_path / "many") == [4, 8, 12, 16], "a file that cannot be removed is a checkpoint"
    run = launch(tmp_path / "few", "fail", failures=1, save_async=save_async)
    assert run.returncode == 1
    assert "a checkpoint could not be deleted (1 in a row, save_failure_limit=1)" in run.stderr


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


def test_a_checkpoint_is_saved_to_any_path(tmp_path: Path) -> None:
    """Variables in folders and name are filled in; what is there is replaced; the path is given back."""
    for value in (1.0, 2.0):
        state = new_state(3, value=value, run_name="my-run")
        path = save_checkpoint(state, f"{tmp_path}/{{run_name}}/ba{{batch}}/final.pt")
        assert path == f"{tmp_path}/my-run/ba3/final.pt"
        assert value_in(read_checkpoint(path)) == value


class Leave(Callback):
    """Goes to another folder at one batch, as Hydra does, or code that works with files of its own."""

    def __init__(self, folder: Path, batch: int) -> None:
        self.folder, self.batch = folder, batch

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == self.batch:
            os.chdir(self.folder)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("name", ["saves", "./saves", "{run_name}/saves"])
@pytest.mark.parametrize("batch", [1, 5])
def test_checkpoints_stay_in_one_folder(
    name: str, batch: int, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the process goes, and whatever is saved at that moment: all are in the folder that it began with."""
    start, elsewhere = tmp_path / "start", tmp_path / "elsewhere"
    start.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(start)
    how: dict[str, Any] = {
        "save_folder": name,
        "save_interval": "1ba",
        "save_num_checkpoints_to_keep": 3,
        "save_async": asynchronous,
    }
    train(callbacks=[Leave(elsewhere, batch)], max_duration="2ep", **how)
    assert list(elsewhere.iterdir()) == []
    folder = start / name.format(run_name="run")
    assert saved_batches(folder) == [6, 7, 8]
    assert (folder / "latest-rank0.pt").resolve() == folder / "ep1-ba8-rank0.pt"
    assert not list(folder.rglob("*.lease")), "the lease was given back in the wrong place"

    monkeypatch.chdir(start)
    record = Record()
    with trainer(callbacks=[record], autoresume=True, **how) as run:
        os.chdir(elsewhere)  # between construction and training
        run.fit()
        assert run.saved_checkpoints[-1].endswith("saves/ep2-ba12-rank0.pt")
    assert record.batches == [9, 10, 11, 12]
    assert saved_batches(folder) == [10, 11, 12]
    assert list(elsewhere.iterdir()) == []


def test_a_working_directory_that_is_removed_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an absolute save_folder, checkpoints need no working directory."""

    class Remove(Callback):
        """Removes the working directory."""

        def batch_end(self, state: State, logger: Logger) -> None:
            if int(state.timestamp.batch) == 1:
                Path.cwd().rmdir()

    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    how: dict[str, Any] = {"save_interval": "2ba", "max_duration": "4ba", "save_num_checkpoints_to_keep": 1}
    run = trainer(save_folder=tmp_path / "saves", callbacks=[Remove()], **how)
    try:
        run.fit()
        run.close()
    finally:
        monkeypatch.chdir(tmp_path)
    assert saved_batches(tmp_path / "saves") == [4]
