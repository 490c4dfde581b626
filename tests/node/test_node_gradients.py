"""What lies in `main_grad`, or in `.grad`, after any sequence of what correct training loops do, beside a
model that knows only sums: micro-batches, outstanding forwards, graphs that run twice, frozen weights,
memory that is cleared, replaced, scaled or made, what writes in place of adding, experts that change
places, copies of a node, and several nodes of one layer.
"""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
from engine.moe_golden import golden
from framework import IS_PADDLE, numpy, relative_rmse, tensor, torch
from node.node_harness import ARRANGEMENTS, FLUSHES, Layer, gradients_of, problems, want_gradient
from pairwise import pairwise

from sonicmoe.config import SonicMoEConfig
from sonicmoe.layer import questions

BATCHES = problems(3, hidden=8, intermediate=8, topk=2)
EVENTS_PER_RUN, RUNS = 14, 4


def lying_as(layer, dw1, dw2):
    """Gradients of the layer's weights, by weight."""
    if layer.arrangement == "per_expert":
        return [*dw1, *dw2]
    if layer.arrangement == "fused":
        return [dw1, dw2]
    halves = np.split(dw1.transpose(0, 2, 1), 2, 1)
    return [np.stack(halves, 2).reshape(len(dw1), -1, dw1.shape[1]), dw2.transpose(0, 2, 1)]


def of_exchanged(problem):
    """The same where the first two experts have changed places."""
    ids = problem.indices
    return problem.but(indices=np.where((ids == 0) | (ids == 1), 1 - ids, ids))


