"""What passes take: two exchanged tensors are an error that names both, whichever two they are, and
sizes that contradict each other are named with the field that says so.
"""

from __future__ import annotations

import inspect
import itertools

import pytest
from framework import torch
from kernels.needs import NVCC

from sonicmoe.bench.cost_model import TILE_ROWS
from sonicmoe.engine.capabilities import HOPPER
from sonicmoe.engine.hopper_passes import Passes
from sonicmoe.engine.hopper_program import KERNELS, NUMBERS
from sonicmoe.errors import ShapeError
from sonicmoe.kernels.host import program_source
from sonicmoe.quant.format import BlockScaledTensor, Orientation
from sonicmoe.quant.gpu import W1_BLOCK
from sonicmoe.quant.recipes import RECIPES, iso
from sonicmoe.routing.metadata import ROW_ALIGNMENT

pytestmark = NVCC
# No two of these are equal, nor is one a block count of another but for ALIKE.
T, K, E, H, I, R = 70, 3, 5, 272, 448, 1152
UP, DOWN = 24, 40  # columns of adapters
DGATED_WITH_DX = "dgated and dgrad"
DW1, DW2 = "wgrad of dw1", "wgrad of dw2"
PASSES = ("forward", "dgated", "dgrad", DGATED_WITH_DX, "wgrad", DW1, DW2, "adapters")


