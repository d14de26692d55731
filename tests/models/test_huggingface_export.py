"""Folders of Hugging Face from checkpoints, and models from both, without the script that trained them."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import transformers
from forked import run_forked
from models import hf_ranks
from models.hf_parts import causal_model, logits, lora, tokenizer, train, trainer_of

from composerlite.checkpoint import read_checkpoint
from composerlite.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    IncompatibleCheckpointError,
    UntrustedCheckpointError,
)
from composerlite.models import HuggingFaceModel, write_huggingface_pretrained_from_composer_checkpoint
from composerlite.testing import run_ranks

pytestmark = pytest.mark.filterwarnings(
    # peft asks transformers in a way that this calls old
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
LAST = "ep2-ba12-rank0.pt"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, HuggingFaceModel]:
    """The checkpoint of a run, and its model."""
    folder = tmp_path_factory.mktemp("run")
    model = HuggingFaceModel(causal_model("gpt2"), tokenizer())
    train(model, folder)
    return folder / LAST, model


@pytest.mark.parametrize(
    ("kind", "ending"),
    [("gpt2", ".pt"), ("gpt2", ".pt.gz"), ("gpt2", ".tar.gz"), ("llama", ".pt"), ("tied-llama", ".pt")],
)
def test_export_loads_back_bit_for_bit(kind: str, ending: str, tmp_path: Path) -> None:
    """AutoModel and AutoTokenizer load the folder of an export; the logits are those of the trained model."""
    model = HuggingFaceModel(causal_model(kind), tokenizer())
    train(model, tmp_path / "run", save_filename=f"ep{{epoch}}-ba{{batch}}-rank{{rank}}{ending}")
    checkpoint = tmp_path / "run" / f"ep2-ba12-rank0{ending}"
    write_huggingface_pretrained_from_composer_checkpoint(checkpoint, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model.model))
    assert not torch.equal(logits(loaded), logits(causal_model(kind)))
    assert loaded.generation_config.eos_token_id == model.model.generation_config.eos_token_id
    texts = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert texts("hello world")["input_ids"] == tokenizer()("hello world")["input_ids"]
    assert texts.chat_template == tokenizer().chat_template

    again, words = HuggingFaceModel.hf_from_composer_checkpoint(checkpoint)
    assert type(again) is type(model.model)
    assert not again.training
    assert torch.equal(logits(again), logits(model.model))
    assert words.get_vocab() == tokenizer().get_vocab()


def export_without_transformers(checkpoint: str) -> None:
    """Export as a program does where transformers cannot be imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        del sys.modules[name]
    sys.modules["transformers"] = None  # type: ignore[assignment]
    write_huggingface_pretrained_from_composer_checkpoint(checkpoint, "out")


def test_export_needs_no_transformers(run: tuple[Path, HuggingFaceModel], tmp_path: Path) -> None:
    """A machine that only exports has torch and safetensors; the tied weight is in the file once."""
    done = run_forked(export_without_transformers, str(run[0]), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*names, "chat_template.jinja"}
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert file.metadata() == {"format": "pt"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["GPT2LMHeadModel"], "float32")


def test_export_in_another_type_and_in_several_files(run: tuple[Path, HuggingFaceModel], tmp_path: Path) -> None:
    """bfloat16 is what transformers loads then; an index says in which file a weight is, and none is too large."""
    checkpoint, model = run
    write_huggingface_pretrained_from_composer_checkpoint(
        checkpoint, tmp_path / "out", dtype="bfloat16", largest_file_bytes=20_000
    )
    weights = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(weights) > 1
    assert all(path.stat().st_size < 22_000 for path in weights)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype is torch.bfloat16
    assert all(map(torch.equal, loaded.parameters(), copy.deepcopy(model.model).bfloat16().parameters()))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in loaded.parameters())

    with pytest.raises(CheckpointExistsError, match="not empty"):
        write_huggingface_pretrained_from_composer_checkpoint(checkpoint, tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("mine")
    write_huggingface_pretrained_from_composer_checkpoint(checkpoint, tmp_path / "out", overwrite=True)
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model.model))
    assert not list((tmp_path / "out").glob("model-*")), "files of the export before would be loaded by some"
    assert (tmp_path / "out" / "README.md").read_text() == "mine"
    for dtype in ("int8", "bfloat17"):
        with pytest.raises(ConfigError, match=dtype):
            write_huggingface_pretrained_from_composer_checkpoint(checkpoint, tmp_path / "no", dtype=dtype)


