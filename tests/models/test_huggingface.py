"""HuggingFaceModel in training, and what its checkpoints keep beside the weights."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models.hf_parts import VOCABULARY, Tokens, causal_model, logits, same, tokenizer, train, trainer_of
from torch.utils.data import DataLoader

from composerlite import Evaluator
from composerlite.checkpoint import read_checkpoint
from composerlite.errors import ConfigError, IncompatibleCheckpointError, TrainingError
from composerlite.models import HuggingFaceModel


def batch(rows: int = 3) -> dict[str, torch.Tensor]:
    """One batch as a loader gives it."""
    return next(iter(DataLoader(Tokens(), batch_size=rows)))


def test_importing_models_imports_no_transformers() -> None:
    """Who has no model of transformers does not wait for it, nor for metrics, and need not have it."""
    code = (
        "import sys, composerlite, composerlite.algorithms, composerlite.models, composerlite.optim; "
        "from composerlite.models import HuggingFaceModel; "
        "sys.modules['transformers'] = None\n"
        "try: HuggingFaceModel(None)\n"
        "except composerlite.errors.ConfigError as e: print(e)\n"
        "print([m for m in ('peft', 'tokenizers', 'safetensors', 'torchmetrics') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'composerlite[huggingface]'" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_loss_is_that_of_the_model_and_falls(tmp_path: Path) -> None:
    """The loss is what transformers computes from the labels; training makes it smaller; what the model does not take
    in a batch is left out."""
    model = HuggingFaceModel(causal_model(), tokenizer())
    one = batch()
    assert torch.equal(model.loss(model(one), one), model.model(input_ids=one["input_ids"], labels=one["labels"]).loss)
    before = model.loss(model(one), one).item()
    train(model, None)
    assert model.loss(model(one), one).item() < 0.9 * before


def test_what_is_no_batch_of_the_model_is_said() -> None:
    """A pair of tensors, and a batch without labels, are errors that say what is wanted."""
    model = HuggingFaceModel(causal_model(), tokenizer())
    with pytest.raises(TrainingError, match="a batch is a list: expected a mapping"):
        model([torch.zeros(1), torch.zeros(1)])
    no_labels = {"input_ids": batch()["input_ids"]}
    with pytest.raises(TrainingError, match=r"the batch has input_ids\. Add 'labels'"):
        model.loss(model(no_labels), no_labels)


def test_metrics_get_logits_and_the_next_token() -> None:
    """The perplexity of evaluation is the exponential of the loss, over batches of any size; metrics are fresh."""
    from torchmetrics.text import Perplexity

    model = HuggingFaceModel(causal_model(), tokenizer(), use_logits=True, metrics=[Perplexity(ignore_index=-100)])
    (perplexity,) = model.get_metrics(is_train=False).values()
    assert perplexity is not next(iter(model.get_metrics(is_train=False).values()))
    one = batch()
    labels = one["labels"].clone()
    with torch.no_grad():
        outputs = model.eval_forward(one)
        model.update_metric(one, outputs, perplexity)
        loss = model.loss(model(one), one)
        assert torch.equal(model.eval_forward(one, model(one)), outputs)
    assert torch.equal(one["labels"], labels)  # shifting them is nobody's business but the metric's
    torch.testing.assert_close(perplexity.compute(), loss.exp())
    assert list(model.get_metrics(is_train=True)) == ["Perplexity"]
    trainer = trainer_of(model, None, eval_dataloader=DataLoader(Tokens(), batch_size=5))
    trainer.eval()
    assert trainer.state.eval_metric_values["Perplexity"] > 1
    trainer.close()


def test_evaluation_has_a_loss_without_a_metric() -> None:
    """The model's own, of the labels; the mean over samples. With logits alone there is none, and asking says so."""
    model = HuggingFaceModel(causal_model(), tokenizer())
    with trainer_of(model, None, eval_dataloader=DataLoader(Tokens(7), batch_size=5)) as trainer:
        trainer.eval()
        value = trainer.state.eval_metric_values["loss"]
    with torch.no_grad():
        each = [model.loss(model(one), one).item() for one in DataLoader(Tokens(7), batch_size=1)]
    assert value == pytest.approx(sum(each) / 7, rel=1e-5)
    asked = Evaluator(label="asked", dataloader=DataLoader(Tokens(7), batch_size=5), metric_names=["loss"])
    logits = HuggingFaceModel(causal_model(), tokenizer(), use_logits=True)
    with trainer_of(logits, None, eval_dataloader=DataLoader(Tokens(7), batch_size=5)) as trainer:
        trainer.eval()
        assert "loss" not in trainer.state.eval_metric_values
        with pytest.raises(TrainingError, match="use_logits=True: eval_forward returns logits"):
            trainer.eval(asked)


def test_metrics_are_named_and_labels_of_classes_stay() -> None:
    """A classifier's labels are not shifted, its metrics have the names they were given, and a regression with one
    output loses that dimension."""
    from torchmetrics import MeanSquaredError
    from torchmetrics.classification import MulticlassAccuracy

    config = causal_model().config
    config.num_labels, config.pad_token_id = 3, 1
    model = HuggingFaceModel(
        transformers.LlamaForSequenceClassification(config),
        use_logits=True,
        metrics={"right": MulticlassAccuracy(3, average="micro")},
        eval_metrics=MeanSquaredError(),
    )
    assert not model.shift_labels
    one = {"input_ids": batch()["input_ids"], "labels": torch.tensor([0, 1, 2])}
    (name, metric), *_ = model.get_metrics(is_train=True).items()
    outputs = model.eval_forward(one)
    model.update_metric(one, outputs, metric)
    assert name == "right"
    assert metric.compute() == (outputs.argmax(1) == one["labels"]).float().mean()
    assert list(model.get_metrics(is_train=False)) == ["MeanSquaredError"]
    config.num_labels = 1
    one_output = HuggingFaceModel(transformers.LlamaForSequenceClassification(config), use_logits=True)
    assert one_output.eval_forward(one).shape == (3,)


