"""``composerlite checkpoint prune`` and ``gc``: what goes, what stays, and that a dry run does nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import answer, composerlite, published, train

from composerlite.checkpoint import Catalog, Checkpointer
from composerlite.checkpoint.tools.surveying import place_at, remove, survey
from composerlite.errors import ConfigError
from composerlite.storage import StagedFile, Transfer, open_store

ONE, TWO, THREE = (f"ep{epoch}-ba{4 * epoch}-rank0.pt" for epoch in (1, 2, 3))
DEAD = "tmp-0123456789abcdef"


def everything(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, with what is in the files."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def names(folder: Path) -> list[str]:
    """The checkpoints that ``ls`` lists."""
    return [found["name"] for found in answer("checkpoint", "ls", folder.name, cwd=folder.parent)["checkpoints"]]


# ── prune ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_prune_keeps_the_newest(demo: Path) -> None:
    """What goes is told with its size, and nothing of it is left; links lead where they led."""
    sizes = [(demo / name).stat().st_size for name in (ONE, TWO)]
    told = answer("checkpoint", "prune", "demo", "--keep-last", 1, cwd=demo.parent)
    assert told == {
        "dry_run": False,
        "removed": [
            {"uri": f"demo/{name}", "size_bytes": size, "why": None}
            for name, size in zip((ONE, TWO), sizes, strict=True)
        ],
        "kept": [f"demo/{THREE}"],
        "freed_bytes": sum(sizes),
    }
    assert sorted(path.name for path in demo.glob("*.pt")) == [THREE, "latest-rank0.pt"]
    assert [path for path in demo.rglob("*") if ONE in path.name or TWO in path.name] == []
    assert (demo / "latest-rank0.pt").resolve() == (demo / THREE).resolve()


def test_prune_follows_the_attempt_that_lives(demo: Path) -> None:
    """A run that was started over: its newest stays, ``latest`` leads to it, and the old attempt goes if asked for."""
    train(demo, epochs=1, save_overwrite=True)
    listed = answer("checkpoint", "ls", "demo", cwd=demo.parent)["checkpoints"]
    assert {one["name"]: one["abandoned"] for one in listed} == {ONE: False, TWO: True, THREE: True}
    assert answer("checkpoint", "latest", "demo", cwd=demo.parent)["name"] == ONE
    assert answer("checkpoint", "prune", "demo", "--keep-last", 1, cwd=demo.parent)["removed"] == []
    gone = answer("checkpoint", "prune", "demo", "--abandoned", cwd=demo.parent)["removed"]
    assert [one["uri"] for one in gone] == [f"demo/{TWO}", f"demo/{THREE}"]
    assert names(demo) == [ONE]
    assert (demo / "latest-rank0.pt").resolve() == (demo / ONE).resolve()


def test_prune_leaves_what_a_link_leads_to(demo: Path) -> None:
    """A run that was killed between a commit and its link: ``latest`` leads to the one before, which stays for now."""
    (demo / "latest-rank0.pt").unlink()
    (demo / "latest-rank0.pt").symlink_to(TWO)
    gone = answer("checkpoint", "prune", "demo", "--keep-last", 1, cwd=demo.parent)["removed"]
    assert [one["uri"] for one in gone] == [f"demo/{ONE}"]
    assert (demo / "latest-rank0.pt").exists()


def test_prune_leaves_directories_that_links_lead_to(tmp_path: Path) -> None:
    """The user's own link ``best`` to a step, one to a file in a step, and an absolute one through a linked folder."""
    model = torch.nn.Linear(4, 2)
    for step in (10, 20, 30, 40, 50):
        Checkpointer().save(tmp_path / f"steps/step{step}", model, {"step": step})
    (tmp_path / "linked").symlink_to("steps")
    (tmp_path / "steps/best").symlink_to("step10")
    (tmp_path / "steps/index").symlink_to("step20/model_and_optim/.metadata")
    (tmp_path / "steps/absolute").symlink_to(tmp_path / "linked/step30")
    gone = answer("checkpoint", "prune", "steps", "--keep-last", 1, cwd=tmp_path)["removed"]
    assert [one["uri"] for one in gone] == ["steps/step40"]
    assert all((tmp_path / "steps" / link).exists() for link in ("best", "index", "absolute"))


