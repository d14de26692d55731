"""``defaults:``: files included by a run, in the simple forms of Hydra's defaults list."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composerlite.config import build_trainer, load_config

ErrorOf = Callable[..., str]
Write = Callable[..., Path]

BASE = """\
variables: {width: 8}
model: {name: my_task:net, width: "${variables.width}"}
train_loader:
  dataset: {name: my_task:data, size: 8}
  batch_size: 4
max_duration: 2ep
callbacks: [lr_monitor, speed_monitor]
optimizer: {name: decoupled_adamw, lr: 1e-3, betas: [0.9, 0.95]}
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes ``base.yaml`` and the given files, ``__`` for ``/`` in their names; returns the path of the first."""
    (tmp_path / "base.yaml").write_text(BASE)

    def write_files(**texts: str) -> Path:
        files = [tmp_path / f"{name.replace('__', '/')}.yaml" for name in texts]
        for file, text in zip(files, texts.values(), strict=True):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return files[0]

    return write_files


def values(file: Path, *overrides: str) -> dict[str, Any]:
    return load_config(file, overrides).values


def test_the_values_of_a_file_win_over_included_files(write: Write) -> None:
    """Mappings are merged key by key, lists and other values replaced, and variables resolved after merging."""
    own = "variables: {width: 16}\noptimizer: {lr: 2.0, betas: [0.5]}\ncallbacks: [nan_monitor]"
    run = values(write(run=f"defaults: [base]\n{own}"))
    assert run["model"] == {"name": "my_task:net", "width": 16}
    assert run["optimizer"] == {"name": "decoupled_adamw", "lr": 2.0, "betas": [0.5]}
    assert run["callbacks"] == ["nan_monitor"]
    assert (run["max_duration"], "defaults" in run) == ("2ep", False)


@pytest.mark.parametrize(
    ("defaults", "seed"),
    [("[base, a, b]", 3), ("[base, b, a]", 3), ("[base, a, b, _self_]", 3), ("[_self_, base, a, b]", 2),
     ("[base, a, _self_, b]", 2), ("[base, _self_, b, a]", 1)],
)  # fmt: skip
def test_later_files_win(write: Write, defaults: str, seed: int) -> None:
    """``_self_`` is the position of the file's own values; without ``_self_`` the own values are last."""
    assert values(write(run=f"defaults: {defaults}\nseed: 3", a="seed: 1", b="seed: 2"))["seed"] == seed


GROUPS = {
    "run": "defaults:\n  - base\n  - optimizer: adam\n  - model: null\n  - _self_\noptimizer: {lr: 3.0}\n",
    "optimizer__adam": "name: decoupled_adamw\nlr: 1.0\nweight_decay: 0.5\n",
    "optimizer__sgd": "name: decoupled_sgdw\nlr: 2.0\n",
    "model__wide": "width: 99\n",
    "model__deep": "depth: 9\n",
}


def test_a_group_is_a_folder_for_the_values_of_a_key(write: Write) -> None:
    """``{optimizer: adam}`` reads ``optimizer/adam.yaml``; ``null`` reads no file; a list reads several."""
    file = write(**GROUPS)
    assert values(file)["optimizer"] == {
        "name": "decoupled_adamw", "lr": 3.0, "betas": [0.9, 0.95], "weight_decay": 0.5,
    }  # fmt: skip
    assert values(file)["model"] == {"name": "my_task:net", "width": 8}
    file.write_text("defaults: [base, {model: [wide, deep]}]")
    assert values(file)["model"] == {"name": "my_task:net", "width": 99, "depth": 9}


def test_an_override_selects_the_file_of_a_group(write: Write, error_of: ErrorOf) -> None:
    """Also together with overrides of its values. ``null`` selects no file; a mapping is merged as elsewhere."""
    file = write(**GROUPS | {"base": BASE.replace("betas: [0.9, 0.95]", "")})
    file = file.with_name("run.yaml")
    run = values(file, "model.width=5", "model=wide", "optimizer=sgd")
    assert run["model"] == {"name": "my_task:net", "width": 5}
    assert run["optimizer"] == {"name": "decoupled_sgdw", "lr": 3.0}
    assert values(file, "model={depth: 7}")["model"] == {"name": "my_task:net", "width": 8, "depth": 7}
    assert values(file, "model=[wide,deep]")["model"]["depth"] == 9
    assert values(file, "model=wide", "model=deep")["model"]["depth"] == 9, "the last one counts"
    assert values(file, "optimizer=null")["optimizer"] == {"lr": 3.0, "name": "decoupled_adamw"}
    expected = f"override 'model=narrow': there is no file '{file.parent}/model/narrow.yaml'. Known: deep, wide."
    assert error_of(file, "model=narrow") == expected


def test_groups_may_be_nested(write: Write) -> None:
    """``train_loader/fast`` is a file too; a group below a group is selected by its path."""
    file = write(
        run="defaults: [base, {train_loader/dataset: small}, train_loader/fast]",
        train_loader__fast="batch_size: 2",
        train_loader__dataset__small="size: 2",
        train_loader__dataset__large="size: 2000",
    )
    run = values(file)
    assert run["train_loader"] == {"dataset": {"name": "my_task:data", "size": 2}, "batch_size": 2}
    assert values(file, "train_loader/dataset=large")["train_loader"]["dataset"]["size"] == 2000


