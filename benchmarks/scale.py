"""Cost of coordination at thousands of ranks: planning, commit, index, record and load planning of Llama models.

The ranks are logical ones in one process: DTensors in the real layouts, over torch's fake process group, whose parts
have memory for one number.
What ranks send each other is pickled as for gloo, and the code of rank 0 runs on the messages of all. Nothing is
written: files have digests of the size that real ones have. Seconds are those of one core.

Where ranks list their parts all are run. Where they follow a rule three are run, and the others send what one of these
did, but for what each has of its own: the states of its random generators. Exponents are those of 512 ranks and more,
by least squares; the last line is what ``a * ranks ** b``, fitted to the sizes before the largest, says of it.

Votes are those of real clients of a real store, as many as a process may have files; of more ranks, one after another.

Usage: ``python benchmarks/scale.py`` for all; ``--models 70B --ranks 8 64`` for some.
"""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import argparse
import base64
import collections
import concurrent.futures
import dataclasses
import datetime
import functools
import gc
import importlib
import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import resource
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed
from measure import write
from rank_costs import Counted, connected
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from composerlite.checkpoint.format.folder_index import index_of
from composerlite.checkpoint.format.sharded_layout import MOST_CHUNKS, file_name
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.checkpoint.load.sharded import digests_of, shared_requests
from composerlite.checkpoint.load.sharded_reader import requests_of
from composerlite.checkpoint.place.directory import LEAST_CHUNK_BYTES, SaveHandle
from composerlite.checkpoint.record.record import FileRecord, seal_index
from composerlite.checkpoint.save import sharded_plan
from composerlite.checkpoint.save.sharded_plan import Plan, Proposal, RankState, plan_save
from composerlite.checkpoint.save.sharded_writer import WrittenFile, files_of, index_bytes, record_of_directory
from composerlite.devices import rng
from composerlite.dist.group import Group
from composerlite.dist.votes import Vote
from composerlite.on_demand import uncollected
from composerlite.storage import FileDigest, chunk_bytes_for

A = TypeVar("A")
RANKS = (8, 64, 512, 4096, 16384)
_LARGE = 512
PROCESSES = 2
REPEATS = 3
THREADS = 4
MEETING_SECONDS = 300.0
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
        known: dict[Any, Any] = {}
        for name, shape, tensor_parallel in self.model.shapes():
            placements = self._placements(tensor_parallel)
            if (shape, placements) not in known:  # layers have the same
                known[shape, placements] = _compute_local_shape_and_global_offset(
                    shape, self.shape, list(self._coordinate(rank)), placements
                )
            local, _ = known[shape, placements]
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
    """Runs what some ranks do together, one at a time, each in a thread; counts what they send."""

    def __init__(self, count: int, samples: Sequence[int]) -> None:
        self.count = count
        self.samples = samples
        self.meetings: list[Sent] = []
        self.rank_seconds = collections.Counter[int]()
        self._turn = threading.Condition()
        self._told: dict[int, bytes] = {}
        self._replies: dict[int, bytes] = {}
        self._failures: list[BaseException] = []

    def run(self, work: Callable[[Group], A]) -> dict[int, A]:
        """Run ``work`` of each sampled rank, given its group; what each returned."""
        results: dict[int, A] = {}

        def one(rank: int) -> None:
            with self._turn:
                try:
                    results[rank] = work(_Member(self, rank))
                except BaseException as e:  # noqa: BLE001 - raised below
                    self._failures.append(e)
                self._turn.notify_all()

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in self.samples]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(MEETING_SECONDS)
        if self._failures:
            raise self._failures[0]
        return results

    def tell(self, rank: int, message: bytes) -> list[bytes] | None:
        """Send to rank 0, which returns with the messages of all, those that were not run included."""
        self._told[rank] = message
        self._turn.notify_all()
        if rank:
            return None
        self._wait(lambda: len(self._told) == len(self.samples))
        told, self._told = self._told, {}
        others = [sample for sample in self.samples if sample] or [0]
        return [told.get(one) or _stand_in(told[others[one % len(others)]], one) for one in range(self.count)]

    def hear(self, rank: int, replies: list[bytes] | None) -> bytes:
        """The reply to a rank; rank 0 has the ``replies`` to all."""
        if replies is not None:
            self._replies = {sample: replies[sample] for sample in self.samples}
            self._turn.notify_all()
        self._wait(lambda: rank in self._replies)
        return self._replies.pop(rank)

    def _wait(self, happened: Callable[[], bool]) -> None:
        if not self._turn.wait_for(lambda: happened() or self._failures, MEETING_SECONDS) or self._failures:
            raise TimeoutError(f"logical ranks did not meet: {self._failures}")


