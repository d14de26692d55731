"""Format numbers, durations and times for the report."""

from __future__ import annotations

import math
from datetime import UTC, datetime

_NARROW_SPACE = "\u202f"  # no line break


def duration(seconds: float) -> str:
    """Format a duration: ``'8 ms'``, ``'2.5 s'``, ``'2 min 05 s'``, ``'3 h 07 min'``, ``'2 d 04 h'``."""
    if seconds < 0.1:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        unit, smaller, factor, value = "min", "s", 60, seconds
    elif seconds < 86400:
        unit, smaller, factor, value = "h", "min", 60, seconds / 60
    else:
        unit, smaller, factor, value = "d", "h", 24, seconds / 3600
    whole, rest = divmod(round(value), factor)
    return f"{whole} {unit} {rest:02d} {smaller}" if rest else f"{whole} {unit}"


def number(value: float) -> str:
    """Format a number with four significant digits; digits of large numbers are grouped by three."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) or abs(value) >= 10_000:
        return f"{value:,.0f}".replace(",", _NARROW_SPACE)
    return f"{value:.4g}"


def count(many: int, singular: str, plural: str = "") -> str:
    """Format a count: ``'1 batch'``, ``'3 batches'``."""
    return f"{number(many)} {singular if many == 1 else plural or singular + 's'}"


def share(part: float, whole: float = 1.0) -> str:
    """Format a fraction: ``'42 %'``, ``'4.2 %'``, ``'< 0.1 %'``."""
    percent = 100 * part / whole if whole > 0 else 0.0
    if 0 < percent < 0.1:
        return "< 0.1 %"
    return f"{percent:.1f} %" if 0 < percent < 10 else f"{percent:.0f} %"


def clock(seconds: float) -> str:
    """Format a time: ``'2026-11-22 06:50:21 UTC'``."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
