"""Runs that DeepSpeed's ZeRO trains: their checkpoints obey the same rules as all others."""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
import shutil
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_ranks
from click.testing import CliRunner
from forked import run_forked
from ports import reserved_port
from safetensors.torch import load_file

from composerlite.checkpoint import Catalog, unshard_zero
from composerlite.cli.app import app
from composerlite.errors import ConfigError, CorruptCheckpointError, IncompatibleCheckpointError
from composerlite.storage import open_store
from composerlite.testing import run_ranks, run_ranks_to_the_end

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="the extra 'deepspeed' is not installed"
)
QUICK = [(1, "amp_bf16"), (2, "fp32"), (3, "amp_bf16")]
CELLS = [
    pytest.param(stage, precision, marks=[] if (stage, precision) in QUICK else pytest.mark.soak)
    for stage in (1, 2, 3)
    for precision in ("fp32", "amp_bf16")
]
DATA = Path(__file__).parents[1] / "data/deepspeed"
Weights = dict[str, torch.Tensor]


def equal(a: Weights, b: Weights) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("stage", "precision"), CELLS)
def test_a_killed_run_goes_on_bit_for_bit(stage: int, precision: str, tmp_path: Path) -> None:
    """Each rank saves an archive; the record in that of rank 0 names all, and the links lead to the newest.

    Both ranks killed, the run ends as if nothing had happened. Weights alone load exactly, the file of a rank that is
    missing is named, and one file is made of the weights, without DeepSpeed.
    """
    died = run_ranks_to_the_end(zero_ranks.train_then_die, 2, stage, precision, str(tmp_path))
    assert any("SIGKILL" in str(outcome.error) for outcome in died), died
    whole = pickle.loads((tmp_path / "whole.pickle").read_bytes())

    told = run_ranks(zero_ranks.go_on, 2, stage, precision, str(tmp_path))
    saved = [f"ba{batch}-rank{rank}.tar" for batch in (3, 6, 9, 12) for rank in (0, 1)]
    for one in told:
        assert one["resumed at"] == zero_ranks.SAVED
        assert equal(one["resumed"], whole)
        assert equal(one["seeded"], whole)
        assert equal(one["weights only"], whole)
        assert one["weights only at"] == 0
        assert one["names"] == sorted([*saved, "latest-rank0.tar", "latest-rank1.tar"])
        assert f"ba{zero_ranks.SAVED}-rank1.tar', the file of rank 1, is missing" in one["missing"]
        assert "CheckpointNotFoundError" in one["missing"]
        assert one["passed over"] == 9  # the newest is damaged
        assert one["link"] == "ba9-rank1.tar"
        assert one["predicted"] == 6

    catalog = Catalog(tmp_path / "run")
    newest = catalog.manifests()[-1]
    assert (newest.kind, [file.path for file in newest.files]) == ("deepspeed", ["ba9-rank0.tar", "ba9-rank1.tar"])
    catalog.verify(newest)
    file = unshard_zero(catalog.folder / "latest-rank0.tar", tmp_path / "weights.pt")
    assert list(torch.load(file, weights_only=True)) == list(whole)
    command = ["checkpoint", "unshard", str(catalog.folder / "ba9-rank0.tar"), str(tmp_path / "cli"), "--safetensors"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    written, expected = load_file(tmp_path / "cli" / "model.safetensors"), torch.load(file)
    assert equal({name: written[name] for name in expected}, expected)


def kill(folder: Path, victim: int, number: int) -> int:
    """Kill a rank at a file event of its second save, and go on; how many events there were if that was not reached."""
    died = run_ranks_to_the_end(zero_ranks.die_while_saving, 2, str(folder), victim, number, dist_timeout=4, fresh=True)
    if died[victim].error is None:
        return died[victim].value
    assert "SIGKILL" in str(died[victim].error)
    began, ended = run_ranks(zero_ranks.go_on_after, 2, str(folder), fresh=True)[0]
    assert began in (3, 6)
    assert equal(ended, run_ranks(zero_ranks.trained, 2, 2, "fp32", fresh=True)[0])
    catalog = Catalog(folder)
    for manifest in catalog.manifests():
        catalog.verify(manifest)
    assert not list(folder.rglob(".*.tmp-*"))
    return 0


def test_a_kill_in_the_middle_of_a_save(tmp_path: Path) -> None:
    """The run goes on from the newest whole checkpoint and ends with the very same bits; nothing is left over."""
    assert kill(tmp_path, victim=1, number=2) == 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_at_every_file_event_of_a_save(victim: int, tmp_path: Path) -> None:
    """Whatever was done and whatever was not."""
    number = 0
    while not kill(tmp_path / str(number), victim, number := number + 1):
        assert number < 100
    assert number > 2


def on_one_rank(function: str, stage: str, folder: str) -> None:
    """A program that does what a function of ``zero_ranks`` does, and leaves what it returns in a file."""
    Path(folder, "result").write_bytes(pickle.dumps(getattr(zero_ranks, function)(int(stage), folder)))


def alone(function: str, stage: int, folder: Path) -> Any:
    """What it returns in a process of its own: DeepSpeed numbers modules in each process from its start on."""
    done = run_forked(on_one_rank, function, str(stage), str(folder), cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    return pickle.loads((folder / "result").read_bytes())


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_another_number_of_ranks_goes_on(stage: int, tmp_path: Path) -> None:
    """What two ranks have saved one rank loads exactly, and trains on as they did; and the other way round."""
    ended = run_ranks(zero_ranks.saved, 2, stage, str(tmp_path / "two"), fresh=True)[0]
    one = alone("converted", stage, tmp_path / "two")
    weights = unshard_zero(tmp_path / "two" / f"ba{zero_ranks.SAVED}-rank0.tar", tmp_path / "weights.pt")
    assert one["loaded at"] == zero_ranks.SAVED
    assert equal(one["loaded"], torch.load(weights))
    for name in ended.keys() - {"seen"}:  # which counts what each rank sees
        assert torch.allclose(one["ended"][name], ended[name], atol=1e-5), name

    (tmp_path / "one").mkdir()
    alone("saved", stage, tmp_path / "one")
    weights = unshard_zero(tmp_path / "one" / f"ba{zero_ranks.SAVED}-rank0.tar", tmp_path / "one.pt")
    for two in run_ranks(zero_ranks.converted, 2, stage, str(tmp_path / "one"), fresh=True):
        assert equal(two["loaded"], torch.load(weights))


def test_a_run_goes_on_from_its_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: Any) -> None:
    """Its folder lost, it goes on from the bucket bit for bit, with compressed archives; latest leads there for each
    rank."""
    monkeypatch.chdir(tmp_path)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"s3://{s3_server.new_bucket()}"
    for one in run_ranks(zero_ranks.in_a_bucket, 2, bucket):
        assert one["began"] == zero_ranks.SAVED
        assert equal(one["resumed"], one["whole"])
        assert equal(one["seeded"], one["whole"])
    with open_store(bucket) as store:
        names = {info.name for info in store.list_objects("run/")}
        assert {"run/ba6-rank0.tar.gz", "run/ba6-rank1.tar.gz"} <= names
        assert store.read_range("run/latest-rank1.tar.symlink", 0, 99) == b"run/ba12-rank1.tar.gz"
    file = unshard_zero(f"{bucket}/run/ba12-rank0.tar.gz", tmp_path / "weights.pt")
    assert equal(torch.load(file), one["whole"])


def test_contradictions_are_errors_that_name_both_values(tmp_path: Path) -> None:
    """Before training starts, each with the way out."""
    (said,) = run_ranks(zero_ranks.contradictions, 1, str(tmp_path))
    wanted: list[Sequence[str]] = [
        ("train_batch_size", "99", "8"),
        ("train_micro_batch_size_per_gpu", "5", "3"),
        ("gradient_accumulation_steps", "7", "3"),
        ("gradient_clipping", "0.5", "0.1"),
        ("clipping_type='value'", "'norm'"),
        ("bf16", "True", "precision='fp32'"),
        ("bf16", "False", "precision='amp_bf16'"),
        ("fp16", "True", "precision='fp32'"),
        ("optimizer", "AdamW", "optimizers="),
        ("scheduler", "WarmupLR", "schedulers="),
        ("deepspeed_config", "parallelism_config", "fsdp"),
        ("'stage': 0", "leave deepspeed_config out"),
        ("'stage': 9", "expected {'stage': 1}"),
        ("none.json", "no such file"),
        ("'auto'", "deepspeed_config"),
        ("save_weights_only=True", "unshard_zero"),
        ("ep{epoch}.tar", "{rank}"),
        (".pt.gz", "'ep{epoch}-rank{rank}.tar.gz'"),
        ("save_latest_filename", "{rank}"),
        ("load_ignore_keys", "state/optimizers", "load_weights_only=True"),
        ("EMA", "stage 3"),
    ]
    assert len(said) == len(wanted)
    for text, words in zip(said, wanted, strict=True):
        assert all(word in text for word in words), (text, words)


def finish(stage: str, folder: str) -> None:
    """A program that trains, saves, and ends."""
    zero_ranks.saved(int(stage), folder)


def ends(stage: int, folder: Path) -> list[int]:
    """The exit codes of two programs that train together."""

    def one(rank: int, port: int) -> int:
        its = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        its |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        done = run_forked(finish, str(stage), str(folder / "run"), cwd=folder, environment=its)
        assert "terminate called" not in done.stderr, done.stderr
        return done.returncode

    with reserved_port() as port, ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2), [port] * 2))


