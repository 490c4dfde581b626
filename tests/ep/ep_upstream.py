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


def run_upstream(source, mode=None, rank=0, world=1):
    """Everything that this rank sees of both functions, by name, in numpy."""
    mine = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    up, down = (torch.from_numpy(values[mine]).float() for values in expert_weights())
    found = {}
    for function in (moe_ep_general_routing_forward, moe_ep_TC_softmax_topk_forward):
        routed = function is moe_ep_general_routing_forward
        x, scores = (torch.from_numpy(values).clone() for values in (source.x, source.weights))
        router = torch.from_numpy(
            np.random.default_rng(7).standard_normal((EXPERTS, HIDDEN), np.float32)
        )
        leaves = [x, scores if routed else router, up.clone(), down.clone()]
        x, second, w1, w2 = (leaf.requires_grad_() for leaf in leaves)
        if routed:
            first, rest = (x, torch.from_numpy(source.ids), second), (EXPERTS,)
        else:
            first, rest = (x, second), (TOPK, EXPERTS)
        config = mode and RuntimeEPConfig(world, TOPK, DispatchMode(mode))
        weights = w1.permute(2, 1, 0), None, w2, None
        y = function(*first, *weights, *rest, concat_layout=True, ep_config=config)
        y.backward(torch.from_numpy(source.dout))
        names = "dx", "dweights" if routed else "drouter", "up_gate", "down"
        arrays = {"y": y.detach()} | dict(zip(names, [leaf.grad for leaf in leaves], strict=True))
        found |= {f"{function.__name__}/{key}": value.numpy() for key, value in arrays.items()}
    return found


def run_routed(source, rank, world, **options):
    """The first of the two through `routed_mlp`, by the same names."""
    mine = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    up, down = (torch.from_numpy(values[mine]).float() for values in expert_weights())
    activation = ActivationType.SWIGLU
    plan = replace(make_plan(activation, layout_of(activation, True), None), is_own=True)
    group = routed.name_of(routed.ExpertGroup(EXPERTS, default_group(), options))
    x, probs = (torch.from_numpy(values).clone() for values in (source.x, source.weights))
    leaves = [
        leaf.requires_grad_() for leaf in (x, probs, up.mT.contiguous(), down.mT.contiguous())
    ]
    given = leaves[0], torch.from_numpy(source.ids).long(), leaves[1], (*leaves[2:], None, None)
    y = routed.routed_mlp(number_of(plan), group, *given)
    y.backward(torch.from_numpy(source.dout))
    gc.collect()
    assert not routed._kept
    dx, dweights, up, down = (leaf.grad for leaf in leaves)
    found = {"y": y.detach(), "dx": dx, "dweights": dweights, "up_gate": up.mT, "down": down.mT}
    return {name: value.numpy() for name, value in found.items()}


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
    sources = cases(world)
    waits = {True: "uneven", False: "an expert without tokens"}
    return (
        {f"page/{name}": array for name, array in run_page(rank).items()}
        | {
            f"routed, {waiting}/{name}": array
            for waiting, case in waits.items()
            for name, array in run_routed(
                sources[case][rank], rank, world, wait_for_counts=waiting
            ).items()
        }
        | {
            f"{mode}/{name}": array
            for mode in MODES
            for name, array in run_upstream(
                sources[case_of(mode)][rank], mode, rank=rank, world=world
            ).items()
        }
    )


def case_of(mode):
    """Ranks have equally many tokens where every token goes to every rank."""
    return "an expert without tokens" if mode == MODES[1] else "uneven"
