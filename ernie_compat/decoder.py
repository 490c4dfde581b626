"""A small ERNIE-style MoE decoder on the node, once for both frameworks: `torch` is PyTorch or
Paddle's torch proxy, whichever `sonicmoe` is bound to. Axes are passed by position, because the two
call them `dim` and `axis`.

`dense_dtype` is that of the products outside the experts: fp32, or bf16 as mixed precision has it
(Paddle's CPU build has no bf16 matrix product). Residual stream, norms, routers, head and losses are
fp32 either way.

Shape suffixes: T tokens (B x S), B sequences, S positions, H hidden, N heads, D head size, E
experts, K slots, I intermediate, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from sonicmoe import SonicMoEConfig
from sonicmoe.ep import Dispatcher
from sonicmoe.ernie_compat import SonicMoEMlpNode

from .initial_weights import causal_mask, rotary_tables
from .model_config import ModelConfig
from .ranks import Ranks

if TYPE_CHECKING:
    import torch
    from torch import nn
else:
    from sonicmoe.interop import torch

    nn = torch.nn
F = nn.functional
Tensor = torch.Tensor


class Output(NamedTuple):
    """A layer gives its `values` `[T, H]`; an MoE layer also the balance loss (1 when balanced), the z
    loss, and slots per expert fp32 `[E]` of all ranks' tokens. The decoder gives logits `[T, V]`,
    the losses summed over MoE layers, and slots `[L_moe, E]`.
    """

    values: Tensor
    aux_loss: Any = 0.0
    z_loss: Any = 0.0
    expert_counts: Any = None


class Projection(nn.Module):
    """`x @ weight` with an fp32 `weight [in, out]` and no bias, both operands rounded to `dtype`."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty([inputs, outputs]))
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]` in `dtype`."""
        return _as(x, self.dtype) @ _as(self.weight, self.dtype)


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last axis, fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty([size]))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Causal self-attention with rotary positions; its gradients are the same bits every time.

    In fp32 by plain products; in bf16, which only PyTorch runs, by its fused kernels, which never
    store the scores.
    """

    cos_S1D: Tensor
    sin_S1D: Tensor
    mask_SS: Tensor

    def __init__(self, config: ModelConfig, dense_dtype: torch.dtype) -> None:
        """Allocate projections; tables and mask are constants."""
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.fused = dense_dtype != torch.float32
        self.qkv_proj = Projection(config.hidden_size, 3 * config.hidden_size, dense_dtype)
        self.o_proj = Projection(config.hidden_size, config.hidden_size, dense_dtype)
        cos, sin = rotary_tables(config)
        tables = {
            # The axis of size 1 spreads over heads.
            "cos_S1D": cos[:, None],
            "sin_S1D": sin[:, None],
            "mask_SS": causal_mask(config.seq_len),
        }
        # Computed from the configuration and not saved, hence `persistent=False`.
        for name, table in tables.items():
            self.register_buffer(name, torch.from_numpy(table), persistent=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """`[B, S, H]` -> `[B, S, H]` in the dense dtype."""
        batch, length, hidden = x_BSH.shape
        # Queries and keys stay together until they are rotated: one product and one rotation serve
        # both.
        qk_BSH, v_BSH = self.qkv_proj(x_BSH).split([2 * hidden, hidden], -1)
        qk_BSND = self._rotate(qk_BSH.reshape([batch, length, 2 * self.num_heads, self.head_dim]))
        q_BNSD, k_BNSD = _swap_heads(qk_BSND).chunk(2, 1)
        v_BNSD = _swap_heads(v_BSH.reshape([batch, length, self.num_heads, self.head_dim]))
        out_BNSD = self._attend(q_BNSD, k_BNSD, v_BNSD)
        return self.o_proj(_swap_heads(out_BNSD).reshape([batch, length, hidden]))

    def _attend(self, q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor) -> Tensor:
        if self.fused:
            from .torch_attention import repeatable_attention

            return repeatable_attention(q_BNSD, k_BNSD, v_BNSD)
        length = q_BNSD.shape[2]
        # The scale is applied to q, which usually has fewer elements than the scores.
        scores = (q_BNSD * self.head_dim**-0.5) @ k_BNSD.permute([0, 1, 3, 2])
        return torch.softmax(scores + self.mask_SS[:length, :length], -1) @ v_BNSD

    def _rotate(self, x_BSND: Tensor) -> Tensor:
        """In fp32, rounded once to the dtype of `x_BSND`."""
        length = x_BSND.shape[1]
        first, second = x_BSND.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        rotated = x_BSND * self.cos_S1D[:length] + turned * self.sin_S1D[:length]
        return _as(rotated, x_BSND.dtype)


class SwiGLUMlp(nn.Module):
    """Gated MLP with the node's weight layout: `up_gate_proj.weight [H, 2I]` (gate first) and
    `down_proj.weight [I, H]`.
    """

    def __init__(self, hidden: int, intermediate: int, dtype: torch.dtype = torch.float32) -> None:
        """Allocate; as an expert only the weights are used, the node does the arithmetic."""
        super().__init__()
        self.up_gate_proj = Projection(hidden, 2 * intermediate, dtype)
        self.down_proj = Projection(intermediate, hidden, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., H]` -> `[..., H]` in `dtype`."""
        gate, up = self.up_gate_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class MoEMlp(nn.Module):
    """Softmax router with top-k, dispatch to the ranks of the experts, this rank's experts through
    the node, combine.
    """

    expert_ids_E: Tensor

    def __init__(
        self,
        config: ModelConfig,
        node_config: SonicMoEConfig,
        token_dtype: torch.dtype,
        ranks: Ranks,
        dispatcher: Dispatcher,
    ) -> None:
        """Allocate router and experts (None for those of other ranks) and hand the experts to a
        node.
        """
        super().__init__()
        self.topk, self.num_experts, self.token_dtype = config.topk, config.num_experts, token_dtype
        self.ranks, self.dispatcher = ranks, dispatcher
        self.router = Projection(config.hidden_size, config.num_experts)
        self.register_buffer("expert_ids_E", torch.arange(config.num_experts), persistent=False)
        local = ranks.layout.local_experts(config.num_experts)
        experts = [
            SwiGLUMlp(config.hidden_size, config.intermediate_size) if expert in local else None
            for expert in range(config.num_experts)
        ]
        self.experts = nn.ModuleList(experts)  # type: ignore[arg-type]  # ids stay global, and so do parameter names
        self.node = SonicMoEMlpNode(
            experts, len(local), config.hidden_size, config.intermediate_size, config=node_config
        )

    def forward(self, x_TH: Tensor) -> Output:
        """`[T, H]` -> `[T, H]`, and the router's losses and counts."""
        logits_TE = self.router(x_TH)
        probs_TE = torch.softmax(logits_TE, -1)
        top_TK, indices_TK = torch.topk(probs_TE, self.topk, -1)
        # The K probabilities are scaled to sum to 1. The division is part of the graph, so the
        # router learns through it.
        top_TK = top_TK / top_TK.sum(-1, keepdim=True)
        # `bincount` would wait for a GPU.
        counts_E = (indices_TK.unsqueeze(-1) == self.expert_ids_E).sum((0, 1)).to(torch.float32)
        # In place and outside the graph: counts are integers in fp32 and have no gradient.
        self.ranks.sum([counts_E])
        # Every rank calls this in every layer, also with no tokens for its experts: it is a
        # collective.
        received = self.dispatcher.dispatch(x_TH.to(self.token_dtype), indices_TK, top_TK)
        out_RH = self.node(received.x, received.tokens_per_expert, received.indices, received.probs)
        out_TH = self.dispatcher.combine(out_RH, received.handle)
        # Switch-Transformer balance loss: E * sum_e (share of slots on e) * (mean probability of
        # e); 1 when balanced.
        # The share is that of all ranks: the mean of the ranks' losses is then the loss of all
        # tokens together.
        share_E = counts_E / (x_TH.shape[0] * self.topk * self.ranks.layout.world_size)
        aux_loss = self.num_experts * (share_E * probs_TE.mean(0)).sum()
        z_loss = torch.logsumexp(logits_TE, -1).square().mean()
        return Output(out_TH.to(torch.float32), aux_loss, z_loss, counts_E)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residuals; the MLP is dense or a mixture of experts."""

    def __init__(
        self, config: ModelConfig, mlp: MoEMlp | SwiGLUMlp, dense_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, dense_dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = mlp

    def forward(self, x_BSH: Tensor) -> Output:
        """`[B, S, H]` -> `[B, S, H]` and, of an MoE layer, its router's losses and counts."""
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH))
        normed_BSH = self.mlp_norm(x_BSH)
        if not isinstance(self.mlp, MoEMlp):
            return Output(x_BSH + self.mlp(normed_BSH))
        out = self.mlp(normed_BSH.reshape([-1, normed_BSH.shape[-1]]))
        return out._replace(values=x_BSH + out.values.reshape(x_BSH.shape))


