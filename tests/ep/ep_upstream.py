"""One rank's part of a layer through upstream's functions for expert parallelism, and through the
operator of compiled graphs; PyTorch only.
"""

from __future__ import annotations

import gc
import re
from dataclasses import replace

import numpy as np
import torch
from ep_cases import EXPERTS, HIDDEN, TOPK, cases, expert_weights
from processes import ROOT

from sonicmoe import moe_ep_general_routing_forward, moe_ep_TC_softmax_topk_forward
from sonicmoe.distributed_utils import DispatchMode, RuntimeEPConfig, default_group
from sonicmoe.enums import ActivationType
from sonicmoe.functional import layout_of, routed
from sonicmoe.layer.plan import make_plan, number_of

MODES = (None, "AG_DISPATCH_TRITON", "RANK_DEDUP_DISPATCH_TRITON")
WAITS = {True: MODES[0], False: MODES[1]}  # whether counts are waited for, beside a mode


def experts_of(rank, world):
    """The rank's up_gate `[L, H, 2I]` and down `[L, I, H]`."""
    mine = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    return [torch.from_numpy(values[mine]).float() for values in expert_weights()]


def gradients_of(y, dout, **leaves):
    """The output and the gradients, by name, in numpy."""
    y.backward(torch.from_numpy(dout))
    found = {name: leaf.grad for name, leaf in leaves.items()}
    return {name: value.numpy() for name, value in {"y": y.detach(), **found}.items()}


def run_upstream(source, mode=None, rank=0, world=1):
    """Everything that this rank sees of both functions, by name."""
    config = mode and RuntimeEPConfig(world, TOPK, DispatchMode(mode))
    options = {"concat_layout": True, "ep_config": config}

    def leaves():
        given = torch.tensor(source.x), *experts_of(rank, world)
        return [leaf.requires_grad_() for leaf in given]

    x, up, down = leaves()
    weights, ids = torch.tensor(source.weights, requires_grad=True), torch.from_numpy(source.ids)
    own = up.permute(2, 1, 0), None, down, None
    y = moe_ep_general_routing_forward(x, ids, weights, *own, EXPERTS, **options)
    found = gradients_of(y, source.dout, dx=x, dweights=weights, up_gate=up, down=down)
    x, up, down = leaves()
    drawn = np.random.default_rng(7).standard_normal((EXPERTS, HIDDEN), np.float32)
    router, own = torch.tensor(drawn, requires_grad=True), (up.permute(2, 1, 0), None, down, None)
    y = moe_ep_TC_softmax_topk_forward(x, router, *own, TOPK, EXPERTS, **options)
    of_router = gradients_of(y, source.dout, dx=x, drouter=router, up_gate=up, down=down)
    return found | {f"router/{name}": array for name, array in of_router.items()}


def run_routed(source, rank, world, **options):
    """The first of the two through `routed_mlp`, by the same names."""
    activation = ActivationType.SWIGLU
    plan = replace(make_plan(activation, layout_of(activation, True), None), is_own=True)
    group = routed.name_of(routed.ExpertGroup(EXPERTS, default_group(), options))
    given = torch.tensor(source.x), torch.tensor(source.weights), *experts_of(rank, world)
    x, probs, up, down = (leaf.requires_grad_() for leaf in given)
    weights = up.mT.contiguous(), down.mT.contiguous(), None, None
    y = routed.routed_mlp(number_of(plan), group, x, torch.from_numpy(source.ids), probs, weights)
    found = gradients_of(y, source.dout, dx=x, dweights=probs, up_gate=up, down=down)
    gc.collect()
    assert not routed._kept
    return found


def run_page(rank):
    """The layer of docs/parallel.md on this rank: the norm of every gradient, by name, and how many
    experts are here.
    """
    page = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    (snippet,) = (s for s in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Ex" in s)
    names = {}
    torch.manual_seed(rank)
    exec(snippet, names)
    layer = names["layer"]
    leaves = {"x": names["x"], "up": layer.up, "down": layer.down}
    norms = {name: leaf.grad.float().norm().numpy() for name, leaf in leaves.items()}
    return norms | {"experts": np.array(layer.up.shape[0])}


def upstream_results(rank, world):
    """`run_upstream` by mode, `run_routed`, waiting for counts and not, and `run_page`."""
    parts = {"page": run_page(rank)}
    for waits, mode in WAITS.items():
        own = cases(world)[case_of(mode)][rank]
        parts[f"routed, {waits}"] = run_routed(own, rank, world, wait_for_counts=waits)
    for mode in MODES:
        parts[mode] = run_upstream(cases(world)[case_of(mode)][rank], mode, rank, world)
    return {f"{part}/{name}": found[name] for part, found in parts.items() for name in found}


def case_of(mode):
    """Ranks have equally many tokens where every token goes to every rank."""
    return "an expert without tokens" if mode == MODES[1] else "uneven"
