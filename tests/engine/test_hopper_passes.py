"""The Hopper engine end to end without a GPU: its real host code, native passes included, over
kernels computed on the host.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import itertools
from collections import Counter
from dataclasses import replace

import pytest
from framework import IS_PADDLE, torch

if IS_PADDLE:
    pytest.skip("launch arguments are read through PyTorch", allow_module_level=True)

from engine import host_kernels
from engine.host_kernels import ACTIVATION_NAMES as NAMES
from engine.host_kernels import KERNELS, STEADY_KERNELS
from torch.multiprocessing.reductions import StorageWeakRef

from sonicmoe import interop
from sonicmoe.diagnostics.nonfinite import NonFiniteError
from sonicmoe.engine import hopper, hopper_layer, hopper_passes
from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.gradient_memory import WeightTarget
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.interface import EngineSettings, NativeBuffer
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.engine.targets import FreshTargets, ParameterTargets
from sonicmoe.enums import ActivationType, ZCode
from sonicmoe.errors import ConfigError
from sonicmoe.jit.toolchain import find_toolkit
from sonicmoe.kernels import aggregate_source, routing_metadata_source
from sonicmoe.kernels.cuda_quantize import quantize_source
from sonicmoe.kernels.cuda_wgrad import wgrad_operands_source
from sonicmoe.kernels.host import passes_source
from sonicmoe.kernels.sm90 import fp8_dgated_source, fp8_grouped_gemm_source, fp8_wgrad_source
from sonicmoe.layouts import WeightLayout
from sonicmoe.observe import listening, ranges_on
from sonicmoe.quant import format as quant_format
from sonicmoe.quant.format import BlockScaledTensor
from sonicmoe.quant.recipes import RECIPES, rows
from sonicmoe.quant.reference import dequantize, quantize
from sonicmoe.routing.build import build_routing

pytestmark = [
    pytest.mark.skipif(find_toolkit() is None, reason="needs nvcc"),
    pytest.mark.skipif(importlib.util.find_spec("tvm_ffi") is None, reason="needs apache-tvm-ffi"),
]
FP8, ROW128 = (EngineSettings(recipe=RECIPES[name]) for name in ("dx256", "row128-dx256"))
OURS, REFERENCE = HopperEngine(), ReferenceEngine()
T, H, I, E, K = 70, 272, 320, 4, 3
MODES = {
    "default": {},
    "recompute_z": {"recompute_z": True},
    "stagewise": {"frees_stagewise": True},
    "iso_weight": {"iso_weight": True},
    "z in bf16": {"save_z": ZCode.BF16},
    "z in bf16, recomputed": {"save_z": ZCode.BF16, "recompute_z": True},
    "everything": {"recompute_z": True, "frees_stagewise": True, "iso_weight": True},
}


REAL = {
    "quantize_rows": quantize_source,
    "gather_gated_gemm": fp8_grouped_gemm_source,
    "grouped_gemm": fp8_grouped_gemm_source,
    "aggregate_rows": aggregate_source,
    "gather_dgated_gemm": fp8_dgated_source,
    "sum_or_zero": routing_metadata_source,
    "gather_transpose_quantize": wgrad_operands_source,
    "gather_transpose_quantize_pair": wgrad_operands_source,
    "gather_transpose_requantize": wgrad_operands_source,
    "gather_row_scales": wgrad_operands_source,
    "gather_transpose_codes": wgrad_operands_source,
    "grouped_wgrad": fp8_wgrad_source,
    "grouped_wgrad_into": fp8_wgrad_source,
}


@pytest.fixture(scope="module")
def native(artefacts):
    return passes_source("sm_90a").load(artefacts)


@pytest.fixture(autouse=True)
def host_passes(native, monkeypatch):
    """Launches reach the host's kernels; every byte that nobody wrote is a NaN."""
    passes = hopper_passes.Passes(native, NAMES, KERNELS)
    columns = int(native.numbers()["dprob_columns"])
    monkeypatch.setattr(host_kernels, "DPROB_COLUMNS", columns)
    steady = hopper_passes.Passes(native, NAMES, STEADY_KERNELS)
    monkeypatch.setattr(
        hopper_layer, "passes_on", lambda *key: steady if key[4:] == (True,) else passes
    )
    empty = interop.empty

    def poisoned(*args):
        made = empty(*args)
        if made.numel():
            made.view(torch.uint8).fill_(0xFF)
        return made

    for module in (hopper, hopper_layer, hopper_passes, quant_format):
        monkeypatch.setattr(module, "empty", poisoned)


