"""A small ERNIE-style MoE decoder on the node, in Paddle; `torch_model` is its twin, name by name
and bit by bit at the start.

Only tokens cross into bf16, at the node's border: Paddle's CPU build has no bf16 matrix product.
Shape suffixes: T tokens (B x S), B sequences, S positions, H hidden, N heads, D head size, E
experts, K slots, I intermediate, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import paddle
from paddle import nn
from paddle.nn import functional as F

from sonicmoe import SonicMoEConfig
from sonicmoe.ep import Dispatcher
from sonicmoe.ernie_compat import SonicMoEMlpNode

from .initial_weights import causal_mask, half_turn, rotary_tables
from .model_config import ModelConfig
from .parallel import Parallel

Tensor: TypeAlias = paddle.Tensor


class RouterOutput(NamedTuple):
    """Of one MoE layer: balance loss (1 when balanced), z loss, slots per expert fp32 `[E]` of all
    ranks' tokens.
    """

    aux_loss: Tensor
    z_loss: Tensor
    counts_E: Tensor


class DecoderOutput(NamedTuple):
    """Results of one forward: logits `[T, V]`, router losses summed over MoE layers, slots per
    expert fp32 `[L_moe, E]`.
    """

    logits: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    expert_counts: Tensor


def projection(inputs: int, outputs: int) -> nn.Linear:
    """`x @ weight` with `weight [in, out]` and no bias."""
    return nn.Linear(inputs, outputs, bias_attr=False)


class RMSNorm(nn.Layer):
    """`x / rms(x) * weight` over the last axis, fp32."""

    def __init__(self, size: int, eps: float) -> None:
        """Allocate; values are loaded afterwards."""
        super().__init__()
        self.weight = self.create_parameter(
            [size], default_initializer=nn.initializer.Constant(1.0)
        )
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`."""
        return x * paddle.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Layer):
    """Causal self-attention with rotary positions; plain products, so that gradients are the same
    bits every time.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Allocate projections; tables and mask are constants."""
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.qkv_proj = projection(config.hidden_size, 3 * config.hidden_size)
        self.o_proj = projection(config.hidden_size, config.hidden_size)
        cos, sin = rotary_tables(config)
        self.register_buffer("cos_S1D", paddle.to_tensor(cos[:, None]), persistable=False)
        self.register_buffer("sin_S1D", paddle.to_tensor(sin[:, None]), persistable=False)
        self.register_buffer(
            "turn_DD", paddle.to_tensor(half_turn(self.head_dim)), persistable=False
        )
        self.register_buffer(
            "mask_SS", paddle.to_tensor(causal_mask(config.seq_len)), persistable=False
        )

    def forward(self, x_BSH: Tensor) -> Tensor:
        """`[B, S, H]` -> `[B, S, H]`."""
        batch, length, hidden = x_BSH.shape
        qk_BSH, v_BSH = self.qkv_proj(x_BSH).split([2 * hidden, hidden], axis=-1)
        qk_BSND = self._rotate(qk_BSH.reshape([batch, length, 2 * self.num_heads, self.head_dim]))
        q_BNSD, k_BNSD = qk_BSND.transpose([0, 2, 1, 3]).chunk(2, axis=1)
        v_BNSD = v_BSH.reshape([batch, length, self.num_heads, self.head_dim]).transpose(
            [0, 2, 1, 3]
        )
        scores = paddle.matmul(q_BNSD * self.head_dim**-0.5, k_BNSD, transpose_y=True)
        weights = F.softmax(scores + self.mask_SS[:length, :length], axis=-1)
        return self.o_proj(
            paddle.matmul(weights, v_BNSD).transpose([0, 2, 1, 3]).reshape([batch, length, hidden])
        )

    def _rotate(self, x_BSND: Tensor) -> Tensor:
        length = x_BSND.shape[1]
        turned = paddle.matmul(x_BSND.reshape([-1, self.head_dim]), self.turn_DD).reshape(
            x_BSND.shape
        )
        return x_BSND * self.cos_S1D[:length] + turned * self.sin_S1D[:length]