def test_programs_end_well(tmp_path: Path) -> None:
    """Every rank exits with 0 when training is over."""
    assert ends(3, tmp_path) == [0, 0]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one rank."""
    folder = tmp_path_factory.mktemp("archives")
    run_ranks(zero_ranks.saved, 1, 2, str(folder))
    return folder


def drop_record(path: Path) -> None:
    """Cut the record off an archive, as a program does that packs it anew."""
    manifest = Catalog(path.parent).manifest_of(path.name)
    assert manifest is not None
    path.write_bytes(path.read_bytes()[: manifest.files[0].digest.body_bytes])


@pytest.fixture
def run(archives: Path, tmp_path: Path) -> Path:
    return shutil.copytree(archives, tmp_path / "run", symlinks=True)


def test_a_damaged_archive_is_refused(run: Path, tmp_path: Path) -> None:
    """One bit is enough. Without a record only what is in the files can tell, and the name must say the ranks."""
    path = run / "ba12-rank0.tar"
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"ba12-rank0\.tar"):
        unshard_zero(path, tmp_path / "a.pt")
    drop_record(run / "ba6-rank0.tar")
    with pytest.raises(ConfigError, match=r"Put '\{rank\}' into it"):
        unshard_zero(run / "ba6-rank0.tar", tmp_path / "a.pt")
    assert unshard_zero(run / "ba6-rank{rank}.tar", tmp_path / "a.pt").exists()


@pytest.mark.parametrize("evil", ["link", "code", "outside"])
def test_a_hostile_archive_runs_and_writes_nothing(evil: str, run: Path, tmp_path: Path) -> None:
    """Neither through links, nor through what a pickle names; a name that leads outside is never written to."""
    path = run / "ba6-rank0.tar"
    with tarfile.open(path) as archive:
        members = {m.name: archive.extractfile(m).read() for m in archive}  # type: ignore[union-attr]
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            if evil == "code" and name.endswith("optim_states.pt"):
                buffer = io.BytesIO()
                torch.save({"optimizer_state_dict": Evil()}, buffer)
                data = buffer.getvalue()
            member = tarfile.TarInfo(f"../{name}" if evil == "outside" else name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        if evil == "link":
            member = tarfile.TarInfo("deepspeed/more.pt")
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(member)
    expected = {"link": "as a link", "code": "posix.system", "outside": "without DeepSpeed"}[evil]
    with pytest.raises(Exception, match=expected):
        unshard_zero(run / "ba6-rank{rank}.tar", tmp_path / "a.pt")
    assert not (tmp_path / "pwned").exists()


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


def test_other_runs_say_what_to_do_with_it(run: Path) -> None:
    """A run without DeepSpeed cannot load it, and is told how it could."""
    with pytest.raises(IncompatibleCheckpointError, match=r"deepspeed_config=….*unshard_zero"):
        zero_ranks.trainer(None, load_path=run / "ba6-rank0.tar", train_dataloader=None)


def test_a_folder_of_another_program_gives_its_weights() -> None:
    """Saved by two ranks of DeepSpeed without us; where the optimizer is wanted, too, the message says what works."""
    saved = torch.load(DATA / "zero0/global_step6/mp_rank_00_model_states.pt")["module"]
    ((found, said),) = run_ranks(zero_ranks.of_another_program, 1, 3, str(DATA / "zero2"))
    assert equal(found, saved)
    assert "load_weights_only=True" in said
    assert "without deepspeed_config" in said
