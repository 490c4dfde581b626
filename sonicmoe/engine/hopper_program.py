"""What the Hopper engine launches: the list of each pass, and what its tensors are.

This is the one place that says which kernel gets what. `kernels/sm90` and `kernels/cuda` have the
kernels, whose arguments the lists name in their order.

Tokens, and gradients of tokens, are values that a pass quantises (x), or codes with one scale per
128 columns of a row (x_codes, x_scale) that somebody has quantised before. z is kept in 8-bit codes
(z, z_scale) or in bf16 (z_rows): the kernels are built for one of them. The operands of wgrad are
quantised and token-major (in dz, y1s), or rows in bf16 (dz_rows, y1s_rows) for weight gradients that
are not computed in FP8.

A weight gradient goes to a destination (dw1, dw2), which is an object of the module whose kernel adds
to it. Biases and factors of low-rank adapters are bound with the weights; the factors as forward
reads them, or transposed for the backward. Passes write the narrow products: u (up_u, down_u) in
forward, v (down_v, up_v) in dgated. dgated sums the gradients of biases and of second factors too,
where it is given memory for them, because later there are no codes of dz by rows, nor always values of
dout. `adapters` sums those of the first factors.

Legend: R padded rows in expert order; other letters as in `interface`.
"""

from __future__ import annotations

from ..quant.format import Code, Orientation
from ..quant.recipes import RECIPES
from .program import Format, Rule, Vocabulary, stages_of, table_of
from .routed_passes import FACTORS, HEAD, OF_LAUNCHES, ROUTED_TENSORS, WORDS, buffers_of, kernels_of

RECIPE = RECIPES["dx256"]
WEIGHTS = "w1", "w2", "w1_dgrad", "w2_dgrad"
# Which activation a GEMM computes, as its module numbers them, and its parameters.
GATES = {
    gemm: tuple(f"{gemm}_{name}" for name in ("activation", "first", "second"))
    for gemm in ("up", "dgated")
}
NUMBERS = *GATES["up"], *GATES["dgated"], *OF_LAUNCHES

_TENSORS = """
    w1 codes E 2I H | w1_scale f32 E * H/128 | w2 codes E H I | w2_scale f32 E H/128 I/128
    w1_dgrad codes E H 2I | w1_dgrad_scale f32 E H/128 2I/256
    w2_dgrad codes E I H | w2_dgrad_scale f32 E I/128 H/128
    b1 f32 E 2I | b2 f32 E H
    up_a bf16 E * H | up_b bf16 E 2I * | up_a_t bf16 E H * | up_b_t bf16 E * 2I
    down_a bf16 E * I | down_b bf16 E H * | down_a_t bf16 E I * | down_b_t bf16 E * H

    x tokens T H | x_codes codes T H | x_scale f32 T H/128
    dout tokens T H | dout_codes codes T H | dout_scale f32 T H/128
    out tokens T H | dx tokens T H | dprobs f32 T K
    z codes R 2I | z_scale f32 R 2I/128 | z_rows bf16 R 2I
    up_u bf16 R * | up_v bf16 R * | down_u bf16 R * | down_v bf16 R *
    dz_rows bf16 R 2I | y1s_rows bf16 R I
    db1 f32 E 2I | db2 f32 E H | bias_parts f32 R/128 *
    d_up_a f32 E * H strided | d_up_b f32 E 2I * strided
    d_down_a f32 E * I strided | d_down_b f32 E H * strided | parts f32 *

    x_fp8 codes T H | x_fp8_scale f32 T H/128 | dout_fp8 codes T H | dout_fp8_scale f32 T H/128
    y1 codes R I | y1_scale f32 R I/128 | y2 bf16 R H
    dz_fp8 codes R 2I | dz_fp8_scale f32 R/128 2I/256
    dprob_parts f32 I/{dprob_columns} R | no_scales f32 I/128 R/128 | dx_rows bf16 R H
    dz_t codes 2I R | dz_t_scale f32 2I/256 R/128 | y1s_t codes I R | y1s_t_scale f32 I/128 R/128
    x_t codes H R | x_t_scale f32 H/128 R/128 | dout_t codes H R | dout_t_scale f32 H/128 R/128
"""

