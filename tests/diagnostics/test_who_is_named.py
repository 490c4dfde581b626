"""One NaN in each operand of each face: detection names that operand, in the caller's words. Also under
Paddle.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine.low_rank_golden import Adapted
from engine.moe_golden import make_problem
from findings import found
from framework import IS_PADDLE, numpy, tensor, torch
from node.node_harness import FP8, FULL, Layer, want_gradient

from sonicmoe.engine.low_rank import NAMES_OF_FACTORS, Adapters, LowRank
from sonicmoe.fleet.run import run_sonic_moe

PROBLEM = make_problem(hidden=32, intermediate=24, topk=2, bias=True)
SORTED = make_problem(hidden=32, intermediate=24, topk=1, empty=(), bias=True)
SORTED.indices[:] = np.sort(np.abs(SORTED.indices) % 4, 0)
FACTORS = {name: f"computed from parameters that are not finite: adapters.{name}" for name in NAMES_OF_FACTORS}  # fmt: skip
OF_NODE = {
    "x": "input x at token",
    "probs": "input probs = dispatched_probs at",
    "w1": "input w1 = weight1 at expert 1",
    "w2": "input w2 = weight2 at expert 1",
    "b1": "input b1 = b1 at expert 1",
    "b2": "input b2 = b2 at expert 1",
    "dout": "input dout at token",
    **FACTORS,
}
OF_STACKED = OF_NODE | {
    "probs": "input probs = probs at",
    "w1": "input w1 = w1 at expert 1",
    "w2": "input w2 = w2 at expert 1",
}
OF_MOE = OF_STACKED | {
    "x": "input x = hidden_states at token",
    "w1": "input w1 = c_fc.weight at expert 1",
    "w2": "input w2 = c_proj.weight at expert 1",
    "b1": "input b1 = c_fc.bias at expert 1",
    "b2": "input b2 = c_proj.bias at expert 1",
    "dout": "input dout = the gradient of output at token",
}
del OF_MOE["probs"]  # it computes them by itself
OF_FLEET = {
    "x": "input x = hidden_states at token",
    "probs": "input probs = topk_scores at",
    "w1": "input w1 = w1 at expert 1",
    "w2": "input w2 = w2 at expert 1",
    "dout": "input dout at token",
}


def operands(problem, bad, turned=False):
    """By name; weights `[E, H, N1]`, `[E, I, H]`, or with their axes turned. One element is a NaN: of the
    second expert, or of a token of it.
    """
    token = int(np.argwhere(problem.indices == 1)[0][0])
    exact, axes = Adapted(problem).exact, (0, 2, 1) if turned else (0, 1, 2)
    arrays = {
        "x": problem.x, "probs": problem.probs, "dout": problem.dout,
        "w1": problem.up_gate.transpose(axes), "w2": problem.down.transpose(axes),
        "b1": problem.b1, "b2": problem.b2,
        "up.a": exact["up"][0], "up.b": exact["up"][1], "down.a": exact["down"][0], "down.b": exact["down"][1],
    }  # fmt: skip
    made = {}
    for name, values in arrays.items():
        array = np.array(values, np.float32)
        if name == bad:
            if name == "probs":
                array[token][problem.indices[token] == 1] = np.nan
            else:
                array[token if name in ("x", "dout") else 1].flat[3] = np.nan
        made[name] = tensor(array, torch.float32)
        want_gradient(made[name], name != "dout")
    return made


def adapters_of(have):
    return Adapters(LowRank(have["up.a"], have["up.b"]), LowRank(have["down.a"], have["down.b"]))


def with_weights(problem, have, **options):
    """A node on weights that have the NaN."""
    return Layer(
        problem.but(up_gate=numpy(have["w1"]), down=numpy(have["w2"])),
        arrangement="fused",
        **options,
    ).node


def node(bad, fp8):
    have = operands(PROBLEM, bad)
    made = with_weights(PROBLEM, have, config=FP8 if fp8 else FULL)
    beside = {"biases": (have["b1"], have["b2"]), "adapters": adapters_of(have)}
    out = made(have["x"], None, tensor(PROBLEM.indices), have["probs"], **beside)
    out.backward(have["dout"])


def node_sorted(bad, fp8):
    have = operands(SORTED, bad)
    made = with_weights(SORTED, have, config=FP8 if fp8 else FULL)
    beside = {"biases": (have["b1"], have["b2"]), "adapters": adapters_of(have)}
    counts = tensor(np.bincount(SORTED.indices[:, 0], minlength=4))
    out = made.forward_sorted(have["x"], counts, have["probs"].reshape([-1]), **beside)
    out.backward(have["dout"])


def fleet(bad, fp8):
    have, topk = operands(PROBLEM, bad), PROBLEM.indices.shape[1]
    node_of = with_weights(PROBLEM, have)
    weights = node_of._state.parameters.parameters()
    out = run_sonic_moe(
        have["x"], tensor(PROBLEM.indices), have["probs"], topk, 4, *weights, fp8=fp8
    )
    out.backward(have["dout"])


def stacked(bad, fp8):
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional.autograd import expert_mlp
    from sonicmoe.layouts import WeightLayout

    have = operands(PROBLEM, bad, turned=True)
    given = [have[name] for name in ("w1", "w2", "b1", "b2")]
    out = expert_mlp(
        *(have["x"], tensor(PROBLEM.indices), have["probs"], *given, ActivationType.SWIGLU),
        layout=WeightLayout(split_half=True), use_fp8=fp8, adapters=adapters_of(have),
    )  # fmt: skip
    out.backward(have["dout"])


def moe(bad, fp8):
    from sonicmoe import MoE

    have, layer = operands(PROBLEM, bad, turned=True), MoE(4, 2, 32, 24, add_bias=True)
    for name, held in (("w1", layer.c_fc.weight), ("w2", layer.c_proj.weight)):
        held.data.copy_(have[name])
    for name, held in (("b1", layer.c_fc.bias), ("b2", layer.c_proj.bias)):
        held.data.copy_(have[name])
    out, _ = layer(have["x"], use_fp8=fp8, adapters=adapters_of(have))
    out.backward(have["dout"])


FACES = {"node": (node, OF_NODE), "node, sorted": (node_sorted, OF_NODE), "PaddleFleet": (fleet, OF_FLEET)}  # fmt: skip
if not IS_PADDLE:
    FACES |= {"expert_mlp": (stacked, OF_STACKED), "MoE": (moe, OF_MOE)}


@pytest.mark.parametrize("fp8", [False, True], ids=["full", "fp8"])
@pytest.mark.parametrize(
    ("face", "operand"), [(face, name) for face, (_, names) in FACES.items() for name in names]
)
def test_the_operand_that_has_the_nan_is_named(face, operand, fp8):
    run, names = FACES[face]
    run("", fp8)  # sound without it
    assert names[operand] in str(found(lambda: run(operand, fp8)))
