"""Every public object in every state of its life: pickled, saved, copied, and of use afterwards; or one
sentence says why not.
"""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
from engine.fp8_arrivals import quantised
from engine.moe_golden import make_problem
from findings import found
from framework import IS_PADDLE, numpy, tensor, torch
from node.node_harness import FP8, FULL, Layer

from sonicmoe import SonicMoEConfig
from sonicmoe.engine.capabilities import RECORDS
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.ep import Dispatcher, LocalDispatcher
from sonicmoe.ep.collective import CollectiveTransport
from sonicmoe.ep.fixed_size import FixedSizeTransport
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.errors import OutOfMemoryError
from sonicmoe.fleet.configuration import FP8Config
from sonicmoe.frameworks import FrameworkMissingError
from sonicmoe.out_of_memory import raise_with_advice

PROBLEM = make_problem(hidden=32, intermediate=24, topk=2)


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"pickle": pickled, "deepcopy": copy.deepcopy}
if not IS_PADDLE:
    WAYS["torch.save"] = saved
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


class Subject:
    """A node or module and its arguments; it computes its states over two steps, each ended by `step`."""

    def __init__(self, held, step, *arguments, **options):
        self.held, self.step = held, step
        self.arguments, self.options = arguments, options

    def call(self, held):
        out = held(*self.arguments, **self.options)
        return out[0] if isinstance(out, tuple) else out

    def states(self):
        for number in (1, 2):
            yield number, "begun"
            with torch.no_grad():
                self.call(self.held)
            yield number, "after inference"
            out = self.call(self.held)
            yield number, "after a forward"
            out.sum().backward()
            yield number, "after a backward"
            self.step(self.held)

    def run(self, held):
        out = self.call(held)
        out.sum().backward()
        self.step(held)
        return numpy(out)


def node(arrangement, config, main_grad, **options):
    layer = Layer(PROBLEM, arrangement=arrangement, config=config, main_grad=main_grad, **options)
    return Subject(layer.node, SonicMoEMlpNode.step, *layer.call().arguments)


def prequantised():
    subject = node("per_expert", FP8, None)
    subject.held.prequantize_weights()
    return subject


def descend(module):
    torch.optim.SGD(module.parameters(), 1e-3).step()


def moe(**options):
    from sonicmoe import MoE

    return Subject(MoE(4, 2, 32, 24), descend, torch.from_numpy(PROBLEM.x).float(), **options)


def hub_experts(implementation):
    pytest.importorskip("transformers")
    from integrations.hf_models import FAMILIES, build

    from sonicmoe.integrations.transformers import register

    register()
    model = build(FAMILIES["qwen3-moe"](1), implementation)
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(7, 64)
    return Subject(experts, descend, x, torch.randint(0, 6, (7, 2)), torch.rand(7, 2))


SUBJECTS = {
    "node": lambda: node("per_expert", FP8, None),
    "node, prequantised": prequantised,
    "node, fused": lambda: node("fused", FULL, 0.0),
    "node, through autograd": lambda: node("native", SonicMoEConfig(fp8_mode="mem"), "absent"),
    "node, step": lambda: node("fused", FP8, 0.0, flush="step"),
}
if not IS_PADDLE:
    SUBJECTS |= {
        "MoE": moe,
        "MoE, FP8": lambda: moe(use_fp8=True),
        "transformers": lambda: hub_experts("sonicmoe"),
        "transformers, FP8": lambda: hub_experts("sonicmoe_fp8"),
    }


@pytest.mark.parametrize("name", SUBJECTS)
def test_what_computes_does_so_in_every_state(name):
    subject = SUBJECTS[name]()
    copies = [
        (step, state, way, make(subject.held))
        for step, state in subject.states()
        for way, make in WAYS.items()
    ]
    expected = {}
    for step, state, way, other in copies:
        out = subject.run(other)
        wanted = expected.setdefault(step, out)  # a module has other weights in the second step
        np.testing.assert_array_equal(out, wanted, err_msg=f"{step} {state} {way}")


def fp8_config():
    made = FP8Config()
    made.fp8_wgrad = False
    made.node_config()
    return made


def out_of_memory():
    try:
        raise_with_advice(MemoryError("no memory"), "forward", None)
    except OutOfMemoryError as error:
        return error


# What says itself how it is pickled; others are plain dataclasses.
VALUES = {
    "SonicMoEConfig, resolved": lambda: SonicMoEConfig(fp8_mode="perf").resolve(),
    "FP8Config": fp8_config,
    "record": lambda: RECORDS[next(iter(RECORDS))],
    "BlockScaledTensor": lambda: quantised(make_problem(hidden=256).x),
    "NonFiniteError": lambda: found(Layer(PROBLEM.but(x=0 * PROBLEM.x + np.nan)).call),
    "OutOfMemoryError": out_of_memory,
    "FrameworkMissingError": lambda: FrameworkMissingError("none", "install it"),
}


@each_way
@pytest.mark.parametrize("name", VALUES)
def test_what_is_a_value_stays_one(name, way):
    value = VALUES[name]()
    other = way(value)
    assert type(other) is type(value) and str(other) == str(value)


@each_way
def test_an_engine_is_found_again(way):
    engine = ReferenceEngine()
    assert engine.record.biases
    assert way(engine).record is engine.record


class Group:
    """What no file can hold, as a process group."""

    world_size, rank, name = 1, 0, "a group"

    def __reduce__(self):
        raise TypeError("cannot pickle 'ProcessGroup'")


@pytest.mark.parametrize(
    "make",
    [lambda group: CollectiveTransport(4, group), lambda group: FixedSizeTransport(4, group, 40)],
    ids=["collective", "fixed size"],
)
@each_way
def test_a_dispatcher_over_a_group_is_shared_or_says_why_not(make, way):
    dispatcher = Dispatcher(make(Group()))
    if way is not copy.deepcopy:
        words = r"the dispatcher over .* belongs to a group of processes"
        with pytest.raises(TypeError, match=words):
            way(dispatcher)
        return
    other = way(dispatcher)
    assert other is not dispatcher and other.transport is dispatcher.transport


@each_way
def test_a_dispatcher_of_one_rank_is_copied(way):
    other = way(LocalDispatcher(PROBLEM.num_experts, fp8=True))
    assert other.num_experts == PROBLEM.num_experts and other.fp8
    x, probs = tensor(PROBLEM.x, torch.float32), tensor(PROBLEM.probs, torch.float32)
    received = other.dispatch(x, tensor(PROBLEM.indices), probs, fp8=False)
    np.testing.assert_array_equal(numpy(other.combine(received.x, received.handle)), numpy(x))


@each_way
def test_copies_of_weights_are_nobodys_to_save(way):
    copies = Layer(PROBLEM, config=FP8).node.make_copies()
    with pytest.raises(TypeError, match="FP8 copies of weights belong to this process"):
        way(copies)
