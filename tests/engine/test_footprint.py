"""Gradient memory is recognised where nothing moved, and only there."""

from __future__ import annotations

import weakref

import pytest
from framework import IS_PADDLE, torch

from sonicmoe.engine.footprint import Footprint
from sonicmoe.engine.gradient_memory import WeightTarget
from sonicmoe.engine.targets import ParameterTargets
from sonicmoe.interop import data_ptr
from sonicmoe.layouts import WeightLayout

ERNIE = WeightLayout(transposed=True, split_half=True)
E, H, I = 3, 32, 64


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def matrices(count=4):
    return [zeros(8, 16) for _ in range(count)]


def test_the_same_tensors():
    tensors = matrices()
    last = Footprint("rows", tensors)
    assert last.seen_again("rows", tensors) is last
    assert last.seen_again("rows", list(tensors)) is last, "another list of them"
    assert last.seen_again("columns", tensors) is None


def test_views_made_anew_of_the_same_memory():
    """A trainer may make the slices of its communication buffer at every backward."""
    buffer, asked = zeros(4, 8, 16), []
    last = Footprint("rows", [buffer[e] for e in range(4)])
    last.once("key", lambda: asked.append(1))
    views = [buffer[e] for e in range(4)]
    again = last.seen_again("rows", views)
    assert again is not None and again is not last
    again.once("key", lambda: asked.append(1))
    assert asked == [1]
    assert again.seen_again("rows", views) is again, "from now on of these tensors"


@pytest.mark.parametrize("change", [
    lambda t: [t[1], t[0], *t[2:]],
    lambda t: [*t[:3], zeros(8, 16)],
    lambda t: [None, *t[1:]],
    lambda t: t[:3],
    lambda t: [*t, zeros(8, 16)],
    lambda t: [*t[:3], t[3].transpose(0, 1)],
    lambda t: [*t[:3], t[3].reshape([16, 8])],
    lambda t: [*t[:3], t[3][:4]],
    lambda t: [*t[:3], t[3].view(torch.int32)],
], ids=("order", "memory", "frozen", "fewer", "more", "strides", "shape", "rows", "dtype"))  # fmt: skip
def test_other_tensors(change):
    tensors = matrices()
    assert Footprint("rows", tensors).seen_again("rows", change(tensors)) is None


@pytest.mark.skipif(IS_PADDLE, reason="the ways in which PyTorch changes a tensor in place")
@pytest.mark.parametrize("change", [
    lambda t: t.t_(),
    lambda t: t.unsqueeze_(0),
    lambda t: t.as_strided_([16, 8], [8, 1]),
    lambda t: t.as_strided_([8, 16], [16, 1], 4),
    lambda t: setattr(t, "data", t.data.reshape(16, 8)),
    lambda t: setattr(t, "data", zeros(8, 16)),
    lambda t: t.set_(zeros(8, 16)),
    lambda t: t.resize_(64, 16),
    lambda t: t.untyped_storage().resize_(0),
])  # fmt: skip
def test_a_tensor_that_changed_in_place(change):
    tensors = matrices()
    tensors[2] = zeros(16, 16)[:8]  # as_strided_ with an offset stays within
    last = Footprint("rows", tensors)
    change(tensors[2])
    assert last.seen_again("rows", tensors) is None


@pytest.mark.skipif(not IS_PADDLE, reason="a way in which Paddle changes a tensor in place")
def test_a_tensor_that_paddle_reshaped_in_place():
    tensors = matrices()
    last = Footprint("rows", tensors)
    tensors[2].reshape_([16, 8])
    assert last.seen_again("rows", tensors) is None


def test_an_id_proves_nothing_when_its_tensor_is_gone():
    """The next tensor often gets the same id, and here also the address and the strides."""
    buffer = zeros(8, 16)
    for _ in range(50):
        view = buffer.view(torch.float32)
        last = Footprint("rows", [view])
        old = id(view)
        del view
        view = buffer.view(torch.int32)
        assert last.seen_again("rows", [view]) is None, id(view) == old


def test_a_footprint_owns_no_tensor():
    tensors = matrices()
    last, alive = Footprint("rows", tensors), [weakref.ref(tensor) for tensor in tensors]
    last.once("key", lambda: 1)
    del tensors
    assert [ref() for ref in alive] == [None] * 4


class TestTargets:
    def make(self):
        ups, downs = [zeros(H, 2 * I) for _ in range(E)], [zeros(I, H) for _ in range(E)]
        return ups, downs

    def targets(self, ups, downs, layout=ERNIE):
        return ParameterTargets(
            WeightTarget.per_expert(list(ups), layout), WeightTarget.per_expert(list(downs), layout)
        )

    def problems(self, targets):
        return targets.problem(2 * I, H, I, "cpu"), targets.copy_engine_problem()

    def test_another_layout_is_another_arrangement(self):
        ups, downs = [zeros(H, H) for _ in range(E)], [zeros(H, H) for _ in range(E)]
        last = self.targets(ups, downs).recognise(None)
        assert self.targets(ups, downs).recognise(last) is last
        assert self.targets(ups, downs, WeightLayout()).recognise(last) is not last
        assert self.targets(ups[:2], [ups[2], *downs]).recognise(last) is not last
        stacked = [zeros(3, H, H), zeros(3, H, H)]
        three = ParameterTargets(*(WeightTarget.stacked(t, 3, ERNIE) for t in stacked))
        two = ParameterTargets(*(WeightTarget.stacked(t, 2, ERNIE) for t in stacked))
        assert two.recognise(three.recognise(None)) is not three.footprint

    @pytest.mark.skipif(IS_PADDLE, reason="PyTorch's way of freeing memory of a living tensor")
    def test_freed_memory_is_named(self):
        ups, downs = self.make()
        ups[1].untyped_storage().resize_(0)
        assert data_ptr(ups[1]) == 0
        words = "the gradient memory of expert 1's up-projection has no memory: it was freed"
        assert self.problems(self.targets(ups, downs))[0] == words
