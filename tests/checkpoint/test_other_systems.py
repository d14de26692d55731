"""Checkpoints that other systems have saved: weights bit for bit, and training that follows the system's own.

The files in tests/data were written by the systems themselves: tests/interop/make_fixtures.py, with their versions.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tiny_training import Classifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Callback, Event, Logger, State, Trainer
from composerlite.checkpoint.format.archive import stand_ins
from composerlite.checkpoint.format.byte_sources import MemoryFile
from composerlite.checkpoint.format.torch_reader import TorchFile
from composerlite.checkpoint.tools.reading import whole_contents
from composerlite.checkpoint.tools.surveying import pointed
from composerlite.errors import (
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UntrustedCheckpointError,
)

DATA = Path(__file__).parents[1] / "data"
SAVED, STEPS = 6, 26


class Losses(Callback):
    """The loss of every batch."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.BATCH_END:
            self.found.append(state.total_loss_dict["loss/train/total"])


class Wrapped(Classifier):
    """The same network under another attribute: names begin with ``module.``."""

    def __init__(self) -> None:
        super().__init__()
        network = nn.Module()
        network.body, network.head = self.body, self.head
        del self.body, self.head
        self.module = network

    def forward(self, batch: Any) -> torch.Tensor:
        return self.module.head(self.module.body(batch[0]).relu())


def data() -> DataLoader[Any]:
    """As make_fixtures.py has it."""
    x, y = torch.arange(64).reshape(16, 4).float().sin(), torch.arange(16) % 2
    return DataLoader(TensorDataset(x, y), batch_size=4)


def trainer(path: Path | str, losses: Losses | None = None, model: nn.Module | None = None, **more: Any) -> Trainer:
    """A run that begins with the checkpoint ``path`` and trains as long as the system itself has."""
    model = model or Classifier()
    make = more.pop("optimizer", None) or (lambda model: torch.optim.AdamW(model.parameters(), lr=0.5))
    optimizer = make(model)
    falling = more.pop("scheduler", lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9))
    chosen = {
        "optimizers": optimizer,
        "schedulers": falling(optimizer),
        "step_schedulers_every_batch": True,
        "max_duration": f"{STEPS}ba",
        "train_dataloader": data(),
    }
    callbacks = [*more.pop("callbacks", []), *([losses] if losses else [])]
    return Trainer(
        model=model,
        callbacks=callbacks,
        progress_bar=False,
        load_path=str(path),
        **chosen | more,
    )


def weights() -> dict[str, torch.Tensor]:
    """Those that every system has saved, by their names in the network."""
    return torch.load(DATA / "torch/weights.pt")


def of_deepspeed() -> dict[str, torch.Tensor]:
    """Those that DeepSpeed has saved in every stage: two ranks have added what others have not."""
    return torch.load(DATA / "deepspeed/zero0/global_step6/mp_rank_00_model_states.pt")["module"]


def check_weights(model: nn.Module, prefix: str = "", saved: dict[str, torch.Tensor] | None = None) -> None:
    """They are those, bit for bit."""
    saved, own = saved or weights(), model.state_dict()
    assert own.keys() == {prefix + name for name in saved}
    assert all(torch.equal(own[prefix + name], saved[name]) for name in saved)


_DECAYED = ("body.weight", "head.weight")


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """The two groups that the Trainer of transformers makes: with decay, and biases without."""
    named = [(name.removeprefix("module."), parameter) for name, parameter in model.named_parameters()]
    decayed = [parameter for name, parameter in named if name in _DECAYED]
    others = [parameter for name, parameter in named if name not in _DECAYED]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}])


