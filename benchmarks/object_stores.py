"""P8 and P10: what moving a checkpoint to a bucket and back costs, and finding the newest of 10,000.

Everything goes to a real S3 service on loopback, started by each process for itself. Four measurements:

- ``transfers``: one object up, down into memory and down into a file, by every client in turn, in an order by chance.
  A file counts when it is durable. The seconds are those of the clock; the processor seconds are the client's alone.
  What one has left to write to the disk is written before the next begins, and a client whose turn other programs
  disturbed has another.
- ``finding``: the requests and seconds to find the newest checkpoint, counted on the wire by a proxy.
- ``training``: the time that a Trainer's own thread spends on uploads, by a profile of that thread.
- ``composerlite`` and ``OLMo-core``: a save to a bucket, until training goes on and until it is published.

Usage: ``python benchmarks/object_stores.py`` for all, with a measurement's name for that one once. ``--megabytes`` of
the object that is moved, ``--checkpoints`` in the bucket.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import logging
import os
import pstats
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from measure import SHORT, ForeignCpu, Sample, installed, interleaved, report, spread, undisturbed, write
from object_store_clients import CLIENTS, Client, Service

sys.path.append(str(Path(__file__).parent.parent / "tests"))  # where the services of the tests are started
from storage.servers.seaweedfs import S3Server, running_seaweedfs

REPEATS = 5
MOST_ROUNDS = 5
MEGABYTES, CHECKPOINTS = (8, 20) if SHORT else (128, 10_000)
LAYERS = 1 if SHORT else 3
TEMPLATE = "ba{batch}.pt"
SAVES = 1 if SHORT else 5
TURNS = 2
WRITERS = 16
FINDS = 5
BATCHES, BATCHES_PER_SAVE = 60, 10
TIMEOUT = 300.0
OURS = "composerlite"
SAVERS = (OURS, "OLMo-core") if installed("ai2-olmo-core") else (OURS,)
DIRECTIONS = ("upload", "read", "download")


@contextlib.contextmanager
def service() -> Generator[S3Server]:
    """A service of this process, with its credentials and address in the environment."""
    with running_seaweedfs() as server:
        os.environ.update(server.environment)
        os.environ["AWS_ENDPOINT_URL"] = server.endpoint_url
        yield server


@contextlib.contextmanager
def bucket_of(server: S3Server) -> Generator[str]:
    """A bucket that is removed with all that is in it."""
    name = server.new_bucket()
    yield name
    client = server.client()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
        if entries := [{"Key": entry["Key"]} for entry in page.get("Contents", ())]:
            client.delete_objects(Bucket=name, Delete={"Objects": entries})
    client.delete_bucket(Bucket=name)
    client.close()


# ── transfers ────────────────────────────────────────────────────────────────────────────────────────────────────
def transfers(megabytes: int) -> None:
    """P8, one round: every client moves one object."""
    found: list[Sample] = []
    with service() as server, tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.write_bytes(os.urandom(megabytes * 1_000_000))
        memory = memoryview(bytearray(source.read_bytes()))  # touched before
        with bucket_of(server) as bucket:
            where = Service(server.endpoint_url, server.access_key, server.secret_key, server.region, bucket)
            for name in random.sample(list(CLIENTS), len(CLIENTS)):
                found.append(turn(name, where, source, memory))
    for sample in found:
        report(sample.values, sample.foreign_cpu, sample.part)


def turn(name: str, where: Service, source: Path, memory: memoryview) -> Sample:
    """What one client needs: undisturbed, or the last of several turns."""
    number = 0
    while True:
        number += 1
        client = CLIENTS[name](where)
        with ForeignCpu() as foreign:
            values = moves(client, f"{name} {number}", source, memory)
        client.close()
        sample = Sample(values, foreign.share, name)
        if not sample.disturbed or number == TURNS:
            return sample


def moves(client: Client, folder: str, source: Path, memory: memoryview) -> dict[str, float]:
    """Seconds, and processor seconds of this process, in each direction. What is in the bucket is below ``folder``."""
    target = source.with_name("target")

    def download() -> None:
        client.download(f"{folder}/object", target)
        if not client.flushes:
            flush(target)

    with source.with_name("small").open("wb") as small:
        small.write(b"x")
    client.upload(f"{folder}/small", Path(small.name))  # connections and threads are there
    steps: dict[str, Callable[[], None]] = {
        "upload": lambda: client.upload(f"{folder}/object", source),
        "read": lambda: client.read(f"{folder}/object", memory),
        "download": download,
    }
    values: dict[str, float] = {}
    for name, step in steps.items():
        os.sync()  # what others have left to write is not this one's
        start, cpu = time.perf_counter(), time.process_time()
        step()
        values[f"{name}_s"], values[f"{name}_cpu_s"] = time.perf_counter() - start, time.process_time() - cpu
    assert target.stat().st_size == memory.nbytes
    target.unlink()
    return values


def flush(path: Path) -> None:
    """Make a file durable."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# ── finding ──────────────────────────────────────────────────────────────────────────────────────────────────────
