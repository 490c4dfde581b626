"""Run a dumped step on an engine and take every stage tensor it shows, on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ..engine.interface import Engine, EngineSettings, EngineWeights, GradientTargets
from ..interop import device_name, plain_ops
from ..observe import listening, tap
from ..quant.format import BlockScaledTensor, Code, Orientation
from ..quant.recipes import BlockShape
from ..quant.reference import dequantize
from ..quant.tokens import tokens_of
from ..routing.build import build_routing
from ..routing.ids import is_here
from ..routing.metadata import RoutingMetadata
from .capture import to_numpy
from .stage_stats import StageValue
from .step_dump import Array, StepDump

Tensor = torch.Tensor


@dataclass(eq=False)
class StageRun:
    """Stage tensors of one run by name, routing tensors apart: a listener that keeps a host copy of
    everything shown once. What an engine taps beats what its seam returns.

    forced: values of another run by stage, with which the engine goes on. So every stage that is kept
        is computed from the inputs which that run had for it.
    error: the exception that ended the run early, None where none did.
    """

    engine: str
    forced: Mapping[str, Array]
    stages: dict[str, StageValue] = field(default_factory=dict)
    routing: dict[str, Array] = field(default_factory=dict)
    error: str | None = None

    def __call__(self, name: str, value: Any) -> Any:
        """Keep `value`; return it, or what is forced in its place."""
        if isinstance(value, RoutingMetadata):
            # The routing contract says every value of these tensors, so they are compared exactly
            # and apart from the stages.
            self.routing = {
                field: to_numpy(getattr(value, field)) for field in RoutingMetadata.TENSOR_FIELDS
            }
        elif isinstance(value, BlockScaledTensor):
            # Statistics of code use are about logical rows, so token-major codes are turned round.
            codes = to_numpy(value.codes.to(torch.float32))
            codes = codes if value.orientation is Orientation.ROWS else codes.swapaxes(-1, -2)
            self.stages[name] = StageValue(to_numpy(dequantize(value)), codes, value.code.max)
        else:
            self.stages[name] = StageValue(to_numpy(value))
        forced = self.forced.get(name)
        return value if forced is None else _in_place_of(value, forced)

    def at_seam(self, name: str, value: Any) -> None:
        """Show a value that an engine has returned, unless its own tap has shown that stage."""
        if value is not None and name not in self.stages:
            tap(name, value)


def _in_place_of(value: Any, values: Array) -> Any:
    """`values` as a tensor of the type of `value`."""
    if not isinstance(value, BlockScaledTensor):
        return _tensor(values, device_name(value)).to(value.dtype)
    # Every value is the scale of a code 1 in a block of its own, and so stays as it is. Quantising
    # it once more could move it.
    scales = _tensor(values, device_name(value.scale_inv))
    codes = torch.ones_like(scales).to(Code.E4M3.dtype)
    return BlockScaledTensor(codes, scales, BlockShape(1, 1), Code.E4M3)


def run_stages(
    step: StepDump,
    engine: Engine,
    device: str,
    *,
    forced: Mapping[str, Array] | None = None,
) -> StageRun:
    """Routing, weights, forward and backward of a step. Stages come from the engine's taps; for a
    stage that it does not tap, the returned value stands in.

    An engine that raises ends its run: `error` says how, and the stages before it stay.

    Args:
        forced: values by stage that the engine goes on with instead of its own. Nobody else listens
            to such a run: a listener may have changed the run that the values are from.
    """
    run = StageRun(engine.name, forced or {})
    try:
        # The listener is process-wide, so no other engine may run meanwhile.
        with plain_ops(), listening(run, alone=forced is not None):
            run_step(step, engine, device, run.at_seam)
    except Exception as error:
        run.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return run


def run_step(
    step: StepDump, engine: Engine, device: str, at_seam: Callable[[str, Any], None]
) -> None:
    """Routing, weights, forward, and with a `dout` backward, in the step's settings.

    at_seam: gets what the engine returned, by stage: out, z_saved, ds, dz, y1s, dx and every
        weight gradient.
    """
    settings = step.settings.computed
    dtype = getattr(torch, step.settings.dtype)

    def given(name: str) -> Any:
        if getattr(step, f"{name}_codes", None) is not None:
            return tap(name, _fp8_tokens(step, name, device))
        return tap(name, _tensor(getattr(step, name), device).to(dtype))

    x = given("x")
    w1, w2 = given("w1"), given("w2")
    b1, b2 = None, None
    if step.b1 is not None and step.b2 is not None:
        # Engines read biases in fp32, whatever the dtype of the tokens is.
        b1, b2 = tap("b1", _tensor(step.b1, device)), tap("b2", _tensor(step.b2, device))
    probs, indices = tap("probs", _tensor(step.probs, device)), _tensor(step.indices, device)
    # Counts come from the host, as a dispatcher lists them, so that the builder takes the same way
    # as in training.
    served = step.indices[is_here(step.indices, step.num_experts)]
    counts = np.bincount(served, minlength=step.num_experts).tolist()
    routing = build_routing(
        indices, probs, step.num_experts, counts, alignment=settings.row_alignment
    )
    routing = tap("routing", routing)
    weights = _shown_weights(engine.prepare_weights(w1, w2, b1, b2, settings), settings)
    out, saved = engine.forward(x, routing, weights, settings)
    at_seam("out", out)
    assert saved is not None
    at_seam("z_saved", saved.z)
    if step.dout is None:
        return
    dx, ds, pending = engine.backward_dx(given("dout"), saved, weights)
    for name, value in (("ds", ds), ("dz", pending.dz), ("y1s", pending.y1s), ("dx", dx)):
        at_seam(name, value)  # before wgrad, which releases them
    (experts, n1, hidden), width = step.w1.shape, step.w2.shape[2]
    # Fresh accumulators of zeros: weight gradients are added to what is there.
    sums = GradientTargets.zeros(experts, n1, hidden, width, bias=b1 is not None, device=w1.device)
    engine.backward_dw(pending, sums)
    for name, gradient in sums.named().items():
        at_seam(name, gradient)


def _shown_weights(weights: EngineWeights, settings: EngineSettings) -> EngineWeights:
    """Tap both weights; values that dgrad shares stay shared."""
    recipe = settings.recipe
    for name in ("w1", "w2"):
        prepared = getattr(weights, name)
        shown = tap(f"{name}_fp8", prepared)
        if shown is not prepared:
            shared = recipe is None or getattr(recipe, f"{name}_dgrad") == getattr(recipe, name)
            weights = replace(
                weights, **{name: shown}, **({f"{name}_dgrad": shown} if shared else {})
            )
    return weights


def _fp8_tokens(step: StepDump, name: str, device: str) -> BlockScaledTensor:
    """x or dout as it arrived."""
    held, scale = getattr(step, f"{name}_codes"), getattr(step, f"{name}_scale")
    codes = _tensor(held.astype(np.uint8), device).view(torch.float8_e4m3fn)
    return tokens_of(codes, _tensor(scale.astype(np.float32), device))


def _tensor(array: Array, device: str) -> Tensor:
    return torch.tensor(np.ascontiguousarray(array), device=device)
