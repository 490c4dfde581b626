"""Diagnosis of `MoE` on GPU engines: eager and compiled calls are observed, names are the model's,
and a CUDA graph is captured as ever where nobody observes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sonicmoe import MoE
from sonicmoe.diagnostics.bisect import bisect
from sonicmoe.diagnostics.bisect_report import text_of
from sonicmoe.diagnostics.capture import captured_calls
from sonicmoe.diagnostics.nonfinite import NonFiniteError, detect_nonfinite
from sonicmoe.diagnostics.step_dump import load_dump

pytestmark = pytest.mark.gpu

MODES = pytest.mark.parametrize(
    ("use_fp8", "bias"),
    [(False, False), (False, True), (True, False)],
    ids=["bf16", "bf16, biases", "fp8"],
)


class Model(torch.nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            MoE(8, 2, 256, 128, add_bias=bias, std=0.1) for _ in range(2)
        )

    def forward(self, x, **options):
        for layer in self.layers:
            x = x + layer(x, **options)[0]
        return x


def model(bias: bool) -> Model:
    made = Model(bias).to("cuda", torch.bfloat16)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return made


def tokens() -> torch.Tensor:
    make = torch.Generator().manual_seed(1)
    return torch.randn(4, 100, 256, generator=make).to("cuda", torch.bfloat16).requires_grad_()


@MODES
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_weight_is_named_as_the_model_names_it(use_fp8, bias, compiled):
    torch._dynamo.reset()
    made = model(bias)
    with torch.no_grad():
        made.layers[1].c_fc.weight[5, 7, 3] = float("nan")
    run = torch.compile(made) if compiled else made
    with pytest.raises(NonFiniteError) as caught, detect_nonfinite():
        run(tokens(), use_fp8=use_fp8)
    line = str(caught.value).splitlines()[1]
    assert line.startswith("first bad: input w1 = layers.1.c_fc.weight[5, 7, 3] at expert 5: nan")


@MODES
def test_calls_are_captured_and_run_again(use_fp8, bias, tmp_path):
    made = model(bias)
    made.layers[1].dump(tmp_path / "step.npz")
    with detect_nonfinite(), captured_calls("call") as cases:
        made(tokens(), use_fp8=use_fp8).sum().backward()
    assert [case.name for case in cases] == ["call-0 layers.1", "call-1 layers.0"]
    step = load_dump(tmp_path / "step.npz")
    for array, weight in (
        (step.w1, made.layers[1].c_fc.weight),
        (step.b1, made.layers[1].c_fc.bias),
    ):
        if weight is not None:
            np.testing.assert_array_equal(array, weight.detach().float().cpu().numpy())
    report = bisect(step, step.settings.engine, "golden", "cuda:0")
    assert report.healthy, text_of(report)


@MODES
def test_a_graph_is_captured_where_nobody_observes(use_fp8, bias):
    made, x = model(bias), tokens()
    with detect_nonfinite():
        made(x, use_fp8=use_fp8).sum().backward()
    x.grad = None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made(x, use_fp8=use_fp8).sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    wanted, x.grad = x.grad.clone(), None
    made.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made(x, use_fp8=use_fp8).sum().backward()
    graph.replay()
    torch.testing.assert_close(x.grad, wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))
