"""Tensors of every kind, and how two are compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Scaled(Tensor):
    """Numbers in 8 bits and a scale for each row, as optimizers of 8 bits keep their state."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device, dtype=torch.float32)  # pyright: ignore

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale"], []

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> Scaled:
        return cls(inner["codes"], inner["scale"])

    @staticmethod
    def of(whole: Tensor) -> Scaled:
        scale = whole.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return Scaled((whole / scale).round().to(torch.int8), scale)

    def whole(self) -> Tensor:
        return self.codes.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default):
            return cls(args[0].codes.clone(), args[0].scale.clone())
        if func is aten.view.default and tuple(args[1]) == tuple(args[0].shape):
            return cls(args[0].codes, args[0].scale)
        if func is aten.copy_.default and isinstance(args[0], Scaled):
            source = args[1] if isinstance(args[1], Scaled) else Scaled.of(args[1])
            args[0].codes.copy_(source.codes)
            args[0].scale.copy_(source.scale)
            return args[0]
        plain = tree_map(lambda value: value.whole() if isinstance(value, Scaled) else value, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Unknown(Scaled):
    """One that nobody has allowed."""


def quietly(make: Callable[[], dict[str, Tensor]]) -> Callable[[], dict[str, Tensor]]:
    """torch calls half of them experimental."""

    def made() -> dict[str, Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()

    return made


@quietly
def kinds() -> dict[str, Tensor]:
    """What can be saved, each new."""
    return {
        "coo": torch.eye(3).to_sparse(),
        "not coalesced": torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2), check_invariants=False),
        "hybrid": torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 3), (4, 3), check_invariants=False),
        "csr": torch.eye(3).to_sparse_csr(),
        "csc": torch.eye(3).to_sparse_csc(),
        "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
        "bsc": torch.eye(4).to_sparse_bsc((2, 2)),
        "complex": torch.tensor([1 + 2j, 3 - 1j]),
        "half complex": torch.tensor([1 + 2j, 3 - 1j]).to(torch.complex32),
        "bool": torch.tensor([True, False]),
        **{name: torch.tensor([1, 2, 3]).to(getattr(torch, name)) for name in ("uint8", "uint16", "uint32", "uint64")},
        **{
            name: torch.tensor([1.0, 2.0, 4.0]).to(getattr(torch, name))
            for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
        },
        "no dimensions": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "expanded": torch.arange(3.0).expand(4, 3),
        "columns": torch.arange(12.0).reshape(3, 4)[:, 1:3],
        "transposed": torch.arange(12.0).reshape(3, 4).T,
        "overlapping": torch.arange(6.0).as_strided((3, 2), (1, 1)),
        "channels last": torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        "scaled": Scaled.of(torch.arange(6.0).reshape(2, 3)),
    }


@quietly
def refused() -> dict[str, Tensor]:
    """What cannot."""
    return {
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "mkldnn": torch.ones(3).to_mkldnn(),
        "quantized": torch.quantize_per_tensor(torch.tensor([0.5, 1.0, -1.0]), 0.1, 3, torch.qint8),
        "never quantized": torch.empty(4, dtype=torch.quint4x2),
        "four bits": torch.empty(4, dtype=torch.uint4),
        "unknown class": Unknown(torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 1)),
    }


def same(one: Tensor, other: Tensor) -> bool:
    """Whether the two are of one kind, and equal bit for bit."""
    if (one.layout, one.dtype, one.shape) != (other.layout, other.dtype, other.shape):
        return False
    if isinstance(one, Scaled) or isinstance(other, Scaled):
        is_one = isinstance(one, Scaled) and type(one) is type(other) and isinstance(other, Scaled)
        return is_one and same(one.codes, other.codes) and same(one.scale, other.scale)
    if one.layout is torch.sparse_coo:
        parts = [(t._indices(), t._values(), torch.tensor(t.is_coalesced())) for t in (one, other)]
    elif one.layout is not torch.strided:
        rows = one.layout in (torch.sparse_csr, torch.sparse_bsr)
        parts = [
            (t.crow_indices() if rows else t.ccol_indices(), t.col_indices() if rows else t.row_indices(), t.values())
            for t in (one, other)
        ]
    else:
        parts = [(_bytes_of(t),) for t in (one, other)]
    return all(torch.equal(a, b) for a, b in zip(*parts, strict=True))


def _bytes_of(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8) if plain.numel() else torch.empty(0)


def zeros_like(tensor: Tensor) -> Tensor:
    """One of the same kind with other numbers."""
    if isinstance(tensor, Scaled):
        return type(tensor)(torch.zeros_like(tensor.codes), torch.zeros_like(tensor.scale))
    if tensor.layout is torch.strided:
        return (
            torch.empty(tensor.shape, dtype=tensor.dtype).view(torch.uint8).zero_().view(tensor.dtype)
            if tensor.dim()
            else torch.zeros((), dtype=tensor.dtype)
        )
    return torch.zeros(tensor.shape, dtype=tensor.dtype).to_sparse(layout=tensor.layout, **_blocks(tensor))


def laid_out_like(tensor: Tensor) -> Tensor:
    """One with its strides, so that elements that share memory do so here too, and with other numbers."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.full((elements,), 7).to(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _blocks(tensor: Tensor) -> dict[str, Any]:
    blocked = tensor.layout in (torch.sparse_bsr, torch.sparse_bsc)
    return {"blocksize": tuple(tensor.values().shape[1:])} if blocked else {}
