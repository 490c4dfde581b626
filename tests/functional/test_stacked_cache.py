"""Prepared weights of `MoE`: made once while the weights stand still, never stale, never copied or
stored.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
from framework import torch
from functional.layer_golden import assert_same_bits, make_layer, make_tokens, run_layer
from torch.multiprocessing.reductions import StorageWeakRef

from sonicmoe import moe_TC_softmax_topk_layer
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.functional import softmax_topk_layer
from sonicmoe.layouts import WeightLayout
from sonicmoe.quant.recipes import RECIPES, iso
from sonicmoe.quant.reference import dequantize, quantize
from sonicmoe.weights.stacked_cache import _kept, read_weights

FP8 = {"use_fp8": True}
MODES = pytest.mark.parametrize("options", [{}, FP8], ids=["fp32", "fp8"])
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
}


def tokens():
    return make_tokens(19, 32), make_tokens(19, 32, seed=2)


def without_cache(moe, x, **options):
    """The output of a layer with the same parameters that has prepared nothing yet."""
    fresh = make_layer(bias=True, seed=99)
    fresh.load_state_dict(moe.state_dict())
    return fresh(x, **options)[0]


def test_prepared_once(prepared):
    moe, (x, dout) = make_layer(bias=True), tokens()
    runs = [run_layer(moe, x, dout, **FP8) for _ in range(3)]
    moe.eval()(x, **FP8)
    with torch.inference_mode():
        moe(x, **FP8)
    assert len(prepared) == 1
    assert_same_bits(runs[0], runs[2])


def test_nothing_is_kept_of_unquantised_weights():
    """Engines read the user's own memory: to keep it is to keep it from being freed."""
    moe, (x, dout) = make_layer(bias=True), tokens()
    run_layer(moe, x, dout)
    assert not _kept.get(moe.c_fc.weight)
    for options, count in ((FP8, 1), ({}, 0)):
        moe(x, **options)
        assert len(_kept[moe.c_fc.weight]) == count


def converted(moe):
    """Stands for a move to another device."""
    moe.to(torch.bfloat16)


def let_go(moe):
    """As offloading and sharding by hand do."""
    for parameter in moe.parameters():
        parameter.data = torch.empty(0)


@MODES
@pytest.mark.parametrize("leave", [converted, let_go])
def test_weights_that_a_model_left_are_freed_at_once(leave, options):
    moe, (x, dout) = make_layer(bias=True), tokens()
    memory = [StorageWeakRef(parameter.untyped_storage()) for parameter in moe.parameters()]
    run_layer(moe, x, dout, **options)
    with torch.no_grad():
        moe(x, **options)
    assert not any(storage.expired() for storage in memory)
    leave(moe)
    assert all(storage.expired() for storage in memory)


def test_prepared_again_for_another_precision(prepared):
    moe, (x, _) = make_layer(), tokens()
    for options in ({}, FP8, FP8, {}):
        moe(x, **options)
    assert [recipe is not None for recipe in prepared] == [False, True, False]


@MODES
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_step(name, options, prepared):
    moe, (x, dout) = make_layer(bias=True), tokens()
    optimizer = OPTIMIZERS[name](moe.parameters())
    outputs = []
    for _ in range(2):
        out, aux = moe(x, **options)
        ((out * dout).sum() + aux).backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(out.detach())
    assert len(prepared) == (2 if options else 4), "unquantised: in backward too"
    assert not torch.equal(*outputs)
    assert torch.equal(moe(x, **options)[0], without_cache(moe, x, **options))


@MODES
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_load_state_dict(options, assign, prepared):
    moe, other, (x, _) = make_layer(bias=True), make_layer(bias=True, seed=7), tokens()
    moe(x, **options)
    expected = other(x, **options)[0]
    moe.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(moe(x, **options)[0], expected)
    assert len(prepared) == 3


@MODES
@pytest.mark.parametrize("name", ["c_fc.weight", "c_proj.weight", "c_fc.bias", "c_proj.bias"])
def test_every_weight_counts(name, options):
    moe, (x, _) = make_layer(bias=True), tokens()
    before = moe(x, **options)[0]
    with torch.no_grad():
        moe.get_parameter(name).mul_(-1.5)
    after = moe(x, **options)[0]
    assert not torch.equal(before, after) and torch.equal(after, without_cache(moe, x, **options))


def test_write_through_data_needs_invalidation():
    moe, (x, _) = make_layer(bias=True), tokens()
    before = moe(x, **FP8)[0]
    moe.c_fc.weight.data.mul_(-1.5)
    assert torch.equal(moe(x, **FP8)[0], before), "documented: `.data` leaves no trace"
    moe.invalidate_caches()
    after = moe(x, **FP8)[0]
    assert not torch.equal(after, before) and torch.equal(after, without_cache(moe, x, **FP8))


