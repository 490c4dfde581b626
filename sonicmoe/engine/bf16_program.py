"""What the BF16 engine launches on Hopper: the list of each pass, and what its tensors are.

This is the one place that says which kernel gets what. `kernels/sm90/bf16_*.cu` and `kernels/cuda`
have the kernels, whose arguments the lists name in their order.

Weights are values: a tensor, or matrices of each expert that a module of the GEMMs has made. w1_up:
the up rows, where w1 has the gate rows alone. z and dz have their columns in the order of w1's rows,
which `halves` says, so that every product but `up` and `dgated` is a plain one. dz may lie where z
lies.

Where there are rows_scratch, tokens are gathered before the GEMMs and not by them, as the kernels were
built (`gathers_first`). Factors of low-rank adapters, narrow products and gradients have the names of
`hopper_program`; up_b_t has its columns in the order of w1's rows, too.

Legend: N columns of z; R padded rows in expert order; other letters as in `interface`.
"""

from __future__ import annotations

from typing import Any

import torch

from ..layouts import WeightLayout
from .program import Vocabulary, stages_of, table_of
from .routed_passes import FACTORS, HEAD, OF_LAUNCHES, ROUTED_TENSORS, WORDS, buffers_of, kernels_of

Tensor = torch.Tensor
_HALVES = WeightLayout(split_half=True)

# DTYPE: of the tokens.
_TENSORS = """
    b1 f32 E N | b2 f32 E H
    up_a DTYPE E * H | up_b DTYPE E N * | up_a_t DTYPE E H * | up_b_t DTYPE E * N
    down_a DTYPE E * I | down_b DTYPE E H * | down_a_t DTYPE E I * | down_b_t DTYPE E * H

    x DTYPE T H | dout DTYPE T H | out DTYPE T H | dx DTYPE T H | dprobs f32 T K
    z DTYPE R N | dz DTYPE R N | y1s DTYPE R I | partials f32 * R
    up_u DTYPE R * | up_v DTYPE R * | down_u DTYPE R * | down_v DTYPE R *
    d_up_a f32 E * H strided | d_up_b f32 E N * strided
    d_down_a f32 E * I strided | d_down_b f32 E H * strided | parts f32 *

    token_rows DTYPE R H | y1 DTYPE R I | y2 DTYPE R H | dx_rows DTYPE R H
    dprob_parts f32 I/{dprob_columns} R
"""
_MEMORY = {
    "scratch": ["y1 y2"],
    "rows_scratch": ["token_rows"],
    "dz_scratch": ["dprob_parts dx_rows"],
    "dx_scratch": ["dx_rows"],
}
VOCABULARIES = {
    dtype: Vocabulary(
        tensors=table_of(ROUTED_TENSORS + _TENSORS.replace("DTYPE", element)),
        memory=buffers_of(_MEMORY),
        # by_rows: weights are contracted over their rows, as dgrad reads them.
        bound=("transposed", "by_rows", "first", "second", *FACTORS, *OF_LAUNCHES),
        head=HEAD,
    )
    for dtype, element in (("bfloat16", "bf16"), ("float16", "f16"))
}


class InTurns:
    """z or dz in the order that listeners know: gate and up in turns."""

    @staticmethod
    def seen(values: Tensor, halves: bool) -> Tensor:
        return _HALVES.native_b1(values) if halves else values

    @staticmethod
    def put(planted: Tensor, values: Tensor, halves: bool) -> None:
        values.copy_(_HALVES.user_b1(planted) if halves else planted)


# Without `out` it ends at z, which a backward that saved none asks for.
_FORWARD = """
low_rank when up_a
    narrow_rows x none? true up_a ROWS up_u up_scale stream
up
    gather_rows x row_token token_rows stream when rows_scratch
    up token_rows|x w1 w1_up? transposed halves b1? up_u? up_b? ROWS z? y1? first second SMS
    show z z halves turns
    show y1 y1
low_rank when out down_a
    narrow_rows y1 none? false down_a ROWS down_u down_scale stream
down when out
    grouped_gemm y1 w2 none? transposed b2? down_u? down_b? padded_offsets y2 SMS
    show y2 y2
aggregate_out when out
    aggregate_rows y2 slot_row row_prob out true stream
"""

# Where there is memory for dx.
_DGRAD = """
dx_gemm when dx
    grouped_gemm dz w1 w1_up? by_rows none? up_v? up_a_t? padded_offsets dx_rows SMS
    show dx_rows dx_rows
aggregate_dx when dx
    aggregate_rows dx_rows slot_row row_prob dx false stream
"""

# A tile sums <dy1, y1> over its own columns. The partial sums are added in a second launch and in a
# fixed order, because atomics would change the order, and the bits, from run to run. Without memory
# for dprobs the caller adds those in `partials`, and what a bias adds.
_DGATED = f"""
low_rank when down_b_t
    narrow_rows dout none? true down_b_t ROWS down_v down_scale stream
dgated
    gather_rows dout row_token token_rows stream when rows_scratch
    dgated token_rows|dout w2 transposed halves down_v? down_a_t? z row_prob ROWS dz y1s
        partials|dprob_parts first second SMS
    sum_or_zero slot_row dprob_parts dprobs stream when dprobs
    show dz dz halves turns
    show y1s y1s
low_rank when up_b_t
    narrow_rows dz none? false up_b_t ROWS up_v up_scale stream
{_DGRAD}"""

# The gradients of factors: sums over an expert's rows of narrow^T rows, or of rows^T narrow.
_ADAPTERS = """
low_rank
    narrow_gradient x none? true false up_v none? ROWS false parts? d_up_a stream when d_up_a
    narrow_gradient dz none? false false up_u none? ROWS true parts? d_up_b stream when d_up_b
    narrow_gradient y1s none? false false down_v none? ROWS false parts? d_down_a stream when d_down_a
    narrow_gradient dout none? true false down_u row_prob ROWS true parts? d_down_b stream
        when d_down_b
"""

# Those that have a destination (dw1, dw2), which is an object of the module.
_WGRAD = """
dw2 when dw2
    wgrad dout y1s true ROWS expert_counts dw2 SMS
dw1 when dw1
    wgrad x dz false ROWS expert_counts dw1 SMS
"""


def _stages(text: str) -> Any:
    return stages_of(text, WORDS, {"turns": InTurns})


PASSES = {
    "forward": (_stages(_FORWARD), "scratch rows_scratch", ()),
    "dgated": (_stages(_DGATED), "rows_scratch dz_scratch", ()),
    "dgrad": (_stages(_DGRAD), "dx_scratch", ()),
    "adapters": (_stages(_ADAPTERS), "", ()),
}
BINDS = "forward", "dgated", "dgrad"
WGRAD = {"wgrad": (_stages(_WGRAD), "", ())}
KERNELS = kernels_of(PASSES)
