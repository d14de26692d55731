"""Unshards a checkpoint into a folder that has files, and dies each time one step later than before.

Run as a program: ``unshard_kills.py <root>``. Each attempt has a folder ``<root>/<strategy>/<attempt>`` with files of
an older model and of others, in which the newer model of ``<root>/new`` is to replace the older one.
"""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

import torch
from checkpoint.sharded_parts import small_model
from kill_points import attempt, die_at_step

from composerlite.checkpoint import UnshardStrategy, save_model_and_optim_state, unshard_checkpoint

STRATEGIES = {"one_file": UnshardStrategy.one_file(), "chunks": UnshardStrategy.chunks(300)}
FOREIGN = {"notes": "mine", "model/notes": "mine too"}


def unshard(checkpoint: Path, target: Path, strategy: str) -> None:
    """As somebody does who wants the newest weights in the same place."""
    unshard_checkpoint(checkpoint, target, save_overwrite=True, unshard_strategy=STRATEGIES[strategy])


def main(root: str) -> None:
    torch.set_num_threads(1)  # processes are forked
    for seed, name in enumerate(("old", "new")):
        save_model_and_optim_state(Path(root, name), small_model(seed=seed))
    for strategy in STRATEGIES:
        template = Path(root, strategy, "template")
        unshard(Path(root, "old"), template, strategy)
        for name, text in FOREIGN.items():
            (template / name).parent.mkdir(exist_ok=True)
            (template / name).write_text(text)
        number, code = 0, -signal.SIGKILL
        while code != 0:
            folder = Path(root, strategy, f"step{number}")
            shutil.copytree(template, folder)
            code, where = attempt(
                lambda target, how=strategy: unshard(Path(root, "new"), target, how),
                folder,
                lambda said, n=number, f=folder: die_at_step(n, f, said),  # type: ignore[misc]
            )
            if code not in (0, -signal.SIGKILL):
                raise SystemExit(f"{folder}: ended with {code} {where}")
            number += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
