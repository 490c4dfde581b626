"""The routed expert MLP as two `torch.library` operators, so that `torch.compile(fullgraph=True)`
keeps it in its graph.

A graph holds tensors and numbers only: settings are named by number. Every shape is a function of
the inputs' shapes: the rows of the saved `z` are the worst case of any routing, as on a GPU.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ..autograd import refuse_second_derivative
from ..config import ACTIVE, SonicMoEConfig
from ..engine.interface import EngineSettings, Saved
from ..engine.low_rank import NO_ADAPTERS, Adapters
from ..enums import ZCode
from ..errors import ConfigError, EngineUnavailableError, expect
from ..interop import dtype_name
from ..layouts import StackedWeights, flat_weights, weights_of
from ..quant.format import BlockScaledTensor, Code, Orientation
from ..routing.build import num_rows_bound
from .passed_call import PassedCall, halves_of, in_shape_of, rows_of
from .plan import Plan, make_plan, plan_of

Tensor = torch.Tensor
TensorSpec = tuple[tuple[Any, ...], torch.dtype]


def expert_operator(
    x: Tensor,
    routes: Tensor,
    probs: Tensor | None,
    weights: StackedWeights,
    number: int,
    save: bool,
    adapters: Adapters = NO_ADAPTERS,
) -> Tensor:
    """`expert_mlp` as one operator: inside a graph, or where a dispatch mode looks at operators.

    routes: indices `[T, K]`, or counts `[E]` of rows in expert order. number: of the plan. Unless
    that is the layer's own, the operator raises at run time under another `SonicMoEConfig`.
    """
    low_rank = *adapters.factors, *adapters.scales
    out: Tensor = _expert_mlp(x, routes, probs, *flat_weights(weights), *low_rank, number, save)[0]
    return out if save else out.detach()  # the operator is differentiable, whatever it saved


@torch.library.custom_op("sonicmoe::expert_mlp", mutates_args=())
def _expert_mlp(
    x: Tensor,
    routes: Tensor,
    probs: Tensor | None,
    w1: Tensor,
    w1_up: Tensor | None,
    w2: Tensor,
    w2_scales: Tensor | None,
    b1: Tensor | None,
    b2: Tensor | None,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    up_scale: float,
    down_scale: float,
    plan_number: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(out [..., H], z or its codes, scales of the codes, what adapters project)`; all but the
    first are empty where backward needs none.
    """
    plan = plan_of(plan_number)
    _check_config(plan)
    weights = weights_of((w1, w1_up, w2, w2_scales, b1, b2))
    adapters = Adapters.of((up_a, up_b, down_a, down_b), (up_scale, down_scale))
    plan = plan.fitted_to(x, weights, adapters != NO_ADAPTERS)
    out, saved = _call(plan, routes, weights, adapters).forward(x, probs, save=save)
    # The compiler has allocated and typed the graph by `register_fake` alone. An engine that saved
    # z in another form would be read as the wrong bytes in backward, so it is refused here.
    z, scales = _z_tensors(saved, x)
    specs, projected = _NO_Z, x.new_empty(0)
    if saved is not None:
        specs = _z_specs(plan.settings, saved.routing.num_rows, _n1(weights, plan), x.dtype)
        projected = projected if saved.projected is None else saved.projected
    for tensor, (shape, dtype) in zip((z, scales), specs, strict=True):
        expect(
            tuple(tensor.shape) == shape and tensor.dtype == dtype,
            EngineUnavailableError,
            f"engine {plan.chosen.name!r} saved z as {dtype_name(tensor.dtype)} {tuple(tensor.shape)}; "
            f"torch.compile needs {dtype_name(dtype)} {shape}",
        )
    return out, z, scales, projected


def _call(plan: Plan, routes: Tensor, weights: StackedWeights, adapters: Adapters) -> PassedCall:
    return PassedCall(
        plan=plan,
        routes=routes,
        weights=weights,
        adapters=adapters,
        static_rows=True,
        once=True,
    )


