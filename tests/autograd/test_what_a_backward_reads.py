"""Every tensor of the caller that a backward reads, at every face: a write to it between a forward
and its backward is refused, or changes nothing. docs/design.md has the list, and this test walks over it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from engine.fp8_arrivals import quantised
from engine.low_rank_golden import Adapted
from engine.moe_golden import make_problem
from framework import IS_PADDLE, numpy, tensor, torch
from node.node_harness import FP8, FULL, Layer, want_gradient

from sonicmoe.config import SonicMoEConfig
from sonicmoe.engine.low_rank import Adapters, LowRank
from sonicmoe.ep import Dispatcher, LocalDispatcher
from sonicmoe.ep.dispatcher import LocalTransport
from sonicmoe.fleet.overlap import ExpertsStep
from sonicmoe.fleet.run import run_sonic_moe
from sonicmoe.layer.late_wgrad import WgradStore
from sonicmoe.layouts import WeightLayout

PAGE = Path(__file__).parents[2] / "docs" / "design.md"
SECTION = "## What a backward reads of its caller"
AGAIN = {"recompute_z": True}
CONFIGS = {
    "full": FULL,
    "fp8": FP8,
    "full, z again": SonicMoEConfig(engine="reference", **AGAIN),
    "fp8, z again": SonicMoEConfig(engine="reference", fp8_mode="perf", **AGAIN),
}


def table():
    """`{face: {row: words of the cell}}` of the page, without the cells that say "–"."""
    text = PAGE.read_text().split(SECTION)[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    (_, *faces), _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines
    ]
    cells = [
        (face, row[0], cell) for row in rows for face, cell in zip(faces, row[1:], strict=True)
    ]
    found = {face: {} for face in faces}
    for face, row, cell in cells:
        if cell != "–":
            found[face][row] = set(re.findall("compared|copied", cell))
    return found


@dataclass
class Scene:
    """A forward that has run. given: the caller's tensors by row of the table. finish: the backward,
    which returns gradients.
    """

    given: dict[str, list]
    finish: Callable[[], list]


def leaf(values, dtype=None):
    made = tensor(values, torch.float32).to(dtype or torch.float32)
    want_gradient(made, True)
    return made


def gradients(tensors):
    return [numpy(each.grad) for each in tensors if each.grad is not None]


PROBLEM = make_problem(hidden=32, intermediate=24, topk=2, bias=True)
ONE_SLOT = make_problem(topk=1, empty=(), bias=True)
ONE_SLOT.indices[:] = np.sort(np.abs(ONE_SLOT.indices) % 4, 0)
WIDE = make_problem(hidden=256, intermediate=64, topk=2, dtype=torch.bfloat16)


def beside(problem):
    """Biases and adapters of the grouped arrangement."""
    adapted = Adapted(problem)
    pairs = [LowRank(*map(leaf, adapted.exact[name]), 0.7) for name in ("up", "down")]
    return (leaf(problem.b1), leaf(problem.b2)), Adapters(*pairs)


def node_scene(config, problem=PROBLEM, arrangement="fused", is_sorted=False):
    layer = Layer(problem, config=CONFIGS[config], arrangement=arrangement)
    biases, adapters = beside(problem)
    if arrangement == "native":
        adapters = None
    x, counts = (
        leaf(problem.x),
        tensor(np.bincount(problem.indices[problem.indices >= 0], minlength=4)[:4]),
    )
    probs = leaf(problem.probs[:, 0] if is_sorted else problem.probs)
    indices = tensor(problem.indices)
    more = {"biases": biases, "adapters": adapters}
    given = {
        "tokens": [x],
        "probabilities": [probs],
        "weights": list(layer.weights),
        "biases": list(biases),
    }
    if adapters is not None:
        given["factors of adapters"] = list(adapters.factors)
    if is_sorted:
        given["indices, or counts of rows"] = [counts]
        out = layer.node.forward_sorted(x, counts, probs, **more)
    else:
        given |= {"indices, or counts of rows": [indices], "`tokens_per_expert`": [counts]}
        out = layer.node(x, counts, indices, probs, **more)

    def finish():
        out.backward(tensor(problem.dout, torch.float32))
        return gradients(
            [x, probs, *layer.weights, *biases, *(adapters.factors if adapters else ())]
        )

    return Scene(given, finish)


def quantised_scene():
    """Tokens that arrived in FP8."""
    layer, tokens = Layer(WIDE, config=FP8, dtype=torch.bfloat16), quantised(WIDE.x)
    dx_to = leaf(np.zeros(WIDE.x.shape), torch.bfloat16)
    codes, scales = tokens.codes, tokens.scale_inv
    out = layer.node(
        codes, None, tensor(WIDE.indices), leaf(WIDE.probs), x_scale=scales, dx_to=dx_to
    )

    def finish():
        out.backward(tensor(WIDE.dout, torch.float32).to(torch.bfloat16))
        return gradients([dx_to, *layer.weights])

    return Scene(
        {"tokens": [codes], "scales of tokens in FP8": [scales], "receiver `dx_to`": [dx_to]},
        finish,
    )


def step_scene(fp8):
    """A schedule's step: `forward_step` under PaddleFleet's face."""
    tokens = quantised(WIDE.x) if fp8 else None
    layer = Layer(WIDE, config=FP8 if fp8 else FULL, dtype=torch.bfloat16, main_grad=0.0)
    x = tensor(WIDE.x, torch.float32).to(torch.bfloat16) if tokens is None else tokens.codes
    scales = None if tokens is None else tokens.scale_inv
    counts = tensor(np.bincount(WIDE.indices[WIDE.indices >= 0], minlength=4)[:4])
    indices, probs = tensor(WIDE.indices), tensor(WIDE.probs, torch.float32)
    _, step = layer.node.forward_step(x, counts, indices, probs, x_scale=scales)
    given = {
        "tokens": [x], "probabilities": [probs], "indices, or counts of rows": [indices],
        "`tokens_per_expert`": [counts], "weights": layer.weights,
    }  # fmt: skip
    if fp8:
        given["scales of tokens in FP8"] = [scales]

    def finish():
        found = step.backward(tensor(WIDE.dout, torch.float32).to(torch.bfloat16))
        return [*map(numpy, found), *layer.gradients()]

    return Scene(given, finish)


def late_scene(way):
    """Weight gradients that a schedule adds after their backward."""
    layer, store, runs = Layer(PROBLEM, main_grad=0.0), WgradStore(), []
    offer = lambda position, weight, run: not runs.append(run)  # noqa: E731
    layer.node._state.offers = lambda: store if way == "store" else offer
    call = layer.call()
    call.backward()

    def finish():
        for run in [store.run] if way == "store" else runs:
            run()
        return layer.gradients()

    return Scene({"tokens": [call.x], "gradient of the output": [call.dout]}, finish)


def fleet_scene(fp8, as_step):
    from fleet.fleet_calls import Experts

    experts, config = Experts(WIDE, "grouped"), None
    topk, count = WIDE.indices.shape[1], WIDE.num_experts
    x, scores, indices = leaf(WIDE.x, torch.bfloat16), leaf(WIDE.probs), tensor(WIDE.indices)
    counts = tensor(np.bincount(WIDE.indices[WIDE.indices >= 0], minlength=4)[:4])
    dout = tensor(WIDE.dout, torch.float32).to(torch.bfloat16)
    given = {
        "tokens": [x], "probabilities": [scores], "indices, or counts of rows": [indices],
        "`tokens_per_expert`": [counts], "weights": experts.weights,
    }  # fmt: skip
    if as_step:
        step = ExpertsStep(topk, count, *experts.weights, fp8, config)
        step.forward(x, indices, scores, counts)
        return Scene(given, lambda: [*map(numpy, step.backward(dout)), *experts.gradients()])
    out = run_sonic_moe(
        *(x, indices, scores, topk, count, *experts.weights), fp8=fp8, tokens_per_expert=counts
    )

    def finish():
        out.backward(dout)
        return [*gradients([x, scores]), *experts.gradients()]

    return Scene(given, finish)


def dispatcher_scene(make):
    """Both ways: what the dispatcher gave counts as the caller's too, from then on."""
    x, weights = leaf(WIDE.x, torch.bfloat16), leaf(WIDE.probs)
    ids = tensor(WIDE.indices)
    dispatcher = make()
    received = dispatcher.dispatch(x, ids, weights)
    doubled = received.x * 2
    out = dispatcher.combine(doubled, received.handle)
    total = (out.to(torch.float32) * 3).sum() + received.probs.sum()
    given = {
        "tokens": [x, doubled],
        "probabilities": [weights],
        "indices, or counts of rows": [ids, received.indices],
    }

    def finish():
        total.backward()
        return gradients([x, weights])

    return Scene(given, finish)