@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_prune_leaves_what_a_run_saves_meanwhile(where: str, demo: Path, bucket: str) -> None:
    """``prune --abandoned`` beside the run that was started over, which has saved one of the old names by the time that
    it would go: the new one, the newest of the run, stays."""
    if where == "bucket":
        published(demo, bucket)
    with place_at(f"{bucket}/demo" if where == "bucket" else str(demo)) as place:
        listed = {one.name: one for one in survey(place)}
        train(demo, epochs=2, save_overwrite=True)
        if where == "bucket":
            published(demo, bucket)
        assert not remove(listed[TWO])
        catalog = Catalog(place)
        for manifest in catalog.manifests():
            catalog.verify(manifest)
        assert {ONE, TWO} < {manifest.name for manifest in catalog.manifests()}
        assert remove(listed[THREE])
        assert [manifest.name for manifest in catalog.manifests()] == [ONE, TWO]


def test_prune_in_a_bucket_leaves_what_a_link_leads_to(demo: Path, bucket: str) -> None:
    """There, too: the object of the link names the checkpoint before the newest."""
    published(demo, bucket)
    with open_store(bucket) as store, Transfer(store) as transfer:
        transfer.put_bytes("demo/latest-rank0.pt.symlink", f"demo/{TWO}".encode())
    gone = answer("checkpoint", "prune", f"{bucket}/demo", "--keep-last", 1, cwd=demo.parent)["removed"]
    assert [one["uri"] for one in gone] == [f"{bucket}/demo/{ONE}"]


def test_a_dry_run_changes_nothing(demo: Path) -> None:
    """``prune`` and ``gc`` tell what they would do."""
    (demo / f".x.{DEAD}").write_bytes(b"left")
    (demo / "other.pt").write_bytes(b"data")
    before = everything(demo)
    told = composerlite("checkpoint", "prune", "demo", "--keep-last", 2, "--dry-run", cwd=demo.parent).stdout
    assert told.splitlines()[0].startswith(f"would remove demo/{ONE} (")
    told = composerlite("checkpoint", "gc", "demo", "--older-than", "0s", "--dry-run", cwd=demo.parent).stdout
    assert told.splitlines() == [
        f"would remove demo/.x.{DEAD} (4 B): an unfinished file",
        "would remove 1, 4 B",
    ]
    assert everything(demo) == before


def test_rules_are_those_of_training(demo: Path) -> None:
    """``--keep-every`` and ``--best-k`` keep what the Trainer's arguments keep; any rule's yes counts."""
    keeps = {
        ("--keep-every", "2ep"): [TWO, THREE],
        ("--keep-every", "4ba", "--keep-last", "1"): [ONE, TWO, THREE],
        ("--best-k", "1", "--best-metric", "train/MulticlassAccuracy", "--best-mode", "min"): None,
    }
    metrics = {
        found["name"]: found["metrics"]["train/MulticlassAccuracy"]
        for found in answer("checkpoint", "ls", "demo", cwd=demo.parent)["checkpoints"]
    }
    worst = min(reversed(metrics), key=lambda name: metrics[name])
    for rules, kept in keeps.items():
        told = answer("checkpoint", "prune", "demo", *rules, "--dry-run", cwd=demo.parent)
        expected = sorted({worst, THREE}) if kept is None else kept
        assert told["kept"] == [f"demo/{name}" for name in expected]


def test_each_run_counts_by_itself(demo: Path) -> None:
    """In a folder of many runs the newest of each stays, and ``--run`` touches only one."""
    train(demo.parent / "other", epochs=2, run_name="other")
    told = answer("checkpoint", "prune", ".", "--keep-last", 1, "--run", "other", cwd=demo.parent)
    assert [one["uri"] for one in told["removed"]] == [f"other/{ONE}"]
    told = answer("checkpoint", "prune", ".", "--keep-last", 1, cwd=demo.parent)
    assert [one["uri"] for one in told["removed"]] == [f"demo/{ONE}", f"demo/{TWO}"]
    assert names(demo) == [THREE]


