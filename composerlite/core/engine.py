"""Engine: calls algorithms, callbacks and loggers at the events of training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias, cast

from composerlite.core.algorithm import Algorithm
from composerlite.core.callback import Callback, Logger, LoggerDestination
from composerlite.core.event import Event
from composerlite.core.state.run_state import by_class
from composerlite.core.state.state import State
from composerlite.errors import raise_all

__all__ = ["AlgorithmPass", "Engine", "Trace", "Traces", "algorithms_of", "callbacks_of"]


@dataclass(slots=True)
class Trace:
    """Record of an algorithm at an event.

    Attributes:
        name: class name of the algorithm, with ``:1``, ``:2``, … for further algorithms of the class.
        event: the event.
        exit_code: result of ``apply``; ``None`` if the algorithm did not run.
        order: position among the algorithms of the event, from 0; ``None`` if the algorithm did not run.
        run: the algorithm ran.
    """

    name: str
    event: Event
    exit_code: int | None = None
    order: int | None = None
    run: bool = False


Handler: TypeAlias = Callable[[State, Logger], object]
"""Function to call at an event."""

Traces: TypeAlias = Mapping[str, Trace]
"""Traces by ``'<algorithm>/<event>'``."""

AlgorithmPass: TypeAlias = Callable[[Sequence[Algorithm], Event], Sequence[Algorithm]]
"""Function that reorders or drops the matching algorithms of an event."""

_NO_TRACES: Traces = MappingProxyType({})
_LOADS = {Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD}
_RESOLVE_AT = frozenset({*_LOADS, Event.FIT_START, Event.EVAL_STANDALONE_START, Event.PREDICT_START})


def callbacks_of(state: State) -> Sequence[Callback]:
    """Return the callbacks of ``state``, typed as callbacks."""
    return cast("list[Callback]", state.callbacks)


def algorithms_of(state: State) -> Sequence[Algorithm]:
    """Return the algorithms of ``state``, typed as algorithms."""
    return cast("list[Algorithm]", state.algorithms)


def last_in_first_out(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Reverse the order at ``AFTER_`` events, to undo changes of the ``BEFORE_`` event in the opposite order."""
    return list(reversed(algorithms)) if event.value.startswith("after_") else algorithms


