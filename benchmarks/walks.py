"""The modules that one save and one load go through, and the calls between them.

A run of one rank saves its second checkpoint into a folder as one file, with the default of keeping all; again in a run
that keeps one, so that the save deletes the first; and another run is built with ``load_path``. ``sys.setprofile`` and
``threading.setprofile`` see every call in every thread of the three. Counted are the modules of the packages in
`LAYERS` in which a function was called, and the edges: pairs of such modules of which one called the other, directly or
through functions of others (a context manager of Python, a hook of the trainer), each pair once. Starting a thread is
no call. Functions are those above `storage` that were called from another module, each once.

An edge goes up where a lower layer calls a higher one: storage the other two, checkpoint the callbacks.

Usage: ``python benchmarks/walks.py`` prints the walks, each module once, and again in a thread, under the module that
first called it; then the edges that go up. ``--edges`` lists all edges. ``--check 22 45 20`` exits with 1 where a save
has more modules, a save more edges or a load more modules than that. ``--markdown`` prints the part of
``docs/architecture.md`` that is about them, and ``--write docs/architecture.md`` puts it there: ``make walks``.
``--functions`` lists the functions.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import textwrap
import threading
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import composerlite
from composerlite import Trainer
from composerlite.models import ComposerClassifier

PACKAGE = Path(composerlite.__file__).parent
LAYERS = {"storage": 0, "checkpoint": 1, "callbacks": 2}
"""The packages that are counted, the lowest first."""

BEGIN, END = "<!-- walks: written by `make walks` -->", "<!-- end of walks -->"
"""What stands around the walks in the page."""

Edge: TypeAlias = tuple[str, str]


@dataclass(slots=True, eq=False)
class Step:
    """A function that was called from another module, and what it called in others."""

    module: str
    function: str
    steps: list[Step] = field(default_factory=list["Step"])
    in_thread: bool = False


@dataclass(slots=True, eq=False)
class Walk:
    """The calls between modules while something ran."""

    roots: list[Step] = field(default_factory=list[Step])
    """Functions outside of the counted packages from which these were entered."""
    edges: dict[Edge, int] = field(default_factory=dict[Edge, int])
    modules: set[str] = field(default_factory=set[str])
    functions: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """Module and name of each function above storage that another module called."""
    _running: dict[FrameType, Step] = field(default_factory=dict[FrameType, Step])
    _started_by: dict[int, Step] = field(default_factory=dict[int, Step])
    """By the ``id`` of a thread: the function that started it."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def upward(self) -> list[Edge]:
        """The edges from a lower layer to a higher one."""
        return [edge for edge in self.edges if _layer(edge[0]) < _layer(edge[1])]

    @contextmanager
    def followed(self) -> Generator[None]:
        """Note every call of the block, in all threads that it starts."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if event == "return":
            with self._lock:
                self._running.pop(frame, None)
        elif event == "call":
            if frame.f_code is threading.Thread.start.__code__ and (starter := self._step_of(frame.f_back)):
                self._started_by[id(frame.f_locals["self"])] = starter
            elif (module := _counted(frame)) and frame.f_code.co_name != "<module>":
                with self._lock:
                    self._enter(frame, module)

    def _enter(self, frame: FrameType, module: str) -> None:
        self.modules.add(module)
        caller = frame.f_back
        while caller and not _counted(caller):
            caller = caller.f_back
        if caller and (calling := _counted(caller)) != module:
            assert calling is not None
            self.edges[calling, module] = self.edges.get((calling, module), 0) + 1
        elif caller:
            return
        if _layer(module) > 0:
            self.functions.add((module, frame.f_code.co_qualname))
        above = self._step_of(frame.f_back)
        in_thread = above is None and (above := self._started_by.get(id(threading.current_thread()))) is not None
        if above is None:
            above = self._root(frame)
        step = Step(module, frame.f_code.co_qualname, in_thread=in_thread)
        above.steps.append(step)
        self._running[frame] = step

    def _step_of(self, frame: FrameType | None) -> Step | None:
        while frame:
            if step := self._running.get(frame):
                return step
            frame = frame.f_back
        return None

    def _root(self, frame: FrameType) -> Step:
        """The function of the trainer, or of whatever else of the package, from which the counted ones are entered."""
        above = frame.f_back
        while above and not _module(above):
            above = above.f_back
        module, name = (
            (_module(above) or "", above.f_code.co_qualname) if above else ("", threading.current_thread().name)
        )
        for root in self.roots:
            if (root.module, root.function) == (module, name):
                return root
        self.roots.append(Step(module, name))
        return self.roots[-1]


def _module(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts) if path.is_relative_to(PACKAGE) else None


def _counted(frame: FrameType) -> str | None:
    # Codes of two files are equal where name, line and instructions are, so the file belongs to the key.
    key = frame.f_code, frame.f_code.co_filename
    if key not in _KNOWN:
        module = _module(frame)
        _KNOWN[key] = module if module and module.split(".")[0] in LAYERS else None
    return _KNOWN[key]


_KNOWN: dict[Any, str | None] = {}


def _layer(module: str) -> int:
    return LAYERS[module.split(".")[0]]


# ── what is followed ─────────────────────────────────────────────────────────────────────────────────────────────
def _trainer(**arguments: Any) -> Trainer:
    """A run that is ready to train."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(16, 8), torch.randint(0, 2, (16,)))
    model = ComposerClassifier(nn.Linear(8, 2), num_classes=2)
    optimizer = torch.optim.AdamW(model.parameters())
    return Trainer(
        model=model,
        optimizers=optimizer,
        train_dataloader=DataLoader(data, batch_size=4),
        max_duration="4ba",
        progress_bar=False,
        **arguments,
    )


