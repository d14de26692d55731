"""Small helpers that scripts of Composer import from ``utils``."""

from __future__ import annotations

import contextlib
import importlib
import platform
import socket
import string
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TextIO, cast

import torch
from torch import nn

from composerlite import dist
from composerlite._version import VERSION
from composerlite.errors import ConfigError

__all__ = [
    "STR_TO_DTYPE",
    "MissingConditionalImportError",
    "StringEnum",
    "convert_flat_dict_to_nested_dict",
    "convert_nested_dict_to_flat_dict",
    "create_symlink_file",
    "ensure_folder_is_empty",
    "ensure_tuple",
    "extract_hparams",
    "get_composer_env_dict",
    "get_free_tcp_port",
    "import_object",
    "is_model_fsdp",
    "is_notebook",
    "map_collection",
    "model_eval_mode",
    "partial_format",
    "print_env",
]

STR_TO_DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Types of numbers by the names that configurations have for them."""


# ── collections ──────────────────────────────────────────────────────────────────────────────────────────────────────
def ensure_tuple(x: Any) -> tuple[Any, ...]:
    """Return ``x`` as a tuple: ``()`` of ``None``, the values of a dict, the items of an iterable; else ``(x,)``."""
    if x is None:
        return ()
    if isinstance(x, Mapping):
        return tuple(cast("Mapping[Any, Any]", x).values())
    alone = isinstance(x, str | bytes | bytearray | torch.Tensor) or not isinstance(x, Iterable)
    return (x,) if alone else tuple(cast("Iterable[Any]", x))


def map_collection(collection: Any, map_fn: Callable[[Any], Any]) -> Any:
    """Return ``collection``, a list, tuple, dict, ``None`` or one single thing, with ``map_fn`` of each item.

    Args:
        collection: a list, tuple, dict, ``None`` or a single item.
        map_fn: function of an item.

    Returns:
        The same kind of collection.
    """
    if collection is None:
        return None
    if isinstance(collection, tuple | list):
        items = cast("Iterable[Any]", collection)
        return type(collection)(map_fn(item) for item in items)  # pyright: ignore[reportUnknownVariableType]
    if isinstance(collection, dict):
        return {key: map_fn(value) for key, value in cast("dict[Any, Any]", collection).items()}
    return map_fn(collection)


def convert_nested_dict_to_flat_dict(nested_dict: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of dicts within dicts by their path, as in ``'optimizer/lr'``.

    Args:
        nested_dict: nested dicts.
        prefix: put before every key.

    Returns:
        Values by their path.
    """
    flat: dict[str, Any] = {}
    for key, value in nested_dict.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat.update(convert_nested_dict_to_flat_dict(cast("dict[str, Any]", value), f"{name}/"))
        else:
            flat[name] = value
    return flat


