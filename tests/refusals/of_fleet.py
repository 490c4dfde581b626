"""What PaddleFleet's face refuses, in either framework."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import numpy as np
from engine.fp8_arrivals import problem_with_idle_tokens, quantised
from engine.moe_golden import make_problem
from fleet.fleet_calls import Experts, FleetExpert, bf16, zeros
from framework import IS_PADDLE, tensor, torch
from refusals.table import rows, scenes
from weights.freed_memory import free

from sonicmoe.config import SonicMoEConfig
from sonicmoe.errors import (
    ConfigError,
    DTypeError,
    EngineUnavailableError,
    FrameworkError,
    LayoutError,
    RoutingError,
    ShapeError,
    StaleWeightsError,
)
from sonicmoe.fleet import carrier, twin
from sonicmoe.fleet.carrier import Carrier, declare_carrier, tokens_from_carrier
from sonicmoe.fleet.combine_grad import CombineGradient, combine_gradient
from sonicmoe.fleet.configuration import FIELDS, FP8Config
from sonicmoe.fleet.deferral import set_wgrad_deferral_hook
from sonicmoe.fleet.layer import weights_changed
from sonicmoe.fleet.overlap import ExpertsStep
from sonicmoe.fleet.quantizer import quantize_activation_blockscaled_fast as quantize_fast
from sonicmoe.fleet.run import run_sonic_moe
from sonicmoe.fleet.situ import encode_situ_activation, parse_situ_activation
from sonicmoe.fleet.weight_copies import clear_all_fp8_weight_caches, quantize_native_fp8_weights
from sonicmoe.fleet.weight_layout import (
    fused_grouped_w1_to_sonic,
    fused_sonic_w1_to_grouped,
    fused_transpose_w2_layout,
)
from sonicmoe.weights.stacked import layout_of_pair

LATE = (RuntimeError, OSError)
WIDE = problem_with_idle_tokens()
EXPERTS = partial(Experts, WIDE)


def scores(problem=WIDE):
    return tensor(problem.probs, torch.float32)


def run(**changes):
    w1, w2 = EXPERTS().weights
    given = {
        "hidden_states": bf16(WIDE.x), "topk_indices": tensor(WIDE.indices), "topk_scores": scores(),
        "K": WIDE.indices.shape[1], "E": WIDE.num_experts, "w1": w1, "w2": w2,
    }  # fmt: skip
    run_sonic_moe(**(given | changes))


def first_backward():
    with SonicMoEConfig(first_backward="overwrite").activate():
        EXPERTS().call()


def unfit_main_grad():
    experts = Experts(make_problem(dtype=torch.bfloat16))
    experts.weights[1].main_grad = zeros((4, 40, 96))
    experts.call().backward()


UNFIT = r"main_grad has shape \(4, 40, 96\); the parameter's is \(4, 80, 48\), and \(4, 48, 80\) in its other"
NO_PAIR = r"w1 has shape .* and w2 .* H = 16; needed: \[E, 2I, H\]"
ROWS = [
    *rows(
        run,
        (ShapeError, r"topk_indices has shape \(37, 2\).* K = 4", {"K": 4}),
        (ShapeError, r"topk_scores has shape \(36, 2\).* T = 37", {"topk_scores": scores()[1:]}),
        (ShapeError, r"topk_scores has shape \(37, 1\) and", {"topk_scores": scores()[:, :1]}),
        (RoutingError, "E is 5, and w1 and w2 hold 4 experts.*MoonEP", {"E": 5}),
        (ShapeError, r"hidden_states has shape \(1, 37, 256\)", {"hidden_states": bf16(WIDE.x)[None]}),
        (ShapeError, "and w2 .* with H = 40", {"hidden_states": bf16(WIDE.x)[:, :40]}),
        (DTypeError, "hidden_states is float64", {"hidden_states": bf16(WIDE.x).to(torch.float64)}),
        (DTypeError, "topk_scores is float16", {"topk_scores": scores().to(torch.float16)}),
        (DTypeError, "topk_indices is float32", {"topk_indices": scores()}),
        (DTypeError, "float8_e4m3fn and fp8_scale is None", {"hidden_states": quantised(WIDE.x).codes}),
        (DTypeError, "fp8_scale came with hidden_states in bfloat16", {"fp8_scale": quantised(WIDE.x).scale_inv}),
        (TypeError, "hidden_states must be a", {"hidden_states": np.zeros((2, 256))}),
        (TypeError, "topk_indices must be a", {"topk_indices": WIDE.indices}),
        (TypeError, "w2 must be a", {"w2": np.zeros((4, 256, 64))}),
        (ConfigError, "fp8_config is dict", {"fp8_config": {}}),
        (ConfigError, "needed: a gated activation", {"activation_type": "relu"}),
    ),
    *scenes(
        (ConfigError, "first_backward='overwrite' counts from node.step", first_backward),
        ((ShapeError, OSError), UNFIT, unfit_main_grad),
        *((ShapeError, NO_PAIR, partial(layout_of_pair, *shapes, 16)) for shapes in (
            ((3, 8, 16), (3, 16, 5)), ((3, 8, 16), (2, 16, 4)), ((3, 16, 8), (3, 16, 4)),
            ((3, 8), (3, 16, 4)), ((0, 8, 16), (0, 16, 4)),
        )),
    ),
]  # fmt: skip


# Scales on the wire, and gradients that the combine sends.


@contextmanager
def declared(words=None):
    """What packed words mean in the block; nobody has said it before, and it is forgotten."""
    before, carrier._declared = carrier._declared, None
    try:
        if words is not None:
            declare_carrier(words)
        yield
    finally:
        carrier._declared = before


def values(hidden=256, tokens=6):
    rng = np.random.default_rng(0)
    return bf16(rng.standard_normal((tokens, hidden)))


def quantise(words=None, x=None, **options):
    with declared(words):
        quantize_fast(values() if x is None else x, **options)


def carried(scale=np.ones((6, 2), np.float32), codes=None):  # noqa: B008
    with declared():
        given = quantize_fast(values(hidden=208))[0] if codes is None else codes
        tokens_from_carrier(given, scale if scale is None else tensor(scale))


def undeclared(as_bytes):
    with declared():
        codes, words = quantize_fast(values(), pack_scale_words=True)
        carrier._declared = None
        tokens_from_carrier(codes, words.view(torch.uint8) if as_bytes else words)


def declare_twice(words):
    with declared("fp32_1x128"):
        declare_carrier(words)


def filled(dout):
    """A handle as Fleet's combine leaves it: codes, and the bytes of packed words."""
    with declared():
        codes, words = quantize_fast(dout, pack_scale_words=True)
    return {"data": codes, "scale": words.view(torch.uint8)}


