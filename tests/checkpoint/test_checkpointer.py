"""Checkpointer: directories of steps that are checkpoints or nothing, for loops of one's own."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint import checkpointer_ranks
from checkpoint.sharded_parts import same, small_model, states, trained
from storage.servers.seaweedfs import S3Server
from torch.optim import AdamW

from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint import (
    Checkpointer,
    CheckpointerConfig,
    CheckpointMetadata,
    load_model_and_optim_state,
    save_model_and_optim_state,
    save_safetensors,
)
from composerlite.checkpoint.record.record import unseal_index
from composerlite.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UntrustedCheckpointError,
)
from composerlite.testing import run_ranks, run_ranks_to_the_end


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_step_comes_back_with_what_was_remembered(tmp_path: Path) -> None:
    """Model, optimizer and train state, in the layout that is documented; plain DCP and torch read it."""
    model = small_model()
    optim = trained(model)
    checkpointer = CheckpointerConfig(save_thread_count=2).build()
    place = tmp_path / Checkpointer.checkpoint_dirname(7)
    random_numbers = torch.get_rng_state()
    checkpointer.save(place, (model, optim), {"step": 7, "rng": random_numbers})
    assert {"train/rank0.pt", "model_and_optim/.metadata", ".metadata.json"} <= {
        str(path.relative_to(place)) for path in place.rglob("*")
    }
    assert json.loads((place / ".metadata.json").read_text())["ephemeral"] is False
    other = small_model(seed=1)
    other_optim = AdamW(other.parameters())
    found = checkpointer.load(place, (other, other_optim))
    assert found is not None
    assert same(found["rng"], random_numbers)
    assert same(states(other, other_optim), states(model, optim))
    weights = {"model": {key: torch.zeros_like(value) for key, value in model.state_dict().items()}}
    dcp.load(weights, storage_reader=dcp.FileSystemReader(place / "model_and_optim"), no_dist=True)
    assert same(weights["model"], dict(model.state_dict()))
    assert torch.load(place / "train" / "rank0.pt", weights_only=True)["step"] == 7


def test_an_asynchronous_save_has_the_values_of_the_call(tmp_path: Path) -> None:
    """Of the model, the optimizer and the train state, whatever training does then; one save follows the other."""
    model = small_model(width=256)
    optim = trained(model)
    before = states(model, optim)
    remembered = {"losses": torch.ones(3)}
    checkpointer = Checkpointer()
    futures = [checkpointer.save_async(tmp_path / f"step{n}", (model, optim), remembered) for n in (1, 2)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    remembered["losses"].zero_()
    assert [future.result(60) for future in futures] == [None, None]
    found = checkpointer.load(tmp_path / "step2", (model, optim))
    assert same(states(model, optim), before)
    assert same(found, {"losses": torch.ones(3)})


@pytest.mark.parametrize("own", [True, False])
def test_threads_save_at_the_same_time(tmp_path: Path, own: bool) -> None:
    """Models of several sizes are trained by threads, with a ``Checkpointer`` each or one for all: each is saved."""
    shared = Checkpointer()

    def save(number: int) -> None:
        checkpointer, model = Checkpointer() if own else shared, torch.nn.Linear(50, 20 + 2000 * number)
        saves: list[Any] = []
        for step in range(6):
            torch.nn.init.constant_(model.weight, step)
            saves.append(checkpointer.save_async(tmp_path / f"{number}/step{step}", model, {"step": step}))
        for one in saves:
            one.result()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(save, range(4)))
    finally:
        sys.setswitchinterval(interval)
    for number, step in itertools.product(range(4), range(6)):
        model = torch.nn.Linear(50, 20 + 2000 * number)
        assert shared.load(tmp_path / f"{number}/step{step}", model) == {"step": step}
        assert bool((model.weight == step).all())


@pytest.mark.parametrize("is_last", [True, False])
def test_a_save_of_an_atexit_handler_is_a_checkpoint(tmp_path: Path, is_last: bool) -> None:
    """The program ends when it is written, and whether another save was in the background does not matter."""
    lines = ["checkpointer.save_async(sys.argv[1] + '/step1', model, {})", "atexit.register(save_at_the_end)"]
    script = f"""
