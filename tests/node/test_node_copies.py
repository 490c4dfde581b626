"""A node that reads FP8 copies of its weights, while the parameters hold no memory."""

from __future__ import annotations

import gc
import logging
import weakref

import numpy as np
import pytest
from framework import IS_PADDLE, numpy, relative_rmse, torch
from node.node_harness import ARRANGEMENTS, FP8, FULL, Layer, make_problem, problems
from weights.freed_memory import free, holds_memory, restore

from sonicmoe.config import SonicMoEConfig
from sonicmoe.diagnostics.nonfinite import NonFiniteError, detect_nonfinite
from sonicmoe.diagnostics.step_dump import load_dump
from sonicmoe.errors import ConfigError, LayoutError, StaleWeightsError

each_arrangement = pytest.mark.parametrize("arrangement", ARRANGEMENTS)
RECOMPUTE = SonicMoEConfig(engine="reference", fp8_mode="perf", recompute_z=True)
ISO = SonicMoEConfig(engine="reference", fp8_mode="perf", iso_weight=True)


def make_layer(problem, config=FP8, arrangement="native"):
    layer = Layer(problem, arrangement=arrangement, dtype=torch.bfloat16, config=config)
    layer.set_main_grad(0.0)
    return layer


class Step:
    """Micro-batches whose forwards all come before the first backward, on copies or without."""

    def __init__(self, layer, batches, copies=None):
        self.layer, self.copies = layer, copies
        node = layer.node
        if copies is not None:
            layer.node = lambda *arguments: node(*arguments, copies=copies)
        try:
            self.calls = [layer.call(batch) for batch in batches]
        finally:
            layer.node = node

    def backward(self):
        for call in self.calls:
            call.backward()
        return self

    def arrays(self):
        made = [array for c in self.calls for array in (numpy(c.out), c.dx, c.dprobs)]
        return [*made, *self.layer.gradients("main_grad")]


def assert_same_bits(one, other):
    for left, right in zip(one, other, strict=True):
        assert np.array_equal(left, right)


@each_arrangement
@pytest.mark.parametrize("config", [FP8, ISO, RECOMPUTE], ids=["two orders", "iso", "recompute"])
def test_training_without_memory_gives_the_bits_of_training_with_it(arrangement, config):
    batches = problems(3)
    kept, freed = (make_layer(batches[0], config, arrangement) for _ in range(2))
    expected = Step(kept, batches).backward().arrays()
    copies = freed.node.make_copies()
    free(*freed.weights)
    step = Step(freed, batches, copies)
    assert not any(map(holds_memory, freed.weights))
    assert_same_bits(step.backward().arrays(), expected)
    assert copies.iso_weight is (config is ISO)
    assert freed.node.gradient_bytes == 0


@pytest.mark.parametrize("config", [FULL, SonicMoEConfig(fp8_mode="off")])
def test_copies_need_a_recipe(config):
    layer = make_layer(make_problem(), config)
    with pytest.raises(ConfigError, match="reference engine computes without FP8 recipe"):
        layer.node.make_copies()


def test_a_forward_without_memory_and_without_copies_is_refused():
    layer = make_layer(make_problem())
    free(layer.weights[1])
    with pytest.raises(LayoutError, match=r"weights \[1\] of the experts hold no memory; .*copies"):
        layer.call()
    with pytest.raises(LayoutError, match=r"weights \[1\] of the experts hold no memory"):
        layer.node.make_copies()


def test_a_configuration_without_fp8_reads_the_parameters():
    layer = make_layer(make_problem())
    copies = layer.node.make_copies()
    layer.node = type(layer.node).from_native(*layer.weights, config=FULL)
    expected = numpy(layer.call().out)
    assert np.array_equal(numpy(Step(layer, [layer.problem], copies).calls[0].out), expected)
    free(*layer.weights)
    with pytest.raises(LayoutError, match="hold no memory"):
        Step(layer, [layer.problem], copies)


