"""Precision: which number formats there are, and where."""

from __future__ import annotations

import pytest
import torch

from composerlite.core import Precision, get_precision_context
from composerlite.core.numerics import ensure_precision
from composerlite.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_default_depends_on_the_device() -> None:
    """fp32 on a CPU, amp_fp16 on a CUDA GPU."""
    assert ensure_precision(None, CPU) is Precision.FP32
    assert ensure_precision(None, CUDA) is Precision.AMP_FP16
    assert ensure_precision("AMP_BF16", CPU) is Precision.AMP_BF16


def test_an_unknown_precision_lists_the_known_ones() -> None:
    """A precision that does not exist is an error with all that do."""
    with pytest.raises(ConfigError, match=r"precision='fp8'.*fp32, amp_fp16, amp_bf16"):
        ensure_precision("fp8", CPU)


def test_fp16_needs_a_gpu() -> None:
    """amp_fp16 on a CPU is refused with what to use instead."""
    with pytest.raises(ConfigError, match="use 'amp_bf16' or 'fp32'"):
        ensure_precision("amp_fp16", CPU)
    assert ensure_precision("amp_fp16", CUDA) is Precision.AMP_FP16


def test_products_are_computed_in_the_format() -> None:
    """Within the context matrix products are bfloat16 under amp_bf16 and stay float32 under fp32."""
    x = torch.ones(2, 2)
    with get_precision_context(Precision.AMP_BF16, CPU):
        assert (x @ x).dtype is torch.bfloat16
    with get_precision_context(Precision.FP32, CPU):
        assert (x @ x).dtype is torch.float32