class Engine:
    """Runs events: algorithms first, then callbacks, then loggers; at ``INIT`` loggers, callbacks, algorithms.

    The overridden methods of callbacks are looked up when training starts, not at every event. A callback added to
    ``state.callbacks`` later is called from the next ``FIT_START`` (or ``AFTER_LOAD``, …) on. An exception in a handler
    propagates at once, and the later handlers of the event do not run.

    Args:
        state: state of training, passed to handlers.
        logger: logger, passed to handlers.
        algorithm_passes: functions that reorder the matching algorithms, after the built-in pass, which reverses the
            order at ``AFTER_`` events.

    Attributes:
        handlers: functions to call with state and logger at an event, by event. A faster form of :meth:`run_event` for
            events of every batch; not for events such as ``FIT_START``, at which the handlers are looked up.
    """

    def __init__(
        self, state: State, logger: Logger, algorithm_passes: AlgorithmPass | Sequence[AlgorithmPass] | None = None
    ) -> None:
        self.state = state
        self.logger = logger
        if algorithm_passes is None:
            algorithm_passes = ()
        elif callable(algorithm_passes):
            algorithm_passes = (algorithm_passes,)
        self._passes: list[AlgorithmPass] = [last_in_first_out, *algorithm_passes]
        self._handlers: dict[Event, tuple[Handler, ...]] = {}
        self.handlers: dict[Event, tuple[Handler, ...]] = {}
        self._closed = False
        self._resolve()

    def register_pass(self, algorithm_pass: AlgorithmPass, index: int = -1) -> None:
        """Add a pass.

        Args:
            algorithm_pass: function that reorders the algorithms of an event.
            index: position among the passes; -1 appends.
        """
        self._passes.insert(len(self._passes) if index == -1 else index, algorithm_pass)

    def run_event(self, event: Event | str) -> Traces:
        """Call every handler of ``event``, and return the traces of the algorithms.

        Raises:
            RuntimeError: the engine is closed.
        """
        if type(event) is not Event:
            event = Event(event)
        if event in _RESOLVE_AT or self._closed:
            self._resolve()
        traces = self._run_algorithms(event) if self._algorithms and event is not Event.INIT else _NO_TRACES
        for handler in self._handlers[event]:
            handler(self.state, self.logger)
        return self._run_algorithms(event) if event is Event.INIT else traces

    def close(self) -> None:
        """Close every callback, then call their ``post_close``. Safe to call twice.

        Raises:
            Exception: error of a callback, raised after all others are closed; an ``ExceptionGroup`` for several.
            KeyboardInterrupt, SystemExit: the first of several.
        """
        if self._closed:
            return
        self._closed = True
        errors: list[Exception] = []
        interrupts: list[BaseException] = []
        failed: set[int] = set()
        callbacks = callbacks_of(self.state)
        calls = [(c, functools.partial(c.close, self.state, self.logger)) for c in callbacks]
        for callback, call in [*calls, *((c, c.post_close) for c in callbacks)]:
            if id(callback) in failed:
                continue
            try:
                call()
            except BaseException as e:  # noqa: BLE001 - raised below, after all callbacks are closed
                failed.add(id(callback))
                (errors if isinstance(e, Exception) else interrupts).append(e)  # pyright: ignore[reportArgumentType]
        self.handlers = {}
        self._handlers = {}
        self._algorithms = ()
        try:
            raise_all(errors, "several callbacks failed to close")
        finally:
            if interrupts:
                raise interrupts[0]

    def _resolve(self) -> None:
        """Look up the handlers of each event. Loggers come last, except at ``INIT``."""
        if self._closed:
            raise RuntimeError("this trainer is closed. Build a new Trainer to continue.")
        self._algorithms = tuple(algorithms_of(self.state))
        self._names = {id(algorithm): name for name, algorithm in by_class(self._algorithms).items()}
        callbacks = callbacks_of(self.state)
        loggers = [c for c in callbacks if isinstance(c, LoggerDestination)]
        others = [c for c in callbacks if not isinstance(c, LoggerDestination)]
        for event in Event:
            order = loggers + others if event is Event.INIT else others + loggers
            self._handlers[event] = tuple(h for h in (_handler(c, event) for c in order) if h is not None)
        self.handlers = self._handlers
        if self._algorithms:
            self.handlers = {event: (functools.partial(self._run_for, event),) for event in Event}

    def _run_for(self, event: Event, state: State, logger: Logger) -> None:
        self.run_event(event)

    def _run_algorithms(self, event: Event) -> Traces:
        matched: Sequence[Algorithm] = [a for a in self._algorithms if a.match(event, self.state)]
        if not matched:
            return _NO_TRACES
        for algorithm_pass in self._passes:
            matched = algorithm_pass(matched, event)
        traces: dict[str, Trace] = {}
        for order, algorithm in enumerate(matched):
            code = algorithm.apply(event, self.state, self.logger)
            name = self._names[id(algorithm)]
            traces[f"{name}/{event}"] = Trace(name=name, event=event, exit_code=code, order=order, run=True)
        if self.logger.destinations:
            self.logger.log_traces({key: int(trace.run) for key, trace in traces.items()})
        return traces


def _handler(callback: Callback, event: Event) -> Handler | None:
    """Return the function to call for ``callback`` at ``event``; ``None`` without an override."""
    if type(callback).run_event is not Callback.run_event:
        return functools.partial(callback.run_event, event)
    if getattr(type(callback), event.value) is getattr(Callback, event.value) and event.value not in vars(callback):
        return None
    return getattr(callback, event.value)
