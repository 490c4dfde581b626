"""`moe_general_routing_inputs`: any sorted (token, expert, score) triples, the sentinels, the
layouts and the border.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine.moe_golden import golden
from framework import numpy, relative_rmse, torch
from functional.layer_golden import (
    MODES,
    batch,
    make_layer,
    make_tokens,
    native,
    native_gradients,
    problem_of,
    views,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sonicmoe import SonicMoEConfig, moe_general_routing_inputs
from sonicmoe.enums import ActivationType
from sonicmoe.errors import ConfigError, DTypeError, RoutingError, ShapeError

SWIGLU = ActivationType.SWIGLU
EXPERTS = 5

# Tokens that come not at all, once, many times, and twice to one expert; both sentinels, first and
# last.
TOKENS = [0, 0, 1, 3, 3, 3, 3, 3, 3, 4, 4, 6, 6, 6]
EXPERT_IDS = [-1, 2, 0, 4, 1, 5, 0, 2, -1, 3, 3, 1, 99, 0]
NUM_TOKENS = 8  # tokens 2, 5 and 7 have no triple
DROPPED = [i for i, e in enumerate(EXPERT_IDS) if not 0 <= e < EXPERTS]


def triples(dtype=torch.float32, index=torch.int64):
    scores = torch.rand(len(TOKENS), generator=torch.Generator().manual_seed(5)) + 0.1
    scores = scores.to(dtype).requires_grad_()
    return scores, torch.tensor(TOKENS, dtype=index), torch.tensor(EXPERT_IDS, dtype=index)


def padded(scores, tokens, experts, num_tokens):
    """Triples as `[T, K]` numpy indices (-1 filled), scores, and each triple's place."""
    slots = [[] for _ in range(num_tokens)]
    for i, token in enumerate(tokens):
        slots[token].append(i)
    width = max([1, *map(len, slots)])
    indices, probs = np.full((num_tokens, width), -1), np.zeros((num_tokens, width))
    places = np.zeros((len(tokens), 2), int)
    for t, row in enumerate(slots):
        for k, i in enumerate(row):
            indices[t, k], probs[t, k], places[i] = experts[i], scores[i], (t, k)
    return indices, probs, places


def golden_triples(moe, x, scores, tokens, experts, dout):
    """Golden `out` and gradients by name, in native layout."""
    weights = [
        native(w) for w in (moe.c_fc.weight, moe.c_proj.weight, moe.c_fc.bias, moe.c_proj.bias)
    ]
    indices, probs, places = padded(numpy(scores), tokens, experts, x.shape[0])
    problem = problem_of(*weights, moe.activation_function, numpy(x), indices, probs, numpy(dout))
    result = golden(problem)
    dw1, dw2, db1, db2 = native_gradients(problem, result)
    named = {"out": result.out, "x": result.dx, "scores": result.dprobs[places[:, 0], places[:, 1]]}
    named |= {"c_fc.weight": dw1, "c_proj.weight": dw2, "c_fc.bias": db1, "c_proj.bias": db2}
    return {name: value for name, value in named.items() if value is not None}


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


def ids(*values):
    return torch.tensor(values, dtype=torch.int64)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


