"""Gradients added to the parameters' own memory: why some memory does not serve, in one sentence each,
and what the reference engine adds, in every layout and arrangement.
"""

from __future__ import annotations

import pytest
from engine.moe_golden import make_problem, set_up
from framework import numpy, torch

from sonicmoe.engine.gradient_places import GradientPlaces
from sonicmoe.engine.targets import GradientTargets
from sonicmoe.enums import ActivationType, is_glu
from sonicmoe.layouts import WeightLayout
from sonicmoe.observe import listening

ERNIE = WeightLayout(transposed=True, split_half=True)
LAYOUTS = [ERNIE, WeightLayout(True, False), WeightLayout(False, True), WeightLayout()]
E, H, I = 3, 32, 64


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def per_expert(ups, downs):
    return GradientTargets(
        GradientPlaces.per_expert(ups, ERNIE), GradientPlaces.per_expert(downs, ERNIE)
    )


def fitting():
    return [zeros(H, 2 * I) for _ in range(E)], [zeros(I, H) for _ in range(E)]


def assert_says(found, memory, words):
    """One sentence about the memory that is wrong."""
    assert found.startswith(f"the gradient memory of {memory} ")
    assert words in found and "\n" not in found


class TestProblem:
    def test_none(self):
        targets = per_expert(*fitting())
        assert targets.copy_engine_problem() is None
        stacked = GradientTargets(
            GradientPlaces.stacked(zeros(E, H, 2 * I), E, ERNIE),
            GradientPlaces.stacked(zeros(E, I, H), E, ERNIE),
        )
        assert stacked.copy_engine_problem() is None

    def test_one_kind_of_layout_for_each_projection(self):
        """PaddleFleet converts main_grad of weight1 and leaves that of weight2."""
        native = WeightLayout()
        mixed = GradientTargets(
            GradientPlaces.stacked(zeros(E, 2 * I, H), E, native),
            GradientPlaces.stacked(zeros(E, I, H).transpose(1, 2), E, native),
        )
        assert mixed.copy_engine_problem() is None

    @pytest.mark.parametrize(("tensor", "words"), [
        (lambda: zeros(I, 2 * H)[:, ::2], "needed: 1 in one axis of its matrices"),
        (lambda: zeros(I, H + 2)[:, :H], "needed: multiples of 16 bytes in all axes but"),
        (lambda: zeros(I * H + 1)[1:].reshape([I, H]), "needed: a multiple of 16 bytes"),
    ], ids=("no axis", "stride", "address"))  # fmt: skip
    def test_for_the_copy_engine(self, tensor, words):
        ups, downs = fitting()
        downs[2] = tensor()
        assert_says(
            per_expert(ups, downs).copy_engine_problem(), "expert 2's down-projection", words
        )

    def test_a_stacked_tensor_is_named_as_one(self):
        wrong = GradientPlaces.stacked(zeros(E, H, 4 * I)[:, :, ::2], E, ERNIE)
        down = GradientPlaces.stacked(zeros(E, I, H), E, ERNIE)
        words = "the gradient memory of the up-projections has strides"
        assert GradientTargets(wrong, down).copy_engine_problem().startswith(words)

    def test_overlap(self):
        buffer = zeros(2 * H * 2 * I)
        ups, downs = fitting()
        ups[0] = buffer[: H * 2 * I].reshape([H, 2 * I])
        ups[2] = buffer[H * 2 * I - 4 : 2 * H * 2 * I - 4].reshape([H, 2 * I])
        found = per_expert(ups, downs).copy_engine_problem()
        assert "expert 0's up-projection overlaps" in found and "expert 2's up" in found
        ups[2] = buffer[H * 2 * I :].reshape([H, 2 * I])
        assert per_expert(ups, downs).copy_engine_problem() is None

    def test_one_memory_for_two_experts(self):
        ups, downs = fitting()
        downs[1] = downs[0]
        assert "overlaps" in per_expert(ups, downs).copy_engine_problem()

    def test_different_axes(self):
        ups, downs = fitting()
        ups[1] = zeros(2 * I, H).transpose(0, 1)
        words = "the experts' up-projection gradients are contiguous along different axes"
        assert per_expert(ups, downs).copy_engine_problem() == words