DOUT = bf16(WIDE.dout)


def take(handle=None, gradient=None):
    handle = filled(DOUT) if handle is None else handle
    with declared("fp32_1x128"):
        CombineGradient(handle).take(DOUT if gradient is None else gradient)


def take_twice(dtype):
    with declared("fp32_1x128"):
        source = CombineGradient(filled(DOUT))
        source.take(DOUT)
        source.take(DOUT.to(getattr(torch, dtype)))


def with_keys(*keys):
    return lambda: {"handle": {key: filled(DOUT).get(key, 1) for key in keys}}


def changed(key, value):
    return lambda: {"handle": filled(DOUT) | {key: value()}}


OTHER = "carrier is 'e8m0_1x32', and this process decl"
KEYS = r"has the keys .*needed: \['data', 'scale'\]"
ROWS += rows(
    carried,
    (ShapeError, r"scale is int32 \(6, 2\); codes \(6, 208\) need", {"scale": np.zeros((6, 2), np.int32)}),
    (DTypeError, "scale is int64; needed: float32, int32 or", {"scale": np.zeros((6, 7), np.int64)}),
    (ShapeError, r"x_scale has shape \(5, 2\)", {"scale": np.zeros((5, 2), np.float32)}),
    (TypeError, "scale must be a", {"scale": None}),
    (DTypeError, "codes are bfloat16", lambda: {"codes": values()}),
)  # fmt: skip
ROWS += rows(
    quantise,
    *((error, words, change | {"words": carried_words})
      for carried_words in (None, "e8m0_1x32") for error, words, change in (
        (ShapeError, "H a multiple of 128", {"x": values(hidden=208), "pack_scale_words": True}),
        (ConfigError, "scale_dtype is 'float32' with pack", {"pack_scale_words": True, "scale_dtype": torch.float32}),
        (ConfigError, "scale_dtype is 'int64'", {"scale_dtype": torch.int64}),
        (DTypeError, "x is int64", {"x": tensor(np.zeros((2, 128), np.int64))}),
        (ShapeError, r"x has shape \(256,\)", {"x": values()[0]}),
    )),
)  # fmt: skip
ROWS += rows(
    take,
    *((ConfigError, KEYS, with_keys(*keys)) for keys in (("data",), ("scale",), ("data", "scale", "event"))),
    (DTypeError, r"'data'\] is NoneType; needed: a tensor", changed("data", lambda: None)),
    (DTypeError, r"'data'\] is bfloat16; needed: float8_e4m3fn", changed("data", lambda: DOUT)),
    (DTypeError, "scale is bfloat16; needed: float32, int32 or uint8", changed("scale", lambda: DOUT)),
    (ShapeError, r"'data'\] has shape \(36, 256\); .* \(37, 256\): needed: the handle of the same",
     lambda: {"handle": filled(DOUT[:36])}),
    (ShapeError, r"\['data'\] and \['scale'\]: scale is uint8 \(36, 8\)",
     changed("scale", lambda: filled(DOUT)["scale"][:36])),
    (ConfigError, "float8_e4m3fn and fp8_combine_grad_handle is empty; the backward of the combine fills it",
     lambda: {"handle": {}, "gradient": filled(DOUT)["data"]}),
)  # fmt: skip
ROWS += scenes(
    *((ConfigError, r"packed words .* nobody declared", partial(undeclared, each)) for each in (False, True)),
    *((ConfigError, OTHER, partial(quantise, "fp32_1x128", scale_dtype=each)) for each in (None, torch.uint8)),
    (ConfigError, "carrier is 'e8m0_1x32', and this process declared", lambda: declare_twice(Carrier.E8M0_1X32)),
    (ConfigError, r"carrier is 'fp16'; needed: one of \['fp32_1x128'", lambda: declare_twice("fp16")),
    *((ConfigError, "an earlier backward of this forward took", partial(take_twice, each))
      for each in ("bfloat16", "float8_e4m3fn")),
    (DTypeError, "needed: a dict, or None", lambda: combine_gradient([])),
)  # fmt: skip


