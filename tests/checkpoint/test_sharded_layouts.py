"""An index that is a rule: what was saved is loaded in any layout, and nothing of it is believed unchecked."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
from __future__ import annotations

import itertools
import json
import random
import resource
import shutil
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import layout_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint.test_record_fuzz import changed
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from composerlite.checkpoint import RemoteFileSystemReader, load_state_dict
from composerlite.checkpoint.format.sharded_layout import LAYOUT_MARK, read_layout
from composerlite.cli.app import app
from composerlite.errors import CheckpointError, CorruptCheckpointError
from composerlite.testing import run_ranks


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of four ranks, one for each way to split tensors."""
    folder = tmp_path_factory.mktemp("layouts")
    run_ranks(layout_ranks.save, 4, folder, timeout=120)
    return folder


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_what_a_rule_places_is_loaded_by_any_number_of_ranks_in_any_layout(saved: Path, ranks: int) -> None:
    """Rows, columns, grids, replicas, shards that are uneven or empty: every number comes back."""
    run_ranks(layout_ranks.load, ranks, saved, timeout=120)


def test_the_index_is_a_rule_and_reads_like_a_list(saved: Path) -> None:
    """Each part of each tensor is in it once, in a place of its own, and together they are the whole."""
    for name in layout_ranks.LAYOUTS:
        assert (saved / name / ".metadata").read_bytes().startswith(LAYOUT_MARK), name
        with RemoteFileSystemReader(saved / name) as reader:
            found = reader.read_metadata()
        places = dict(found.storage_data)
        for number, shape in enumerate(layout_ranks.SHAPES):
            seen = torch.zeros(shape, dtype=torch.int64)
            stored = found.state_dict_metadata[f"w{number}"]
            assert isinstance(stored, TensorStorageMetadata)
            for chunk in stored.chunks:
                part = seen
                for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                    part = part.narrow(dim, start, size)
                part += 1
                assert sum(i.fqn == f"w{number}" and i.offset == chunk.offsets for i in places) == 1
            assert torch.equal(seen, torch.ones_like(seen)), (name, number)
        spans = sorted((place.relative_path, place.offset, place.length) for place in places.values())
        for (file, start, size), (next_file, next_start, _) in itertools.pairwise(spans):
            assert file != next_file or start + size == next_start


def _parsed(index: bytes) -> Any:
    """An index as JSON."""
    return json.loads(zlib.decompress(index[len(LAYOUT_MARK) :]))


def _packed(parsed: Any) -> bytes:
    return LAYOUT_MARK + zlib.compress(json.dumps(parsed).encode())


def _mutated(draw: random.Random, index: bytes) -> bytes:
    """``index`` with one thing in it that is odd, gone, or more."""
    if draw.random() < 0.1:
        at = draw.randrange(len(index))
        return index[:at] + draw.randbytes(draw.randrange(3)) + index[at + draw.randrange(3) :]
    parsed = changed(draw, _parsed(index))
    return _packed(changed(draw, parsed) if draw.random() < 0.2 else parsed)


def _seen(folder: Path) -> str:
    """What comes of a load by a single process: the right tensors, or a refusal."""
    wanted: dict[str, Any] = {
        f"w{number}": torch.zeros(shape, dtype=layout_ranks.full(number, shape).dtype)
        for number, shape in enumerate(layout_ranks.SHAPES)
    }
    try:
        load_state_dict(folder, wanted)
    except CheckpointError:
        return "refused"
    for number, shape in enumerate(layout_ranks.SHAPES):
        assert torch.equal(wanted[f"w{number}"], layout_ranks.full(number, shape)), number
    return "right"


