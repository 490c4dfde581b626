"""Tokens and gradients that travel in FP8 between two processes, against the same tokens in one process."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ep_cases import EXPERTS, joined
from ep_fp8 import BOTH, CASES, Spy, experts_of, run_fp8, sources
from framework import relative_rmse
from test_ep_dispatchers import Group

from sonicmoe import SonicMoEConfig
from sonicmoe.ep import LocalDispatcher, TransportDispatcher, make_dispatcher
from sonicmoe.ep.deepep import ElasticTransport, LegacyTransport
from sonicmoe.ep.fleet import FleetDispatcher, FleetFunctions
from sonicmoe.ep.fp8_rows import quantised
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.errors import ConfigError, ShapeError
from sonicmoe.quant.recipes import rows
from sonicmoe.quant.reference import quantize

FRAMEWORKS = ["torch", pytest.param("paddle", marks=pytest.mark.paddle)]
TRANSPORTS = {
    "torch": ("collective", "fixed size", "legacy", "legacy worst case"),
    "paddle": ("collective", "fixed size"),
}
BOUND = 5e-3  # of bf16 roundings of partial sums
KEYS = ("y", "dx", "dweights", "up", "down")


@pytest.fixture(params=FRAMEWORKS)
def world(request, world_results):
    ranks = world_results(request.param, 2)
    return request.param, [
        {name.removeprefix("in fp8/"): array for name, array in rank.items()} for rank in ranks
    ]


WAYS = pytest.mark.parametrize(
    ("form", "grads"), BOTH, ids=[f"x {form}, dout {grads}" for form, grads in BOTH]
)


@cache
def one_process(case, form, grads):
    return run_fp8(LocalDispatcher(EXPERTS), joined(sources(case)), 0, form, grads=grads)


@WAYS
@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(world, case, form, grads):
    framework, results = world
    wanted = one_process(case, form, grads)
    for name in TRANSPORTS[framework]:
        for key in KEYS:
            path = f"{name}/{form}/{grads}/{case}/{key}"
            got = np.concatenate([rank[path] for rank in results])
            assert got.shape == wanted[key].shape and np.isfinite(got).all(), (name, key)
            assert relative_rmse(got, wanted[key]) <= BOUND, (name, key)


@WAYS
@pytest.mark.parametrize("case", CASES)
def test_counts_that_nobody_knows_change_no_bit(world, case, form, grads):
    _, results = world
    for rank in results:
        for key in KEYS:
            path = f"{form}/{grads}/{case}/{key}"
            assert rank[f"fixed size/{path}"].tobytes() == rank[f"collective/{path}"].tobytes(), key


@WAYS
@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales_arrive_bit_for_bit(world, case, form, grads):
    framework, results = world
    everything, local = joined(sources(case)), EXPERTS // 2
    for values, one, prefix in ((everything.x, form, ""), (everything.dout, grads, "dout ")):
        if not one:
            continue
        sent = quantize(torch.tensor(values).to(torch.bfloat16), rows(256 if one == "row" else 128))
        for rank, result in enumerate(results):
            here = ((everything.ids >= rank * local) & (everything.ids < (rank + 1) * local)).any(1)
            for name in TRANSPORTS[framework]:
                path = f"{name}/{form}/{grads}/{case}/{prefix}"
                np.testing.assert_array_equal(result[f"{path}codes"], sent.bytes.numpy()[here])
                scales = result[f"{path}scales"]
                assert scales.shape[1] == (1 if one == "row" else 2)
                np.testing.assert_array_equal(scales, sent.scale_inv.numpy()[here])


@pytest.mark.parametrize("case", CASES[:1])
def test_a_gradient_that_was_sent_in_fp8_is_the_one_quantised_at_home(case):
    """Bit for bit what the node makes of the gradient that its own process has quantised."""
    source = joined(sources(case))
    for form in (True, "row"):
        sent = run_fp8(LocalDispatcher(EXPERTS, False, form), source, 0, False, grads=form)
        node = SonicMoEMlpNode.from_fused(
            *experts_of(0, EXPERTS), config=SonicMoEConfig(engine="reference", fp8_mode="perf")
        )
        x = torch.tensor(source.x, requires_grad=True)
        probs = torch.tensor(source.weights, requires_grad=True)
        dout = torch.tensor(source.dout).to(torch.bfloat16)
        home = SimpleNamespace(take=lambda _, dout=dout, form=form: quantised(dout, form))
        ids = torch.tensor(source.ids)
        ids = torch.where((ids >= 0) & (ids < EXPERTS), ids, -1)
        node(x.to(torch.bfloat16), None, ids, probs, dout_source=home).backward(dout)
        np.testing.assert_array_equal(sent["dx"], x.grad.numpy())


def test_an_elastic_buffer_refuses_by_name(world):
    framework, results = world
    if framework == "torch":
        words = "ElasticBuffer is used in bfloat16 only"
        assert all(str(r["refused"]).count(words) == 2 for r in results)


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

    def test_the_dispatcher_or_the_call_decides_about_gradients(self):
        x, ids, probs = torch.randn(4, 256), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
        for own, call, wanted in ((False, None, False), (True, None, True), (True, False, False), (False, "row", "row")):  # fmt: skip
            made = make_dispatcher(EXPERTS, fp8_grad=own)
            source = made.dispatch(x, ids, probs, fp8_grad=call).dout_source
            assert (False if source is None else source.form) == wanted
        with pytest.raises(ConfigError, match=r"fp8_grad is 'rows'; needed: one of"):
            make_dispatcher(EXPERTS, fp8_grad="rows")

    def test_unknown_forms_are_refused(self):
        for fp8 in ("rows", 1, None):
            with pytest.raises(
                ConfigError, match=r"fp8 is .*; needed: one of \[False, True, 'row'\]"
            ):
                make_dispatcher(EXPERTS, fp8=fp8)

    def test_those_that_send_bf16_only_say_so(self):
        fleet = FleetDispatcher(8, Group(2), FleetFunctions(None, None))
        x, ids, probs = torch.randn(4, 256), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
        for asked in ({"fp8": True}, {"fp8_grad": "row"}):
            with pytest.raises(ConfigError, match="Fleet's fused_dispatch in bfloat16 only"):
                fleet.dispatch(x.to(torch.bfloat16), ids, probs, **asked)
        assert fleet.bf16_only
        elastic = ElasticTransport(8, Group(2), None, max_tokens=4)
        assert TransportDispatcher(elastic).bf16_only
        legacy = TransportDispatcher(LegacyTransport(8, Group(2), None))
        assert not legacy.bf16_only
        with pytest.raises(ShapeError, match=r"x has 200 columns; DeepEP carries FP8 rows"):
            legacy.dispatch(x[:, :200], ids, probs, fp8=True)
        # A backward would be too late to say it.
        with pytest.raises(ShapeError, match="x has 200 columns"):
            legacy.dispatch(x[:, :200], ids, probs, fp8_grad=True)


class TestAGradientPastAutograd:
    """Nobody takes what stands for the gradient for the gradient itself."""

    def received(self, **options):
        x = torch.randn(6, 256).to(torch.bfloat16).requires_grad_()
        ids, probs = torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1)
        dispatcher = make_dispatcher(EXPERTS, fp8_grad=True)
        return x, dispatcher, dispatcher.dispatch(x, ids, probs, **options)

    def test_autograd_carries_two_bytes(self):
        _x, dispatcher, received = self.received()
        seen = []
        out = received.x * 1.0
        out.register_hook(seen.append)
        dispatcher.combine(out, received.handle).sum().backward()
        assert seen[0].untyped_storage().nbytes() == 2 and seen[0].dtype == torch.bfloat16

    def test_experts_that_do_not_ask_get_nan_and_no_invented_gradient(self):
        x, dispatcher, received = self.received()
        dispatcher.combine(received.x * 1.0, received.handle).sum().backward()
        assert x.grad.isnan().all()

    def test_experts_that_do_not_ask_are_named_by_the_dispatch(self):
        _x, dispatcher, received = self.received(fp8=True)
        out = received.dx_to * 1.0
        with pytest.raises(ConfigError, match=r"did not ask for it; needed: node\(.*dout_source"):
            dispatcher.combine(out, received.handle).sum().backward()

    def test_anomaly_detection_finds_nothing(self):
        x, dispatcher, received = self.received()
        with torch.autograd.detect_anomaly():
            dispatcher.combine(received.x * 1.0, received.handle).sum().backward()
        assert (x.grad == 0).all()

    @pytest.mark.parametrize("what", ["an operation", "a second use", "no combine"])
    def test_an_output_that_goes_elsewhere_is_refused(self, what):
        weights = experts_of(0, EXPERTS)
        node = SonicMoEMlpNode.from_fused(*weights, config=SonicMoEConfig(engine="reference"))
        _x, dispatcher, received = self.received()
        given = received.tokens_per_expert, received.indices, received.probs
        out = node(received.x.float(), *given, dout_source=received.dout_source)
        loss = dispatcher.combine(out * 2 if what == "an operation" else out, received.handle).sum()
        loss = out.sum() if what == "no combine" else loss
        loss = loss + out.sum() if what == "a second use" else loss
        words = "has no gradient" if what == "no combine" else "is not the one that the combine"
        with pytest.raises(ConfigError, match=words):
            loss.backward()
        assert not any(weight.main_grad.any() for weight in weights)

    def test_a_second_backward_sends_it_again(self):
        weights = experts_of(0, EXPERTS)
        node = SonicMoEMlpNode.from_fused(*weights, config=SonicMoEConfig(engine="reference"))
        x, dispatcher, received = self.received()
        spy = Spy(received.dout_source)
        given = received.tokens_per_expert, received.indices, received.probs
        out = node(received.x.float(), *given, dout_source=spy)
        y = dispatcher.combine(out, received.handle)
        found = []
        for _ in range(2):
            y.sum().backward(retain_graph=True)
            found.append(x.grad.clone())
            x.grad = None
        assert torch.equal(*found) and found[0].any()

    def test_a_forward_without_gradients_leaves_nothing(self):
        _x, dispatcher, received = self.received()
        with torch.no_grad():
            y = dispatcher.combine(received.x, received.handle)
        assert y is received.x or torch.equal(y, received.x)