def linear(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """The rate that the Trainer of transformers has by default: it falls to zero."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (STEPS - step) / STEPS))


def constant(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """The rate stays: OLMo-core saves no scheduler."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "transformers": ("transformers/checkpoint-6", {"optimizer": grouped, "scheduler": linear}),
    "accelerate": (
        "accelerate/state",
        {
            "load_key_map": {
                "model": "model",
                "optimizer": "optimizer.bin",
                "scheduler": "scheduler.bin",
                "batch": "scheduler.bin.last_epoch",
            }
        },
    ),
    "torchtitan": ("dcp/torchtitan", {}),
    "OLMo-core": (
        "olmo_core/step6",
        {"optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), "scheduler": constant},
    ),
    "Lightning": ("lightning/step6.ckpt", {}),
    **{f"DeepSpeed, stage {stage}": (f"deepspeed/zero{stage}", {}) for stage in range(4)},
    "torch, by a key map": (
        "torch/nested.pt",
        {
            "load_key_map": {
                "model": "run.nets.net",
                "optimizer": "run.opts.0",
                "scheduler": "run.rates",
                "batch": "run.at.step",
            },
        },
    ),
    "torch, usual names": (
        "torch/checkpoint.pt",
        {"load_key_map": {"model": "model.*", "optimizer": "optimizer", "scheduler": "scheduler", "batch": "step"}},
    ),
}
"""Path and arguments of a run that has the rest of what the system's own has."""
SAFETENSORS = [
    *("safetensors/model.safetensors", "safetensors/sharded", "transformers/checkpoint-6"),
    *("dcp/safetensors", "dcp/safetensors-sharded"),  # by one process, and by two ranks
]


@pytest.mark.parametrize("system", WHOLE)
@pytest.mark.parametrize("model", [Classifier, Wrapped], ids=["same names", "other prefix"])
def test_a_run_continues_as_the_system_itself(system: str, model: type[nn.Module]) -> None:
    """Weights, optimizer, scheduler and step are restored: the next losses are those that the system itself had."""
    name, more = WHOLE[system]
    expected = json.loads((DATA / name.partition("/")[0] / "expected.json").read_text())["losses"]
    losses = Losses()
    with trainer(DATA / name, losses, model(), **more) as run:
        if system not in ("transformers", "OLMo-core"):  # which had other rates
            saved = of_deepspeed() if system.startswith("DeepSpeed") else None
            check_weights(run.state.model, "module." if model is Wrapped else "", saved)
        assert int(run.state.timestamp.batch) == SAVED
        run.fit()
    assert losses.found == pytest.approx(expected, rel=1e-5)


def test_a_step_of_olmo_core_tells_time_and_random_state() -> None:
    """Step, epochs that have ended, batches of this one, and the state of each generator."""
    saved = torch.load(DATA / "olmo_core/step6/train/rank0.pt", weights_only=False)
    with trainer(DATA / "olmo_core/step6") as run:
        time = run.state.timestamp
        assert (int(time.epoch), int(time.batch), int(time.batch_in_epoch)) == (1, 6, 2)
        (generators,) = run.state.resumed.generators or ()
        assert torch.equal(generators["torch"], saved["rng"]["torch"]["state"])
        assert generators["python"] == saved["rng"]["python"]["state"]


@pytest.mark.parametrize("name", ["step6/model_and_optim", "flat"])
def test_the_optimizer_of_olmo_core_is_read_in_both_layouts(name: str) -> None:
    """A directory of model and optimizer alone: no time, and the momentum of every parameter."""
    saved = torch.load(DATA / "olmo_core/unsharded/optim.pt")["state"]
    with trainer(DATA / "olmo_core" / name) as run:
        assert int(run.state.timestamp.batch) == 0
        own = run.state.get_optim_state_dict()["AdamW"]
        assert own["param_groups"][0]["lr"] == 0.01
        for parameter, state in saved.items():
            assert all(torch.equal(own["state"][parameter][key], value) for key, value in state.items())


@pytest.mark.parametrize("name", ["model.pt", "file/model.safetensors", "chunks/model"])
def test_what_unshard_checkpoint_of_olmo_core_writes_is_read(name: str) -> None:
    """One file of torch or safetensors, and a folder of chunks without an index."""
    saved = torch.load(DATA / "olmo_core/unsharded/model.pt")
    with trainer(DATA / "olmo_core/unsharded" / name) as run:
        assert all(torch.equal(run.state.model.state_dict()[key], value) for key, value in saved.items())


def test_an_epoch_that_has_ended_is_not_trained_again(tmp_path: Path) -> None:
    """Lightning saves at the end of an epoch before it counts it."""
    with trainer(DATA / "lightning/epoch0.ckpt") as run:
        time = run.state.timestamp
        assert (int(time.epoch), int(time.batch), int(time.batch_in_epoch)) == (1, 4, 0)


@pytest.mark.parametrize(
    "name", ["torch/weights.pt", "torch/checkpoint.pt", "lightning/step6.ckpt", "dcp/nested", *SAFETENSORS]
)
def test_weights_are_taken_alone(name: str) -> None:
    """A file of weights is loaded as such; of any other they can be asked for."""
    with trainer(DATA / name, load_weights_only=True) as run:
        if "transformers" not in name:  # whose rate falls otherwise
            check_weights(run.state.model)
        assert int(run.state.timestamp.batch) == 0
        assert not run.state.optimizers[0].state


@pytest.mark.parametrize("name", ["first", "second", "third"])
def test_a_tied_weight_that_was_saved_once_is_loaded_under_all_names(tmp_path: Path, name: str) -> None:
    """Programs that write safetensors save one of the names of a tied weight."""
    model = Classifier()
    saved = {**model.state_dict(), f"{name}.weight": torch.full((4, 4), 7.0)}
    torch.save(saved, tmp_path / "weights.pt")
    for tied in ("first", "second", "third"):
        setattr(model, tied, nn.Linear(4, 4, bias=False))
        getattr(model, tied).weight = model.first.weight
    with trainer(tmp_path / "weights.pt", model=model, load_weights_only=True):
        assert torch.equal(model.first.weight, saved[f"{name}.weight"])
        assert model.first.weight is model.second.weight is model.third.weight


def test_what_is_not_recognised_says_what_would_be(tmp_path: Path) -> None:
    """The message lists the systems, and how to say where the parts are."""
    torch.save({"a": 1, "nets": {"x": torch.ones(2)}}, tmp_path / "other.pt")
    with pytest.raises(IncompatibleCheckpointError, match=r"'a', 'nets'.*Lightning.*torch, a dict.*load_key_map="):
        trainer(tmp_path / "other.pt")


@pytest.mark.parametrize(
    ("key_map", "message"),
    [
        ({"model": "run.nets.nett"}, r"has nothing at 'run.nets.nett'.*run\.nets"),
        ({"modell": "x"}, "'modell' is not a part of a run. Did you mean 'model'"),
        ({"batch.of": "x"}, "'batch.of' is not a part of a run"),
        ({"model": "run.at.epoch"}, "'run.at.epoch' holds no weight"),
        ({"model.body.*": "run"}, r"'model.body.\*' is not a part of a run"),
        ({}, "expected a dict such as"),
        ({"model": 3}, "expected a dict such as"),
    ],
)
def test_a_key_map_that_cannot_be_followed_is_refused(key_map: Any, message: str) -> None:
    """It names what there is."""
    with pytest.raises(ConfigError, match=message):
        trainer(DATA / "torch/nested.pt", load_key_map=key_map)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved["param_groups"][0]["params"].pop(), r"its groups have \[3\] parameters.*this run \[4\]"),
        (lambda saved: saved["param_groups"][0].pop("betas"), "have no betas: it was another kind of optimizer"),
        (lambda saved: saved["state"].update({9: {}}), "KeyError\\(9\\)"),
        (lambda saved: saved.update(param_groups=3), "no 'param_groups'"),
        (lambda saved: saved["param_groups"].insert(0, "x"), "TypeError"),
        (lambda saved: saved["param_groups"][0].update({7: 1}), "7 is not the name of a setting"),
        (
            lambda saved: saved["param_groups"][0]["params"].insert(0, []),
            r"\[\] is neither a name nor a number of a parameter",
        ),
    ],
    ids=["members", "kind", "state", "no groups", "no group", "no name", "no parameter"],
)
def test_an_optimizer_that_does_not_fit_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    """Before anything is loaded, with the way to do without it."""
    contents = torch.load(DATA / "torch/checkpoint.pt")
    change(contents["optimizer"])
    torch.save(contents, tmp_path / "other.pt")
    with pytest.raises(IncompatibleCheckpointError, match=f"{message}.*load_ignore_keys"):
        trainer(tmp_path / "other.pt")
    with trainer(tmp_path / "other.pt", load_ignore_keys=["state/optimizers"]) as run:
        check_weights(run.state.model)


