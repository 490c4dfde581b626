"""The engine under `torch.autograd`, for weights that are ordinary autograd inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..autograd.torch_bridge import apply_function, refuse_transforms
from ..config import active_config
from ..engine.low_rank import NO_ADAPTERS, Adapters
from ..enums import ActivationParameters, ActivationType
from ..layer.compiled import expert_operator
from ..layer.passed_call import PassedCall, PassedFunction
from ..layer.plan import Plan, check_use_fp8, plan_for
from ..layouts import Codes, GateUp, StackedWeights, WeightLayout, flat_weights
from ..observe import FACES, STACKED
from ..weights.stacked_cache import look
from .border import check_stored, check_switch

Tensor = torch.Tensor


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
    if inference is not False:
        check_switch("is_inference_mode", inference)  # both names of the argument begin so
    is_alone = adapters in (None, NO_ADAPTERS)
    adapters = NO_ADAPTERS if adapters is None or is_alone else adapters.native(layout)
    save = not inference and is_differentiated(x, probs, flat, adapters)
    # The compiler cannot trace the engines' launches, so the graph gets one operator. `save`
    # becomes a constant of it. Tensors without values (`FakeTensorMode`) get their shapes from it.
    if torch.compiler.is_compiling() or type(x).__name__ == "FakeTensor":
        # Imported here, because that module loads the compiler, which takes a second or more.
        from ..layer.graph_constants import plan_number

        # Asked for while the compiler traces: the number becomes a constant of the graph, and names
        # the configuration of that moment.
        of_layout = layout.transposed, layout.split_half, layout.apart
        number = plan_number(activation.value, parameters, *of_layout, use_fp8, face)
        return expert_operator(x, indices, probs, weights, number, save, adapters)
    # The plan holds the configuration of this moment. Backward may run on one of autograd's
    # threads, where nothing is activated, and under another configuration later.
    of_layer = activation, layout, use_fp8, parameters, face
    if use_fp8 is not None and type(use_fp8) is not bool:  # 1 equals True, and would be found
        check_use_fp8(use_fp8)
    resolved = active_config().resolve()
    asked = resolved, of_layer, not is_alone, x.device, x.dtype, x.shape[-1]
    looked = look(flat, asked)
    plan = None if looked is None else looked.plan
    plan = plan or plan_for(resolved, x, weights, not is_alone, *of_layer)
    call = PassedCall(
        plan=plan,
        routes=indices,
        weights=weights,
        adapters=adapters,
        module=module,
        looked=looked,
    )
    return _run(call, x, probs, flat, save)


def planned_mlp(
    plan: Plan,
    number: int,
    x: Tensor,
    routes: Tensor,
    probs: Tensor | None,
    weights: StackedWeights,
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
    looked = look(flat, (plan, x.device, x.dtype, x.shape[-1]))
    known = None if looked is None else looked.plan
    plan = known or plan.fitted_to(x, weights)
    call = PassedCall(plan=plan, routes=routes, weights=weights, module=module, looked=looked)
    return _run(call, x, probs, flat, save)


def is_differentiated(
    x: Tensor, probs: Tensor | None, flat: tuple[Any, ...], adapters: Adapters = NO_ADAPTERS
) -> bool:
    """Whether anything must be kept for a backward."""
    if torch.is_grad_enabled():
        factors = () if adapters is NO_ADAPTERS else adapters.factors
        for given in (x, probs, *flat, *factors):
            if given is not None and given.requires_grad:
                return True
    return False


def _run(
    call: PassedCall, x: Tensor, probs: Tensor | None, flat: tuple[Any, ...], save: bool
) -> Tensor:
    factors = () if call.adapters is NO_ADAPTERS else call.adapters.factors
    differentiable = (x, probs, *flat, *factors)
    refuse_transforms(differentiable)
    if not save:
        return call.forward(x, probs, save=False)[0]
    out: Tensor = apply_function(PassedFunction, (call,), differentiable)
    return out
