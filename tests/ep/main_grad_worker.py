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
from ernie import Pending, bind_main_grads, golden, make_batch, make_experts, make_node, weights_of
from framework import numpy
from paddle.distributed.fleet.utils import tensor_fusion_helper
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients
from paddle.distributed.fleet.utils.tensor_fusion_helper import HOOK_ACTION, FusedCommBuffer

# The buffers know accelerators only; on a host they work when told of it.
tensor_fusion_helper.get_current_device_type = lambda: "cpu"
tensor_fusion_helper.alignment["cpu"] = 256
SEEDS, WORLD = (11, 12, 13, 14), 2


def batches_of(rank):
    """Four micro-batches; expert 2 gets no token on rank 1."""
    return [make_batch(seed=100 * rank + seed, only=[0, 1] if rank else None) for seed in SEEDS]


def mean_golden(experts, count):
    """Mean over ranks of the gradients of the first `count` micro-batches."""
    per_rank = [golden(experts, batches_of(rank)[:count]).dw for rank in range(WORLD)]
    return [sum(parts) / WORLD for parts in zip(*per_rank, strict=True)]


def error(actual, wanted):
    """Largest relative RMSE over the weights, each on its own."""
    pairs = zip(actual, wanted, strict=True)
    return max(float(np.linalg.norm(a - w) / max(np.linalg.norm(w), 1e-30)) for a, w in pairs)


def main_grads(experts):
    return [numpy(weight.main_grad) for weight in weights_of(experts)]


def trained(rank, flush):
    """Experts and their node: `node.step()` behind four backwards, then the trainer's fused
    all-reduce.
    """
    experts = make_experts()
    node = make_node(experts, flush=flush)
    kept = bind_main_grads(experts)
    for batch in batches_of(rank):
        Pending(node, batch).backward()
    node.step()
    fused_allreduce_gradients(weights_of(experts), None)
    pairs = zip(weights_of(experts), kept, strict=True)
    assert all(weight.main_grad is main_grad for weight, main_grad in pairs)
    return experts, node


def data_parallel(rank, flush):
    experts, _ = trained(rank, flush)
    return {f"data parallel, {flush}": error(main_grads(experts), mean_golden(experts, 4))}


def late_step(rank, flush):
    """The same with `node.step()` behind the all-reduce: refused where gradients waited."""
    experts, refused = make_experts(), 0
    node = make_node(experts, flush=flush)
    bind_main_grads(experts)
    Pending(node, batches_of(rank)[0]).backward()
    fused_allreduce_gradients(weights_of(experts), None)
    try:
        node.step()
    except RuntimeError as error_of_step:
        refused = int("main_grad was written while gradients" in str(error_of_step))
    return {
        f"late error, {flush}": error(main_grads(experts), mean_golden(experts, 1)),
        f"late refused, {flush}": refused,
    }


class Overlap:
    """A communication buffer whose reduction starts when every weight's hook has fired `acc_steps`
    times.
    """

    def __init__(self, experts, acc_steps, act=HOOK_ACTION.ALL_REDUCE):
        self.experts, self.fired = experts, 0
        for weight in weights_of(experts):
            weight.main_grad = None
        given = 0, weights_of(experts), dist.get_group(), acc_steps
        self.buffer = FusedCommBuffer(*given, act=act, use_main_grad=True)
        for weight in weights_of(experts):
            weight._register_backward_hook(self._hook(weight))

    def _hook(self, weight):
        def fire(*_):
            self.fired += 1
            self.buffer.add_grad(weight)

        return fire


def overlap(rank, flush):
    """Under reduction that overlaps backward."""
    experts = make_experts()
    node, comm = make_node(experts, flush=flush), Overlap(experts, 4)
    for batch in batches_of(rank):
        Pending(node, batch).backward()
    comm.buffer.scale_grads()
    node.step()
    return {
        f"overlap, {flush}": error(main_grads(experts), mean_golden(experts, 4)),
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

    experts = make_experts()
    real, dist.reduce_scatter = dist.reduce_scatter, emulated
    try:
        node = make_node(experts, flush=flush)
        comm = Overlap(experts, 2, HOOK_ACTION.REDUCE_SCATTER)
        for batch in batches_of(rank)[:2]:
            Pending(node, batch).backward()
        comm.buffer.scale_grads()
    finally:
        dist.reduce_scatter = real
    storage, wanted = numpy(comm.buffer.grad_storage), mean_golden(experts, 2)
    flat = np.zeros(storage.shape)
    base = comm.buffer.grad_storage.data_ptr()
    for weight, gradient in zip(weights_of(experts), wanted, strict=True):
        start = (weight.main_grad.data_ptr() - base) // 4
        flat[start : start + gradient.size] = gradient.reshape(-1)
    half = len(flat) // WORLD
    own = slice(rank * half, (rank + 1) * half)
    return {f"reduce scatter, {flush}": error([storage[own]], [flat[own]])}


def pipeline(rank, flush):
    """1F1B over two chunks (virtual stages) in the order of a pipeline: three forwards ahead, then
    one backward each; overlap on both.
    """
    chunks = [make_experts(seed=seed) for seed in (0, 1)]
    nodes = [make_node(experts, flush=flush) for experts in chunks]
    comms = [Overlap(experts, 4) for experts in chunks]
    waiting, batches = [], batches_of(rank)
    schedule = [(chunk, step) for step in range(4) for chunk in (0, 1)]
    ahead = 3
    for position, (chunk, step) in enumerate(schedule):
        waiting.append(Pending(nodes[chunk], batches[step]))
        if position >= ahead:
            waiting.pop(0).backward()
    while waiting:
        waiting.pop(0).backward()
    for comm in comms:
        comm.buffer.scale_grads()
    errors = [error(main_grads(experts), mean_golden(experts, 4)) for experts in chunks]
    fired = sum(comm.fired for comm in comms)
    return {f"pipeline, {flush}": max(errors), f"pipeline hooks, {flush}": fired}


def delayed_loss_scale(rank, flush):
    """The pipeline's delayed scaling replaces `main_grad` by a scaled copy after `step()`; the next
    step adds to the copy.
    """
    experts, node = trained(rank, flush)
    for weight in weights_of(experts):
        weight.main_grad = weight.main_grad.scale(1 / len(SEEDS))
    wanted = [gradient / len(SEEDS) for gradient in mean_golden(experts, 4)]
    scaled = error(main_grads(experts), wanted)
    for weight in weights_of(experts):
        weight.main_grad.zero_()
    Pending(node, batches_of(rank)[0]).backward()
    node.step()
    alone = error(main_grads(experts), golden(experts, batches_of(rank)[:1]).dw)
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