def stepped(order: Sequence[str], *, named: bool) -> tuple[Classifier, torch.optim.Optimizer]:
    """A network and its optimizer, which has its parameters in ``order``, after a step."""
    model = Classifier()
    parameters = dict(model.named_parameters())
    given: Any = [(name, parameters[name]) if named else parameters[name] for name in order]
    optimizer = torch.optim.AdamW(given, lr=0.5)
    batch = next(iter(data()))
    model.loss(model(batch), batch).backward()
    optimizer.step()
    return model, optimizer


REVERSED = ["head.bias", "head.weight", "body.bias", "body.weight"]


@pytest.mark.parametrize("prefix", ["", "module."])
def test_an_optimizer_that_names_its_parameters_is_taken_by_the_names(tmp_path: Path, prefix: str) -> None:
    """Their order in the file does not matter, nor does a prefix that all of them have."""
    model, optimizer = stepped(REVERSED, named=True)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["param_names"] = [prefix + name for name in REVERSED]
    torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / "other.pt")
    with trainer(tmp_path / "other.pt") as run:
        own = run.state.get_optim_state_dict()["AdamW"]["state"]
        for name, parameter in model.named_parameters():
            assert torch.equal(own[name]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_an_optimizer_in_another_order_is_refused(tmp_path: Path) -> None:
    """Without names the shapes tell: the message has the parameter, both shapes and the way out."""
    model, optimizer = stepped(REVERSED, named=False)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "other.pt")
    message = r"exp_avg of body\.weight has another shape: \(2,\) in the checkpoint, \(3, 4\) now.*load_ignore_keys"
    with pytest.raises(IncompatibleCheckpointError, match=message):
        trainer(tmp_path / "other.pt")