class Case:
    """bf16 operands of one layer; one expert without tokens, both sentinels, and more rows than are
    needed.
    """

    def __init__(self, tokens=T, *, spare_rows=128, seed=0, invalid=0.3):
        generator = torch.Generator().manual_seed(seed)

        def normal(*size, scale=1.0):
            return (torch.randn(size, generator=generator) * scale).to(torch.bfloat16)

        self.x, self.dout = normal(tokens, H), normal(tokens, H)
        self.w1, self.w2 = normal(E, 2 * I, H, scale=H**-0.5), normal(E, H, I, scale=I**-0.5)
        ids = torch.rand(tokens, E - 1, generator=generator).argsort(1)[:, :K]
        drop = torch.rand(tokens, K, generator=generator) < invalid
        sentinel = torch.where(torch.rand(tokens, K, generator=generator) < 0.5, -1, E)
        probs = torch.rand(tokens, K, generator=generator) + 0.05
        self.routing = with_spare_rows(
            build_routing(torch.where(drop, sentinel, ids), probs, E), spare_rows
        )

    def quantised(self, *names):
        """The same with x, or what is named, as its sender quantised it; tokens without a valid
        slot are NaN.
        """
        other = copy.copy(self)
        unused = torch.ones(len(self.x), dtype=torch.bool)
        unused[self.routing.row_token[self.routing.row_token >= 0].long()] = False
        for name in names or ("x",):
            q = quantize(getattr(self, name).float(), rows(128))
            q.bytes[unused], q.scale_inv[unused] = 0x7F, float("nan")
            setattr(other, name, q)
        return other

    def run(self, engine, settings, **options):
        weights = engine.prepare_weights(self.w1, self.w2, None, None, settings)
        sums = options.get("targets") or NativeBuffer.zeros(E, 2 * I, H, I, False, "cpu")
        out, saved = engine.forward(self.x, self.routing, weights, settings)
        dx, dprobs, pending = engine.backward_dx(self.dout, saved, weights)
        pending.shares_gpu = options.get("shares_gpu", False)
        engine.backward_dw(pending, sums)
        dw1, dw2 = sums.sums("dw1"), sums.sums("dw2")
        return {"out": out, "dx": dx, "dprobs": dprobs, "dw1": dw1, "dw2": dw2}


PER_EXPERT = WeightLayout(transposed=True, split_half=True)


def parameter_targets(layout, *, stacked=False, frozen=()):
    """fp32 memory of every expert in that layout; not of those of `frozen`."""
    shapes = (2 * I, H), (H, I)
    if layout.transposed:
        shapes = tuple(shape[::-1] for shape in shapes)
    if stacked:
        return ParameterTargets(
            *(WeightTarget.stacked(torch.zeros((E, *shape)), E, layout) for shape in shapes)
        )
    made = [[None if e in frozen else torch.zeros(s) for e in range(E)] for s in shapes]
    return ParameterTargets(*(WeightTarget.per_expert(tensors, layout) for tensors in made))


def with_spare_rows(routing, count):
    """As a builder leaves it that does not know the counts on the host: padding rows behind
    everybody's.
    """
    rows = routing.num_rows + count
    longer = {
        name: torch.cat(
            [getattr(routing, name), torch.full((count,), fill, dtype=getattr(routing, name).dtype)]
        )
        for name, fill in (("row_token", -1), ("row_prob", 0))
    }
    return replace(routing, num_rows=rows, **longer)


def assert_close(got, wanted, tolerance=2e-5):
    """Equal codes everywhere, so results differ by fp32 rounding and one of bf16."""
    for name, tensor in wanted.items():
        error, size = (got[name].float() - tensor.float()).norm(), tensor.float().norm()
        assert got[name].dtype == tensor.dtype and float(error) <= tolerance * max(
            float(size), 1e-30
        ), (
            name,
            float(error / size),
        )


@pytest.mark.parametrize(
    "activation",
    [ActivationType.SWIGLU, ActivationType.GEGLU, ActivationType.REGLU],
    ids=lambda a: a.value,
)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_the_reference_engines(mode, activation):
    case, settings = Case(), replace(FP8, activation=activation, **MODES[mode])
    assert_close(case.run(OURS, settings), case.run(REFERENCE, settings), 1e-3)


SIDES = pytest.mark.parametrize("sides", [("x",), ("dout",), ("x", "dout")], ids="+".join)


@SIDES
@pytest.mark.parametrize("mode", MODES)
def test_tokens_and_gradients_that_come_quantised(mode, sides):
    """The reference engine's step, and the bits of tokens that the engine quantises itself."""
    plain, settings = Case(seed=12), replace(FP8, **MODES[mode])
    case = plain.quantised(*sides)
    got, itself = case.run(OURS, settings), plain.run(OURS, replace(FP8, save_z=settings.save_z))
    assert_close(got, case.run(REFERENCE, settings), 1e-3)
    rounded_twice = {"x": "dw1", "dout": "dw2"}
    for name in itself:
        again = name in [rounded_twice[side] for side in sides]
        assert torch.equal(got[name], itself[name]) != again, name


@SIDES
def test_unquantised_weight_gradients_of_what_came_quantised(monkeypatch, sides):
    """The BF16 GEMMs, which a host has not, are handed values in bf16."""
    plain, settings, seen = Case(seed=12), replace(FP8, fp8_wgrad=False), []
    case = plain.quantised(*sides)
    monkeypatch.setattr(
        Bf16Engine, "backward_dw", lambda _, pending, __: seen.extend([pending.x, pending.dout])
    )
    case.run(OURS, settings)
    for name, found in zip(("x", "dout"), seen, strict=True):
        given = getattr(case, name)
        quantised = isinstance(given, BlockScaledTensor)
        values = dequantize(given).to(torch.bfloat16) if quantised else given
        assert torch.equal(found.view(torch.int16), values.view(torch.int16)), name