# dgrad reads dz from dz_scratch, so that one lives from dgated to dgrad. Where both are one pass, the
# rows of dx overwrite the codes of dout. no_scales: dgated writes scales also of operands of wgrad
# that nobody wants; they go there.
_MEMORY = {
    "scratch": ["x_fp8 x_fp8_scale y1 y1_scale y2"],
    "dz_scratch": [
        "dz_fp8 dz_fp8_scale dprob_parts no_scales", "dx_rows", "dout_fp8 dout_fp8_scale",
    ],
    "dout_scratch": ["dout_fp8 dout_fp8_scale"],
    "dx_scratch": ["dx_rows"],
    # Operands of wgrad wait for the weight gradients, each in memory of its own, so that each can be
    # freed when its product is done.
    "dz": ["dz_t dz_t_scale"],
    "y1s": ["y1s_t y1s_t_scale"],
    "wgrad_scratch": ["x_t x_t_scale dout_t dout_t_scale"],
    "dw_scratch": ["", "x_t x_t_scale", "dout_t dout_t_scale"],  # of one product at a time
}  # fmt: skip

VOCABULARY = Vocabulary(
    tensors=table_of(ROUTED_TENSORS + _TENSORS),
    memory=buffers_of(_MEMORY),
    bound=(
        *(name for weight in WEIGHTS for name in (weight, f"{weight}_scale")),
        *("b1", "b2", *FACTORS, *NUMBERS),
    ),
    head=HEAD,
)

_FORMATS = {
    "tokens": Format(RECIPE.x),
    # A kernel that was built for INT8 alone writes codes that are read as adaptive ones.
    "z": Format(RECIPE.z, Code.ADAPTIVE),
    "dz": Format(RECIPE.dz),
    "dz_operand": Format(RECIPE.wgrad_dz, orientation=Orientation.COLUMNS),
    "operand": Format(RECIPE.w2, orientation=Orientation.COLUMNS),
}
_WORDS = {
    **WORDS,
    "X": "x_codes|x_fp8 x_scale|x_fp8_scale",
    "DOUT": "dout_codes|dout_fp8 dout_scale|dout_fp8_scale",
    "UP_GATE": " ".join(GATES["up"]),
    "DGATED_GATE": " ".join(GATES["dgated"]),
}

# x, then z and y1, then y2, then out. Without `out` it ends at z, which a backward that saved none
# asks for. Where z, or its scale, is not kept, the kernel does not look at what it is handed for it.
_FORWARD = """
quantize_x when x
    quantize_rows x x_fp8 x_fp8_scale stream
    show x_fp8 X tokens
low_rank when up_a
    narrow_rows X true up_a ROWS up_u up_scale stream
up
    gather_gated_gemm X w1 w1_scale b1? up_u? up_b? ROWS z|z_rows|y1 z_scale|y1_scale
        y1 y1_scale UP_GATE ?z|z_rows SMS
    show z z|z_rows z_scale z
    show y1 y1 y1_scale tokens
low_rank when out down_a
    narrow_rows y1 y1_scale false down_a ROWS down_u down_scale stream
down when out
    grouped_gemm y1 y1_scale w2 w2_scale b2? down_u? down_b? padded_offsets y2 SMS
    show y2 y2
aggregate_out when out
    aggregate_rows y2 slot_row row_prob out true stream
"""

# From dz in dz_scratch, where there is memory for dx.
_DGRAD = """
dx_gemm when dx
    grouped_gemm dz_fp8 dz_fp8_scale w1_dgrad w1_dgrad_scale none? up_v? up_a_t? padded_offsets
        dx_rows SMS
    show dx_rows dx_rows
aggregate_dx when dx
    aggregate_rows dx_rows slot_row row_prob dx false stream
"""

# dout, then everything that the gradient of the gated activation gives: dz in dz_scratch for dgrad,
# those operands of wgrad for which there is memory, and dprobs; with `dx` it goes on to that. Where z
# or operands come in rows, the kernel does not look at what it is handed for their scales.
# sum_tokens adds <dout, b2> of every row to its first partial sum of dprobs, and sums db2. The bias is
# not quantised, and neither is dout in these sums, unless it came so.
_DGATED = f"""
quantize_dout when dout
    quantize_rows dout dout_fp8 dout_fp8_scale stream
    show dout_fp8 DOUT tokens
low_rank when down_b_t
    narrow_both DOUT true down_b_t down_u row_prob ROWS parts? down_v d_down_b down_scale stream
dgated
    gather_dgated_gemm DOUT w2_dgrad w2_dgrad_scale down_v? down_a_t? row_token row_prob
        padded_offsets z|z_rows z_scale|dprob_parts dz_fp8 dz_fp8_scale dprob_parts
        dz_rows|dz_t? dz_t_scale|no_scales y1s_rows|y1s_t? y1s_t_scale|no_scales ?dz_rows
        DGATED_GATE SMS
    sum_tokens dout|dout_codes dout_scale? b2 row_prob ROWS dprob_parts bias_parts? db2? stream
        when b2
    sum_or_zero slot_row dprob_parts dprobs stream
    show dz_fp8 dz_fp8 dz_fp8_scale dz
    show ds dprobs
    show dz dz_rows|dz_t dz_t_scale dz_operand
    show y1s y1s_rows|y1s_t y1s_t_scale operand
biases when db1
    sum_dz dz_fp8 dz_fp8_scale ROWS bias_parts db1 stream
low_rank when up_b_t
    narrow_both dz_fp8 dz_fp8_scale false up_b_t up_u none? ROWS parts? up_v d_up_b up_scale stream
{_DGRAD}"""

