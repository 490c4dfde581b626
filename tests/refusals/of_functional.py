"""What the PyTorch face refuses: `MoE`, the functions, and the operators behind them."""

from __future__ import annotations

import importlib.util
import re
import sys
from contextlib import nullcontext
from functools import partial
from unittest import mock

import numpy as np
import torch
from functional.layer_golden import batch, make_layer, make_tokens, views
from functional.test_general_routing import TOKENS, triples
from functional.test_routed import COUNTS
from functional.test_routed import Layer as RoutedLayer
from functional.test_two_tensors import general, leaves, turned, whole_layer
from node.node_harness import Layer as NodeLayer
from refusals.table import rows, scenes

from sonicmoe import (
    Adapters,
    KernelBackendMoE,
    LowRank,
    MoE,
    SonicMoEConfig,
    count_cumsum,
    moe_ep_general_routing_forward,
    moe_ep_TC_softmax_topk_forward,
    moe_general_routing_inputs,
    moe_TC_softmax_topk_layer,
)
from sonicmoe.diagnostics.nonfinite import NonFiniteError, detect_nonfinite
from sonicmoe.distributed_utils import NetworkProfiler, RuntimeEPConfig
from sonicmoe.errors import (
    ConfigError,
    DeviceError,
    DTypeError,
    EngineUnavailableError,
    FrameworkError,
    LayoutError,
    RoutingError,
    ShapeError,
    SonicMoEError,
)
from sonicmoe.fsdp import gather_codes
from sonicmoe.functional import FP8BlockwiseTensor, freeze_weights, moe_TC_softmax_topk_layer_fp8
from sonicmoe.integrations.frozen import freeze_experts
from sonicmoe.layouts import flat_weights

BACKENDS = [backend.value for backend in list(KernelBackendMoE)[1:]]
WRITTEN = "modified by an inplace operation"


def ids(*values):
    return torch.tensor(values, dtype=torch.int64)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


# The functions.


def topk(**changes):
    moe = make_layer()
    given = dict(zip(("w1", "b1", "w2", "b2"), views(moe), strict=True))
    given |= {"x": make_tokens(4, 32), "router_w": moe.router.weight, "K": 2}
    moe_TC_softmax_topk_layer(**given | changes)


def three_triples(**changes):
    given = dict(zip(("w1", "b1", "w2", "b2"), views(make_layer()), strict=True))
    given |= {"x": make_tokens(8, 32), "router_scores": torch.ones(3)}
    given |= {"token_indices": ids(0, 0, 4), "expert_indices": ids(0, 1, 2)}
    moe_general_routing_inputs(**given | changes)


def cumsum(x=zeros(2, dtype=torch.int64), experts=4):  # noqa: B008
    count_cumsum(x, experts)


def swapped(*names):
    """Weights whose matrices are the other way round."""
    w1, _, w2, _ = views(make_layer())
    return lambda: {name: {"w1": w1, "w2": w2}[name].transpose(0, 1) for name in names}


