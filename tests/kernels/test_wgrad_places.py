"""The index arithmetic of wgrad's tiles, walked on the host: every element of a destination is added
to once, by the product it stands for, and nothing beside it. The last test has the rule for fetched sums.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import kept
import pytest
import torch
from kernels.host_cuda import cuda_include
from kernels.needs import HOST_COMPILER
from worlds import ROOT

from sonicmoe.engine.gradient_places import GradientPlaces
from sonicmoe.layouts import WeightLayout

pytestmark = HOST_COMPILER
SOURCE = Path(__file__).with_name("wgrad_walk.cpp")
EXPERTS = 3
# (H, I): whole tiles, an odd number of 64s, H no multiple of 128, one box of each
SIZES = [(256, 128), (272, 320), (144, 64), (16, 192)]


@pytest.fixture(scope="module")
def walk(artefacts):
    flags = "-std=c++20", "-O1", f"-I{cuda_include()}"
    library = kept.shared_object(artefacts, "wgrad_walk", SOURCE, *flags)
    function = ctypes.CDLL(str(library)).walk
    number, array = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = [number, number, ctypes.c_bool, *[number] * 5, ctypes.c_int, *[array] * 3]
    return function


def walked(walk, target, split, experts):
    """`(count, left row, right row)` of every element of the destination's memory; its first element
    is the memory's.
    """
    m, n = target.native_size
    item = target.tensors[0].element_size()
    places, size = target.places(split), target.tensors[0].untyped_storage().nbytes() // item
    touched = [torch.full((size,), start, dtype=torch.int32) for start in (0, -2, -2)]
    step = (places[-1].address - places[0].address) // item // max(len(places) - 1, 1)
    for expert in experts:
        _, *strides = places[expert]
        walk(m, n, split, *strides, step, expert, item, *(array.data_ptr() for array in touched))
    return touched


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("split_half", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_element_once(walk, dtype, split_half, transposed, permuted, size):
    """For both gradients; expert 1 gets none."""
    hidden, inner = size
    layout = WeightLayout(transposed, split_half)
    ids = torch.arange(2 * inner * hidden, dtype=torch.int32)
    for (m, n), split, to_user in (
        ((2 * inner, hidden), split_half, layout.user_w1),
        ((hidden, inner), False, layout.user_w2),
    ):
        # Row and column of each native element, as the user's layout has them.
        row, column = (
            to_user(part.reshape(m, n)) for part in (ids[: m * n] // n, ids[: m * n] % n)
        )
        # Columns and experts behind the matrices' own are somebody else's.
        shape = (EXPERTS, *row.shape)
        lead, rows, columns = shape[0] + 1, *(shape[2:0:-1] if permuted else shape[1:])
        memory = torch.zeros(lead, rows + 2, columns + 8, dtype=dtype)
        stacked = memory[:EXPERTS, :rows, :columns]
        stacked = stacked.transpose(1, 2) if permuted else stacked
        target = GradientPlaces.stacked(stacked, EXPERTS, layout)
        count, left, right = walked(walk, target, split, (0, 2))

        def as_destination(flat, like=stacked):
            return flat.as_strided(like.shape, like.stride())

        wanted = torch.zeros(memory.numel(), dtype=torch.int32)
        as_destination(wanted)[[0, 2]] = 1
        assert torch.equal(count, wanted)
        for expert in (0, 2):
            assert torch.equal(as_destination(left)[expert], row)
            assert torch.equal(as_destination(right)[expert], column)


RULE = ROOT / "sonicmoe/kernels/sm90/fetched_sums.hpp"
SHIM = """
#include <cuda_runtime.h>
#define TVM_FFI_CHECK_CUDA_ERROR(call) call
struct DLDevice { int device_type, device_id; };
"""
# Device 0 is an H100, device 1 an H200: kHz, and bits.
DRIVER = """
extern "C" int questions = 0;
extern "C" cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int device) {
  const int kilohertz[] = {2619000, 3201000}, bits[] = {5120, 6144};
  *value = (what == cudaDevAttrMemoryClockRate ? kilohertz : bits)[device];
  return ++questions, cudaSuccess;
}
extern "C" bool fetches(int output, int rows, bool half, int device) {
  return sonicmoe::fetches_sums(static_cast<sonicmoe::sm90::WgradOutput>(output), 8 * rows, 8,
      half ? sonicmoe::kRowsToFetchHalf : sonicmoe::kRowsToFetch, {2, device});
}
"""


def test_faster_memory_has_a_lower_bound_and_is_asked_for_once(artefacts):
    text = RULE.read_text(encoding="utf-8").replace('#include "../host/border.hpp"', SHIM)
    flags = "-std=c++20", f"-I{cuda_include()}", f"-I{RULE.parent}"
    library = kept.shared_object(artefacts, "fetched_sums", text + DRIVER, *flags, headers=[RULE])
    loaded = ctypes.CDLL(str(library))
    fetches = loaded.fetches
    fetches.restype = ctypes.c_bool
    cards = [(half, device) for half in (False, True) for device in (0, 1)]
    most = [sum(fetches(0, rows, *card) for rows in range(1, 2000)) for card in cards]
    assert most == [1280, 832, 640, 320] and not fetches(1, 1, False, 0)
    assert ctypes.c_int.in_dll(loaded, "questions").value == 4  # two of each card
