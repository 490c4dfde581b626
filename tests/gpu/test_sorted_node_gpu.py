"""A node over the parameters of Megatron-Core's experts, on rows that a dispatcher has sorted, whose weights
lie elsewhere in the backward.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import faces
from oracle.case import Case
from oracle.golden import scene_of

pytestmark = pytest.mark.gpu


def gather_elsewhere(weights):
    """As FSDP, between a forward and its backward."""
    values = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.untyped_storage().resize_(0)
    hold = [torch.full_like(value, float("nan")) for value in values]  # where they were
    for weight, value in zip(weights, values, strict=True):
        weight.untyped_storage().resize_(value.numel() * value.element_size())
        weight.data.copy_(value)
    return hold


class Moving(faces.Sorted):
    def parameter(self, array):
        """The parameter is alone in its memory."""
        return torch.nn.Parameter(self.tensor(array).to(self.dtype))

    def backward(self, call):
        self.snapshots = [taken for taken in self.snapshots if "weight 0" not in taken.tensors]
        hold = gather_elsewhere(self.weights)
        super().backward(call)
        del hold


@pytest.mark.parametrize("gradients", ["main_grad", "unset"])
@pytest.mark.parametrize(("engine", "recipe"), [("bf16", "none"), ("hopper", "dx256")])
def test_the_bits_of_weights_that_stay(engine, recipe, gradients, monkeypatch):
    case = Case.parse(
        f"face=sorted arrangement=numbered gradients={gradients} recipe={recipe} dtype=bfloat16 "
        "routing=sentinels sizes=300x256x128x4x1"
    )
    stayed = faces.run(case, scene_of(case), engine)
    monkeypatch.setitem(faces.LAYERS, "sorted", Moving)
    moved = faces.run(case, scene_of(case), engine)
    assert all(np.array_equal(moved[name], stayed[name]) for name in stayed)
