"""The helpers of ``composerlite.utils``, surgery on modules, metrics and losses: as scripts of Composer use them."""

from __future__ import annotations

import io
import socket
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from composerlite import utils
from composerlite.errors import ConfigError
from composerlite.loss import (
    binary_cross_entropy_with_logits,
    check_for_index_targets,
    ensure_targets_one_hot,
    infer_target_type,
    loss_registry,
)
from composerlite.metrics import (
    BinaryF1Score,
    CrossEntropy,
    Dice,
    LanguageCrossEntropy,
    LanguagePerplexity,
    LossMetric,
    MaskedAccuracy,
    MIoU,
)
from composerlite.utils.module_surgery import (
    count_module_instances,
    replace_module_classes,
    update_params_in_optimizer,
)


def test_anything_becomes_a_tuple() -> None:
    """None is empty, text and tensors are one thing, a dict is its values."""
    assert utils.ensure_tuple(None) == ()
    assert utils.ensure_tuple("ab") == ("ab",)
    assert utils.ensure_tuple([1, 2]) == utils.ensure_tuple({"a": 1, "b": 2}) == (1, 2)
    assert len(utils.ensure_tuple(torch.zeros(3))) == 1


def test_a_function_is_mapped_over_any_collection() -> None:
    """Lists stay lists, dicts dicts, and one thing is one thing."""
    assert utils.map_collection([1, 2], str) == ["1", "2"]
    assert utils.map_collection({"a": 1}, str) == {"a": "1"}
    assert utils.map_collection(1, str) == "1"
    assert utils.map_collection(None, str) is None


def test_nested_settings_are_flat_and_nested_again() -> None:
    """Paths with slashes, both ways."""
    nested = {"optimizer": {"lr": 0.1, "betas": [0.9]}, "seed": 1}
    flat = utils.convert_nested_dict_to_flat_dict(nested)
    assert flat == {"optimizer/lr": 0.1, "optimizer/betas": [0.9], "seed": 1}
    assert utils.convert_flat_dict_to_nested_dict(flat) == nested


def test_the_arguments_of_a_constructor_are_plain_values() -> None:
    """Objects are told by their class; what is private or self is left out."""
    found = utils.extract_hparams({"self": 1, "_x": 2, "lr": 0.1, "model": nn.Linear(1, 1), "several": [1, nn.ReLU()]})
    assert found == {"lr": 0.1, "model": "Linear", "several": [1, "ReLU"]}


def test_choices_are_found_by_value_and_name_in_any_case() -> None:
    """As with Composer's StringEnum; what does not exist is told with what does."""

    class Kind(utils.StringEnum):
        KEY = "value"

    assert Kind("KeY") is Kind("VaLuE") is Kind.KEY
    assert Kind.KEY == "key"
    assert Kind.KEY != "other"
    with pytest.raises(ValueError, match=r"Kind: 'other' does not exist. Known: value."):
        Kind("other")


def test_a_name_is_filled_in_partly() -> None:
    """What is not given is left as it is."""
    assert utils.partial_format("{run}/ep{epoch:03}", run="a") == "a/ep{epoch:03}"
    assert utils.partial_format("{}-{}", 1) == "1-{}"


def test_objects_are_imported_by_their_path() -> None:
    """A module and a name; anything else says how it is written."""
    assert utils.import_object("functools:partial").__name__ == "partial"
    with pytest.raises(ConfigError, match=r"import_object\('functools'\): expected a module and a name"):
        utils.import_object("functools")
    assert "pip install 'composerlite[nlp]'" in str(utils.MissingConditionalImportError("nlp", "transformers"))


def test_a_model_is_evaluated_within_a_context() -> None:
    """It is as it was after it."""
    model = nn.Dropout()
    with utils.model_eval_mode(model):
        assert not model.training
    assert model.training
    assert not utils.is_model_fsdp(model)


def test_files_that_stand_for_links_and_folders_that_are_empty(tmp_path: Path) -> None:
    """A link is a text file; a folder with a file in it is not empty, and the error names the file."""
    utils.ensure_folder_is_empty(tmp_path)
    utils.create_symlink_file("run/ep1.pt", tmp_path / "latest.pt.symlink")
    assert (tmp_path / "latest.pt.symlink").read_text() == "run/ep1.pt"
    with pytest.raises(FileExistsError, match=r"latest\.pt\.symlink"):
        utils.ensure_folder_is_empty(tmp_path)
    with pytest.raises(ConfigError, match=r"expected a name ending with \.symlink"):
        utils.create_symlink_file("run/ep1.pt", tmp_path / "latest.pt")


def test_this_machine_is_told() -> None:
    """Versions, devices, a port that is free; this is no notebook."""
    report = io.StringIO()
    utils.print_env(report)
    assert f"torch_version: {torch.__version__}" in report.getvalue()
    with socket.socket() as one:
        one.bind(("127.0.0.1", utils.get_free_tcp_port()))
    assert not utils.is_notebook()
    assert utils.STR_TO_DTYPE["bf16"] is torch.bfloat16
    assert utils.get_device("cpu").name == "cpu"