# Configuration, activations, names.


def field(**given):
    for name, value in given.items():
        setattr(FP8Config(), name, value)


def activation(name="swiglu", clamp=None):
    config = FP8Config()
    config.swiglu_clamp_value = clamp
    config.activation(name)


NUMBERS = {"swiglu_clamp_value", "situ_beta", "situ_linear_beta", "gemm_num_sms"}
SWITCHES = sorted(set(FIELDS) - NUMBERS)
OUT_OF_RANGE = [0, -1.0, float("nan"), 1e-39, 1e39, True]
OF_COPY = {
    name: value for name, value in vars(twin).items() if isinstance(value, twin._InFleetsCopyAlone)
}
ROWS += rows(
    field,
    (ConfigError, "no field 'fuse_everything'; known: alignment", {"fuse_everything": True}),
    *((ConfigError, rf"fp8_config\.\w+.* is {bad!r}; needed: True, False", {name: bad})
      for name in SWITCHES for bad in (1, "True", 0.5)),
    *((ConfigError, rf"fp8_config\.{name}.* is {bad!r}; needed: a ", {name: bad}) for name, values in (
        ("swiglu_clamp_value", ("10", float("nan"), True)), ("situ_beta", (0.0, "none")),
        ("situ_linear_beta", (-1.0,)), ("gemm_num_sms", (1, -2, "64", 1.5, True)),
    ) for bad in values),
)  # fmt: skip
ROWS += rows(
    activation,
    *((ConfigError, r"swiglu_clamp_value is 7\.0 with activation '\w+'", {"name": name, "clamp": 7})
      for name in ("geglu", "situ_glu", "situ_glu:b=1.0:lb=none", "relu")),
    *((ConfigError, rf"^activation_type is {name!r}", {"name": name})
      for name in ("swish", None, 3, "situ_glu:q=1")),
)  # fmt: skip
ROWS += rows(
    encode_situ_activation,
    *((ConfigError, ": beta is .*; needed: a number from", {"beta": bad})
      for bad in (*OUT_OF_RANGE, float("inf"), None, "4")),
    *((ConfigError, ": linear_beta is .*; needed: a number from", {"linear_beta": bad})
      for bad in (*OUT_OF_RANGE, "25")),
)  # fmt: skip
ROWS += scenes(
    *((ConfigError, f"situ_glu:{rest}", partial(parse_situ_activation, f"situ_glu:{rest}"))
      for rest in ("", "c=1", "b", "b=none", "lb=", "b=1:x")),
    (AttributeError, "resolve_fuse_everything", lambda: FP8Config().resolve_fuse_everything),
    # Names of Fleet's copy of `run_sonic_moe` can be bound and not used.
    *((EngineUnavailableError, rf"^_?{name} .*call .*run_sonic_moe",
       partial(way(part), object(), fp8_config=None))
      for name, part in OF_COPY.items() for way in (lambda it: it.apply, lambda it: it)),
)  # fmt: skip


# Copies of weights, layouts, schedules.


def quantised_expert():
    """Its copies hang on its parameters."""
    expert = FleetExpert(make_problem())
    expert.quant_weight()
    return expert


def freed(expert):
    expert.to_layout("sonic")
    free(*expert.weights)
    return expert


def after(event):
    """A forward of freed parameters after what makes their copies stale."""
    expert = quantised_expert()
    event(expert)
    freed(expert).forward(expert.problem)


def trained_and_cleared(expert):
    """The trainer clears caches before its optimizer, and forgets the attributes."""
    expert.forward(expert.problem).backward()
    clear_all_fp8_weight_caches()


