"""A checkpoint of any form of which any file is damaged: loaded is what was saved, or nothing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import damage
import pytest
import torch
from checkpoint import parts
from torch import nn
from twelve_batches import digest

from composerlite import State
from composerlite.checkpoint import (
    Checkpointer,
    load_checkpoint,
    load_state_dict,
    read_checkpoint,
    save_checkpoint,
    save_safetensors,
    save_state_dict,
)
from composerlite.errors import CheckpointError

PACKED = (".pt", ".pt.gz", ".pt.bz2", ".pt.xz", ".pt.lz4", ".pt.zst", ".tar", ".tar.gz", ".tar.bz2")
BYTES: tuple[damage.Kind, ...] = (
    damage.flip_bit,
    damage.flip_bit,
    damage.flip_many,
    damage.zero_page,
    damage.truncate,
    damage.extend,
    damage.delete_data,
)
"""Damage to one file. Where a checkpoint has several files, the file of another save in its place is damage, too."""


@dataclass(frozen=True)
class Form:
    """How a checkpoint of this form is saved as ``name``, and what a user's program loads."""

    name: str
    save: Callable[[Path, int], None]
    load: Callable[[Path], str]


def model_of(seed: int) -> nn.Linear:
    """Weights that no codec makes smaller: 12 kB of them."""
    model = nn.Linear(1000, 3)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def state_of(seed: int) -> State:
    """The state of a run after a step, so that there are moments."""
    model = model_of(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    return State(
        model,
        rank_zero_seed=17,
        run_name="run",
        device=torch.device("cpu"),
        max_duration="100ep",
        optimizers=optimizer,
    )


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    return {key: value.detach() for key, value in model_of(seed).state_dict().items()}


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    return digest({"model": tensors, "optimizers": {}})


def save_file(path: Path, seed: int) -> None:
    save_checkpoint(state_of(seed), path)


def load_file(path: Path) -> str:
    return digest(read_checkpoint(path)["state"])


def save_run_directory(path: Path, seed: int) -> None:
    """As a run with sharded weights leaves it."""
    parts.save_run_directory(path, state_of(seed), 0)


def load_run_directory(path: Path) -> str:
    state = state_of(0)
    load_checkpoint(path, state)
    return digest(state.state_dict())


def save_directory(path: Path, seed: int) -> None:
    save_state_dict(path, tensors_of(seed))


def load_directory(path: Path) -> str:
    tensors = tensors_of(0)
    load_state_dict(path, tensors)
    return digest_of(tensors)


def save_step(path: Path, seed: int) -> None:
    Checkpointer().save(path, model_of(seed), {"seed": seed, "noise": torch.randn(100)})


def load_step(path: Path) -> str:
    model = model_of(0)
    train_state = Checkpointer().load(path, model)
    assert train_state is not None
    return f"{digest_of(dict(model.state_dict()))} {train_state['seed']}"


def save_weights(path: Path, seed: int) -> None:
    save_safetensors(path, tensors_of(seed))


def load_weights(path: Path) -> str:
    tensors = tensors_of(0)
    load_state_dict(path, {"model": tensors})
    return digest_of(tensors)


FORMS = [
    *(Form(f"c{suffix}", save_file, load_file) for suffix in PACKED),
    Form("run-directory", save_run_directory, load_run_directory),
    Form("directory", save_directory, load_directory),
    Form("step1", save_step, load_step),
    Form("safetensors", save_weights, load_weights),
]


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def inject(form: Form, root: Path, count: int, seed: int) -> Counter[str]:
    """Damage a file of the checkpoint ``count`` times, each time after the last damage was repaired.

    Returns how often the checkpoint was refused, and how often it was loaded with all that was saved, which a flipped
    bit must not be.
    """
    chooser = random.Random(seed)
    path, other = root / "run" / form.name, root / "other" / form.name
    for seed_of_weights, folder in ((1, path), (2, other)):
        folder.parent.mkdir()
        form.save(folder, seed_of_weights)
    expected = form.load(path)
    sound = {file: file.read_bytes() for file in files_of(path)}
    of_other = dict(zip(sound, files_of(other), strict=True))  # names differ in the id of the save
    kinds = (*BYTES, None) if len(sound) > 1 else BYTES
    outcomes: Counter[str] = Counter()
    for number in range(count):
        kind = kinds[number % len(kinds)]
        file = chooser.choice(list(sound))
        if kind is None:
            file.write_bytes(of_other[file].read_bytes())
        else:
            kind(damage.Target(file.parent, file.name, ()), chooser)
        try:
            loaded = form.load(path)
        except CheckpointError:
            outcomes["refused"] += 1
        else:
            assert kind is not damage.flip_bit, f"bit {number} of seed {seed} in {file.name} was loaded"
            assert loaded == expected, f"damage {number} of seed {seed}, {kind} of {file.name}, was loaded"
            outcomes["loaded as saved"] += 1
        file.write_bytes(sound[file])
    assert form.load(path) == expected
    return outcomes


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_what_is_loaded_of_a_damaged_checkpoint_is_what_was_saved(form: Form, tmp_path: Path) -> None:
    """Or nothing is loaded: every form, any file, any place."""
    outcomes = inject(form, tmp_path, 4 * len(BYTES), seed=3)
    assert outcomes["refused"] > 2 * len(BYTES)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_what_is_loaded_of_a_checkpoint_damaged_two_thousand_times_is_what_was_saved(
    form: Form, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The same, at other places each time."""
    seed = random.SystemRandom().randrange(1 << 30)
    outcomes = inject(form, tmp_path, 2000, seed)
    told = ", ".join(f"{count} {what}" for what, count in outcomes.most_common())
    record_property("count", f"{form.name} damaged 2000 times (seed {seed}): {told}")