def test_what_is_torn_does_not_count_as_kept(demo: Path) -> None:
    """If the newest is not whole the one before it is the newest, and stays. What is torn stays as it is."""
    (demo / THREE).write_bytes(b"torn")
    told = answer("checkpoint", "prune", "demo", "--keep-last", 1, cwd=demo.parent)
    assert [one["uri"] for one in told["removed"]] == [f"demo/{ONE}"]
    assert names(demo) == [TWO, THREE]


def test_prune_removes_steps_and_their_folders(tmp_path: Path) -> None:
    """Directories of a Checkpointer go whole, but for what the user has put there."""
    model = torch.nn.Linear(4, 2)
    for step in (10, 20, 30):
        Checkpointer().save(tmp_path / f"steps/step{step}", model, {"step": step})
    (tmp_path / "steps/step20/notes.txt").write_text("mine")
    told = answer("checkpoint", "prune", "steps", "--keep-last", 1, cwd=tmp_path)
    assert [one["uri"] for one in told["removed"]] == ["steps/step10", "steps/step20"]
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == ["step20", "step30"]
    assert [path.name for path in (tmp_path / "steps/step20").rglob("*") if path.is_file()] == ["notes.txt"]


def test_prune_works_on_a_bucket(demo: Path, bucket: str) -> None:
    """Manifest and data go; what is left is listed and verified."""
    published(demo, bucket)
    told = answer("checkpoint", "prune", f"{bucket}/demo", "--keep-last", 1, cwd=demo.parent)
    assert told["kept"] == [f"{bucket}/demo/{THREE}"]
    with open_store(bucket) as store:
        left = [info.name for info in store.list_objects("demo/")]
    assert [name for name in left if ONE in name or TWO in name] == []
    assert composerlite("checkpoint", "verify", f"{bucket}/demo", cwd=demo.parent).returncode == 0


def test_a_wrong_rule_is_one_line_and_status_2(demo: Path) -> None:
    """Nothing is removed for a command that could not be meant so."""
    before = everything(demo)
    for arguments, words in (
        ([], "no rule is given. Pass --keep-last, --keep-every, --best-k or --abandoned."),
        (["--best-k", "2"], "best_k=2, best_metric=None: expected both"),
        (["--keep-every", "10"], "invalid time '10'"),
        (["--keep-every", "0.5dur"], "the length of training is not known"),
        (["--best-k", "2", "--best-metric", "x", "--best-mode", "most"], "best_mode='most'"),
        (["--keep-last", "0"], "--keep-last"),
        (["--keep-last", "1", "--run", ""], "--run : no checkpoint of this run was found"),
    ):
        done = composerlite("checkpoint", "prune", "demo", *arguments, cwd=demo.parent)
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr
    assert everything(demo) == before


def test_a_metric_or_a_run_that_no_checkpoint_has_removes_nothing(demo: Path) -> None:
    """A misspelt name is no rule by which all others go: the message tells what there is, for all places before any."""
    for step in (1, 2):
        Checkpointer().save(demo.parent / f"other/step{step}", torch.nn.Linear(4, 2), {"step": step})
    before = everything(demo.parent)
    for arguments, words in (
        (["demo", "--best-k", "1", "--best-metric", "train/MulticlassAcuracy"], "Did you mean 'train/Mu"),
        (
            ["demo", "other", "--best-k", "1", "--best-metric", "train/MulticlassAccuracy"],
            "has this metric, such as other/step",
        ),
        (["demo", "--keep-last", "1", "--run", "dmo"], "--run dmo: no checkpoint of this run was found. Did you mean"),
    ):
        done = composerlite("checkpoint", "prune", *arguments, cwd=demo.parent)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert words in done.stderr
    assert everything(demo.parent) == before
    best = ["--best-k", "1", "--best-metric", "train/MulticlassAccuracy", "--run", "demo"]
    assert composerlite("checkpoint", "prune", "demo", "other", *best, cwd=demo.parent).returncode == 0