def _fuzzed(saved: Path, folder: Path, count: int) -> Counter[str]:
    outcomes = Counter[str]()
    for name in ("rows", "grid", "replicas"):
        shutil.copytree(saved / name, folder / name)  # without the record, whose digest would refuse all
        index = folder / name / ".metadata"
        original, draw = index.read_bytes(), random.Random(name)
        for _ in range(count // 3):
            index.write_bytes(_mutated(draw, original))
            outcomes[_seen(folder / name)] += 1
    return outcomes


def test_an_index_that_somebody_changed_is_refused_or_gives_the_right_tensors(saved: Path, tmp_path: Path) -> None:
    """Whatever it claims of meshes, splits, sizes and files; and it does not take much memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = _fuzzed(saved, tmp_path, 120)
    assert outcomes["refused"] > 60
    assert outcomes["right"] > 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


@pytest.mark.soak
def test_a_thousand_indexes_that_somebody_changed(saved: Path, tmp_path: Path) -> None:
    """The same, more often."""
    assert _fuzzed(saved, tmp_path, 1000)["refused"] > 500


def _claims(ranks: int, tensors: int, dims: int) -> Any:
    """An index that claims many ranks, of tensors that are all of another size."""
    mesh = [2] * (ranks.bit_length() - 1)
    splits = [list(range(at, len(mesh), dims)) for at in range(dims)]
    shapes = [[10**9 + number] * dims for number in range(tensors)]
    layout: dict[str, Any] = {"ranks": ranks, "items": []}
    layout["tensors"] = [[[f"w{number}"], shape, "float32", mesh, splits] for number, shape in enumerate(shapes)]
    return [layout, "", ""]


@pytest.mark.parametrize(
    "index",
    [
        _packed(_claims(1 << 17, 3000, 1)),
        _packed(_claims(1 << 16, 500, 8)),
        _packed(_claims(1 << 30, 1, 1)),
        LAYOUT_MARK + zlib.compress(b"[" * (300 << 20)),
    ],
    ids=["many ranks", "many dimensions", "too many ranks", "large when unpacked"],
)
def test_an_index_that_claims_much_is_refused_at_once(index: bytes) -> None:
    """Before anything is made of what it claims: it takes no more memory than a few times its size."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptCheckpointError):
        read_layout(index, "index")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_convert_makes_a_list_of_a_rule(saved: Path, tmp_path: Path) -> None:
    """Which torch.distributed.checkpoint loads by itself."""
    app.main(["checkpoint", "convert", str(saved / "grid"), str(tmp_path / "listed")], standalone_mode=False)
    assert not (tmp_path / "listed" / ".metadata").read_bytes().startswith(LAYOUT_MARK)
    reader = dcp.FileSystemReader(tmp_path / "listed")
    keys = reader.read_metadata().state_dict_metadata
    for number, shape in enumerate(layout_ranks.SHAPES):
        (key,) = (key for key in keys if key.split(".")[-1] == f"w{number}")
        wanted = {key: torch.zeros(shape, dtype=layout_ranks.full(number, shape).dtype)}
        dcp.load(wanted, storage_reader=reader)
        assert torch.equal(wanted[key], layout_ranks.full(number, shape))


@pytest.mark.soak
def test_more_shards_than_are_listed_are_saved_as_a_rule(tmp_path: Path) -> None:
    """With the true limit: 12,600 tensors on four ranks, each in a shard of its own of every rank."""
    run_ranks(layout_ranks.save_and_load_many, 4, tmp_path, 12_600, timeout=500)
    assert (tmp_path / "many" / ".metadata").read_bytes().startswith(LAYOUT_MARK)


def test_ranks_that_differ_make_a_list(tmp_path: Path) -> None:
    """Where one rank has what others have not, the index is one of DCP, with all of it."""
    run_ranks(layout_ranks.save_differing, 2, tmp_path, timeout=120)
    assert not (tmp_path / "differing" / ".metadata").read_bytes().startswith(LAYOUT_MARK)
    with RemoteFileSystemReader(tmp_path / "differing") as reader:
        assert {"own0", "own1", "w0", "plain0"} <= set(reader.read_metadata().state_dict_metadata)