class Moving(LocalTransport):
    """Rows take the way that they take between ranks, and come from another memory."""

    moves = True

    def dispatch(self, x, topk_idx, topk_weights):
        received = super().dispatch(x, topk_idx, topk_weights)
        return replace(received, x=received.x.clone())

    def dispatch_cached(self, x, handle):
        return x.clone()


@cache
def in_a_graph(function):
    return torch.compile(function, backend="eager", fullgraph=True)


def functional_scene(fp8, more=True, compiled=False, again=False):
    """`expert_mlp`, which transformers' experts call too, on transformers' arrangement."""
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional.autograd import expert_mlp

    x, probs, indices = leaf(PROBLEM.x), leaf(PROBLEM.probs), tensor(PROBLEM.indices)
    weights = [leaf(array.transpose(0, 2, 1).copy()) for array in (PROBLEM.up_gate, PROBLEM.down)]
    biases, adapters = beside(PROBLEM) if more else ((None, None), None)
    layout = WeightLayout(split_half=True)
    run = in_a_graph(expert_mlp) if compiled else expert_mlp
    with SonicMoEConfig(engine="reference", recompute_z=again).activate():
        out = run(
            *(x, indices, probs, *weights, *biases, ActivationType.SWIGLU),
            layout=layout, use_fp8=fp8, adapters=adapters,
        )  # fmt: skip
    given = {
        "tokens": [x], "probabilities": [probs], "indices, or counts of rows": [indices], "weights": weights,
    }  # fmt: skip
    if more:
        given |= {"biases": list(biases), "factors of adapters": list(adapters.factors)}
    leaves = [tensor for name, held in given.items() for tensor in held if "indices" not in name]

    def finish():
        out.backward(tensor(PROBLEM.dout, torch.float32))
        return gradients(leaves)

    return Scene(given, finish)


