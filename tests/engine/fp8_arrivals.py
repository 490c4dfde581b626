"""Tokens, and gradients of tokens, as they arrive in FP8, and the engine's step on them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine.moe_golden import Result, make_problem, set_up, user_gradients
from framework import numpy, tensor, torch

from sonicmoe.engine.interface import EngineSettings
from sonicmoe.enums import ActivationType
from sonicmoe.quant.recipes import RECIPES, ScaleFormat, rows
from sonicmoe.quant.reference import quantize
from sonicmoe.quant.tokens import tokens_of

ISO128 = EngineSettings(recipe=RECIPES["iso128"])
EXACT = EngineSettings(ActivationType.REGLU, RECIPES["iso128-pow2"])
FORMS = pytest.mark.parametrize("row", [False, True], ids=["1x128", "row"])


def problem_with_idle_tokens():
    """A small problem whose H is a multiple of 128; some of its tokens have no valid slot."""
    made = make_problem(hidden=256, intermediate=64, topk=2, dtype=torch.bfloat16)
    indices = made.indices.copy()
    indices[::6] = -1
    return made.but(indices=indices)


def quantised(x, row=False, scale_format=ScaleFormat.FP32):
    """`[T, H]` values as their sender quantises them."""
    block = rows(int(x.shape[1])) if row else rows(128)
    made = quantize(tensor(x, torch.float32), block, scale_format=scale_format)
    return tokens_of(made.codes, made.scale_inv)


def odd_multiples(x, row):
    """Tokens whose scales are small odd multiples of powers of two: their values need more bits
    than a code has, and stay exact in fp32.
    """
    made = quantised(np.sign(x) * (np.abs(x) % 4), row, ScaleFormat.POW2)
    scale = numpy(made.scale_inv)
    odd = 1 + 2 * (np.arange(scale.size).reshape(scale.shape) % 4)
    return tokens_of(made.codes, tensor(scale * odd, torch.float32))


def run(problem, settings, dout=None, x=None):
    """The engine on bf16 tokens, or on quantised ones, and on a gradient of either kind."""
    setup = set_up(problem, settings, torch.bfloat16)
    setup = replace(setup, x=setup.x if x is None else x, dout=setup.dout if dout is None else dout)
    out, saved = setup.forward()
    sums = setup.accumulators()
    dx, dprobs = setup.engine.backward(setup.dout, saved, setup.weights, sums)
    assert out.dtype == dx.dtype == torch.bfloat16
    return Result(numpy(out), numpy(dx), numpy(dprobs), *user_gradients(problem, sums))


def poisoned(x, problem):
    """NaN in the codes and scales of every token without a valid slot; at least one has none."""
    idle = ~((problem.indices >= 0) & (problem.indices < problem.num_experts)).any(1)
    assert idle.any()
    codes, scale = numpy(x.bytes.to(torch.int32)), numpy(x.scale_inv)
    codes[idle], scale[idle] = 0x7F, np.nan
    codes = tensor(codes).to(torch.uint8).view(torch.float8_e4m3fn)
    return tokens_of(codes, tensor(scale, torch.float32))
