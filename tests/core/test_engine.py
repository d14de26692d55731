"""Engine: who is called at an event, in which order, and what closing guarantees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from composerlite.core import Algorithm, Callback, Engine, Event, Logger, LoggerDestination, State, Trace
from composerlite.errors import ConfigError

Calls = list[str]


class Note(Callback):
    """Writes down the events INIT and BATCH_END, and its closing."""

    def __init__(self, name: str, calls: Calls, failure: Exception | None = None) -> None:
        self.name = name
        self.calls = calls
        self.failure = failure

    def init(self, state: State, logger: Logger) -> None:
        self.calls.append(self.name)

    def batch_end(self, state: State, logger: Logger) -> None:
        self.calls.append(self.name)

    def close(self, state: State, logger: Logger) -> None:
        self.calls.append(f"{self.name} close")
        if self.failure is not None:
            raise self.failure

    def post_close(self) -> None:
        self.calls.append(f"{self.name} post_close")


class NoteLogger(Note, LoggerDestination):
    """The same as a logger."""

    def __init__(self, name: str, calls: Calls) -> None:
        super().__init__(name, calls)
        self.traces: list[dict[str, Any]] = []

    def log_traces(self, traces: dict[str, Any]) -> None:
        self.traces.append(traces)


class Change(Algorithm):
    """Writes down the events that it matches."""

    def __init__(self, name: str, calls: Calls, *events: Event, code: int | None = None) -> None:
        self.name = name
        self.calls = calls
        self.events = events
        self.code = code

    def match(self, event: Event, state: State) -> bool:
        return event in self.events

    def apply(self, event: Event, state: State, logger: Logger) -> int | None:
        self.calls.append(self.name)
        return self.code


class OtherChange(Change):
    """An algorithm of another class."""


def engine_of(state: State, *parts: Callback | Algorithm) -> Engine:
    """An engine over ``state`` in which ``parts`` take part."""
    state.callbacks = [part for part in parts if isinstance(part, Callback)]
    state.algorithms = [part for part in parts if isinstance(part, Algorithm)]
    return Engine(state, Logger(state, [part for part in parts if isinstance(part, LoggerDestination)]))


@pytest.mark.parametrize(
    ("event", "order"),
    [
        (Event.BATCH_END, ["algorithm", "first", "second", "logger"]),
        (Event.INIT, ["logger", "first", "second", "algorithm"]),
    ],
)
def test_algorithms_run_first_and_loggers_last_except_at_init(state: State, event: Event, order: list[str]) -> None:
    """Callbacks run in between, in the given order."""
    calls: Calls = []
    parts = NoteLogger("logger", calls), Note("first", calls), Note("second", calls), Change("algorithm", calls, event)
    engine_of(state, *parts).run_event(event)
    assert calls == order


@pytest.mark.parametrize("event", Event)
def test_every_event_calls_its_method_once(state: State, event: Event) -> None:
    """Whatever the event, the method of its name is called once with the state and the logger; no other is."""
    calls: list[tuple[str, State, Logger]] = []

    def method_of(name: str) -> Any:
        return lambda self, state, logger: calls.append((name, state, logger))

    everything = type("Everything", (Callback,), {event.value: method_of(event.value) for event in Event})
    engine = engine_of(state, everything())
    engine.run_event(event)
    assert calls == [(event.value, state, engine.logger)]


def test_events_may_be_named_by_a_string(state: State) -> None:
    """``run_event('batch_end')`` is ``run_event(Event.BATCH_END)``; an unknown name is an error."""
    calls: Calls = []
    engine = engine_of(state, Note("callback", calls), Change("algorithm", calls, Event.BATCH_END))
    engine.run_event("batch_end")
    assert calls == ["algorithm", "callback"]
    with pytest.raises(ConfigError, match="batch_ende"):
        engine.run_event("batch_ende")


def test_a_callback_may_take_all_events(state: State) -> None:
    """A callback that overrides ``run_event`` is called at every event, whichever methods it has."""

    class Spy(Callback):
        def __init__(self) -> None:
            self.seen: list[Event] = []

        def run_event(self, event: Event, state: State, logger: Logger) -> None:
            self.seen.append(event)

    spy = Spy()
    engine = engine_of(state, spy)
    for event in Event:
        engine.run_event(event)
    assert spy.seen == list(Event)


def test_handlers_are_looked_up_once_and_not_at_every_event(state: State) -> None:
    """A callback that joins a run is called from the next ``fit`` on, not in the middle of one."""
    calls: Calls = []
    engine = engine_of(state, Note("early", calls))
    state.callbacks.append(Note("late", calls))
    engine.run_event(Event.BATCH_END)
    assert calls == ["early"]
    engine.run_event(Event.FIT_START)
    engine.run_event(Event.BATCH_END)
    assert calls == ["early", "early", "late"]


def test_a_method_given_to_one_callback_only_is_called(state: State) -> None:
    """A hook that is set on the object, not on its class, counts."""
    calls: Calls = []
    callback = Callback()
    callback.batch_end = lambda state, logger: calls.append("hook")  # type: ignore[method-assign]
    engine_of(state, callback).run_event(Event.BATCH_END)
    assert calls == ["hook"]


def test_an_exception_in_a_handler_ends_the_event(state: State) -> None:
    """What a callback raises leaves ``run_event``; those after it are not called."""

    class Fails(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            raise ZeroDivisionError("in a callback")

    calls: Calls = []
    engine = engine_of(state, Note("before", calls), Fails(), Note("after", calls))
    with pytest.raises(ZeroDivisionError, match="in a callback"):
        engine.run_event(Event.BATCH_END)
    assert calls == ["before"]


def test_what_came_first_before_comes_last_after(state: State) -> None:
    """Algorithms that wrap a step nest: at AFTER_ events the order is reversed."""
    calls: Calls = []
    pair = Event.BEFORE_FORWARD, Event.AFTER_FORWARD
    engine = engine_of(state, Change("outer", calls, *pair), Change("inner", calls, *pair))
    for event in pair:
        engine.run_event(event)
    assert calls == ["outer", "inner", "inner", "outer"]


def test_traces_say_what_ran(state: State) -> None:
    """Each algorithm that ran has a trace with its code and its place, and loggers get them."""
    calls: Calls = []
    logger = NoteLogger("logger", calls)
    engine = engine_of(
        state,
        logger,
        Change("first", calls, Event.BATCH_START, code=3),
        OtherChange("second", calls, Event.BATCH_START),
        OtherChange("elsewhere", calls, Event.BATCH_END),
    )
    traces = engine.run_event(Event.BATCH_START)
    assert traces == {
        "Change/batch_start": Trace("Change", Event.BATCH_START, exit_code=3, order=0, run=True),
        "OtherChange/batch_start": Trace("OtherChange", Event.BATCH_START, exit_code=None, order=1, run=True),
    }
    assert logger.traces == [{"Change/batch_start": 1, "OtherChange/batch_start": 1}]


def test_passes_reorder_and_drop_algorithms(state: State) -> None:
    """A pass decides which of the algorithms that matched run, and in which order."""

    def reverse(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
        return algorithms[::-1]

    def leave_out_b(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
        return [a for a in algorithms if isinstance(a, Change) and a.name != "b"]

    calls: Calls = []
    state.algorithms = [Change(name, calls, Event.BATCH_START) for name in "abc"]
    engine = Engine(state, Logger(state), algorithm_passes=reverse)
    engine.run_event(Event.BATCH_START)
    assert calls == ["c", "b", "a"]
    engine.register_pass(leave_out_b)
    engine.run_event(Event.BATCH_START)
    assert calls[3:] == ["c", "a"]


def test_a_failure_to_close_is_raised_after_the_others_are_closed(state: State) -> None:
    """One that fails does not keep the others open, gets no ``post_close``, and its exception is raised."""
    calls: Calls = []
    engine = engine_of(state, Note("bad", calls, OSError("disk full")), Note("good", calls))
    with pytest.raises(OSError, match="disk full"):
        engine.close()
    engine.close()  # closing again does nothing
    assert calls == ["bad close", "good close", "good post_close"]


def test_several_failures_to_close_are_all_raised(state: State) -> None:
    """No failure hides another: they come together in an ExceptionGroup."""
    failures = [OSError("disk full"), ValueError("no name")]
    engine = engine_of(state, *(Note(f"bad{i}", [], failure) for i, failure in enumerate(failures)))
    with pytest.raises(ExceptionGroup) as error:
        engine.close()
    assert list(error.value.exceptions) == failures


@pytest.mark.parametrize("event", [Event.FIT_START, Event.BATCH_END, Event.EVAL_STANDALONE_START])
def test_a_closed_engine_runs_nothing(state: State, event: Event) -> None:
    """Training on with a closed trainer is an error that says what to do."""
    engine = engine_of(state, Note("a", []))
    engine.close()
    with pytest.raises(RuntimeError, match=r"closed\. Build a new Trainer"):
        engine.run_event(event)