def arranged(kind, shape, experts):
    """`experts` matrices in larger memory, that memory, and whether they are one tensor."""
    rows, columns = shape
    if kind == "own":
        memory = [zeros(rows * columns + 8) for _ in range(experts)]
        return [m[4:-4].reshape(list(shape)) for m in memory], memory, False
    if kind == "slices":
        memory = zeros(experts, rows * columns + 4)
        return [memory[e][:-4].reshape(list(shape)) for e in range(experts)], [memory], False
    if kind == "permuted":
        memory = [zeros(columns, rows + 4) for _ in range(experts)]
        return [m[:, :rows].transpose(0, 1) for m in memory], memory, False
    memory = zeros(experts + 1, rows, columns)
    return [memory[:experts]], [memory], True


def step(setup, targets):
    _, saved = setup.forward()
    setup.engine.backward(setup.dout, saved, setup.weights, targets)


class TestReference:
    """Against accumulators that are added to the same memory afterwards."""

    @pytest.mark.parametrize("kind", ["own", "slices", "permuted", "stacked"])
    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    @pytest.mark.parametrize("activation", [ActivationType.SWIGLU, ActivationType.SILU])
    def test_bits_of_accumulating_and_flushing(self, activation, layout, kind):
        setup = set_up(make_problem(activation=activation))
        layout = WeightLayout(layout.transposed, layout.split_half and is_glu(activation))
        sums = setup.accumulators()
        shapes = [tuple(int(n) for n in held.shape[1:]) for held in (sums.dw1, sums.dw2)]
        experts, weights, memories = int(sums.dw1.shape[0]), [], []
        for native in shapes:
            shape = native[::-1] if layout.transposed else native
            tensors, memory, stacked = arranged(kind, shape, experts)
            memories += memory
            given = (tensors[0], experts) if stacked else (tensors,)
            make = GradientPlaces.stacked if stacked else GradientPlaces.per_expert
            weights.append(make(*given, layout))
        targets = GradientTargets(*weights)
        for memory in memories:
            memory.add_(torch.full_like(memory, 0.25))
        before = [memory.clone() for memory in memories]
        step(setup, sums)
        step(setup, targets)
        got = [memory.clone() for memory in memories]
        for memory, value in zip(memories, before, strict=True):
            memory.copy_(value)
        for name, total in (("dw1", sums.dw1), ("dw2", sums.dw2)):
            for expert in range(experts):
                targets.add(name, expert, targets.arranged(name, total[expert]))
        for memory, value in zip(memories, got, strict=True):
            assert (numpy(memory) == numpy(value)).all(), "other bits, or a stranger's"
        step(setup, sums)
        step(setup, targets)
        first = numpy(targets.sums("dw1"))
        assert abs(first - 0.25 - numpy(sums.dw1)).max() < 1e-5 * abs(first).max()

    def test_frozen_parameters(self):
        setup = set_up(make_problem())
        sums = setup.accumulators()
        experts, n1, hidden = (int(n) for n in sums.dw1.shape)
        ups = [zeros(hidden, n1) if e else None for e in range(experts)]
        targets = per_expert(ups, [None] * experts)
        step(setup, sums)
        step(setup, targets)
        assert targets.sums("dw2") is None and next(iter(targets.named())) == "dw1[1]"
        found = numpy(targets.sums("dw1"))
        assert (found[1:] == numpy(sums.dw1)[1:]).all() and not found[0].any()

    def test_a_listener_sees_the_sums_and_may_replace_them(self):
        setup = set_up(make_problem())
        sums = setup.accumulators()
        experts, n1, hidden = (int(n) for n in sums.dw1.shape)
        inner = int(sums.dw2.shape[2])
        targets = GradientTargets(
            GradientPlaces.stacked(zeros(experts, hidden, n1), experts, ERNIE),
            GradientPlaces.per_expert([zeros(inner, hidden) for _ in range(experts)], ERNIE),
        )
        seen = {"native": {}, "parameters": {}}

        def run(held, where):
            def listener(name, value):
                if name in ("dw1", "dw2"):
                    seen[where][name] = numpy(value)
                    return value * 2
                return value

            with listening(listener):
                step(setup, held)

        run(sums, "native")
        run(targets, "parameters")
        for name in ("dw1", "dw2"):
            assert (seen["native"][name] == seen["parameters"][name]).all()
            assert (numpy(targets.sums(name)) == 2 * seen["native"][name]).all()
