"""What stands below the faces refuses: routing, codes, layouts, parameters, activations and engines, in
either framework.
"""

from __future__ import annotations

import re
from functools import partial

import numpy as np
from engine.moe_golden import FP8, MODES, PLAIN, make_problem, set_up
from framework import IS_PADDLE, parameter, tensor, torch
from refusals.table import rows, scenes
from weights.weight_sources import SWIGLU, expert_modules, weight_arrays

from sonicmoe import layouts
from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.interface import EngineWeights
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.engine.settings import EngineSettings
from sonicmoe.enums import ActivationType, layer_parameters
from sonicmoe.errors import (
    ConfigError,
    DeviceError,
    DTypeError,
    LayoutError,
    RoutingError,
    ShapeError,
)
from sonicmoe.layouts import WeightLayout
from sonicmoe.quant import gpu
from sonicmoe.quant.format import BlockScaledTensor, Code, Orientation
from sonicmoe.quant.recipes import RECIPES, BlockShape, iso
from sonicmoe.quant.reference import quantize
from sonicmoe.routing.build import build_routing, build_sorted_routing
from sonicmoe.weight_source import WeightSource
from sonicmoe.weights.parameters import PerExpertParameters
from sonicmoe.weights.stacked import FusedParameters


def zeros(*shape, dtype=np.float32):
    return tensor(np.zeros(shape, dtype))


def fp32(array):
    return tensor(np.asarray(array), torch.float32)


# Routing.

INDICES, COUNTS = np.array([[0, 2], [2, -1], [2, 0], [-1, 9]], np.int64), [2, 0, 3]


def route(num_experts=3, counts=None, **changes):
    given = {
        "dispatched_indices": tensor(INDICES),
        "dispatched_probs": fp32(np.full((4, 2), 0.5)),
    }
    options = {name: changes.pop(name) for name in ("validate", "alignment") if name in changes}
    build_routing(*(given | changes).values(), num_experts, counts, **options)


def sorted_routing(counts=(2, 3), probs=None, rows=5, **options):
    made = np.array(counts)
    dtype = torch.float64 if made.dtype.kind == "f" else torch.int64
    build_sorted_routing(tensor(made, dtype), rows, probs, **options)


def probabilities(value):
    probs = np.full((4, 2), 0.5)
    probs[2, 0] = value
    return lambda: {"dispatched_probs": fp32(probs), "validate": True}


def ids(*tokens):
    """Of four experts, with validation."""
    made = np.array(tokens, np.int64)
    given = {"dispatched_indices": tensor(made), "dispatched_probs": fp32(np.full(made.shape, 0.5))}
    return given | {"num_experts": 4, "validate": True}


def disagreeing(counts, expert, counted):
    words = rf"tokens_per_expert\[{expert}\] is {counts[expert]} but .* {counted} tokens for expert"
    of_all = f"{re.escape(str(counts))}.*{re.escape(str(COUNTS))}"
    return [(RoutingError, found, {"counts": counts}) for found in (words, of_all)]