def _less(name: str, *keys: str) -> Callable[[Path], Path]:
    """A copy of the file ``name`` without ``keys``, or of the folder without those files."""

    def make(folder: Path) -> Path:
        target = folder / Path(name).name
        if (DATA / name).is_dir():
            shutil.copytree(DATA / name, target, ignore=shutil.ignore_patterns(*keys))
        else:
            contents = torch.load(DATA / name, weights_only=False)
            torch.save({key: value for key, value in contents.items() if key not in keys}, target)
        return target

    return make


def _two(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Path]:
    """A copy of the file ``name`` with another optimizer in it."""

    def make(folder: Path) -> Path:
        contents = torch.load(DATA / name, weights_only=False)
        change(contents)
        torch.save(contents, folder / Path(name).name)
        return folder / Path(name).name

    return make


def _two_of_accelerate(folder: Path) -> Path:
    shutil.copytree(DATA / "accelerate/state", folder / "state")
    shutil.copy(folder / "state/optimizer.bin", folder / "state/optimizer_1.bin")
    return folder / "state"


def _deepspeed_of_fp16(folder: Path) -> Path:
    shutil.copytree(DATA / "deepspeed/zero0", folder / "run")
    _changed(MODEL_STATES, lambda saved: saved.update(optimizer={"fp16": saved["optimizer"]}))(
        folder / "run/global_step6"
    )
    return folder / "run"


def _torchtitan_alone(folder: Path) -> Path:
    with pointed(str(DATA / "dcp/torchtitan")) as target:
        contents = whole_contents(target.the_one())
    del contents["optimizer"]
    dcp.save(contents, checkpoint_id=folder / "titan", no_dist=True)
    return folder / "titan"