import atexit, sys, torch
from composerlite.checkpoint import Checkpointer

checkpointer, model = Checkpointer(), torch.nn.Linear(2000, 2000)

def save_at_the_end():
    checkpointer.save_async(sys.argv[1] + '/step2', model, {{}})

{chr(10).join(lines if is_last else reversed(lines))}
"""
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert [step for step, _ in sorted(Checkpointer.find_checkpoints(tmp_path))] == [1, 2]


def test_what_is_loaded_can_be_chosen(tmp_path: Path) -> None:
    """True asks for it, False leaves it out, None takes what there is."""
    model = small_model()
    optim = trained(model)
    checkpointer = Checkpointer()
    checkpointer.save(tmp_path / "step1", (model, optim), {"step": 1})
    checkpointer.save(tmp_path / "step2", model, {"step": 2})
    save_model_and_optim_state(tmp_path / "bare", model, optim)
    fresh = AdamW(small_model(seed=1).parameters())
    other = small_model(seed=1)
    assert (
        checkpointer.load(tmp_path / "step1", (other, fresh), load_trainer_state=False, load_optim_state=False) is None
    )
    assert not fresh.state
    assert same(states(other), states(model))
    other_optim = AdamW(other.parameters())
    assert checkpointer.load(tmp_path / "step2", (other, other_optim)) == {"step": 2}
    assert not other_optim.state
    with pytest.raises(IncompatibleCheckpointError, match="load_optim_state=True"):
        checkpointer.load(tmp_path / "step2", (other, other_optim), load_optim_state=True)
    assert checkpointer.load(tmp_path / "bare", (other, other_optim)) is None
    assert same(states(other, other_optim), states(model, optim))
    with pytest.raises(CheckpointNotFoundError, match="load_trainer_state=True"):
        checkpointer.load(tmp_path / "bare", other, load_trainer_state=True)
    with pytest.raises(FileNotFoundError, match="is not a complete checkpoint"):
        checkpointer.load(tmp_path / "step9", other)


def test_checkpoints_are_found_by_their_steps(tmp_path: Path) -> None:
    """In the order of numbers; those that did not end, and what is called otherwise, are none."""
    model = small_model()
    checkpointer = Checkpointer()
    for step in (2, 10, 9):
        checkpointer.save(tmp_path / f"step{step}", model, {}, ephemeral=step == 9)
    (tmp_path / "step10").rename(tmp_path / "my-step10-keep")
    checkpointer.save(tmp_path / "step100", model, {})
    (tmp_path / "step100" / ".metadata.json").unlink()
    assert list(Checkpointer.find_checkpoints(tmp_path)) == [(2, str(tmp_path / "step2")), (9, str(tmp_path / "step9"))]
    assert [step for step, _ in Checkpointer.find_checkpoints(tmp_path, ephemeral=True)] == [9]
    assert [step for step, _ in Checkpointer.find_checkpoints(tmp_path, ephemeral=False)] == [2]
    assert Checkpointer.latest_checkpoint(tmp_path) == str(tmp_path / "step9")
    assert Checkpointer.contains_checkpoint(tmp_path)
    assert Checkpointer.dir_is_checkpoint(tmp_path / "step2")
    assert Checkpointer.dir_is_checkpoint(tmp_path / "step2" / "model_and_optim")
    assert not Checkpointer.dir_is_checkpoint(tmp_path)
    assert not Checkpointer.contains_checkpoint(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        Checkpointer.latest_checkpoint(tmp_path / "nothing")
    checkpointer.save(tmp_path / "step100", model, {})  # no checkpoint: nothing is overwritten
    assert Checkpointer.latest_checkpoint(tmp_path) == str(tmp_path / "step100")


def test_an_empty_path_is_not_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a variable that is not set gives is refused wherever a path or a URI is expected, and nothing is written."""
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.chdir(run)
    model = small_model()
    calls: list[Callable[[], object]] = [
        lambda: Checkpointer().save("", model, {}),
        lambda: Checkpointer().write_file("", "name", b""),
        lambda: Checkpointer().load("", model),
        lambda: Checkpointer.dir_is_checkpoint(""),
        lambda: Checkpointer.latest_checkpoint(""),
        lambda: save_model_and_optim_state("", model),
        lambda: load_model_and_optim_state("", model),
        lambda: load_model_and_optim_state("step1", model, pre_download=True, work_dir=""),
        lambda: save_safetensors("", model),
        lambda: CheckpointSaver(folder=""),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="expected a path or a URI"):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert list(run.iterdir()) == []


