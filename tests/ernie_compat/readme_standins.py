"""What the README's snippets assume is there: ERNIE's, Fleet's, PaddleFormers' and Paddle's objects
by their real names, small. Runs under Paddle, in a process of its own.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionOptimizer

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, TOKENS = 32, 24, 4, 2, 20


class Expert(paddle.nn.Layer):
    """ERNIE's expert MLP."""

    def __init__(self):
        super().__init__()
        self.up_gate_proj = paddle.nn.Linear(HIDDEN, 2 * INTERMEDIATE, bias_attr=False)
        self.down_proj = paddle.nn.Linear(INTERMEDIATE, HIDDEN, bias_attr=False)


class MOELayer(paddle.nn.Layer):
    """ERNIE-4.5's MoE layer: gate, experts of all ranks, a token dispatcher whose manager holds
    what was delivered.
    """

    def __init__(self, gate, experts, layer_idx, k=2):
        super().__init__()
        self.gate, self.layer_idx, self.k = gate, layer_idx, k
        self.experts = paddle.nn.LayerList(experts)
        self.token_dispatcher = SimpleNamespace(_comm_manager=SimpleNamespace())

    def forward(self, hidden_states):
        scores, indices = paddle.topk(
            paddle.nn.functional.softmax(self.gate(hidden_states), -1), self.k, axis=-1
        )
        local = [expert is not None for expert in self.experts]
        place = np.where(local, np.cumsum(local) - 1, -1)
        manager = self.token_dispatcher._comm_manager
        manager.dispatched_indices = paddle.to_tensor(place)[indices]
        manager.dispatched_probs = scores
        ids = manager.dispatched_indices.numpy()
        manager.tokens_per_expert = [int((ids == e).sum()) for e in range(sum(local))]
        return self.expert_forward(hidden_states)


class TrainerCallback:
    """PaddleFormers' base of callbacks."""


class Layer(paddle.nn.Layer):
    """Runs the node on routed tokens, squares."""

    def __init__(self, node, experts):
        super().__init__()
        self.node, self.experts = node, paddle.nn.LayerList(experts)

    def forward(self, batch):
        x, indices, probs = batch
        return self.node(x, None, indices, probs).square().mean()


class Rig:
    """A model whose single MoE layer is a node, its optimizer, and PaddleFormers' order of a step."""

    def __init__(self, flush="auto"):
        from sonicmoe.ernie_compat import SonicMoEMlpNode

        paddle.seed(3)
        experts = [Expert() for _ in range(EXPERTS)]
        self.node = SonicMoEMlpNode(experts, EXPERTS, HIDDEN, INTERMEDIATE, flush=flush)
        self.model = paddle.nn.Sequential(Layer(self.node, experts))
        for parameter in self.model.parameters():
            parameter.main_grad = paddle.zeros(parameter.shape, "float32")
        self.optimizer = MixPrecisionOptimizer(
            paddle.optimizer.AdamW(1e-2, parameters=self.model.parameters())
        )
        self.callbacks = []
        self.add_callback = self.callbacks.append

    def train(self, micro_batches):
        losses = [self.model(batch) for batch in micro_batches]
        for loss in losses:
            loss.backward()
        # A reduction over ranks would read `main_grad` here, so every gradient must be in it.
        self.reduced = sum(float(p.main_grad.abs().sum()) for p in self.model.parameters())
        self.optimizer.step()
        self.optimizer.clear_grad()
        for callback in self.callbacks:
            callback.on_optimizer_end(None, None, None, scaler=None)
        return sum(map(float, losses))

    def weights(self):
        return [p.numpy().copy() for p in self.model.parameters()]

    def wanted(self, micro_batches):
        """The weights after one step of the plain order."""
        twin = Rig("step")
        for batch in micro_batches:
            twin.model(batch).backward()
        twin.node.step()
        twin.optimizer.step()
        return twin.weights()


class PipelineParallel(paddle.nn.Layer):
    """Paddle's pipeline wrapper: everything in one call."""

    def __init__(self, rig):
        super().__init__()
        self.model, self.rig = rig.model, rig

    def train_batch(self, data, optimizer, lr_scheduler=None, scaler=None):
        return self.rig.train(data)


def make_batches(count):
    """Tokens, indices, probabilities."""
    rng = np.random.default_rng(5)
    made = []
    for _ in range(count):
        ids = np.stack([rng.permutation(EXPERTS)[:TOPK] for _ in range(TOKENS)])
        x = rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
        made.append(tuple(map(paddle.to_tensor, (x, ids, rng.random(ids.shape, np.float32)))))
    return made