FOLDING_MODES = {name: MODES[name] for name in MODES if not MODES[name].get("iso_weight")}


class UnevenCase(Case):
    """Blocks of x, dout and the weights lie up to 2^20 apart; some tokens are far below others."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        generator = torch.Generator().manual_seed(99)
        for name in ("x", "dout"):
            value = getattr(self, name)
            octaves = torch.randint(-20, 1, (len(value), 3), generator=generator)
            octaves[::2] = octaves[::2, :1]
            factor = torch.exp2(octaves.float()).repeat_interleave(128, 1)[:, :H]
            setattr(self, name, (value * factor).to(torch.bfloat16))
        self.w1 = (self.w1 * torch.tensor([1.0, 2**-12, 2**-3]).repeat_interleave(128)[:H]).to(
            torch.bfloat16
        )


@pytest.mark.parametrize("kind", [Case, UnevenCase])
@pytest.mark.parametrize("mode", FOLDING_MODES)
def test_a_step_of_row128_is_the_reference_engines(mode, kind):
    case, settings = kind(seed=13), replace(ROW128, **MODES[mode])
    assert_close(case.run(OURS, settings), case.run(REFERENCE, settings), 1e-3)


@SIDES
@pytest.mark.parametrize("kind", [Case, UnevenCase])
def test_row128_reads_the_codes_that_came(kind, sides):
    case = kind(seed=12).quantised(*sides)
    assert_close(case.run(OURS, ROW128), case.run(REFERENCE, ROW128), 1e-3)


def test_row128_gives_equal_bits_in_every_mode_and_for_a_sender_that_quantises_alike():
    case = UnevenCase(seed=14)
    first = case.run(OURS, ROW128)
    for options in ({"recompute_z": True}, {"frees_stagewise": True}):
        other = case.run(OURS, replace(ROW128, **options), shares_gpu=True)
        assert all(torch.equal(first[name], other[name]) for name in first), options
    sent = copy.copy(case)
    sent.x, sent.dout = (quantize(t.float(), ROW128.recipe.x) for t in (case.x, case.dout))
    other = sent.run(OURS, ROW128)
    assert all(torch.equal(first[name], other[name]) for name in first)
    unfolded = case.run(OURS, replace(ROW128, recipe=RECIPES["dx256"]))
    assert not torch.equal(first["dw1"], unfolded["dw1"])


@pytest.mark.parametrize(("tokens", "invalid"), [(0, 0.3), (1, 0.0), (5, 1.0), (300, 0.99)])
def test_few_or_no_rows_in_row128(tokens, invalid):
    case = Case(tokens, invalid=invalid, spare_rows=0, seed=2)
    assert_close(case.run(OURS, ROW128), case.run(REFERENCE, ROW128), 1e-3)


def test_row128_shows_its_stages_but_no_operand_of_wgrad():
    case, seen = Case(seed=5), []
    with listening(lambda name, value: seen.append(name) or value):
        shown = case.run(OURS, ROW128)
    hidden = {"dz", "y1s", "wgrad_x", "wgrad_dout"}
    assert sorted(seen) == sorted(set(SHOWN) - hidden)
    quiet = case.run(OURS, ROW128)
    assert all(torch.equal(quiet[name], shown[name]) for name in quiet)


def test_row128_without_fp8_wgrad_folds_nothing():
    """Values go on to the BF16 GEMMs, and the rest of the step is the same."""
    case, settings = Case(seed=4), replace(ROW128, fp8_wgrad=False)
    weights = OURS.prepare_weights(case.w1, case.w2, None, None, settings)
    _, saved = OURS.forward(case.x, case.routing, weights, settings)
    dx, dprobs, pending = OURS.backward_dx(case.dout, saved, weights)
    wanted = case.run(OURS, ROW128)
    assert torch.equal(dx, wanted["dx"]) and torch.equal(dprobs, wanted["dprobs"])
    assert pending.x is case.x or torch.equal(pending.x, case.x)
    assert pending.dz.dtype == pending.dout.dtype == torch.bfloat16


def test_row128_refuses_one_buffer_per_weight():
    case = Case()
    with pytest.raises(ConfigError, match="iso_weight"):
        case.run(OURS, replace(ROW128, iso_weight=True))


def test_sizes_of_scratch_are_asked_for_once(monkeypatch, native):
    """Of equal numbers; each number that differs asks anew."""
    passes, asked = hopper_passes.Passes(native, NAMES, dict.fromkeys(KERNELS, print)), []
    ask = passes._ask_for_sizes
    monkeypatch.setattr(passes, "_ask_for_sizes", lambda *of: asked.append(of[1:]) or ask(*of))
    case, other = Case(), Case(T + 1)
    first = passes.routed(case.routing, H, I).bytes_of
    assert passes.routed(case.routing, H, I).bytes_of == first and asked == [(H, I)]
    assert passes.routed(case.routing, H + 128, I).bytes_of != first
    assert passes.routed(case.routing, H, I + 128).bytes_of != first
    assert passes.routed(with_spare_rows(case.routing, 128), H, I).bytes_of != first
    assert passes.routed(other.routing, H, I).bytes_of != first
    assert len(asked) == 5


def test_row_scales_need_codes_and_fp8_wgrad(native):
    case, launched = Case(), []
    passes = hopper_passes.Passes(native, NAMES, {name: launched.append for name in KERNELS})
    handle, bytes_of, *_ = passes.routed(case.routing, H, I)
    sums = NativeBuffer.zeros(E, 2 * I, H, I, False, "cpu")
    rows = case.routing.num_rows
    arguments = {
        "weights": None, "routing": handle, "stream": 0, "multiprocessors": 0, "shares_gpu": 0, "inner": I,
        **hopper_passes.token_arguments("x", case.x), **hopper_passes.token_arguments("dout", case.dout),
        "dz": torch.empty(bytes_of.dz, dtype=torch.uint8), "y1s": torch.empty(bytes_of.y1s, dtype=torch.uint8),
        "scratch": torch.empty(bytes_of.wgrad, dtype=torch.uint8), "dw1": sums.dw1, "into_dw1": None,
        "dw2": sums.dw2, "into_dw2": None, "row_scales": torch.zeros(rows, 2),
    }  # fmt: skip
    with pytest.raises(ValueError, match="wgrad: needed with row_scales: x_codes and x_scale"):
        passes.wgrad(**arguments)
    assert not launched


def test_quantised_tokens_and_values_exclude_each_other(native):
    case = Case()
    passes = hopper_passes.Passes(native, NAMES, KERNELS)
    weights = OURS.prepare_weights(case.w1, case.w2, None, None, FP8)
    prepared = hopper_passes.prepared_handle(passes, weights)
    handle, bytes_of, *_ = passes.routed(case.routing, H, I)
    q = case.quantised().x
    given = {"x": case.x, "x_codes": q.bytes, "x_scale": q.scale_inv}
    for names in ((), ("x", "x_codes"), ("x", "x_scale"), ("x_codes",), ("x_scale",), tuple(given)):
        arguments = {name: given[name] if name in names else None for name in given}
        with pytest.raises(ValueError, match="forward: needed: either x, or x_codes and x_scale"):
            passes.forward(
                weights=prepared.handle, routing=handle, stream=0, multiprocessors=0, activation=0, z=None, z_scale=None, z_rows=None,
                out=None,
                scratch=torch.empty(bytes_of.forward_to_z, dtype=torch.uint8), **arguments,
            )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_modes_and_repeats_give_equal_bits(mode):
    case, settings = Case(seed=1), replace(FP8, **MODES[mode])
    first = case.run(OURS, replace(FP8, save_z=settings.save_z))
    other = case.run(OURS, settings, shares_gpu=True)
    for name, tensor in first.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize(("tokens", "invalid"), [(0, 0.3), (1, 0.0), (5, 1.0), (300, 0.99)])
@pytest.mark.parametrize("mode", ["default", "everything"])
def test_few_or_no_rows(tokens, invalid, mode):
    case, settings = (
        Case(tokens, invalid=invalid, spare_rows=0, seed=2),
        replace(FP8, **MODES[mode]),
    )
    assert_close(case.run(OURS, settings), case.run(REFERENCE, settings), 1e-3)


def each_with_every_layout(usual, *choices):
    """Every combination of the choices in the two modes that differ in all; the usual one in the
    modes between: a mode decides which operands wgrad gets, and a layout where it puts its sums.
    """
    layouts = list(itertools.product(*choices))
    ends = [(*layout, mode) for layout in layouts for mode in ("default", "everything")]
    return [*ends, *((*usual, mode) for mode in MODES if mode not in ("default", "everything"))]


@pytest.mark.parametrize(
    ("split_half", "transposed", "stacked", "mode"),
    each_with_every_layout((True, True, False), *3 * [(False, True)]),
)
def test_gradients_added_to_the_parameters_own_memory(split_half, transposed, stacked, mode):
    """The same numbers as in accumulators, in every layout; a second backward adds as many."""
    case, settings = Case(seed=9), replace(FP8, **MODES[mode])
    targets = parameter_targets(WeightLayout(transposed, split_half), stacked=stacked)
    shape = (E, H, 2 * I) if transposed else (E, 2 * I, H)
    assert OURS.problem_of(targets, settings) is None
    assert targets.problem(2 * I, H, I, "cpu") is None
    wanted = case.run(OURS, settings)
    for times in (1, 2):
        got = case.run(OURS, settings, targets=targets)
        for name, tensor in wanted.items():
            scale = times if name in ("dw1", "dw2") else 1
            assert torch.equal(got[name], scale * tensor), name
    if stacked:
        assert tuple(targets.up.tensors[0].shape) == shape


@pytest.mark.parametrize(
    ("dtype", "split_half", "transposed", "mode"),
    each_with_every_layout(("bfloat16", True, True), ("bfloat16", "float32"), *2 * [(False, True)]),
)
def test_gradients_written_to_fresh_memory(dtype, split_half, transposed, mode):
    """The sums rounded once, in every layout, over whatever was there; zeros without tokens."""
    dtype = getattr(torch, dtype)
    settings, layout = replace(FP8, **MODES[mode]), WeightLayout(transposed, split_half)
    for case in (Case(seed=9), Case(5, invalid=1.0, spare_rows=0, seed=2), Case(0, spare_rows=0)):
        wanted = case.run(OURS, settings)
        for stacked in (False, True):
            given = parameter_targets(layout, stacked=stacked)
            weights = []
            for weight in (given.up, given.down):
                poisoned = [torch.full_like(t, float("nan"), dtype=dtype) for t in weight.tensors]
                weights.append(replace(weight, tensors=poisoned))
            got = case.run(OURS, settings, targets=FreshTargets(*weights))
            for name, tensor in wanted.items():
                rounded = tensor.to(dtype) if name in ("dw1", "dw2") else tensor
                assert torch.equal(got[name], rounded), name


def test_frozen_experts_have_no_memory():
    case, targets = Case(seed=10), parameter_targets(PER_EXPERT, frozen=(0, 2))
    got, wanted = case.run(OURS, FP8, targets=targets), case.run(OURS, FP8)
    for name in ("dw1", "dw2"):
        assert torch.equal(got[name][[1, 3]], wanted[name][[1, 3]])
        assert not got[name][[0, 2]].any() and wanted[name][0].any()
    half_frozen = ParameterTargets(
        WeightTarget.per_expert([None] * E, PER_EXPERT), parameter_targets(PER_EXPERT).down
    )
    assert torch.equal(case.run(OURS, FP8, targets=half_frozen)["dw2"], wanted["dw2"])


def test_destinations_are_made_once_and_anew_where_memory_moved(native, monkeypatch):
    made = []

    def spy(*arguments):
        made.append(arguments)
        return KERNELS["wgrad_destination"](*arguments)

    passes = hopper_passes.Passes(native, NAMES, KERNELS | {"wgrad_destination": spy})
    monkeypatch.setattr(hopper_layer, "passes_on", lambda *_: passes)
    case, targets = Case(seed=11), parameter_targets(PER_EXPERT)
    first = case.run(OURS, FP8, targets=targets)
    again = ParameterTargets(targets.up, targets.down)  # as the next backward finds the same memory
    case.run(OURS, FP8, targets=again)
    assert len(made) == 2
    moved = [tensor.clone() for tensor in targets.up.tensors]
    before = [tensor.clone() for tensor in targets.up.tensors]
    elsewhere = ParameterTargets(WeightTarget.per_expert(moved, PER_EXPERT), targets.down)
    case.run(OURS, FP8, targets=elsewhere)
    assert len(made) == 3
    assert all(map(torch.equal, targets.up.tensors, before)), "the old memory was written"
    assert torch.equal(elsewhere.sums("dw1"), 3 * first["dw1"])
    # The same address in other strides is another destination.
    square = [torch.zeros(4, 4).T, torch.zeros(4, 4)]
    square[1] = square[0].T
    prints = {WeightTarget.per_expert([t], PER_EXPERT).fingerprint for t in square}
    assert len(prints) == 2


def test_destinations_of_recognised_memory_are_not_looked_for(native, monkeypatch):
    passes, other = (hopper_passes.Passes(native, NAMES, KERNELS) for _ in range(2))
    targets = parameter_targets(PER_EXPERT)
    last = targets.recognise(None)
    made = passes.gradients(targets)
    monkeypatch.setattr(hopper_passes.Passes, "_destination", None)
    again = ParameterTargets(targets.up, targets.down)
    assert again.recognise(last) is last and passes.gradients(again) is made
    monkeypatch.undo()
    assert other.gradients(again) is not made, "of these passes"
    moved = parameter_targets(PER_EXPERT)
    moved.recognise(last)
    assert passes.gradients(moved)["into_dw1"] is not made["into_dw1"]


def test_an_accumulator_and_a_destination_exclude_each_other(native):
    case, launched = Case(), []
    passes = hopper_passes.Passes(native, NAMES, {name: launched.append for name in KERNELS})
    handle, bytes_of, *_ = passes.routed(case.routing, H, I)
    sums = NativeBuffer.zeros(E, 2 * I, H, I, False, "cpu")
    arguments = {
        "weights": None, "routing": handle, "stream": 0, "multiprocessors": 0, "shares_gpu": 0, "inner": I,
            **hopper_passes.token_arguments("x", case.x), **hopper_passes.token_arguments("dout", case.dout),
        "dz": torch.empty(bytes_of.dz, dtype=torch.uint8), "y1s": torch.empty(bytes_of.y1s, dtype=torch.uint8),
        "scratch": torch.empty(bytes_of.wgrad, dtype=torch.uint8), "dw2": sums.dw2, "into_dw2": None,
        "row_scales": None,
    }  # fmt: skip
    for dw1, into in ((None, None), (sums.dw1, "somewhere")):
        with pytest.raises(ValueError, match="wgrad: needed: either dw1 or into_dw1"):
            passes.wgrad(**arguments, dw1=dw1, into_dw1=into)
    assert not launched


def test_inference_keeps_nothing():
    case = Case(seed=3)
    weights = OURS.prepare_weights(case.w1, case.w2, None, None, FP8)
    out, saved = OURS.forward(case.x, case.routing, weights, FP8, save=False)
    assert saved is None and torch.equal(out, case.run(OURS, FP8)["out"])


def test_plain_operands_of_wgrad():
    """With FP8 wgrad off, backward hands bf16 rows on and computes the same dx and dprobs."""
    case, settings = Case(seed=4), replace(FP8, fp8_wgrad=False)
    weights = OURS.prepare_weights(case.w1, case.w2, None, None, settings)
    _, saved = OURS.forward(case.x, case.routing, weights, settings)
    dx, dprobs, pending = OURS.backward_dx(case.dout, saved, weights)
    wanted, last = case.run(OURS, FP8), int(case.routing.padded_offsets[-1])
    assert torch.equal(dx, wanted["dx"]) and torch.equal(dprobs, wanted["dprobs"])
    assert pending.dz.dtype == pending.y1s.dtype == torch.bfloat16
    assert pending.dz.shape == (case.routing.num_rows, 2 * I) and pending.y1s.shape == (
        case.routing.num_rows,
        I,
    )
    assert bool(torch.isfinite(pending.dz[:last]).all()) and bool(
        torch.isfinite(pending.y1s[:last]).all()
    )


SHOWN = {
    "x_fp8": (T, H), "z": None, "y1": None, "y2": None, "out": (T, H), "dout_fp8": (T, H), "dz_fp8": None, "ds": (T, K),
    "dz": None, "y1s": None, "dx_rows": None, "dx": (T, H), "wgrad_x": None, "wgrad_dout": None,
}  # fmt: skip
WIDTH = {
    "z": 2 * I,
    "y1": I,
    "y2": H,
    "dz_fp8": 2 * I,
    "dz": 2 * I,
    "y1s": I,
    "dx_rows": H,
    "wgrad_x": H,
    "wgrad_dout": H,
}


@pytest.mark.parametrize("mode", ["default", "stagewise", "recompute_z"])
def test_every_stage_is_shown(mode):
    """As the reference engine computes it, and without changing a bit."""
    case, settings = Case(seed=5), replace(FP8, **MODES[mode])
    quiet, seen, wanted = case.run(OURS, settings), {}, {}

    def keep(where):
        def listener(name, value):
            where[name] = (
                dequantize(value) if isinstance(value, BlockScaledTensor) else value.clone()
            )
            return value

        return listener

    with listening(keep(seen)):
        shown = case.run(OURS, settings)
    with listening(keep(wanted)):
        case.run(REFERENCE, FP8)
    assert all(torch.equal(quiet[name], shown[name]) for name in quiet)
    assert set(seen) == set(SHOWN)
    last = int(case.routing.padded_offsets[-1])
    for name, size in SHOWN.items():
        assert tuple(seen[name].shape) == (size or (case.routing.num_rows, WIDTH[name])), name
        rows = slice(None) if size else slice(last)
        golden = wanted["z_saved" if name == "z" else name]
        error = (seen[name][rows].float() - golden[rows].float()).norm() / golden[
            rows
        ].float().norm()
        assert float(error) < (0.06 if name in ("dz", "y1s") else 1e-3), (
            name,
            float(error),
        )  # there shown before quantisation


@pytest.mark.parametrize(
    ("stage", "reaches"),
    [
        ("x_fp8", {"out", "dx", "dprobs", "dw1", "dw2"}), ("z", {"dx", "dprobs", "dw1", "dw2"}), ("y1", {"out"}), ("y2", {"out"}),
        ("dout_fp8", {"dx", "dprobs", "dw1"}), ("dz_fp8", {"dx"}), ("dz", {"dw1"}), ("y1s", {"dw2"}), ("dx_rows", {"dx"}),
        ("wgrad_x", {"dw1"}), ("wgrad_dout", {"dw2"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
@pytest.mark.parametrize("mode", ["default", "stagewise", "recompute_z"])
def test_what_a_listener_plants_flows_on(mode, stage, reaches):
    """A fault planted in a stage reaches what is computed from it and nothing else."""
    case, settings = Case(seed=6), replace(FP8, **MODES[mode])

    def plant(name, value):
        if name != stage:
            return value
        if isinstance(value, BlockScaledTensor):
            doubled = BlockScaledTensor(
                value.codes.clone(), value.scale_inv * 2, value.block, value.code, value.orientation
            )
            return doubled
        return value * 2

    wanted = case.run(OURS, settings)
    with listening(plant):
        got = case.run(OURS, settings)
    assert {name for name in wanted if not torch.equal(got[name], wanted[name])} == reaches


def test_ranges_open_and_close_in_order():
    events = []

    class Range:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            events.append(f"+{self.name.removeprefix('sonicmoe.')}")

        def __exit__(self, *_):
            events.append(f"-{self.name.removeprefix('sonicmoe.')}")

    with ranges_on(Range):
        Case().run(OURS, FP8)
    stages = [event[1:] for event in events if event.startswith("+")]
    assert stages == [
        "prepare_weights", "quantize_x", "up", "down", "aggregate_out", "quantize_dout", "dgated", "dx_gemm", "aggregate_dx",
        "wgrad_operands", "dw2", "dw1",
    ][-len(stages) :]  # fmt: skip
    assert events == [sign + name for name in stages for sign in "+-"]


def test_tokens_that_moved_off_a_16_byte_address_since_forward():
    """As a hook on saved tensors, or a compiled graph, may hand them back."""
    case = Case(seed=7)
    wanted = case.run(OURS, FP8)
    for mode in ("default", "everything"):
        settings = replace(FP8, **MODES[mode])
        weights, sums = (
            OURS.prepare_weights(case.w1, case.w2, None, None, settings),
            NativeBuffer.zeros(E, 2 * I, H, I, False, "cpu"),
        )
        _, saved = OURS.forward(case.x, case.routing, weights, settings)
        moved = torch.zeros(T * H + 1, dtype=torch.bfloat16)[1:].reshape(T, H).copy_(case.x)
        assert moved.data_ptr() % 16
        saved.x = moved
        dx, dprobs = OURS.backward(case.dout, saved, weights, sums)
        got = {"dx": dx, "dprobs": dprobs, "dw1": sums.dw1, "dw2": sums.dw2}
        assert all(torch.equal(got[name], wanted[name]) for name in got)


def test_a_step_is_four_native_calls_and_few_allocations(monkeypatch):
    """Of small batches the host decides the time: each launch from Python costs it more than a
    launch, and so does an allocation.
    """
    case, counts = Case(), Counter()
    weights, sums = (
        OURS.prepare_weights(case.w1, case.w2, None, None, FP8),
        NativeBuffer.zeros(E, 2 * I, H, I, False, "cpu"),
    )

    def counting(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    for module in (hopper, hopper_layer, hopper_passes, quant_format):
        monkeypatch.setattr(module, "empty", counting("allocations", module.empty))
    passes = hopper_layer.passes_on("cpu", ActivationType.SWIGLU)
    for name in ("forward", "dgated", "dgrad", "wgrad"):
        monkeypatch.setattr(passes, name, counting("native calls", getattr(passes, name)))
    _, saved = OURS.forward(case.x, case.routing, weights, FP8)
    assert counts == {"native calls": 1, "allocations": 4}  # out, codes and scales of z, scratch
    OURS.backward(case.dout, saved, weights, sums)
    assert counts == {"native calls": 4, "allocations": 4 + 8}


class TestLifetimes:
    """Handles refer to tensors from C++, where no garbage collection sees them."""

    @staticmethod
    def memory(*tensors):
        return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]

    @staticmethod
    def at_launches(native, monkeypatch, kernel, watched):
        """At every launch of a kernel, which of the memory in `watched` is still alive."""
        seen = []

        def spy(*arguments):
            seen.append([not memory.expired() for memory in watched])
            return KERNELS[kernel](*arguments)

        passes = hopper_passes.Passes(native, NAMES, KERNELS | {kernel: spy})
        monkeypatch.setattr(hopper_layer, "passes_on", lambda *_: passes)
        return seen

    @pytest.mark.parametrize("frees", [True, False])
    def test_z_is_freed_before_the_dx_gemm(self, native, monkeypatch, frees):
        watched = []
        seen = self.at_launches(native, monkeypatch, "grouped_gemm", watched)
        case, settings = Case(seed=8), replace(FP8, frees_stagewise=frees)
        weights = OURS.prepare_weights(case.w1, case.w2, None, None, settings)
        _, saved = OURS.forward(case.x, case.routing, weights, settings)
        watched += self.memory(saved.z.bytes, saved.z.scale_inv)
        OURS.backward_dx(case.dout, saved, weights)
        assert seen == [[], [not frees] * 2]

    @pytest.mark.parametrize("frees", [True, False])
    def test_operands_of_dw2_are_freed_before_dw1(self, native, monkeypatch, frees):
        watched = []
        seen = self.at_launches(native, monkeypatch, "grouped_wgrad", watched)
        case, settings = Case(seed=8), replace(FP8, frees_stagewise=frees)
        weights = OURS.prepare_weights(case.w1, case.w2, None, None, settings)
        _, saved = OURS.forward(case.x, case.routing, weights, settings)
        dout = case.dout.clone()
        _, _, pending = OURS.backward_dx(dout, saved, weights)
        watched += self.memory(dout, pending.y1s, pending.x, pending.dz)
        del dout
        OURS.backward_dw(pending, NativeBuffer.zeros(E, 2 * I, H, I, False, "cpu"))
        assert seen == [[True] * 4, [not frees, not frees, True, True]]
        del saved
        # x is the caller's; a pending backward that is kept holds no operand and only its routing
        assert [memory.expired() for memory in watched] == [True, True, False, True]

    def test_handles_die_with_the_owners_of_their_tensors(self):
        case = Case(seed=8)
        weights = OURS.prepare_weights(case.w1, case.w2, None, None, FP8)
        _, saved = OURS.forward(case.x, case.routing, weights, FP8)
        _, _, pending = OURS.backward_dx(case.dout, saved, weights)
        of_weights = self.memory(weights.w1.bytes, weights.w2_dgrad.scale_inv)
        of_routing = self.memory(case.routing.row_token, case.routing.slot_row)
        del weights
        assert all(memory.expired() for memory in of_weights)
        del saved
        case.routing = None
        assert not any(memory.expired() for memory in of_routing), "wgrad will read them"
        del pending
        assert all(memory.expired() for memory in of_routing)


def test_a_failing_launch_or_listener_is_the_callers_error(native, monkeypatch):
    case = Case()

    def refuse(*_):
        raise ValueError("not this one")

    def listener(name, value):
        if name == "y1":
            raise NonFiniteError("the listener's own", None, None)
        return value

    with listening(listener), pytest.raises(NonFiniteError, match=r"^the listener.s own$"):
        case.run(OURS, FP8)
    passes = hopper_passes.Passes(native, NAMES, KERNELS | {"grouped_gemm": refuse})
    monkeypatch.setattr(hopper_layer, "passes_on", lambda *_: passes)
    with pytest.raises(ValueError, match="not this one"):
        case.run(OURS, FP8)


@pytest.mark.parametrize("kernel", REAL)
def test_every_real_kernel_takes_what_a_pass_gives_it(native, kernel, artefacts, monkeypatch):
    """Number and kinds of the arguments fit, and so does what is checked before where they lie."""
    real = getattr(REAL[kernel]("sm_90a").load(artefacts), kernel)
    folds = kernel in ("gather_row_scales", "gather_transpose_codes")
    kernels = (STEADY_KERNELS if folds else KERNELS) | {kernel: real}
    into = kernel == "grouped_wgrad_into"
    if into:
        module = fp8_wgrad_source("sm_90a").load(artefacts)
        kernels["wgrad_destination"] = module.wgrad_destination
    passes = hopper_passes.Passes(native, NAMES, kernels)
    monkeypatch.setattr(hopper_layer, "passes_on", lambda *_: passes)
    settings = replace(FP8, frees_stagewise=kernel == "gather_transpose_quantize")
    case = Case()
    if kernel == "gather_transpose_requantize":
        case = case.quantised()
    if folds:
        settings = ROW128
    with pytest.raises(Exception, match="must be on a CUDA device"):
        case.run(OURS, settings, targets=parameter_targets(PER_EXPERT) if into else None)


@pytest.mark.parametrize("frees_stagewise", [False, True])
def test_every_gemm_is_told_how_many_multiprocessors_it_may_take(
    native, monkeypatch, frees_stagewise
):
    told = Counter()

    def watched(name, launch):
        position = list(inspect.signature(launch).parameters).index("multiprocessors")

        def call(*arguments):
            told[name, int(arguments[position])] += 1
            return launch(*arguments)

        return call

    gemms = {name: watched(name, KERNELS[name]) for name in KERNELS if "gemm" in name}
    gemms["grouped_wgrad"] = watched("grouped_wgrad", KERNELS["grouped_wgrad"])
    passes = hopper_passes.Passes(native, NAMES, KERNELS | gemms)
    monkeypatch.setattr(hopper_layer, "passes_on", lambda *_: passes)
    settings = replace(FP8, frees_stagewise=frees_stagewise)
    capped = Case().run(OURS, replace(settings, gemm_num_sms=40))
    # up, down and dx; dgated; dw1 and dw2
    once = {"gather_gated_gemm": 1, "grouped_gemm": 2, "gather_dgated_gemm": 1, "grouped_wgrad": 2}
    assert told == {(name, 40): count for name, count in once.items()}
    told.clear()
    free = Case().run(OURS, settings)
    assert told == {(name, 0): count for name, count in once.items()}
    assert all(torch.equal(capped[name], free[name]) for name in free)


def test_a_scratch_that_is_too_small_is_refused(native):
    """Nothing is launched into memory that is not there."""
    case = Case()
    weights, launched = OURS.prepare_weights(case.w1, case.w2, None, None, FP8), []
    passes = hopper_passes.Passes(native, NAMES, {name: launched.append for name in KERNELS})
    prepared = hopper_passes.prepared_handle(passes, weights)
    handle, bytes_of, *_ = passes.routed(case.routing, H, I)
    arguments = {
        "weights": prepared.handle, "routing": handle, "stream": 0, "multiprocessors": 0, "activation": 0,
        **hopper_passes.token_arguments("x", case.x),
        "z": None, "z_scale": None, "z_rows": None, "out": None,
    }  # fmt: skip
    needed = bytes_of.forward_to_z
    small = torch.empty(needed - 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"scratch has {needed - 1} bytes; needed: {needed}"):
        passes.forward(**arguments, scratch=small)
    assert not launched


def test_temporaries_of_a_pass_do_not_overlap(native):
    """Each lies in its own 512-byte-aligned part of the scratch."""
    case, spans = Case(), []

    def listener(name, value):
        tensors = (
            (value.codes, value.scale_inv) if isinstance(value, BlockScaledTensor) else (value,)
        )
        if name in ("x_fp8", "y1", "y2"):
            spans.extend(
                (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), name) for t in tensors
            )
        return value

    weights = OURS.prepare_weights(case.w1, case.w2, None, None, FP8)
    with listening(listener):
        OURS.forward(case.x, case.routing, weights, FP8)
    spans.sort()
    assert len(spans) == 5 and all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    assert len({start % 512 for start, _, _ in spans}) == 1
