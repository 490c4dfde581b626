"""Gate, dispatch, experts, combine."""

import paddle
import paddle.nn.functional as F
import paddlefleet_ops
from paddle import nn

from . import fused_a2a, moe_expert
from .fused_a2a import DeepEPCombine, DeepEPDispatch


class TopKRouter(nn.Layer):
    """fp32 softmax over all experts; the weights of the best K sum to one."""

    def __init__(self, config):
        super().__init__()
        self.topk = config.num_experts_per_tok
        self.weight = self.create_parameter([config.hidden_size, config.n_routed_experts])

    def forward(self, hidden_states):
        probs = F.softmax(hidden_states.astype("float32") @ self.weight, -1)
        weights, indices = paddle.topk(probs, self.topk, axis=-1)
        return weights / weights.sum(-1, keepdim=True), indices


class MoELayer(nn.Layer):
    """`group` is DeepEP's, of one rank; None computes on one card, without a dispatcher."""

    def __init__(self, config, group=None):
        super().__init__()
        self.config, self.group = config, group
        if config.using_sonic_moe:
            assert paddlefleet_ops.is_sonic_moe_available(), (
                paddlefleet_ops.blocked_import_messages["paddlefleet_ops.sonicmoe"]
            )
            if hasattr(paddlefleet_ops, "load_sonic_moe"):
                paddlefleet_ops.load_sonic_moe()
                moe_expert._load_sonic_symbols()
                fused_a2a._load_sonic_symbols()
        assert not (config.hidden_act == "situ" and config.fp8 and config.fp8_wgrad)
        self.fp8_dispatch = bool(config.fp8)
        self.fp8_dispatch_bwd = self.fp8_dispatch and config.fp8_wgrad
        self.recompute_moe_gate_up = "moe_gate_up" in config.recompute_modules
        self.gate = TopKRouter(config)
        self.grouped_gemm_experts = moe_expert.SonicMoEExpert(
            config.n_routed_experts, config.num_experts_per_tok, config
        )

    def forward(self, hidden_states):
        weights, indices = self.gate(hidden_states)
        if self.group is None:
            return self.grouped_gemm_experts(
                hidden_states,
                indices,
                weights,
                self.config.fp8 is not None,
                recompute_moe_gate_up=self.recompute_moe_gate_up,
            ).cast(hidden_states.dtype)
        recv_x, recv_probs, states, fp8_handle = DeepEPDispatch.apply(
            hidden_states, indices, weights, self.config.n_routed_experts, self.group,
            self.fp8_dispatch,
        )  # fmt: skip
        handle = {} if self.fp8_dispatch_bwd else None
        out = self.grouped_gemm_experts(
            recv_x,
            states["dispatched_indices"],
            recv_probs,
            self.config.fp8 is not None,
            tokens_per_expert=states["tokens_per_expert"],
            fp8_scale=None if fp8_handle is None else fp8_handle["scale"],
            recompute_moe_gate_up=self.recompute_moe_gate_up,
            fp8_combine_grad_handle=handle,
        )
        return DeepEPCombine.apply(
            out, self.group, states, fp8_dispatch=self.fp8_dispatch_bwd, combine_grad_handle=handle
        )
