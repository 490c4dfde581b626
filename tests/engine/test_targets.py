"""Gradients added to the parameters' own memory: why some memory does not serve, in one sentence each,
and what the reference engine adds, in every layout and arrangement.
"""

from __future__ import annotations

import pytest
from engine.moe_golden import make_problem, set_up
from framework import numpy, torch
from passes import backward

from sonicmoe.engine.gradient_places import GradientPlaces
from sonicmoe.engine.targets import GradientTargets
from sonicmoe.layouts import WeightLayout
from sonicmoe.observe import listening

ERNIE = WeightLayout(transposed=True, split_half=True)
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


def step(setup, targets):
    _, saved = setup.forward()
    backward(setup.engine, setup.dout, saved, setup.weights, targets)


class TestReference:
    """Against accumulators that are added to the same memory afterwards."""

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