NO_DTYPE = {
    "dispatched_indices": (("int16", "uint8", "float32", "bool"), "int32 or int64"),
    "dispatched_probs": (("float64", "bfloat16", "float16", "int32"), "float32"),
}
EXPERTS = "; needed: the number of local experts, at least 1$"
NO_COUNT = (-1, 2.5, float("nan"), float("inf"), "2", "two", None, True, [2])
NAN_ROW = fp32([1.0, 1.0, 1.0, np.nan, 1.0, np.nan])
ROWS = rows(
    route,
    *((ShapeError, f"tokens_per_expert has {len(bad)} entries; needed: 3", {"counts": bad})
      for bad in ([2], [2, 0, 3, 0], np.zeros(2, np.int64))),
    *((RoutingError, r"tokens_per_expert\[1\] is .*needed: an int >= 0", {"counts": [2, bad, 3]}) for bad in NO_COUNT),
    *((RoutingError, f"tokens_per_expert is {type(bad).__name__}; needed: a list", {"counts": bad})
      for bad in ("203", 5, {0: 2}, iter(COUNTS))),
    *((RoutingError, r"dispatched_probs of token 2, slot 0, is .*expert 2", probabilities(bad))
      for bad in (np.nan, np.inf, -np.inf)),
    *(row for given in (([2, 0, 2], 2, 3), ([3, 0, 3], 0, 2), ([2, 1, 3], 1, 0), ([8, 0, 3], 0, 2))
      for row in disagreeing(*given)),
    *((RoutingError, rf"token 1 names expert {one} twice \(slots {one} and {other}\)",
       ids(range(4), [one if slot == other else slot for slot in range(4)]))
      for one, other in ((0, 1), (0, 3), (1, 2), (2, 3))),
    (RoutingError, r"no id of dispatched_indices is in 0\.\.3, and the largest is 14; needed: ids",
     ids([8, 9], [-1, 14])),
    *((RoutingError, f"dispatched_indices of token 1, slot 1, is {low}", ids([0, 1], [-1, low]))
      for low in (-2, -128, -(2**31))),
    *((ShapeError, rf"{name} has shape .*needed: \[tokens, topk\]{hint}",
       {name: tensor(np.zeros(shape), dtype)})
      for name, dtype in (("dispatched_indices", torch.int64), ("dispatched_probs", torch.float32))
      for shape, hint in (((4,), ".*HybridEP"), ((4, 2, 1), "$"), ((), "$"))),
    (ShapeError, r"\(4, 2\).*\(4, 3\)", {"dispatched_probs": fp32(np.zeros((4, 3)))}),
    *((DTypeError, f"{name} is {dtype}; needed: {needed}",
       {name: tensor(np.ones((4, 2)), getattr(torch, dtype))})
      for name, (dtypes, needed) in NO_DTYPE.items() for dtype in dtypes),
    *((TypeError, f"{name} must be a .* tensor, got ndarray", {name: np.zeros((4, 2))}) for name in NO_DTYPE),
    # A list is what comes where the counts were passed in its place.
    *((RoutingError, f"^{re.escape(f'num_experts is {bad!r}')}{EXPERTS}", {"num_experts": bad})
      for bad in (0, -1, None, "3", 2.5, True, [1, 1, 1])),
    *((RoutingError, f"alignment is {bad}.*128", {"alignment": bad}) for bad in (0, -128, 64, 130)),
)  # fmt: skip
ROWS += rows(
    sorted_routing,
    (RoutingError, r"counts\[1\] is -1; needed: an int >= 0", {"counts": [2, -1]}),
    (RoutingError, "counts sum to 6 rows and there are 5; needed: at most as many", {"counts": [2, 4]}),
    (ShapeError, r"counts has shape \(1, 2\); needed: \[experts\]", {"counts": [[2, 3]]}),
    (DTypeError, "counts is float64; needed: int32 or int64", {"counts": [2.0, 3.0]}),
    (ShapeError, r"probs has shape \(4,\); needed: \(5,\)", {"probs": fp32(np.ones(4))}),
    (RoutingError, "probs of row 3 is nan", {"probs": NAN_ROW, "rows": 6, "validate": True}),
)  # fmt: skip


# Codes.


def quantised(x=np.ones((2, 2), np.float32), block=iso(128), code=Code.E4M3):  # noqa: B008
    quantize(tensor(x), block, code)


def blocks(*parts):
    BlockScaledTensor(*parts)


def quantised_rows(x=np.zeros((4, 16), np.float32)):  # noqa: B008
    gpu.quantize_rows(tensor(x))


def gpu_source(up, down, transposed=True):
    gpu._check_source(WeightSource((up,), (down,), WeightLayout(transposed, True)))


def in_dtype(tensor, dtype):
    return tensor.to(getattr(torch, dtype))


SHIFTED = zeros(16 * 16 + 1)[1:].reshape([16, 16])
ROW_128 = BlockShape(1, 128)
E4M3, INT8 = (quantize(zeros(2, 130, 200), ROW_128, code) for code in (Code.E4M3, Code.INT8))
TURNED = E4M3.scale_inv.transpose(-2, -1).contiguous()
SHAPES = (
    r"scale_inv has shape \(2, 2, 130\).* codes \(2, 130, 200\) in 1x128 blocks need \(2, 130, 2\)"
)