class SwiGLUMlp(nn.Layer):
    """Gated MLP with the node's weight layout: `up_gate_proj.weight [H, 2I]` (gate first) and
    `down_proj.weight [I, H]`.
    """

    def __init__(self, hidden: int, intermediate: int) -> None:
        """Allocate; as an expert only the weights are used, the node does the arithmetic."""
        super().__init__()
        self.up_gate_proj = projection(hidden, 2 * intermediate)
        self.down_proj = projection(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., H]` -> `[..., H]`."""
        gate, up = self.up_gate_proj(x).chunk(2, axis=-1)
        return self.down_proj(F.silu(gate) * up)


class MoEMlp(nn.Layer):
    """Softmax router with top-k, dispatch to the ranks of the experts, this rank's experts through
    the node, combine.
    """

    def __init__(
        self,
        config: ModelConfig,
        node_config: SonicMoEConfig,
        token_dtype: str,
        parallel: Parallel,
        dispatcher: Dispatcher,
    ) -> None:
        """Allocate router and experts (None for those of other ranks) and hand the experts to a
        node.
        """
        super().__init__()
        self.topk, self.num_experts, self.token_dtype = config.topk, config.num_experts, token_dtype
        self.parallel, self.dispatcher = parallel, dispatcher
        self.router = projection(config.hidden_size, config.num_experts)
        local = parallel.layout.local_experts(config.num_experts)
        experts = [
            SwiGLUMlp(config.hidden_size, config.intermediate_size) if expert in local else None
            for expert in range(config.num_experts)
        ]
        self.experts = nn.LayerList(experts)  # ids stay global, and so do parameter names
        self.node = SonicMoEMlpNode(
            experts, len(local), config.hidden_size, config.intermediate_size, config=node_config
        )

    def forward(self, x_TH: Tensor) -> tuple[Tensor, RouterOutput]:
        """`[T, H]` -> `[T, H]`, and the router's losses and counts."""
        logits_TE = self.router(x_TH)
        probs_TE = F.softmax(logits_TE, axis=-1)
        top_TK, indices_TK = paddle.topk(probs_TE, self.topk, axis=-1)
        top_TK = top_TK / top_TK.sum(-1, keepdim=True)
        counts_E = paddle.cast(
            paddle.bincount(indices_TK.flatten(), minlength=self.num_experts), "float32"
        )
        self.parallel.sum_world([counts_E])
        received = self.dispatcher.dispatch(paddle.cast(x_TH, self.token_dtype), indices_TK, top_TK)
        out_RH = self.node(received.x, received.tokens_per_expert, received.indices, received.probs)
        out_TH = self.dispatcher.combine(out_RH, received.handle)
        # Switch-Transformer balance loss: E * sum_e (share of slots on e) * (mean probability of
        # e); 1 when balanced. The share is of all ranks' tokens, so that the mean of the ranks'
        # losses is the loss of all tokens together.
        share_E = counts_E / (x_TH.shape[0] * self.topk * self.parallel.layout.world_size)
        aux_loss = self.num_experts * (share_E * probs_TE.mean(0)).sum()
        z_loss = paddle.logsumexp(logits_TE, axis=-1).square().mean()
        return paddle.cast(out_TH, "float32"), RouterOutput(aux_loss, z_loss, counts_E)


class DecoderLayer(nn.Layer):
    """Pre-norm attention and MLP with residuals; the MLP is dense or a mixture of experts."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        node_config: SonicMoEConfig,
        token_dtype: str,
        parallel: Parallel,
        dispatcher: Dispatcher,
    ) -> None:
        """Layer `index` of `config`."""
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        if index in config.moe_layers:
            self.mlp = MoEMlp(config, node_config, token_dtype, parallel, dispatcher)
        else:
            self.mlp = SwiGLUMlp(config.hidden_size, config.dense_intermediate_size)

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, RouterOutput | None]:
        """`[B, S, H]` -> `[B, S, H]` and, of an MoE layer, its router's losses and counts."""
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH))
        normed_BSH = self.mlp_norm(x_BSH)
        if not isinstance(self.mlp, MoEMlp):
            return x_BSH + self.mlp(normed_BSH), None
        out_TH, router = self.mlp(normed_BSH.reshape([-1, normed_BSH.shape[-1]]))
        return x_BSH + out_TH.reshape(x_BSH.shape), router


class ErnieMoEDecoder(nn.Layer):
    """Byte-level decoder; `node_config` and `token_dtype` decide only what happens inside the
    nodes.
    """

    def __init__(
        self, config: ModelConfig, node_config: SonicMoEConfig, token_dtype: str, parallel: Parallel
    ) -> None:
        """Build the layers; load weights with `initial_weights` afterwards."""
        super().__init__()
        dispatcher = parallel.dispatcher(config.num_experts)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.LayerList(
            [
                DecoderLayer(config, i, node_config, token_dtype, parallel, dispatcher)
                for i in range(config.num_layers)
            ]
        )
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = projection(config.hidden_size, config.vocab_size)

    @property
    def nodes(self) -> list[SonicMoEMlpNode]:
        """The nodes of all MoE layers, first to last."""
        return [layer.mlp.node for layer in self.layers if isinstance(layer.mlp, MoEMlp)]

    def forward(self, tokens_BS: Tensor) -> DecoderOutput:
        """int64 tokens `[B, S]` -> `DecoderOutput` with T = B * S rows."""
        x_BSH = self.embedding(tokens_BS)
        routers: list[RouterOutput] = []
        for layer in self.layers:
            x_BSH, router = layer(x_BSH)
            routers += [router] if router is not None else []
        logits_BSV = self.lm_head(self.final_norm(x_BSH))
        logits_TV = logits_BSV.reshape([-1, logits_BSV.shape[-1]])
        return DecoderOutput(
            logits_TV,
            paddle.stack([router.aux_loss for router in routers]).sum(),
            paddle.stack([router.z_loss for router in routers]).sum(),
            paddle.stack([router.counts_E for router in routers]),
        )
