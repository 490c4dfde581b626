"""`SonicMoEMlpNode`: the expert MLP of one MoE layer, between DeepEP's dispatch and combine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch

from ..config import SonicMoEConfig, warn_unknown_flags
from ..engine.expert_matrices import may_stay_apart
from ..engine.low_rank import Adapters
from ..enums import (
    ActivationParameters,
    ActivationType,
    EngineName,
    FlushMode,
    layer_parameters,
    member_of,
)
from ..errors import ConfigError, LayoutError
from ..interop import holds_memory, is_cuda
from ..layer.arrivals import Arrivals, GradientSource
from ..layer.node_call import BackwardStep, run, run_step
from ..layer.plan import OwnPlan
from ..layer.state import LayerState
from ..layouts import NATIVE
from ..weights.copies import WeightCopies
from ..weights.parameters import PerExpertParameters
from ..weights.stacked import FusedParameters, StackedWeight
from .upkeep import NodeUpkeep

Tensor = torch.Tensor
Parameters = Mapping[str, float | None] | ActivationParameters | None


class NodeOptions(TypedDict, total=False):
    """See `SonicMoEMlpNode`."""

    config: SonicMoEConfig | None
    activation_parameters: Parameters
    flush: FlushMode | str


class SonicMoEMlpNode(NodeUpkeep):
    """`out[t] = sum_k p[t,k] * (act(x_t Wg_e) * (x_t Wu_e)) Wd_e` over the slots with a local
    expert `e = indices[t,k]`.

    One node per MoE layer, reused for every micro-batch:

        node = SonicMoEMlpNode(experts, n_experts=E, hidden_size=H, intermediate_size=I)
        out = node(x, tokens_per_expert, dispatched_indices, dispatched_probs)
        ...                      # any number of forwards and backwards, in any order
        node.step()              # after the last backward, before gradients are reduced

    Per-call state lives in the autograd graph. The node holds weight caches, and gradient memory
    only with `flush="step"`.

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
        flush: when weight gradients are complete (docs/gradients.md).
            "auto", or "backward": when a backward returns. They are in fp32 `main_grad` of each
            parameter that has the attribute, and autograd gets the others. They are added, or
            written where it is None (memory is made) or `overwrite_main_grad` is true.
            "step": they wait in fp32 accumulators of the node, and `step()` adds them to
            `main_grad`, or to `.grad`. Until then their memory stays in place and nobody else
            writes it. With "auto" the framework's gradient hooks see complete gradients, once per
            weight and backward. Hooks that take a gradient get None for one in `main_grad`.
        idle_grads: what an expert without a row in a batch gets where its gradients go to autograd:
            True: zeros, by which an optimizer with weight decay or momentum still moves it. False:
            none, so that `.grad` stays as it is. Each backward then waits for the GPU, to read the
            counts where the caller gave none. Not with a wrapper that reduces every gradient (DDP).

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
        activation_parameters: Parameters = None,
        flush: FlushMode | str = "auto",
        idle_grads: bool = True,
    ) -> None:
        activation = member_of(ActivationType, activation_type, "activation_type")
        if not hasattr(experts, "__getitem__"):  # ModuleList and LayerList are no Sequence
            raise LayoutError(
                f"experts is {type(experts).__name__}; needed: a list of expert modules"
            )
        parameters = PerExpertParameters(
            experts, n_experts, hidden_size, intermediate_size, activation
        )
        state = LayerState(parameters, flush, idle_grads)
        self._init(state, activation, config, activation_parameters)

    @classmethod
    def from_fused(
        cls,
        weight1: StackedWeight,
        weight2: StackedWeight,
        activation_type: ActivationType | str = ActivationType.SWIGLU,
        **options: Unpack[NodeOptions],
    ) -> SonicMoEMlpNode:
        """A node on two stacked parameters `weight1 [E, H, 2I]` (split-half, gate first) and
        `weight2 [E, I, H]`.

        A tensor that it is given, it keeps: make it after whatever puts another in its place
        (`load_state_dict(assign=True)`, `to_empty()`). Given `(module, name)` in place of a tensor,
        it looks the parameter up in every call: `from_fused((experts, "weight1"), (experts,
        "weight2"))`.
        """
        activation = member_of(ActivationType, activation_type, "activation_type")
        return cls._of_stacked(FusedParameters(weight1, weight2, activation), **options)

    @classmethod
    def from_native(
        cls,
        weight1: StackedWeight,
        weight2: StackedWeight,
        activation_type: ActivationType | str = ActivationType.SWIGLU,
        **options: Unpack[NodeOptions],
    ) -> SonicMoEMlpNode:
        """A node on two stacked parameters as `sonicmoe.MoE` has them: `weight1 [E, 2I, H]` (gate
        and up rows in turns) and `weight2 [E, H, I]`; tensors, or `(module, name)` as for
        `from_fused`.
        """
        activation = member_of(ActivationType, activation_type, "activation_type")
        return cls._of_stacked(FusedParameters(weight1, weight2, activation, NATIVE), **options)

    @classmethod
    def _of_stacked(
        cls,
        parameters: FusedParameters,
        flush: FlushMode | str = "auto",
        **options: Any,
    ) -> SonicMoEMlpNode:
        return cls.over(LayerState(parameters, flush), parameters.activation, **options)

    @classmethod
    def over(
        cls,
        state: LayerState,
        activation_type: ActivationType,
        *,
        config: SonicMoEConfig | None = None,
        activation_parameters: Parameters = (),
    ) -> SonicMoEMlpNode:
        """Another node of a layer: with settings of its own, and with the parameters, the weight
        caches and the gradients of all nodes over `state`.
        """
        node = cls.__new__(cls)
        node._init(state, activation_type, config, activation_parameters)
        return node

    def _init(
        self,
        state: LayerState,
        activation: ActivationType,
        config: SonicMoEConfig | None,
        activation_parameters: Parameters,
    ) -> None:
        if config is not None and not isinstance(config, SonicMoEConfig):
            raise ConfigError(f"config is {config!r}; needed: a SonicMoEConfig, or None")
        # Here, because a process without a node need not care about our flags.
        warn_unknown_flags()
        self._state = state
        self.flush_mode = state.gradients.way
        self.n_experts, self.hidden_size, self.intermediate_size = state.sizes
        self.activation_type = activation
        self.activation_parameters = layer_parameters(activation, activation_parameters)
        sizes = self.hidden_size, self.intermediate_size
        separate = state.parameters.are_separate and may_stay_apart(
            self.n_experts, state.parameters.parameters()[0].dtype
        )
        of_layer = activation, self.activation_parameters, sizes, separate, state.face
        self._plan = OwnPlan(config, *of_layer)
        # Settings that contradict each other are refused here and not in the first step.
        resolved = self._plan.in_force().config.resolve()
        state.gradients.overwriting.check(resolved.first_backward)
        # An engine that was asked for by name is chosen now, so that the constructor raises if it
        # cannot run. `auto` waits for the first call, because the tokens' dtype decides too.
        weight = state.parameters.parameters()[0]
        # A freed weight names no device.
        named = resolved.engine is not EngineName.AUTO
        if named and holds_memory(weight) and is_cuda(weight):
            self._plan.fitted_to_weight(weight)

    def forward(
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
        biases: tuple[Tensor, Tensor] | None = None,
        adapters: Adapters | None = None,
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
                `[T, ceil(H/128)]`. An engine that cannot read such tokens gets their values in bf16,
                and the log says so once.
            dx_to: the tensor that gets the gradient of such tokens: bf16 `[T, H]`, whose values are
                never read, so one element that is expanded will do. Under Paddle it may be x itself
                (docs/parallel.md, "Tokens that arrive in FP8"). None: nobody gets it.
            dout_source: who has the gradient of the output, where that arrives in FP8; see
                `GradientSource`. None: autograd delivers it.
            copies: FP8 copies of the weights (`make_copies`), which are read in place of the
                parameters, also where the memory of these has been freed. Where the engine that is
                chosen computes without FP8, the parameters themselves are read.
            biases: b1 `[E, N1]`, in the order of the weights' rows, and b2 `[E, H]`, which p weights
                as it does the rest. Autograd gets their gradients.
            adapters: low-rank pairs beside the weights, which may be frozen; rows of `up.b` have
                the order of the weights' rows. Autograd gets the gradients of the factors.

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
        routed = tokens_per_expert, dispatched_indices, dispatched_probs
        arrived = Arrivals(
            *routed, x_scale, dx_to, dout_source, copies, biases=biases, adapters=adapters
        )
        return run(x, arrived, self._state, self._plan)  # type: ignore[no-any-return]

    __call__ = forward

    def forward_sorted(
        self,
        x: Tensor,
        counts: Tensor,
        probs: Tensor | None = None,
        tokens_per_expert: Any = None,
        biases: tuple[Tensor, Tensor] | None = None,
        adapters: Adapters | None = None,
    ) -> Tensor:
        """`forward` of rows that a dispatcher has sorted by expert, one slot each.

        Args:
            x: `[T, H]`. Rows beyond the sum of the counts are not read, and get zeros.
            counts: int32 or int64 `[E]`, on the device of x.
            probs: fp32 `[T]`; None where the caller applies them, before or after.
            tokens_per_expert: the counts on the host, where it knows them: they size the rows.
            biases, adapters: as of `forward`.

        Errors are those of `forward`, and of `build_sorted_routing`.
        """
        routed = tokens_per_expert, counts, probs
        arrived = Arrivals(*routed, is_sorted=True, biases=biases, adapters=adapters)
        return run(x, arrived, self._state, self._plan)  # type: ignore[no-any-return]

    def forward_step(
        self,
        x: Tensor,
        tokens_per_expert: Any = None,
        dispatched_indices: Any = None,
        dispatched_probs: Any = None,
        x_scale: Any = None,
        dout_source: GradientSource | None = None,
        copies: WeightCopies | None = None,
    ) -> tuple[Tensor, BackwardStep]:
        """`forward` without autograd, and the backward as a step of its own: for schedules that
        interleave the forward of one micro-batch with the backward of another. Arguments and errors
        are those of `forward`; no tensor that is passed in or returned joins a graph.
        """
        # Autograd must not see the call: its backward is the caller's.
        tokens, probs = (
            value.detach() if isinstance(value, torch.Tensor) else value
            for value in (x, dispatched_probs)
        )
        routed = tokens_per_expert, dispatched_indices, probs
        arrived = Arrivals(*routed, x_scale, None, dout_source, copies, is_stepped=True)
        out, call, saved = run_step(tokens, arrived, self._state, self._plan)
        read = {"x": x} if x_scale is None else {"x": x, "x_scale": x_scale}
        return out, BackwardStep(call, saved, read)
