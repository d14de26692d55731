"""CheckpointSaver: when it saves, how often, and where ``latest`` points meanwhile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Callback, ComposerModel, DataSpec, Event, Logger, State, Time, Trainer
from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint import Catalog
from composerlite.errors import ConfigError, UnknownArgumentError


class Regression(ComposerModel):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layer(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return (outputs - batch[1]).square().mean()


def trainer(*callbacks: Callback, samples: int = 16, **arguments: Any) -> Trainer:
    """Four batches of four samples in an epoch, three epochs."""
    model = Regression()
    data = TensorDataset(torch.ones(samples, 3), torch.ones(samples, 1))
    how: dict[str, Any] = {"max_duration": "3ep", "progress_bar": False, "run_name": "run", **arguments}
    loader = DataSpec(DataLoader(data, batch_size=4), get_num_tokens_in_batch=lambda batch: 10 * len(batch[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Trainer(model=model, train_dataloader=loader, optimizers=optimizer, callbacks=list(callbacks), **how)


def saved_batches(folder: Path) -> list[int]:
    return [manifest.batch for manifest in Catalog(folder).manifests()]


def train(folder: Path, **arguments: Any) -> list[int]:
    """The batch counts at which a run saved."""
    with trainer(save_folder=folder, **arguments) as run:
        run.fit()
    return saved_batches(folder)


# ── when ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def crossings(samples: Sequence[int], step: int) -> list[int]:
    """The batches at which a growing count reaches or passes a multiple of ``step``, and the last one."""
    before = [0, *samples[:-1]]
    hits = [i for i, (a, b) in enumerate(zip(before, samples, strict=True), start=1) if a // step != b // step]
    return sorted({*hits, len(samples)})


def at_3_and_7(state: State, event: Event) -> bool:
    return event is Event.BATCH_CHECKPOINT and int(state.timestamp.batch) in (3, 7)


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (1, [4, 8, 12]),
        (2, [8, 12]),
        ("1ep", [4, 8, 12]),
        ("2ep", [8, 12]),
        ("7ep", [12]),
        ("1iter", [4, 8, 12]),
        ("2ba", [2, 4, 6, 8, 10, 12]),
        ("5ba", [5, 10, 12]),
        (Time(5, "ba"), [5, 10, 12]),
        ("10sp", crossings([4 * n for n in range(1, 13)], 10)),
        ("100tok", crossings([40 * n for n in range(1, 13)], 100)),
        ("0.25dur", [3, 6, 9, 12]),
        ("1dur", [12]),
        (0, []),
        pytest.param(at_3_and_7, [3, 7], id="function"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_interval_says_when(tmp_path: Path, interval: Any, expected: list[int]) -> None:
    """Every form of it; built-in ones save at the end as well, a function only when it says so."""
    assert train(tmp_path, save_interval=interval) == expected


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        ({"save_interval": 0}, True),
        ({"save_interval": "-1ba"}, True),
        ({"save_interval": 0, "save_ephemeral_interval": "5ba"}, False),
        ({"save_interval": "7ep"}, False),
    ],
)
def test_who_saves_nothing_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, arguments: dict[str, Any], warned: bool
) -> None:
    """A folder of checkpoints that stays empty is a surprise that comes too late; saving by hand is allowed."""
    saved = train(tmp_path, **arguments)
    assert ("is never due" in caplog.text) is warned
    assert bool(saved) is not warned


def test_uneven_batches_save_where_a_threshold_is_crossed(tmp_path: Path) -> None:
    """The last batch of an epoch is short: '65sp' holds all the same."""
    sizes = [4, 4, 4, 4, 2] * 12
    samples = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    found = train(tmp_path, samples=18, max_duration="12ep", save_interval="65sp")
    assert found == crossings(samples, 65)
    assert [samples[batch - 1] for batch in found[:2]] == [66, 130]


def test_a_training_that_ends_within_an_epoch_is_saved(tmp_path: Path) -> None:
    """The end counts, not the epoch's."""
    assert train(tmp_path, max_duration="6ba", save_interval="1ep") == [4, 6]


