"""``composerlite checkpoint cp``, ``push`` and ``pull``: what arrives is what was saved, or nothing arrives."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from click.testing import CliRunner
from commands import answer, composerlite, published, train
from sealed_files import record_in, rewrite_record

from composerlite.checkpoint import (
    Checkpointer,
    read_checkpoint,
    save_model_and_optim_state,
)
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.tools.converting import write_file
from composerlite.checkpoint.tools.copying import copy
from composerlite.checkpoint.tools.surveying import place_at, pointed
from composerlite.cli.app import app
from composerlite.errors import CheckpointExistsError, ConfigError
from composerlite.storage import StagedFile, Transfer, open_store
from composerlite.testing import Fault, FaultyStore

ONE, TWO, THREE = (f"ep{epoch}-ba{4 * epoch}-rank0.pt" for epoch in (1, 2, 3))


def states(*arguments: object, cwd: Path) -> list[str]:
    """Where the checkpoints are that a copy tells of, and whether they were copied."""
    return [f"{one['state']}: {one['target']}" for one in answer("checkpoint", *arguments, cwd=cwd)["copied"]]


# ── between folders and buckets ──────────────────────────────────────────────────────────────────────────────────
def test_a_checkpoint_travels_from_folder_to_bucket_to_bucket_to_folder(demo: Path, bucket: str) -> None:
    """It is verified at each end, and loads as it did; the keys of the answer are these."""
    (told,) = answer("checkpoint", "cp", f"demo/{THREE}", f"{bucket}/a", cwd=demo.parent)["copied"]
    assert told == {
        "name": THREE,
        "source": f"demo/{THREE}",
        "target": f"{bucket}/a/{THREE}",
        "size_bytes": (demo / THREE).stat().st_size,
        "state": "copied",
    }
    assert states("cp", f"{bucket}/a/{THREE}", f"{bucket}/b", cwd=demo.parent) == [f"copied: {bucket}/b/{THREE}"]
    assert states("cp", f"{bucket}/b/{THREE}", "back", cwd=demo.parent) == [f"copied: back/{THREE}"]
    assert states("cp", f"back/{THREE}", "again", cwd=demo.parent) == [f"copied: again/{THREE}"]
    for place in ("back", "again", f"{bucket}/a", f"{bucket}/b"):
        (found,) = answer("checkpoint", "verify", place, cwd=demo.parent)["checkpoints"]
        assert (found["name"], found["state"]) == (THREE, "verified")
    torch.testing.assert_close(
        read_checkpoint(demo.parent / "again" / THREE)["state"]["model"],
        read_checkpoint(demo / THREE)["state"]["model"],
        rtol=0,
        atol=0,
    )


def test_directories_and_steps_are_copied_whole(tmp_path: Path, bucket: str) -> None:
    """Sharded directories and steps go with all their files, and are what they were."""
    model = torch.nn.Linear(4, 2)
    save_model_and_optim_state(tmp_path / "runs/ep1", model)
    Checkpointer().save(tmp_path / "runs/step5", model, {"step": 5})
    for name in ("ep1", "step5"):
        composerlite("checkpoint", "cp", f"runs/{name}", f"{bucket}/runs", cwd=tmp_path)
        composerlite("checkpoint", "cp", f"{bucket}/runs/{name}", "back", cwd=tmp_path)
    found = answer("checkpoint", "verify", "back", cwd=tmp_path)["checkpoints"]
    assert [(one["name"], one["state"]) for one in found] == [("ep1", "verified"), ("step5", "verified")]
    other = torch.nn.Linear(4, 2)
    assert Checkpointer().load(tmp_path / "back/step5", other) == {"step": 5}
    assert torch.equal(other.weight, model.weight)


def test_push_and_pull_take_the_newest_the_named_or_all(demo: Path, bucket: str) -> None:
    """What is there already is not copied again; a link leads to the last."""
    there = f"{bucket}/demo"
    assert states("push", "demo", there, cwd=demo.parent) == [f"copied: {there}/{THREE}"]
    assert states("push", "demo", there, ONE, cwd=demo.parent) == [f"copied: {there}/{ONE}"]
    assert states("push", "demo", there, "--all", "--link", "latest-rank0.pt", cwd=demo.parent) == [
        f"exists: {there}/{ONE}",
        f"copied: {there}/{TWO}",
        f"exists: {there}/{THREE}",
    ]
    with open_store(bucket) as store:
        assert store.read_range("demo/latest-rank0.pt.symlink", 0, 99) == f"demo/{THREE}".encode()
    assert states("pull", there, "back", "--link", "latest-rank0.pt", cwd=demo.parent) == [f"copied: back/{THREE}"]
    assert (demo.parent / "back/latest-rank0.pt").readlink() == Path(THREE)
    assert len(states("pull", there, "back", "--all", cwd=demo.parent)) == 3


def test_a_run_goes_on_from_what_was_pulled(demo: Path, bucket: str) -> None:
    """A folder that was pulled is one that autoresume finds its checkpoint in."""
    composerlite("checkpoint", "push", "demo", f"{bucket}/demo", cwd=demo.parent)
    shutil.rmtree(demo)
    composerlite("checkpoint", "pull", f"{bucket}/demo", "demo", "--link", "latest-rank0.pt", cwd=demo.parent)
    train(demo, epochs=4, autoresume=True)
    assert [path.name for path in sorted(demo.glob("ep*"))] == [THREE, "ep4-ba16-rank0.pt"]


# ── what may go wrong ────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_another_checkpoint_is_not_overwritten_unasked(where: str, demo: Path, bucket: str) -> None:
    """One of the same name of another run stays; with ``--overwrite`` it is replaced."""
    place = f"{bucket}/demo" if where == "bucket" else "there"
    train(demo.parent / "other", epochs=1, run_name="other")
    assert states("cp", f"other/{ONE}", place, cwd=demo.parent) == [f"copied: {place}/{ONE}"]
    done = composerlite("checkpoint", "cp", f"demo/{ONE}", place, cwd=demo.parent)
    assert (done.returncode, done.stdout) == (1, "")
    assert "is another checkpoint with that name" in done.stderr
    assert answer("checkpoint", "ls", place, cwd=demo.parent)["checkpoints"][0]["run_name"] == "other"
    assert states("cp", f"demo/{ONE}", place, "--overwrite", cwd=demo.parent) == [f"copied: {place}/{ONE}"]
    assert answer("checkpoint", "ls", place, cwd=demo.parent)["checkpoints"][0]["run_name"] == "demo"
    assert composerlite("checkpoint", "verify", place, cwd=demo.parent).returncode == 0


def test_a_file_and_a_directory_do_not_replace_one_another(tmp_path: Path, demo: Path) -> None:
    """Two runs, of which one saves a file ``x.pt`` and the other a directory of that name, into one folder: the error
    tells it, and what was there is what it was, with its manifest."""
    save_model_and_optim_state(tmp_path / "directory/x.pt", torch.nn.Linear(4, 2))
    assert composerlite("checkpoint", "convert", f"demo/{ONE}", "file/x.pt", cwd=tmp_path).returncode == 0
    for source, target in (("directory", "file"), ("file", "directory")):
        done = composerlite("checkpoint", "cp", f"{source}/x.pt", target, "--overwrite", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"'{target}/x.pt' is a {target}, which a {source} does not replace" in done.stderr
        (found,) = answer("checkpoint", "verify", target, cwd=tmp_path)["checkpoints"]
        assert found["state"] == "verified"


def test_a_file_that_is_no_part_of_a_checkpoint_is_not_overwritten_unasked(demo: Path) -> None:
    """Data of that name that nobody vouches for may be somebody's."""
    (demo.parent / "there").mkdir()
    (demo.parent / "there" / ONE).write_bytes(b"mine")
    done = composerlite("checkpoint", "cp", f"demo/{ONE}", "there", cwd=demo.parent)
    assert done.returncode == 1
    assert "give --overwrite to replace it" in done.stderr
    assert (demo.parent / "there" / ONE).read_bytes() == b"mine"
    assert states("cp", f"demo/{ONE}", "there", "--overwrite", cwd=demo.parent) == [f"copied: there/{ONE}"]


