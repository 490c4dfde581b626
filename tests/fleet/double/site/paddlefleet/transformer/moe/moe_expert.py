"""Fused experts whose parameters change between the grouped layout and Sonic's, in place."""

from contextlib import suppress

import paddle
import paddlefleet_ops
from paddle import nn


def _load_sonic_symbols():
    """Names that are missing are noticed at their first use."""
    global run_sonic_moe, _refresh_fp8_config, clear_all_fp8_weight_caches
    global quantize_native_fp8_weights
    global fused_grouped_w1_to_sonic, fused_sonic_w1_to_grouped, fused_transpose_w2_layout
    with suppress(ImportError, RuntimeError):
        from paddlefleet_ops.sonicmoe import run_sonic_moe
        from paddlefleet_ops.sonicmoe.ernie_compat.weight_layout_fusion import (
            fused_grouped_w1_to_sonic,
            fused_sonic_w1_to_grouped,
            fused_transpose_w2_layout,
        )
        from paddlefleet_ops.sonicmoe.functional import (
            _refresh_fp8_config,
            clear_all_fp8_weight_caches,
        )
        from paddlefleet_ops.sonicmoe.quack_utils import quantize_native_fp8_weights


if not hasattr(paddlefleet_ops, "load_sonic_moe"):
    _load_sonic_symbols()


class SonicMoEExpert(nn.Layer):
    """`weight1 [E, H, 2I]` in halves and `weight2 [E, I, H]`; in Sonic layout `[E, 2I, H]` in turns
    and `[E, H, I]`. `weight2.main_grad` never changes its layout.
    """

    def __init__(self, num_local_experts, topk, config):
        super().__init__()
        self.config, self.num_local_experts, self.K = config, num_local_experts, topk
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        zeros = nn.initializer.Constant(0.0)
        for name, shape in (
            ("weight1", [num_local_experts, hidden, 2 * inner]),
            ("weight2", [num_local_experts, inner, hidden]),
        ):
            made = paddle.create_parameter(shape, "bfloat16", default_initializer=zeros)
            made.color = {"color": "moe_expert", "group": None}
            setattr(self, name, made)
        self.sonic_moe_config = _refresh_fp8_config()
        settings = self.sonic_moe_config
        settings.enabled = config.fp8 is not None
        settings.fp8_wgrad = config.fp8_wgrad
        settings.fuse_y1_quant = True
        settings.fuse_y1_bf16_trunc = True
        settings.recompute_z = False
        settings.swiglu_clamp_value = float(config.activation_func_clamp_value or 0.0)
        self._activation = {}
        if config.hidden_act == "situ":
            from paddlefleet_ops.sonicmoe.quack_utils.activation_situ import encode_situ_activation

            betas = config.activation_situ_beta, config.activation_situ_linear_beta
            settings.situ_beta, settings.situ_linear_beta = betas
            self._activation = {"activation_type": encode_situ_activation(*betas)}
        self._forward_counter, self._num_micro_batches = 0, 9999

    def set_num_micro_batches(self, num_micro_batches):
        self._num_micro_batches = num_micro_batches

    def _is_sonic(self):
        w1, w2 = self.weight1.shape, self.weight2.shape
        if w1[1] == 2 * w2[2] and w1[2] == w2[1]:
            return True
        assert w1[1] == w2[2] and w1[2] == 2 * w2[1]
        return False

    def convert_weights_to_sonic_layout(self):
        if not self._is_sonic():
            self._convert(fused_grouped_w1_to_sonic)

    def convert_weights_to_grouped_layout(self):
        if self._is_sonic():
            self._convert(fused_sonic_w1_to_grouped)

    @paddle.no_grad()
    def _convert(self, convert_w1):
        for weight, converter in (
            (self.weight1, convert_w1),
            (self.weight2, fused_transpose_w2_layout),
        ):
            if weight._is_initialized():
                _assign(weight, converter(weight))
            else:
                experts, rows, columns = weight.shape
                weight.get_tensor()._set_dims([experts, columns, rows])
            main_grad = getattr(weight, "main_grad", None)
            if weight is self.weight1 and main_grad is not None:
                _assign(main_grad, converter(main_grad))
            if weight.grad is not None:
                _assign(weight.grad, converter(weight.grad))

    @paddle.no_grad()
    def quant_weight(self):
        self.convert_weights_to_sonic_layout()
        self.clear_fp8_weights()
        iso32 = self.config.fp8_weight_quant_format == "32x32"
        payload = quantize_native_fp8_weights(self.weight1, self.weight2, iso32=iso32)
        assert payload["format"] in ("1x32", "iso32")
        for name, weight in (("w1", self.weight1), ("w2", self.weight2)):
            if payload["format"] == "iso32":
                codes, scale, transposed_scale = payload[name]
                transposed = codes.transpose([0, 2, 1])
            else:
                codes, scale, transposed, transposed_scale = payload[name]
            weight.fp8 = (codes, scale)
            weight.transposed_fp8 = (transposed, transposed_scale)
        self._forward_counter = 0

    def clear_fp8_weights(self):
        clear_all_fp8_weight_caches()
        for weight in (self.weight1, self.weight2):
            weight.fp8 = weight.transposed_fp8 = None

    def need_quant_weight(self):
        return any(
            getattr(weight, name, None) is None
            for weight in (self.weight1, self.weight2)
            for name in ("fp8", "transposed_fp8")
        )

    def _releases(self, recompute_moe_gate_up):
        last = self._forward_counter >= self._num_micro_batches - 1
        return (
            self.config.fp8_weight_quant_format == "1x32"
            and last
            and not recompute_moe_gate_up
            and self.config.recompute_granularity != "full"
            and hasattr(self.weight1, "fp8")
            and hasattr(self.weight2, "fp8")
        )

    def forward(
        self,
        hidden_states,
        topk_indices,
        topk_scores,
        use_fp8=False,
        tokens_per_expert=None,
        fp8_scale=None,
        recompute_moe_gate_up=False,
        fp8_combine_grad_handle=None,
    ):
        self.convert_weights_to_sonic_layout()
        if self.sonic_moe_config.enabled is True and self.need_quant_weight():
            self.quant_weight()
        self.sonic_moe_config.recompute_z = recompute_moe_gate_up
        releases = self._releases(recompute_moe_gate_up)
        hidden_states = run_sonic_moe(
            hidden_states,
            topk_indices,
            topk_scores,
            self.K,
            self.num_local_experts,
            self.weight1,
            self.weight2,
            use_fp8,
            tokens_per_expert=tokens_per_expert,
            fp8_scale=fp8_scale,
            fp8_combine_grad_handle=fp8_combine_grad_handle,
            fp8_config=self.sonic_moe_config,
            release_fp8_weights=releases,
            **self._activation,
        )
        if releases:
            self.weight1.fp8 = self.weight2.fp8 = None
        self._forward_counter += 1
        return hidden_states


def _assign(tensor, value):
    value = value.contiguous()
    if list(tensor.shape) != list(value.shape):
        tensor.reshape_(list(value.shape))
    paddle.assign(value, output=tensor)
