"""What many ranks cost beyond writing their bytes: bytes read by several layouts, planning, votes.

Planning and votes are measured with more ranks than there are processes: the plans of all ranks are made and merged in
one process, and ranks that vote are threads of one process with a connection each to a real store in another.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import SHORT, ForeignCpu, installed
from sharded_systems import Measured, join
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

__all__ = [
    "MOST_ITEMS",
    "RANKS",
    "TENSORS",
    "VOTERS",
    "Counted",
    "bytes_read",
    "connected",
    "planning",
    "serve_store",
    "vote",
    "votes",
]

LAYERS, WIDTH = 2 if SHORT else 12, 1024
KEYS_STEP = 10
TENSORS = (100,) if SHORT else (100, 1_000, 10_000)
RANKS = (1, 16) if SHORT else (1, 16, 256, 4096)
MOST_ITEMS, MOST_ITEMS_OF_ALL = 409_600, 25_600
VOTERS = (1, 4) if SHORT else (1, 4, 16, 64, 256)
ROUNDS = 1 if SHORT else 5


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────
def bytes_read(folder: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """For each system and each layout: what the ranks needed, what they read, and what the reader says it read."""
    from composerlite.testing import run_ranks

    for number, (saved, wanted) in enumerate(((4, 2), (2, 3))):
        paths = {name: folder / f"{number}{name}" for name in WRITERS}
        run_ranks(_save_rows, saved, paths, dist_timeout=None, timeout=120)
        for dim, what in ((0, ""), (1, ", into columns")):
            found = run_ranks(_load_parts, wanted, paths, dim, dist_timeout=None, timeout=120)
            for name in paths:
                yield f"{name}, {saved}→{wanted} ranks{what}", _sum([of[name] for of in found])
        if number == 0:
            found = run_ranks(_load_some_keys, 1, paths, dist_timeout=None, timeout=120)
            for name in paths:
                yield f"{name}, 10 % of the keys", found[0][name]


def _sum(found: list[dict[str, float]]) -> dict[str, float]:
    return {key: sum(values[key] for values in found) for key in found[0]}


def _ours(path: Path) -> Any:
    from composerlite.checkpoint import RemoteFileSystemReader

    return RemoteFileSystemReader(path)


def _our_writer(path: Path) -> Any:
    from composerlite.checkpoint import RemoteFileSystemWriter

    return RemoteFileSystemWriter(path)


def _olmo(path: Path) -> Any:
    from olmo_core.distributed.checkpoint.filesystem import RemoteFileSystemReader

    return RemoteFileSystemReader(path)


def _olmo_writer(path: Path) -> Any:
    from olmo_core.distributed.checkpoint.filesystem import RemoteFileSystemWriter

    return RemoteFileSystemWriter(path)


READERS: dict[str, Callable[[Path], Any]] = {"composerlite": _ours, "torch DCP": FileSystemReader}
WRITERS: dict[str, Callable[[Path], Any]] = {
    "composerlite": _our_writer,
    "torch DCP": FileSystemWriter,
}
if installed("ai2-olmo-core"):
    READERS["OLMo-core"] = _olmo
    WRITERS["OLMo-core"] = _olmo_writer


def _tensors() -> dict[str, torch.Tensor]:
    shapes = {"weight": (WIDTH, WIDTH), "bias": (WIDTH,)}
    kinds = ("model", "exp_avg", "exp_avg_sq")
    keys = {f"{kind}.{layer}.{name}": shapes[name] for kind in kinds for layer in range(LAYERS) for name in shapes}
    return {key: torch.rand(shape) for key, shape in keys.items()}


def _parts(dim: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        key: distribute_tensor(tensor, mesh, [Shard(min(dim, tensor.dim() - 1))], src_data_rank=None)
        for key, tensor in _tensors().items()
    }


def _save_rows(paths: dict[str, Path]) -> None:
    import torch.distributed.checkpoint as dcp

    join()
    state = _parts(0)
    for name, path in paths.items():
        dcp.save(state, storage_writer=WRITERS[name](path))


def _load_parts(paths: dict[str, Path], dim: int) -> dict[str, dict[str, float]]:
    join()
    state: dict[str, Any] = _parts(dim)
    needed = sum(tensor.to_local().nbytes for tensor in state.values())
    return {name: _counted(name, path, state, needed) for name, path in paths.items()}


def _load_some_keys(paths: dict[str, Path]) -> dict[str, dict[str, float]]:
    join()
    state = dict(list(_tensors().items())[::KEYS_STEP])
    needed = sum(tensor.nbytes for tensor in state.values())
    return {name: _counted(name, path, state, needed) for name, path in paths.items()}


def _counted(name: str, path: Path, state: dict[str, Any], needed: int) -> dict[str, float]:
    """The second of two loads: the first imports what is needed."""
    import torch.distributed.checkpoint as dcp

    dcp.load(state, storage_reader=READERS[name](path))
    before = _read_so_far()
    reader = READERS[name](path)
    dcp.load(state, storage_reader=reader)
    read = _read_so_far() - before
    return {"needed": needed, "read": read, "counted": getattr(reader, "bytes_read", read)}


def _read_so_far() -> int:
    """Bytes that this process has read from files."""
    fields = Path("/proc/self/io").read_text().split()
    return int(fields[fields.index("rchar:") + 1])


# ── planning ─────────────────────────────────────────────────────────────────────────────────────────────────────
def planning() -> Iterator[Measured]:
    """Seconds of the first rank, and bytes, for numbers of tensors and ranks; beside DCP's for up to so many parts."""
    for tensors in TENSORS:
        for ranks in RANKS:
            if tensors * ranks <= MOST_ITEMS:
                with ForeignCpu() as foreign, _nothing_else():
                    values = _planned(tensors, ranks)
                    if tensors * ranks <= MOST_ITEMS_OF_ALL:
                        values |= _compared(tensors, ranks)
                yield f"{tensors} {ranks}", {"tensors": tensors, "ranks": ranks, **values}, foreign.share