IN_PART: dict[str, tuple[Callable[[Path], Path], str]] = {
    "transformers": (_less("transformers/checkpoint-6", "optimizer.pt"), "is of a run and holds no optimizer"),
    "accelerate": (_less("accelerate/state", "optimizer.bin"), "is of a run and holds no optimizer"),
    "accelerate, generators": (
        _less("accelerate/state", "optimizer.bin", "scheduler.bin"),
        "is of a run and holds no optimizer",
    ),
    "accelerate, two": (_two_of_accelerate, "an optimizer, 'optimizer_1.bin'"),
    "Lightning": (_less("lightning/step6.ckpt", "optimizer_states"), "is of a run and holds no optimizer"),
    "Lightning, two": (
        _two("lightning/step6.ckpt", lambda saved: saved["optimizer_states"].append({**saved["optimizer_states"][0]})),
        r"an optimizer, 'optimizer_states\.1'",
    ),
    "DeepSpeed": (_deepspeed_of_fp16, r"an optimizer, 'optimizer\.fp16'"),
    "torchtitan": (_torchtitan_alone, "is of a run and holds no optimizer"),
    "torch, under another name": (
        _two("torch/checkpoint.pt", lambda saved: saved.update(opts={"net": saved.pop("optimizer")})),
        r"an optimizer, 'opts\.net'",
    ),
    "torch, two": (
        _two("torch/checkpoint.pt", lambda saved: saved.update(optim={**saved["optimizer"]})),
        "an optimizer, 'optim",
    ),
}
"""Checkpoints of which a run would get weights and no optimizer, or one of two; and what the message says."""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", IN_PART)
def test_a_checkpoint_is_not_resumed_without_its_optimizer(tmp_path: Path, kind: str) -> None:
    """Before anything is loaded; the message has the argument that takes the weights, and that does."""
    make, message = IN_PART[kind]
    path = make(tmp_path)
    with pytest.raises(IncompatibleCheckpointError, match=f"{message}.*load_weights_only=True.*load_key_map"):
        trainer(path, optimizer=grouped if kind == "transformers" else None)
    with trainer(path, load_weights_only=True) as run:
        assert not run.state.optimizers[0].state
    with trainer(path, load_ignore_keys=["state/optimizers"]) as run:
        assert not run.state.optimizers[0].state


@pytest.mark.parametrize("name", ["bf16-2", "frozen-2", "frozen-3"])
def test_a_save_of_deepspeed_in_bf16_or_with_frozen_layers_continues(name: str) -> None:
    """Weights in bf16 come with the fp32 that the optimizer has; what is frozen is whole, and in no group."""

    def trained(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.5)

    expected = json.loads((DATA / "deepspeed/expected.json").read_text())[name.replace("-", "_")]
    losses, model = Losses(), Classifier()
    model.body.requires_grad_(not name.startswith("frozen"))
    with trainer(DATA / "deepspeed" / name, losses, model, optimizer=trained) as run:
        assert all(tensor.dtype is torch.float32 for tensor in run.state.model.state_dict().values())
        assert bool(run.state.optimizers[0].state.get(model.body.weight)) is model.body.weight.requires_grad
        run.fit()
    assert losses.found == pytest.approx(expected, rel=0.02 if name.startswith("bf16") else 1e-5)


def plain_contents(path: Path) -> Any:
    """What a file of torch holds, without the classes of DeepSpeed in it."""
    data = path.read_bytes()
    file = TorchFile(MemoryFile(data), len(data), types=stand_ins())
    file.read()
    if (state := file.contents.get("optimizer_state_dict")) is not None:
        state["zero_stage"] = state["zero_stage"].arguments[0]
        del state["loss_scaler"], state["param_slice_mappings"]
    return file.contents


def _changed(end: str, change: Any) -> Any:
    """What changes the contents of each file whose name ends so."""

    def apply(folder: Path) -> None:
        for path in folder.glob(f"*{end}"):
            change(saved := plain_contents(path))
            torch.save(saved, path)

    return apply


