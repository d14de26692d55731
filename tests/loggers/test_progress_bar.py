"""ProgressBarLogger: bars on a real terminal (a pty), lines elsewhere."""

from __future__ import annotations

import fcntl
import io
import itertools
import logging
import os
import pty
import re
import struct
import sys
import termios
import threading

import pytest
from rich.console import Console

from composerlite.loggers import ProgressBarLogger


class Terminal:
    """A pseudo-terminal. Programs write to ``stream``; ``shown`` returns everything that arrived."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w")
        self._arrived = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def resize(self, width: int) -> None:
        fcntl.ioctl(self.stream, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 4096)
            except OSError:  # Linux raises EIO when the other end is closed
                data = b""
            if not data:
                return
            self._arrived += data

    def shown(self) -> str:
        """Close the terminal, and return everything that was written."""
        if not self.stream.closed:
            self.stream.close()
            self._reader.join()
            os.close(self._master)
        return self._arrived.decode()

    def lines(self) -> list[str]:
        """Return the lines without colours and movements of the cursor. A redrawn line is there several times."""
        shown = re.split(r"[\r\n]+", self.shown())
        return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() for line in shown]


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 100 columns that can redraw."""
    monkeypatch.setenv("TERM", "xterm")
    opened = Terminal()
    opened.resize(100)
    yield opened
    opened.shown()


def test_lines_without_a_terminal(run):
    """In the log file of a cluster there is one line per epoch and one per evaluation."""
    out = io.StringIO()
    run(ProgressBarLogger(stream=out), max_duration="2ep").epoch(acc=0.5).evaluate(acc=0.25).epoch().finish()
    assert out.getvalue().splitlines() == [
        "[train] epoch 1/2, batch 5/10: loss 0.2, acc 0.5",
        "[eval] batch 5: acc 0.25",
        "[train] epoch 2/2, batch 10/10: loss 0.1",
    ]


def test_a_long_epoch_writes_lines(run, monkeypatch):
    """Without a terminal, an epoch of hours writes a line every 30 seconds."""
    seconds = itertools.count(0.0, 10.0)
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    out = io.StringIO()
    training = run(ProgressBarLogger(stream=out), max_duration="1ep")
    training.state.set_dataloader([0] * 1000, "train")
    training.batches(6)
    batches = [int(line.split("batch ")[1].split("/")[0]) for line in out.getvalue().splitlines()]
    assert len(batches) >= 2
    assert out.getvalue().startswith(f"[train] epoch 1/1, batch {batches[0]}/1000: loss ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"log_to_console": False}, []),
        ({"log_to_console": True, "console_log_interval": "2ba"}, ["batch 2/15", "batch 4/15"]),
        ({"progress_bar": False}, []),
    ],
)
def test_which_lines_are_written(run, arguments, expected):
    """``log_to_console=True`` writes lines at the interval, ``False`` none, ``None`` the few lines of an epoch."""
    out = io.StringIO()
    run(ProgressBarLogger(stream=out, **arguments)).batches(4)
    assert [re.search(r"batch \d+/15", line)[0] for line in out.getvalue().splitlines()] == expected


