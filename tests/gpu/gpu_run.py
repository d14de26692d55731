"""A run that saves each batch and resumes by itself, as a program that a test kills."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from gpu_parts import build

from composerlite import Callback, Logger, State


class Told(Callback):
    """Prints each batch, and gives a test the time to kill the run."""

    def batch_end(self, state: State, logger: Logger) -> None:
        """Print it."""
        sys.stdout.write(f"batch {int(state.timestamp.batch)}\n")
        sys.stdout.flush()
        time.sleep(0.1)


if __name__ == "__main__":
    with build(Path(sys.argv[1]), run_name="killed", autoresume=True, callbacks=Told()) as trainer:
        trainer.fit()