@contextlib.contextmanager
def _nothing_else() -> Generator[None]:
    """Garbage collection does not look at what is here already: the first of many ranks has not what others have."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _planned(tensors: int, ranks: int) -> dict[str, float]:
    """Our way: from the plans of all ranks, as they arrive, to what each is told."""
    from composerlite.checkpoint.save.sharded_plan import merge_pieces

    sent = [pickle.dumps(_pieces_of(_plan_of(rank, ranks, tensors))) for rank in range(ranks)]
    with _nothing_else():
        start = time.perf_counter()
        written, _ = merge_pieces([pickle.loads(text) for text in sent])
        replies = [pickle.dumps(numbers) for numbers in written]
        seconds = time.perf_counter() - start
    return {"plan_s": seconds, "plan_bytes": sum(map(len, sent)) + sum(map(len, replies))}


def _compared(tensors: int, ranks: int) -> dict[str, float]:
    """DCP's way, which gives the same; what the first rank does when all have written; and reading the index."""
    from composerlite.checkpoint.format.sharded_index import read_index
    from composerlite.checkpoint.save.sharded_plan import merge_pieces

    plans = [_plan_of(rank, ranks, tensors) for rank in range(ranks)]
    start = time.perf_counter()
    pieces = [_pieces_of(plan) for plan in plans]
    pack = (time.perf_counter() - start) / ranks
    written, entries = merge_pieces(pieces)
    metadata = Metadata(entries)
    sent = [pickle.dumps(plan) for plan in plans]
    with _nothing_else():
        start = time.perf_counter()
        final, their_metadata = DefaultSavePlanner().create_global_plan([pickle.loads(text) for text in sent])
        replies = [pickle.dumps(plan) for plan in final]
        seconds = {"pack_s": pack, "dcp_plan_s": time.perf_counter() - start}
    assert entries == their_metadata.state_dict_metadata
    assert list(map(len, written)) == [len(plan.items) for plan in final]

    votes = [pickle.dumps(_results_of(plan)) for plan in final]
    with _nothing_else():
        start = time.perf_counter()
        found = [result for vote in votes for result in pickle.loads(vote)]
        metadata.storage_data = {result.index: result.storage_data for result in found}
        index = pickle.dumps(metadata)
        seconds["commit_s"] = time.perf_counter() - start
    with _nothing_else():
        start = time.perf_counter()
        read_index(index, "index")
        seconds["read_index_s"] = time.perf_counter() - start
    return {**seconds, "dcp_plan_bytes": sum(map(len, [*sent, *replies])), "index_bytes": len(index)}


