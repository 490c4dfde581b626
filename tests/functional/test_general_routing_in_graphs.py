"""`moe_general_routing_inputs` where nothing may be read back: the width of the routing table given
by the caller.
"""

from __future__ import annotations

import pytest
from framework import torch
from functional.layer_golden import MODES, batch, make_layer, views
from functional.test_general_routing import DROPPED, TOKENS, run_triples, triples

from sonicmoe import SonicMoEConfig, moe_general_routing_inputs
from sonicmoe.errors import RoutingError
from sonicmoe.functional import triples as triples_module

MOST = max(TOKENS.count(token) for token in TOKENS)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Tokens pass for GPU tensors, which may not be read, and reading any tensor is an error."""

    def read(*_):
        raise AssertionError("a GPU would be waited for")

    monkeypatch.setattr(triples_module, "is_cuda", lambda _: True)
    for name in ("tolist", "item", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, read)


def biased_layer():
    return make_layer(bias=True), *batch(8)


@MODES
@pytest.mark.parametrize("most", [MOST, MOST + 3])
def test_the_width_changes_no_bit(most, options):
    moe, x, dout = biased_layer()
    expected, frequency = run_triples(moe, x, *triples(), dout, **options)
    found, again = run_triples(moe, x, *triples(), dout, **options, max_experts_per_token=most)
    assert torch.equal(frequency, again) and not found["scores"][DROPPED].any()
    for name, got in found.items():
        assert torch.equal(got, expected[name]), name


def test_nothing_is_read_back(on_a_gpu):
    scores, tokens, experts = triples()
    triples_module.triples_to_topk(scores, tokens, experts, 8, MOST)
    with pytest.raises(AssertionError, match="waited for"):
        triples_module.triples_to_topk(scores, tokens, experts, 8, None)


WRONG = {
    "unsorted": ([0, 2, 1], "not ascending"),
    "beyond x": ([0, 1, 8], r"1 ids outside \[0, 8\)"),
    "too often": ([3, 3, 3], "names a token 3 times; max_experts_per_token is 2"),
}


@pytest.mark.parametrize("where", ["on the host", "validated on a GPU", "on a GPU"])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_tokens_are_refused_everywhere(case, where, monkeypatch):
    """Where the call may not wait, by an assertion on the device (which the host raises at once)."""
    tokens, message = WRONG[case]
    moe, x, _ = biased_layer()
    arguments = (x, torch.ones(3), torch.tensor(tokens), torch.tensor([0, 1, 2]), *views(moe))
    if where != "on the host":
        monkeypatch.setattr(triples_module, "is_cuda", lambda _: True)
    error, words = (
        (RoutingError, message)
        if where != "on a GPU"
        else (RuntimeError, "names a token more than 2 times")
    )
    with (
        SonicMoEConfig(validate_dispatch=where == "validated on a GPU").activate(),
        pytest.raises(error, match=words),
    ):
        moe_general_routing_inputs(*arguments, max_experts_per_token=2)