class _Member(Group):
    """A rank's view of a :class:`LogicalGroup`, in place of torch's collectives."""

    def __init__(self, group: LogicalGroup, rank: int) -> None:
        super().__init__(rank, group.count)
        self._ranks = group

    def _through_first(self, operation: str, each: Any, first: Any, *, scatter: bool) -> Any:
        since = time.thread_time()
        pickled = pickle.dumps(each())
        self._ranks.rank_seconds[self.rank] += time.thread_time() - since  # type: ignore[assignment]
        replies: list[bytes] | None = None
        if (told := self._ranks.tell(self.rank, pickled)) is not None:
            since = time.thread_time()
            with uncollected():
                results = first([pickle.loads(value) for value in told])
                replies = [pickle.dumps((one, None)) for one in (results if scatter else [results])]
                del results
            seconds = time.thread_time() - since
            replies = replies if scatter else replies * self.size
            self._ranks.meetings.append(Sent(sum(map(len, told)), sum(map(len, replies)), seconds))
        return pickle.loads(self._ranks.hear(self.rank, replies))[0]


def _stand_in(message: bytes, rank: int) -> bytes:
    """``message`` as ``rank`` would have sent it, which has other states of generators."""
    proposal = _unpickled(message)
    if not isinstance(proposal, Proposal):
        return message
    pieces = [one._replace(key=f"rng.{rank}") if one.key.startswith("rng.") else one for one in proposal.pieces]
    paths = {
        f"rng.{rank}" if key.startswith("rng.") else key: ("rng", str(rank)) if key.startswith("rng.") else path
        for key, path in proposal.paths.items()
    }
    return pickle.dumps(proposal._replace(pieces=pieces, paths=paths))


@functools.lru_cache(8)
def _unpickled(message: bytes) -> Any:
    return pickle.loads(message)


# ── one save and one load ────────────────────────────────────────────────────────────────────────────────────────────
def simulated(model: str, layout: str, count: int) -> dict[str, float]:
    """What a first save, a repeated one and a load cost: of plans the medians of several."""
    ranks = Ranks(model, layout, count)
    all_run = not _by_rule(model, count)
    samples = sorted(range(count) if all_run else {0, 1, count - 1})
    states = {rank: ranks.state(rank) for rank in samples}
    sharded_plan.MOST_PLANS = len(samples)  # each logical rank has its own, and all are in one process
    before = _memory()
    passes: list[dict[str, float]] = []
    for number in range(REPEATS if count >= _LARGE else 1):
        sharded_plan.known_plans.clear()
        _, _, first = _planned(ranks, states)
        plans, held, again = _planned(ranks, states)
        passes.append(
            {f"plan_{name}": value for name, value in first.items()}
            | {f"again_{name}": value for name, value in again.items()}
        )
        if not number:
            index, committed = _committed(ranks, plans, held)
            passes[0] |= committed | _loaded(ranks, index, held) | {"memory_bytes": _memory() - before}
    return _medians(passes)


class _Directory:
    """A directory in which nothing is made."""

    def begin(self, handle: SaveHandle) -> None:
        """Begin a save."""


