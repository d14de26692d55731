"""Cost of coordination at thousands of ranks: planning, commit, index, manifest and load planning of Llama models.

The ranks are logical ones in one process: DTensors in the real layouts, over torch's fake process group, whose parts
have memory for one number.
What ranks send each other is pickled as for gloo, and the code of rank 0 runs on the messages of all. Nothing is
written: files have digests of the size that real ones have. Seconds are those of one core.

Where ranks list their parts all are run, or the size is left out. Where they follow a rule three are run, and the
others send what one of these did, but for what each has of its own: the states of its random generators. Exponents are
those of 512 ranks and more, by least squares; the last line is what ``a * ranks ** b``, fitted to the sizes before the
largest, says of it.

Usage: ``python benchmarks/scale.py`` for all; ``--models 70B --ranks 8 64`` for some.
"""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import argparse
import base64
import collections
import concurrent.futures
import copy
import dataclasses
import datetime
import functools
import gc
import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import resource
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed
from measure import write
from rank_costs import Counted, connected
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from composerlite.checkpoint.format.sharded_index import StorageInfo
from composerlite.checkpoint.format.sharded_layout import file_name, narrowed
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.checkpoint.place.directory import _MOST_CHUNKS, _chunk_bytes
from composerlite.checkpoint.save.sharded_plan import Planner, _Proposal, _Table, plan_together
from composerlite.checkpoint.save.sharded_writer import _files, _files_by_rule, _FileWritten
from composerlite.devices import rng
from composerlite.dist.commit_barrier import CommitRound
from composerlite.on_demand import uncollected
from composerlite.storage import FileDigest

RANKS = (8, 64, 512, 4096, 16384)
_LARGE = 512
PROCESSES = 2
MOST_ITEMS = 60_000
"""Items of all ranks together that are made, where none can stand for another."""
TENSOR_PARALLEL = 8
REPLICAS = 8


class Llama(NamedTuple):
    """Sizes from the published ``config.json`` of meta-llama/Llama-2-7b, Llama-3.1-70B and Llama-3.1-405B."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Name and shape of each parameter, and how tensor parallelism shards it: by columns, by rows, or not."""
        kv = self.hidden * self.kv_heads // self.heads
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden), "row"
        for layer in range(self.layers):
            name = f"model.layers.{layer}"
            yield f"{name}.self_attn.q_proj.weight", (self.hidden, self.hidden), "column"
            yield f"{name}.self_attn.k_proj.weight", (kv, self.hidden), "column"
            yield f"{name}.self_attn.v_proj.weight", (kv, self.hidden), "column"
            yield f"{name}.self_attn.o_proj.weight", (self.hidden, self.hidden), "row"
            yield f"{name}.mlp.gate_proj.weight", (self.feed_forward, self.hidden), "column"
            yield f"{name}.mlp.up_proj.weight", (self.feed_forward, self.hidden), "column"
            yield f"{name}.mlp.down_proj.weight", (self.hidden, self.feed_forward), "row"
            yield f"{name}.input_layernorm.weight", (self.hidden,), ""
            yield f"{name}.post_attention_layernorm.weight", (self.hidden,), ""
        yield "model.norm.weight", (self.hidden,), ""
        yield "lm_head.weight", (self.vocabulary, self.hidden), "column"


MODELS = {
    "7B": Llama(4096, 32, 32, 32, 11008, 32000),
    "70B": Llama(8192, 80, 64, 8, 28672, 128256),
    "405B": Llama(16384, 126, 128, 8, 53248, 128256),
}
LAYOUTS = ("FSDP2", "HSDP", "FSDP x TP")