def finding(checkpoints: int) -> None:
    """P10: the newest of many checkpoints, where ``latest`` leads to it and where it does not."""
    from composerlite.checkpoint.place.bucket import Bucket
    from composerlite.checkpoint.place.catalog import Catalog
    from composerlite.storage import Transfer, open_store
    from composerlite.testing import FaultProxy

    link = "run/latest-rank0.pt"
    with ForeignCpu() as foreign, service() as server, bucket_of(server) as bucket:
        address = urlsplit(server.endpoint_url)
        fill(server, bucket, checkpoints, link)
        with FaultProxy(str(address.hostname), int(address.port or 0)) as proxy, contextlib.ExitStack() as stack:

            def remote(url: str) -> Catalog:
                store = stack.enter_context(open_store(f"s3://{bucket}", endpoint_url=url))
                return Catalog(Bucket(stack.enter_context(Transfer(store)), "run"))

            counted, direct = remote(proxy.url), remote(server.endpoint_url)
            newest = counted.latest(link, "run")
            assert newest is not None
            assert newest.batch == checkpoints
            requests = proxy.requests
            seconds = [timed(lambda: direct.latest(link, "run")) for _ in range(FINDS)]
            before = proxy.requests
            assert len(list(counted.names())) == checkpoints
            listing = proxy.requests - before
            all_seconds = timed(lambda: direct.manifests()[-1])
    for number in range(FINDS):
        values = {"latest_requests": requests, "latest_s": seconds[number], "list_requests": listing}
        report({**values, "all_s": all_seconds}, foreign.share)


def fill(server: S3Server, bucket: str, checkpoints: int, link: str) -> None:
    """Put so many small checkpoints into the bucket, and point the link to the newest."""
    from composerlite.checkpoint.place.bucket import Bucket
    from composerlite.checkpoint.place.commit import commit_sent
    from composerlite.checkpoint.record.record import FileRecord, Manifest, SavedRun, seal
    from composerlite.storage import Transfer, chunk_bytes_for, open_store
    from composerlite.storage.disk.writer import Digester

    stamp = dict.fromkeys(("epoch", "batch", "sample", "token", "batch_in_epoch", "sample_in_epoch"), 0)
    body = bytes(1000)
    digester = Digester(chunk_bytes_for(len(body)))
    digester.update(body)
    digest = digester.finish()

    def sealed(batch: int) -> tuple[Manifest, bytes]:
        """The record of a checkpoint, and its file."""
        name = f"ep0-ba{batch}-rank0.pt"
        when = f"2026-01-01T00:00:{batch / checkpoints:.6f}"
        manifest = Manifest(
            name=name,
            kind="monolithic",
            template="ep{epoch}-ba{batch}-rank{rank}.pt",
            run=SavedRun(name="run", timestamp={**stamp, "batch": batch}),
            files=(),
            saved_at=when,
        )
        tail = seal(manifest, digest)
        return replace(manifest, files=(FileRecord(name, **asdict(digest.with_tail(tail))),)), body + tail

    with open_store(f"s3://{bucket}") as store, Transfer(store) as transfer:

        def put(batch: int) -> None:
            manifest, file = sealed(batch)
            transfer.put_bytes(f"run/{manifest.name}", file)

        with ThreadPoolExecutor(WRITERS) as pool:
            list(pool.map(put, range(1, checkpoints)))
        with tempfile.NamedTemporaryFile() as data:
            newest, file = sealed(checkpoints)
            data.write(file)
            data.flush()
            commit_sent(Bucket(transfer, "run"), newest, Path(data.name), None, {link: newest.name})


