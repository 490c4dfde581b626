"""The engine under `torch.autograd`, for weights that are ordinary autograd inputs."""

from __future__ import annotations

from typing import Any

import torch

from ..config import current_config
from ..engine.interface import Engine, EngineSettings, EngineWeights, GradAccumulators
from ..engine.select import announce, choose_engine
from ..enums import ActivationType
from ..errors import FrameworkError
from ..interop import IS_PADDLE, device_name
from ..routing.build import build_metadata

if IS_PADDLE:
    raise FrameworkError(
        "sonicmoe.functional and sonicmoe.MoE are the PyTorch face; under Paddle use sonicmoe.ernie_compat.SonicMoEMlpNode"
    )

from torch.optim.optimizer import register_optimizer_step_post_hook  # Paddle's proxy has no such module

Tensor = torch.Tensor


_optimizer_steps = 0


def _count_optimizer_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_optimizer_step)  # fused optimizers move no version counter


class WeightCache:
    """Prepared weights of one layer, reused while storage and version counters stand still and no `torch.optim.Optimizer` steps.

    PyTorch's in-place operations move the version counter; a write through `.data` moves nothing: call `clear`.
    Inference tensors have no version counter, so nothing is kept of them. A copied or unpickled cache is empty.
    """

    def __init__(self) -> None:
        """Empty."""
        self._key: tuple[Any, ...] = ()
        self._weights: EngineWeights | None = None
        self._sources: tuple[Tensor | None, ...] = ()  # kept alive: freed memory could return under the same address

    def __reduce__(self) -> tuple[type[WeightCache], tuple[()]]:
        """Copies and pickles are empty: prepared weights can always be made again."""
        return WeightCache, ()

    def get(self, engine: Engine, tensors: tuple[Tensor | None, ...], settings: EngineSettings) -> EngineWeights:
        """Prepare `(w1, w2, b1, b2)` for `engine`, or return what was prepared from the same bytes."""
        w1, w2, b1, b2 = tensors
        assert w1 is not None and w2 is not None
        if any(t is not None and t.is_inference() for t in tensors):
            return engine.prepare_weights(w1, w2, b1, b2, settings)
        versions = tuple((t.data_ptr(), t._version) if t is not None else None for t in tensors)
        key = (engine.name, settings, versions, _optimizer_steps)
        if self._weights is None or key != self._key:
            self._weights = engine.prepare_weights(w1, w2, b1, b2, settings)
            self._key, self._sources = key, tensors
        return self._weights

    def clear(self) -> None:
        """Forget the prepared weights."""
        self._weights, self._sources = None, ()


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
    inference: bool = False,
    weight_cache: WeightCache | None = None,
) -> Tensor:
    """Routed expert MLP `[T, H] -> [T, H]` on native weights `w1 [E, N1, H]`, `w2 [E, H, I]`, differentiable in all but `indices`."""
    config = current_config()
    settings = EngineSettings.from_config(config, activation)
    choice = choose_engine(device_name(x), config.engine)
    announce(choice, device_name(x))
    tensors = tuple(None if t is None else t.detach() for t in (w1, w2, b1, b2))
    prepared = (weight_cache or WeightCache()).get(choice.engine, tensors, settings)
    x = x.contiguous()
    routing_options: dict[str, Any] = {"alignment": settings.row_alignment, "validate": config.validate_dispatch}
    differentiable = (x, probs, w1, w2, b1, b2)
    if inference or not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiable)):
        routing = build_metadata(indices, probs, int(w1.shape[0]), **routing_options)
        return choice.engine.forward(x, routing, prepared, settings, save=False)[0]
    out: Tensor = _ExpertMlp.apply(choice.engine, settings, prepared, indices, routing_options, *differentiable)
    return out


class _ExpertMlp(torch.autograd.Function):
    """Weight gradients are computed in fresh fp32 accumulators and returned in each weight's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        settings: EngineSettings,
        prepared: EngineWeights,
        indices: Tensor,
        routing_options: dict[str, Any],
        x: Tensor,
        probs: Tensor,
        *weights: Tensor | None,
    ) -> Tensor:
        """Build routing, run the engine, keep its tensors through `save_for_backward`."""
        routing = build_metadata(indices, probs, prepared.num_experts, **routing_options)
        out, saved = engine.forward(x, routing, prepared, settings)
        assert saved is not None
        tensors, ctx.spec = saved.pack()
        # Unquantised weights are views of the user's: autograd then refuses a backward after they were changed in place.
        views = weights if settings.recipe is None else (None,) * len(weights)
        ctx.save_for_backward(*views, *tensors)
        ctx.engine, ctx.prepared = engine, prepared
        ctx.weight_dtypes = [None if weight is None else weight.dtype for weight in weights]
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, probs, w1, w2, b1, b2."""
        saved = ctx.spec.unpack(ctx.saved_tensors[len(ctx.weight_dtypes) :])
        x_wanted, probs_wanted, *weights_wanted = ctx.needs_input_grad[5:]
        accumulators = _zeros_like_weights(ctx.prepared, dout) if any(weights_wanted) else None
        dx, dprobs = ctx.engine.backward(dout, saved, ctx.prepared, accumulators)
        gradients: list[Tensor | None] = [None] * len(weights_wanted)
        if accumulators is not None:
            native = (accumulators.dw1, accumulators.dw2, accumulators.db1, accumulators.db2)
            for i, (gradient, wanted, dtype) in enumerate(zip(native, weights_wanted, ctx.weight_dtypes, strict=True)):
                gradients[i] = gradient.to(dtype) if wanted and gradient is not None else None
        return (None, None, None, None, None, dx if x_wanted else None, dprobs if probs_wanted else None, *gradients)


def _zeros_like_weights(weights: EngineWeights, like: Tensor) -> GradAccumulators:
    experts, n1, hidden = (int(size) for size in weights.w1.shape)
    return GradAccumulators.zeros(experts, n1, hidden, weights.intermediate_size, weights.b1 is not None, like.device)
