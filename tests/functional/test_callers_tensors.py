"""Public calls of the PyTorch face never write into their caller's tensors; the node's suite has
its own (tests/node/test_node_life.py).
"""

from __future__ import annotations

import callers_tensors
import pytest
from callers_tensors import FACES, SPELLINGS, check_face, given, spelled, untouched
from framework import torch
from functional.layer_golden import assert_same_bits, make_layer, make_tokens, run_layer

CALLS = [
    (face, fp8) for face in FACES for fp8 in (False, True) if not (fp8 and face == "MoE, plain")
]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("face", "fp8"), CALLS)
def test_calls_leave_their_callers_tensors_alone(face, fp8, spelling):
    check_face(face, given("cpu", spelling), fp8)


@pytest.mark.parametrize("use_fp8", [False, True])
def test_a_main_grad_is_left_alone(use_fp8):
    """Autograd gets the gradients of weights that are passed to a call, whatever they carry."""
    moe, x, dout = make_layer(bias=True), make_tokens(8, 32), make_tokens(8, 32, seed=2)
    expected = run_layer(moe, x, dout, use_fp8=use_fp8)
    for weight in moe.parameters():
        weight.main_grad = torch.full_like(weight, float("nan"))
        weight.grad_added_to_main_grad = False
    assert_same_bits(run_layer(moe, x, dout, use_fp8=use_fp8), expected)
    for weight in moe.parameters():
        assert weight.main_grad.isnan().all() and not weight.grad_added_to_main_grad


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.data[0].neg_(),
        lambda t: t.mul_(1),
        lambda t: t.requires_grad_(),
        lambda t: t.resize_(2, 3),
        lambda t: callers_tensors.storage_bytes(t)[-1].fill_(1),
        lambda t: callers_tensors.storage_bytes(t)[2 * callers_tensors.MARGIN + 2].fill_(1),
        lambda t: setattr(t, "grad", torch.zeros_like(t)),
    ],
    ids=[
        "value",
        "version counter",
        "wants a gradient",
        "shape",
        "behind it",
        "between its elements",
        ".grad",
    ],
)
def test_the_snapshot_sees(change):
    tensor = spelled(torch.ones(3, 4, dtype=torch.bfloat16), "strided")
    with pytest.raises(AssertionError, match="mine"), untouched(mine=tensor, other=torch.ones(3)):
        change(tensor)
