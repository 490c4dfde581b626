"""A small step, and faults planted into its stages while an engine runs."""

import dataclasses

import numpy as np
from framework import torch
from numerics_cases import make_case

from sonicmoe.diagnostics.cases import CaseSizes
from sonicmoe.diagnostics.golden_stages import RowLayout
from sonicmoe.diagnostics.step_dump import StepDump, StepSettings
from sonicmoe.quant.format import BlockScaledTensor, Code
from sonicmoe.routing.metadata import RoutingMetadata

SIZES = CaseSizes(tokens=96, hidden=256, intermediate=128, experts=3, topk=2)


def make_step(kind="gaussian", sizes=SIZES, seed=0, bias=False, **settings):
    """A step with some slots elsewhere, in the default recipe."""
    case = make_case(kind, sizes, seed)
    indices = case.indices.copy()
    indices[::5, -1], indices[1::7, 0] = -1, sizes.experts
    arrays = (case.x, indices, case.probs, case.w1, case.w2)
    step = StepDump(kind, StepSettings.of(**settings), *arrays, dout=case.dout)
    return with_biases(step) if bias else step


def with_biases(step, seed=7):
    rng = np.random.default_rng(seed)
    b1, b2 = (
        rng.standard_normal(weight.shape[:2]).astype(np.float32) for weight in (step.w1, step.w2)
    )
    return step.but(b1=b1, b2=b2)


def layout_of(step):
    return RowLayout.of(step, step.settings.computed.row_alignment)


def row_of(step, expert=2, position=3):
    """`(row, token, slot)` of an expert's position-th token."""
    layout = layout_of(step)
    row = int(np.flatnonzero((layout.row_expert == expert) & layout.real)[position])
    return row, *divmod(int(layout.fields["row_slot"][row]), step.indices.shape[1])


def plant(stage, kind, index):
    """A listener that breaks one stage: "nan" or "inf" at `index`, or "scaled": its row times
    three.
    """

    def listener(name, value):
        return broken(value, kind, index) if name == stage else value

    return listener


def broken(value, kind, index):
    if isinstance(value, RoutingMetadata):
        return broken_routing(value)
    if isinstance(value, BlockScaledTensor):
        return broken_codes(value, kind, index)
    value = value.clone()
    if kind == "scaled":
        index = index if value.dim() == 2 and value.shape[1] <= SIZES.topk else index[:-1]
        value[index] = value[index] * 3
    else:
        value[index] = float(kind)
    return value


def broken_codes(value, kind, index):
    codes, scales = value.codes.clone(), value.scale_inv.clone()
    block = (*index[:-2], index[-2] // value.block.rows, index[-1] // value.block.cols)
    if kind == "nan" and value.code is Code.E4M3:
        bits = codes.view(torch.uint8)
        bits[index] = 0x7F
        codes = bits.view(torch.float8_e4m3fn)
    elif kind == "scaled":
        scales[block] = scales[block] * 3
    else:
        scales[block] = float(kind)
    return BlockScaledTensor(codes, scales, value.block, value.code, value.orientation)


def broken_routing(value):
    """Two tokens of one expert change places: every count still fits."""
    row_token = value.row_token.clone()
    row_token[0], row_token[1] = value.row_token[1].clone(), value.row_token[0].clone()
    return dataclasses.replace(value, row_token=row_token)
