"""Every layout map equals an explicit index definition and is undone by its inverse."""

from __future__ import annotations

import numpy as np
import pytest
from framework import numpy, tensor, torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sonicmoe import layouts
from sonicmoe.errors import LayoutError

DTYPES = ["float32", "bfloat16", "float16"]
sizes = st.integers(1, 9)
leads = st.lists(st.integers(1, 3), max_size=2).map(tuple)
EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)


def numbered(shape):
    """Distinct values, exact in every dtype."""
    return (np.arange(np.prod(shape)).reshape(shape) % 256).astype(np.float64)


def tensor_of(array, dtype="float32"):
    return tensor(array, torch.float32).to(getattr(torch, dtype))


def interleaved(rows):
    """Row 2i is gate i, row 2i + 1 is up i."""
    n = rows.shape[-2]
    result = np.empty_like(rows)
    for i in range(n // 2):
        result[..., 2 * i, :] = rows[..., i, :]
        result[..., 2 * i + 1, :] = rows[..., n // 2 + i, :]
    return result


@EXAMPLES
@given(leads, sizes, sizes, st.sampled_from(DTYPES))
def test_interleave(lead, half, hidden, dtype):
    rows = numbered((*lead, 2 * half, hidden))
    native = layouts.interleave_gate_up(tensor_of(rows, dtype))
    np.testing.assert_array_equal(numpy(native), interleaved(rows))
    np.testing.assert_array_equal(numpy(layouts.deinterleave_gate_up(native)), rows)
    assert str(native.dtype).endswith(dtype)


@EXAMPLES
@given(leads, sizes, sizes, st.booleans())
def test_w1(lead, hidden, intermediate, gated):
    """native[.., 2i, h] = user[.., h, i] (gate), native[.., 2i + 1, h] = user[.., h, I + i] (up)."""
    user = numbered((*lead, hidden, intermediate * (2 if gated else 1)))
    native = layouts.native_w1_from_split_half(tensor_of(user), gated)
    got = numpy(native)
    for h in range(hidden):
        for i in range(intermediate):
            if gated:
                np.testing.assert_array_equal(got[..., 2 * i, h], user[..., h, i])
                np.testing.assert_array_equal(
                    got[..., 2 * i + 1, h], user[..., h, intermediate + i]
                )
            else:
                np.testing.assert_array_equal(got[..., i, h], user[..., h, i])
    assert native.is_contiguous()
    np.testing.assert_array_equal(numpy(layouts.split_half_from_native_w1(native, gated)), user)


@EXAMPLES
@given(leads, sizes, sizes)
def test_w2(lead, intermediate, hidden):
    user = numbered((*lead, intermediate, hidden))
    native = layouts.native_w2_from_user(tensor_of(user))
    got = numpy(native)
    for i in range(intermediate):
        for h in range(hidden):
            np.testing.assert_array_equal(got[..., h, i], user[..., i, h])
    assert native.is_contiguous()
    np.testing.assert_array_equal(numpy(layouts.user_w2_from_native(native)), user)


@EXAMPLES
@given(leads, sizes)
def test_bias(lead, half):
    split = numbered((*lead, 2 * half))
    native = layouts.interleave_bias(tensor_of(split))
    for i in range(half):
        np.testing.assert_array_equal(numpy(native)[..., 2 * i], split[..., i])
        np.testing.assert_array_equal(numpy(native)[..., 2 * i + 1], split[..., half + i])
    np.testing.assert_array_equal(numpy(layouts.deinterleave_bias(native)), split)


@pytest.mark.parametrize("half", [1, 2, 5])
@pytest.mark.parametrize("hidden", [1, 3])
@pytest.mark.parametrize("name", ["split_half_from_native_w1", "user_w2_from_native"])
def test_user_gradients_are_fresh_at_every_size(half, hidden, name):
    """An axis of one element makes a transpose contiguous as it is; the result must be a copy even
    so, the source is zeroed later.
    """
    gated = [(True,), (False,)] if name == "split_half_from_native_w1" else [()]
    for more in gated:
        native = tensor_of(np.ones((2 * half, hidden) if more == (True,) else (half, hidden)))
        user = getattr(layouts, name)(native, *more)
        native.zero_()
        assert (numpy(user) == 1).all(), more


def test_gate_and_up_are_not_exchanged():
    """[g0 g1 | u0 u1] becomes g0 u0 g1 u1: the concatenated layout read as interleaved would be
    nonsense without an error.
    """
    native = layouts.native_w1_from_split_half(
        tensor_of(np.array([[10.0, 11.0, 20.0, 21.0]])), True
    )
    assert numpy(native).ravel().tolist() == [10, 20, 11, 21]


@pytest.mark.parametrize("function", ["interleave_gate_up", "deinterleave_gate_up"])
def test_an_odd_number_of_rows_is_refused(function):
    with pytest.raises(LayoutError, match=rf"{function} needs an even number of rows.*\(5, 2\)"):
        getattr(layouts, function)(tensor_of(numbered((5, 2))))


def test_stack_copies():
    parts = [tensor_of(numbered((2, 3)) + k) for k in range(3)]
    stacked = layouts.stack(parts)
    parts[1].zero_()
    np.testing.assert_array_equal(
        numpy(stacked), np.stack([numbered((2, 3)) + k for k in range(3)])
    )
