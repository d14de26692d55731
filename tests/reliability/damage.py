"""Ways to damage a folder of checkpoints, none of which leaves the bytes that were saved."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sealed_files

PAGE = 4096
FOOTER = 50
"""Bytes of the footer, which has the digest of the record."""


@dataclass(frozen=True)
class Target:
    """The checkpoint ``name`` in ``folder``; ``others`` are its neighbours."""

    folder: Path
    name: str
    others: tuple[str, ...]

    @property
    def data(self) -> Path:
        return self.folder / self.name

    def another(self, chooser: random.Random) -> Target:
        """One of its neighbours."""
        return Target(self.folder, chooser.choice(self.others), ())


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
    size = target.data.stat().st_size
    _cut(target.data, chooser.choice((0, chooser.randrange(size), size - 1, size // 2)))


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


def flip_in_record(target: Target, chooser: random.Random) -> None:
    """One bit of the record."""
    size = target.data.stat().st_size
    _flip(target.data, chooser, size - _record_bytes(target), size)


def cut_record(target: Target, chooser: random.Random) -> None:
    """The end of the record is missing."""
    _cut(target.data, target.data.stat().st_size - chooser.randrange(1, _record_bytes(target)))


def record_of_another(target: Target, chooser: random.Random) -> None:
    """The record of another checkpoint, sound in itself, behind the data of this one."""
    other = target.another(chooser)
    record = other.data.read_bytes()[-_record_bytes(other) :]
    target.data.write_bytes(target.data.read_bytes()[: -_record_bytes(target)] + record)


def remove_record(target: Target, chooser: random.Random) -> None:
    """Another program has saved the same contents."""
    sealed_files.remove_record(target.data)


def edit_record(target: Target, chooser: random.Random) -> None:
    """A number or a letter of the record is another, and the rest of the file agrees with it: but not its digest."""
    size, tail = target.data.stat().st_size, _record_bytes(target)
    content = target.data.read_bytes()
    places = [at for at in range(size - tail, size - FOOTER) if content[at : at + 1].isalnum()]
    at = chooser.choice(places)
    letter = content[at : at + 1]
    other = b"5" if letter.isdigit() and letter != b"5" else b"x" if letter != b"x" else b"y"
    target.data.write_bytes(content[:at] + other + content[at + 1 :])


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
RECORD: list[Kind] = [
    flip_in_record,
    cut_record,
    record_of_another,
    remove_record,
    edit_record,
]


def _record_bytes(target: Target) -> int:
    """The size of the record in the file."""
    return sealed_files.record_in(target.data).files[0].tail_bytes


def _flip(path: Path, chooser: random.Random, start: int = 0, end: int | None = None) -> None:
    """Change one bit of the bytes from ``start`` to ``end``."""
    with path.open("r+b") as file:
        at = chooser.randrange(start, path.stat().st_size if end is None else end)
        file.seek(at)
        (old,) = file.read(1)
        file.seek(at)
        file.write(bytes([old ^ 1 << chooser.randrange(8)]))


def _cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)
