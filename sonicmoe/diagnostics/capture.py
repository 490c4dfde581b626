"""Take the inputs of calls out of a running program, for `sonicmoe numerics --captured`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .call_events import BackwardBegins, CallEvent
from .cases import Case
from .stages import observing
from .step_capture import step_of_backward


@contextmanager
def captured_calls(name: str) -> Iterator[list[Case]]:
    """Inside the block, every backward of every node appends a copy of its inputs to the list: the
    last layer's comes first.

    Cases are called `{name}-0`, `{name}-1`, ... SwiGLU experts without biases only, whatever engine
    and precision they run in.
    """
    cases: list[Case] = []

    def collect(event: CallEvent) -> None:
        # At this event the saved tensors are complete. Later the backward may release them one by
        # one.
        if isinstance(event, BackwardBegins):
            cases.append(case_of(f"{name}-{len(cases)}", event))

    with observing(collect):
        yield cases


def case_of(name: str, event: BackwardBegins) -> Case:
    """The inputs of one call as a case."""
    step = step_of_backward(name, event)
    assert step.dout is not None
    return Case(name, step.x, step.indices, step.probs, step.w1, step.w2, step.dout)
