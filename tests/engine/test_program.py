"""Programs over kernels that note what they get: which launches run, on what, and what watchers see."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from framework import IS_PADDLE, torch
from kernels.needs import HOST_MODULE

from sonicmoe.engine.program import (
    Buffer,
    Format,
    Program,
    Programs,
    Rule,
    Vocabulary,
    stages_of,
    table_of,
)
from sonicmoe.interop import data_ptr
from sonicmoe.kernels.host import program_source
from sonicmoe.observe import listening, ranges_on
from sonicmoe.quant.format import BlockScaledTensor
from sonicmoe.quant.recipes import rows

pytestmark = HOST_MODULE
R, H = 3, 200
WORDS, FORMATS = {"CODES": "x_codes|found x_scale|found_scale"}, {"by_row": Format(rows(128))}
LIST = """
quantise when x
    quantise x found found_scale
    show codes CODES by_row
twice
    double CODES sums ?x true
        factor
    show sums sums
    add sums out more? weight when out
    late sums|none? over when more out
    show over over
"""
VOCABULARY = Vocabulary(
    tensors=table_of("""
        num_rows size R | x tokens R H | x_codes codes R H | x_scale f32 R H/128
        found codes R H | found_scale f32 R H/128 | sums f32 H R | over bf16 R 2H
        out f32 R H | more f32 * H strided | weight f32 H *
    """),
    memory={"memory": Buffer(64, ["found found_scale", "sums", "over"])},
    bound=("weight", "factor"),
    head=("num_rows",),
)
RULES = [Rule("either x, or x_codes and x_scale", ("x", "x_codes x_scale"))]


@pytest.fixture(scope="module")
def native(artefacts):
    return program_source("sm_90a").load(artefacts)


class Layer:
    """A program, what its kernels got, and arguments that fit."""

    def __init__(self, native, **others):
        self.got = []

        def kernel(name):
            return lambda *given: self.got.append((name, given))

        kernels = {name: kernel(name) for name in ("quantise", "double", "add", "late")} | others
        self.of = Programs(native, VOCABULARY, kernels)
        self.program = Program(self.of, "pass", stages_of(LIST, WORDS, FORMATS), "memory", RULES)
        ends = self.of.part_ends("RH")(R, H)
        self.ends = {part: end for (_, part), end in ends.items()}
        self.memory = torch.zeros((max(self.ends.values()),), dtype=torch.uint8)
        self.weight = torch.zeros((H, 5), dtype=torch.float32)
        self.given = {
            "weights": self.of.bind(weight=self.weight, factor=3), "routing": (R,), "memory": self.memory,
            "x": torch.zeros((R, H), dtype=torch.bfloat16), "x_codes": None, "x_scale": None,
            "out": torch.zeros((R, H), dtype=torch.float32), "more": None,
        }  # fmt: skip

    def call(self, **changes):
        self.got.clear()
        self.program.call(**self.given | changes)
        return [name for name, _ in self.got]


@pytest.fixture
def layer(native):
    return Layer(native)


def codes():
    scale = torch.ones((R, 2), dtype=torch.float32)
    return {"x": None, "x_codes": torch.zeros((R, H), dtype=torch.uint8), "x_scale": scale}


def watched():
    return listening(lambda _, value: value)


@pytest.mark.parametrize("watching", [nullcontext, watched, lambda: ranges_on(nullcontext)])
def test_a_launch_runs_where_all_its_names_are_there(layer, watching):
    with watching():
        assert layer.call() == ["quantise", "double", "add"]
        assert layer.call(**codes()) == ["double", "add"]
        assert layer.call(out=None) == ["quantise", "double"]
        more = torch.zeros((H, 4), dtype=torch.float32).T
        assert layer.call(more=more) == ["quantise", "double", "add", "late"]
        assert layer.call(more=more, out=None) == ["quantise", "double"]


def test_watchers_see_stages_and_the_matrices_where_they_lie(layer):
    names, seen = [], {}

    def listener(name, value):
        seen[name] = value
        return value

    with ranges_on(lambda name: names.append(name) or nullcontext()), listening(listener):
        layer.call()
    assert names == ["sonicmoe.quantise", "sonicmoe.twice"] and list(seen) == ["codes", "sums"]
    assert isinstance(seen["codes"], BlockScaledTensor) and seen["codes"].block == rows(128)
    assert (
        data_ptr(seen["sums"]) - data_ptr(layer.memory) == -(-layer.ends["found_scale"] // 64) * 64
    )
    assert list(seen["sums"].shape) == [H, R] and seen["sums"].dtype == torch.float32


def test_what_a_listener_replaces_is_written_where_later_launches_read(layer):
    def plant(name, value):
        return value + 1.0 if name == "sums" else value

    with listening(plant):
        layer.call()
    begin, end = -(-layer.ends["found_scale"] // 64) * 64, layer.ends["sums"]
    written = layer.memory.tolist()
    assert any(written[begin:end]) and not any(written[:begin]) and not any(written[end:])


def test_errors_come_before_the_first_launch(layer, native):
    wide = torch.zeros((R, H + 1), dtype=torch.float32)
    wrong = {
        "pass: needed: either x, or x_codes and x_scale": codes() | {"x": layer.given["x"]},
        r"pass: out is float32 \[3, 201\]; needed: float32 \[R, H\], and weight says H = 200": {"out": wide},
        "pass: memory is None; needed: uint8": {"memory": None},
        rf"pass: memory has {layer.ends['sums'] - 1} bytes; needed: {layer.ends['sums']} or more": {
            "memory": torch.zeros((layer.ends["sums"] - 1,), dtype=torch.uint8)
        },
        "pass: out is not contiguous": {"out": torch.zeros((H, R), dtype=torch.float32).T},
        "weights: weight is None, and this pass needs it": {"weights": layer.of.bind(weight=None, factor=3)},
    }  # fmt: skip
    if IS_PADDLE:  # whose transposed tensors are contiguous
        wrong.pop("pass: out is not contiguous")
    for words, changes in wrong.items():
        with pytest.raises(ValueError, match=words):
            layer.call(**changes)
        assert not layer.got, words
    with pytest.raises(TypeError, match="pass: out is no tensor; needed: float32"):
        layer.call(out="out")
    without = Layer(native, late=None)
    assert without.call() == ["quantise", "double", "add"], "nobody asks for it"
    with pytest.raises(Exception, match="there is no kernel late"):
        without.call(more=without.given["out"])