def planned_scene(fp8):
    """Rows in expert order, as torchtitan's experts pass them."""
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional.autograd import planned_mlp
    from sonicmoe.layer.plan import make_plan, number_of

    plan = make_plan(ActivationType.SWIGLU, WeightLayout(split_half=True), fp8)
    x, probs = leaf(ONE_SLOT.x), leaf(ONE_SLOT.probs[:, 0])
    counts = tensor(np.bincount(ONE_SLOT.indices[:, 0], minlength=4))
    arrays = (ONE_SLOT.up_gate, ONE_SLOT.down)
    weights = [leaf(array.transpose(0, 2, 1).copy()) for array in arrays]
    biases = [leaf(ONE_SLOT.b1), leaf(ONE_SLOT.b2)]
    out = planned_mlp(plan, number_of(plan), x, counts, probs, (*weights, *biases), None)
    given = {
        "tokens": [x], "probabilities": [probs], "indices, or counts of rows": [counts],
        "weights": weights, "biases": biases,
    }  # fmt: skip

    def finish():
        out.backward(tensor(ONE_SLOT.dout, torch.float32))
        return gradients([x, probs, *weights, *biases])

    return Scene(given, finish)


def moe_scene(fp8):
    from functional.layer_golden import make_layer, make_tokens

    moe, x = make_layer(bias=True), make_tokens(19, 32).requires_grad_()
    out, aux = moe(x, use_fp8=fp8)
    up, down = moe.c_fc, moe.c_proj
    given = {"tokens": [x], "weights": [up.weight, down.weight], "biases": [up.bias, down.bias]}

    def finish():
        ((out * make_tokens(19, 32, seed=3)).sum() + aux).backward()
        return gradients([x, *moe.parameters()])

    return Scene(given, finish)