FP8 = "use_fp8 is 'off'; needed: True, False or None"
SWISH = r"_type is 'swish'; needed: one of \['swiglu'"
TURNED = r"needed: \[E, N1, H\] = \(5, 48, 32\) and \[E, H, I\] = \(5, 32, 24\)"
DTYPES = r"x .* is bfloat16, router_w .* is float32; convert one, or use autocast"
SWITCHES = "is_inference_mode_enabled", "is_softmax_over_topk", "norm_topk_probs", "concat_layout"
ROWS = [
    *rows(
        topk,
        *((ShapeError, f"K is {k!r}; needed: 1 to 5", {"K": k}) for k in (6, 0, "2", 2.0, True)),
        (ShapeError, r"router_w has shape \(5, 31\); needed: \[E, H\] with H = 32", {"router_w": zeros(5, 31)}),
        (ShapeError, r"w1 .*needed: 6 experts \(the rows of router_w\)", {"router_w": zeros(6, 32)}),
        (ShapeError, "w2 .*needed: 5 experts", {"w2": zeros(32, 24, 6)}),
        (ShapeError, r"w1 .*needed: 5 experts .*first are passed as w1.permute\(1, 2, 0\)", {"w1": zeros(5, 48, 32)}),
        (ShapeError, r"w2 .*needed: 5 experts .*first are passed as w2.permute\(1, 2, 0\)", {"w2": zeros(5, 32, 24)}),
        (ShapeError, "both or neither", {"b2": zeros(5, 32)}),
        (ShapeError, "b1 has shape", {"b1": zeros(5, 24), "b2": zeros(5, 32)}),
        (ShapeError, r"x has shape \(2, 4, 32\); needed: \[T, H\]", {"x": zeros(2, 4, 32)}),
        (DTypeError, DTYPES, {"x": make_tokens(4, 32).bfloat16()}),
        (ConfigError, SWISH, {"activation_type": "swish"}),
        *((ConfigError, f"{name[:17]}.* is 'no'; needed: True or False", {name: "no"}) for name in SWITCHES),
        (ConfigError, FP8, {"use_fp8": "off"}),
        (ConfigError, "needed: a number from",
         {"activation_type": "situ_glu", "activation_parameters": {"beta": 0.0}}),
    ),
    *rows(
        three_triples,
        (RoutingError, "token_indices is not ascending", {"token_indices": ids(0, 2, 1)}),
        (RoutingError, r"2 ids outside \[0, 8\)", {"token_indices": ids(-2, -1, 3)}),
        (ShapeError, r"shape \(2,\); needed: that of router_scores, \(3,\)", {"token_indices": ids(0, 1)}),
        (ShapeError, r"expert_indices has shape \(4,\)", {"expert_indices": ids(0, 1, 2, 3)}),
        (ShapeError, r"router_scores has shape \(3, 1\)", {"router_scores": torch.ones(3, 1)}),
        (DTypeError, "router_scores is int64", {"router_scores": ids(1, 1, 1)}),
        (DTypeError, "token_indices is float32", {"token_indices": zeros(3)}),
        (DTypeError, "expert_indices is float32", {"expert_indices": zeros(3)}),
        (ShapeError, r"w1 \[N1, H, E\] has shape \(48, 32, 5\); needed: 4 experts", {"E": 4}),
        (ShapeError, r"w1 .* needed: 5 experts .* w1.permute\(1, 2, 0\)", {"w1": zeros(5, 48, 32)}),
        (ShapeError, r"w1 has shape \(48, 5\); needed: \[N1, H, E\]", {"w1": zeros(48, 5)}),
        (ShapeError, "w1 has 46 rows per expert", {"w1": zeros(46, 32, 5)}),
        (ShapeError, "w2 has shape", {"w2": zeros(16, 24, 5)}),
        (ShapeError, r"x has shape \(8, 16\)", {"x": zeros(8, 16)}),
        (DTypeError, "x is float64", {"x": zeros(8, 32, dtype=torch.float64)}),
        (ShapeError, r"x has shape \(2, 4, 32\); needed: \[T, H\]", {"x": zeros(2, 4, 32)}),
        (ShapeError, "max_experts_per_token is 0; needed: .*, at least 1", {"max_experts_per_token": 0}),
        (ConfigError, FP8, {"use_fp8": "off"}),
        (ShapeError, f"and w1 looks transposed; {TURNED}", swapped("w1")),
        (ShapeError, f"and w2 looks transposed; {TURNED}", swapped("w2")),
        (ShapeError, f"and both look transposed; {TURNED}", swapped("w1", "w2")),
    ),
    *rows(
        cumsum,
        (TypeError, r"^x must be a torch tensor, got list$", {"x": [0, 1]}),
        *((ShapeError, f"^E is {e!r}; needed: an integer, at least 0$", {"experts": e}) for e in (-1, "3", 2.5, True)),
        (ShapeError, r"x has shape \(2, 2\); needed: one axis", {"x": zeros(2, 2).long()}),
        *((DTypeError, "needed: int32 or int64", {"x": zeros(2, dtype=dtype)})
          for dtype in (torch.float32, torch.int16, torch.bool)),
    ),
]  # fmt: skip


