"""Programs that compress and decompress checkpoints: whatever they do, nobody waits for them without end."""

from __future__ import annotations

import threading

import pytest

from composerlite.checkpoint.format.codecs import ToolPipe
from composerlite.errors import CheckpointError, SaveError

WAIT = 30.0


@pytest.mark.parametrize("program", [["cat"], ["sleep", "1000"]], ids=["that answers", "that does nothing"])
def test_a_file_that_is_given_up_ends_who_waits_for_the_program(program: list[str]) -> None:
    """At whatever moment: one that sends bytes to the program gets an error, and the program is gone."""
    for _ in range(20):
        pipe = ToolPipe(program, SaveError)
        sent, errors = threading.Event(), list[Exception]()

        def send(pipe: ToolPipe = pipe, sent: threading.Event = sent, errors: list[Exception] = errors) -> None:
            try:
                while True:
                    sent.set()
                    b"".join(pipe.exchange(bytes(1 << 20)))
            except CheckpointError as e:
                errors.append(e)

        thread = threading.Thread(target=send)
        thread.start()
        assert sent.wait(WAIT)
        pipe.stop()
        thread.join(WAIT)
        assert not thread.is_alive()
        pipe.close()
        pipe.close()
        assert "SIGKILL" in str(errors[0]) or "is not started" in str(errors[0])