ROWS += rows(
    quantised,
    *((DTypeError, rf"x is {dtype}, needed: float32, bfloat16 or float16", {"x": np.ones((2, 2), dtype)})
      for dtype in ("int32", "int64", "bool")),
    *((ShapeError, "the adaptive code needs blocks of one row and of 16",
       {"x": np.ones((128, 128), np.float32), "block": block, "code": Code.ADAPTIVE})
      for block in (iso(128), BlockShape(1, 8))),
)  # fmt: skip
ROWS += rows(
    quantised_rows,
    (ShapeError, r"x has shape \(4, 24\); needed: \[T, C\] with C a multiple of 16", {"x": np.zeros((4, 24), np.float32)}),
    (DTypeError, "x is float64; needed: bfloat16, float16 or float32", {"x": np.zeros((4, 16))}),
)  # fmt: skip
ROWS += scenes(
    *((error, words, partial(blocks, *parts)) for error, words, parts in (
        (DTypeError, "codes are float8_e4m3fn, the int8 code needs int8", (E4M3.codes, E4M3.scale_inv, ROW_128, Code.INT8)),
        (DTypeError, "codes are int8, the e4m3 code needs float8_e4m3fn", (INT8.codes, INT8.scale_inv, ROW_128, Code.E4M3)),
        *((DTypeError, f"codes are {dtype}", (in_dtype(zeros(4, 128), dtype), zeros(4, 1), ROW_128, Code.E4M3))
          for dtype in ("bfloat16", "float32", "uint8")),
        *((DTypeError, f"scale_inv is {dtype}, needed: float32", (E4M3.codes, in_dtype(E4M3.scale_inv, dtype), ROW_128, Code.E4M3))
          for dtype in ("bfloat16", "float16", "float64")),
        (ShapeError, SHAPES, (E4M3.codes, TURNED, ROW_128, Code.E4M3)),
        # Scales of the other orientation.
        (ShapeError, "128x1 blocks need", (E4M3.codes, E4M3.scale_inv, ROW_128, Code.E4M3, Orientation.COLUMNS)),
    )),
    *((error, words, partial(gpu_source, *given)) for error, words, given in (
        (ShapeError, "N1=64, H=16, I=24; needed: multiples of 16", (zeros(16, 64), zeros(24, 16))),
        (ShapeError, "split halves need N1 = 2 I, got N1=64 and I=16", (zeros(16, 64), zeros(16, 16))),
        (ShapeError, r"down\[0\] has shape \(32, 16\); needed: \(16, 16\)", (zeros(32, 16), zeros(32, 16), False)),
        (DTypeError, r"down\[0\] is float64, up\[0\] is float32", (zeros(16, 32), zeros(16, 16, dtype=np.float64))),
        (DTypeError, r"up\[0\] is int32", (zeros(16, 32, dtype=np.int32), zeros(16, 16))),
    )),
    *((ValueError, f"at least one row and one column, got {m}x{n}", partial(BlockShape, m, n))
      for m, n in ((0, 128), (128, 0), (-1, 1))),
)  # fmt: skip
if SHIFTED.data_ptr() % 16:  # a framework may copy slices
    WORDS_OF_IT = r"down\[0\] starts at 0x\w+; needed: a multiple of 16 bytes"
    ROWS += scenes((LayoutError, WORDS_OF_IT, lambda: gpu_source(zeros(16, 32), SHIFTED)))


# Layouts and parameters.


def per_expert(change=lambda _: None, experts=3, hidden=16, intermediate=12, activation=SWIGLU, more=()):  # fmt: skip
    modules = expert_modules(*weight_arrays())
    change(modules)
    PerExpertParameters([*modules, *more], experts, hidden, intermediate, activation)


def lacks(name):
    return {"change": lambda modules: delattr(modules[2], name)}


def has_float64(modules):
    modules[1].down_proj.weight = tensor(np.zeros((12, 16), np.float64), grad=True)


def has_strides(modules):
    modules[0].down_proj.weight = torch.nn.Parameter(torch.zeros(16, 12).t())


def fused(up=(3, 16, 24), down=(3, 12, 16)):
    FusedParameters(*(parameter(np.zeros(shape, np.float32)) for shape in (up, down)), SWIGLU)


def convert(w1=(2, 10, 3), w2=(2, 3, 5), source="halves", target="interleaved"):
    given = (zeros(*w) if isinstance(w, tuple) else w for w in (w1, w2))
    layouts.convert_weights(*given, source, target)