# ── logical ranks ────────────────────────────────────────────────────────────────────────────────────────────────────
class Ranks:
    """The logical ranks of one run: one mesh, in which this process is one rank after the other."""

    def __init__(self, model: str, layout: str, count: int) -> None:
        self.count = count
        self.model = MODELS[model]
        self.layout = layout
        replicas = min(REPLICAS, max(1, count // 8))
        shapes = {
            "FSDP2": (count,),
            "HSDP": (replicas, count // replicas),
            "FSDP x TP": (count // TENSOR_PARALLEL, TENSOR_PARALLEL),
        }
        self.shape = shapes[layout]
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
        self.mesh = DeviceMesh("cpu", torch.arange(count).view(self.shape), _init_backend=False)

    def become(self, rank: int) -> None:
        """Make this process the rank ``rank`` of the mesh."""
        cast("Any", self.mesh)._coordinate_on_dim = self._coordinate(rank)

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        return tuple(rank // stride % size for stride, size in zip(strides, self.shape, strict=True))

    def _placements(self, tensor_parallel: str) -> tuple[Any, ...]:
        if self.layout == "FSDP2":
            return (Shard(0),)
        if self.layout == "HSDP":
            return Replicate(), Shard(0)
        return {
            "column": (_StridedShard(0, split_factor=TENSOR_PARALLEL), Shard(0)),
            "row": (Shard(0), Shard(1)),
            "": (Shard(0), Replicate()),
        }[tensor_parallel]

    def state(self, rank: int) -> dict[str, Any]:
        """The state of a run with AdamW, in float32, as ``rank`` has it; a tensor has memory for one number."""
        self.become(rank)
        model: dict[str, Any] = {}
        optimizer: dict[str, Any] = {}
        for name, shape, tensor_parallel in self.model.shapes():
            placements = self._placements(tensor_parallel)
            local, _ = _compute_local_shape_and_global_offset(
                shape, self.shape, list(self._coordinate(rank)), placements
            )
            strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]

            def part(
                local: Any = local, placements: Any = placements, shape: Any = shape, strides: Any = strides
            ) -> DTensor:
                return DTensor.from_local(
                    torch.empty(1).expand(local),
                    self.mesh,
                    placements,
                    run_check=False,
                    shape=torch.Size(shape),
                    stride=tuple(strides),
                )

            model[name] = part()
            optimizer[name] = {"step": torch.zeros(()), "exp_avg": part(), "exp_avg_sq": part()}
        groups = [{"lr": 1e-4, "betas": (0.9, 0.95), "params": list(model)}]
        return {
            "state": {"model": model, "optimizers": {"AdamW": {"state": optimizer, "param_groups": groups}}},
            "rng": {str(rank): _generators()},
        }


@functools.cache
def _generators() -> torch.Tensor:
    return rng.packed(rng.of_training())


class Sent(NamedTuple):
    """What ranks sent to rank 0 and back in one meeting: bytes of all ranks, and seconds of rank 0."""

    bytes_up: int
    bytes_down: int
    seconds: float


class LogicalGroup:
    """Runs what some ranks do together, one at a time, as a group does; counts what they send."""

    def __init__(self, count: int, samples: Sequence[int]) -> None:
        from composerlite.dist.group import Group

        outer = self
        self.count = count
        self.samples = samples
        self.meetings: list[Sent] = []
        self.rank_seconds: list[float] = []
        self._up: queue.Queue[tuple[int, bytes]] = queue.Queue()
        self._down = {rank: queue.Queue[bytes]() for rank in samples}
        self._first: Callable[[list[Any]], Any] | None = None

        class Member(Group):
            def __init__(self, rank: int) -> None:
                self.rank, self.size = rank, count

            def _through_first(self, what: str, each: Any, first: Any, *, scatter: bool) -> Any:
                start = time.thread_time()
                message = pickle.dumps(each())
                outer.rank_seconds.append(time.thread_time() - start)
                if self.is_first:
                    outer._first = first
                outer._up.put((self.rank, message))
                return {}, pickle.loads(outer._down[self.rank].get())

            outcomes = gather = broadcast = None  # type: ignore[assignment]

        Member.__abstractmethods__ = frozenset()
        self._member = Member

    def run(self, work: Callable[[Any], Any]) -> dict[int, Any]:
        """Run ``work`` of each sampled rank, given its group; what each returned."""
        results: dict[int, Any] = {}
        failures: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                results[rank] = work(self._member(rank))
            except BaseException as e:  # noqa: BLE001 - raised below
                failures.append(e)
            self._up.put((rank, b""))

        threads = {rank: threading.Thread(target=one, args=(rank,), daemon=True) for rank in self.samples}
        going = list(self.samples)
        for rank in self.samples:
            threads[rank].start()  # each runs alone until it meets the others
            self._await(rank, going)
        while going and not failures:
            replies = self._meet()
            for rank in list(going):
                self._down[rank].put(replies[rank])
                self._await(rank, going)
        if failures:
            raise failures[0]
        return results

    def _await(self, rank: int, going: list[int]) -> None:
        who, message = self._up.get(timeout=600)
        assert who == rank
        if not message:
            going.remove(rank)
        self._messages = {**getattr(self, "_messages", {}), rank: message}

    def _meet(self) -> list[bytes]:
        others = [rank for rank in self.samples if rank] or [0]
        messages = [
            self._messages.get(rank) or _stand_in(self._messages[others[rank % len(others)]], rank)
            for rank in range(self.count)
        ]
        assert self._first is not None
        start = time.thread_time()
        with uncollected():
            told = [pickle.loads(message) for message in messages]
        replies = [pickle.dumps(reply) for reply in self._first(told)]
        seconds = time.thread_time() - start
        self.meetings.append(Sent(sum(map(len, messages)), sum(map(len, replies)), seconds))
        return replies


def _stand_in(message: bytes, rank: int) -> bytes:
    """``message`` as ``rank`` would have sent it, which has other states of generators."""
    proposal = _unpickled(message)
    if not isinstance(proposal, _Proposal):
        return message
    wholes = proposal.plan.wholes
    table: _Table = _unpickled(wholes.table)
    names = {key: f"rng.{rank}" if key.startswith("rng.") else key for key in table.keys}
    paths = {names.get(key, key): ("rng", str(rank)) if key in names else path for key, path in table.paths.items()}
    wholes = dataclasses.replace(
        wholes, table=pickle.dumps(table._replace(keys=[names[key] for key in table.keys], paths=paths))
    )
    return pickle.dumps(dataclasses.replace(proposal, plan=dataclasses.replace(proposal.plan, wholes=wholes)))


@functools.lru_cache(8)
def _unpickled(message: bytes) -> Any:
    return pickle.loads(message)


# ── one save and one load ────────────────────────────────────────────────────────────────────────────────────────────
def simulated(model: str, layout: str, count: int) -> dict[str, float]:
    """What a first save, a repeated one and a load cost."""
    from composerlite.checkpoint.save import sharded_plan

    ranks = Ranks(model, layout, count)
    samples = sorted({0, 1, count - 1} if _by_rule(model, count) else range(count))
    sharded_plan._MOST_PLANS = 2 * len(samples)  # each logical rank has its own, and all are in one process
    group = LogicalGroup(count, samples)
    states = {rank: ranks.state(rank) for rank in samples}
    planners = {rank: Planner(of_run=True) for rank in samples}
    before = _memory()

    def plan(member: Any) -> Any:
        def local() -> SavePlan:
            ranks.become(member.rank)
            planner = planners[member.rank]
            planner.set_up_planner(states[member.rank], None, member.is_first)
            return planner.create_local_plan()

        return plan_together(
            member,
            planners[member.rank],
            local,
            lambda number: [("claim", rank, number) for rank in range(number)],
            reuse=True,
        )

    group.run(plan)
    first, group.meetings = group.meetings, []
    each, group.rank_seconds = group.rank_seconds, []
    known = {rank: made[0] for rank, made in group.run(plan).items()}
    values = {
        "tensors": 3 * len(states[0]["state"]["model"]),
        "plan_s": sum(sent.seconds for sent in first),
        "plan_rank_s": statistics.median(each),
        "plan_bytes": sum(sent.bytes_up + sent.bytes_down for sent in first),
        "again_s": sum(sent.seconds for sent in group.meetings),
        "again_rank_s": statistics.median(group.rank_seconds),
        "again_bytes": sum(sent.bytes_up + sent.bytes_down for sent in group.meetings),
    }
    values |= _saved_and_loaded(ranks, planners, known, states) | {"memory_bytes": _memory() - before}
    return values


def _saved_and_loaded(ranks: Ranks, planners: Any, known: Any, states: Any) -> dict[str, float]:
    """Rank 0 when all have written, from the votes as they arrive; and a load on each of the ranks that were run."""
    from composerlite.checkpoint.format.folder_index import index_of
    from composerlite.checkpoint.load.sharded import _LoadPlanner
    from composerlite.checkpoint.load.sharing import ReadRequests
    from composerlite.checkpoint.save.sharded_writer import RemoteFileSystemWriter

    writer = RemoteFileSystemWriter(f"/tmp/{os.getpid()}/step1", thread_count=4)
    writer.layout = known[0].layout
    writer._claim = cast("Any", Claim(""))
    votes = {rank: _vote(rank, ranks.count, planners[rank], known[rank], writer) for rank in known}
    others = [rank for rank in known if rank] or [0]
    every = [
        pickle.dumps(votes.get(rank) or [_as_of(part, rank) for part in votes[others[rank % len(others)]]])
        for rank in range(ranks.count)
    ]
    metadata = copy.copy(known[0].metadata)
    start = time.thread_time()
    results = [pickle.loads(vote) for vote in every]
    index, files = writer.indexed(metadata, results)
    manifest = writer._folder.sealed(index, {name: digest for name, (digest, _) in files.items()}, {}, {}).manifest
    record = manifest.to_json()
    values = {
        "commit_s": time.thread_time() - start,
        "vote_bytes": sum(map(len, every)),
        "index_bytes": len(index),
        "manifest_bytes": len(record),
        "files": len(files),
    }
    seconds: list[float] = []
    sent: list[int] = []
    for rank in known:
        wanted = {key: tensor for key, tensor in planners[rank].state_dict.items() if isinstance(tensor, DTensor)}
        ranks.become(rank)
        start = time.thread_time()
        found = index_of(index, "index")
        planner = _LoadPlanner("index")
        planner.set_up_planner(wanted, narrowed(found, wanted), rank == 0)
        load = planner.create_local_plan()
        for item in load.items:
            assert found.storage_data[item.storage_index].length > 0
        report = pickle.dumps(ReadRequests(load, planner, "a bucket").told)
        seconds.append(time.thread_time() - start)
        sent.append(len(report))
    return {**values, "load_s": statistics.median(seconds), "load_bytes": statistics.median(sent) * ranks.count}


class Claim(NamedTuple):
    """The claim of a save."""

    suffix: str


def _vote(rank: int, count: int, planner: Any, known: Any, writer: Any) -> list[Any]:
    """What a rank that has written votes with: real numbers, and the digests of files that there are not."""
    layout = known.layout
    files = (
        _files(known.final.items, writer.threads) if layout is None else _files_by_rule(known.final.items, layout, rank)
    )
    results: list[Any] = []
    for number, items in enumerate(files):
        name, at = file_name(rank, number, ""), 0
        for item in items:
            size = _size(item, planner)
            results.append(WriteResult(item.index, size, StorageInfo(name, at, size)))
            at += size
        chunk = _chunk_bytes(at, _MOST_CHUNKS if layout is None else layout.most_chunks)
        digest = FileDigest(at, "0" * 32, chunk, base64.b64encode(os.urandom(8 * -(-at // chunk))).decode())
        results.append(WriteResult(MetadataIndex(f"file {name}"), at, _FileWritten(name, digest, None)))
    if layout is None:
        return results
    places = {part.metadata_index: place for part, place in layout.places(rank, "")}
    return [result for result in results if places.get(result.index) != result.storage_data]


def _size(item: Any, planner: Any) -> int:
    if item.tensor_data is None:
        return len(planner.resolve_data(item).getvalue())
    return TorchImage(cast("Any", torch.empty(item.tensor_data.chunk.sizes))).size_bytes


def _as_of(result: Any, rank: int) -> Any:
    """``result`` as another rank would have it."""
    place = result.storage_data
    name = place.name if isinstance(place, _FileWritten) else place.relative_path
    number = name.split("_")[3].split(".")[0]
    other = file_name(rank, int(number), "")
    if isinstance(place, _FileWritten):
        return WriteResult(MetadataIndex(f"file {other}"), result.size_in_bytes, place._replace(name=other))
    its = result.index.fqn.startswith("rng.")
    key = dataclasses.replace(result.index, fqn=f"rng.{rank}") if its else result.index
    return WriteResult(key, result.size_in_bytes, StorageInfo(other, place.offset, place.length))


def _memory() -> int:
    """Most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _tensors(model: str) -> int:
    return 3 * sum(1 for _ in MODELS[model].shapes())


def _by_rule(model: str, count: int) -> bool:
    from composerlite.checkpoint.save import sharded_plan

    return _tensors(model) * count > sharded_plan._MOST_LISTED


# ── votes ────────────────────────────────────────────────────────────────────────────────────────────────────────────
VOTERS = (64, 128, 256, 512)  # 2,048 clients of one store on two cores were not all connected after minutes
VOTERS_IN_TURN, CONNECTIONS = (512, 4096, 16384), 64
VOTING_PROCESSES = 4
VOTING_SECONDS = 120.0


def _received(pipe: multiprocessing.connection.Connection, count: int) -> Any:
    if not pipe.poll(VOTING_SECONDS):
        raise TimeoutError(f"votes of {count} ranks: a process did not answer within {VOTING_SECONDS:g} s")
    return pipe.recv()


def votes() -> dict[int, dict[str, float]]:
    """Votes over a real TCPStore in another process, each rank a thread with a connection of its own."""
    processes = multiprocessing.get_context("fork")
    found: dict[int, dict[str, float]] = {}
    print("\nvotes over a TCPStore: from the last vote until rank 0 has all, and until every rank knows")
    for count in VOTERS:
        server, ours, port = _server(processes)
        pipes: list[Any] = []
        for number in range(VOTING_PROCESSES):
            pipe, its = processes.Pipe()
            ranks = range(number, count, VOTING_PROCESSES)
            processes.Process(target=_vote_as, args=(its, port, ranks, count), daemon=True).start()
            pipes.append(pipe)
        for pipe in pipes:
            _received(pipe, count)
        ours.send("seconds")
        before = _received(ours, count)
        for pipe in pipes:
            pipe.send("vote")
        told = [_received(pipe, count) for pipe in pipes]
        ours.send("seconds")
        last = max(one["arrived"] for one in told)
        found[count] = {
            "decided_s": max(one["decided"] for one in told) - last,
            "known_s": max(one["known"] for one in told) - last,
            "store_s": _received(ours, count) - before,
            "requests": sum(one["requests"] for one in told) / count,
        }
        server.kill()
        print(
            f"{count:>14} ranks: rank 0 {found[count]['decided_s']:.3f} s, all {found[count]['known_s']:.3f} s, "
            f"store {found[count]['store_s']:.3f} s of a core, {found[count]['requests']:.1f} requests a rank",
            flush=True,
        )
    for name in ("decided_s", "known_s", "store_s"):
        points = [(count, one[name]) for count, one in found.items()]
        (_, b), (c, d) = exponent(points), exponent(points[:-1])
        print(f"{name:>14} exponent {b:.2f}; the law of the smaller sizes says {c * VOTERS[-1] ** d:.3f} s")
    return found


def votes_in_turn() -> dict[int, dict[str, float]]:
    """Votes of more ranks over fewer connections, all cast before rank 0 looks: nobody waits or asks twice."""
    processes = multiprocessing.get_context("fork")
    found: dict[int, dict[str, float]] = {}
    print(f"\nvotes of more ranks, in turn over {CONNECTIONS} connections: until rank 0 has all, and the store for all")
    for count in VOTERS_IN_TURN:
        server, ours, port = _server(processes)
        asked = collections.Counter[str]()
        clients = [torch.distributed.PrefixStore("vote", connected(port)) for _ in range(CONNECTIONS)]
        limit, value = datetime.timedelta(seconds=VOTING_SECONDS), os.urandom(1000)
        stores = [cast("Any", Counted(client, asked)) for client in clients]
        rounds = [
            CommitRound(stores[rank % CONNECTIONS], rank, count, "save", limit, datetime.timedelta())
            for rank in range(count)
        ]
        ours.send("seconds")
        before = _received(ours, count)
        for one in rounds:
            one.arrive(value)
        start = time.monotonic()
        assert len(rounds[0].decide()) == count
        decided = time.monotonic() - start
        rounds[0].release()
        for one in rounds[1:]:
            one.wait()
        ours.send("seconds")
        store = _received(ours, count) - before
        found[count] = {"decided_s": decided, "store_s": store, "requests": asked.total() / count}
        server.kill()
        print(
            f"{count:>14} ranks: rank 0 {decided:.3f} s, store {store:.3f} s of a core, "
            f"{found[count]['requests']:.1f} requests a rank",
            flush=True,
        )
    for name in ("decided_s", "store_s"):
        print(f"{name:>14} exponent {exponent([(count, one[name]) for count, one in found.items()])[1]:.2f}")
    return found


def _server(processes: Any) -> tuple[Any, Any, int]:
    """A store in a process of its own, the pipe to it, and its port."""
    ours, theirs = processes.Pipe()
    server = processes.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    return server, ours, _received(ours, 0)


def _serve(connection: Any) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    while connection.recv():
        connection.send(time.process_time())


def _vote_as(connection: Any, port: int, ranks: Sequence[int], count: int) -> None:
    """Vote as each of ``ranks``, when something is received."""
    asked = collections.Counter[str]()
    with concurrent.futures.ThreadPoolExecutor(16) as connecting:
        clients = connecting.map(lambda _: connected(port), ranks)
        stores = [torch.distributed.PrefixStore("vote", client) for client in clients]
    limit = datetime.timedelta(seconds=120)
    rounds = [
        CommitRound(cast("Any", Counted(store, asked)), rank, count, "save", limit, datetime.timedelta())
        for rank, store in zip(ranks, stores, strict=True)
    ]
    arrived, known, decided = [0.0] * len(ranks), [0.0] * len(ranks), [0.0]
    value = os.urandom(1000)
    connection.send("ready")
    connection.recv()

    def commit(values: list[bytes]) -> None:
        decided[0] = time.monotonic()
        assert len(values) == count

    def one(number: int) -> None:
        def written() -> bytes:
            arrived[number] = time.monotonic()
            return value

        rounds[number].run(written, commit)
        known[number] = time.monotonic()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(known), "a rank failed"
    told = {"arrived": max(arrived), "known": max(known), "decided": decided[0], "requests": asked.total()}
    connection.send(told)


# ── all of them ──────────────────────────────────────────────────────────────────────────────────────────────────────
NUMBERS = (
    "plan_s",
    "plan_rank_s",
    "plan_bytes",
    "again_s",
    "again_rank_s",
    "again_bytes",
    "commit_s",
    "vote_bytes",
    "index_bytes",
    "manifest_bytes",
    "files",
    "load_s",
    "load_bytes",
    "memory_bytes",
)


def exponent(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """``a`` and ``b`` of ``a * ranks ** b``, by least squares of logarithms over the larger sizes of ``points``."""
    larger = [(math.log(ranks), math.log(max(value, 1e-9))) for ranks, value in points if ranks >= _LARGE]
    larger = larger if len(larger) > 1 else [(math.log(n), math.log(max(value, 1e-9))) for n, value in points[-2:]]
    b, a = statistics.linear_regression(*zip(*larger, strict=True))
    return math.exp(a), b


def _child(connection: Any, model: str, layout: str, count: int) -> None:
    gc.freeze()
    connection.send(simulated(model, layout, count))


def measured(model: str, layout: str, counts: Sequence[int]) -> dict[int, dict[str, float]]:
    """:func:`simulated` of each size, in a process of its own, so that its memory is seen; two at a time."""
    processes = multiprocessing.get_context("fork")
    waiting, found = sorted(counts), dict[int, dict[str, float]]()
    running: dict[Any, tuple[int, Any]] = {}
    while waiting or running:
        while waiting and len(running) < PROCESSES:
            count = waiting.pop()
            ours, theirs = processes.Pipe(duplex=False)
            child = processes.Process(target=_child, args=(theirs, model, layout, count))
            child.start()
            theirs.close()
            running[ours] = count, child
        for ours in multiprocessing.connection.wait(list(running)):
            count, child = running.pop(ours)
            found[count] = cast("Any", ours).recv()
            child.join(60)
    return {count: found[count] for count in sorted(found)}


def table(model: str, layout: str, counts: Sequence[int]) -> dict[int, dict[str, float]]:
    """Measure, and print a line for each size; in the end exponents, and what the law makes of the next to last."""
    print(f"\n{model}, {layout}: {_tensors(model)} tensors")
    print(f"{'ranks':>14}" + "".join(f"{name:>15}" for name in NUMBERS))
    sizes = [count for count in counts if _by_rule(model, count) or _tensors(model) * count <= MOST_ITEMS]
    found = measured(model, layout, sizes)
    for count, values in found.items():
        print(f"{count:>14}" + "".join(f"{_text(name, values[name]):>15}" for name in NUMBERS), flush=True)
    by_rule = [count for count in found if _by_rule(model, count)]
    if len(by_rule) >= 2:
        laws = {name: exponent([(count, found[count][name]) for count in by_rule]) for name in NUMBERS}
        print(f"{'exponent':>14}" + "".join(f"{laws[name][1]:>15.2f}" for name in NUMBERS))
    if len(by_rule) >= 3:
        checks = {name: exponent([(count, found[count][name]) for count in by_rule[:-1]]) for name in NUMBERS}
        last = by_rule[-1]
        print(f"{'law says':>14}" + "".join(f"{_text(n, a * last**b):>15}" for n, (a, b) in checks.items()))
    return found


def _text(name: str, value: float) -> str:
    if name.endswith("_s"):
        return f"{value:.3f} s"
    return f"{value / 1e6:.3f} MB" if name.endswith("_bytes") else f"{value:.0f}"


def main() -> None:
    """Print all tables; write ``out/scale.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS), help="; default: all")
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=LAYOUTS, help="; default: all")
    parser.add_argument("--ranks", nargs="*", type=int, default=RANKS, help="; default: 8 to 16384")
    parser.add_argument("--no-votes", action="store_true", help="leave out the votes over a real store")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    for model in given.models:
        for layout in given.layouts:
            results[f"{model}, {layout}"] = table(model, layout, given.ranks)
    if not given.no_votes:
        results["votes"] = votes()
        results["votes in turn"] = votes_in_turn()
    write("scale", results)


if __name__ == "__main__":
    main()
