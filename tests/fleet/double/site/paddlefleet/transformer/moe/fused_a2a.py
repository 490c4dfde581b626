"""Dispatch and combine over DeepEP's buffer as PyLayers, with tokens and gradients in FP8."""

import inspect

import paddle
import paddlefleet_ops
from paddle.autograd import PyLayer
from paddlefleet_ops import deep_ep, is_sonic_moe_available

quantize_activation_blockscaled_fast = None
_SONIC_PACK_SCALE_WORDS_AVAILABLE = False
_buffers = {}


def _load_sonic_symbols():
    """Fleet of today runs this as the module is imported, lazy Fleet as a layer is made."""
    global quantize_activation_blockscaled_fast, _SONIC_PACK_SCALE_WORDS_AVAILABLE
    if not is_sonic_moe_available():
        return
    try:
        from paddlefleet_ops.sonicmoe import quack_utils

        quantizer = quack_utils.quantize_activation_blockscaled_fast
    except ImportError:
        quantizer = None
    quantize_activation_blockscaled_fast = quantizer
    _SONIC_PACK_SCALE_WORDS_AVAILABLE = (
        quantizer is not None and "pack_scale_words" in inspect.signature(quantizer).parameters
    )


if not hasattr(paddlefleet_ops, "load_sonic_moe"):
    _load_sonic_symbols()


def get_buffer(group):
    return _buffers.setdefault(id(group), deep_ep.Buffer(group))


def _pack_sonic_fp8_scale_for_deepep(x_fp8, scale):
    """Bytes four to a word where they fit, by value elsewhere; words pass as they are."""
    tokens, hidden = x_fp8.shape
    groups = -(-hidden // 32)
    shape = tuple(scale.shape)
    if groups % 4 == 0 and scale.dtype == paddle.int32 and shape == (tokens, groups // 4):
        return scale
    if shape != (tokens, groups):
        raise RuntimeError(f"Invalid Sonic FP8 scale shape before DeepEP dispatch: {shape}")
    if scale.dtype != paddle.uint8:
        raise TypeError(f"Sonic FP8 scale carrier expects raw uint8 E8M0 bytes, got {scale.dtype}")
    return scale.view(paddle.int32) if groups % 4 == 0 else scale.cast(paddle.int32)


def _unpack_sonic_fp8_scale_from_deepep(x_fp8, scale):
    """uint8 `[N, H/32]`: the bytes of packed words, or the words by value."""
    tokens, hidden = x_fp8.shape
    groups = -(-hidden // 32)
    shape = tuple(scale.shape)
    if scale.dtype == paddle.int32 and groups % 4 == 0 and shape == (tokens, groups // 4):
        return scale.view(paddle.uint8)
    if scale.dtype == paddle.int32 and shape == (tokens, groups):
        return scale.cast(paddle.uint8)
    raise RuntimeError(f"Invalid packed Sonic FP8 scale received from DeepEP: {shape}")


def _sonicmoe_quantize(x):
    assert quantize_activation_blockscaled_fast is not None, "please update sonicmoe"
    if not _SONIC_PACK_SCALE_WORDS_AVAILABLE:
        return quantize_activation_blockscaled_fast(x, scale_dtype=paddle.int32)
    packs = x.shape[1] % 128 == 0
    codes, scale = quantize_activation_blockscaled_fast(x, pack_scale_words=packs)
    return codes, _pack_sonic_fp8_scale_for_deepep(codes, scale)


def _record_fp8_combine_grad(pair, handle):
    if handle is None:
        raise RuntimeError("fp8 dispatch needs a combine_grad_handle in the backward of combine")
    codes, scale = pair
    if _SONIC_PACK_SCALE_WORDS_AVAILABLE:
        scale = _unpack_sonic_fp8_scale_from_deepep(codes, scale)
    handle["data"], handle["scale"] = codes, scale
    return codes


class DeepEPDispatch(PyLayer):
    """`(recv_x, recv_probs, states, {"scale": ...} or None)`."""

    @staticmethod
    def forward(ctx, x, token_indices, token_probs, num_experts, group, fp8_dispatch=False):
        if fp8_dispatch:
            x = _sonicmoe_quantize(x.contiguous())
        recv_x, indices, probs, counts, handle = get_buffer(group).dispatch(
            x, token_indices, token_probs, num_experts
        )
        ctx.group, ctx.handle = group, handle
        ctx.set_grad_in_dtype_consistent(False)
        states = {"dispatched_indices": indices, "tokens_per_expert": counts, "handle": handle}
        if fp8_dispatch:
            return recv_x[0], probs, states, {"scale": recv_x[1]}
        return recv_x, probs, states, None

    @staticmethod
    def backward(ctx, grad_output, grad_token_probs):
        assert grad_output.dtype == paddle.bfloat16, "dx is bf16, whatever was dispatched"
        grad_x, grad_probs = get_buffer(ctx.group).combine(
            grad_output.contiguous(), ctx.handle, grad_token_probs.cast(paddle.float32)
        )
        return grad_x, None, grad_probs


class DeepEPCombine(PyLayer):
    """The sum over ranks, unweighted; its backward may answer in e4m3 and fill the handle."""

    @staticmethod
    def forward(ctx, x, group, states, fp8_dispatch=False, combine_grad_handle=None):
        ctx.handle, ctx.group = states["handle"], group
        ctx.fp8_dispatch, ctx.combine_grad_handle = fp8_dispatch, combine_grad_handle
        return get_buffer(group).combine(x, states["handle"])[0]

    @staticmethod
    def backward(ctx, grad_output):
        grad_output = grad_output.contiguous()
        sent = _sonicmoe_quantize(grad_output) if ctx.fp8_dispatch else grad_output
        grad_x = get_buffer(ctx.group).dispatch(sent, handle=ctx.handle)[0]
        if ctx.fp8_dispatch:
            return _record_fp8_combine_grad(grad_x, ctx.combine_grad_handle)
        return grad_x
