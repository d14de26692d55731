"""A machine whose clock is wrong."""

from __future__ import annotations

from datetime import datetime, timedelta, tzinfo

from composerlite.checkpoint.record import record

__all__ = ["set_clock"]


def set_clock(hours: float) -> None:
    """Let this process, which ends soon, believe that it is so many hours later; earlier where negative."""

    class Wrong(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(hours=hours)

    record.datetime = Wrong  # type: ignore[attr-defined]