SAVES: dict[str, Any] = {
    "file": lambda path, weights: write_file({"weight": weights}, path, None, overwrite=False),
    "directory": lambda path, weights: save_model_and_optim_state(path, torch.nn.ParameterDict({"weight": weights})),
    "step": lambda path, weights: Checkpointer().save(path, torch.nn.ParameterDict({"weight": weights}), {}),
}
"""Each saves a checkpoint as the path, with these weights."""


def copied(checkpoint: Path, target: str, **options: Any) -> None:
    """Copy a checkpoint to the place."""
    with pointed(str(checkpoint)) as source, place_at(target, may_be_new=True) as place:
        copy(source.the_one(), place, **options)


@contextlib.contextmanager
def overtaken(uri: str, by: Path) -> Generator[Bucket]:
    """The place at ``uri``, which gets the checkpoint ``by`` right before a copy puts its deciding object."""
    store = FaultyStore(open_store(uri))

    def overtake() -> None:
        store.faults = []
        copied(by, uri)

    names = (f"run/{by.name}", f"run/{by.name}/*.metadata")
    verbs = ("put_bytes", "upload_object", "complete")
    store.faults = [Fault(verb, name, error=None, first=overtake) for verb in verbs for name in names]
    with Transfer(store, part_bytes=5 << 20) as transfer:
        yield Bucket(transfer, "run")


