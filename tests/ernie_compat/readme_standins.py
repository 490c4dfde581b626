"""What the README's snippets assume is there: ERNIE's, Fleet's, PaddleFormers' and Paddle's objects
by their real names, small.

Runs under Paddle, in a process of its own. `Model` stands for a model whose single MoE layer is a
node.
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

    def __init__(
        self, gate, experts, layer_idx, shared_experts=None, group=None, recompute=False, k=2
    ):
        super().__init__()
        self.gate, self.layer_idx, self.group, self.k = gate, layer_idx, group, k
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
    """PaddleFormers' callback events around the optimizer."""

    def on_optimizer_begin(self, args, state, control, **kwargs):
        pass

    def on_optimizer_end(self, args, state, control, **kwargs):
        pass


class Model(paddle.nn.Layer):
    """Routes tokens, runs the node, squares."""

    def __init__(self, node, experts):
        super().__init__()
        self.node, self.experts = node, paddle.nn.LayerList(experts)

    def forward(self, batch):
        x, indices, probs = batch
        return self.node(x, None, indices, probs).square().mean()


class Trainer:
    """PaddleFormers' order: backwards, reduction and scaling, on_optimizer_begin, optimizer,
    on_optimizer_end.
    """

    def __init__(self, model, optimizer, reduce):
        self.model, self.optimizer, self.reduce, self.callbacks = model, optimizer, reduce, []

    def add_callback(self, callback):
        self.callbacks.append(callback)

    def train(self, micro_batches):
        for batch in micro_batches:
            self.model(batch).backward()
        self.reduce()
        for callback in self.callbacks:
            callback.on_optimizer_begin(None, None, None, scaler=None)
        self.optimizer.step()
        self.optimizer.clear_grad()
        for callback in self.callbacks:
            callback.on_optimizer_end(None, None, None, scaler=None)


class PipelineParallel(paddle.nn.Layer):
    """Paddle's pipeline wrapper: everything in one call."""

    def __init__(self, model, reduce):
        super().__init__()
        self.model, self.reduce = model, reduce

    def train_batch(
        self, data, optimizer, lr_scheduler=None, scaler=None, loss_fn_idx=0,
        return_micro_batch_loss=False,
    ):  # fmt: skip
        losses = [self.model(batch) for batch in data]
        for loss in losses:
            loss.backward()
        self.reduce()
        optimizer.step()
        optimizer.clear_grad()
        return sum(float(loss) for loss in losses)


def make_batches(count):
    """Tokens, indices, probabilities."""
    rng = np.random.default_rng(5)
    made = []
    for _ in range(count):
        ids = np.stack([rng.permutation(EXPERTS)[:TOPK] for _ in range(TOKENS)])
        x = rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
        made.append(tuple(map(paddle.to_tensor, (x, ids, rng.random(ids.shape, np.float32)))))
    return made


class Rig:
    """A model with its optimizer; counts what the reduction saw."""

    def __init__(self, flush="auto", main_grad=0.0, **options):
        from sonicmoe.ernie_compat import SonicMoEMlpNode

        paddle.seed(3)
        experts = [Expert() for _ in range(EXPERTS)]
        self.node = SonicMoEMlpNode(experts, EXPERTS, HIDDEN, INTERMEDIATE, flush=flush, **options)
        self.model = Model(self.node, experts)
        for parameter in self.model.parameters():
            parameter.main_grad = (
                None if main_grad is None else paddle.full(parameter.shape, main_grad, "float32")
            )
        self.optimizer = MixPrecisionOptimizer(
            paddle.optimizer.AdamW(1e-2, parameters=self.model.parameters())
        )
        self.reduced = 0.0

    def reduce(self):
        """A reduction over ranks, which must see every gradient."""
        self.reduced = sum(float(p.main_grad.abs().sum()) for p in self.model.parameters())

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
