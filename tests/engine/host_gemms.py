"""The GEMMs and row kernels of engines `bf16` and `mxfp8` on the host: what `quack_gemm`,
`mx_gemm` and `ExpertRows` compute on a GPU, in plain tensor operations.
"""

from __future__ import annotations

import itertools
from functools import cache

import torch

from sonicmoe.engine.activations import activate, activate_backward
from sonicmoe.engine.blackwell.mx import (
    ATOM_BLOCKS,
    ATOM_BYTES,
    ATOM_ROWS,
    BLOCK,
    MxTensor,
    atom_of_tile,
    scale_atoms,
)
from sonicmoe.kernels.blackwell.quack_gemm import Stored
from sonicmoe.quant.recipes import ScaleFormat, rows
from sonicmoe.quant.reference import quantize


def rows_of_experts(cu_rows):
    """`(expert, first, end)` of those that have rows."""
    for expert, (first, end) in enumerate(itertools.pairwise(cu_rows.tolist())):
        if end > first:
            yield expert, first, end


class Gemms:
    """What becomes of the sums of a product, `(rows, fp32 sums)` of each expert; notes what was
    called.
    """

    COLUMNS: int  # of a tile, whose partial sums of dprobs are one

    def __init__(self, activation, parameters=()):
        self.kind, self.calls = (activation, parameters), []

    def load(self, name):
        self.calls.append("load " + (name if isinstance(name, str) else name[0]))

    def launch(self, name, *operands):
        """name: of a variant, as the compiled GEMMs know it."""
        product, *stored = (name,) if isinstance(name, str) else name
        getattr(self, product.replace(" ", "_"))(*operands, *stored)

    def up_only(self, *operands):
        self.up(*operands)

    def store(self, name, products, out):
        self.calls.append(name)
        for own, acc in products:
            out[own] = acc.to(out.dtype)

    def store_up(self, products, z, put_y1):
        self.calls.append("up" if z is not None else "up_only")
        for own, acc in products:
            if z is not None:
                z[own] = acc.to(z.dtype)
            put_y1(own, activate(acc, *self.kind))

    def store_dgated(self, products, dz, z, y1s, prob, partials):
        self.calls.append("dgated")
        for own, dy1 in products:
            p = prob[own].unsqueeze(-1)
            y1, gradient = activate_backward(z[own].float(), dy1 * p, *self.kind)
            dz[own], y1s[own] = gradient.to(dz.dtype), (y1 * p).to(y1s.dtype)
            parts = (dy1 * y1).split(self.COLUMNS, 1)
            partials[own] = torch.stack([part.sum(1) for part in parts], 1)


class Bf16Rows:
    """Stands for `ExpertRows` on a host, with the same calls."""

    def __init__(self, routing):
        self.cu_rows = routing.padded_offsets.clamp(max=routing.num_rows).to(torch.int32)
        self.gather_index = routing.row_token.clone()
        for first, count, padded in routing.expert_slices():
            if count:
                last = routing.row_token[first + count - 1]
                self.gather_index[first + count : first + padded] = last

    @classmethod
    def of(cls, routing):
        return cls(routing)

    def sum_partials(self, partials, dout, b2):
        sums = partials.sum(1)
        if b2 is not None:
            for e, first, end in rows_of_experts(self.cu_rows):
                sums[first:end] += dout[self.gather_index[first:end]].float() @ b2[e]
        return sums

    def add_columns(self, values, accumulator, *, weight):
        for e, first, end in rows_of_experts(self.cu_rows):
            own = slice(first, end)
            if weight is None:
                accumulator[e] += values[own].float().sum(0)
            else:
                gathered = values[self.gather_index[own]].float()
                accumulator[e] += (gathered * weight[own].unsqueeze(-1)).sum(0)


