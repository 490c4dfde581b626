"""What `flush_gradients` of kernels/cuda/flush.cu does, on host memory: it sees addresses and
formats, no tensors and no layouts.
"""

from __future__ import annotations

import ctypes

import numpy as np
from engine.moe_golden import native_order
from framework import numpy

NUMBERS = {"float32": 21, "bfloat16": 22, "float16": 23}
FRESH = 64
WORDS = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}


def memory_at(address, shape, word):
    """An array that is that memory."""
    size = int(np.prod(shape)) * np.dtype(word).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), word).reshape(shape)


def to_bfloat16(values):
    """The bits of finite fp32 values rounded to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


class FlushByAddress:
    """Takes the kernel's arguments; counts its launches. The numbers of formats are its own: the
    caller may know none but those that it is told.
    """

    def __init__(self):
        self.launches = 0

    def gradient_format(self, dtype, fresh):
        return NUMBERS[dtype] + FRESH * fresh

    def flush_gradients(self, dw1, dw2, table, transposed, split_half, stream):
        self.launches += 1
        experts = int(dw1.shape[0])
        assert len(table) == 4 * experts
        pairs = np.asarray(table, np.int64).reshape(2, experts, 2)
        for entries, accumulator, halves in ((pairs[0], dw1, split_half), (pairs[1], dw2, False)):
            gradients = numpy(accumulator).astype(np.float32)
            order = native_order(gradients.shape[1], halves)
            for (address, code), native in zip(entries.tolist(), gradients, strict=True):
                matrix = np.empty_like(native)
                matrix[order] = native
                self.write(address, code, matrix.T if transposed else matrix)
            accumulator.zero_()

    @staticmethod
    def write(address, code, gradient):
        if address == 0:
            return
        (dtype,) = (name for name, number in NUMBERS.items() if number == code % FRESH)
        target = memory_at(address, gradient.shape, WORDS[dtype])
        held = from_bfloat16(target) if dtype == "bfloat16" else target.astype(np.float32)
        total = gradient if code >= FRESH else held + gradient
        target[:] = to_bfloat16(total) if dtype == "bfloat16" else total.astype(target.dtype)
