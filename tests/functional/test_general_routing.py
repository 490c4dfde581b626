"""`moe_general_routing_inputs`: any sorted (token, expert, score) triples, the sentinels, the
layouts and the border.
"""

from __future__ import annotations

import pytest
from framework import torch
from functional.layer_golden import (
    MODES,
    batch,
    make_layer,
    make_tokens,
    views,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sonicmoe import SonicMoEConfig, moe_general_routing_inputs
from sonicmoe.errors import RoutingError
from sonicmoe.functional import triples as triples_module

EXPERTS = 5

# Tokens that come not at all, once, many times, and twice to one expert; both sentinels, first and
# last.
TOKENS = [0, 0, 1, 3, 3, 3, 3, 3, 3, 4, 4, 6, 6, 6]
EXPERT_IDS = [-1, 2, 0, 4, 1, 5, 0, 2, -1, 3, 3, 1, 99, 0]
SCORES = torch.float32, torch.bfloat16, torch.float16, torch.float64
DROPPED = [i for i, e in enumerate(EXPERT_IDS) if not 0 <= e < EXPERTS]


def triples():
    scores = torch.rand(len(TOKENS), generator=torch.Generator().manual_seed(5)) + 0.1
    return scores.requires_grad_(), torch.tensor(TOKENS), torch.tensor(EXPERT_IDS)


def run_triples(moe, x, scores, tokens, experts, dout, **options):
    """Output and gradients by name, and the frequency."""
    x = x.detach().clone().requires_grad_()
    given = x, scores, tokens, experts, *views(moe), EXPERTS, None, moe.activation_function
    out, frequency = moe_general_routing_inputs(*given, **options)
    leaves = {"x": x, "scores": scores, **dict(moe.named_parameters())}
    del leaves["router.weight"]
    gradients = torch.autograd.grad((out.float() * dout.float()).sum(), list(leaves.values()))
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}, frequency


def one_by_one(moe, x, scores, tokens, experts, dout):
    """What each triple gives as a token of its own, which tests/oracle has."""
    number = torch.arange(len(tokens))
    found, _ = run_triples(moe, x[tokens], scores, number, experts, dout[tokens])
    for name in ("out", "x"):
        found[name] = torch.zeros_like(x).index_add(0, tokens, found[name])
    return found


def compare(run, expected, bound=2e-6, least_norm=0.0):
    """Errors relative to what is expected, or to `least_norm` where little is left after cancellation."""
    assert set(run) == set(expected)
    for name, got in run.items():
        error = (got.double() - expected[name].double()).norm()
        assert error <= bound * max(expected[name].norm(), least_norm), name


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_routing(data):
    num_tokens = data.draw(st.integers(0, 6), "tokens")
    pairs = st.tuples(st.integers(0, max(0, num_tokens - 1)), st.integers(-1, EXPERTS + 2))
    drawn = sorted(
        data.draw(st.lists(pairs, max_size=12 if num_tokens else 0), "pairs"),
        key=lambda pair: pair[0],
    )
    tokens, experts = [t for t, _ in drawn], [e for _, e in drawn]
    moe, x, dout = make_layer(), *batch(num_tokens)
    dtype = data.draw(st.sampled_from(SCORES), "dtype of the scores")
    scores = torch.linspace(-1, 2, len(drawn)).to(dtype).requires_grad_()
    ids = [torch.tensor(values, dtype=torch.int64) for values in (tokens, experts)]
    run, frequency = run_triples(moe, x, scores, *ids, dout)
    assert run["scores"].dtype == dtype and run["out"].dtype == torch.float32
    expected = one_by_one(moe, x, scores.detach().float().requires_grad_(), *ids, dout)
    of_scores = {"scores": run.pop("scores")}, {"scores": expected.pop("scores")}
    compare(*of_scores, 2 * torch.finfo(dtype).eps + 1e-6, least_norm=5.0)
    compare(run, expected, least_norm=5.0)
    assert frequency.tolist() == [experts.count(e) for e in range(EXPERTS)]


def test_inference_keeps_nothing(saves):
    moe, x, (scores, tokens, experts) = make_layer(), make_tokens(8, 32), triples()
    arguments = (x, scores, tokens, experts, *views(moe))
    recorded, _ = moe_general_routing_inputs(*arguments)
    quiet, _ = moe_general_routing_inputs(*arguments, is_inference_mode_enabled=True)
    assert saves == [True, False]
    assert recorded.requires_grad and not quiet.requires_grad and torch.equal(recorded, quiet)
    with torch.inference_mode():
        split, _ = moe_general_routing_inputs(*arguments, concat_layout=True)
    assert split.shape == x.shape


# Where nothing may be read back: the width of the routing table is given by the caller.

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
