"""Numbers and times for people."""

from __future__ import annotations

import math
from datetime import UTC, datetime


def duration(seconds: float) -> str:
    """``'8 ms'``, ``'2.5 s'``, ``'2 min 05 s'``, ``'3 h 07 min'``, ``'2 d 04 h'``."""
    if seconds < 0.0005:
        return "0 s"
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.002 else f"{seconds * 1000:.1f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        return _pair(round(seconds), 60, "min", "s")
    if seconds < 86370:
        return _pair(round(seconds / 60), 60, "h", "min")
    return _pair(round(seconds / 3600), 24, "d", "h")


def _pair(smaller: int, factor: int, unit: str, lower: str) -> str:
    whole, rest = divmod(smaller, factor)
    return f"{whole} {unit} {rest:02d} {lower}" if rest else f"{whole} {unit}"


def number(value: float) -> str:
    """A metric with four significant digits, and large numbers in groups of three."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace(",", "\u202f")  # a narrow space at which no line breaks
    return f"{value:,.0f}".replace(",", "\u202f") if abs(value) >= 10_000 else f"{value:.4g}"


def count(many: int, one: str, more: str = "") -> str:
    """``'1 batch'``, ``'3 batches'``."""
    return f"{number(many)} {one if many == 1 else more or one + 's'}"


def share(part: float, whole: float) -> str:
    """``'4.2 %'``."""
    percent = 100 * part / whole if whole > 0 else 0.0
    return f"{percent:.0f} %" if percent >= 10 or percent == 0 else f"{percent:.1f} %" if percent >= 0.1 else "< 0.1 %"


def clock(seconds: float, *, precise: bool = False) -> str:
    """``'2026-11-22 06:50:21 UTC'``."""
    time = datetime.fromtimestamp(seconds, UTC)
    return (
        f"{time:%Y-%m-%d %H:%M:%S}.{time.microsecond // 1000:03d} UTC" if precise else f"{time:%Y-%m-%d %H:%M:%S} UTC"
    )
