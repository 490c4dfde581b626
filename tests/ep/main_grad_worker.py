"""One of two Paddle ranks: every way a Paddle trainer reduces `main_grad`, with the node at its
place.

The process group is Paddle's gloo, which has no reduce-scatter: that one call is emulated by an
all-reduce of which each rank keeps its own part and overwrites the rest, as the real one leaves the
rest undefined. Everything around it is Paddle's own code.
"""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist
from engine.moe_golden import golden, make_problem
from framework import numpy
from node.node_harness import Layer, summed
from paddle.distributed.fleet.utils import tensor_fusion_helper
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients
from paddle.distributed.fleet.utils.tensor_fusion_helper import HOOK_ACTION, FusedCommBuffer

# The buffers know accelerators only; on a host they work when told of it.
tensor_fusion_helper.get_current_device_type = lambda: "cpu"
tensor_fusion_helper.alignment["cpu"] = 256
SEEDS, WORLD = (11, 12, 13, 14), 2


def batches_of(rank, chunk=0):
    """Four micro-batches of one layer; expert 2 gets no token on rank 1."""
    first = make_problem(seed=chunk)
    made = [make_problem(seed=100 * rank + seed, empty=[2] if rank else []) for seed in SEEDS]
    return [problem.but(up_gate=first.up_gate, down=first.down) for problem in made]


def make_layer(flush, chunk=0, **options):
    return Layer(make_problem(seed=chunk), flush=flush, **options)


def mean_golden(count, chunk=0):
    """Mean over ranks of the gradients of the first `count` micro-batches."""
    per_rank = [summed(map(golden, batches_of(rank, chunk)[:count])) for rank in range(WORLD)]
    return [sum(parts) / WORLD for parts in zip(*per_rank, strict=True)]


def error(actual, wanted):
    """Largest relative RMSE over the experts' weights, each on its own."""
    pairs = [pair for both in zip(actual, wanted, strict=True) for pair in zip(*both, strict=True)]
    return max(float(np.linalg.norm(a - w) / max(np.linalg.norm(w), 1e-30)) for a, w in pairs)


def trained(rank, flush):
    """A layer: `node.step()` behind four backwards, then the trainer's fused all-reduce."""
    layer = make_layer(flush, main_grad=0.0)
    kept = [weight.main_grad for weight in layer.weights]
    layer.step(*batches_of(rank))
    fused_allreduce_gradients(layer.weights, None)
    pairs = zip(layer.weights, kept, strict=True)
    assert all(weight.main_grad is main_grad for weight, main_grad in pairs)
    return layer


def data_parallel(rank, flush):
    layer = trained(rank, flush)
    return {f"data parallel, {flush}": error(layer.gradients(), mean_golden(4))}


def late_step(rank, flush):
    """The same with `node.step()` behind the all-reduce: refused where gradients waited."""
    layer, refused = make_layer(flush, main_grad=0.0), 0
    layer.run(batches_of(rank)[0])
    fused_allreduce_gradients(layer.weights, None)
    try:
        layer.node.step()
    except RuntimeError as error_of_step:
        refused = int("main_grad was written while gradients" in str(error_of_step))
    return {
        f"late error, {flush}": error(layer.gradients(), mean_golden(1)),
        f"late refused, {flush}": refused,
    }


class Overlap:
    """A communication buffer whose reduction starts when every weight's hook has fired `acc_steps`
    times.
    """

    def __init__(self, layer, acc_steps, act=HOOK_ACTION.ALL_REDUCE):
        self.fired = 0
        layer.set_main_grad(None)
        given = 0, layer.weights, dist.get_group(), acc_steps
        self.buffer = FusedCommBuffer(*given, act=act, use_main_grad=True)
        for weight in layer.weights:
            weight._register_backward_hook(self._hook(weight))

    def _hook(self, weight):
        def fire(*_):
            self.fired += 1
            self.buffer.add_grad(weight)

        return fire


