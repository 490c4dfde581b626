"""dispatch -> node -> combine and back, in the framework under test, and every transport over the
ranks of a world; used by worker processes and by the tests beside them.
"""

from __future__ import annotations

import numpy as np
from ep_cases import EXPERTS, HIDDEN, INTERMEDIATE, expert_weights
from framework import IS_PADDLE, numpy, tensor, torch
from oracle.held import Snapshot, spelled
from weights.weight_sources import expert_modules

from sonicmoe import SonicMoEConfig
from sonicmoe.ep import fixed_size
from sonicmoe.ep.fixed_size import FixedSizeTransport
from sonicmoe.ernie_compat import SonicMoEMlpNode

MOST_TOKENS = 41  # of any rank in any case, and one more


def local_experts(first, count):
    """Modules of experts `first .. first + count`, each weight with a zero fp32 `main_grad`."""
    made = expert_modules(*(values[first : first + count] for values in expert_weights()))
    for expert in made:
        for weight in (expert.up_gate_proj.weight, expert.down_proj.weight):
            weight.main_grad = tensor(np.zeros(tuple(weight.shape), np.float32))
    return made


def node_of(experts, **options):
    """A node over such modules."""
    config = SonicMoEConfig(**options)
    return SonicMoEMlpNode(experts, len(experts), HIDDEN, INTERMEDIATE, config=config)


class Spy:
    """A source of gradients that remembers what it has given."""

    def __init__(self, source):
        self.source, self.rows = source, None

    def take(self, gradient):
        self.rows = self.source.take(gradient)
        return self.rows


def run_layer(dispatcher, source, rank=0, dtype="float32", fp8=False, spelling="contiguous"):
    """Everything one rank sees of one forward and backward, by name, in numpy. No dispatcher writes
    what it was given, nor what it gave away.
    """
    count = dispatcher.num_local_experts
    experts = local_experts(rank * count, count)
    node = node_of(experts, fp8_mode="perf" if fp8 else "off")
    leaf, weights, ids = (
        spelled(tensor(array), spelling) for array in (source.x, source.weights, source.ids)
    )
    for each in (leaf, weights):
        if IS_PADDLE:
            each.stop_gradient = False
        else:
            each.requires_grad_()
    x = leaf.to(getattr(torch, dtype))
    mine = Snapshot(x=x, ids=ids, weights=weights)
    prepared = []

    def prepare():
        node.prequantize_weights()
        prepared.append(True)

    received = dispatcher.dispatch(x, ids, weights, meanwhile=prepare)
    assert prepared == [True]
    theirs = Snapshot(indices=received.indices, probs=received.probs)
    rows = Snapshot(**({} if dispatcher.fp8 else {"x": received.x}))
    assert (received.dout_source is not None) == dispatcher.fp8_grad
    spy = Spy(received.dout_source) if dispatcher.fp8_grad else None
    out = node(
        received.x, received.tokens_per_expert, received.indices, received.probs,
        x_scale=received.x_scale, dx_to=received.dx_to, dout_source=spy,
    )  # fmt: skip
    results = Snapshot(out=out)
    y = dispatcher.combine(out, received.handle)
    dout = spelled(tensor(source.dout).to(y.dtype), spelling)
    beyond = Snapshot(dout=dout)
    y.backward(dout)
    node.step()
    changes = [words for held in (mine, theirs, rows, results, beyond) for words in held.changes()]
    assert not changes, changes
    counts = received.tokens_per_expert
    return {
        "y": numpy(y),
        "dx": gradient(leaf),
        "dweights": gradient(weights),
        "recv_idx": numpy(received.indices),
        "recv_probs": numpy(received.probs),
        "counts": np.array([-1] * count if counts is None else counts),
        "up_gate": np.stack([numpy(e.up_gate_proj.weight.main_grad) for e in experts]),
        "down": np.stack([numpy(e.down_proj.weight.main_grad) for e in experts]),
        **arrived(dispatcher, received, spy),
    }


def arrived(dispatcher, received, spy):
    """The rows that were delivered: of codes and scales those that have a slot here."""
    here = numpy(received.indices).max(1, initial=-1) >= 0
    found = {}
    if dispatcher.fp8:
        assert received.x.dtype == torch.float8_e4m3fn and received.dx_to.dtype == torch.bfloat16
        found |= {"codes": code_bytes(received.x)[here], "scales": numpy(received.x_scale)[here]}
    else:
        found["recv_x"] = numpy(received.x)
    if spy is not None:
        codes, scales = spy.rows.codes, spy.rows.scale_inv
        found |= {"dout codes": code_bytes(codes)[here], "dout scales": numpy(scales)[here]}
    return found


def code_bytes(codes):
    empty = 0 in tuple(codes.shape)  # which Paddle cannot view
    return np.zeros(codes.shape) if empty else numpy(codes.view(torch.uint8).to(torch.int32))


def gradient(leaf):
    """The gradient, zeros where none arrived (no token, nothing to differentiate)."""
    return np.zeros(tuple(leaf.shape)) if leaf.grad is None else numpy(leaf.grad)


def start(world, rank, directory):
    """Join the world; returns the exchange of its ranks."""
    if IS_PADDLE:
        import paddle.distributed as dist

        from sonicmoe.ep.exchange_paddle import PaddleExchange

        dist.init_parallel_env()
        return PaddleExchange()
    import torch.distributed as dist

    from sonicmoe.ep.exchange_torch import TorchExchange

    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    return TorchExchange()


def poisoned_fixed_size(exchange):
    """The transport that waits for nothing, its memory full of NaN."""

    def empty(shape, dtype, device):
        poison = float("nan") if "float" in str(dtype) else 0x7F  # which is NaN in e4m3
        return torch.full(list(shape), poison, dtype=dtype, device=device)

    fixed_size.empty = empty
    return FixedSizeTransport(EXPERTS, exchange, MOST_TOKENS)


def deepep_transports(limit):
    """Every mode of the emulated library."""
    import emulated_deepep
    import torch.distributed as dist

    from sonicmoe.ep.deepep import DeepEPTransport

    given = EXPERTS, dist.group.WORLD, emulated_deepep.LIBRARY
    return {
        "deepep": DeepEPTransport(*given),
        "deepep worst case": DeepEPTransport(*given, limit=limit),
    }