def test_modules_are_replaced_by_class_and_in_the_optimizer() -> None:
    """Wherever they are; a module that is used twice is replaced by one; the optimizer trains the new parameters."""
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(nn.Linear(2, 2), nn.ReLU()), shared)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replaced = replace_module_classes(model, {nn.Linear: lambda old, number: nn.Bilinear(2, 2, 2)}, optimizer)
    assert len(replaced) == 2
    assert model[0] is model[2]
    assert count_module_instances(model, nn.Linear) == 0
    assert count_module_instances(model, (nn.Bilinear, nn.ReLU)) == 3
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}


def test_replacements_are_replaced_again_where_that_is_asked_for() -> None:
    """The example of Composer's documentation: convolutions become linear layers, and those become larger ones."""
    module = nn.Sequential(nn.Conv2d(1, 32, 3, 1), nn.ReLU(), nn.Linear(5408, 128))
    policies = {
        nn.Conv2d: lambda old, number: nn.Linear(16, 32),
        nn.Linear: lambda old, number: nn.Linear(32, 64) if old.in_features == 16 else None,
    }
    replaced = replace_module_classes(module, policies, recurse_on_replacements=True)
    assert len(replaced) == 2
    assert module[0].in_features == 32
    assert module[2].in_features == 5408


def test_new_parameters_need_one_group() -> None:
    """Those of two groups cannot be replaced by one: said before anything is changed."""
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([{"params": one.parameters()}, {"params": other.parameters()}], lr=0.1)
    with pytest.raises(ConfigError, match="in 2 of the optimizer's 2 groups"):
        update_params_in_optimizer([*one.parameters(), *other.parameters()], nn.Linear(1, 1).parameters(), optimizer)
    new = nn.Linear(1, 1)
    update_params_in_optimizer(one.parameters(), new.parameters(), optimizer)
    assert optimizer.param_groups[0]["params"] == list(new.parameters())


def test_losses_take_class_numbers_and_probabilities() -> None:
    """Both give the same loss; a class number below 0 is no class."""
    logits, numbers = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    one_hot = F.one_hot(numbers, 3).float()
    for loss in loss_registry.values():
        assert torch.allclose(loss(logits, numbers), loss(logits, one_hot))
    assert binary_cross_entropy_with_logits(logits, numbers, scale_by_batch_size=False).shape == ()
    assert (infer_target_type(logits, numbers), infer_target_type(logits, one_hot)) == ("indices", "one_hot")
    assert check_for_index_targets(numbers)
    assert not check_for_index_targets(one_hot)
    assert ensure_targets_one_hot(logits, torch.tensor([0, -1, 1, 1]))[1].sum() == 0
    with pytest.raises(ConfigError, match=r"targets of shape \(2,\) do not fit logits of shape \(4, 3\)"):
        infer_target_type(logits, numbers[:2])


def test_metrics_of_language_models_count_tokens() -> None:
    """Over batches of several lengths, without those that are ignored."""
    cross_entropy, perplexity, accuracy = LanguageCrossEntropy(), LanguagePerplexity(), MaskedAccuracy()
    logits, targets = [torch.randn(2, n, 5) for n in (3, 4)], [torch.randint(5, (2, n)) for n in (3, 4)]
    targets[0][0, 0] = -100
    for one, target in zip(logits, targets, strict=True):
        cross_entropy.update({"logits": one}, target)
        perplexity.update(one, target)
        accuracy.update(one, target)
    flat, true = torch.cat([one.reshape(-1, 5) for one in logits]), torch.cat([t.reshape(-1) for t in targets])
    assert torch.allclose(cross_entropy.compute(), F.cross_entropy(flat, true))
    assert torch.allclose(perplexity.compute(), F.cross_entropy(flat, true).exp())
    kept = true != -100
    assert torch.allclose(accuracy.compute(), (flat.argmax(-1) == true)[kept].float().mean())


def test_metrics_of_classification_and_segmentation() -> None:
    """By hand: two of three right, one false alarm, one miss."""
    f1 = BinaryF1Score()
    f1.update(torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]), torch.tensor([1, 0, 1, 0]))
    assert f1.compute() == 0.5
    mean_loss = LossMetric(F.mse_loss)
    mean_loss.update(torch.zeros(2), torch.ones(2))
    mean_loss.update(torch.zeros(2), torch.zeros(2))
    assert mean_loss.compute() == 0.5
    assert CrossEntropy(dist_sync_on_step=False).ignore_index == -100
    preds = F.one_hot(torch.tensor([[0, 1, 1, 1]]), 2).movedim(-1, 1).float()
    target = torch.tensor([[0, 0, 1, -1]])
    iou = MIoU(2)
    iou.update(preds, target)
    assert iou.compute() == 50  # 1 of 2 pixels of each class
    dice = Dice(2)
    dice.update(preds, torch.tensor([[0, 0, 1, 1]]))
    assert torch.allclose(dice.compute(), torch.tensor(80.0, dtype=torch.float64))
