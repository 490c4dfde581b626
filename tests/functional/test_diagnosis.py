"""Diagnosis of `MoE` and of the functional API: one NaN anywhere is found, and named as the caller
knows it.
"""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
from findings import captured_calls, fault_of, found, measured, said_by, spoil
from framework import torch
from functional.layer_golden import make_layer, make_tokens
from functional.sharded_models import TopK
from numerics_cases import load_case
from pairwise import pairwise
from torch import nn

from sonicmoe import moe_general_routing_inputs, moe_TC_softmax_topk_layer
from sonicmoe.diagnostics.bisect import bisect
from sonicmoe.diagnostics.capture import dump
from sonicmoe.diagnostics.step_dump import load_dump, save_dump
from sonicmoe.enums import ActivationType
from sonicmoe.observe import listening

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
E, K, H, I = 5, 2, 32, 24
QUANTISED = {"use_fp8": True}
FP8 = pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "step.npz"


class Model(nn.Module):
    """Three layers, of which the middle one is broken."""

    def __init__(self, bias: bool = False, activation=ActivationType.SWIGLU) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            make_layer(activation, bias=bias, seed=seed) for seed in range(3)
        )

    def forward(self, x, **options):
        for layer in self.layers:
            x = x + layer(x, **options)[0]
        return x


@pytest.fixture(scope="module")
def compiled():
    """A sound model, and a step of it in a graph that was compiled before anybody observed."""
    torch._dynamo.reset()
    model = Model(bias=True)
    graph = torch.compile(model, backend="aot_eager", fullgraph=True)
    graph(make_tokens(4, 10, H).requires_grad_(), **QUANTISED).sum().backward()
    yield model, lambda x: graph(x, **QUANTISED)
    torch._dynamo.reset()


WEIGHTS = [
    ("c_fc.weight", (3, 7, 4), "w1", "row 7, column 4"),
    ("c_proj.weight", (3, 7, 4), "w2", "row 7, column 4"),
    ("c_fc.bias", (3, 11), "b1", "row 11"),
    ("c_proj.bias", (3, 11), "b2", "column 11"),
]


class TestMoE:
    @FP8
    def test_tokens_and_gradients(self, fp8):
        moe, x = make_layer(), make_tokens(4, 10, H)
        error = found(lambda: moe(spoil(x.clone(), 2, 3, 5), use_fp8=fp8))
        assert "input x = hidden_states at token 23, column 5" in fault_of(error)
        assert "it came from before the experts: look for the first module" in str(error)
        x.requires_grad_()
        dout = spoil(torch.ones_like(x), 1, 9, 7)
        error = found(lambda: moe(x, use_fp8=fp8)[0].backward(dout))
        assert "input dout = the gradient of output at token 19, column 7" in fault_of(error)
        assert str(error).startswith("the gradient of hidden_states is not finite")
        assert "from the side of the loss: torch.autograd.detect_anomaly()" in str(error)

    def test_the_router(self):
        """Its weight is no input of the experts: probabilities are the first that they see."""
        moe = make_layer()
        spoil(moe.router.weight, 1, 3)
        error = found(lambda: moe(make_tokens(30, H)))
        words = "input probs = the softmax of hidden_states @ router.weight.T at expert"
        assert words in fault_of(error)


@pytest.mark.parametrize(
    ("activation", "fp8", "bias"),
    pairwise(["swiglu", "geglu", "swiglu_oai", "relu_sq"], [False, True], [False, True]),
)
def test_captured_calls_run_again(fp8, bias, activation, path):
    """Captured, saved, bisected and measured through the commands."""
    model = Model(bias, ActivationType(activation))
    with captured_calls("call") as cases:
        model(make_tokens(4, 10, H).requires_grad_(), use_fp8=fp8).sum().backward()
    # Backward visits the last layer first.
    assert [case.name for case in cases] == [f"call-{n} layers.{2 - n}" for n in range(3)]
    for layer, case in zip(reversed(model.layers), cases, strict=True):
        wanted = layer.c_fc.weight.detach().to(torch.bfloat16).float().numpy()
        np.testing.assert_array_equal(case.w1, wanted)
        assert (case.b1 is not None) == bias and case.settings.activation == activation
    save_dump(path, cases[1])
    back = load_case(path)
    assert back.caller == cases[1].caller and back.settings == cases[1].settings
    assert (back.b1 is not None) == bias
    assert json.loads(said_by("bisect", path, "--json"))["layer"] == "layers.1"
    assert measured(path) == "call-1 layers.1"


