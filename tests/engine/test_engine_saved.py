"""What waits between forward and backward: freed stage by stage, packed for autograd, and checked
against a changed routing.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest
from engine.moe_golden import (
    FP8,
    PLAIN,
    ROWS,
    assert_same_bits,
    make_problem,
    set_up,
)
from framework import tensor, torch

from sonicmoe.engine import reference, reference_operands
from sonicmoe.engine.interface import Saved
from sonicmoe.enums import ZCode
from sonicmoe.errors import RoutingError
from sonicmoe.routing.build import build_routing


class TestMemory:
    @staticmethod
    def alive_at(monkeypatch, module, function, stage, watched):
        """Whether `watched` is alive when an operand of this name is made, in the list returned."""
        seen, original = [], getattr(module, function)

        def spy(values, name, *rest):
            if name == stage:
                seen.append(watched() is not None)  # without a collection of garbage
            return original(values, name, *rest)

        monkeypatch.setattr(module, function, spy)
        return seen

    @pytest.mark.parametrize("frees", [True, False])
    def test_z_is_dead_before_the_dx_gemm(self, monkeypatch, frees):
        """z feeds dgated only: under stage-wise memory the codes are gone when the dgrad operand dz
        is quantised.
        """
        setup = set_up(make_problem(), replace(FP8, frees_stagewise=frees))
        _, saved = setup.forward()
        codes = weakref.ref(saved.z.codes)
        seen = self.alive_at(monkeypatch, reference, "operand", "dz", codes)
        setup.engine.backward_dx(setup.dout, saved, setup.weights)
        assert (saved.x is None) == (saved.z is None) == frees
        assert seen == [not frees]

    @pytest.mark.parametrize("frees", [True, False])
    def test_operands_of_dw2_are_dead_before_dw1(self, monkeypatch, frees):
        setup = set_up(make_problem(), replace(FP8, frees_stagewise=frees))
        pending = setup.pending()
        y1s = weakref.ref(pending.y1s)
        seen = self.alive_at(monkeypatch, reference_operands, "_wgrad_operand", "wgrad_x", y1s)
        setup.engine.backward_dw(pending, setup.accumulators())
        assert seen == [not frees]

    def test_a_released_forward_says_so(self):
        setup = set_up(make_problem(), replace(FP8, frees_stagewise=True))
        _, saved = setup.forward()
        _, _, pending = setup.engine.backward_dx(setup.dout, saved, setup.weights)
        with pytest.raises(RuntimeError, match="released"):
            setup.engine.backward_dx(setup.dout, saved, setup.weights)
        setup.engine.backward_dw(pending, setup.accumulators())
        with pytest.raises(RuntimeError, match="released"):
            setup.engine.backward_dw(pending, setup.accumulators())


class TestSaved:
    @pytest.mark.parametrize(
        "settings",
        [PLAIN, FP8, ROWS, replace(FP8, save_z=ZCode.BF16), replace(FP8, recompute_z=True)],
        ids=["plain", "int8", "e4m3", "bf16", "none"],
    )
    def test_packs_and_unpacks_to_the_same_bits(self, settings):
        setup = set_up(make_problem(bias=True), settings)
        out, saved = setup.forward()
        tensors, spec = saved.pack()
        assert not any(isinstance(v, torch.Tensor) for v in spec)
        assert_same_bits(setup.backward(out, spec.unpack(tensors)), setup.run())

    def repacked(self, indices, probs=None):
        """The spec of one routing, the tensors of another: what activation recompute delivers when
        the router is not deterministic.
        """
        problem = make_problem(tokens=6, topk=2, experts=3, empty=())
        first = np.array([[0, 1], [1, 2], [0, 2], [2, -1], [1, 0], [-1, 0]])
        setup = set_up(problem.but(indices=first))
        _, spec = setup.forward()[1].pack()
        probs = problem.probs if probs is None else probs
        other = build_routing(tensor(np.asarray(indices)), tensor(probs, torch.float32), 3)
        tensors, _ = Saved(setup.settings, other, setup.x, None).pack()
        return spec, tensors

    def test_other_counts_are_named(self):
        spec, tensors = self.repacked([[0, 1], [1, 2], [0, 2], [2, 1], [1, 0], [-1, 0]])
        words = r"routing differs between forward and recompute.*\[4, 3, 3\].*\[4, 4, 3\]"
        with pytest.raises(RoutingError, match=words):
            spec.unpack(tensors)

    def test_other_tokens_with_the_same_counts_are_named(self):
        spec, tensors = self.repacked([[0, 2], [1, 2], [0, 1], [2, -1], [1, 0], [-1, 0]])
        with pytest.raises(RoutingError, match="routing differs between forward and recompute"):
            spec.unpack(tensors)
