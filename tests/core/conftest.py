"""A state to test with, built by hand: no trainer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from composerlite.core import State


@pytest.fixture
def state() -> State:
    """The state of a run of 10 epochs that has not begun."""
    return State(nn.Linear(2, 2), rank_zero_seed=17, run_name="a-run", device=torch.device("cpu"), max_duration="10ep")