ANNOUNCEMENTS = {
    "step": lambda layer: layer.node.step(),
    "invalidate_caches": lambda layer: layer.node.invalidate_caches(),
}
if not IS_PADDLE:
    ANNOUNCEMENTS |= {
        "optimizer step": lambda layer: torch.optim.SGD(layer.weights, lr=0.1).step(),
        "inplace operation": lambda layer: layer.weights[0].detach().zero_(),
    }


@pytest.mark.parametrize("event", ANNOUNCEMENTS)
def test_stale_copies_are_never_read_where_the_parameters_were_freed(event):
    batch = make_problem()
    layer = make_layer(batch)
    copies = layer.node.make_copies()
    values = [weight.detach().clone() for weight in layer.weights]
    ANNOUNCEMENTS[event](layer)
    free(*layer.weights)
    with pytest.raises(
        StaleWeightsError, match=rf"\(event {copies.version}\) are stale: .*{event}"
    ):
        Step(layer, [batch], copies)
    # New copies, made while there is memory, are read again.
    for weight, value in zip(layer.weights, values, strict=True):
        restore(weight, value)
    fresh = layer.node.make_copies()
    assert fresh.version > copies.version
    free(*layer.weights)
    Step(layer, [batch], fresh).backward()


def test_another_layers_events_leave_copies_alone():
    batch = make_problem()
    layer, other = make_layer(batch), make_layer(batch)
    copies = layer.node.make_copies()
    other.node.step()
    if not IS_PADDLE:
        torch.optim.SGD(other.weights, lr=0.1).step()
    free(*layer.weights)
    Step(layer, [batch], copies).backward()


@pytest.mark.parametrize("config", [FP8, ISO], ids=["two orders", "iso"])
@pytest.mark.parametrize("announced", [False, True])
def test_changed_weights_that_hold_memory_are_quantised_again_in_place(caplog, announced, config):
    one, other = problems(1)[0], make_problem(seed=9)
    layer, expected = make_layer(one, config), make_layer(one.but(up_gate=other.up_gate), config)
    wanted = Step(expected, [one]).backward().arrays()
    copies = layer.node.make_copies()
    buffers = [copies.weights.w1.bytes, copies.weights.w2_dgrad.scale_inv]
    layer.overwrite(one.but(up_gate=other.up_gate))
    if announced:
        layer.node.step()
    with caplog.at_level(logging.INFO, logger="sonicmoe"):
        step = Step(layer, [one], copies)
    assert_same_bits(step.backward().arrays(), wanted)
    assert ("node.step()" in caplog.text) == announced
    assert buffers[0] is copies.weights.w1.bytes
    assert buffers[1] is copies.weights.w2_dgrad.scale_inv
    caplog.clear()
    free(*layer.weights)
    Step(layer, [one], copies)
    assert not caplog.text, "the copies are current again"


def test_a_late_backward_of_overwritten_copies_is_refused():
    one, other = problems(1)[0], make_problem(seed=9)
    layer = make_layer(one)
    copies = layer.node.make_copies()
    late = Step(layer, [one], copies)
    layer.overwrite(one.but(up_gate=other.up_gate))
    Step(layer, [one], copies)
    with pytest.raises(Exception, match="modified by an inplace operation, and read by another"):
        late.backward()


def test_an_announcement_of_nothing_lets_outstanding_backwards_run():
    batch = make_problem()
    layer = make_layer(batch)
    copies = layer.node.make_copies()
    outstanding = Step(layer, [batch], copies)
    layer.node.invalidate_caches()
    Step(layer, [batch], copies)
    outstanding.backward()


def test_copies_of_other_weights_or_settings_are_refused():
    batch = make_problem()
    layer, other = make_layer(batch), make_layer(batch)
    copies = other.node.make_copies()
    with pytest.raises(LayoutError, match="made of other parameters"):
        Step(layer, [batch], copies)
    rows = SonicMoEConfig(engine="reference", fp8_mode="perf", recipe="1x128")
    layer = make_layer(batch, rows)
    copies = make_layer(batch).node.make_copies()
    with pytest.raises(
        ConfigError, match=r"recipe 'dx256' and a gated .* computes with .* recipe '1x128'"
    ):
        Step(layer, [batch], copies)