def test_files_beside_a_checkpoint_belong_to_their_writer(tmp_path: Path) -> None:
    """write_file is atomic, does not replace unless asked to, and what it wrote outlives a save."""
    place = tmp_path / "step1"
    path = Checkpointer().write_file(place, "config.json", "{}")
    assert Path(path).read_text() == "{}"
    Checkpointer().save(place, small_model(), {})
    Checkpointer(save_overwrite=True).save(place, small_model(), {})
    assert Path(path).read_text() == "{}"
    with pytest.raises(FileExistsError, match="save_overwrite=True"):
        Checkpointer().write_file(place, "config.json", b"new")
    Checkpointer(save_overwrite=True).write_file(place, "config.json", b"new")
    assert Path(path).read_text() == "new"
    for name in ("../x", "/x", ".metadata.json", "train/rank0.pt", ""):
        with pytest.raises(ConfigError, match="fname="):
            Checkpointer().write_file(place, name, "")
    for name, rule in (("x" * 234, "of at most 233: .* temporary names"), (f"{'x' * 256}/a", "255 bytes in a part")):
        with pytest.raises(ConfigError, match=rf"step1/x+.*: .*{rule}.*Give another name"):
            Checkpointer().write_file(place, name, "")
    Checkpointer().write_file(place, "x" * 233, "")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step1"]


def test_train_states_are_verified_and_run_no_code(tmp_path: Path) -> None:
    """Bytes that differ, a rank's file that is gone, and types that may run code are errors that name the file."""
    model = small_model()
    checkpointer = Checkpointer()
    checkpointer.save(tmp_path / "step1", model, {"text": "x" * 1000})
    path = tmp_path / "step1" / "train" / "rank0.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"rank0\.pt"):
        checkpointer.load(tmp_path / "step1", model)
    path.unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"it has no train/rank0\.pt"):
        checkpointer.load(tmp_path / "step1", model)
    checkpointer.save(tmp_path / "step2", model, {})
    torch.save({"bad": _Harmful()}, tmp_path / "step2" / "train" / "rank0.pt")
    marker = tmp_path / "step2" / ".metadata.json"
    with pytest.raises(CorruptCheckpointError, match=r"rank0\.pt"):
        checkpointer.load(tmp_path / "step2", model)
    marker.write_text('{"version": "2.5.0", "ephemeral": true}')
    index = tmp_path / "step2" / "model_and_optim" / ".metadata"
    bare, _ = unseal_index("step2/model_and_optim/.metadata", index.read_bytes(), str)
    index.write_bytes(bare)  # as OLMo-core writes it: without a record
    with pytest.raises(UntrustedCheckpointError):
        checkpointer.load(tmp_path / "step2", model)
    assert [step for step, _ in Checkpointer.find_checkpoints(tmp_path, ephemeral=True)] == [2]
    marker.write_text("[]")
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        checkpointer.load(tmp_path / "step2", model)


class _Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("echo harm",)


def test_a_configuration_is_plain_data() -> None:
    """A dataclass whose fields are replaced by name; a wrong name is an error."""
    config = CheckpointerConfig(throttle_uploads=True)
    assert CheckpointerConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    built = config.build(save_overwrite=True, load_thread_count=3)
    assert (built.save_overwrite, built.load_thread_count, built.throttle_uploads) == (True, 3, True)
    assert not config.build().save_overwrite
    with pytest.raises(TypeError, match="save_overwite"):
        config.build(save_overwite=True)
    assert CheckpointMetadata.from_json(CheckpointMetadata(ephemeral=True).to_json(), "x").ephemeral


# ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_ranks_save_and_load_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two ranks save and load shards; a failure of one is that of both; plans are used again only for the same; and
    with another number of ranks the train state is that of rank 0, and a warning says so."""
    (tmp_path / "run").mkdir()
    Checkpointer().save(tmp_path / "one" / "step7", checkpointer_ranks.Module(), {"rng": 5})
    (saved, first), (_, second) = run_ranks(checkpointer_ranks.all_of_it, 2, tmp_path)
    assert first == second == {"rng": 5}
    model = small_model(width=64, seed=1)
    optim = AdamW(model.parameters())
    found = Checkpointer().load(tmp_path / "run" / "step2", (model, optim))
    assert found == {"rank": 0, "step": 2}
    assert "saved by 2 ranks and is loaded by 1: a new rank takes the train state of rank 0" in caplog.text
    assert same(dict(model.state_dict()), saved["model"])
    assert same(optim.state_dict()["state"], saved["optim"])
    assert [step for step, _ in Checkpointer.find_checkpoints(tmp_path / "run", ephemeral=True)] == [2]


def test_a_killed_rank_is_named_and_the_step_before_stands(tmp_path: Path) -> None:
    """The others hear of it within the timeout, and a new run finds the checkpoint before."""
    outcomes = run_ranks_to_the_end(checkpointer_ranks.die_behind_training, 2, tmp_path, dist_timeout=None)
    assert outcomes[0].error is None
    assert isinstance(outcomes[1].error, ChildProcessError)
    assert Checkpointer.latest_checkpoint(tmp_path) == str(tmp_path / "step1")
    checkpointer = Checkpointer()
    model = small_model(seed=1)
    assert checkpointer.load(tmp_path / "step1", model) == {"step": 1}
    assert same(states(model), states(small_model()))
    checkpointer.save(tmp_path / "step2", model, {"step": 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step1", "step2"]


def test_a_uri_is_as_good_as_a_folder(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Save, find, load, replace, and save again what a killed save has left, at s3://."""
    monkeypatch.setenv("S3_ENDPOINT_URL", s3_server.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    bucket = s3_server.new_bucket()
    run = f"s3://{bucket}/run"
    model = small_model()
    optim = trained(model)
    checkpointer = Checkpointer(throttle_uploads=True, pre_download=True, work_dir=tmp_path / "work")
    assert not Checkpointer.contains_checkpoint(run)
    checkpointer.save(f"{run}/step9", (model, optim), {"step": 9})
    checkpointer.save_async(f"{run}/step10", (model, optim), {"step": 10}, ephemeral=True).result(60)
    with pytest.raises(CheckpointExistsError, match="save_overwrite"):
        checkpointer.save(f"{run}/step10", (model, optim), {"step": 10})
    assert Checkpointer.latest_checkpoint(run) == f"{run}/step10"
    assert list(Checkpointer.find_checkpoints(run, ephemeral=False)) == [(9, f"{run}/step9")]
    other = small_model(seed=1)
    other_optim = AdamW(other.parameters())
    assert checkpointer.load(f"{run}/step10", (other, other_optim)) == {"step": 10}
    assert same(states(other, other_optim), states(model, optim))

    s3_server.client().delete_object(Bucket=bucket, Key="run/step10/.metadata.json")  # as a killed save leaves it
    assert Checkpointer.latest_checkpoint(run) == f"{run}/step9"
    checkpointer.save(f"{run}/step10", (other, other_optim), {"step": 10, "again": True})
    assert checkpointer.load(f"{run}/step10", (other, other_optim)) == {"step": 10, "again": True}
    place = checkpointer.write_file(f"{run}/step10", "config.json", "{}")
    assert place == f"{run}/step10/config.json"
    with pytest.raises(FileExistsError):
        checkpointer.write_file(f"{run}/step10", "config.json", "{}")
    Checkpointer(save_overwrite=True).save(f"{run}/step10", other, {"step": 11})
    assert checkpointer.load(f"{run}/step10", other) == {"step": 11}
