"""What the PyTorch learner has of its own. Fused attention: the numbers of plain products, the same bits
again, and a deterministic mode that is on for its kernels alone. And the bf16 products that a GPU
gets beside FP8 and BF16 experts; test_ernie_gpu.py trains with them.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from small_run import SIZES, train_config
from torch.nn import functional as F

from ernie_compat import torch_attention, torch_backend
from ernie_compat.torch_attention import repeatable_attention
from ernie_compat.torch_backend import dense_dtype_on
from ernie_compat.trainer import backend

B, N, S, D = 2, 3, 40, 16


def operands(dtype):
    """q, k, v as slices of one projection, with the strides that the model's have, and a gradient
    for the result.
    """
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(3, B, S, N, D, generator=generator).transpose(2, 3)
    dout = torch.randn(B, S, N, D, generator=generator).transpose(1, 2)
    return [tensor.to(dtype).requires_grad_() for tensor in qkv] + [dout.to(dtype)]


def plain(q, k, v):
    mask = torch.full((S, S), -torch.inf, dtype=q.dtype).triu(1)
    return torch.softmax(q @ k.transpose(-2, -1) * D**-0.5 + mask, dim=-1) @ v


def results(attend, dtype):
    q, k, v, dout = operands(dtype)
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
def test_result_and_gradients_are_those_of_plain_products_and_repeat(dtype, bound):
    first, second = (results(repeatable_attention, dtype) for _ in range(2))
    for ours, again, exact in zip(first, second, results(plain, torch.float64), strict=True):
        assert ours.dtype == dtype and ours.shape == (B, N, S, D)
        assert float((ours.double() - exact).norm() / exact.norm()) < bound
        assert torch.equal(ours, again)


@pytest.mark.parametrize(
    ("before", "filled"), [((False, False), True), ((True, True), True), ((True, False), False)]
)
def test_the_deterministic_mode_is_the_callers_again(before, filled, monkeypatch):
    seen, fused, memory = [], F.scaled_dot_product_attention, torch.utils.deterministic

    def mode():
        enabled = torch.are_deterministic_algorithms_enabled()
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        return enabled, warns, memory.fill_uninitialized_memory

    def watched(*arguments, **options):
        seen.append(mode())
        return fused(*arguments, **options)

    monkeypatch.setattr(torch_attention.F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(memory, "fill_uninitialized_memory", filled)
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        results(repeatable_attention, torch.bfloat16)
        assert mode() == (*before, filled)
    finally:
        torch.use_deterministic_algorithms(False)
    # Not merely a warning: the kernels read that as permission. Nobody pays for filled memory who
    # did not ask for it.
    assert seen == [(True, False, filled and before[0])] * 2


def learner():
    return backend("torch").Learner(SIZES, train_config(), "fp8", "auto")


def test_only_the_wide_products_are_narrow_and_move_a_step_little(corpus, monkeypatch):
    """The host runs the products as a GPU would."""
    batch = corpus.batch(1, 4, SIZES.seq_len, 0)
    wide = learner().train_step(batch, 1e-2)
    on_a_gpu = partial(dense_dtype_on, "cuda")
    monkeypatch.setattr(torch_backend, "dense_dtype_on", lambda _, precision: on_a_gpu(precision))
    made, seen = learner(), {}
    step = made.train_step(batch, 1e-2)
    assert step.loss != wide.loss
    # Over 6 seeds: at most 1.4e-4 and 1.4e-2.
    assert step.loss == pytest.approx(wide.loss, rel=1e-3)
    assert step.grad_norm == pytest.approx(wide.grad_norm, rel=0.05)
    for name, module in made.decoder.named_modules():
        module.register_forward_hook(lambda _, inputs, out, name=name: seen.update({name: out}))
    made.decoder(torch.zeros(2, SIZES.seq_len, dtype=torch.int64))
    narrow = {name for name in seen if getattr(seen[name], "dtype", None) == torch.bfloat16}
    parts, layers = ("", ".qkv_proj", ".o_proj"), range(SIZES.num_layers)
    attention = [f"layers.{i}.attention{part}" for i in layers for part in parts]
    dense = [f"layers.0.mlp{part}" for part in ("", ".up_gate_proj", ".down_proj")]
    assert narrow == {*attention, *dense}
    exact = {"embedding", "final_norm", "lm_head", "layers.1.mlp.router", "layers.1.mlp_norm"}
    assert all(seen[name].dtype == torch.float32 for name in exact)