def test_the_class_may_be_another(run: tuple[Path, HuggingFaceModel]) -> None:
    """A class, an auto class or the name of one: the weights that it has are those of the checkpoint."""
    checkpoint, model = run
    for wanted in (transformers.AutoModel, "transformers.GPT2Model", transformers.GPT2Model):
        body, _ = HuggingFaceModel.hf_from_composer_checkpoint(checkpoint, wanted)
        assert type(body) is transformers.GPT2Model
        assert torch.equal(body.wte.weight, model.model.transformer.wte.weight)
    classifier, _ = HuggingFaceModel.hf_from_composer_checkpoint(
        checkpoint, transformers.AutoModelForSequenceClassification, {"num_labels": 5}
    )
    assert classifier.score.weight.shape[0] == 5
    assert torch.equal(classifier.transformer.wte.weight, model.model.transformer.wte.weight)
    with pytest.raises(ConfigError, match="no_such"):
        HuggingFaceModel.hf_from_composer_checkpoint(checkpoint, "no_such.Class")


def test_exports_from_a_bucket(s3_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A URI is as good as a path, a link to the newest as well as its name."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    uri = f"s3://{s3_server.new_bucket()}/run"
    model = HuggingFaceModel(causal_model(), tokenizer())
    train(model, uri, save_staging_folder=str(tmp_path / "staging"))
    write_huggingface_pretrained_from_composer_checkpoint(f"{uri}/latest-rank0.pt", tmp_path / "out")
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model.model))
    loaded, _ = HuggingFaceModel.hf_from_composer_checkpoint(f"{uri}/{LAST}")
    assert torch.equal(logits(loaded), logits(model.model))


def test_what_no_such_model_saved_is_refused(tmp_path: Path) -> None:
    """A checkpoint of another model has no config; a folder of several is none; a file that is not there is said."""
    torch.save({"state": {"model": {"weight": torch.zeros(2)}, "integrations": {}}}, tmp_path / "other.pt")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "bare.pt")
    for name in ("other.pt", "bare.pt"):
        with pytest.raises(IncompatibleCheckpointError, match="was not saved by a HuggingFaceModel"):
            write_huggingface_pretrained_from_composer_checkpoint(tmp_path / name, tmp_path / "out")
    with pytest.raises(ConfigError, match="a folder of checkpoints: give one"):
        HuggingFaceModel.hf_from_composer_checkpoint(tmp_path)
    with pytest.raises(CheckpointNotFoundError):
        HuggingFaceModel.hf_from_composer_checkpoint(tmp_path / "none.pt")
    assert not (tmp_path / "out").exists()


def changed(checkpoint: Path, target: Path, change: Callable[[Any], None]) -> Path:
    """A copy of ``checkpoint`` with other integrations."""
    contents = read_checkpoint(checkpoint)
    kept = copy.deepcopy(contents["state"]["integrations"]["huggingface"])
    change(kept)
    contents["state"]["integrations"] = {"huggingface": kept}
    torch.save(contents, target)
    return target


@pytest.mark.parametrize(
    "name",
    [
        "../evil.json",
        "/tmp/evil.json",
        "additional_chat_templates/../../evil.json",
        "a/b.json",
        "..",
        "config.json",
        "model.safetensors",
        "a\\b.json",
        "x.pkl",
        "",
    ],
)
def test_files_of_a_tokenizer_cannot_leave_the_folder(
    name: str, run: tuple[Path, HuggingFaceModel], tmp_path: Path
) -> None:
    """A name that leads elsewhere, or that the model's own files have, is refused before anything is written."""
    checkpoint = changed(
        run[0],
        tmp_path / "hostile.pt",
        lambda kept: kept["tokenizer"].update({name: {"file_extension": "", "content": {"a": 1}}}),
    )
    with pytest.raises(UntrustedCheckpointError, match="Nothing was written"):
        write_huggingface_pretrained_from_composer_checkpoint(checkpoint, tmp_path / "out")
    with pytest.raises(UntrustedCheckpointError):
        HuggingFaceModel.hf_from_composer_checkpoint(checkpoint)
    assert {path.name for path in tmp_path.iterdir()} == {"hostile.pt"}


@pytest.mark.parametrize("name", ["os.system", "transformers.pipeline", "subprocess.Popen", "transformers.utils.os"])
def test_only_models_of_transformers_are_looked_up(
    name: str, run: tuple[Path, HuggingFaceModel], tmp_path: Path
) -> None:
    """A class in a checkpoint is a name in a list; what is not on it is asked of the user."""

    def change(kept: Any) -> None:
        kept["model"]["config"]["class"] = name
        kept["model"]["config"]["content"]["architectures"] = [name, name.rpartition(".")[2]]

    checkpoint = changed(run[0], tmp_path / "hostile.pt", change)
    with pytest.raises(IncompatibleCheckpointError, match="Pass the class as model_instantiation_class"):
        HuggingFaceModel.hf_from_composer_checkpoint(checkpoint)
    loaded, _ = HuggingFaceModel.hf_from_composer_checkpoint(checkpoint, transformers.GPT2LMHeadModel)
    assert torch.equal(logits(loaded), logits(run[1].model))


