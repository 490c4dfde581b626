"""A call of a layer that lives from step to step: its weights and their gradients belong to a
`LayerState`. It runs under autograd, or as a step of a schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import and_
from typing import TYPE_CHECKING, Any

import torch

from .. import autograd
from ..borrowed import Borrowed
from ..config import ACTIVE, ResolvedConfig, active_config
from ..engine.interface import EngineWeights, Saved, Tokens
from ..engine.settings import TokenFormat
from ..errors import DTypeError, ShapeError, expect
from ..gradients.batch import GradientBatch
from ..gradients.flush import add_to_grad
from ..interop import (
    IS_PADDLE,
    dtype_name,
    grad_enabled,
    holds_memory,
    plain_ops,
    require_framework_tensor,
    requires_grad,
)
from ..observe import stage
from ..out_of_memory import advising, raise_with_advice
from ..quant.tokens import anchor_of, checked_tokens, is_fp8, to_bfloat16
from .arrivals import Arrivals, GradientSource, gradient_from, tokens_among
from .beside import Beside
from .call import LayerCall, Named
from .late_wgrad import WgradOffer, WgradStore, WgradWork, fire_hooks
from .plan import OwnPlan
from .state import LayerState

if TYPE_CHECKING:
    from ..observe import NativeWeights

Tensor = torch.Tensor


@dataclass(eq=False, kw_only=True)
class NodeCall(LayerCall, autograd.DifferentiableCall):
    """It is never written to. Activations live in the autograd context, so any number of calls may be
    outstanding.

    state: the node's, shared by all its calls.
    parameters: the layer's as this forward found them, which are the inputs of the autograd node.
    beside: biases and adapters; None where there are none.
    num_inputs: of the differentiable call, without those of `beside`; see `forward`.
    wgrad_offer: to whom weight gradients are offered; the parameters are then no inputs of the
        autograd node. None: to nobody.
    dout_source: asked for the gradient of the output by every backward; None: autograd has it.
    """

    state: LayerState
    parameters: list[Tensor]
    beside: Beside | None = None
    num_inputs: int = 2
    dout_source: GradientSource | None = None
    wgrad_offer: WgradOffer | WgradStore | None = None
    releases_saved: bool = False
    attaches_parameters: bool = True

    def explain(self, error: Exception, during: str) -> None:
        like = None if self.is_sorted else self.routes
        raise_with_advice(error, during, self.plan.settings, like)

    def run(self, inputs: tuple[Tensor, ...], *, save: bool) -> tuple[Tensor, Saved | None]:
        """`forward` outside autograd."""
        with advising("forward", self.plan.settings, inputs[0]):
            return self.forward(inputs, save=save)

    def forward(self, inputs: tuple[Tensor, ...], *, save: bool) -> tuple[Tensor, Saved | None]:
        """Routing, then the engine, on `(x, probs)`; on `(x, probs, scales)` where x arrived in
        FP8, and on `(dx_to, probs, scales, x)` where its gradient goes to another tensor. Rows in
        expert order may come without probabilities, as `(x,)`. Biases and factors of adapters stand
        behind these. The gradient of the tokens belongs to the first input, whichever it is. The
        caller has activated the plan's configuration.
        """
        inputs = inputs[: self.num_inputs]
        probs = inputs[1] if len(inputs) > 1 else None
        with plain_ops():  # once: inside, autocast costs nothing more
            x = inputs[0] if len(inputs) <= 2 else self._fp8_tokens(inputs)
            with stage("routing"):
                routing = self.route(int(inputs[0].shape[0]), probs, self.state.sizes[0])
            return self.compute(x, probs, routing, save)

    def _weights(self) -> EngineWeights:
        assert self.reading is not None
        weights = self.reading.weights
        return weights if self.beside is None else self.beside.read(weights)

    def _fp8_tokens(self, inputs: tuple[Tensor, ...]) -> Tokens:
        x = tokens_among(inputs)
        tokens = checked_tokens(x.detach(), inputs[2].detach())
        return to_bfloat16(tokens) if self.plan.dequantises else tokens

    def backward(
        self,
        gradients: tuple[Tensor, ...],
        saved: Saved | None,
        *,
        reached: Sequence[bool] | None = None,
        collected: bool = False,
    ) -> tuple[tuple[Tensor | None, ...], list[Tensor | None]]:
        """`(dout,)` -> `(dx, dprobs)` and gradients to return per parameter; the others are added
        to `main_grad`, or wait in the node.
        """
        assert saved is not None and self.reading is not None
        dout, plan, sink = gradients[0], self.plan, self.state.gradients
        trained = list(map(requires_grad, self.parameters))
        if reached is not None:
            # `torch.autograd.grad(loss, x)` runs this backward too, and must not add weight
            # gradients that nobody asked for.
            trained = list(map(and_, trained, reached))
        before = ACTIVE.set(plan.config)
        try:
            if self.dout_source is not None:
                with plain_ops():
                    source = self.dout_source, dout, plan.chosen, plan.settings
                    dout = gradient_from(*source)  # type: ignore[assignment]
            # Several threads may run backwards of this layer, or of layers that share experts.
            with sink.alone(anchor_of(dout)):
                # The caller may have overwritten what stands beside the weights.
                self.reading.check_current()
                if self.beside is not None:
                    self.beside.borrowed.check()
                if collected and any(trained) and self.wgrad_offer is None:
                    sink.check_collectable(self.parameters, trained)
                dx, dprobs, (behind, returned, _) = self.differentiate(dout, saved, trained)
        finally:
            ACTIVE.reset(before)
        of_inputs = dx, dprobs.reshape([-1]) if self.is_sorted else dprobs, None, None
        return (*of_inputs[: self.num_inputs], *behind), returned

    def _gradients(
        self, dout: Tokens, saved: Saved, trained: Sequence[bool]
    ) -> tuple[
        Tensor, Tensor, tuple[tuple[Tensor | None, ...], list[Tensor | None], GradientBatch | None]
    ]:
        """Behind dx and dprobs: gradients of biases and factors, those that are returned per
        parameter, and the memory that took the others.
        """
        state, batch, beside, parameters = self.state, None, self.beside, self.parameters
        engine, settings, config = self.plan.chosen, self.plan.settings, self.plan.config
        state.gradients.overwriting.begin(self.plan.first_backward, parameters)
        trains, trained = any(trained), list(trained)
        # Memory first: a backward that runs out of it must not have added anything yet.
        if trains and self.wgrad_offer is None:
            given = engine, settings, parameters, trained, anchor_of(dout)
            batch = state.gradients.open(*given)
            if batch.waits or IS_PADDLE:  # the others leave nothing to ask about
                state.note_backward(batch)
        saved.wants_biases = beside is not None and beside.trains_biases
        saved.wants_weights = trains or saved.wants_biases or self.wgrad_offer is not None
        dx, dprobs, pending = engine.backward_dx(dout, saved, self._weights())
        # Before the weights', which may be put off, free operands, or be wanted by nobody.
        behind = () if beside is None else beside.gradients(engine, pending)
        returned: list[Tensor | None] = [None] * len(trained)
        if batch is not None:
            state.gradients.add(engine, pending, batch)
            returned = state.gradients.close(batch)
            if not state.idle_grads:
                returned = state.of_busy(returned, parameters, pending.routing)
        elif self.wgrad_offer is not None:
            work = WgradWork(state.gradients, config, engine, settings, parameters)
            work.offer(self.wgrad_offer, trained, pending)
        return dx, dprobs, (behind, returned, batch)

    def _left(self, gradients: Any) -> Named:
        _, returned, batch = gradients
        return partial(self._weight_gradients, returned, batch)

    def _told(self) -> Mapping[str, Any]:
        # The first half of the list are weights of the up-projection: one, or one of each expert.
        half = len(self.parameters) // 2
        weights = {"w1": self.parameters[:half], "w2": self.parameters[half:]}
        beside = {} if self.beside is None else dict(self.beside.borrowed.named)
        weights |= {name: [beside.pop(name)] for name in ("b1", "b2") if name in beside}
        return {"weights": weights, "layer": self.state, "factors": beside}

    def _native(self) -> NativeWeights:
        assert self.reading is not None
        held = all(map(holds_memory, self.parameters))
        weights = self.state.parameters.native() if held else self.reading.values()
        return (*weights, None, None) if self.beside is None else self.beside.native(*weights)

    def _weight_gradients(
        self, returned: Sequence[Tensor | None], batch: GradientBatch | None
    ) -> Iterator[tuple[str, Tensor]]:
        """The weight gradients of this backward, by name, wherever they were left; those that
        were put off are nowhere yet.
        """
        if batch is None:
            return
        if batch.waits:
            yield from self.state.gradients.held().items()
            return
        mains = (getattr(parameter, "main_grad", None) for parameter in self.parameters)
        yield from (
            ("weight gradient", tensor) for tensor in (*returned, *mains) if tensor is not None
        )


@autograd.eagerly
def run(x: Tensor, arrived: Arrivals, state: LayerState, own: OwnPlan) -> Tensor:
    """The output `[T, H]` of one call of a node, under autograd: from its arguments to its kernels.

    state, own: of the node. Errors are those of `SonicMoEMlpNode.forward`.
    """
    experts, hidden, _ = state.sizes
    inputs = arrived.inputs(x, experts, hidden)
    autograd.refuse_transforms(inputs)
    config = own.config or active_config()
    before = ACTIVE.set(config)
    try:
        call = _call_on(inputs, arrived, state, own, config.resolve())
        # Outside autograd nothing is saved for a backward that cannot come.
        wanted = any(map(requires_grad, inputs)) or any(map(requires_grad, call.parameters))
        if wanted and grad_enabled():
            return autograd.apply(call, inputs, call.parameters)  # type: ignore[no-any-return]
        return call.run(inputs, save=False)[0]
    finally:
        ACTIVE.reset(before)


def run_step(
    x: Tensor, arrived: Arrivals, state: LayerState, own: OwnPlan
) -> tuple[Tensor, NodeCall, Saved]:
    """The same outside autograd, whose backward somebody else runs: the output, the call, and what its
    backward needs.
    """
    experts, hidden, _ = state.sizes
    # Weights are read as for training, also where the schedule has switched gradients off.
    with own.scope() as config:
        with torch.enable_grad():
            inputs = arrived.inputs(x, experts, hidden)
            call = _call_on(inputs, arrived, state, own, config.resolve())
        out, saved = call.run(inputs, save=True)
    assert saved is not None
    return out, call, saved


def _call_on(
    inputs: tuple[Tensor, ...],
    arrived: Arrivals,
    state: LayerState,
    own: OwnPlan,
    resolved: ResolvedConfig,
) -> NodeCall:
    """One forward of these inputs with everything that it and its backward need; inside the scope
    of the plan, whose configuration is `resolved`.
    """
    beside, num_inputs, x = None, 2, inputs[0]
    kind: Any = x.dtype, TokenFormat.PLAIN, False, False
    if len(inputs) != 2:  # else plain tokens and probabilities
        has_biases, has_adapters = arrived.biases is not None, arrived.adapters is not None
        if has_biases or has_adapters:
            beside = Beside(arrived.biases, arrived.adapters, state.parameters)
        num_inputs = len(inputs) - (0 if beside is None else len(beside.inputs))
        x = tokens_among(inputs[:num_inputs])
        kind = *arrived.form(x), has_biases, has_adapters
    # Read once per call: modules may replace their weights between calls, and the list is at once
    # the input of autograd, the source of the engine weights and the destination of the gradients.
    parameters = state.parameters.parameters()
    if arrived.copies is None:
        plan, reading = state.bound.bind(own, resolved, x, kind, parameters)
    else:
        plan, reading = state.bound.bind_copies(own, x, kind, parameters, arrived.copies)
    offer = None
    if state.offers is not None:
        runs_without = arrived.is_stepped or any(map(requires_grad, inputs))
        offer = state.offer_for(parameters, runs_without)
    return NodeCall(
        plan=plan,
        routes=arrived.indices,
        is_sorted=arrived.is_sorted,
        tokens_per_expert=arrived.tokens_per_expert,
        is_checked=True,
        reading=reading,
        state=state,
        parameters=parameters,
        beside=beside,
        num_inputs=num_inputs,
        dout_source=arrived.dout_source,
        wgrad_offer=offer,
        releases_saved=plan.settings.frees_stagewise,
        attaches_parameters=offer is None,
    )


class BackwardStep:
    """The backward of one `forward_step`, to be run once, where a schedule and not autograd decides
    when. It keeps alive what that forward saved.

    Weight gradients go where they go in a backward under autograd, and then the backward hooks of
    the weights are fired, under Paddle: under PyTorch nobody but autograd can.
    """

    def __init__(self, call: NodeCall, saved: Saved, given: dict[str, Tensor]) -> None:
        """`given`: the caller's tensors that the backward reads, by their names."""
        self._call, self._saved = call, saved
        self._given = Borrowed(given.items())
        self._shape = tuple(int(size) for size in given["x"].shape)
        self._ran = False

    def backward(self, dout: Tensor) -> tuple[Tensor, Tensor]:
        """`(dx [T, H], dprobs fp32 [T, K])` of `dout [T, H]`, the gradient of the output; e4m3
        codes where the forward was given a `dout_source` that has their scales.

        Raises:
            RuntimeError: it ran before, or the tokens were written or freed since the forward.
            ShapeError, DTypeError: `dout` is not of the output's shape, or FP8 without a source.
            OutOfMemoryError: nothing was added, and it may be run again, unless stage-wise memory
                has dropped z.
        """
        if self._ran:
            raise RuntimeError(
                "this backward ran before; needed: one backward of each forward_step()"
            )
        self._check(dout)
        call = self._call
        # Asked before the backward, as autograd does: a hook may freeze a weight.
        trained = list(map(requires_grad, call.parameters))
        try:
            with plain_ops():
                (dx, dprobs, *_), returned = call.backward((dout,), self._saved)
        except Exception as error:
            call.explain(error, "backward")
            raise
        assert dx is not None and dprobs is not None
        # Only now: a backward that ran out of memory may be run again.
        self._ran = True
        del self._given
        if call.attaches_parameters:
            self._finish(returned, trained)
        del self._saved
        return dx, dprobs

    def _finish(self, returned: Sequence[Tensor | None], trained: Sequence[bool]) -> None:
        """What autograd does where the weights are inputs of its node."""
        for parameter, gradient in zip(self._call.parameters, returned, strict=True):
            # Where there is `main_grad` the gradient is in it. The tensor that is returned then only
            # fires PyTorch's hooks, which nobody can do here.
            if gradient is not None and not hasattr(parameter, "main_grad"):
                with plain_ops():
                    add_to_grad(parameter, gradient)
        for parameter, wanted in zip(self._call.parameters, trained, strict=True):
            if wanted:
                fire_hooks(parameter)

    def _check(self, dout: Tensor) -> None:
        require_framework_tensor(dout, "dout")
        expect(
            tuple(dout.shape) == self._shape,
            ShapeError,
            f"dout has shape {tuple(dout.shape)}; the output has {self._shape}",
        )
        expect(
            self._call.dout_source is not None or not is_fp8(dout),
            DTypeError,
            f"dout is {dtype_name(dout.dtype)}; needed: bfloat16, or a dout_source that has the "
            "scales",
        )
        self._given.check("this forward_step() and its backward")
