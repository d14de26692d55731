"""Between who saves and the thread that writes: what is saved was read, and may change."""

from __future__ import annotations

import threading
from typing import final

from composerlite.errors import SaveError

__all__ = ["HandOver"]

_WAIT_SECONDS = 3600.0


@final
class HandOver:
    """The moment from which a state that is written as it is, without a copy, may change."""

    def __init__(self) -> None:
        self._may_change = threading.Event()
        self._is_waited_for = True

    def wait(self) -> None:
        """Wait for it; the end of the save is one, too.

        Raises:
            SaveError: it does not come.
        """
        try:
            if not self._may_change.wait(_WAIT_SECONDS):
                raise SaveError(f"the state is not written after {_WAIT_SECONDS:g} s: does the disk hang?")
        except BaseException:  # an interrupt, too: the state changes from now on, and is still being read
            self._is_waited_for = False
            raise

    def take_place(self) -> None:
        """In the thread that writes: everything was read.

        Raises:
            SaveError: whoever saves did not wait for it.
        """
        if not self._is_waited_for:
            raise SaveError("the save was interrupted while its state was read: what was written is not of one moment.")
        self._may_change.set()

    def end(self) -> None:
        """The save has ended, well or not."""
        self._may_change.set()