def triples_scene(fp8):
    from sonicmoe.functional import moe_general_routing_inputs

    x, scores = leaf(PROBLEM.x), leaf(PROBLEM.probs.reshape(-1))
    tokens = torch.arange(len(PROBLEM.x)).repeat_interleave(PROBLEM.indices.shape[1])
    experts = tensor(PROBLEM.indices.reshape(-1))
    weights = [leaf(array.transpose(0, 2, 1).copy()) for array in (PROBLEM.up_gate, PROBLEM.down)]
    up, down = (weight.permute(1, 2, 0) for weight in weights)
    out, _ = moe_general_routing_inputs(
        x, scores, tokens, experts, up, None, down, None, PROBLEM.num_experts, concat_layout=True,
        use_fp8=fp8,
    )  # fmt: skip
    given = {
        "tokens": [x], "probabilities": [scores], "indices, or counts of rows": [tokens, experts],
        "weights": weights,
    }  # fmt: skip

    def finish():
        out.backward(tensor(PROBLEM.dout, torch.float32))
        return gradients([x, scores, *weights])

    return Scene(given, finish)


FACES = {
    "node, PaddleFleet": {
        **{name: partial(node_scene, name) for name in CONFIGS},
        "native": partial(node_scene, "full", arrangement="native"),
        "per expert": partial(node_scene, "fp8", arrangement="per_expert"),
        "sorted": partial(node_scene, "fp8", ONE_SLOT, is_sorted=True),
        "tokens in FP8": quantised_scene,
        "PaddleFleet": partial(fleet_scene, False, False),
        "PaddleFleet, FP8": partial(fleet_scene, True, False),
    },
    "steps of a schedule": {
        "forward_step": partial(step_scene, False),
        "forward_step, FP8": partial(step_scene, True),
        "PaddleFleet": partial(fleet_scene, True, True),
    },
    "gradients put off": {
        "store": partial(late_scene, "store"),
        "offers": partial(late_scene, "offers"),
    },
    "dispatchers": {
        "local": partial(dispatcher_scene, lambda: LocalDispatcher(4)),
        "between ranks": partial(dispatcher_scene, lambda: Dispatcher(Moving(4))),
    },
}
if not IS_PADDLE:
    FACES["PyTorch face"] = {
        "full": partial(functional_scene, False),
        "fp8": partial(functional_scene, True),
        "full, z again": partial(functional_scene, False, again=True),
        "fp8, z again": partial(functional_scene, True, again=True),
        "sorted": partial(planned_scene, False),
        "sorted, fp8": partial(planned_scene, True),
        "MoE": partial(moe_scene, False),
        "MoE, fp8": partial(moe_scene, True),
        "triples": partial(triples_scene, False),
        "triples, fp8": partial(triples_scene, True),
    }
    FACES["in a compiled graph"] = {
        "full": partial(functional_scene, False, compiled=True),
        "fp8": partial(functional_scene, True, compiled=True),
    }

SCENES = [(face, name) for face, scenes in FACES.items() for name in scenes]
NEEDS_PYTORCH = {"PyTorch face", "in a compiled graph"}


def test_every_face_of_the_page_has_scenes():
    assert set(table()) == set(FACES) | NEEDS_PYTORCH


@pytest.mark.parametrize(("face", "name"), SCENES)
def test_a_write_before_the_backward_is_refused_or_changes_nothing(face, name):
    make, rows = FACES[face][name], table()[face]
    scene = make()
    assert set(scene.given) <= set(rows), "not on the page"
    expected = scene.finish()
    for row, tensors in scene.given.items():
        for index in range(len(tensors)):
            happened = outcome_of_a_write(make, row, index, expected)
            assert happened in rows[row], f"{row}[{index}]: {happened}, the page has {rows[row]}"


def outcome_of_a_write(make, row, index, expected):
    scene = make()
    with torch.no_grad():
        scene.given[row][index].zero_()
    try:
        found = scene.finish()
    except Exception as error:  # what Paddle makes of an error in a backward is an OSError
        assert re.search("written in place|modified by an inplace operation", str(error)), error
        return "compared"
    same = all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
    return "copied" if same else "read as it was written"


@pytest.mark.parametrize("face", FACES)
def test_every_cell_of_the_page_has_a_scene(face):
    seen = {row for make in FACES[face].values() for row in make().given}
    assert seen == set(table()[face])