def timed(do: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


# ── the training thread ──────────────────────────────────────────────────────────────────────────────────────────
UPLOADS = {
    *("publish.py", "bucket.py", "background.py", "transfer.py", "part_uploads.py", "workers.py", "s3.py", "retry.py"),
}


def training() -> None:
    """P8: milliseconds of the training thread in the code of uploads, for each save of a run that saves to a bucket."""
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, TensorDataset

    from composerlite import Callback, ComposerModel, Trainer

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(16, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 4))

        def forward(self, batch: Any) -> torch.Tensor:
            return self.layers(batch[0])

        def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
            return F.cross_entropy(outputs, batch[1])

    class Profiled(Callback):
        """A profile of each epoch."""

        def __init__(self) -> None:
            self.profiles: list[cProfile.Profile] = []

        def epoch_start(self, state: Any, logger: Any) -> None:
            self.profiles.append(cProfile.Profile())
            self.profiles[-1].enable()

        def epoch_end(self, state: Any, logger: Any) -> None:
            self.profiles[-1].disable()

    profiled, model = Profiled(), Model()
    data = TensorDataset(torch.randn(BATCHES * 8, 16), torch.randint(0, 4, (BATCHES * 8,)))
    with ForeignCpu() as foreign, service() as server, bucket_of(server) as bucket, tempfile.TemporaryDirectory() as at:
        trainer = Trainer(
            model=model,
            train_dataloader=DataLoader(data, batch_size=8),
            max_duration=f"{REPEATS}ep",
            optimizers=torch.optim.AdamW(model.parameters()),
            save_folder=f"s3://{bucket}/run",
            save_staging_folder=at,
            save_interval=f"{BATCHES_PER_SAVE}ba",
            callbacks=profiled,
            progress_bar=False,
            device="cpu",
        )
        trainer.fit()
        trainer.close()
    saves = BATCHES // BATCHES_PER_SAVE
    for profile in profiled.profiles:
        values = {"upload_ms_per_save": seconds_in_uploads(profile) * 1e3 / saves, "saves": saves}
        report(values, foreign.share)


def seconds_in_uploads(profile: cProfile.Profile) -> float:
    """In functions of uploads that other functions called."""
    stats: Any = pstats.Stats(profile)

    def is_upload(function: tuple[str, int, str]) -> bool:
        return Path(function[0]).name in UPLOADS

    return sum(
        edge[3]
        for function, (*_, callers) in stats.stats.items()
        if is_upload(function)
        for caller, edge in callers.items()
        if not is_upload(caller)
    )


# ── saving ───────────────────────────────────────────────────────────────────────────────────────────────────────
def saving(system: str) -> None:
    """Saves of a training state to a bucket; the first of each way is not timed."""
    import torch
    from checkpoint_systems import Run

    torch.set_num_threads(os.cpu_count() or 1)
    with ForeignCpu() as foreign, service() as server, tempfile.TemporaryDirectory() as folder:
        run = Run(LAYERS)
        run.free_gradients()
        found = list((saves_of_ours if system == OURS else saves_of_olmo)(server, run, Path(folder)))
    size = sum(tensor.nbytes for tensor in run.tensors())
    for part, stall, published in found:
        report({"stall_s": stall, "published_s": published, "state_bytes": size}, foreign.share, part)


def saves_of_ours(server: S3Server, run: Any, folder: Path) -> Iterator[tuple[str, float, float]]:
    """Saves and a Publisher, as Trainer uses them."""
    from checkpoint_systems import Composerlite

    from composerlite import dist
    from composerlite.checkpoint import Catalog
    from composerlite.checkpoint.place.bucket import Bucket
    from composerlite.checkpoint.save.form import SaveRequest
    from composerlite.checkpoint.save.options import SaveOptions
    from composerlite.checkpoint.save.publish import Publisher
    from composerlite.storage import Transfer, Uploader, open_store

    system = Composerlite(run)
    system.prepare("async")
    with bucket_of(server) as bucket, open_store(f"s3://{bucket}") as store:
        uploader = Uploader(Transfer(store))
        for number in range(SAVES + 1):
            catalog, root = Catalog(folder / f"{number}"), f"run{number}"
            publisher = Publisher(
                uploader=uploader,
                bucket=Bucket(uploader.transfer, root),
                template=TEMPLATE,
                links=[f"{root}/latest-rank0.pt"],
                options=SaveOptions({"upload_timeout_in_seconds": TIMEOUT}),
                check=lambda: None,
            )

            def publish(publisher: Publisher = publisher, catalog: Catalog = catalog) -> None:
                (manifest,) = catalog.manifests()
                publisher.submit(manifest, catalog, dist.Group().vote("publishing"))

            start = time.perf_counter()
            request = SaveRequest(state=system.state, catalog=catalog, template=TEMPLATE, publish=publish)
            pending = system.begin(request)
            stall = time.perf_counter() - start
            pending.wait(TIMEOUT)
            assert uploader.wait(TIMEOUT)
            published = time.perf_counter() - start
            uploader.raise_failures()
            assert publisher.remote.latest(f"{root}/latest-rank0.pt", "run") is not None
            if number:
                yield "async", stall, published
        uploader.close()
    system.release()


