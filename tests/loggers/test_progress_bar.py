"""ProgressBarLogger: lines where there is no terminal, bars on a real one (a pty)."""

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

from composerlite.errors import ConfigError
from composerlite.loggers import ProgressBarLogger


class Terminal:
    """A pseudo-terminal. ``stream`` is what programs write to; ``shown`` is all that arrived."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w")
        self._arrived = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 4096)
            except OSError:  # Linux says EIO when the other end is closed
                data = b""
            if not data:
                return
            self._arrived += data

    def shown(self) -> str:
        """Close the terminal; everything that was written to it."""
        if not self.stream.closed:
            self.stream.close()
            self._reader.join()
            os.close(self._master)
        return self._arrived.decode()


@pytest.fixture
def terminal(monkeypatch):
    """A terminal that can redraw."""
    monkeypatch.setenv("TERM", "xterm")
    opened = Terminal()
    yield opened
    opened.shown()


def text(shown: str) -> list[str]:
    """The lines without colours and movements of the cursor. A line that was redrawn is there as often."""
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() for line in re.split(r"[\r\n]+", shown)]


def test_no_terminal_a_line_per_epoch_and_evaluation(run):
    """In a log file of a cluster there is one line per epoch and one per evaluation, nothing else."""
    out = io.StringIO()
    run(ProgressBarLogger(stream=out), max_duration="2ep").epoch(acc=0.5).evaluate(acc=0.25).epoch().finish()

    assert out.getvalue().splitlines() == [
        "[train] epoch 1/2, batch 5/10: loss 0.2, acc 0.5",
        "[eval] batch 5: acc 0.25",
        "[train] epoch 2/2, batch 10/10: loss 0.1",
    ]


def test_one_long_epoch_is_not_silent(run, monkeypatch):
    """Where there is no terminal, an epoch of hours has a line every 30 seconds, beside that at its end."""
    seconds = itertools.count(0.0, 10.0)
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    out = io.StringIO()
    training = run(ProgressBarLogger(stream=out), max_duration="1ep")
    training.state.set_dataloader([0] * 1000, "train")
    training.batches(6)

    batches = [int(line.split("batch ")[1].split("/")[0]) for line in out.getvalue().splitlines()]
    assert len(batches) >= 2
    assert out.getvalue().startswith(f"[train] epoch 1/1, batch {batches[0]}/1000: loss ")


def test_no_terminal_and_lines_at_an_interval(run):
    """With log_to_console the lines come at the interval asked for."""
    out = io.StringIO()
    run(ProgressBarLogger(log_to_console=True, console_log_interval="2ba", stream=out)).batches(4)

    assert [line.split(":")[0] for line in out.getvalue().splitlines()] == [
        "[train] epoch 1/3, batch 2/15",
        "[train] epoch 1/3, batch 4/15",
    ]


def test_no_lines_if_not_wanted(run):
    """With log_to_console=False nothing is written where there is no terminal."""
    out = io.StringIO()
    run(ProgressBarLogger(log_to_console=False, stream=out)).epoch().evaluate(acc=1.0).finish()

    assert out.getvalue() == ""


def test_settings_tables_and_traces_are_lines(run):
    """Where lines are written, hyperparameters and tables are among them, and traces if asked for."""
    out = io.StringIO()
    logger = run(ProgressBarLogger(stream=out, log_traces=True)).logger
    logger.log_hyperparameters({"lr": 0.1})
    logger.log_table(["name"], [["a"]], name="names")
    logger.log_traces({"EMA/batch_end": 1})

    assert out.getvalue().splitlines() == [
        '[config] {"lr": 0.1}',
        "[table] names",
        "    name",
        "    a",
        '[trace] {"EMA/batch_end": 1}',
    ]


def test_dumb_terminal_gets_lines(run, monkeypatch, terminal):
    """A terminal that cannot redraw gets lines."""
    monkeypatch.setenv("TERM", "dumb")
    run(ProgressBarLogger(stream=terminal.stream)).epoch().finish()

    assert text(terminal.shown())[0] == "[train] epoch 1/3, batch 5/15: loss 0.2"


def test_a_bar_per_epoch_and_evaluation(run, terminal):
    """On a terminal each epoch and each evaluation has a bar that stays with its last numbers; there are no lines."""
    run(ProgressBarLogger(stream=terminal.stream), max_duration="2ep").epoch(acc=0.5).evaluate(acc=0.25).epoch()
    lines = text(terminal.shown())

    first = next(line for line in lines if line.startswith("epoch 1/2") and "5/5" in line)
    assert "━━━" in first
    assert "loss 0.2, acc 0.5" in first
    assert any(line.startswith("eval") and "2/2" in line and "acc 0.25" in line for line in lines)
    assert any(line.startswith("epoch 2/2") and "5/5" in line for line in lines)
    assert not any(line.startswith("[train]") for line in lines)


def test_evaluation_within_an_epoch(run, terminal):
    """A bar of an evaluation comes above that of the epoch, which then goes on from where it was."""
    training = run(ProgressBarLogger(stream=terminal.stream)).batches(3).evaluate("mine", acc=0.25)
    training.epoch().finish()
    lines = text(terminal.shown())

    evaluated = next(i for i, line in enumerate(lines) if line.startswith("mine") and "2/2" in line)
    assert any(line.startswith("epoch 1/3") and "5/5" in line for line in lines[evaluated:])


def test_resumed_within_an_epoch(run, terminal):
    """A run that resumes in the middle of an epoch shows that epoch from there, without its start being announced."""
    run(ProgressBarLogger(stream=terminal.stream), resume_at=7).batches(1).finish()
    lines = text(terminal.shown())

    assert any(line.startswith("epoch 2/3") and "2/5" in line for line in lines)
    assert any(line.startswith("epoch 2/3") and "3/5" in line for line in lines)


def test_lines_above_bars(run, terminal):
    """Lines at an interval appear above the bar, whole, while it goes on."""
    logger = ProgressBarLogger(log_to_console=True, console_log_interval="5ba", stream=terminal.stream)
    run(logger).epoch().finish()
    lines = text(terminal.shown())

    assert "[train] epoch 1/3, batch 5/15: loss 0.2" in lines
    assert any(line.startswith("epoch 1/3") and "5/5" in line for line in lines)


def test_prediction_has_a_bar(run, terminal):
    """Prediction shows how far it is."""
    logger = ProgressBarLogger(stream=terminal.stream)
    run(logger).run_events(["predict_start", *["predict_batch_end"] * 5, "predict_end"])

    assert any(line.startswith("predict") and "5/5" in line for line in text(terminal.shown()))


def test_drawing_does_not_throttle_training(run, terminal):
    """A thousand fast batches draw a handful of bars, not a thousand: at most ten a second."""
    training = run(ProgressBarLogger(stream=terminal.stream))
    training.state.set_dataloader([0] * 1000, "train")
    training.run_events(["epoch_start"])
    training.run_events(["batch_end"] * 1000)

    assert len([line for line in text(terminal.shown()) if line.startswith("epoch 1/3")]) < 100


def test_the_terminal_is_usable_after_an_error(run, terminal):
    """After an error within an epoch the cursor is visible, at once and after close; closing twice is harmless."""
    interrupted = run(ProgressBarLogger(stream=terminal.stream)).batches(2)
    stdout, stderr = sys.stdout, sys.stderr
    logger = interrupted.state.callbacks[0]
    logger.close(interrupted.state, interrupted.logger)
    logger.close(interrupted.state, interrupted.logger)

    assert (sys.stdout, sys.stderr) == (stdout, stderr)
    shown = terminal.shown()
    hidden, visible = shown.find("\x1b[?25l"), shown.find("\x1b[?25h")
    assert hidden < visible < shown.find("epoch 1/3")
    assert shown.rfind("\x1b[?25l") < shown.rfind("\x1b[?25h")


def test_fit_after_an_interrupted_fit(run, terminal):
    """Training again after an error was caught shows the new bar only."""
    training = run(ProgressBarLogger(stream=terminal.stream))
    training.state.set_dataloader([0] * 2, "eval")
    training.run_events(["epoch_start", "eval_start", "fit_start"])
    training.state.set_dataloader([0] * 5, "train")
    training.epoch().finish()

    assert text(terminal.shown())[-2].startswith("epoch 1/3")


def test_what_the_program_prints_to_a_file_arrives_there(run, terminal, tmp_path, monkeypatch):
    """`python train.py > out.txt` with a bar on the terminal: prints during an epoch are in out.txt."""
    with (tmp_path / "out.txt").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        training = run(ProgressBarLogger(stream=terminal.stream)).batches(1)
        sys.stdout.write("a line of the program\n")
        training.finish()

    assert (tmp_path / "out.txt").read_text() == "a line of the program\n"
    assert "a line of the program" not in terminal.shown()


@pytest.mark.parametrize("width", [80, 120])
def test_a_bar_has_speed_and_times_within_the_width(run, terminal, width):
    """A bar says batches per second, elapsed time and time left, and no line is wider than the terminal."""
    fcntl.ioctl(terminal.stream, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    training = run(ProgressBarLogger(stream=terminal.stream), max_duration="1ep").batches(1)
    bars = training.state.callbacks[0]._bars
    bars._next_draw = 0.0
    training.batches(1)
    training.epoch(**{f"a-long-name-of-a-metric-{i}": 0.125 for i in range(9)}).finish()
    lines = text(terminal.shown())

    assert any(re.search(r"^epoch 1/1 ━+─* 2/5, [0-9.e+]+/s, 0:00, 0:00 left, loss 0.5$", line) for line in lines)
    assert any(re.search(r"^epoch 1/1 ━+ 5/5, [0-9.e+]+/s, 0:00, loss 0.2, .*\+[0-9]$", line) for line in lines)
    assert max(map(len, lines)) <= width


def test_nothing_is_glued_to_a_bar(run, terminal, monkeypatch):
    """What is logged while there is a bar has a line of its own, also by a handler that was made before it."""
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    handler = logging.StreamHandler()
    logger = logging.getLogger("composerlite")
    logger.addHandler(handler)
    try:
        training = run(ProgressBarLogger(stream=terminal.stream)).batches(2)
        logger.warning("a line of the log")
        training.epoch().finish()
        logger.warning("a line after it")
    finally:
        logger.removeHandler(handler)
    lines = text(terminal.shown())

    assert "a line of the log" in lines
    assert "a line after it" in lines


def test_bars_in_a_notebook(run, monkeypatch):
    """In a notebook a bar is redrawn on its line, that of an evaluation in its turn, and finished ones stay.

    What is written to standard error meanwhile has a line of its own.
    """

    class OutStream(io.StringIO):
        """Rewrites a line at a carriage return, as the output of a notebook does."""

        __module__ = "ipykernel.iostream"

    out = OutStream()
    monkeypatch.setattr(sys, "stderr", out)
    training = run(ProgressBarLogger(stream=out), max_duration="1ep").batches(3).evaluate(acc=0.25).batches(1)
    sys.stderr.write("a line of the program\n")
    training.epoch(acc=0.5).finish()
    assert sys.stderr is out
    lines = [line.rpartition("\r")[2].rstrip() for line in out.getvalue().split("\n")]

    assert re.fullmatch(r"eval ━{20} 2/2, \S+/s, 0:00, acc 0.25", lines[0])
    assert lines[1] == "a line of the program"
    assert re.fullmatch(r"epoch 1/1 ━{20} 5/5, \S+/s, 0:00, loss 0.2, acc 0.5", lines[2])
    assert lines[3:] == [""]
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"stream": "stdrr"}, "Did you mean 'stderr'"),
        ({"log_to_console": True, "console_log_interval": "2bq"}, "invalid time '2bq'"),
        ({"progressbar": True}, "Did you mean 'progress_bar'"),
    ],
)
def test_bad_arguments(arguments, says):
    """A bad argument is an error at construction that says what is allowed."""
    with pytest.raises(ConfigError, match=says):
        ProgressBarLogger(**arguments)


@pytest.mark.parametrize("width", [80, 120])
def test_a_finished_evaluation_shows_all_that_it_measured(run, terminal, width):
    """Where a line is too narrow the rest is on the next; a bar that moves says how many it leaves out."""
    fcntl.ioctl(terminal.stream, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    names = ["MulticlassAccuracy", "CrossEntropy", "MulticlassF1Score", "BinaryAveragePrecision", "loss"]
    run(ProgressBarLogger(stream=terminal.stream)).evaluate(**dict.fromkeys(names, 0.25))
    lines = text(terminal.shown())

    assert all(any(f"{name} 0.25" in line for line in lines) for name in names)
    assert not any(", +" in line for line in lines)
    assert max(map(len, lines)) <= width
