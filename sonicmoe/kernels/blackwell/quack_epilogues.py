"""Epilogue functions of the grouped GEMMs, in the form quack-kernels traces: imported by build
processes only.

Values are fp32 scalars, one accumulator element (or gate and up pair) a call. Without gates the
class for sm100 hands over two neighbouring elements as one value. The formulas are
those of `engine.activations`: GELU is the exact one through erf, slopes at a kink are 0, and NaN
stays NaN where a bare maximum would drop it.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from cutlass import Boolean, Float32, cute
from cutlass._mlir.dialects import arith
from cutlass.cutlass_dsl import dsl_user_op
from quack.activation import (
    dgelu_erf,
    drelu,
    dswiglu,
    dswiglu_oai,
    gelu_erf,
    relu,
    sigmoid,
    silu,
    swiglu,
    swiglu_oai,
)
from quack.epilogue.frontend import EpiMod, gemm_epilogue
from quack.epilogue.math import F2, pack, unpack
from quack.epilogue.ops import ColVecLoad, ColVecReduce, RowVecLoad

Backward = Callable[..., Any]
# Every parameter of the activation by name: constants of the traced code.
Values = Mapping[str, float]

_TWO_SQRT_2_OVER_PI = 2.0 * math.sqrt(2.0 / math.pi)


# Backward needs the value for y1 and the slope for dz; both come from one sigmoid.
def _silu_slope(x):
    sigma = sigmoid(x)
    value = x * sigma
    return value, sigma + value * (1.0 - sigma)


def _gelu_slope(x):
    slope, value = dgelu_erf(x, Float32(1.0))
    return value, slope


# (1 + tanh(u)) / 2 = sigmoid(2 u), whose error is a thousandth of `tanh.approx`'s.
def _gelu_tanh_slope(x):
    # The bound keeps the cube from overflowing where sigma is flat.
    square = _at_most(x * x, 1e4)
    sigma = sigmoid(x * (_TWO_SQRT_2_OVER_PI + 0.044715 * _TWO_SQRT_2_OVER_PI * square))
    value = x * sigma
    inner = _TWO_SQRT_2_OVER_PI + 3.0 * 0.044715 * _TWO_SQRT_2_OVER_PI * square
    return value, sigma + value * (1.0 - sigma) * inner


def _gelu_tanh(x):
    return _gelu_tanh_slope(x)[0]


def _relu(x):
    # quack's relu is the hardware maximum, which returns the operand that is a number: relu(NaN)
    # would be 0. Adding `x * 0` brings a NaN back and leaves finite values alone.
    return relu(x) + x * 0.0


def _relu_slope(x):
    # With a gradient of 1, `drelu` returns the slope itself.
    step, positive = drelu(x, Float32(1.0))
    return positive + x * 0.0, step + x * 0.0


def _relu_sq(x):
    positive = _relu(x)
    return positive * positive


def _relu_sq_slope(x):
    positive = _relu(x)
    return positive * positive, 2.0 * positive


_UNGATED = {
    "silu": (silu, _silu_slope),
    "gelu": (gelu_erf, _gelu_slope),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_slope),
    "relu": (_relu, _relu_slope),
    "relu_sq": (_relu_sq, _relu_sq_slope),
}


def _gated(
    value: Callable[..., Any], value_and_slope: Callable[..., Any]
) -> tuple[Callable[..., Any], Backward]:
    """`(y1(gate, up), (dgate, dup, y1)(gate, up, dy1))` of an activation on the gate."""

    def forward(gate, up):
        return value(gate) * up

    def backward(gate, up, dy1):
        # `y1 = act(gate) * up`, so `dgate = dy1 * up * act'(gate)` and `dup = dy1 * act(gate)`. The
        # third value is y1 again: forward need not keep it, and dprobs and dw2 are computed from
        # it.
        act, slope = value_and_slope(gate)
        return dy1 * up * slope, dy1 * act, act * up

    return forward, backward


def _of_swiglu_oai(values: Values) -> tuple[Callable[..., Any], Backward]:
    alpha, limit = values["alpha"], values["limit"]

    def forward(gate, up):
        return swiglu_oai(gate, up, alpha, limit)

    def backward(gate, up, dy1):
        dgate, dup, y1 = dswiglu_oai(gate, up, dy1, alpha, limit)
        # The masks of the clamps turn a NaN into 0; y1 is bounded by them.
        return dgate + y1 * 0.0, dup, y1

    return forward, backward


def _of_swiglu_clamp(values: Values) -> tuple[Callable[..., Any], Backward]:
    limit = values["limit"]

    def forward(gate, up):
        return swiglu(_at_most(gate, limit), _at_least(_at_most(up, limit), -limit))

    def backward(gate, up, dy1):
        bounded = _at_most(gate, limit), _at_least(_at_most(up, limit), -limit)
        dgate, dup, y1 = dswiglu(*bounded, dy1)
        # A bound passes the gradient, and beyond it there is none. Comparisons are false for a NaN,
        # which therefore stays.
        return _where(gate > limit, 0.0, dgate), _where(abs(up) > limit, 0.0, dup), y1

    return forward, backward


def _of_situ_glu(values: Values) -> tuple[Callable[..., Any], Backward]:
    beta, linear_beta = values["beta"], values["linear_beta"]

    def forward(gate, up):
        return _softcap(gate, beta)[0] * sigmoid(gate) * _softcap(up, linear_beta)[0]

    def backward(gate, up, dy1):
        # y1 = c(gate) s(gate) b(up) of two softcaps c and b, and s' = s (1 - s).
        capped, capped_slope = _softcap(gate, beta)
        sigma = sigmoid(gate)
        act = capped * sigma
        factor, factor_slope = _softcap(up, linear_beta)
        dgate = dy1 * factor * (capped_slope * sigma + act * (1.0 - sigma))
        return dgate, dy1 * act * factor_slope, act * factor

    return forward, backward


def _softcap(x, bound: float):
    """`bound * tanh(x / bound)` and its derivative; x itself under an infinite bound.

    Both follow from r = 1 / (1 + exp(2 |x| / bound)): tanh is 1 - 2 r, and its derivative 4 r (1 -
    r) keeps its digits where tanh is flat. Below a quarter of the bound 1 - 2 r would lose digits,
    and a polynomial takes over. The value is off by less than 2^-19 of itself, a thousandth of a
    bf16 rounding; `tanh.approx`, off by 2^-11, would add a quarter of one.
    """
    if bound == math.inf:
        return x, Float32(1.0)
    size = abs(x)
    rest = sigmoid(size * (-2.0 / bound))
    far = bound - (2.0 * bound) * rest
    square = (x * (1.0 / bound)) * (x * (1.0 / bound))
    # tanh(s) / s to the sixth power of s; the next term is 62/2835 s^8.
    near = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315))))
    value = _where(size < 0.25 * bound, near, _where(x < 0.0, -far, far))
    return value, 4.0 * rest * (1.0 - rest)


# Instructions that hand a NaN on, unlike the maximum and minimum of IEEE.
@dsl_user_op
def _at_most(x, bound: float, *, loc=None, ip=None):
    values = (Float32(v).ir_value(loc=loc, ip=ip) for v in (x, bound))
    return Float32(arith.minimumf(*values, loc=loc, ip=ip))


@dsl_user_op
def _at_least(x, bound: float, *, loc=None, ip=None):
    values = (Float32(v).ir_value(loc=loc, ip=ip) for v in (x, bound))
    return Float32(arith.maximumf(*values, loc=loc, ip=ip))


@dsl_user_op
@cute.jit
def _where(condition, yes, no, *, loc=None, ip=None):
    return Float32(yes) if Boolean(condition) else Float32(no)


# SwiGLU's come from quack, which spends fewer instructions on them.
_GATED = {
    "swiglu": (swiglu, dswiglu),
    "geglu": _gated(*_UNGATED["gelu"]),
    "geglu_tanh": _gated(*_UNGATED["gelu_tanh"]),
    "reglu": _gated(*_UNGATED["relu"]),
}
# From the layer's parameters.
_WITH_PARAMETERS = {
    "swiglu_oai": _of_swiglu_oai,
    "swiglu_clamp": _of_swiglu_clamp,
    "situ_glu": _of_situ_glu,
}


def ungated_functions(activation: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward, and value and slope, of an ungated activation; of one element or of two."""
    forward, slope = _entry(_UNGATED, activation)
    return _by_lane(forward), _by_lane(slope)


