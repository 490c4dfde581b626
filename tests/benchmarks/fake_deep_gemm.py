"""A `deep_gemm` that runs on a CPU: checks what it is handed as the real one does on Hopper (version
2.6, `csrc/apis`), then computes the products by their definition.

Shapes, dtypes, strides and alignment are asserted; the real library ends with an exception, or reads
what is not there.
"""

from __future__ import annotations

from types import ModuleType

from framework import torch

BLOCK = 128


class Calls:
    """The names and sizes of every call, in order."""

    def __init__(self):
        self.log = []


def make_module(**changes):
    """The module; `calls.log` lists `(kind, groups, rows, n, k)`. changes: attributes to replace, or
    to remove where None.
    """
    module = ModuleType("deep_gemm")
    module.calls = Calls()
    log = module.calls.log

    def by_rows(a, b, d, grouped_layout, recipe=None, compiled_dims="nk"):
        (codes, scales), (weights, weight_scales) = a, b
        (m, k), (groups, n, k_of_weights) = codes.shape, weights.shape
        assert recipe is None and k == k_of_weights
        for tensor in (codes, weights):
            assert tensor.dtype == torch.float8_e4m3fn and tensor.is_contiguous()
        assert scales.dtype == weight_scales.dtype == torch.float32
        check_scales(scales, m, k)
        assert weight_scales.shape == (groups, n // BLOCK, k // BLOCK)
        assert weight_scales.is_contiguous()
        assert d.shape == (m, n) and d.dtype == torch.bfloat16 and d.is_contiguous()
        assert grouped_layout.dtype == torch.int32 and grouped_layout.shape == (m,)
        # The kernel asks the first row of a block for its expert, so no block may have two.
        blocks = grouped_layout.view(-1, BLOCK)
        assert ((blocks == blocks[:, :1]) | (blocks == -1)).all() and (blocks[:, 0] >= 0).all()
        log.append(("rows", groups, int((grouped_layout >= 0).sum()), n, k))
        for group in range(groups):
            own = (grouped_layout == group).nonzero().flatten()
            wide = weight_scales[group].repeat_interleave(BLOCK, 0)
            product = values(codes[own], scales[own]) @ values(weights[group], wide).T
            d[own] = product.to(torch.bfloat16)

    def by_experts(a, b, d, ks_cpu, grouped_layout, c=None, recipe=(1, 1, BLOCK)):
        (left, left_scales), (right, right_scales) = a, b
        groups, m, n = d.shape
        total = sum(ks_cpu)
        assert isinstance(ks_cpu, list) and len(ks_cpu) == groups
        assert all(k % BLOCK == 0 for k in ks_cpu) and recipe == (1, 1, BLOCK)
        assert grouped_layout.dtype == torch.int32 and grouped_layout.tolist() == ks_cpu
        for tensor, width in ((left, m), (right, n)):
            assert tensor.dtype == torch.float8_e4m3fn and tensor.is_contiguous()
            assert tensor.numel() == total * width
        check_scales(left_scales, m, total)
        check_scales(right_scales, n, total)
        assert d.dtype == torch.float32 and d.is_contiguous()
        assert c is d, "the sum of a weight gradient is updated in place"
        log.append(("experts", groups, total, m, n))
        start = 0
        for group, k in enumerate(ks_cpu):
            blocks = slice(start // BLOCK, (start + k) // BLOCK)
            parts = [
                values(codes[start * width : (start + k) * width].view(width, k), scales[:, blocks])
                for codes, scales, width in ((left, left_scales, m), (right, right_scales, n))
            ]
            d[group] += parts[0] @ parts[1].T
            start += k

    module.__version__ = "2.6.1"
    module.get_mk_alignment_for_contiguous_layout = lambda: BLOCK
    module.m_grouped_fp8_gemm_nt_contiguous = by_rows
    module.k_grouped_fp8_gemm_nt_contiguous = by_experts
    for name, value in changes.items():
        if value is None:
            delattr(module, name)
        else:
            setattr(module, name, value)
    return module


def check_scales(scales, mn, k):
    """One per row and 128 of K; rows contiguous and columns 16 bytes apart at least, else the library
    transposes them in every call.
    """
    assert scales.shape == (mn, k // BLOCK) and scales.stride() == (1, mn) and mn % 4 == 0


def values(codes, scales):
    return codes.to(torch.float32) * scales.repeat_interleave(BLOCK, 1)
