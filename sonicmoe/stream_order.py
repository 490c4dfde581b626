"""One buffer, kernels of several CUDA streams."""

from __future__ import annotations

from typing import Any

import torch

from .interop import IS_PADDLE, current_stream, is_cuda

Tensor = torch.Tensor


class StreamOrder:
    """Has a stream that comes to a buffer wait for what the stream before it did there; on the
    device, never on the host.

    Costs one comparison as long as all work is on one stream. A capture is left alone: whoever
    captures has waited before, and orders replays. Does nothing under Paddle, whose programs
    compute on one stream.
    """

    def __init__(self) -> None:
        """No stream has come yet."""
        self._handle: int | None = None
        self._stream: Any = None
        self._done: Any = None
        self._several = False

    def __reduce__(self) -> tuple[type[StreamOrder], tuple[()]]:
        """A copy is of another buffer."""
        return StreamOrder, ()

    def enter(self, tensor: Tensor) -> None:
        """The current stream is about to use the buffer, which lies on the device of `tensor`."""
        handle = current_stream(tensor)
        if (
            handle == self._handle
            or IS_PADDLE
            or not is_cuda(tensor)
            or torch.cuda.is_current_stream_capturing()
        ):
            return
        stream = torch.cuda.current_stream(tensor.device)
        if self._done is not None:
            stream.wait_event(self._done)
        elif (
            self._stream is not None
        ):  # the first change: what is behind the buffer's last use there is waited for too
            stream.wait_stream(self._stream)
        self._several = self._stream is not None
        self._handle, self._stream = handle, stream

    def leave(self) -> None:
        """Everything that uses the buffer has been launched."""
        if self._several and not torch.cuda.is_current_stream_capturing():
            self._done = self._stream.record_event()
