"""A node's findings in the names of the modules that hold its weights. Also under Paddle."""

import numpy as np
import pytest
from engine.moe_golden import make_problem
from findings import found
from framework import IS_PADDLE, torch
from node.node_harness import Layer

from sonicmoe import SonicMoEConfig
from sonicmoe.diagnostics.step_dump import Caller

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
    ("per_expert", "up_gate", (2, 7, I + 3), "w1", "experts.2.up_gate_proj.weight at expert 2, row 7, column 7"),
    ("per_expert", "down", (2, 7, 3), "w2", "experts.2.down_proj.weight at expert 2, row 3, column 7"),
    ("fused", "up_gate", (2, 7, 3), "w1", "weight1 at expert 2, row 6, column 7"),
    ("native", "down", (2, 3, 7), "w2", "weight2 at expert 2, row 7, column 3"),
]  # fmt: skip


@pytest.mark.parametrize("mode", ["off", "perf"])
@pytest.mark.parametrize(("arrangement", "which", "place", "stage", "named"), BROKEN)
def test_a_weight_is_named_as_the_model_has_it(arrangement, which, place, stage, named, mode):
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
