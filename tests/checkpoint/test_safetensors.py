"""Weights in safetensors: written by all ranks at once, and read in parts, in folders and buckets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors_ranks
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from composerlite.checkpoint import load_state_dict, save_safetensors
from composerlite.errors import CheckpointExistsError, ConfigError, CorruptCheckpointError, SaveError
from composerlite.storage import open_store
from composerlite.testing import run_ranks

INDEX = "model.safetensors.index.json"


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """What the safetensors library reads, by the index."""
    places = json.loads((folder / INDEX).read_bytes())["weight_map"]
    files = {name: load_file(folder / name) for name in set(places.values())}
    assert sum(len(tensors) for tensors in files.values()) == len(places)
    return {name: files[file][name] for name, file in places.items()}


def only_file(folder: Path) -> Path:
    """The one file of weights in a folder."""
    (path,) = folder.glob("model_*.safetensors")
    return path


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The names and, bit for bit, the numbers are the same."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("count", [2, 4])
def test_all_ranks_write_what_safetensors_reads(tmp_path: Path, count: int) -> None:
    """Weights spread by rows, columns, both, with copies or not at all are what the library reads, in files of about
    the same size; so is a model that FSDP and tensor parallelism share, which loads here again."""
    whole = run_ranks(safetensors_ranks.write, count, tmp_path)[0]
    expected = safetensors_ranks.whole_weights()
    expected["tied"] = expected["rows"]
    same(loaded(tmp_path / "state"), expected)
    same(loaded(tmp_path / "cut"), expected)
    same(loaded(tmp_path / "model"), whole)
    sizes = [path.stat().st_size for path in (tmp_path / "state").glob("*.safetensors")]
    total = sum(tensor.nbytes for tensor in expected.values())
    largest = max(tensor.nbytes for tensor in expected.values())
    assert len(sizes) == count
    assert max(sizes) <= total / count + largest
    cut = [path for path in (tmp_path / "cut").glob("*.safetensors") if path.stat().st_size > 2_001_000]
    assert len({name for path in cut for name in load_file(path)}) == len(cut)  # what is larger is alone


def test_a_rank_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Every rank hears of a type that the format does not have, and of a disk that is full before and while another
    writes; nobody waits for the others, nothing is there, and the same folder can be written then."""
    for told in run_ranks(safetensors_ranks.fail, 2, tmp_path):
        assert "'odd': safetensors has no tensors of torch.complex128" in told["type"]
        assert "no space" in told["before"]
        assert "no space" in told["during"]
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["before"]
    expected = safetensors_ranks.whole_weights()
    same(loaded(tmp_path / "before"), {**expected, "tied": expected["rows"]})


@pytest.fixture
def bucket(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3_server.new_bucket()}"


def test_all_ranks_write_to_a_bucket_and_read_their_parts(bucket: str, tmp_path: Path) -> None:
    """What is replaced is gone. Of a folder and of a file in a bucket, as of those on a disk, a rank reads its rows
    and no more; where it has columns no more than all of that tensor."""
    run_ranks(safetensors_ranks.write_to_a_bucket, 2, f"{bucket}/run/weights")
    (tmp_path / "down").mkdir()
    with open_store(bucket) as store:
        for info in store.list_objects("run/weights"):
            store.download_object(info.name, tmp_path / "down" / Path(info.name).name)
    expected = safetensors_ranks.whole_weights()
    expected["tied"] = expected["rows"]
    same(loaded(tmp_path / "down"), expected)
    assert len(list((tmp_path / "down").glob("*.safetensors"))) == 2
    file = tmp_path / "weights.safetensors"
    save_file({name: tensor.clone() for name, tensor in expected.items()}, file)
    with open_store(bucket) as store:
        store.upload_object("one/weights.safetensors", file)
        for number, names in enumerate((["columns", "tied"], set(expected) - {"columns", "tied"}), 1):
            part = tmp_path / f"pytorch_model-{number:05}-of-00002.bin"
            torch.save({name: expected[name] for name in names}, part)
            store.upload_object(f"bins/{part.name}", part)
    places = [f"{bucket}/{name}" for name in ("run/weights", "one/weights.safetensors", "bins")]
    for place in (*places, str(tmp_path / "down"), str(file)):
        for told in run_ranks(safetensors_ranks.read, 2, place):
            for name in ("rows", "half"):
                assert told[name]["read"] <= told[name]["needed"] + (128 << 10), (place, name, told)
            assert told["columns"]["read"] <= expected["columns"].nbytes + (128 << 10)
            if place.startswith("s3"):
                assert told["rows"]["moved"] <= told["rows"]["needed"] + (256 << 10), (place, told)