def saves_of_olmo(server: S3Server, run: Any, folder: Path) -> Iterator[tuple[str, float, float]]:
    """``save_model_and_optim_state`` to ``s3://``, and its asynchronous sister."""
    import olmo_core.distributed.checkpoint as olmo

    with bucket_of(server) as bucket:
        for number in range(SAVES + 1):
            path = f"s3://{bucket}/sync{number}"
            seconds = timed(lambda path=path: olmo.save_model_and_optim_state(path, run.model, run.optimizer))
            if number:
                yield "sync", seconds, seconds
        for number in range(SAVES + 1):
            start = time.perf_counter()
            path = f"s3://{bucket}/async{number}"
            future = olmo.async_save_model_and_optim_state(path, run.model, run.optimizer)
            stall = time.perf_counter() - start
            future.result(TIMEOUT)
            if number:
                yield "async", stall, time.perf_counter() - start


# ── all of them ──────────────────────────────────────────────────────────────────────────────────────────────────
def main(megabytes: int, checkpoints: int, repeats: int) -> None:
    """All measurements; writes ``out/object_stores.json``."""
    arguments = ["--megabytes", str(megabytes), "--checkpoints", str(checkpoints)]

    def run(systems: list[str], count: int, most_rounds: int) -> tuple[dict[str, list[Sample]], int]:
        return interleaved(
            __file__, systems, repeats=count, most_rounds=most_rounds, warm_up_rounds=0, arguments=arguments
        )

    moved, rounds = run(["transfers"], repeats, max(MOST_ROUNDS, repeats))
    found, _ = run(["finding"], 1, 1)
    trained, _ = run(["training"], 1, 1)
    saved, _ = run(list(SAVERS), SAVES, 1)
    clients = by_part(moved["transfers"])
    results: dict[str, Any] = {
        "megabytes": megabytes,
        "rounds": rounds,
        "clients": {
            name: {"version": version(CLIENTS[name].distribution), "flushes": CLIENTS[name].flushes, **numbers(mine)}
            for name, mine in ((name, clients[name]) for name in CLIENTS)
        },
        "of_best": {direction: of_best(clients, direction) for direction in DIRECTIONS},
        "checkpoints": checkpoints,
        "finding": numbers(found["finding"]),
        "plain_requests": 1 + 2 * checkpoints,  # a listing, and size and content of each: counted, not run
        "training": numbers(trained["training"]),
        "saving": {
            system: {
                "version": version({OURS: OURS, "OLMo-core": "ai2-olmo-core"}[system]),
                "parts": {part: numbers(mine) for part, mine in by_part(samples).items()},
            }
            for system, samples in saved.items()
        },
    }
    write("object_stores", results)


def by_part(samples: list[Sample]) -> dict[str, list[Sample]]:
    """The samples of each part."""
    return {
        part: [sample for sample in samples if sample.part == part]
        for part in dict.fromkeys(sample.part for sample in samples)
    }


def numbers(samples: list[Sample]) -> dict[str, Any]:
    """Of every number median, minimum and maximum over the undisturbed repeats; processor time and counts over all."""
    kept = undisturbed(samples)
    return {
        "repeats": len(kept),
        "dropped": len(samples) - len(kept),
        **{
            name: spread(
                [s.values[name] for s in (samples if name.endswith(("cpu_s", "requests", "_bytes")) else kept)]
            )
            for name in samples[0].values
        },
        "samples": [{**sample.values, "foreign_cpu": sample.foreign_cpu} for sample in samples],
    }


def of_best(clients: dict[str, list[Sample]], direction: str) -> dict[str, Any]:
    """Our speed as a share of the best other client's, in the same round: over the undisturbed rounds, and over all."""
    seconds = {name: [sample.values[f"{direction}_s"] for sample in samples] for name, samples in clients.items()}
    rounds = range(len(clients[OURS]))
    quiet = [number for number in rounds if not any(samples[number].disturbed for samples in clients.values())]
    return {"undisturbed": share_of_best(seconds, quiet), "all": share_of_best(seconds, rounds)}


def share_of_best(seconds: dict[str, list[float]], rounds: Sequence[int]) -> dict[str, Any] | None:
    """The best other client is the one with the least median seconds; ``None`` if there are no rounds."""
    if not rounds:
        return None
    others = [name for name in seconds if name != OURS]
    best = min(others, key=lambda name: statistics.median(seconds[name][number] for number in rounds))
    share = spread([seconds[best][number] / seconds[OURS][number] for number in rounds])
    return {"client": best, "rounds": len(rounds), "share": share}


MEASUREMENTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "transfers": lambda given: transfers(given.megabytes),
    "finding": lambda given: finding(given.checkpoints),
    "training": lambda given: training(),
    **{system: lambda given, system=system: saving(system) for system in SAVERS},
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", nargs="?", choices=MEASUREMENTS, help="once; all by default")
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="of the object that is moved")
    parser.add_argument("--checkpoints", type=int, default=CHECKPOINTS, help="in the bucket that is looked through")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="undisturbed ones of each client")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if given.measurement is None:
        main(given.megabytes, given.checkpoints, given.repeats)
    else:
        MEASUREMENTS[given.measurement](given)
