"""`detect_nonfinite()`: the first call of a layer of experts whose result is not finite raises. The
error has the stage, expert, row and token that began it, in the caller's own names and indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ..errors import SonicMoEError
from ..interop import IS_PADDLE, device_name, holds_memory
from ..log import logger
from ..observe import (
    FACES,
    BackwardBegins,
    BackwardDone,
    CallEvent,
    ExpertCall,
    ForwardDone,
    observing,
)
from ..quant.tokens import anchor_of
from .bisect import BisectReport, bisect
from .bisect_report import text_of
from .capture import step_of_backward, step_of_forward
from .module_names import names_of_factors, parameters_behind
from .step_dump import StepDump, save_dump

Tensor = torch.Tensor


class NonFiniteError(SonicMoEError, ArithmeticError):
    """A layer of experts computed NaN or infinity. `report` says where it began; `dump` is the file
    to bisect again, None if none was asked for.
    """

    def __init__(self, message: str, report: BisectReport, dump: Path | None) -> None:
        super().__init__(message)
        self.report, self.dump = report, dump

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[str, BisectReport, Path | None]]:
        """Processes hand exceptions to each other."""
        return type(self), (str(self), self.report, self.dump)


@contextmanager
def detect_nonfinite(dump_dir: str | Path | None = None) -> Iterator[None]:
    """Inside the block every call of experts is checked: out and the weights after forward; dx,
    dprobs and weight gradients after backward. A weight may be bad where out is not: no token uses
    its expert, or the engine has computed on FP8 copies that are older than the weight.

    So are those of `SonicMoEMlpNode`, `MoE`, the functional API, PaddleFleet, and transformers
    models that run on the engine, also inside compiled graphs. A block that saw no call ends with a
    warning. Waits for the device after every call, and costs nothing outside the block.

    Args:
        dump_dir: where the step that failed is written, for `sonicmoe bisect`.

    Raises:
        NonFiniteError: from the forward or backward that computed the first NaN or infinity, or whose
            weights have one.
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
    "detect_nonfinite saw no call of experts and checked nothing: it watches SonicMoEMlpNode, MoE, "
    "the functional API, and transformers models whose experts implementation is sonicmoe"
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
            self._fail_in_forward("out", event)
        factors = {name: (factor,) for name, factor in event.call.factors.items()}
        for name, weights in {**event.call.weights, **factors}.items():
            if not _are_finite(weights):
                self._fail_in_forward(name, event)

    def _fail_in_forward(self, result: str, event: ForwardDone) -> None:
        step = step_of_forward(f"call {self.calls}", event)
        self._fail(result, step, event.call, device_name(event.out))

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
                self._fail(name, step, begun.call, device_name(anchor_of(begun.dout)))

    def _fail(self, result: str, step: StepDump, call: ExpertCall, device: str) -> None:
        engine = step.settings.engine
        # The step runs once more, stage by stage, on copies of its inputs. This is slow and happens
        # once, because the block ends here.
        report = bisect(step, engine, device)
        path = None
        if self._dump_dir is not None:
            path = _unused(self._dump_dir / f"nonfinite-{step.name.replace(' ', '-')}.npz")
        called = (None if step.caller is None else step.caller.called(result)) or result
        called = "output" if called == "out" else called
        # The name of a weight has that of its layer.
        layer = f" of {report.layer}" if report.layer and report.layer not in called else ""
        lines = [
            f"{called}{layer} is not finite (engine {engine}, {step.name} since detection began)",
            text_of(report),
        ]
        lines += _about_adapters(report, call)
        lines += _about_copies(step, call)
        if report.fault is None and len(lines) == 2:
            lines.append(
                "the same inputs give finite stages when run again: the engine did not repeat its "
                "result, or memory was overwritten"
            )
        if path is not None:
            try:
                save_dump(path, step)
                lines.append(f"inputs written to {path}: sonicmoe bisect {path}")
            except OSError as error:  # the finding counts for more
                lines.append(f"the inputs cannot be written: {error}")
                path = None
        self.failure = NonFiniteError("\n".join(lines), report, path)
        raise self.failure


def _about_copies(step: StepDump, call: ExpertCall) -> list[str]:
    """A line where only one of the engine's copies and the weights is finite: a write that leaves no
    trace makes no new copies.
    """
    if step.settings.recipe is None:
        return []
    old = [
        name
        for name, weight, copy in zip(
            ("w1", "w2"), (step.w1, step.w2), call.read_weights(), strict=True
        )
        if np.isfinite(weight).all() != all_finite(copy)
    ]
    if not old:
        return []
    return [
        f"the engine computed on FP8 copies of {' and '.join(old)} that are older than the weights: "
        "call invalidate_caches() after a write through .data, or by an optimizer that is no torch.optim.Optimizer"
    ]


def _about_adapters(report: BisectReport, call: ExpertCall) -> list[str]:
    """A line where a weight that is not finite is computed from others, as adapters do: the
    parameter under its own name may be sound.
    """
    stage = "" if report.fault is None else report.fault.stage
    if stage not in call.weights:
        return []
    behind = () if IS_PADDLE or call.module is None else parameters_behind(call.module)
    bad = [name for name, parameter in behind if not all_finite(parameter)]
    # Those of peft are among the parameters behind, under its own names.
    bad = bad or [name for name, factor in names_of_factors(call) if not all_finite(factor)]
    own = str(getattr(FACES[call.face], stage))
    if not bad or any(f".{name}".endswith(f".{own}") for name in bad):
        return []
    return [f"{own} is computed from parameters that are not finite: {', '.join(bad)}"]


def _are_finite(weights: Sequence[Tensor]) -> bool:
    """Whether no weight, stacked or one per expert, has an entry that is NaN or infinite; True for
    those whose memory the framework has freed.
    """
    # Expert after expert, because the check makes an fp32 copy of what it looks at.
    held = [weight for weight in weights if holds_memory(weight)]
    return all(
        all_finite(part)
        for weight in held
        for part in (weight if len(weight.shape) == 3 else [weight])
    )


def _unused(path: Path) -> Path:
    """This path, or the first of path-2, path-3, ... where an earlier block has left a file."""
    stem, number = path.stem, 1
    while path.exists():
        number += 1
        path = path.with_stem(f"{stem}-{number}")
    return path


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite; waits for the device."""
    # In fp32, so that one check serves results of every dtype.
    return bool(torch.isfinite(tensor.detach().to(torch.float32)).all())
