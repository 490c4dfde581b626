"""What an ERNIE training loop brings to the node: expert layers, dispatched batches, and a golden
in plain Paddle autograd.

Importing this module skips the importing test module where the Paddle suites cannot run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from paddle_face import SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)

import paddle
from framework import numpy, relative_rmse, tensor
from paddle.nn import functional as F

from sonicmoe import SonicMoEConfig
from sonicmoe.ernie_compat import SonicMoEMlpNode

FP8 = SonicMoEConfig(fp8_mode="perf")
PRECISE = SonicMoEConfig()
DEEPEP = Path(__file__).parents[1] / "data" / "deepep"
PRECISE_BOUND = 2e-5


class Projection(paddle.nn.Layer):
    """A bias-free linear layer as ERNIE has them: `weight [in, out]`."""

    def __init__(self, values, dtype):
        super().__init__()
        constant = paddle.nn.initializer.Constant(0.0)
        self.weight = self.create_parameter(
            list(values.shape), dtype=dtype, default_initializer=constant
        )
        self.weight.set_value(paddle.to_tensor(values).astype(dtype))


class Expert(paddle.nn.Layer):
    """`up_gate_proj.weight [H, 2I]` (gate first) and `down_proj.weight [I, H]`; the node does the
    arithmetic.
    """

    def __init__(self, hidden, intermediate, rng, dtype="float32"):
        super().__init__()
        self.up_gate_proj = Projection(
            (rng.standard_normal((hidden, 2 * intermediate)) * hidden**-0.5).astype("float32"),
            dtype,
        )
        self.down_proj = Projection(
            (rng.standard_normal((intermediate, hidden)) * intermediate**-0.5).astype("float32"),
            dtype,
        )


def make_experts(n=3, hidden=32, intermediate=24, dtype="float32", seed=0):
    """`n` experts with reproducible weights."""
    rng = np.random.default_rng(seed)
    return [Expert(hidden, intermediate, rng, dtype) for _ in range(n)]


def weights_of(experts):
    """Every up_gate weight, then every down weight: the order of the node's parameters."""
    local = [expert for expert in experts if expert is not None]
    return [e.up_gate_proj.weight for e in local] + [e.down_proj.weight for e in local]


def make_node(experts, config=PRECISE, flush="step"):
    """A node with its sizes read from the experts."""
    weights = weights_of(experts)
    hidden, intermediate = weights[0].shape[0], weights[-1].shape[0]
    return SonicMoEMlpNode(
        experts, len(weights) // 2, hidden, intermediate, config=config, flush=flush
    )


@dataclass
class Batch:
    """One dispatched micro-batch in numpy: x `[T, H]`, indices `[T, K]`, probs `[T, K]`, the
    gradient of out, counts.
    """

    x: np.ndarray
    indices: np.ndarray
    probs: np.ndarray
    dout: np.ndarray
    counts: list[int]


def make_batch(tokens=40, hidden=32, experts=3, topk=2, seed=1, here=0.7, only=None):
    """Distinct ids per row, about `here` of the slots local, probabilities 0 elsewhere (as legacy
    DeepEP delivers them).

    only: experts that may be chosen; the others stay empty.
    """
    rng = np.random.default_rng(seed)
    local = np.array(range(experts) if only is None else only, dtype=np.int64)
    remote = experts + np.arange(max(topk, 4))
    chance = np.r_[
        np.full(len(local), here / max(len(local), 1)),
        np.full(len(remote), (1 - here) / len(remote)),
    ]
    world = np.r_[local, remote]
    rows = [rng.choice(world, topk, replace=False, p=chance / chance.sum()) for _ in range(tokens)]
    ids = np.array(rows, dtype=np.int64).reshape(tokens, topk)
    indices = np.where(ids < experts, ids, -1)
    probs = np.where(indices >= 0, rng.random((tokens, topk)) + 0.1, 0).astype(np.float32)
    counts = [int((indices == e).sum()) for e in range(experts)]
    return Batch(
        rng.standard_normal((tokens, hidden)).astype(np.float32),
        indices,
        probs,
        rng.standard_normal((tokens, hidden)).astype(np.float32),
        counts,
    )


