"""Every tensor of the caller that a backward reads, at every face: a write to it between a forward
and its backward is refused, or changes nothing. docs/design.md has the list, and this test walks over it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from engine.fp8_arrivals import quantised
from engine.moe_golden import factors_of, make_problem
from framework import IS_PADDLE, numpy, tensor, torch
from node.node_harness import FP8, FULL, Layer, want_gradient
from oracle.case import Case
from oracle.faces import LAYERS, Call, normal
from oracle.golden import ROUTERS, scene_of

from sonicmoe.engine.low_rank import Adapters, LowRank
from sonicmoe.ep import Dispatcher, LocalDispatcher
from sonicmoe.ep.dispatcher import LocalTransport
from sonicmoe.layer.late_wgrad import WgradStore
from sonicmoe.layouts import WeightLayout

PAGE = Path(__file__).parents[2] / "docs" / "design.md"
SECTION = "## What a backward reads of its caller"


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


ONE_SLOT = make_problem(topk=1, empty=(), bias=True)
ONE_SLOT.indices[:] = np.sort(np.abs(ONE_SLOT.indices) % 4, 0)
WIDE = make_problem(hidden=256, intermediate=64, topk=2, dtype=torch.bfloat16)
MORE = "sizes=37x32x24x4x2 bias=True"


@cache
def graphs_of(line):
    """A graph is for one configuration: those of another line go."""
    torch._dynamo.reset()
    graphs_of.cache_clear()


def in_a_graph(function):
    return torch.compile(function, backend="eager", fullgraph=True)


def case_scene(line, compiled=False):
    """A forward of a case of the oracle."""
    case = Case.parse(f"{MORE} {line}")
    case = case if normal(case) == case else normal(Case.parse(line))
    layer, around = LAYERS[case.face](case, scene_of(case), "reference"), nullcontext()
    if compiled:
        graphs_of(line)
        from sonicmoe.functional import autograd

        around = mock.patch.object(autograd, "expert_mlp", in_a_graph(autograd.expert_mlp))
    with layer.config.activate(), around:
        call = Call(layer, layer.scene)
    given = {"tokens": [call.leaf], "weights": list(layer.weights), "biases": list(layer.biases)}
    given["factors of adapters"] = [f for p in layer.pairs.values() for f in (p.a, p.b)]
    if case.face not in ROUTERS:
        given |= {"probabilities": [call.probs], "indices, or counts of rows": [call.indices]}
    if case.arrivals == "x":
        given["receiver `dx_to`"], given["tokens"] = given["tokens"], [layer.sent.codes]
        given["scales of tokens in FP8"] = [layer.sent.scale_inv]
    if case.counts == "tensor":
        given["`tokens_per_expert`"] = [layer.tokens_per_expert]
    leaves = [call.leaf, call.probs, *layer.weights, *layer.biases]
    leaves += [factor for pair in layer.pairs.values() for factor in (pair.a, pair.b)]

    def finish():
        call.backward()
        return gradients(leaves)

    return Scene({name: held for name, held in given.items() if held}, finish)


def sorted_scene(call):
    """Rows in expert order. call: gives a function of them, their probabilities and counts, the weights,
    what else is the caller's, and its adapters.
    """
    problem = ONE_SLOT
    biases, x, probs = (
        (leaf(problem.b1), leaf(problem.b2)),
        leaf(problem.x),
        leaf(problem.probs[:, 0]),
    )
    counts = tensor(np.bincount(problem.indices[:, 0], minlength=4))
    run, weights, factors = call(biases)
    out = run(x, counts, probs)
    given = {
        "tokens": [x], "probabilities": [probs], "indices, or counts of rows": [counts],
        "weights": weights, "biases": [*biases], "factors of adapters": factors,
    }  # fmt: skip

    def finish():
        out.backward(tensor(problem.dout, torch.float32))
        return gradients([x, probs, *weights, *biases, *factors])

    return Scene({name: held for name, held in given.items() if held}, finish)


def by_a_node(biases):
    layer = Layer(ONE_SLOT, config=FP8, arrangement="fused")
    adapters = Adapters(*(LowRank(*map(leaf, pair), 0.7) for pair in factors_of(ONE_SLOT)))
    run = partial(layer.node.forward_sorted, biases=biases, adapters=adapters)
    return run, list(layer.weights), list(adapters.factors)


def by_a_plan(fp8, biases):
    """As torchtitan's experts pass them."""
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional.autograd import planned_mlp
    from sonicmoe.layer.plan import make_plan, number_of

    plan = make_plan(ActivationType.SWIGLU, WeightLayout(split_half=True), fp8)
    arrays = (ONE_SLOT.up_gate, ONE_SLOT.down)
    weights = [leaf(array.transpose(0, 2, 1).copy()) for array in arrays]

    def run(x, counts, probs):
        return planned_mlp(plan, number_of(plan), x, counts, probs, (*weights, *biases), None)

    return run, weights, []


