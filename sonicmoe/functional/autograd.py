"""The engine under `torch.autograd`, for weights that are ordinary autograd inputs."""

from __future__ import annotations

from typing import Any

import torch

from ..autograd import refuse_second_derivative
from ..autograd.torch_bridge import apply_function, refuse_transforms
from ..enums import ActivationParameters, ActivationType
from ..layouts import WeightLayout
from ..observe import STACKED, is_awaited, is_heard
from .call import Origin, Plan, backward, forward, make_plan
from .compiled import compiled_expert_mlp

Tensor = torch.Tensor


def expert_mlp(
    x: Tensor,
    indices: Tensor,
    probs: Tensor,
    w1: Tensor,
    w2: Tensor,
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
) -> Tensor:
    """Routed expert MLP `[..., H] -> [..., H]`, differentiable in all but `indices`.

    Args:
        x: `[..., H]`; its leading axes are one axis T to the experts.
        indices: int `[T, K]`, expert ids (docs/design.md, "Routing contract").
        probs: fp32 `[T, K]`.
        w1, w2, b1, b2: stacked weights, arranged as `layout` says (default: native `[E, N1, H]`,
            `[E, H, I]`).
        parameters: of the activation, those that the layer sets.
        inference: keep nothing for a backward.
        use_fp8: True or False overrides the configuration's FP8 mode.
        face: a key of `observe.FACES`: the names of the arguments, for a diagnosis.
        module: whose attributes the weights are, for a diagnosis.

    Returns:
        The output in the shape of x, in memory of its own: it is no view, so that the caller may
        write it in place also under FSDP2, which hangs its hooks on it.

    Inside `torch.compile` the call is one custom operator, under the configuration in force when
    the graph is compiled.
    """
    weights = (w1, w2, b1, b2)
    differentiable = (x, probs, *weights)
    # Under `no_grad`, and where nothing requires a gradient, nothing is kept: neither z nor the
    # tokens.
    save = not inference and torch.is_grad_enabled()
    save = save and any([t is not None and t.requires_grad for t in differentiable])
    layout = layout or WeightLayout()
    # The compiler cannot trace the engines' launches, so the graph gets one operator. `save`
    # becomes a constant of it.
    if torch.compiler.is_compiling():
        return compiled_expert_mlp(
            x, indices, probs, weights, activation, parameters, layout, use_fp8, save, face
        )
    refuse_transforms(differentiable)
    # The plan holds the configuration of this moment. Backward may run on one of autograd's
    # threads, where nothing is activated, and under another configuration later.
    plan = make_plan(activation, layout, use_fp8, parameters, face).fitted(x, weights)
    origin = Origin(indices, module)
    if not save:
        return forward(plan, x, probs, weights, origin, save=False)[0]
    out: Tensor = apply_function(_ExpertMlp, (plan, origin), differentiable)
    return out


def _keeps_graph() -> bool:
    """Whether the backward that runs may be repeated (`retain_graph`, `create_graph`)."""
    # Private, and what PyTorch's own compiled backwards ask before they reuse saved memory. Without
    # it nothing is reused.
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return asked is None or bool(asked())


class _ExpertMlp(torch.autograd.Function):
    """Weight gradients are summed in fp32 and returned in each weight's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        origin: Origin,
        x: Tensor,
        probs: Tensor,
        *weights: Any,
    ) -> Tensor:
        """Run the engine, and keep its tensors through `save_for_backward`."""
        out, saved, reading = forward(plan, x, probs, weights, origin, save=True)
        assert saved is not None
        tensors, ctx.spec = saved.pack()
        # FP8 weights are copies of their own. Plain ones are the user's: saving them lets autograd
        # refuse a backward after they were changed in place, and they are prepared again for
        # backward, so that no rearranged copy lives from one pass to the other.
        quantised = plan.settings.recipe is not None
        ctx.reading = reading if quantised else None
        ctx.save_for_backward(*((None,) * 4 if quantised else weights), *tensors)
        ctx.plan = plan
        # Who observes this forward sees its backward with the user's tensors. Nobody else may keep
        # those alive.
        ctx.observed = (weights, origin) if is_awaited() else None
        ctx.dtypes = tuple([None if weight is None else weight.dtype for weight in weights])
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, probs, w1, w2, b1, b2."""
        refuse_second_derivative()
        w1, w2, b1, b2, *tensors = ctx.saved_tensors
        x_wanted, probs_wanted, *trained = ctx.needs_input_grad[2:]
        weights, origin = ctx.observed or (None, Origin())
        # Plain weights come through the saved tensors, whose version autograd has just compared
        # with that of the forward.
        if ctx.reading is None:
            weights = (w1, w2, b1, b2)
        saved = ctx.spec.unpack(tensors)
        # Only z is memory of our own. Whoever observes the call, or listens, may look at it afterwards.
        is_watched = ctx.observed is not None or is_awaited() or is_heard()
        saved.donated = not is_watched and not _keeps_graph()
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
        dx = dx.view(dout.shape)
        of_tokens = dx if x_wanted else None, dprobs if probs_wanted else None
        return (None, None, *of_tokens, *gradients)