def _planned(ranks: Ranks, states: Mapping[int, Any]) -> tuple[dict[int, Plan], dict[int, RankState], dict[str, float]]:
    """The plans and the pieces of the sampled ranks, and what it took: the whole, if no plan is known already."""
    group = LogicalGroup(ranks.count, list(states))

    def plan(member: Group) -> tuple[Plan, RankState]:
        def contents() -> Any:
            ranks.become(member.rank)
            return states[member.rank]

        handle = SaveHandle(overwrite=False)
        made, _, held = plan_save(member, contents, cast("Any", _Directory()), handle, of_run=True)
        return made, held

    found = group.run(plan)
    seconds = {
        "s": sum(sent.seconds for sent in group.meetings),
        "rank_s": statistics.median(group.rank_seconds.values()),
        "bytes": sum(sent.bytes_up + sent.bytes_down for sent in group.meetings),
    }
    return {rank: one for rank, (one, _) in found.items()}, {rank: one for rank, (_, one) in found.items()}, seconds


def _committed(
    ranks: Ranks, plans: Mapping[int, Plan], held: Mapping[int, RankState]
) -> tuple[bytes, dict[str, float]]:
    """The index that rank 0 makes when all have written, and what it takes, from the votes as they arrive."""
    own = {rank: _vote(rank, plans[rank], held[rank]) for rank in plans}
    others = [rank for rank in plans if rank] or [0]
    votes = [
        pickle.dumps(own.get(rank) or [_as_of(file, rank) for file in own[others[rank % len(others)]]])
        for rank in range(ranks.count)
    ]
    metadata = plans[0].metadata
    assert metadata is not None
    start = time.thread_time()
    written: list[list[WrittenFile]] = [pickle.loads(vote) for vote in votes]
    index = index_bytes(metadata, written, plans[0].layout, "")
    records = [FileRecord(f"step1/{file.name}", **dataclasses.asdict(file.digest)) for part in written for file in part]
    record = dataclasses.replace(
        record_of_directory("step1", ranks.count), form="sharded", id="0" * 16, files=tuple(records)
    )
    record_bytes = len(seal_index(record, index)) - len(index)
    return index, {
        "commit_s": time.thread_time() - start,
        "vote_bytes": sum(map(len, votes)),
        "index_bytes": len(index),
        "record_bytes": record_bytes,
        "files": len(records),
    }


def _loaded(ranks: Ranks, index: bytes, held: Mapping[int, RankState]) -> dict[str, float]:
    """What a load takes on the first rank and the last."""
    seconds: list[float] = []
    sent: list[int] = []
    for rank in (0, ranks.count - 1):
        ranks.become(rank)
        start = time.thread_time()
        found = index_of(index, "index")
        requests = requests_of(found, held[rank].tensors, "index")
        for request in requests:
            assert found.storage_data[request.piece].length > 0
        report = pickle.dumps(digests_of(shared_requests(requests, held[rank].tensors), "a bucket"))
        seconds.append(time.thread_time() - start)
        sent.append(len(report))
    return {"load_s": statistics.median(seconds), "load_bytes": statistics.median(sent) * ranks.count}


