"""The GEMMs of engine `mxfp8` on the host: what `kernels.mx_gemm.MxGemms` computes on a GPU, from the
codes and scales that it is handed, in plain tensor operations.

Scales are found by the formula of the GEMMs, byte by byte of the blocked layout, and every byte that
no GEMM may read is somebody else's.
"""

from __future__ import annotations

import itertools

import torch

from sonicmoe.engine.activations import activate, activate_backward
from sonicmoe.kernels.quack_gemm import Stored
from sonicmoe.quant.mx import scale_offset
from sonicmoe.quant.recipes import ScaleFormat, rows
from sonicmoe.quant.reference import quantize

DPROB_COLUMNS = 256


def places(m, k):
    """Of the scale of every element of an operand `[M, K]` that is contracted over K."""
    blocks = -(-k // 32)
    row = torch.tensor([[scale_offset(i, b, blocks) for b in range(blocks)] for i in range(m)])
    return row.repeat_interleave(32, 1)[:, :k]


def decoded(codes, atoms):
    """`[M, K]` codes with scales `[ceil(M/128), ceil(K/128), 512]`."""
    held = atoms.reshape(-1)[places(*codes.shape)].to(torch.int32)
    scale = torch.where(held == 255, float("nan"), torch.exp2(held.float() - 127))
    return codes.view(torch.float8_e4m3fn).float() * scale


class HostGemms:
    """As `MxGemms`; each operand a pair of codes and scales."""

    def __init__(self, activation, parameters=()):
        self.activation, self.parameters = activation, parameters
        self.calls = []

    def dprob_tiles(self, intermediate):
        return -(-intermediate // DPROB_COLUMNS)

    @staticmethod
    def experts(cu_rows):
        """`(expert, its rows, its atoms)` of those that have any."""
        starts = cu_rows.tolist()
        for e, (first, end) in enumerate(itertools.pairwise(starts)):
            atom = first // 128 + e
            if end > first:
                yield e, slice(first, end), slice(atom, atom + (end - first) // 128)

    def products(self, a, w, cu_rows, transpose):
        """`(rows, atoms, a_e w_e^T)`; `transpose`: w is `[E, K, N]`."""
        for e, own, atoms in self.experts(cu_rows):
            left = decoded(a[0][own], a[1][atoms])
            codes = w[0][e].T if transpose else w[0][e]
            yield own, atoms, left @ decoded(codes.contiguous(), w[1][e]).T

    def up(self, x, w1, z, y1, cu_rows):
        self.calls.append("up" if z is not None else "up_only")
        for own, atoms, acc in self.products(x, w1, cu_rows, False):
            if z is not None:
                z[own] = acc.to(z.dtype)
            q = quantize(
                activate(acc, self.activation, self.parameters),
                rows(32),
                scale_format=ScaleFormat.POW2,
            )
            y1[0][own] = q.bytes
            flat = y1[1][atoms].reshape(-1).clone()
            held = (q.scale_inv.view(torch.int32) >> 23).to(torch.uint8)
            where = places(*q.bytes.shape)[:, ::32]
            flat[where.reshape(-1)] = held.reshape(-1)
            y1[1][atoms] = flat.reshape(y1[1][atoms].shape)

    def up_again(self, x, w1, z, cu_rows):
        self.calls.append("up_again")
        for own, _, acc in self.products(x, w1, cu_rows, False):
            z[own] = acc.to(z.dtype)

    def down(self, y1, w2, y2, cu_rows):
        self.calls.append("down")
        for own, _, acc in self.products(y1, w2, cu_rows, False):
            y2[own] = acc.to(y2.dtype)

    def dgated(self, dout, w2, dz, z, y1s, prob, partials, cu_rows):
        self.calls.append("dgated")
        for own, _, dy1 in self.products(dout, w2, cu_rows, True):
            p = prob[own].unsqueeze(-1)
            y1, dz_own = activate_backward(
                z[own].float(), dy1 * p, self.activation, self.parameters
            )
            dz[own], y1s[own] = dz_own.to(dz.dtype), (y1 * p).to(y1s.dtype)
            parts = (dy1 * y1).split(DPROB_COLUMNS, 1)
            partials[own] = torch.stack([part.sum(1) for part in parts], 1)

    def dgrad(self, dz, w1, dx_rows, cu_rows):
        self.calls.append("dgrad")
        for own, _, acc in self.products(dz, w1, cu_rows, True):
            dx_rows[own] = acc.to(dx_rows.dtype)

    def load_wgrad(self, stored):
        self.calls.append(f"load {stored.value}")

    def _transposed(self, q, own, atoms):
        return decoded(q[0][own].T.contiguous(), q[1][:, atoms].contiguous())

    def _wgrad(self, left, right, dw, cu_rows, halves):
        for e, own, atoms in self.experts(cu_rows):
            product = self._transposed(left, own, atoms) @ self._transposed(right, own, atoms).T
            if halves:
                product = torch.cat([product[0::2], product[1::2]])
            dw[e] += product

    def wgrad_down(self, dout, y1s, dw2, cu_rows, stored=Stored.INNER):
        self.calls.append("wgrad_down")
        left, right = (dout, y1s) if stored is Stored.INNER else (y1s, dout)
        self._wgrad(left, right, dw2, cu_rows, False)

    def wgrad_up(self, x, dz, dw1, cu_rows, stored=Stored.HIDDEN):
        self.calls.append("wgrad_up")
        left, right = (x, dz) if stored is Stored.INNER else (dz, x)
        self._wgrad(left, right, dw1, cu_rows, stored is Stored.HALVES)


class HostRows:
    """As `bf16.ExpertRows`, of the padded rows."""

    def __init__(self, routing):
        self.cu_rows = routing.padded_offsets.to(torch.int32)

    def sum_partials(self, partials, dout, b2):
        assert b2 is None
        return partials.sum(1)
