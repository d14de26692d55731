"""``composerlite checkpoint diff``, ``convert`` and ``unshard``: another form of a checkpoint holds the same."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from commands import answer, composerlite, published, train
from forked import run_forked

from composerlite.checkpoint import (
    Checkpointer,
    load_model_and_optim_state,
    read_checkpoint,
    save_model_and_optim_state,
)
from composerlite.checkpoint.tools.comparing import compared, flat
from composerlite.cli import main

ONE, TWO, THREE = (f"ep{epoch}-ba{4 * epoch}-rank0.pt" for epoch in (1, 2, 3))


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Those of the model in a checkpoint file."""
    return read_checkpoint(path)["state"]["model"]


# ── diff ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_diff_tells_by_how_much_weights_changed(demo: Path) -> None:
    """The largest change first, with its norm; the keys of the answer are these."""
    told = answer("checkpoint", "diff", f"demo/{ONE}", f"demo/{THREE}", cwd=demo.parent)
    a, b = weights(demo / ONE), weights(demo / THREE)
    changes = told.pop("changes")
    assert {change["key"] for change in changes} == set(a)
    for change in changes:
        difference = a[change["key"]].double() - b[change["key"]].double()
        assert change["max_abs"] == difference.abs().max().item()
        assert change["norm"] == pytest.approx(difference.norm().item())
        assert change["relative"] == pytest.approx((difference.norm() / a[change["key"]].double().norm()).item())
        assert change["shape"] == list(difference.shape)
    assert [change["max_abs"] for change in changes] == sorted((c["max_abs"] for c in changes), reverse=True)
    assert told == {
        "a": f"demo/{ONE}",
        "b": f"demo/{THREE}",
        "equal": False,
        "equal_count": 0,
        "changed_count": 4,
        "only_a": [],
        "only_b": [],
        "forms": [],
        "values": [],
    }


def test_diff_tells_what_only_one_has_and_other_forms(tmp_path: Path) -> None:
    """Keys, shapes and types that differ; numbers that are not a number are equal to themselves."""
    nan = torch.tensor([float("nan"), float("inf"), 1.0])
    torch.save({"same": nan, "shape": torch.zeros(2), "type": torch.zeros(2), "old": torch.zeros(1)}, tmp_path / "a.pt")
    torch.save(
        {"same": nan, "shape": torch.zeros(3), "type": torch.zeros(2).half(), "new": torch.zeros(1)}, tmp_path / "b.pt"
    )
    told = answer("checkpoint", "diff", "a.pt", "b.pt", cwd=tmp_path)
    assert (told["only_a"], told["only_b"], told["equal_count"]) == (["old"], ["new"], 1)
    assert told["forms"] == [
        {"key": "shape", "a": "float32 [2]", "b": "float32 [3]"},
        {"key": "type", "a": "float32 [2]", "b": "float16 [2]"},
    ]
    lines = composerlite("checkpoint", "diff", "a.pt", "b.pt", cwd=tmp_path).stdout.splitlines()
    assert lines[:3] == ["only in a.pt: old", "only in b.pt: new", "shape: float32 [2] in a.pt, float32 [3] in b.pt"]


def test_diff_of_all_compares_optimizer_time_and_generators(demo: Path) -> None:
    """What is not compared unless it is asked for; the status says whether they differ if that is asked for, too."""
    state = read_checkpoint(demo / ONE)
    state["state"]["timestamp"]["Timestamp"]["batch"] = 7
    torch.save(state, demo / "other.pt")
    same = composerlite("checkpoint", "diff", f"demo/{ONE}", "demo/other.pt", "--exit-code", cwd=demo.parent)
    assert same.returncode == 0, same.stderr
    done = composerlite(
        "checkpoint", "diff", f"demo/{ONE}", "demo/other.pt", "--all", "--exit-code", "--json", cwd=demo.parent
    )
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert told["values"] == [{"key": "state.timestamp.Timestamp.batch", "a": "4", "b": "7"}]
    assert told["changes"] == []
    assert told["equal_count"] > 50


