"""Tokens that travel in FP8 between two processes, against the same tokens in one process."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from ep_cases import EXPERTS, joined
from ep_fp8 import CASES, FORMS, run_fp8, sources
from framework import relative_rmse
from test_ep_dispatchers import Group
from worlds import TESTS, paddle_variables, run_world

from sonicmoe.ep import LocalDispatcher, TransportDispatcher, make_dispatcher
from sonicmoe.ep.deepep import ElasticTransport, LegacyTransport
from sonicmoe.ep.fleet import FleetDispatcher, FleetFunctions
from sonicmoe.errors import ConfigError, ShapeError
from sonicmoe.quant.recipes import rows
from sonicmoe.quant.reference import quantize

FRAMEWORKS = ["torch", pytest.param("paddle", marks=pytest.mark.paddle)]
TRANSPORTS = {"torch": ("collective", "legacy", "legacy worst case"), "paddle": ("collective",)}
BOUND = 5e-3  # of bf16 roundings of partial sums
KEYS = ("y", "dx", "dweights", "up", "down")


@pytest.fixture(scope="module", params=FRAMEWORKS)
def world(request, tmp_path_factory):
    framework = request.param
    directory = tmp_path_factory.mktemp(f"fp8 {framework}")
    launch = paddle_variables(2) if framework == "paddle" else [{}] * 2
    variables = [{**each, "SONICMOE_TEST_FRAMEWORK": framework} for each in launch]
    run_world(lambda rank: [TESTS / "ep" / "fp8_worker.py", rank, directory], variables, framework)
    return framework, [dict(np.load(directory / f"{rank}.npz")) for rank in range(2)]


@cache
def one_process(case, form):
    return run_fp8(LocalDispatcher(EXPERTS), joined(sources(case)), 0, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(world, case, form):
    framework, results = world
    wanted = one_process(case, form)
    for name in TRANSPORTS[framework]:
        for key in KEYS:
            got = np.concatenate([rank[f"{name}/{form}/{case}/{key}"] for rank in results])
            assert got.shape == wanted[key].shape and np.isfinite(got).all(), (name, key)
            assert relative_rmse(got, wanted[key]) <= BOUND, (name, key)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales_arrive_bit_for_bit(world, case, form):
    framework, results = world
    everything, local = joined(sources(case)), EXPERTS // 2
    x = torch.tensor(everything.x).to(torch.bfloat16)
    sent = quantize(x, rows(256 if form == "row" else 128))
    for rank, result in enumerate(results):
        here = ((everything.ids >= rank * local) & (everything.ids < (rank + 1) * local)).any(1)
        for name in TRANSPORTS[framework]:
            got = {
                key: result[f"{name}/{form}/{case}/{key}"] for key in ("codes", "scales", "format")
            }
            assert got["format"] == (1 if form == "row" else 2)
            np.testing.assert_array_equal(got["codes"], sent.bytes.numpy()[here])
            np.testing.assert_array_equal(got["scales"], sent.scale_inv.numpy()[here])


def test_an_elastic_buffer_refuses_by_name(world):
    framework, results = world
    if framework == "torch":
        assert all("ElasticBuffer is used in bfloat16 only" in str(r["refused"]) for r in results)


class TestDispatchers:
    def test_the_dispatcher_or_the_call_decides(self):
        x, ids, probs = torch.randn(4, 256), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
        for own, call, wanted in (
            (False, None, 0),
            (True, None, 2),
            (True, False, 0),
            (False, "row", 1),
        ):
            received = make_dispatcher(EXPERTS, fp8=own).dispatch(x, ids, probs, fp8=call)
            assert (0 if received.x_scale is None else received.x_scale.shape[1]) == wanted
            assert received.x.dtype == (torch.float8_e4m3fn if wanted else torch.float32)
            assert received.dx_to is None

    def test_the_gradient_has_the_dtype_of_the_tokens(self):
        x = torch.randn(4, 256, requires_grad=True)
        received = LocalDispatcher(EXPERTS, True).dispatch(
            x, torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
        )
        assert received.dx_to.shape == x.shape and received.dx_to.untyped_storage().nbytes() == 2
        received.dx_to.backward(torch.full((4, 256), 1000.0, dtype=torch.bfloat16))
        assert x.grad.dtype == torch.float32 and (x.grad == 1000.0).all()

    def test_unknown_forms_are_refused(self):
        for fp8 in ("rows", 1, None):
            with pytest.raises(
                ConfigError, match=r"fp8 is .*; needed: one of \[False, True, 'row'\]"
            ):
                make_dispatcher(EXPERTS, fp8=fp8)

    def test_those_that_send_bf16_only_say_so(self):
        fleet = FleetDispatcher(8, Group(2), FleetFunctions(None, None))
        x, ids, probs = torch.randn(4, 256), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
        with pytest.raises(ConfigError, match="Fleet's fused_dispatch in bfloat16 only"):
            fleet.dispatch(x.to(torch.bfloat16), ids, probs, fp8=True)
        assert fleet.bf16_only
        elastic = ElasticTransport(8, Group(2), None, max_tokens=4)
        assert TransportDispatcher(elastic).bf16_only
        legacy = TransportDispatcher(LegacyTransport(8, Group(2), None))
        assert not legacy.bf16_only
        with pytest.raises(ShapeError, match=r"x has shape \(4, 200\); DeepEP carries FP8 rows"):
            legacy.dispatch(x[:, :200], ids, probs, fp8=True)
