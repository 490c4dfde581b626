"""A node that reads FP8 copies of its weights, while the parameters hold no memory. tests/oracle has the
bits, and weights/test_stale_weights.py what makes copies stale.
"""

from __future__ import annotations

import gc
import logging

import numpy as np
import pytest
from framework import numpy, relative_rmse, torch
from node.node_harness import (
    FP8,
    Layer,
    assert_equal,
    make_problem,
)
from weights.freed_memory import free

from sonicmoe.config import SonicMoEConfig
from sonicmoe.diagnostics.nonfinite import NonFiniteError, detect_nonfinite
from sonicmoe.diagnostics.step_dump import load_dump


def perf(**changes):
    return SonicMoEConfig(**{"engine": "reference", "fp8_mode": "perf"} | changes)


RECOMPUTE, ISO = perf(recompute_z=True), perf(iso_weight=True)


def make_layer(problem=None, config=FP8, arrangement="native"):
    return Layer(
        problem, arrangement=arrangement, dtype=torch.bfloat16, config=config, main_grad=0.0
    )


def copied(problem=None, config=FP8, arrangement="native", freed=True):
    """A layer and copies of its weights, whose own memory is gone."""
    layer = make_layer(problem, config, arrangement)
    copies = layer.node.make_copies()
    if freed:
        free(*layer.weights)
    return layer, copies


def results(layer, calls):
    """Everything that the backwards of these calls leave."""
    for call in calls:
        call.backward()
    made = [array for call in calls for array in (numpy(call.out), call.dx, call.dprobs)]
    return [*made, *layer.gradients()]


@pytest.mark.parametrize("config", [FP8, ISO], ids=["two orders", "iso"])
@pytest.mark.parametrize("announced", [False, True])
def test_changed_weights_that_hold_memory_are_quantised_again(caplog, announced, config):
    one, changed = make_problem(), make_problem().but(up_gate=make_problem(seed=9).up_gate)
    expected = make_layer(changed, config)
    wanted = results(expected, [expected.call(one)])
    layer, copies = copied(one, config, freed=False)
    layer.overwrite(changed)
    if announced:
        layer.node.step()
    with caplog.at_level(logging.INFO, logger="sonicmoe"):
        call = layer.call(copies=copies)
    assert_equal(results(layer, [call]), wanted)
    assert ("node.step()" in caplog.text) == announced
    caplog.clear()
    free(*layer.weights)
    layer.call(copies=copies)
    assert not caplog.text, "the copies are current again"


def test_an_announcement_of_nothing_lets_outstanding_backwards_run():
    layer, copies = copied(freed=False)
    outstanding = layer.call(copies=copies)
    layer.node.invalidate_caches()
    layer.call(copies=copies)
    outstanding.backward()


class TestRelease:
    def test_one_buffer_for_both_directions_is_kept(self):
        layer, copies = copied(config=ISO)
        assert "same buffers" in copies.release_forward()
        layer.run(copies=copies)

    def test_it_is_kept_while_a_backward_will_recompute_z(self):
        layer, copies = copied(config=RECOMPUTE)
        call = layer.call(copies=copies)
        assert "1 outstanding backward(s) recompute z" in copies.release_forward()
        call.backward()
        del call
        gc.collect()
        assert copies.release_forward() == ""


@pytest.mark.parametrize("release", [False, True])
def test_those_who_inspect_a_call_get_the_decoded_weights(tmp_path, release):
    """A dump, and the report of a NaN."""
    layer, copies = copied(freed=False)
    w1, w2 = (numpy(weight) for weight in layer.weights)
    free(*layer.weights)
    layer.node.dump(tmp_path / "step.npz")
    call = layer.call(copies=copies)
    if release:
        copies.release_forward()
    call.backward()
    found = load_dump(tmp_path / "step.npz")
    assert relative_rmse(found.w1, w1) < 0.04 and relative_rmse(found.w2, w2) < 0.04
    x = layer.problem.x.copy()
    x[3] = np.nan
    if not release:
        with pytest.raises(NonFiniteError, match="output is not finite"), detect_nonfinite():
            layer.call(layer.problem.but(x=x), copies=copies)