@dataclass
class Result:
    """out, dx, dprobs of one micro-batch (fp64 numpy; None where no gradient arrived)."""

    out: np.ndarray
    dx: np.ndarray | None
    dprobs: np.ndarray | None


class Pending:
    """A forward that waits for its backward."""

    def __init__(
        self,
        node,
        batch,
        *,
        dtype="float32",
        index_dtype="int64",
        counts=True,
        x_grad=True,
        probs_grad=True,
        call=None,
    ):
        self.batch, self.dtype = batch, dtype
        self.x = tensor(batch.x).astype(dtype)
        self.x.stop_gradient = not x_grad
        self.probs = tensor(batch.probs)
        self.probs.stop_gradient = not probs_grad
        counts = batch.counts if counts is True else counts
        indices = tensor(batch.indices.astype(index_dtype))
        self.out = (call or node)(self.x, counts, indices, self.probs)

    def backward(self):
        """Run it with the batch's dout and collect."""
        self.out.backward(tensor(self.batch.dout).astype(self.out.dtype))
        return self.result()

    def result(self):
        """What has arrived by now."""
        return Result(
            numpy(self.out),
            *(None if t.grad is None else numpy(t.grad) for t in (self.x, self.probs)),
        )


def run(node, batch, **options):
    """Forward and backward of one micro-batch."""
    return Pending(node, batch, **options).backward()


@dataclass
class Golden:
    """Results per batch and the weight gradients summed over them, all fp64 numpy."""

    results: list[Result]
    dw: list[np.ndarray]


def golden(experts, batches, dtype="float32"):
    """fp32 Paddle autograd over plain operations; x rounded to `dtype` first. Rows without a valid
    slot get zeros whatever x holds.
    """
    copies = [tensor(numpy(w).astype("float32"), grad=True) for w in weights_of(experts)]
    ups, downs = copies[: len(copies) // 2], copies[len(copies) // 2 :]
    results = []
    for batch in batches:
        x = tensor(numpy(tensor(batch.x).astype(dtype)).astype("float32"), grad=True)
        probs = tensor(batch.probs, grad=True)
        out = plain_moe(x, tensor(batch.indices), probs, ups, downs)
        dout = numpy(tensor(batch.dout).astype(dtype)).astype("float32")
        if batch.x.shape[0]:
            out.backward(tensor(dout))
        results.append(Result(numpy(out), *(_gradient(t) for t in (x, probs))))
    return Golden(results, [_gradient(w) for w in copies])


def plain_moe(x, indices, probs, ups, downs):
    """Every expert on every token, weighted by the probability of the slot that chose it (0 where
    none did).
    """
    out = paddle.zeros_like(x)
    for expert, (up_gate, down) in enumerate(zip(ups, downs, strict=True)):
        gate, up = paddle.chunk(paddle.matmul(x, up_gate), 2, axis=-1)
        y = paddle.matmul(F.silu(gate) * up, down)
        weight = (paddle.where(indices == expert, probs, paddle.zeros_like(probs))).sum(
            -1, keepdim=True
        )
        out = out + weight * y
    return out


def _gradient(leaf):
    return np.zeros(tuple(leaf.shape)) if leaf.grad is None else numpy(leaf.grad)


def bind_main_grads(experts):
    """Private zero fp32 `main_grad`s; returns them in `weights_of` order."""
    for weight in weights_of(experts):
        weight.main_grad = paddle.zeros(weight.shape, dtype="float32")
    return [weight.main_grad for weight in weights_of(experts)]


def assert_close(actual, wanted, bound, name=""):
    """Relative RMSE below `bound`; exact zeros where the golden is all zero."""
    assert tuple(np.shape(actual)) == tuple(np.shape(wanted)), name
    error = relative_rmse(actual, wanted)
    assert error <= bound, f"{name}: relative RMSE {error:.3g} > {bound:.3g}"


def assert_weight_gradients(gradients, wanted, bound):
    """Every weight on its own: an expert may not hide in another's norm."""
    for position, (gradient, expected) in enumerate(zip(gradients, wanted, strict=True)):
        assert_close(
            numpy(gradient) if isinstance(gradient, paddle.Tensor) else gradient,
            expected,
            bound,
            f"weight {position}",
        )