def overlap(rank, flush):
    """Under reduction that overlaps backward."""
    layer = make_layer(flush)
    comm = Overlap(layer, 4)
    for batch in batches_of(rank):
        layer.run(batch)
    comm.buffer.scale_grads()
    layer.node.step()
    return {
        f"overlap, {flush}": error(layer.gradients(), mean_golden(4)),
        f"overlap hooks, {flush}": comm.fired,
    }


def reduce_scatter(rank, flush):
    """Sharding: each rank holds the reduced half of the fused buffer."""

    def emulated(shard, full, op=None, group=None, sync_op=True):
        whole = full.clone()
        dist.all_reduce(whole, op=op, group=group)
        size = shard.shape[0]
        full.fill_(1e30)
        shard.copy_(whole[group.rank * size : (group.rank + 1) * size], True)
        return dist.all_reduce(paddle.zeros([1]), group=group, sync_op=False)

    layer = make_layer(flush)
    real, dist.reduce_scatter = dist.reduce_scatter, emulated
    try:
        comm = Overlap(layer, 2, HOOK_ACTION.REDUCE_SCATTER)
        for batch in batches_of(rank)[:2]:
            layer.run(batch)
        comm.buffer.scale_grads()
    finally:
        dist.reduce_scatter = real
    storage, wanted = numpy(comm.buffer.grad_storage), mean_golden(2)
    flat = np.zeros(storage.shape)
    base = comm.buffer.grad_storage.data_ptr()
    for weight, gradient in zip(layer.weights, [*wanted[0], *wanted[1]], strict=True):
        start = (weight.main_grad.data_ptr() - base) // 4
        flat[start : start + gradient.size] = gradient.reshape(-1)
    half = len(flat) // WORLD
    own = slice(rank * half, (rank + 1) * half)
    return {f"reduce scatter, {flush}": error([[storage[own]]], [[flat[own]]])}


def pipeline(rank, flush):
    """1F1B over two chunks (virtual stages) in the order of a pipeline: three forwards ahead, then
    one backward each; overlap on both.
    """
    chunks = [make_layer(flush, chunk) for chunk in (0, 1)]
    comms = [Overlap(layer, 4) for layer in chunks]
    waiting, batches = [], [batches_of(rank, chunk) for chunk in (0, 1)]
    schedule = [(chunk, step) for step in range(4) for chunk in (0, 1)]
    ahead = 3
    for position, (chunk, step) in enumerate(schedule):
        waiting.append(chunks[chunk].call(batches[chunk][step]))
        if position >= ahead:
            waiting.pop(0).backward()
    while waiting:
        waiting.pop(0).backward()
    for comm in comms:
        comm.buffer.scale_grads()
    errors = [error(chunks[chunk].gradients(), mean_golden(4, chunk)) for chunk in (0, 1)]
    fired = sum(comm.fired for comm in comms)
    return {f"pipeline, {flush}": max(errors), f"pipeline hooks, {flush}": fired}


def delayed_loss_scale(rank, flush):
    """The pipeline's delayed scaling replaces `main_grad` by a scaled copy after `step()`; the next
    step adds to the copy.
    """
    layer = trained(rank, flush)
    for weight in layer.weights:
        weight.main_grad = weight.main_grad.scale(1 / len(SEEDS))
    wanted = [gradient / len(SEEDS) for gradient in mean_golden(4)]
    scaled = error(layer.gradients(), wanted)
    layer.zero_main_grad()
    batch = batches_of(rank)[0]
    layer.step(batch)
    alone = error(layer.gradients(), summed([golden(batch)]))
    return {f"delayed scale, {flush}": scaled, f"after delayed scale, {flush}": alone}


def results(rank):
    """Errors and numbers by case."""
    found = {}
    for case in (data_parallel, late_step, delayed_loss_scale):
        for flush in ("auto", "step"):
            found |= case(rank, flush)
    for case in (overlap, reduce_scatter, pipeline):
        found |= case(rank, "auto")
    return found
