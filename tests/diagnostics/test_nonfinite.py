"""`detect_nonfinite` and dumps of a node's step, in a training loop; nothing is left behind outside
the block. Also under Paddle.
"""

from __future__ import annotations

import errno
import logging
import types

import numpy as np
import pytest
from framework import IS_PADDLE, numpy, parameter, tensor, torch
from planted import plant

from sonicmoe import SonicMoEConfig, observe
from sonicmoe.diagnostics import step_capture
from sonicmoe.diagnostics.bisect import bisect
from sonicmoe.diagnostics.nonfinite import NonFiniteError, detect_nonfinite
from sonicmoe.diagnostics.step_dump import DumpError, load_dump
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.engine.select import EngineChoice
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.observe import listening

T, H, I, E, K = 40, 128, 128, 4, 2


def make_experts():
    rng = np.random.default_rng(0)

    def projection(rows, columns):
        weight = parameter(rng.standard_normal((rows, columns)) * rows**-0.5, torch.bfloat16)
        weight.main_grad = None
        return types.SimpleNamespace(weight=weight)

    return [
        types.SimpleNamespace(up_gate_proj=projection(H, 2 * I), down_proj=projection(I, H))
        for _ in range(E)
    ]


def make_node(mode="perf", experts=None, **options):
    experts = make_experts() if experts is None else experts
    return SonicMoEMlpNode(experts, E, H, I, config=SonicMoEConfig(fp8_mode=mode), **options)


def batch(seed=1):
    rng = np.random.default_rng(seed)
    indices = np.argsort(rng.random((T, E)), axis=1)[:, :K].astype(np.int64)
    indices[::4, 1] = -1
    x, dout = (
        tensor(rng.standard_normal((T, H)), torch.float32).to(torch.bfloat16) for _ in range(2)
    )
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


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    assert observe._observers == ()


@pytest.mark.parametrize("mode", ["perf", "mem", "off"])
def test_a_healthy_step_passes(mode):
    with detect_nonfinite():
        node = make_node(mode)
        train_step(node)
        node.step()
        train_step(node)


def test_a_bad_token_is_named_in_forward(tmp_path):
    x, *_ = batch()
    values = numpy(x)
    values[17, 5] = np.inf
    with (
        pytest.raises(NonFiniteError, match=r"first bad: input x at token 17, column 5") as caught,
        detect_nonfinite(tmp_path),
    ):
        train_step(make_node(), x=tensor(values, torch.float32).to(torch.bfloat16))
    assert caught.value.report.fault.kind == "inf"
    assert caught.value.dump == tmp_path / "nonfinite-call-1.npz"
    report = bisect(load_dump(caught.value.dump), "reference")
    assert str(report.fault) == str(caught.value.report.fault)
    before = caught.value.dump.read_bytes()
    with pytest.raises(NonFiniteError) as again, detect_nonfinite(tmp_path):
        train_step(make_node(), x=tensor(values, torch.float32).to(torch.bfloat16))
    assert again.value.dump == tmp_path / "nonfinite-call-1-2.npz", "the first one stays"
    assert caught.value.dump.read_bytes() == before


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
    with (
        pytest.raises(NonFiniteError, match=r"first bad: input w2 = ") as caught,
        detect_nonfinite(),
    ):
        node(x, None, tensor(ids), probs)
    assert "experts[2].down_proj.weight[7, 3]" in str(caught.value)
    assert "older than the weights" not in str(caught.value)


def test_a_bad_gradient_is_named_in_backward(tmp_path):
    *_, dout = batch()
    values = numpy(dout)
    values[23, 9] = np.nan
    with (
        pytest.raises(NonFiniteError, match=r"first bad: input dout at token 23, column 9"),
        detect_nonfinite(),
    ):
        train_step(make_node("mem"), dout=tensor(values, torch.float32).to(torch.bfloat16))


class SpoiledEngine(ReferenceEngine):
    """The reference engine with NaN in one weight gradient; what a bisection runs again is sound."""

    def backward_dw(self, pending, targets):
        super().backward_dw(pending, targets)
        sums = targets.sums("dw1")
        sums[2, 3, 4] = float("nan")
        targets.replace("dw1", sums)


@pytest.mark.parametrize("flush", ["auto", "step", "backward"])
def test_a_bad_weight_gradient_is_found_wherever_it_went(flush, monkeypatch):
    choice = EngineChoice(SpoiledEngine(), "test")
    monkeypatch.setattr("sonicmoe.node.choices.ready_engine", lambda *_: choice)
    with pytest.raises(NonFiniteError, match="did not repeat") as caught, detect_nonfinite():
        train_step(make_node(flush=flush))
    assert caught.value.report.healthy


@pytest.mark.parametrize("stage", ["y1", "dz"])
def test_a_stage_that_breaks_in_training_is_named(stage, monkeypatch):
    choice = EngineChoice(ReferenceEngine(), "test")
    monkeypatch.setattr("sonicmoe.node.choices.ready_engine", lambda *_: choice)
    with (
        listening(plant(stage, "nan", (3, 2))),
        pytest.raises(NonFiniteError) as caught,
        detect_nonfinite(),
    ):
        train_step(make_node())
    fault = caught.value.report.fault
    assert (fault.stage, fault.place.row, fault.place.expert, fault.place.column) == (
        stage,
        3,
        0,
        2,
    )


@pytest.mark.parametrize("mode", ["perf", "mem", "off"])
def test_a_dump_holds_the_next_step_of_its_node(mode, tmp_path):
    node, other = make_node(mode), make_node()
    node.dump(tmp_path / "step.npz")
    train_step(other)
    assert not (tmp_path / "step.npz").exists()
    x, indices, probs, dout = train_step(node)
    step = load_dump(tmp_path / "step.npz")
    for found, wanted in ((step.x, x), (step.indices, indices), (step.dout, dout)):
        np.testing.assert_array_equal(found, numpy(wanted))
    valid = step.indices >= 0
    np.testing.assert_array_equal(step.probs[valid], numpy(probs)[valid].astype(np.float32))
    assert (step.settings.recipe is None) == (mode == "off") and step.settings.dtype == "bfloat16"
    written = (tmp_path / "step.npz").read_bytes()
    train_step(node)
    assert (tmp_path / "step.npz").read_bytes() == written, "one step only"
    report = bisect(step, "reference")
    assert report.healthy and report.missing == ()


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


@pytest.mark.parametrize("good_writes", [0, 1], ids=["forward", "backward"])
def test_a_write_that_fails_during_the_step_does_not_break_it(
    good_writes, tmp_path, monkeypatch, caplog
):
    written = []

    def save_dump(path, step):
        written.append(step)
        if len(written) > good_writes:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(step_capture, "save_dump", save_dump)
    node = make_node()
    node.dump(tmp_path / "step.npz")
    with caplog.at_level(logging.WARNING, logger="sonicmoe"):
        x, *_ = train_step(node)
        train_step(node)
    assert x.grad is not None and observe._observers == () and len(written) == good_writes + 1
    (line,) = [record.getMessage() for record in caplog.records if record.name == "sonicmoe"]
    assert "step.npz" in line and "No space left on device" in line


def test_a_block_without_a_node_call_says_that_it_checked_nothing(caplog):
    def warnings():
        return [
            record.getMessage()
            for record in caplog.records
            if "detect_nonfinite" in record.getMessage()
        ]

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
