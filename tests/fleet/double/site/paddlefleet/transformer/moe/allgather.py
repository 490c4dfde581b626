"""The allgather dispatcher: every rank has all experts and I/EP columns of each."""

import paddle
from paddle.autograd import PyLayer

from . import fused_a2a


def all_gather(x, group):
    """Rows of all ranks, as they are."""
    assert group.nranks == 1
    return x.clone()


def reduce_scatter(x, group):
    """This rank's share of the sum over ranks."""
    assert group.nranks == 1
    return x.clone()


def _quantize_and_pack_fp8(x):
    """One uint8 row per token: codes, then the bytes of its int32 scales."""
    quantizer = fused_a2a.quantize_activation_blockscaled_fast
    if quantizer is None:
        raise RuntimeError("Cannot find quantize_activation_blockscaled_fast")
    codes, scale = quantizer(x.contiguous(), scale_dtype=paddle.int32)
    return paddle.concat([codes.view("uint8"), scale.view("uint8")], axis=1).contiguous()


def _split_fp8(fused, hidden):
    codes = fused[:, :hidden].contiguous().view("float8_e4m3fn")
    scale = fused[:, hidden:].contiguous().view("int32")
    return codes, scale.reshape([fused.shape[0], -1])


class GatherTokens(PyLayer):
    """bf16 rows of all ranks, or `(codes, scales)`; backward: reduce-scatter of bf16."""

    @staticmethod
    def forward(ctx, x, group, fp8):
        ctx.group = group
        if not fp8:
            return all_gather(x, group)
        ctx.set_grad_in_dtype_consistent(False)
        ctx.set_materialize_grads(False)
        return _split_fp8(all_gather(_quantize_and_pack_fp8(x), group), int(x.shape[1]))

    @staticmethod
    def backward(ctx, grad, grad_scale=None):
        assert grad is None or grad.dtype == paddle.bfloat16
        return None if grad is None else reduce_scatter(grad, ctx.group)


class GatherWeights(PyLayer):
    """Router weights of all ranks; every rank computes with a part of I, so gradients sum."""

    @staticmethod
    def forward(ctx, weights, group):
        ctx.group = group
        return all_gather(weights, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.group)


class CombineTokens(PyLayer):
    """Reduce-scatter of the parts; backward: rows of all ranks, in e4m3 with a handle."""

    @staticmethod
    def forward(ctx, x, group, fp8_combine_grad_handle=None):
        ctx.group, ctx.handle = group, fp8_combine_grad_handle
        if fp8_combine_grad_handle is not None:
            ctx.set_grad_in_dtype_consistent(False)
            ctx.set_materialize_grads(False)
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, grad):
        if ctx.handle is None:
            return all_gather(grad, ctx.group)
        fused = all_gather(_quantize_and_pack_fp8(grad), ctx.group)
        codes, scale = _split_fp8(fused, int(grad.shape[1]))
        ctx.handle["data"], ctx.handle["scale"] = codes, scale
        return codes


def count_tokens(indices, num_experts):
    """int32 `[E]` on the device of the ids, without asking the host."""
    flat = indices.reshape([-1]).cast("int64")
    sink = paddle.where(flat >= 0, flat, paddle.full_like(flat, num_experts))
    counts = paddle.zeros([num_experts + 1], dtype="int32")
    return paddle.scatter(counts, sink, paddle.ones_like(sink).cast("int32"), overwrite=False)[
        :num_experts
    ]