def _by_lane(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which also takes the two elements that the class for sm100 hands over as one."""

    # quack's own functions take both forms, but return two elements as a plain tuple, which has no
    # arithmetic. F2 has it, and multiplies both with one instruction.
    def of_one_or_two(x):
        if not isinstance(x, tuple):
            return function(x)
        first, second = function(x[0]), function(x[1])
        if isinstance(first, tuple):
            return tuple(F2(*both) for both in zip(first, second, strict=True))
        return F2(first, second)

    return of_one_or_two


def gate_functions(activation: str, parameters: str = "") -> tuple[Callable[..., Any], Backward]:
    """Forward and backward of a gated activation; `parameters` as "beta=4.0 linear_beta=inf"."""
    if activation not in _WITH_PARAMETERS:
        return _entry(_GATED, activation)
    pairs = (pair.split("=") for pair in parameters.split())
    return _WITH_PARAMETERS[activation]({name: float(value) for name, value in pairs})


def _entry(table: dict[str, Any], activation: str) -> Any:
    if activation not in table:
        raise NotImplementedError(
            f"activation {activation!r} has no epilogue in kernels/blackwell/quack_epilogues.py, though its "
            "record names engine 'bf16'"
        )
    return table[activation]


@functools.cache
def up_epilogue(
    activation: str, parameters: str, *, gated: bool, bias: bool, store_z: bool
) -> EpiMod:
    """`z = acc (+ bias)` as D when `store_z`, `y1 = act(z)` from the unrounded z as the output
    "y1".
    """
    functions = gate_functions(activation, parameters) if gated else ungated_functions(activation)
    act = functions[0]

    # `acc_pair` hands neighbouring columns over as one pair. Weights are interleaved, so a pair is
    # (gate, up) of one feature and y1 has half as many columns as z.
    def finish(z):
        y1 = act(*unpack(z)) if gated else act(z)
        return {"D": z, "y1": y1} if store_z else {"y1": y1}

    # quack looks at the parameter names of the traced function: "acc" is the accumulator, every
    # other name is an operand. A bias that may be None is therefore a second function and not a
    # condition.
    def without_bias(acc):
        return finish(acc)

    def with_bias(acc, bias):
        return finish(acc + bias)

    ops = {"bias": RowVecLoad("bias")} if bias else {}
    mode = "acc_pair" if gated else None
    return gemm_epilogue(outputs=("y1",), ops=ops, mode=mode)(with_bias if bias else without_bias)


@functools.cache
def dgated_epilogue(activation: str, parameters: str, *, gated: bool) -> EpiMod:
    """From `acc = dy1` and c = z: D = dz of `prob * dy1`, "y1s" = prob * y1, "dprob" = partial row
    sums of dy1 * y1.
    """

    # The probability multiplies dy1 before the activation's gradient (`acc * prob`), because out =
    # prob * y2. dprob takes the unweighted product: its gradient is the sum over columns of dy1 *
    # y1.
    def of_pair(acc, c, prob):
        dgate, dup, y1 = gate_functions(activation, parameters)[1](*unpack(c), acc * prob)
        return {"D": pack(dgate, dup), "y1s": y1 * prob, "dprob": (y1, acc)}

    def of_element(acc, c, prob):
        y1, slope = ungated_functions(activation)[1](c)
        return {"D": acc * prob * slope, "y1s": y1 * prob, "dprob": (y1, acc)}

    return gemm_epilogue(
        outputs=("y1s",),
        ops={"prob": ColVecLoad("prob")},
        # `scaled=True` lets the reduction take the factors (y1, acc) apart and fuse the product
        # into its sum. quack reduces over the columns of one tile only, hence one partial sum per
        # tile.
        reduces={"dprob": ColVecReduce("dprob", scaled=True)},
        # z and dz have twice the columns of the accumulator dy1. In this mode C and D pack gate and
        # up, two 16-bit values, into one 32-bit element, so their tiles have the accumulator's
        # shape.
        mode="packed_cd_b16x2" if gated else None,
    )(of_pair if gated else of_element)
