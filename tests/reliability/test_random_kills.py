"""SIGKILL at any instant of a save, of retention or of a resume: nothing that was committed is ever lost."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from twelve_batches import BATCHES, SAVING, WIDE, Digests, build, digest
from zygote import Zygote

from composerlite.checkpoint import Catalog, read_checkpoint

LARGE: dict[str, Any] = {"width": WIDE, "save_interval": "3ba", "num_checkpoints_to_keep": 1}
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"num_checkpoints_to_keep": 1},
    {"num_checkpoints_to_keep": 3},
    {"save_interval": "3ba", "num_checkpoints_to_keep": 2},
    {"filename": "newest.pt", "overwrite": True},
    {"filename": "{epoch}/of/ba{batch}.pt", "num_checkpoints_to_keep": 2},
    LARGE,
]
"""The runs that are killed."""


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as zygote:
        yield zygote


@dataclass
class Facts:
    """What is known of a run that is killed again and again.

    Attributes:
        committed: batches of which a checkpoint was seen, and which retention may not have deleted.
        linked: ``latest`` was seen.
        kills: by what they left behind.
    """

    folder: Path
    diary: Path
    mode: str
    arguments: dict[str, Any]
    reference: dict[int, str]
    committed: set[int] = field(default_factory=set[int])
    linked: bool = False
    kills: Counter[str] = field(default_factory=Counter[str])

    @property
    def keeps(self) -> int:
        """How many checkpoints there are at least, once there were so many."""
        return 1 if "overwrite" in self.arguments else self.arguments.get("num_checkpoints_to_keep", -1)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[int, str]]:
    """What an uninterrupted run of some width is after each batch, and at the end."""
    known: dict[int, dict[int, str]] = {}

    def reference(width: int) -> dict[int, str]:
        if width not in known:
            digests = Digests()
            with build(None, width=width, callbacks=[digests]) as run:
                run.fit()
            assert digests.at[BATCHES] == digest(run.state.state_dict())
            known[width] = digests.at
        return known[width]

    return reference


class Patience:
    """How long runs of each kind are let live: adjusted so that seven of ten are killed, however busy the machine."""

    def __init__(self) -> None:
        self._most: dict[str, float] = {}

    def draw(self, kind: str, chooser: random.Random) -> float:
        """After how many seconds to kill one."""
        return chooser.uniform(0, self._most.setdefault(kind, 0.3))

    def learn(self, kind: str, *, killed: bool) -> None:
        """Take note of how it ended."""
        self._most[kind] *= 1.1 if killed else 0.8


def kill_again_and_again(facts: Facts, zygote: Zygote, chooser: random.Random, patience: Patience, most: int) -> None:
    """Kill a run until it has lived to its end, or ``most`` times; then let it."""
    kind = str(facts.arguments)
    for _ in range(most):
        code = live(facts, zygote, patience.draw(kind, chooser))
        patience.learn(kind, killed=code != 0)
        if code == 0:
            return
    assert live(facts, zygote, None) == 0


def live(facts: Facts, zygote: Zygote, kill_after: float | None) -> int:
    """Let it live once more, and look at what it leaves."""
    before = facts.diary.stat().st_size if facts.diary.exists() else 0
    job = {"folder": str(facts.folder), "diary": str(facts.diary), "mode": facts.mode, "arguments": facts.arguments}
    code, _ = zygote.run(job, kill_after)
    said = facts.diary.read_text()[before:].splitlines() if facts.diary.exists() else []
    assert code in (0, -signal.SIGKILL), "\n".join(said)
    look_after_a_kill(facts, said)
    if code == 0:
        assert said[-1] == f"ended {facts.reference[BATCHES]}"
    else:
        facts.kills[what_was_going_on(facts, said)] += 1
    return code


def look_after_a_kill(facts: Facts, said: list[str]) -> None:
    """Fails if something is lost, before anybody has repaired anything."""
    catalog = Catalog(facts.folder)
    if resumed := [line for line in said if line.startswith("resumed")]:
        start = int(resumed[0].split()[1])
        assert start >= max(facts.committed, default=0), "it did not go on from the newest checkpoint"
    there = {manifest.batch: manifest for manifest in catalog.manifests()}
    for batch, manifest in there.items():
        catalog.verify(manifest)
        contents = read_checkpoint(facts.folder / manifest.name)["state"]
        assert contents["timestamp"]["Timestamp"]["batch"] == batch
        assert digest(contents) == facts.reference[batch]
    new = {batch_of(line, there) for line in said if line.startswith("committed")} - {None}
    facts.committed |= {batch for batch in new if batch is not None} | set(there)
    for batch in sorted(facts.committed - set(there)):
        newer = [other for other in there if other > batch]
        assert facts.keeps != -1, f"batch {batch} is lost"
        assert len(newer) >= facts.keeps, f"batch {batch} was deleted, and there are only {newer}"
        facts.committed.remove(batch)
    link = facts.folder / "latest.pt"
    facts.linked |= "latest" in said or len(facts.committed) > 1
    if facts.linked:
        assert link.is_symlink(), "latest is gone"
    if link.is_symlink():
        assert catalog.manifest_of(str(link.readlink())) is not None, f"latest points to {link.readlink()}"
        facts.linked = True


def batch_of(line: str, there: dict[int, Any]) -> int | None:
    """The batch of a checkpoint that the diary calls committed; ``None`` where its name does not say."""
    stem = Path(line.split()[1]).stem
    return int(stem.removeprefix("ba")) if stem.startswith("ba") else None


def what_was_going_on(facts: Facts, said: list[str]) -> str:
    """At the moment of the kill, by what is left and what the run had said."""
    if not any(line.startswith("resumed") for line in said):
        return "resume"
    names = [path.name for path in facts.folder.rglob("*")]
    if any(name.startswith(".latest.pt.tmp-") for name in names):
        return "link"
    return "write" if any(".pt.tmp-" in name for name in names) else "training"


def kill(
    zygote: Zygote,
    references: Callable[[int], dict[int, str]],
    root: Path,
    *,
    kills: int,
    seed: int,
    among: Sequence[dict[str, Any]] = ARGUMENTS,
) -> Counter[str]:
    """Kill runs of all kinds until there were so many kills; what was going on at each."""
    chooser = random.Random(seed)
    kinds = [(mode, arguments) for arguments in among for mode in SAVING]
    chooser.shuffle(kinds)
    patience = Patience()
    found: Counter[str] = Counter()
    number = 0
    while found.total() < kills:
        mode, arguments = kinds[number % len(kinds)]
        home = root / str(number)
        home.mkdir()
        facts = Facts(home / "run", home / "diary", mode, arguments, references(arguments.get("width", 8)))
        try:
            kill_again_and_again(facts, zygote, chooser, patience, min(kills - found.total(), 8))
        except Exception as e:
            e.add_note(f"{mode} {arguments}, in {home}, seed {seed}, after {found.total()} kills")
            raise
        found.update(facts.kills)
        shutil.rmtree(home)
        number += 1
    return found


def test_a_kill_at_any_instant_loses_nothing(
    zygote: Zygote, references: Callable[[int], dict[int, str]], tmp_path: Path
) -> None:
    """Runs of every kind are killed and started again until they end, bit for bit as if nothing had happened."""
    small = [arguments for arguments in ARGUMENTS if arguments is not LARGE]
    assert kill(zygote, references, tmp_path, kills=8, seed=time.time_ns(), among=small).total() == 8


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_thousand_kills_lose_nothing(
    zygote: Zygote,
    references: Callable[[int], dict[int, str]],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """The same, a thousand times."""
    found = kill(zygote, references, tmp_path, kills=1000, seed=time.time_ns())
    assert found.total() == 1000
    during = ", ".join(f"{count} in {what}" for what, count in found.most_common())
    record_property("count", f"random SIGKILLs: 1000 ({during}), nothing committed was lost")
