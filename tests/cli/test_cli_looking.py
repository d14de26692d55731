"""``composerlite checkpoint ls``, ``latest``, ``inspect`` and ``verify``: what they say, and what they leave alone."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from commands import answer, composerlite, published, train

from composerlite.checkpoint import Checkpointer, load_keys, save_model_and_optim_state
from composerlite.checkpoint.tools.surveying import Pointed, place_at
from composerlite.cli.listing import verdict
from composerlite.storage import open_store

ONE, TWO, THREE = (f"ep{epoch}-ba{4 * epoch}-rank0.pt" for epoch in (1, 2, 3))


def flip(path: Path, at: int = -3000) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# ── ls ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_ls_tells_of_which_moment_each_checkpoint_is(demo: Path) -> None:
    """Every checkpoint has its line, the oldest first: name, run, counts, size, kind and state. Links are none."""
    done = composerlite("checkpoint", "ls", "demo", cwd=demo.parent)
    assert done.returncode == 0, done.stderr
    heads, *lines = done.stdout.splitlines()
    assert heads.split() == [
        "name",
        "run",
        "epoch",
        "batch",
        "sample",
        "saved",
        "size",
        "kind",
        "ranks",
        "metrics",
        "where",
        "state",
    ]
    assert [line.split()[:5] for line in lines] == [
        [ONE, "demo", "1", "4", "64"],
        [TWO, "demo", "2", "8", "128"],
        [THREE, "demo", "3", "12", "192"],
    ]
    assert all(line.endswith("local  committed") for line in lines)


def test_ls_answers_programs(demo: Path) -> None:
    """With ``--json`` the keys are these, and what is not known is null."""
    (demo / "foreign.pt").write_bytes(b"not ours")
    known, foreign = (
        found
        for found in answer("checkpoint", "ls", "demo", cwd=demo.parent)["checkpoints"]
        if found["name"] in (THREE, "foreign.pt")
    )
    saved_at, metrics = known.pop("saved_at"), known.pop("metrics")
    assert saved_at.endswith("+00:00")
    assert list(metrics) == ["train/MulticlassAccuracy"]
    assert known == {
        "name": THREE,
        "uri": f"demo/{THREE}",
        "where": "local",
        "state": "committed",
        "copy_of": None,
        "attempt": 1,
        "abandoned": False,
        "faults": [],
        "kind": "monolithic",
        "run_name": "demo",
        "epoch": 3,
        "batch": 12,
        "sample": 192,
        "token": 0,
        "size_bytes": (demo / THREE).stat().st_size,
        "file_count": 1,
        "world_size": 1,
        "ephemeral": False,
    }
    assert set(foreign) == {*known, "saved_at", "metrics"}
    assert [foreign[key] for key in ("state", "kind", "run_name", "epoch", "saved_at")] == [
        "unverified",
        None,
        None,
        None,
        None,
    ]


def test_ls_says_what_is_torn_and_why(demo: Path) -> None:
    """A file without its record, with a part of it, with a damaged one, and one that another program has extended."""
    train(demo, epochs=4, load_path=str(demo / THREE), run_name="demo")
    whole = {name: (demo / name).read_bytes() for name in (ONE, TWO, THREE)}
    (demo / ONE).write_bytes(whole[ONE][:1000])
    (demo / TWO).write_bytes(whole[TWO][:-10])
    (demo / THREE).write_bytes(whole[THREE].replace(b'"run": {"name": "demo"', b'"run": {"name": "demi"'))
    with (demo / "ep4-ba16-rank0.pt").open("ab") as file:
        file.write(b"more")
    found = answer("checkpoint", "ls", "demo", cwd=demo.parent)["checkpoints"]
    torn = dict.fromkeys((TWO, THREE, "ep4-ba16-rank0.pt"), "incomplete")
    assert {one["name"]: one["state"] for one in found} == {**torn, ONE: "unverified"}
    faults = {one["name"]: one["faults"][0] for one in found}
    assert faults[ONE].startswith("it has no record")
    assert "its footer is damaged" in faults[TWO]
    assert "its digest does not match" in faults[THREE]
    assert "its footer is damaged" in faults["ep4-ba16-rank0.pt"]
    done = composerlite("checkpoint", "gc", "demo", "--older-than", "0s", "--dry-run", cwd=demo.parent)
    assert [line for line in done.stdout.splitlines() if "ep4" in line or TWO in line or THREE in line] == []


def test_ls_knows_directories_and_steps(tmp_path: Path) -> None:
    """Sharded directories and steps of a Checkpointer are one line each; a step without its marker is torn."""
    model = torch.nn.Linear(4, 2)
    save_model_and_optim_state(tmp_path / "sharded/ep1", model)
    for step in (10, 20, 30):
        Checkpointer().save(tmp_path / f"steps/step{step}", model, {"step": step}, ephemeral=step == 20)
    (tmp_path / "steps/step30/.metadata.json").unlink()
    (tmp_path / "steps/step10/train/rank0.pt").unlink()
    found = answer("checkpoint", "ls", "sharded", "steps", cwd=tmp_path)["checkpoints"]
    assert [(one["name"], one["kind"], one["batch"], one["state"], one["ephemeral"]) for one in found] == [
        ("ep1", "sharded", None, "committed", False),
        ("step10", "step", 10, "incomplete", False),
        ("step20", "step", 20, "committed", True),
        ("step30", "step", 30, "incomplete", False),
    ]
    assert found[1]["faults"] == ["step10/train/rank0.pt is missing"]
    assert found[3]["faults"] == ["step30/.metadata.json is missing"]


def test_ls_sorts_and_chooses_a_run(demo: Path) -> None:
    """A folder of many runs is listed whole; ``--run`` takes one of them, ``--sort`` orders."""
    train(demo.parent / "other", epochs=1, run_name="other")
    names = [one["name"] for one in answer("checkpoint", "ls", ".", "--sort", "name", cwd=demo.parent)["checkpoints"]]
    assert names == [*(f"demo/{name}" for name in (ONE, TWO, THREE)), f"other/{ONE}"]
    (only,) = answer("checkpoint", "ls", ".", "--run", "other", cwd=demo.parent)["checkpoints"]
    assert only["name"] == f"other/{ONE}"
    done = composerlite("checkpoint", "ls", ".", "--sort", "sizes", cwd=demo.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'sizes' is not one of 'age', 'name', 'saved', 'size'" in done.stderr


def test_ls_fits_a_terminal(demo: Path) -> None:
    """Columns that a narrow terminal has no room for are left out; name, counts and state are always there."""
    code = "from composerlite.cli import main; main()"
    here, there = pty.openpty()
    with os.fdopen(here, "rb", buffering=0) as terminal:
        subprocess.run(
            [sys.executable, "-c", code, "checkpoint", "ls", "demo"],
            cwd=demo.parent,
            env={**os.environ, "COLUMNS": "80", "TERM": "dumb"},
            stdout=there,
            check=True,
        )
        os.close(there)
        text = terminal.read(1 << 16).decode()
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["name", "epoch", "batch", "saved", "size", "state"]
    assert [line.split()[0] for line in lines[1:]] == [ONE, TWO, THREE]
    assert all(line.endswith("committed") for line in lines[1:])


def test_ls_lists_a_bucket_beside_a_folder(demo: Path, bucket: str) -> None:
    """Places may be URIs; each checkpoint is told to be local or remote."""
    published(demo, bucket)
    found = answer("checkpoint", "ls", "demo", f"{bucket}/demo", cwd=demo.parent)["checkpoints"]
    assert [(one["name"], one["where"], one["state"]) for one in found] == [
        (name, where, "committed") for where in ("local", "remote") for name in (ONE, TWO, THREE)
    ]
    assert found[-1]["uri"] == f"{bucket}/demo/{THREE}"
    assert answer("checkpoint", "ls", bucket, cwd=demo.parent)["checkpoints"][0]["name"] == f"demo/{ONE}"


def test_what_cannot_be_listed_is_one_line(tmp_path: Path, bucket: str) -> None:
    """A folder that is not there, an unknown scheme, a bucket that does not exist: an error, and never "none"."""
    for place, status, words in (
        ("absent", 1, "'absent' does not exist"),
        ("s4://bucket/run", 2, "unknown scheme 's4'"),
        (f"{bucket}-absent/run", 1, "bucket"),
        ("https://example.com/run", 2, "not an object store"),
    ):
        for verb in ("ls", "latest"):
            done = composerlite("checkpoint", verb, place, cwd=tmp_path)
            assert (done.returncode, done.stdout) == (status, ""), done.stderr
            assert done.stderr.startswith("composerlite: error: ")
            assert done.stderr.count("\n") == 1
            assert words in done.stderr


# ── latest ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_latest_is_the_newest_that_is_whole(demo: Path, bucket: str) -> None:
    """One line that other commands take: a path or a URI. What is torn is passed over."""
    published(demo, bucket)
    assert composerlite("checkpoint", "latest", "demo", cwd=demo.parent).stdout == f"demo/{THREE}\n"
    (demo / THREE).unlink()
    assert composerlite("checkpoint", "latest", "demo", cwd=demo.parent).stdout == f"demo/{TWO}\n"
    both = composerlite("checkpoint", "latest", "demo", f"{bucket}/demo", cwd=demo.parent)
    assert both.stdout == f"{bucket}/demo/{THREE}\n"


def test_latest_has_status_1_where_there_is_none(tmp_path: Path) -> None:
    """Nothing on stdout: a script sees it by the status."""
    (tmp_path / "empty").mkdir()
    done = composerlite("checkpoint", "latest", "empty", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("composerlite: error: no committed checkpoint in empty")


# ── verify ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_verify_reads_every_byte(demo: Path) -> None:
    """One byte that differs is found, the status is 1; the others are verified; what has no record is unverified."""
    assert "verified" in composerlite("checkpoint", "verify", f"demo/{ONE}", cwd=demo.parent).stdout
    flip(demo / ONE, at=9000)
    torch.save(torch.load(demo / TWO, weights_only=False), demo / TWO)
    done = composerlite("checkpoint", "verify", "demo", "--json", cwd=demo.parent)
    assert done.returncode == 1
    found = {one["name"]: one for one in json.loads(done.stdout)["checkpoints"]}
    assert {name: one["state"] for name, one in found.items()} == {
        ONE: "damaged",
        THREE: "verified",
        TWO: "unverified",
    }
    assert set(found[ONE]) == {"name", "uri", "state", "copy_of", "faults", "size_bytes"}
    assert "differ from the saved bytes" in found[ONE]["faults"][0]
    assert done.stderr.endswith("1 of 3 checkpoints are damaged\n")
    lines = composerlite("checkpoint", "verify", "demo", cwd=demo.parent).stdout.splitlines()
    assert "damaged: the bytes of" in lines[1]


def test_verify_finds_a_flipped_byte_anywhere(demo: Path) -> None:
    """In the body and in the record, of a copy under another name, too: whole it is verified, and says what it is."""
    copy = demo.parent / "elsewhere" / "x.pt"
    copy.parent.mkdir()
    shutil.copy(demo / ONE, copy)
    (found,) = answer("checkpoint", "verify", copy, cwd=demo.parent)["checkpoints"]
    assert (found["state"], found["copy_of"], found["faults"]) == ("verified", ONE, [])
    shown = composerlite("checkpoint", "verify", copy, cwd=demo.parent).stdout
    assert f"verified: a copy of '{ONE}'" in shown
    whole = copy.read_bytes()
    with place_at(str(copy.parent)) as place:
        (record,) = Pointed(place, "x.pt", "x.pt").the_one().records
    tail = range(len(whole) - record.tail_bytes, len(whole))
    for at in [*range(0, tail.start, 997), tail.start - 1, *tail[:60], *tail[:: len(tail) // 40], *tail[-60:]]:
        copy.write_bytes(whole)
        flip(copy, at=at)
        with place_at(str(copy.parent)) as place:
            state, _ = verdict(Pointed(place, "x.pt", "x.pt").the_one(), int)
        assert state == "damaged", at


def test_a_copy_made_by_hand_is_never_the_newest_nor_pruned(demo: Path) -> None:
    """``ls`` names the checkpoint that it is a copy of; ``latest``, ``prune`` and ``gc`` leave it alone."""
    shutil.copy(demo / THREE, demo / "best.pt")
    (demo / THREE).unlink()
    found = {one["name"]: one for one in answer("checkpoint", "ls", "demo", cwd=demo.parent)["checkpoints"]}
    assert [found["best.pt"][key] for key in ("state", "copy_of", "batch")] == ["copy", THREE, 12]
    assert f"a copy of '{THREE}'" in composerlite("checkpoint", "ls", "demo", cwd=demo.parent).stdout
    assert composerlite("checkpoint", "latest", "demo", cwd=demo.parent).stdout == f"demo/{TWO}\n"
    composerlite("checkpoint", "prune", "demo", "--keep-last", 1, cwd=demo.parent)
    composerlite("checkpoint", "gc", "demo", "--older-than", "0s", cwd=demo.parent)
    assert sorted(path.name for path in demo.glob("*.pt") if path.exists()) == sorted(["best.pt", TWO])


def test_a_folder_that_was_moved_is_listed_as_it_was(demo: Path) -> None:
    """The record has the name below the run's folder, and a name with folders is found by its path alone."""
    train(demo, epochs=1, save_filename="sub/ep{epoch}.pt", run_name="other")
    (demo.parent / "archive").mkdir()
    demo.rename(demo.parent / "archive/old")
    found = answer("checkpoint", "ls", "archive", cwd=demo.parent)["checkpoints"]
    assert {one["name"]: one["state"] for one in found} == dict.fromkeys(
        [*(f"old/{name}" for name in (ONE, TWO, THREE)), "old/sub/ep1.pt"], "committed"
    )
    for cwd, path in ((demo.parent, "archive/old/sub/ep1.pt"), (demo.parent / "archive/old/sub", "ep1.pt")):
        (found,) = answer("checkpoint", "verify", path, cwd=cwd)["checkpoints"]
        assert (found["name"], found["state"], found["copy_of"]) == ("sub/ep1.pt", "verified", None)
        assert Path(cwd, found["uri"]).samefile(demo.parent / "archive/old/sub/ep1.pt")
        assert not Path(found["uri"]).is_absolute()
    composerlite("checkpoint", "cp", "archive/old/sub/ep1.pt", "there", cwd=demo.parent)
    (found,) = answer("checkpoint", "ls", "there", cwd=demo.parent)["checkpoints"]
    assert (found["name"], found["state"], found["copy_of"]) == ("sub/ep1.pt", "committed", None)


