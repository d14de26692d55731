"""Files of a plain state dict, for torch or for safetensors. The files are no checkpoints of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from composerlite.checkpoint.foreign.keys import tensors_of
from composerlite.checkpoint.format.safetensors_file import TensorEntry, header_of, laid_out, write_tensor
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.storage import StagedFile, StreamWriter, make_folder


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
    _write(path, image.size_bytes, image.write, overwrite=overwrite)


def write_safetensors(path: Path, contents: Mapping[str, Any], *, overwrite: bool = True) -> None:
    """Write the tensors in ``contents`` to the safetensors file ``path``, and warn about all other values.

    Args:
        path: of the file.
        contents: tensors by name.
        overwrite: replace a file of the same name.

    Raises:
        SaveError: the format does not support the type or the layout of a tensor.
        FileExistsError: the file exists, and ``overwrite`` is false.
    """
    tensors = tensors_of(contents, str(path))
    entries = laid_out(TensorEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    for entry in entries:
        entry.check(tensors[entry.name].layout)
    header = header_of(entries)

    def fill(sink: StreamWriter) -> None:
        sink.write(header)
        for entry in entries:
            write_tensor(sink, tensors[entry.name])

    _write(path, len(header) + sum(entry.size_bytes for entry in entries), fill, overwrite=overwrite)


def _write(path: Path, size_bytes: int, fill: Callable[[StreamWriter], None], *, overwrite: bool) -> None:
    make_folder(path.parent)
    with StagedFile(path) as staged:
        with StreamWriter(staged.temporary, size_bytes) as sink:
            fill(sink)
            sink.finish()
        staged.publish(overwrite=overwrite)
