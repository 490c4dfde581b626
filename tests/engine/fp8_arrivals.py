"""Tokens, and gradients of tokens, as they arrive in FP8, and the engine's step on them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from engine.moe_golden import Result, make_problem, set_up
from framework import numpy, tensor, torch

from sonicmoe.engine.interface import EngineSettings
from sonicmoe.quant.recipes import RECIPES, ScaleFormat, rows
from sonicmoe.quant.reference import quantize
from sonicmoe.quant.tokens import tokens_of

ISO128 = EngineSettings(recipe=RECIPES["iso128"])


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


def run(problem, settings, dout=None, x=None) -> Result:
    """The engine on bf16 tokens, or on quantised ones, and on a gradient of either kind."""
    setup = set_up(problem, settings, torch.bfloat16)
    setup = replace(setup, x=setup.x if x is None else x, dout=setup.dout if dout is None else dout)
    return setup.run()


def poisoned(x, problem):
    """NaN in the codes and scales of every token without a valid slot; at least one has none."""
    idle = ~((problem.indices >= 0) & (problem.indices < problem.num_experts)).any(1)
    assert idle.any()
    codes, scale = numpy(x.bytes.to(torch.int32)), numpy(x.scale_inv)
    codes[idle], scale[idle] = 0x7F, np.nan
    codes = tensor(codes).to(torch.uint8).view(torch.float8_e4m3fn)
    return tokens_of(codes, tensor(scale, torch.float32))