def test_freed_memory_cannot_pass_for_old_weights():
    """Converting twice may put new values where the old ones were, under the same version counter."""
    moe, (x, _) = make_layer(bias=True), tokens()
    for _ in range(5):
        before = moe(x, **FP8)[0]
        moe.half()
        moe.c_fc.weight.data = moe.c_fc.weight.data * -1.5
        moe.float()
        after = moe(x, **FP8)[0]
        assert not torch.equal(after, before) and torch.equal(after, without_cache(moe, x, **FP8))


def test_the_same_memory_given_again_is_no_hit():
    """An allocator may hand out the block that was freed: address, shape and version are those of
    the old weights.
    """
    moe, (x, _) = make_layer(bias=True), tokens()
    block = moe.c_fc.weight.detach().numpy().copy()
    outputs = []
    for factor in (1.0, -1.5):
        moe.c_fc.weight.data = torch.empty(0)
        np.multiply(block, factor, out=block)
        moe.c_fc.weight.data = torch.from_numpy(block)
        outputs.append(moe(x, **FP8)[0])
    assert not torch.equal(*outputs) and torch.equal(outputs[1], without_cache(moe, x, **FP8))


def test_an_address_alone_does_not_name_weights():
    """Where the allocator hands out the same block again and again, the cache must hold on to what
    it compares with.
    """
    engine, settings = ReferenceEngine(), EngineSettings(recipe=RECIPES["dx256"])
    w2 = torch.ones(1, 128, 64)
    for value in range(1, 20):
        w1 = torch.full((1, 128, 128), float(value))
        prepared = read_weights(
            engine, (w1, w2, None, None), settings, WeightLayout(), torch.bfloat16
        ).weights
        assert dequantize(prepared.w1).unique().tolist() == [pytest.approx(value)]
        del w1, prepared


@MODES
@pytest.mark.parametrize("kind", ["parameters", "views"])
def test_rearranged_weights(kind, options, prepared):
    """Split-half weights are interleaved for the engine: the copy must follow its source, and is
    kept in FP8 only.
    """
    moe, (x, _) = make_layer(bias=True), tokens()
    weights = (moe.c_fc.weight, moe.c_proj.weight, moe.c_fc.bias, moe.c_proj.bias)

    def layer():
        w1, w2, b1, b2 = (
            weights if kind == "parameters" else (weight.view_as(weight) for weight in weights)
        )
        return softmax_topk_layer(
            x,
            moe.router.weight,
            (w1, w2, b1, b2),
            2,
            moe.activation_function,
            layout=WeightLayout(split_half=True),
            **options,
        )[0]

    def fresh():
        w1, w2 = (weight.detach().clone().permute(1, 2, 0) for weight in weights[:2])
        return moe_TC_softmax_topk_layer(
            x, moe.router.weight, w1, weights[2], w2, weights[3], 2, concat_layout=True, **options
        )[0]

    for _ in range(5):
        out = layer()
        assert torch.equal(out, fresh())
        prepared.clear()
        assert torch.equal(layer(), out)
        assert len(prepared) == (0 if options else 1)
        with torch.no_grad():
            moe.c_fc.weight.mul_(-1.5)
            moe.c_fc.bias.add_(0.5)


def test_prepared_weights_die_with_their_layer():
    moe, (x, _) = make_layer(), tokens()
    moe(x, **FP8)
    (kept,) = map(weakref.ref, _kept[moe.c_fc.weight].values())
    assert kept() is not None
    del moe
    gc.collect()
    assert kept() is None


@MODES
def test_layer_made_in_inference_mode(options):
    """Inference tensors have no version counter: in-place changes must be seen all the same."""
    x, _ = tokens()
    expected = make_layer(bias=True)
    with torch.inference_mode():
        moe = make_layer(bias=True)
        assert torch.equal(moe(x, **options)[0], expected(x, **options)[0])
        moe.c_proj.weight.mul_(-1.5)
        after = moe(x, **options)[0]
    with torch.no_grad():
        expected.c_proj.weight.mul_(-1.5)
    assert torch.equal(after, expected(x, **options)[0])


@MODES
def test_prepared_in_inference_mode_used_in_training(options, prepared):
    moe, (x, dout) = make_layer(bias=True), tokens()
    with torch.inference_mode():
        moe(x, **options)
    run = run_layer(moe, x, dout, **options)
    assert len(prepared) == (1 if options else 3)
    moe.invalidate_caches()
    assert_same_bits(run, run_layer(moe, x, dout, **options))