class ErnieMoEDecoder(nn.Module):
    """Byte-level decoder; `node_config` and `token_dtype` decide what happens inside the nodes,
    `dense_dtype` the products around them.
    """

    def __init__(
        self,
        config: ModelConfig,
        node_config: SonicMoEConfig,
        token_dtype: torch.dtype,
        dense_dtype: torch.dtype,
        ranks: Ranks,
    ) -> None:
        """Build the layers; a learner writes the initial weights."""
        super().__init__()
        # One dispatcher for all layers: its buffers are large, and layers use them one after
        # another.
        dispatcher = ranks.dispatcher(config.num_experts)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)

        def mlp(index: int) -> MoEMlp | SwiGLUMlp:
            if index in config.moe_layers:
                return MoEMlp(config, node_config, token_dtype, ranks, dispatcher)
            return SwiGLUMlp(config.hidden_size, config.dense_intermediate_size, dense_dtype)

        layers = [DecoderLayer(config, mlp(i), dense_dtype) for i in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = Projection(config.hidden_size, config.vocab_size)

    @property
    def nodes(self) -> list[SonicMoEMlpNode]:
        """The nodes of all MoE layers, first to last."""
        return [layer.mlp.node for layer in self.layers if isinstance(layer.mlp, MoEMlp)]

    def forward(self, tokens_BS: Tensor) -> Output:
        """int64 tokens `[B, S]` -> logits of T = B * S rows, losses and counts."""
        x_BSH, aux_loss, z_loss, counts = self.embedding(tokens_BS), 0.0, 0.0, []
        for layer in self.layers:
            out = layer(x_BSH)
            x_BSH, aux_loss, z_loss = out.values, aux_loss + out.aux_loss, z_loss + out.z_loss
            counts += [] if out.expert_counts is None else [out.expert_counts]
        logits_BSV = self.lm_head(self.final_norm(x_BSH))
        logits_TV = logits_BSV.reshape([-1, logits_BSV.shape[-1]])
        return Output(logits_TV, aux_loss, z_loss, torch.stack(counts))


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` itself where it has the dtype: Paddle would copy it."""
    return x if x.dtype == dtype else x.to(dtype)


def _swap_heads(x: Tensor) -> Tensor:
    """`[B, S, N, D]` <-> `[B, N, S, D]`."""
    return x.permute([0, 2, 1, 3])