def test_diff_compares_every_number_of_arrays_in_lists() -> None:
    """Also those in the middle of a long one, which ``repr`` leaves out."""
    one, other = np.zeros(3000), np.zeros(3000)
    other[1500] = 1
    found = compared(flat({"callbacks": [one, {}]}), flat({"callbacks": [other, {}]}))
    assert [(change.key, change.max_abs) for change in found.changes] == [("callbacks.0", 1.0)]
    assert compared(flat([(one,)]), flat([(other,)])).changes[0].key == "0.0"


def test_diff_tells_all_numbers_apart() -> None:
    """Integers that float64 does not tell apart differ, by how much, and so do values in the middle of a long array."""
    words = np.array(["a"] * 5000)
    other = words.copy()
    other[2500] = "b"
    pairs = {
        "near": (torch.tensor([2**53, 5]), torch.tensor([2**53 + 1, 5])),
        "far": (torch.tensor([2**63 - 1]), torch.tensor([-(2**63)])),
        "unsigned": (torch.tensor([2**64 - 2], dtype=torch.uint64), torch.tensor([2**64 - 1], dtype=torch.uint64)),
        "complex": (np.array([1 + 1e-12j]), np.array([1 + 2e-12j])),
        "words": (words, other),
        "same": (torch.tensor([2**53 + 1]), torch.tensor([2**53 + 1])),
    }
    a, b = ({key: pair[side] for key, pair in pairs.items()} for side in (0, 1))
    told = compared(flat(a), flat(b))
    assert {change.key: change.max_abs for change in told.changes} == {
        "far": 2.0**64,
        "near": 1.0,
        "unsigned": 1.0,
        "complex": pytest.approx(1e-12),
    }
    assert [key for key, _, _ in told.values] == ["words"]
    assert told.equal_count == 1


def test_diff_compares_places_and_forms(demo: Path, bucket: str) -> None:
    """A file in a bucket, a directory and the weights alone are the same model."""
    published(demo, bucket)
    for form in ("there", "there.safetensors"):
        composerlite("checkpoint", "convert", f"demo/{TWO}", form, cwd=demo.parent)
        told = answer("checkpoint", "diff", f"{bucket}/demo/{TWO}", form, cwd=demo.parent)
        assert (told["equal"], told["equal_count"]) == (True, 4)


# ── convert ──────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("to", ["state_dict", "directory", "file"])
def test_convert_replaces_files_only(to: str, demo: Path) -> None:
    """A pipe stays even with ``--overwrite``, and a checkpoint that is replaced leaves no record of other bytes."""
    form = ["--to", to] if to == "state_dict" else []
    pipe = demo / ("pipe.pt" if to == "file" else "pipe")
    os.mkfifo(pipe)
    done = composerlite("checkpoint", "convert", f"demo/{ONE}", pipe, *form, "--overwrite", cwd=demo.parent)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Pass another name" in done.stderr
    assert pipe.is_fifo()
    if form:
        composerlite("checkpoint", "convert", f"demo/{ONE}", f"demo/{TWO}", *form, "--overwrite", cwd=demo.parent)
        (found,) = answer("checkpoint", "verify", f"demo/{TWO}", cwd=demo.parent)["checkpoints"]
        assert found["state"] == "unverified"


def limited(*_: str) -> None:
    """The command on a disk that has no room for what it writes."""
    sys.dont_write_bytecode = True  # which would have no room either
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    main()


def test_a_conversion_without_room_leaves_what_it_was_to_replace(demo: Path) -> None:
    """The checkpoint of that name stays as it was, and a run resumes from it."""
    arguments = ["checkpoint", "convert", f"demo/{THREE}", f"demo/{TWO}", "--to", "state_dict", "--overwrite"]
    done = run_forked(limited, *arguments, cwd=demo.parent)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "File too large" in done.stderr
    (found,) = answer("checkpoint", "verify", f"demo/{TWO}", cwd=demo.parent)["checkpoints"]
    assert found["state"] == "verified"


def test_a_conversion_for_others_replaces_no_checkpoint_that_is_a_folder(demo: Path) -> None:
    """A folder of weights that was saved here stays with its manifest, also where files of its names would come."""
    assert composerlite("checkpoint", "convert", f"demo/{ONE}", "w", "--to", "safetensors", cwd=demo.parent).stdout
    done = composerlite(
        "checkpoint", "convert", f"demo/{THREE}", "w", "--to", "state_dict", "--overwrite", cwd=demo.parent
    )
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "'w' exists and is no file" in done.stderr
    assert "Pass another" in done.stderr
    (found,) = answer("checkpoint", "verify", "w", cwd=demo.parent)["checkpoints"]
    assert found["state"] == "verified"


