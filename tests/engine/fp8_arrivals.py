"""Tokens, and gradients of tokens, as they arrive in FP8, and the engine's step on them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine.fp8_by_hand import by_hand
from engine.moe_golden import Result, make_problem, set_up
from framework import numpy, tensor, torch
from passes import backward

from sonicmoe.engine.interface import EngineSettings
from sonicmoe.enums import ActivationType
from sonicmoe.quant.recipes import RECIPES, ScaleFormat, rows
from sonicmoe.quant.reference import dequantize, quantize
from sonicmoe.quant.tokens import tokens_of

ISO128 = EngineSettings(recipe=RECIPES["iso128"])
EXACT = EngineSettings(ActivationType.REGLU, RECIPES["iso128-pow2"])
WGRADS = pytest.mark.parametrize("fp8_wgrad", [True, False], ids=["fp8_wgrad", "plain_wgrad"])


def gaussian_problem():
    return make_problem(tokens=160, hidden=256, intermediate=128, topk=2, dtype=torch.bfloat16)


def problem_with_idle_tokens(made=None, step=6):
    """A small problem whose H is a multiple of 128; some of its tokens have no valid slot."""
    made = made or make_problem(hidden=256, intermediate=64, topk=2, dtype=torch.bfloat16)
    indices = made.indices.copy()
    indices[::step] = -1
    return made.but(indices=indices)


def quantised(x, scale_format=ScaleFormat.FP32):
    """`[T, H]` values as their sender quantises them."""
    made = quantize(tensor(x, torch.float32), rows(128), scale_format=scale_format)
    return tokens_of(made.codes, made.scale_inv)


def odd_multiples(x):
    """Tokens whose scales are small odd multiples of powers of two: their values need more bits
    than a code has, and stay exact in fp32.
    """
    made = quantised(np.sign(x) * (np.abs(x) % 4), ScaleFormat.POW2)
    scale = numpy(made.scale_inv)
    odd = 1 + 2 * (np.arange(scale.size).reshape(scale.shape) % 4)
    return tokens_of(made.codes, tensor(scale * odd, torch.float32))


def run(problem, settings, dout=None, x=None) -> Result:
    """The engine on bf16 tokens, or on quantised ones, and on a gradient of either kind."""
    setup = set_up(problem, settings, torch.bfloat16)
    setup = replace(setup, x=setup.x if x is None else x, dout=setup.dout if dout is None else dout)
    out, saved = setup.forward()
    sums = setup.accumulators()
    dx, dprobs = backward(setup.engine, setup.dout, saved, setup.weights, sums)
    assert out.dtype == dx.dtype == torch.bfloat16
    return setup.result(out, dx, dprobs, sums)


def arrived_by_hand(problem, settings, **arriving) -> Result:
    """What the recipe makes of an x or dout that arrives in FP8: nobody quantises it again but for
    wgrad.
    """
    seen = problem.but(**{name: numpy(dequantize(q)) for name, q in arriving.items()})
    return by_hand(seen, settings, torch.bfloat16, skip=arriving, exact=True)


def poisoned(x, problem):
    """NaN in the codes and scales of every token without a valid slot; at least one has none."""
    idle = ~((problem.indices >= 0) & (problem.indices < problem.num_experts)).any(1)
    assert idle.any()
    codes, scale = numpy(x.bytes.to(torch.int32)), numpy(x.scale_inv)
    codes[idle], scale[idle] = 0x7F, np.nan
    codes = tensor(codes).to(torch.uint8).view(torch.float8_e4m3fn)
    return tokens_of(codes, tensor(scale, torch.float32))