def test_a_checkpoint_in_a_subfolder_of_a_bucket_is_no_copy(demo: Path, bucket: str) -> None:
    """``verify`` and ``cp`` of one object know its name in the run."""
    train(demo, epochs=1, save_filename="sub/ep{epoch}.pt", run_name="other")
    composerlite("checkpoint", "push", "demo", f"{bucket}/old", "sub/ep1.pt", cwd=demo.parent)
    (found,) = answer("checkpoint", "verify", f"{bucket}/old/sub/ep1.pt", cwd=demo.parent)["checkpoints"]
    assert (found["name"], found["state"], found["copy_of"]) == ("sub/ep1.pt", "verified", None)
    assert found["uri"] == f"{bucket}/old/sub/ep1.pt"


def test_verify_lists_all_that_is_wrong_with_a_directory(tmp_path: Path) -> None:
    """Each file of a directory that is missing or differs is named."""
    Checkpointer().save(tmp_path / "step1", torch.nn.Linear(4, 2), {})
    (data,) = (tmp_path / "step1").rglob("*.distcp")
    (tmp_path / "step1/train/rank0.pt").unlink()
    flip(data, at=100)
    for place in ("step1", "."):
        done = composerlite("checkpoint", "verify", place, "--json", cwd=tmp_path)
        assert done.returncode == 1
        (found,) = json.loads(done.stdout)["checkpoints"]
        assert (found["name"], found["state"]) == ("step1", "damaged")
        missing, differs = sorted(found["faults"])
        assert missing == "step1/train/rank0.pt is missing"
        assert f"{data.name}' differ from the saved bytes" in differs


