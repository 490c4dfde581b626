"""The processes that tests start: what they leave out of their imports."""

from __future__ import annotations

import processes
import pytest
from worlds import ROOT, environment

OPTIMIZER = """
import sys, torch
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.AdamW([weight])
weight.grad = torch.ones(3)
optimizer.step()
optimizer.zero_grad()
print("torch._dynamo.utils" in sys.modules)
print(torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(1)).item())
print("torch._dynamo.utils" in sys.modules, torch._dynamo.graph_break.__module__)
optimizer.zero_grad()
function = torch.optim.Optimizer.zero_grad.__wrapped__
print(getattr(function, "__dynamo_disable") is function)
"""
PADDLE = "import paddle, sys; print('torch' in sys.modules); import torch; print(torch.__name__)"


def printed(program: str) -> str:
    done = processes.run(["-c", program], environment(), ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_optimizer_imports_no_compiler_until_something_is_compiled() -> None:
    assert printed(OPTIMIZER) == "False\n2.0\nTrue torch._dynamo.decorators\nFalse\n"


@pytest.mark.paddle
def test_paddle_imports_no_pytorch_and_leaves_it_to_be_imported() -> None:
    assert printed(PADDLE) == "False\ntorch\n"