@pytest.mark.parametrize(("interval", "expected"), [("100s", [4, 7, 10, 14]), ("5m", [10])])
def test_an_interval_may_be_a_time(tmp_path: Path, interval: str, expected: list[int]) -> None:
    """Of training, as the clock of the run says; here a batch takes half a minute."""
    model = nn.Linear(1, 1)
    state = State(model, rank_zero_seed=0, run_name="run", device=torch.device("cpu"), max_duration="1000ba")
    saver = CheckpointSaver(tmp_path, save_interval=interval)
    saver.init(state, Logger(state))
    for _ in range(14):
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(duration=timedelta(seconds=30))
        saver.batch_checkpoint(state, Logger(state))
    saver.fit_end(state, Logger(state))
    assert saved_batches(tmp_path) == expected


def test_a_batch_count_is_saved_once(tmp_path: Path) -> None:
    """Where a batch ends an epoch and the training, three reasons make one checkpoint."""
    assert train(tmp_path, save_interval="1ba", save_filename="ep{epoch}-ba{batch}.pt") == list(range(1, 13))


def test_a_name_of_its_own_is_given_again(tmp_path: Path) -> None:
    """Names without ``{batch}``: the newest save of an epoch replaces the one before it, and is what is loaded."""
    with trainer(save_folder=tmp_path, save_filename="ep{epoch}.pt", save_interval="2ba", max_duration="7ba") as run:
        run.fit()
        assert [Path(path).name for path in run.saved_checkpoints] == ["ep0.pt", "ep1.pt"]
    assert saved_batches(tmp_path) == [4, 7]
    with trainer(load_path=tmp_path / "ep1.pt") as again:
        assert int(again.state.timestamp.batch) == 7


def test_a_resume_does_not_save_the_same_batch_again(tmp_path: Path) -> None:
    """The end of an epoch comes after the resume, and was saved before it."""
    train(tmp_path, save_interval="1ba", max_duration="4ba")
    again = train(tmp_path, save_interval="1ba", max_duration="5ba", load_path=tmp_path / "latest-rank0.pt")
    assert again == [1, 2, 3, 4, 5]


# ── latest ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class Watch(Callback):
    """Follows the link at every event of the training: the batch counts it led to."""

    def __init__(self, link: Path) -> None:
        self.link = link
        self.seen: list[int] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if not self.seen and not self.link.is_symlink():
            return  # nothing was saved yet; once there is a link there always is one
        batch = self.follow()
        if not self.seen or batch != self.seen[-1]:
            self.seen.append(batch)

    def follow(self) -> int:
        while True:
            target = str(self.link.readlink())
            manifest = Catalog(self.link.parent).manifest_of(target)
            if manifest is not None:
                return manifest.batch
            assert str(self.link.readlink()) != target, "the link leads to what is not committed"


@pytest.mark.parametrize("save_async", [False, True])
@pytest.mark.parametrize("keep", [-1, 1, 2])
def test_latest_leads_to_a_committed_checkpoint(tmp_path: Path, keep: int, save_async: bool) -> None:
    """Between any two events, also with retention; without background saves to the newest checkpoint."""
    watch = Watch(tmp_path / "latest-rank0.pt")
    arguments: dict[str, Any] = {"save_num_checkpoints_to_keep": keep, "save_async": save_async}
    with trainer(watch, save_folder=tmp_path, save_interval="1ba", **arguments) as run:
        run.fit()
        assert watch.follow() == 12
    assert watch.seen == (sorted(set(watch.seen)) if save_async else list(range(1, 13)))


@pytest.mark.parametrize("target", ["older", "gone"])
def test_a_resume_moves_latest_where_a_kill_had_left_it_behind(tmp_path: Path, target: str) -> None:
    """Between the commit of a checkpoint and its link: also where the run had ended and saves nothing more.

    Also where the link leads to nothing, as after its checkpoint was quarantined.
    """
    with trainer(save_folder=tmp_path, save_interval="1ba") as run:
        run.fit()
    link = tmp_path / "latest-rank0.pt"
    newest = link.readlink()
    link.unlink()
    link.symlink_to(Catalog(tmp_path).manifests()[-2].name if target == "older" else "gone.pt")
    with trainer(save_folder=tmp_path, save_interval="1ba", autoresume=True) as run:
        run.fit()
    assert link.readlink() == newest