def test_verify_of_a_directory_that_has_lost_its_index_fails(tmp_path: Path) -> None:
    """It says so, and exits with 1. In a folder, it may be a save that goes on: it is unverified."""
    save_model_and_optim_state(tmp_path / "ep1", torch.nn.Linear(4, 2))
    (tmp_path / "ep1/.metadata").unlink()
    done = composerlite("checkpoint", "verify", "ep1", "--json", cwd=tmp_path)
    assert done.returncode == 1
    (found,) = json.loads(done.stdout)["checkpoints"]
    assert (found["name"], found["state"]) == ("ep1", "damaged")
    assert ".metadata is missing" in found["faults"][0]
    (found,) = answer("checkpoint", "verify", ".", cwd=tmp_path)["checkpoints"]
    assert (found["name"], found["state"]) == ("ep1", "unverified")


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_what_another_program_has_written_again_is_unverified(tmp_path: Path) -> None:
    """As a load takes it: it is no damage. Damage beside it is damage, in what a rank remembers, too."""
    Checkpointer().save(tmp_path / "step2", torch.nn.Linear(4, 2), {"step": 2})
    model = load_keys(tmp_path / "step2/model_and_optim", ["model"])
    dcp.save({"model": next(iter(model))}, checkpoint_id=tmp_path / "step2/model_and_optim", no_dist=True)
    (found,) = answer("checkpoint", "verify", "step2", cwd=tmp_path)["checkpoints"]
    assert found["state"] == "unverified"
    assert "It has no record" in found["faults"][0]
    flip(tmp_path / "step2/train/rank0.pt", at=-100)
    done = composerlite("checkpoint", "verify", "step2", "--json", cwd=tmp_path)
    assert done.returncode == 1
    assert json.loads(done.stdout)["checkpoints"][0]["state"] == "damaged"


