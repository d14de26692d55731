"""The profiler: which batches it records, what is in the traces, and where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import profiler_ranks
import pytest
import torch
from profiled_run import names_in, profiled_trainer, train

from composerlite import Callback, Logger, State
from composerlite.errors import ConfigError, UnknownArgumentError
from composerlite.loggers import RemoteUploaderDownloader
from composerlite.profiler import JSONTraceHandler, Profiler, ProfilerAction, TraceHandler, cyclic_schedule
from composerlite.storage import open_store
from composerlite.testing import run_ranks


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Actions(Callback):
    """What the schedule says for each batch."""

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule
        self.actions: list[str] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        self.actions.append(self.schedule(state).value)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "warmup active active active active_and_save skip skip skip"),
        ({"skip_first": 1, "wait": 1, "active": 2}, "skip skip warmup active active_and_save skip skip skip"),
        ({"warmup": 0, "active": 1, "repeat": 2}, "active_and_save active_and_save" + " skip" * 6),
        (
            {"active": 2, "repeat": 0},
            "warmup active active_and_save warmup active active_and_save warmup active_and_save",
        ),
    ],
)
def test_schedules_go_through_cycles(arguments: dict[str, int], expected: str) -> None:
    """Cycles of waiting, warming up and recording in every epoch; the end of the epoch saves what there is."""
    actions = Actions(cyclic_schedule(**arguments))
    train(None, batches=8, max_duration="2ep", callbacks=[actions])
    assert actions.actions == expected.split() * 2


def test_a_resumed_run_counts_from_where_it_resumes() -> None:
    """The first batches of the process are slow, wherever in the epoch they are."""
    train(None, batches=8, max_duration="3ba", save_folder="run", save_filename="ba{batch}.pt")
    schedule = cyclic_schedule(skip_first=1, active=2)
    actions = Actions(schedule)
    train(Profiler(schedule), batches=8, load_path="run/ba3.pt", callbacks=[actions])
    assert actions.actions == ["skip", "warmup", "active", "active_and_save", "skip"]


def test_a_trace_has_what_torch_and_the_trainer_do(tmp_path: Path) -> None:
    """One for each cycle, named after its batch; the trainer's parts are in it by name, once for each batch."""
    profiler = Profiler(cyclic_schedule(active=2), torch_prof_record_shapes=True)
    trainer = train(profiler)
    assert profiler.saved_traces == (Path("profiled/torch_traces/rank0.3.pt.trace.json"),)
    names = names_in(profiler.saved_traces[0])
    assert any(name.startswith("aten::") for name in names)
    for part in ("dataloader", "batch", "forward", "loss", "backward", "train_batch"):
        assert names.count(f"trainer/{part}") == 2, part
    assert "trainer/eval" not in names
    assert trainer.state.profiler is profiler


def test_a_trace_that_the_epoch_cuts_short_is_saved() -> None:
    """Also where the loader does not say how long it is: at the end of training at the latest."""
    profiler = Profiler(cyclic_schedule(active=10))
    train(profiler, batches=3)
    assert [path.name for path in profiler.saved_traces] == ["rank0.3.pt.trace.json"]
    profiler = Profiler(lambda state: ProfilerAction.ACTIVE, torch_prof_folder="other")
    train(profiler, batches=3)
    assert [path.name for path in profiler.saved_traces] == ["rank0.3.pt.trace.json"]
    assert names_in(profiler.saved_traces[0]).count("trainer/eval") == 1


def test_training_is_the_same_with_and_without_it() -> None:
    """To the last bit."""
    plain, profiled = train(None), train(Profiler(cyclic_schedule(warmup=0, active=6)))
    for name, weight in plain.state.model.state_dict().items():
        assert torch.equal(weight, profiled.state.model.state_dict()[name])


