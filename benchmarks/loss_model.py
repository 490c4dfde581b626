"""The model that loss.py trains: a byte-level MoE decoder of ernie_compat's sizes with stacked
experts, fp32 masters and bf16 products, written for speed. Imported by the benchmarks beside it.

A step waits for nothing. Everything but attention and the experts is compiled by Inductor, attention
is PyTorch's fused kernel with gradients of equal bits, and AdamW is one launch for all tensors.

Legend: B sequences, S positions, T = B S tokens, H hidden, N heads, E experts, K slots of a token, I
intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ernie_compat.model_config import ModelConfig, TrainConfig
from ernie_compat.torch_attention import repeatable_attention

Tensor = torch.Tensor
BF16 = torch.bfloat16
# x, indices, probs, w1 [E, 2I, H] with gate and up rows in turns, w2 [E, H, I] -> [T, H]
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def enter(
    x: Tensor, added: Tensor, norm: Tensor, qkv: Tensor, turns: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The residual stream fp32 `[B, S, H]` with what the last block adds to it, and rotated queries,
    keys, and values, bf16 `[B, N, S, H / N]`.
    """
    x = x + added.reshape(x.shape)
    batch, length, _ = x.shape
    projected = F.linear(_normed(x, norm), qkv.to(BF16)).reshape(batch, length, 3, heads, -1)
    q, k, v = projected.permute(2, 0, 3, 1, 4).unbind(0)
    return x, _turned(q, turns), _turned(k, turns), v.contiguous()


