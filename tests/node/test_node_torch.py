"""The node as a PyTorch citizen: torch autograd as the reference, hooks, checkpointing, graphs run
twice, memory, autocast.
"""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from engine.moe_golden import ALL_ACTIVATIONS, assert_same_bits, golden, make_problem
from framework import IS_PADDLE, numpy, relative_rmse, tensor, torch
from node.node_harness import ARRANGEMENTS, FP8, FULL, Layer, problems

from sonicmoe.config import SonicMoEConfig
from sonicmoe.engine import reference
from sonicmoe.enums import ActivationType, is_glu
from sonicmoe.errors import RoutingError
from sonicmoe.node.late_wgrad import WgradQueue

if IS_PADDLE:
    pytest.skip("what only PyTorch has; tests/paddle has Paddle's", allow_module_level=True)

import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

STAGEWISE = SonicMoEConfig(engine="reference", fp8_mode="mem")
TORCH_ACTIVATIONS = {
    ActivationType.SWIGLU: F.silu,
    ActivationType.GEGLU: F.gelu,
    ActivationType.REGLU: F.relu,
    ActivationType.SWIGLU_OAI: lambda v: v.clamp(max=7.0) * torch.sigmoid(1.702 * v.clamp(max=7.0)),
    ActivationType.SWIGLU_CLAMP: lambda v: F.silu(v.clamp(max=10.0)),
    ActivationType.SITU_GLU: lambda v: torch.tanh(v) * torch.sigmoid(v),
    ActivationType.SILU: F.silu,
    ActivationType.GELU: F.gelu,
    ActivationType.RELU: F.relu,
    ActivationType.RELU_SQ: lambda v: F.relu(v).square(),
}


def plain_moe(problem, x, probs, up_gates, downs):
    """The layer as a user would write it for torch autograd."""
    indices, out = torch.tensor(problem.indices), torch.zeros_like(x)
    act = TORCH_ACTIVATIONS[problem.activation]
    for e, (up_gate, down) in enumerate(zip(up_gates, downs, strict=True)):
        for k in range(indices.shape[1]):
            tokens = (indices[:, k] == e).nonzero().reshape(-1)
            z = x[tokens] @ up_gate
            up = z[:, problem.intermediate :]
            if problem.activation is ActivationType.SWIGLU_OAI:
                up = up.clamp(-7.0, 7.0) + 1
            elif problem.activation is ActivationType.SWIGLU_CLAMP:
                up = up.clamp(-10.0, 10.0)
            y1 = act(z[:, : problem.intermediate]) * up if is_glu(problem.activation) else act(z)
            out = out.index_add(0, tokens, (y1 @ down) * probs[tokens, k : k + 1])
    return out


@pytest.mark.parametrize("activation", ALL_ACTIVATIONS, ids=lambda a: a.value)
def test_against_torch_autograd(activation):
    layer = Layer(make_problem(activation))
    layer.set_main_grad(0.0)
    call = layer.run()
    layer.node.step()
    x, probs = (leaf.detach().clone().requires_grad_() for leaf in (call.x, call.probs))
    weights = [weight.detach().clone().requires_grad_() for weight in layer.weights]
    out = plain_moe(layer.problem, x, probs, weights[:4], weights[4:])
    out.backward(call.dout)
    assert relative_rmse(numpy(call.out), numpy(out)) < 1e-6
    assert relative_rmse(call.dx, numpy(x.grad)) < 1e-6
    assert relative_rmse(call.dprobs, numpy(probs.grad)) < 1e-6
    for weight, reference_weight in zip(layer.weights, weights, strict=True):
        assert relative_rmse(numpy(weight.main_grad), numpy(reference_weight.grad)) < 1e-6


