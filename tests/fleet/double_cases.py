"""What the tests of the double share: engines, and one layer's results by name."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import numpy as np
import paddle
from fleet.double import load, model
from fleet.double.optimizer import into_main_grad

HIDDEN, INNER, EXPERTS, TOPK, TOKENS = 128, 64, 4, 2, 48  # H = 2I: only weight2 tells the layout


@contextmanager
def engine(loader="eager"):
    """`paddlefleet` with this package as its engine."""
    from sonicmoe.ernie_compat import fleet as ours

    with load(loader, install=partial(ours.install, reference=True)) as fleet:
        try:
            yield fleet
        finally:
            ours.uninstall()


def config_of(fleet, **changes):
    sizes = {
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INNER,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOPK,
    }
    return fleet.config.TransformerConfig(**{**sizes, **changes})


def values(seed, *shape, scale=1.0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def leaf(array):
    made = paddle.to_tensor(array).astype("bfloat16")
    made.stop_gradient = False
    return made


def as_numpy(tensor):
    return tensor.astype("float32").numpy()


def relative(actual, wanted):
    """||actual - wanted|| / ||wanted||."""
    return float(np.linalg.norm(actual - wanted) / (np.linalg.norm(wanted) or 1.0))


def give_main_grads(layer):
    """fp32 zeros for every parameter, filled from autograd where the engine does not write."""
    for parameter in layer.parameters():
        parameter.main_grad = paddle.zeros(parameter.shape, "float32")
        parameter._register_grad_hook(into_main_grad(parameter))


def layer_of(fleet, config, group=None):
    """Fleet's layer with its gradients; `group` None computes on one card, without a dispatcher."""
    layer = model.initialise(fleet.layer.MoELayer(config, group))
    give_main_grads(layer)
    return layer


def run(layer, batches, before=lambda: None, after=lambda: None):
    """out and dx of every micro-batch, then `main_grad` by name, all numpy."""
    before()
    outs, gradients = [], []
    for x, dout in batches:
        given = leaf(x)
        out = layer(given)
        out.backward(paddle.to_tensor(dout).astype("bfloat16"))
        outs.append(as_numpy(out))
        gradients.append(as_numpy(given.grad))
    after()
    found = {"out": np.stack(outs), "dx": np.stack(gradients)}
    for name, parameter in layer.named_parameters():
        found[name.rpartition(".")[2] if "experts" in name else name] = as_numpy(
            parameter.main_grad
        )
    return found


def micro_batches(count=3, tokens=TOKENS, hidden=HIDDEN):
    return [(values([1, n], tokens, hidden), values([2, n], tokens, hidden)) for n in range(count)]


def plain_results(fleet, config, batches):
    """What plain experts make of the same."""
    layer = model.initialise(model.PlainMoE(config, fleet.layer.TopKRouter))
    give_main_grads(layer)
    return run(layer, batches)
