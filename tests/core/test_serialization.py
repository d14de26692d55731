"""What a checkpoint holds of a state, and what comes back."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torchmetrics import MeanMetric, Metric

from composerlite.core import Algorithm, Callback, Event, Logger, State, Timestamp
from composerlite.errors import IncompatibleCheckpointError

KEYS = [
    "model",
    "optimizers",
    "schedulers",
    "algorithms",
    "callbacks",
    "scaler",
    "timestamp",
    "rank_zero_seed",
    "train_metrics",
    "eval_metrics",
    "run_name",
    "dataset_state",
    "integrations",
    "metadata",
]


class Counter(Callback):
    """A callback with progress."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class Shift(Algorithm):
    """An algorithm with progress."""

    def __init__(self, offset: float = 0.0) -> None:
        self.offset = torch.tensor(offset)

    def match(self, event: Event, state: State) -> bool:
        return False

    def apply(self, event: Event, state: State, logger: Logger) -> None: ...

    def __repr__(self) -> str:
        return "Shift()"

    def state_dict(self) -> dict[str, Any]:
        return {"offset": self.offset}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.offset = state_dict["offset"]


class Deepen(Algorithm):
    """Surgery: puts a layer behind the model's last one. A checkpoint of such a model fits no other."""

    def __init__(self, width: int) -> None:
        self.width = width

    def match(self, event: Event, state: State) -> bool:
        return event is Event.INIT

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        assert isinstance(state.model, nn.Sequential)
        state.model.append(nn.Linear(1, self.width))

    @staticmethod
    def required_on_load() -> bool:
        return True

    def config(self) -> dict[str, Any]:
        return {"width": self.width}


def run(
    *,
    steps: int = 0,
    model: nn.Module | None = None,
    callbacks: Sequence[Callback] = (),
    algorithms: Sequence[Algorithm] = (),
    metrics: Mapping[str, Metric] | None = None,
) -> State:
    """The state of a run of a small model after ``steps`` steps."""
    torch.manual_seed(steps)  # a run that is restored differs from the one that was saved, until it is restored
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)) if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = State(
        model,
        rank_zero_seed=17 + steps,
        run_name="a-run",
        device=torch.device("cpu"),
        max_duration="10ep",
        optimizers=optimizer,
        callbacks=callbacks,
        algorithms=algorithms,
        save_metrics=True,
    )
    state.schedulers = [ExponentialLR(optimizer, gamma=0.5)]
    state.train_metrics = dict(metrics or {})
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        state.schedulers[0].step()
        state.timestamp = state.timestamp.to_next_batch(4, 0, 0.25)
    return state


