"""A disk of which only what was flushed is sure to survive a power cut.

The rules are those of POSIX, at their worst:

- Bytes and sizes of a file are durable once the file was flushed (fsync, fdatasync). Until then any part of what was
  written since may survive, in any order, each write possibly cut off at a multiple of 512 bytes. O_DIRECT changes
  nothing about that.
- Names (created, renamed, removed, linked, folders included) are durable once *the folder they are in* was flushed;
  flushing the file is not enough. Until then any of them may survive, in any order. A rename within
  one folder survives whole or not at all; one between two folders may survive as its half.

A file system such as ext4 with its journal keeps more than this.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from storage_recorder import Call, Kind

Tree = Mapping[str, "bytes | str | None"]
"""What is on a disk: contents of files, targets of links, ``None`` for folders; by path below the root."""


@dataclass(eq=False)
class File:
    """A file: what is durable, what was written since, and both together."""

    durable: bytes = b""
    now: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)  # (offset, data), or (size, None)

    def change(self, offset: int, data: bytes | None) -> None:
        apply(self.now, offset, data)
        self.pending.append((offset, data))

    def sync(self) -> None:
        if self.pending:
            self.durable = bytes(self.now)
            self.pending = []


@dataclass(eq=False)
class Link:
    """A symbolic link."""

    target: str


@dataclass(eq=False)
class Folder:
    """A folder: its entries as they are durable, how they changed since, and as they are now."""

    durable: dict[str, Node] = field(default_factory=dict)
    now: dict[str, Node] = field(default_factory=dict)
    pending: list[tuple[str | None, str | None, Node]] = field(default_factory=list)  # (gone, made, what)

    def change(self, gone: str | None, made: str | None, node: Node) -> None:
        move(self.now, gone, made, node)
        self.pending.append((gone, made, node))

    def sync(self) -> None:
        self.durable = dict(self.now)
        self.pending = []


Node = File | Link | Folder


def apply(content: bytearray, offset: int, data: bytes | None) -> None:
    """One change of a file: ``data`` at ``offset``, or the new size ``offset``."""
    if data is None:
        del content[offset:]
        content.extend(bytes(offset - len(content)))
    else:
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + len(data)] = data


def move(entries: dict[str, Node], gone: str | None, made: str | None, node: Node) -> None:
    """One change of a folder. What has been renamed is not there under its old name, whatever else survived."""
    if gone is not None and entries.get(gone) is node:
        del entries[gone]
    if made is not None:
        entries[made] = node


Keep = Callable[["File | Folder"], "list[float]"]
"""Of each pending change of a file or folder: 0 it is lost, 1 it survives, between them: so much of a write does."""


class Disk:
    """A disk on which calls happen below ``root``. At first all is durable and as in the folder ``before``.

    ``inodes`` has those that the calls name, by path below the root, the root itself as ``.``.
    """

    def __init__(self, root: Path, before: Path, inodes: Mapping[str, int]) -> None:
        self.root = root
        self.top = Folder()
        self._inodes: dict[int, File | Folder] = {inodes["."]: self.top}
        self._load(before, self.top, before, inodes)

    def _load(self, path: Path, folder: Folder, before: Path, inodes: Mapping[str, int]) -> None:
        for entry in path.iterdir():
            node: Node
            if entry.is_symlink():
                node = Link(str(entry.readlink()))
            elif entry.is_dir():
                node = Folder()
                self._load(entry, node, before, inodes)
            else:
                content = entry.read_bytes()
                node = File(content, bytearray(content))
            if not isinstance(node, Link):
                self._inodes[inodes[str(entry.relative_to(before))]] = node
            folder.now[entry.name] = node
        folder.sync()

    def do(self, call: Call) -> None:
        """Let a recorded call happen."""
        node = self._inodes.get(call.inode)
        match call.kind:
            case Kind.CREATE:
                self._inodes[call.inode] = file = File()
                if call.path:
                    self._enter(call.path, file)
            case Kind.MKDIR:
                self._inodes[call.inode] = folder = Folder()
                self._enter(call.path, folder)
            case Kind.SYMLINK:
                self._enter(call.path, Link(call.other))
            case Kind.WRITE | Kind.TRUNCATE | Kind.ALLOCATE:
                assert isinstance(node, File), call
                if call.kind is Kind.WRITE:
                    node.change(call.a, call.data)
                elif call.kind is Kind.TRUNCATE or call.a + call.b > len(node.now):
                    node.change(call.a + call.b, None)
            case Kind.SYNC:
                assert node is not None, call
                node.sync()
            case Kind.LINK:
                folder, name = self._parent(call.path)
                self._enter(call.other, folder.now[name])
            case Kind.RENAME:
                self._rename(call.path, call.other)
            case Kind.UNLINK | Kind.RMDIR:
                folder, name = self._parent(call.path)
                folder.change(name, None, folder.now[name])
            case Kind.MARK:
                pass
            case _:
                raise AssertionError(f"the model does not know this call: {call}")

    def _enter(self, path: str, node: Node) -> None:
        folder, name = self._parent(path)
        folder.change(None, name, node)

    def _rename(self, old: str, new: str) -> None:
        (source, gone), (target, made) = self._parent(old), self._parent(new)
        node = source.now[gone]
        if source is target:
            source.change(gone, made, node)
        else:
            target.change(None, made, node)
            source.change(gone, None, node)

    def _parent(self, path: str) -> tuple[Folder, str]:
        *folders, name = Path(os.path.normpath(path)).relative_to(self.root).parts
        folder = self.top
        for part in folders:
            node = folder.now[part]
            assert isinstance(node, Folder), path
            folder = node
        return folder, name

    @property
    def unsure(self) -> bool:
        """Whether something is not durable."""
        return any(node.pending for node in self._inodes.values())

    def after(self, keep: Keep) -> Tree:
        """The disk after a power cut in which of the changes that were not flushed survived what ``keep`` says."""
        return dict(_tree(self.top, "", keep))


def _tree(folder: Folder, path: str, keep: Keep) -> Iterator[tuple[str, bytes | str | None]]:
    entries = dict(folder.durable)
    for survives, (gone, made, node) in zip(keep(folder), folder.pending, strict=True):
        if survives >= 0.5:
            move(entries, gone, made, node)
    for name, node in entries.items():
        match node:
            case Link():
                yield path + name, node.target
            case Folder():
                yield path + name, None
                yield from _tree(node, f"{path}{name}/", keep)
            case File():
                yield path + name, _content(node, keep(node))


def _content(file: File, keep: list[float]) -> bytes:
    if not any(keep):
        return file.durable
    content = bytearray(file.durable)
    for part, (offset, data) in zip(keep, file.pending, strict=True):
        if data is not None and part < 1:
            data = data[: int(len(data) * part) // 512 * 512]
        if part:
            apply(content, offset, data)
    return bytes(content)


def everything(node: File | Folder) -> list[float]:
    """A kill of the process, not of the machine."""
    return [1.0] * len(node.pending)


def nothing(node: File | Folder) -> list[float]:
    """All that was not flushed is lost."""
    return [0.0] * len(node.pending)


def names_only(node: File | Folder) -> list[float]:
    """Files have their names and sizes, and none of the bytes that were not flushed: holes."""
    if isinstance(node, Folder):
        return everything(node)
    return [1.0 if data is None else 0.0 for _, data in node.pending]


def bytes_only(node: File | Folder) -> list[float]:
    """The bytes are there, the names are not."""
    return nothing(node) if isinstance(node, Folder) else everything(node)


def first_part(chooser: random.Random) -> Keep:
    """What happened first survives, up to some moment: a journal."""
    return lambda node: [1.0] * (kept := chooser.randint(0, len(node.pending))) + [0.0] * (len(node.pending) - kept)


def any_part(chooser: random.Random) -> Keep:
    """Each change survives, or does not, or half, for itself."""
    return lambda node: [chooser.choice((0.0, 1.0, 1.0, chooser.random())) for _ in node.pending]


def materialise(tree: Tree, folder: Path) -> None:
    """Make ``folder``, which must not exist, what a disk was."""
    folder.mkdir()
    for path, content in tree.items():
        match content:
            case None:
                (folder / path).mkdir()
            case str():
                (folder / path).symlink_to(content)
            case bytes():
                (folder / path).write_bytes(content)


def actual(folder: Path) -> Tree:
    """What is in ``folder``."""
    tree: dict[str, bytes | str | None] = {}
    for path in folder.rglob("*"):
        content = str(path.readlink()) if path.is_symlink() else None if path.is_dir() else path.read_bytes()
        tree[str(path.relative_to(folder))] = content
    return tree
