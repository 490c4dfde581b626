"""A language model of one MoE layer over the text of the licence, and the trainer's loop around it.

The next character from this one and the last. Everything but the experts is fp32.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import paddle.nn.functional as F
from fleet.double import reference
from fleet.double.optimizer import ShardingOptimizer
from paddle import nn

TEXT = (Path(__file__).resolve().parents[3] / "LICENSE").read_text(encoding="utf-8")
LETTERS = sorted(set(TEXT))
IDS = np.array([LETTERS.index(letter) for letter in TEXT], dtype=np.int64)


class Widen(paddle.autograd.PyLayer):
    """A bf16 parameter in fp32, whose gradient goes to `main_grad` unrounded."""

    @staticmethod
    def forward(ctx, parameter):
        ctx.parameter = parameter
        ctx.set_grad_in_dtype_consistent(False)
        return parameter.astype("float32")

    @staticmethod
    def backward(ctx, gradient):
        ctx.parameter.main_grad.add_(gradient)


class PlainExperts(nn.Layer):
    """The same parameters, in grouped layout for ever, in a loop of plain Paddle."""

    def __init__(self, config):
        super().__init__()
        experts, hidden = config.n_routed_experts, config.hidden_size
        inner = config.moe_intermediate_size
        zeros = {"default_initializer": nn.initializer.Constant(0.0)}
        up, down = [experts, hidden, 2 * inner], [experts, inner, hidden]
        self.weight1 = paddle.create_parameter(up, "bfloat16", **zeros)
        self.weight2 = paddle.create_parameter(down, "bfloat16", **zeros)
        self.activation = reference.swiglu(config.activation_func_clamp_value or 0.0)
        if config.hidden_act == "situ":
            self.activation = reference.situ(
                config.activation_situ_beta, config.activation_situ_linear_beta
            )

    def forward(self, x, indices, scores):
        weights = Widen.apply(self.weight1), Widen.apply(self.weight2)
        out = reference.run_experts(x.astype("float32"), indices, scores, *weights, self.activation)
        return out.astype("bfloat16")


class PlainMoE(nn.Layer):
    """Gate and plain experts, without a dispatcher. `router` is Fleet's."""

    def __init__(self, config, router):
        super().__init__()
        self.gate, self.grouped_gemm_experts = router(config), PlainExperts(config)

    def forward(self, x):
        weights, indices = self.gate(x)
        return self.grouped_gemm_experts(x, indices, weights)


class Model(nn.Layer):
    """Embeddings of two characters, the MoE layer beside them, a projection on letters."""

    def __init__(self, moe, hidden):
        super().__init__()
        self.moe = moe
        self.here = self.create_parameter([len(LETTERS), hidden])
        self.before = self.create_parameter([len(LETTERS), hidden])
        self.head = self.create_parameter([hidden, len(LETTERS)])

    def forward(self, tokens):
        """tokens int64 `[T + 2]` -> the mean loss of T predictions."""
        x = F.embedding(tokens[1:-1], self.here) + F.embedding(tokens[:-2], self.before)
        y = x + self.moe(normal(x).astype("bfloat16")).astype("float32")
        return F.cross_entropy(normal(y) @ self.head, tokens[2:])


def normal(x):
    return x * paddle.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def initialise(model):
    """Values by parameter name and not by order of creation."""
    with paddle.no_grad():
        for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
            embeds = name in ("here", "before")
            scale = 1.0 if embeds else int(parameter.shape[-2]) ** -0.5
            rng = np.random.default_rng([0, number])
            values = rng.standard_normal(parameter.shape).astype(np.float32) * scale
            paddle.assign(paddle.to_tensor(values).astype(parameter.dtype), output=parameter)
    return model


def micro_batches(step, count, tokens):
    """int64 `[tokens + 2]` each, a pure function of the step."""
    rng = np.random.default_rng([0, step])
    starts = rng.integers(0, len(IDS) - tokens - 2, count)
    return [paddle.to_tensor(IDS[start : start + tokens + 2]) for start in starts]


class Trainer:
    """PaddleFormers' order of one step."""

    def __init__(self, model, args, *callbacks):
        self.model, self.args, self.callbacks = model, args, callbacks
        self.optimizer = ShardingOptimizer(model.parameters(), lr=1e-3)

    def step(self, batches):
        """The mean loss of the micro-batches."""
        self._call("on_step_begin")
        losses = []
        for batch in batches:
            loss = self.model(batch) / len(batches)
            loss.backward()
            losses.append(float(loss))
        self._call("on_optimizer_begin")
        self.optimizer.step()
        self.optimizer.clear_grad()
        return sum(losses)

    def _call(self, event):
        for callback in self.callbacks:
            getattr(callback, event)(
                self.args, None, None, model=self.model, optimizer=self.optimizer
            )


def one_rank():
    return SimpleNamespace(nranks=1)


def sonic_trainer(fleet, config):
    """A trainer of Fleet's layer with Fleet's callback, on one rank of DeepEP."""
    moe = fleet.layer.MoELayer(config, one_rank())
    model = initialise(Model(moe, config.hidden_size))
    args = SimpleNamespace(using_sonic_moe=True, fp8=config.fp8)
    return Trainer(model, args, fleet.callback.SonicMoELayoutSwitchCallback())


def plain_trainer(fleet, config):
    """The same model on plain experts; `fleet` only lends its gate."""
    model = initialise(Model(PlainMoE(config, fleet.layer.TopKRouter), config.hidden_size))
    return Trainer(model, SimpleNamespace(using_sonic_moe=False, fp8=None))
