"""`detect_nonfinite()`: the first node call whose result is not finite raises, with the stage,
expert, row and token that began it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..engine.interface import Saved
from ..enums import FlushMode
from ..errors import SonicMoEError
from ..interop import device_name
from ..node.mlp_call import MlpCall
from .bisect import GOLDEN, Report, bisect
from .bisect_report import text_of
from .call_hooks import CallObserver, forget, observe
from .step_capture import step_of_backward, step_of_forward
from .step_dump import StepDump, save_dump

logger = logging.getLogger("sonicmoe")

Tensor = torch.Tensor


class NonFiniteError(SonicMoEError, ArithmeticError):
    """A node computed NaN or infinity. `report` says where it began; `dump` is the file to bisect
    again, None if none was asked for.
    """

    def __init__(self, message: str, report: Report, dump: Path | None) -> None:
        """Message with the whole report."""
        super().__init__(message)
        self.report, self.dump = report, dump


@contextmanager
def detect_nonfinite(dump_dir: str | Path | None = None) -> Iterator[None]:
    """Inside the block every call of a `SonicMoEMlpNode` is checked: out after forward; dx, dprobs
    and weight gradients after backward.

    `MoE`, the functional API and transformers models do not run through the node: a block that saw
    no call ends with a warning, and `torch.autograd.detect_anomaly` is there for them. Waits for
    the device after every call, and costs nothing outside the block.

    Args:
        dump_dir: where the step that failed is written, for `sonicmoe bisect`.

    Raises:
        NonFiniteError: from the forward or backward that computed the first NaN or infinity.
    """
    watcher = _Watcher(None if dump_dir is None else Path(dump_dir))
    observe(watcher)
    try:
        yield
    except Exception:
        # Paddle turns what a backward raises into an OSError with a shortened message.
        if watcher.failure is not None:
            raise watcher.failure from None
        raise
    else:
        if not watcher.calls:
            logger.warning(NOTHING_SEEN)
    finally:
        forget(watcher)


NOTHING_SEEN = (
    "detect_nonfinite saw no node call and checked nothing: it watches SonicMoEMlpNode only; for MoE, the functional API and "
    "transformers models there is torch.autograd.detect_anomaly"
)


class _Watcher(CallObserver):
    def __init__(self, dump_dir: Path | None) -> None:
        self._dump_dir = dump_dir
        self.calls = 0
        self._step: StepDump | None = None
        self._pending: tuple[Any, ...] = ()
        self.failure: NonFiniteError | None = None

    def after_forward(
        self, call: MlpCall, x: Tensor, probs: Tensor, out: Tensor, saved: Saved | None
    ) -> None:
        self.calls += 1
        if not all_finite(out):
            self._fail(
                call, "out", step_of_forward(f"call {self.calls}", call, x, probs), device_name(x)
            )

    def before_backward(self, call: MlpCall, dout: Tensor, saved: Saved) -> None:
        self.calls = max(self.calls, 1)  # of a forward before the block
        # Stage-wise memory releases these fields in the middle of backward; a copy of the holder
        # keeps them.
        self._pending = (dout, Saved(saved.settings, saved.routing, saved.x, saved.z))

    def after_backward(
        self, call: MlpCall, result: tuple[Tensor, Tensor, list[Tensor | None]]
    ) -> None:
        (dout, saved), self._pending = self._pending, ()
        for name, tensor in named_gradients(call, result):
            if not all_finite(tensor):
                step = step_of_backward(f"call {self.calls}", call, dout, saved)
                self._fail(call, name, step, device_name(dout))

    def _fail(self, call: MlpCall, result: str, step: StepDump, device: str) -> None:
        report = bisect(step, call.engine.name, GOLDEN, device)
        path = None
        if self._dump_dir is not None:
            path = self._dump_dir / f"nonfinite-{step.name.replace(' ', '-')}.npz"
            save_dump(path, step)
        lines = [
            f"{result} is not finite (engine {call.engine.name}, {step.name} since detection began)",
            text_of(report),
        ]
        if report.fault is None:
            lines.append(
                "the same inputs give finite stages when run again: the engine did not repeat its result, or memory was overwritten"
            )
        if path is not None:
            lines.append(f"inputs written to {path}: sonicmoe bisect {path}")
        self.failure = NonFiniteError("\n".join(lines), report, path)
        raise self.failure


def named_gradients(
    call: MlpCall, result: tuple[Tensor, Tensor, list[Tensor | None]]
) -> Iterator[tuple[str, Tensor]]:
    """Everything a backward computed: dx, dprobs, and the weight gradients wherever the flush mode
    has left them.

    Weight gradients that the node puts off (`wgrad_queue`) are not there yet, and not checked.
    """
    dx, dprobs, returned = result
    yield from (("dx", dx), ("dprobs", dprobs))
    if not call.trainable or getattr(call, "wgrad_queue", None) is not None:
        return
    sums = call.experts.accumulators(dx.device)
    yield from (("dw1", sums.dw1), ("dw2", sums.dw2))
    if call.flush is FlushMode.BACKWARD:
        mains = (
            getattr(parameter, "main_grad", None) for parameter in call.experts.source.parameters()
        )
        yield from (
            ("flushed gradient", tensor) for tensor in (*returned, *mains) if tensor is not None
        )


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite; waits for the device."""
    return bool(torch.isfinite(tensor.detach().to(torch.float32)).all())
