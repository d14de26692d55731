"""What runs on each of several nodes, a rank each, that keep replicas of each other's checkpoints in memory."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from composerlite import dist
from composerlite.checkpoint import Catalog
from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.resume import choose
from composerlite.checkpoint.memory import Replication, replica_folder
from composerlite.checkpoint.place.node_disks import disks_of
from composerlite.checkpoint.record.record import FileRecord, Manifest, SavedRun, seal, seal_index
from composerlite.storage import FileDigest

"""More than a piece that is sent at once."""


def own(nodes: Path, node: int) -> Catalog:
    return Catalog(nodes / f"node{node}" / "run")


def replicas(nodes: Path, node: int) -> Catalog:
    return Catalog(replica_folder(nodes / f"node{node}" / "run"))


def on_node(nodes: Path, node: int, gigabytes_per_second: float = 1e3) -> Replication:
    """The memory of this rank, the only one of its node, which was number ``node`` when checkpoints were saved."""
    rank = dist.get_global_rank()
    os.environ.update({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)})
    (nodes / f"node{node}" / "run").mkdir(parents=True, exist_ok=True)
    os.chdir(nodes / f"node{node}")  # paths are the same on every node, and another place
    folder = Path("run").absolute()
    disks = disks_of(replica_folder(folder))
    assert disks is not None
    return Replication(folder, disks, gigabytes_per_second)


def save(nodes: Path, node: int, of: int, batch: int, *, size_bytes: int = 1000, run: str = "run") -> None:
    """Save what ``node`` has of a sharded checkpoint of so many nodes; of none: a file, on node 0 alone."""
    name, save_id = f"ba{batch}", f"{batch:016x}"
    if not of and node:
        return
    contents = {file_of(number, batch): bytes([number, batch]) * size_bytes for number in range(of)}
    records = [
        FileRecord(f"{name}/{file}", len(data), xxhash.xxh3_128_hexdigest(data), node=number)
        for number, (file, data) in enumerate(contents.items())
    ]
    manifest = Manifest(
        name=name,
        kind="sharded" if of else "monolithic",
        form="sharded" if of else "file",
        template="ba{batch}",
        run=SavedRun(name=run, timestamp={"batch": batch}),
        files=tuple(records),
        saved_at="2026-01-01T00:00:00.000+00:00",
        id=save_id,
    )
    folder = own(nodes, node).folder
    if of:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / (file := file_of(node, batch))).write_bytes(contents[file])
        (folder / name / ".metadata").write_bytes(seal_index(manifest, b"index"))
    else:
        folder.mkdir(parents=True, exist_ok=True)
        body = bytes([batch]) * size_bytes
        (folder / name).write_bytes(body + seal(manifest, FileDigest(len(body), xxhash.xxh3_128_hexdigest(body))))


def file_of(node: int, batch: int) -> str:
    """Name of the data file of a node."""
    return f"__{node}_0_{batch:016x}.distcp"


def replicate(memory: Replication, batch: int) -> str:
    """Replicate a checkpoint, as training does; the warning of a failure."""
    with warnings() as messages:
        memory.poll(f"ba{batch}")
        dist.barrier("the main thread talks to the others meanwhile")
        until = time.monotonic() + 30
        while memory.is_busy and time.monotonic() < until:
            time.sleep(0.01)
        for counter in memory.counters:
            counter.reduced = sum(dist.get_group().gather(counter.number()))
        memory.poll(f"ba{batch}")
        assert not memory.is_busy, "also after a failure the next one is waited for"
    return "".join(messages)


@contextlib.contextmanager
def warnings() -> Generator[list[str]]:
    """The warnings that are logged in the block."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("composerlite")
    log.addHandler(handler)
    try:
        yield messages
    finally:
        log.removeHandler(handler)


def state_of(nodes: Path, node: int) -> tuple[list[tuple[str, int | None]], list[tuple[str, int | None]]]:
    """Checkpoints in the memory of a node, each verified, and replicas."""
    found: list[list[tuple[str, int | None]]] = []
    for catalog in (own(nodes, node), replicas(nodes, node)):
        for manifest in catalog.manifests():
            catalog.verify(manifest)
        found.append([(manifest.name, manifest.node) for manifest in catalog.manifests()])
    return found[0], found[1]


def saves(
    nodes: Path, batches: Sequence[int], *, sharded: bool = True, size_bytes: int = 1000, in_the_way: str = ""
) -> list[Any]:
    """Save and replicate on all nodes; what each has then. On node 1 a file is in the way of the replica."""
    node = dist.get_global_rank()
    memory = on_node(nodes, node)
    errors: list[str] = []
    if in_the_way and node == 1:
        (replicas(nodes, node).folder / in_the_way).touch()
    for batch in batches:
        save(nodes, node, dist.get_world_size() if sharded else 0, batch, size_bytes=size_bytes)
        errors.append(replicate(memory, batch))
    return [*state_of(nodes, node), errors]


def resumes(nodes: Path, order: Sequence[int]) -> dict[str, Any]:
    """Choose a checkpoint on the nodes of these numbers, and then what each has of it, and what it has logged."""
    node = order[dist.get_global_rank()]
    memory = on_node(nodes, node)
    with warnings() as messages:
        places = [
            RunPlace(Catalog("run"), "ba{batch}", in_memory=True, memory=memory),
            RunPlace(Catalog(nodes / "disk"), "ba{batch}"),
        ]
        place = str(choose(places, "run").path)
    return {
        "place": place.removeprefix(f"{nodes}/"),
        "skipped": [message for message in messages if message.startswith("skipped")],
        "own": [(manifest.name, manifest.node) for manifest in own(nodes, node).manifests()],
        "files": sorted(path.name for path in own(nodes, node).folder.glob(f"{Path(place).name}/*")),
    }
