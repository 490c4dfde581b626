"""`SonicMoEMlpNode`: the expert MLP of one MoE layer, between DeepEP's dispatch and combine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import autograd
from ..config import SonicMoEConfig, warn_unknown_flags
from ..engine.interface import Engine, EngineSettings, Saved
from ..enums import (
    ActivationParameters,
    ActivationType,
    EngineName,
    FlushMode,
    layer_parameters,
    member_of,
)
from ..errors import ConfigError, FrameworkError, LayoutError, ShapeError, expect
from ..interop import (
    IS_PADDLE,
    device_name,
    dtype_name,
    grad_enabled,
    holds_memory,
    is_cuda,
    require_framework_tensor,
    requires_grad,
)
from ..jit_warmup import warmup_jit
from ..layouts import NATIVE
from ..observe import StepDone, emit, is_awaited, stage
from ..out_of_memory import raise_with_advice
from ..routing.backends import arch_of
from ..routing.deepep import check_dispatched_tokens
from ..routing.validation import check_indices_and_probs
from ..weights.cache import Reading
from ..weights.copies import WeightCopies
from ..weights.parameters import ExpertParameters, PerExpertParameters, check_memory
from ..weights.stacked import FusedParameters, StackedWeight
from .backward_step import BackwardStep
from .choices import Choices
from .fp8_gradients import GradientSource, check_source
from .fp8_tokens import check_token_gradient, inputs_of, token_form
from .layer_state import LayerState
from .mlp_call import MlpCall

if TYPE_CHECKING:
    from .graphed import GraphedLayer

Tensor = torch.Tensor
logger = logging.getLogger("sonicmoe")


class SonicMoEMlpNode:
    """`out[t] = sum_k p[t,k] * (act(x_t Wg_e) * (x_t Wu_e)) Wd_e` over the slots with a local
    expert `e = indices[t,k]`.

    One node per MoE layer, reused for every micro-batch:

        node = SonicMoEMlpNode(experts, n_experts=E, hidden_size=H, intermediate_size=I)
        out = node(x, tokens_per_expert, dispatched_indices, dispatched_probs)
        ...                      # any number of forwards and backwards, in any order
        node.step()              # after the last backward, before gradients are reduced

    Per-call state lives in the autograd graph. The node holds weight caches, and fp32 gradient
    accumulators only where weight gradients cannot go straight into `main_grad`.

    Args:
        experts: modules with `up_gate_proj.weight [H, 2I]` (split-half, gate first; `[H, I]` for
            ungated activations) and `down_proj.weight [I, H]`, in local-id order; `None` entries
            (other ranks' experts) are skipped.
        n_experts: local experts E.
        hidden_size, intermediate_size: H, I.
        activation_type: a member of `ActivationType`, or its value.
        config: settings of this node; None follows the activated configuration and the environment
            at every call.
        activation_parameters: numbers of this layer's activation by name, such as `limit` of
            `swiglu_clamp` or `beta` of `situ_glu`; those not given have their defaults
            (`enums.ACTIVATIONS`).
        flush: which way weight gradients take.
            "auto": straight into fp32 `main_grad` in every backward, where each parameter that
            trains has that attribute (None: memory is made) and the engine can add there; the node
            then holds no gradient. Through autograd in every backward, where one has no `main_grad`.
            As "step" otherwise. The log says once which.
            "direct": straight into `main_grad`, or the backward raises and says why.
            "step": they wait in fp32 accumulators of the node, and `step()` adds them to `main_grad`,
            or to `.grad`.
            "backward": every backward adds them to `main_grad`, or returns them through autograd.
            "prompt": as "auto", and as "backward" where that would wait for `step()`.
            In all ways but "step" the framework's gradient hooks see complete gradients, once per
            weight and backward. Hooks that take a gradient get None for one in `main_grad`.
        split_wgrad: a backward returns dx before the weight gradients are computed, so that the
            combine of dx need not wait: a side stream computes them on a GPU; on a host they wait
            for `finish_wgrad()` or `step()`. Needs flush "step", which "auto" then means.

    A backward to other inputs alone (`torch.autograd.grad(loss, x)`, `paddle.grad(loss, x)`) adds
    no weight gradients, and `loss.backward(inputs=[weight])` those of that weight. A backward that
    is to return a weight's gradient (`torch.autograd.grad(loss, weight)`) does so where gradients
    take the way through autograd, and raises otherwise. A copy of a node has no gradients.

    Raises:
        LayoutError, ShapeError, DTypeError: an expert does not have the weights named above, or has
            a bias.
        ConfigError: an unknown activation or flush mode, or settings that contradict each other.
    """

    def __init__(
        self,
        experts: Sequence[Any],
        n_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation_type: ActivationType | str = ActivationType.SWIGLU,
        *,
        config: SonicMoEConfig | None = None,
        activation_parameters: Mapping[str, float | None] | None = None,
        flush: FlushMode | str = "auto",
        split_wgrad: bool = False,
    ) -> None:
        activation = member_of(ActivationType, activation_type, "activation_type")
        if not hasattr(experts, "__getitem__"):  # ModuleList and LayerList are no Sequence
            raise LayoutError(
                f"experts is {type(experts).__name__}; needed: a list of expert modules"
            )
        parameters = PerExpertParameters(
            experts, n_experts, hidden_size, intermediate_size, activation
        )
        _refuse_biases(experts)
        self._init(parameters, config, activation_parameters, flush, split_wgrad)

    @classmethod
    def from_fused(
        cls,
        weight1: StackedWeight,
        weight2: StackedWeight,
        activation_type: ActivationType | str = ActivationType.SWIGLU,
        *,
        config: SonicMoEConfig | None = None,
        activation_parameters: Mapping[str, float | None] | None = None,
        flush: FlushMode | str = "auto",
        split_wgrad: bool = False,
    ) -> SonicMoEMlpNode:
        """A node on two stacked parameters `weight1 [E, H, 2I]` (split-half, gate first) and
        `weight2 [E, I, H]`.

        A tensor that it is given, it keeps: make it after whatever puts another in its place
        (`load_state_dict(assign=True)`, `to_empty()`). Given `(module, name)` in place of a tensor,
        it looks the parameter up in every call: `from_fused((experts, "weight1"), (experts,
        "weight2"))`.
        """
        activation = member_of(ActivationType, activation_type, "activation_type")
        parameters = FusedParameters(weight1, weight2, activation)
        node = cls.__new__(cls)
        node._init(parameters, config, activation_parameters, flush, split_wgrad)
        return node

    @classmethod
    def from_native(
        cls,
        weight1: StackedWeight,
        weight2: StackedWeight,
        activation_type: ActivationType | str = ActivationType.SWIGLU,
        *,
        config: SonicMoEConfig | None = None,
        activation_parameters: Mapping[str, float | None] | None = None,
        flush: FlushMode | str = "auto",
        split_wgrad: bool = False,
    ) -> SonicMoEMlpNode:
        """A node on two stacked parameters as `sonicmoe.MoE` has them: `weight1 [E, 2I, H]` (gate
        and up rows in turns) and `weight2 [E, H, I]`; tensors, or `(module, name)` as for
        `from_fused`.
        """
        activation = member_of(ActivationType, activation_type, "activation_type")
        parameters = FusedParameters(weight1, weight2, activation, NATIVE)
        node = cls.__new__(cls)
        node._init(parameters, config, activation_parameters, flush, split_wgrad)
        return node

    def _init(
        self,
        parameters: ExpertParameters,
        config: SonicMoEConfig | None,
        activation_parameters: Mapping[str, float | None] | None,
        flush: FlushMode | str,
        split_wgrad: bool,
    ) -> None:
        mode = member_of(FlushMode, flush, "flush")
        expect(
            not split_wgrad or mode in (FlushMode.AUTO, FlushMode.STEP),
            ConfigError,
            f"split_wgrad with flush={mode.value!r}: gradients must be complete when a backward returns; "
            "needed: flush='step', or 'auto', which then means 'step'",
        )
        state = LayerState(parameters, mode, split_wgrad)
        self._init_over(state, parameters.activation, config, activation_parameters)

    @classmethod
    def over(
        cls,
        state: LayerState,
        activation_type: ActivationType,
        *,
        config: SonicMoEConfig | None = None,
        activation_parameters: ActivationParameters = (),
    ) -> SonicMoEMlpNode:
        """Another node of a layer: with settings of its own, and with the parameters, the weight
        caches and the gradients of all nodes over `state`.
        """
        node = cls.__new__(cls)
        node._init_over(state, activation_type, config, activation_parameters)
        return node

    def _init_over(
        self,
        state: LayerState,
        activation: ActivationType,
        config: SonicMoEConfig | None,
        activation_parameters: Mapping[str, float | None] | ActivationParameters | None,
    ) -> None:
        if config is not None and not isinstance(config, SonicMoEConfig):
            raise ConfigError(f"config is {config!r}; needed: a SonicMoEConfig, or None")
        warn_unknown_flags()
        self._state = state
        self.flush_mode = state.flush_mode
        parameters = state.parameters
        (self.n_experts, _, self.hidden_size), (_, _, self.intermediate_size) = (
            parameters.native_shapes()
        )
        self.activation_type = activation
        self.activation_parameters = layer_parameters(activation, activation_parameters)
        sizes = self.hidden_size, self.intermediate_size
        self._choices = Choices(config, activation, self.activation_parameters, *sizes)
        # Settings that contradict each other are refused here and not in the first step.
        resolved, settings = self._choices.settings()
        # An engine that was asked for by name is chosen now, so that the constructor raises if it
        # cannot run. `auto` waits for the first call, because the tokens' dtype decides too.
        weight = parameters.parameters()[0]
        # A freed weight names no device.
        named = resolved.engine is not EngineName.AUTO
        if named and holds_memory(weight) and is_cuda(weight):
            with self._choices.scope():
                self._choices.engine(
                    device_name(weight), resolved, settings, _token_dtype_for(weight)
                )

    def __call__(
        self,
        x: Tensor,
        tokens_per_expert: Any = None,
        dispatched_indices: Any = None,
        dispatched_probs: Any = None,
        # Not keyword-only, which Paddle's re-entrant recompute refuses in whatever it calls.
        x_scale: Any = None,
        dx_to: Any = None,
        dout_source: GradientSource | None = None,
        copies: WeightCopies | None = None,
        recompute_z: bool | None = None,
    ) -> Tensor:
        return self.forward(
            x,
            tokens_per_expert,
            dispatched_indices,
            dispatched_probs,
            x_scale=x_scale,
            dx_to=dx_to,
            dout_source=dout_source,
            copies=copies,
            recompute_z=recompute_z,
        )

    def forward(
        self,
        x: Tensor,
        tokens_per_expert: Any = None,
        dispatched_indices: Any = None,
        dispatched_probs: Any = None,
        x_scale: Any = None,
        dx_to: Any = None,
        dout_source: GradientSource | None = None,
        copies: WeightCopies | None = None,
        recompute_z: bool | None = None,
    ) -> Tensor:
        """Run the local experts on dispatched tokens.

        Args:
            x: bf16 `[T, H]` (fp16 and fp32 where the engine has them), or, with `x_scale`, e4m3
                codes; one row per received token; T may be 0.
            tokens_per_expert: E counts as DeepEP lists them, or a tensor, or None / [] to count
                from the indices.
            dispatched_indices: int32 or int64 `[T, K]`, local expert id per slot; docs/design.md,
                "Routing contract", says which ids are "not here".
            dispatched_probs: fp32 `[T, K]`; only values at valid slots count. Its gradient is
                exactly 0 elsewhere.
            x_scale: fp32 multipliers of tokens that were quantised by their sender,
                `[T, ceil(H/128)]`, or `[T, 1]` with one per row. An engine that cannot read such
                tokens gets their values in bf16, and the log says so once.
            dx_to: the tensor that gets the gradient of such tokens: bf16 `[T, H]`, whose values are
                never read, so one element that is expanded will do. Under Paddle it may be x itself
                (docs/parallel.md, "Tokens that arrive in FP8"). None: nobody gets it.
            dout_source: who has the gradient of the output, where that arrives in FP8; see
                `GradientSource`. None: autograd delivers it.
            copies: FP8 copies of the weights (`make_copies`), which are read in place of the
                parameters, also where the memory of these has been freed. Where the engine that is
                chosen computes without FP8, the parameters themselves are read.
            recompute_z: whether the backward of this call computes z again instead of keeping it;
                None follows the configuration. All calls share one copy of the weights.

        Returns:
            `[T, H]` in x's dtype (bf16 for e4m3) and row order; a token without a local expert gets
            exact zeros.

        Raises:
            DTypeError, ShapeError, DeviceError, RoutingError, FrameworkError, TypeError: naming the
            argument, what came and what is needed.
            LayoutError, StaleWeightsError: the weights, or current copies, are nowhere in memory.
            OutOfMemoryError: nothing has changed; the message says what lowers the need.

        NaN in a token makes that token's rows NaN and no other token's.
        """
        call, inputs = self._call(
            x,
            tokens_per_expert,
            dispatched_indices,
            dispatched_probs,
            x_scale,
            dx_to,
            dout_source,
            copies,
            recompute_z,
        )
        wanted = any(map(requires_grad, inputs)) or any(map(requires_grad, call.parameters))
        if wanted and grad_enabled():
            return autograd.apply(call, inputs, call.parameters)  # type: ignore[no-any-return]
        return _outside_autograd(call, inputs, save=False)[0]

    def forward_step(
        self,
        x: Tensor,
        tokens_per_expert: Any = None,
        dispatched_indices: Any = None,
        dispatched_probs: Any = None,
        x_scale: Any = None,
        dout_source: GradientSource | None = None,
        copies: WeightCopies | None = None,
        recompute_z: bool | None = None,
    ) -> tuple[Tensor, BackwardStep]:
        """`forward` without autograd, and the backward as a step of its own: for schedules that
        interleave the forward of one micro-batch with the backward of another. Arguments and errors
        are those of `forward`; no tensor that is passed in or returned joins a graph.
        """
        tokens, probs = (
            value.detach() if isinstance(value, torch.Tensor) else value
            for value in (x, dispatched_probs)
        )
        # Weights are read as for training, also where the schedule has switched gradients off.
        with torch.enable_grad():
            call, inputs = self._call(
                tokens,
                tokens_per_expert,
                dispatched_indices,
                probs,
                x_scale,
                None,
                dout_source,
                copies,
                recompute_z,
                stepped=True,
            )
        out, saved = _outside_autograd(call, inputs, save=True)
        assert saved is not None
        read = {"x": x} if x_scale is None else {"x": x, "x_scale": x_scale}
        return out, BackwardStep(call, saved, read)

    def graphed(
        self, x: Tensor, dispatched_indices: Tensor, dispatched_probs: Tensor
    ) -> GraphedLayer:
        """The layer as two CUDA graphs, for batches that take the host longer than the GPU; under
        PyTorch, on a GPU engine. Call the result as `out = layer(x, indices, probs)`.

        Every batch needs the dtypes and widths of these samples, and at most as many tokens; of the
        samples' values nothing is read. Replays add weight gradients to the `main_grad` that the
        weights have now, which must stay where it is. The backward of a call comes before the next
        forward: layers in a row need a graphed layer each, and so do micro-batches in flight.

        Raises:
            ConfigError: a weight that trains has no `main_grad`; or a setting waits for the device
                (`validate_dispatch`).
            DeviceError, FrameworkError, ShapeError, DTypeError: naming the argument, what came and
                what is needed.
        """
        expect(
            not self._choices.settings()[0].validate_dispatch,
            ConfigError,
            "validate_dispatch reads ids on the host, which no graph can; needed: validate_dispatch=False",
        )
        expect(
            not IS_PADDLE,
            FrameworkError,
            "graphed() is for PyTorch; under Paddle it was not tried: needed: the node itself",
        )
        from .graphed import GraphedLayer  # a function of PyTorch's autograd

        return GraphedLayer(
            self.forward_step, self._state, self._choices, x, dispatched_indices, dispatched_probs
        )

    def _call(
        self,
        x: Tensor,
        tokens_per_expert: Any,
        dispatched_indices: Any,
        dispatched_probs: Any,
        x_scale: Any,
        dx_to: Any,
        dout_source: GradientSource | None,
        copies: WeightCopies | None,
        recompute_z: bool | None,
        *,
        stepped: bool = False,
    ) -> tuple[MlpCall, tuple[Tensor, ...]]:
        """One forward with everything that it and its backward need, and its inputs; `stepped`: the
        caller runs the backward.
        """
        # First, because the outputs of other dispatch modes deserve a message of their own; the
        # general checks would call them a wrong shape.
        check_dispatched_tokens(x, dispatched_indices, dispatched_probs, tokens_per_expert, x_scale)
        require_framework_tensor(x, "x")
        check_indices_and_probs(dispatched_indices, dispatched_probs, self.n_experts)
        self._check_tokens(x, dispatched_indices)
        check_token_gradient(x, x_scale, dx_to)
        check_source(dout_source)
        if copies is not None and not isinstance(copies, WeightCopies):
            raise TypeError(
                f"copies is {type(copies).__name__}; needed: what make_copies() returned, or None"
            )
        config, settings = self._choices.settings(recompute_z)
        with self._choices.scope() as scope:
            dtype, form = token_form(x, x_scale)
            choice = self._choices.engine(device_name(x), config, settings, dtype, form)
            # `auto` may have fallen back from FP8 to BF16, and then the engine has settings of its
            # own.
            settings = choice.settings or settings
            # Read once per call: modules may replace their weights between calls, and the list is
            # at once the input of autograd, the source of the engine weights and the destination of
            # the gradients.
            parameters = self._state.parameters.parameters()
            reading = self._read_weights(choice.engine, settings, parameters, copies)
        # Outside the call, so that autograd records the copy and gives the caller's x its gradient.
        inputs = inputs_of(x, dispatched_probs, x_scale, dx_to)
        call = MlpCall(
            state=self._state,
            config=scope,
            engine=choice.engine,
            settings=settings,
            parameters=parameters,
            reading=reading,
            indices=dispatched_indices,
            tokens_per_expert=tokens_per_expert,
            validate=config.validate_dispatch,
            dequantises=choice.dequantises is not None,
            num_inputs=len(inputs),
            dout_source=dout_source,
            wgrad_offer=self._state.offer_for(
                parameters, stepped or any(map(requires_grad, inputs))
            ),
        )
        return call, inputs

    def step(self) -> None:
        """Have every weight gradient with its parameter, and mark weight caches stale.

        Call it once per optimizer step: after the last backward and before gradients are reduced,
        clipped or applied. Gradients that wait in the node are added in place: to `main_grad` (a
        new fp32 tensor where it is None), or to `.grad` of a parameter without that attribute. All
        others are there already. Idempotent. Where gradients were already reduced or applied
        without those waiting here, the log says so once. Where the gradients of the expert weights
        were cleared meanwhile, what waits is of a skipped batch: it is dropped, and the log says so
        once.

        Raises:
            RuntimeError: a backward failed while it added weight gradients (see `discard_grads`);
                gradients wait here for parameters that the modules no longer hold; or `main_grad`
                was replaced after a backward that adds to it was captured into a CUDA graph.
            OutOfMemoryError: nothing is lost; call it again when there is memory.
        """
        self.flush_grads()
        self._state.end_step()
        if is_awaited():
            emit(StepDone(self._state))

    def flush_grads(self) -> None:
        """The gradient half of `step()`: flush, keep the weight caches. May run between
        micro-batches.
        """
        # Weight gradients that were put off must be in the accumulators before these are handed
        # over.
        self.finish_wgrad()
        # Where none waits there is no stage, and nothing that an activated configuration decides.
        if not self._state.gradients.waiting:
            self._state.gradients.settle()
            return
        with self._choices.scope(), stage("flush"):
            try:
                self._state.flush()
            except Exception as error:
                raise_with_advice(error, "step()", self._choices.settings()[1])
                raise

    def finish_wgrad(self) -> None:
        """Have every weight gradient that `split_wgrad` put off added to the accumulators: now, or
        on a GPU in stream order.
        """
        self._state.finish_wgrad()

    def invalidate_caches(self) -> None:
        """Forget everything derived from the weights; call it after loading or swapping weights
        outside an optimizer step.
        """
        self._state.invalidate()

    def discard_grads(self) -> None:
        """Drop every weight gradient that waits in the node: of a batch that is skipped, or of a
        backward that failed half-way. What was added to `main_grad` goes when that is cleared.
        """
        self._state.discard()

    def release_grads(self) -> None:
        """Free the accumulators until the next backward, and forget memory that captured backwards
        add to.

        Raises:
            RuntimeError: they hold gradients that were not flushed.
        """
        self._state.release()

    def prequantize_weights(self) -> None:
        """Build the weight caches now, ahead of the first forward of a step."""
        config, settings = self._choices.settings()
        parameters = self._state.parameters.parameters()
        weight = parameters[0]
        with self._choices.scope():
            choice = self._choices.engine(
                device_name(weight), config, settings, _token_dtype_for(weight)
            )
            self._read_weights(choice.engine, choice.settings or settings, parameters)

    def make_copies(self) -> WeightCopies:
        """FP8 copies of the weights as they are now, for `forward(copies=)`.

        The caller holds them, and may then free the parameters' memory: by
        `_clear_to_zero_allocation()` under Paddle, by `untyped_storage().resize_(0)` under PyTorch.
        `step()`, `invalidate_caches()` and, under PyTorch, a step of an optimizer of the parameters
        make them stale (docs/weights.md).

        Raises:
            ConfigError: the configuration, or the engine that `auto` chooses, computes without FP8.
            LayoutError: the memory of a weight has been freed already.
        """
        config, settings = self._choices.settings()
        parameters = self._state.parameters.parameters()
        check_memory(parameters)
        weight = parameters[0]
        with self._choices.scope():
            choice = self._choices.engine(
                device_name(weight), config, settings, _token_dtype_for(weight)
            )
            try:
                return WeightCopies(
                    choice.engine,
                    choice.settings or settings,
                    self._state.parameters,
                    parameters,
                )
            except Exception as error:
                raise_with_advice(error, "make_copies()", settings)
                raise

    def drop_caches(self) -> None:
        """Free everything derived from the weights that this node holds; the next forward makes it
        again.
        """
        self._state.weights.drop()

    def warmup(self) -> tuple[str, ...]:
        """Compile every kernel this node needs, once per cluster; returns their names (none on the
        CPU). Allocates no gradients.

        Raises:
            CompileError: a kernel does not compile, or compiling is forbidden.
        """
        weight = self._state.parameters.parameters()[0]
        device = device_name(weight)
        report = warmup_jit(
            self.n_experts,
            self.hidden_size,
            self.intermediate_size,
            device,
            dtype=dtype_name(weight.dtype),
            activation=self.activation_type,
            activation_parameters=self.activation_parameters,
            arch=arch_of(device) if is_cuda(weight) else None,
            config=self._choices.config,
        )
        return tuple(outcome.kernel for outcome in report.kernels)

    def dump(self, path: str | Path) -> None:
        """Write the inputs of the next forward, then of its backward, to `path`, for `sonicmoe
        bisect`.

        The file is there after the forward and complete after the backward; `step()` ends the wait
        for one. Copies weights and tokens to the host.
        """
        # One of the two lazy doors to `diagnostics/` (docs/design.md): a model that dumps nothing
        # loads none of it.
        from ..diagnostics.step_capture import dump_next_step

        dump_next_step(self._state, path)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of fp32 accumulators the node holds now; 0 where gradients go straight into
        `main_grad`.
        """
        return self._state.gradients.nbytes

    def _read_weights(
        self,
        engine: Engine,
        settings: EngineSettings,
        parameters: list[Tensor],
        copies: WeightCopies | None = None,
    ) -> Reading:
        try:
            return self._state.read_weights(engine, settings, parameters, copies)
        except Exception as error:
            raise_with_advice(error, "forward", settings)
            raise

    def _check_tokens(self, x: Tensor, indices: Tensor) -> None:
        wanted = (int(indices.shape[0]), self.hidden_size)
        if tuple(x.shape) != wanted:
            raise ShapeError(
                f"x has shape {tuple(x.shape)}; {wanted[0]} rows of dispatched_indices and hidden_size {wanted[1]} need {wanted}"
            )


def _outside_autograd(
    call: MlpCall, inputs: tuple[Tensor, ...], save: bool
) -> tuple[Tensor, Saved | None]:
    try:
        return call.forward(inputs, save=save)
    except Exception as error:
        call.explain(error, "forward")
        raise


def _refuse_biases(experts: Sequence[Any]) -> None:
    """Refuse biases: the node would compute without them, and they would never train."""
    for index, expert in enumerate(experts):
        for name in ("up_gate_proj", "down_proj"):
            bias = getattr(getattr(expert, name, None), "bias", None)
            expect(
                bias is None,
                LayoutError,
                f"experts[{index}].{name} has a bias; the node computes without: needed: bias_attr=False (bias=False)",
            )


def _token_dtype_for(weight: Tensor) -> str:
    """The dtype to expect of tokens before any came: bfloat16 for fp32 master weights on a GPU."""
    return (
        "bfloat16"
        if is_cuda(weight) and weight.dtype == torch.float32
        else dtype_name(weight.dtype)
    )