def test_an_empty_place_is_refused(demo: Path) -> None:
    """A variable that is not set: ``""`` is no folder, and never the current one."""
    before = everything(demo.parent)
    commands = (
        ["prune", "", "--keep-last", 1],
        ["gc", "demo", "", "--older-than", "0s"],
        ["ls", ""],
        ["latest", " "],
        ["verify", ""],
        ["inspect", ""],
        ["cp", f"demo/{ONE}", ""],
        ["push", "", "s3://bucket/demo"],
        ["convert", f"demo/{ONE}", ""],
    )
    for arguments in commands:
        done = composerlite("checkpoint", *arguments, cwd=demo.parent)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert "expected a path or a URI" in done.stderr
    with pytest.raises(ConfigError, match="load_path=''"):
        train(demo, run_name="other", load_path="")
    assert everything(demo.parent) == before


@pytest.mark.parametrize("order", [("run/sub", "run"), ("run", "run/sub")])
def test_a_place_inside_a_run_folder_hides_nothing(tmp_path: Path, order: tuple[str, str]) -> None:
    """Seen from the inner folder, checkpoints that were saved with a folder in their names look like copies."""
    train(tmp_path / "run", save_filename="sub/ep{epoch}.pt", save_latest_filename=None)
    removed = answer("checkpoint", "prune", *order, "--keep-last", 1, cwd=tmp_path)["removed"]
    assert len(removed) == 2
    assert names(tmp_path / "run") == ["sub/ep3.pt"]


# ── gc ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_gc_removes_what_dead_processes_left(demo: Path) -> None:
    """Temporaries and saves whose process has died go; those of a process that lives, and checkpoints, stay."""
    (demo / f".{ONE}.{DEAD}").write_bytes(b"half")
    before = names(demo)
    with StagedFile(demo / "ep8.pt") as alive:
        told = answer("checkpoint", "gc", "demo", cwd=demo.parent)
        assert alive.temporary.exists()
    assert [(one["uri"], one["size_bytes"], one["why"]) for one in told["removed"]] == [
        (f"demo/.{ONE}.{DEAD}", 4, "an unfinished file"),
    ]
    assert told["freed_bytes"] == 4
    assert names(demo) == before


def test_gc_ends_old_uploads_of_a_bucket(demo: Path, bucket: str) -> None:
    """Parts of uploads that were never completed, of this prefix only, by the clock of the store; a file stays."""
    published(demo, bucket)
    with open_store(bucket) as store:
        for name in ("demo/ep9.pt", "other/ep9.pt"):
            upload = store.start_parts(name)
            assert upload is not None
            upload.send(1, memoryview(bytes(5 << 20)))
        store.put_bytes("demo/other.pt", b"data")
        assert answer("checkpoint", "gc", f"{bucket}/demo", cwd=demo.parent)["removed"] == []
        told = answer("checkpoint", "gc", f"{bucket}/demo", "--older-than", "0s", cwd=demo.parent)
        assert [one["uri"] for one in told["removed"]] == [f"{bucket}/demo/ep9.pt"]
        assert [upload.name for upload in store.unfinished_parts("")] == ["other/ep9.pt"]
    assert len(answer("checkpoint", "ls", f"{bucket}/demo", cwd=demo.parent)["checkpoints"]) == 4


@pytest.mark.parametrize("arguments", [["prune", "demo", "--keep-every", "2ep"], ["gc", "demo"]], ids=" ".join)
def test_torch_is_not_imported_to_clean_up(arguments: list[str], demo: Path) -> None:
    """Manifests suffice to know what may go."""
    code = (
        "import sys\n"
        "from composerlite.cli.app import app\n"
        f"app({['checkpoint', *arguments]!r}, standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=demo.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
