"""Tokens and gradients that travel in FP8 between two processes, against the same tokens in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ep_cases import EXPERTS, IN_FP8, MATRICES, PRECISIONS, cases, joined
from ep_layer import Spy, local_experts, node_of, run_layer
from framework import relative_rmse
from kernels.needs import can_load_kernels

from sonicmoe.ep import LocalDispatcher, make_dispatcher
from sonicmoe.errors import ConfigError
from sonicmoe.quant.recipes import rows
from sonicmoe.quant.reference import quantize

SYMMETRIC = ("symmetric", "symmetric fixed") if can_load_kernels() else ()
OF_BOTH = ("collective", "fixed size")
TRANSPORTS = {
    "torch": (*OF_BOTH, "deepep", "deepep worst case", *SYMMETRIC),
    "paddle": OF_BOTH,
}
BOUND = 5e-3  # of bf16 roundings of partial sums


@pytest.mark.parametrize("framework", ["torch", pytest.param("paddle", marks=pytest.mark.paddle)])
@pytest.mark.parametrize(("case", "form", "grads"), IN_FP8)
def test_codes_arrive_bit_for_bit_and_results_are_those_of_one_process(
    framework, case, form, grads, world_results
):
    """Unknown counts change no bit."""
    results, everything = world_results(framework, 2), joined(cases(2)[case])
    alone = LocalDispatcher(EXPERTS, form, grads)
    wanted = run_layer(alone, everything, **PRECISIONS["fp8"])
    ways = {name: f"in fp8/{name}/{form}/{grads}/{case}" for name in TRANSPORTS[framework]}
    for key in ("y", "dx", "dweights", *MATRICES):
        for name, path in ways.items():
            parts = [rank[f"{path}/{key}"] for rank in results]
            got = np.concatenate(parts)
            assert got.shape == wanted[key].shape and np.isfinite(got).all(), (name, key)
            assert relative_rmse(got, wanted[key]) <= BOUND, (name, key)
            for rank, part in zip(results, parts, strict=True):
                same = rank[f"{ways['collective']}/{key}"].tobytes()
                assert part.tobytes() == same or "deepep" in name, (name, key)
    local = EXPERTS // 2
    for values, is_sent, prefix in ((everything.x, form, ""), (everything.dout, grads, "dout ")):
        sent = quantize(torch.tensor(values).to(torch.bfloat16), rows(128))
        for rank, result in enumerate(results if is_sent else ()):
            here = (everything.ids >= rank * local) & (everything.ids < (rank + 1) * local)
            for path in ways.values():
                codes, scales = (result[f"{path}/{prefix}{kind}"] for kind in ("codes", "scales"))
                np.testing.assert_array_equal(codes, sent.bytes.numpy()[here.any(1)])
                np.testing.assert_array_equal(scales, sent.scale_inv.numpy()[here.any(1)])


def one_slot(count=4):
    """Tokens `[count, 256]`, all on expert 0."""
    ids = torch.zeros(count, 1, dtype=torch.int64)
    return torch.randn(count, 256), ids, torch.ones(count, 1)


class TestDispatchers:
    @pytest.mark.parametrize(
        ("own", "call", "wanted"),
        [(False, None, False), (True, None, True), (True, False, False), (False, True, True)],
    )
    def test_the_dispatcher_or_the_call_decides(self, own, call, wanted):
        received = make_dispatcher(EXPERTS, fp8=own).dispatch(*one_slot(), fp8=call)
        scales = 0 if received.x_scale is None else received.x_scale.shape[1]
        assert scales == (2 if wanted else 0)
        assert received.x.dtype == (torch.float8_e4m3fn if wanted else torch.float32)
        assert received.dx_to is None
        dispatcher = make_dispatcher(EXPERTS, fp8_grad=own)
        source = dispatcher.dispatch(*one_slot(), fp8_grad=call).dout_source
        assert (source is not None) == wanted

    def test_the_gradient_has_the_dtype_of_the_tokens(self):
        x, ids, probs = one_slot()
        received = LocalDispatcher(EXPERTS, True).dispatch(x.requires_grad_(), ids, probs)
        assert received.dx_to.shape == x.shape and received.dx_to.untyped_storage().nbytes() == 2
        received.dx_to.backward(torch.full((4, 256), 1000.0, dtype=torch.bfloat16))
        assert x.grad.dtype == torch.float32 and (x.grad == 1000.0).all()


class TestAGradientPastAutograd:
    """Nobody takes what stands for the gradient for the gradient itself."""

    def received(self, **options):
        x, ids, probs = one_slot(6)
        x, dispatcher = x.to(torch.bfloat16), make_dispatcher(EXPERTS, fp8_grad=True)
        received = dispatcher.dispatch(x.requires_grad_(), ids, probs, **options)
        return x, dispatcher, received

    def experts(self, received, source):
        """The output of a node that asks `source` for its gradient, and its weights."""
        experts = local_experts(0, EXPERTS)
        node, weights = node_of(experts), [e.up_gate_proj.weight for e in experts]
        given = received.tokens_per_expert, received.indices, received.probs
        return node(received.x.float(), *given, dout_source=source), weights

    def test_experts_that_do_not_ask_get_nan_and_no_invented_gradient(self):
        """Autograd carries two bytes of each gradient."""
        x, dispatcher, received = self.received()
        seen, out = [], received.x * 1.0
        out.register_hook(seen.append)
        dispatcher.combine(out, received.handle).sum().backward()
        assert seen[0].untyped_storage().nbytes() == 2 and seen[0].dtype == torch.bfloat16
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
        _x, dispatcher, received = self.received()
        out, weights = self.experts(received, received.dout_source)
        loss = dispatcher.combine(out * 2 if what == "an operation" else out, received.handle).sum()
        loss = out.sum() if what == "no combine" else loss
        loss = loss + out.sum() if what == "a second use" else loss
        words = "has no gradient" if what == "no combine" else "is not the one that the combine"
        with pytest.raises(ConfigError, match=words):
            loss.backward()
        assert not any(weight.main_grad.any() for weight in weights)

    def test_a_second_backward_sends_it_again(self):
        x, dispatcher, received = self.received()
        out, _ = self.experts(received, Spy(received.dout_source))
        y = dispatcher.combine(out, received.handle)
        found = []
        for _ in range(2):
            y.sum().backward(retain_graph=True)
            found.append(x.grad.clone())
            x.grad = None
        assert torch.equal(*found) and found[0].any()
