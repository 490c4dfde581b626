"""Engine `bf16` on Hopper without a GPU: its real host code over GEMMs computed on the host. Weights
are read, and gradients left, where the caller has them. `test_bf16_passes.py` has what it shares with
the GEMMs of quack-kernels.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from framework import IS_PADDLE, torch

if IS_PADDLE:
    pytest.skip("the host's GEMMs are PyTorch's", allow_module_level=True)

from engine.bf16_host import HOPPER, launches_fixture  # noqa: F401
from engine.plain_layer import (
    BF16,
    SWIGLU,
    E,
    H,
    I,
    make_case,
    run,
)
from torch.multiprocessing.reductions import StorageWeakRef

from sonicmoe.engine import bf16_weights
from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.expert_matrices import tensors_of
from sonicmoe.engine.gradient_places import GradientPlaces
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.settings import GradientMode
from sonicmoe.engine.targets import GradientTargets
from sonicmoe.enums import is_glu
from sonicmoe.errors import ConfigError, ShapeError
from sonicmoe.layouts import NATIVE, GateUp, WeightLayout
from sonicmoe.observe import listening
from sonicmoe.weight_source import StackedMatrices

OURS = Bf16Engine()
LAYOUTS = [WeightLayout(*flags) for flags in itertools.product((False, True), repeat=2)]
HALVES, FUSED = WeightLayout(split_half=True), WeightLayout(True, True)
APART = WeightLayout(split_half=True, apart=True)
FP32 = torch.float32

pytestmark = pytest.mark.parametrize("launches", [HOPPER], indirect=True)


def case_in(layout, activation=SWIGLU, **options):
    """A case whose weights lie so."""
    if not is_glu(activation):
        layout = WeightLayout(layout.transposed)
    return replace(make_case(activation, **options), layout=layout)


def sums_of(case):
    """Gradients as accumulators have them: native, fp32."""
    sums = case.accumulators()
    OURS.backward_dw(case.pending(OURS), sums)
    return sums


def user_shapes(layout):
    shapes = (2 * I, H), (H, I)
    return [shape[::-1] if layout.transposed else shape for shape in shapes]


def apart(source):
    """The same weights, a tensor for each expert."""
    up, down = ([matrix.clone() for matrix in side] for side in (source.up, source.down))
    return replace(source, up=up, down=down)


def results(case, source):
    """Of a forward and a backward to the tokens."""
    weights = OURS.refresh(source, case.settings)
    out, saved = OURS.forward(case.x, case.routing, weights, case.settings)
    return (out, *OURS.backward_dx(case.dout, saved, weights)[:2])


def stacked(layout, shape, fill, dtype=FP32):
    sizes = (2, E, I, H) if layout.apart and shape == (2 * I, H) else (E, *shape)
    tensor = torch.full(sizes, fill, dtype=dtype)
    return GradientPlaces.stacked(tensor, E, layout)


def permuted(layout, shape, fill, dtype=FP32):
    """Contiguous along the other axis."""
    tensor = torch.full((E, *shape[::-1]), fill, dtype=dtype).transpose(1, 2)
    return GradientPlaces.stacked(tensor, E, layout)


def check(target, native, layout, user, fill=0.0):
    """Every wanted expert's matrix is the native gradient as the user has it, plus what was there."""
    for expert in range(E):
        found = target.matrix(expert)
        if found is not None:
            expected = (getattr(layout, user)(native[expert]) + fill).to(found.dtype)
            assert torch.equal(found, expected), expert