def _vote(rank: int, plan: Plan, held: RankState) -> list[WrittenFile]:
    """What a rank that has written votes with: real numbers, and the digests of files that there are not."""
    layout, data = plan.layout, {index: held.data[index] for index in plan.own}
    known: Mapping[Any, Any] = {}
    if layout is not None:
        known = layout.places(rank, "")
    written: list[WrittenFile] = []
    for number, indices in enumerate(files_of(data, THREADS, layout)):
        places: dict[MetadataIndex, tuple[int, int]] = {}
        at = 0
        for index in indices:
            value = data[index]
            size = len(value) if isinstance(value, bytes) else _size_of(value.shape)
            if index not in known:
                places[index] = at, size
            at += size
        chunk = chunk_bytes_for(at, LEAST_CHUNK_BYTES, MOST_CHUNKS if layout is None else layout.most_chunks)
        digest = FileDigest(at, "0" * 32, chunk, base64.b64encode(os.urandom(8 * -(-at // chunk))).decode())
        written.append(WrittenFile(file_name(rank, number, ""), digest, places, None))
    return written


@functools.cache
def _size_of(shape: torch.Size) -> int:
    return TorchImage(cast("Any", torch.empty(shape))).size_bytes


def _as_of(file: WrittenFile, rank: int) -> WrittenFile:
    """``file`` as another rank would have written it."""
    number = file.name.split("_")[3].split(".")[0]
    places = {
        dataclasses.replace(index, fqn=f"rng.{rank}") if index.fqn.startswith("rng.") else index: place
        for index, place in file.places.items()
    }
    return file._replace(name=file_name(rank, int(number), ""), places=places)


def _memory() -> int:
    """Most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _tensors(model: str) -> int:
    return 3 * sum(1 for _ in MODELS[model].shapes())


def _by_rule(model: str, count: int) -> bool:
    return _tensors(model) * count > sharded_plan.MOST_LISTED


# ── votes ────────────────────────────────────────────────────────────────────────────────────────────────────────────
VOTERS = (64, 512, 2048)  # of 4,096, each a thread of Python on two cores, some did not vote within two minutes
VOTERS_IN_TURN, CONNECTIONS = (512, 4096, 16384), 64
VOTING_PROCESSES = 4
VOTING_SECONDS = 120.0


def _received(pipe: multiprocessing.connection.Connection, count: int) -> Any:
    if not pipe.poll(VOTING_SECONDS):
        raise TimeoutError(f"votes of {count} ranks: a process did not answer within {VOTING_SECONDS:g} s")
    return pipe.recv()


def _fits(count: int) -> bool:
    """Return true if a store may have so many clients, each a file of its process; more are allowed if they can be."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most == resource.RLIM_INFINITY or count + 100 < most


def votes() -> dict[int, dict[str, float]]:
    """Votes over a real TCPStore in another process, each rank a thread with a connection of its own."""
    found: dict[int, dict[str, float]] = {}
    print("\nvotes over a TCPStore: from the last vote until rank 0 has all, and until every rank knows")
    for count in filter(_fits, VOTERS):
        try:
            found[count] = _voted(count)
        except TimeoutError as e:
            print(f"not run: {e}", flush=True)
            break
        print(
            f"{count:>14} ranks: rank 0 {found[count]['decided_s']:.3f} s, all {found[count]['known_s']:.3f} s, "
            f"store {found[count]['store_s']:.3f} s of a core, {found[count]['requests']:.1f} requests a rank",
            flush=True,
        )
    if len(found) > 2:
        for name in ("decided_s", "known_s", "store_s"):
            print(f"{name:>14} exponent {exponent([(count, one[name]) for count, one in found.items()])[1]:.2f}")
    return found


def _voted(count: int) -> dict[str, float]:
    processes = multiprocessing.get_context("fork")
    server, ours, port = _server(processes)
    started, pipes, rounds = [server], list[Any](), list[dict[str, float]]()
    try:
        for number in range(VOTING_PROCESSES):
            pipe, its = processes.Pipe()
            ranks = range(number, count, VOTING_PROCESSES)
            started.append(processes.Process(target=_vote_as, args=(its, port, ranks, count), daemon=True))
            started[-1].start()
            pipes.append(pipe)
        for _ in range(REPEATS):
            for pipe in pipes:
                _received(pipe, count)
            ours.send("seconds")
            before = _received(ours, count)
            for pipe in pipes:
                pipe.send("vote")
            told = [_received(pipe, count) for pipe in pipes]
            ours.send("seconds")
            last = max(one["arrived"] for one in told)
            rounds.append(
                {
                    "decided_s": max(one["decided"] for one in told) - last,
                    "known_s": max(one["known"] for one in told) - last,
                    "store_s": _received(ours, count) - before,
                    "requests": sum(one["requests"] for one in told) / count,
                }
            )
    finally:
        for one in started:
            one.kill()
    return _medians(rounds)


def votes_in_turn() -> dict[int, dict[str, float]]:
    """Votes of more ranks over fewer connections, all cast before rank 0 looks: nobody waits or asks twice."""
    processes = multiprocessing.get_context("fork")
    found: dict[int, dict[str, float]] = {}
    print(f"\nvotes of more ranks, in turn over {CONNECTIONS} connections: until rank 0 has all, and the store for all")
    for count in VOTERS_IN_TURN:
        server, ours, port = _server(processes)
        asked = collections.Counter[str]()
        clients = [connected(port) for _ in range(CONNECTIONS)]
        found[count] = _medians([_voted_in_turn(number, clients, count, ours, asked) for number in range(REPEATS)])
        server.kill()
        print(
            f"{count:>14} ranks: rank 0 {found[count]['decided_s']:.3f} s, store {found[count]['store_s']:.3f} s "
            f"of a core, {found[count]['requests']:.1f} requests a rank",
            flush=True,
        )
    for name in ("decided_s", "store_s"):
        print(f"{name:>14} exponent {exponent([(count, one[name]) for count, one in found.items()])[1]:.2f}")
    return found


def _voted_in_turn(
    number: int, clients: Sequence[Any], count: int, server: Any, asked: collections.Counter[str]
) -> dict[str, float]:
    asked.clear()
    limit, value = datetime.timedelta(seconds=VOTING_SECONDS), os.urandom(1000)
    stores = [cast("Any", Counted(torch.distributed.PrefixStore(f"vote {number}", one), asked)) for one in clients]
    rounds = [Vote(stores[rank % CONNECTIONS], rank, count, "save", limit) for rank in range(count)]
    server.send("seconds")
    before = _received(server, count)
    for one in rounds:
        one.arrive(value)
    start = time.monotonic()
    assert rounds[0].decide(len) == count
    decided = time.monotonic() - start
    for one in rounds[1:]:
        one.wait()
    server.send("seconds")
    store = _received(server, count) - before
    return {"decided_s": decided, "store_s": store, "requests": asked.total() / count}


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds if name in one) for name in rounds[0]}


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
    with concurrent.futures.ThreadPoolExecutor(16) as connecting:
        clients = list(connecting.map(lambda _: connected(port), ranks))
    for number in range(REPEATS):
        connection.send("ready")
        connection.recv()
        connection.send(_voted_at_once(number, clients, ranks, count))


def _voted_at_once(number: int, clients: Sequence[Any], ranks: Sequence[int], count: int) -> dict[str, float]:
    """One round, each of ``ranks`` in a thread."""
    asked = collections.Counter[str]()
    rounds = [
        Vote(
            cast("Any", Counted(torch.distributed.PrefixStore(f"vote {number}", client), asked)),
            rank,
            count,
            "save",
            datetime.timedelta(seconds=VOTING_SECONDS),
        )
        for rank, client in zip(ranks, clients, strict=True)
    ]
    arrived, known, decided = [0.0] * len(ranks), [0.0] * len(ranks), [0.0]
    value = os.urandom(1000)

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
    return {"arrived": max(arrived), "known": max(known), "decided": decided[0], "requests": asked.total()}


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
    "record_bytes",
    "files",
    "load_s",
    "load_bytes",
    "memory_bytes",
)


class Job(NamedTuple):
    """A size of a table."""

    model: str
    layout: str
    ranks: int


def exponent(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """``a`` and ``b`` of ``a * ranks ** b``, by least squares of logarithms over the larger sizes of ``points``."""
    larger = [(math.log(ranks), math.log(max(value, 1e-9))) for ranks, value in points if ranks >= _LARGE]
    larger = larger if len(larger) > 1 else [(math.log(n), math.log(max(value, 1e-9))) for n, value in points[-2:]]
    b, a = statistics.linear_regression(*zip(*larger, strict=True))
    return math.exp(a), b


def _child(connection: Any, job: Job) -> None:
    gc.freeze()
    start = time.process_time()
    values = simulated(*job)
    connection.send((values, time.process_time() - start))


def measured(jobs: Sequence[Job], until: float) -> Iterator[tuple[Job, dict[str, float]]]:
    """:func:`simulated` of each job, in a process of its own, so that its memory is seen; two at a time.

    None begins after ``until``.
    """
    processes = multiprocessing.get_context("fork")
    waiting, done = collections.deque(jobs), 0
    running: dict[Any, tuple[Job, Any]] = {}
    while (waiting and time.monotonic() < until) or running:
        while waiting and len(running) < PROCESSES and time.monotonic() < until:
            job = waiting.popleft()
            ours, theirs = processes.Pipe(duplex=False)
            child = processes.Process(target=_child, args=(theirs, job))
            child.start()
            theirs.close()
            running[ours] = job, child
        for ours in multiprocessing.connection.wait(list(running)):
            job, child = running.pop(ours)
            values, seconds = cast("Any", ours).recv()
            child.join(60)
            done += 1
            told = f"{done} of {len(jobs)}: {job.model}, {job.layout}, {job.ranks} ranks: {seconds:.1f} s of a core"
            print(told, file=sys.stderr, flush=True)
            yield job, values


Table = dict[int, dict[str, float]]


def exponents(found: Table, model: str, *, but: int = 0) -> dict[str, tuple[float, float]]:
    """The laws of the sizes of a model at which the index is a rule, without the largest ``but``."""
    counts = [count for count in sorted(found) if _by_rule(model, count)]
    counts = counts[: len(counts) - but]
    if len(counts) < 2:
        return {}
    return {name: exponent([(count, found[count][name]) for count in counts]) for name in NUMBERS}


def print_table(model: str, layout: str, found: Table) -> None:
    """Print a line for each size; then exponents, and what the law of the smaller sizes makes of the largest."""
    print(f"\n{model}, {layout}: {_tensors(model)} tensors")
    print(f"{'ranks':>14}" + "".join(f"{name:>15}" for name in NUMBERS))
    for count in sorted(found):
        print(f"{count:>14}" + "".join(f"{_text(name, found[count][name]):>15}" for name in NUMBERS))
    if laws := exponents(found, model):
        print(f"{'exponent':>14}" + "".join(f"{laws[name][1]:>15.2f}" for name in NUMBERS))
    if checks := exponents(found, model, but=1):
        last = max(found)
        print(f"{'law says':>14}" + "".join(f"{_text(n, a * last**b):>15}" for n, (a, b) in checks.items()), flush=True)


def _text(name: str, value: float) -> str:
    if name.endswith("_s"):
        return f"{value:.{4 if value < 0.1 else 3}f} s"
    return f"{value / 1e6:.3f} MB" if name.endswith("_bytes") else f"{value:.0f}"


TARGETS: dict[str, tuple[float, Callable[[dict[str, float]], float]]] = {
    "later plans, rank 0, s": (0.3, lambda one: one["again_s"] + one["again_rank_s"]),
    "later plans, MB": (10, lambda one: one["again_bytes"] / 1e6),
    "first plan, rank 0, s": (10, lambda one: one["plan_s"] + one["plan_rank_s"]),
    "commit after the last vote, s": (1, lambda one: one["commit_s"] + one["decided_s"]),
    "planning a load, s": (1, lambda one: one["load_s"]),
    "index, MB": (2, lambda one: one["index_bytes"] / 1e6),
}
TARGET_RANKS, TARGET_MODEL, TARGET_EXPONENT = 4096, "70B", 1.05


def print_targets(tables: Mapping[tuple[str, str], Table], decided: float | None) -> None:
    """Compare what was measured with the targets; without votes, ``decided`` is ``None``."""
    print(f"\ntargets at {TARGET_RANKS} ranks of {TARGET_MODEL}, and for the exponents of each table")
    for (model, layout), found in tables.items():
        if model == TARGET_MODEL and TARGET_RANKS in found:
            values = found[TARGET_RANKS] | {"decided_s": 0.0 if decided is None else decided}
            for name, (most, of) in TARGETS.items():
                without = ", without the votes" if decided is None and name.startswith("commit") else ""
                _print_target(f"{layout}: {name}{without}", of(values), most)
        if laws := exponents(found, model):
            name = max(laws, key=lambda one: laws[one][1])
            _print_target(f"{model}, {layout}: largest exponent, of {name}", laws[name][1], TARGET_EXPONENT)


def _print_target(name: str, value: float, most: float) -> None:
    print(f"  {'met   ' if round(value, 2) <= most else 'missed'} {value:8.2f} of {most:5.2f}   {name}")


def _not_run(no_votes: bool) -> Iterator[str]:
    yield "most of the ranks: three are run where the index is a rule, the others send what one of these did"
    if no_votes:
        yield "votes: --no-votes was given"
    else:
        most = max(filter(_fits, VOTERS))
        yield f"a store with more than {most} clients at the same time: more ranks vote in turn"
    yield "messages of ranks over a network: they are pickled and counted, and read by the code of rank 0"
    yield "several machines, a bucket, data files: digests have the size of real ones"


def main() -> None:
    """Print all tables; write ``out/scale.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS), help="; default: all")
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=LAYOUTS, help="; default: all")
    parser.add_argument("--ranks", nargs="*", type=int, default=RANKS, help="; default: 8 to 16384")
    parser.add_argument("--no-votes", action="store_true", help="leave out the votes over a real store")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no size begins; default: 9")
    given = parser.parse_args()
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # torch looks up the name of each client of a store
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    start = time.monotonic()
    importlib.import_module("torch._dynamo")  # as DTensors do: here once for all processes
    cast_votes = {} if given.no_votes else {"votes": votes(), "votes in turn": votes_in_turn()}
    jobs = [
        Job(model, layout, count)
        for is_large in (True, False)  # what exponents and targets are of, before the rest
        for model in given.models
        for layout in given.layouts
        for count in sorted(given.ranks, reverse=True)
        if (count >= _LARGE) is is_large
    ]
    tables: dict[tuple[str, str], Table] = {(job.model, job.layout): {} for job in jobs}
    missing = dict.fromkeys(jobs)
    for job, values in measured(jobs, start + given.minutes * 60):
        tables[job.model, job.layout][job.ranks] = values
        del missing[job]
        if not any(one[:2] == job[:2] for one in missing):
            print_table(job.model, job.layout, tables[job.model, job.layout])
    for key in dict.fromkeys(job[:2] for job in missing):
        print_table(*key, tables[key])
    voted = {**cast_votes.get("votes in turn", {}), **cast_votes.get("votes", {})}
    print_targets(tables, voted[TARGET_RANKS]["decided_s"] if voted else None)
    print()
    for model, layout in dict.fromkeys(job[:2] for job in missing):
        sizes = ", ".join(f"{job.ranks}" for job in missing if job[:2] == (model, layout))
        print(f"not run: {model}, {layout}, {sizes} ranks: {given.minutes:g} minutes were over")
    for what in _not_run(given.no_votes):
        print(f"not run: {what}")
    print(f"took {(time.monotonic() - start) / 60:.1f} minutes")
    write("scale", {f"{model}, {layout}": found for (model, layout), found in tables.items()} | cast_votes)


if __name__ == "__main__":
    main()
