"""What schedules do with Fleet's layer: passes in other orders, recompute, copies released after the
last forward, two layers on one pair of parameters.
"""

from __future__ import annotations

import double_cases as cases
import numpy as np
import pytest
from fleet.double import model

FP8 = {"fp8": "e4m3"}


def layer_of(fleet, **changes):
    return cases.layer_of(fleet, cases.config_of(fleet, **changes), model.one_rank())


@pytest.fixture(scope="module")
def wanted(fleet):
    """Each forward followed by its backward."""
    return {
        fp8: cases.run(layer, cases.micro_batches(3), after=to_grouped(layer))
        for fp8 in (None, "e4m3")
        for layer in [layer_of(fleet, fp8=fp8)]
    }


def to_grouped(layer):
    return layer.grouped_gemm_experts.convert_weights_to_grouped_layout


@pytest.mark.parametrize("form", ["1x32", "32x32"])
def test_freed_weights_leave_every_bit_as_it_was(fleet, wanted, form):
    """With 1x32 and the number of micro-batches known, forward's copies are released after the last
    forward, and backward's order stays.
    """
    layer = layer_of(fleet, **FP8, fp8_weight_quant_format=form)
    experts = layer.grouped_gemm_experts
    experts.set_num_micro_batches(3)
    experts.quant_weight()
    for weight in experts.parameters():
        weight._clear_to_zero_allocation()
    weights, seen = (experts.weight1, experts.weight2), []
    experts.register_forward_post_hook(
        lambda *_: seen.append([w.fp8 is None or w.transposed_fp8 is None for w in weights])
    )
    found = cases.run(layer, cases.micro_batches(3), after=to_grouped(layer))
    assert seen == [[False, False], [False, False], [form == "1x32"] * 2]
    assert all(w.transposed_fp8 is not None for w in weights)
    for name, value in wanted["e4m3"].items():
        assert np.array_equal(found[name], value), name


def test_two_layers_on_one_pair_of_parameters(fleet):
    """As MTP layers share them: gradients of both arrive, whoever changed the layout."""
    first, second = layer_of(fleet, **FP8), layer_of(fleet, **FP8)
    lone = cases.run(layer_of(fleet, **FP8), cases.micro_batches(1))
    for name in ("weight1", "weight2"):
        shared = getattr(first.grouped_gemm_experts, name)
        setattr(second.grouped_gemm_experts, name, shared)
    both = [cases.run(layer, cases.micro_batches(1)) for layer in (first, second)]
    for name in ("out", "dx"):
        assert np.array_equal(both[1][name], lone[name])
    for name in ("weight1", "weight2"):
        assert np.array_equal(both[0][name], lone[name])
        assert cases.relative(both[1][name], 2 * lone[name]) < 1e-6
