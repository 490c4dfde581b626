"""The BF16 GEMMs for Hopper on the host: what the entry points of `kernels/sm90/bf16_*.cu` say they
compute, in plain tensor operations, of the same arguments.
"""

from __future__ import annotations

import ctypes
import itertools

import torch
from engine.host_kernels import (
    Destination,
    aggregate_rows,
    gather,
    gradient_parts,
    held,
    narrow_gradient,
    narrow_rows,
    prepare_factor,
    sum_or_zero,
)

from sonicmoe.engine.activations import activate, activate_backward
from sonicmoe.engine.gradient_places import WgradOutput
from sonicmoe.enums import ACTIVATIONS, is_glu


def turned(columns, halves):
    """Gates and then up values, `[rows, 2I]`, as the two in turns."""
    if not halves:
        return columns
    gate, up = columns.chunk(2, 1)
    return torch.stack([gate, up], 2).flatten(1)


def in_halves(columns, halves):
    """The way back."""
    return torch.cat([columns[:, ::2], columns[:, 1::2]], 1) if halves else columns


def ordered(factor, halves):
    """A factor of the up-projection, whose rows are native, in the order of w1's rows."""
    assert factor.is_contiguous()
    return torch.cat([factor[:, ::2], factor[:, 1::2]], 1) if halves else factor


def readable(weight):
    """A matrix of each expert, where the copy engine can read it."""
    *outer, last = weight.stride()
    assert last == 1 and all(stride % 8 == 0 for stride in outer), weight.stride()
    assert weight.data_ptr() % 16 == 0
    return weight


def joined(weight, second):
    """w1 as one tensor, also of gate and up in two, which must lie alike."""
    if second is None:
        return weight
    assert readable(weight).stride() == readable(second).stride()
    return torch.cat([weight, second], 1)


def launched(kernel):
    """The kernel of a launch's arguments."""
    return lambda *arguments: kernel(*map(held, arguments))