@MODES
def test_backward_after_a_change_of_the_weights(options):
    """FP8 operands are copies, so their backward is the forward's; plain ones are the user's own,
    and autograd refuses.
    """
    moe, (x, dout) = make_layer(bias=True), tokens()
    expected = run_layer(moe, x, dout, **options)[2]
    out, _ = moe(x, **options)
    with torch.no_grad():
        moe.c_fc.weight.mul_(-1.5)
    wanted = [moe.c_fc.weight, moe.c_proj.weight]
    if not options:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad((out * dout).sum(), wanted)
        return
    for gradient, name in zip(
        torch.autograd.grad((out * dout).sum(), wanted), ("c_fc", "c_proj"), strict=True
    ):
        assert torch.equal(gradient, expected[f"{name}.weight"])


def test_fp8_backward_after_a_change_of_the_biases():
    """They are kept beside the codes, as copies."""
    moe, (x, dout) = make_layer(bias=True), tokens()
    wanted = [moe.router.weight, moe.c_fc.weight, moe.c_proj.weight]
    expected = torch.autograd.grad((moe(x, **FP8)[0] * dout).sum(), wanted)
    out, _ = moe(x, **FP8)
    with torch.no_grad():
        moe.c_fc.bias.mul_(-1.5)
        moe.c_proj.bias.mul_(-1.5)
    assert all(map(torch.equal, torch.autograd.grad((out * dout).sum(), wanted), expected))


def test_autocast_casts_plain_weights_only(monkeypatch):
    """Engines multiply operands of one dtype; FP8 codes are better made of the fp32 parameters
    themselves.
    """
    seen, original = [], ReferenceEngine.prepare_weights

    def prepare(self, w1, w2, *rest):
        seen.append((w1.dtype, w2.dtype))
        return original(self, w1, w2, *rest)

    monkeypatch.setattr(ReferenceEngine, "prepare_weights", prepare)
    moe, (x, dout) = make_layer(bias=True), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        out, _, gradients = run_layer(moe, x, dout)
        run_layer(moe, x, dout, **FP8)
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 2 + [(torch.float32, torch.float32)], (
        "forward, backward; FP8 once"
    )
    assert out.dtype == torch.bfloat16
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}


# Copies


def deep_copied(moe):
    return copy.deepcopy(moe)


def pickled(moe):
    return pickle.loads(pickle.dumps(moe))


def reloaded(moe):
    fresh = make_layer(bias=True, seed=99)
    fresh.load_state_dict(moe.state_dict())
    return fresh


@MODES
@pytest.mark.parametrize("duplicate", [deep_copied, pickled, reloaded])
def test_copies_are_equal_and_independent(duplicate, options, prepared):
    moe, (x, dout) = make_layer(bias=True), tokens()
    expected = run_layer(moe, x, dout, **options)
    twin = duplicate(moe)
    assert_same_bits(run_layer(twin, x, dout, **options), expected)
    assert len(prepared) == (2 if options else 4), "a copy prepares its own weights"
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.zero_()
    assert not moe(x, **options)[0].any()
    assert_same_bits(run_layer(twin, x, dout, **options), expected)


def test_prepared_weights_are_not_stored():
    moe, (x, _) = make_layer(bias=True), tokens()
    size = len(pickle.dumps(moe))
    moe(x, **FP8)
    assert len(pickle.dumps(moe)) == size
    assert copy.deepcopy(moe).c_fc.weight not in _kept
    assert set(moe.state_dict()) == {name for name, _ in moe.named_parameters()}


def test_an_engine_that_updates_in_place_gives_others_buffers_of_their_own():
    """One up-projection with two down-projections: the second forward must not overwrite what the
    first one's backward reads.
    """
    engine, settings = HopperEngine(), EngineSettings(recipe=RECIPES["dx256"])

    def weight(*shape):
        return torch.nn.Parameter(
            torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))
        )

    w1, w2, other = weight(2, 128, 32), weight(2, 32, 64), torch.nn.Parameter(torch.ones(2, 32, 64))

    def prepare(down):
        return read_weights(
            engine, (w1, down, None, None), settings, WeightLayout(), torch.bfloat16
        ).weights

    first = prepare(w2)
    assert prepare(w2).store is first.store
    assert prepare(other).store is not first.store
    assert torch.equal(dequantize(first.w2), dequantize(quantize(w2.detach(), iso(128))))
    with torch.inference_mode():
        anonymous = torch.ones(2, 128, 32), torch.ones(2, 32, 64), None, None
    read_weights(engine, anonymous, settings, WeightLayout(), torch.bfloat16)
    assert anonymous[0] not in _kept
