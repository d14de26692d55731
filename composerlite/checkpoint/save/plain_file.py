"""Files of a plain state dict, for torch or for safetensors. The files are no checkpoints of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from composerlite.checkpoint.format.safetensors_file import TensorEntry, header_of, laid_out, write_tensor
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.storage import StagedFile, StreamWriter

log = logging.getLogger(__name__)


def write_torch(path: Path, contents: Any, *, overwrite: bool = True) -> None:
    """Write the file ``path`` for ``torch.load``.

    Args:
        path: of the file.
        contents: of the file.
        overwrite: replace a file of the same name.

    Raises:
        FileExistsError: the file exists, and ``overwrite`` is false.
    """
    image = TorchImage(contents)
    with StagedFile(path) as staged:
        with StreamWriter(staged.temporary, image.size_bytes) as sink:
            image.write(sink)
            sink.finish()
        staged.publish(overwrite=overwrite)


def write_safetensors(path: Path, contents: Mapping[str, Any], *, overwrite: bool = True) -> None:
    """Write the tensors in ``contents`` to the file ``path`` of safetensors. Arguments as :func:`write_torch`.

    Raises:
        SaveError: the format does not support the type or the layout of a tensor.
        FileExistsError: the file exists, and ``overwrite`` is false.
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
