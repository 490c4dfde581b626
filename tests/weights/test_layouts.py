"""Every layout map equals an explicit index definition and is undone by its inverse."""

from __future__ import annotations

import numpy as np
import pytest
from framework import IS_PADDLE, numpy, tensor, torch, want_gradient
from hypothesis import given, settings
from hypothesis import strategies as st

from sonicmoe import layouts
from sonicmoe.fleet import weight_layout as fleet
from sonicmoe.interop import data_ptr, requires_grad
from sonicmoe.layouts import ExpertLayout, WeightLayout, convert_bias, convert_weights
from sonicmoe.weight_source import WeightSource

DTYPES = ["float32", "bfloat16", "float16"]
sizes = st.integers(1, 9)
leads = st.lists(st.integers(1, 3), max_size=2).map(tuple)
EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)


def numbered(shape):
    """Distinct values, exact in every dtype."""
    return (np.arange(np.prod(shape)).reshape(shape) % 256).astype(np.float64)


def tensor_of(array, dtype="float32"):
    return tensor(array, torch.float32).to(getattr(torch, dtype))


@EXAMPLES
@given(leads, sizes, sizes, st.booleans(), st.booleans(), st.sampled_from(DTYPES))
def test_native_rows_by_their_index(lead, hidden, inner, gated, transposed, dtype):
    """native[.., 2i, h] = user[.., h, i] (gate), native[.., 2i + 1, h] = user[.., h, I + i] (up)."""
    layout, width = WeightLayout(transposed, gated), inner * (1 + gated)
    order = [n // 2 + inner * (n % 2) for n in range(width)] if gated else range(width)
    rows = numbered((*lead, width, hidden))
    up, down, bias = rows[..., order, :], numbered((*lead, hidden, inner)), rows[..., 0]

    def lying(array):
        return tensor_of(np.swapaxes(array, -1, -2) if transposed else array, dtype)

    for user, to_native, back, wanted in (
        (lying(rows), layout.native_w1, layout.user_w1, up),
        (lying(down), layout.native_w2, layout.user_w2, down),
        (tensor_of(bias, dtype), layout.native_b1, layout.user_b1, bias[..., order]),
    ):
        native = to_native(user)
        np.testing.assert_array_equal(numpy(native), wanted)
        np.testing.assert_array_equal(numpy(back(native)), numpy(user))
        assert str(native.dtype).endswith(dtype)
        assert native.is_contiguous() or not transposed
    if gated:
        native = layouts.interleave_gate_up(tensor_of(rows))
        np.testing.assert_array_equal(numpy(native), up)
        np.testing.assert_array_equal(numpy(layouts.deinterleave_gate_up(native)), rows)


@pytest.mark.parametrize("half", [1, 2, 5])
@pytest.mark.parametrize("hidden", [1, 3])
@pytest.mark.parametrize("name", ["user_w1", "user_w2"])
def test_user_gradients_are_fresh_at_every_size(half, hidden, name):
    """An axis of one element makes a transpose contiguous as it is; the result must be a copy even
    so, the source is zeroed later.
    """
    for gated in (False, True):
        native = tensor_of(np.ones((2 * half if gated else half, hidden)))
        user = getattr(WeightLayout(True, gated), name)(native)
        native.zero_()
        assert (numpy(user) == 1).all(), gated


class TestSources:
    """`WeightSource`: nothing is copied before somebody reads, and native weights never."""

    def weights(self):
        return tensor_of(numbered((2, 6, 4))), tensor_of(numbered((2, 4, 3)))

    def test_native_weights_stay_the_users_memory(self):
        w1, w2 = self.weights()
        native = WeightSource.stacked(w1, w2).native()
        assert [data_ptr(weight) for weight in native[:2]] == [data_ptr(w1), data_ptr(w2)]
        assert native[2:] == (None, None)

    @pytest.mark.skipif(IS_PADDLE, reason="Paddle has no strided tensors by default")
    def test_a_strided_weight_is_copied_by_readers_only(self):
        _, w2 = self.weights()
        strided = tensor_of(numbered((2, 4, 6))).transpose(1, 2)
        source = WeightSource.stacked(strided, w2)
        assert data_ptr(source.anchor) == data_ptr(strided)
        with torch.no_grad():
            strided.zero_()
        assert not numpy(source.up[1]).any() and source.up[1].is_contiguous()
        assert source.pointers[0] == data_ptr(source.up[0]) != data_ptr(strided)


ENGINE = {
    ExpertLayout.INTERLEAVED: WeightLayout(),
    ExpertLayout.HALVES: WeightLayout(split_half=True),
    ExpertLayout.FUSED: WeightLayout(transposed=True, split_half=True),
    ExpertLayout.FUSED_INTERLEAVED: WeightLayout(transposed=True),
}
PAIRS = [(source, target) for source in ExpertLayout for target in ExpertLayout]
SHAPES = [(2, 3, 5), (1, 1, 1), (3, 4, 4), (1, 2, 1), (2, 1, 3), (2, 8, 4)]  # E, H, I


class TestConverter:
    """`convert_weights` and `convert_bias` between every pair of the public layouts."""

    def lying(self, layout, shape, gated=True, dtype="float32"):
        """Numbered weights in a layout, by the maps of the engines."""
        experts, hidden, inner = shape
        maps = ENGINE[layout] if gated else WeightLayout(ENGINE[layout].transposed)
        w1 = tensor_of(numbered((experts, inner * (2 if gated else 1), hidden)), dtype)
        w2 = tensor_of(numbered((experts, hidden, inner)), dtype)
        return maps.user_w1(w1), maps.user_w2(w2)

    @pytest.mark.parametrize("gated", [True, False])
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize(("source", "target"), PAIRS)
    def test_every_layout_becomes_every_other_and_returns(self, source, target, shape, gated):
        """In memory of its own, outside of the graph."""
        before, want = (self.lying(layout, shape, gated) for layout in (source, target))
        for weight in before:
            want_gradient(weight, True)
        after = convert_weights(*before, source, target.value)
        assert not {*map(data_ptr, before)} & {*map(data_ptr, after)}
        for got, wanted in zip(after, want, strict=True):
            assert not requires_grad(got)
            assert tuple(got.shape) == tuple(wanted.shape) and got.is_contiguous()
            np.testing.assert_array_equal(numpy(got), numpy(wanted))
        for got, wanted in zip(convert_weights(*after, target, source), before, strict=True):
            np.testing.assert_array_equal(numpy(got), numpy(wanted))

    def test_the_order_is_the_one_that_is_written_down(self):
        w1 = tensor_of(np.array([[[10.0], [11.0], [20.0], [21.0]]]))  # gate, gate, up, up; H = 1
        w2 = tensor_of(np.ones((1, 1, 2)))
        orders = {layout: convert_weights(w1, w2, "halves", layout)[0] for layout in ExpertLayout}
        assert {layout.value: numpy(w).ravel().tolist() for layout, w in orders.items()} == {
            "interleaved": [10, 20, 11, 21],
            "halves": [10, 11, 20, 21],
            "fused": [10, 11, 20, 21],
            "fused_interleaved": [10, 20, 11, 21],
        }

    def test_fleets_own_functions_agree(self):
        w1, w2 = self.lying(ExpertLayout.FUSED, (2, 3, 4))
        up, down = convert_weights(w1, w2, "fused", "interleaved")
        np.testing.assert_array_equal(numpy(up), numpy(fleet.fused_grouped_w1_to_sonic(w1)))
        np.testing.assert_array_equal(numpy(down), numpy(fleet.fused_transpose_w2_layout(w2)))

    @pytest.mark.parametrize(("source", "target"), PAIRS)
    def test_a_bias_follows_the_rows_of_its_weight(self, source, target):
        w1, w2 = self.lying(ExpertLayout.HALVES, (3, 1, 4))  # H = 1: a column of w1 is a bias
        bias = {
            layout: convert_weights(w1, w2, "halves", layout)[0].reshape([3, 8])
            for layout in ExpertLayout
        }
        np.testing.assert_array_equal(
            numpy(convert_bias(bias[source], source, target)), numpy(bias[target])
        )