class TestCompiled:
    def test_it_is_captured_and_dumped(self, compiled, path):
        """The same copies as of the eager model."""
        model, graph = compiled
        x = make_tokens(4, 10, H).requires_grad_()
        model.layers[1].dump(path)
        with captured_calls("call") as cases:
            graph(x).sum().backward()
        with captured_calls("call") as eager:
            model(x, **QUANTISED).sum().backward()
        for case, wanted in zip(cases, eager, strict=True):
            assert case.name == wanted.name and case.settings == wanted.settings
            for name in ("indices", "w1", "w2", "b1", "b2"):
                np.testing.assert_array_equal(getattr(case, name), getattr(wanted, name))
            np.testing.assert_allclose(case.dout, wanted.dout, rtol=0.01, atol=1e-3)
        step = load_dump(path)
        np.testing.assert_array_equal(step.indices, cases[1].indices)
        of_layer = dict(model.layers[1].named_parameters())
        for name, _, stage, _ in WEIGHTS:
            np.testing.assert_array_equal(getattr(step, stage), of_layer[name].detach().numpy())
        assert step.dout is not None and step.caller.layer == "layers.1"
        report = bisect(step, "reference")
        assert report.healthy and report.missing == ()
        measured(path)


@pytest.mark.parametrize("in_a_graph", [False, True])
@pytest.mark.parametrize(("name", "index", "stage", "place"), WEIGHTS)
def test_a_weight_is_named_as_the_model_names_it(name, index, stage, place, in_a_graph, compiled):
    """Of the middle layer."""
    model, graph = compiled
    run = graph if in_a_graph else partial(model, use_fp8=False)
    sound = {name: value.clone() for name, value in model.state_dict().items()}
    spoil(model.layers[1].get_parameter(name), *index)
    try:
        error = found(lambda: run(make_tokens(4, 10, H).requires_grad_()))
    finally:
        model.load_state_dict(sound)
    text = f"first bad: input {stage} = layers.1.{name} at expert 3, {place}: nan;"
    assert fault_of(error).startswith(text)
    assert "output of layers.1 is not finite" in str(error)
    assert error.report.layer == "layers.1"
    assert error.report.to_json()["fault"]["caller"] == f"layers.1.{name}"


def weights(seed=0, bias=True):
    """Upstream's arguments: w1 `[N1, H, E]`, w2 `[H, I, E]`."""
    make = torch.Generator().manual_seed(seed)
    w1, w2 = (torch.randn(*shape, generator=make) * 0.2 for shape in ((2 * I, H, E), (H, I, E)))
    b1, b2 = (torch.randn(*shape, generator=make) for shape in ((E, 2 * I), (E, H)))
    return w1, b1 if bias else None, w2, b2 if bias else None


def topk(x, tensors, router=None, **options):
    if router is None:
        router = torch.randn(E, H, generator=torch.Generator().manual_seed(9))
    return moe_TC_softmax_topk_layer(x, router, *tensors, K, **options)[0]


def triples(x, tensors, **options):
    tokens = torch.arange(2 * len(x)) // 2
    scores = torch.full((2 * len(x),), 0.5)
    experts = (tokens + torch.arange(2 * len(x)) % 2) % E
    return moe_general_routing_inputs(x, scores, tokens, experts, *tensors, **options)[0]


