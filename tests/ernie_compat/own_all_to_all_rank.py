"""One of two ranks: runs the README's all-to-all and compares it with one process that has all
experts and both ranks' tokens.

Argument: the snippet.
"""

from __future__ import annotations

import sys

import numpy as np
import paddle

paddle.enable_compat(scope={"sonicmoe"}, silent=True)
import paddle.distributed as dist  # noqa: E402

from sonicmoe.ernie_compat import SonicMoEMlpNode  # noqa: E402

H, I, E, K, T = 32, 24, 6, 3, 40


def alltoall_single(arrived, rows, send, recv, group=None):
    """Paddle's, over gloo, which has none: every rank gathers all rows and keeps its own."""
    counts = []
    dist.all_gather(counts, paddle.to_tensor(send), group=group)
    table = np.stack([each.numpy() for each in counts])  # [source, destination]
    fullest = int(table.sum(1).max())
    padding = paddle.zeros([fullest - rows.shape[0], *rows.shape[1:]], rows.dtype)
    gathered = []
    dist.all_gather(gathered, paddle.concat([rows, padding]), group=group)
    me, own = dist.get_rank(), []
    for source, each in enumerate(gathered):
        start = int(table[source, :me].sum())
        own.append(each[start : start + int(table[source, me])])
    assert recv == [len(piece) for piece in own]
    paddle.assign(paddle.concat(own), arrived)


def tokens_of(rank):
    """bf16 x `[T, H]`, ids `[T, K]` of all experts, some dropped, and probabilities."""
    rng = np.random.default_rng(rank)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(T)])
    ids[3, 1], ids[5], ids[7] = -1, [0, 1, 2], [3, 4, 5]  # one rank alone, then the other
    x = paddle.to_tensor(rng.standard_normal((T, H)).astype(np.float32)).astype("bfloat16")
    probs = paddle.to_tensor(rng.random((T, K), np.float32))
    for tensor in (x, probs):
        tensor.stop_gradient = False
    return x, paddle.to_tensor(ids), probs


def weights_of(experts):
    """Of some of the E experts, the same on every rank."""
    rng = np.random.default_rng(99)
    shapes = (E, H, 2 * I), (E, I, H)
    made = [rng.standard_normal(shape).astype(np.float32) * 0.2 for shape in shapes]
    weights = [paddle.create_parameter([len(experts), *a.shape[1:]], "float32") for a in made]
    for weight, values in zip(weights, made, strict=True):
        weight.set_value(values[experts])
    return weights


def close(found, wanted):
    """Each rank rounds its part of a token's sum to bf16, and so does the sum of the parts."""
    a, b = (tensor.astype("float32").numpy() for tensor in (found, wanted))
    assert np.abs(b).sum() > 0
    np.testing.assert_allclose(a, b, rtol=2**-7, atol=2**-7 * np.abs(b).max())


def main(snippet):
    dist.init_parallel_env()
    rank, world = dist.get_rank(), dist.get_world_size()
    own = slice(rank * E // world, (rank + 1) * E // world)
    mine = weights_of(np.arange(E)[own])
    names = {"paddle": paddle, "group": None, "world": world, "num_experts": E}
    names["node"] = SonicMoEMlpNode.from_fused(*mine)
    dist.alltoall_single = alltoall_single
    exec(snippet, names)

    x, ids, probs = tokens_of(rank)
    dout = paddle.to_tensor(np.random.default_rng(7).standard_normal((T, H)).astype(np.float32))
    out = names["moe_forward"](x, ids, probs)
    assert out.dtype == x.dtype == paddle.bfloat16
    (out.astype("float32") * dout).sum().backward()

    every = weights_of(np.arange(E))
    node, total = SonicMoEMlpNode.from_fused(*every), 0.0
    batches = [tokens_of(each) for each in range(world)]
    for batch in batches:
        expected = node(batch[0], None, *batch[1:])
        total = total + (expected.astype("float32") * dout).sum()
        if batch is batches[rank]:
            close(out, expected)
    total.backward()
    found = [x.grad, probs.grad, *(weight.grad for weight in mine)]
    wanted = [batches[rank][0].grad, batches[rank][2].grad, *(w.grad[own] for w in every)]
    for a, b in zip(found, wanted, strict=True):
        close(a, b)
    print("as one process")


if __name__ == "__main__":
    main(sys.argv[1])