def step_scene(fp8):
    """A schedule's step."""
    sent = quantised(WIDE.x) if fp8 else None
    x = leaf(WIDE.x, torch.bfloat16) if sent is None else sent.codes
    scales = {} if sent is None else {"x_scale": sent.scale_inv}
    counts = tensor(np.bincount(WIDE.indices[WIDE.indices >= 0], minlength=4)[:4])
    indices, probs = tensor(WIDE.indices), leaf(WIDE.probs)
    layer = Layer(WIDE, config=FP8 if scales else FULL, dtype=torch.bfloat16, main_grad=0.0)
    _, step = layer.node.forward_step(x, counts, indices, probs, **scales)
    given = {
        "tokens": [x], "probabilities": [probs], "indices, or counts of rows": [indices],
        "`tokens_per_expert`": [counts], "weights": layer.weights,
    }  # fmt: skip
    if fp8:
        given["scales of tokens in FP8"] = [*scales.values()]
    dout = tensor(WIDE.dout, torch.float32).to(torch.bfloat16)
    return Scene(given, lambda: [*map(numpy, step.backward(dout)), *layer.gradients()])


def late_scene(way):
    """Weight gradients that a schedule adds after their backward."""
    layer, store, runs = (
        Layer(make_problem(hidden=32, intermediate=24, topk=2), main_grad=0.0),
        WgradStore(),
        [],
    )
    offer = lambda position, weight, run: not runs.append(run)  # noqa: E731
    layer.node._state.offers = lambda: store if way == "store" else offer
    call = layer.call()
    call.backward()

    def finish():
        for run in [store.run] if way == "store" else runs:
            run()
        return layer.gradients()

    return Scene({"tokens": [call.x], "gradient of the output": [call.dout]}, finish)


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

    def dispatch(self, x, topk_idx, topk_weights, meanwhile=None):
        received = super().dispatch(x, topk_idx, topk_weights)
        return replace(received, x=received.x.clone())

    def dispatch_cached(self, x, handle):
        return x.clone()


AGAIN = "recompute_z=True"
STEPS = "face=steps dtype=bfloat16 arrangement=fused counts=tensor recipe=dx256"
FP8_AGAIN = f"recipe=dx256 {AGAIN}"
NODES = (
    *(f"arrangement=fused adapters=both counts=tensor {line}" for line in ("", "recipe=dx256", AGAIN, FP8_AGAIN)),
    "arrangement=native counts=tensor", "recipe=dx256 adapters=both counts=tensor",
    "recipe=dx256 arrivals=x dtype=bfloat16 sizes=37x256x64x4x2",
    *(f"face=fleet dtype=bfloat16 arrangement=fused counts=tensor gradients=main_grad {line}"
      for line in ("", "recipe=dx256")),
)  # fmt: skip
FACES = {
    "node, PaddleFleet": {
        **{line: partial(case_scene, line) for line in NODES},
        "sorted": partial(sorted_scene, by_a_node),
    },
    "steps of a schedule": {
        "forward_step": partial(step_scene, False),
        "forward_step, FP8": partial(step_scene, True),
        STEPS: partial(case_scene, STEPS),
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
STACKED = [
    f"face=stacked arrangement=concat adapters=both {line}"
    for line in ("", "recipe=dx256", AGAIN, FP8_AGAIN)
]
OTHERS = [
    f"face={face} {fp8}"
    for face in ("moe", "triples", "transformers")
    for fp8 in ("", "recipe=dx256")
]
if not IS_PADDLE:
    FACES["PyTorch face"] = {
        **{line: partial(case_scene, line) for line in (*STACKED, *OTHERS)},
        "sorted": partial(sorted_scene, partial(by_a_plan, False)),
        "sorted, fp8": partial(sorted_scene, partial(by_a_plan, True)),
    }
    FACES["in a compiled graph"] = {
        line: partial(case_scene, line, compiled=True) for line in STACKED[:2]
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