def arguments(function):
    """What a function takes for one layer, by name."""
    moe, x = make_layer(bias=True), make_tokens(6, 32)
    given = dict(zip(("x", "w1", "b1", "w2", "b2"), (x, *views(moe)), strict=True))
    spread = function.__name__.startswith("moe_ep")
    if spread:
        given |= {"w2": moe.c_proj.weight.permute(0, 2, 1), "E": 5}
    chosen = torch.tensor([[0, 1], [2, 3]] * 3)
    if "TC" in function.__name__:
        return given | {"router_w": moe.router.weight, "K": 2}
    if spread:
        return given | {"topk_indices": chosen, "topk_scores": torch.rand(6, 2)}
    names = "token_indices", "expert_indices", "router_scores"
    found = torch.arange(6).repeat_interleave(2), chosen.flatten(), torch.rand(12)
    return given | dict(zip(names, found, strict=True))


FUNCTIONS = (
    moe_TC_softmax_topk_layer, moe_general_routing_inputs,
    moe_ep_TC_softmax_topk_forward, moe_ep_general_routing_forward,
)  # fmt: skip
FORMS = {
    "list": torch.Tensor.tolist, "meta": lambda value: value.to("meta"), "sparse": torch.Tensor.to_sparse,
    "bool": torch.Tensor.bool, "complex": lambda value: value.to(torch.complex64),
    "codes": lambda value: value.to(torch.float8_e4m3fn),
}  # fmt: skip


def every_function(function=moe_TC_softmax_topk_layer, name=None, form=None, use_fp8=False):
    """A tensor of a function in a form that no engine reads."""
    given = arguments(function)
    if name is not None:
        given[name] = FORMS[form](given[name].detach())
    function(**given, use_fp8=use_fp8)


def overwriting(call):
    """Autograd adds the gradients of every function here, and of `MoE`."""
    with SonicMoEConfig(first_backward="overwrite").activate():
        call()


def over_ranks(**changes):
    moe_ep_general_routing_forward(**arguments(moe_ep_general_routing_forward) | changes)


def named(function):
    return [name for name, value in arguments(function).items() if hasattr(value, "detach")]


OVERWRITE = "first_backward='overwrite' writes main_grad, and here autograd"
ROWS += rows(
    every_function,
    *((TypeError if form == "list" else SonicMoEError,
       f"^{name} must be a torch tensor, got list$" if form == "list" else rf"\b{name}\b",
       {"function": function, "name": name, "form": form, "use_fp8": use_fp8})
      for function in FUNCTIONS for name in named(function) for form in FORMS for use_fp8 in (False, True)),
)  # fmt: skip
ROWS += rows(
    over_ranks,
    (ValueError, r"w1 has shape .* with L = E / W = 4", {"E": 4}),
    (RoutingError, "E is True; 1 ranks need a positive multiple of 1", {"E": True}),
    (ConfigError, "W = 2 and K = 2; needed: 1 ranks and 2", {"ep_config": RuntimeEPConfig(2, 2)}),
    (ConfigError, "group is str; needed: a process group, or None", {"group": "all"}),
    (ConfigError, "CPU_sync_on_runtime is 'no'; needed: True or", {"CPU_sync_on_runtime": "no"}),
    (ConfigError, "ep_config is str; needed: a RuntimeEPConfig", {"ep_config": "AG"}),
    (ConfigError, "redispatch_x_in_backward is True; needed", {"redispatch_x_in_backward": True}),
)
ROWS += scenes(
    (ConfigError, "combine_mode is 'RS'; needed: one of", lambda: RuntimeEPConfig(1, 2, combine_mode="RS")),
    (EngineUnavailableError, "leave ep_config out",
     lambda: NetworkProfiler(T_local=6, H=32, K=2, dtype=torch.float32).profile()),
    *((ConfigError, OVERWRITE, partial(overwriting, partial(every_function, function))) for function in FUNCTIONS),
    (ConfigError, OVERWRITE, lambda: overwriting(lambda: make_layer()(make_tokens(6, 32)))),
)  # fmt: skip