def test_a_notebook_without_ipywidgets_gets_lines(run, monkeypatch):
    """rich draws bars in a notebook with ipywidgets, which the tests do not install."""
    monkeypatch.setattr(Console, "is_jupyter", True, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    out = io.StringIO()
    run(ProgressBarLogger(stream=out)).epoch()
    assert out.getvalue() == "[train] epoch 1/3, batch 5/15: loss 0.2\n"


def test_a_terminal_that_cannot_redraw_gets_lines(run, monkeypatch, terminal):
    """``TERM=dumb`` is such a terminal."""
    monkeypatch.setenv("TERM", "dumb")
    run(ProgressBarLogger(stream=terminal.stream)).epoch().finish()
    assert terminal.lines()[0] == "[train] epoch 1/3, batch 5/15: loss 0.2"


@pytest.mark.parametrize("width", [80, 120])
def test_bars_of_epochs_and_evaluations(run, terminal, width):
    """Each bar stays with its last values, speed and elapsed time. No line is wider than the terminal."""
    terminal.resize(width)
    names = ["MulticlassAccuracy", "CrossEntropy", "MulticlassF1Score", "BinaryAveragePrecision"]
    training = run(ProgressBarLogger(stream=terminal.stream), max_duration="2ep").batches(3)
    training.evaluate("mine", **dict.fromkeys(names, 0.25)).epoch(acc=0.5).epoch().finish()
    lines = terminal.lines()

    evaluated = next(i for i, line in enumerate(lines) if re.match(r"mine ━+ 2/2 [0-9.e+]+/s, 0:00", line))
    assert all(any(name in line for line in lines) for name in names)
    assert sum("0.25" in line for line in lines[evaluated : evaluated + 5]) >= 1
    assert any(re.match(r"epoch 1/2 ━+ 5/5 [0-9.e+]+/s, 0:00 loss 0.2, acc 0.5$", line) for line in lines[evaluated:])
    assert any(re.match(r"epoch 2/2 ━+ 5/5 [0-9.e+]+/s, 0:00 loss 0.1,", line) for line in lines)
    assert not any(line.startswith("[") for line in lines)
    assert max(map(len, lines)) <= width


def test_a_bar_in_motion(run, terminal, monkeypatch):
    """A bar shows batches per second, elapsed time, time left and the loss; here two batches of a second each."""
    now = [0.0]
    for clock in ("time.monotonic", "rich.console.monotonic"):
        monkeypatch.setattr(clock, lambda: now[0])
    training = run(ProgressBarLogger(stream=terminal.stream), max_duration="1ep")
    for now[0] in (1.0, 2.0, 3.0):
        training.batches(1)
    training.engine.close()
    assert any(re.match(r"epoch 1/1 ━+.* 3/5 1/s, 0:02, 0:02 left loss 0.3333", line) for line in terminal.lines())


def test_resumed_within_an_epoch(run, terminal):
    """A run that resumes in the middle of an epoch shows the epoch from there."""
    run(ProgressBarLogger(stream=terminal.stream), resume_at=7).batches(1).finish()
    lines = [line for line in terminal.lines() if line.startswith("epoch 2/3")]
    assert " 2/5 " in lines[0]
    assert " 3/5 " in lines[-1]


def test_lines_above_bars(run, terminal):
    """With ``log_to_console=True`` whole lines appear above the bar."""
    logger = ProgressBarLogger(log_to_console=True, console_log_interval="5ba", stream=terminal.stream)
    run(logger).epoch().finish()
    lines = terminal.lines()
    assert "[train] epoch 1/3, batch 5/15: loss 0.2" in lines
    assert any(line.startswith("epoch 1/3") and "5/5" in line for line in lines)


def test_prediction_has_a_bar(run, terminal):
    """As an evaluation has."""
    run(ProgressBarLogger(stream=terminal.stream)).run_events(
        ["predict_start", *["predict_batch_end"] * 5, "predict_end"]
    )
    assert any(line.startswith("predict") and "5/5" in line for line in terminal.lines())


def test_drawing_does_not_slow_down_training(run, terminal):
    """A thousand fast batches draw a few bars: at most ten per second."""
    training = run(ProgressBarLogger(stream=terminal.stream))
    training.state.set_dataloader([0] * 1000, "train")
    training.run_events(["epoch_start"]).run_events(["batch_end"] * 1000)
    assert len([line for line in terminal.lines() if line.startswith("epoch 1/3")]) < 100


def test_the_terminal_is_usable_after_an_error(run, terminal):
    """After an error in an epoch the cursor is visible and the streams are restored; closing twice is harmless."""
    interrupted = run(ProgressBarLogger(stream=terminal.stream)).batches(2)
    stdout, stderr = sys.stdout, sys.stderr
    logger = interrupted.state.callbacks[0]
    for _ in range(2):
        logger.close(interrupted.state, interrupted.logger)
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
    shown = terminal.shown()
    hidden, visible = shown.find("\x1b[?25l"), shown.find("\x1b[?25h")
    assert hidden < visible < shown.find("epoch 1/3")
    assert shown.rfind("\x1b[?25l") < shown.rfind("\x1b[?25h")


def test_fit_after_an_interrupted_fit(run, terminal):
    """Training again after a caught error shows the new bar only."""
    training = run(ProgressBarLogger(stream=terminal.stream))
    training.state.set_dataloader([0] * 2, "eval")
    training.run_events(["epoch_start", "eval_start", "fit_start"])
    training.state.set_dataloader([0] * 5, "train")
    training.epoch().finish()
    assert terminal.lines()[-2].startswith("epoch 1/3")


def test_redirected_output_of_the_program(run, terminal, tmp_path, monkeypatch):
    """`python train.py > out.txt` with a bar on the terminal: prints during an epoch are in out.txt."""
    with (tmp_path / "out.txt").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        training = run(ProgressBarLogger(stream=terminal.stream)).batches(1)
        sys.stdout.write("a line of the program\n")
        training.finish()
    assert (tmp_path / "out.txt").read_text() == "a line of the program\n"
    assert "a line of the program" not in terminal.shown()


def test_log_records_have_their_own_lines(run, terminal, monkeypatch):
    """Also records of a handler that was created before the bar, as by ``logging.basicConfig``."""
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    handler = logging.StreamHandler()
    logger = logging.getLogger("composerlite")
    logger.addHandler(handler)
    try:
        training = run(ProgressBarLogger(stream=terminal.stream)).batches(2)
        logger.warning("a line of the log")
        training.epoch().finish()
        logger.warning("a line after the bar")
    finally:
        logger.removeHandler(handler)
    assert {"a line of the log", "a line after the bar"} <= set(terminal.lines())
