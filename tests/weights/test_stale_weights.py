"""docs/design.md, "Stale weights": both tables, row by row and column by column, in both frameworks.
A row or a cell that this file does not know fails.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from framework import IS_PADDLE, numpy, parameter, tensor, torch
from functional.following import Following
from node.node_harness import ARRANGEMENTS, Layer, make_problem
from weights.freed_memory import free

from sonicmoe.config import SonicMoEConfig
from sonicmoe.engine.capabilities import REFERENCE
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import EngineName
from sonicmoe.errors import ConfigError, StaleWeightsError
from sonicmoe.layer import bound, plan
from sonicmoe.weights.cache import PreparedWeights

PAGE = Path(__file__).parents[2] / "docs" / "design.md"
OURS = SonicMoEConfig(engine="auto", fp8_mode="perf")
UNQUANTISED = SonicMoEConfig(engine="auto")
OTHERS = {
    "settings": SonicMoEConfig(engine="auto", fp8_mode="perf", recipe="1x128"),
    "engine": SonicMoEConfig(engine="reference", fp8_mode="perf"),
}


def tables():
    """Each table of the section: its head, and its rows by their first cells."""
    text = PAGE.read_text().split("\n## Stale weights\n")[1].split("\n## ")[0]
    found, lines = [], text.splitlines()
    for line, after in itertools.pairwise(lines):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if after.startswith("|---"):
            found.append((cells[1:], {}))
        elif line.startswith("|") and not line.startswith("|---"):
            found[-1][1][cells[0]] = cells[1:]
    return found


(COLUMNS, EVENT_ROWS), (_, QUIET_ROWS) = tables()
NODE, PASSED, COPIES = COLUMNS


class Counting(ReferenceEngine):
    """One that does not look for writes. events: "made" whenever it makes weights."""

    name = "counting"
    record = REFERENCE

    def __init__(self):
        self.events = []

    def prepare_weights(self, *arguments):
        self.events.append("made")
        return super().prepare_weights(*arguments)


class Blind(Following):
    """One that looks and finds nothing, as a sample may: an event alone makes it write."""

    name = "blind"

    def __init__(self):
        super().__init__()
        self.is_blind = True


@pytest.fixture
def engines(monkeypatch):
    """Has every layer choose `kind()` by itself, and another one where `engine` names one."""

    def plant(kind):
        made = {EngineName.AUTO: kind(), EngineName.REFERENCE: kind()}
        made[EngineName.REFERENCE].name += ", named"
        choose = plan.ready_engine

        def choice(device, requested, workload):
            found = choose(device, EngineName.REFERENCE, workload)
            return dataclasses.replace(found, engine=made[requested])

        monkeypatch.setattr(plan, "ready_engine", choice)
        monkeypatch.setattr(plan, "_fits", {})
        return made[EngineName.AUTO], made[EngineName.REFERENCE]

    return plant


class OfNode:
    """The layer of a node."""

    def __init__(self, arrangement="per_expert"):
        given = {"arrangement": arrangement, "dtype": torch.bfloat16, "config": None}
        self.layer = Layer(make_problem(), **given)
        if IS_PADDLE:  # nothing is kept before the first announcement
            self.layer.node.invalidate_caches()

    def forward(self, config=OURS):
        with config.activate():
            return numpy(self.layer.call().out)

    def fresh(self, config=OURS):
        self.layer.node = self.layer.another_node()
        return self.forward(config)

    @property
    def weights(self):
        return self.layer.weights

    parameters = weights

    def step(self):
        self.layer.node.step()

    def invalidate(self):
        self.layer.node.invalidate_caches()

    def move(self, which):
        expert = self.layer.experts[1]
        module = (expert.up_gate_proj, expert.down_proj)[which]
        moved = np.float32(numpy(module.weight)[:, ::-1])
        module.weight = parameter(moved, torch.bfloat16)
        self.layer.weights[1 + which * len(self.layer.experts)] = module.weight


class OfPassed:
    """A `MoE`, whose weights come with each call."""

    def __init__(self):
        from sonicmoe import MoE

        torch.manual_seed(0)
        self.module = MoE(4, 2, 32, 64, add_bias=True).to(torch.bfloat16)
        self.x = torch.randn(9, 32).to(torch.bfloat16)

    def forward(self, config=OURS):
        with config.activate():
            return numpy(self.module(self.x)[0])

    def fresh(self, config=OURS):
        self.module = copy.deepcopy(self.module)
        return self.forward(config)

    @property
    def weights(self):
        return [self.module.c_fc.weight, self.module.c_proj.weight]

    @property
    def parameters(self):
        return [*self.module.c_fc.parameters(), *self.module.c_proj.parameters()]

    def invalidate(self):
        self.module.invalidate_caches()

    def move(self, which):
        module = (self.module.c_fc, self.module.c_proj)[which]
        moved = torch.nn.Parameter(module.weight.detach().flip(1).clone())
        for _ in range(module.weight._version):  # so that the place alone tells them apart
            torch.autograd.graph.increment_version(moved)
        self.before, module.weight = module.weight, moved  # whose memory lives on


class OfCopies(OfNode):
    """Copies whose parameters were freed."""

    def __init__(self):
        super().__init__()
        with OURS.activate():
            self.copies = self.layer.node.make_copies()

    def forward(self, config=OURS):
        free(*self.weights)
        with config.activate():
            return numpy(self.layer.call(copies=self.copies).out)


SUBJECTS = {NODE: OfNode, PASSED: OfPassed, COPIES: OfCopies}


def write(place, subject):
    with torch.no_grad():
        subject.weights[place].mul_(-1.5)


def optimize(parameters):
    """A fused optimizer moves no version counter."""
    for each in parameters:
        each.grad = torch.ones_like(each)
    torch.optim.AdamW(parameters, lr=0.1, fused=True).step()


def another(subject):
    optimize([torch.nn.Parameter(torch.zeros(1))])


# Of each row what happens, by name; the configuration of the next call, where that is the event.
EVENTS = {
    "`node.step()`": {"step": lambda subject: subject.step()},
    "`invalidate_caches()`": {"call": lambda subject: subject.invalidate()},
    "a parameter lies in other memory, in another layout or dtype": {
        "up": lambda subject: subject.move(0),
        "down": lambda subject: subject.move(1),
    },
    "PyTorch: a version counter moved": {"up": partial(write, 0), "down": partial(write, -1)},
    "PyTorch: a `torch.optim.Optimizer` stepped, any in the process": {
        "own": lambda subject: optimize(subject.weights),
        "another's": another,
    },
    "other settings, another engine": OTHERS,
}
# What is passed is kept for engines that look, and copies are kept whatever the engine does.
KINDS = {
    NODE: (Counting, Following, Blind),
    PASSED: (Following, Blind),
    COPIES: (Counting,),
}
CELLS = [
    pytest.param(row, event, column, cell, kind, id=f"{column[:5]}-{row}-{event}-{kind.name}")
    for row, cells in EVENT_ROWS.items()
    for column, cell in zip(COLUMNS, cells, strict=True)
    for event in EVENTS.get(row, [""])
    for kind in KINDS[column]
    if cell != "–" and not (IS_PADDLE and (column == PASSED or row.startswith("PyTorch")))
]


def test_no_row_is_unknown():
    assert list(EVENT_ROWS) == list(EVENTS)
    assert list(QUIET_ROWS) == list(QUIET)


@pytest.mark.usefixtures("weights_on_a_gpu")
@pytest.mark.parametrize(("row", "event", "column", "cell", "kind"), CELLS)
def test_an_event(row, event, column, cell, kind, engines):
    happens = EVENTS[row][event]
    of_call = happens if isinstance(happens, SonicMoEConfig) else OURS
    engine, named = engines(kind)
    subject = SUBJECTS[column]()
    if column == COPIES:
        check_copies(subject, event, happens, of_call, cell)
        return
    assert cell == "made again"
    for _ in range(3):
        subject.forward()
    assert engine.events == ["made"] and not named.events
    if happens is not of_call:
        happens(subject)
    out = subject.forward(of_call)
    subject.forward(of_call)
    assert len(engine.events + named.events) == 2, "made again, and once"
    if of_call is OURS:
        assert np.array_equal(out, subject.fresh()), "stale"


def check_copies(copies, event, happens, of_call, cell):
    if of_call is not OURS:
        assert cell == "refused"
        with pytest.raises(ConfigError, match="copies that were made with the configuration"):
            copies.forward(of_call)
        return
    happens(copies)
    if event == "another's":
        assert cell == "stale if it holds one of the parameters"
        copies.forward()
        return
    assert cell.startswith("stale")
    with pytest.raises(StaleWeightsError, match="are stale"):
        copies.forward()


# ---- what else the guard of a node's layer names ----


def other_grad_mode(subject, monkeypatch):
    with torch.no_grad():
        subject.forward()


def other_dtype(subject, monkeypatch):
    problem = subject.layer.problem
    with OURS.activate():
        x = tensor(problem.x, torch.float32)
        routed = tensor(problem.indices, torch.int64), tensor(problem.probs, torch.float32)
        subject.layer.node(x, None, *routed)


def other_node(subject, monkeypatch):
    """Of the same layer, with settings of its own."""
    node = subject.layer.node
    subject.layer.node = type(node).over(node._state, node.activation_type, config=OURS)
    subject.forward()


def other_capture(subject, monkeypatch):
    monkeypatch.setattr(bound, "is_capturing", lambda _: True)
    subject.forward()


@pytest.mark.usefixtures("weights_on_a_gpu")
@pytest.mark.parametrize("change", [other_grad_mode, other_dtype, other_node, other_capture])
def test_a_call_of_another_kind_binds_the_layer_anew(change, engines, monkeypatch):
    engines(Counting)
    subject, reads = OfNode(), []
    subject.forward()
    read = PreparedWeights.read
    monkeypatch.setattr(
        PreparedWeights, "read", lambda *given, **how: reads.append(1) or read(*given, **how)
    )
    for _ in range(2):
        subject.forward()
    assert not reads
    change(subject, monkeypatch)
    assert reads


@pytest.mark.usefixtures("weights_on_a_gpu")
def test_settings_that_change_no_weight_share_them_until_they_are_dropped(engines):
    engine, _ = engines(Counting)
    subject = OfNode()
    for others in ({}, {"save_z": "e4m3", "recompute_z": True}, {"fp8_wgrad": False}):
        subject.forward(SonicMoEConfig(engine="auto", fp8_mode="perf", **others))
    assert engine.events == ["made"]
    bound_layer = subject.layer.node._state.bound
    bound_layer.drop()
    assert bound_layer._prepared.weights is None
    subject.forward()
    assert engine.events == ["made", "made"]


@pytest.mark.skipif(IS_PADDLE, reason="it prepares again unless writes are announced")
@pytest.mark.usefixtures("weights_on_a_gpu")
@pytest.mark.parametrize("kind", [Counting, Blind])
def test_other_memory_at_the_same_address_is_another_place(kind, engines):
    """An allocator hands it out again where the first one was freed."""
    engine, _ = engines(kind)
    subject = OfNode()
    weight = subject.weights[-1]
    held = bytearray(weight.nbytes + 64)

    def put(values):
        # Of its own, like that of an allocator, over the same bytes.
        memory = torch.frombuffer(held, dtype=values.dtype, count=values.numel())
        weight.data = memory.view(values.shape).copy_(values)

    values = weight.detach().clone()
    put(values)
    for factor in (-1.5, 0.5):
        for _ in range(3):
            before = subject.forward()
        made, version, address = len(engine.events), weight._version, weight.data_ptr()
        weight.data = torch.empty(0, dtype=weight.dtype)
        put(factor * values)
        assert (weight._version, weight.data_ptr()) == (version, address)
        found = subject.forward()
        assert len(engine.events) == made + 1 and not np.array_equal(found, before)
        assert np.array_equal(found, OfNode.fresh(copy.copy(subject)))


# ---- a forward without an event ----


def of_every_face():
    return [OfNode] if IS_PADDLE else [OfNode, OfPassed]


def looked_at(engines, request):
    """The engine is asked at every forward, and finds what no event announced."""
    for face in of_every_face():
        engine, _ = engines(Following)
        subject = face()
        subject.forward()
        for weight in subject.weights:
            before = numpy(weight).astype(np.float32)
            assign_unseen(weight, -1.5 * before)
            subject.forward()
        found = ["made"] + ["found"] * len(subject.weights)
        assert engine.events == found and np.array_equal(subject.forward(), subject.fresh())


def assign_unseen(weight, values):
    """Past every version counter."""
    made = parameter(values, torch.bfloat16)
    if IS_PADDLE:
        with torch.no_grad():
            weight.copy_(made)
    else:
        weight.data.copy_(made.data)


def made_every_time(face, engines, config=OURS):
    engine, _ = engines(Counting)
    subject = face()
    for _ in range(3):
        subject.forward(config)
    assert engine.events == 3 * ["made"]
    for weight in subject.parameters:
        assign_unseen(weight, -1.5 * numpy(weight).astype(np.float32) + 0.5)
    assert np.array_equal(subject.forward(config), subject.fresh(config))


def on_a_host(engines, request):
    for arrangement, config in itertools.product(ARRANGEMENTS, (OURS, UNQUANTISED)):
        made_every_time(partial(OfNode, arrangement), engines, config)


def on_a_gpu(engines, request):
    request.getfixturevalue("weights_on_a_gpu")
    engine, _ = engines(Counting)
    subject = OfNode()
    for _ in range(3):
        subject.forward()
    assert engine.events == ["made"]


def in_paddle(engines, request):
    request.getfixturevalue("weights_on_a_gpu")
    engine, _ = engines(Counting)
    subject = OfNode()
    subject.layer.node = subject.layer.another_node()  # to which nobody has announced anything
    for _ in range(2):
        subject.forward()
    assert engine.events == 2 * ["made"]
    subject.invalidate()
    for _ in range(3):
        subject.forward()
    assert engine.events == 3 * ["made"]
    with torch.no_grad():
        for _ in range(2):
            subject.forward()
    assert engine.events == 5 * ["made"]


def of_passed(engines, request):
    request.getfixturevalue("weights_on_a_gpu")
    made_every_time(OfPassed, engines)


QUIET = {
    "`hopper`, `mxfp8`": (looked_at, True),
    "any other, on a host": (on_a_host, True),
    "any other, on a GPU, node under PyTorch": (on_a_gpu, not IS_PADDLE),
    "any other, on a GPU, node under Paddle": (in_paddle, IS_PADDLE),
    "any other, functional API": (of_passed, not IS_PADDLE),
}


@pytest.mark.parametrize("row", [row for row, (_, here) in QUIET.items() if here])
def test_no_event(row, engines, request):
    QUIET[row][0](engines, request)
