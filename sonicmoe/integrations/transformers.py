"""Hugging Face transformers >= 5.7: the engine as an experts implementation.

    from sonicmoe.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16,
    experts_implementation="sonicmoe_fp8")

`sonicmoe` follows the configuration (`SonicMoEConfig`, environment), which is unquantised by
default; `sonicmoe_fp8` is FP8 always.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from ..engine.low_rank import Adapters, LowRank
from ..errors import FrameworkError, LayoutError, expect
from ..fsdp import FoundExperts, finders
from ..functional import autocast
from ..functional.autograd import expert_mlp
from ..functional.border import WEIGHT_DTYPES
from ..functional.frozen import FROZEN, check_frozen, frozen_in, frozen_operands
from ..interop import device_name, parse_version
from ..layer.plan import Kind, Plan, make_plan
from ..layouts import WeightLayout
from ..log import logger
from ..observe import GATED_EXPERTS, PLAIN_EXPERTS
from ..weights.stacked_cache import forget
from . import peft
from .gates import ALWAYS_READ, Found, Names, activation_of, state_of

Tensor = torch.Tensor
ExpertsForward = Callable[..., Tensor]

MINIMUM_TRANSFORMERS = (5, 7)
# Name of the implementation: whether it computes in FP8, None as configured.
IMPLEMENTATIONS: dict[str, bool | None] = {
    "sonicmoe": None,
    "sonicmoe_fp8": True,
}

_NEEDED = "models take registered experts implementations from transformers 5.7 on"


def register() -> None:
    """Make `experts_implementation="sonicmoe"` and `"sonicmoe_fp8"` known to transformers; may be
    called again.

    `"sonicmoe"` replaces the implementation of that name which transformers downloads from its
    kernel hub. Adapters of peft on weights of experts (`target_parameters`) are computed as
    low-rank products by both.

    Raises:
        FrameworkError: transformers is missing, or older than 5.7.
    """
    moe = _moe_module()
    _check_version()
    for name, use_fp8 in IMPLEMENTATIONS.items():
        # All readers share the registry, and registering a name again replaces the entry.
        moe.ALL_EXPERTS_FUNCTIONS.register(name, _experts_forward(use_fp8, moe._default_apply_gate))
    peft.hand_over(_takes_adapters)


def check_model(model: nn.Module) -> None:
    """Raise for a model whose experts the engine cannot compute; the first forward raises the same.
    Logs a warning where the engine could compute them, but another implementation is in force;
    where a forward would warn, as of sizes that no kernel takes; and where peft has to compute
    adapters, whose ranks are too high. Models in fp32 are taken for ones that run under autocast.

    Raises:
        LayoutError: names every such class of experts and the reason; or the model has no experts
            that transformers can dispatch.
    """
    experts = [module for module in model.modules() if _is_experts(module)]
    # All layers of a model have the same kind of experts: one line about each kind is enough.
    found = {type(module): module for module in experts}
    kind = type(model).__name__
    expect(bool(found), LayoutError, f"{kind} has no experts with an exchangeable implementation")
    reasons = [reason for reason in map(unsupported_reason, found.values()) if reason is not None]
    expect(not reasons, LayoutError, f"{kind}: {'; '.join(reasons)}")
    for name in sorted({str(_implementation(module)) for module in experts}):
        if (problem := _not_in_force(name)) is not None:
            logger.warning("%s does not run on sonicmoe: %s", kind, problem)
    for module in found.values():
        if _not_in_force(str(_implementation(module))) is None:
            _foretell(module)
    for words in sorted(peft.left_to_peft(model, _takes_adapters)):
        logger.warning("%s", words)


def _foretell(experts: nn.Module) -> None:
    """Say which engine will compute these experts, which are supported, and what is lost by that."""
    weights = [getattr(experts, name) for name in _weight_names(experts)]
    found, _ = activation_of(experts, _moe_module()._default_apply_gate)
    assert not isinstance(found, str)
    (activation, parameters), layout, down = found, _layout(experts), weights[1]
    use_fp8 = IMPLEMENTATIONS[str(_implementation(experts))]
    plan = make_plan(activation, layout, use_fp8, parameters)
    dtype = torch.bfloat16 if down.dtype in (torch.float32, torch.uint8) else down.dtype
    hidden = int(down.shape[2 if layout.transposed else 1])
    device = "cpu" if down.is_meta else device_name(down)
    kind = Kind(device, dtype, hidden, layout.intermediate_size(down), len(weights) > 2)
    check_frozen(experts, plan, plan.foretell(kind))


def invalidate_caches(model: nn.Module) -> None:
    """Have the next forward make the FP8 copies of every expert anew. Needed only after a write that
    leaves no trace: through `.data`, or by an optimizer that is no `torch.optim.Optimizer`.
    """
    for experts in filter(_is_experts, model.modules()):
        up, *_ = _weight_names(experts)
        # Copies are kept under the first weight. Classes that are refused may not have it.
        if isinstance(weight := getattr(experts, up, None), torch.Tensor):
            forget(weight)


def _found_experts(module: nn.Module) -> FoundExperts | None:
    """For `fsdp.gather_codes`."""
    if not _is_experts(module):
        return None
    form, _ = _read(module, _moe_module()._default_apply_gate)
    if isinstance(form, str):
        raise LayoutError(f"no codes of these experts can be gathered: {form}")
    names, layout, (activation, parameters) = form

    def plan(use_fp8: bool | None) -> Plan | None:
        name = str(_implementation(module))
        if _not_in_force(name) is not None:
            return None
        use_fp8 = IMPLEMENTATIONS[name] if use_fp8 is None else use_fp8
        return make_plan(activation, layout, use_fp8, parameters)

    return FoundExperts(tuple((module, name) for name in names[:2]), layout, len(names) > 2, plan)


finders.append(_found_experts)


def unsupported_reason(experts: nn.Module) -> str | None:
    """Why the engine cannot compute this experts module, in words that name its class; None where
    it can.
    """
    weights = [getattr(experts, name, None) for name in _weight_names(experts)]
    found, _ = _verdict(experts, _moe_module()._default_apply_gate, weights)
    return found if isinstance(found, str) else None


def _implementation(experts: nn.Module) -> str | None:
    return getattr(getattr(experts, "config", None), "_experts_implementation", None)


def _takes_adapters(experts: nn.Module, weight: str) -> bool:
    """Whether these experts run on the engine, and this is the weight of a projection."""
    ours = _is_experts(experts) and _implementation(experts) in IMPLEMENTATIONS
    return ours and weight in _weight_names(experts)[:2]


def _not_in_force(name: str) -> str | None:
    """Why a model with this experts implementation does not run on the engine, and what to do; None
    where it does.
    """
    if name not in IMPLEMENTATIONS:
        wanted = " or ".join(map(repr, IMPLEMENTATIONS))
        return f"its experts implementation is {name!r}; call register() and model.set_experts_implementation({wanted})"
    # transformers knows a "sonicmoe" of its own from its kernel hub. Only the module of the
    # registered function tells the two apart.
    ours = getattr(_moe_module().ALL_EXPERTS_FUNCTIONS.get(name), "__module__", None) == __name__
    return (
        None
        if ours
        else f"its experts implementation {name!r} is not this package's; call {__name__}.register()"
    )


def _verdict(
    experts: nn.Module, standard_gate: Any, weights: Sequence[Any]
) -> tuple[Found | str, Names]:
    """The engine's activation that equals this module's, with its parameters, or why the engine
    cannot compute the module, in words that name its class; and the names that its gate reads.

    standard_gate: the `_apply_gate` of experts that compute act(gate) * up. weights: those of
    `_weight_names`.
    """
    kind = type(experts).__name__
    if getattr(experts, "has_post_expert_norm", False):
        return f"{kind} normalises the output of every expert (has_post_expert_norm)", ()
    found, names = activation_of(experts, standard_gate)
    problem = f"has {found}" if isinstance(found, str) else _problem_of(experts, weights)
    return (found if problem is None else f"{kind} {problem}"), names


def _problem_of(experts: nn.Module, weights: Sequence[Any]) -> str | None:
    """What the weights of `_weight_names` lack, None where they are fit for the engine."""
    for name, weight in zip(_weight_names(experts), weights, strict=True):
        # A class may keep its weights under other names, or in another form.
        if not isinstance(weight, torch.Tensor):
            return f"has no weight {name}"
        if weight.dtype not in WEIGHT_DTYPES and name not in frozen_in(experts):
            return f"has {name} in {weight.dtype}; needed: bfloat16, float16 or float32"
    return None


class _Form(NamedTuple):
    """What a module of experts computes, and the names and the layout of its weights."""

    names: tuple[str, ...]
    layout: WeightLayout
    found: Found


class _Known(NamedTuple):
    """What was found of one module of experts, by its state."""

    reference: weakref.ref[nn.Module]
    names: Names
    reads_config: bool
    forms: dict[Any, _Form]


_known: dict[int, _Known] = {}
_WITH_CODES = (*WEIGHT_DTYPES, torch.uint8)
_READ = (
    "has_gate", "has_bias", "has_post_expert_norm", "is_concatenated", "is_transposed", "_apply_gate", "act_fn", *ALWAYS_READ,
)  # fmt: skip


def _read(experts: nn.Module, standard_gate: Any) -> tuple[_Form | str, list[Any]]:
    """The form of a module, or why the engine cannot compute it; and the weights."""
    # torch.compile reads every attribute itself, and guards it.
    known = None if torch.compiler.is_compiling() else _known.get(id(experts))
    try:
        # Written out, because a call costs as much as the look-up.
        config = experts.config if known and known.reads_config else None
        form = known and known.forms.get(state_of(experts, known.names, config))
    except TypeError:  # what may change unseen is refused
        form = None
    if form is not None:
        held = experts._parameters
        given = [*map(held.get, form.names)]
        has_codes = FROZEN in experts.__dict__ and frozen_in(experts)
        dtypes = _WITH_CODES if has_codes else WEIGHT_DTYPES
        for weight in given:
            if weight is None or weight.dtype not in dtypes:
                break
        else:
            return form, given
    weight_names = _weight_names(experts)
    given = [getattr(experts, name, None) for name in weight_names]
    if form is not None and _problem_of(experts, given) is None:  # parametrized weights
        return form, given
    found, names = _verdict(experts, standard_gate, given)
    if isinstance(found, str):
        return found, given
    form = _Form(weight_names, _layout(experts), found)
    if not torch.compiler.is_compiling():
        _keep(experts, names, form)
    return form, given


def _keep(experts: nn.Module, names: Names, form: _Form) -> None:
    # By its identity, and not in the module, which may be copied and pickled.
    key, watched = id(experts), (*_READ, *[name for name in names if name != "config"])
    known = _known.get(key)
    if known is None or known.names != watched:
        reference = weakref.ref(experts, lambda _: _known.pop(key, None))
        known = _known[key] = _Known(reference, watched, "config" in names, {})
    with suppress(TypeError):  # what no gate reads may be unhashable
        config = experts.config if known.reads_config else None
        known.forms[state_of(experts, watched, config)] = form


def _is_split_half(experts: nn.Module) -> bool:
    """Whether gate and up lie in halves, not in pairs."""
    return getattr(experts, "has_gate", True) and getattr(experts, "is_concatenated", True)


def _experts_forward(use_fp8: bool | None, standard_gate: Any) -> ExpertsForward:
    """The function that transformers calls in place of an experts module's forward.

    It receives `standard_gate` instead of importing it, because transformers' packages are lazy
    modules, and torch.compile up to 2.11 cannot trace such an import.
    """

    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        adapters: Mapping[str, LowRank] | None = None,
    ) -> Tensor:
        """`[T, H]`, expert ids `[T, K]`, weights `[T, K]` -> `[T, H]`; adapters: those of peft, by
        the name of the weight.
        """
        # Checked in every forward, because registration sees no model. The checks read attributes
        # and no device memory.
        form, given = _read(self, standard_gate)
        if isinstance(form, str):
            raise LayoutError(f"the sonicmoe experts implementation cannot run this model: {form}")
        names, layout, (activation, parameters) = form
        # Parallel models hand over DTensors; the engine computes on this rank's part.
        tokens, ids, scores, up, down, *biases = _local(
            hidden_states, top_k_index, top_k_weights, *given
        )
        if up is not given[0]:
            _check_part(self, names[0], int(up.shape[0]), int(given[0].shape[0]))
        up_bias, down_bias = biases or (None, None)
        pairs = Adapters(*map(adapters.get, names[:2])) if adapters else None
        if FROZEN in self.__dict__ and frozen_in(self):
            beside = layout, up_bias, pairs
            up, down, layout, up_bias, pairs = frozen_operands(self, names, *beside)
        out = expert_mlp(
            # Under autocast norms return fp32. The built-in implementations compute in the lower
            # dtype all the same, because their matrix products are cast.
            autocast(tokens),
            ids,
            scores if scores.dtype == torch.float32 else scores.to(torch.float32),
            up,
            down,
            up_bias,
            down_bias,
            activation,
            parameters=parameters,
            layout=layout,
            use_fp8=use_fp8,
            face=GATED_EXPERTS if names[0] == "gate_up_proj" else PLAIN_EXPERTS,
            module=self,
            adapters=pairs,
        )
        # A cast to the same dtype takes as long as an allocation.
        return out if out.dtype == tokens.dtype else out.to(tokens.dtype)

    return forward


def _layout(experts: nn.Module) -> WeightLayout:
    transposed = getattr(experts, "is_transposed", False)
    return WeightLayout(transposed=transposed, split_half=_is_split_half(experts))


def _weight_names(experts: nn.Module) -> tuple[str, ...]:
    up = "gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj"
    biases = (f"{up}_bias", "down_proj_bias") if getattr(experts, "has_bias", False) else ()
    return (up, "down_proj", *biases)


def _is_experts(module: nn.Module) -> bool:
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


def _local(*tensors: Tensor) -> list[Tensor]:
    """This rank's part of each DTensor; other tensors as they are.

    It is a view (`[:]`), and the weight caches keep nothing of a view of a temporary tensor. They
    must not: an in-place operation on the DTensor does not change the version counter of its local
    part, so a cached copy could be stale unnoticed.
    """
    found = list(tensors)
    for index, tensor in enumerate(tensors):
        to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
        if to_local is not None:
            found[index] = to_local()[:]
    return found


def _check_part(experts: nn.Module, name: str, held: int, whole: int) -> None:
    """Refuse a part of a DTensor that does not have the experts that the module believes in."""
    # Expert parallelism sets the number to that of its own part.
    believed = getattr(experts, "num_experts", whole)
    kind = type(experts).__name__
    part = f"{name} of {kind} has {held} of its {believed} experts on this rank"
    words = f"{part}: FSDP has sharded it"
    needed = "a call by way of the module that was given to fully_shard, whose forward gathers it"
    expect(held == believed, LayoutError, f"{words}; needed: {needed}")


def _moe_module() -> Any:
    try:
        from transformers.integrations import moe
    except ImportError as error:
        raise FrameworkError(f"{_NEEDED} (pip install 'transformers>=5.7'): {error}") from error
    return moe


def _check_version() -> None:
    import transformers

    found = transformers.__version__
    # 5.0 to 5.6 have the registry, but their models refuse names that are not in their own list.
    expect(
        parse_version(found) >= MINIMUM_TRANSFORMERS,
        FrameworkError,
        f"transformers {found} is too old: {_NEEDED}",
    )