def blocks(n, size=128):
    return -(-n // size)


def codes(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


def scales(*shape):
    return torch.zeros(shape, dtype=torch.float32)


def tokens(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


WEIGHTS = {
    "w1": lambda: codes(E, 2 * I, H), "w1_scale": lambda: scales(E, blocks(2 * I, 256), blocks(H)),
    "w2": lambda: codes(E, H, I), "w2_scale": lambda: scales(E, blocks(H), blocks(I)),
    "w1_dgrad": lambda: codes(E, H, 2 * I), "w1_dgrad_scale": lambda: scales(E, blocks(H), blocks(2 * I, 256)),
    "w2_dgrad": lambda: codes(E, I, H), "w2_dgrad_scale": lambda: scales(E, blocks(I), blocks(H)),
    "b1": lambda: scales(E, 2 * I), "b2": lambda: scales(E, H),
    "up_a": lambda: tokens(E, UP, H), "up_b": lambda: tokens(E, 2 * I, UP),
    "down_a": lambda: tokens(E, DOWN, I), "down_b": lambda: tokens(E, H, DOWN),
    "up_a_t": lambda: tokens(E, H, UP), "up_b_t": lambda: tokens(E, UP, 2 * I),
    "down_a_t": lambda: tokens(E, I, DOWN), "down_b_t": lambda: tokens(E, DOWN, H),
}  # fmt: skip
# 256 rows of w1 are 128 of gate and 128 of up, so that these scales have one shape for all sizes:
# only their names tell them apart.
ALIKE_WEIGHTS = [("w1_scale", "w2_dgrad_scale"), ("w2_scale", "w1_dgrad_scale")]
# The ranks of adapters may be any.
ALIKE_WEIGHTS += [("up_a", "down_b_t"), ("down_b", "up_a_t")]
ROUTING = {
    "expert_counts": lambda: torch.zeros((E,), dtype=torch.int32),
    "padded_offsets": lambda: torch.zeros((E + 1,), dtype=torch.int64),
    "row_token": lambda: torch.zeros((R,), dtype=torch.int32),
    "slot_row": lambda: torch.zeros((T, K), dtype=torch.int64),
    "row_prob": lambda: scales(R),
}


def tensors(fields):
    return {name: make() for name, make in fields.items()}


@pytest.fixture(scope="module")
def native(artefacts):
    return program_source("sm_90a").load(artefacts)


class Launches:
    """Stands for all kernels, and counts what is launched."""

    count = 0

    def __call__(self, *_):
        self.count += 1


@pytest.fixture
def launches():
    return Launches()


@pytest.fixture
def passes(native, launches):
    return Passes(native, ((), ()), dict.fromkeys(KERNELS, launches))


def bound(passes, given):
    return passes.bind(**given, **dict.fromkeys(NUMBERS, 1))


def routed(given):
    return None, *given.values(), T, K, E, R, I


@pytest.fixture
def head(passes):
    """The handle and whatever else a pass takes besides tensors."""
    weights, routing = bound(passes, tensors(WEIGHTS)), routed(tensors(ROUTING))
    return {"weights": weights, "routing": routing, "stream": 0, "multiprocessors": 0}


def pass_of(passes, name):
    """The pass that a member of `PASSES` is a call of."""
    return getattr(passes, name.split()[0])


def fields_of(passes, head, name):
    """Tensors of a pass that fit, without those that it takes instead of others."""
    ends = passes.routed(Metadata(), H, I).ends
    size = {"dz_scratch": ends["dz_scratch", "no_scales"], "scratch": ends["scratch", "y2"]}
    for buffer in ("dz", "y1s", "dout_scratch", "dx_scratch", "wgrad_scratch", "dw_scratch"):
        size[buffer] = max(end for (name, _), end in ends.items() if name == buffer)
    made = {
        "x": tokens(T, H), "dout": tokens(T, H), "out": tokens(T, H), "dx": tokens(T, H),
        "z": codes(R, 2 * I), "z_scale": scales(R, blocks(2 * I)), "z_rows": None, "dprobs": scales(T, K),
        "dz_rows": None, "y1s_rows": None,
        "dw1": "somewhere", "dw2": "somewhere",
        "db1": scales(E, 2 * I), "db2": scales(E, H),
        "bias_parts": scales(R // ROW_ALIGNMENT, 2 * I),
        "x_codes": None, "x_scale": None, "dout_codes": None, "dout_scale": None,
        **{buffer: codes(bytes_) for buffer, bytes_ in size.items()},
        "up_u": tokens(R, UP), "up_v": tokens(R, UP), "down_u": tokens(R, DOWN), "down_v": tokens(R, DOWN),
        "d_up_a": scales(E, UP, H), "d_up_b": scales(E, 2 * I, UP),
        "d_down_a": scales(E, DOWN, I), "d_down_b": scales(E, H, DOWN), "parts": scales(1),
    }  # fmt: skip
    if name == "dgated":
        made["dx"] = None
    if name in (DGATED_WITH_DX, "wgrad"):
        made |= {
            "dz_scratch": codes(
                max(ends["dz_scratch", "dout_fp8_scale"], ends["dz_scratch", "dx_rows"])
            ),
            "dout_scratch": None,
        }
    if name == "wgrad":
        made["dw_scratch"] = None
    elif name in (DW1, DW2):
        other = ("dout", "y1s", "dw2") if name == DW1 else ("x", "dz", "dw1")
        made |= dict.fromkeys((*other, "wgrad_scratch"))
    wanted = inspect.signature(pass_of(passes, name)).parameters
    return {field: value for field, value in (made | head).items() if field in wanted}


class Metadata:
    """What `Passes.routed` reads of a routing."""

    sizes, memory = (T, K, E, 128, R), None
    held = (torch.zeros(R),)

    @staticmethod
    def tensors():
        return tuple(make() for make in ROUTING.values())


def pairs(fields):
    return list(itertools.combinations(fields, 2))


def exchanged(given, one, other):
    return given | {one: given[other], other: given[one]}


def test_exchanged_weights_are_named(passes):
    given = tensors(WEIGHTS)
    for one, other in {*pairs(WEIGHTS)} - {*ALIKE_WEIGHTS}:
        words = rf"^weights: .*\({one} and {other} are exchanged\)$"
        with pytest.raises(ValueError, match=words):
            bound(passes, exchanged(given, one, other))


def test_exchanged_tensors_of_a_routing_are_named(passes, head):
    given, fitting = tensors(ROUTING), fields_of(passes, head, "forward")
    for one, other in pairs(ROUTING):
        words = rf"^forward: .*\({one} and {other} are exchanged\)$"
        with pytest.raises(ValueError, match=words):
            passes.forward(**fitting | {"routing": routed(exchanged(given, one, other))})


# Tensors of one dtype and shape: nothing but their names tells them apart.
ALIKE = {
    "forward": {("x", "out")}, "wgrad": {("x", "dout")},
    # scratch may be larger than needed
    "dgated": set(), "dgrad": set(), DGATED_WITH_DX: {("dout", "dx")}, DW1: set(), DW2: set(), "adapters": set(),
}  # fmt: skip
BOTH_WAYS = "up_u", "up_v", "down_u", "down_v"
NARROW = {
    "forward": ("up_u", "down_u"), "dgated": BOTH_WAYS, DGATED_WITH_DX: BOTH_WAYS, "adapters": ("up_v", "down_v"),
}  # fmt: skip
for name, narrow in NARROW.items():
    ALIKE[name] |= set(pairs(narrow))


@pytest.mark.parametrize("name", PASSES)
def test_exchanged_tensors_of_a_pass_are_named(passes, head, launches, name):
    """Every pair; a pair that is alike must be all that is not found."""
    fitting, found = fields_of(passes, head, name), set()
    own = [field for field, value in fitting.items() if isinstance(value, torch.Tensor)]
    for one, other in pairs(own):
        try:
            pass_of(passes, name)(**exchanged(fitting, one, other))
        except ValueError as error:
            assert str(error).startswith(f"{name.split()[0]}: ")
            assert {one, other} <= set(str(error).replace("(", " ").split()), (one, other)
            assert "are exchanged)" in str(error)
        else:
            found.add((one, other))
    assert {frozenset(pair) for pair in found} == {frozenset(pair) for pair in ALIKE[name]}


@pytest.mark.parametrize("name", PASSES)
def test_tensors_that_fit_reach_the_kernels_by_their_names(passes, head, launches, name):
    """So none can come in the place of another, and none can be forgotten."""
    given = fields_of(passes, head, name)
    pass_of(passes, name)(**given)
    assert launches.count
    with pytest.raises(TypeError):
        pass_of(passes, name)(*given.values())
    for missing in given:
        with pytest.raises(TypeError, match=missing):
            pass_of(passes, name)(**{field: v for field, v in given.items() if field != missing})


@pytest.mark.parametrize("name", ["forward", "dgated", "dgrad"])
def test_weights_are_their_handle(passes, head, name):
    given = fields_of(passes, head, name) | {"weights": torch.zeros(2)}
    with pytest.raises(TypeError, match=r"sonicmoe\.Bound"):
        pass_of(passes, name)(**given)
    with pytest.raises(ValueError, match=f"^{name}: weights are None"):
        pass_of(passes, name)(**given | {"weights": None})


def test_weights_of_another_layer_contradict_its_routing(passes, head):
    other = {name: torch.cat([value, value]) for name, value in tensors(WEIGHTS).items()}
    given = fields_of(passes, head, "forward") | {"weights": bound(passes, other)}
    words = "weights: w1 says E = 10, but num_experts says E = 5"
    with pytest.raises(ValueError, match=words):
        passes.forward(**given)


@pytest.mark.parametrize(
    ("name", "field", "value", "words"),
    [
        ("forward", "x", tokens(T, H + 16), r"x is bfloat16 \[70, 288\]; needed: .* \[T, H\], and w1 says H = 272"),
        ("forward", "z", codes(R - 128, 2 * I), r"z is uint8 \[1024, 896\]; needed: uint8 \[R, 2 I\], and num_rows says R = 1152"),
        ("forward", "out", scales(T, H), r"out is float32 \[70, 272\], but other tokens are bfloat16"),
        ("forward", "x", tokens(H, T).T, "x is not contiguous"),
        ("forward", "z_scale", None, "forward: needed: z and z_scale, or z_rows"),
        ("forward", "z_rows", tokens(R, 2 * I), "forward: needed: z and z_scale, or z_rows"),
        ("dgated", "z", None, "dgated: needed: z and z_scale, or z_rows"),
        ("dgated", "dout_scratch", None, "dz_scratch has .* bytes; needed: "),
        ("dgated", "y1s", None, "dz and y1s, or dz_rows and y1s_rows"),
        ("forward", "scratch", None, r"forward: scratch is None; needed: uint8 \[any\]"),
        ("dgated", "dprobs", None, r"dgated: dprobs is None; needed: float32 \[T, K\]"),
        ("forward", "scratch", codes(100), "scratch has 100 bytes; needed: "),
        ("dgated", "dprobs", scales(T, K + 1), r"dprobs is .*; needed: float32 \[T, K\], and topk says K = 3"),
        ("dgated", "dz_scratch", codes(100), "dz_scratch has 100 bytes; needed: "),
        ("wgrad", "y1s", None, r"wgrad: y1s is None; needed: uint8 \[any\]"),
        (DW1, "x", None, "wgrad: needed: dw1 with either x, or x_codes and x_scale; or none of them"),
        ("wgrad", "dw2", None, "wgrad: needed: dw2 with either dout, or dout_codes and dout_scale; or none"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_named(passes, head, launches, name, field, value, words):
    given = fields_of(passes, head, name) | {field: value}
    with pytest.raises(ValueError, match=words):
        pass_of(passes, name)(**given)
    assert not launches.count


def test_quantised_tokens_and_values_exclude_each_other(passes, head):
    given = {"x": tokens(T, H), "x_codes": codes(T, H), "x_scale": scales(T, blocks(H))}
    fitting = fields_of(passes, head, "forward") | dict.fromkeys(given)
    for names in ("", "x x_codes", "x x_scale", "x_codes", "x_scale", "x x_codes x_scale"):
        chosen = {name: given[name] for name in names.split()}
        with pytest.raises(ValueError, match="forward: needed: either x, or x_codes and x_scale"):
            passes.forward(**fitting | chosen)


@pytest.mark.parametrize("name", ["w1", "w2_dgrad"])
def test_weights_in_the_other_order_are_named(passes, name):
    """Where H = 2 I both orders have one shape."""
    wrong = Orientation.COLUMNS if name == "w1" else Orientation.ROWS
    square = BlockScaledTensor.empty((E, 256, 256), iso(128), "cpu", orientation=wrong)
    with pytest.raises(ShapeError, match=f"{name} is stored by {wrong.value}"):
        passes.weights_of({name: square}, {})


def test_a_pass_names_what_its_weights_lack(passes, head):
    forward_only = {
        name: (v if "dgrad" not in name else None) for name, v in tensors(WEIGHTS).items()
    }
    given = fields_of(passes, head, "dgrad") | {"weights": bound(passes, forward_only)}
    with pytest.raises(ValueError, match=r"w1_dgrad(_scale)? is None, and this pass needs it"):
        passes.dgrad(**given)


def test_numbers_are_those_that_python_computes_with(native):
    built = {str(name): int(value) for name, value in native.numbers().items()}
    recipe = RECIPES[HOPPER.recipes[0]]
    assert built["row_alignment"] == ROW_ALIGNMENT == recipe.row_alignment == TILE_ROWS
    blocks = (recipe.x, recipe.w1, recipe.w2, recipe.z)
    assert {recipe.w2.rows, *(block.cols for block in blocks)} == {built["scale_block"]}
    of_gate_and_up = {recipe.w1.rows, recipe.dz.cols, recipe.wgrad_dz.cols}
    assert of_gate_and_up == {built["gate_up_block"]} == {W1_BLOCK.rows}