@_expert_mlp.register_fake
def _(x: Tensor, routes: Tensor, probs: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    # Runs on tensors without data, with symbolic sizes: only shapes and dtypes may be computed
    # from. The number of rows depends on routing, which is data, so it is the worst case.
    weights, factors = weights_of(arguments[:6]), arguments[6:10]
    plan_number, save = arguments[12:]
    low_rank = any(factor is not None for factor in factors)
    plan = plan_of(int(plan_number)).fitted_to(x, weights, low_rank)
    # Rows in expert order are one slot each.
    slots = x.shape[0] if routes.dim() == 1 else routes.shape[0] * routes.shape[1]
    rows = num_rows_bound(slots, weights[1].shape[0], plan.settings.row_alignment)
    specs = _z_specs(plan.settings, rows, _n1(weights, plan), x.dtype) if save else _NO_Z
    columns = sum(Adapters.of(factors, (0.0, 0.0)).widths) if save else 0
    projected = (rows, columns) if columns else (0,)
    saved = (x.new_empty(shape, dtype=dtype) for shape, dtype in (*specs, (projected, x.dtype)))
    return (torch.empty_like(x, memory_format=torch.contiguous_format), *saved)


@torch.library.custom_op("sonicmoe::expert_mlp_backward", mutates_args=())
def _expert_mlp_backward(
    dout: Tensor,
    x: Tensor,
    routes: Tensor,
    probs: Tensor | None,
    w1: Tensor,
    w1_up: Tensor | None,
    w2: Tensor,
    w2_scales: Tensor | None,
    b1: Tensor | None,
    b2: Tensor | None,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    up_scale: float,
    down_scale: float,
    z: Tensor,
    scales: Tensor,
    projected: Tensor,
    plan_number: int,
    trains_weights: bool,
    trains_biases: bool,
    trains_adapters: bool,
) -> list[Tensor]:
    """`dx, dprobs, dw1, dw2, db1, db2` and of the factors; empty where not wanted. dw1 is `[2, E, I,
    H]` of gate and up in two tensors, because outputs of an operator must not share memory.
    """
    weights, given = weights_of((w1, w1_up, w2, w2_scales, b1, b2)), (w1, w2, b1, b2)
    factors = up_a, up_b, down_a, down_b
    adapters = Adapters.of(factors, (up_scale, down_scale))
    plan = plan_of(plan_number).fitted_to(x, weights, adapters != NO_ADAPTERS)
    # Autograd has compared the versions of the saved weights, so they are read again as the
    # forward's.
    tokens, call = rows_of(x.detach()), _call(plan, routes, weights, adapters)
    with plan.config.activate():
        # Built again from the same indices, which gives the same tensors: the alternative is five
        # more outputs of the forward operator that live until backward.
        routing = call.routing(int(tokens.shape[0]), probs)
    # The same contents as in eager mode, with x from the graph's saved tensors and z from the
    # forward's outputs.
    z_saved = _restore_z(plan.settings, z, scales)
    trained = [trains_weights] * 2 + [trains_biases] * 2
    trained = [trains and w is not None for trains, w in zip(trained, given, strict=True)]
    dx, dprobs, gradients = call.backward(
        dout,
        Saved(plan.settings, routing, tokens, z_saved, projected=projected),
        tuple(None if weight is None else weight.dtype for weight in given),
        [*trained, *[trains_adapters] * 4],
    )
    each = itertools.zip_longest(gradients, (*given, *factors))
    left = [
        x.new_empty(0) if g is None or of is None else g.to(of.dtype).contiguous() for g, of in each
    ]
    dprobs = x.new_empty(0) if probs is None else dprobs.view(probs.shape)
    return [in_shape_of(x, dx), dprobs, *left]


@_expert_mlp_backward.register_fake
def _(
    dout: Tensor, x: Tensor, routes: Tensor, probs: Tensor | None, *arguments: Any
) -> list[Tensor]:
    *_, trains_weights, trains_biases, trains_adapters = arguments
    wanted = [trains_weights] * 2 + [trains_biases] * 2 + [trains_adapters] * 4
    w1, w1_up, w2, _, *others = arguments[:10]
    gradients = [
        tensor.new_empty(tensor.shape) if trains and tensor is not None else x.new_empty(0)
        for tensor, trains in zip((w1, w2, *others), wanted, strict=True)
    ]
    if trains_weights and w1_up is not None:
        gradients[0] = w1.new_empty((2, *w1.shape))
    dprobs = x.new_empty(0) if probs is None else probs.new_empty(probs.shape)
    return [x.new_empty(x.shape), dprobs, *gradients]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, up_scale, down_scale, ctx.plan_number, _ = inputs
    ctx.low_rank_scales = up_scale, down_scale
    # What follows the output leaves the operator only for its own backward. Without the second line
    # autograd would make zeros for its gradients, as large as z.
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[1:])