class TestHooks:
    """Post-accumulate-grad hooks are where communication overlap starts: one per weight and
    backward, with the gradient complete.
    """

    def count(self, layer, attribute):
        fired = []
        for index, weight in enumerate(layer.weights):
            weight.register_post_accumulate_grad_hook(
                lambda w, i=index: fired.append(
                    (i, None if getattr(w, attribute) is None else getattr(w, attribute).clone())
                )
            )
        return fired

    @pytest.mark.parametrize("arrangement", ARRANGEMENTS)
    @pytest.mark.parametrize("attribute", ["grad", "main_grad"])
    def test_flush_backward_fires_each_once_per_backward(self, arrangement, attribute):
        batches = problems(2)  # expert 2 has no token in any of them
        layer = Layer(batches[0], arrangement=arrangement, flush="auto")
        if attribute == "main_grad":
            layer.set_main_grad(0.0)
        fired = self.count(layer, attribute)
        for micro_batch, problem in enumerate(batches, start=1):
            layer.run(problem)
            assert sorted(i for i, _ in fired) == sorted(
                list(range(len(layer.weights))) * micro_batch
            )
        for i, seen in fired[-len(layer.weights) :]:
            assert torch.equal(seen, getattr(layer.weights[i], attribute)), (
                "the hook saw an incomplete gradient"
            )
        layer.node.step()
        assert len(fired) == 2 * len(layer.weights)


class TestCheckpoint:
    @pytest.mark.parametrize("flush", ["auto", "step"])
    @pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non_reentrant"])
    @pytest.mark.parametrize("config", [FULL, FP8, STAGEWISE], ids=["full", "fp8", "stagewise"])
    def test_gives_the_same_bits(self, config, use_reentrant, flush):
        plain, recomputed = Layer(config=config, flush=flush), Layer(config=config, flush=flush)
        plain.set_main_grad(0.0)
        recomputed.set_main_grad(0.0)
        expected = plain.run()
        plain.node.step()
        call = recomputed.call()
        call.out = checkpoint(
            recomputed.node,
            call.x,
            call.counts,
            call.indices,
            call.probs,
            use_reentrant=use_reentrant,
        )
        call.backward()
        recomputed.node.step()
        assert_same_bits(recomputed.result(call), plain.result(expected))

    @pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non_reentrant"])
    def test_several_outstanding(self, use_reentrant):
        batches = problems(3)
        layer = Layer(batches[0])
        layer.set_main_grad(0.0)
        calls = [layer.call(problem) for problem in batches]
        for call in calls:
            call.out = checkpoint(
                layer.node, call.x, None, call.indices, call.probs, use_reentrant=use_reentrant
            )
        for call in reversed(calls):
            call.backward()
        layer.node.step()
        for got, name in zip(layer.gradients("main_grad"), ("dw1", "dw2"), strict=True):
            assert relative_rmse(got, sum(getattr(golden(p), name) for p in batches)) < 1e-5

    def test_a_router_that_changes_its_mind_is_named(self):
        """The recomputed forward routes one token elsewhere; counts stay the same, so shapes cannot
        give it away.
        """
        problem = make_problem(tokens=8, topk=1, empty=()).but(
            indices=np.array([[0], [1], [2], [3], [0], [1], [2], [3]])
        )
        layer = Layer(problem)
        other = problem.indices.copy()
        other[[0, 1]] = other[[1, 0]]
        routes = iter([problem.indices, other])
        call = layer.call()
        call.out = checkpoint(
            lambda x, probs: layer.node(x, None, torch.tensor(next(routes)), probs),
            call.x,
            call.probs,
            use_reentrant=False,
        )
        with pytest.raises(RoutingError, match="routing differs between forward and recompute"):
            call.backward()


