"""One of two Paddle ranks: both ways in which a Paddle trainer reduces `main_grad`, with the node at its
place.
"""

from __future__ import annotations

import numpy as np
import paddle.distributed as dist
from engine.moe_golden import golden, make_problem
from node.node_harness import Layer, summed
from paddle.distributed.fleet.utils import tensor_fusion_helper
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients
from paddle.distributed.fleet.utils.tensor_fusion_helper import HOOK_ACTION, FusedCommBuffer

# The buffers know accelerators only; on a host they work when told of it.
tensor_fusion_helper.get_current_device_type = lambda: "cpu"
tensor_fusion_helper.alignment["cpu"] = 256
SEEDS, WORLD = (11, 12, 13, 14), 2


def batches_of(rank):
    """Four micro-batches of one layer; expert 2 gets no token on rank 1."""
    first = make_problem(seed=0)
    made = [make_problem(seed=100 * rank + seed, empty=[2] if rank else []) for seed in SEEDS]
    return [problem.but(up_gate=first.up_gate, down=first.down) for problem in made]


def error(actual):
    """Largest relative RMSE over the experts' weights, each on its own, of the mean over ranks."""
    per_rank = [summed(map(golden, batches_of(rank))) for rank in range(WORLD)]
    wanted = [sum(parts) / WORLD for parts in zip(*per_rank, strict=True)]
    pairs = [pair for both in zip(actual, wanted, strict=True) for pair in zip(*both, strict=True)]
    return max(float(np.linalg.norm(a - w) / max(np.linalg.norm(w), 1e-30)) for a, w in pairs)


def data_parallel(rank):
    """`node.step()` behind four backwards, then the trainer's fused all-reduce."""
    layer = Layer(make_problem(seed=0), flush="step", main_grad=0.0)
    kept = [weight.main_grad for weight in layer.weights]
    layer.step(*batches_of(rank))
    fused_allreduce_gradients(layer.weights, None)
    pairs = zip(layer.weights, kept, strict=True)
    assert all(weight.main_grad is main_grad for weight, main_grad in pairs)
    return error(layer.gradients())


def overlap(rank):
    """A communication buffer whose reduction starts when every weight's hook has fired for each
    micro-batch; and how many fired.
    """
    layer, fired = Layer(make_problem(seed=0)), []
    layer.set_main_grad(None)
    given = 0, layer.weights, dist.get_group(), len(SEEDS)
    buffer = FusedCommBuffer(*given, act=HOOK_ACTION.ALL_REDUCE, use_main_grad=True)

    def hook(weight):
        return lambda *_: fired.append(weight) or buffer.add_grad(weight)

    for weight in layer.weights:
        weight._register_backward_hook(hook(weight))
    for batch in batches_of(rank):
        layer.run(batch)
    buffer.scale_grads()
    layer.node.step()
    return error(layer.gradients()), len(fired)


def results(rank):
    """Errors and numbers by case."""
    error_of_overlap, fired = overlap(rank)
    return {"data parallel": data_parallel(rank), "overlap": error_of_overlap, "hooks": fired}