class Loop:
    """A layer, the model of its gradients, and what happens to both.

    memory: "held" main_grads, "none" yet, or "absent". first: of `first_backward`.
    """

    def __init__(self, arrangement, flush, memory, first, seed):
        self.random = random.Random(f"{arrangement} {flush} {memory} {first} {seed}")
        config = SonicMoEConfig(engine="reference", first_backward=first)
        options = {"arrangement": arrangement, "flush": flush, "config": config}
        value = {"held": 0.25, "none": None, "absent": "absent"}[memory]
        self.layer = Layer(BATCHES[0], main_grad=value, **options)
        self.first, self.memory = first == "overwrite", memory
        # Another node of the layer does as it likes, where gradients may be added.
        other = self.random.choice(FLUSHES) if flush == "step" else flush
        nodes = (
            [self.layer.node]
            if self.first
            else [self.layer.node, self.layer.another_node(flush=other)]
        )
        self.nodes = dict(zip(nodes, (flush == "step", other == "step"), strict=False))
        self.waits = any(self.nodes.values())
        self.held = [self.now(weight) for weight in self.weights]
        self.waiting, self.ahead, self.written, self.ran = {}, [], set(), False
        self.is_exchanged = False
        exact = map(golden, BATCHES)
        self.exact = [lying_as(self.layer, each.dw1, each.dw2) for each in exact]
        self.done = []

    @property
    def weights(self):
        return self.layer.weights

    def memory_of(self, weight):
        return getattr(weight, "grad" if self.memory == "absent" else "main_grad", None)

    def now(self, weight):
        gradient = self.memory_of(weight)
        return None if gradient is None else numpy(gradient).copy()

    def happens(self):
        """Something that the loop may do now."""
        events = ["run", "run", "step", "forward", "frozen", "asked", "copied"]
        events += [] if IS_PADDLE else ["twice"]
        events += ["exchanged"] if self.layer.arrangement == "per_expert" else []
        events += ["backward"] * 2 if self.ahead else []
        if self.memory != "absent" and not self.waiting:
            events += ["cleared", "scaled", "replaced"] + ["taken"] * (not self.first)
            events += [] if self.waits else ["flagged"]
        events += [] if self.first else ["flushed"]
        events += [] if self.ahead or self.waiting else ["skipped"]
        event = self.random.choice(events)
        self.done.append(event)
        getattr(self, event)()
        self.compare()

    def compare(self):
        """Other trained weights in the next backward may hand over early what waits for the others."""
        if self.waiting:
            return
        for index, (weight, wanted) in enumerate(zip(self.weights, self.held, strict=True)):
            found = self.now(weight)
            if wanted is None or found is None:
                assert found is None and wanted is None, (index, self.done)
            else:
                assert relative_rmse(found, wanted) < 1e-5, (index, self.done)

    # What arrives.

    def forward(self, **leaves):
        batch, node = self.random.randrange(len(BATCHES)), self.random.choice([*self.nodes])
        self.layer.node = node
        problem = of_exchanged(BATCHES[batch]) if self.is_exchanged else BATCHES[batch]
        self.ahead.append((batch, self.nodes[node], self.layer.call(problem, **leaves)))

    def backward(self, place=None, frozen=None):
        place = self.random.randrange(len(self.ahead)) if place is None else place
        batch, waits, call = self.ahead.pop(place)
        call.backward()
        self.arrives(batch, waits, frozen)

    def arrives(self, batch, waits, frozen):
        self.ran = True
        for index, gradient in enumerate(self.exact[batch]):
            if index == frozen:
                continue
            if waits:
                self.waiting[index] = self.waiting.get(index, 0.0) + gradient
                continue
            writes = getattr(self.weights[index], "overwrite_main_grad", False)
            writes = writes or (self.first and index not in self.written)
            self.written.add(index)
            self.add(index, gradient, writes)

    def add(self, index, gradient, writes=False):
        held = None if writes else self.held[index]
        self.held[index] = gradient if held is None else held + gradient

    def run(self):
        """Tokens and probabilities may want no gradients."""
        wanted = {name: self.random.random() < 0.7 for name in ("x_grad", "probs_grad")}
        self.forward(**wanted)
        leaves = self.ahead[-1][2].x, self.ahead[-1][2].probs
        self.backward(-1)
        assert [leaf.grad is not None for leaf in leaves] == [*wanted.values()]

    def twice(self):
        """Two backwards of one forward."""
        self.forward()
        batch, waits, call = self.ahead[-1]
        call.backward(retain_graph=True)
        self.arrives(batch, waits, None)
        self.backward(-1)

    def frozen(self):
        """In the forward, in the backward, or in both."""
        index, when = self.random.randrange(len(self.weights)), self.random.choice("fb*")
        want_gradient(self.weights[index], when == "b")
        self.forward()
        want_gradient(self.weights[index], when == "f")
        self.backward(-1, index)
        want_gradient(self.weights[index], True)

    def asked(self):
        """Gradients of the tokens alone: nothing is added."""
        self.forward()
        batch, _, call = self.ahead.pop()
        (dx,) = gradients_of(call, [call.x])
        self.ran = True
        assert relative_rmse(numpy(dx), golden(BATCHES[batch]).dx) < 1e-5

    def skipped(self):
        """A batch whose gradients are not finite, and that is dropped."""
        bad = BATCHES[0].but(dout=np.full_like(BATCHES[0].dout, np.nan))
        self.layer.run(bad)
        for node in self.nodes:
            node.discard_grads()
        self.written.clear()
        if self.first:  # nobody clears
            self.run()
        elif not self.nodes[self.layer.node]:  # memory was made
            self.held = [np.zeros(tuple(weight.shape)) for weight in self.weights]
            self.cleared()

    # Events that change the layer or its nodes.

    def exchanged(self):
        """Balancing exchanges experts so. A gradient belongs to the weight that it was computed for."""
        experts = self.layer.experts
        experts[0], experts[1] = experts[1], experts[0]
        self.is_exchanged = not self.is_exchanged

    def copied(self):
        """A copy has no gradients: they are for the parameters of the original, which alone hands them
        over.
        """
        other = copy.deepcopy(self.random.choice([*self.nodes]))
        assert other.gradient_bytes == 0
        weights = other._state.parameters.parameters()
        before = list(map(self.now, weights))
        other.step()
        for was, weight in zip(before, weights, strict=True):
            np.testing.assert_array_equal(self.now(weight), was)

    # What the loop does to memory.

    def step(self):
        for node in self.nodes:
            node.step()
        self.flushed()
        # Nobody clears where the first backward writes: step() zeroes what none has written.
        for index in range(len(self.weights)) if self.first and self.ran else ():
            if index not in self.written:
                self.held[index] = 0 * self.held[index]
        self.written.clear()
        self.ran = False

    def flushed(self):
        """Between micro-batches."""
        for node in self.nodes:
            node.flush_grads()
        for index, gradient in self.waiting.items():
            self.add(index, gradient)
        self.waiting.clear()

    def clears(self):
        """As an optimizer does behind its step."""
        ways = [self.cleared, self.replaced, self.taken]
        self.random.choice(ways[: 1 if self.memory == "absent" else 2 if self.first else 3])()

    def cleared(self):
        for gradient in filter(lambda held: held is not None, map(self.memory_of, self.weights)):
            with torch.no_grad():
                gradient.zero_()
        self.held = [None if held is None else 0 * held for held in self.held]

    def scaled(self):
        for weight in self.weights:
            if weight.main_grad is not None:
                weight.main_grad = tensor(0.5 * numpy(weight.main_grad), torch.float32)
        self.held = [None if held is None else 0.5 * held for held in self.held]

    def replaced(self):
        self.layer.set_main_grad(0.0)
        self.held = [np.zeros(tuple(weight.shape)) for weight in self.weights]

    def taken(self):
        self.layer.set_main_grad(None)
        self.held = [None for _ in self.weights]

    def flagged(self):
        """Megatron's word of a weight whose next backwards write."""
        weight = self.random.choice(self.weights)
        weight.overwrite_main_grad = not getattr(weight, "overwrite_main_grad", False)


SETTINGS = [("auto", memory, "add") for memory in ("held", "none", "absent")]
SETTINGS += [("step", memory, "add") for memory in ("held", "none", "absent")]
SETTINGS += [("auto", "held", "overwrite")]


@pytest.mark.parametrize(("setting", "which", "arrangement"),
                         pairwise(SETTINGS, ("adds", "writes", "elsewhere"), ARRANGEMENTS))  # fmt: skip
def test_whatever_a_loop_does(engine, said, setting, which, arrangement):
    engine(which)
    for seed in range(RUNS):
        loop = Loop(arrangement, *setting, seed)
        for _ in range(EVENTS_PER_RUN):
            loop.happens()
        loop.step()
        loop.compare()
    for _ in range(questions.STEPS + 2):
        loop.run()
        loop.step()
        loop.clears()
    assert said() == []