@pytest.mark.parametrize("form", ["ep2", "ep2.pt", "ep2.pt.gz", "ep2.tar"])
def test_a_run_goes_on_from_a_converted_checkpoint(form: str, demo: Path) -> None:
    """Bit for bit as it would have from the original: a directory, a file of a directory, compressed, in an archive."""
    folder = demo.parent / "forms"
    assert composerlite("checkpoint", "convert", f"demo/{TWO}", "forms/step", cwd=demo.parent).returncode == 0
    told = answer("checkpoint", "convert", "forms/step", f"forms/{form}", cwd=demo.parent)
    assert told["form"] == ("file" if "." in form else "directory")
    found = {one["name"]: one for one in answer("checkpoint", "ls", "forms", cwd=demo.parent)["checkpoints"]}
    assert [found[form][key] for key in ("state", "run_name", "epoch", "batch")] == ["committed", "demo", 2, 8]
    assert composerlite("checkpoint", "verify", f"forms/{form}", cwd=demo.parent).returncode == 0
    difference = answer("checkpoint", "diff", f"demo/{TWO}", f"forms/{form}", "--all", cwd=demo.parent)
    assert difference["equal"], difference
    train(demo.parent / "again", load_path=str(folder / form))
    difference = answer("checkpoint", "diff", f"demo/{THREE}", f"again/{THREE}", "--all", cwd=demo.parent)
    assert difference["changes"] == []
    assert [one["key"] for one in difference["values"] if "wct" not in one["key"]] == []
    assert difference["only_a"] == difference["only_b"] == []


def test_files_of_other_systems_are_converted_and_compared(tmp_path: Path) -> None:
    """From Lightning to safetensors, and from that to a file; a folder of transformers is looked into."""
    data = Path(__file__).parents[1] / "data"
    composerlite("checkpoint", "convert", data / "lightning/step6.ckpt", "w.safetensors", cwd=tmp_path)
    saved = torch.load(data / "lightning/step6.ckpt")["state_dict"]
    loaded = safetensors.torch.load_file(tmp_path / "w.safetensors")
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    told = answer("checkpoint", "diff", data / "safetensors/sharded", data / "torch/weights.pt", cwd=tmp_path)
    assert told["equal"]
    told = answer("checkpoint", "inspect", data / "transformers/checkpoint-6", cwd=tmp_path)
    assert {"model.body.weight", "optimizer.pt"} <= {entry["key"] for entry in told["entries"]}