def convert_bias(b1=(2, 10), source="halves", target="interleaved"):
    layouts.convert_bias(zeros(*b1), source, target)


SIZES = r"experts\[0\]\.\w+\.weight has shape .*needed: \[\w+, \w+\] = "
UNGATED = r"\(16, 24\); needed: \[H, I\] = \(16, 12\)$"
STACKED = r"weight1 has .* and weight2 .*; needed: \[E, H, 2I\] and \[E, I, H\]$"
TURNED = (
    r"w1 has shape \(2, 10, 3\) and w2 \(2, 3, 5\); 'fused' needs w1 \[E, H, 2I\] and w2 "
    r"\[E, I, H\] .*; these two are w1 \[E, 2I, H\] and w2 \[E, H, I\], which is another"
)
ROWS += rows(
    per_expert,
    (LayoutError, r"experts\[2\] \(SimpleNamespace\) has no up_gate_proj.weight; needed: gate and up in one", lacks("up_gate_proj")),
    (LayoutError, r"experts\[2\] \(SimpleNamespace\) has no down_proj.weight", lacks("down_proj")),
    (DTypeError, r"experts\[1\]\.down_proj\.weight is float64", {"change": has_float64}),
    (LayoutError, r"3 local modules \(4 entries.*n_experts is 2", {"experts": 2, "more": [None]}),
    (LayoutError, r"\(4 entries.*n_experts is 4; pass the number of local experts \(3\)", {"experts": 4, "more": [None]}),
    (ShapeError, SIZES, {"hidden": 15}), (ShapeError, SIZES, {"intermediate": 13}),
    (ShapeError, SIZES, {"activation": ActivationType.RELU}),
    # Who brings two halves for an ungated activation is told so.
    (ShapeError, UNGATED, {"activation": ActivationType.SILU}),
    # Paddle's parameters are contiguous by construction.
    *([] if IS_PADDLE else [(LayoutError, "not contiguous", {"change": has_strides})]),
)  # fmt: skip
ROWS += rows(
    fused,
    (ShapeError, r"weight1 has shape \(3, 16\); needed: \[E, H, 2I\]", {"up": (3, 16)}),
    (ShapeError, r"weight2 has shape \(12, 16\); needed: \[E, I, H\]", {"down": (12, 16)}),
    *((ShapeError, STACKED, {"up": up, "down": down}) for up, down in (
        ((3, 16, 23), (3, 12, 16)), ((3, 16, 24), (2, 12, 16)), ((3, 16, 24), (3, 12, 15)),
        ((3, 24, 16), (3, 12, 16)), ((3, 16, 24), (3, 16, 12)), ((3, 24, 16), (3, 16, 12)),
    )),
)  # fmt: skip
ROWS += rows(
    convert,
    (ShapeError, TURNED, {"source": "fused"}),
    (ShapeError, r"'halves' needs .*; these two are w1 \[E, H, 2I\]", {"w1": (2, 3, 10), "w2": (2, 5, 3)}),
    *((ShapeError, r"'halves' needs .*without a gate\)$", {"w1": w1, "w2": w2}) for w1, w2 in (
        ((2, 7, 3), (2, 3, 5)), ((3, 10, 3), (2, 3, 5)), ((10, 3), (3, 5)), ((2, 10, 3, 1), (2, 3, 5)),
    )),
    (ConfigError, r"source is 'concat'; needed: one of \['interleaved'", {"source": "concat"}),
    (TypeError, r"w2 must be a .* tensor, got ndarray", {"w2": np.ones((2, 3, 5))}),
)  # fmt: skip
ROWS += rows(
    convert_bias,
    (ConfigError, "target is None", {"target": None}),
    (ShapeError, r"b1 has shape \(2, 5\); needed: \[E, 2I\]", {"b1": (2, 5)}),
)
ROWS += scenes(
    *((LayoutError, rf"{name} needs an even number of rows.*\(5, 2\)", partial(getattr(layouts, name), zeros(5, 2)))
      for name in ("interleave_gate_up", "deinterleave_gate_up")),
    (ShapeError, "2 up and 1 down matrices", lambda: WeightSource.stacked(zeros(2, 4, 3), zeros(1, 3, 2))),
)  # fmt: skip


# Parameters of activations, and engines.


def activation(name="swiglu_oai", **given):
    layer_parameters(ActivationType(name), given)


