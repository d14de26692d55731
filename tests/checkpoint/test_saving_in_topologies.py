"""Saving through the Trainer, however the model is spread over ranks: plain torch reads what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import topology_ranks
import torch
from tiny_training import Classifier, trainer
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from composerlite.checkpoint import Catalog
from composerlite.checkpoint.format.sharded_index import leaves
from composerlite.testing import run_ranks

KINDS = {
    "tp": ("sharded", "ep0-ba2"),
    "weights": ("weights", "sub/run-ba2"),
    "full": ("monolithic", "ep0-ba2-rank0.pt"),
    "full weights": ("weights", "ep0-ba2-rank0.pt"),
    "prefix": ("sharded", "at-2"),
    "hsdp": ("sharded", "ep0-ba1"),
    "fsdp and tp": ("sharded", "ep0-ba2"),
}


def as_torch_reads_it(path: Path, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The tensors of ``expected``, read by torch."""
    if path.is_file():
        return leaves(torch.load(path, weights_only=True), as_dcp=True).values
    tensors = {key: torch.empty_like(tensor) for key, tensor in expected.items()}
    load(tensors, storage_reader=FileSystemReader(path), no_dist=True)
    return tensors


def weights_of_a_run_from(path: str) -> dict[str, torch.Tensor]:
    """The weights of one process that begins with those of the checkpoint ``path``."""
    with trainer(model=Classifier(8), load_path=path, load_weights_only=True) as run:
        assert int(run.state.timestamp.batch) == 0
        return run.state.model.state_dict()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("world_size", [2, 4])
def test_plain_torch_reads_what_the_trainer_saves(tmp_path: Path, world_size: int) -> None:
    """FSDP, HSDP, tensor parallelism, weights alone, whole tensors in one file, names of one's own: under the name that
    was asked for, the newest only, with a link to it, and the same for every rank."""
    told = run_ranks(topology_ranks.train_all, world_size, tmp_path, world_size)
    for name, case in told[0].items():
        assert all(one[name]["saved"] == case["saved"] for one in told), name
        catalog = Catalog(tmp_path / name)
        (manifest,) = catalog.manifests()
        catalog.verify(manifest)
        assert (manifest.kind, manifest.name) == KINDS[name]
        assert case["saved"] == [str(catalog.folder / manifest.name)]
        (link,) = (path for path in catalog.folder.iterdir() if path.is_symlink())
        assert link.resolve() == catalog.folder / manifest.name
        assert link.name == {"weights": "newest"}.get(name, "latest-rank0.pt" if "full" in name else "latest")
        files = {str(path.relative_to(catalog.folder)) for path in catalog.folder.rglob("*") if path.is_file()}
        kept = {file.path for file in manifest.files}
        assert files - {link.name} == kept, name
        if manifest.is_directory:
            owners = {"_".join(Path(file.path).name.split("_")[:3]) for file in manifest.files}
            assert owners == {".metadata"} | {f"__{rank}" for rank in range(world_size)}
        tensors = as_torch_reads_it(Path(case["saved"][0]), case["tensors"])
        for key, tensor in case["tensors"].items():
            assert torch.equal(tensors[key], tensor), (name, key)
        loaded = weights_of_a_run_from(case["saved"][0])
        for key, tensor in loaded.items():
            assert torch.equal(tensor, case["tensors"][f"state.model.{key}"]), (name, key)
