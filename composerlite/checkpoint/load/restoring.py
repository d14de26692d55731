"""What of a checkpoint is wanted, where it goes, and that it is there in the end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Sequence
from typing import Any, final

from composerlite.checkpoint.record.contents import IgnoreKeys, TrainingState, without
from composerlite.errors import CorruptCheckpointError, IncompatibleCheckpointError
from composerlite.types import StateDict

__all__ = ["Restoring", "check_kind", "half_loaded"]

log = logging.getLogger(__name__)
WEIGHTS_ONLY = {"model", "integrations", "metadata", "algorithms"}
"""What a checkpoint holds at most that was saved for its weights."""


@final
class Restoring:
    """One load of a checkpoint into a state: first :meth:`wanted`, then :meth:`places`, then :meth:`load`.

    Args:
        state: what to restore.
        weights_only: restore the model alone.
        strict: parameter names must agree exactly.
        ignore_keys: what to leave as it is in ``state``.
        exclude_algorithms: names of those that are not restored.
        source: the checkpoint, for messages.
    """

    def __init__(
        self,
        state: TrainingState,
        *,
        weights_only: bool,
        strict: bool,
        ignore_keys: IgnoreKeys,
        exclude_algorithms: Sequence[str],
        source: str,
    ) -> None:
        self.state = state
        self.source = source
        self._weights_only = weights_only
        self._strict = strict
        self._ignore_keys = ignore_keys
        self._exclude = exclude_algorithms

    def wanted(self, contents: Any) -> StateDict:
        """What of ``contents`` is wanted; the numbers in its tensors do not matter.

        Raises:
            IncompatibleCheckpointError: they are not those of a checkpoint.
        """
        check_kind(contents, self.source)
        self._weights_only = self._weights_only or set(contents["state"]) <= WEIGHTS_ONLY
        contents = without(contents, self._ignore_keys)
        state = contents.get("state", {})
        if self._weights_only:
            return {"state": {key: value for key, value in state.items() if key in WEIGHTS_ONLY}}
        return {"state": state, "rng": contents.get("rng")}

    def places(self, wanted: StateDict) -> StateDict:
        """The live tensors that those in ``wanted`` are to become, after all that does not fit has been said."""
        live = self.state.places_for(
            wanted["state"],
            weights_only=self._weights_only,
            strict=self._strict,
            exclude_algorithms=self._exclude,
            source=self.source,
        )
        return {"state": live}

    def load(self, wanted: StateDict) -> list[dict[str, Any]] | None:
        """Restore the state from what was ``wanted``, its tensors read; the states of the random generators."""
        if self._weights_only:
            self.state.load_model_state(
                wanted["state"], strict=self._strict, exclude_algorithms=self._exclude, source=self.source
            )
            log.info("loaded the weights of %s", self.source)
            return None
        self.state.load_state_dict(
            wanted["state"], strict=self._strict, exclude_algorithms=self._exclude, source=self.source
        )
        log.info("loaded %s", self.source)
        return wanted["rng"]


@contextlib.contextmanager
def half_loaded(in_place: bool) -> Generator[None]:
    """Within it, damage that shows says what it has done to the state, if numbers are read ``in_place``."""
    try:
        yield
    except CorruptCheckpointError as e:
        if not in_place:
            raise
        damaged = CorruptCheckpointError(
            f"{e} The state that it was being loaded into holds a part of it now and must not be used: build it anew, "
            "or load another checkpoint into it."
        )
        for note in getattr(e, "__notes__", ()):  # which rank has seen it
            damaged.add_note(note)
        raise damaged from e


def check_kind(contents: Any, source: str) -> None:
    """See that ``contents`` are those of a checkpoint.

    Raises:
        IncompatibleCheckpointError: they are something else.
    """
    if isinstance(contents, dict) and isinstance(contents.get("state"), dict):  # pyright: ignore[reportUnknownMemberType]
        return
    found = ", ".join(map(repr, list(contents)[:8])) if isinstance(contents, dict) else type(contents).__name__  # pyright: ignore
    raise IncompatibleCheckpointError(
        f"{source} is not a checkpoint of a run: it holds {found or 'nothing'} and no 'state'. If it is "
        "a bare state dict of a model, load it with model.load_state_dict(torch.load(path))."
    )
