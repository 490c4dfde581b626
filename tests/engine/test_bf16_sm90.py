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
from engine.fp8_layer import PLAIN, Case, E, assert_same_bits, sums_of
from torch.multiprocessing.reductions import StorageWeakRef

from sonicmoe.engine import bf16_weights
from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.expert_matrices import tensors_of
from sonicmoe.engine.gradient_places import GradientPlaces
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.settings import GradientMode
from sonicmoe.errors import ConfigError, ShapeError
from sonicmoe.layouts import NATIVE, GateUp, WeightLayout
from sonicmoe.observe import listening
from sonicmoe.weight_source import StackedMatrices

OURS = Bf16Engine()
LAYOUTS = [WeightLayout(*flags) for flags in itertools.product((False, True), repeat=2)]
HALVES, FUSED = WeightLayout(split_half=True), WeightLayout(True, True)
APART = WeightLayout(split_half=True, apart=True)
BF16, FP32 = torch.bfloat16, torch.float32
H, I = 72, 40  # no tile divides these

pytestmark = pytest.mark.parametrize("launches", [HOPPER], indirect=True)


def case_in(layout, **options):
    """A case whose weights lie so."""
    return Case(150, H, I, layout=layout, **options)


def apart(source):
    """The same weights, a tensor for each expert."""
    up, down = ([matrix.clone() for matrix in side] for side in (source.up, source.down))
    return replace(source, up=up, down=down)


class TestWeights:
    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    def test_are_read_where_they_lie(self, layout):
        """In one tensor, or in one for each expert. Only biases are converted."""
        case = case_in(layout)
        source, separate = case.source, apart(case.source)
        weights, others = (OURS.refresh(given, PLAIN) for given in (source, separate))
        assert weights.w1 is weights.w1_dgrad is source.up.stacked
        assert weights.w2 is weights.w2_dgrad is source.down.stacked
        assert others.w1.tensors == tuple(separate.up)
        assert others.w2.tensors == tuple(separate.down)
        for found in (weights, others):
            assert found.layout == layout and found.n1 == 2 * I
            assert found.native_shapes == ((E, 2 * I, H), (E, H, I))
            assert OURS.keep(found, written=True)
        assert not OURS.keep(OURS.refresh(case_in(layout, biased=True).source, PLAIN), written=True)
        assert_same_bits(case.run(OURS, source=separate), case.run(OURS))

    def test_of_two_tensors_are_read_where_they_lie_or_joined(self, monkeypatch):
        """Joined where dgrad cannot read both: other strides, or I that it cannot cut."""
        case = case_in(APART)
        source, wide = case.source, torch.zeros((E, I, H + 8), dtype=BF16)[:, :, :H]
        weights, wanted = OURS.refresh(source, PLAIN), case.run(OURS)
        assert weights.w1 == (source.up.stacked, source.up_half.stacked)
        assert weights.w1_dgrad is weights.w1 and weights.layout == APART
        assert OURS.keep(weights, written=True)
        wide.copy_(source.up_half.stacked)
        joined = [OURS.refresh(replace(source, up_half=StackedMatrices(wide)), PLAIN)]
        monkeypatch.setattr(bf16_weights, "_DEPTH", 64)
        for weights in (*joined, OURS.refresh(source, PLAIN)):
            assert torch.equal(weights.w1, torch.cat([source.up.stacked, wide], 1))
            assert weights.layout == HALVES and not OURS.keep(weights, written=True)
        assert_same_bits(case.run(OURS), wanted)

    def test_of_a_tensor_for_each_expert_are_stacked_where_the_kernels_cannot_read_them(self):
        """fp32, an odd address, more experts than a launch has maps."""
        source = apart(case_in(FUSED).source)
        odd = torch.zeros(I * H + 1, dtype=BF16)[1:].view(I, H)
        for other in (
            replace(source, compute_dtype=torch.float16),
            replace(source, down=[odd, *source.down[1:]]),
            replace(source, up=source.up * 62, down=source.down * 62),
        ):
            weights = OURS.refresh(other, PLAIN)
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
    def weights(layout=FUSED):
        source = case_in(layout, biased=True).source
        return [source.up.stacked.clone(), source.down.stacked.clone(), source.b1, source.b2]

    def test_are_recognised(self, looks):
        first = OURS.read_stacked(self.weights(), FUSED, BF16, PLAIN)
        again = self.weights()
        found = OURS.read_stacked(again, FUSED, BF16, PLAIN)
        assert len(looks) == 1
        assert found.w1 is found.w1_dgrad is again[0] and found.w2 is found.w2_dgrad is again[1]
        assert found.native_shapes == first.native_shapes and found.layout == FUSED
        assert torch.equal(found.b1, again[2]) and found.b1.dtype == FP32
        assert found.native is first.native and found.store is found.adapters is None

    def test_of_two_tensors_are_recognised_by_both(self, looks):
        gate, w2, b1, b2 = self.weights(APART)
        wide = torch.zeros((E, I, H + 8), dtype=BF16)[:, :, :H]
        odd = torch.zeros(E * I * H + 1, dtype=BF16)[1:].view(E, I, H)
        for other, looked in ((gate + 1, 1), (gate + 2, 1), (wide, 2), (odd, 3)):
            given = GateUp(gate, other), w2, b1, b2
            found = OURS.read_stacked(given, APART, BF16, PLAIN)
            assert len(looks) == looked and found.native_shapes == ((E, 2 * I, H), (E, H, I))
            in_place = tensors_of(found.w1)[-1].data_ptr() == other.data_ptr()
            assert in_place == (looked == 1)

    def test_in_any_other_form_are_looked_at(self, looks):
        """And copied each time where the copy engine cannot read them."""
        OURS.read_stacked(self.weights(), FUSED, BF16, PLAIN)
        w1, w2, b1, b2 = given = self.weights()
        wide = torch.zeros((E, H, 2 * I + 8), dtype=BF16)[:, :, : 2 * I].copy_(w1)
        odd = torch.zeros(w2.numel() + 1, dtype=BF16)[1:].view(w2.shape).copy_(w2)
        for weights, layout, dtype, settings, copied in (
            (given, WeightLayout(True), BF16, PLAIN, False),
            (given, FUSED, None, PLAIN, False),
            (given, FUSED, BF16, EngineSettings(), False),
            ((w1, w2, None, None), FUSED, BF16, PLAIN, False),
            ((wide, w2, b1, b2), FUSED, BF16, PLAIN, False),
            *(((w1, odd, b1, b2), FUSED, BF16, PLAIN, True),) * 2,
            *(((w1.float(), w2.float(), b1, b2), FUSED, BF16, PLAIN, True),) * 2,
        ):
            looks.clear()
            found = OURS.read_stacked(weights, layout, dtype, settings)
            assert len(looks) == 1 and torch.equal(found.w2, w2)
            assert (found.w2.data_ptr() != weights[1].data_ptr()) == copied
            assert copied or found.w1.data_ptr() == weights[0].data_ptr()
        with pytest.raises(ShapeError):
            OURS.read_stacked((w1, w2[:, :, :64].contiguous(), b1, b2), FUSED, BF16, PLAIN)

    def test_are_not_kept(self):
        weights = self.weights()
        memory = [StorageWeakRef(weight.untyped_storage()) for weight in weights]
        OURS.read_stacked(weights, FUSED, BF16, PLAIN)
        weights.clear()
        assert all(map(StorageWeakRef.expired, memory))


