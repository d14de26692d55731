"""Runs jobs in processes that can be killed at any moment, without paying for the import of torch each time.

``Zygote`` starts this file as a program. It imports torch and composerlite once, has torch build its first optimizer,
and then forks a child for each job; it kills the child with SIGKILL when its time is over, and says how it ended.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Self


class Zygote:
    """A process that is ready to fork. Used as a context manager."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self._ask() == "ready"
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # which ends it
        self._process.wait(timeout=60)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def run(self, job: dict[str, Any], kill_after: float | None) -> tuple[int, float]:
        """Run ``killed_runs.live(**job)`` in a child, killed after so many seconds: its exit code, and its seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"job": job, "kill_after": kill_after}) + "\n")
        answer = self._ask()
        return answer["code"], answer["seconds"]

    def _ask(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the zygote died"
        return json.loads(line)


def serve() -> None:
    """Fork and kill as told on stdin."""
    import torch

    torch.set_num_threads(1)  # threads do not survive a fork
    from killed_runs import live
    from twelve_batches import build

    build(None, max_duration="1ba").fit()  # torch imports half of itself for the first optimizer
    answers, sys.stdout = sys.stdout, sys.stderr

    def answer(what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    answer("ready")
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                live(**request["job"])
                code = 0
            except BaseException:  # noqa: BLE001 - the process ends here and says so
                with Path(request["job"]["diary"]).open("a") as diary:
                    diary.write(traceback.format_exc())
            os._exit(code)
        with selectors.DefaultSelector() as selector:
            ended = os.pidfd_open(child)
            selector.register(ended, selectors.EVENT_READ)
            if not selector.select(request["kill_after"]):
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            os.close(ended)
        answer({"code": os.waitstatus_to_exitcode(status), "seconds": time.perf_counter() - start})
    os._exit(0)  # nothing to tidy up


if __name__ == "__main__":
    serve()