REFUSED = [
    # argument, value, error, message
    ("token_indices", ids(0, 2, 1), RoutingError, "token_indices is not ascending"),
    ("token_indices", ids(0, 1, 8), RoutingError, r"1 ids outside \[0, 8\)"),
    ("token_indices", ids(-2, -1, 3), RoutingError, r"2 ids outside \[0, 8\)"),
    (
        "token_indices",
        ids(0, 1),
        ShapeError,
        r"shape \(2,\); needed: that of router_scores, \(3,\)",
    ),
    ("expert_indices", ids(0, 1, 2, 3), ShapeError, r"expert_indices has shape \(4,\)"),
    ("router_scores", torch.ones(3, 1), ShapeError, r"router_scores has shape \(3, 1\)"),
    ("router_scores", ids(1, 1, 1), DTypeError, "router_scores is int64"),
    ("token_indices", zeros(3), DTypeError, "token_indices is float32"),
    ("expert_indices", zeros(3), DTypeError, "expert_indices is float32"),
    ("E", 4, ShapeError, r"w1 \[N1, H, E\] has shape \(48, 32, 5\); needed: 4 experts"),
    ("w1", zeros(48, 32, 4), ShapeError, "w1 .* needed: 5 experts"),
    ("w1", zeros(5, 48, 32), ShapeError, r"w1 .* needed: 5 experts .* w1.permute\(1, 2, 0\)"),
    ("w1", zeros(48, 5), ShapeError, r"w1 has shape \(48, 5\); needed: \[N1, H, E\]"),
    ("w1", zeros(46, 32, 5), ShapeError, "w1 has 46 rows per expert"),
    ("w2", zeros(16, 24, 5), ShapeError, "w2 has shape"),
    ("b1", zeros(5, 48), ShapeError, "both or neither"),
    ("x", zeros(8, 16), ShapeError, r"x has shape \(8, 16\)"),
    ("x", zeros(8, 32, dtype=torch.float64), DTypeError, "x is float64"),
    ("x", zeros(8, 32, dtype=torch.int32), DTypeError, "x is int32"),
    ("x", zeros(2, 4, 32), ShapeError, r"x has shape \(2, 4, 32\); needed: \[T, H\]"),
    ("activation_type", "swish", ConfigError, r"_type is 'swish'; needed: one of \['swiglu'"),
    ("max_experts_per_token", "2", ShapeError, "max_experts_per_token is '2'; needed: an integer"),
    ("max_experts_per_token", 0, ShapeError, "max_experts_per_token is 0; needed: .*, at least 1"),
    ("use_fp8", "off", ConfigError, "use_fp8 is 'off'; needed: True, False or None"),
]


def three_triples():
    w1, b1, w2, b2 = views(make_layer())
    given = {"x": make_tokens(8, 32), "router_scores": torch.ones(3)}
    given |= {"token_indices": ids(0, 0, 4), "expert_indices": ids(0, 1, 2)}
    return given | {"w1": w1, "b1": b1, "w2": w2, "b2": b2}


@pytest.mark.parametrize(("name", "value", "error", "message"), REFUSED)
def test_refused(name, value, error, message):
    arguments = three_triples()
    moe_general_routing_inputs(**arguments)
    with pytest.raises(error, match=message):
        moe_general_routing_inputs(**arguments | {name: value})


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(
    ("changed", "value", "message"),
    [
        (
            "scores",
            float("nan"),
            r"^router_scores of token 3, slot 3, is nan at a valid slot \(expert 0\)",
        ),
        ("ids", -7, r"^expert_indices of token 3, slot 3, is -7; ids below -1 mean nothing"),
        (
            "ids",
            2,
            r"^expert_indices of token 3 names expert 2 twice \(slots 3 and 4\); ids must",
        ),
    ],
)
def test_validation_names_token_and_slot(changed, value, message, saves):
    moe, x, (scores, tokens, experts) = make_layer(), make_tokens(8, 32), triples()
    experts = torch.where(torch.arange(len(TOKENS)) == 10, -1, experts)  # 3 stands twice
    scores = scores.detach()
    (scores if changed == "scores" else experts)[6] = value
    with (
        SonicMoEConfig(validate_dispatch=True).activate(),
        torch.set_grad_enabled(saves),
        pytest.raises(RoutingError, match=message),
    ):
        moe_general_routing_inputs(x, scores, tokens, experts, *views(moe))


@pytest.mark.parametrize(
    ("turned", "looks"), [("w1", "w1 looks"), ("w2", "w2 looks"), ("w1 w2", "both look")]
)
def test_transposed_weights_are_blamed_themselves(turned, looks):
    moe, x, (scores, tokens, experts) = make_layer(), make_tokens(8, 32), triples()
    w1, b1, w2, b2 = views(moe)
    w1 = w1.transpose(0, 1) if "w1" in turned else w1
    w2 = w2.transpose(0, 1) if "w2" in turned else w2
    needed = r"needed: \[E, N1, H\] = \(5, 48, 32\) and \[E, H, I\] = \(5, 32, 24\)"
    with pytest.raises(ShapeError, match=rf"and {looks} transposed; {needed}"):
        moe_general_routing_inputs(x, scores, tokens, experts, w1, b1, w2, b2)
