"""What the passes of the Hopper engine launch, with which arguments, and which memory lives then."""

from __future__ import annotations

import inspect
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
from framework import IS_PADDLE, torch

if IS_PADDLE:
    pytest.skip("launch arguments are read through PyTorch", allow_module_level=True)

from engine.fp8_layer import assert_same_bits, with_spare_rows
from engine.hopper_host import (  # noqa: F401
    FP8,
    OURS,
    PER_EXPERT,
    Case,
    H,
    I,
    T,
    host_passes,
    native_fixture,
    parameter_targets,
    use_fixture,
)
from engine.host_kernels import ACTIVATION_NAMES as NAMES
from engine.host_kernels import KERNELS
from kernels.needs import NVCC
from passes import backward
from torch.multiprocessing.reductions import StorageWeakRef

from sonicmoe.diagnostics.nonfinite import NonFiniteError
from sonicmoe.engine import hopper, hopper_layer, hopper_passes, routed_layer
from sonicmoe.engine.gradient_places import GradientPlaces
from sonicmoe.engine.targets import GradientTargets
from sonicmoe.enums import ActivationType, ZCode
from sonicmoe.kernels import aggregate_source, routing_metadata_source
from sonicmoe.kernels.cuda_quantize import quantize_source
from sonicmoe.kernels.cuda_wgrad import wgrad_operands_source
from sonicmoe.kernels.sm90 import fp8_dgated_source, fp8_grouped_gemm_source, fp8_wgrad_source
from sonicmoe.observe import listening, ranges_on
from sonicmoe.quant import format as quant_format
from sonicmoe.quant.recipes import rows
from sonicmoe.quant.reference import quantize
from sonicmoe.routing.metadata import RoutingMetadata

pytestmark = NVCC
# As a layer of SwiGLU loads them.
GATED = {"activation": ActivationType.SWIGLU}
REAL = {
    "quantize_rows": quantize_source,
    "gather_gated_gemm": partial(fp8_grouped_gemm_source, **GATED),
    "grouped_gemm": partial(fp8_grouped_gemm_source, **GATED),
    "aggregate_rows": aggregate_source,
    "gather_dgated_gemm": partial(fp8_dgated_source, **GATED),
    "sum_or_zero": routing_metadata_source,
    **{name: wgrad_operands_source for name in KERNELS if name.startswith("gather_transpose_")},
    "grouped_wgrad": fp8_wgrad_source,
}


def test_sizes_of_scratch_are_asked_for_once(monkeypatch, native):
    """Of equal numbers; each number that differs asks anew."""
    passes, asked = hopper_passes.Passes(native, NAMES, dict.fromkeys(KERNELS, print)), []
    ask = passes._part_ends
    monkeypatch.setattr(passes, "_part_ends", lambda *of: asked.append(of[-2:]) or ask(*of))
    case, other = Case(), Case(tokens=T + 1)
    first = passes.routed(case.routing, H, I).ends
    assert passes.routed(case.routing, H, I).ends == first and asked == [(H, I)]
    assert passes.routed(case.routing, H + 128, I).ends != first
    assert passes.routed(case.routing, H, I + 128).ends != first
    assert passes.routed(with_spare_rows(case.routing, 128), H, I).ends != first
    assert passes.routed(other.routing, H, I).ends != first
    assert len(asked) == 5