MODEL_STATES, OPTIM_STATES = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"
HOSTILE_FOLDERS: dict[str, tuple[Any, type[Exception], str]] = {
    "no rank 1": (lambda folder: (folder / OPTIM_STATES).unlink(), CorruptCheckpointError, r"files of ranks \[1\]"),
    "split layers": (
        lambda folder: shutil.copy(folder / MODEL_STATES, folder / "mp_rank_01_model_states.pt"),
        IncompatibleCheckpointError,
        "'mp_rank_01_model_states.pt': models whose layers",
    ),
    "cut off": (
        lambda folder: (folder / OPTIM_STATES).write_bytes((folder / OPTIM_STATES).read_bytes()[:900]),
        CorruptCheckpointError,
        OPTIM_STATES,
    ),
    "code": (
        lambda folder: (folder / OPTIM_STATES).write_bytes((folder / "code.pt").read_bytes()),
        UntrustedCheckpointError,
        "getcwd",
    ),
    "ranks of millions": (
        _changed(MODEL_STATES, lambda saved: saved.update(dp_world_size=1 << 40)),
        CorruptCheckpointError,
        "does not record how many ranks",
    ),
    "shape of petabytes": (
        _changed(MODEL_STATES, lambda saved: saved["param_shapes"][0].update({"body.weight": (1 << 50,)})),
        CorruptCheckpointError,
        "'body.weight' is incomplete",
    ),
    "negative shape": (
        _changed(MODEL_STATES, lambda saved: saved["param_shapes"][0].update({"body.weight": (-3, 4)})),
        CorruptCheckpointError,
        "'body.weight' is incomplete",
    ),
    "moments of another size": (
        _changed(
            "optim_states.pt",
            lambda saved: saved["optimizer_state_dict"]["base_optimizer_state"]["state"][0].update(exp_avg="x"),
        ),
        CorruptCheckpointError,
        "'exp_avg' of the optimizer is str",
    ),
    "no groups": (
        _changed("optim_states.pt", lambda saved: saved["optimizer_state_dict"].pop("base_optimizer_state")),
        CorruptCheckpointError,
        "do not fit together",
    ),
    "steps of text": (
        _changed(MODEL_STATES, lambda saved: saved.update(global_steps="six")),
        IncompatibleCheckpointError,
        "training counts are invalid",
    ),
}
"""What is done to a folder, and how loading it fails."""


@pytest.mark.parametrize("kind", HOSTILE_FOLDERS)
def test_a_hostile_folder_of_deepspeed_is_refused(tmp_path: Path, kind: str) -> None:
    """With an error of ours that names what is wrong."""
    shutil.copytree(DATA / "deepspeed/zero1", tmp_path / "run")
    change, error, message = HOSTILE_FOLDERS[kind]
    if kind == "code":
        torch.save({"optimizer_state_dict": os.getcwd}, tmp_path / "run/global_step6/code.pt")
    change(tmp_path / "run/global_step6")
    with pytest.raises(error, match=message):
        trainer(tmp_path / "run")


