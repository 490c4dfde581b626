"""A stream of high priority for communication that runs beside weight gradients.

Thread blocks of a GEMM that are done leave their multiprocessor to the next thread block in line,
and without a priority those are the rest of the same GEMM: small kernels of another stream, such as
the sum of a combine, then wait for its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from ..interop import IS_PADDLE
from ..node.late_wgrad import tensors_in

Tensor = torch.Tensor
T = TypeVar("T")


class SideStream:
    """Launches work beside the caller's stream. On a host the work runs at once, and under Paddle on
    the caller's stream, because its memory cannot be kept until another stream has read it.
    """

    def __init__(self) -> None:
        """Makes no stream before the first GPU tensor."""
        self._stream: torch.cuda.Stream | None = None

    def __reduce__(self) -> tuple[type[SideStream], tuple[()]]:
        """A copy makes a stream of its own."""
        return SideStream, ()

    def run(self, work: Callable[[], T], *reads: Any) -> T:
        """Launch `work`, which returns tensors, behind everything that the caller's stream was given
        so far. The caller's next launches come after it; the host waits for nothing.

        reads: the tensors of the caller's stream that `work` reads. Their memory is not handed out
        again before it has read them.
        """
        tensors = [] if IS_PADDLE else _on_gpu(reads)
        if not tensors:
            return work()
        device = tensors[0].device
        if self._stream is None:
            # PyTorch takes the highest priority that the device has.
            self._stream = torch.cuda.Stream(device=device, priority=-100)
        side, callers = self._stream, torch.cuda.current_stream(device)
        side.wait_stream(callers)
        _keep_until(side, tensors)
        with torch.cuda.stream(side):
            value = work()
        callers.wait_stream(side)
        _keep_until(callers, _on_gpu(value))
        return value


def _on_gpu(value: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(value) if tensor.is_cuda]


def _keep_until(stream: Any, tensors: Iterable[Tensor]) -> None:
    """Keep memory that other streams allocated from reuse until `stream` has read it."""
    for tensor in tensors:
        tensor.record_stream(stream)
