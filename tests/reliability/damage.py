"""Ways to damage a folder of checkpoints, none of which leaves the bytes that were saved."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = 4096


@dataclass(frozen=True)
class Target:
    """The checkpoint ``name`` in ``folder``; ``others`` are its neighbours."""

    folder: Path
    name: str
    others: tuple[str, ...]

    @property
    def data(self) -> Path:
        return self.folder / self.name

    @property
    def manifest(self) -> Path:
        return self.folder / ".manifest" / f"{self.name}.json"

    def another(self, chooser: random.Random) -> Target:
        """One of its neighbours."""
        return Target(self.folder, chooser.choice(self.others), ())


# ── the data ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def flip_bit(target: Target, chooser: random.Random) -> None:
    """One bit, anywhere in the file: in tensors, the pickle, the archive's directory, or padding."""
    _flip(target.data, chooser)


def flip_many(target: Target, chooser: random.Random) -> None:
    """A few bytes in a row are noise."""
    with target.data.open("r+b") as file:
        size = target.data.stat().st_size
        at = chooser.randrange(size)
        file.seek(at)
        old = file.read(min(64, size - at))
        new = chooser.randbytes(len(old))
        file.seek(at)
        file.write(new if new != old else bytes(255 - byte for byte in old))


def zero_page(target: Target, chooser: random.Random) -> None:
    """A page that was never written: zeros where there was something else."""
    size = target.data.stat().st_size
    pages = list(range(-(-size // PAGE)))
    chooser.shuffle(pages)
    with target.data.open("r+b") as file:
        for page in pages:
            file.seek(page * PAGE)
            old = file.read(PAGE)
            if any(old):
                file.seek(page * PAGE)
                file.write(bytes(len(old)))
                return


def swap_pages(target: Target, chooser: random.Random) -> None:
    """Two pages that differ have changed places."""
    size = target.data.stat().st_size
    with target.data.open("r+b") as file:
        while True:
            first, second = chooser.sample(range(size // PAGE), 2)
            file.seek(first * PAGE)
            one = file.read(PAGE)
            file.seek(second * PAGE)
            two = file.read(PAGE)
            if one != two:
                break
        file.seek(first * PAGE)
        file.write(two)
        file.seek(second * PAGE)
        file.write(one)


def truncate(target: Target, chooser: random.Random) -> None:
    """The end is missing, or everything."""
    _truncate(target.data, chooser)


def extend(target: Target, chooser: random.Random) -> None:
    """There is more than was saved."""
    with target.data.open("ab") as file:
        file.write(chooser.choice((bytes(PAGE), b"\0", chooser.randbytes(100))))


def stale_data(target: Target, chooser: random.Random) -> None:
    """The data of another checkpoint of the run, under the name of this one."""
    shutil.copyfile(target.another(chooser).data, target.data)


def swap_data(target: Target, chooser: random.Random) -> None:
    """Two checkpoints have each other's data."""
    other = target.another(chooser)
    aside = target.data.with_name("aside")
    target.data.rename(aside)
    other.data.rename(target.data)
    aside.rename(other.data)


def mixed_data(target: Target, chooser: random.Random) -> None:
    """The first half of this one, the second of another: a save over an older file that did not get to its end."""
    old = target.another(chooser).data.read_bytes()
    at = chooser.randrange(PAGE, len(old) - PAGE)
    content = target.data.read_bytes()
    mixed = content[:at] + old[at:]
    assert mixed != content
    target.data.write_bytes(mixed)


def delete_data(target: Target, chooser: random.Random) -> None:
    """The file is gone."""
    target.data.unlink()


def folder_for_data(target: Target, chooser: random.Random) -> None:
    """A folder stands where the file was."""
    target.data.unlink()
    target.data.mkdir()


# ── the manifest ─────────────────────────────────────────────────────────────────────────────────────────────────────
def flip_in_manifest(target: Target, chooser: random.Random) -> None:
    """One bit of its manifest."""
    before = target.manifest.read_bytes()
    while _means_the_same(before, target.manifest.read_bytes()):
        target.manifest.write_bytes(before)
        _flip(target.manifest, chooser)


def truncate_manifest(target: Target, chooser: random.Random) -> None:
    """The end of the manifest is missing, or all of it."""
    _truncate(target.manifest, chooser)


def manifest_of_another(target: Target, chooser: random.Random) -> None:
    """The manifest of another checkpoint, sound in itself, lies under the name of this one."""
    shutil.copyfile(target.another(chooser).manifest, target.manifest)


def copy_of_another(target: Target, chooser: random.Random) -> None:
    """Both the data and the manifest are those of another checkpoint, under the name of this one."""
    other = target.another(chooser)
    shutil.copyfile(other.data, target.data)
    shutil.copyfile(other.manifest, target.manifest)


def delete_manifest(target: Target, chooser: random.Random) -> None:
    """The manifest is gone."""
    target.manifest.unlink()


def edit_manifest(target: Target, chooser: random.Random) -> None:
    """One field of the manifest says something else."""
    fields = _fields(target)
    _edit(fields, chooser.choice([name for name in fields if name != "digest"]), chooser)
    target.manifest.write_text(json.dumps(fields, indent=1))


def edit_file_record(target: Target, chooser: random.Random) -> None:
    """What the manifest says of a file: its path, size or digests."""
    fields = _fields(target)
    record = fields["files"][0]
    _edit(record, chooser.choice(list(record)), chooser)
    target.manifest.write_text(json.dumps(fields, indent=1))


def believable_manifest(target: Target, chooser: random.Random) -> None:
    """Edits that agree with each other and with the files; only the manifest's own digest is not made anew.

    It is declared newer, another run's, or to be the record of data that was changed as well.
    """
    fields = _fields(target)
    how = chooser.choice(("newer", "other run", "other data"))
    if how == "newer":
        fields["timestamp"]["batch"] += chooser.randrange(1, 100)
        fields["fit_calls"] += 1
    elif how == "other run":
        fields["run_name"] += "-2"
        fields["template"] = "x" + fields["template"]
    else:
        record = _fields(target.another(chooser))["files"][0]
        shutil.copyfile(target.folder / record["path"], target.data)
        fields["files"] = [{**record, "path": target.name}]
    target.manifest.write_text(json.dumps(fields, indent=1))


Kind = Callable[[Target, random.Random], None]

DATA: list[Kind] = [
    flip_bit,
    flip_many,
    zero_page,
    swap_pages,
    truncate,
    extend,
    stale_data,
    swap_data,
    mixed_data,
    delete_data,
    folder_for_data,
]
MANIFEST: list[Kind] = [
    flip_in_manifest,
    truncate_manifest,
    manifest_of_another,
    copy_of_another,
    delete_manifest,
    edit_manifest,
    edit_file_record,
    believable_manifest,
]


def _fields(target: Target) -> dict[str, Any]:
    return json.loads(target.manifest.read_text())


def _edit(fields: dict[str, Any], name: str, chooser: random.Random) -> None:
    old = fields[name]
    match old:
        case bool():
            fields[name] = not old
        case int() | float():
            fields[name] = old + chooser.choice((-1, 1, 1000))
        case str():
            at = chooser.randrange(len(old) + 1)
            fields[name] = old[:at] + chooser.choice("0az") + old[at:]
        case list():
            fields[name] = [*old, *old] or ["more"]
        case dict():
            fields[name] = {**old, "more": 1}
        case _:
            fields[name] = "something"


def _means_the_same(one: bytes, two: bytes) -> bool:
    try:
        return json.loads(one) == json.loads(two)
    except ValueError:
        return False


def _flip(path: Path, chooser: random.Random) -> None:
    with path.open("r+b") as file:
        at = chooser.randrange(path.stat().st_size)
        file.seek(at)
        (old,) = file.read(1)
        file.seek(at)
        file.write(bytes([old ^ 1 << chooser.randrange(8)]))


def _truncate(path: Path, chooser: random.Random) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(chooser.choice((0, chooser.randrange(size), size - 1, size // 2)))