class TestGraphsRunTwice:
    @pytest.mark.parametrize("config", [FULL, FP8], ids=["full", "fp8"])
    def test_retain_graph(self, config):
        layer = Layer(config=config)
        layer.set_main_grad(0.0)
        call = layer.call()
        call.backward(retain_graph=True)
        dx, dprobs = call.dx, call.dprobs
        call.backward()
        layer.node.step()
        np.testing.assert_array_equal(call.dx, 2 * dx)
        np.testing.assert_array_equal(call.dprobs, 2 * dprobs)
        single = Layer(config=config)
        single.set_main_grad(0.0)
        single.run()
        single.node.step()
        for twice, once in zip(
            layer.gradients("main_grad"), single.gradients("main_grad"), strict=True
        ):
            np.testing.assert_allclose(twice, 2 * once, rtol=1e-6)

    def test_stagewise_memory_says_why_not(self):
        call = Layer(config=STAGEWISE).call()
        call.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=r"stagewise memory dropped z.*stagewise_memory off"):
            call.backward()

    def test_without_retain_graph_torch_says_so(self):
        call = Layer().run()
        with pytest.raises(RuntimeError, match="second time"):
            call.backward()

    def test_second_derivatives_are_refused(self):
        call = Layer().call()
        # The graph of the first derivative would go around the node: dx is constant in it.
        with pytest.raises(RuntimeError, match=r"no second derivative.*create_graph=True"):
            torch.autograd.grad((call.out + call.x).sum(), call.x, create_graph=True)

    @pytest.mark.parametrize("flush", ["auto", "step"])
    @pytest.mark.parametrize("split", [True, False])
    def test_backward_to_other_inputs_only_adds_nothing(self, flush, split):
        """Penalties on the gradient of the tokens, saliency: what follows is the gradient of the
        real backwards alone.
        """
        if split and flush == "backward":
            pytest.skip("refused together")
        wanted, layer = Layer(flush=flush), Layer(flush=flush)
        layer.node._state.wgrad_queue = WgradQueue() if split else None
        for each in (wanted, layer):
            each.set_main_grad(0.0)
        call = layer.call()
        call.out.backward(call.dout, inputs=[call.x], retain_graph=True)
        torch.autograd.grad(call.out, [call.probs], call.dout, retain_graph=True)
        call.backward()
        expected = [wanted.run()]
        for each in (wanted, layer):
            each.node.step()
        for ours, theirs in zip(
            layer.gradients("main_grad"), wanted.gradients("main_grad"), strict=True
        ):
            assert np.array_equal(ours, theirs)
        assert np.array_equal(call.dprobs, expected[0].dprobs)


class TestMemory:
    def codes_of_z(self, monkeypatch):
        """Weak references to the bytes of every z that a forward stores."""
        kept, original = [], reference.saved_z

        def spy(*arguments):
            z = original(*arguments)
            kept.append(weakref.ref(z.bytes))
            return z

        monkeypatch.setattr(reference, "saved_z", spy)
        return kept

    @pytest.mark.parametrize("config", [FP8, STAGEWISE], ids=["fp8", "stagewise"])
    def test_saved_tensors_die_with_the_backward(self, monkeypatch, config):
        kept = self.codes_of_z(monkeypatch)
        layer = Layer(config=config)
        calls = [layer.call() for _ in range(2)]
        assert [ref() is not None for ref in kept] == [True, True]
        calls[0].backward()
        assert [ref() is not None for ref in kept] == [False, True]
        calls[1].backward()
        assert [ref() is not None for ref in kept] == [False, False]

    @pytest.mark.parametrize("config", [FP8, STAGEWISE], ids=["fp8", "stagewise"])
    def test_stagewise_memory_drops_z_in_the_middle_of_the_backward(self, monkeypatch, config):
        kept = self.codes_of_z(monkeypatch)
        alive_at_dz, original = [], reference.operand

        def spy(values, name, *rest):
            if name == "dz":
                alive_at_dz.append(kept[0]() is not None)
            return original(values, name, *rest)

        monkeypatch.setattr(reference, "operand", spy)
        Layer(config=config).run()
        assert alive_at_dz == [config is FP8]

    def test_a_forward_that_is_dropped_frees_everything(self, monkeypatch):
        kept = self.codes_of_z(monkeypatch)
        call = Layer(config=STAGEWISE).call()
        assert kept[0]() is not None
        del call
        assert kept[0]() is None


def test_autocast_does_not_reach_the_engine():
    """Automatic mixed precision around the layer must not round what the engine computes in fp32."""
    plain, mixed = Layer(), Layer()
    plain.set_main_grad(0.0)
    mixed.set_main_grad(0.0)
    expected = plain.run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call = mixed.run()
        mixed.node.step()
    plain.node.step()
    assert_same_bits(mixed.result(call), plain.result(expected))


@pytest.mark.trained
def test_an_optimizer_trains_through_grad():
    """No main_grad anywhere: `step()` fills `.grad`, and a stock optimizer does the rest."""
    problem = make_problem(tokens=64, hidden=32, intermediate=24, empty=())
    layer = Layer(problem)
    optimizer = torch.optim.AdamW(layer.weights, lr=0.02)
    target = tensor(np.random.default_rng(5).standard_normal(problem.x.shape), torch.float32)
    losses = []
    for _ in range(15):
        loss = (layer.call().out - target).square().mean()
        loss.backward()
        layer.node.step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    # 0.21 to 0.27 over 6 seeds and two orders of summation.
    assert losses[-1] < 0.6 * losses[0], losses