def _save(folder: str, keep: int) -> Walk:
    """Save twice, and follow the second save, which deletes the first if ``keep`` is 1."""
    # No interval: a save at the end of `fit` would be of the same batch, and the followed save would replace the file.
    trainer = _trainer(save_folder=folder, save_interval=lambda state, event: False, save_num_checkpoints_to_keep=keep)
    trainer.fit(duration="1ba")
    trainer.save_checkpoint_to_save_folder()
    trainer.fit(duration="1ba")
    walk = Walk()
    with walk.followed():
        trainer.save_checkpoint_to_save_folder()
    trainer.close()
    return walk


def _load(folder: str) -> Walk:
    """Follow the construction of a run, which loads."""
    walk = Walk()
    with walk.followed():
        trainer = _trainer(load_path=f"{folder}/ep0-ba2-rank0.pt")
    trainer.close()
    return walk


# ── what is printed ──────────────────────────────────────────────────────────────────────────────────────────────
def show(title: str, walk: Walk, *, edges: bool) -> None:
    """Print one walk."""
    print(f"{title}: {_counts(walk)}\n", *_drawn(walk), "", sep="\n")
    for edge in sorted(walk.edges) if edges else walk.upward:
        print(f"{edge[0]} → {edge[1]}, calls: {walk.edges[edge]}{', up' if edge in walk.upward else ''}")
    print()


def markdown(save: Walk, deleting: Walk, load: Walk) -> str:
    """The part of the page on the architecture that is about the walks."""
    lines = [BEGIN, "## One save", "", f"{_counts(deleting)}.", "", "```text", *_drawn(deleting), "```", ""]
    lines += [f"This save deletes an older checkpoint. A save that keeps all: {_counts(save)}.", ""]
    lines += ["## One load", "", f"{_counts(load)}.", "", "```text", *_drawn(load), "```", ""]
    return "\n".join([*lines[:-1], END, ""])


def _counts(walk: Walk) -> str:
    above = [module for module in walk.modules if _layer(module) > 0]
    return (
        f"{len(walk.modules)} modules, {len(above)} of them above storage, {len(walk.edges)} edges, {len(walk.upward)} "
        f"of them up, {len(walk.functions)} functions"
    )


