"""Tensors are read straight into those that they replace, and what comes of it is what a copy would have given."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parts import new_state, save_batch
from tiny_training import trainer
from torch import nn

from composerlite.checkpoint import Catalog, CheckpointManager, load_checkpoint, read_checkpoint, safe_torch_load
from composerlite.checkpoint.format.torch_reader import TorchFile
from composerlite.checkpoint.save.form import SaveRequest
from composerlite.checkpoint.save.save import save
from composerlite.core import State
from composerlite.errors import (
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UntrustedCheckpointError,
)
from composerlite.storage import ParallelReader

LARGE = 1 << 19  # numbers; 2 MiB, which are chunks of their own


def state_of(model: nn.Module, *, stepped: bool = False, **arguments: Any) -> State:
    """A state with ``model`` and AdamW, which has stepped once if ``stepped``."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    state = State(
        model, rank_zero_seed=1, run_name="run", device=torch.device("cpu"), optimizers=optimizer, **arguments
    )
    if stepped:
        for parameter in model.parameters():
            parameter.grad = torch.rand_like(parameter)
        optimizer.step()
    return state


def large() -> nn.Module:
    """Two weights of 2 MiB each."""
    return nn.Sequential(nn.Linear(1, LARGE, bias=False), nn.Linear(LARGE, 1, bias=False))


def saved_now(state: State, folder: Path) -> Path:
    """A checkpoint of ``state``."""
    return save(SaveRequest(state=state, catalog=Catalog(folder), template="saved.pt"))


def tensors_of(state: State) -> dict[str, torch.Tensor]:
    """Weights and optimizer state by name."""
    found = dict(state.model.state_dict())
    for number, kept in enumerate(state.optimizers[0].state.values()):
        found |= {f"{number}/{key}": value for key, value in kept.items()}
    return found


