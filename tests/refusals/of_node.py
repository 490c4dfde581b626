"""What the node refuses, in either framework."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
from engine.fp8_arrivals import problem_with_idle_tokens, quantised
from engine.moe_golden import factors_of, make_problem
from framework import IS_PADDLE, numpy, parameter, tensor, torch
from node.node_harness import FULL, Layer, counts_of, recomputed, want_gradient
from node.test_node_copies import copied, make_layer, perf
from node.test_node_fp8 import GradientCall, Source, TokensCall, bf16, bf16_layer
from node.test_node_step import in_one_buffer
from refusals.table import rows, scenes
from weights.freed_memory import free
from weights.weight_sources import expert_modules

from sonicmoe.config import SonicMoEConfig
from sonicmoe.diagnostics.nonfinite import NonFiniteError, detect_nonfinite
from sonicmoe.engine.low_rank import Adapters, LowRank
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.errors import (
    ConfigError,
    DTypeError,
    EngineUnavailableError,
    LayoutError,
    RoutingError,
    ShapeError,
    StaleWeightsError,
)
from sonicmoe.gradients import sink
from sonicmoe.quant.tokens import tokens_of

# Paddle raises an OSError in place of what a backward raises.
LATE = (RuntimeError, OSError)
PROBLEM = make_problem()


def fp32(array):
    return tensor(array, torch.float32)


def zeros(*shape, dtype="float32"):
    return fp32(np.zeros(shape)).to(getattr(torch, dtype))


def arguments(**changes):
    p = PROBLEM
    given = {"x": fp32(p.x), "tokens_per_expert": counts_of(p)}
    given |= {"dispatched_indices": tensor(p.indices), "dispatched_probs": fp32(p.probs)}
    return given | changes


def forward(**changes):
    Layer().node(**arguments(**changes))


def sparse(name):
    value = arguments()[name]
    return {name: value.to_sparse_coo(2) if IS_PADDLE else value.to_sparse()}


def construct(**changes):
    given = {"n_experts": 4, "hidden_size": 80, "intermediate_size": 48}
    SonicMoEMlpNode(**{"experts": Layer().experts} | given | changes)


def transposed():
    p = PROBLEM
    parts = ([w.T.copy() for w in part] for part in (p.up_gate, p.down))
    return {"experts": expert_modules(*parts)}


def biased():
    layer = Layer()
    layer.experts[1].down_proj.bias = layer.weights[0]
    layer.another_node()


def adapted_projection(late):
    """Its weight is the base layer's, which the node would read alone."""
    layer = Layer()
    module = __import__("paddle").nn.Layer if IS_PADDLE else torch.nn.Module
    adapted = module()
    adapted.weight = layer.experts[1].down_proj.weight
    adapted.lora_A = Layer().experts[1].down_proj.weight
    if late:
        layer.run()
    layer.experts[1].down_proj = adapted
    layer.run() if late else layer.another_node()


TANH = r"activation_type is 'tanh'; needed: one of \['swiglu', "
FLUSHES = r"needed: one of \['auto', 'step'\]"
OVERWRITE = SonicMoEConfig(engine="reference", first_backward="overwrite")
WRITES_WHAT_WAITS = "first_backward='overwrite' with flush='step'"
IMPOSSIBLE = SonicMoEConfig(fp8_mode="perf", recipe="1x128", iso_weight=True)
LORA = r"experts\[1\].down_proj .* \['lora_A'\]; .*merged"
ROWS = [
    *rows(
        forward,
        (DTypeError, "x is float64", {"x": zeros(37, 80, dtype="float64")}),
        (TypeError, "x must be a .* tensor, got ndarray", {"x": np.zeros((37, 80))}),
        (ShapeError, r"x has shape \(36, 80\); 37 rows", {"x": zeros(36, 80)}),
        (ShapeError, r"x has shape \(37, 81\).*hidden_size 80", {"x": zeros(37, 81)}),
        (RoutingError, "dispatched_indices missing.*HybridEP", {"dispatched_indices": None}),
        (RoutingError, "dispatched_probs missing.*HybridEP", {"dispatched_probs": None}),
        # Also where nothing would read them.
        (TypeError, r"copies is str; needed: what make_copies\(\)", {"copies": "a"}),
        *((LayoutError, f"^{name} is sparse; needed: a dense", partial(sparse, name))
          for name in ("x", "dispatched_indices", "dispatched_probs")),
    ),
    *rows(
        construct,
        (LayoutError, "n_experts is 0; needed: at least one", {"experts": [], "n_experts": 0}),
        (LayoutError, r"experts is .*; needed: a list", {"experts": object()}),
        (ConfigError, r"config is .*; needed: a SonicMoEConfig", {"config": {"fp8_mode": "perf"}}),
        (ConfigError, TANH, {"activation_type": "tanh"}),
        (ConfigError, "iso_weight", {"config": IMPOSSIBLE}),
        (ConfigError, WRITES_WHAT_WAITS, {"config": OVERWRITE, "flush": "step"}),
        *((ConfigError, rf"flush is '{gone}'; {FLUSHES}", {"flush": gone})
          for gone in ("direct", "prompt", "sometimes")),
        (ConfigError, "idle_grads is False and gradients wait for step", {"idle_grads": False, "flush": "step"}),
        (ShapeError, r"up_gate_proj\.weight", {"intermediate_size": 47}),
        (ShapeError, r"shape \(96, 80\); needed: \[H, 2I\] = \(80, 96\); it looks transposed", transposed),
    ),
    *scenes(
        (EngineUnavailableError, "hopper", lambda: Layer(config=SonicMoEConfig(engine="hopper")).call()),
        (RoutingError, "the second argument, tokens_per_expert, has two axes",
         lambda: Layer().node(fp32(PROBLEM.x), tensor(PROBLEM.indices), fp32(PROBLEM.probs))),
        (LayoutError, r"experts\[1\].down_proj has a bias", biased),
        *((LayoutError, LORA, partial(adapted_projection, late)) for late in (False, True)),
    ),
]  # fmt: skip


