"""Files that are no checkpoints of a run: a state dict, for torch or for safetensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from composerlite.checkpoint.format.safetensors_file import TensorEntry, header_of, laid_out, write_tensor
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.storage import StagedFile, StreamWriter

__all__ = ["write_safetensors", "write_torch"]

log = logging.getLogger(__name__)


def write_torch(path: Path, contents: Any, *, overwrite: bool = True) -> None:
    """Make the file ``path`` that ``torch.load`` opens.

    Args:
        path: of the file.
        contents: what it holds.
        overwrite: replace a file of that name.

    Raises:
        FileExistsError: there is one, and ``overwrite`` is false.
    """
    image = TorchImage(contents)
    with StagedFile(path) as staged:
        with StreamWriter(staged.temporary, image.size_bytes) as sink:
            image.write(sink)
            sink.finish()
        staged.publish(overwrite=overwrite)


def write_safetensors(path: Path, contents: Mapping[str, Any], *, overwrite: bool = True) -> None:
    """Make the file ``path`` of safetensors, of the tensors in ``contents``. Arguments as :func:`write_torch`.

    Raises:
        SaveError: the format has none of that type or layout.
        FileExistsError: there is a file of that name, and ``overwrite`` is false.
    """
    tensors = {name: value for name, value in contents.items() if isinstance(value, Tensor)}
    if left_out := sorted(set(contents) - set(tensors)):
        log.warning("%s: left out what is no tensor: %s", path, ", ".join(left_out[:20]))
    entries = laid_out(TensorEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    for entry in entries:
        entry.check(tensors[entry.name].layout)
    header = header_of(entries)
    size = len(header) + sum(entry.size_bytes for entry in entries)
    with StagedFile(path) as staged:
        with StreamWriter(staged.temporary, size) as sink:
            sink.write(header)
            for entry in entries:
                write_tensor(sink, tensors[entry.name])
            sink.finish()
        staged.publish(overwrite=overwrite)
