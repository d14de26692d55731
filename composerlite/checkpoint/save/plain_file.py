"""Files that are no checkpoints of a run: a state dict, for torch or for safetensors."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torch import Tensor

from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.errors import ConfigError
from composerlite.storage import StagedFile, StreamWriter

__all__ = ["plain_writer", "write_torch"]

log = logging.getLogger(__name__)


def plain_writer(*, use_safetensors: bool) -> Callable[[Path, Any], None]:
    """Return a function that writes a file atomically.

    Raises:
        ConfigError: safetensors is not installed.
    """
    return _safetensors_writer() if use_safetensors else write_torch


def write_torch(path: Path, contents: Any) -> None:
    """Make the file ``path`` that ``torch.load`` opens."""
    image = TorchImage(contents)
    with StagedFile(path) as staged:
        with StreamWriter(staged.temporary, image.size_bytes) as sink:
            image.write(sink)
            sink.finish()
        staged.publish()


def _safetensors_writer() -> Callable[[Path, Any], None]:
    try:
        library: ModuleType = importlib.import_module("safetensors.torch")
    except ImportError as e:
        raise ConfigError(
            "use_safetensors=True: safetensors is not installed: pip install 'composerlite[safetensors]'"
        ) from e
    save_file = cast("Callable[..., None]", library.save_file)

    def write(path: Path, contents: Any) -> None:
        tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        for key, value in contents.items():
            if isinstance(value, Tensor):
                tensor = value.contiguous()
                address = tensor.untyped_storage().data_ptr()
                tensors[key] = tensor.clone() if address in seen else tensor  # the library takes none that share memory
                seen.add(address)
        if left_out := sorted(set(contents) - set(tensors)):
            log.warning("%s: left out what is no tensor: %s", path, ", ".join(left_out[:20]))
        with StagedFile(path) as staged:
            save_file(tensors, staged.temporary, metadata={"format": "pt"})
            staged.flush()
            staged.publish()

    return write
