"""The user's weights in both arrangements, made from one pair of arrays."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from engine.moe_golden import native_order
from framework import parameter, tensor

from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import ActivationType, FlushMode, is_glu
from sonicmoe.gradients.sink import GradientSink
from sonicmoe.interop import requires_grad
from sonicmoe.layouts import NATIVE
from sonicmoe.weights.parameters import PerExpertParameters
from sonicmoe.weights.stacked import FusedParameters

SWIGLU = ActivationType.SWIGLU


def weight_arrays(experts=3, hidden=16, intermediate=12, activation=SWIGLU, seed=0):
    """`up_gate [E, H, N1]` split-half and `down [E, I, H]`, fp64 values exact in fp32."""
    rng = np.random.default_rng(seed)
    width = intermediate * (2 if is_glu(activation) else 1)
    shapes = (experts, hidden, width), (experts, intermediate, hidden)
    return tuple(
        (rng.standard_normal(s) * 0.3).astype(np.float32).astype(np.float64) for s in shapes
    )


def expert_modules(up_gate, down, dtype=None):
    """ERNIE's experts, with all that a node reads of them. They compare by value, as a user's may."""
    held = (
        [parameter(np.float32(array), dtype) for array in pair]
        for pair in zip(up_gate, down, strict=True)
    )
    return [
        SimpleNamespace(
            up_gate_proj=SimpleNamespace(weight=up), down_proj=SimpleNamespace(weight=low)
        )
        for up, low in held
    ]


def fused_weights(up_gate, down, dtype=None):
    """Two stacked parameters."""
    return parameter(np.ascontiguousarray(up_gate, np.float32), dtype), parameter(
        np.ascontiguousarray(down, np.float32), dtype
    )


def native_arrays(up_gate, down, activation=SWIGLU):
    """In the native layout, `[E, N1, H]` and `[E, H, I]`."""
    order = native_order(up_gate.shape[2], is_glu(activation))
    return up_gate.transpose(0, 2, 1)[:, order], down.transpose(0, 2, 1)


def native_weights(up_gate, down, dtype=None, activation=SWIGLU):
    """Two stacked parameters in the native layout."""
    return fused_weights(*native_arrays(up_gate, down, activation), dtype)


def per_expert_source(up_gate, down, activation=SWIGLU, dtype=None):
    modules = expert_modules(up_gate, down, dtype)
    return PerExpertParameters(modules, len(modules), up_gate.shape[1], down.shape[1], activation)


def fused_source(up_gate, down, activation=SWIGLU, dtype=None):
    return FusedParameters(*fused_weights(up_gate, down, dtype), activation)


def native_source(up_gate, down, activation=SWIGLU, dtype=None):
    weights = native_weights(up_gate, down, dtype, activation)
    return FusedParameters(*weights, activation, NATIVE)


SOURCES = {"per_expert": per_expert_source, "fused": fused_source, "native": native_source}


def opened(sink, engine=None):
    """A backward of all weights that train, on a host."""
    weights = sink._layer.parameters()
    trained = list(map(requires_grad, weights))
    return sink.open(engine or ReferenceEngine(), None, weights, trained, tensor(np.zeros(1)))


def filled(source, seed=7):
    """A `GradientSink` in which distinct gradients wait, and those as arrays `(dw1, dw2)` in the
    layout of the parameters.
    """
    sink = GradientSink(source, FlushMode.STEP)
    batch = opened(sink)
    targets = batch.targets
    rng = np.random.default_rng(seed)
    native = [np.float32(rng.standard_normal(tuple(target.shape))) for target in targets.tensors()]
    for target, values in zip(targets.tensors(), native, strict=True):
        target.add_(tensor(values))
    sink.close(batch)
    if source.layout == NATIVE:
        return sink, *(values.astype(np.float64) for values in native)
    order = native_order(native[0].shape[1], is_glu(source.activation))
    dw1 = np.zeros(native[0].transpose(0, 2, 1).shape)
    dw1[:, :, order] = native[0].transpose(0, 2, 1)
    return sink, dw1, native[1].transpose(0, 2, 1).astype(np.float64)