class TestWeights:
    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    def test_are_read_where_they_lie(self, layout):
        source = case_in(layout).source
        weights = OURS.refresh(source, EngineSettings())
        w1, w2 = source.up.stacked, source.down.stacked
        assert weights.w1.data_ptr() == weights.w1_dgrad.data_ptr() == w1.data_ptr()
        assert weights.w2.data_ptr() == weights.w2_dgrad.data_ptr() == w2.data_ptr()
        assert weights.layout == layout
        assert weights.native_shapes == ((E, 2 * I, H), (E, H, I)) and weights.n1 == 2 * I
        assert not OURS.keep(weights, written=True), "biases are converted"
        assert OURS.keep(OURS.refresh(case_in(layout, bias=False).source, EngineSettings()), True)

    def test_of_two_tensors_are_read_where_they_lie_or_joined(self, monkeypatch):
        """Joined where dgrad cannot read both: other strides, or I that it cannot cut."""
        case = case_in(APART, bias=False)
        source, wide = case.source, torch.zeros((E, I, H + 8), dtype=BF16)[:, :, :H]
        weights, wanted = OURS.refresh(source, case.settings), results(case, source)
        assert weights.w1 == (source.up.stacked, source.up_half.stacked)
        assert (
            weights.w1_dgrad is weights.w1
            and weights.layout == APART
            and OURS.keep(weights, written=True)
        )
        wide.copy_(source.up_half.stacked)
        joined = [OURS.refresh(replace(source, up_half=StackedMatrices(wide)), case.settings)]
        monkeypatch.setattr(bf16_weights, "_DEPTH", 64)
        for weights in (*joined, OURS.refresh(source, case.settings)):
            assert torch.equal(weights.w1, torch.cat([source.up.stacked, wide], 1))
            assert weights.layout == HALVES and not OURS.keep(weights, written=True)
        assert all(map(torch.equal, results(case, source), wanted))

    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    def test_that_do_not_fit_together_are_refused(self, layout):
        """A bias of as many elements would be read in a wrong order."""
        source = case_in(layout, bias=True).source
        turned, narrow = source.b1.T.contiguous(), source.down.stacked[:, :, :8].contiguous()
        for wrong, words in (
            ({"b1": turned}, r"b1 has shape"),
            ({"b2": None}, "both or neither"),
            ({"down": StackedMatrices(narrow)}, "needs"),
        ):
            with pytest.raises(ShapeError, match=words):
                OURS.refresh(replace(source, **wrong), EngineSettings())

    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    def test_of_a_tensor_for_each_expert_are_read_where_they_lie(self, layout):
        case = case_in(layout)
        source = apart(case.source)
        weights = OURS.refresh(source, case.settings)
        assert weights.native_shapes == ((E, 2 * I, H), (E, H, I)) and weights.n1 == 2 * I
        assert weights.w1.tensors == tuple(source.up) and weights.w2.tensors == tuple(source.down)
        assert OURS.keep(weights, written=True) == (source.b1 is None)
        for wanted, found in zip(results(case, case.source), results(case, source), strict=True):
            assert torch.equal(found, wanted)

    def test_of_a_tensor_for_each_expert_are_stacked_where_the_kernels_cannot_read_them(self):
        """fp32, an odd address, more experts than a launch has maps."""
        source = apart(case_in(FUSED, bias=False).source)
        odd = torch.zeros(I * H + 1, dtype=BF16)[1:].view(I, H)
        for other in (
            replace(source, compute_dtype=torch.float16),
            replace(source, down=[odd, *source.down[1:]]),
            replace(source, up=source.up * 62, down=source.down * 62),
        ):
            weights = OURS.refresh(other, EngineSettings())
            assert torch.is_tensor(weights.w1) and weights.num_experts == len(other.up)
            assert not OURS.keep(weights, written=True)
            assert torch.allclose(weights.w2.to(BF16), torch.stack(list(other.down)), atol=1e-6)


