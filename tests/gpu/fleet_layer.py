"""The calls that PaddleFleet makes of one layer, through PyTorch: its two stacked parameters with fp32
`main_grad`, tokens and gradients in FP8, FP8 copies of the weights and freed storage.

Legend: T tokens, H hidden, I intermediate, E experts, K slots.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import NamedTuple

import torch

from sonicmoe import SonicMoEConfig
from sonicmoe.fleet.quantizer import quantize_activation_blockscaled_fast
from sonicmoe.fleet.run import run_sonic_moe
from sonicmoe.fleet.weight_copies import (
    clear_all_fp8_weight_caches,
    quantize_native_fp8_weights,
)


class Sizes(NamedTuple):
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int


class Batch(NamedTuple):
    """bf16 `[T, H]`, int64 `[T, K]`, fp32 `[T, K]`, and the gradient of the output, bf16 `[T, H]`."""

    x: torch.Tensor
    ids: torch.Tensor
    probs: torch.Tensor
    dout: torch.Tensor

    @classmethod
    def random(cls, sizes, device):
        """A tenth of the slots is dropped."""
        torch.manual_seed(0)
        shape = sizes.tokens, sizes.hidden
        x, dout = (torch.randn(shape, device=device).to(torch.bfloat16) for _ in range(2))
        ids = torch.rand(sizes.tokens, sizes.experts, device=device).topk(sizes.topk, 1).indices
        ids[torch.rand(ids.shape, device=device) < 0.1] = -1
        return cls(x, ids, torch.rand(ids.shape, device=device) / sizes.topk, dout)


def weights_of(sizes, device):
    """`weight1 [E, H, 2I]` and `weight2 [E, I, H]`, bf16, with `main_grad` of zeros."""
    torch.manual_seed(1)
    made = []
    for rows, columns in (
        (sizes.hidden, 2 * sizes.intermediate),
        (sizes.intermediate, sizes.hidden),
    ):
        values = torch.randn(sizes.experts, rows, columns, device=device) * rows**-0.5
        made.append(torch.nn.Parameter(values.to(torch.bfloat16)))
        made[-1].main_grad = torch.zeros_like(values)
    return made


def call_fleet(weights, batch, engine, config):
    """`run_sonic_moe` as Fleet's experts call it behind an FP8 dispatch: e4m3 tokens with packed
    words, and the handle that the combine's backward has filled with bytes. y, dprobs, dw1 and dw2;
    PyTorch has no gradient of e4m3 tensors.
    """
    hidden, handle = int(batch.x.shape[1]), {}
    arguments = fleet_arguments(weights, batch, handle, config)
    probs = arguments["topk_scores"]
    with SonicMoEConfig(engine=engine).activate():
        out = run_sonic_moe(**arguments)
        dout, words = quantize_activation_blockscaled_fast(batch.dout, pack_scale_words=True)
        handle["data"], handle["scale"] = dout, words.view(torch.uint8).reshape(-1, hidden // 32)
        # What autograd carries is a placeholder, which nobody reads.
        out.backward(torch.full_like(out, float("nan")))
    assert not handle, "a handle is emptied by the backward that reads it"
    w1, w2 = (weight.main_grad for weight in weights)
    return {"y": out.detach(), "dprobs": probs.grad, "dw1": w1, "dw2": w2}


def fleet_arguments(weights, batch, handle, config):
    """The arguments that `run_sonic_moe` gets behind an FP8 dispatch, whose sender quantised the tokens."""
    codes, words = quantize_activation_blockscaled_fast(batch.x, pack_scale_words=True)
    return {
        "hidden_states": codes,
        "topk_indices": batch.ids,
        "topk_scores": batch.probs.clone().requires_grad_(),
        "K": int(batch.ids.shape[1]),
        "E": int(weights[1].shape[0]),
        "w1": weights[0],
        "w2": weights[1],
        "fp8": True,
        "fp8_scale": words,
        "fp8_combine_grad_handle": handle,
        "fp8_config": config,
    }


def give_copies(weights, *, iso32):
    """Quantise, and set the attributes that Fleet's experts set."""
    payload = quantize_native_fp8_weights(*weights, iso32=iso32)
    for name, weight in zip(("w1", "w2"), weights, strict=True):
        codes, scale, *rest = payload[name]
        transposed = codes.transpose(1, 2) if payload["format"] == "iso32" else rest[0]
        weight.fp8 = (codes, scale)
        weight.transposed_fp8 = (transposed, rest[-1])


def take_copies(weights):
    """Drop the copies, which Fleet does before the optimizer."""
    clear_all_fp8_weight_caches()
    for weight in weights:
        weight.fp8 = weight.transposed_fp8 = None


@contextmanager
def freed(weights):
    """Inside, the parameters keep their shapes and hold no memory, as in a step of Fleet's."""
    held = [weight.detach().to("cpu", copy=True) for weight in weights]
    for weight in weights:
        weight.untyped_storage().resize_(0)
    try:
        yield
    finally:
        for weight, values in zip(weights, held, strict=True):
            weight.untyped_storage().resize_(values.untyped_storage().nbytes())
            with torch.no_grad():
                weight.data.copy_(values)


def relative(actual, wanted):
    """||actual - wanted|| / ||wanted||, in fp64."""
    actual, wanted = actual.double(), wanted.double()
    return float((actual - wanted).norm() / wanted.norm().clamp_min(1e-30))
