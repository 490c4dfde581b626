"""One NaN in each operand of each face: detection names that operand, in the caller's words. Also under
Paddle.
"""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest
from engine.moe_golden import make_problem
from findings import found
from framework import IS_PADDLE, torch
from node.node_harness import Layer
from oracle.case import Case
from oracle.faces import normal, run
from oracle.golden import scene_of

from sonicmoe import SonicMoEConfig
from sonicmoe.diagnostics.step_dump import Caller
from sonicmoe.engine.low_rank import NAMES_OF_FACTORS


@pytest.fixture(autouse=True)
def few_objects():
    """Names are looked for among all objects of the process, and those of imports were most of the time."""
    gc.collect()
    gc.freeze()


FACTORS = {name: f"computed from parameters that are not finite: adapters.{name}" for name in NAMES_OF_FACTORS}  # fmt: skip


def called(x="", dout="", probs="", **parameters):
    """Operands of a face, and the words with which a finding in each begins: the face's own name for it,
    where it has one.
    """
    words = {name: f"input {name} = {own} at expert 1" for name, own in parameters.items()}
    for name, own in (("x", x), ("dout", dout)):
        words[name] = f"input {name}{' = ' if own else ''}{own} at token"
    return words | ({"probs": f"input probs = {probs} at"} if probs else {})


BIASES = {"b1": "b1", "b2": "b2"}
OF_NODE = called(probs="dispatched_probs", w1="weight1", w2="weight2", **BIASES) | FACTORS
OF_STACKED = called(probs="probs", w1="w1", w2="w2", **BIASES) | FACTORS
OF_MOE = FACTORS | called(  # which computes probabilities by itself
    "hidden_states", "the gradient of output", w1="c_fc.weight", w2="c_proj.weight", b1="c_fc.bias", b2="c_proj.bias"
)  # fmt: skip
OF_TRANSFORMERS = called(
    "hidden_states", "", "top_k_weights", w1="gate_up_proj", w2="down_proj", b1="gate_up_proj_bias",
    b2="down_proj_bias",
)  # fmt: skip
OF_FLEET = called("hidden_states", "", "topk_scores", w1="w1", w2="w2")


def with_a_nan(scene, name):
    """One element of an operand: of the second expert, or of a token of it."""
    token, slot = map(int, np.argwhere(scene.indices == 1)[0])
    field = {"w1": "up_gate", "w2": "down"}.get(name, name)
    if "." in field:
        projection, factor = field.split(".")
        pair = [np.array(held) for held in scene.pairs[projection]]
        pair["ab".index(factor)][1].flat[3] = np.nan
        return replace(scene, pairs=scene.pairs | {projection: tuple(pair)})
    array = np.array(getattr(scene, field))
    place = (token, slot if field == "probs" else 3) if field in ("x", "probs", "dout") else (1,)
    array[place[:1]].flat[place[1] if len(place) > 1 else 3] = np.nan
    return replace(scene, **{field: array})


MORE = "bias=True adapters=both sizes=37x32x24x4x2"
FACES = {
    "node": (f"arrangement=fused {MORE}", OF_NODE),
    "node, sorted": (f"face=sorted arrangement=fused {MORE}", OF_NODE),
    "PaddleFleet": ("face=fleet arrangement=fused dtype=bfloat16 sizes=37x32x24x4x2", OF_FLEET),
    "PaddleFleet, native": (
        "face=fleet arrangement=native dtype=bfloat16 sizes=37x32x24x4x2",
        OF_FLEET,
    ),
}
if not IS_PADDLE:
    FACES |= {
        "expert_mlp": (f"face=stacked arrangement=concat {MORE}", OF_STACKED),
        "MoE": (f"face=moe arrangement=native {MORE}", OF_MOE),
        "transformers": (f"face=transformers arrangement=concat {MORE}", OF_TRANSFORMERS),
    }


# In turns from operand to operand and from face to face.
RECIPES = ("none", "dx256")


