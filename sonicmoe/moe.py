"""`MoE`: a token-choice Mixture-of-Experts layer for PyTorch, source compatible with upstream
SonicMoE.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .engine.activations import activate, pre_activation_width
from .engine.low_rank import Adapters, LowRank
from .enums import ActivationType, KernelBackendMoE, layer_parameters, member_of
from .enums import is_glu as is_gated
from .errors import ConfigError, EngineUnavailableError, LayoutError, ShapeError, expect
from .functional import softmax_topk_layer
from .functional.border import WHOLE, check_router_dtype, need_values, need_whole
from .functional.frozen import codes_in, frozen_in
from .functional.peft_pairs import low_rank_of
from .interop import current_stream
from .layer.plan import check_use_fp8
from .layouts import Codes
from .observe import MOE
from .refusals import need_shape, need_type
from .weights.stacked_cache import forget

Tensor = torch.Tensor


class Experts(nn.Module):
    """E stacked linear maps: `weight [E, out_features, in_features]`, `bias [E, out_features]` or
    None.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        add_bias: bool = True,
        std: float | None = None,
    ) -> None:
        """Normal weights with standard deviation `std` (default 0.02), zero biases."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features)) if add_bias else None
        self.std = 0.02 if std is None else std
        self.num_experts, self.in_features, self.out_features = (
            num_experts,
            in_features,
            out_features,
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, mean=0.0, std=self.std)
        if self.bias is not None:
            self.bias.zero_()

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}"


class MoE(nn.Module):
    """Router, top-k, softmax over the chosen, gated expert MLPs, weighted sum; with the Switch
    load-balancing loss.

    Args:
        num_experts: E.
        num_experts_per_tok: K.
        hidden_size, intermediate_size: H, I.
        activation_function: `ActivationType` or its value.
        add_bias: biases on both projections.
        std: standard deviation of the expert weights.
        is_glu: as upstream's scripts say it; follows from the activation, which it must not
            contradict.
        activation_parameters: numbers of this layer's activation by name, such as `limit` of
            `swiglu_clamp` or `beta` of `situ_glu`; those not given have their defaults
            (`enums.ACTIVATIONS`).

    `state_dict` names: `router.weight [E, H]`, `c_fc.weight [E, N1, H]` (gate and up rows
    interleaved), `c_fc.bias`, `c_proj.weight [E, H, I]`, `c_proj.bias`.

    Raises:
        ShapeError: K > E, or a size is no positive integer.
        ConfigError: an unknown activation, one without these parameters, `is_glu` contradicts it,
            or `std` or `add_bias` is none.
    """

    def __init__(
        self,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        intermediate_size: int,
        activation_function: ActivationType | str = ActivationType.SWIGLU,
        add_bias: bool = False,
        std: float = 0.02,
        is_glu: bool | None = None,
        activation_parameters: Mapping[str, float | None] | None = None,
    ) -> None:
        """See the class; weights are drawn from a normal distribution."""
        super().__init__()
        sizes = {"num_experts": num_experts, "num_experts_per_tok": num_experts_per_tok}
        sizes |= {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
        for name, size in sizes.items():
            # Sizes come out of configuration files, where 64 may be a text; and True is an int.
            whole = isinstance(size, Integral) and not isinstance(size, bool)
            expect(whole and size > 0, ShapeError, f"{name} is {size!r}; needed: at least 1")
        expect(
            num_experts_per_tok <= num_experts,
            ShapeError,
            f"num_experts_per_tok is {num_experts_per_tok}; only {num_experts} experts",
        )
        need_type("add_bias", add_bias, bool, "True or False", ConfigError)
        # NaN is not at least 0 either.
        fits = std is None or (isinstance(std, Real) and std >= 0)
        expect(fits, ConfigError, f"std is {std!r}; needed: a number, at least 0")
        self.num_experts, self.top_k = num_experts, num_experts_per_tok
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.activation_function = member_of(
            ActivationType, activation_function, "activation_function"
        )
        gated = is_gated(self.activation_function)
        expect(
            is_glu is None or is_glu == gated,
            ConfigError,
            f"is_glu is {is_glu}; {self.activation_function.value} needs {gated}",
        )
        self.activation_parameters = layer_parameters(
            self.activation_function, activation_parameters
        )
        width = pre_activation_width(intermediate_size, self.activation_function)
        self.router = nn.Linear(hidden_size, num_experts, bias=False)
        self.c_fc = Experts(num_experts, hidden_size, width, add_bias, std)
        self.c_proj = Experts(num_experts, intermediate_size, hidden_size, add_bias, std)

    def forward(
        self,
        hidden_states: Tensor,
        kernel_backend_moe: KernelBackendMoE | str = KernelBackendMoE.sonicmoe,
        is_inference_mode: bool = False,
        prequant_fp8_weights: bool = False,
        *,
        use_fp8: bool | None = None,
        adapters: Adapters | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer.

        Args:
            hidden_states: `[..., H]`.
            kernel_backend_moe: `sonicmoe` (the engine), `sonicmoe_fp8` (the same with
                `use_fp8=True`) or `torch` (plain differentiable PyTorch, for comparison), or its
                value.
            is_inference_mode: keep nothing for a backward, and compute no loss.
            prequant_fp8_weights: as upstream's scripts say it, with `sonicmoe_fp8`; decides
                nothing, because FP8 copies of the weights always serve until the weights change.
            use_fp8: True or False overrides the configuration's FP8 mode; None follows it.
            adapters: low-rank pairs beside `c_fc.weight` and `c_proj.weight`, which may be frozen.
                Those of peft, with these two as its `target_parameters`, need no argument.

        Returns:
            `(output [..., H], aux_loss scalar)`; aux_loss is None with `is_inference_mode`.

        `eval()` changes nothing: gradients flow wherever autograd records, as in any module.

        Raises:
            EngineUnavailableError: a backend this package does not have.
            TypeError: `hidden_states` is no tensor.
            ShapeError: its last axis is not H, or the router's is not E.
            LayoutError, DeviceError: it is sparse, nested, or on another device than the weights.
            LayoutError: `c_fc` or `c_proj` has become another adapter of peft than of its weight.
            DTypeError: tokens and router differ in dtype outside autocast.
            ConfigError: there are adapters of peft and an argument; `use_fp8` is none of True,
                False and None, or contradicts the backend; `is_inference_mode` is no bool;
                `prequant_fp8_weights` is no bool, or True without `sonicmoe_fp8`.
        """
        need_values("hidden_states", hidden_states)
        shape = hidden_states.shape
        expect(
            tuple(shape[-1:]) == (self.hidden_size,),
            ShapeError,
            f"hidden_states has shape {tuple(shape)}; needed: [..., {self.hidden_size}]",
        )
        need_type("adapters", adapters, (Adapters, type(None)), "an Adapters, or None")
        if not (isinstance(self.c_fc, Experts) and isinstance(self.c_proj, Experts)):
            adapters = self._adapters_of_peft(adapters)
        # A member or its value: scripts written for upstream pass either.
        backend = getattr(kernel_backend_moe, "value", kernel_backend_moe)
        fp8_only = backend == KernelBackendMoE.sonicmoe_fp8.value
        expect(
            prequant_fp8_weights is False or (fp8_only and prequant_fp8_weights is True),
            ConfigError,
            f"prequant_fp8_weights is {prequant_fp8_weights!r} and kernel_backend_moe {backend!r}; "
            "needed: a bool, and True only with sonicmoe_fp8. use_fp8 is a keyword",
        )
        if fp8_only:
            check_use_fp8(use_fp8)
            expect(
                use_fp8 is not False,
                ConfigError,
                "use_fp8 is False and kernel_backend_moe 'sonicmoe_fp8'; needed: True or None",
            )
            use_fp8 = True
        if fp8_only or backend == KernelBackendMoE.sonicmoe.value:
            weights = *self._weights(), self.c_fc.bias, self.c_proj.bias
            if type(weights[0]) not in (
                *WHOLE,
                Codes,
            ):  # before the router, which may be a part too
                need_whole("c_fc.weight", weights[0], self)
            logits = self._logits(hidden_states.reshape(-1, self.hidden_size))
            out, counts = softmax_topk_layer(
                hidden_states,
                logits,
                weights,
                self.top_k,
                self.activation_function,
                parameters=self.activation_parameters,
                inference=is_inference_mode,
                use_fp8=use_fp8,
                face=MOE,
                module=self,
                adapters=adapters,
            )
        elif backend == KernelBackendMoE.torch.value:
            # The engine's path checks it by itself.
            check_use_fp8(use_fp8)
            expect(
                not use_fp8,
                ConfigError,
                "use_fp8=True needs kernel_backend_moe=KernelBackendMoE.sonicmoe",
            )
            words = "kernel_backend_moe is 'torch', and the experts are frozen as codes"
            is_plain = not isinstance(self._weights()[0], Codes)
            expect(is_plain, ConfigError, f"{words}; needed: sonicmoe_fp8, or thaw_experts")
            tokens = hidden_states.reshape(-1, self.hidden_size)
            out, logits, counts = self._run_plain(tokens, adapters or Adapters())
            # Under autograd a reshaped tensor is a view, which FSDP2 cannot see written in place.
            out = out if len(shape) == 2 else out.reshape(shape).clone()
        else:
            raise EngineUnavailableError(
                f"kernel_backend_moe={backend!r}; available: sonicmoe, sonicmoe_fp8, torch"
            )
        return out, None if is_inference_mode else switch_loss(logits, counts)

    @property
    def stream_id(self) -> int:
        """The caller's current stream, for the `stream_id` arguments of upstream's functions; 0 on
        the host.
        """
        return current_stream(self.c_fc.weight)

    def invalidate_caches(self) -> None:
        """Forget prepared weights; needed after a write through `.data`, or by an optimizer that is
        no `torch.optim.Optimizer`.
        """
        forget(self.c_fc.weight)

    def dump(self, path: str | Path) -> None:
        """Write the inputs of the experts in the next backward, and in its forward, to `path`, for
        `sonicmoe bisect`. Copies weights and tokens to the host.

        Raises:
            DumpError: `path` cannot be written.
        """
        # One of the two lazy doors to `diagnostics/` (docs/design.md): a model that dumps nothing
        # loads none of it.
        from .diagnostics.capture import dump

        dump(self, path)

    def _weights(self) -> tuple[Tensor | Codes, Tensor | Codes]:
        """Of both projections; `Codes` where they are frozen."""
        found: list[Tensor | Codes] = []
        for module in (self.c_fc, self.c_proj):
            base = under_wrappers(module)
            found.append(codes_in(base, "weight") if frozen_in(base) else module.weight)
        return found[0], found[1]

    def _adapters_of_peft(self, given: Adapters | None) -> Adapters | None:
        """Of peft's layers around the experts: their forward, which adds the adapter, is not
        called, and the weight that they show is that of the base layer.
        """
        pairs = []
        for name in ("c_fc", "c_proj"):
            found = getattr(self, name)
            wraps_weight = getattr(found, "parameter_name", None) == "weight"
            words = f"{name} is {type(found).__name__}, an adapter that would do nothing here"
            needed = f"target_parameters with {name}.weight, or adapters on the router or merged"
            is_known = wraps_weight or not hasattr(found, "base_layer")
            expect(is_known, LayoutError, f"{words}; needed: {needed}")
            words = f"{name} is {type(found).__name__}, whose forward would not be called"
            is_fsdp = hasattr(found, "_fsdp_wrapped_module")  # that of FullyShardedDataParallel
            has_weight = not is_fsdp and isinstance(getattr(found, "weight", None), Tensor)
            expect(has_weight, LayoutError, f"{words}; needed: one around the whole MoE")
            pairs.append(low_rank_of(found) if wraps_weight else None)
        if pairs == [None, None]:
            return given
        words = "adapters came as an argument, and peft has some on c_fc or c_proj"
        expect(given is None, ConfigError, f"{words}; needed: one of the two")
        return Adapters(*pairs)

    def _logits(self, tokens: Tensor) -> Tensor:
        """`[T, E]`, by the module, which may have hooks, an adapter or a bias, or be another one."""
        weight = getattr(self.router, "weight", None)
        if isinstance(weight, Tensor):
            check_router_dtype(tokens, weight)
        logits: Tensor = self.router(tokens)
        fits = logits.dim() == 2 and logits.shape[1] == self.num_experts
        need_shape(fits, "the router's output", logits, f"[T, {self.num_experts}]")
        return logits

    def _run_plain(self, tokens: Tensor, adapters: Adapters) -> tuple[Tensor, Tensor, Tensor]:
        logits = self._logits(tokens)
        chosen, indices = torch.topk(logits.float(), self.top_k, dim=-1)
        probs = torch.softmax(chosen, dim=-1)
        # One expert after the other, in operations that autograd knows: an independent computation
        # to compare the engines with. The K experts of a token are distinct, so no `index_add`
        # meets a token twice and its order cannot change the bits.
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, slot = torch.nonzero(indices == expert, as_tuple=True)
            z = _linear(tokens[token], self.c_fc, expert, adapters.up)
            y1 = activate(z, self.activation_function, self.activation_parameters)
            y2 = _linear(y1, self.c_proj, expert, adapters.down)
            weighted = y2 * probs[token, slot].unsqueeze(-1)
            out = out.index_add(0, token, weighted.to(out.dtype))
        return out, logits, torch.bincount(indices.reshape(-1), minlength=self.num_experts)


def under_wrappers(module: Any) -> Any:
    """The module that has the parameter, which peft's wrappers lie around."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def _linear(x: Tensor, experts: Experts, expert: int, pair: LowRank | None) -> Tensor:
    bias = None if experts.bias is None else experts.bias[expert]
    y = nn.functional.linear(x, experts.weight[expert], bias)
    if pair is None:
        return y
    a, b = pair.a[expert].to(x.dtype), pair.b[expert].to(x.dtype)
    return y + pair.scale * (x @ a.T @ b.T)


def switch_loss(logits: Tensor, expert_frequency: Tensor) -> Tensor:
    """Load balancing `E * sum_e f_e P_e` (Switch, arXiv:2101.03961, eq. 4); f: share of slots, P:
    share of probability.
    """
    # Only the probabilities carry a gradient; the counts are integers. The bounds below make the
    # loss 0 and not NaN where there is no token.
    probs = torch.softmax(logits.float(), dim=-1).sum(0)
    share = expert_frequency.float() / expert_frequency.sum().clamp(min=1)
    return logits.shape[-1] * (probs / probs.sum().clamp(min=1e-12) * share).sum()