def _drawn(walk: Walk) -> Iterator[str]:
    """Yield the lines of one walk."""
    longest = max(walk.roots, key=_size)
    yield f"{longest.function:59} {longest.module}"
    seen: set[str] = set()
    yield from _lines_of(longest.steps, "", seen)
    if others := sorted(walk.modules - seen):
        yield from textwrap.wrap(f"before and after it: {', '.join(others)}", 110)


def _lines_of(steps: list[Step], indent: str, seen: set[str]) -> Iterator[str]:
    """Yield each module where it is first reached, under the name of the call that led furthest."""
    news = list(_merged(steps, seen))
    seen.update(step.module for step in news)
    leaves = [step for step in news if not step.in_thread and not any(_merged(step.steps, seen))]
    if len(leaves) > 1:  # on one line, first
        news = [step for step in news if step not in leaves]
        sign = "├" if news else "└"
        lines = textwrap.wrap(", ".join(step.module for step in leaves), 110 - len(indent))
        yield from (f"{indent} {mark} {line}" for mark, line in zip([sign, *"│" * len(lines)], lines, strict=False))
    for at, step in enumerate(news, 1):
        line = f"{indent} {'└' if at == len(news) else '├'} {'─ ─ ' if step.in_thread else ''}{step.function}"
        yield f"{line:59} {step.module}"
        seen_there = {step.module} if step.in_thread else seen
        yield from _lines_of(step.steps, f"{indent} {' ' if at == len(news) else '│'}", seen_there)
        seen |= seen_there


def _merged(steps: list[Step], seen: set[str]) -> Iterator[Step]:
    """One step for each module that was not seen; of those that were seen, the ones below them."""
    found: dict[tuple[str, bool], list[Step]] = {}
    left = list(reversed(steps))
    while left:
        step = left.pop()
        if step.module in seen and not step.in_thread:
            left.extend(reversed(step.steps))
        else:
            found.setdefault((step.module, step.in_thread), []).append(step)
    for (module, in_thread), calls in found.items():
        below = [further for call in calls for further in call.steps]
        yield Step(module, max(calls, key=_size).function, below, in_thread=in_thread)


def _size(step: Step) -> int:
    return 1 + sum(map(_size, step.steps))


def main() -> int:
    """Follow one save and one load; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", action="store_true", help="list the edges, and not only those that go up")
    parser.add_argument("--functions", action="store_true", help="list the functions")
    parser.add_argument("--markdown", action="store_true", help="print them as docs/architecture.md has them")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put them into this page")
    parser.add_argument("--check", nargs=3, type=int, metavar=("MODULES", "EDGES", "MODULES_OF_LOAD"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        _save(first, keep=1)  # what is imported when it is first used, is then there
        _load(first)
        save, deleting, load = _save(second, keep=-1), _save(first + "/again", keep=1), _load(second)
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        before, after = page.split(f"{BEGIN}\n")[0], page.split(f"{END}\n")[1]
        options.write.write_text(before + markdown(save, deleting, load) + after, encoding="utf-8")
    elif options.markdown:
        print(markdown(save, deleting, load), end="")
    else:
        show("One save", save, edges=options.edges)
        show("One save, with the deletion of an older checkpoint", deleting, edges=options.edges)
        show("One load", load, edges=options.edges)
    for walk in (save, deleting, load) if options.functions else ():
        print(*(f"{module}: {name}" for module, name in sorted(walk.functions)), "", sep="\n")
    if options.check:
        found = (len(deleting.modules), len(deleting.edges), len(load.modules))
        names = ("modules of a save", "edges of a save", "modules of a load")
        over = [
            f"{got} {name}, at most {most}"
            for got, name, most in zip(found, names, options.check, strict=True)
            if got > most
        ]
        print(*over, sep="\n", file=sys.stderr)
        return int(bool(over))
    return 0


if __name__ == "__main__":
    sys.exit(main())
