"""``defaults:``: a run that starts from other files. What Hydra's users expect of the simple forms holds here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composerlite.config import build_trainer, load_config
from composerlite.errors import ConfigError

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
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes files by their names, ``/`` being ``__``, and gives the path of the first. ``base.yaml`` is there."""
    (tmp_path / "base.yaml").write_text(BASE)

    def write_files(**texts: str) -> Path:
        files = [tmp_path / f"{name.replace('__', '/')}.yaml" for name in texts]
        for file, text in zip(files, texts.values(), strict=True):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return files[0]

    return write_files


Write = Callable[..., Path]


def values(file: Path, *overrides: str) -> dict[str, Any]:
    return load_config(file, overrides).values


def message_of(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(file, overrides)
    return str(error.value)


# ── order and merging ────────────────────────────────────────────────────────────────────────────────────────────
def test_a_files_own_values_count_more_than_those_it_starts_from(write: Write) -> None:
    """Mappings are merged key by key, lists and all else replaced, and variables filled in when all are merged."""
    run = values(
        write(
            run="defaults: [base]\nvariables: {width: 16}\noptimizer: {lr: 2.0, betas: [0.5]}\ncallbacks: [nan_monitor]"
        )
    )
    assert run["model"] == {"name": "my_task:net", "width": 16}
    assert run["optimizer"] == {"name": "decoupled_adamw", "lr": 2.0, "betas": [0.5]}
    assert run["callbacks"] == ["nan_monitor"]
    assert (run["max_duration"], "defaults" in run) == ("2ep", False)


@pytest.mark.parametrize(
    ("defaults", "seed"),
    [("[base, a, b]", 3), ("[base, b, a]", 3), ("[base, a, b, _self_]", 3), ("[_self_, base, a, b]", 2),
     ("[base, a, _self_, b]", 2), ("[base, _self_, b, a]", 1)],
)  # fmt: skip
def test_the_later_of_the_list_counts(write: Write, defaults: str, seed: int) -> None:
    """``_self_`` is the place of the file's own values; without it they come last."""
    assert values(write(run=f"defaults: {defaults}\nseed: 3", a="seed: 1", b="seed: 2"))["seed"] == seed


def test_files_start_from_files(write: Write) -> None:
    """As deep as one likes, each file relative to the folder of the one that names it, ``..`` included."""
    file = write(
        experiments__today__run="defaults: [../longer]\nseed: 1",
        experiments__longer="defaults: [../base]\nmax_duration: 9ep",
    )
    run = values(file)
    assert (run["seed"], run["max_duration"], run["optimizer"]["lr"]) == (1, "9ep", 1e-3)


# ── groups ───────────────────────────────────────────────────────────────────────────────────────────────────────
GROUPS = {
    "run": "defaults:\n  - base\n  - optimizer: adam\n  - model: null\n  - _self_\noptimizer: {lr: 3.0}\n",
    "optimizer__adam": "name: decoupled_adamw\nlr: 1.0\nweight_decay: 0.5\n",
    "optimizer__sgd": "name: decoupled_sgdw\nlr: 2.0\n",
    "model__wide": "width: 99\n",
    "model__deep": "depth: 9\n",
}


def test_a_group_is_a_folder_and_its_file_goes_below_the_key_of_that_name(write: Write) -> None:
    """``{optimizer: adam}`` reads ``optimizer/adam.yaml``; ``null`` reads nothing; a list reads several."""
    file = write(**GROUPS)
    assert values(file)["optimizer"] == {
        "name": "decoupled_adamw", "lr": 3.0, "betas": [0.9, 0.95], "weight_decay": 0.5,
    }  # fmt: skip
    assert values(file)["model"] == {"name": "my_task:net", "width": 8}
    file.write_text("defaults: [base, {model: [wide, deep]}]")
    assert values(file)["model"] == {"name": "my_task:net", "width": 99, "depth": 9}


def test_an_override_chooses_the_file_of_a_group(write: Write) -> None:
    """In whatever order, with values of it set as well; a mapping is merged as ever, and ``null`` takes no file."""
    file = write(**GROUPS | {"base": BASE.replace("betas: [0.9, 0.95]", "")})
    file = file.with_name("run.yaml")
    run = values(file, "model.width=5", "model=wide", "optimizer=sgd")
    assert run["model"] == {"name": "my_task:net", "width": 5}
    assert run["optimizer"] == {"name": "decoupled_sgdw", "lr": 3.0}
    assert values(file, "model={depth: 7}")["model"] == {"name": "my_task:net", "width": 8, "depth": 7}
    assert values(file, "model=[wide,deep]")["model"]["depth"] == 9
    assert values(file, "model=wide", "model=deep")["model"]["depth"] == 9, "the last one counts"
    assert values(file, "optimizer=null")["optimizer"] == {"lr": 3.0, "name": "decoupled_adamw"}


def test_groups_may_be_nested_and_named_in_one_piece(write: Write) -> None:
    """``callbacks/often`` and ``/callbacks/often`` are files too, and a group below a group is chosen by its path."""
    file = write(
        run="defaults: [base, {train_loader/dataset: small}, train_loader/fast]",
        train_loader__fast="defaults: [/more]\nbatch_size: 2",
        train_loader__dataset__small="size: 2",
        train_loader__dataset__large="size: 2000",
        more="seed: 5",
    )
    run = values(file)
    assert run["train_loader"] == {"dataset": {"name": "my_task:data", "size": 2}, "batch_size": 2}
    assert run["seed"] == 5
    assert values(file, "train_loader/dataset=large")["train_loader"]["dataset"]["size"] == 2000


def test_another_folder_on_the_disk_says_nothing_of_keys(write: Write) -> None:
    """The values of a file behind ``..`` go to the top, those of a group there below its last folder."""
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


def test_a_group_without_a_choice_asks_for_one(write: Write) -> None:
    """``???`` is filled in on the command line, as a value is that has to be set."""
    file = write(**GROUPS | {"run": "defaults:\n  - base\n  - model: ???\nseed: ???"})
    assert f"{file}:3: 'model' has to be chosen: model=NAME. Known: deep, wide." == message_of(file)
    assert f"{file}:4: seed is '???': it has to be set, such as by seed=VALUE." == message_of(file, "model=wide")
    assert values(file, "model=wide", "seed=3")["seed"] == 3


# ── where values come from ───────────────────────────────────────────────────────────────────────────────────────
def test_an_error_names_the_file_and_line_that_said_it(write: Write) -> None:
    """Through any number of files, and for values that were merged into each other."""
    base = BASE.replace("batch_size: 4", "batch_sise: 4")
    file = write(run="defaults: [base]\nseed: x\n", base=base)
    folder = file.parent
    message = message_of(file)
    assert f"{folder}/base.yaml:5: unknown key 'batch_sise' in 'train_loader'. Did you mean 'batch_size'?" in message
    write(base=BASE.replace("batch_size: 4", "batch_size: 4\n  shuffle: 1"))
    assert message_of(file).startswith(f"{folder}/base.yaml:6: train_loader.shuffle=1: expected true")
    write(base=BASE)
    assert message_of(file).startswith(f"{file}:2: seed='x': expected a whole number")


def test_every_value_can_be_shown_with_its_place(write: Write) -> None:
    """``--print-origins``: the file and line of each value, or the override; and it is a configuration still."""
    file = write(run="defaults: [base, {model: wide}]\nseed: 1\n", model__wide="width: 99\n")
    run = load_config(file, ["max_duration=5ba"])
    lines = {line.split("  # ")[0].strip(): line.split("  # ")[1] for line in run.annotated.splitlines() if "#" in line}
    folder = file.parent
    assert lines["width: 99"] == f"{folder}/model/wide.yaml:1"
    assert lines["name: my_task:net"] == f"{folder}/base.yaml:2"
    assert lines["- lr_monitor"] == f"{folder}/base.yaml:7"
    assert lines["seed: 1"] == f"{file}:2"
    assert lines["max_duration: 5ba"] == "override 'max_duration=5ba'"
    file.write_text(run.annotated)
    assert values(file) == run.values


def test_modules_are_found_beside_every_file(write: Write, write_run: Callable[..., Path]) -> None:
    """A file in another folder that starts from one with its task beside it can be trained."""
    base = write_run()
    file = write(elsewhere__today=f"defaults: [../{base.stem}]\nmax_duration: 1ba\n")
    with build_trainer(load_config(file)) as trainer:
        trainer.fit()
    assert trainer.state.timestamp == "1ba"


# ── mistakes ─────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("defaults: [bese]", "run.yaml:1: there is no file '{folder}/bese.yaml'. Did you mean 'base'? Known: "),
        ("defaults:\n  - base\n  - model: gpt", "run.yaml:3: there is no file '{folder}/model/gpt.yaml'. There is no"),
        ("defaults: base", "run.yaml:1: defaults='base': expected a list such as [base, {{model: gpt}}, _self_]."),
        ("defaults: [3]", "run.yaml:1: defaults: 3: expected a list such as"),
        ("defaults: [{a: b, c: d}]", "expected a list such as"),
        ("defaults: [[base]]", "run.yaml:1: defaults: ['base']: expected a list such as"),
        ("defaults: [_self_, base, _self_]", "'_self_' stands for this file's own values"),
        ("defaults: [base, base]", "{folder}/base.yaml is in a defaults list already, at {folder}/run.yaml:1."),
        ("defaults: [run]", "run.yaml:1: a file cannot start from itself: {folder}/run.yaml → {folder}/run.yaml."),
        ("defaults: [base, override model: gpt]", "override of Hydra is not supported"),
        ("defaults: [base, {model@net: gpt}]", "packages of Hydra is not supported"),
        ("defaults: [base, '${x}']", "interpolation of Hydra is not supported"),
        ("# @package _global_\ndefaults: [base]", "run.yaml:1: '@package' of Hydra is not supported."),
        ("defaults: [base]\ncallbacks: {nan_monitor: }", "run.yaml:2: callbacks is a list in one file and a mapping"),
        ("defaults: [base, {model: }]\ninclude: x", "run.yaml:2: unknown key 'include'."),
    ],
)  # fmt: skip
def test_a_wrong_list_is_told_with_its_line(write: Write, text: str, expected: str) -> None:
    """What is missing, misspelt, there twice, or Hydra's and not supported."""
    file = write(run=text)
    message = message_of(file)
    assert message.startswith(str(file))
    assert expected.format(folder=file.parent) in message


