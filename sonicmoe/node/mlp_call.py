"""One forward of the node and what its backward will need, under autograd or as a call of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import and_
from typing import TYPE_CHECKING, Any

import torch

from ..autograd import DifferentiableCall
from ..borrowed import Borrowed
from ..config import SonicMoEConfig, active_config
from ..engine.interface import Engine, EngineSettings, EngineWeights, Saved, Tokens
from ..errors import DTypeError, ShapeError, expect
from ..gradients.batch import GradientBatch
from ..gradients.flush import add_to_grad
from ..interop import (
    device_name,
    dtype_name,
    holds_memory,
    plain_ops,
    require_framework_tensor,
    requires_grad,
)
from ..observe import BackwardBegins, BackwardDone, ExpertCall, ForwardDone, emit, is_awaited, stage
from ..out_of_memory import advising, raise_with_advice
from ..quant.tokens import anchor_of, checked_tokens, is_fp8, to_bfloat16
from ..routing.build import build_routing, build_sorted_routing
from ..routing.ids import ids_of_sorted
from ..routing.metadata import RoutingMetadata
from ..weights.cache import Reading
from .adapters import CallAdapters
from .arrivals import Arrivals, GradientSource, gradient_from, tokens_among
from .biases import Biases
from .choices import Choices
from .late_wgrad import WgradOffer, WgradStore, WgradWork, fire_hooks
from .layer_state import LayerState

if TYPE_CHECKING:
    from ..observe import NativeWeights

Tensor = torch.Tensor


@dataclass(eq=False)
class MlpCall(DifferentiableCall):
    """The arguments of one call. It is never written to and holds no activation. Activations live
    in the autograd context, so any number of calls may be outstanding.

    state: the node's, shared by all its calls.
    config: activated in both passes, so that kernels come from the node's own cache directory.
        Backward may run on another thread, and after the caller's `activate()` block has ended.
    parameters: the layer's as this forward found them, which are the inputs of the autograd node.
    reading: the engine weights as this forward read them. This reference keeps them alive until the
        last backward.
    dequantises: the engine is handed the values of tokens that arrived in FP8.
    indices: `[T, K]`, or, where is_sorted, the counts `[E]` of rows in expert order.
    borrowed: the caller's biases and factors, which the backward reads; None where there are none.
    num_inputs: of the differentiable call. num_behind: those of biases and adapters; see `forward`.
    wgrad_offer: to whom weight gradients are offered; the parameters are then no inputs of the
        autograd node. None: to nobody.
    dout_source: asked for the gradient of the output by every backward; None: autograd has it.
    """

    state: LayerState
    config: SonicMoEConfig
    engine: Engine
    settings: EngineSettings
    parameters: list[Tensor]
    reading: Reading
    indices: Tensor
    tokens_per_expert: Any
    validate: bool
    dequantises: bool = False
    is_sorted: bool = False
    biases: Biases | None = None
    adapters: CallAdapters | None = None
    borrowed: Borrowed | None = None
    num_inputs: int = 2
    num_behind: int = 0
    dout_source: GradientSource | None = None
    wgrad_offer: WgradOffer | WgradStore | None = None

    @property
    def releases_saved(self) -> bool:
        return self.settings.frees_stagewise

    @property
    def attaches_parameters(self) -> bool:
        return self.wgrad_offer is None

    def explain(self, error: Exception, during: str) -> None:
        raise_with_advice(error, during, self.settings, None if self.is_sorted else self.indices)

    def run(self, inputs: tuple[Tensor, ...], *, save: bool) -> tuple[Tensor, Saved | None]:
        """`forward` outside autograd."""
        with advising("forward", self.settings, inputs[0]):
            return self.forward(inputs, save=save)

    def forward(self, inputs: tuple[Tensor, ...], *, save: bool) -> tuple[Tensor, Saved | None]:
        """Routing, then the engine, on `(x, probs)`; on `(x, probs, scales)` where x arrived in
        FP8, and on `(dx_to, probs, scales, x)` where its gradient goes to another tensor. Rows in
        expert order may come without probabilities, as `(x,)`. Biases and factors of adapters stand
        behind these. The gradient of the tokens belongs to the first input, whichever it is. The
        caller has activated `config`.
        """
        inputs = inputs[: len(inputs) - self.num_behind]
        probs = inputs[1] if len(inputs) > 1 else None
        with plain_ops():  # once: inside, autocast costs nothing more
            x = self._tokens(inputs)
            with stage("routing"):
                routing = self._route(int(inputs[0].shape[0]), probs)
            weights = self._weights()
            out, saved = self.engine.forward(x, routing, weights, self.settings, save=save)
        # Asked before the event is built, so that a run without observers pays one read of a
        # global.
        if is_awaited():
            given = self._probs_in_slots(int(out.shape[0]), probs)
            emit(ForwardDone(self._described(int(out.shape[0])), x, given, out, saved))
        return out, saved

    def _route(self, rows: int, probs: Tensor | None) -> RoutingMetadata:
        alignment, validate = self.settings.row_alignment, self.validate
        if self.is_sorted:
            counted = self.indices, rows, probs, self.tokens_per_expert
            return build_sorted_routing(*counted, alignment=alignment, validate=validate)
        assert probs is not None
        return build_routing(
            self.indices,
            probs,
            self.state.sizes[0],
            self.tokens_per_expert,
            alignment=alignment,
            validate=validate,
            is_checked=True,
        )

    def _weights(self) -> EngineWeights:
        """The engine's, with the biases and the adapters of this call."""
        weights = self.reading.weights
        weights = weights if self.biases is None else self.biases.beside(weights)
        return weights.with_adapters(None if self.adapters is None else self.adapters.native())

    def _tokens(self, inputs: tuple[Tensor, ...]) -> Tokens:
        x = tokens_among(inputs)
        if len(inputs) <= 2:
            return x
        tokens = checked_tokens(x.detach(), inputs[2].detach())
        return to_bfloat16(tokens) if self.dequantises else tokens

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
        assert saved is not None
        dout: Tokens = gradients[0]
        if self.dout_source is not None:
            with self.config.activate(), plain_ops():
                dout = gradient_from(self.dout_source, gradients[0], self.engine, self.settings)
        if is_watched := is_awaited():
            emit(BackwardBegins(self._described(int(anchor_of(dout).shape[0])), dout, saved))
        trained = list(map(requires_grad, self.parameters))
        if reached is not None:
            # `torch.autograd.grad(loss, x)` runs this backward too, and must not add weight
            # gradients that nobody asked for.
            trained = list(map(and_, trained, reached))
        # Several threads may run backwards of this layer, or of layers that share experts.
        with self.state.gradients.alone(anchor_of(dout)), self.config.activate():
            # An engine that updates in place may have overwritten the weights of this forward, and
            # the caller what stands beside them. It is refused here, before anything is added.
            self.reading.check_current()
            if self.borrowed is not None:
                self.borrowed.check()
            dx, dprobs, behind, returned, batch = self._compute(dout, saved, trained, collected)
        if is_watched:
            # Bound and not called: the observer decides whether to look, and a host copy is
            # expensive.
            left = partial(self._weight_gradients, returned, batch)
            emit(BackwardDone(self._described(int(dx.shape[0])), dx, dprobs, left))
        of_inputs = dx, dprobs.reshape([-1]) if self.is_sorted else dprobs, None, None
        return (*of_inputs[: self.num_inputs - self.num_behind], *behind), returned

    def _compute(
        self, dout: Tokens, saved: Saved, trained: list[bool], collected: bool
    ) -> tuple[
        Tensor, Tensor, tuple[Tensor | None, ...], list[Tensor | None], GradientBatch | None
    ]:
        state, batch = self.state, None
        state.gradients.overwriting.begin(self.config.resolve().first_backward, self.parameters)
        trains = any(trained)
        # Memory first: a backward that runs out of it must not have added anything yet.
        if trains and self.wgrad_offer is None:
            if collected:
                state.gradients.check_collectable(self.parameters, trained)
            place = anchor_of(dout)
            batch = state.open(self.engine, self.settings, self.parameters, trained, place)
        biases = self.biases
        saved.wants_biases = biases is not None and any(biases.trained)
        saved.wants_weights = trains or saved.wants_biases or self.wgrad_offer is not None
        dx, dprobs, pending = self.engine.backward_dx(dout, saved, self._weights())
        # Before the weights', which may be put off, free operands, or be wanted by nobody.
        behind = () if biases is None else biases.gradients(self.engine, pending)
        behind += () if self.adapters is None else self.adapters.gradients(pending)
        returned: list[Tensor | None] = [None] * len(trained)
        if batch is not None:
            state.gradients.add(self.engine, pending, batch)
            returned = state.gradients.close(batch)
            if not state.idle_grads:
                returned = state.of_busy(returned, self.parameters, pending.routing)
        elif self.wgrad_offer is not None:
            about = self.engine, self.settings, self.parameters
            work = WgradWork(state.gradients, self.config, *about)
            work.offer(self.wgrad_offer, trained, pending)
        return dx, dprobs, behind, returned, batch

    def _probs_in_slots(self, rows: int, probs: Tensor | None) -> Tensor:
        """`[T, K]`, for those who observe the call."""
        if probs is None:
            probs = torch.ones([rows], dtype=torch.float32, device=self.indices.device)
        return probs.reshape([rows, 1]) if self.is_sorted else probs

    def _described(self, rows: int) -> ExpertCall:
        indices = ids_of_sorted(self.indices, rows) if self.is_sorted else self.indices
        # Half of them are of the up-projection, whether there are two or two of every expert.
        half = len(self.parameters) // 2
        weights = {"w1": self.parameters[:half], "w2": self.parameters[half:]}
        beside = {} if self.borrowed is None else dict(self.borrowed.named)
        weights |= {name: [beside.pop(name)] for name in ("b1", "b2") if name in beside}
        return ExpertCall(
            self.engine.name,
            self.settings,
            indices,
            self._native_weights,
            self.reading.values,
            weights,
            self.state.face,
            layer=self.state,
            factors=beside,
        )

    def _native_weights(self) -> NativeWeights:
        biases = (None, None) if self.biases is None else self.biases.native()
        held = all(map(holds_memory, self.parameters))
        weights = self.state.parameters.native() if held else self.reading.values()
        if self.adapters is not None:
            weights = self.adapters.native().merged(*weights)
        return (*weights, *biases)

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