def test_a_load_reads_each_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the live tensors, and nowhere else; the chunks with the index are read twice."""
    state = state_of(large(), stepped=True)
    path = saved_now(state, tmp_path)
    read = 0
    real = os.preadv

    def counted(*arguments: Any) -> int:
        nonlocal read
        count = real(*arguments)
        read += count
        return count

    monkeypatch.setattr(os, "preadv", counted)
    load_checkpoint(path, state)
    assert path.stat().st_size * 0.9 < read < path.stat().st_size * 1.25


# ── where the bytes go ───────────────────────────────────────────────────────────────────────────────────────────────
def test_weights_and_optimizer_state_stay_where_they_are(tmp_path: Path) -> None:
    """The tensors of a state that has stepped keep their memory; their numbers are those of the checkpoint."""
    source, target = state_of(large(), stepped=True), state_of(large(), stepped=True)
    before = {name: tensor.data_ptr() for name, tensor in tensors_of(target).items()}
    load_checkpoint(saved_now(source, tmp_path), target)
    after = tensors_of(target)
    assert {name: tensor.data_ptr() for name, tensor in after.items()} == before
    for name, tensor in tensors_of(source).items():
        assert torch.equal(after[name], tensor), name


def test_a_new_optimizer_takes_the_saved_state(tmp_path: Path) -> None:
    """It has no tensors yet that could be read into. Training goes on the same from there."""
    source, target = state_of(large(), stepped=True), state_of(large())
    load_checkpoint(saved_now(source, tmp_path), target)
    for state in (source, target):
        for parameter in state.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        state.optimizers[0].step()
    for name, tensor in tensors_of(source).items():
        assert torch.equal(tensors_of(target)[name], tensor), name


def test_what_is_ignored_is_not_read(tmp_path: Path) -> None:
    """Damage to a tensor that is left out is not even seen; otherwise it is, and says that the state is spoiled."""
    source = state_of(large(), stepped=True)
    path = saved_now(source, tmp_path)
    first = next(iter(source.optimizers[0].state.values()))["exp_avg"]
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(first.numpy().tobytes()) + first.numel() * 2] ^= 1
    path.write_bytes(damaged)
    target = state_of(large())
    load_checkpoint(path, target, ignore_keys=["state/optimizers"])
    assert torch.equal(target.model.get_parameter("0.weight"), source.model.get_parameter("0.weight"))
    load_checkpoint(path, target, load_weights_only=True)
    assert "optimizers" not in read_checkpoint(path, ignore_keys=["state/optimizers"])["state"]
    with pytest.raises(CorruptCheckpointError, match=r"differ from the saved bytes.*must not be used"):
        load_checkpoint(path, target)
    with pytest.raises(CorruptCheckpointError, match="differ from the saved bytes"):
        read_checkpoint(path)


def test_damage_to_what_is_seen_first_spoils_nothing(tmp_path: Path) -> None:
    """The pickle and the directory are verified before a byte of the state is changed."""
    path = saved_now(state_of(large(), stepped=True), tmp_path)
    whole = path.read_bytes()
    target = state_of(large(), stepped=True)
    before = {name: tensor.clone() for name, tensor in tensors_of(target).items()}
    for place in (whole.index(b"exp_avg"), whole.index(b"PK\1\2") + 20, len(whole) - 5):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(CorruptCheckpointError) as e:
            load_checkpoint(path, target)
        assert "must not be used" not in str(e.value)
    for name, tensor in tensors_of(target).items():
        assert torch.equal(tensor, before[name])


def test_all_that_does_not_fit_is_said_before_anything_changes(tmp_path: Path) -> None:
    """Names, shapes and parameter groups in one message, with the file."""
    path = saved_now(state_of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), stepped=True), tmp_path)
    target = state_of(nn.Sequential(nn.Linear(2, 4), nn.Linear(3, 1), nn.Linear(1, 1)), stepped=True)
    before = {name: tensor.clone() for name, tensor in tensors_of(target).items()}
    with pytest.raises(IncompatibleCheckpointError) as e:
        load_checkpoint(path, target)
    for part in (
        *(path.name, "missing in the checkpoint (2): 2.weight; 2.bias"),
        "0.weight: (3, 2) in the checkpoint, (4, 2) in the model",
        *("AdamW does not fit", "group 0 has no saved state for: 2.bias, 2.weight"),
        "exp_avg of 0.weight has another shape: (3, 2) in the checkpoint, (4, 2) now",
    ):
        assert part in str(e.value)
    for name, tensor in tensors_of(target).items():
        assert torch.equal(tensor, before[name])


# ── tensors of other forms ───────────────────────────────────────────────────────────────────────────────────────────
class Tied(nn.Module):
    """Two names for one weight if ``tied``."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        if tied:
            self.two.weight = self.one.weight