def through_a_file(contents: dict[str, Any]) -> dict[str, Any]:
    """``contents`` as any torch reads it back, without trusting the file."""
    file = io.BytesIO()
    torch.save(contents, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def restored(contents: dict[str, Any], state: State, **options: Any) -> State:
    """``state`` after loading ``contents`` from a file."""
    state.load_state_dict(through_a_file(contents), source="ep1.pt", **options)
    return state


def equal(a: Any, b: Any) -> bool:
    """Whether two state dicts are the same bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def test_a_checkpoint_has_the_documented_keys_in_order() -> None:
    """The keys are those that scripts written for Composer look up."""
    assert list(run().state_dict()) == KEYS
    assert list(State.serialized_attributes) == KEYS[:-2]


def test_everything_comes_back() -> None:
    """Model, optimizer, scheduler, clock, seed and the rest are what they were, bit for bit."""
    saved = run(steps=3, callbacks=[Counter(5)], algorithms=[Shift(2.0)])
    saved.dataset_state = {"train": {"epoch": 1}, "eval": {}}
    contents = saved.state_dict()
    state = restored(contents, run(callbacks=[Counter()], algorithms=[Shift()]))
    assert equal(state.state_dict(), contents)
    model = run().model
    model.load_state_dict(through_a_file(contents)["model"])  # the part loads into the bare model
    assert equal(model.state_dict(), saved.model.state_dict())
    assert list(saved.weights_state_dict()) == ["model", "integrations", "metadata"]
    assert (state.timestamp, state.rank_zero_seed) == (saved.timestamp, 20)
    assert state.optimizers[0].param_groups[0]["lr"] == 0.1 * 0.5**3
    assert state.dataset_state["train"] == {"epoch": 1}


def test_the_scale_of_losses_comes_back() -> None:
    """Of ``amp_fp16``: the scale, and how many steps it has been so."""
    saved, other = run(), run()
    saved.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for _ in range(3):  # it has grown once
        saved.optimizers[0].zero_grad()
        saved.scaler.scale(saved.model(torch.ones(4, 3)).sum()).backward()
        saved.scaler.step(saved.optimizers[0])
        saved.scaler.update()
    other.scaler = torch.amp.GradScaler("cpu")
    restored(saved.state_dict(), other)
    assert other.scaler.state_dict() == saved.scaler.state_dict()
    assert (other.scaler.get_scale(), other.scaler.state_dict()["_growth_tracker"]) == (16.0, 1)


def test_two_callbacks_of_one_class_keep_separate_states() -> None:
    """Neither overwrites the other: they are told apart by their order."""
    saved = run(callbacks=[Counter(1), Callback(), Counter(2)], algorithms=[Shift(3.0), Shift(4.0)]).state_dict()
    assert list(saved["callbacks"]) == ["Counter", "Callback", "Counter:1"]
    first, second, shifts = Counter(), Counter(), [Shift(), Shift()]
    restored(saved, run(callbacks=[first, Callback(), second], algorithms=shifts))
    assert (first.count, second.count) == (1, 2)
    assert [float(shift.offset) for shift in shifts] == [3.0, 4.0]


def test_metrics_go_on_where_they_were() -> None:
    """A metric in the middle of an epoch counts what it had seen before."""
    metric = MeanMetric()
    metric.update(torch.tensor([1.0, 2.0]))
    again = MeanMetric()
    restored(run(metrics={"Mean": metric}).state_dict(), run(metrics={"Mean": again}))
    again.update(torch.tensor([6.0]))
    assert float(again.compute()) == 3.0


def test_metrics_are_saved_only_on_request() -> None:
    """Without ``save_metrics`` a checkpoint holds no metrics."""
    state = run(metrics={"Mean": MeanMetric()})
    state.save_metrics = False
    assert state.state_dict()["train_metrics"] == {}


def other_model() -> nn.Module:
    """A model in which a layer is missing, one is new and one has another shape."""
    return nn.Sequential(nn.Linear(5, 2), nn.Identity(), nn.Linear(2, 1), nn.Linear(1, 1, bias=False))


def test_everything_that_does_not_fit_is_in_one_error() -> None:
    """Missing, unexpected and mis-shaped names come at once, and not a single weight was changed."""
    saved, state = run(steps=1).state_dict(), run(model=other_model())
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    with pytest.raises(IncompatibleCheckpointError) as error:
        restored(saved, state)
    text = str(error.value)
    assert text.startswith("ep1.pt does not fit the model.")
    assert "missing in the checkpoint (1): 3.weight" in text
    unexpected = "1.weight; 1.bias; 1.running_mean; 1.running_var; 1.num_batches_tracked"
    assert f"not in the model (5): {unexpected}" in text
    assert "of another shape (1): 0.weight: (2, 3) in the checkpoint, (2, 5) in the model" in text
    assert "load_strict_model_weights=False" in text
    assert equal(state.model.state_dict(), before)
    assert state.timestamp == Timestamp()


def test_without_strictness_the_names_that_agree_are_loaded(caplog: pytest.LogCaptureFixture) -> None:
    """Fine-tuning with a new head: what both sides have is loaded, the rest stays, and the log says so."""
    saved = run(steps=1)
    state = run(model=nn.Sequential(nn.Linear(3, 2), nn.Identity(), nn.Linear(2, 1), nn.Linear(1, 1, bias=False)))
    head = state.model.state_dict()["3.weight"].clone()
    with caplog.at_level(logging.WARNING):
        state.load_state_dict(
            through_a_file(saved.weights_state_dict()), strict=False, source="ep1.pt", weights_only=True
        )
    assert torch.equal(state.model.state_dict()["0.weight"], saved.model.state_dict()["0.weight"])
    assert torch.equal(state.model.state_dict()["3.weight"], head)
    assert "kept from the model: 3.weight; skipped in the checkpoint: 1.weight" in caplog.text


def test_without_strictness_shapes_must_agree_nevertheless() -> None:
    """A weight of another shape is never skipped in silence."""
    state = run(model=other_model())
    with pytest.raises(IncompatibleCheckpointError, match=r"of another shape \(1\): 0\.weight") as error:
        state.load_state_dict(
            through_a_file(run(steps=1).weights_state_dict()), strict=False, source="ep1.pt", weights_only=True
        )
    assert "missing" not in str(error.value)


def test_another_optimizer_is_an_error() -> None:
    """AdamW's state is no state for SGD: training does not go on without saying so."""
    state = run()
    state.optimizers = (torch.optim.SGD(state.model.parameters(), lr=0.1),)
    with pytest.raises(IncompatibleCheckpointError, match=r"saved with the optimizer AdamW and the run has SGD"):
        restored(run(steps=1).state_dict(), state)


def test_what_has_no_partner_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A callback without saved state starts fresh, saved state without a callback is left: one message says both."""
    with caplog.at_level(logging.WARNING):
        restored(run(steps=1, callbacks=[Counter(3)]).state_dict(), run(algorithms=[Shift()]))
    (message,) = [record.getMessage() for record in caplog.records if "does not match the run" in record.getMessage()]
    assert "has no state of 'Shift' in algorithms: Shift starts fresh" in message
    assert "has a state of 'Counter' in callbacks, and the run has no Counter" in message


def test_what_keeps_no_state_is_not_said_to_start_fresh(caplog: pytest.LogCaptureFixture) -> None:
    """A callback or an algorithm that is new in the script and has nothing to be restored is no difference."""

    class Silent(Callback):
        """Has no progress."""

    saved = through_a_file(run(steps=1, algorithms=[Shift()], callbacks=[Counter(3)]).state_dict())
    with caplog.at_level(logging.WARNING):
        restored(saved, run(callbacks=[Silent(), Counter(3)], algorithms=[Shift(), Deepen(4)]))
    assert "starts fresh" not in caplog.text


@pytest.mark.parametrize("part", State.serialized_attributes)
def test_a_part_that_was_left_out_stays_as_it_is(part: str) -> None:
    """With ``load_ignore_keys=['state/<part>']`` the rest is restored and the part keeps its own value."""
    contents = run(steps=2, callbacks=[Counter(5)]).state_dict()
    state = run(callbacks=[Counter()])
    own = through_a_file({"own": state.state_dict()[part]})["own"]
    restored({key: value for key, value in contents.items() if key != part}, state)
    assert equal(state.state_dict()[part], own)
    for other in ("model", "timestamp", "callbacks"):
        assert other == part or equal(state.state_dict()[other], contents[other])


def test_surgery_is_done_again_before_weights_are_loaded() -> None:
    """A run without the algorithm gets it, and the changed model, from a full and from a weights-only checkpoint."""
    model = nn.Sequential(nn.Linear(3, 1))
    saved = run(model=model)
    surgery = Deepen(width=4)
    surgery.apply(Event.INIT, saved, Logger(saved))
    saved.algorithms.append(surgery)
    saved.optimizers = ()
    saved.schedulers = []

    full = run(model=nn.Sequential(nn.Linear(3, 1)))
    full.optimizers, full.schedulers = (), []
    restored(saved.state_dict(), full)
    weights = run(model=nn.Sequential(nn.Linear(3, 1)))
    weights.load_state_dict(through_a_file(saved.weights_state_dict()), source="ep1.pt", weights_only=True)
    for state in (full, weights):
        assert [type(algorithm) for algorithm in state.algorithms] == [Deepen]
        assert equal(state.model.state_dict(), model.state_dict())


def test_excluded_surgery_is_not_done() -> None:
    """``load_exclude_algorithms`` leaves the model as it is; then the weights do not fit, which is said."""
    saved = run(model=nn.Sequential(nn.Linear(3, 1)))
    Deepen(width=4).apply(Event.INIT, saved, Logger(saved))
    saved.algorithms.append(Deepen(width=4))
    state = run(model=nn.Sequential(nn.Linear(3, 1)))
    with pytest.raises(IncompatibleCheckpointError, match=r"not in the model \(2\): 1\.weight; 1\.bias"):
        restored(saved.state_dict(), state, exclude_algorithms=["Deepen"])
    assert state.algorithms == []


def test_an_unknown_algorithm_is_not_evaluated() -> None:
    """A checkpoint names algorithms; a name that is not known here is an error, whatever text it is."""
    contents = run().weights_state_dict()
    contents["algorithms"] = [("__import__('os').abort()", {"required": True, "config": {}, "state": {}})]
    with pytest.raises(IncompatibleCheckpointError, match=r"needs the algorithm .* no such class is imported"):
        run().load_state_dict(through_a_file(contents), source="ep1.pt", weights_only=True)
