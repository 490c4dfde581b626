"""Weight gradients that autograd accumulates leave the GEMM as autograd takes them: the bits of fp32
accumulators that are rounded once, in every layout, over poisoned memory, without the accumulators'
memory.
"""

from __future__ import annotations

import pytest
import torch
from pairwise import pairwise

from sonicmoe import SonicMoEConfig
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.enums import ActivationType
from sonicmoe.functional.autograd import expert_mlp
from sonicmoe.layouts import WeightLayout

pytestmark = pytest.mark.gpu

E, H, I, K = 6, 272, 192, 2
FP8 = SonicMoEConfig(engine="hopper", fp8_mode="perf")
DTYPES = [torch.bfloat16, torch.float32]
LAYOUTS = [WeightLayout(t, s) for t in (False, True) for s in (False, True)]


@pytest.fixture
def both(monkeypatch):
    """A step's gradients: written, and through accumulators."""

    def run(step):
        poison = torch.full((1 << 26,), float("nan"), device="cuda")
        del poison  # fresh memory now begins as NaN
        written = step()
        with monkeypatch.context() as patch:
            patch.setattr(HopperEngine, "writes_gradients", lambda *_: False)
            return written, step()

    return run


def batch(tokens):
    generator = torch.Generator("cuda").manual_seed(tokens)
    scores = torch.rand(tokens, E, generator=generator, device="cuda")
    scores[:, 1] = -1.0  # an expert without tokens
    x, dout = torch.randn(2, tokens, H, generator=generator, device="cuda").to(torch.bfloat16)
    probs = torch.rand(tokens, K, generator=generator, device="cuda")
    return x, scores.topk(K, 1).indices, probs, dout


def weights(layout, dtype):
    generator = torch.Generator("cuda").manual_seed(1)
    for rows, columns in ((2 * I, H), (H, I)):
        shape = (E, columns, rows) if layout.transposed else (E, rows, columns)
        values = torch.randn(shape, generator=generator, device="cuda") * columns**-0.5
        yield torch.nn.Parameter(values.to(dtype))


def equal(written, accumulated):
    return all(
        one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        for one, other in zip(written, accumulated, strict=True)
    )


@pytest.mark.parametrize(
    ("layout", "tokens", "dtype"), pairwise(LAYOUTS, [300, 0, 1], DTYPES), ids=str
)
def test_functional(both, dtype, layout, tokens):
    x, ids, probs, dout = batch(tokens)

    def step():
        w1, w2 = weights(layout, dtype)
        with FP8.activate():
            for _ in range(2):  # autograd adds the second
                out = expert_mlp(
                    x, ids, probs, w1, w2, None, None, ActivationType.SWIGLU, layout=layout
                )
                out.backward(dout)
        return w1.grad, w2.grad

    written, accumulated = both(step)
    assert equal(written, accumulated)
    assert not written[0][1].any() and bool(written[0].any()) == (tokens > 0)
