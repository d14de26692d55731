"""The units that callbacks log wall-clock time in."""

from __future__ import annotations

from composerlite.errors import ConfigError, did_you_mean

__all__ = ["seconds_per"]

_SECONDS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}


def seconds_per(time_unit: str, *, owner: str) -> int:
    """Seconds in one ``time_unit``: ``'seconds'``, ``'minutes'``, ``'hours'`` or ``'days'``.

    Raises:
        ConfigError: another unit. The message names ``owner``.
    """
    if time_unit not in _SECONDS:
        raise ConfigError(f"{owner}(time_unit={time_unit!r}): no such unit.{did_you_mean(str(time_unit), _SECONDS)}")
    return _SECONDS[time_unit]
