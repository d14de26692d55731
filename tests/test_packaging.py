"""What a user gets from the package: names that resolve, imports that stay light, and no trace of our machines."""

from __future__ import annotations

import importlib.metadata
import pkgutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

import composerlite

ROOT = Path(__file__).parent.parent

PUBLIC = {
    "composerlite": """Trainer State Engine Event Time Timestamp TimeUnit Algorithm Callback DataSpec Evaluator Logger
        ComposerModel __version__""",
    "composerlite.core": """State Engine Event Time Timestamp TimeUnit Algorithm Callback DataSpec Evaluator Logger
        AlgorithmPass Trace Precision Serializable ensure_time ensure_data_spec ensure_evaluator Batch JSON""",
    "composerlite.trainer": "Trainer",
    "composerlite.callbacks": """CheckpointSaver LoadCheckpoint EarlyStopper SpeedMonitor LRMonitor MemoryMonitor
        NaNMonitor OptimizerMonitor RuntimeEstimator""",
    "composerlite.loggers": """Logger LoggerDestination ProgressBarLogger ConsoleLogger FileLogger InMemoryLogger
        JSONLLogger CSVLogger TensorboardLogger WandBLogger MLFlowLogger RemoteUploaderDownloader""",
    "composerlite.models": "ComposerModel ComposerClassifier",
    "composerlite.optim": """DecoupledSGDW DecoupledAdamW ComposerScheduler StepScheduler MultiStepScheduler
        ConstantScheduler LinearScheduler ExponentialScheduler CosineAnnealingScheduler
        CosineAnnealingWarmRestartsScheduler PolynomialScheduler MultiStepWithWarmupScheduler
        ConstantWithWarmupScheduler LinearWithWarmupScheduler CosineAnnealingWithWarmupScheduler
        PolynomialWithWarmupScheduler""",
    "composerlite.algorithms": "GradientClipping EMA LabelSmoothing BlurPool SWA NoOpModel",
    "composerlite.utils": """save_checkpoint load_checkpoint get_save_filename safe_torch_load PartialFilePath
        glob_filter format_name_with_dist format_name_with_dist_and_time create_interval_scheduler dist
        reproducibility download_checkpoint get_file is_tar get_compressor is_compressed_pt KNOWN_COMPRESSORS
        parse_uri maybe_create_object_store_from_uri ObjectStore ObjectStoreTransientError S3ObjectStore GCSObjectStore
        OCIObjectStore LibcloudObjectStore SFTPObjectStore retry""",
    "composerlite.utils.object_store": """ObjectStore ObjectStoreTransientError S3ObjectStore GCSObjectStore
        OCIObjectStore LibcloudObjectStore SFTPObjectStore""",
    "composerlite.utils.checkpoint": """save_checkpoint load_checkpoint safe_torch_load download_checkpoint
        DistCPObjectStoreReader FileSystemReaderWithValidation""",
    "composerlite.checkpoint": """save_state_dict async_save_state_dict load_state_dict save_model_and_optim_state
        save_safetensors async_save_model_and_optim_state load_model_and_optim_state unshard_checkpoint load_keys
        get_checkpoint_metadata swap_param_keys prune_state_dict merge_state_dicts UnshardStrategy UnshardStrategyType
        Checkpointer CheckpointerConfig CheckpointMetadata RemoteFileSystemReader RemoteFileSystemWriter""",
}
"""The documented import paths: scripts written for Composer use them under the name of its package."""

PACKAGES = ["composerlite"] + [
    module.name for module in pkgutil.walk_packages(composerlite.__path__, "composerlite.") if module.ispkg
]


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(("path", "names"), [(path, names.split()) for path, names in PUBLIC.items()], ids=list(PUBLIC))
def test_documented_import_paths_work(path: str, names: list[str]) -> None:
    """``from <path> import <name>`` works for every documented pair."""
    module = importlib.import_module(path)
    assert [name for name in names if not hasattr(module, name)] == []


