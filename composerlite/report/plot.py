"""The parts of charts. What is drawn is stretched to the width of the page; texts are not, and stay readable."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

WIDTH, HEIGHT = 1000.0, 100.0
"""The coordinates of a drawing, whatever its size on the page."""
_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


@final
@dataclass(frozen=True, slots=True)
class Axis:
    """Values from ``low`` to ``high``, which is more."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Iterable[float]) -> Axis:
        """An axis that has all ``values``; of one value it has some room beside it."""
        known = list(values)
        low, high = min(known), max(known)
        room = (abs(high) * 0.1 or 1.0) if high - low <= 1e-12 * max(abs(low), abs(high)) else 0.0
        return cls(low - room, high + room)

    def part(self, value: float) -> float:
        """Return the relative position of ``value``: 0 at ``low``, 1 at ``high``."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def x(self, value: float) -> float:
        """Return the distance from the left of the drawing."""
        return round(WIDTH * self.part(value), 2)

    def ticks(self, step: float) -> list[float]:
        """The multiples of ``step`` on it."""
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def nice_step(span: float, most: int, *, whole: bool = False) -> float:
    """1, 2 or 5 times a power of ten, such that ``span`` has at most ``most`` steps."""
    raw = max(span / most, 1.0 if whole else 1e-300)
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


def time_step(seconds: float, most: int) -> float:
    """A step that people count time by."""
    if seconds < most * 0.5:
        return nice_step(seconds, most)
    return next((step for step in _TIME_STEPS if seconds / step <= most), None) or 86400 * nice_step(
        seconds / 86400, most, whole=True
    )


def plain(text: object) -> str:
    """``text`` as HTML shows it."""
    return html.escape(str(text), quote=True)


def attributes(**given: object) -> str:
    """``class_="a", d="…"`` as the attributes of an element; without those that are ``None``."""
    pairs = ((name.rstrip("_").replace("_", "-"), value) for name, value in given.items() if value is not None)
    return "".join(f' {name}="{plain(value)}"' for name, value in pairs)


def mark(kind: str, left: float, right: float, tip: str, *, top: float = 0.0, bottom: float = HEIGHT) -> str:
    """A bar that is seen however short it is, with what to say about it."""
    d = f"M{left:g} {top:g}H{max(right, left):g}V{bottom:g}H{left:g}Z"
    return f"<path{attributes(class_=f'mark {kind}', d=d, data_tip=tip)}/>"


def svg(kind: str, label: str, parts: Sequence[str]) -> str:
    """A drawing that takes the size that the page gives it."""
    head = attributes(
        class_=kind, viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}", preserveAspectRatio="none", role="img", aria_label=label
    )
    return f"<svg{head}>{''.join(parts)}</svg>"
