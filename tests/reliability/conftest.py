"""A small disk, and the counts of the long tests, said at the end of a test run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a disk in memory of so many bytes. Skips where this process may not mount."""
    mounted: list[Path] = []

    def mount(size_bytes: int) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount program")
        if done.returncode != 0:
            pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded as ``count``; xdist brings it from its workers."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    properties = [item for report in reports for item in getattr(report, "user_properties", [])]
    if counts := sorted({str(value) for name, value in properties if name == "count"}):
        terminalreporter.section("counts")
        for line in counts:
            terminalreporter.write_line(line)
