"""out, dx, dprobs and dw of the node against Paddle's own autograd, over everything a dispatched
batch may look like.
"""

from __future__ import annotations

import numpy as np
import pytest
from ernie import (
    BF16_BOUND,
    FP8,
    FP8_BOUND,
    PRECISE,
    PRECISE_BOUND,
    Pending,
    assert_close,
    assert_results,
    assert_weight_gradients,
    bind_main_grads,
    golden,
    make_batch,
    make_experts,
    make_node,
    paddle,
    plain_moe,
    run,
    weights_of,
)
from framework import numpy, tensor

from sonicmoe import layouts
from sonicmoe.engine import reference
from sonicmoe.routing import build as routing

MODES = {
    "fp32": (PRECISE, "float32", "float32", PRECISE_BOUND),
    "bf16": (PRECISE, "bfloat16", "bfloat16", BF16_BOUND),
    "fp16": (PRECISE, "float16", "float32", BF16_BOUND),
    "fp8": (FP8, "bfloat16", "bfloat16", FP8_BOUND),
}


def check(batches, *, mode="fp32", n=3, experts=None, flush="step", **options):
    """Run the batches in sequence, step once, compare everything; returns the results."""
    config, token_dtype, weight_dtype, bound = MODES[mode]
    hidden = batches[0].x.shape[1]
    experts = experts or make_experts(n, hidden, dtype=weight_dtype)
    node = make_node(experts, config, flush)
    main_grads = bind_main_grads(experts)
    results = [run(node, batch, dtype=token_dtype, **options) for batch in batches]
    node.step()
    wanted = golden(experts, batches, token_dtype)
    for result, expected in zip(results, wanted.results, strict=True):
        assert_results(result, expected, bound)
    assert_weight_gradients(main_grads, wanted.dw, bound)
    assert all(weight.grad is None for weight in weights_of(experts))
    return results


@pytest.mark.parametrize("mode", MODES)
def test_one_batch(mode):
    check([make_batch(130, hidden=128)], mode=mode)


@pytest.mark.parametrize("topk", [1, 3, 8])
def test_slots_per_token(topk):
    check([make_batch(24, experts=9, topk=topk)], n=9)


@pytest.mark.parametrize("mode", ["fp32", "fp8"])
def test_several_micro_batches_accumulate(mode):
    check([make_batch(size, hidden=128, seed=size) for size in (130, 70, 97)], mode=mode)


@pytest.mark.parametrize(
    "only", [[], [0], [1, 2]], ids=["no expert here", "all on one", "one empty"]
)
@pytest.mark.parametrize("flush", ["auto", "step"])
def test_empty_experts_get_exact_zero_gradients(only, flush):
    experts = make_experts()
    batch = make_batch(only=only)
    check([batch], experts=experts, flush=flush)
    empty = [e for e in range(3) if e not in only]
    weights = weights_of(experts)
    for expert in empty:
        for weight in (weights[expert], weights[3 + expert]):
            assert not numpy(weight.main_grad).any()


def test_a_batch_without_tokens_between_others():
    check([make_batch(20, seed=1), make_batch(0), make_batch(20, seed=2)])


def test_interleaved_backwards_of_two_nodes():
    """Two layers in one process share nothing, in whatever order a pipeline schedule runs their
    passes.
    """
    layers = [make_experts(seed=seed) for seed in (1, 2)]
    nodes = [make_node(layers[0]), make_node(layers[1], flush="auto")]
    for experts in layers:
        bind_main_grads(experts)
    batches = [
        [make_batch(20 + 7 * layer + micro, seed=10 * layer + micro) for micro in range(3)]
        for layer in range(2)
    ]
    pending = {
        (layer, micro): Pending(nodes[layer], batches[layer][micro])
        for micro in range(3)
        for layer in (1, 0)
    }
    order = [(0, 0), (1, 0), (1, 1), (0, 1), (1, 2), (0, 2)]
    results = {key: pending[key].backward() for key in order}
    nodes[0].step()
    for layer, experts in enumerate(layers):
        wanted = golden(experts, batches[layer])
        for micro in range(3):
            assert_results(results[layer, micro], wanted.results[micro], PRECISE_BOUND)
        assert_weight_gradients(
            [w.main_grad for w in weights_of(experts)], wanted.dw, PRECISE_BOUND
        )


