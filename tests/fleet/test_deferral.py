"""Weight gradients that PaddleFleet's schedule puts off: run, then hook, once, whatever the order."""

from __future__ import annotations

import gc
import logging
import weakref
from functools import partial

import numpy as np
import pytest
from engine.moe_golden import golden, make_problem
from fleet.fleet_calls import LAYOUTS, Experts, zeros
from framework import IS_PADDLE, numpy, relative_rmse, tensor, torch
from node.node_harness import problems, want_gradient

from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.errors import ConfigError, LayoutError, OutOfMemoryError
from sonicmoe.fleet.deferral import (
    DOWN_POINT,
    POINTS,
    UP_GATE_POINT,
    set_wgrad_deferral_hook,
    wgrad_deferral_hook,
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


@pytest.fixture(scope="module")
def problem():
    return make_problem(dtype=torch.bfloat16)


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


class Hooked:
    """What `main_grad` held each time the backward hook of a weight fired."""

    def __init__(self, experts):
        self.seen = ([], [])
        for weight, seen in zip(experts.weights, self.seen, strict=True):
            weight._register_backward_hook(partial(self._note, weakref.ref(weight), seen))

    @staticmethod
    def _note(weight, seen, *_):
        seen.append(numpy(weight().main_grad))

    @property
    def counts(self):
        return [len(seen) for seen in self.seen]


def at_once(problem, **options):
    """Gradients without a hook."""
    experts = Experts(problem, **options)
    experts.call().backward()
    return [numpy(weight.main_grad) for weight in experts.weights]


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "points", [POINTS, POINTS[:1], POINTS[1:], ()], ids=["both", "up", "down", "none"]
)
def test_runs_and_then_fires_the_hook_once(problem, points, layout, fp8):
    expected = at_once(problem, layout=layout, fp8=fp8)
    experts = Experts(problem, layout, fp8=fp8)
    hooked = Hooked(experts)
    set_wgrad_deferral_hook(fleets_hook(points))
    call = experts.call().backward()
    plain = Experts(problem, layout, fp8=fp8)
    set_wgrad_deferral_hook(None)
    np.testing.assert_array_equal(call.dx, plain.call().backward().dx)
    late = {WHICH[point] for point in points}
    assert hooked.counts == [int(i not in late) for i in range(2)]
    for index in late:
        assert not numpy(experts.weights[index].main_grad).any()
    assert len(WeightGradStore.cache) == len(points)
    run_queue()
    assert hooked.counts == [1, 1]
    for seen, weight, wanted in zip(hooked.seen, experts.weights, expected, strict=True):
        np.testing.assert_array_equal(seen[0], wanted)  # complete when the hook fired
        np.testing.assert_array_equal(numpy(weight.main_grad), wanted)


def test_the_hook_gets_what_fleet_expects(problem):
    experts, asked = Experts(problem), []

    def hook(point, weight, run_wgrad):
        asked.append((point, weight))
        return False

    set_wgrad_deferral_hook(hook)
    assert wgrad_deferral_hook() is hook
    experts.call().backward()
    assert [point for point, _ in asked] == [DOWN_POINT, UP_GATE_POINT]
    assert asked[0][1] is experts.weights[1] and asked[1][1] is experts.weights[0]


@pytest.mark.parametrize("main_grad", ["weight", "none"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 3, 0, 1), (1, 2, 0, 3)])
def test_two_micro_batches_under_zero_bubble_orders(order, main_grad):
    """Both forwards, both backwards in reverse order, then the additions in any order."""
    batches = problems(2, dtype=torch.bfloat16)
    plain, experts = (Experts(batches[0], main_grad=main_grad) for _ in range(2))
    tasks = []
    set_wgrad_deferral_hook(lambda _point, _weight, run: tasks.append(run) or True)
    calls = [experts.call(batch) for batch in batches]
    for call in reversed(calls):
        call.backward()
    assert len(tasks) == 4
    for position in order:
        tasks[position]()
    set_wgrad_deferral_hook(None)
    for batch in reversed(batches):
        plain.call(batch).backward()
    for weight, other in zip(experts.weights, plain.weights, strict=True):
        if order == (0, 1, 2, 3):
            np.testing.assert_array_equal(numpy(weight.main_grad), numpy(other.main_grad))
        assert relative_rmse(numpy(weight.main_grad), numpy(other.main_grad)) < 1e-6


def test_operands_are_free_after_both_have_run(problem, monkeypatch):
    kept, original = [], ReferenceEngine.backward_dx

    def watched(self, *arguments):
        result = original(self, *arguments)
        kept.extend(weakref.ref(t) for t in (result[2].dz, result[2].y1s))
        return result

    monkeypatch.setattr(ReferenceEngine, "backward_dx", watched)
    experts, tasks = Experts(problem), []
    set_wgrad_deferral_hook(lambda _point, _weight, run: tasks.append(run) or True)
    experts.call().backward()
    gc.collect()
    assert all(held() is not None for held in kept)
    tasks[0]()
    tasks[1]()
    assert all(held() is None for held in kept)
    with pytest.raises(RuntimeError, match="added before; needed: one run of each offer"):
        tasks[0]()


