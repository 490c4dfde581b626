"""Hugging Face transformers >= 5.7: the engine as an experts implementation.

    from sonicmoe.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, experts_implementation="sonicmoe_fp8")

`sonicmoe` follows the configuration (`SonicMoEConfig`, environment), which is unquantised by default; `sonicmoe_fp8` is FP8 always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..enums import ActivationType
from ..errors import FrameworkError, LayoutError, expect
from ..functional import autocast
from ..functional.autograd import expert_mlp
from ..functional.weights import WeightLayout
from ..interop import parse_version

Tensor = torch.Tensor
ExpertsForward = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]

MINIMUM_TRANSFORMERS = (5, 7)
IMPLEMENTATIONS: dict[str, bool | None] = {"sonicmoe": None, "sonicmoe_fp8": True}  # name: FP8, None as configured

_GATED = {"silu": ActivationType.SWIGLU, "gelu": ActivationType.GEGLU, "relu": ActivationType.REGLU}
_PLAIN = {
    "silu": ActivationType.SILU,
    "gelu": ActivationType.GELU,
    "relu": ActivationType.RELU,
    "relu2": ActivationType.RELU_SQ,
}
_NEEDED = "models take registered experts implementations from transformers 5.7 on"
# transformers instantiates these for `hidden_act`; tanh approximations of GELU are other classes, or say so in an attribute.
_ACTIVATION_CLASSES = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}


def register() -> None:
    """Make `experts_implementation="sonicmoe"` and `"sonicmoe_fp8"` known to transformers; may be called again.

    `"sonicmoe"` replaces the implementation of that name which transformers downloads from its kernel hub.

    Raises:
        FrameworkError: transformers is missing, or older than 5.7.
    """
    moe = _moe_module()
    _check_version()
    for name, use_fp8 in IMPLEMENTATIONS.items():
        moe.ALL_EXPERTS_FUNCTIONS.register(name, _experts_forward(use_fp8, moe._default_apply_gate))


def check_model(model: nn.Module) -> None:
    """Raise for a model whose experts the engine cannot compute; the first forward raises the same.

    Raises:
        LayoutError: names every such class of experts and the reason; or the model has no experts that transformers can dispatch.
    """
    found = {type(module): module for module in model.modules() if _is_experts(module)}
    kind = type(model).__name__
    expect(bool(found), LayoutError, f"{kind} has no experts with an exchangeable implementation")
    reasons = [reason for reason in map(unsupported_reason, found.values()) if reason is not None]
    expect(not reasons, LayoutError, f"{kind}: {'; '.join(reasons)}")


def unsupported_reason(experts: nn.Module) -> str | None:
    """Why the engine cannot compute this experts module, in words that name its class; None where it can."""
    return _unsupported_reason(experts, _moe_module()._default_apply_gate)


def _unsupported_reason(experts: nn.Module, standard_gate: Any) -> str | None:
    """`standard_gate`: the `_apply_gate` of experts that compute act(gate) * up."""
    kind = type(experts).__name__
    gated = getattr(experts, "has_gate", True)
    if gated and getattr(type(experts), "_apply_gate", None) is not standard_gate:
        return f"{kind} has a gate of its own (_apply_gate); the engine computes act(gate) * up"
    if getattr(experts, "has_post_expert_norm", False):
        return f"{kind} normalises the output of every expert (has_post_expert_norm)"
    act = getattr(experts, "act_fn", None)
    known = _GATED if gated else _PLAIN
    if _activation_name(act) not in known:
        return f"{kind} has the activation {type(act).__name__}; needed: one of {sorted(known)}"
    for name in _weight_names(experts):
        weight = getattr(experts, name, None)
        if not isinstance(weight, torch.Tensor):
            return f"{kind} has no weight {name}"
        if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{kind} has {name} in {weight.dtype}; needed: bfloat16, float16 or float32"
    return None


def _experts_forward(use_fp8: bool | None, standard_gate: Any) -> ExpertsForward:
    """The function that transformers calls in place of an experts module's forward.

    It imports nothing: transformers' packages are lazy modules, whose import torch.compile up to 2.11 cannot trace.
    """

    def forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[T, H]`, ids `[T, K]` (-1 and >= E: another rank's), weights `[T, K]` -> `[T, H]`."""
        reason = _unsupported_reason(self, standard_gate)
        if reason is not None:
            raise LayoutError(f"the sonicmoe experts implementation cannot run this model: {reason}")
        gated = getattr(self, "has_gate", True)
        names = _weight_names(self)
        up, down, *biases = (_local(getattr(self, name)) for name in names)
        up_bias, down_bias = biases or (None, None)
        tokens = _local(hidden_states)
        out = expert_mlp(
            autocast(tokens),  # norms give fp32 under autocast; the built-in implementations compute lower all the same
            _local(top_k_index),
            _local(top_k_weights).to(torch.float32),
            up,
            down,
            up_bias,
            down_bias,
            (_GATED if gated else _PLAIN)[_activation_name(self.act_fn)],
            layout=WeightLayout(
                transposed=getattr(self, "is_transposed", False),
                split_half=gated and getattr(self, "is_concatenated", True),
            ),
            use_fp8=use_fp8,
        )
        return out.to(tokens.dtype)

    return forward


def _weight_names(experts: nn.Module) -> tuple[str, ...]:
    up = "gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj"
    biases = (f"{up}_bias", "down_proj_bias") if getattr(experts, "has_bias", False) else ()
    return (up, "down_proj", *biases)


def _activation_name(act: Any) -> str:
    """Its name in the tables above; "" for what none of them is."""
    tanh = getattr(act, "approximate", "none") != "none"
    return "" if tanh else _ACTIVATION_CLASSES.get(type(act).__name__, "")


def _is_experts(module: nn.Module) -> bool:
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, as a view: nothing is kept of it, since in-place operations on DTensors do not move its version."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()[:]


def _moe_module() -> Any:
    try:
        from transformers.integrations import moe
    except ImportError as error:
        raise FrameworkError(f"{_NEEDED} (pip install 'transformers>=5.7'): {error}") from error
    return moe


def _check_version() -> None:
    import transformers

    found = transformers.__version__
    # 5.0 to 5.6 have the registry, but their models refuse every name that is not in a list of their own.
    expect(parse_version(found) >= MINIMUM_TRANSFORMERS, FrameworkError, f"transformers {found} is too old: {_NEEDED}")