def call_on(
    inputs: tuple[Tensor, ...], arrived: Arrivals, state: LayerState, choices: Choices
) -> MlpCall:
    """One forward of these inputs with everything that it and its backward need; inside the scope
    of `choices`.
    """
    given = arrived.adapters
    adapters = given and CallAdapters.of(given, state.parameters.layout)
    beside = arrived.biases is not None, adapters is not None
    num_behind = 2 * beside[0] + (0 if adapters is None else len(adapters.factors))
    x = tokens_among(inputs[: len(inputs) - num_behind])
    chosen = choices.engine(device_name(x), *arrived.form(x), *beside)
    engine, settings = chosen.engine, chosen.settings
    # Read once per call: modules may replace their weights between calls, and the list is at once
    # the input of autograd, the source of the engine weights and the destination of the gradients.
    parameters = state.parameters.parameters()
    with advising("forward", settings):
        reading = state.weights.read(engine, settings, parameters, arrived.copies)
    runs_without = arrived.is_stepped or any(map(requires_grad, inputs))
    biases = arrived.biases and Biases.of(arrived.biases, state.parameters)
    return MlpCall(
        state=state,
        config=active_config(),
        engine=engine,
        settings=settings,
        parameters=parameters,
        reading=reading,
        indices=arrived.indices,
        tokens_per_expert=arrived.tokens_per_expert,
        validate=chosen.validates,
        dequantises=chosen.dequantises,
        is_sorted=arrived.is_sorted,
        biases=biases,
        adapters=adapters,
        borrowed=Borrowed(arrived.borrowed()) if True in beside else None,
        num_inputs=len(inputs),
        num_behind=num_behind,
        dout_source=arrived.dout_source,
        wgrad_offer=state.offer_for(parameters, runs_without),
    )


class BackwardStep:
    """The backward of one `forward_step`, to be run once, where a schedule and not autograd decides
    when. It keeps alive what that forward saved.

    Weight gradients go where they go in a backward under autograd, and then the backward hooks of
    the weights are fired, under Paddle: under PyTorch nobody but autograd can.
    """

    def __init__(self, call: MlpCall, saved: Saved, given: dict[str, Tensor]) -> None:
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