def validated(place, value, saves):
    """A score, or an id, of the token that has six triples."""
    moe, x, (scores, tokens, experts) = make_layer(), make_tokens(8, 32), triples()
    experts = torch.where(torch.arange(len(TOKENS)) == 10, -1, experts)  # 3 stands twice
    scores = scores.detach()
    (scores if place == "scores" else experts)[6] = value
    with SonicMoEConfig(validate_dispatch=True).activate(), torch.set_grad_enabled(saves):
        moe_general_routing_inputs(x, scores, tokens, experts, *views(moe))


ROWS += scenes(
    *((RoutingError, words, partial(validated, place, value, saves)) for saves in (False, True)
      for place, value, words in (
        ("scores", float("nan"), r"^router_scores of token 3, slot 3, is nan at a valid slot \(expert 0\)"),
        ("ids", -7, r"^expert_indices of token 3, slot 3, is -7; ids below -1 mean nothing"),
        ("ids", 2, r"^expert_indices of token 3 names expert 2 twice \(slots 3 and 4\); ids must"),
    )),
)  # fmt: skip


# w1 as two tensors.

HALF = torch.zeros(64, 32, 5)


def two(w1=None, face=general, **options):
    x, gate, up, w2, b1, b2 = leaves()
    face(x, (turned(gate), turned(up)) if w1 is None else w1, turned(w2), b1, b2, **options)


def diagnosed():
    module = torch.nn.Module()
    x, module.w1_EFD, module.w3_EFD, w2, *_ = leaves()
    with torch.no_grad():
        module.w3_EFD[3, 2, 1] = float("nan")
    with detect_nonfinite():
        general(x, (turned(module.w1_EFD), turned(module.w3_EFD)), turned(w2), None, None)


ROWS += rows(
    two,
    *((error, words, change | {"face": face}) for face in (whole_layer, general) for error, words, change in (
        (TypeError, "^w1 must be a torch tensor, got list$", {"w1": [HALF, HALF]}),
        (ShapeError, "w1 has 1 parts; needed: one tensor, or two, gate and up", {"w1": (HALF,)}),
        (TypeError, r"w1\[1\]", {"w1": (HALF, None)}),
        (ShapeError, r"w1\[1\] has shape \(32, 5\); needed: \[I, H, E\]", {"w1": (HALF, HALF[0])}),
        (ShapeError, r"w1\[1\] has shape \(63, 32, 5\); needed: \(64, 32, 5\)", {"w1": (HALF, HALF[1:])}),
        (DTypeError, r"w1\[1\] is float64; needed: float32", {"w1": (HALF, HALF.double())}),
        (DeviceError, r"w1\[1\] is on meta", {"w1": (HALF, HALF.to("meta"))}),
        (ShapeError, r"w1\[0\] \[I, H, E\] .*needed: 5 experts", {"w1": (HALF[:, :, 1:],) * 2}),
        (ShapeError, "126", {"w1": (HALF[1:],) * 2}),
        (ConfigError, "'silu' has no gate; needed: one", {"activation_type": "silu"}),
    )),
)  # fmt: skip
ROWS += scenes((NonFiniteError, "w1_EFD and w3_EFD at expert 3, row 5, column 1: nan", diagnosed))


# `MoE`.


def construct(**changes):
    names = "num_experts", "num_experts_per_tok", "hidden_size", "intermediate_size"
    given = dict(zip(names, (4, 1, 8, 8), strict=True)) | {"activation_function": "swiglu_clamp"}
    MoE(**given | changes)


def call(hidden_states=make_tokens(4, 32), **changes):  # noqa: B008
    make_layer()(hidden_states, **changes)


def sent_in_fp8():
    moe, x = make_layer(), make_tokens(19, 32)
    given = x, moe.router.weight, moe.c_fc.weight, moe.c_proj.weight, 2, "swiglu"
    moe_TC_softmax_topk_layer_fp8(*given, x_fp8=x)


def wrapped(backend):
    """Put a module around experts, which peft's `target_parameters` does."""
    moe, wrapper = make_layer(), torch.nn.Module()
    wrapper.base_layer, wrapper.weight, wrapper.bias = moe.c_fc, moe.c_fc.weight, None
    moe.c_fc = wrapper
    moe(make_tokens(19, 32), backend)