def convert_flat_dict_to_nested_dict(flat_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by paths such as ``'optimizer/lr'`` as dicts within dicts."""
    nested: dict[str, Any] = {}
    for path, value in flat_dict.items():
        *folders, name = path.split("/")
        inner = nested
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = value
    return nested


def extract_hparams(locals_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``locals()`` of a constructor into plain values that can be logged.

    An object becomes the name of its class, or its ``local_hparams`` if it has any.
    """

    def told(value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return value.value if isinstance(value, Enum) else type(value).__name__

    def one(value: Any) -> Any:
        if hasattr(value, "local_hparams"):
            return {type(value).__name__: value.local_hparams}
        if isinstance(value, tuple | list):
            return [told(item) for item in cast("Iterable[Any]", value)]
        return map_collection(value, told) if isinstance(value, dict) else told(value)

    left_out = {"self"}
    return {
        name: one(value)
        for name, value in locals_dict.items()
        if name not in left_out and not name.startswith("_") and type(value) is not type
    }


# ── names and text ───────────────────────────────────────────────────────────────────────────────────────────────────
class StringEnum(Enum):
    """Choices by name. ``Kind('value')`` takes the value or the name, in any case, and so does a comparison."""

    __hash__ = Enum.__hash__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return other.lower() in (str(self.value).lower(), self.name.lower())
        return self is other

    @classmethod
    def _missing_(cls, value: object) -> StringEnum:
        for choice in cls:
            if isinstance(value, str) and choice == value:
                return choice
        known = ", ".join(choice.value for choice in cls)
        raise ValueError(f"{cls.__name__}: {value!r} does not exist. Known: {known}.")


def partial_format(s: str, *args: object, **kwargs: object) -> str:
    """Return ``s`` with the given fields filled in; the others are left as they are.

    Args:
        s: a format string.
        *args: values of positional fields.
        **kwargs: values of named fields.

    Returns:
        The string.
    """
    positional = iter(args)
    text = ""
    for literal, field, form, conversion in string.Formatter().parse(s):
        text += literal
        if field is None:
            continue
        whole = "{" + field + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "") + "}"
        if field == "":
            value = next(positional, None)
            text += whole if value is None else whole.format(value)
        else:
            known = field in kwargs or (field.isdigit() and int(field) < len(args))
            text += whole.format(*args, **kwargs) if known else whole
    return text


def import_object(name: str) -> Any:
    """Return the object that ``'path.to.module:name'`` names."""
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(f"import_object({name!r}): expected a module and a name, such as 'path.to.module:name'.")
    return getattr(importlib.import_module(module), attribute)


class MissingConditionalImportError(ImportError):
    """An optional library is not installed. The message says which extra has it.

    Args:
        extra_deps_group: extra of composerlite that has the library.
        conda_package: name of the library.
        conda_channel: ignored; Composer has it.
    """

    def __init__(self, extra_deps_group: str, conda_package: str, conda_channel: str | None = "conda-forge") -> None:
        super().__init__(f"{conda_package} is not installed: pip install 'composerlite[{extra_deps_group}]'.")


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@contextlib.contextmanager
def model_eval_mode(model: nn.Module) -> Generator[None]:
    """Switch ``model`` to evaluation mode within the block, and restore its modes after it."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def is_model_fsdp(model: nn.Module) -> bool:
    """Return true if parameters of ``model`` are sharded over ranks."""
    return any(map(dist.is_distributed_tensor, model.parameters()))


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────
def ensure_folder_is_empty(folder_name: str | Path) -> None:
    """Raise ``FileExistsError`` if there are files in ``folder_name`` or below it."""
    found = next((path for path in Path(folder_name).rglob("*") if path.is_file()), None)
    if found is not None:
        raise FileExistsError(f"{folder_name} is not empty: there is {found}. Name another folder, or empty it.")


def create_symlink_file(existing_path: str, destination_filename: str | Path) -> None:
    """Write a text file that stands for a link to ``existing_path``: :func:`get_file` follows it, in buckets too.

    Args:
        existing_path: name that the file refers to.
        destination_filename: path of the file, which ends with ``.symlink``.
    """
    path = Path(destination_filename)
    if path.suffix != ".symlink":
        raise ConfigError(f"destination_filename={str(path)!r}: expected a name that ends with .symlink.")
    with path.open("x") as file:
        file.write(existing_path)


# ── this machine ─────────────────────────────────────────────────────────────────────────────────────────────────────
def get_free_tcp_port() -> int:
    """Return a port of this machine that nobody listens on. Another process may take it before you do."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def is_notebook() -> bool:
    """Return true if this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and type(shell).__name__ != "TerminalInteractiveShell"


def get_composer_env_dict() -> dict[str, Any]:
    """Return the versions and the machine that a run depends on."""
    return {
        "composerlite_version": VERSION,
        "torch_version": str(torch.__version__),
        "python_version": platform.python_version(),
        "platform": platform.platform(),
        "node_world_size": dist.get_world_size() // max(1, dist.get_local_world_size()),
        "local_world_size": dist.get_local_world_size(),
        "accelerator_model_name": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "cuda_device_count": torch.cuda.device_count(),
    }


def print_env(file: TextIO | None = None) -> None:
    """Print the versions and the machine, as a report of a bug needs them."""
    for name, value in get_composer_env_dict().items():
        print(f"{name}: {value}", file=file)
