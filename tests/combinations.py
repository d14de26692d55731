"""Which combinations of parameters `make test` tries, where `make soak` tries them all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["covering"]


def covering(at_once: int, *values: Sequence[Any]) -> list[Any]:
    """Every combination of the values, for ``parametrize``; most have the mark ``soak``.

    ``at_once``: of those without it, 1 has each value at least once (a row and a column: the diagonal), 2 each value
    with each value of the other sequences.
    """
    rows = list(itertools.product(*(range(len(one)) for one in values)))
    parts = {row: set(itertools.combinations(enumerate(row), at_once)) for row in rows}
    left = {part for found in parts.values() for part in found}
    quick: set[tuple[int, ...]] = set()
    while left:  # the first of those with most that is new: the same in every process
        best = max(rows, key=lambda row: len(left & parts[row]))
        quick.add(best)
        left -= parts[best]
    return [
        pytest.param(
            *(one[at] for one, at in zip(values, row, strict=True)), marks=() if row in quick else pytest.mark.soak
        )
        for row in rows
    ]
