"""The order of kernels that several CUDA streams launch on one buffer."""

from __future__ import annotations

from typing import Any

import torch

from .interop import IS_PADDLE, current_stream, is_cuda

Tensor = torch.Tensor


class StreamOrder:
    """Orders the streams that use one buffer: each waits, on the device, for the use before its
    own.

    The host never waits. As long as all work is on one stream this costs one comparison. During a
    capture nothing is added: the capturing program has waited before, and orders the replays. Does
    nothing under Paddle, whose programs compute on one stream.
    """

    def __init__(self) -> None:
        self._handle: int | None = None
        self._stream: Any = None
        self._done: Any = None
        self._several = False

    def __reduce__(self) -> tuple[type[StreamOrder], tuple[()]]:
        """A copy belongs to another buffer, which no stream has used."""
        return StreamOrder, ()

    def enter(self, tensor: Tensor) -> int:
        """The current stream, whose handle is returned, is about to use the buffer, which lies on the
        device of `tensor`.
        """
        # The raw handle first: it is an integer and costs less than a Stream object, and it is all
        # that a program with one stream ever needs.
        handle = current_stream(tensor)
        if (
            handle == self._handle
            or IS_PADDLE
            or not is_cuda(tensor)
            or torch.cuda.is_current_stream_capturing()
        ):
            return handle
        stream = torch.cuda.current_stream(tensor.device)
        # `_done` is the event behind the last use. None was recorded while there was one stream,
        # because an event costs a launch that such a program does not need.
        if self._done is not None:
            stream.wait_event(self._done)
        elif self._stream is not None:
            # The first change of streams waits for the whole other stream, also for work that was
            # launched there after the buffer's last use.
            stream.wait_stream(self._stream)
        self._several = self._stream is not None
        self._handle, self._stream = handle, stream
        return handle

    def join(self) -> None:
        """The current stream is about to use what the last stream used; it waits like one that
        enters.
        """
        stream = self._stream
        if stream is None or torch.cuda.is_current_stream_capturing():
            return
        current = torch.cuda.current_stream(stream.device)
        if current != stream:
            current.wait_stream(stream)

    def leave(self) -> None:
        """Everything that uses the buffer has been launched."""
        # Recorded once a second stream has come. From then on each use ends with an event.
        if self._several and not torch.cuda.is_current_stream_capturing():
            self._done = self._stream.record_event()
