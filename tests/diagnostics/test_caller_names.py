"""A node's findings in the names, layouts and indices of the modules that hold its weights. Also
under Paddle.
"""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from framework import IS_PADDLE, parameter, tensor, torch
from weights.weight_sources import expert_modules

from sonicmoe import SonicMoEConfig
from sonicmoe.cli.main import main
from sonicmoe.diagnostics.callers import Caller, Located, Named
from sonicmoe.diagnostics.capture import captured_calls, dump
from sonicmoe.diagnostics.nonfinite import NonFiniteError, detect_nonfinite
from sonicmoe.diagnostics.step_dump import load_dump, save_dump
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.observe import GATED_EXPERTS, MOE, NODE

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


def train_step(node, x=None, dout=None, probs=None):
    rng = np.random.default_rng(1)
    drawn = rng.standard_normal((T, H)), rng.standard_normal((T, H)), rng.random((T, K))
    x, dout, probs = (
        (default if given is None else given).astype(np.float32)
        for given, default in zip((x, dout, probs), drawn, strict=True)
    )
    indices = np.argsort(rng.random((T, E)), axis=1)[:, :K].astype(np.int64)
    out = node(tensor(x, grad=True), None, tensor(indices), tensor(probs, grad=True))
    (out * tensor(dout)).sum().backward()
    node.step()


def found(run):
    with pytest.raises(NonFiniteError) as caught, detect_nonfinite():
        run()
    return caught.value


BROKEN = [
    ("per expert", 0, (2, 7, I + 3), "w1", "experts.2.up_gate_proj.weight[7, 19]"),
    ("per expert", 0, (2, 7, 3), "w1", "experts.2.up_gate_proj.weight[7, 3]"),
    ("per expert", 1, (2, 7, 3), "w2", "experts.2.down_proj.weight[7, 3]"),
    ("fused", 0, (2, 7, I + 3), "w1", "weight1[2, 7, 19]"),
    ("fused", 1, (2, 7, 3), "w2", "weight2[2, 7, 3]"),
    ("native", 0, (2, 7, 3), "w1", "weight1[2, 7, 3]"),
    ("native", 1, (2, 7, 3), "w2", "weight2[2, 7, 3]"),
]


@MODES
@pytest.mark.parametrize(("arrangement", "which", "index", "stage", "named"), BROKEN)
def test_a_weight_is_named_as_the_model_has_it(arrangement, which, index, stage, named, mode):
    whole = model(Block(arrangement, mode), Block(arrangement, mode, (which, index)))
    train_step(whole.layers[0].node)
    error = found(lambda: train_step(whole.layers[1].node))
    text = f"first bad: input {stage} = layers.1.{named} at expert 2: nan; 1 NaN"
    assert str(error).splitlines()[1].startswith(text)
    layer = "layers.1" + (".experts" if arrangement == "per expert" else "")
    assert error.report.layer == layer and f"output of {layer} is not finite" in str(error)


@pytest.mark.parametrize(
    ("arrangement", "named"),
    [("per expert", "experts[2].down_proj.weight[7, 3]"), ("fused", "weight2[2, 7, 3]")],
)
def test_weights_of_no_module_have_the_names_of_the_arguments(arrangement, named):
    up, down = arrays(arrangement, (1, (2, 7, 3)))
    if arrangement == "fused":
        node = SonicMoEMlpNode.from_fused(parameter(up), parameter(down))
    else:
        node = SonicMoEMlpNode(expert_modules(up, down), E, H, I)
    text = str(found(lambda: train_step(node)))
    assert f"first bad: input w2 = {named} at expert 2: nan" in text
    assert text.startswith("output is not finite (engine reference")


@MODES
def test_tokens_probabilities_and_gradients(mode):
    node = Block("fused", mode).node
    bad, probs = np.ones((T, H), dtype=np.float32), np.ones((T, K), dtype=np.float32)
    bad[17, 5] = probs[17, 1] = np.nan
    for given, words in (
        ({"x": bad}, "x at token 17, column 5"),
        ({"dout": bad}, "dout at token 17, column 5"),
        ({"probs": probs}, "probs = dispatched_probs[17, 1] at expert"),
    ):
        error = found(lambda given=given: train_step(node, **given))
        assert f"first bad: input {words}" in str(error)