def test_main_grad_is_looked_up_when_it_runs(problem):
    (wanted, _), experts, tasks = at_once(problem), Experts(problem), []
    set_wgrad_deferral_hook(lambda _point, _weight, run: tasks.append(run) or True)
    experts.call().backward()
    old, new = experts.weights[0].main_grad, zeros(tuple(experts.weights[0].shape))
    experts.weights[0].main_grad = new
    for task in tasks:
        task()
    assert experts.weights[0].main_grad is new and not numpy(old).any()
    np.testing.assert_array_equal(numpy(new), wanted)


def test_main_grad_that_was_removed_is_missed(problem):
    experts, tasks = Experts(problem), []
    set_wgrad_deferral_hook(lambda _point, _weight, run: tasks.append(run) or True)
    experts.call().backward()
    del experts.weights[1].main_grad
    with pytest.raises(LayoutError, match="main_grad of an expert weight was removed"):
        tasks[0]()


def test_a_run_without_memory_may_be_repeated(problem, monkeypatch):
    expected, experts, tasks = at_once(problem), Experts(problem), []
    set_wgrad_deferral_hook(lambda _point, _weight, run: tasks.append(run) or True)
    experts.call().backward()
    original, failed = ReferenceEngine.backward_dw, []

    def fails_once(self, pending, targets):
        if not failed:
            failed.append(1)
            raise MemoryError
        original(self, pending, targets)

    monkeypatch.setattr(ReferenceEngine, "backward_dw", fails_once)
    with pytest.raises(OutOfMemoryError, match="weight gradients"):
        tasks[0]()
    for task in tasks:
        task()
    for weight, wanted in zip(experts.weights, expected, strict=True):
        np.testing.assert_array_equal(numpy(weight.main_grad), wanted)


def test_frozen_weights_are_not_offered(problem):
    experts, asked = Experts(problem), []
    hooked = Hooked(experts)
    want_gradient(experts.weights[0], False)
    set_wgrad_deferral_hook(lambda point, _weight, _run: asked.append(point))
    experts.call().backward()
    assert asked == [DOWN_POINT] and hooked.counts == [0, 1]


def test_a_backward_to_the_tokens_alone_offers_nothing(problem):
    experts, asked = Experts(problem), []
    set_wgrad_deferral_hook(lambda point, _weight, _run: asked.append(point))
    call = experts.call()
    (dx,) = paddle.grad(call.out, call.x, call.dout)
    assert asked == [] and not any(g.any() for g in experts.gradients())
    assert relative_rmse(numpy(dx), golden(problem).dx) < 0.01


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute(problem, reentrant):
    expected, experts = at_once(problem), Experts(problem)
    hooked = Hooked(experts)
    set_wgrad_deferral_hook(fleets_hook(POINTS))
    x = tensor(problem.x, torch.float32).astype("bfloat16")
    x.stop_gradient = False
    out = recompute(lambda x: experts.call(x=x).out, x, use_reentrant=reentrant)
    out.backward(tensor(problem.dout, torch.float32).astype("bfloat16"))
    assert hooked.counts == [0, 0]
    run_queue()
    assert hooked.counts == [1, 1]
    for weight, wanted in zip(experts.weights, expected, strict=True):
        np.testing.assert_array_equal(numpy(weight.main_grad), wanted)


class TestNotOffered:
    """Gradients are then complete when the backward returns, and Paddle fires the hooks."""

    def ran(self, problem, experts, **given):
        asked = []
        set_wgrad_deferral_hook(lambda point, _weight, _run: asked.append(point))
        call = experts.call(**given).backward()
        assert asked == []
        for found, wanted in zip(
            experts.gradients(), (golden(problem).dw1, golden(problem).dw2), strict=True
        ):
            assert relative_rmse(found, wanted) < 0.01
        return call

    def test_without_main_grad(self, problem, caplog):
        with caplog.at_level(logging.WARNING, logger="sonicmoe"):
            experts = Experts(problem, main_grad="absent")
            self.ran(problem, experts)
        assert "are not put off, because a weight that trains has no main_grad" in caplog.text

    def test_where_no_input_wants_a_gradient(self, problem):
        experts = Experts(problem)
        hooked, x = Hooked(experts), tensor(problem.x, torch.float32).astype("bfloat16")
        self.ran(problem, experts, x=x, scores_grad=False)
        assert hooked.counts == [1, 1]


def test_what_is_no_function_is_refused():
    with pytest.raises(ConfigError, match="hook is str; needed: a function"):
        set_wgrad_deferral_hook("later")
