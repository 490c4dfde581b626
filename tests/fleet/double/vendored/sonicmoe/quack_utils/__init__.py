"""Quantisers: powers of two per 32 columns for tokens, values as they are for weights."""

import numpy as np
import paddle


def quantize_activation_blockscaled_fast(x, scale_dtype=None, pack_scale_words=False):
    """`(e4m3 [T, H], E8M0 bytes)`: uint8 `[T, H/32]`, or as int32, one byte a word."""
    tokens, hidden = (int(size) for size in x.shape)
    groups = x.astype("float32").numpy().reshape(tokens, -1, 32)
    mantissa, exponent = np.frexp(np.abs(groups).max(-1))
    # The least exponent with |x| / 2^e <= 448 = 1.75 * 2^8; frexp's mantissa is in [0.5, 1).
    power = np.where(mantissa > 0, np.clip(exponent - 9 + (mantissa > 0.875), -127, 127), -127)
    codes = (groups * 2.0 ** -power[..., None]).astype(np.float32).reshape(tokens, hidden)
    scale = paddle.to_tensor((power + 127).astype(np.uint8))
    scale = scale if scale_dtype is None else scale.astype(scale_dtype)
    return paddle.to_tensor(codes).astype("float8_e4m3fn"), scale


def dequantize(codes, scale):
    """fp32 of codes and any of the three E8M0 carriers."""
    tokens, hidden = (int(size) for size in codes.shape)
    if tokens == 0:
        return paddle.zeros([0, hidden])
    held = scale.numpy()
    if held.dtype == np.int32:
        packed = held.shape[1] == hidden // 128
        held = held.view(np.uint8) if packed else held.astype(np.uint8)
    powers = np.exp2(held.astype(np.float32) - 127).repeat(32, 1)[:, :hidden]
    return codes.astype("float32") * paddle.to_tensor(powers.astype(np.float32))


def quantize_native_fp8_weights(w1, w2, iso32=True):
    """The documented dictionary; "codes" are copies in the weights' own dtype."""
    ones = paddle.ones([1])
    if iso32:
        return {"format": "iso32", **{n: (w.clone(), ones, ones) for n, w in named(w1, w2)}}
    made = {n: (w.clone(), ones, w.transpose([0, 2, 1]), ones) for n, w in named(w1, w2)}
    return {"format": "1x32", **made}


def named(w1, w2):
    return (("w1", w1), ("w2", w2))
