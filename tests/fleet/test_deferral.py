"""Weight gradients that PaddleFleet's schedule puts off: run, then hook, once, whatever the order."""

from __future__ import annotations

import gc
import logging
import weakref
from functools import partial

import numpy as np
import pytest
from engine.moe_golden import golden
from fleet.fleet_calls import LAYOUTS, Experts, assert_same, bf16, overwrite, zeros
from framework import IS_PADDLE, numpy, relative_rmse, torch
from node.node_harness import problems, want_gradient
from oracle.held import Hooked
from pairwise import pairwise

from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.fleet import deferral
from sonicmoe.fleet.deferral import (
    DOWN_POINT,
    POINTS,
    UP_GATE_POINT,
    set_wgrad_deferral_hook,
)

pytestmark = pytest.mark.skipif(
    not IS_PADDLE, reason="PyTorch's hooks cannot be fired from outside a backward"
)
if IS_PADDLE:
    import paddle
    from paddle.distributed.fleet.meta_parallel.zero_bubble_utils import WeightGradStore
    from paddle.distributed.fleet.utils import recompute

WHICH = {UP_GATE_POINT: 0, DOWN_POINT: 1}


@pytest.fixture(autouse=True)
def no_hook_stays():
    yield
    set_wgrad_deferral_hook(None)
    WeightGradStore.clear()


@pytest.fixture
def asked():
    """The points at which the hook was asked; nothing is put off."""
    points = []
    set_wgrad_deferral_hook(lambda point, _weight, _run: points.append(point))
    return points


def main_grads(experts):
    return [numpy(weight.main_grad) for weight in experts.weights]


def fleets_hook(points):
    """As PaddleFleet's own: a task that runs the addition and then fires the hook."""

    def task(weight, run):
        run()
        weight._apply_backward_hook()

    def hook(point, weight, run):
        if point not in points:
            return False
        WeightGradStore.enabled = True
        WeightGradStore.put(partial(task, weight, run))
        WeightGradStore.enabled = False
        return True

    return hook


def run_queue():
    WeightGradStore.flush()
    WeightGradStore.pop()


def watched(experts):
    """What `main_grad` held each time the backward hook of a weight fired."""
    return Hooked(experts.weights, lambda weight: numpy(weight.main_grad)).seen


def counts(hooked):
    return [len(seen) for seen in hooked]


def at_once(problem, **options):
    """The backward and the gradients without a hook."""
    hook = deferral._hook
    set_wgrad_deferral_hook(None)
    experts = Experts(problem, **options)
    call = experts.call().backward()
    set_wgrad_deferral_hook(hook)
    return call, main_grads(experts)


TAKEN = {"both": POINTS, "up": POINTS[:1], "down": POINTS[1:], "none": ()}


@pytest.mark.parametrize(("taken", "layout", "fp8"), pairwise(list(TAKEN), LAYOUTS, [False, True]))
def test_runs_and_then_fires_the_hook_once(problem, taken, layout, fp8):
    points = TAKEN[taken]
    plain, expected = at_once(problem, layout=layout, fp8=fp8)
    experts = Experts(problem, layout, fp8=fp8)
    hooked = watched(experts)
    set_wgrad_deferral_hook(fleets_hook(points))
    call = experts.call().backward()
    set_wgrad_deferral_hook(None)
    np.testing.assert_array_equal(call.dx, plain.dx)
    late = {WHICH[point] for point in points}
    assert counts(hooked) == [int(i not in late) for i in range(2)]
    for index in late:
        assert not numpy(experts.weights[index].main_grad).any()
    assert len(WeightGradStore.cache) == len(points)
    run_queue()
    assert counts(hooked) == [1, 1]
    assert_same([seen[0] for seen in hooked], expected)  # complete when the hook fired
    assert_same(main_grads(experts), expected)


@pytest.mark.parametrize(
    ("order", "main_grad"),
    pairwise([(0, 1, 2, 3), (3, 2, 1, 0), (2, 3, 0, 1), (1, 2, 0, 3)], ["weight", "none"]),
)
def test_two_micro_batches_under_zero_bubble_orders(order, main_grad, tasks):
    """Both forwards, both backwards in reverse order, then the additions in any order."""
    batches = problems(2, dtype=torch.bfloat16)
    plain, experts = (Experts(batches[0], main_grad=main_grad) for _ in range(2))
    calls = [experts.call(batch) for batch in batches]
    for call in reversed(calls):
        call.backward()
    assert len(tasks) == 4
    for position in order:
        tasks[position]()
    set_wgrad_deferral_hook(None)
    for batch in reversed(batches):
        plain.call(batch).backward()
    for found, wanted in zip(main_grads(experts), main_grads(plain), strict=True):
        assert order != (0, 1, 2, 3) or np.array_equal(found, wanted)
        assert relative_rmse(found, wanted) < 1e-6


