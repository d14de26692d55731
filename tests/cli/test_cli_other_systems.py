"""``composerlite checkpoint …`` on what other systems have written."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from commands import answer, composerlite

DATA = Path(__file__).parents[1] / "data"
OURS_OR_COMPOSER, STATE_DICT = "composerlite or Composer", "torch or safetensors, a state dict of a model"
SYSTEMS = {
    "composer/ep1-ba6-rank0.pt": OURS_OR_COMPOSER,
    "composer/packed.tar.bz2": OURS_OR_COMPOSER,
    "composer/ep2-ba6": OURS_OR_COMPOSER,
    "olmo_core/step6": "OLMo-core (step…)",
    "lightning/step6.ckpt": "Lightning (.ckpt)",
    "transformers/checkpoint-6": "transformers (checkpoint-N)",
    "accelerate/state": "accelerate (save_state)",
    "dcp/torchtitan": "torchtitan",
    "dcp/nested": "torch, a dict with a model",
    "torch/checkpoint.pt": "torch, a dict with a model",
    "torch/weights.pt": STATE_DICT,
    "safetensors/model.safetensors": STATE_DICT,
    "safetensors/sharded": STATE_DICT,
    "dcp/safetensors": STATE_DICT,
}
"""What ``inspect`` and ``verify`` say that each is."""


def test_verify_says_what_each_is_and_compares_it_with_its_own_checksums(tmp_path: Path) -> None:
    """Nothing is verified without a record: it is read, and compared with the checksums that its files have."""
    verdicts = answer("checkpoint", "verify", *(DATA / name for name in SYSTEMS), cwd=tmp_path)["checkpoints"]
    for system, verdict in zip(SYSTEMS.values(), verdicts, strict=True):
        assert verdict["state"] == "unverified"
        assert f"{system}. It has no record: " in verdict["faults"][0]
        assert "the checksums inside its files match" in verdict["faults"][0]


@pytest.mark.parametrize("name", [name for name in SYSTEMS if "safetensors" not in name and "packed" not in name])
def test_checkpoints_of_other_systems_are_inspected_converted_and_compared(name: str, tmp_path: Path) -> None:
    """The system is recognised, weights are listed, converted to safetensors and equal to these."""
    source, target = DATA / name, tmp_path / "weights.safetensors"
    shown = composerlite("checkpoint", "inspect", source, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "body.weight" in shown.stdout
    assert f", {SYSTEMS[name]}\n" in shown.stdout
    assert "incomplete" not in shown.stderr
    converted = composerlite("checkpoint", "convert", source, target, cwd=tmp_path)
    assert converted.returncode == 0, converted.stderr
    compared = composerlite("checkpoint", "diff", source, target, cwd=tmp_path)
    assert compared.returncode == 0, compared.stderr
    assert "4 equal, 0 changed" in compared.stdout


def test_ls_lists_what_other_systems_wrote(tmp_path: Path) -> None:
    """One line for each, by its names alone, and none is called incomplete; a directory without its index is. ``gc``
    deletes nothing that only other programs write."""
    for name in SYSTEMS:
        (shutil.copytree if (DATA / name).is_dir() else shutil.copy)(DATA / name, tmp_path / Path(name).name)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/__0_0.distcp").write_bytes(b"x")
    listed = {one["name"]: one for one in answer("checkpoint", "ls", ".", cwd=tmp_path)["checkpoints"]}
    assert listed.pop("torn")["faults"] == [".metadata is missing: its save did not end"]
    assert set(listed) == {Path(name).name for name in SYSTEMS}
    assert {one["state"] for one in listed.values()} == {"unverified"}
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    gone = {one["uri"] for one in answer("checkpoint", "gc", ".", "--dry-run", cwd=tmp_path)["removed"]}
    assert not gone


DAMAGE = ["lightning/step6.ckpt", "transformers/checkpoint-6/optimizer.pt", "dcp/torchtitan/__0_0.distcp",
          "accelerate/state/optimizer.bin", "olmo_core/step6/train/rank0.pt"]  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_verify_finds_a_wrong_bit_by_the_checksums_in_the_files(name: str, tmp_path: Path) -> None:
    """In the numbers of a tensor, where no reader would notice; the exit status is 1."""
    system, checkpoint, *inner = Path(name).parts
    source, target = DATA / system / checkpoint, tmp_path / checkpoint
    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    path = target.joinpath(*inner)
    data = path.read_bytes()
    header = data.rindex(b"PK\3\4", 0, data.index(b"/data/0"))
    at = header + 30 + sum(struct.unpack_from("<2H", data, header + 26))  # behind its name and its padding
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    done = composerlite("checkpoint", "verify", target, "--json", cwd=tmp_path)
    (verdict,) = json.loads(done.stdout)["checkpoints"]
    assert (done.returncode, verdict["state"]) == (1, "damaged"), verdict
    assert "CRC-32" in verdict["faults"][0]


def test_verify_says_which_file_of_a_directory_is_gone(tmp_path: Path) -> None:
    """Its index names a file that is not there: it is damaged, and the exit status is 1."""
    shutil.copytree(DATA / "dcp/torchtitan", tmp_path / "step")
    (tmp_path / "step/__0_0.distcp").rename(tmp_path / "step/__0_1.distcp")
    done = composerlite("checkpoint", "verify", "step", "--json", cwd=tmp_path)
    (verdict,) = json.loads(done.stdout)["checkpoints"]
    assert (done.returncode, verdict["state"]) == (1, "damaged"), verdict
    assert "'step/__0_0.distcp' is gone" in verdict["faults"][0]


def test_what_is_not_recognised_or_not_safe_is_said_to_be(tmp_path: Path) -> None:
    """The list of what is recognised; the name of the type, and nothing of it is run."""
    torch.save({"a": 1, "nets": {"x": torch.ones(2)}}, tmp_path / "other.pt")
    shown = composerlite("checkpoint", "inspect", "other.pt", cwd=tmp_path)
    assert shown.returncode == 0
    assert "Supported besides composerlite and Composer: Lightning" in shown.stderr
    assert answer("checkpoint", "inspect", "other.pt", cwd=tmp_path)["system"] is None
    for command in (["convert", "other.pt", "new.safetensors"], ["diff", "other.pt", "other.pt"]):
        done = composerlite("checkpoint", *command, cwd=tmp_path)
        (tmp_path / "new.safetensors").unlink(missing_ok=True)
        assert done.returncode == 0, done.stderr  # a dict of tensors may be a model
    torch.save({"a": 1}, tmp_path / "none.pt")
    done = composerlite("checkpoint", "convert", "none.pt", "new.safetensors", cwd=tmp_path)
    assert done.returncode == 1
    assert "holds no model" in done.stderr
    assert "Supported besides" in done.stderr
    torch.save({"model": {"w": torch.ones(2)}, "config": Evil()}, tmp_path / "evil.pt")
    done = composerlite("checkpoint", "verify", "evil.pt", "--json", cwd=tmp_path)
    (verdict,) = json.loads(done.stdout)["checkpoints"]
    assert (done.returncode, verdict["state"]) == (1, "refused")
    assert "mkdir" in verdict["faults"][0]
    shutil.copytree(DATA / "transformers/checkpoint-6", tmp_path / "checkpoint-6")
    shutil.copy(tmp_path / "evil.pt", tmp_path / "checkpoint-6/optimizer.pt")
    done = composerlite("checkpoint", "verify", "checkpoint-6", "--json", cwd=tmp_path)
    (verdict,) = json.loads(done.stdout)["checkpoints"]
    assert (done.returncode, verdict["state"]) == (1, "refused")
    assert not (tmp_path / "pwned").exists()


class Evil:
    """What makes a folder when it is unpickled."""

    def __reduce__(self) -> object:
        return os.mkdir, ("pwned",)