class TestGradients:
    def test_in_an_order_that_dz_does_not_have_are_refused(self):
        """Also where nobody asked `problem_of`: gate and up rows would change places."""
        case = case_in(NATIVE)
        pending, targets = case.pending(OURS), case.targets(HALVES, stacked=True)
        with pytest.raises(ConfigError, match="all gates before all up values"):
            OURS.backward_dw(pending, targets)
        assert not any(map(torch.any, sums_of(targets).values()))
        assert pending.dz is not None

    def test_in_memory_that_is_taken_late(self, launches):
        """dw1 comes first then, and its operands are gone when memory for dw2 is taken."""
        case, held = case_in(FUSED), []
        wanted, pending = case.run(OURS), case.pending(OURS)
        targets = case.targets(FUSED, stacked=True, mode=GradientMode.FRESH)
        down, targets.down = targets.down, GradientPlaces.stacked(None, E, FUSED)

        def make_down():
            held.append((pending.x, pending.dz))
            return down

        targets.make_down = make_down
        launches.clear()
        OURS.backward_dw(pending, targets)
        assert launches.calls == ["wgrad_up", "wgrad_down"] and held == [(None, None)]
        assert_same_bits(sums_of(targets), wanted)

    @pytest.mark.parametrize(
        ("weights", "gradients"), list(itertools.product(LAYOUTS, LAYOUTS)), ids=str
    )
    @pytest.mark.parametrize("turned", [False, True])
    def test_in_another_layout_than_the_weights(self, weights, gradients, turned):
        """Gate and up of dz lie as in the weights. Only halves can be put in turns, row by row."""
        case = case_in(weights)
        targets = case.targets(gradients, stacked=True, turned=turned)
        problem = OURS.problem_of(targets, PLAIN, weights)
        along_hidden = turned == gradients.transposed
        same = weights.split_half == gradients.split_half
        assert (problem is None) == (same or (weights.split_half and along_hidden))
        if problem is None:
            wanted = case.run(OURS)
            OURS.backward_dw(case.pending(OURS), targets)
            assert_same_bits(sums_of(targets), wanted)
        else:
            words = "before all up values, and" if gradients.split_half else "along gate and up"
            assert words in problem and "\n" not in problem


def test_listeners_know_gate_and_up_in_turns_however_the_weights_lie():
    wanted, found = {}, {}
    for layout, seen in ((NATIVE, wanted), (FUSED, found)):
        with listening(lambda name, value, seen=seen: seen.setdefault(name, value)):
            case_in(layout).run(OURS)
    assert list(found) == list(wanted)
    for name in ("z", "dz", "y1", "y1s", "dx_rows"):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-2, atol=1e-2)
    assert torch.equal(found["z"], wanted["z"]) and torch.equal(found["dz"], wanted["dz"])
