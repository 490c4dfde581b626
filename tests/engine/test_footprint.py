"""Gradient memory is recognised where nothing moved, and only there."""

from __future__ import annotations

import weakref

import pytest
from framework import IS_PADDLE, torch

from sonicmoe.engine import footprint
from sonicmoe.engine.footprint import Footprint, findings_of
from sonicmoe.engine.gradient_places import GradientPlaces
from sonicmoe.engine.targets import GradientTargets
from sonicmoe.layouts import WeightLayout

ERNIE = WeightLayout(transposed=True, split_half=True)
E, H, I = 3, 32, 64


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def matrices(count=4):
    return [zeros(8, 16) for _ in range(count)]


def test_views_made_anew_of_the_same_memory():
    """A trainer may make the slices of its communication buffer at every backward."""
    buffer = zeros(4, 8, 16)
    last = Footprint("rows", [buffer[e] for e in range(4)])
    views = [buffer[e] for e in range(4)]
    assert not last.is_of(views)
    assert findings_of("rows", views) is last.findings


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
    last, others = Footprint("rows", tensors), change(tensors)
    assert not last.is_of(others)
    assert findings_of("rows", others) is not last.findings


def test_answers_are_found_once_and_not_for_ever(monkeypatch):
    monkeypatch.setattr(footprint, "_known", {})
    monkeypatch.setattr(footprint, "MAX_KNOWN", 2)
    tensors, asked = matrices(), []
    last = Footprint("rows", tensors)
    places = GradientPlaces.per_expert(tensors, ERNIE)
    targets = GradientTargets(places, places, findings=last.findings)
    for _ in range(2):
        assert targets.once("key", lambda: asked.append(1) or len(asked)) == 1
    kept = [matrices() for _ in range(4)]
    for others in kept:
        findings_of("rows", others)
        assert len(footprint._known) <= 2
    assert last.findings == {"key": 1}, "where it lies still"
    assert findings_of("rows", tensors) is not last.findings


# The ways in which each framework does.
CHANGED_IN_PLACE = [lambda t: t.reshape_([16, 8])] if IS_PADDLE else [
    lambda t: t.t_(),
    lambda t: t.unsqueeze_(0),
    lambda t: t.as_strided_([16, 8], [8, 1]),
    lambda t: t.as_strided_([8, 16], [16, 1], 4),
    lambda t: setattr(t, "data", t.data.reshape(16, 8)),
    lambda t: setattr(t, "data", zeros(8, 16)),
    lambda t: t.set_(zeros(8, 16)),
    lambda t: t.resize_(64, 16),
    lambda t: t.untyped_storage().resize_(0),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGED_IN_PLACE)
def test_a_tensor_that_changed_in_place(change):
    tensors = matrices()
    tensors[2] = zeros(16, 16)[:8]  # as_strided_ with an offset stays within
    last = Footprint("rows", tensors)
    change(tensors[2])
    assert not last.is_of(tensors)


def test_an_id_proves_nothing_when_its_tensor_is_gone():
    """The next tensor often gets the same id, and here also the address and the strides."""
    buffer = zeros(8, 16)
    for _ in range(50):
        view = buffer.view(torch.float32)
        last = Footprint("rows", [view])
        old = id(view)
        del view
        view = buffer.view(torch.int32)
        assert not last.is_of([view]), id(view) == old


def test_a_footprint_owns_no_tensor():
    tensors = matrices()
    last, alive = Footprint("rows", tensors), [weakref.ref(tensor) for tensor in tensors]
    del tensors
    assert [ref() for ref in alive] == [None] * 4
    assert not last.is_of([None] * 4)


class TestTargets:
    def targets(self, ups, downs, layout=ERNIE):
        return GradientTargets(
            GradientPlaces.per_expert(list(ups), layout),
            GradientPlaces.per_expert(list(downs), layout),
        )

    def test_another_layout_is_another_arrangement(self):
        ups, downs = [zeros(H, H) for _ in range(E)], [zeros(H, H) for _ in range(E)]
        last = self.targets(ups, downs).footprint().findings
        assert self.targets(ups, downs).footprint().findings is last
        assert self.targets(ups, downs, WeightLayout()).footprint().findings is not last
        assert self.targets(ups[:2], [ups[2], *downs]).footprint().findings is not last
        stacked = [zeros(3, H, H), zeros(3, H, H)]
        three, two = (
            GradientTargets(*(GradientPlaces.stacked(t, experts, ERNIE) for t in stacked))
            for experts in (3, 2)
        )
        assert two.footprint().findings is not three.footprint().findings
