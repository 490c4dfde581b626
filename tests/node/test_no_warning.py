"""Correct loops that come near a warning read none."""

from __future__ import annotations

import numpy as np
import pytest
from engine.moe_golden import make_problem
from fleet.fleet_calls import Experts
from framework import IS_PADDLE, tensor, torch
from node.node_harness import FP8, Layer, counts_of, problems, want_gradient
from node.test_node_step import CLEARINGS, optimizer_of

from sonicmoe import SonicMoEConfig
from sonicmoe.ep import LocalDispatcher
from sonicmoe.fleet import deferral
from sonicmoe.fleet.configuration import refresh_fp8_config
from sonicmoe.layer import questions

STEPS = questions.STEPS + 2
SMALL = problems(1, hidden=8, intermediate=8)[0]


def started_with_weight_decay():
    """A trainer that puts the decay into `main_grad` in place of zeros: into other memory, and into the
    same.
    """
    for again in (False, True):
        layer = Layer(SMALL, main_grad=0.0)
        for _ in range(STEPS):
            for weight in layer.weights:
                decay = (weight.detach() * 0.1).to(torch.float32)
                weight.main_grad = weight.main_grad.copy_(decay) if again else decay
            layer.step()


def many_micro_batches():
    for clear in CLEARINGS:
        layer = Layer(SMALL, flush="step", main_grad=0.0)
        for _ in range(2):
            layer.step(*[None] * 12)
            clear(layer)


def an_optimizer_that_is_set_up_first():
    """A step without gradients makes its state; those of a skipped batch are dropped before one."""
    layer = Layer(SMALL, flush="step", dtype=torch.float32)
    optimizer = optimizer_of(layer.weights)
    optimizer.step()
    layer.run()
    layer.run()
    layer.node.discard_grads()
    optimizer.step()
    for _ in range(3):
        layer.step(None, None)
        optimizer.step()
        optimizer.clear_grad() if IS_PADDLE else optimizer.zero_grad()


def another_models_optimizer():
    """It steps while gradients wait here."""
    layer, other = Layer(SMALL, flush="step", main_grad=0.0), Layer(SMALL)
    optimizer = optimizer_of(other.weights)
    for _ in range(STEPS):
        layer.run()
        other.run()
        optimizer.step()
    layer.node.step()


def gradients_put_off():
    """Evaluated before the trainer made `main_grad`, with a frozen weight, then trained."""
    layer = Layer(SMALL)
    layer.node._state.offers = lambda: lambda position, weight, run: False
    with torch.no_grad():
        layer.call()
    want_gradient(layer.weights[0], False)
    for weight in layer.weights[1:]:
        weight.main_grad = None
    layer.step()


def ids_that_are_not_here():
    """Batches of which nothing is here, in the two spellings, and without tokens."""
    layer = Layer(SMALL, config=SonicMoEConfig(engine="reference", validate_dispatch=True))
    for ids in (np.full_like(SMALL.indices, -1), np.full_like(SMALL.indices, SMALL.num_experts)):
        layer.run(SMALL.but(indices=ids))
    rows = {name: getattr(SMALL, name)[:0] for name in ("x", "indices", "probs", "dout")}
    layer.run(SMALL.but(**rows))


def prepared_ahead_of_mixed_precision():
    """fp32 master weights, tokens in bfloat16."""
    problem = make_problem(hidden=128, intermediate=64, topk=2)
    layer = Layer(problem, main_grad=0.0, config=SonicMoEConfig(fp8_mode="perf"))
    layer.node.prequantize_weights()
    x = tensor(problem.x, torch.float32).to(torch.bfloat16)
    indices, probs = tensor(problem.indices), tensor(problem.probs, torch.float32)
    layer.node(x, counts_of(problem), indices, probs).sum().backward()
    layer.node.step()


def one_rank():
    x, probs = tensor(SMALL.x, torch.float32), tensor(SMALL.probs, torch.float32)
    dispatcher = LocalDispatcher(SMALL.num_experts)
    received = dispatcher.dispatch(x, tensor(SMALL.indices), probs)
    dispatcher.combine(received.x, received.handle)


def fleets_defaults():
    problem = make_problem(hidden=128, intermediate=64, topk=2, dtype=torch.bfloat16)
    for fp8 in (False, True):
        Experts(problem, fp8=fp8, fp8_config=refresh_fp8_config()).call().backward()


def fleets_hook():
    if IS_PADDLE:
        deferral.set_wgrad_deferral_hook(lambda point, weight, run: False)
    try:
        fleets_defaults()
    finally:
        if IS_PADDLE:
            deferral.set_wgrad_deferral_hook(None)


def observed():
    from sonicmoe.diagnostics.nonfinite import detect_nonfinite

    layer = Layer(SMALL, config=FP8)
    call = layer.call()
    with detect_nonfinite():  # a forward before the block counts too
        call.backward()


def dumped(path="step.npz"):
    layer = Layer(SMALL)
    layer.node.dump(path)
    layer.run()


LOOPS = (
    started_with_weight_decay, many_micro_batches, an_optimizer_that_is_set_up_first, another_models_optimizer,
    gradients_put_off, ids_that_are_not_here, prepared_ahead_of_mixed_precision, one_rank, fleets_defaults,
    fleets_hook, observed, dumped,
)  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS)
def test_a_correct_loop_reads_no_warning(loop, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loop()
    assert [line for line in said() if "paddle" not in line.lower() and "ccache" not in line] == []