def test_a_folder_outside_is_not_a_key(write: Write) -> None:
    """The values of a file behind ``..`` go to the top level, those of a group there below its last folder."""
    file = write(
        today__run="defaults: [../base, ../shared/more, {../shared/optimizer: slow}]",
        shared__more="defaults: [{model: wide}]\nseed: 4",
        shared__model__wide="width: 99",
        shared__optimizer__slow="lr: 1e-9",
        shared__optimizer__fast="defaults: [slow]\nlr: 9.0",
    )
    run = values(file)
    assert (run["seed"], run["model"]["width"], run["optimizer"]["lr"]) == (4, 99, 1e-9)
    assert values(file, "optimizer=fast")["optimizer"]["lr"] == 9.0


def test_a_group_without_a_choice_is_an_error(write: Write, error_of: ErrorOf) -> None:
    """``???`` requires an override, for a group and for a value."""
    file = write(**GROUPS | {"run": "defaults:\n  - base\n  - model: ???\nseed: ???"})
    assert error_of(file) == f"{file}:3: 'model' has to be chosen: model=NAME. Known: deep, wide."
    assert error_of(file, "model=wide") == f"{file}:4: seed: is '???': set a value, such as by seed=VALUE."
    assert values(file, "model=wide", "seed=3")["seed"] == 3


def test_an_error_names_the_file_and_line_of_the_value(write: Write, error_of: ErrorOf) -> None:
    """Also for values merged from several files."""
    file = write(run="defaults: [base]\nseed: x\n", base=BASE.replace("batch_size: 4", "batch_sise: 4"))
    base = file.with_name("base.yaml")
    message = error_of(file, "seed=1")
    assert f"{base}:5: unknown key 'batch_sise' in 'train_loader'. Did you mean 'batch_size'?" in message
    write(base=BASE.replace("batch_size: 4", "batch_size: 4\n  shuffle: 1"))
    assert error_of(file, "seed=1").startswith(f"{base}:6: train_loader.shuffle=1: expected boolean")
    assert error_of(file).startswith(f"{file}:2: seed='x': expected integer")


def test_every_value_can_be_printed_with_its_place(write: Write) -> None:
    """``--print-origins``: the file and line of each value, or the override. The output is still a configuration."""
    file = write(run="defaults: [base, {model: wide}]\nseed: 1\n", model__wide="width: 99\n")
    run = load_config(file, ["max_duration=5ba"])
    places = dict(re.findall(r"^ *(.*?) *# (.*)$", run.annotated, re.MULTILINE))
    assert places["width: 99"] == f"{file.parent}/model/wide.yaml:1"
    assert places["name: my_task:net"] == f"{file.parent}/base.yaml:2"
    assert places["- lr_monitor"] == f"{file.parent}/base.yaml:7"
    assert places["seed: 1"] == f"{file}:2"
    assert places["max_duration: 5ba"] == "override 'max_duration=5ba'"
    file.write_text(run.annotated)
    assert values(file) == run.values


def test_modules_are_found_beside_every_file(write: Write, write_run: Callable[..., Path]) -> None:
    """A file in another folder can include a file with its module beside it."""
    base = write_run()
    file = write(elsewhere__today=f"defaults: [../{base.stem}]\nmax_duration: 1ba\n")
    with build_trainer(load_config(file)) as trainer:
        assert trainer.state.max_duration == "1ba"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("defaults: [bese]", "run.yaml:1: there is no file '{folder}/bese.yaml'. Did you mean 'base'? Known: "),
        ("defaults:\n  - base\n  - model: gpt", "run.yaml:3: there is no file '{folder}/model/gpt.yaml'."),
        ("defaults: base", "run.yaml:1: defaults='base': expected a list such as [base, {{model: gpt}}, _self_]."),
        ("defaults: [3]", "run.yaml:1: defaults: 3: expected a list such as"),
        ("defaults: [{a: b, c: d}]", "expected a list such as"),
        ("defaults: [[base]]", "run.yaml:1: defaults: ['base']: expected a list such as"),
        ("defaults: [_self_, base, _self_]", "expected a list such as"),
        ("defaults: [base, base]", "{folder}/base.yaml is included already, at {folder}/run.yaml:1."),
        ("defaults: [run]", "run.yaml:1: {folder}/run.yaml is included already, at {folder}/run.yaml."),
        ("defaults: [base, override model: gpt]", "there is no file '{folder}/override model/gpt.yaml'"),
        ("defaults: [base, {model@net: gpt}]", "there is no file '{folder}/model@net/gpt.yaml'"),
        ("defaults: [base]\ncallbacks: {nan_monitor: }", "run.yaml: a list and a mapping cannot be merged"),
        ("defaults: [base, {model: }]\ninclude: x", "run.yaml:2: unknown key 'include'."),
        ("defaults: [a]", "a.yaml:2: not valid YAML: found duplicate key"),
    ],
)  # fmt: skip
def test_a_wrong_list_is_an_error_with_its_line(write: Write, error_of: ErrorOf, text: str, expected: str) -> None:
    """Missing files, cyclic and duplicate files, wrong forms, and syntax of Hydra without support here."""
    file = write(run=text, a="seed: 1\nseed: 2\n")
    message = error_of(file)
    assert message.startswith(str(file.parent))
    assert expected.format(folder=file.parent) in message