def test_the_link_is_named_as_one_likes(tmp_path: Path) -> None:
    """With variables, in a folder, or not at all."""
    train(tmp_path / "a", save_latest_filename="links/{run_name}")
    assert (tmp_path / "a" / "links" / "run").resolve() == tmp_path / "a" / "ep3-ba12-rank0.pt"
    train(tmp_path / "b", save_latest_filename=None)
    assert [path for path in (tmp_path / "b").rglob("*") if path.is_symlink()] == []


# ── names and folders ────────────────────────────────────────────────────────────────────────────────────────────────
def test_by_default_a_saver_has_composers_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folder, file and link."""
    monkeypatch.chdir(tmp_path)
    with trainer(CheckpointSaver(), run_name="my-run", max_duration="1ep") as run:
        run.fit()
    assert run.saved_checkpoints == ["my-run/checkpoints/ep1-ba4-rank0.pt"]
    assert Path("my-run/checkpoints/latest-rank0.pt").resolve() == Path("my-run/checkpoints/ep1-ba4-rank0.pt").resolve()


def test_a_saver_follows_the_name_of_each_run(tmp_path: Path) -> None:
    """Given to a second trainer, it saves into the folder of that run."""
    saver = CheckpointSaver(folder=f"{tmp_path}/{{run_name}}")
    for name in ("a", "b"):
        with trainer(saver, run_name=name, max_duration="1ep") as run:
            run.fit()
        assert run.saved_checkpoints == [f"{tmp_path}/{name}/ep1-ba4-rank0.pt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_filename": "ep{epcoh}.pt"}, r"save_filename='ep\{epcoh\}\.pt': \{epcoh\} is not.*'epoch'"),
        ({"save_latest_filename": "latest{rnak}"}, r"save_latest_filename=.*'rank'"),
        ({"save_folder": "{epoch}"}, r"save_folder='\{epoch\}'"),
        ({"save_folder": "s4://bucket/checkpoints"}, "unknown scheme 's4'.*s3"),
        ({"save_folder": "https://host/checkpoints"}, "https://host/checkpoints"),
        ({"save_folder": "here", "save_staging_folder": "there"}, "save_staging_folder='there'"),
        ({"save_remote_file_name": "ep{epcoh}.pt"}, r"save_remote_file_name='ep\{epcoh\}.*'epoch'"),
        ({"save_filename": "../ep{epoch}.pt"}, r"save_filename='\.\./ep"),
        ({"save_filename": "/ep{epoch}.pt"}, "save_filename='/ep"),
        ({"save_interval": "10bananas"}, "10bananas"),
        ({"save_interval": None}, "None"),
        ({"save_num_checkpoints_to_keep": -2}, "num_checkpoints_to_keep=-2"),
        ({"save_num_checkpoints_to_keep": "3"}, "save_num_checkpoints_to_keep='3': expected -1 for all, or a whole"),
        ({"save_num_checkpoints_to_keep": False}, "save_num_checkpoints_to_keep=False"),
        ({"save_num_remote_checkpoints_to_keep": 0}, "save_num_remote_checkpoints_to_keep=0: expected -1 for all, or"),
        ({"save_num_remote_checkpoints_to_keep": True}, "save_num_remote_checkpoints_to_keep=True"),
        ({"save_ignore_keys": "state/model"}, r"save_ignore_keys='state/model'.*list of globs"),
    ],
)
def test_what_cannot_be_saved_is_an_error_at_construction(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    """The message names the argument and its value; nothing is written."""
    with pytest.raises(ConfigError, match=message):
        trainer(samples=16, **{"save_folder": tmp_path / "new", **arguments})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), "10", None, 0, -1, True, 1e300])
def test_a_timeout_that_cannot_be_waited_for_is_an_error_at_construction(seconds: Any) -> None:
    """It is needed at the end of training, which is late."""
    with pytest.raises(ConfigError, match=rf"upload_timeout_in_seconds={re.escape(repr(seconds))}: expected a number"):
        CheckpointSaver(upload_timeout_in_seconds=seconds)


def test_a_misspelt_argument_names_the_right_one() -> None:
    """Of the saver as of the trainer."""
    with pytest.raises(UnknownArgumentError, match=r"no argument 'filname'.*'filename'"):
        CheckpointSaver(filname="x.pt")  # type: ignore[call-arg]
    with pytest.raises(UnknownArgumentError, match=r"no argument 'save_fliename'.*'save_filename'"):
        trainer(save_fliename="x.pt")
