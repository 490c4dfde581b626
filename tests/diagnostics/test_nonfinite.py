"""`detect_nonfinite` and dumps of a node's step that fail, in a training loop; nothing is left behind outside
the block. Also under Paddle.
"""

import errno
import logging

import numpy as np
import pytest
from findings import found
from framework import IS_PADDLE, numpy, parameter, tensor, torch
from weights.weight_sources import Expert

from sonicmoe import SonicMoEConfig, observe
from sonicmoe.diagnostics import capture
from sonicmoe.diagnostics.bisect import bisect
from sonicmoe.diagnostics.nonfinite import detect_nonfinite
from sonicmoe.diagnostics.step_dump import DumpError, load_dump
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.engine.select import EngineChoice
from sonicmoe.ernie_compat import SonicMoEMlpNode

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
T, H, I, E, K = 40, 128, 128, 4, 2


def make_experts():
    rng = np.random.default_rng(0)

    def weight(rows, columns):
        made = parameter(rng.standard_normal((rows, columns)) * rows**-0.5, torch.bfloat16)
        made.main_grad = None
        return made

    return [Expert(weight(H, 2 * I), weight(I, H)) for _ in range(E)]


def make_node(mode="perf", experts=None, **options):
    experts = make_experts() if experts is None else experts
    return SonicMoEMlpNode(experts, E, H, I, config=SonicMoEConfig(fp8_mode=mode), **options)


def in_bf16(values):
    return tensor(values, torch.float32).to(torch.bfloat16)


def batch(seed=1):
    rng = np.random.default_rng(seed)
    indices = np.argsort(rng.random((T, E)), axis=1)[:, :K].astype(np.int64)
    indices[::4, 1] = -1
    x, dout = (in_bf16(rng.standard_normal((T, H))) for _ in range(2))
    probs = tensor(rng.random((T, K)).astype(np.float32), grad=True)
    if IS_PADDLE:
        x.stop_gradient = False
    else:
        x.requires_grad_()
    return x, tensor(indices), probs, dout


def train_step(node, dout=None, **changes):
    x, indices, probs, given = batch()
    x, probs = changes.get("x", x), changes.get("probs", probs)
    out = node(x, None, indices, probs)
    (out * (given if dout is None else dout)).sum().backward()
    return x, indices, probs, given


def test_a_bad_token_is_named_in_forward(tmp_path):
    values = numpy(batch()[0])
    values[17, 5] = np.inf

    def step():
        train_step(make_node(), x=in_bf16(values))

    error = found(step, "first bad: input x at token 17, column 5", dump_dir=tmp_path)
    assert error.report.fault.kind == "inf" and error.dump == tmp_path / "nonfinite-call-1.npz"
    assert f"inputs written to {error.dump}: sonicmoe bisect {error.dump}" in str(error)
    report = bisect(load_dump(error.dump), "reference")
    assert str(report.fault) == str(error.report.fault)
    before = error.dump.read_bytes()
    again = found(step, dump_dir=tmp_path)
    assert again.dump == tmp_path / "nonfinite-call-1-2.npz", "the first one stays"
    assert error.dump.read_bytes() == before


@pytest.mark.parametrize(("mode", "bad"), [("perf", np.nan), ("off", np.inf)])
def test_a_bad_weight_of_an_expert_without_tokens_is_named(mode, bad):
    experts = make_experts()
    values = numpy(experts[2].down_proj.weight)
    values[7, 3] = bad
    experts[2].down_proj.weight = parameter(values, torch.bfloat16)
    experts[2].down_proj.weight.main_grad = None
    node = make_node(mode, experts)
    x, indices, probs, _ = batch()
    ids = numpy(indices)
    ids[ids == 2] = -1
    text = str(found(lambda: node(x, None, tensor(ids), probs), "first bad: input w2 = "))
    assert (
        "experts[2].down_proj.weight at expert 2, row 3, column 7" in text
        and "older than the weights" not in text
    )


@pytest.fixture
def engine(monkeypatch):
    """Has every node choose this engine."""

    def choose(it):
        choice = EngineChoice(it, "test")
        monkeypatch.setattr("sonicmoe.layer.plan.ready_engine", lambda *_: choice)

    return choose


class SpoiledEngine(ReferenceEngine):
    """The reference engine with NaN in one weight gradient; what a bisection runs again is sound."""

    def backward_dw(self, pending, targets):
        super().backward_dw(pending, targets)
        sums = targets.sums("dw1")
        sums[2, 3, 4] = float("nan")
        targets.replace("dw1", sums)


@pytest.mark.parametrize("flush", ["auto", "step", "backward"])
def test_a_bad_weight_gradient_is_found_wherever_it_went(flush, engine):
    engine(SpoiledEngine())
    assert found(lambda: train_step(make_node(flush=flush)), "did not repeat").report.healthy


def test_a_path_that_cannot_be_written_is_refused_before_the_step(tmp_path):
    node, taken = make_node(), tmp_path / "file"
    taken.touch()
    for path in (taken / "step.npz", tmp_path):
        with pytest.raises(DumpError, match="cannot write a step to"):
            node.dump(path)
    assert observe._observers == ()
    node.dump(tmp_path / "made" / "step.npz")
    train_step(node)
    assert load_dump(tmp_path / "made" / "step.npz").dout is not None


def test_a_write_that_fails_during_the_step_does_not_break_it(tmp_path, monkeypatch, caplog):
    def save_dump(path, step):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(capture, "save_dump", save_dump)
    node = make_node()
    node.dump(tmp_path / "step.npz")
    with caplog.at_level(logging.WARNING, logger="sonicmoe"):
        x, *_ = train_step(node)
        train_step(node)
    assert x.grad is not None and observe._observers == ()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "sonicmoe"]
    assert "step.npz" in line and "No space left on device" in line


def test_a_block_without_a_node_call_says_that_it_checked_nothing(caplog):
    def warnings():
        said = [record.getMessage() for record in caplog.records]
        return [line for line in said if "detect_nonfinite" in line]

    with caplog.at_level(logging.WARNING, logger="sonicmoe"):
        node = make_node()
        with detect_nonfinite():
            x, indices, probs, dout = batch()
            out = node(x, None, indices, probs)
        with detect_nonfinite():
            (out * dout).sum().backward()
        with pytest.raises(ZeroDivisionError), detect_nonfinite():
            _ = 1 // 0
        assert warnings() == []
        with detect_nonfinite():
            pass
    (line,) = warnings()
    assert "SonicMoEMlpNode, MoE, the functional API" in line