# Tokens and gradients in FP8.

IDLE = problem_with_idle_tokens()
X = quantised(IDLE.x)
BF16, FP32, E5M2 = bf16(IDLE.x), fp32(IDLE.x), fp32(IDLE.x).to(torch.float8_e5m2)
PAIR, WORDS = (X.codes, X.scale_inv), X.scale_inv.view(torch.int32)
SCALES = r"x_scale has shape .* needs \[T, ceil\(H/128\)\] = \(37, 2\)"


def tokens(**changes):
    given = {"codes": X.codes, "x_scale": X.scale_inv} | changes
    codes = given.pop("codes")
    bf16_layer(IDLE).node(codes, None, tensor(IDLE.indices), fp32(IDLE.probs), **given)


def trained_codes(**others):
    codes = quantised(IDLE.x).codes
    want_gradient(codes, True)
    return {"codes": codes} | {name: codes for name in others}


def nan_scale(way):
    """The first NaN of what arrived is named."""
    arrived = quantised(getattr(IDLE, way))
    scale = numpy(arrived.scale_inv)
    scale[1, 0] = np.nan
    arrived = tokens_of(arrived.codes, fp32(scale))
    with detect_nonfinite():
        if way == "x":
            TokensCall(bf16_layer(IDLE), arrived).backward()
        else:
            source = SimpleNamespace(take=lambda gradient: arrived)
            GradientCall(bf16_layer(IDLE), source).backward()


def written_scale():
    x = quantised(IDLE.x)
    call = TokensCall(bf16_layer(IDLE), x)
    with torch.no_grad():
        x.scale_inv.add_(x.scale_inv)
    call.backward()


def no_gradient(given):
    GradientCall(bf16_layer(IDLE), Source(given())).backward()


def leaf_codes():
    x = quantised(IDLE.x)
    x.codes.stop_gradient = False
    TokensCall(bf16_layer(IDLE), x, dx_to=x.codes)