class HopperGemms:
    """Stands for the loaded modules of one activation; notes what was called, on how many
    multiprocessors.
    """

    COLUMNS = 24  # of a tile of dgated, whose partial sums of dprobs are one

    def __init__(self, activation, parameters=(), calls=None, lent=None):
        self.kind, self.gated = (activation, parameters), is_glu(activation)
        values = ACTIVATIONS[activation].values(parameters).values()
        self.gate = tuple([*values, 0.0, 0.0][:2])
        self.calls = [] if calls is None else calls
        self.lent = set() if lent is None else lent

    def kernels(self):
        """By the names of their modules, with the others that the passes launch."""
        own = "up", "grouped_gemm", "dgated"
        beside = narrow_rows, narrow_gradient, aggregate_rows, sum_or_zero
        return {name: launched(lambda *given, name=name: getattr(self, name)(*given)) for name in own} | {
            kernel.__name__: kernel for kernel in (*beside, gradient_parts, prepare_factor)
        }  # fmt: skip

    def note(self, call, rows, multiprocessors, stream):
        assert stream == 0
        if len(rows):  # without any, the entry points launch nothing
            self.calls.append(call)
            self.lent.add(multiprocessors)

    def products(self, a, b, transposed, bias, padded_offsets, u=None, factor=None):
        """`(rows, fp32 sums)` of each expert that has rows: `a_e b_e^T + bias_e + u_e factor_e^T`."""
        matrices = readable(b) if isinstance(b, torch.Tensor) else b.read(a.dtype)
        assert len(matrices) + 1 == len(padded_offsets)
        for e, (first, end) in enumerate(itertools.pairwise(padded_offsets.tolist())):
            if end > first:
                matrix = matrices[e].float()
                sums = a[first:end].float() @ (matrix if transposed else matrix.T)
                sums = sums if bias is None else sums + bias[e]
                if u is not None:
                    assert u.is_contiguous() and factor[e].shape == (sums.shape[1], u.shape[1])
                    sums = sums + u[first:end].float() @ factor[e].float().T
                yield slice(first, end), sums

    def up(
        self, x, w1, w1_up, transposed, halves, b1, u, factor, row_token, padded_offsets, z, y1,
        first, second, multiprocessors, stream,
    ):  # fmt: skip
        name = "up" if None not in (z, y1) else "up_only" if z is None else "up_again"
        self.note(name, row_token, multiprocessors, stream)
        assert (first, second) == self.gate
        a, halves = gather(x, row_token), halves and self.gated
        w1 = joined(w1, w1_up)
        factor = None if factor is None else ordered(factor, halves)
        for own, sums in self.products(a, w1, transposed, b1, padded_offsets, u, factor):
            if z is not None:
                z[own] = sums.to(z.dtype)
            if y1 is not None:
                y1[own] = activate(turned(sums, halves), *self.kind).to(y1.dtype)

    def grouped_gemm(
        self, a, b, b_rest, transposed, bias, u, factor, padded_offsets, out, multiprocessors,
        stream,
    ):  # fmt: skip
        self.note("grouped_gemm", a, multiprocessors, stream)
        for own, sums in self.products(
            a, joined(b, b_rest), transposed, bias, padded_offsets, u, factor
        ):
            out[own] = sums.to(out.dtype)

    def dgated(
        self, dout, w2, transposed, halves, u, factor, z, row_prob, row_token, padded_offsets,
        dz, y1s, partials, first, second, multiprocessors, stream,
    ):  # fmt: skip
        self.note("dgated", row_token, multiprocessors, stream)
        assert (first, second) == self.gate
        a, halves = gather(dout, row_token), halves and self.gated
        # The matrices as dgrad reads them.
        for own, dy1 in self.products(a, w2, not transposed, None, padded_offsets, u, factor):
            p = row_prob[own].unsqueeze(1)
            y1, gradient = activate_backward(turned(z[own].float(), halves), dy1 * p, *self.kind)
            dz[own], y1s[own] = in_halves(gradient, halves).to(dz.dtype), (y1 * p).to(y1s.dtype)
            parts = (dy1 * y1).split(self.COLUMNS, 1)
            partials[:, own] = torch.stack([part.sum(1) for part in parts])

    def wgrad(
        self, tokens, rows, tokens_first, row_token, padded_offsets, counts, destination,
        multiprocessors, stream,
    ):  # fmt: skip
        self.note("wgrad_down" if tokens_first else "wgrad_up", rows, multiprocessors, stream)
        (self.wgrad_down if tokens_first else self.wgrad_up)(
            gather(tokens, row_token).float(), rows.float(), padded_offsets, counts, destination
        )

    @staticmethod
    def wgrad_destination(*arguments):
        return HopperDestination(*arguments)

    def wgrad_down(self, tokens, rows, padded_offsets, counts, destination):
        assert not destination.split
        self.store(tokens, rows, padded_offsets, counts, destination)

    def wgrad_up(self, tokens, rows, padded_offsets, counts, destination):
        along_tokens = all(place[3] == 1 for place in destination.places if place[0])
        assert along_tokens or not destination.split, "a gradient in two parts"
        self.store(rows, tokens, padded_offsets, counts, destination)

    @staticmethod
    def store(left, right, padded_offsets, counts, destination):
        experts = len(destination.places)
        assert len(padded_offsets) == experts + 1 == len(counts) + 1 and len(left) > 0
        for e, (first, count) in enumerate(
            zip(padded_offsets.tolist(), counts.tolist(), strict=False)
        ):
            own = slice(first, first + count)
            product = left[own].T @ right[own]
            assert tuple(product.shape) == destination.size
            if count or destination.output is not WgradOutput.ADD_F32:
                destination.put(e, turned(product.T, destination.split).T)


class HostMatrices:
    """What `expert_matrices` is told."""

    def __init__(self, addresses, rows, columns):
        assert columns % 8 == 0 and all(address % 16 == 0 for address in addresses)
        self.addresses, self.size = addresses, (rows, columns)

    def read(self, dtype):
        rows, columns = self.size
        memory = ctypes.c_byte * (rows * columns * dtype.itemsize)
        return [
            torch.frombuffer(memory.from_address(at), dtype=dtype).reshape(self.size)
            for at in self.addresses
        ]


class HopperDestination(Destination):
    """Where gradients lie, as the copy engine can reach it."""

    def __init__(self, m, n, split, places, output):
        super().__init__(m, n, split, places, output)
        item = 2 if self.output is WgradOutput.WRITE_BF16 else 4
        for address, stride_m, _, stride_n in self.places:
            strides = sorted((stride_m, stride_n))
            assert not address or (strides[0] == 1 and strides[1] * item % 16 == 0)
