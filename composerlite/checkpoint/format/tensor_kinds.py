"""Kinds of tensors: which have numbers that can be written one after the other, and which cannot be saved at all."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from composerlite._torch_compat import local_part, savable_dtypes
from composerlite.checkpoint.trust.trusted import is_loadable
from composerlite.dist import is_distributed_tensor
from composerlite.errors import SaveError

__all__ = ["check_savable", "is_dense"]

_QUANTIZED = (torch.per_tensor_affine, torch.per_channel_affine)
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def is_dense(tensor: Tensor) -> bool:
    """Whether ``tensor`` is nothing but numbers at strides, of which a part can be read or written by itself.

    Others are saved as values: sparse and quantized ones, those without numbers, and those of classes of their own.
    Of a distributed one the part of this rank counts.
    """
    if is_distributed_tensor(tensor):
        return is_dense(local_part(tensor))
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_nested:
        return False
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    return is_strided and tensor.dtype in savable_dtypes()


def check_savable(tensor: Tensor) -> None:
    """See that ``tensor`` can be pickled on one rank, and loaded by a script that does not trust the file.

    Raises:
        SaveError: it cannot; names the kind and the way out.
    """
    kind = type(tensor)
    if is_distributed_tensor(tensor) and is_dense(tensor):
        raise SaveError(
            f"a tensor of the shape {tuple(tensor.shape)} that is distributed over ranks is inside an object, or in a "
            "set. Keep it in a dict, a list, a tuple or a deque of the state, where each rank writes its own part."
        )
    if is_distributed_tensor(tensor):
        local = type(local_part(tensor))
        raise SaveError(
            f"a distributed tensor of the shape {tuple(tensor.shape)} whose parts are of the class {_name(local)} "
            "cannot be saved: its parts are no plain numbers. Keep it on each rank by itself, or as plain tensors."
        )
    if is_lazy(tensor):
        return
    if kind not in (Tensor, nn.Parameter) and not tensor.is_nested:
        if not is_loadable(kind):
            raise SaveError(
                f"a tensor of the class {_name(kind)} would be saved, and refused when it is loaded. If it can be "
                f"pickled, allow it where the script begins: torch.serialization.add_safe_globals([{kind.__name__}])."
            )
        return
    if tensor.is_nested:
        raise SaveError("a nested tensor cannot be saved. Keep its values and offsets, which are plain tensors.")
    if tensor.dtype not in savable_dtypes():
        raise SaveError(
            f"a tensor of {tensor.dtype} cannot be saved: torch has no way to. Keep tensor.view(torch.uint8)."
        )
    if tensor.is_quantized:
        if (scheme := _scheme(tensor)) not in _QUANTIZED:
            raise SaveError(
                f"a tensor of {tensor.dtype}, quantized with {scheme}, cannot be saved: only per_tensor_affine and "
                "per_channel_affine can. Keep its int_repr() and its scales."
            )
    elif tensor.layout is not torch.strided and tensor.layout not in _SPARSE:
        raise SaveError(f"a tensor of the layout {tensor.layout} cannot be saved. Keep tensor.to_dense().")


def _scheme(tensor: Tensor) -> torch.qscheme | None:
    try:
        return tensor.qscheme()
    except RuntimeError:  # it has a type for quantized numbers, and was never quantized
        return None


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
