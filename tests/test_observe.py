"""Stage names and taps: silent and free when nobody listens, nested and restored when somebody
does.
"""

from __future__ import annotations

import timeit
from contextlib import contextmanager

import pytest

from sonicmoe import observe as module
from sonicmoe.observe import (
    emit,
    forget,
    is_awaited,
    listening,
    observe,
    observing,
    ranges_on,
    stage,
    tap,
)


def test_off_costs_next_to_nothing():
    def with_both() -> None:
        with stage("up"):
            tap("z", None)

    for call, seconds in ((with_both, 5e-6), (is_awaited, 2e-6)):
        assert min(timeit.repeat(call, number=1000, repeat=5)) / 1000 < seconds


def test_observers_see_every_event_and_are_gone_after_an_error():
    seen = []
    with pytest.raises(KeyError), observing(seen.append):
        with observing(lambda event: seen.append(-event)):
            emit(1)
        emit(2)
        raise KeyError
    assert seen == [1, -1, 2] and not is_awaited()
    emit(3)
    assert seen == [1, -1, 2]


def test_an_observer_may_leave_while_it_observes():
    seen = []

    def once(event):
        seen.append(event)
        forget(once)
        forget(once)

    observe(once)
    with observing(seen.append):
        emit(1)
        emit(2)
    assert seen == [1, 1, 2] and not is_awaited()


def test_ranges_are_prefixed_nested_and_restored():
    seen = []

    @contextmanager
    def factory(name):
        seen.append(name)
        yield

    with ranges_on(factory), stage("up"), stage("down"):
        pass
    assert seen == ["sonicmoe.up", "sonicmoe.down"]
    assert module._ranges is None


def test_listeners_see_replace_chain_and_are_restored_after_an_error():
    with pytest.raises(KeyError), listening(lambda name, value: value + 1):
        assert tap("z", 1) == 2
        with listening(lambda name, value: (name, value)):
            assert tap("z", 1) == ("z", 2)
        assert tap("z", 1) == 2
        raise KeyError
    assert tap("z", 1) == 1