class Form(nn.Module):
    """One weight, and a buffer that lies in its memory as ``view`` makes it."""

    def __init__(self, weight: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        if view is not None:
            self.register_buffer("view", view(self.weight.data))


def numbers(*shape: int) -> torch.Tensor:
    return torch.rand(shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "tied in both": (lambda: Tied(tied=True), lambda: Tied(tied=True)),
    "tied in the checkpoint": (lambda: Tied(tied=True), lambda: Tied(tied=False)),
    "transposed in the checkpoint": (lambda: Form(numbers(3, 4).t()), lambda: Form(numbers(4, 3))),
    "transposed in the model": (lambda: Form(numbers(4, 3)), lambda: Form(numbers(3, 4).t())),
    "transposed in both": (lambda: Form(numbers(3, 4).t()), lambda: Form(numbers(3, 4).t())),
    "channels last in both": (
        lambda: Form(numbers(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)),
        lambda: Form(numbers(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)),
    ),
    "part of a larger tensor": (lambda: Form(numbers(9, 4)[2:5]), lambda: Form(numbers(9, 4)[1:4])),
    "every other number": (lambda: Form(numbers(9, 4)[::2]), lambda: Form(numbers(9, 4)[::2])),
    "whole, into part of a larger one": (lambda: Form(numbers(3, 4)), lambda: Form(numbers(9, 4)[1:4])),
    "views of each other in both": (
        lambda: Form(numbers(3, 4), lambda weight: weight[1:]),
        lambda: Form(numbers(3, 4), lambda weight: weight[1:]),
    ),
    "one memory in two forms": (
        lambda: Form(numbers(4, 4), lambda weight: weight.t()),
        lambda: Form(numbers(4, 4), lambda weight: weight.t()),
    ),
    "views in the checkpoint alone": (
        lambda: Form(numbers(3, 4), lambda weight: weight[1:]),
        lambda: Form(numbers(3, 4), lambda weight: weight[1:].clone()),
    ),
    "sizes of one": (lambda: Form(numbers(1, 4, 1)), lambda: Form(numbers(1, 4, 1).as_strided((1, 4, 1), (9, 1, 7)))),
    "no numbers": (lambda: Form(numbers(0, 4)), lambda: Form(numbers(0, 4))),
    "a single number": (lambda: Form(torch.tensor(2.5)), lambda: Form(torch.tensor(0.0))),
    "another precision": (lambda: Form(numbers(3, 4).bfloat16()), lambda: Form(numbers(3, 4))),
    "complex": (lambda: Form(torch.rand(3, dtype=torch.complex64)), lambda: Form(torch.rand(3, dtype=torch.complex64))),
    "a module that was compiled": (
        lambda: nn.Sequential(torch.compile(nn.Linear(3, 3), backend="eager")),  # type: ignore[arg-type]
        lambda: nn.Sequential(nn.Linear(3, 3)),
    ),
}


@pytest.mark.parametrize("models", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("stepped", [False, True])
def test_every_form_of_tensor_gets_its_numbers(
    tmp_path: Path, models: tuple[Callable[[], nn.Module], Callable[[], nn.Module]], stepped: bool
) -> None:
    """Weights and optimizer state are those that were saved, however both lie in memory."""
    source, target = state_of(models[0](), stepped=stepped), state_of(models[1](), stepped=stepped)
    ignore = ["state/optimizers"] if models is MODELS["tied in the checkpoint"] else None
    before = {name: tensor.data_ptr() for name, tensor in target.model.state_dict().items()}
    path = saved_now(source, tmp_path)
    load_checkpoint(path, target, ignore_keys=ignore)
    expected = read_checkpoint(path)["state"]
    own = target.model.state_dict()
    for name, tensor in expected["model"].items():
        assert torch.equal(own[name], tensor.to(own[name].dtype)), name
    assert {name: tensor.data_ptr() for name, tensor in own.items()} == before
    if stepped and ignore is None:
        for saved, kept in zip(
            expected["optimizers"]["AdamW"]["state"].values(), target.optimizers[0].state.values(), strict=True
        ):
            for key, tensor in saved.items():
                assert torch.equal(kept[key], tensor.to(kept[key].dtype)), key


@pytest.mark.parametrize("order", [("one", "two"), ("two", "one")])
def test_weights_that_share_memory_here_and_did_not_there(tmp_path: Path, order: tuple[str, str]) -> None:
    """They are refused, in whatever order they are in the file; where they are equal they are loaded."""
    source = nn.ModuleDict({name: nn.Linear(3, 3) for name in order})
    path = saved_now(state_of(source), tmp_path)
    with pytest.raises(IncompatibleCheckpointError, match="tied in the model, different in the checkpoint"):
        load_checkpoint(path, state_of(Tied(tied=True)), load_weights_only=True)
    source["one"].load_state_dict(source["two"].state_dict())
    target = state_of(Tied(tied=True))
    load_checkpoint(saved_now(state_of(source), tmp_path / "equal"), target, load_weights_only=True)
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.model.state_dict()[name], tensor), name


class Shared(nn.Module):
    """Two weights, defined in the order of their names. ``share``: the first, in memory of the second."""

    def __init__(self, names: tuple[str, str], share: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        tensors = {"whole": numbers(8), "part": numbers(8)[:4].clone()}
        if share is not None:
            tensors["part"] = share(tensors["whole"])
        for name in names:
            self.register_buffer(name, tensors[name])


SHARES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the beginning": lambda whole: whole[:4],
    "the end": lambda whole: whole[4:],
}


@pytest.mark.parametrize("names", [("whole", "part"), ("part", "whole")])
@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
def test_tensors_that_share_memory_here_alone_are_loaded_as_torch_does(
    tmp_path: Path, names: tuple[str, str], share: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """The numbers of the tensor that the model defines last count, whichever is first in the file."""
    source = Shared(("whole", "part"))
    with CheckpointManager(tmp_path, model=source) as checkpoints:
        checkpoints.restore()
        checkpoints.save(1)
    target, expected = Shared(names, share), Shared(names, share)
    expected.load_state_dict(source.state_dict())
    with CheckpointManager(tmp_path, model=target) as checkpoints:
        checkpoints.restore()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name


def test_a_converted_precision_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the names of the weights and both precisions."""
    path = saved_now(state_of(Form(torch.rand(2, dtype=torch.float64))), tmp_path)
    load_checkpoint(path, state_of(Form(torch.rand(2))))
    assert "weight from torch.float64 to torch.float32" in caplog.text


def test_a_model_that_changes_what_it_loads_gets_it_to_change(tmp_path: Path) -> None:
    """A hook that leaves a weight out keeps that weight: nothing was read into it."""

    def leave_out(_: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        del state_dict[f"{prefix}weight"]

    path = save_batch(tmp_path, 3)
    target = new_state(value=1.0)
    target.model.register_load_state_dict_pre_hook(leave_out)
    load_checkpoint(path, target)
    assert target.model.get_parameter("weight").unique().tolist() == [1.0]
    assert target.model.get_parameter("bias").unique().tolist() == [3.0]


# ── files of others ──────────────────────────────────────────────────────────────────────────────────────────────────
def foreign(folder: Path) -> Path:
    """A file of ``torch.save`` with a weight of 2 MiB."""
    path = folder / "theirs.pt"
    torch.save({"state": state_of(large(), stepped=True).state_dict(), "rng": []}, path)
    return path


def test_damage_to_a_file_without_a_manifest_shows_in_its_checksums(tmp_path: Path) -> None:
    """Which every zip archive has, unless it was written without."""
    path = foreign(tmp_path)
    damaged = bytearray(path.read_bytes())
    damaged[1 << 20] ^= 1
    path.write_bytes(damaged)
    for load in (read_checkpoint, safe_torch_load, lambda p: load_checkpoint(p, state_of(large()))):  # pyright: ignore
        with pytest.raises(CorruptCheckpointError, match="CRC-32"):
            load(path)


def test_a_file_without_checksums_is_loaded(tmp_path: Path) -> None:
    """``torch.serialization.set_crc32_options(False)`` writes such."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = foreign(tmp_path)
    finally:
        torch.serialization.set_crc32_options(before)
    load_checkpoint(path, state_of(large()))


def test_numbers_of_another_byte_order_are_refused(tmp_path: Path) -> None:
    """A file of a machine whose bytes are the other way round. The error names both orders and the way out."""
    torch.save({"a": torch.arange(5.0)}, tmp_path / "archive.pt")
    other = b"big" if sys.byteorder == "little" else b"little"
    with zipfile.ZipFile(tmp_path / "archive.pt") as old, zipfile.ZipFile(tmp_path / "turned.pt", "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, other if info.filename.endswith("byteorder") else old.read(info))
    with pytest.raises(CorruptCheckpointError, match=rf"byte order {other!r}, and this machine has.*torch\.save"):
        safe_torch_load(tmp_path / "turned.pt")


@pytest.mark.parametrize(
    "where",
    ["cpu", "meta", torch.device("cpu"), {"cpu": "meta"}, {"cuda:0": "cpu"}, None, lambda storage, location: storage],  # pyright: ignore
    ids=["name", "meta", "device", "dict", "other dict", "none", "function"],
)
def test_tensors_go_where_they_are_sent(tmp_path: Path, where: Any) -> None:
    """As with ``torch.load``."""
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.arange(4.0), "b": torch.ones(2).bfloat16()}, path)
    expected = torch.load(path, map_location=where)
    loaded = safe_torch_load(path, where)
    for name, tensor in expected.items():
        assert loaded[name].device == tensor.device
        assert loaded[name].dtype == tensor.dtype
        assert tensor.device.type == "meta" or torch.equal(loaded[name], tensor)


def test_a_file_of_an_old_format_is_refused(tmp_path: Path) -> None:
    """That of torch before 1.6, which cannot be read piece by piece."""
    torch.save({"state": {}}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CorruptCheckpointError, match=r"format of torch\.save since torch 1\.6"):
        read_checkpoint(tmp_path / "old.pt")


@pytest.mark.parametrize("ending", [".pt.gz", ".tar", ".tar.gz", ".pt.xz"])
def test_compressed_files_are_loaded_and_verified(tmp_path: Path, ending: str) -> None:
    """Before a byte of them is unpacked; without a manifest, too."""
    path = save_batch(tmp_path, 3, template=f"ba{{batch}}{ending}")
    state = new_state()
    load_checkpoint(path, state)
    assert state.model.get_parameter("weight").unique().tolist() == [3.0]
    elsewhere = path.rename(tmp_path / f"elsewhere{ending}")
    load_checkpoint(elsewhere, new_state())
    damaged = bytearray(elsewhere.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CorruptCheckpointError, match="differ from the saved bytes"):
        load_checkpoint(path, new_state())


def test_headers_that_were_not_those_of_the_file_are_seen(tmp_path: Path) -> None:
    """They say where data begin, and are read before they can be verified: what they said is compared later."""
    path = foreign(tmp_path)
    with ParallelReader(path) as source:

        class Earlier:
            read_into = source.read_into

            def read(self, offset: int, size: int) -> bytes:
                data = bytearray(source.read(offset, size))
                if data.startswith(b"PK\3\4") and size >= 30 and data[26] == len("theirs/data/0"):
                    data[28] ^= 1
                return bytes(data)

        with pytest.raises(CorruptCheckpointError, match="changed while it was read"):
            TorchFile(Earlier(), path.stat().st_size).read()


# ── the user's own check ─────────────────────────────────────────────────────────────────────────────────────────────
ASKED: list[tuple[Path, object]] = []


def allow(path: Path, specs: object) -> bool:
    """A check that lets everything pass."""
    ASKED.append((path, specs))
    return True


def refuse(path: Path, specs: object) -> bool:
    """One that lets nothing pass."""
    return False


def refuse_the_newest(path: Path, specs: object) -> bool:
    """One that lets all pass but the second checkpoint."""
    return path.name != "ba2.pt"


def test_the_users_check_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``CHECKPOINT_VALIDATION_FUNCTION`` names a function of (path, specs); what it refuses is not loaded."""
    path = save_batch(tmp_path, 3)
    with monkeypatch.context() as patch:
        patch.setenv("CHECKPOINT_VALIDATION_FUNCTION", "test_in_place.allow")
        load_checkpoint(path, new_state())
        assert [(path, None)] == sys.modules["test_in_place"].ASKED
        patch.setenv("CHECKPOINT_VALIDATION_FUNCTION", "test_in_place.refuse")
        path.write_bytes(b"not looked at")
        with pytest.raises(UntrustedCheckpointError, match=r"ba3\.pt' was refused by test_in_place\.refuse"):
            load_checkpoint(path, new_state())
        for name in ("nothing", "no.such.module.check", "test_in_place.absent", "test_in_place.LARGE", "."):
            patch.setenv("CHECKPOINT_VALIDATION_FUNCTION", name)
            with pytest.raises(ConfigError, match="CHECKPOINT_VALIDATION_FUNCTION"):
                load_checkpoint(path, new_state())
    assert "CHECKPOINT_VALIDATION_FUNCTION" not in os.environ


def test_a_run_does_not_resume_from_an_older_checkpoint_if_the_users_check_refuses_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends with an error, and no file is renamed."""
    arguments: dict[str, Any] = {"save_folder": str(tmp_path), "save_filename": "ba{batch}.pt", "autoresume": True}
    with trainer(max_duration="2ba", save_interval="1ba", **arguments) as run:
        run.fit()
    before = sorted(path.name for path in tmp_path.iterdir())
    monkeypatch.setenv("CHECKPOINT_VALIDATION_FUNCTION", "test_in_place.refuse_the_newest")
    with pytest.raises(UntrustedCheckpointError, match=r"ba2\.pt' was refused"):
        trainer(max_duration="4ba", **arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