@pytest.mark.parametrize("where", ["folder", "bucket"])
@pytest.mark.parametrize(("kind", "count"), [("file", 1000), ("file", 1_500_000), ("directory", 1000), ("step", 1000)])
def test_a_checkpoint_that_is_saved_meanwhile_is_not_replaced(
    kind: str, count: int, where: str, tmp_path: Path, bucket: str
) -> None:
    """Without ``--overwrite`` the copy fails, and what was saved under its name during the copy is whole."""
    for number, folder in enumerate(("ours", "theirs")):
        SAVES[kind](tmp_path / folder / "step1", torch.full((count,), float(number)))
    target = f"{bucket}/run" if where == "bucket" else str(tmp_path / "run")
    ours, theirs = tmp_path / "ours/step1", tmp_path / "theirs/step1"
    left = [1]

    def overtake(_: int) -> None:
        if left and left.pop():
            copied(theirs, target)

    with contextlib.ExitStack() as stack:
        source = stack.enter_context(pointed(str(ours)))
        in_folder = where == "folder"
        place = stack.enter_context(place_at(target, may_be_new=True) if in_folder else overtaken(target, by=theirs))
        with pytest.raises(CheckpointExistsError, match=r"step1.* was saved by another process meanwhile"):
            copy(source.the_one(), place, progress=overtake if in_folder else int)
    assert states("cp", f"{target}/step1", "back", cwd=tmp_path) == ["copied: back/step1"]
    (found,) = answer("checkpoint", "verify", "back", cwd=tmp_path)["checkpoints"]
    assert (found["name"], found["state"]) == ("step1", "verified")
    for path in theirs.rglob("*") if theirs.is_dir() else [theirs]:
        back = tmp_path / "back" / path.relative_to(theirs.parent)
        assert path.is_dir() or back.read_bytes() == path.read_bytes()
    copied(ours, target, overwrite=True)
    assert states("cp", "ours/step1", target, cwd=tmp_path) == [f"exists: {target}/step1"]


