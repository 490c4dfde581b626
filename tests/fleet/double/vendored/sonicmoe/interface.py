"""`run_sonic_moe` in plain Paddle."""

import paddle
from fleet.double import reference

from . import functional
from .enums import ActivationType
from .quack_utils import dequantize


def run_sonic_moe(
    hidden_states,
    topk_indices,
    topk_scores,
    K,
    E,
    w1,
    w2,
    fp8=False,
    tokens_per_expert=None,
    fp8_scale=None,
    fp8_combine_grad_handle=None,
    fp8_config=None,
    release_fp8_weights=False,
    activation_type=ActivationType.SWIGLU,
):
    assert tuple(w1.shape) == (E, 2 * w2.shape[2], w2.shape[1]), "weights are in Sonic layout"
    assert tuple(topk_indices.shape) == tuple(topk_scores.shape) == (len(hidden_states), K)
    activation = _activation(activation_type, fp8_config)
    # Autograd asks for a gradient of scales that came out of a PyLayer.
    fp8_scale = None if fp8_scale is None else fp8_scale.detach()
    return _Experts.apply(
        hidden_states, topk_scores, topk_indices, w1, w2, fp8, fp8_scale, activation,
        fp8_combine_grad_handle,
    )  # fmt: skip


def _activation(kind, config):
    kind = getattr(kind, "value", kind)
    if kind == "swiglu":
        return reference.swiglu(getattr(config, "swiglu_clamp_value", 0.0))
    name, beta, linear = kind.split(":")
    assert name == "situ_glu"
    linear = linear.removeprefix("lb=")
    return reference.situ(
        float(beta.removeprefix("b=")), None if linear == "none" else float(linear)
    )


class _Experts(paddle.autograd.PyLayer):
    """Weight gradients are added to `main_grad`; the weights get none from autograd."""

    @staticmethod
    def forward(ctx, x, scores, indices, w1, w2, fp8, scale, activation, handle):
        ctx.set_grad_in_dtype_consistent(False)
        values = dequantize(x, scale) if scale is not None else x.astype("float32")
        ctx.save_for_backward(values, scores, indices)
        ctx.weights, ctx.fp8, ctx.activation, ctx.handle = (w1, w2), fp8, activation, handle
        out = reference.run_experts(values, indices, scores, *_values(ctx), activation)
        return out.astype("bfloat16")

    @staticmethod
    def backward(ctx, dout):
        values, scores, indices = ctx.saved_tensor()
        if ctx.handle is not None:
            dout = dequantize(ctx.handle["data"], ctx.handle["scale"])
            ctx.handle.clear()
        leaves = [t.detach() for t in (values, scores, *_values(ctx))]
        for leaf in leaves:
            leaf.stop_gradient = False
        with paddle.enable_grad():
            out = reference.run_experts(leaves[0], indices, leaves[1], *leaves[2:], ctx.activation)
            found = [None] * 4
            if not out.stop_gradient and int(out.shape[0]):
                found = paddle.grad(out, leaves, [dout.astype("float32")], allow_unused=True)
        dx, dscores, dw1, dw2 = (
            paddle.zeros_like(leaf) if g is None else g
            for g, leaf in zip(found, leaves, strict=True)
        )
        w1, w2 = ctx.weights
        _add("moe_sonic_expert_down_proj", w2, lambda: w2.main_grad.add_(dw2))
        # In Sonic layout like the weight, while that of w2 stays grouped.
        sonic_dw1 = reference.sonic_w1(dw1)
        _add("moe_sonic_expert_up_gate_proj", w1, lambda: w1.main_grad.add_(sonic_dw1))
        return dx.astype("bfloat16"), dscores, None, None, None


def _values(ctx):
    """fp32 `[E, H, 2I]` and `[E, I, H]`, from the FP8 copies where the call is one in FP8."""
    w1, w2 = ctx.weights
    if ctx.fp8:
        w1, w2 = (weight.transposed_fp8[0].transpose([0, 2, 1]) for weight in (w1, w2))
    w1, w2 = w1.astype("float32"), w2.astype("float32")
    return reference.grouped_w1(w1).detach(), w2.transpose([0, 2, 1]).detach()


def _add(point, weight, run):
    hook = functional._WGRAD_DEFERRAL_HOOK
    if hook is None or not hook(point, weight, run):
        run()