class TestStackedWeightsThatComeAgain:
    """What no address changes is asked of the first ones alone."""

    @pytest.fixture
    def looks(self, monkeypatch):
        """The settings of each look at a source."""
        seen, refresh = [], Bf16Engine.refresh

        def noted(self, source, settings):
            seen.append(settings)
            return refresh(self, source, settings)

        monkeypatch.setattr(Bf16Engine, "refresh", noted)
        return seen

    @staticmethod
    def weights(layout=FUSED, dtype=BF16, **other):
        source = case_in(layout, bias=True, **other).source
        w1, w2 = source.up.stacked.to(dtype), source.down.stacked.to(dtype)
        return [w1.clone(), w2.clone(), source.b1, source.b2]

    def test_are_recognised(self, looks):
        settings = EngineSettings()
        first = OURS.read_stacked(self.weights(), FUSED, BF16, settings)
        again = self.weights()
        found = OURS.read_stacked(again, FUSED, BF16, settings)
        assert len(looks) == 1
        assert found.w1 is found.w1_dgrad is again[0] and found.w2 is found.w2_dgrad is again[1]
        assert found.native_shapes == first.native_shapes and found.layout == FUSED
        assert torch.equal(found.b1, again[2]) and found.b1.dtype == FP32
        assert found.native is first.native and found.store is found.adapters is None

    def test_of_two_tensors_are_recognised_by_both(self, looks):
        settings, (gate, w2, b1, b2) = EngineSettings(), self.weights(APART)
        wide = torch.zeros((E, I, H + 8), dtype=BF16)[:, :, :H]
        odd = torch.zeros(E * I * H + 1, dtype=BF16)[1:].view(E, I, H)
        for other, looked in ((gate + 1, 1), (gate + 2, 1), (wide, 2), (odd, 3)):
            given = GateUp(gate, other), w2, b1, b2
            found = OURS.read_stacked(given, APART, BF16, settings)
            assert len(looks) == looked and found.native_shapes == ((E, 2 * I, H), (E, H, I))
            in_place = tensors_of(found.w1)[-1].data_ptr() == other.data_ptr()
            assert in_place == (looked == 1)

    def test_in_any_other_form_are_looked_at(self, looks):
        settings = EngineSettings()
        OURS.read_stacked(self.weights(), FUSED, BF16, settings)
        w1, w2, b1, b2 = self.weights()
        wide = torch.zeros((E, H, 2 * I + 8), dtype=BF16)[:, :, : 2 * I].copy_(w1)
        narrow = w2[:, :, :64].contiguous()
        for count, (weights, layout, dtype, own) in enumerate((
            ((w1, w2, b1, b2), WeightLayout(True), BF16, settings),
            ((w1, w2, b1, b2), FUSED, None, settings),
            ((w1, w2, b1, b2), FUSED, BF16, EngineSettings()),
            ((w1, w2, None, None), FUSED, BF16, settings),
            ((wide, w2, b1, b2), FUSED, BF16, settings),
        )):  # fmt: skip
            found = OURS.read_stacked(weights, layout, dtype, own)
            assert len(looks) == count + 2 and found.w1.data_ptr() == weights[0].data_ptr()
        with pytest.raises(ShapeError):
            OURS.read_stacked((w1, narrow, b1, b2), FUSED, BF16, settings)

    def test_that_the_copy_engine_cannot_read_are_copied_each_time(self, looks):
        settings = EngineSettings()
        w1, w2, b1, b2 = self.weights()
        OURS.read_stacked((w1, w2, b1, b2), FUSED, BF16, settings)
        odd = torch.zeros(w2.numel() + 1, dtype=BF16)[1:].view(w2.shape).copy_(w2)
        for weights in ((w1, odd, b1, b2), (w1.float(), w2.float(), b1, b2)):
            for _ in range(2):
                looks.clear()
                found = OURS.read_stacked(weights, FUSED, BF16, settings)
                assert len(looks) == 1 and torch.equal(found.w2, w2)
                assert found.w2.data_ptr() != weights[1].data_ptr()

    def test_are_not_kept(self):
        weights = self.weights()
        memory = [StorageWeakRef(weight.untyped_storage()) for weight in weights]
        OURS.read_stacked(weights, FUSED, BF16, EngineSettings())
        weights.clear()
        assert all(map(StorageWeakRef.expired, memory))