def test_verify_reads_a_bucket(demo: Path, bucket: str) -> None:
    """Objects are compared as they come, by checkpoint, by link and by folder."""
    published(demo, bucket)
    assert answer("checkpoint", "verify", f"{bucket}/demo/latest-rank0.pt", cwd=demo.parent)["checkpoints"] == [
        {
            "name": THREE,
            "uri": f"{bucket}/demo/{THREE}",
            "state": "verified",
            "copy_of": None,
            "faults": [],
            "size_bytes": (demo / THREE).stat().st_size,
        }
    ]
    flip(demo / TWO)
    with open_store(bucket) as store:
        store.upload_object(f"demo/{TWO}", demo / TWO)
        store.delete_object(f"demo/{ONE}")
    done = composerlite("checkpoint", "verify", f"{bucket}/demo", "--json", cwd=demo.parent)
    assert done.returncode == 1
    states = {one["name"]: one["state"] for one in json.loads(done.stdout)["checkpoints"]}
    assert states == {TWO: "damaged", THREE: "verified"}


def test_verify_of_nothing_does_not_succeed(tmp_path: Path) -> None:
    """A script that verifies an empty folder, or a name that is not there, learns it."""
    (tmp_path / "empty").mkdir()
    for target, words in (
        ("empty", "there is nothing to verify"),
        ("empty/ep1.pt", "neither a checkpoint nor a folder"),
    ):
        done = composerlite("checkpoint", "verify", target, cwd=tmp_path)
        assert done.returncode == 1
        assert words in done.stderr