# left^T right of the operands that there are, left in the destination of that name. Tokens come first,
# in expert order, transposed and quantised in blocks of that order; where both come as values, one launch
# reads the routing once. dw_scratch: of one product alone, for stage-wise memory.
_WGRAD = """
wgrad_operands
    gather_transpose_quantize_pair x dout ROWS x_t x_t_scale dout_t dout_t_scale stream when x dout
    gather_transpose_quantize x ROWS x_t x_t_scale stream when x dout_codes
    gather_transpose_quantize x ROWS x_t x_t_scale stream when x dw_scratch
    gather_transpose_quantize dout ROWS dout_t dout_t_scale stream when dout x_codes
    gather_transpose_quantize dout ROWS dout_t dout_t_scale stream when dout dw_scratch
    gather_transpose_requantize x_codes x_scale ROWS x_t x_t_scale stream when x_codes
    gather_transpose_requantize dout_codes dout_scale ROWS dout_t dout_t_scale stream when dout_codes
    show wgrad_x x_t x_t_scale operand
    show wgrad_dout dout_t dout_t_scale operand
dw2 when dw2
    grouped_wgrad dout_t dout_t_scale y1s_t y1s_t_scale padded_offsets dw2 SMS
dw1 when dw1
    grouped_wgrad dz_t dz_t_scale x_t x_t_scale padded_offsets dw1 SMS
"""

# The gradients of first factors: sums over an expert's rows of v^T rows. y1s as dgated left it: codes,
# or rows. A gradient that is None is not summed.
_ADAPTERS = """
low_rank
    narrow_gradient x|x_codes x_scale? true false up_v none? ROWS false parts? d_up_a stream
        when d_up_a
    narrow_gradient y1s_rows none? false false down_v none? ROWS false parts? d_down_a stream
        when d_down_a y1s_rows
    narrow_gradient y1s_t y1s_t_scale false true down_v none? ROWS false parts? d_down_a stream
        when d_down_a y1s
"""


def _either(name: str, *others: str) -> Rule:
    return Rule(f"either {name}, or {' and '.join(others)}", (name, " ".join(others)))


_ONE_X = _either("x", "x_codes", "x_scale")
_ONE_DOUT = _either("dout", "dout_codes", "dout_scale")
_OF_DW1, _OF_DW2 = (
    Rule(
        f"{dw} with either {name}, or {name}_codes and {name}_scale; or none of them",
        (f"{dw} {name}", f"{dw} {name}_codes {name}_scale", ""),
    )
    for dw, name in (("dw1", "x"), ("dw2", "dout"))
)
_ONE_Z = Rule("z and z_scale, or z_rows", ("z z_scale", "z_rows"))
_OPERANDS = Rule(
    "dz and y1s, or dz_rows and y1s_rows, or y1s alone, or none of them",
    ("dz y1s", "dz_rows y1s_rows", "y1s", ""),
)

PASSES = {
    name: (stages_of(text, _WORDS, _FORMATS), buffers, rules)
    for name, text, buffers, *rules in (
        ("forward", _FORWARD, "scratch", _ONE_X, _ONE_Z._replace(allowed=(*_ONE_Z.allowed, ""))),
        ("dgated", _DGATED, "dout_scratch dz_scratch dz y1s", _ONE_DOUT, _ONE_Z, _OPERANDS),
        ("dgrad", _DGRAD, "dx_scratch dz_scratch"),
        ("wgrad", _WGRAD, "dz y1s wgrad_scratch dw_scratch", _OF_DW1, _OF_DW2),
        ("adapters", _ADAPTERS, "y1s", _ONE_X),
    )
}
# The passes that read weights.
BINDS = "forward", "dgated", "dgrad"
KERNELS = kernels_of(PASSES)