def test_a_disk_without_space_for_all_files_is_full_before_the_first(mount: Callable[[str], Path]) -> None:
    """Three files of which two would fit: an error says so, nothing stays, and one alone is saved then."""
    folder = mount("size=24m") / "weights"
    state = {f"w{number}": torch.randn(1000, 2500) for number in range(3)}
    with pytest.raises(OSError, match="cannot reserve 10000112 bytes"):
        save_safetensors(folder, state, largest_file_bytes=11_000_000)
    assert [path.name for path in folder.parent.iterdir() if not path.name.startswith(".manifest")] == []
    save_safetensors(folder, {"w0": state["w0"]})
    same(loaded(folder), {"w0": state["w0"]})


def test_one_process_writes_the_same(tmp_path: Path) -> None:
    """One process writes one file, with the type of its tensors noted for the library; nested dicts are joined by
    dots, and what is no tensor is left out. Another model is not replaced unasked; a config beside it stays."""
    state = {"net": {"weight": torch.randn(3, 2), "step": 3}, "scale": torch.tensor(2.0, dtype=torch.float64)}
    save_safetensors(tmp_path / "weights", state)
    expected = {"net.weight": state["net"]["weight"], "scale": state["scale"]}
    same(loaded(tmp_path / "weights"), expected)
    with safe_open(only_file(tmp_path / "weights"), "pt") as file:
        assert file.metadata() == {"format": "pt"}
    (tmp_path / "weights/config.json").write_text("{}")
    with pytest.raises(CheckpointExistsError, match="holds a checkpoint"):
        save_safetensors(tmp_path / "weights", state)
    save_safetensors(tmp_path / "weights", {"other": torch.zeros(2)}, save_overwrite=True)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == [
        "config.json",
        INDEX,
        only_file(tmp_path / "weights").name,
    ]
    same(loaded(tmp_path / "weights"), {"other": torch.zeros(2)})


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """Sparse tensors, types that the format does not have, an empty state and a size of no bytes, before anything is
    there."""
    with pytest.raises(SaveError, match=r"'s': safetensors cannot store Tensor of torch\.sparse_coo"):
        save_safetensors(tmp_path / "weights", {"s": torch.eye(3).to_sparse()})
    with pytest.raises(SaveError, match=r"'c': safetensors has no tensors of torch\.complex128"):
        save_safetensors(tmp_path / "weights", {"c": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(ConfigError, match="no tensors to write"):
        save_safetensors(tmp_path / "weights", {"step": 3})
    with pytest.raises(ConfigError, match="largest_file_bytes"):
        save_safetensors(tmp_path / "weights", {"a": torch.zeros(2)}, largest_file_bytes=0)
    assert not (tmp_path / "weights").exists()


def test_damage_is_found_when_it_is_loaded(tmp_path: Path) -> None:
    """A flipped bit in the numbers or in the header of what was written here; an index of another program is read, and
    what it replaced all of is taken for that."""
    state = {"a": torch.randn(400, 400), "b": torch.randn(400, 400)}
    save_safetensors(tmp_path / "weights", state)
    path = only_file(tmp_path / "weights")
    good = path.read_bytes()
    for place in (good.index(b'"a"') + 1, len(good) - 5):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(CorruptCheckpointError):
            load_state_dict(tmp_path / "weights", {"model": {key: torch.zeros(400, 400) for key in state}})
    save_file({key: tensor.half() for key, tensor in state.items()}, path)
    (tmp_path / "weights" / INDEX).unlink()
    found = {key: torch.zeros(400, 400, dtype=torch.half) for key in state}
    load_state_dict(tmp_path / "weights", {"model": found})
    same(found, {key: tensor.half() for key, tensor in state.items()})