# ── inspect ──────────────────────────────────────────────────────────────────────────────────────────────────────
def tensors(told: Any) -> dict[str, tuple[str, list[int], int]]:
    """Type, shape and bytes of each tensor of the model."""
    return {
        entry["key"].rpartition("model.")[2]: (entry["dtype"], entry["shape"], entry["size_bytes"])
        for entry in told["entries"]
        if entry["kind"] == "tensor" and "model." in entry["key"]
    }


@pytest.mark.parametrize("suffix", [".pt", ".pt.gz", ".tar.gz"])
def test_inspect_shows_keys_shapes_and_types(suffix: str, tmp_path: Path) -> None:
    """Of a file, of a compressed one and of an archive, without a tensor's bytes being asked for in vain."""
    train(tmp_path / "demo", epochs=1, save_filename=f"ep{{epoch}}{suffix}")
    told = answer("checkpoint", "inspect", f"demo/ep1{suffix}", cwd=tmp_path)
    assert tensors(told)["module.0.weight"] == ("float32", [32, 8], 1024)
    assert told["tensor_bytes"] == sum(e["size_bytes"] for e in told["entries"] if e["kind"] == "tensor")
    assert [told[key] for key in ("kind", "epoch", "state")] == ["monolithic", 1, "committed"]
    shown = composerlite("checkpoint", "inspect", f"demo/ep1{suffix}", "--depth", "2", cwd=tmp_path).stdout
    assert "\nstate  " in shown
    assert "\n  model  4 tensors, 1.4 kB\n" in shown
    assert "0.weight" not in shown


def test_inspect_reads_no_tensors(demo: Path) -> None:
    """The numbers of a tensor may be damaged: its shape is told all the same, where there is no record."""
    torch.save(torch.load(demo / ONE, weights_only=False), demo / ONE)
    whole = (demo / ONE).read_bytes()
    weights = torch.load(demo / ONE)["state"]["model"]["module.0.weight"].numpy().tobytes()
    (demo / ONE).write_bytes(whole.replace(weights, bytes(len(weights))))
    assert (demo / ONE).read_bytes() != whole
    told = answer("checkpoint", "inspect", f"demo/{ONE}", cwd=demo.parent)
    assert tensors(told)["module.0.weight"] == ("float32", [32, 8], 1024)


