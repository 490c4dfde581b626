"""`moe_general_routing_inputs`: any sorted (token, expert, score) triples, the sentinels, the
layouts and the border.
"""

from __future__ import annotations

import numpy as np
import pytest
from framework import numpy, relative_rmse, torch
from functional.layer_golden import (
    MODES,
    batch,
    make_layer,
    make_tokens,
    views,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.golden import Scene, golden

from sonicmoe import moe_general_routing_inputs
from sonicmoe.enums import ActivationType

SWIGLU = ActivationType.SWIGLU
EXPERTS = 5

# Tokens that come not at all, once, many times, and twice to one expert; both sentinels, first and
# last.
TOKENS = [0, 0, 1, 3, 3, 3, 3, 3, 3, 4, 4, 6, 6, 6]
EXPERT_IDS = [-1, 2, 0, 4, 1, 5, 0, 2, -1, 3, 3, 1, 99, 0]
DROPPED = [i for i, e in enumerate(EXPERT_IDS) if not 0 <= e < EXPERTS]


def triples(dtype=torch.float32, index=torch.int64):
    scores = torch.rand(len(TOKENS), generator=torch.Generator().manual_seed(5)) + 0.1
    scores = scores.to(dtype).requires_grad_()
    return scores, torch.tensor(TOKENS, dtype=index), torch.tensor(EXPERT_IDS, dtype=index)


def golden_triples(moe, x, scores, tokens, experts, dout):
    """Output and gradients by name in fp64. Each triple is a token of its own to the golden."""
    w1, _, w2, _ = (None if t is None else numpy(t) for t in views(moe))
    halves = np.concatenate([w1[::2], w1[1::2]])
    token, expert = (np.asarray(ids, np.int64).reshape(-1) for ids in (tokens, experts))
    scene = Scene(
        "swiglu", numpy(x)[token], expert[:, None], numpy(scores)[:, None], numpy(dout)[token],
        halves.transpose(2, 1, 0), w2.transpose(2, 1, 0),
    )  # fmt: skip
    found = golden(scene)
    whole = {name: np.zeros(x.shape) for name in ("out", "dx")}
    for name, rows in whole.items():
        np.add.at(rows, token, found[name])
    dw1, dw2 = (found[name].transpose(0, 2, 1) for name in ("dw1", "dw2"))
    turns = np.stack(np.split(dw1, 2, 1), 2).reshape(dw1.shape)
    return {
        "out": whole["out"], "x": whole["dx"], "scores": found["dprobs"][:, 0],
        "c_fc.weight": turns, "c_proj.weight": dw2,
    }  # fmt: skip


def run_triples(
    moe, x, scores, tokens, experts, dout, weights=None, face=moe_general_routing_inputs, **options
):
    """Output and gradients by name, and the frequency. face: the function, or a graph of it."""
    x = x.detach().clone().requires_grad_()
    out, frequency = face(
        x,
        scores,
        tokens,
        experts,
        *(weights or views(moe)),
        EXPERTS,
        None,
        moe.activation_function,
        **options,
    )
    leaves = {
        "x": x,
        "scores": scores,
        **{n: p for n, p in moe.named_parameters() if n != "router.weight"},
    }
    gradients = torch.autograd.grad((out.float() * dout.float()).sum(), list(leaves.values()))
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}, frequency


def compare(run, expected, bound, least_norm=0.0):
    """Errors relative to the golden's norm, or to `least_norm` where little is left after
    cancellation.
    """
    assert set(run) == set(expected)
    for name, got in run.items():
        error = np.linalg.norm(numpy(got) - expected[name])
        assert error <= bound * max(np.linalg.norm(expected[name]), least_norm), name


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
    scores = torch.linspace(-1, 2, len(drawn)).requires_grad_()
    ids = [torch.tensor(values, dtype=torch.int64) for values in (tokens, experts)]
    run, frequency = run_triples(moe, x, scores, *ids, dout)
    compare(run, golden_triples(moe, x, scores, tokens, experts, dout), 2e-6, least_norm=5.0)
    assert frequency.tolist() == [experts.count(e) for e in range(EXPERTS)]


@pytest.mark.parametrize("num_tokens", [0, 3])
@MODES
def test_no_triples(num_tokens, options):
    moe, x = make_layer(bias=True), make_tokens(num_tokens, 32)
    none = torch.zeros(0, dtype=torch.int64)
    given = torch.zeros(0, requires_grad=True), none, none, torch.ones(num_tokens, 32)
    run, frequency = run_triples(moe, x, *given, **options)
    assert run["out"].shape == (num_tokens, 32) and run["scores"].shape == (0,)
    assert not any(value.any() for value in run.values()) and frequency.tolist() == [0] * EXPERTS


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64], ids=["bf16", "fp16", "fp64"]
)
def test_score_dtypes(dtype):
    moe, x, dout = make_layer(), *batch(8)
    scores, tokens, experts = triples(dtype)
    run, _ = run_triples(moe, x, scores, tokens, experts, dout)
    assert run["scores"].dtype == dtype and run["out"].dtype == torch.float32
    expected = golden_triples(moe, x, scores.detach(), TOKENS, EXPERT_IDS, dout)
    rounded = run.pop("scores")
    assert (
        relative_rmse(numpy(rounded), expected.pop("scores")) <= 2 * torch.finfo(dtype).eps + 1e-6
    )
    compare(run, expected, 2e-6)


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