def test_operands_are_free_after_both_have_run(problem, monkeypatch, tasks):
    kept, original = [], ReferenceEngine.backward_dx

    def watched(self, *arguments):
        result = original(self, *arguments)
        kept.extend(weakref.ref(t) for t in (result[2].dz, result[2].y1s))
        return result

    monkeypatch.setattr(ReferenceEngine, "backward_dx", watched)
    experts = Experts(problem)
    experts.call().backward()
    gc.collect()
    assert all(held() is not None for held in kept)
    tasks[0]()
    tasks[1]()
    assert all(held() is None for held in kept)
    with pytest.raises(RuntimeError, match="added before; needed: one run of each offer"):
        tasks[0]()


@pytest.mark.parametrize("overwrite_main_grad", [False, True])
def test_main_grad_is_looked_up_when_it_runs(problem, overwrite_main_grad, tasks):
    """The task also looks up then whether `main_grad` is to be written."""
    (_, wanted), experts = at_once(problem), Experts(problem)
    experts.call().backward()
    old = [weight.main_grad for weight in experts.weights]
    for weight in experts.weights:
        weight.main_grad = zeros(tuple(weight.shape))
        if overwrite_main_grad:
            overwrite(weight.main_grad, np.full(tuple(weight.shape), np.nan))
            weight.overwrite_main_grad = True
    for task in tasks:
        task()
    assert_same(main_grads(experts), wanted)
    assert not any(numpy(held).any() for held in old)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute(problem, reentrant):
    (_, expected), experts = at_once(problem), Experts(problem)
    hooked, x = watched(experts), bf16(problem.x)
    set_wgrad_deferral_hook(fleets_hook(POINTS))
    x.stop_gradient = False
    out = recompute(lambda x: experts.call(x=x).out, x, use_reentrant=reentrant)
    out.backward(bf16(problem.dout))
    assert counts(hooked) == [0, 0]
    run_queue()
    assert counts(hooked) == [1, 1]
    assert_same(main_grads(experts), expected)


class TestTheHookIsAsked:
    """Gradients that are not offered to it are complete when the backward returns, and Paddle fires the
    hooks.
    """

    def ran(self, problem, experts, **given):
        experts.call(**given).backward()
        wanted = golden(problem)
        for found, exact in zip(experts.gradients(), (wanted.dw1, wanted.dw2), strict=True):
            assert relative_rmse(found, exact) < 0.01

    def test_for_the_down_projection_first(self, problem, asked):
        """As Fleet's queue runs them."""
        self.ran(problem, Experts(problem))
        assert asked == [DOWN_POINT, UP_GATE_POINT]

    def test_not_for_frozen_weights(self, problem, asked):
        experts = Experts(problem)
        hooked = watched(experts)
        want_gradient(experts.weights[0], False)
        experts.call().backward()
        assert asked == [DOWN_POINT] and counts(hooked) == [0, 1]

    def test_not_by_a_backward_to_the_tokens_alone(self, problem, asked):
        experts = Experts(problem)
        call = experts.call()
        (dx,) = paddle.grad(call.out, call.x, call.dout)
        assert asked == [] and not any(g.any() for g in experts.gradients())
        assert relative_rmse(numpy(dx), golden(problem).dx) < 0.01

    def test_not_without_main_grad(self, problem, caplog, asked):
        with caplog.at_level(logging.WARNING, logger="sonicmoe"):
            self.ran(problem, Experts(problem, main_grad="absent"))
        assert asked == []
        assert "are not put off, because a weight that trains has no main_grad" in caplog.text

    def test_not_where_no_input_wants_a_gradient(self, problem, asked):
        experts = Experts(problem)
        hooked = watched(experts)
        self.ran(problem, experts, x=bf16(problem.x), scores_grad=False)
        assert asked == [] and counts(hooked) == [1, 1]