REFERENCE, BF16, HOPPER = ReferenceEngine(), Bf16Engine(), HopperEngine()
SILU, RELU = (EngineSettings(ActivationType(name)) for name in ("silu", "relu"))
HOPPERS, BIASES = (
    {"w1": (4, 128, 80), "w2": (4, 80, 64)},
    {"b1": (4, 96), "b2": (4, 80)},
)


def prepare(engine=REFERENCE, settings=PLAIN, reads=False, **changes):
    """A change is a shape or a dtype. reads: where the weights lie, as `hopper` does."""
    shapes = {"w1": (4, 96, 80), "w2": (4, 80, 48), "b1": None, "b2": None}
    dtypes = dict.fromkeys(shapes, "bfloat16")
    shapes |= {name: change for name, change in changes.items() if not isinstance(change, str)}
    dtypes |= {name: change for name, change in changes.items() if isinstance(change, str)}
    made = {
        name: None if shape is None else torch.zeros(shape, dtype=getattr(torch, dtypes[name]))
        for name, shape in shapes.items()
    }
    if reads:
        engine.refresh(WeightSource.stacked(*made.values()), settings)
    else:
        engine.prepare_weights(**made, settings=settings)


def of_engine(engine, settings, error, words, **changes):
    return error, words, {"engine": engine, "settings": settings} | changes


OF_HOPPER = [
    of_engine(HOPPER, PLAIN, ConfigError, "the hopper engine cannot compute this: FP8 is off", **HOPPERS),
    of_engine(HOPPER, FP8, ShapeError, "H is 136 and I is 64, and it needs multiples of 16", w1=(4, 128, 136), w2=(4, 136, 64)),
    of_engine(HOPPER, FP8, ShapeError, r"b2 has shape \(4, 1\); needed: \(4, 80\)", **HOPPERS, b1=(4, 128), b2=(4, 1)),
    of_engine(HOPPER, FP8, ShapeError, r"b1 has shape \(4, 64\)", **HOPPERS, b1=(4, 64), b2=(4, 80)),
    of_engine(HOPPER, FP8, ShapeError, "b1 and b2 must be given both", **HOPPERS, b2=(4, 80)),
    of_engine(HOPPER, FP8, ShapeError, "w1 has 64 rows per expert; swiglu with I=64 needs 128", w1=(4, 64, 80), w2=(4, 80, 64)),
]  # fmt: skip
ROWS += rows(
    prepare,
    (ShapeError, r"w1 has shape \(4, 96\)", {"w1": (4, 96)}),
    (ShapeError, r"w2 has shape .*\(4, 80, 48\)", {"w2": (4, 81, 48)}),
    (ShapeError, "w1 has 95 rows per expert; swiglu with I=48 needs 96", {"w1": (4, 95, 80)}),
    (ShapeError, "relu with I=48 needs 48", {"settings": RELU}),
    (ShapeError, "both or neither", {"b1": (4, 96)}), (ShapeError, "both or neither", {"b2": (4, 80)}),
    (ShapeError, r"b1 has shape \(4, 95\); needed: \(4, 96\)", BIASES | {"b1": (4, 95)}),
    (ShapeError, r"b2 has shape \(4, 1\); needed: \(4, 80\)", BIASES | {"b2": (4, 1)}),
    of_engine(BF16, FP8, ConfigError, "the bf16 engine cannot compute this: FP8 is on .*, and it quantises nothing"),
    of_engine(BF16, PLAIN, DTypeError, r"w1 is float32, w2 is float32; .* one of \['bfloat16', 'float16'\]",
              w1="float32", w2="float32"),
    of_engine(BF16, PLAIN, DTypeError, "w1 is bfloat16, w2 is float16", w2="float16"),
    of_engine(BF16, PLAIN, ShapeError, "H is 80 and I is 20", w1=(4, 40, 80), w2=(4, 80, 20)),
    of_engine(BF16, PLAIN, DeviceError, "w1 is on cpu; the bf16 engine needs a GPU of sm_90a"),
    of_engine(BF16, SILU, ShapeError, "silu with I=48 needs 48"),
    *OF_HOPPER,
    *((error, words, change | {"reads": True}) for error, words, change in OF_HOPPER),
)  # fmt: skip
ROWS += rows(
    activation,
    (ConfigError, "has 'limit'; swiglu has", {"name": "swiglu", "limit": 7.0}),
    (ConfigError, r"has 'beta'; swiglu_oai has \['alpha', 'limit'\]", {"beta": 1.0}),
    (ConfigError, r"\['alpha'\] is '1.7'; needed: a number", {"alpha": "1.7"}),
    (ConfigError, r"\['limit'\] is True; needed: a number", {"limit": True}),
    (ConfigError, r"\['limit'\] is -7.0; needed: a number from 1.17", {"limit": -7.0}),
    *((ConfigError, rf"\['limit'\] is {bad}; needed: a number from", {"name": "swiglu_clamp", "limit": bad})
      for bad in (0.0, None, float("inf"))),
    *((ConfigError, words, {"name": "situ_glu"} | change) for words, change in (
        (r"\['beta'\] is None; needed: a number from", {"beta": None}),
        (r"\['beta'\] is 1e-39; .* to 8.507059173023462e\+37", {"beta": 1e-39}),
        (r"\['linear_beta'\] is 0; .* or None to leave it out", {"linear_beta": 0}),
        (r"\['linear_beta'\] is 1e\+38; needed: a number from", {"linear_beta": 1e38}),
    )),
)  # fmt: skip


