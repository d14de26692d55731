"""Train and save here with save_compat='composer', then resume in Composer: the next losses are the same.

.venv/bin/python tests/interop/back_to_composer.py save FOLDER
tests/interop/.venv-composer/bin/python tests/interop/back_to_composer.py resume FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def save(folder: Path) -> None:
    """Write a checkpoint and the losses after it."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
    from test_composer_files import FILE, SAVED, Losses, saved_for_composer

    losses = Losses()
    saved_for_composer(folder, losses, save_filename=FILE.name.replace("ep1-ba6", "ep{epoch}-ba{batch}"))
    (folder / "losses.json").write_text(json.dumps([float(loss) for loss in losses.found[SAVED:]]))


def resume(folder: Path) -> None:
    """Resume in Composer, and compare."""
    from make_fixtures import train_with_composer

    losses = train_with_composer(load_path=str(folder / "ep1-ba6-rank0.pt"))
    assert losses == json.loads((folder / "losses.json").read_text()), losses


if __name__ == "__main__":
    {"save": save, "resume": resume}[sys.argv[1]](Path(sys.argv[2]))
