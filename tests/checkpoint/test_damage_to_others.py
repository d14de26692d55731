"""Damage by chance to what other systems have saved: an error of ours or a checkpoint, whatever is changed."""

from __future__ import annotations

import collections
import io
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_child import Watch, mutated, mutated_bytes
from test_other_systems import DATA, MODEL_STATES, OPTIM_STATES, WHOLE, Wrapped, plain_contents, trainer, weights

from composerlite.checkpoint import RemoteFileSystemReader, load_checkpoint
from composerlite.checkpoint.foreign.deepspeed import taken_from_deepspeed
from composerlite.checkpoint.load.reader import deepspeed_contents
from composerlite.checkpoint.load.sharded import load_flat
from composerlite.checkpoint.place.place import Folder
from composerlite.checkpoint.tools.reading import read_without_record
from composerlite.checkpoint.tools.surveying import pointed
from composerlite.errors import CheckpointError, ConfigError

FEW, MANY = 20, 1000
FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Composer, a file": ("composer/ep1-ba6-rank0.pt", ("",)),
    "Composer, compressed": ("composer/packed.pt.gz", ("",)),
    "Composer, an archive": ("composer/packed.tar.bz2", ("",)),
    "Composer, a directory": ("composer/ep2-ba6", (".metadata", ".metadata", "__0_0.distcp", "__1_0.distcp")),
    "OLMo-core, a step": (
        "olmo_core/step6",
        ("train/rank0.pt", "model_and_optim/.metadata", ".metadata.json", "model_and_optim/__0_0.distcp"),
    ),
    "OLMo-core, a flat optimizer": ("olmo_core/flat", (".metadata", ".metadata", "__0_0.distcp")),
    "Lightning": ("lightning/step6.ckpt", ("",)),
    "transformers": (
        "transformers/checkpoint-6",
        ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "model.safetensors"),
    ),
    "accelerate": ("accelerate/state", ("optimizer.bin", "scheduler.bin", "random_states_0.pkl", "model.safetensors")),
    "torch, usual names": ("torch/checkpoint.pt", ("",)),
    "torch, by a key map": ("torch/nested.pt", ("",)),
    "torch, a state dict": ("torch/weights.pt", ("",)),
    "torchtitan": ("dcp/torchtitan", (".metadata", ".metadata", "__0_0.distcp")),
    "DCP": ("dcp/nested", (".metadata", ".metadata", "__0_0.distcp")),
    "DCP's safetensors": ("dcp/safetensors", ("model.safetensors.index.json", "model-00001-of-00001.safetensors")),
    "safetensors, a file": ("safetensors/model.safetensors", ("",)),
    "safetensors, a folder": (
        "safetensors/sharded",
        ("model.safetensors.index.json", "model-00001-of-00002.safetensors"),
    ),
}
"""A checkpoint of each format, and the files of it that are damaged; what is named twice is chosen more often."""


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    """No line for each of them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(7000)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.soak)])
def test_damage_by_chance_to_what_other_systems_save_does_no_harm(
    name: str, count: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """It is loaded and verified, or refused with an error of ours; nothing of it is run, imported or
    written."""
    path, files = FORMATS[name]
    source, target = DATA / path, tmp_path / Path(path).name
    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    whole = {file: _readable_by_mutations(source / file if file else source) for file in files}
    arguments = dict(WHOLE.get(name, ("", {}))[1])
    key_map = arguments.get("load_key_map")
    with trainer(source, model=Wrapped(), **arguments) as run:  # what loading imports is imported
        _verify(source)
        for codec in ("cp437", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"):
            "".encode(codec)  # codecs of JSON and of names in a zip archive
        watch, outcomes = Watch(), collections.Counter[str]()
        for number in range(count):
            chance = random.Random(number)
            file = chance.choice(files)
            damaged = target / file if file else target
            damaged.write_bytes(_damaged(whole[file], chance))
            watch.on = True
            for what, do in {
                "load": lambda: load_checkpoint(target, run.state, progress_bar=False, key_map=key_map),
                "verify": lambda: _verify(target),
            }.items():
                try:
                    do()
                    outcomes[f"{what}: done"] += 1
                except (CheckpointError, ConfigError) as e:
                    outcomes[f"{what}: {type(e).__name__}"] += 1
                except Exception as e:
                    raise AssertionError(f"{what} of mutation {number}, of {file!r}") from e
            watch.on = False
            damaged.write_bytes(whole[file])
    assert watch.seen == []
    assert sum(outcomes.values()) == 2 * count
    if count == MANY:
        record_property(
            "count", f"mutated checkpoints, {name}: {count} ({dict(outcomes)}), no code run, nothing written"
        )


def _verify(path: Path) -> None:
    with pointed(str(path)) as target:
        read_without_record(target.the_one())


def _readable_by_mutations(path: Path) -> bytes:
    """The contents of a file; one of torch as the mutations want it."""
    data = path.read_bytes()
    if not data.startswith(b"PK") or path.suffix == ".distcp":
        return data
    out = io.BytesIO()
    torch.save(torch.load(path, weights_only=False), out)
    return out.getvalue()


def _damaged(whole: bytes, chance: random.Random) -> bytes:
    return mutated(whole, chance)[1] if b"archive/data.pkl" in whole[:2000] else mutated_bytes(whole, chance)


def test_every_system_that_is_recognised_is_damaged_here() -> None:
    """None is forgotten: what :mod:`.systems` lists has a format above."""
    from composerlite.checkpoint.foreign.systems import SYSTEMS, recognised
    from composerlite.checkpoint.tools.reading import contents_of

    found: set[Any] = set()
    for path in (*(path for path, _ in FORMATS.values()), "deepspeed/zero1"):  # which has a test of its own below
        with pointed(str(DATA / path)) as target:
            found.add(recognised(contents_of(target.the_one())))
    assert {system.name for system in SYSTEMS} <= found


@pytest.mark.timeout(7000)
@pytest.mark.parametrize("name", [MODEL_STATES, OPTIM_STATES, "pytorch_model.bin"])
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.soak)])
def test_damage_by_chance_to_files_of_torch_in_a_folder_does_no_harm(name: str, count: int, tmp_path: Path) -> None:
    """A file of DeepSpeed, and one of weights: an error of ours, or contents; nothing of it is run or written."""
    shutil.copytree(DATA / "deepspeed/zero1/global_step6", tmp_path / "run")
    torch.save(weights(), tmp_path / "run/pytorch_model.bin")

    def read() -> None:
        if name != "pytorch_model.bin":
            taken_from_deepspeed(deepspeed_contents(Folder(tmp_path), "run"), "it")
            return
        with RemoteFileSystemReader(tmp_path / "run") as reader:
            load_flat(reader, list(reader.read_metadata().state_dict_metadata))

    damaged = tmp_path / "run" / name
    torch.save(plain_contents(damaged), written := io.BytesIO())
    damaged.write_bytes(whole := written.getvalue())
    chance, watch, refused = random.Random(0), Watch(), 0
    read()
    for _ in range(count):
        damaged.write_bytes(mutated(whole, chance)[1])
        watch.on = True
        try:
            read()
        except CheckpointError:
            refused += 1
        finally:
            watch.on = False
    assert watch.seen == []
    assert refused > count / 2