def test_programs_in_a_checkpoint_are_not_run(
    run: tuple[Path, HuggingFaceModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Python in a tokenizer's files is not written, and configs that refer to some load the classes of transformers."""
    flag = tmp_path / "executed"
    program = f"open({str(flag)!r}, 'w')"

    def change(kept: Any) -> None:
        kept["tokenizer"]["evil.py"] = {"file_extension": ".py", "content": program}
        kept["tokenizer"]["tokenizer_config.json"]["content"]["auto_map"] = {"AutoTokenizer": ["evil.T", "evil.T"]}
        kept["model"]["config"]["content"]["auto_map"] = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}

    checkpoint = changed(run[0], tmp_path / "hostile.pt", change)
    HuggingFaceModel.hf_from_composer_checkpoint(checkpoint)
    write_huggingface_pretrained_from_composer_checkpoint(checkpoint, tmp_path / "out")
    assert "skipped the tokenizer program evil.py" in caplog.text
    assert not flag.exists()
    assert not list((tmp_path / "out").glob("*.py"))


def test_a_tokenizer_with_several_templates(tmp_path: Path) -> None:
    """They are files of a folder of their own, which is the only one that a name may have."""
    words = copy.deepcopy(tokenizer())
    words.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    train(HuggingFaceModel(causal_model(), words), tmp_path / "run", max_duration=1)
    checkpoint = tmp_path / "run" / "latest-rank0.pt"
    write_huggingface_pretrained_from_composer_checkpoint(checkpoint, tmp_path / "out")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == words.chat_template
    _, again = HuggingFaceModel.hf_from_composer_checkpoint(checkpoint)
    assert again.chat_template == words.chat_template


def test_composers_checkpoints_are_exported(run: tuple[Path, HuggingFaceModel], tmp_path: Path) -> None:
    """In their oldest form: names of files without endings, and nothing that only we keep."""

    def change(kept: Any) -> None:
        kept["tokenizer"] = {Path(name).stem: entry for name, entry in kept["tokenizer"].items()}
        kept["model"] = {"config": kept["model"]["config"]}

    checkpoint = changed(run[0], tmp_path / "composer.pt", change)
    write_huggingface_pretrained_from_composer_checkpoint(checkpoint, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(run[1].model))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer().chat_template
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118


def test_a_sharded_run_resumes_and_is_exported(tmp_path: Path) -> None:
    """With FSDP on two ranks: a run that ended early goes on to the weights of one that did not, and its directory is
    exported as a file is, a tied weight once."""
    whole, other = run_ranks(hf_ranks.train_sharded, 2, tmp_path / "whole", "gpt2", False)
    assert whole.keys() == other.keys()
    run_ranks(hf_ranks.train_sharded, 2, tmp_path / "run", "gpt2", False, "4ba")
    resumed, _ = run_ranks(hf_ranks.train_sharded, 2, tmp_path / "run", "gpt2", False)
    assert all((resumed[name] == whole[name]).all() for name in whole)
    write_huggingface_pretrained_from_composer_checkpoint(tmp_path / "run" / "latest", tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    twin = causal_model("gpt2")
    twin.load_state_dict({name.removeprefix("model."): torch.from_numpy(value) for name, value in whole.items()})
    assert torch.equal(logits(loaded), logits(twin))
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    again, words = HuggingFaceModel.hf_from_composer_checkpoint(tmp_path / "run" / "latest")
    assert torch.equal(logits(again), logits(twin))
    assert words.get_vocab() == tokenizer().get_vocab()


def test_sharded_adapters_are_saved_alone_and_exported(tmp_path: Path) -> None:
    """With FSDP the directory has the adapters' weights; one process goes on with them, and PEFT loads the export."""
    weights, _ = run_ranks(hf_ranks.train_sharded, 2, tmp_path / "run", "llama", True)
    assert len(weights) == 8
    loaded, _ = HuggingFaceModel.hf_from_composer_checkpoint(tmp_path / "run" / "latest", base_model=causal_model())
    model = HuggingFaceModel(causal_model(), tokenizer(), peft_config=lora())
    with trainer_of(model, None, load_path=str(tmp_path / "run" / "latest")):
        assert all((model.state_dict()[name].numpy() == value).all() for name, value in weights.items())
        assert torch.equal(logits(loaded), logits(model.model))


def test_a_model_over_ranks_does_not_generate() -> None:
    """The error says what does."""
    told, _ = run_ranks(hf_ranks.generated, 2)
    assert "hf_from_composer_checkpoint" in told