ROWS += rows(
    tokens,
    (DTypeError, r"float8_e4m3fn without its scales.*x_scale, float32", {"x_scale": None}),
    (DTypeError, "x_scale came with x in bfloat16", {"codes": BF16}),
    (DTypeError, "dx_to came with x in bfloat16", {"codes": BF16, "x_scale": None, "dx_to": BF16}),
    (DTypeError, "x is a tuple.*as x_scale", {"codes": PAIR, "x_scale": None}),
    (DTypeError, "x is float8_e5m2", {"codes": E5M2}),
    (DTypeError, "x_scale is int32; needed: float32", {"x_scale": WORDS}),
    (TypeError, "x_scale must be a", {"x_scale": np.ones((37, 2))}),
    (DTypeError, "dx_to is float32; needed: bfloat16", {"dx_to": FP32}),
    (ShapeError, r"dx_to has shape \(36, 256\)", {"dx_to": BF16[:36]}),
    (TypeError, "dx_to must be a", {"dx_to": IDLE.x}),
    *((ShapeError, SCALES, {"x_scale": fp32(np.ones(shape))})
      for shape in ((37, 1), (37, 3), (36, 2), (37,), (37, 256))),
    (DTypeError, "x wants a gradient, and autograd would cast it", trained_codes),
)  # fmt: skip
NO_SOURCE = r"dout_source is .*; needed: an object with take"
ROWS += scenes(
    *((DTypeError, NO_SOURCE, lambda given=given: GradientCall(bf16_layer(IDLE), given))
      for given in (quantised(IDLE.dout), {"data": None})),
    *(((*LATE, DTypeError, ShapeError), words, partial(no_gradient, given)) for words, given in (
        ("take returned NoneType; needed: a BlockScaledTensor or a tensor", lambda: None),
        ("dout is float8_e4m3fn without its scales", lambda: quantised(IDLE.dout).codes),
        (r"dout has shape \(36, 256\); needed: \(37, 256\)", lambda: quantised(IDLE.dout[:36])),
    )),
    *((NonFiniteError, f"input {way} at token 1", partial(nan_scale, way)) for way in ("x", "dout")),
    (LATE, r"modified by an inplace|x_scale was written|overwritten", written_scale),
)  # fmt: skip
if IS_PADDLE:
    ROWS += scenes((DTypeError, "x is a leaf, whose gradient Paddle casts", leaf_codes))
else:
    ROWS += rows(
        tokens, (DTypeError, "PyTorch casts the gradient", partial(trained_codes, dx_to=1))
    )


# Adapters, copies of weights, parameters and their gradients.


def trained_pairs(rank=5):
    factors = ([parameter(f, torch.float32) for f in pair] for pair in factors_of(PROBLEM, rank))
    return Adapters(*(LowRank(*pair, 0.7) for pair in factors))


def adapters(change=lambda pairs: pairs, rank=5):
    Layer(PROBLEM).call(adapters=change(trained_pairs(rank)))


def up(name, change):
    """A part of the pair of the up-projection becomes what `change` makes of it."""
    return {
        "change": lambda pairs: pairs._replace(
            up=pairs.up._replace(**{name: change(getattr(pairs.up, name))})
        )
    }


def written_factor():
    given = trained_pairs()
    call = Layer(PROBLEM).call(adapters=given)
    with torch.no_grad():
        given.up.b.zero_()
    call.backward()


def without_memory(call):
    layer = make_layer()
    free(layer.weights[1])
    call(layer)


def released(freed):
    layer, copies = copied(freed=False)
    copies.release_forward()
    if freed:
        free(*layer.weights)
    layer.call(copies=copies)


def of_another_recipe():
    make_layer(config=perf(recipe="1x128")).call(copies=copied(freed=False)[1])


def by_name(*shape_of):
    """A module's parameters after a change of both."""
    layer = Layer(arrangement="fused")
    module = SimpleNamespace(weight1=layer.weights[0], weight2=layer.weights[1])
    names = (module, "weight1"), (module, "weight2")
    node = SonicMoEMlpNode.from_fused(*names, PROBLEM.activation, config=FULL)
    for name, weight, part in zip(("weight1", "weight2"), layer.weights, shape_of, strict=True):
        setattr(module, name, parameter(numpy(weight)[part], torch.float32))
    node(**arguments())


def another_buffer():
    layer = Layer(flush="step")
    in_one_buffer(layer)
    layer.run()
    in_one_buffer(layer)
    layer.node.step()


def another_route():
    """The recomputed forward routes one token elsewhere; counts stay the same, so shapes cannot give it
    away.
    """
    problem = make_problem(tokens=8, topk=1, empty=())
    problem = problem.but(indices=np.arange(8).reshape(8, 1) % 4)
    other = problem.indices.copy()
    other[[0, 1]] = other[[1, 0]]
    routes, layer = iter([problem.indices, other]), Layer(problem)
    call = layer.call()

    def forward(x, probs):
        return layer.node(x, None, tensor(next(routes)), probs)

    call.out = recomputed(forward, call.x, call.probs, use_reentrant=False)
    call.backward()


def overwrites_what_waits():
    layer = Layer(main_grad=1.0, config=None, flush="step")
    with OVERWRITE.activate():
        call = layer.call()
    call.backward()


def captured(config, main_grad):
    with mock.patch.object(sink, "is_capturing", lambda _: True):
        Layer(config=config, main_grad=main_grad).run()