@pytest.mark.parametrize("target", ["x.pt", "x.pt.gz", "x.safetensors", "weights", "directory"])
def test_a_file_that_appears_during_a_conversion_is_not_replaced(
    target: str, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``--overwrite``: it is what it was, and the error says so."""
    path = demo.parent / "there" / target
    theirs = path / ".metadata" if target == "directory" else path
    path.parent.mkdir()
    real = StagedFile.__init__

    def stage(*arguments: Any) -> None:
        real(*arguments)
        theirs.write_bytes(b"theirs")

    monkeypatch.setattr(StagedFile, "__init__", stage)
    arguments = ["checkpoint", "convert", str(demo / ONE), str(path)]
    done = CliRunner().invoke(app, [*arguments, *(["--to", "state_dict"] if target == "weights" else [])])
    assert done.exit_code == 1
    words = (" was saved by another process", ": File exists", " holds a checkpoint")
    assert any(f"{str(path)!r}{said}" in done.output for said in words), done.output
    assert [found.name for found in theirs.parent.iterdir()] == [theirs.name]
    assert theirs.read_bytes() == b"theirs"


@pytest.mark.parametrize("target", ["folder", "bucket"])
def test_damage_is_not_copied(target: str, demo: Path, bucket: str) -> None:
    """A byte that differs from what was saved is found on the way: there is no checkpoint at the other end."""
    place = f"{bucket}/demo" if target == "bucket" else "there"
    data = bytearray((demo / ONE).read_bytes())
    data[9000] ^= 1
    (demo / ONE).write_bytes(data)
    (demo / TWO).write_bytes((demo / TWO).read_bytes()[:-60])
    (demo / THREE).write_bytes((demo / THREE).read_bytes()[:1000])
    for name, words in ((ONE, "differ from the saved bytes"), (TWO, "is incomplete"), (THREE, "has no record")):
        done = composerlite("checkpoint", "cp", f"demo/{name}", place, cwd=demo.parent)
        assert done.returncode == 1
        assert words in done.stderr
    if target == "bucket":
        assert answer("checkpoint", "ls", place, cwd=demo.parent)["checkpoints"] == []
    else:
        assert not list(demo.parent.glob("there/**/ep*"))


@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_damage_replaces_nothing(where: str, demo: Path, bucket: str) -> None:
    """With ``--overwrite`` a good checkpoint stays, whole, where the other of its name turns out to be damaged."""
    place = f"{bucket}/there" if where == "bucket" else "there"
    for folder, weight in (("source", 1.0), ("good", 2.0)):
        model = torch.nn.Linear(50, 50)
        torch.nn.init.constant_(model.weight, weight)
        Checkpointer().save(demo.parent / folder / "step1", model, {"weight": weight})
        save_model_and_optim_state(demo.parent / folder / "ep1", model)
    for name in ("step1", "ep1"):
        assert composerlite("checkpoint", "cp", f"good/{name}", place, cwd=demo.parent).returncode == 0
        (file,) = (demo.parent / "source" / name).rglob("*.distcp")
        data = bytearray(file.read_bytes())
        data[3000] ^= 1
        file.write_bytes(data)
        done = composerlite("checkpoint", "cp", f"source/{name}", place, "--overwrite", cwd=demo.parent)
        assert done.returncode == 1
        assert "differ from the saved bytes" in done.stderr
        assert composerlite("checkpoint", "verify", f"{place}/{name}", cwd=demo.parent).returncode == 0
    model = torch.nn.Linear(50, 50)
    uri = place if where == "bucket" else str(demo.parent / place)
    assert Checkpointer().load(f"{uri}/step1", model) == {"weight": 2.0}
    assert torch.equal(model.weight, torch.full((50, 50), 2.0))


def test_damage_in_a_bucket_is_not_copied(demo: Path, bucket: str) -> None:
    """The same where the damage is in the object."""
    published(demo, bucket)
    data = bytearray((demo / ONE).read_bytes())
    data[9000] ^= 1
    with open_store(bucket) as store:
        store.put_bytes(f"demo/{ONE}", bytes(data))
    done = composerlite("checkpoint", "pull", f"{bucket}/demo", "back", ONE, cwd=demo.parent)
    assert done.returncode == 1
    assert "differ from the saved bytes" in done.stderr
    assert not list(demo.parent.glob("back/**/ep*"))


def test_an_interrupted_copy_is_gone_on_with(tmp_path: Path) -> None:
    """What a copy that was killed has brought is verified and stays; before the index there is no checkpoint."""
    save_model_and_optim_state(tmp_path / "runs/ep1", torch.nn.Linear(4, 2))
    (tmp_path / "there/ep1").mkdir(parents=True)
    (data,) = (tmp_path / "runs/ep1").glob("__0_0_*.distcp")
    there = Path(shutil.copy(data, tmp_path / "there/ep1"))
    before = there.stat().st_ino
    assert [one["state"] for one in answer("checkpoint", "ls", "there", cwd=tmp_path)["checkpoints"]] == ["incomplete"]
    assert states("cp", "runs/ep1", "there", cwd=tmp_path) == ["copied: there/ep1"]
    assert there.stat().st_ino == before
    assert composerlite("checkpoint", "verify", "there", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("kept", [10, -60])
def test_a_torn_copy_is_replaced_when_asked(kept: int, demo: Path) -> None:
    """A copy that has lost bytes since has lost its record, too: nothing says that it is a copy."""
    there = demo.parent / "there" / ONE
    assert states("cp", f"demo/{ONE}", "there", cwd=demo.parent) == [f"copied: there/{ONE}"]
    there.write_bytes(there.read_bytes()[:kept])
    done = composerlite("checkpoint", "cp", f"demo/{ONE}", "there", cwd=demo.parent)
    assert (done.returncode, done.stdout) == (1, "")
    assert "give --overwrite to replace it" in done.stderr
    assert states("cp", f"demo/{ONE}", "there", "--overwrite", cwd=demo.parent) == [f"copied: there/{ONE}"]
    assert states("cp", f"demo/{ONE}", "there", cwd=demo.parent) == [f"exists: there/{ONE}"]
    assert composerlite("checkpoint", "verify", "there", cwd=demo.parent).returncode == 0


def test_a_file_renamed_by_hand_is_copied_as_it_is(demo: Path, bucket: str) -> None:
    """``cp`` changes no byte: a file whose record has another name stays a copy, in a bucket, too."""
    shutil.copy(demo / ONE, demo.parent / "mine.pt")
    assert states("cp", "mine.pt", f"{bucket}/there", cwd=demo.parent) == [f"copied: {bucket}/there/mine.pt"]
    assert states("cp", f"{bucket}/there/mine.pt", "back", cwd=demo.parent) == ["copied: back/mine.pt"]
    assert (demo.parent / "back/mine.pt").read_bytes() == (demo / ONE).read_bytes()
    (found,) = answer("checkpoint", "ls", "back", cwd=demo.parent)["checkpoints"]
    assert (found["state"], found["copy_of"]) == ("copy", ONE)
    (demo.parent / "back/mine.pt").rename(demo.parent / "back" / ONE)
    (found,) = answer("checkpoint", "ls", "back", cwd=demo.parent)["checkpoints"]
    assert (found["state"], found["copy_of"]) == ("committed", None)


@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_a_link_replaces_links_only(where: str, demo: Path, bucket: str) -> None:
    """A checkpoint's name, a file of the user's and a name outside are refused before anything is copied."""
    place = f"{bucket}/demo" if where == "bucket" else "there"
    composerlite("checkpoint", "cp", f"demo/{TWO}", place, cwd=demo.parent)
    (demo.parent / "mine.txt").write_text("mine")
    refused = [("../mine.txt", "expected the path of a file inside the folder")]
    refused += [(TWO, "is not a link" if where == "folder" else "is a checkpoint")]
    if where == "folder":
        (demo.parent / "there/mine.txt").write_text("mine")
        (demo.parent / "there/out").symlink_to(demo.parent)
        refused += [("mine.txt", "is not a link"), ("out/mine.txt", "is not a link")]
    for link, words in refused:
        done = composerlite("checkpoint", "cp", f"demo/{ONE}", place, "--link", link, cwd=demo.parent)
        assert (done.returncode, done.stdout) == (2, ""), link
        assert words in done.stderr
    assert composerlite("checkpoint", "cp", f"demo/{ONE}", place, "--link", ONE, cwd=demo.parent).returncode == 2
    assert (demo.parent / "mine.txt").read_text() == "mine"
    found = answer("checkpoint", "verify", place, cwd=demo.parent)["checkpoints"]
    assert [(one["name"], one["state"]) for one in found] == [(TWO, "verified")]


def test_training_replaces_no_file_by_its_link(tmp_path: Path) -> None:
    """A file of the user's that is called as the link to the newest stays, and the run says so."""
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo/latest-rank0.pt").write_text("mine")
    with pytest.raises(ConfigError, match=r"is not a link.*save_latest_filename"):
        train(tmp_path / "demo", epochs=1)
    assert [path.name for path in (tmp_path / "demo").glob("*.pt")] == ["latest-rank0.pt"], "it is said before training"
    assert (tmp_path / "demo/latest-rank0.pt").read_text() == "mine"


def test_a_run_that_was_copied_without_its_links_is_resumed(demo: Path) -> None:
    """``scp -r`` makes a file of the link to the newest: the run says so, and resumes when the file is removed."""
    copied = demo.parent / "copied"
    shutil.copytree(demo, copied)
    assert not (copied / "latest-rank0.pt").is_symlink()
    with pytest.raises(ConfigError, match=r"is not a link.*Move it away"):
        train(copied, epochs=4, autoresume=True)
    (copied / "latest-rank0.pt").unlink()
    train(copied, epochs=4, autoresume=True)
    assert [path.name for path in copied.glob("ep4-*")] == [str((copied / "latest-rank0.pt").readlink())]


@pytest.mark.parametrize("victim", ["../secret.pt", THREE])
def test_a_record_cannot_send_files_elsewhere(victim: str, demo: Path) -> None:
    """A planted record names a file outside of its folder, or another checkpoint: neither is copied nor deleted."""
    (demo.parent / "secret.pt").write_bytes(b"secret")
    (demo / "latest-rank0.pt").unlink()  # else all checkpoints stay that name its target
    data = (demo / victim).read_bytes()
    file = {"path": victim, "size_bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    shared: dict[str, Any] = {"template": THREE.replace("12", "{rank}"), "id": record_in(demo / THREE).id}
    planted, newer = demo / THREE.replace("12", "1"), demo / THREE.replace("12", "2")
    for path, files in ((planted, [file]), (newer, [])):
        shutil.copy(demo / (TWO if files else THREE), path)
        rewrite_record(path, name=path.name, form="archives" if files else "file", files=files, **shared)
    done = composerlite("checkpoint", "cp", f"demo/{planted.name}", "deep/there", cwd=demo.parent)
    assert done.returncode == 1
    assert not (demo.parent / "deep").exists()
    assert composerlite("checkpoint", "prune", "demo", "--keep-last", 1, cwd=demo.parent).returncode == 0
    assert (demo / victim).read_bytes() == data
    assert planted.exists() == victim.startswith("../"), "a damaged record is left alone"


def test_a_wrong_copy_is_one_line(demo: Path, bucket: str) -> None:
    """What was given, what is wanted, and what to do."""
    (demo / "foreign.pt").write_bytes(b"data")
    for arguments, status, words in (
        (["cp", "demo", "there"], 2, "is a folder of checkpoints"),
        (["cp", "demo/foreign.pt", "there"], 1, "has no record"),
        (["cp", f"demo/{ONE}", f"demo/{TWO}"], 2, "is a file"),
        (["cp", "demo/ep9.pt", "there"], 1, "neither a checkpoint nor a folder"),
        (["push", "demo", "there"], 2, "and a URI such as s3://bucket/run, given 'there'"),
        (["push", bucket, bucket], 2, "expected a local folder"),
        (["pull", "demo", "there"], 2, "and a URI such as s3://bucket/run, given 'demo'"),
        (["push", "demo", bucket, "ep9.pt"], 1, "is no checkpoint. Known: "),
        (["push", "demo", bucket, str(demo / ONE)], 1, "is no checkpoint. Known: "),
        (["push", "demo", bucket, "latest-rank0.pt"], 1, "is no checkpoint. Known: "),
        (["push", "demo", bucket, ONE, "--all"], 2, "expected names or --all"),
        (["pull", f"{bucket}/nothing", "there"], 1, "there is nothing to copy"),
    ):
        done = composerlite("checkpoint", *arguments, cwd=demo.parent)
        assert (done.returncode, done.stdout) == (status, ""), arguments
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
    assert not (demo.parent / "there").exists()