def test_a_cycle_is_told_with_the_way(write: Write) -> None:
    """The line is that of the file that closes it."""
    file = write(run="defaults: [a]", a="defaults: [b]", b="seed: 1\ndefaults:\n  - run")
    folder = file.parent
    way = " → ".join(f"{folder}/{name}.yaml" for name in ("run", "a", "b", "run"))
    assert message_of(file) == f"{folder}/b.yaml:3: a file cannot start from itself: {way}."


def test_a_base_that_is_no_yaml_is_told_with_its_own_line(write: Write) -> None:
    """The file that is wrong is named, not the one that starts from it."""
    file = write(run="defaults: [a]", a="seed: 1\nseed: 2\n")
    assert message_of(file).startswith(f"{file.parent}/a.yaml:2: not valid YAML: found duplicate key")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model=narrow", "there is no file '{folder}/model/narrow.yaml'. Known: deep, wide."),
        ("db/main=x", "override 'db/main=x': no defaults list has this group. Known: model, optimizer."),
        ("defaults=[base]", "the list itself stays as it is. GROUP=NAME chooses"),
        ("+seed=3", "'+' of Hydra is not supported. seed=VALUE sets what is there"),
        ("~optimizer=3", "'~' of Hydra is not supported."),
    ],
)
def test_a_wrong_choice_is_told_with_what_is_known(write: Write, override: str, expected: str) -> None:
    """An override that names a group or a file that is not there, or has a sign of Hydra's."""
    file = write(**GROUPS)
    message = message_of(file, override)
    assert message.startswith(f"override {override!r}: ")
    assert expected.format(folder=file.parent) in message
