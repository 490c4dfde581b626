"""The engine under `torch.autograd`, for weights that are ordinary autograd inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..autograd import refuse_second_derivative
from ..autograd.torch_bridge import apply_function, refuse_transforms
from ..engine.low_rank import NO_ADAPTERS, Adapters
from ..enums import ActivationParameters, ActivationType
from ..layouts import Codes, GateUp, WeightLayout, flat_weights, weights_of
from ..observe import FACES, STACKED, is_awaited, is_heard
from ..weights.stacked_cache import Weights
from .border import check_stored, check_switch
from .call import NOWHERE, Origin, backward, forward
from .compiled import expert_operator, halves_of
from .plan import Plan, make_plan

Tensor = torch.Tensor
WEIGHTS = 6  # so many are `flat_weights`


def expert_mlp(
    x: Tensor,
    indices: Tensor,
    probs: Tensor,
    w1: Tensor | GateUp | Codes,
    w2: Tensor | Codes,
    b1: Tensor | None,
    b2: Tensor | None,
    activation: ActivationType,
    *,
    parameters: ActivationParameters = (),
    layout: WeightLayout | None = None,
    inference: bool = False,
    use_fp8: bool | None = None,
    face: str = STACKED,
    module: object = None,
    adapters: Adapters | None = None,
) -> Tensor:
    """Routed expert MLP `[..., H] -> [..., H]`, differentiable in all but `indices`.

    Args:
        x: `[..., H]`; its leading axes are one axis T to the experts.
        indices: int `[T, K]`, expert ids (docs/design.md, "Routing contract").
        probs: fp32 `[T, K]`.
        w1, w2, b1, b2: stacked weights, arranged as `layout` says (default: native `[E, N1, H]`,
            `[E, H, I]`). Both are `Codes` where they are frozen, in the native layout; FP8 only.
        parameters: of the activation, those that the layer sets.
        inference: keep nothing for a backward.
        use_fp8: True or False overrides the configuration's FP8 mode.
        face: a key of `observe.FACES`: the names of the arguments, for a diagnosis.
        module: whose attributes the weights are, for a diagnosis.
        adapters: low-rank pairs beside w1 and w2, whose `up.b` has the order of the rows of w1.

    Returns:
        The output in the shape of x, in memory of its own: it is no view, so that the caller may
        write it in place also under FSDP2, which hangs its hooks on it.

    Inside `torch.compile` the call is one custom operator, under the configuration in force when
    the graph is compiled.
    """
    weights, layout = (w1, w2, b1, b2), layout or WeightLayout()
    flat = flat_weights(weights)
    check_stored(x, flat, FACES[face], module)
    check_switch("is_inference_mode", inference)  # both names of the argument begin so
    low_rank, adapters = adapters is not None, (adapters or NO_ADAPTERS).native(layout)
    save = not inference and is_differentiated(x, probs, flat, adapters)
    # The compiler cannot trace the engines' launches, so the graph gets one operator. `save`
    # becomes a constant of it. Tensors without values (`FakeTensorMode`) get their shapes from it.
    if torch.compiler.is_compiling() or type(x).__name__ == "FakeTensor":
        # Imported here, because that module loads the compiler, which takes a second or more.
        from .graph_constants import plan_number

        # Asked for while the compiler traces: the number becomes a constant of the graph, and names
        # the configuration of that moment.
        of_layout = layout.transposed, layout.split_half, layout.apart
        number = plan_number(activation.value, parameters, *of_layout, use_fp8, face, low_rank)
        return expert_operator(x, indices, probs, weights, number, save, adapters)
    # The plan holds the configuration of this moment. Backward may run on one of autograd's
    # threads, where nothing is activated, and under another configuration later.
    plan = make_plan(activation, layout, use_fp8, parameters, face, low_rank)
    return _run(plan, x, probs, flat, Origin(indices, module, adapters), save)


def planned_mlp(
    plan: Plan,
    number: int,
    x: Tensor,
    routes: Tensor,
    probs: Tensor | None,
    weights: Weights,
    module: object,
) -> Tensor:
    """`expert_mlp` under a plan that was made before, of which `number_of` gave the number.

    routes: indices `[T, K]`, with fp32 probs `[T, K]`; or, where x `[T, H]` is in expert order, the
    counts `[E]` of its rows, with fp32 probs `[T]`, or None where the caller multiplies the output
    himself. Rows beyond the sum of the counts are not read; their output and gradient are zeros.
    """
    flat = flat_weights(weights)
    save = is_differentiated(x, probs, flat)
    # Selective checkpointing keeps the outputs of operators that it knows by name. It is a dispatch
    # mode, to which the engines' launches show nothing.
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return expert_operator(x, routes, probs, weights, number, save)
    return _run(plan, x, probs, flat, Origin(routes, module), save)


def is_differentiated(
    x: Tensor, probs: Tensor | None, flat: tuple[Any, ...], adapters: Adapters = NO_ADAPTERS
) -> bool:
    """Whether anything must be kept for a backward."""
    if torch.is_grad_enabled():
        for given in (x, probs, *flat, *adapters.factors):
            if given is not None and given.requires_grad:
                return True
    return False


def _run(
    plan: Plan, x: Tensor, probs: Tensor | None, flat: tuple[Any, ...], origin: Origin, save: bool
) -> Tensor:
    adapters = origin.adapters
    factors = () if adapters is NO_ADAPTERS else adapters.factors
    differentiable = (x, probs, *flat, *factors)
    refuse_transforms(differentiable)
    weights = weights_of(flat)
    plan = plan.fitted(x, weights)
    if not save:
        return forward(plan, x, probs, weights, origin, save=False)[0]
    out: Tensor = apply_function(_ExpertMlp, (plan, origin), differentiable)
    return out


def keeps_graph() -> bool:
    """Whether the backward that runs may be repeated (`retain_graph`, `create_graph`)."""
    return _graph_is_kept is None or bool(_graph_is_kept())


# Private, and what PyTorch's own compiled backwards ask before they reuse saved memory. Without it
# nothing is reused.
_graph_is_kept: Any = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


class _ExpertMlp(torch.autograd.Function):
    """Gradients are summed in fp32 and returned in each weight's dtype; those of adapters by
    PyTorch, which casts them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        origin: Origin,
        x: Tensor,
        probs: Tensor | None,
        *tensors: Any,
    ) -> Tensor:
        """Run the engine, and keep its tensors through `save_for_backward`. Behind the six
        `flat_weights` are the four factors of adapters, where there are any.
        """
        flat, factors = tensors[:WEIGHTS], tensors[WEIGHTS:]
        weights = weights_of(flat)
        out, saved, reading = forward(plan, x, probs, weights, origin, save=True)
        assert saved is not None
        kept, ctx.spec = saved.pack()
        # FP8 weights are copies of their own. Plain ones are the user's: saving them lets autograd
        # refuse a backward after they were changed in place, and they are prepared again for
        # backward, so that no rearranged copy lives from one pass to the other.
        # Codes of frozen weights are the user's memory as well.
        quantised = plan.settings.recipe is not None and flat[3] is None
        ctx.reading = reading if quantised else None
        ctx.save_for_backward(*(() if quantised else flat), *factors, *kept)
        ctx.scales = origin.adapters.scales if factors else None
        ctx.plan, ctx.shape_of_probs = plan, None if probs is None else probs.shape
        # Who observes this forward sees its backward with the user's tensors. Nobody else may keep
        # those alive.
        ctx.observed = (weights, origin) if is_awaited() else None
        ctx.dtypes = tuple([None if w is None else w.dtype for w in (flat[0], flat[2], *flat[4:])])
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, probs, w1, its up half, w2, its scales, b1, b2, and of the factors of adapters."""
        refuse_second_derivative()
        tensors = ctx.saved_tensors
        x_wanted, probs_wanted, w1_trained, up_trained, w2_trained, _, *trained = (
            ctx.needs_input_grad[2:]
        )
        trained = [w1_trained or up_trained, w2_trained, *trained]
        weights, origin = ctx.observed or (None, NOWHERE)
        # Plain weights come through the saved tensors, whose version autograd has just compared
        # with that of the forward.
        if ctx.reading is None:
            weights, tensors = weights_of(tensors[:WEIGHTS]), tensors[WEIGHTS:]
        if ctx.scales is not None:
            origin = replace(origin, adapters=Adapters.of(tensors[:4], ctx.scales))
            tensors = tensors[4:]
        saved = ctx.spec.unpack(tensors)
        # Only z is memory of our own. Whoever observes the call, or listens, may look at it afterwards.
        is_watched = ctx.observed is not None or is_awaited() or is_heard()
        saved.donated = not is_watched and not keeps_graph()
        dx, dprobs, gradients = backward(
            ctx.plan,
            dout,
            saved,
            ctx.reading,
            ctx.dtypes,
            trained=trained,
            given=weights,
            origin=origin,
        )
        # A view of the same shape takes the host as long as an allocation.
        if dx.shape != dout.shape:
            dx = dx.view(dout.shape)
        # Probabilities of rows in expert order have one axis.
        if probs_wanted and dprobs.shape != ctx.shape_of_probs:
            dprobs = dprobs.view(ctx.shape_of_probs)
        of_tokens = dx if x_wanted else None, dprobs if probs_wanted else None
        nothing = (None,) * (len(trained) - len(gradients))
        dw1, dw2, *others = gradients
        are_two = ctx.plan.layout.apart
        halves = halves_of(dw1, w1_trained, up_trained) if are_two else (dw1, None)
        return (None, None, *of_tokens, *halves, dw2, None, *others, *nothing)