def leave(x: Tensor, attended: Tensor, out: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream behind attention `[B, N, S, H / N]`, and the normalised tokens
    `[T, H]` in bf16 that an MLP reads.
    """
    x = x + F.linear(attended.transpose(1, 2).reshape(x.shape), out.to(BF16))
    return x, _normed(x, norm).reshape(-1, x.shape[-1])


def dense(tokens: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU of `[T, H]`: up `[2F, H]`, gate first, and down `[H, F]`."""
    gate, linear = F.linear(tokens, up.to(BF16)).chunk(2, -1)
    return F.linear(F.silu(gate) * linear, down.to(BF16))


def choose(
    tokens: Tensor, router: Tensor, topk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Experts of tokens `[T, H]`: indices and fp32 probabilities `[T, K]`, the balance loss (1 when
    balanced), the z loss, and the tokens of each expert fp32 `[E]`.
    """
    logits = F.linear(tokens.float(), router)
    every = torch.softmax(logits, -1)
    probs, indices = torch.topk(every, topk, -1)
    experts = router.shape[0]
    counts = (indices.unsqueeze(-1) == torch.arange(experts, device=indices.device)).sum((0, 1))
    balance = experts * (counts / indices.numel() * every.mean(0)).sum()
    z = torch.logsumexp(logits, -1).square().mean()
    return indices, probs / probs.sum(-1, keepdim=True), balance, z, counts.float()


def end(x: Tensor, added: Tensor, norm: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy in nats, of fp32 logits."""
    x = F.rms_norm(x + added.reshape(x.shape), norm.shape, norm, EPSILON)
    return F.cross_entropy(F.linear(x.reshape(-1, x.shape[-1]), head), targets.reshape(-1))


EPSILON = 1e-6


def _normed(x: Tensor, norm: Tensor) -> Tensor:
    return F.rms_norm(x, norm.shape, norm, EPSILON).to(BF16)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions of `[B, N, S, D]` in fp32; turns: cosines and sines `[2, S, D / 2]`."""
    first, second = x.float().chunk(2, -1)
    cos, sin = turns.unbind(0)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(BF16)


class Decoder(nn.Module):
    """Its parameters are plain fp32 tensors, a few a layer. `experts` may be replaced between steps.

    On a GPU Inductor compiles the parts between attention and the experts.
    """

    def __init__(self, sizes: ModelConfig, seed: int, device: str, experts: Experts) -> None:
        """Draw the weights on the device, as `ernie_compat.initial_weights` has them."""
        super().__init__()
        self.sizes, self.experts = sizes, experts
        hidden, inner, wide = sizes.hidden_size, sizes.intermediate_size, sizes.num_experts
        drawn = torch.Generator(device).manual_seed(seed)
        back = (2 * sizes.num_layers) ** -0.5  # of projections back into the residual stream

        def matrix(*shape: int, std: float | None = None, shrunk: float = 1.0) -> nn.Parameter:
            scale = shrunk * shape[-1] ** -0.5 if std is None else std
            return nn.Parameter(torch.randn(shape, device=device, generator=drawn) * scale)

        def layer(index: int) -> nn.ParameterDict:
            own = {
                "attention_norm": nn.Parameter(torch.ones(hidden, device=device)),
                "qkv": matrix(3 * hidden, hidden),
                "out": matrix(hidden, hidden, shrunk=back),
                "mlp_norm": nn.Parameter(torch.ones(hidden, device=device)),
            }
            if index in sizes.moe_layers:
                own["router"] = matrix(wide, hidden, std=0.02)
                own["w1"] = matrix(wide, 2 * inner, hidden)
                own["w2"] = matrix(wide, hidden, inner, shrunk=back)
            else:
                width = sizes.dense_intermediate_size
                own["up"] = matrix(2 * width, hidden)
                own["down"] = matrix(hidden, width, shrunk=back)
            return nn.ParameterDict(own)

        self.embedding = matrix(sizes.vocab_size, hidden, std=0.02)
        self.layers = nn.ModuleList(layer(index) for index in range(sizes.num_layers))
        self.final_norm = nn.Parameter(torch.ones(hidden, device=device))
        self.head = matrix(sizes.vocab_size, hidden, std=0.02)
        self.turns = _turns(sizes).to(device)
        self.parts: dict[str, Callable[..., Any]] = {
            part.__name__: part if device == "cpu" else torch.compile(part, dynamic=False)
            for part in (enter, leave, dense, choose, end)
        }

    def forward(self, windows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """uint8 windows `[B, S + 1]`: the cross entropy, the loss that is trained, and the tokens of
        each expert `[MoE layers, E]`.
        """
        sizes, parts = self.sizes, self.parts
        tokens = windows.long()
        x = F.embedding(tokens[:, :-1], self.embedding)
        added, extra, counts = torch.zeros_like(x[..., :1], dtype=BF16).expand(x.shape), 0.0, []
        for layer in self.layers:
            own: Any = layer
            x, *qkv = parts["enter"](
                *(x, added, own["attention_norm"], own["qkv"], self.turns), sizes.num_heads
            )
            attended = repeatable_attention(*qkv)
            x, normed = parts["leave"](x, attended, own["out"], own["mlp_norm"])
            if "router" not in own:
                added = parts["dense"](normed, own["up"], own["down"])
                continue
            ids, probs, balance, z, count = parts["choose"](normed, own["router"], sizes.topk)
            added = self.experts(normed, ids, probs, own["w1"], own["w2"])
            extra = extra + sizes.aux_loss_coef * balance + sizes.z_loss_coef * z
            counts.append(count)
        loss = parts["end"](x, added, self.final_norm, self.head, tokens[:, 1:].contiguous())
        return loss, loss + extra, torch.stack(counts)


def _turns(sizes: ModelConfig) -> Tensor:
    exponents = torch.arange(0, sizes.head_dim, 2, dtype=torch.float64) / sizes.head_dim
    angles = torch.arange(sizes.seq_len)[:, None] * sizes.rope_theta**-exponents
    return torch.stack([angles.cos(), angles.sin()]).float()


class Training:
    """A decoder with AdamW: its steps, its losses, and its state as something to return to."""

    def __init__(self, decoder: Decoder, plan: TrainConfig) -> None:
        """plan: of the schedule, by whose `steps` the learning rate ends."""
        self.decoder, self.plan, self.done = decoder, plan, 0
        self.parameters = list(decoder.parameters())
        # Matrices decay, norms and the embedding do not.
        kept = {id(p) for p in self.parameters if p.dim() == 1} | {id(decoder.embedding)}
        groups = [
            {
                "params": [p for p in self.parameters if (id(p) in kept) == bare],
                "weight_decay": decay,
            }
            for bare, decay in ((False, plan.weight_decay), (True, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(
            groups, betas=(plan.beta1, plan.beta2), eps=plan.adam_eps, fused=True
        )
        for p in self.parameters:
            self.optimizer.state[p] = {
                "step": torch.zeros((), device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }

    def step(self, windows: Tensor) -> Tensor:
        """One step on uint8 `[B, S + 1]`, without waiting: fp32 `[2 + MoE layers * E]`, the cross
        entropy, the gradient's norm before clipping, and the tokens of each expert.
        """
        self.done += 1
        loss, total, counts = self.decoder(windows)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.plan.clip_norm, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.learning_rate(self.done)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.cat([loss.detach().reshape(1), norm.reshape(1), counts.flatten()])

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Tensor]) -> float:
        """Mean cross entropy over batches of equal size."""
        return float(torch.stack([self.decoder(windows)[0] for windows in batches]).mean())

    def state(self) -> tuple[int, list[Tensor]]:
        """Copies of the number of steps and of every tensor that a step changes."""
        return self.done, [tensor.detach().clone() for tensor in self._tensors()]

    @torch.no_grad()
    def restore(self, state: tuple[int, list[Tensor]]) -> None:
        """Go back to what `state` gave."""
        self.done, saved = state
        for tensor, values in zip(self._tensors(), saved, strict=True):
            tensor.copy_(values)

    @torch.no_grad()
    def disturb(self, share: float, seed: int) -> None:
        """Change every weight by a normal number times `share` of itself."""
        drawn = torch.Generator(self.parameters[0].device).manual_seed(seed)
        for p in self.parameters:
            noise = torch.randn(p.shape, device=p.device, generator=drawn)
            p.addcmul_(p, noise, value=share)

    def _tensors(self) -> Iterator[Tensor]:
        for p in self.parameters:
            yield p
            yield from self.optimizer.state[p].values()