def engine_tokens(backward, bad):
    """Other tokens, or another gradient of the output, than the routing and the weights are for."""
    from dataclasses import replace

    setup = set_up(make_problem())
    if not backward:
        return replace(setup, x=bad).forward()
    _, saved = setup.forward()
    return setup.engine.backward_dx(bad, saved, setup.weights)


def engine_routing(experts=4, settings=PLAIN, others=None):
    from dataclasses import replace

    setup = set_up(make_problem(), settings)
    given = tensor(setup.problem.indices), fp32(setup.problem.probs)
    routing = build_routing(*given, experts, alignment=128)
    replace(setup, routing=routing, settings=others or settings).forward()


def fp16_tokens():
    w1, w2 = (torch.zeros(shape).to(torch.bfloat16) for shape in ([2, 16, 16], [2, 16, 8]))
    routing = build_routing(torch.zeros([3, 1], dtype=torch.int64), torch.ones([3, 1]), 2)
    x = torch.zeros([3, 16], dtype=torch.float16)
    BF16.forward(x, routing, EngineWeights(w1, w2, w1, w2), PLAIN)


NO_TOKENS = (
    *((ShapeError, r"{} has shape .*\(37, 80\)", zeros(*shape)) for shape in ((36, 80), (37, 79), (37,), (37, 80, 1))),
    *((DTypeError, f"{{}} is {dtype}", zeros(37, 80).to(getattr(torch, dtype)))
      for dtype in ("float8_e4m3fn", "float64", "int32")),
    *((TypeError, "{} must be a", bad) for bad in (make_problem().x, None)),
)  # fmt: skip
ROWS += rows(
    engine_routing,
    (RoutingError, "routing is for 5 experts, the weights hold 4", {"experts": 5}),
    (RoutingError, "pads experts to 128 rows; the recipe needs a multiple of 256",
     {"settings": EngineSettings(recipe=RECIPES["iso256"])}),
    # Plain weights under a recipe would silently be a different computation.
    *((DTypeError, f"weights are .*, the settings have recipe {others.recipe and 'dx256'!r}",
       {"settings": settings, "others": others})
      for settings in MODES.args[1] for others in [FP8 if settings.recipe is None else PLAIN]),
)  # fmt: skip
ROWS += scenes(
    *((error, words.format("dout" if backward else "x"), partial(engine_tokens, backward, bad))
      for backward in (False, True) for error, words, bad in NO_TOKENS),
    (DTypeError, "x is float16; the weights are bfloat16", fp16_tokens),
)  # fmt: skip
if not IS_PADDLE:
    META = torch.zeros((4, 2), device="meta")
    WORDS = "dispatched_probs is on meta but dispatched_indices is on cpu"
    ROWS += rows(route, (DeviceError, WORDS, {"dispatched_probs": META}))
    ROWS += scenes(
        (DeviceError, "routing is on cpu but x is on meta",
         lambda: engine_tokens(False, torch.zeros(37, 80, device="meta")))
    )  # fmt: skip