def test_checkpoint_offers_what_is_promised_and_what_users_hold() -> None:
    """Nothing that only composerlite uses is public: what is documented, and the few types that users hold with it."""
    held = """Catalog CheckpointManager FileRecord IgnoreKeys Manifest SaveReport SaveTask TrainingState
        load_checkpoint read_checkpoint rng safe_torch_load save_checkpoint unshard_zero"""
    promised = PUBLIC["composerlite.checkpoint"].split() + held.split()
    assert set(importlib.import_module("composerlite.checkpoint").__all__) == set(promised)
    assert len(promised) <= 35


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_public_is_listed(package: str) -> None:
    """``__all__`` is what can be imported: nothing is missing, nothing is there by accident, and it is sorted."""
    module = importlib.import_module(package)
    listed: list[str] = list(getattr(module, "__all__", []))
    assert [name for name in listed if not hasattr(module, name)] == []
    importable = {name for name in dir(module) if not name.startswith("_") and not _is_module(module, name)}
    assert importable == {name for name in listed if not name.startswith("_") and not _is_module(module, name)}
    assert listed == sorted(listed, key=_ruff_order)


def _is_module(module: ModuleType, name: str) -> bool:
    return isinstance(getattr(module, name), ModuleType)


def _ruff_order(name: str) -> tuple[int, str]:
    """Constants, classes, the rest: the order that ruff's RUF022 asks for."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    """The package imports names when they are used, and behaves like any other: a typo fails, ``dir`` lists."""
    assert not hasattr(composerlite, "Trianer")
    assert dir(composerlite) == composerlite.__all__


def test_the_version_is_that_of_the_installation() -> None:
    """``composerlite.__version__`` is what pip shows."""
    assert composerlite.__version__ == importlib.metadata.version("composerlite")


def test_a_checkout_that_is_not_installed_saves(tmp_path: Path) -> None:
    """A folder of the sources on ``PYTHONPATH``, as on a machine without network, is enough to save and load."""
    code = textwrap.dedent(
        f"""
        import importlib.metadata
        installed = importlib.metadata.MetadataPathFinder.find_distributions
        importlib.metadata.MetadataPathFinder.find_distributions = lambda context: (
            [] if context.name == "composerlite" else installed(context)
        )
        import torch
        from composerlite.checkpoint import load_state_dict, save_state_dict
        save_state_dict({str(tmp_path / "step")!r}, {{"weight": torch.ones(3)}})
        live = {{"weight": torch.zeros(3)}}
        load_state_dict({str(tmp_path / "step")!r}, live)
        print(live["weight"].sum())
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "tensor(3.)\n"


def test_type_checkers_find_the_types() -> None:
    """The package says that it is typed, and ships the mark."""
    assert (ROOT / "composerlite" / "py.typed").exists()


# ── weight ───────────────────────────────────────────────────────────────────────────────────────────────────────
LATER = ["click", "omegaconf", "pydantic", "rich", "sklearn", "tensorboard", "torchmetrics"]


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("composerlite", ["torch", "numpy", *LATER]),
        ("composerlite.errors", ["torch", "numpy", *LATER]),
        ("composerlite.storage", ["torch", "numpy", *LATER]),
        ("composerlite.checkpoint.place.bucket", ["torch", "numpy", *LATER]),  # and with it manifests and catalogs
        ("composerlite.checkpoint.record.history", ["torch", "numpy", *LATER]),
        ("composerlite.core.time", ["torch", "numpy", *LATER]),
        ("composerlite.cli", ["torch"]),
        ("composerlite.config", ["torch"]),
        ("composerlite.report", ["torch", "numpy", *LATER]),
        ("composerlite.trainer", ["composerlite.checkpoint", *LATER]),  # a Trainer imports that when it is made
    ],
)
def test_imports_are_light(module: str, unwanted: list[str]) -> None:
    """Importing a part does not import what only its use needs: torch, terminal, YAML and metrics libraries."""
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert module in loaded
    assert [name for name in unwanted if name in loaded] == []


# ── tidiness ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    """A clone works anywhere: no tracked file mentions the folders of the machine it was written on."""
    folders = ["/" + "work/", "/" + "root/"]
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as e:
        pytest.skip(f"not a git checkout: {e}")
    files = [ROOT / name for name in listed.split("\0") if name]
    assert files
    found = [
        f"{file.relative_to(ROOT)}: {folder}"
        for file in files
        if file.is_file()
        for folder in folders
        if folder.encode() in file.read_bytes()
    ]
    assert found == []