class TestRelease:
    def test_backward_needs_its_own_order_alone(self):
        batches = problems(2)
        kept, freed = make_layer(batches[0]), make_layer(batches[0])
        expected = Step(kept, batches).backward().arrays()
        copies = freed.node.make_copies()
        free(*freed.weights)
        step = Step(freed, batches, copies)
        forward = [weakref.ref(q) for q in (copies.weights.w1, copies.weights.w2)]
        assert copies.release_forward() == "" and copies.release_forward() == ""
        assert copies.is_released
        gc.collect()
        assert [reference() for reference in forward] == [None, None]
        assert_same_bits(step.backward().arrays(), expected)

    def test_forwards_after_it_are_refused(self):
        batch = make_problem()
        layer = make_layer(batch)
        copies = layer.node.make_copies()
        copies.release_forward()
        with pytest.raises(StaleWeightsError, match="was released; needed: new copies"):
            Step(layer, [batch], copies)
        free(*layer.weights)
        with pytest.raises(StaleWeightsError, match="was released"):
            Step(layer, [batch], copies)

    def test_one_buffer_for_both_directions_is_kept(self):
        layer = make_layer(make_problem(), ISO)
        copies = layer.node.make_copies()
        assert "same buffers" in copies.release_forward()
        free(*layer.weights)
        Step(layer, [layer.problem], copies).backward()

    def test_it_is_kept_while_a_backward_will_recompute_z(self):
        layer = make_layer(make_problem(), RECOMPUTE)
        copies = layer.node.make_copies()
        free(*layer.weights)
        step = Step(layer, [layer.problem], copies)
        assert "1 outstanding backward(s) recompute z" in copies.release_forward()
        step.backward()
        del step
        gc.collect()
        assert copies.release_forward() == ""


def test_copies_belong_to_their_holder():
    """A node keeps none: whoever drops his reference has the memory back."""
    layer = make_layer(make_problem())
    copies = layer.node.make_copies()
    Step(layer, [layer.problem], copies).backward()
    buffer = weakref.ref(copies.weights.w1)
    del copies
    gc.collect()
    assert buffer() is None


def test_the_nodes_own_cache_is_freed_when_copies_take_its_place(weights_on_a_gpu):
    layer = make_layer(make_problem())
    layer.node.step()
    layer.call()
    own = layer.node._state.weights._prepared.weights
    buffer = weakref.ref(own.w1)
    del own
    copies = layer.node.make_copies()
    Step(layer, [layer.problem], copies)
    gc.collect()
    assert buffer() is None
    layer.call()
    layer.node.drop_caches()
    assert layer.node._state.weights._prepared.weights is None


def test_a_node_is_made_of_parameters_that_were_freed_already():
    """Fleet quantises and frees before the first forward of the first step."""
    batch = make_problem()
    layer = make_layer(batch)
    copies = layer.node.make_copies()
    expected = numpy(layer.call().out)
    free(*layer.weights)
    layer.node = type(layer.node).from_native(*layer.weights, config=FP8)
    assert np.array_equal(numpy(Step(layer, [batch], copies).calls[0].out), expected)


@pytest.mark.parametrize("release", [False, True])
def test_those_who_inspect_a_call_get_the_decoded_weights(tmp_path, release):
    """A dump, and the report of a NaN."""
    batch = make_problem()
    layer = make_layer(batch)
    copies = layer.node.make_copies()
    w1, w2 = (numpy(weight) for weight in layer.weights)
    free(*layer.weights)
    layer.node.dump(tmp_path / "step.npz")
    step = Step(layer, [batch], copies)
    if release:
        copies.release_forward()
    step.backward()
    found = load_dump(tmp_path / "step.npz")
    assert relative_rmse(found.w1, w1) < 0.04 and relative_rmse(found.w2, w2) < 0.04
    x = batch.x.copy()
    x[3] = np.nan
    if not release:
        with pytest.raises(NonFiniteError, match="output is not finite"), detect_nonfinite():
            Step(layer, [batch.but(x=x)], copies)