class TestGradients:
    def test_in_an_order_that_dz_does_not_have_are_refused(self):
        """Also where nobody asked `problem_of`: gate and up rows would change places."""
        pending = case_in(NATIVE).pending(OURS)
        up, down = (stacked(HALVES, shape, 0.0) for shape in user_shapes(HALVES))
        with pytest.raises(ConfigError, match="all gates before all up values"):
            OURS.backward_dw(pending, GradientTargets(up, down))
        assert not up.tensors[0].any() and not down.tensors[0].any() and pending.dz is not None

    def test_in_memory_that_is_taken_late(self, launches):
        """dw1 comes first then, and its operands are gone when memory for dw2 is taken."""
        case = case_in(FUSED, bias=False)
        sums, pending, held = sums_of(case), case.pending(OURS), []
        up, down = (stacked(FUSED, s, 0.0) for s in user_shapes(FUSED))
        nothing = GradientPlaces.stacked(None, E, FUSED)

        def make_down():
            held.append((pending.x, pending.dz))
            return down

        targets = GradientTargets(up, nothing, GradientMode.FRESH, make_down=make_down)
        launches.clear()
        OURS.backward_dw(pending, targets)
        assert launches.calls == ["wgrad_up", "wgrad_down"] and held == [(None, None)]
        check(targets.up, sums.dw1, FUSED, "user_w1")
        check(targets.down, sums.dw2, FUSED, "user_w2")

    @pytest.mark.parametrize(
        ("weights", "gradients"), list(itertools.product(LAYOUTS, LAYOUTS)), ids=str
    )
    @pytest.mark.parametrize("arrange", [stacked, permuted])
    def test_in_another_layout_than_the_weights(self, weights, gradients, arrange):
        """Gate and up of dz lie as in the weights. Only halves can be put in turns, row by row."""
        case = case_in(weights, bias=False)
        targets = GradientTargets(*(arrange(gradients, s, 0.0) for s in user_shapes(gradients)))
        problem = OURS.problem_of(targets, case.settings, weights)
        along_hidden = (arrange is stacked) != gradients.transposed
        same = weights.split_half == gradients.split_half
        assert (problem is None) == (same or (weights.split_half and along_hidden))
        if problem is None:
            OURS.backward_dw(case.pending(OURS), targets)
            sums = sums_of(case)
            check(targets.up, sums.dw1, gradients, "user_w1")
            check(targets.down, sums.dw2, gradients, "user_w2")
        else:
            words = "before all up values, and" if gradients.split_half else "along gate and up"
            assert words in problem and "\n" not in problem


@pytest.mark.parametrize("layout", LAYOUTS[::3], ids=str)
def test_without_a_row_fresh_memory_is_zeros_and_sums_stay(layout, launches):
    case = case_in(layout)
    case.indices.fill_(-1)
    memory = [stacked(layout, shape, 3.0) for shape in user_shapes(layout)]
    biases = torch.ones(E, 2 * I), torch.ones(E, H)
    OURS.backward_dw(case.pending(OURS), GradientTargets(*memory))
    assert all(bool((weight.first == 3.0).all()) for weight in memory)
    OURS.backward_dw(case.pending(OURS), GradientTargets(*memory, GradientMode.FRESH, biases))
    assert not any(bool(t.any()) for t in (memory[0].first, memory[1].first, *biases))
    assert not launches.calls


def test_listeners_know_gate_and_up_in_turns_however_the_weights_lie():
    wanted, found = {}, {}
    for layout, seen in ((NATIVE, wanted), (FUSED, found)):
        with listening(lambda name, value, seen=seen: seen.setdefault(name, value)):
            run(case_in(layout), OURS)
    assert list(found) == list(wanted)
    for name in ("z", "dz", "y1", "y1s", "dx_rows"):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-2, atol=1e-2)
    assert torch.equal(found["z"], wanted["z"]) and torch.equal(found["dz"], wanted["dz"])