@pytest.mark.parametrize("tokens", [T, 0])
def test_routing_of_one_memory_is_that_of_five_tensors(artefacts, native, tokens):
    """Where the CUDA builder puts them is where Python and the passes find them."""
    case = Case(tokens=tokens, spare_rows=0)
    five, settings = case.routing, replace(FP8, recompute_z=True)
    sizes = five.num_tokens * five.topk, five.num_experts, five.num_rows
    builder = routing_metadata_source("sm_90a").load(artefacts)
    places = tuple(map(int, builder.metadata_places(*sizes)))
    memory = torch.full(places[-1:], 0xFF, dtype=torch.uint8)
    one = RoutingMetadata.in_memory(five.sizes, memory, places)
    for name, tensor in zip(five.TENSOR_FIELDS, five.tensors(), strict=True):
        getattr(one, name).copy_(tensor)
    assert all(map(torch.equal, one.tensors(), five.tensors()))
    wanted = case.run(OURS, settings)
    case.routing = RoutingMetadata.in_memory(five.sizes, memory, places)
    assert_same_bits(case.run(OURS, settings), wanted)
    with listening(lambda _, value: value):
        assert_same_bits(case.run(OURS, settings), wanted)
    _, _, saved = case.forward(OURS, settings)
    tensors, spec = saved.pack()
    assert len(tensors) == 2 and tensors[1] is memory, "x, and the routing"
    assert all(map(torch.equal, spec.unpack(tensors).routing.tensors(), five.tensors()))
    assert replace(one, num_rows=five.num_rows).memory is None, "another tensor would not be read"
    last = places[-2] + 4 * five.num_rows  # where the last tensor ends
    if tokens:
        case.routing = RoutingMetadata.in_memory(five.sizes, memory[: last - 1], places)
        with pytest.raises(ValueError, match=rf"routing_memory has .* bytes; needed: {last} or"):
            case.run(OURS, settings)


def test_destinations_are_made_once_and_anew_where_memory_moved(use):
    made = []

    def spy(*arguments):
        made.append(arguments)
        return KERNELS["wgrad_destination"](*arguments)

    use(wgrad_destination=spy)
    case, targets = Case(seed=11), parameter_targets(PER_EXPERT)
    first = case.run(OURS, FP8, targets=targets)
    again = GradientTargets(targets.up, targets.down)  # as the next backward finds the same memory
    case.run(OURS, FP8, targets=again)
    assert len(made) == 2
    moved = [tensor.clone() for tensor in targets.up.tensors]
    before = [tensor.clone() for tensor in targets.up.tensors]
    elsewhere = GradientTargets(GradientPlaces.per_expert(moved, PER_EXPERT), targets.down)
    case.run(OURS, FP8, targets=elsewhere)
    assert len(made) == 4
    assert all(map(torch.equal, targets.up.tensors, before)), "the old memory was written"
    assert torch.equal(elsewhere.sums("dw1"), 3 * first["dw1"])


def test_ranges_open_and_close_in_order():
    events = []

    @contextmanager
    def opened(name):
        events.append(f"+{name.removeprefix('sonicmoe.')}")
        yield
        events.append(f"-{name.removeprefix('sonicmoe.')}")

    with ranges_on(opened):
        Case().run(OURS, FP8)
    stages = [event[1:] for event in events if event.startswith("+")]
    assert stages == [
        "prepare_weights", "quantize_x", "up", "down", "aggregate_out", "quantize_dout", "dgated", "dx_gemm", "aggregate_dx",
        "wgrad_operands", "dw2", "dw1",
    ][-len(stages) :]  # fmt: skip
    assert events == [sign + name for name in stages for sign in "+-"]