def unreached():
    """Its attributes and its freed storage stay, and the trainer clears another expert's."""
    first, other = FleetExpert(make_problem()), FleetExpert(make_problem())
    for expert in (first, other):
        expert.step_begin()
        expert.forward(expert.problem).backward()
    other.clear_fp8_weights()
    first.forward(first.problem)


def nothing(call):
    expert = quantised_expert()
    expert.clear_fp8_weights()
    call(freed(expert))


def foreign_copy():
    expert = quantised_expert()
    w1, _ = expert.weights
    w1.fp8 = (tensor(np.zeros(3)) if IS_PADDLE else w1.fp8[0].clone(), w1.fp8[1])
    expert.forward(expert.problem)


def copies_of_two_events():
    expert = quantised_expert()
    w1, _ = expert.weights
    first = w1.fp8
    expert.quant_weight()
    w1.fp8 = first
    expert.forward(expert.problem)


def payload(change=lambda w1, w2: (w1, w2)):
    """Quantise weights in Sonic's layout, after a change."""
    quantize_native_fp8_weights(*change(*Experts(make_problem()).weights))


def numbered(*shape):
    return tensor(np.arange(np.prod(shape)).reshape(shape), torch.float32)


NEEDED = "weight has shape .*; needed: "
ROWS += rows(
    payload,
    (ShapeError, r"needed: \[E, 2I, H\] and \[E, H, I\]", {"change": lambda w1, w2: (w2, w1)}),
    (ShapeError, "w1 has shape", {"change": lambda _, w2: (tensor(np.zeros((3, 4))), w2)}),
    (TypeError, "w2 must be", {"change": lambda w1, _: (w1, None)}),
)
ROWS += scenes(
    (StaleWeightsError, r"announced a write; .* hold no memory", lambda: after(lambda it: weights_changed(*it.weights))),
    (StaleWeightsError, "clear_all_fp8_weight_caches", lambda: after(trained_and_cleared)),
    (StaleWeightsError, "clear_all_fp8_weight_caches", unreached),
    (LayoutError, r"hold no memory; .*FP8 copies", lambda: nothing(lambda expert: expert.call(fp8=True))),
    (LayoutError, "hold no memory", lambda: nothing(FleetExpert.quant_weight)),
    (LayoutError, r"w1\.fp8 holds .* has not made", foreign_copy),
    (LayoutError, "two quantisations", copies_of_two_events),
    *((ShapeError, NEEDED + needed, partial(move, numbered(*shape))) for move, shape, needed in (
        (fused_grouped_w1_to_sonic, (5, 8), r"\[E, H, 2I\]"),
        (fused_grouped_w1_to_sonic, (3, 4, 3), r"\[E, H, 2I\].*even"),
        (fused_sonic_w1_to_grouped, (3, 3, 4), r"\[E, 2I, H\].*even"),
        (fused_transpose_w2_layout, (3,), r"\[E, I, H\]"),
    )),
)  # fmt: skip


def step(*calls):
    """An `ExpertsStep`, after its calls by name."""
    made = ExpertsStep(WIDE.indices.shape[1], WIDE.num_experts, *EXPERTS().weights, False, None)
    x = bf16(WIDE.x)
    known = {
        "forward": lambda: made.forward(x, tensor(WIDE.indices), scores()),
        "backward": lambda: made.backward(DOUT),
        "short": lambda: made.backward(DOUT[1:]),
        "codes": lambda: made.backward(DOUT.to(torch.float8_e4m3fn)),
        "write": x.zero_,
    }
    with torch.no_grad():
        for name in calls:
            known[name]()


NO_FORWARD = r"backward\(\) without a forward\(\)"
ROWS += scenes(
    (RuntimeError, NO_FORWARD, lambda: step("backward")),
    (RuntimeError, NO_FORWARD, lambda: step("forward", "backward", "backward")),
    (RuntimeError, "needed: one ExpertsStep per micro-batch", lambda: step("forward", "forward")),
    (ShapeError, r"dout has shape \(36, 256\); the output has \(37, 256\)", lambda: step("forward", "short")),
    (DTypeError, "dout is float8_e4m3fn; needed: bfloat16", lambda: step("forward", "codes")),
    (RuntimeError, "x was written in place between this forward_step",
     lambda: step("forward", "write", "backward")),
)  # fmt: skip
if IS_PADDLE:
    ROWS += scenes(
        (ConfigError, "hook is str; needed: a function", lambda: set_wgrad_deferral_hook("later"))
    )
else:
    ROWS += scenes(
        (FrameworkError, r"needs Paddle.*delay_wgrad_compute", lambda: set_wgrad_deferral_hook(lambda *_: 0))
    )  # fmt: skip