def test_weights_travel_as_safetensors(demo: Path) -> None:
    """Of a file, of a directory and of a step; and back to a file that a model takes, and a directory."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    composerlite("checkpoint", "convert", f"demo/{TWO}", "w/two.safetensors", cwd=demo.parent)
    loaded = safetensors.torch.load_file(demo.parent / "w/two.safetensors")
    expected = weights(demo / TWO)
    assert set(loaded) == set(expected)
    assert all(torch.equal(loaded[key], expected[key]) for key in loaded)
    composerlite("checkpoint", "convert", "w/two.safetensors", "w/two.pt", cwd=demo.parent)
    renamed = {key.removeprefix("module."): value for key, value in torch.load(demo.parent / "w/two.pt").items()}
    model.load_state_dict(renamed)
    torch.save(renamed, demo.parent / "w/plain.pt")
    composerlite("checkpoint", "convert", "w/plain.pt", "w/two", cwd=demo.parent)
    other = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    load_model_and_optim_state(demo.parent / "w/two", other)
    assert torch.equal(other[0].weight, model[0].weight)


def test_tied_weights_are_written_twice(tmp_path: Path) -> None:
    """safetensors takes no tensors that share memory: each gets its own."""
    tied = torch.arange(6.0)
    torch.save({"model": {"a": tied, "b": tied}}, tmp_path / "tied.pt")
    done = composerlite("checkpoint", "convert", "tied.pt", "tied.safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    loaded = safetensors.torch.load_file(tmp_path / "tied.safetensors")
    assert torch.equal(loaded["a"], tied)
    assert torch.equal(loaded["b"], tied)


def test_nothing_is_converted_over_something(demo: Path) -> None:
    """Unless it is asked for; and nothing is made of what is damaged."""
    before = (demo / TWO).read_bytes()
    done = composerlite("checkpoint", "convert", f"demo/{ONE}", f"demo/{TWO}", cwd=demo.parent)
    assert done.returncode == 1
    assert "exists already" in done.stderr
    assert (demo / TWO).read_bytes() == before
    assert (
        composerlite("checkpoint", "convert", f"demo/{ONE}", f"demo/{TWO}", "--overwrite", cwd=demo.parent).returncode
        == 0
    )
    assert answer("checkpoint", "diff", f"demo/{ONE}", f"demo/{TWO}", "--all", cwd=demo.parent)["equal"]
    data = bytearray((demo / ONE).read_bytes())
    data[900] ^= 1
    (demo / ONE).write_bytes(data)
    for target in ("out.pt", "out", "out.safetensors"):
        done = composerlite("checkpoint", "convert", f"demo/{ONE}", target, cwd=demo.parent)
        assert done.returncode == 1
        assert "differ from the saved bytes" in done.stderr
        assert not (demo.parent / target).exists()


def test_a_wrong_form_is_one_line(demo: Path) -> None:
    """What was given, what is wanted, and what to do."""
    for arguments, status, words in (
        (["convert", f"demo/{ONE}", "s3://bucket/ep1.pt"], 2, "expected a local path"),
        (["convert", f"demo/{ONE}", "ep1.zip"], 2, "unknown checkpoint format '.zip'"),
        (["convert", "demo", "ep1.pt"], 2, "is a folder of checkpoints"),
        (["diff", f"demo/{ONE}", "demo/ep9.pt"], 1, "neither a checkpoint nor a folder"),
        (["unshard", f"demo/{ONE}", "out"], 2, "is one file already"),
        (["unshard", f"demo/{ONE}", "out", "--per-tensor", "--chunk-bytes", "5"], 2, "expected one of them"),
    ):
        done = composerlite("checkpoint", *arguments, cwd=demo.parent)
        assert (done.returncode, done.stdout) == (status, ""), arguments
        assert words in done.stderr
        assert done.stderr.count("\n") == 1


# ── unshard ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_unshard_writes_what_torch_load_and_safetensors_open(tmp_path: Path) -> None:
    """Of directories and steps: one file, one for each tensor, or several; the optimizer where there is one."""
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    save_model_and_optim_state(tmp_path / "ep1", model, optimizer)
    Checkpointer().save(tmp_path / "step5", (model, optimizer), {"step": 5})
    for checkpoint in ("ep1", "step5"):
        told = answer("checkpoint", "unshard", checkpoint, f"out/{checkpoint}", cwd=tmp_path)
        assert told == {"model": f"out/{checkpoint}/model.pt", "optim": f"out/{checkpoint}/optim.pt"}
        assert torch.equal(torch.load(tmp_path / told["model"])["weight"], model.weight)
    told = answer("checkpoint", "unshard", "ep1", "out/s", "--safetensors", cwd=tmp_path)
    assert told == {"model": "out/s/model.safetensors", "optim": None}
    assert torch.equal(safetensors.torch.load_file(tmp_path / told["model"])["weight"], model.weight)
    told = answer("checkpoint", "unshard", "ep1", "out/t", "--per-tensor", "--no-optim", cwd=tmp_path)
    assert sorted(path.name for path in (tmp_path / told["model"]).glob("*.pt")) == ["bias.pt", "weight.pt"]
    done = composerlite("checkpoint", "unshard", "ep1", "out/t", "--per-tensor", "--no-optim", cwd=tmp_path)
    assert done.returncode == 1
    assert "exists already" in done.stderr


def test_unshard_takes_the_model_of_a_run(demo: Path) -> None:
    """The directory of a run has its model below its state: that is written, without what is around it."""
    composerlite("checkpoint", "convert", f"demo/{TWO}", "two", cwd=demo.parent)
    told = answer("checkpoint", "unshard", "two", "out", cwd=demo.parent)
    written: dict[str, Any] = torch.load(demo.parent / told["model"])
    expected = weights(demo / TWO)
    assert set(written) == set(expected)
    assert all(torch.equal(written[key], expected[key]) for key in expected)