def test_a_step_is_three_native_calls_and_few_allocations(monkeypatch):
    """Of small batches the host decides the time: each launch from Python costs it more than a
    launch, and so does an allocation.
    """
    case, counts = Case(), Counter()
    weights, sums = case.forward(OURS, FP8)[0], case.accumulators()

    def counting(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    for module in (hopper, hopper_layer, routed_layer, quant_format):
        monkeypatch.setattr(module, "empty", counting("allocations", module.empty))
    passes = hopper_layer.passes_on("cpu", ActivationType.SWIGLU, ZCode.ADAPTIVE, False)
    for name in ("forward", "dgated", "dgrad", "wgrad"):
        monkeypatch.setattr(passes, name, counting("native calls", getattr(passes, name)))
    _, saved = OURS.forward(case.x, case.routing, weights, FP8)
    assert counts == {"native calls": 1, "allocations": 4}  # out, codes and scales of z, scratch
    backward(OURS, case.dout, saved, weights, sums)
    # dx, dprobs, both operands of wgrad, two scratches
    assert counts == {"native calls": 3, "allocations": 4 + 6}


class TestLifetimes:
    """Handles refer to tensors from C++, where no garbage collection sees them."""

    @staticmethod
    def memory(*tensors):
        return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]

    @staticmethod
    def at_launches(use, **watched):
        """At every launch of each kernel, which of the memory that is watched for it is still alive."""
        seen = {kernel: [] for kernel in watched}

        def spying(kernel):
            def spy(*arguments):
                seen[kernel].append([not memory.expired() for memory in watched[kernel]])
                return KERNELS[kernel](*arguments)

            return spy

        use(**{kernel: spying(kernel) for kernel in watched})
        return seen

    @pytest.mark.parametrize("frees", [True, False])
    def test_operands_are_freed_before_the_next_product(self, use, frees):
        """z before dx, and those of dw2 before dw1."""
        of_dx, of_wgrad = [], []
        seen = self.at_launches(use, grouped_gemm=of_dx, grouped_wgrad=of_wgrad)
        case, settings = Case(seed=8), replace(FP8, frees_stagewise=frees)
        weights, _, saved = case.forward(OURS, settings)
        of_dx += self.memory(saved.z.bytes, saved.z.scale_inv)
        dout = case.dout.clone()
        _, _, pending = OURS.backward_dx(dout, saved, weights)
        of_wgrad += self.memory(dout, pending.y1s, pending.x, pending.dz)
        del dout
        OURS.backward_dw(pending, case.accumulators())
        assert seen["grouped_gemm"] == [[], [not frees] * 2]
        assert seen["grouped_wgrad"] == [[True] * 4, [not frees, not frees, True, True]]
        del saved
        # x is the caller's; a pending backward that is kept holds no operand and only its routing
        assert [memory.expired() for memory in of_wgrad] == [True, True, False, True]

    def test_handles_die_with_the_owners_of_their_tensors(self):
        case = Case(seed=8)
        weights, _, saved = case.forward(OURS, FP8)
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


def test_a_failing_launch_or_listener_is_the_callers_error(use):
    case = Case()

    def refuse(*_):
        raise ValueError("not this one")

    def listener(name, value):
        if name == "y1":
            raise NonFiniteError("the listener's own", None, None)
        return value

    with listening(listener), pytest.raises(NonFiniteError, match=r"^the listener.s own$"):
        case.run(OURS, FP8)
    use(grouped_gemm=refuse)
    with pytest.raises(ValueError, match="not this one"):
        case.run(OURS, FP8)


@pytest.mark.kernels
@pytest.mark.parametrize("kernel", REAL)
def test_every_real_kernel_takes_what_a_pass_gives_it(kernel, artefacts, use):
    """Number and kinds of the arguments fit, and so does what is checked before where they lie."""
    own = {kernel: getattr(REAL[kernel]("sm_90a").load(artefacts), kernel)}
    if kernel == "grouped_wgrad":
        own["wgrad_destination"] = fp8_wgrad_source("sm_90a").load(artefacts).wgrad_destination
    use(**own)
    settings = replace(FP8, frees_stagewise=kernel == "gather_transpose_quantize")
    case = Case()
    if kernel == "gather_transpose_requantize":
        case.x = quantize(case.x.float(), rows(128))
    with pytest.raises(Exception, match="must be on a CUDA device"):
        case.run(OURS, settings)


@pytest.mark.parametrize("frees_stagewise", [False, True])
def test_every_gemm_is_told_how_many_multiprocessors_it_may_take(use, frees_stagewise):
    told = Counter()

    def watched(name, launch):
        position = list(inspect.signature(launch).parameters).index("multiprocessors")

        def call(*arguments):
            told[name, int(arguments[position])] += 1
            return launch(*arguments)

        return call

    gemms = {name: watched(name, KERNELS[name]) for name in KERNELS if "gemm" in name}
    gemms["grouped_wgrad"] = watched("grouped_wgrad", KERNELS["grouped_wgrad"])
    use(**gemms)
    settings = replace(FP8, frees_stagewise=frees_stagewise)
    capped = Case().run(OURS, replace(settings, gemm_num_sms=40))
    # up, down and dx; dgated; dw1 and dw2
    once = {"gather_gated_gemm": 1, "grouped_gemm": 2, "gather_dgated_gemm": 1, "grouped_wgrad": 2}
    assert told == {(name, 40): count for name, count in once.items()}
    told.clear()
    free = Case().run(OURS, settings)
    assert told == {(name, 0): count for name, count in once.items()}
    assert_same_bits(capped, free)
