"""The kernels of bias gradients, compiled for the host, against fp64; what no row names is poison."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from engine.fp8_layer import with_spare_rows
from kernels import host_cuda
from kernels.needs import HOST_MODULE

from sonicmoe.kernels.cuda_wgrad import bias_gradients_source
from sonicmoe.quant.recipes import RECIPES, rows
from sonicmoe.quant.reference import dequantize, quantize
from sonicmoe.routing.build import build_routing

pytestmark = HOST_MODULE
E, H, N1 = 5, 272, 640  # columns that are no multiple of 128, nor of a scale's 256


@pytest.fixture(scope="module")
def module(artefacts):
    return host_cuda.load("host_biases", bias_gradients_source("sm_90a").files, artefacts)


@pytest.fixture(params=["some", "one expert", "none"])
def routing(request):
    tokens = {"some": 300, "one expert": 700, "none": 4}[request.param]
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, E - 1, generator=generator).argsort(1)[:, :2]  # none of the last
    ids[torch.rand(tokens, 2, generator=generator) < 0.3] = E
    if request.param != "some":
        ids[:] = -1 if request.param == "none" else torch.tensor([2, -1])
    probs = torch.rand(tokens, 2, generator=generator) + 0.1
    return with_spare_rows(build_routing(ids, probs, E), 128)


def expert_rows(routing):
    """Of each expert, its rows that have a token."""
    real = routing.row_token >= 0
    bounds = routing.padded_offsets.tolist()
    return [torch.arange(a, b)[real[a:b]] for a, b in itertools.pairwise(bounds)]


def tokens_of(routing, quantised):
    """`(arguments, fp64 [T, H])`; tokens that no row names are NaN."""
    values = torch.randn(routing.num_tokens, H).to(torch.bfloat16)
    unused = torch.ones(routing.num_tokens, dtype=torch.bool)
    unused[routing.row_token[routing.row_token >= 0].long()] = False
    if not quantised:
        values[unused] = math.nan
        return (values, None), values.double()
    q = quantize(values.float(), rows(128))
    q.bytes[unused], q.scale_inv[unused] = 0x7F, math.nan
    return (q.bytes, q.scale_inv), dequantize(q).double()


@pytest.mark.parametrize("quantised", [False, True])
def test_of_tokens(module, routing, quantised):
    """The part of dprobs, added to what is there, and db2, over what was there."""
    given, exact = tokens_of(routing, quantised)
    b2 = torch.randn(E, H)
    sums = torch.randn(routing.num_rows)
    wanted = sums.double()
    db2, parts = torch.full((E, H), math.nan), torch.full((routing.num_rows // 128, H), math.nan)
    wanted_db2 = torch.zeros(E, H, dtype=torch.float64)
    for expert, own in enumerate(expert_rows(routing)):
        read = exact[routing.row_token[own].long()]
        wanted[own] += read @ b2[expert].double()
        wanted_db2[expert] = routing.row_prob[own].double() @ read
    where = routing.row_token, routing.padded_offsets
    alone = sums.clone()
    module.sum_tokens(*given, b2, routing.row_prob, *where, sums, parts, db2, 0)
    module.sum_tokens(*given, b2, routing.row_prob, *where, alone, None, None, 0)
    assert torch.equal(alone, sums)
    torch.testing.assert_close(sums.double(), wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(db2.double(), wanted_db2, rtol=0, atol=1e-3)
    assert not db2[routing.expert_counts == 0].any()


def test_of_dz(module, routing):
    dz, real = torch.randn(routing.num_rows, N1), routing.row_token >= 0
    q = quantize(dz * torch.exp2(-torch.arange(N1) // 128 * 3.0), RECIPES["dx256"].dz)
    exact = dequantize(q).double()
    q.bytes[~real] = 0x7F
    q.scale_inv[int(routing.padded_offsets[-1]) // 128 :] = math.nan
    db1 = torch.full((E, N1), math.nan)
    parts = torch.full((routing.num_rows // 128 * N1,), math.nan)
    where = routing.row_token, routing.padded_offsets
    module.sum_dz(q.bytes, q.scale_inv, *where, parts, db1, 0)
    for expert, own in enumerate(expert_rows(routing)):
        torch.testing.assert_close(db1[expert].double(), exact[own].sum(0), rtol=0, atol=1e-3)
    with pytest.raises(Exception, match="row_token has 100 rows; needed: a multiple of 128"):
        short = routing.row_token[:100].contiguous()
        module.sum_dz(q.bytes, q.scale_inv, short, routing.padded_offsets, parts, db1, 0)