def test_inspect_of_a_copy_shows_its_run(demo: Path) -> None:
    """Run, batch and metrics are in the file, under any name."""
    shutil.copy(demo / TWO, demo.parent / "x.pt")
    told = answer("checkpoint", "inspect", "x.pt", cwd=demo.parent)
    assert [told[key] for key in ("run_name", "batch", "state", "copy_of", "system")] == [
        "demo",
        8,
        "copy",
        TWO,
        "composerlite",
    ]
    assert list(told["metrics"]) == ["train/MulticlassAccuracy"]
    head, metrics, *_ = composerlite("checkpoint", "inspect", "x.pt", cwd=demo.parent).stdout.splitlines()
    assert "run demo, epoch 2, batch 8" in head
    assert head.endswith(f"a copy of '{TWO}'")
    assert metrics.startswith("metrics: train/MulticlassAccuracy 0.")


def test_inspect_shows_directories_steps_and_safetensors(tmp_path: Path) -> None:
    """Sharded directories by their index, steps with what the ranks remember, safetensors by their header."""
    model = torch.nn.Linear(8, 4)
    save_model_and_optim_state(tmp_path / "ep1", model)
    Checkpointer().save(tmp_path / "step5", model, {"step": 5})
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    weight = ("float32", [4, 8], 128)
    assert tensors(answer("checkpoint", "inspect", "ep1", cwd=tmp_path))["weight"] == weight
    step = answer("checkpoint", "inspect", "step5", cwd=tmp_path)
    assert tensors(step)["weight"] == weight
    assert {"key": "train/rank0.pt.step", "value": "5"}.items() <= step["entries"][-1].items()
    (found,) = [
        e for e in answer("checkpoint", "inspect", "model.safetensors", cwd=tmp_path)["entries"] if e["shape"] == [4, 8]
    ]
    assert (found["dtype"], found["size_bytes"]) == ("float32", 128)


def test_inspect_reads_little_of_an_object(demo: Path, bucket: str) -> None:
    """A file in a bucket is told as one on the disk is; a compressed one is brought here first."""
    train(demo, epochs=1, save_filename="packed.pt.gz", run_name="packed", save_overwrite=True)
    published(demo, bucket)
    for name in (THREE, "packed.pt.gz"):
        there = answer("checkpoint", "inspect", f"{bucket}/demo/{name}", cwd=demo.parent)
        here = answer("checkpoint", "inspect", f"demo/{name}", cwd=demo.parent)
        assert there["entries"] == here["entries"]


def test_inspect_runs_nothing_that_a_file_holds(tmp_path: Path) -> None:
    """A checkpoint that names code is refused in one line, which names what it names."""
    torch.save({"state": Attack()}, tmp_path / "evil.pt")
    done = composerlite("checkpoint", "inspect", "evil.pt", cwd=tmp_path)
    assert done.returncode == 1
    assert "posix.system" in done.stderr or "os.system" in done.stderr
    assert not (tmp_path / "ran").exists()


class Attack:
    """Pickled, it says that a command is to be run."""

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("touch ran",)


def test_inspect_wants_one_checkpoint(demo: Path) -> None:
    """A folder of several is a wrong command; a name that is not there is told."""
    assert composerlite("checkpoint", "inspect", "demo", cwd=demo.parent).returncode == 2
    done = composerlite("checkpoint", "inspect", "demo/ep9.pt", cwd=demo.parent)
    assert done.returncode == 1
    assert "there is neither a checkpoint nor a folder of checkpoints at 'demo/ep9.pt'" in done.stderr


# ── weight ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "demo"],
        ["ls", "demo", "--json"],
        ["latest", "demo"],
        ["verify", "demo"],
    ],
    ids=" ".join,
)
def test_torch_is_not_imported_to_look(arguments: list[str], demo: Path) -> None:
    """Manifests suffice: the answer is there before torch would be."""
    code = (
        "import sys\n"
        "from composerlite.cli.app import app\n"
        f"app({['checkpoint', *arguments]!r}, standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=demo.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