class Bf16Gemms(Gemms):
    """Stands for the GEMMs of quack-kernels on a host, with the same variants."""

    COLUMNS = 24

    @classmethod
    def tiles(cls, shape):
        return -(-shape.intermediate // cls.COLUMNS)

    def __init__(self, shape):
        super().__init__(shape.activation, shape.parameters)

    def products(self, a, w, bias, cu_rows, index=None):
        """`a_e w_e^T + bias_e`."""
        for e, first, end in rows_of_experts(cu_rows):
            own = slice(first, end)
            left = a[own] if index is None else a[index[own]]
            product = left.float() @ w[e].float().T
            yield own, product if bias is None else product + bias[e]

    def up(self, x, w1, z, y1, b1, cu_rows, index):
        def put(own, values):
            y1[own] = values.to(y1.dtype)

        self.store_up(self.products(x, w1, b1, cu_rows, index), z, put)

    def up_again(self, x, w1, z, b1, cu_rows, index):
        self.store("up_again", self.products(x, w1, b1, cu_rows, index), z)

    def down(self, y1, w2, y2, b2, cu_rows, index):
        assert index is None
        self.store("down", self.products(y1, w2, b2, cu_rows), y2)

    def dgated(self, dout, w2, dz, z, y1s, prob, partials, cu_rows, index):
        products = self.products(dout, w2.transpose(1, 2), None, cu_rows, index)
        self.store_dgated(products, dz, z, y1s, prob, partials)

    def dgrad(self, dz, w1, dx_rows, bias, cu_rows, index):
        assert bias is index is None
        self.store("dgrad", self.products(dz, w1.transpose(1, 2), None, cu_rows), dx_rows)

    def wgrad_down(self, dout, y1s, dw2, cu_rows, index, stored):
        self.calls.append("wgrad_down")
        self._wgrad(dout[index], y1s, dw2, cu_rows, stored is Stored.HIDDEN)

    def wgrad_up(self, x, dz, dw1, cu_rows, index, stored):
        self.calls.append("wgrad_up")
        halves = stored is Stored.HALVES
        self._wgrad(dz, x[index], dw1, cu_rows, stored is Stored.INNER, halves)

    @staticmethod
    def _wgrad(left, right, gradient, cu_rows, turned, halves=False):
        for e, first, end in rows_of_experts(cu_rows):
            product = left[first:end].float().T @ right[first:end].float()
            product = torch.cat([product[0::2], product[1::2]]) if halves else product
            gradient[e] += product.T if turned else product


def scale_offset(row, block, blocks):
    """Byte of the scale of one row and one block of 32 of the contraction, in a matrix of `blocks`
    blocks a row.
    """
    # An atom is 32 lines of 16 bytes: rows r, r + 32, r + 64 and r + 96 with four blocks each.
    across = -(-blocks // ATOM_BLOCKS)
    atom = row // ATOM_ROWS * across + block // ATOM_BLOCKS
    in_atom = row % ATOM_ROWS
    return atom * ATOM_BYTES + 16 * (in_atom % 32) + 4 * (in_atom // 32) + block % ATOM_BLOCKS


@cache
def places(m, k):
    """Of the scale of every element of an operand `[M, K]` that is contracted over K, by the formula
    of the GEMMs, byte by byte of the blocked layout.
    """
    blocks = -(-k // 32)
    row = scale_offset(torch.arange(m)[:, None], torch.arange(blocks), blocks)
    return row.repeat_interleave(32, 1)[:, :k]


def decoded(codes, atoms):
    """`[M, K]` codes with scales `[ceil(M/128), ceil(K/128), 512]`; every other byte of these is
    somebody else's.
    """
    held = atoms.reshape(-1)[places(*codes.shape)].to(torch.int32)
    scale = torch.where(held == 255, float("nan"), torch.exp2(held.float() - 127))
    return codes.view(torch.float8_e4m3fn).float() * scale


class MxRows:
    """Stands for `ExpertRows`, and has the padded rows."""

    def __init__(self, routing):
        self.cu_rows = routing.padded_offsets.to(torch.int32)

    def sum_partials(self, partials, dout, b2):
        assert b2 is None
        return partials.sum(1)


class MxKernels:
    """The quantisers of `mxfp8`, by the exact one."""

    @staticmethod
    def quantize_rows_iso32(source, token, ends, codes, by_columns, by_rows, gathers, stream):
        # An expert's rows are whole blocks, so all rows are one matrix.
        if not len(token):
            return
        rows = source[token.clamp(min=0).long()] if gathers else source
        values = torch.where((token >= 0)[:, None], rows.float(), 0.0)
        q = quantize(values, BLOCK, scale_format=ScaleFormat.POW2)
        codes.copy_(q.bytes)
        atoms = atom_of_tile(ends, len(token))
        # Atoms between experts keep what they hold.
        if by_columns is not None:
            by_columns[atoms] = scale_atoms(q)[0]
        if by_rows is not None:
            by_rows[:, atoms] = scale_atoms(q)[1]

    @staticmethod
    def update(weights, source):
        """`MxWeights` of what lies on the host."""
        made = []
        for native in source.native()[:2]:
            # A square block has one scale for both directions, so `scale_atoms` serves dgrad too.
            q = quantize(native, BLOCK, scale_format=ScaleFormat.POW2)
            made.append(MxTensor.of(q.bytes, *scale_atoms(q)))
        weights._forward, weights._layout = tuple(made), None


class MxGemms(Gemms):
    """Those of `mxfp8`: behind codes come their scales."""

    COLUMNS = 256

    @staticmethod
    def experts(cu_rows):
        """`(expert, its rows, its atoms)` of those that have any."""
        for e, first, end in rows_of_experts(cu_rows):
            atom = first // 128 + e
            yield e, slice(first, end), slice(atom, atom + (end - first) // 128)

    def products(self, a, w, cu_rows, transpose=False):
        """`a_e w_e^T`; `transpose`: w is `[E, K, N]`."""
        for e, own, atoms in self.experts(cu_rows):
            left = decoded(a[0][own], a[1][atoms])
            codes = w[0][e].T if transpose else w[0][e]
            yield own, left @ decoded(codes.contiguous(), w[1][e]).T

    def up(self, x, x_scale, w1, w1_scale, z, y1, y1_scale, cu_rows):
        atoms_of = {own.start: atoms for _, own, atoms in self.experts(cu_rows)}

        def put(own, values):
            q = quantize(values, rows(32), scale_format=ScaleFormat.POW2)
            y1[own], atoms = q.bytes, atoms_of[own.start]
            flat = y1_scale[atoms].reshape(-1).clone()
            held = (q.scale_inv.view(torch.int32) >> 23).to(torch.uint8)
            flat[places(*q.bytes.shape)[:, ::32].reshape(-1)] = held.reshape(-1)
            y1_scale[atoms] = flat.reshape(y1_scale[atoms].shape)

        self.store_up(self.products((x, x_scale), (w1, w1_scale), cu_rows), z, put)

    def down(self, y1, y1_scale, w2, w2_scale, y2, cu_rows):
        self.store("down", self.products((y1, y1_scale), (w2, w2_scale), cu_rows), y2)

    def dgated(self, dout, dout_scale, w2, w2_scale, dz, z, y1s, prob, partials, cu_rows):
        products = self.products((dout, dout_scale), (w2, w2_scale), cu_rows, transpose=True)
        self.store_dgated(products, dz, z, y1s, prob, partials)

    def dgrad(self, dz, dz_scale, w1, w1_scale, dx_rows, cu_rows):
        products = self.products((dz, dz_scale), (w1, w1_scale), cu_rows, transpose=True)
        self.store("dgrad", products, dx_rows)

    def wgrad(self, left, left_scale, right, right_scale, dw, cu_rows, halves=False):
        self.calls.append("wgrad")
        self._wgrad((left, left_scale), (right, right_scale), dw, cu_rows, halves)

    def wgrad_halves(self, *operands):
        self.wgrad(*operands, True)

    def _wgrad(self, left, right, dw, cu_rows, halves):
        for e, own, atoms in self.experts(cu_rows):
            turned = (
                (q[0][own].T.contiguous(), q[1][:, atoms].contiguous()) for q in (left, right)
            )
            one, other = itertools.starmap(decoded, turned)
            product = one @ other.T
            dw[e] += torch.cat([product[0::2], product[1::2]]) if halves else product