def test_two_layers_chained():
    """The inner node's out, a non-leaf, is the outer node's x: gradients run through both."""
    first, second = make_experts(seed=1), make_experts(seed=2)
    nodes, batch = (make_node(first), make_node(second)), make_batch()
    for experts in (first, second):
        bind_main_grads(experts)
    x, indices, probs = (
        tensor(batch.x, grad=True),
        tensor(batch.indices),
        tensor(batch.probs, grad=True),
    )
    out = nodes[1](nodes[0](x, None, indices, probs) + x, None, indices, probs)
    out.backward(tensor(batch.dout))
    for node in nodes:
        node.step()
    gx, gprobs = tensor(batch.x, grad=True), tensor(batch.probs, grad=True)
    copies = [
        [tensor(numpy(w).astype("float32"), grad=True) for w in weights_of(e)]
        for e in (first, second)
    ]
    middle = plain_moe(gx, indices, gprobs, copies[0][:3], copies[0][3:]) + gx
    plain_moe(middle, indices, gprobs, copies[1][:3], copies[1][3:]).backward(tensor(batch.dout))
    assert_close(numpy(x.grad), numpy(gx.grad), PRECISE_BOUND, "dx")
    assert_close(numpy(probs.grad), numpy(gprobs.grad), PRECISE_BOUND, "dprobs")
    for experts, golds in zip((first, second), copies, strict=True):
        assert_weight_gradients(
            [w.main_grad for w in weights_of(experts)],
            [numpy(w.grad) for w in golds],
            PRECISE_BOUND,
        )


@pytest.mark.parametrize("x_grad,probs_grad", [(False, True), (True, False), (False, False)])
def test_frozen_inputs_do_not_cut_off_the_weights(x_grad, probs_grad):
    """A frozen embedding in front of the layer: PyLayers run backward only for inputs that want
    gradients, so weights are inputs.
    """
    experts, batch = make_experts(), make_batch()
    node, main_grads = make_node(experts), bind_main_grads(experts)
    result = run(node, batch, x_grad=x_grad, probs_grad=probs_grad)
    node.step()
    wanted = golden(experts, [batch])
    assert (result.dx is not None, result.dprobs is not None) == (x_grad, probs_grad)
    if x_grad:
        assert_close(result.dx, wanted.results[0].dx, PRECISE_BOUND, "dx")
    if probs_grad:
        assert_close(result.dprobs, wanted.results[0].dprobs, PRECISE_BOUND, "dprobs")
    assert_weight_gradients(main_grads, wanted.dw, PRECISE_BOUND)


@pytest.mark.parametrize("flush", ["auto", "step"])
def test_partly_frozen_experts(flush):
    """One trainable matrix among frozen ones gets its gradient, once; the frozen get neither
    gradient, main_grad nor hook call.
    """
    experts, batch = make_experts(), make_batch()
    weights, calls = weights_of(experts), []
    for position, weight in enumerate(weights):
        weight.main_grad = None
        if position != 4:
            weight.stop_gradient = True
    weights[4]._register_backward_hook(lambda *_: calls.append(4))
    node = make_node(experts, flush=flush)
    result = run(node, batch)
    node.step()
    wanted = golden(make_experts(), [batch])
    assert_results(result, wanted.results[0], PRECISE_BOUND)
    assert_close(numpy(weights[4].main_grad), wanted.dw[4], PRECISE_BOUND, "dw")
    assert calls == [4]
    assert all(
        weight.main_grad is None and weight.grad is None
        for position, weight in enumerate(weights)
        if position != 4
    )