@pytest.mark.parametrize(
    ("face", "operand", "recipe"),
    [
        (face, name, RECIPES[(row + column) % 2])
        for row, (face, (_, names)) in enumerate(FACES.items())
        for column, name in enumerate(names)
    ],
)
def test_the_operand_that_has_the_nan_is_named(face, operand, recipe):
    line, names = FACES[face]
    case = normal(Case.parse(f"{line} recipe={recipe}"))
    scene = scene_of(case)
    run(case, scene)  # sound without it
    assert names[operand] in str(found(lambda: run(case, with_a_nan(scene, operand))))


# In the names of the modules that hold a node's weights

if IS_PADDLE:
    import paddle

    Module, ModuleList = paddle.nn.Layer, paddle.nn.LayerList
else:
    Module, ModuleList = torch.nn.Module, torch.nn.ModuleList

PROBLEM = make_problem(empty=())
I = PROBLEM.intermediate


class Projection(Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight


class Expert(Module):
    def __init__(self, up, down):
        super().__init__()
        self.up_gate_proj, self.down_proj = Projection(up), Projection(down)


class Block(Module):
    """One layer of a model, which has the weights of a node in one of the arrangements."""

    def __init__(self, arrangement, mode, **changes):
        super().__init__()
        config = SonicMoEConfig(fp8_mode=mode)
        self.layer = Layer(PROBLEM.but(**changes), arrangement=arrangement, config=config)
        if arrangement == "per_expert":
            half = len(self.layer.weights) // 2
            pairs = zip(self.layer.weights[:half], self.layer.weights[half:], strict=True)
            self.experts = ModuleList([Expert(*pair) for pair in pairs])
        else:
            self.weight1, self.weight2 = self.layer.weights


# Up 3 is row 7 of native weights, which have gate and up in turns.
BROKEN = [
    ("perf", "per_expert", "up_gate", (2, 7, I + 3), "experts.2.up_gate_proj.weight at expert 2, row 7, column 7"),
    ("off", "per_expert", "down", (2, 7, 3), "experts.2.down_proj.weight at expert 2, row 3, column 7"),
    ("off", "fused", "up_gate", (2, 7, 3), "weight1 at expert 2, row 6, column 7"),
    ("perf", "native", "down", (2, 3, 7), "weight2 at expert 2, row 7, column 3"),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "arrangement", "which", "place", "named"), BROKEN)
def test_a_weight_is_named_as_the_model_has_it(mode, arrangement, which, place, named):
    stage = {"up_gate": "w1", "down": "w2"}[which]
    array = np.array(getattr(PROBLEM, which))
    array[place] = np.nan
    model = Module()
    model.layers = ModuleList(
        [Block(arrangement, mode), Block(arrangement, mode, **{which: array})]
    )
    model.layers[0].layer.step()
    error = found(model.layers[1].layer.step)
    text = f"first bad: input {stage} = layers.1.{named}: nan; 1 NaN"
    assert str(error).splitlines()[1].startswith(text)
    layer = "layers.1" + (".experts" if arrangement == "per_expert" else "")
    assert error.report.layer == layer and f"output of {layer} is not finite" in str(error)


CALLER = Caller(
    {
        "x": ("hidden_states",), "out": ("output",), "w1": ("gate_up_proj",),
        "w2": tuple(f"e{n}" for n in range(4)),
    },
    "model.layer",
)  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "expert", "wanted"),
    [
        ("x_fp8", None, "hidden_states"),
        ("dx", None, "the gradient of hidden_states"),
        ("dout", None, "the gradient of output"),
        ("w1", 3, "gate_up_proj"),
        ("dw1", None, "the gradient of gate_up_proj"),
        ("w2_fp8", 3, "e3"),
        ("dw2", 0, "the gradient of e0"),
        ("w2", None, None),
        ("b2", 3, None),
        ("z", 3, None),
    ],
)
def test_a_stage_has_the_name_of_the_tensor_that_it_shows(stage, expert, wanted):
    assert CALLER.called(stage, expert) == wanted
