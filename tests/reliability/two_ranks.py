"""Kills one rank of a run of two, or both, at a file event of a save or a load; looks at what is left; starts it again.

``two_ranks.py <folder> <what> <spread> <mode> <rank> <most>``: a run that is left in peace tells how many file events
rank ``rank`` has in ``what``, which is ``save`` or ``load``; then, at every event or at ``most`` of them, that rank is
killed by SIGKILL right before it, in turn alone and together with the other. If anything is not as it must be, the
program fails; it prints a line for each kill.

Ranks are forked from a process that has imported everything, so that their start costs nothing.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import twelve_batches
from ports import reserved_port

from composerlite.checkpoint import Catalog
from composerlite.checkpoint.place.commit import delete_checkpoint

CHANGES = ("open", "os.link", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.mkdir")
READS = ("open", "os.listdir", "os.scandir")
LONGEST_SECONDS = 60.0
KEEP, INTERVAL = "2", "3ba"


@dataclass
class Fuse:
    """Kills this process right before its file event ``number`` below ``folder``; tells ``said`` where that was.

    With a negative number it tells of each event instead. Those of a load end when the trainer is built, where those of
    the saves begin.
    """

    what: str
    number: int
    folder: Path
    said: int
    count: int = 0
    lit: bool = True

    def __post_init__(self) -> None:
        self.lit = self.what == "load"
        real = twelve_batches.build

        def build(*arguments: Any, **others: Any) -> Any:
            trainer = real(*arguments, **others)
            self.lit = self.what == "save"
            return trainer

        twelve_batches.build = build
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.lit or not self.counts(event, arguments):
            return
        self.count += 1
        if self.number < 0:
            os.write(self.said, b".")
        elif self.count == self.number:
            os.write(self.said, f"{event} {Path(str(arguments[0])).name}".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def counts(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event not in (READS if self.what == "load" else CHANGES) or not str(arguments[0]).startswith(
            str(self.folder)
        ):
            return False
        return self.what == "load" or event != "open" or bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def start(rank: int, port: int, output: Path, act: Callable[[], None]) -> int:
    """A rank that does it; its process."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"})
        act()
        code = 0
    except BaseException:  # noqa: BLE001 - the process ends here and says so
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass
class Runs:
    """Runs of one kind, in folders below ``root``. ``victim`` is the rank that dies."""

    root: Path
    what: str
    spread: str
    mode: str
    victim: int

    def live(self, folder: Path, number: int = 0, *, both: bool = False) -> tuple[list[int], str]:
        """Let the run live, with a rank to die at its event ``number``: how its ranks ended, and what was said."""
        folder.mkdir(parents=True, exist_ok=True)
        heard, said = os.pipe()

        def act(rank: int) -> None:
            if number and rank == self.victim:
                Fuse(self.what, number, folder / "checkpoints", said)
            twelve_batches.main(str(folder), self.mode, KEEP, INTERVAL, self.spread)

        with reserved_port() as port:  # also for the ranks: they are forked, and it is theirs to their ends
            ranks = [start(rank, port, folder / f"rank{rank}.log", lambda rank=rank: act(rank)) for rank in (0, 1)]  # type: ignore[misc]
        os.close(said)
        watched = [os.pidfd_open(process) for process in ranks]
        if both:
            select.select([watched[self.victim]], [], [], LONGEST_SECONDS)
            os.kill(ranks[1 - self.victim], signal.SIGKILL)
        codes: list[int] = []
        for rank, process in enumerate(ranks):
            hangs = not select.select([watched[rank]], [], [], LONGEST_SECONDS)[0]
            if hangs:
                os.kill(process, signal.SIGKILL)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
            os.close(watched[rank])
            assert not hangs, f"{folder}: rank {rank} hangs"
        with os.fdopen(heard) as pipe:
            return codes, pipe.read()

    def live_in_peace(self, folder: Path) -> int:
        """Let it live to its end; the batch it went on from."""
        codes, _ = self.live(folder)
        assert codes == [0, 0], f"{folder}: {codes}\n{log_of(folder, 0)}\n{log_of(folder, 1)}"
        (resumed,) = {int(log_of(folder, rank).split("resumed from step ")[1].split()[0]) for rank in (0, 1)}
        return resumed

    def whole(self) -> tuple[Path, int]:
        """A run that was left in peace, and how many events the victim had. What is loaded is what a run has left."""
        folder = self.root / "whole"
        if self.what == "load":
            self.live_in_peace(folder)
            catalog = Catalog(folder / "checkpoints")
            delete_checkpoint(catalog.place, catalog.manifests()[-1])
        codes, events = self.live(self.copy("counted"), -1)
        assert codes == [0, 0], log_of(self.root / "counted", 0) + log_of(self.root / "counted", 1)
        return self.root / "counted", len(events)

    def copy(self, name: str) -> Path:
        """A folder to begin with."""
        if self.what == "load":
            shutil.copytree(self.root / "whole", self.root / name, symlinks=True)
        return self.root / name

    def kill(self, number: int, expected: str, *, both: bool) -> str:
        """Kill it at an event, and start it again: where that was, and what it went on from."""
        folder = self.copy(f"event{number}")
        codes, where = self.live(folder, number, both=both)
        assert where, f"{folder}: it did not come to its event {number}"
        assert codes[self.victim] == -signal.SIGKILL
        if not both and not where.endswith(".lease"):  # which goes when the other rank has ended
            told = log_of(folder, 1 - self.victim)
            assert codes[1 - self.victim] == 1, told
            assert "RankError" in told, told
            assert f"rank {self.victim}" in told or "the store" in told, told
        catalog = Catalog(folder / "checkpoints")
        committed = catalog.manifests()
        for manifest in committed:
            catalog.verify(manifest)
        resumed = self.live_in_peace(folder)
        assert resumed >= max((manifest.batch for manifest in committed), default=0), f"{folder}: lost work"
        assert (folder / "final").read_text() == expected, f"{folder}: it ended otherwise"
        return f"{where}\tresumed from {resumed}"


def log_of(folder: Path, rank: int) -> str:
    """What a rank said."""
    return (folder / f"rank{rank}.log").read_text()


def main(root: str, what: str, spread: str, mode: str, rank: str, most: str) -> None:
    """Kill it at one event after the other."""
    torch.set_num_threads(1)
    twelve_batches.build(None, max_duration="1ba").fit()  # torch imports half of itself for the first optimizer
    runs = Runs(Path(root), what, spread, mode, int(rank))
    whole, events = runs.whole()
    expected = (whole / "final").read_text()
    step = max(1, -(-events // int(most)))
    for number in range(1, events + 1)[step // 2 :: step]:
        both = (number // step) % 2 == 1
        done = runs.kill(number, expected, both=both)
        sys.stdout.write(f"{'both' if both else 'one'}\t{number}/{events}\t{done}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
