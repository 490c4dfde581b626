"""The hook by which PaddleFleet's pipeline schedule puts off the weight gradients of the experts
(`functional.set_wgrad_deferral_hook` of the engine that Fleet knows).

Fleet installs one hook per process. It puts the addition of a gradient into `WeightGradStore`, whose
tasks the schedule runs while it waits for other stages; each task runs the addition and then fires
the weight's backward hook. The two additions of a backward share their operands, which stay in
memory until both have run.

A gradient is offered where all weights that train have `main_grad`, and where the tokens or the
scores want a gradient, because without the weights among its inputs nothing else makes autograd run
the backward. Elsewhere weight gradients are complete when the backward returns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import ConfigError, FrameworkError, expect
from ..interop import IS_PADDLE
from ..layer.late_wgrad import WgradOffer

Tensor = torch.Tensor
Run = Callable[[], None]
Hook = Callable[[str, Tensor, Run], bool]

UP_GATE_POINT = "moe_sonic_expert_up_gate_proj"
DOWN_POINT = "moe_sonic_expert_down_proj"
POINTS = (UP_GATE_POINT, DOWN_POINT)  # in the order of the parameters of a layer

# One for the process, because Fleet installs it once and for all layers.
_hook: Hook | None = None


def set_wgrad_deferral_hook(hook: Hook | None) -> None:
    """Have every backward offer its weight gradients to `hook`; None: to nobody.

    Args:
        hook: `hook(point, weight, run_wgrad) -> bool`, `point` one of `POINTS`. Where it returns
            True, somebody calls `run_wgrad()` once, and fires the backward hooks of `weight` after
            that. Where it returns False, the gradient is added at once and the hooks are fired here.

    Raises:
        ConfigError: `hook` cannot be called.
        FrameworkError: PyTorch, whose hooks cannot be fired from outside.
    """
    global _hook
    needed = "a function (point, weight, run_wgrad) -> bool, or None"
    words = f"hook is {type(hook).__name__}; needed: {needed}"
    expect(hook is None or callable(hook), ConfigError, words)
    if hook is not None and not IS_PADDLE:
        raise FrameworkError(
            "set_wgrad_deferral_hook needs Paddle, whose backward hooks can be fired from outside a "
            "backward; under PyTorch: delay_wgrad_compute of Megatron-Core, whose schedule takes "
            "the weight gradients of sonicmoe.integrations.megatron"
        )
    _hook = hook


def current_offer() -> WgradOffer | None:
    """The hook as nodes ask it."""
    # Read once: the schedule may take the hook back while a backward runs.
    hook = _hook
    if hook is None:
        return None

    # Nodes number the weights of a layer, and Fleet names them.
    def offer(position: int, weight: Tensor, run: Run) -> bool:
        return bool(hook(POINTS[position], weight, run))

    return offer