def broken_router():
    moe, (x, _) = make_layer(), batch()
    with torch.no_grad():
        moe.router.weight[1, 3] = float("nan")
    with SonicMoEConfig(validate_dispatch=True).activate():
        moe(x)


def second_derivative(output):
    moe, x = make_layer(), make_tokens(19, 32).requires_grad_()
    loss = moe(x)[output].square().sum() + moe(x)[0].sum()
    torch.autograd.grad(loss, x, create_graph=True)


def dual(moe, x):
    with torch.autograd.forward_ad.dual_level():
        moe(x)  # no tangent, no refusal
        return moe(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


def weights_with_tangents(moe, x):
    weights = {name: weight.detach() for name, weight in moe.named_parameters()}
    run = lambda given: torch.func.functional_call(moe, given, (x,))[0]  # noqa: E731
    return torch.func.jvp(run, (weights,), (weights,))


TRANSFORMS = (
    lambda moe, x: torch.func.grad(lambda x: moe(x)[0].sum())(x),
    lambda moe, x: torch.func.jvp(lambda x: moe(x)[0], (x,), (torch.ones_like(x),)),
    lambda moe, x: torch.func.jacfwd(lambda x: moe(x)[0])(x),
    lambda moe, x: torch.func.vmap(lambda x: moe(x)[0])(torch.stack([x, x])),
    dual,
    weights_with_tangents,
)


def transformed(transform, trains, gradients):
    with torch.set_grad_enabled(gradients):
        transform(make_layer().requires_grad_(trains), make_tokens(19, 32))


def transformed_node(transform, gradients):
    layer = NodeLayer(main_grad=0.0)
    x, *given = layer.call(x_grad=False).arguments
    with torch.set_grad_enabled(gradients):
        transform(lambda x: (layer.node(x, *given),), x)


SIZES = {
    "num_experts": (0, "4"), "num_experts_per_tok": (0, 1.5), "hidden_size": (None,), "intermediate_size": (-8, True),
}  # fmt: skip
ACTIVATION = r"activation_function is 'swish'; needed: one of \['swiglu', 'geglu', .*'gelu_tanh'\]"
AVAILABLE = "; available: sonicmoe, sonicmoe_fp8, torch"
ROWS += rows(
    construct,
    (ShapeError, "num_experts_per_tok is 5; only 4 experts", {"num_experts_per_tok": 5}),
    *((ShapeError, f"{name} is {bad!r}; needed: at least 1", {name: bad}) for name in SIZES for bad in SIZES[name]),
    (ConfigError, r"^activation_parameters is \[7.0\]; needed: num", {"activation_parameters": [7.0]}),
    (ConfigError, ACTIVATION, {"activation_function": "swish"}),
    (ConfigError, "^std is nan; needed: a number, at least 0", {"std": float("nan")}),
    (ConfigError, "^add_bias is str; needed: True or False", {"add_bias": "no"}),
    (TypeError, r"unexpected keyword argument 'norm_topk_prob'$", {"norm_topk_prob": False}),
)  # fmt: skip
TOKENS_REFUSED = (
    *((TypeError, "^hidden_states must be a torch tensor, got", bad) for bad in (None, np.eye(32))),
    *((ShapeError, r"hidden_states has shape .*; needed: \[..., 32\]", zeros(*shape)) for shape in ((4, 31), (31,), ())),
    (DeviceError, "^hidden_states is on meta", torch.zeros(4, 32, device="meta")),
    (LayoutError, "^hidden_states is sparse; needed: a dense", torch.eye(32).to_sparse()),
)  # fmt: skip
ROWS += rows(
    call,
    *((error, words, {"hidden_states": bad, "kernel_backend_moe": backend})
      for backend in BACKENDS for error, words, bad in TOKENS_REFUSED),
    *((EngineUnavailableError, re.escape(f"kernel_backend_moe={getattr(bad, 'value', bad)!r}{AVAILABLE}"),
       {"kernel_backend_moe": bad}) for bad in (KernelBackendMoE.scattermoe, "sonic", None)),
    *((ConfigError, f"is_inference_mode is {bad!r}; needed: True or False", {"is_inference_mode": bad})
      for bad in ("no", None, 0)),
    # Strings are all true, and "off" must not turn it on.
    *((ConfigError, f"use_fp8 is {bad!r}; needed: True, False or None", {"use_fp8": bad, "kernel_backend_moe": backend})
      for backend in BACKENDS for bad in ("off", "", 0, 1, 1.0)),
    (TypeError, "adapters is tuple; needed: an Adapters, or None", {"adapters": (None, None)}),
    (ConfigError, "use_fp8=True needs kernel_backend_moe", {"kernel_backend_moe": "torch", "use_fp8": True}),
    (ConfigError, "use_fp8 is False and kernel_backend_moe 'sonicmoe_fp8'",
     {"kernel_backend_moe": "sonicmoe_fp8", "use_fp8": False}),
    *((ConfigError, f"prequant_fp8_weights is {value} and kernel",
       {"kernel_backend_moe": backend, "prequant_fp8_weights": value})
      for backend, value in (("sonicmoe", True), ("sonicmoe_fp8", 1))),
)  # fmt: skip
ROWS += scenes(
    (EngineUnavailableError, "FP8BlockwiseTensor is not there: pass", lambda: FP8BlockwiseTensor.to_weights(HALF)),
    (ConfigError, "x_fp8 is Tensor; needed: None", sent_in_fp8),
    *((LayoutError, r"^c_fc is Module, an adapter that would do nothing", partial(wrapped, backend))
      for backend in BACKENDS),
    (RoutingError, r"dispatched_probs of token 0, slot", broken_router),
    *((RuntimeError, "no second derivative", partial(second_derivative, output)) for output in (0, 1)),
    *((NotImplementedError, "in place of vmap one call", partial(transformed, transform, trains, gradients))
      for transform in TRANSFORMS for trains in (True, False) for gradients in (True, False)),
    *((NotImplementedError, "in place of vmap one call", partial(transformed_node, transform, gradients))
      for transform in TRANSFORMS[:-1] for gradients in (True, False)),
)  # fmt: skip


# Adapters and frozen experts.


def with_short_factor():
    down = LowRank(zeros(5, 3, 24), zeros(4, 32, 3))
    make_layer()(make_tokens(19, 32), adapters=Adapters(down=down))


def frozen(after=lambda moe, x: moe(x), recipe="dx256"):
    moe = make_layer()
    freeze_experts(moe)
    with SonicMoEConfig(fp8_mode="perf", recipe=recipe).activate():
        after(moe, make_tokens(5, 32))


def without_fp8(moe, x):
    moe(x, use_fp8=False)


def short_scales(moe, x):
    scales = moe.c_fc.weight_scale
    moe.c_fc.weight_scale = torch.nn.Parameter(scales[:, :, :0].clone(), requires_grad=False)
    moe(x, use_fp8=True)


def frozen_arguments(w2=None, experts=5, use_fp8=True):
    """A functional call with codes, of which these are replaced."""
    moe = make_layer()
    weights = [module.weight.detach().permute(1, 2, 0) for module in (moe.c_fc, moe.c_proj)]
    codes = freeze_weights(*weights)
    first, second = codes[0], codes[1] if w2 is None else weights[1]
    x, router = make_tokens(5, 32), moe.router.weight[:experts]
    moe_TC_softmax_topk_layer(x, router, first, None, second, None, 2, use_fp8=use_fp8)


def written(moe, x):
    out = moe(x.requires_grad_(), use_fp8=True)[0]
    moe.c_fc.weight.zero_()
    out.sum().backward()


def gathered(model=None, **options):
    gather_codes(make_layer() if model is None else model, **options)


ROWS += rows(
    frozen,
    (LayoutError, "take for values", {"after": lambda moe, _: gather_codes(moe, use_fp8=True)}),
    (ConfigError, "computes in BF16", {"after": without_fp8}),
    (ConfigError, "frozen as codes", {"after": lambda moe, x: moe(x, "torch")}),
    (ConfigError, "codes of recipe 'dx256'", {"recipe": "iso128"}),
    (LayoutError, "one scale per block", {"after": short_scales}),
    (RuntimeError, WRITTEN, {"after": written}),
)
ROWS += rows(
    frozen_arguments,
    (ConfigError, "computes in BF16", {"use_fp8": False}),
    (TypeError, "w2 is Tensor, and the other weight is frozen", {"w2": "values"}),
    (ShapeError, "codes of 5 experts; needed: 3", {"experts": 3}),
)
ROWS += rows(
    gathered,
    (LayoutError, "Linear has no MoE layer, and no experts", {"model": torch.nn.Linear(2, 2)}),
    (ConfigError, "use_fp8 is 1", {"use_fp8": 1}),
    (LayoutError, "router.weight is no parameter", {"weights": ("router.weight", "c_proj.weight")}),
)
ROWS += scenes(
    (ShapeError, r"^down\.b has shape", with_short_factor),
    (TypeError, "got tuple", lambda: freeze_weights((zeros(2, 2, 2),) * 2, zeros(2, 2, 2))),
    (DTypeError, "w1 is uint8", lambda: freeze_weights(*(zeros(4, 4, 2, dtype=torch.uint8),) * 2)),
)  # fmt: skip


# The routed path, and rows that are sorted.


def ticket(copied):
    made = RoutedLayer("off")
    x, probs, *weights = made.leaves
    read, numbers = [weight.detach() for weight in weights], (made.number, True)
    given = x.detach(), made.ids, probs.detach(), *read, made.group
    ticket = torch.ops.sonicmoe.routed_dispatch(*given, *numbers)
    ticket = ticket.clone() if copied else ticket
    for _ in range(2):
        torch.ops.sonicmoe.routed_mlp(ticket, x, probs, *weights, *numbers)


def routed(group=None, **options):
    made = RoutedLayer("off", **options)
    made.group = group or made.group
    made.routed(*made.leaves)


def sorted_rows(counts=COUNTS):
    made = RoutedLayer("off")
    x, _, *weights = made.leaves
    made.sorted(x, None, *weights, counts=counts)


def unknown_plan():
    x, _, *weights = RoutedLayer("off").leaves
    given = (*flat_weights(weights), *[None] * 4, 0.0, 0.0, 5, False)
    torch.ops.sonicmoe.expert_mlp(x, torch.tensor(COUNTS), None, *given)


ROWS += rows(
    routed,
    (ConfigError, "no group of experts \"8 experts, group 'gone', ", {"group": "8 experts, group 'gone', []"}),
    ((ConfigError, EngineUnavailableError), "deepep", {"kind": "deepep"}),
)  # fmt: skip
ROWS += rows(
    sorted_rows,
    (ShapeError, r"counts has shape \(3,\); needed: \(4,\)", {"counts": COUNTS[:3]}),
    (RoutingError, "counts sum to 1022 rows and there are 24", {"counts": [1003, *COUNTS[1:]]}),
)
ROWS += scenes(
    (ConfigError, "the ticket, whose memory owns it, was copied or moved", partial(ticket, copied=True)),
    (ConfigError, "two layers of experts took one dispatch", partial(ticket, copied=False)),
    (ConfigError, "no plan 5 in this process", unknown_plan),
)  # fmt: skip


# transformers.


def registered(version):
    """With this version of transformers, or with none."""
    from sonicmoe.integrations.transformers import register

    there = {} if version else {"transformers.integrations": None}
    patched = mock.patch("transformers.__version__", version) if version else nullcontext()
    with mock.patch.dict(sys.modules, there), patched:
        register()


def checked():
    from sonicmoe.integrations.transformers import check_model

    check_model(torch.nn.Linear(2, 2))


if importlib.util.find_spec("transformers"):
    ROWS += scenes(
        (FrameworkError, r"from transformers 5\.7 on \(pip install", lambda: registered(None)),
        *((FrameworkError, rf"transformers {version} is too old: .* from transformers 5\.7 on",
           partial(registered, version)) for version in ("4.57.0", "5.6.2")),
        (LayoutError, "Linear has no experts", checked),
    )  # fmt: skip