def bin_folder(folder: Path, files: dict[str, Any], index: Any = None) -> Path:
    """A folder of ``.bin`` files with their index."""
    folder.mkdir()
    for name, contents in files.items():
        torch.save(contents, folder / name)
    if index is None:
        index = {"weight_map": {key: name for name, contents in files.items() for key in contents}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


BODY, HEAD = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"


def halves() -> dict[str, Any]:
    """The weights in two files, one a parameter, some a part of a storage."""
    saved = weights()
    both = torch.stack([saved["head.bias"], saved["head.bias"] + 1])
    return {
        BODY: {"body.weight": nn.Parameter(saved["body.weight"]), "body.bias": saved["body.bias"]},
        HEAD: {"head.weight": saved["head.weight"], "head.bias": both[0]},
    }


def test_a_folder_of_bin_files_is_read_by_its_index(tmp_path: Path) -> None:
    """As transformers cut them before safetensors; what the index does not name is not opened."""
    folder = bin_folder(tmp_path / "run", halves())
    (folder / "training_args.bin").write_bytes(b"not opened")
    with trainer(folder) as run:
        check_weights(run.state.model)


HOSTILE_BINS: dict[str, tuple[Any, type[Exception], str]] = {
    "code": ({"body.bias": os.getcwd}, UntrustedCheckpointError, "getcwd"),
    "not by rows": (
        {"body.weight": torch.ones(4, 3).T},
        CorruptCheckpointError,
        "'body.weight' is not a contiguous tensor",
    ),
    "a number": ({"body.weight": 3}, CorruptCheckpointError, "'body.weight' is not a contiguous tensor"),
    "a list": ([torch.ones(2)], CorruptCheckpointError, "holds list and not a state dict"),
    "no name": ({(1, 2): torch.ones(2)}, CorruptCheckpointError, "a key that is tuple, not the name of a tensor"),
    "twice": ({"head.bias": torch.ones(2)}, CorruptCheckpointError, "'head.bias' is in two files"),
}


@pytest.mark.parametrize("kind", HOSTILE_BINS)
def test_a_hostile_bin_file_is_refused(tmp_path: Path, kind: str) -> None:
    """With an error that names the file, or the tensor in it."""
    contents, error, message = HOSTILE_BINS[kind]
    index = {"weight_map": {"a": BODY, "b": HEAD}}
    folder = bin_folder(tmp_path / "run", {**halves(), BODY: contents}, index)
    with pytest.raises(error, match=message):
        trainer(folder)


def header(changed: Any = None, *, raw: bytes = b"", length: int | None = None, data: bytes = bytes(8)) -> bytes:
    """A file of safetensors with two numbers."""
    text = raw or json.dumps({"w": entry()} if changed is None else changed).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    """What a header says of one tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HOSTILE: dict[str, bytes] = {
    "header beyond the end": header(length=1 << 20),
    "header of exabytes": header(length=1 << 62),
    "no header": b"{}",
    "empty": b"",
    "no JSON": header(raw=b"{" + b"x" * 30),
    "no UTF-8": header(raw=b'{"\xff": 1}'),
    "deep JSON": header(raw=b'{"w":' * 100_000),
    "a list": header(raw=b"[{}]" + b" " * 8),
    "overlap": header({"w": entry(), "v": entry(shape=[1], offsets=[4, 8])}),
    "the same bytes": header({"w": entry(), "v": entry()}),
    "gap": header({"w": entry(shape=[1], offsets=[4, 8])}),
    "beyond the end": header({"w": entry(shape=[4], offsets=[0, 16])}),
    "before the start": header({"w": entry(shape=[2], offsets=[-8, 0])}),
    "backwards": header({"w": entry(offsets=[8, 0])}),
    "bytes left over": header(data=bytes(12)),
    "too few bytes": header(data=bytes(4)),
    "shape of petabytes": header({"w": entry(shape=[1 << 50, 0], offsets=[0, 8])}),
    "shape that overflows": header({"w": entry(shape=[1 << 32, 1 << 32], offsets=[0, 8])}),
    "negative shape": header({"w": entry(shape=[-2, -1])}),
    "shape of a truth": header({"w": entry(shape=[True, 2])}),
    "a hundred dimensions": header({"w": entry(shape=[1] * 99 + [2])}),
    "unknown numbers": header({"w": entry(dtype="PICKLE")}),
    "dtype of another kind": header({"w": entry(dtype=[])}),
    "no offsets": header({"w": {"dtype": "F32", "shape": [2]}}),
    "metadata of numbers": header({"__metadata__": {"format": 1}, "w": entry()}),
    "a part of petabytes": header(
        {"__metadata__": {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [1099511627776]}}'}, "w": entry()}
    ),
    "a part nowhere": header({"__metadata__": {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [-2]}}'}, "w": entry()}),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_of_safetensors_is_refused(tmp_path: Path, kind: str) -> None:
    """With an error of ours, before memory is taken for what it claims to hold."""
    (tmp_path / "model.safetensors").write_bytes(HOSTILE[kind])
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        trainer(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            {"weight_map": {"w": "../model.safetensors"}},
            "names '../model.safetensors', not a file in its folder",
        ),
        ({"weight_map": {"w": "/etc/passwd"}}, "not a file in its folder"),
        ({"weight_map": {"w": "gone.safetensors"}}, "not a file in its folder"),
        ({"weight_map": {"w": "model.safetensors.index.json"}}, "not a file in its folder"),
        ({"weight_map": {"w": 3}}, "not a file in its folder|is not an index"),
        ({"weight_map": {"w": ["a"]}}, "is not an index"),
        ({"weight_map": 3}, "is not an index"),
        ([], "is not an index"),
    ],
)
def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path, index: Any, message: str) -> None:
    """Whatever it names must be a file of safetensors beside it."""
    (tmp_path / "model.safetensors").write_bytes(header())
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpointError, match=message):
        trainer(folder)


def test_nothing_of_a_foreign_pickle_runs(tmp_path: Path) -> None:
    """A class of the peer's in a file that is opened is refused by name; what is not needed is not opened."""
    shutil.copytree(DATA / "transformers/checkpoint-6", tmp_path / "run")
    with trainer(tmp_path / "run", load_weights_only=True):  # its training_args.bin names classes of transformers
        pass
    shutil.copy(tmp_path / "run/training_args.bin", tmp_path / "run/optimizer.pt")
    with pytest.raises(UntrustedCheckpointError, match="transformers"):
        trainer(tmp_path / "run")