@pytest.mark.parametrize("consumer", ["transpose", "expand", "slice", "sum of a part"])
def test_shapes_of_the_incoming_gradient(consumer):
    """dout may arrive strided, broadcast or with rows no one used."""
    weight = tensor(np.random.default_rng(9).standard_normal((32, 40)).astype("float32"))
    consume = {
        "transpose": lambda out: (out.transpose([1, 0]) * weight).sum(),
        "expand": lambda out: out.sum(-1).square().sum(),
        "slice": lambda out: out[::2, 1::3].square().sum(),
        "sum of a part": lambda out: out[3:9].sum(),
    }[consumer]
    experts, batch = make_experts(), make_batch()
    node, main_grads = make_node(experts), bind_main_grads(experts)
    pending = Pending(node, batch)
    consume(pending.out).backward()
    node.step()
    x, probs = tensor(batch.x, grad=True), tensor(batch.probs, grad=True)
    copies = [tensor(numpy(w).astype("float32"), grad=True) for w in weights_of(experts)]
    consume(plain_moe(x, tensor(batch.indices), probs, copies[:3], copies[3:])).backward()
    assert_close(pending.result().dx, numpy(x.grad), PRECISE_BOUND, "dx")
    assert_close(pending.result().dprobs, numpy(probs.grad), PRECISE_BOUND, "dprobs")
    assert_weight_gradients(main_grads, [numpy(w.grad) for w in copies], PRECISE_BOUND)


def test_strided_inputs():
    """x, indices and probs cut out of wider tensors."""
    experts, batch = make_experts(), make_batch()
    node = make_node(experts)
    plain = run(node, batch)
    wide_x = tensor(np.repeat(batch.x, 2, axis=1), grad=True)
    wide_probs = tensor(np.repeat(batch.probs, 2, axis=1), grad=True)
    indices = tensor(np.ascontiguousarray(batch.indices.T)).transpose([1, 0])
    out = node(wide_x[:, ::2], batch.counts, indices, wide_probs[:, ::2])
    out.backward(tensor(batch.dout))
    assert np.array_equal(numpy(out), plain.out)
    assert (
        np.array_equal(numpy(wide_x.grad)[:, ::2], plain.dx)
        and not numpy(wide_x.grad)[:, 1::2].any()
    )
    assert np.array_equal(numpy(wide_probs.grad)[:, ::2], plain.dprobs)


@pytest.fixture
def amp_levels(monkeypatch):
    """The tracer's mixed-precision level at every step of the package that computes, by step."""
    levels, tracer = {}, paddle.base.framework._dygraph_tracer()

    def spy(module, name):
        original = getattr(module, name)

        def called(*args, **kwargs):
            levels.setdefault(name, set()).add(tracer._amp_level)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, called)

    spy(reference, "_grouped")
    spy(routing, "exact_routing")
    spy(layouts, "stack")
    spy(layouts, "deinterleave_gate_up")
    return levels


@pytest.mark.parametrize("grad", [True, False])
def test_automatic_mixed_precision_stays_outside(grad, amp_levels, monkeypatch):
    """Autocast around the layer must not reach routing, engine, caches or flush. On CPU it only
    warns, so the tracer is told itself.
    """
    tracer, level = paddle.base.framework._dygraph_tracer(), paddle.base.core.AmpLevel
    experts, batch = make_experts(), make_batch()
    node, main_grads = make_node(experts), bind_main_grads(experts)
    monkeypatch.setattr(tracer, "_amp_dtype", "bfloat16")
    monkeypatch.setattr(tracer, "_amp_level", level.O2)
    with paddle.set_grad_enabled(grad):
        pending = Pending(node, batch)
    if grad:
        pending.backward()
    node.step()
    assert tracer._amp_level == level.O2, "the caller's setting is back"
    ran = {"_grouped", "exact_routing", "stack"} | ({"deinterleave_gate_up"} if grad else set())
    assert amp_levels == {name: {level.O0} for name in ran}
    assert pending.out.dtype == paddle.float32
    wanted = golden(make_experts(), [batch])
    assert_close(numpy(pending.out), wanted.results[0].out, PRECISE_BOUND)
    if grad:
        assert_weight_gradients(main_grads, wanted.dw, PRECISE_BOUND)


@pytest.mark.parametrize("mode", ["bf16", "fp8"])
def test_dtypes_and_layout_of_what_comes_back(mode):
    config, token_dtype, weight_dtype, _ = MODES[mode]
    experts = make_experts(dtype=weight_dtype)
    pending = Pending(make_node(experts, config), make_batch(), dtype=token_dtype)
    pending.backward()
    assert pending.out.dtype == paddle.bfloat16 and pending.out.is_contiguous()
    assert pending.x.grad.dtype == paddle.bfloat16 and pending.x.grad.is_contiguous()
    assert pending.probs.grad.dtype == paddle.float32
