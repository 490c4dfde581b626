"""A node's findings in the names of the modules that hold its weights. Also under Paddle."""

import numpy as np
import pytest
from findings import found
from framework import IS_PADDLE, parameter, tensor, torch

from sonicmoe import SonicMoEConfig
from sonicmoe.diagnostics.step_dump import Caller
from sonicmoe.ernie_compat import SonicMoEMlpNode

if IS_PADDLE:
    import paddle

    Module, ModuleList = paddle.nn.Layer, paddle.nn.LayerList
else:
    Module, ModuleList = torch.nn.Module, torch.nn.ModuleList

T, H, I, E, K = 40, 32, 16, 4, 2
MODES = pytest.mark.parametrize("mode", ["off", "perf"])


class Projection(Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight


class Expert(Module):
    def __init__(self, up, down):
        super().__init__()
        self.up_gate_proj, self.down_proj = Projection(up), Projection(down)


class Block(Module):
    """One layer of a model: a node over experts of its own, in one of the arrangements."""

    def __init__(self, arrangement, mode, broken=None):
        super().__init__()
        up, down = arrays(arrangement, broken)
        config = {"config": SonicMoEConfig(fp8_mode=mode)}
        if arrangement == "per expert":
            pairs = zip(map(parameter, up), map(parameter, down), strict=True)
            self.experts = ModuleList([Expert(*pair) for pair in pairs])
            self.node = SonicMoEMlpNode(list(self.experts), E, H, I, **config)
            return
        self.weight1, self.weight2 = parameter(up), parameter(down)
        make = getattr(SonicMoEMlpNode, f"from_{arrangement}")
        self.node = make(self.weight1, self.weight2, **config)


def arrays(arrangement, broken=None):
    """Weights of an arrangement, with a NaN in the array and at the index that `broken` says."""
    rng = np.random.default_rng(0)
    shapes = ((E, 2 * I, H), (E, H, I)) if arrangement == "native" else ((E, H, 2 * I), (E, I, H))
    found = [(rng.standard_normal(shape) * 0.2).astype(np.float32) for shape in shapes]
    if broken is not None:
        found[broken[0]][broken[1]] = np.nan
    return found


def model(*blocks):
    whole = Module()
    whole.layers = ModuleList(list(blocks))
    return whole


def train_step(node):
    rng = np.random.default_rng(1)
    x, dout = (rng.standard_normal((T, H)).astype(np.float32) for _ in range(2))
    probs = rng.random((T, K)).astype(np.float32)
    indices = np.argsort(rng.random((T, E)), axis=1)[:, :K].astype(np.int64)
    out = node(tensor(x, grad=True), None, tensor(indices), tensor(probs, grad=True))
    (out * tensor(dout)).sum().backward()
    node.step()


# Up 3 is row 7 of native weights, which have gate and up in turns.
BROKEN = [
    ("per expert", 0, (2, 7, I + 3), "w1", "experts.2.up_gate_proj.weight at expert 2, row 7, column 7"),
    ("per expert", 1, (2, 7, 3), "w2", "experts.2.down_proj.weight at expert 2, row 3, column 7"),
    ("fused", 0, (2, 7, 3), "w1", "weight1 at expert 2, row 6, column 7"),
    ("native", 1, (2, 7, 3), "w2", "weight2 at expert 2, row 7, column 3"),
]  # fmt: skip


@MODES
@pytest.mark.parametrize(("arrangement", "which", "index", "stage", "named"), BROKEN)
def test_a_weight_is_named_as_the_model_has_it(arrangement, which, index, stage, named, mode):
    whole = model(Block(arrangement, mode), Block(arrangement, mode, (which, index)))
    train_step(whole.layers[0].node)
    error = found(lambda: train_step(whole.layers[1].node))
    text = f"first bad: input {stage} = layers.1.{named}: nan; 1 NaN"
    assert str(error).splitlines()[1].startswith(text)
    layer = "layers.1" + (".experts" if arrangement == "per expert" else "")
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