CALLS, HALVES = [topk, triples], [False, True]
ARGUMENTS = [
    ("w1", (7, 3, 2), {False: "row 7, column 3", True: "row 14, column 3"}),
    ("b1", (2, 9), {False: "row 9", True: "row 18"}),
    ("w2", (7, 3, 2), dict.fromkeys(HALVES, "row 7, column 3")),
    ("b2", (2, 9), dict.fromkeys(HALVES, "column 9")),
]


@pytest.mark.parametrize(
    ("argument", "call", "halves", "fp8"), pairwise(ARGUMENTS, CALLS, HALVES, [False, True])
)
def test_an_argument_is_named(argument, call, halves, fp8):
    """Row 7 of a gate half is row 14 where gate and up lie in turns."""
    name, index, places = argument
    tensors = dict(zip(("w1", "b1", "w2", "b2"), weights(), strict=True))
    spoil(tensors[name], *index)
    options = {"concat_layout": halves, "use_fp8": fp8}
    error = found(lambda: call(make_tokens(30, H), tensors.values(), **options))
    text = f"first bad: input {name} = {name} at expert 2, {places[halves]}: nan"
    assert fault_of(error).startswith(text)


def test_a_parameter_of_a_module_that_calls_a_function_is_named():
    model = nn.Sequential(*(TopK(make_layer()) for _ in range(2)))
    for name, stage in (("1.fused", "w1"), ("0.down", "w2")):
        spoil(model.get_parameter(name), 4, 7, 3)
        text = fault_of(found(lambda: model(make_tokens(30, H))))
        assert text.startswith(
            f"first bad: input {stage} = {name} at expert 4, row 7, column 3: nan"
        )


@FP8
@pytest.mark.parametrize("call", CALLS)
def test_a_dump_follows_the_parameter(call, fp8, path):
    w1, b1, w2, b2 = weights()
    w1.requires_grad_()
    dump(w1, path)
    call(make_tokens(30, H), weights(1)).sum()
    assert not path.exists()
    call(make_tokens(30, H), (w1, b1, w2, b2), concat_layout=True, use_fp8=fp8).sum().backward()
    step = load_dump(path)
    assert step.dout is not None
    halves = w1.detach().permute(2, 0, 1).numpy()
    np.testing.assert_array_equal(step.w1[:, 0::2], halves[:, :I])
    np.testing.assert_array_equal(step.w1[:, 1::2], halves[:, I:])
    assert bisect(step, "reference").healthy


@FP8
def test_a_score_of_general_routing_is_named_by_expert_token_and_slot(fp8):
    """Tokens have 0 to 3 triples here, some of experts that are not here."""
    tokens = torch.tensor([0, 0, 0, 2, 2, 3, 3, 3, 5])
    experts = torch.tensor([0, -1, 2, 1, 2, E, 3, 0, 4])

    def run(scores):
        x, arguments = make_tokens(6, H), (scores, tokens, experts, *weights())
        return moe_general_routing_inputs(x, *arguments, use_fp8=fp8)[0]

    for number in (2, 4, 6, 8):
        error = found(lambda number=number: run(spoil(torch.ones(9), number)))
        slot = int((tokens[:number] == tokens[number]).sum())
        text = f"first bad: input probs = router_scores at expert {experts[number]}, row"
        assert fault_of(error).startswith(text), fault_of(error)
        assert f"token {tokens[number]}, slot {slot}: nan" in fault_of(error)


def test_a_weight_gradient_is_named_by_the_callers_weight(path):
    w1, _, w2, _ = weights(bias=False)
    dump(w1.requires_grad_(), path)
    topk(make_tokens(30, H), (w1, None, w2, None), concat_layout=True).sum().backward()

    def plant(name, value):
        return spoil(value.clone(), 2, 15, 3) if name == "dw1" else value

    with listening(plant):
        fault = bisect(load_dump(path), "reference").fault
    where = "the gradient of w1 at expert 2, row 15, column 3: nan"
    assert str(fault).startswith(f"first bad: stage dw1 = {where}")
