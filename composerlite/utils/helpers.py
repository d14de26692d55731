"""Small helpers in Composer's ``utils``."""

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
"""Torch types by name in configurations."""


def ensure_tuple(x: Any) -> tuple[Any, ...]:
    """Return ``x`` as a tuple: ``()`` of ``None``, the values of a dict, the items of an iterable; else ``(x,)``."""
    if x is None:
        return ()
    if isinstance(x, Mapping):
        return tuple(cast("Mapping[Any, Any]", x).values())
    alone = isinstance(x, str | bytes | bytearray | torch.Tensor) or not isinstance(x, Iterable)
    return (x,) if alone else tuple(cast("Iterable[Any]", x))


def map_collection(collection: Any, map_fn: Callable[[Any], Any]) -> Any:
    """Apply ``map_fn`` to each item of ``collection``.

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
    """Return the values of nested dicts by path, such as ``'optimizer/lr'``.

    Args:
        nested_dict: nested dicts.
        prefix: prefix of every key.

    Returns:
        Values by path.
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
    """Return nested dicts for values by path, such as ``'optimizer/lr'``."""
    nested: dict[str, Any] = {}
    for path, value in flat_dict.items():
        *folders, name = path.split("/")
        inner = nested
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = value
    return nested


def extract_hparams(locals_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``locals()`` of a constructor as plain values for logs.

    Objects become the name of their class, or their ``local_hparams``.
    """

    def plain(value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return value.value if isinstance(value, Enum) else type(value).__name__

    def converted(value: Any) -> Any:
        if hasattr(value, "local_hparams"):
            return {type(value).__name__: value.local_hparams}
        if isinstance(value, tuple | list):
            return [plain(item) for item in cast("Iterable[Any]", value)]
        return map_collection(value, plain) if isinstance(value, dict) else plain(value)

    return {
        name: converted(value)
        for name, value in locals_dict.items()
        if name != "self" and not name.startswith("_") and type(value) is not type
    }


class StringEnum(Enum):
    """Enum with text values. ``Kind('value')`` and comparisons accept the value or the name, in any case."""

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
    """Return ``s`` with the given fields filled in. Other fields are kept.

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
    """Import the object at ``'path.to.module:name'``."""
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(f"import_object({name!r}): expected a module and a name, such as 'path.to.module:name'.")
    return getattr(importlib.import_module(module), attribute)


class MissingConditionalImportError(ImportError):
    """Raised if an optional library is not installed. The message names the extra to install.

    Args:
        extra_deps_group: extra of composerlite with the library.
        conda_package: name of the library.
        conda_channel: ignored.
    """

    def __init__(self, extra_deps_group: str, conda_package: str, conda_channel: str | None = "conda-forge") -> None:
        super().__init__(f"{conda_package} is not installed: pip install 'composerlite[{extra_deps_group}]'.")


@contextlib.contextmanager
def model_eval_mode(model: nn.Module) -> Generator[None]:
    """Switch ``model`` to evaluation mode inside the block, and restore the mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def is_model_fsdp(model: nn.Module) -> bool:
    """Return true if parameters of ``model`` are sharded over ranks."""
    return any(map(dist.is_distributed_tensor, model.parameters()))


def ensure_folder_is_empty(folder_name: str | Path) -> None:
    """Raise ``FileExistsError`` if there are files in ``folder_name`` or below it."""
    found = next((path for path in Path(folder_name).rglob("*") if path.is_file()), None)
    if found is not None:
        raise FileExistsError(f"{folder_name} is not empty: found {found}. Give another folder, or delete the files.")


def create_symlink_file(existing_path: str, destination_filename: str | Path) -> None:
    """Write a text file as a link to ``existing_path``. :func:`get_file` follows such links, also in buckets.

    Args:
        existing_path: target of the link.
        destination_filename: path of the file, ending with ``.symlink``.
    """
    path = Path(destination_filename)
    if path.suffix != ".symlink":
        raise ConfigError(f"destination_filename={str(path)!r}: expected a name ending with .symlink.")
    with path.open("x") as file:
        file.write(existing_path)


def get_free_tcp_port() -> int:
    """Return a free port of this machine. Another process may take the port at any time."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def is_notebook() -> bool:
    """Return true if this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and type(shell).__name__ != "TerminalInteractiveShell"


def get_composer_env_dict() -> dict[str, Any]:
    """Return the versions of software and a description of the machine."""
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
    """Print the versions of software and a description of the machine, for bug reports."""
    for name, value in get_composer_env_dict().items():
        print(f"{name}: {value}", file=file)