NO_MEMORY = r"weights \[1\] of the experts hold no memory"
NO_RECIPE = "reference engine computes without FP8 recipe"
ROWS += rows(
    adapters,
    (TypeError, "adapters is tuple; needed: an Adapters, or None", {"change": tuple}),
    (TypeError, r"^up is tuple; needed: a LowRank, or None", {"change": lambda pairs: pairs._replace(up=tuple(pairs.up))}),
    (ShapeError, r"^up.a has shape \(3, 5, 80\); needed: \[E, r", up("a", lambda a: a[:3])),
    (ShapeError, r"^up.a .* = \[4, 1 to 128, 80\]", up("a", lambda a: a[:, :, :79])),
    (ShapeError, r"^up.b .* = \(4, 96, 5\)", up("b", lambda b: b[:, 2:])),
    (ShapeError, r"^up.b .* = \(4, 96, 5\)", up("b", lambda b: b[:, 1:])),
    (ShapeError, r"^up.b .* = \(4, 96, 5\)", up("b", lambda b: b[0])),
    (ShapeError, r"^up.b .* = \(4, 96, 5\)", up("b", lambda b: b[:, :, :4])),
    (DTypeError, r"^up.a is int32; needed: bfloat16", up("a", lambda a: a.to(torch.int32))),
    (ConfigError, r"^up.scale is nan; needed: a finite", up("scale", lambda _: float("nan"))),
    (ShapeError, "1 to 128", {"rank": 129}),
)  # fmt: skip
ROWS += scenes(
    (LATE, r"up\.b was written in place", written_factor),
    *((ConfigError, NO_RECIPE, partial(copied, config=config))
      for config in (FULL, SonicMoEConfig(fp8_mode="off"))),
    (LayoutError, f"{NO_MEMORY}; .*copies", lambda: without_memory(Layer.call)),
    (LayoutError, NO_MEMORY, lambda: without_memory(lambda layer: layer.node.make_copies())),
    (ConfigError, r"recipe 'dx256' and a gated .* computes with .* recipe '1x128'", of_another_recipe),
    (StaleWeightsError, "was released; needed: new copies", lambda: released(freed=False)),
    (StaleWeightsError, "was released", lambda: released(freed=True)),
    (ShapeError, r"weight1 has shape .* and weight2", lambda: by_name((..., slice(-2)), ())),
    (ShapeError, "by now; the node was made for", lambda: by_name(slice(2), slice(2))),
    (RuntimeError, "main_grad lies elsewhere than at the first", another_buffer),
    ((ConfigError, OSError), WRITES_WHAT_WAITS, overwrites_what_waits),
    ((ConfigError, OSError), "while a backward is captured", partial(captured, OVERWRITE, 1.0)),
    (LATE, "main_grad allocated before the capture", partial(captured, FULL, None)),
    ((RoutingError, OSError), "routing differs between forward and recompute", another_route),
)  # fmt: skip


# What PyTorch alone has.


def on_meta(*devices):
    shapes = zip(((4, 80, 96), (4, 48, 80)), devices, strict=True)
    weights = [torch.nn.Parameter(torch.empty(shape, device=where)) for shape, where in shapes]
    SonicMoEMlpNode.from_fused(*weights)(**arguments())


def backward_twice():
    call = Layer(config=SonicMoEConfig(engine="reference", fp8_mode="mem")).call()
    call.backward(retain_graph=True)
    call.backward()


def sorted_rows(**changes):
    from node.test_node_sorted import Case

    case = Case()
    given = {"counts": case.counts} | changes
    if "down" in given:
        case.down.weight1 = given.pop("down")
    case.node().forward_sorted(case.x, **given)


if not IS_PADDLE:
    ROWS += scenes(
        *((LayoutError, "on the meta device", partial(on_meta, *devices))
          for devices in (("meta", "meta"), ("cpu", "meta"), ("meta", "cpu"))),
        (RuntimeError, r"stagewise memory dropped z.*stagewise_memory off", backward_twice),
    )  # fmt: skip
    ROWS += rows(
        sorted_rows,
        (RoutingError, "counts sum to 14 rows and there are 13", {"counts": torch.tensor([7, 0, 7])}),
        (ShapeError, r"counts has shape \(2,\)", {"counts": torch.tensor([4, 7])}),
        (DTypeError, "probs is float64", {"probs": torch.rand(13, dtype=torch.float64)}),
        (ShapeError, r"b2 has shape \(3, 7\)", {"biases": (torch.zeros(3, 32), torch.zeros(3, 7))}),
        (ShapeError, r"down.weight1 has shape \(16, 8\); needed: \[H, I\]",
         {"down": torch.nn.Parameter(torch.randn(16, 8))}),
    )  # fmt: skip