def _differentiate(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    # The inputs: x, routes, probs, w1, w1_up, w2, w2_scales, b1, b2, four factors of adapters, then
    # four numbers.
    wanted = ctx.needs_input_grad[:13]
    # Nobody used the output, so there is no gradient to pass on.
    if dout is None:
        return (None,) * 17
    trained = any(wanted[3:6]), any(wanted[7:9]), any(wanted[9:])
    found = ctx.saved_tensors  # once: selective checkpointing refuses a second look
    dx, dprobs, dw1, dw2, *others = _expert_mlp_backward(
        dout, *found[:13], *ctx.low_rank_scales, *found[13:], ctx.plan_number, *trained
    )
    are_two = trained[0] and found[4] is not None
    halves = halves_of(dw1, *wanted[3:5]) if are_two else (dw1, None)
    gradients = (dx, None, dprobs, *halves, dw2, None, *others)
    kept = (gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))
    return *kept, None, None, None, None


_expert_mlp.register_autograd(_differentiate, setup_context=_setup_context)

# An operator returns a fixed number of tensors and never None, so a missing output is empty.
_NO_Z: tuple[TensorSpec, TensorSpec] = (((0,), torch.float32), ((0,), torch.float32))


def _z_specs(
    settings: EngineSettings, rows: Any, n1: Any, dtype: torch.dtype
) -> tuple[TensorSpec, TensorSpec]:
    """Shapes and dtypes of a saved `z` (docs/engines.md) and of its scales."""
    if settings.recompute_z:
        return _NO_Z
    if settings.recipe is None or settings.save_z is ZCode.BF16:
        return ((rows, n1), dtype if settings.recipe is None else torch.bfloat16), _NO_Z[1]
    # Rounded up by integer division, which symbolic sizes have too.
    block = settings.recipe.z
    scales = (-(-rows // block.rows), -(-n1 // block.cols))
    return ((rows, n1), _code(settings).dtype), (scales, torch.float32)


def _code(settings: EngineSettings) -> Code:
    return Code(settings.save_z.value)


def _z_tensors(saved: Saved | None, like: Tensor) -> tuple[Tensor, Tensor]:
    z = None if saved is None else saved.z
    if isinstance(z, BlockScaledTensor):
        return z.codes, z.scale_inv
    nothing = like.new_empty(0, dtype=torch.float32)
    return (like.new_empty(0, dtype=torch.float32) if z is None else z), nothing


def _restore_z(
    settings: EngineSettings, z: Tensor, scales: Tensor
) -> BlockScaledTensor | Tensor | None:
    if settings.recompute_z:
        return None
    # The inverse of `_z_tensors`: the settings say which form the two tensors have.
    if settings.recipe is None or settings.save_z is ZCode.BF16:
        return z
    return BlockScaledTensor(z, scales, settings.recipe.z, _code(settings), Orientation.ROWS)


def _n1(weights: StackedWeights, plan: Plan) -> Any:
    return weights[0].shape[2 if plan.layout.transposed else 1]


def _check_config(plan: Plan) -> None:
    """Refuse an activated configuration that is not the graph's: the graph would ignore it in
    silence, because it keeps the settings that it was compiled under.
    """
    # Nothing is activated, or activation recompute runs on a thread of autograd's own, where the
    # caller's configuration is not seen.
    active = ACTIVE.get()
    if plan.is_own or active is None or active == SonicMoEConfig():
        return
    settings = plan.settings
    wanted = make_plan(
        settings.activation, plan.layout, plan.use_fp8, settings.activation_parameters
    )
    expect(
        wanted.settings == plan.settings and wanted.engine == plan.engine,
        ConfigError,
        "the SonicMoEConfig in force is not the one this graph was compiled under: compile (and first call) inside its "
        "activate() block, or call torch.compiler.reset()",
    )
