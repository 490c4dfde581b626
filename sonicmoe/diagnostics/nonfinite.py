"""`detect_nonfinite()`: the first call of a layer of experts whose result is not finite raises, with
the stage, expert, row and token that began it, in the caller's own names and indices.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from ..errors import SonicMoEError
from ..interop import device_name
from ..quant.tokens import anchor_of
from .bisect import GOLDEN, Report, bisect
from .bisect_report import text_of
from .call_events import BackwardBegins, BackwardDone, CallEvent, ForwardDone
from .stages import observing
from .step_capture import step_of_backward, step_of_forward
from .step_dump import StepDump, save_dump

logger = logging.getLogger("sonicmoe")

Tensor = torch.Tensor


class NonFiniteError(SonicMoEError, ArithmeticError):
    """A layer of experts computed NaN or infinity. `report` says where it began; `dump` is the file
    to bisect again, None if none was asked for.
    """

    def __init__(self, message: str, report: Report, dump: Path | None) -> None:
        """Message with the whole report."""
        super().__init__(message)
        self.report, self.dump = report, dump


@contextmanager
def detect_nonfinite(dump_dir: str | Path | None = None) -> Iterator[None]:
    """Inside the block every call of experts is checked: out after forward; dx, dprobs and weight
    gradients after backward.

    So are those of `SonicMoEMlpNode`, `MoE`, the functional API, PaddleFleet, and transformers
    models that run on the engine, also inside compiled graphs. A block that saw no call ends with a warning. Waits for
    the device after every call, and costs nothing outside the block.

    Args:
        dump_dir: where the step that failed is written, for `sonicmoe bisect`.

    Raises:
        NonFiniteError: from the forward or backward that computed the first NaN or infinity.
    """
    watcher = _Watcher(None if dump_dir is None else Path(dump_dir))
    try:
        with observing(watcher):
            yield
    except Exception:
        # Paddle turns what a backward raises into an OSError with a shortened message.
        # The original is kept by the watcher and raised in place of the framework's version of it.
        if watcher.failure is not None:
            raise watcher.failure from None
        raise
    else:
        if not watcher.calls:
            logger.warning(NOTHING_SEEN)


NOTHING_SEEN = (
    "detect_nonfinite saw no call of experts and checked nothing: it watches SonicMoEMlpNode, MoE, the functional API, and "
    "transformers models whose experts implementation is sonicmoe"
)


class _Watcher:
    """Observes calls and raises at the first result that is not finite."""

    def __init__(self, dump_dir: Path | None) -> None:
        self._dump_dir = dump_dir
        self.calls = 0
        self._begun: BackwardBegins | None = None
        self.failure: NonFiniteError | None = None

    def __call__(self, event: CallEvent) -> None:
        if isinstance(event, ForwardDone):
            self._check_forward(event)
        elif isinstance(event, BackwardBegins):
            self.calls = max(self.calls, 1)  # of a forward before the block
            # Stage-wise memory releases fields of `saved` in the middle of backward; a copy of the
            # holder keeps them.
            self._begun = replace(event, saved=replace(event.saved))
        elif isinstance(event, BackwardDone):
            self._check_backward(event)

    def _check_forward(self, event: ForwardDone) -> None:
        self.calls += 1
        if not all_finite(event.out):
            step = step_of_forward(f"call {self.calls}", event)
            self._fail("out", step, device_name(event.out))

    def _check_backward(self, event: BackwardDone) -> None:
        # Taken out before the checks, so that the copy of the activations does not outlive this
        # backward.
        begun, self._begun = self._begun, None
        if begun is None:
            return  # it began before the block
        results = (("dx", event.dx), ("ds", event.dprobs), *event.weight_gradients())
        for name, tensor in results:
            if not all_finite(tensor):
                step = step_of_backward(f"call {self.calls}", begun)
                self._fail(name, step, device_name(anchor_of(begun.dout)))

    def _fail(self, result: str, step: StepDump, device: str) -> None:
        engine = step.settings.engine
        # The step runs once more, stage by stage, on copies of its inputs. This is slow and happens
        # once, because the block ends here.
        report = bisect(step, engine, GOLDEN, device)
        path = None
        if self._dump_dir is not None:
            path = _unused(self._dump_dir / f"nonfinite-{step.name.replace(' ', '-')}.npz")
            save_dump(path, step)
        called = result if step.caller is None else step.caller.called(result)
        # The name of a weight has that of its layer.
        layer = f" of {report.layer}" if report.layer and report.layer not in called else ""
        lines = [
            f"{called}{layer} is not finite (engine {engine}, {step.name} since detection began)",
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


def _unused(path: Path) -> Path:
    """That path, or the first of path-2, path-3, ... where an earlier block has left a file."""
    stem, number = path.stem, 1
    while path.exists():
        number += 1
        path = path.with_stem(f"{stem}-{number}")
    return path


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite; waits for the device."""
    # In fp32, so that one check serves results of every dtype.
    return bool(torch.isfinite(tensor.detach().to(torch.float32)).all())