@MODES
@pytest.mark.parametrize("arrangement", ["per expert", "fused", "native"])
def test_dumped_captured_bisected_measured(arrangement, mode, tmp_path):
    whole = model(Block(arrangement, mode), Block(arrangement, mode))
    node = whole.layers[1].node
    layer = "layers.1" + (".experts" if arrangement == "per expert" else "")
    dump(node, tmp_path / "step.npz")
    with captured_calls("call") as cases:
        train_step(node)
    (case,) = cases
    assert case.name == f"call-0 {layer}"
    save_dump(tmp_path / "case.npz", case)
    assert load_dump(tmp_path / "step.npz").caller == case.caller
    for file in ("step.npz", "case.npz"):
        path = str(tmp_path / file)
        report = said(["bisect", path])
        assert report["layer"] == layer and "flush" in report["stages"]
        own = ["--recipe", "iso128", "--scales", "fp32", "--z", "int8"]
        (entry,) = said(["numerics", "--captured", path, *own])["results"]
        assert all(tensor["rmse"] < 0.12 for tensor in entry["tensors"].values())


def said(words):
    """The JSON object that a command prints."""
    framework = ["--framework", "paddle" if IS_PADDLE else "torch"]
    result = CliRunner().invoke(main, [*words, "--json", *framework])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


class TestLocate:
    """From an element of a stage to the caller's own index."""

    caller = Caller(
        GATED_EXPERTS,
        {
            "x": Named(("hidden_states",), "TH"),
            "out": Named(("output",), "TH"),
            "probs": Named(("top_k_weights",), "TK"),
            "w1": Named(("gate_up_proj",), "EHN"),
            "w2": Named(tuple(f"e{n}" for n in range(4)), "IH"),
            "b1": Named(("bias",), "EN"),
        },
        split_half=True,
        lead=(2, 3, 5),
    )

    @pytest.mark.parametrize(
        ("stage", "index", "wanted"),
        [
            ("x", (29, 7), Located("hidden_states", (1, 2, 4, 7))),
            ("x", (0, 7), Located("hidden_states", (0, 0, 0, 7))),
            ("dx", (16, 7), Located("the gradient of hidden_states", (1, 0, 1, 7))),
            ("dout", (5, 0), Located("the gradient of output", (0, 1, 0, 0))),
            ("probs", (3, 1), Located("top_k_weights", (0, 0, 3, 1))),
            ("w1", (3, 14, 2), Located("gate_up_proj", (3, 2, 7))),
            ("w1_fp8", (3, 15, 2), Located("gate_up_proj", (3, 2, 23))),
            ("dw1", (0, 31, 0), Located("the gradient of gate_up_proj", (0, 0, 31))),
            ("w2", (3, 2, 9), Located("e3", (9, 2))),
            ("b1", (3, 15), Located("bias", (3, 23))),
            # [E, H, N1 + I], gate and up in halves, then down.
            ("flush", (3, 2, 7), Located("the gradient of gate_up_proj", (3, 2, 7))),
            ("flush", (3, 2, 23), Located("the gradient of gate_up_proj", (3, 2, 23))),
            ("flush", (3, 2, 32 + 9), Located("the gradient of e3", (9, 2))),
            ("b2", (3, 2), None),
            ("z", (130, 2), None),
        ],
    )
    def test_an_element(self, stage, index, wanted):
        assert self.caller.locate(stage, index, 32, gated=True) == wanted

    def test_without_a_gate_rows_are_rows(self):
        caller = Caller(MOE, {"w1": Named(("up",), "ENH")})
        assert caller.locate("w1", (1, 15, 2), 32, gated=False) == Located("up", (1, 15, 2))
        flushed = caller.locate("flush", (1, 2, 15), 32, gated=False)
        assert flushed == Located("the gradient of up", (1, 15, 2))

    def test_plain_data_comes_back(self):
        assert Caller.from_json(json.loads(json.dumps(self.caller.to_json()))) == self.caller
        assert self.caller.problem(30, 4) is None
        assert "lead" in self.caller.problem(29, 4) and "4 names" in self.caller.problem(30, 3)
        assert Caller(NODE).flushes and not self.caller.flushes
