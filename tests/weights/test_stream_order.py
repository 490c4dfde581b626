"""Which stream waits for what when several use one buffer: told by streams that log."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from framework import IS_PADDLE, torch

from sonicmoe import stream_order
from sonicmoe.stream_order import StreamOrder

if IS_PADDLE:
    pytest.skip("Paddle's programs compute on one stream", allow_module_level=True)


@pytest.fixture
def streams(monkeypatch):
    """`use(order, handle)`: a kernel of that stream on the buffer; `log`: what had to wait."""
    here = SimpleNamespace(log=[], current=0, capturing=False, events=0)

    class Stream:
        def __init__(self, handle):
            self.handle = handle

        def wait_stream(self, other):
            here.log.append(f"{self.handle} waits for stream {other.handle}")

        def wait_event(self, event):
            here.log.append(f"{self.handle} waits for {event}")

        def record_event(self):
            here.events += 1
            return f"event {here.events} of {self.handle}"

    def use(order, handle, capturing=False):
        here.current, here.capturing = handle, capturing
        order.enter(torch.ones(1))
        order.leave()

    cuda = SimpleNamespace(
        is_current_stream_capturing=lambda: here.capturing,
        current_stream=lambda device: Stream(here.current),
    )
    monkeypatch.setattr(stream_order, "torch", SimpleNamespace(cuda=cuda, Tensor=torch.Tensor))
    monkeypatch.setattr(stream_order, "is_cuda", lambda tensor: True)
    monkeypatch.setattr(stream_order, "current_stream", lambda tensor: here.current)
    here.use = use
    return here


def test_one_stream_waits_for_nothing_and_records_nothing(streams):
    order = StreamOrder()
    for _ in range(3):
        streams.use(order, 7)
    assert streams.log == [] and streams.events == 0


def test_each_change_waits_for_the_last_use(streams):
    order = StreamOrder()
    for handle in (0, 1, 1, 0, 2):
        streams.use(order, handle)
    assert streams.log == [
        "1 waits for stream 0",
        "0 waits for event 2 of 1",
        "2 waits for event 3 of 0",
    ]


def test_a_capture_is_left_alone(streams):
    order = StreamOrder()
    streams.use(order, 0)
    streams.use(order, 5, capturing=True)
    streams.use(order, 0)
    assert streams.log == [] and streams.events == 0
