"""Weights in safetensors: writing a folder and reading it into the live model, beside the limits and other libraries.

Each measurement is a fresh process that writes the weights of a model to a folder of several files with an index, and
reads them back, each set against a probe of the limit that is taken right before it: see ``checkpoint_saves.py``.

Usage: ``python benchmarks/safetensors_folders.py`` for all, with the name of a system for one measurement of it.
``--no-peers`` measures ours alone. ``--layers 9`` makes the folder smaller than the 1.5 GB of 90 layers.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from checkpoint_limits import Limits
from checkpoint_saves import PAIRS, Bench, checkpoints, part, summary
from checkpoint_systems import Network, Run, System
from measure import SHORT, interleaved, only_installed, write
from torch import Tensor

LAYERS, WIDTH = 1 if SHORT else 90, 2048
LAYER_BYTES = WIDTH * (WIDTH + 1) * 4
FILE_BYTES = 10_000_000 if SHORT else 500_000_000
OURS = "composerlite"
COPIES = 3  # on the disk at the same time: a folder, what replaces it, and that of the probe


class Weights(Run):
    """A model that is not trained."""

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        self.model = Network(layers, WIDTH)

    def tensors(self) -> list[Tensor]:
        """Its weights."""
        return list(self.model.parameters())


class Hub(System):
    """``save_torch_state_dict`` of huggingface_hub, which calls ``save_file`` of safetensors for each file; of each
    file ``load_file`` and ``Module.load_state_dict``."""

    distribution = "safetensors"

    def save(self, path: Path) -> None:
        from huggingface_hub import save_torch_state_dict

        path.mkdir()
        save_torch_state_dict(self.run.model.state_dict(), path, max_shard_size=FILE_BYTES)

    def load(self, path: Path) -> None:
        from safetensors.torch import load_file

        for file in weight_files(path):
            self.run.model.load_state_dict(load_file(file), strict=False)


class FastSafetensors(Hub):
    """``ParallelSaver`` has no index that others read: the folder is that of :class:`Hub`, and ``fastsafe_open`` reads
    it."""

    distribution = "fastsafetensors"

    def load(self, path: Path) -> None:
        from fastsafetensors import fastsafe_open

        live = self.run.model.state_dict()
        with fastsafe_open([str(file) for file in weight_files(path)], nogds=True, device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                live[name].copy_(opened.get_tensor(name))


class TorchHuggingFace(System):
    """``HuggingFaceStorageWriter`` and ``HuggingFaceStorageReader`` of torch's DCP."""

    distribution = "torch"

    def save(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        live = self.run.model.state_dict()
        files = 1 + sum(tensor.nbytes for tensor in live.values()) // FILE_BYTES
        numbers = {name: 1 + number * files // len(live) for number, name in enumerate(live)}
        dcp.save(live, storage_writer=dcp.HuggingFaceStorageWriter(str(path), numbers), no_dist=True)

    def load(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self.run.model.state_dict(), storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)


class Composerlite(System):
    """``save_safetensors``, durable and with a manifest; ``load_checkpoint`` of it, which verifies every byte."""

    distribution = "composerlite"
    flushes = True

    def __init__(self, run: Run) -> None:
        from composerlite import State

        super().__init__(run)
        self.state = State(run.model, rank_zero_seed=0, run_name="run", device=torch.device("cpu"))

    def save(self, path: Path) -> None:
        from composerlite.checkpoint import save_safetensors

        save_safetensors(path, self.run.model, largest_file_bytes=FILE_BYTES)

    def load(self, path: Path) -> None:
        from composerlite.checkpoint import load_checkpoint

        load_checkpoint(path, self.state, load_weights_only=True, progress_bar=False)


class FolderOfAnother(Composerlite):
    """The folder of :class:`Hub`, which nothing verifies."""

    flushes = False

    def save(self, path: Path) -> None:
        Hub(self.run).save(path)


SYSTEMS = only_installed(
    {
        OURS: Composerlite,
        "composerlite, folder of safetensors": FolderOfAnother,
        "safetensors": Hub,
        "fastsafetensors": FastSafetensors,
        "torch DCP, Hugging Face": TorchHuggingFace,
    }
)
READS_ONLY = ("composerlite, folder of safetensors", "fastsafetensors")


def weight_files(folder: Path) -> Iterator[Path]:
    """The files that the index names."""
    (index,) = folder.glob("*.index.json")
    yield from (folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values())))


def measure(name: str, layers: int) -> None:
    """One measurement of the system ``name``: writing and reading."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(dir=checkpoints(), prefix="bench-") as folder:
        run = Weights(layers)
        bench = Bench(SYSTEMS[name](run), run, Limits(run.tensors(), Path(folder)), Path(folder))
        if name not in READS_ONLY:
            part("writing", bench.synchronous)
        part("reading", bench.resume)


def main(layers: int, systems: Sequence[str]) -> None:
    """``systems`` in turn; writes ``out/safetensors_folders.json``."""
    shutil.rmtree(checkpoints())
    wanted = COPIES * layers * LAYER_BYTES
    if (free := shutil.disk_usage(checkpoints()).free) < wanted:
        raise SystemExit(f"{free / 1e9:.1f} GB are free and this needs {wanted / 1e9:.1f}: clean up, or --layers")
    samples, _ = interleaved(
        __file__, systems, repeats=PAIRS, most_rounds=1, warm_up_rounds=0, arguments=["--layers", str(layers)]
    )
    shutil.rmtree(checkpoints())
    results = {
        name: {"version": version(SYSTEMS[name].distribution), "parts": summary(found)}
        for name, found in samples.items()
    }
    write("safetensors_folders", {"folder_bytes": layers * LAYER_BYTES, "systems": results})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", nargs="?", choices=list(SYSTEMS), help="one measurement of it; all by default")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of 2048×2048 weights: 17 MB each")
    parser.add_argument("--no-peers", action="store_true", help="ours: what the targets are set against")
    given = parser.parse_args()
    if given.system is None:
        main(given.layers, [name for name in SYSTEMS if not given.no_peers or name.startswith(OURS)])
    else:
        measure(given.system, given.layers)