def _plan_of(rank: int, ranks: int, tensors: int) -> SavePlan:
    """What FSDP2 makes: every rank has some rows of every tensor."""
    rows, columns = max(8192, ranks), 1024
    share = rows // ranks
    items = [
        WriteItem(
            index=MetadataIndex(f"model.layers.{number}.weight", torch.Size([rank * share, 0])),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size([rank * share, 0]), torch.Size([share, columns])),
                properties=TensorProperties(dtype=torch.float32),
                size=torch.Size([rows, columns]),
            ),
        )
        for number in range(tensors)
    ]
    return SavePlan(items, planner_data={item.index.fqn: ("model", item.index.fqn[6:]) for item in items})


def _pieces_of(plan: SavePlan) -> list[Any]:
    from composerlite.checkpoint.format.sharded_layout import StatePiece

    return [
        StatePiece(
            item.index.fqn,
            tuple(item.tensor_data.size),
            item.tensor_data.properties.dtype,
            tuple(item.tensor_data.chunk.offsets),
            tuple(item.tensor_data.chunk.sizes),
        )
        for item in plan.items
        if item.tensor_data is not None
    ]


def _results_of(plan: SavePlan) -> list[WriteResult]:
    return [
        WriteResult(item.index, 1000, _StorageInfo("__0_0.distcp", 1000 * number, 1000))
        for number, item in enumerate(plan.items)
    ]


# ── votes ────────────────────────────────────────────────────────────────────────────────────────────────────────
def votes() -> Iterator[Measured]:
    """From the last vote until every rank knows that it is committed; and what the store was asked, per rank."""
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    server = processes.Process(target=serve_store, args=(theirs,))
    server.start()
    port = ours.recv()
    stores = [connected(port) for _ in range(max(VOTERS))]
    for ranks in VOTERS:
        for number in range(ROUNDS):
            with ForeignCpu() as foreign:
                values = vote(stores[:ranks], number)
            yield f"{ranks}", {"ranks": ranks, **values}, foreign.share
    ours.send("end")
    server.join()


def serve_store(connection: Any) -> None:
    """Hold a store until something is received."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    connection.recv()


class Counted:
    """A store that counts what it is asked."""

    def __init__(self, store: Any, asked: Counter[str]) -> None:
        self._store = store
        self._asked = asked

    def __getattr__(self, name: str) -> Callable[..., Any]:
        do = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self._asked[name] += 1
            return do(*arguments)

        return counted


def connected(port: int) -> Any:
    """Connect to the store."""
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def vote(stores: list[Any], number: int) -> dict[str, float]:
    """One vote of as many ranks as there are ``stores``, each a thread."""
    from composerlite.dist.votes import Vote

    ranks = len(stores)

    limit = timedelta(seconds=60)
    asked = [Counter[str]() for _ in range(ranks)]
    votes: list[Any] = []
    for rank, store in enumerate(stores):
        counted: Any = Counted(dist.PrefixStore(f"{ranks}/{number}", store), asked[rank])
        votes.append(Vote(counted, rank, ranks, "save", limit))
    ready = threading.Barrier(ranks)
    arrived, told = [0.0] * ranks, [0.0] * ranks

    def rank_votes(rank: int) -> None:
        ready.wait(60)

        def write() -> int:
            arrived[rank] = time.perf_counter()
            return rank

        assert votes[rank].run(write, len) == ranks
        told[rank] = time.perf_counter()

    threads = [threading.Thread(target=rank_votes, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(told), "a rank failed"
    total = [sum(counts.values()) for counts in asked]
    polls = sum(counts["check"] for counts in asked)
    return {
        "seconds": max(told) - max(arrived),
        "requests_per_rank": sum(total) / ranks,
        "polls_per_rank": polls / ranks,
    }
