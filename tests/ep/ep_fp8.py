"""A layer wide enough for several scales per row, whose tokens and gradients travel in FP8."""

from __future__ import annotations

import numpy as np
from ep_cases import EXPERTS, Source, cases
from ep_layer import deepep_transports, gradient, poisoned_fixed_size
from framework import IS_PADDLE, numpy, parameter, tensor, torch

from sonicmoe import SonicMoEConfig
from sonicmoe.ep import Dispatcher
from sonicmoe.ep.collective import CollectiveTransport
from sonicmoe.ernie_compat import SonicMoEMlpNode

HIDDEN, INTERMEDIATE = 256, 24
# Of tokens, and of gradients.
BOTH = ((True, False), (False, True), (True, True))
CASES = ("uneven", "a rank without tokens", "a rank that receives nothing", "no tokens anywhere")


def sources(case):
    """The case's routing over wider tokens."""
    rng = np.random.default_rng(3)

    def wide(rows):
        return rng.standard_normal((len(rows), HIDDEN)).astype(np.float32)

    return [Source(wide(s.x), s.ids, s.weights, wide(s.x)) for s in cases(2)[case]]


def experts_of(first, count):
    """Two stacked parameters with zero fp32 `main_grad`."""
    rng = np.random.default_rng(7)
    up = rng.standard_normal((EXPERTS, HIDDEN, 2 * INTERMEDIATE)) * HIDDEN**-0.5
    down = rng.standard_normal((EXPERTS, INTERMEDIATE, HIDDEN)) * INTERMEDIATE**-0.5
    made = [parameter(each[first : first + count].astype(np.float32)) for each in (up, down)]
    for weight in made:
        weight.main_grad = tensor(np.zeros(tuple(weight.shape), np.float32))
    return made


def node_of(first, count, **options):
    """A node of the reference engine over `experts_of`, and its weights."""
    weights = experts_of(first, count)
    config = SonicMoEConfig(engine="reference", **options)
    return SonicMoEMlpNode.from_fused(*weights, config=config), weights


class Spy:
    """A source that remembers what it has given."""

    def __init__(self, source):
        self.source, self.rows = source, None

    def take(self, gradient):
        self.rows = self.source.take(gradient)
        return self.rows


def code_bytes(codes):
    empty = 0 in tuple(codes.shape)  # which Paddle cannot view
    return np.zeros((0, HIDDEN)) if empty else numpy(codes.view(torch.uint8).to(torch.int32))


def run_fp8(dispatcher, source, rank, form, says=True, grads=False):
    """Everything one rank sees of one forward and backward, by name, in numpy."""
    count = dispatcher.num_local_experts
    node, weights = node_of(rank * count, count, fp8_mode="perf")
    leaf, probs = tensor(source.x, grad=True), tensor(source.weights, grad=True)
    x = leaf.to(torch.bfloat16)
    option = {"fp8": form, "fp8_grad": grads} if says else {}
    received = dispatcher.dispatch(x, tensor(source.ids), probs, **option)
    if form:
        assert received.x.dtype == torch.float8_e4m3fn and received.dx_to.dtype == torch.bfloat16
    assert (received.dout_source is not None) == bool(grads)
    spy = Spy(received.dout_source)
    out = node(
        received.x, received.tokens_per_expert, received.indices, received.probs,
        x_scale=received.x_scale, dx_to=received.dx_to, dout_source=spy if grads else None,
    )  # fmt: skip
    y = dispatcher.combine(out, received.handle)
    y.backward(tensor(source.dout).to(y.dtype))
    node.step()
    here = numpy(received.indices).max(1, initial=-1) >= 0
    arrived = {}
    if form:
        arrived |= {"codes": code_bytes(received.x), "scales": numpy(received.x_scale)}
    if grads:
        arrived["dout codes"] = code_bytes(spy.rows.codes)
        arrived["dout scales"] = numpy(spy.rows.scale_inv)
    return {
        "y": numpy(y),
        "dx": gradient(leaf),
        "dweights": gradient(probs),
        "up": numpy(weights[0].main_grad),
        "down": numpy(weights[1].main_grad),
        **{name: array[here] for name, array in arrived.items()},
    }


def results_in_fp8(exchange, symmetric):
    """What one of two ranks sees through every dispatcher, by name."""
    rank, arrays = exchange.rank, {}
    transports = {
        "collective": CollectiveTransport(8, exchange),
        "fixed size": poisoned_fixed_size(exchange),
    }
    if not IS_PADDLE:
        transports |= deepep_transports() | symmetric
    for case in CASES:
        for form, grads in BOTH:
            for name, transport in transports.items():
                dispatcher = Dispatcher(transport, form, grads)
                found = run_fp8(dispatcher, sources(case)[rank], rank, form, grads=grads)
                arrays |= {f"{name}/{form}/{grads}/{case}/{key}": a for key, a in found.items()}
    return arrays
