"""The GEMMs and row kernels of engine `bf16` on the host: what `kernels.quack_gemm.GroupedGemms` and
`bf16.ExpertRows` compute on a GPU, in plain tensor operations.
"""

from __future__ import annotations

import itertools

import torch

from sonicmoe.engine.activations import activate, activate_backward
from sonicmoe.kernels.quack_gemm import Stored

DPROB_COLUMNS = 24


class HostRows:
    """As `ExpertRows`."""

    def __init__(self, routing):
        self.cu_rows = routing.padded_offsets.clamp(max=routing.num_rows).to(torch.int32)
        self.gather_index = routing.row_token.clone()
        for first, count, padded in routing.expert_slices():
            if count:
                self.gather_index[first + count : first + padded] = routing.row_token[
                    first + count - 1
                ]

    @classmethod
    def of(cls, routing):
        return cls(routing)

    def experts(self):
        """`(expert, its rows)` of those that have any."""
        for e, (first, end) in enumerate(itertools.pairwise(self.cu_rows.tolist())):
            if end > first:
                yield e, slice(first, end)

    def sum_partials(self, partials, dout, b2):
        sums = partials.sum(1)
        if b2 is not None:
            for e, own in self.experts():
                sums[own] += dout[self.gather_index[own]].float() @ b2[e]
        return sums

    def add_columns(self, values, accumulator, *, weight):
        for e, own in self.experts():
            if weight is None:
                accumulator[e] += values[own].float().sum(0)
            else:
                gathered = values[self.gather_index[own]].float()
                accumulator[e] += (gathered * weight[own].unsqueeze(-1)).sum(0)


class HostGemms:
    """As `GroupedGemms`; notes what was called."""

    def __init__(self, shape):
        self.shape, self.calls = shape, []
        self.dprob_tiles = -(-shape.intermediate // DPROB_COLUMNS)

    def activate(self, z):
        return activate(z, self.shape.activation, self.shape.parameters)

    def products(self, a, w, bias, cu_rows, index=None):
        """`(rows, a_e w_e^T + bias_e)` in fp32."""
        for e, (first, end) in enumerate(itertools.pairwise(cu_rows.tolist())):
            own = slice(first, end)
            left = a[own] if index is None else a[index[own]]
            product = left.float() @ w[e].float().T
            yield own, product if bias is None else product + bias[e]

    def up(self, x, w1, z, y1, b1, cu_rows, index):
        self.calls.append("up" if z is not None else "up_only")
        for own, acc in self.products(x, w1, b1, cu_rows, index):
            if z is not None:
                z[own] = acc.to(z.dtype)
            y1[own] = self.activate(acc).to(y1.dtype)

    def up_again(self, x, w1, z, b1, cu_rows, index):
        self.calls.append("up_again")
        for own, acc in self.products(x, w1, b1, cu_rows, index):
            z[own] = acc.to(z.dtype)

    def down(self, y1, w2, y2, b2, cu_rows):
        self.calls.append("down")
        for own, acc in self.products(y1, w2, b2, cu_rows):
            y2[own] = acc.to(y2.dtype)

    def dgated(self, dout, w2, dz, z, y1s, prob, partials, cu_rows, index):
        self.calls.append("dgated")
        for own, dy1 in self.products(dout, w2.transpose(1, 2), None, cu_rows, index):
            p = prob[own].unsqueeze(-1)
            kind = self.shape.activation, self.shape.parameters
            y1, gradient = activate_backward(z[own].float(), dy1 * p, *kind)
            dz[own], y1s[own] = gradient.to(dz.dtype), (y1 * p).to(y1s.dtype)
            parts = (dy1 * y1).split(DPROB_COLUMNS, 1)
            partials[own] = torch.stack([part.sum(1) for part in parts], 1)

    def dgrad(self, dz, w1, dx_rows, cu_rows):
        self.calls.append("dgrad")
        for own, acc in self.products(dz, w1.transpose(1, 2), None, cu_rows):
            dx_rows[own] = acc.to(dx_rows.dtype)

    def load_wgrad(self, product, stored):
        self.calls.append(f"load {product}")

    def wgrad_down(self, dout, y1s, dw2, cu_rows, index, stored):
        self.calls.append("wgrad_down")
        self._wgrad(dout[index], y1s, dw2, cu_rows, stored is Stored.HIDDEN)

    def wgrad_up(self, x, dz, dw1, cu_rows, index, stored):
        self.calls.append("wgrad_up")
        self._wgrad(dz, x[index], dw1, cu_rows, stored is Stored.INNER)

    @staticmethod
    def _wgrad(left, right, gradient, cu_rows, turned):
        for e, (first, end) in enumerate(itertools.pairwise(cu_rows.tolist())):
            product = left[first:end].float().T @ right[first:end].float()
            gradient[e] += product.T if turned else product
