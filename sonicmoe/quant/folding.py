"""Weight gradients from the codes of tokens: the scale of a token stands with the other operand.

    dw1[n, h] = sum_t dz[t, n] x[t, h],      x[t, h] = s_t c[t, h]
              = sum_t (dz[t, n] s_t) c[t, h]
    dw2[h, i] = sum_t dout[t, h] y1s[t, i],  dout[t, h] = d_t c[t, h]
              = sum_t c[t, h] (y1s[t, i] d_t)

The codes c are those that the up-projection (dgated) reads, so x (dout) is rounded once in a step;
dz s_t (y1s d_t) is quantised for wgrad instead of dz. All values below are fp32, and every operation
is rounded to nearest even, in the order written. For a row t in expert order, a feature h of block
b = h // 128, and s_b the scale of that block:

    s_t     = max_b s_b                                    NaN if one is NaN
    c[t,h]  = code[t,h]                                    where s_b == s_t
              e4m3(fl(code[t,h] * fl(s_b / s_t)))          elsewhere; one division per block, NaN stays NaN
    v[t,n]  = fl(dz[t,n] * s_t)
    wgrad_dz = quantise v in 128x128 blocks of one expert's padded rows      (quant.reference)
    dw1     = sum_t dequantised(wgrad_dz)[t,n] * c[t,h]    c enters with scale 1

* **Codes of another block** are rounded once more, to a coarser grid: s_b / s_t <= 1, so nothing
  saturates. In a row that `row128` quantised such a block lies more than 2^10 below the largest.
  Codes with one scale per row and 128 columns that arrive from outside are read the same way,
  whoever made them: kept where the row's scale is constant, rounded once more in every block whose
  scale is not the largest.
* **Floor.** The amax of a block of v is at least 2^-100, as everywhere. In a block below that, what
  is below 2^-110 / 448 becomes 0. s_t itself is at least 2^-100 / 448 where this package made it. A
  product below 2^-126 may be flushed to zero or not: its code is 0.
* **Padding rows** of wgrad have c = 0 and v = 0, and read neither a scale nor a code.
* **Zero.** A row of scale 0 (foreign senders make such) has s_b == s_t, so 0 / 0 never arises.
* **Not finite.** An infinite element of x makes s_t infinite and the token's z NaN, hence dz NaN in
  all columns: dw1 of every expert that the token was sent to is NaN throughout. NaN in x is a code
  and leaves s_t alone; here, too, z and dz are NaN.
* `y1s` is fl(row_prob * y1), and then v[t,i] = fl(y1s[t,i] * d_t): the probability first.
* **Not folded**: bias gradients, which are sums of unquantised dz and dout; everything where
  `fp8_wgrad` is off, which multiplies unquantised values.
* Quantising is a function of x alone, so an engine may keep the codes of the forward for the
  recomputed z and for wgrad, or make them again: the bits are the same.
* A GPU engine whose dz is fl(u m), u in bf16 and m a factor of the row, forms v = fl(u fl(m s_t)),
  and the amax of a row as fl(max |u| |fl(m s_t)|); y1s likewise. That is one fp32 rounding apart from
  the rule, as its dz is today.
* A GEMM whose sums stand in units of the current scale multiplies them where the scale of the next
  block differs, that is, where the two fp32 words do: an approximate quotient of equal scales need
  not be 1. Sums still go from the tensor core to fp32 every 128 of K.
"""

from __future__ import annotations

import torch

from .format import BlockScaledTensor
from .recipes import rows
from .reference import divide, encode_e4m3

Tensor = torch.Tensor


def with_row_scales(q: BlockScaledTensor) -> BlockScaledTensor:
    """e4m3 codes `[T, H]` in blocks of one row, as codes with one scale per row: `(c, s_t)` of the
    module docstring. Scales that are constant along their rows leave every code as it is.
    """
    hidden = q.shape[1]
    wide = rows(max(hidden, 1))
    if int(q.scale_inv.shape[1]) <= 1:
        return BlockScaledTensor(q.codes, q.scale_inv, wide, q.code)
    largest = q.scale_inv.amax(-1, keepdim=True)
    same = q.scale_inv == largest
    ratio = divide(q.scale_inv, largest.expand(q.scale_inv.shape))
    ratio = torch.where(same, torch.ones_like(ratio), ratio)
    each = ratio.repeat_interleave(q.block.cols, -1)[:, :hidden]
    # Times 1 a code stays itself, so one product serves both kinds of blocks.
    codes = encode_e4m3(q.codes.to(torch.float32) * each)
    return BlockScaledTensor(codes, largest, wide, q.code)