def test_a_tokenizer_that_is_too_large_is_an_error_or_enlarges_the_embedding() -> None:
    """Before training, with both numbers; with allow_embedding_resizing the embedding gets rows."""
    few = causal_model(vocabulary=50)
    with pytest.raises(ConfigError, match=f"has {len(tokenizer())} tokens and the model's embedding 50 rows"):
        HuggingFaceModel(few, tokenizer())
    model = HuggingFaceModel(few, tokenizer(), allow_embedding_resizing=True)
    assert model.model.get_input_embeddings().weight.shape[0] == len(tokenizer())
    assert model.model.get_output_embeddings().weight.shape[0] == len(tokenizer())
    HuggingFaceModel(causal_model(vocabulary=500), tokenizer())  # rows for padding are fine


def test_generate_goes_on_with_the_input() -> None:
    """The tokens of the input, and those that the model adds."""
    model = HuggingFaceModel(causal_model(), tokenizer())
    ids = batch()["input_ids"]
    out = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(out[:, : ids.shape[1]], ids)
    assert out.shape[1] <= ids.shape[1] + 3


def test_checkpoints_keep_config_and_tokenizer(tmp_path: Path) -> None:
    """In the shape that Composer's have, also in a checkpoint of weights alone; plain torch opens both."""
    model = HuggingFaceModel(causal_model("gpt2"), tokenizer())
    train(model, tmp_path / "all")
    train(model, tmp_path / "weights", save_weights_only=True, max_duration=1)
    for file in (tmp_path / "all" / "latest-rank0.pt", tmp_path / "weights" / "latest-rank0.pt"):
        kept = torch.load(file, weights_only=True)["state"]["integrations"]["huggingface"]
        config = kept["model"]["config"]
        assert config["content"] == {**config["content"], "model_type": "gpt2", "n_embd": 32, "vocab_size": VOCABULARY}
        assert config["class"] == "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel"
        assert config["file_extension"] == ".json"
        assert set(kept["tokenizer"]) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
        assert kept["tokenizer"]["tokenizer.json"]["content"]["model"]["type"] == "BPE"
        assert kept["tokenizer"]["tokenizer.json"]["file_extension"] == ".json"
        assert kept["tokenizer"]["chat_template.jinja"]["content"] == tokenizer().chat_template


def test_a_resume_with_another_config_is_said_and_goes_on(tmp_path: Path, caplog: Any) -> None:
    """What differs is in the log, with both values; what does not fit in shape is an error as ever."""
    train(HuggingFaceModel(causal_model(), tokenizer()), tmp_path, max_duration=1)
    other = causal_model()
    other.config.rms_norm_eps = 1e-3
    words = tokenizer().__class__(tokenizer_object=tokenizer().backend_tokenizer, pad_token="<s>")
    with caplog.at_level(logging.WARNING), trainer_of(HuggingFaceModel(other, words), tmp_path, autoresume=True) as run:
        assert run.state.timestamp.batch == 6
    assert "rms_norm_eps: 1e-06 in the checkpoint, 0.001 now" in caplog.text
    assert "the tokenizer has changed" in caplog.text
    caplog.clear()
    with trainer_of(HuggingFaceModel(causal_model(), tokenizer()), tmp_path, autoresume=True):
        assert "has changed" not in caplog.text
    with pytest.raises(IncompatibleCheckpointError, match="of another shape"):
        trainer_of(HuggingFaceModel(causal_model(width=64)), None, load_path=str(tmp_path / "latest-rank0.pt"))


def test_a_large_vocabulary_is_kept_as_text(tmp_path: Path) -> None:
    """A file of a tokenizer with very many small parts is one text in the checkpoint, and is written as it was."""
    from composerlite.models.hf_record import LARGEST_PARSED_BYTES, tokenizer_record

    class Words:
        """Writes what a tokenizer with many words does."""

        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "tokenizer.json").write_text('{"a": "' + "x" * LARGEST_PARSED_BYTES + '"}')
            (Path(folder) / "vocab.txt").write_text("one\ntwo")
            (Path(folder) / "spiece.model").write_bytes(b"\xff\x00")

    record = tokenizer_record(Words())
    assert record["tokenizer.json"]["content"] == '{"a": "' + "x" * LARGEST_PARSED_BYTES + '"}'
    assert record["vocab.txt"]["content"] == ["one", "two"]
    assert record["spiece.model"]["content"] == b"\xff\x00"
    torch.save(record, tmp_path / "record.pt")
    assert torch.load(tmp_path / "record.pt", weights_only=True) == record


def test_a_strict_load_takes_what_was_saved(tmp_path: Path) -> None:
    """Weights go from one run's checkpoint to another's model."""
    first = HuggingFaceModel(causal_model("gpt2"))
    train(first, tmp_path, max_duration=1)
    second = HuggingFaceModel(causal_model("gpt2", seed=8))
    with trainer_of(second, None, load_path=str(tmp_path / "latest-rank0.pt"), load_weights_only=True):
        assert same(first.state_dict().values(), second.state_dict().values())
        assert torch.equal(logits(first.model), logits(second.model))
    assert read_checkpoint(tmp_path / "latest-rank0.pt")["state"]["model"].keys() == first.state_dict().keys()