def test_old_traces_go_and_compressed_ones_can_be_read() -> None:
    """The newest ones stay, as many as are to be kept."""
    profiler = Profiler(
        cyclic_schedule(warmup=0, active=1, repeat=0), torch_prof_use_gzip=True, torch_prof_num_traces_to_keep=2
    )
    train(profiler)
    folder = Path("profiled/torch_traces")
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.5.pt.trace.json.gz", "rank0.6.pt.trace.json.gz"]
    assert "trainer/forward" in names_in(profiler.saved_traces[-1])


def test_handlers_get_the_traces() -> None:
    """One of the user's own, and the one that keeps files, of each cycle and of all together."""

    class Counting(TraceHandler):
        def __init__(self) -> None:
            self.files: list[str] = []

        def process_chrome_json_trace_file(self, filepath: Path, state: State, logger: Logger) -> None:
            assert "trainer/forward" in names_in(filepath)
            self.files.append(filepath.name)

    counting, keeping = Counting(), JSONTraceHandler(folder="traces/{run_name}")
    train(Profiler(cyclic_schedule(active=1, repeat=2), [counting, keeping]))
    assert counting.files == ["rank0.2.pt.trace.json", "rank0.4.pt.trace.json"]
    folder = Path("traces/profiled")
    assert keeping.saved_traces == (folder / "ep0-ba2-rank0.json", folder / "ep0-ba4-rank0.json")
    merged = names_in(folder / "merged_trace.json")
    assert merged.count("trainer/forward") == 2


def test_loggers_keep_traces(s3_server: Any) -> None:
    """Under the names that are given, if a logger keeps files."""
    bucket = f"s3://{s3_server.new_bucket()}"
    train(
        Profiler(cyclic_schedule(active=1), JSONTraceHandler()),
        loggers=[RemoteUploaderDownloader(bucket, backend_kwargs=s3_server.store_kwargs)],
    )
    with open_store(bucket, **s3_server.store_kwargs) as store:
        kept = sorted(found.name for found in store.list_objects())
    assert kept == [
        "profiled/torch_traces/rank0.2.pt.trace.json",
        "profiled/traces/ep0-ba2-rank0.json",
        "profiled/traces/merged_trace.json",
    ]


def test_the_files_of_another_run_are_not_mixed_with_its_own() -> None:
    """A run that begins and finds some is refused before it trains, unless it is told otherwise."""
    train(Profiler(cyclic_schedule(active=1)))
    with pytest.raises(ConfigError, match=r"'profiled/torch_traces' is not empty.*overwrite=True"):
        profiled_trainer(Profiler(cyclic_schedule(active=1)))
    train(Profiler(cyclic_schedule(active=1), torch_prof_overwrite=True))


def test_two_ranks_have_a_trace_each_and_one_together(tmp_path: Path) -> None:
    """The merged one has the events of both."""
    for files, names in run_ranks(profiler_ranks.profile, 2, str(tmp_path)):
        assert files == ["ep0-ba3-rank0.json", "ep0-ba3-rank1.json", "merged_trace.json"]
        assert names.count("trainer/forward") == 2 * 2


def test_what_cannot_be_is_refused() -> None:
    """Before training, with the way out."""
    for make, message in (
        (lambda: cyclic_schedule(active=0), "active=0"),
        (lambda: cyclic_schedule(wait=-1), "wait=-1"),
        (lambda: Profiler(cyclic_schedule(), torch_prof_memory_filename="m.html"), "use the callback MemorySnapshot"),
        (lambda: Profiler(cyclic_schedule(), torch_prof_folder="{batch}"), "batch"),
        (lambda: profiled_trainer("a profiler"), "profiler: 'a profiler' is not of type Profiler"),
        (lambda: profiled_trainer(Profiler(cyclic_schedule(), ["x"])), "trace_handlers: 'x'"),  # type: ignore[list-item]
    ):
        with pytest.raises(ConfigError, match=message):
            make()
    with pytest.raises(UnknownArgumentError, match="Did you mean 'schedule'"):
        Profiler(schedul=cyclic_schedule())  # type: ignore[call-arg]
