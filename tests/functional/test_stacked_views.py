"""Prepared weights of views: upstream's functions take a fresh view of each parameter at every
call, DTensors give out one.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
from framework import torch
from functional.layer_golden import make_layer, make_tokens, run_layer
from torch.multiprocessing.reductions import StorageWeakRef

from sonicmoe import SonicMoEConfig, moe_general_routing_inputs, moe_TC_softmax_topk_layer
from sonicmoe.engine.capabilities import REFERENCE
from sonicmoe.engine.interface import Change, EngineSettings
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.functional.call import Plan
from sonicmoe.layouts import WeightLayout
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.quant.reference import dequantize
from sonicmoe.weights import stacked_cache
from sonicmoe.weights.stacked_cache import _kept, read_weights

SETTINGS = EngineSettings(recipe=RECIPES["dx256"])


class Following(ReferenceEngine):
    """Like the GPU's FP8 engine: it overwrites its codes in place when told that the weights may
    differ, or when it finds so itself.
    """

    name = "following"
    record = REFERENCE  # what it computes, and into which memory, is the reference engine's

    def __init__(self):
        # "made": in new buffers; "remade": in the old ones, as told; "found": in the old ones, by
        # its own guard
        self.events = []

    def keep(self, previous, change):
        return False

    def refresh(self, source, settings, previous=None, change=Change.YES):
        natives, changed = source.native()[:2], change is Change.YES
        if previous is None:
            self.events.append("made")
            fresh = self.prepare_weights(*natives, None, None, settings)
            return dataclasses.replace(fresh, store=[native.clone() for native in natives])
        moved = not all(map(torch.equal, natives, previous.store))
        if changed or moved:
            self.events.append("remade" if changed else "found")
            fresh = self.prepare_weights(*natives, None, None, settings)
            for name in ("w1", "w2", "w1_dgrad", "w2_dgrad"):
                getattr(previous, name).codes.view(torch.uint8).copy_(
                    getattr(fresh, name).codes.view(torch.uint8)
                )
                getattr(previous, name).scale_inv.copy_(getattr(fresh, name).scale_inv)
            for old, native in zip(previous.store, natives, strict=True):
                old.copy_(native)
        return previous


@pytest.fixture
def following(monkeypatch):
    """Every call goes to one `Following` engine."""
    engine = Following()
    monkeypatch.setattr(Plan, "choose", lambda *_: engine)
    return engine


def views(moe):
    return (
        moe.c_fc.weight.permute(1, 2, 0),
        moe.c_fc.bias,
        moe.c_proj.weight.permute(1, 2, 0),
        moe.c_proj.bias,
    )


def whole_layer(moe, x):
    return moe_TC_softmax_topk_layer(
        x, moe.router.weight, *views(moe), moe.top_k, None, use_fp8=True
    )[0]


def general(moe, x):
    rows = torch.arange(len(x)).repeat_interleave(2)
    experts = torch.arange(2 * len(x)) % moe.num_experts
    scores = torch.full((2 * len(x),), 0.5)
    return moe_general_routing_inputs(
        x, scores, rows, experts, *views(moe), None, None, use_fp8=True
    )[0]


def module(moe, x):
    return moe(x, use_fp8=True)[0]


FACES = pytest.mark.parametrize("face", [whole_layer, general])


@FACES
def test_one_quantisation_per_update(face, prepared):
    moe, x = make_layer(bias=True), make_tokens(19, 32)
    optimizer = torch.optim.AdamW(moe.parameters(), lr=0.05, fused=True)  # moves no version counter
    for step in (1, 2, 3):
        for _ in range(3):
            out = face(moe, x)
            out.square().sum().backward()
        assert len(prepared) == step
        fresh = make_layer(bias=True, seed=9)
        fresh.load_state_dict(moe.state_dict())
        assert torch.equal(out, face(fresh, x)), "stale codes"
        prepared.pop()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        moe.c_proj.weight.mul_(-1.5)
    after = face(moe, x)
    assert len(prepared) == 4 and not torch.equal(after, out)


@FACES
def test_an_engine_that_updates_in_place_reuses_its_buffers(face, following):
    """It is told of a change once per update; writes through `.data` it finds itself, and no call
    makes new buffers.
    """
    moe, x = make_layer(), make_tokens(19, 32)
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    for _ in range(3):
        face(moe, x).square().sum().backward()
    assert following.events == ["made"]
    optimizer.step()
    for _ in range(3):
        face(moe, x)
    assert following.events == ["made", "remade"]
    moe.c_fc.weight.data.mul_(-1.5)
    for _ in range(3):
        out = face(moe, x)
    assert following.events == ["made", "remade", "found"]
    fresh = make_layer(seed=9)
    fresh.load_state_dict(moe.state_dict())
    assert torch.equal(out, face(fresh, x))


@pytest.mark.parametrize("contiguous", [True, False])
def test_weights_are_split_into_experts_when_asked_for(contiguous):
    """Addresses need no views; and what an engine looked at shows later values, or is copied again."""
    engine, sources = Following(), []

    def refresh(source, *arguments):
        sources.append(source)
        return Following.refresh(engine, source, *arguments)

    engine.refresh = refresh
    w1 = torch.nn.Parameter(torch.randn(2, 128, 32) if contiguous else torch.randn(2, 32, 128).mT)
    w2 = torch.nn.Parameter(torch.randn(2, 32, 64))

    def codes():
        weights = (w1, w2, None, None)
        return dequantize(
            read_weights(engine, weights, SETTINGS, WeightLayout(), torch.bfloat16).weights.w1
        ).clone()

    before = codes()
    with torch.no_grad():
        w1.mul_(-2)
    assert torch.equal(codes(), -2 * before)
    w1.data.mul_(2)  # found by the engine itself
    assert torch.equal(codes(), -4 * before)
    assert engine.events == ["made", "remade", "found"]
    for source in sources:
        matrices = (*source.up, *source.down)
        assert source.pointers == tuple(matrix.data_ptr() for matrix in matrices)
        assert (source.pointers[0] == w1.data_ptr()) == contiguous
        assert len(source.up) == len(source.down) == 2
        assert all(torch.equal(source.down[expert], w2[expert]) for expert in range(2))
        assert torch.equal(matrices[1], source.up[1])


@FACES
@pytest.mark.parametrize("leave", ["converted", "let go"])
def test_an_engine_that_updates_in_place_keeps_none_of_them(face, leave, following):
    moe, x = make_layer(), make_tokens(19, 32)
    memory = [StorageWeakRef(parameter.untyped_storage()) for parameter in moe.parameters()]
    for _ in range(2):
        face(moe, x).square().sum().backward()
    if leave == "converted":
        moe.to(torch.bfloat16)
    else:
        for parameter in moe.parameters():
            parameter.data = torch.empty(0)
    assert following.events == ["made"] and all(storage.expired() for storage in memory)


def test_memory_given_again_gets_buffers_of_its_own(following):
    """Address and version are those of weights whose outstanding forward has still to read its
    codes.
    """
    moe, x = make_layer(), make_tokens(19, 32)
    block = moe.c_fc.weight.detach().numpy().copy()
    moe.c_fc.weight.data = torch.from_numpy(block)
    first = module(moe, x)
    moe.c_fc.weight.data = torch.empty(0)
    moe.c_fc.weight.data = torch.from_numpy(block)
    module(moe, x)
    assert following.events == ["made", "made"]
    first.sum().backward()


def test_every_face_of_a_layer_shares_one_quantisation(following):
    moe, x = make_layer(), make_tokens(19, 32)
    outputs = [face(moe, x) for face in (module, whole_layer, general, module)]
    assert following.events == ["made"]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[3])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_a_compiled_graph(backend, following):
    torch._dynamo.reset()
    moe, x = make_layer(), make_tokens(19, 32)
    graph = torch.compile(lambda x: whole_layer(moe, x), fullgraph=True, backend=backend)
    for _ in range(3):
        graph(x).square().sum().backward()
    assert following.events == ["made"]
    with torch.no_grad():
        moe.c_fc.weight.mul_(-1.5)
    assert torch.equal(graph(x), module(moe, x))
    assert following.events == ["made", "remade"]


@pytest.mark.parametrize("follows", [False, True])
def test_codes_of_views_die_with_the_parameter(follows, request):
    if follows:
        request.getfixturevalue("following")
    moe, x = make_layer(), make_tokens(19, 32)
    whole_layer(moe, x).square().sum().backward()
    (kept,) = _kept[moe.c_fc.weight].values()
    codes, memory = weakref.ref(kept.cache.weights.w1.codes), weakref.ref(moe.c_fc.weight)
    del kept
    assert codes() is not None
    del moe
    gc.collect()
    assert codes() is None and memory() is None


def test_every_layer_of_one_flat_buffer_has_its_own_entry(prepared):
    """All parameters of a model as views of one tensor, as some optimizers keep them."""
    flat = torch.nn.Parameter(torch.randn(4, 2, 128, 32))
    downs = [torch.nn.Parameter(torch.randn(2, 32, 64)) for _ in range(4)]
    engine = ReferenceEngine()

    def prepare(i):
        weights = (flat[i], downs[i], None, None)
        return read_weights(engine, weights, SETTINGS, WeightLayout(), torch.bfloat16).weights

    first = [prepare(i) for i in range(4)]
    assert [prepare(i) for i in range(4)] == first and len(prepared) == 4
    with torch.no_grad():
        flat[2].mul_(-2)  # one version counter for all: everything is made again, nothing is stale
    again = [prepare(i) for i in range(4)]
    assert len(prepared) == 8
    assert torch.equal(dequantize(again[2].w1), -2 * dequantize(first[2].w1))
    assert torch.equal(dequantize(again[1].w1), dequantize(first[1].w1))


def test_overlapping_views_do_not_pile_up():
    buffer, w2 = torch.nn.Parameter(torch.randn(40, 128, 32)), torch.randn(2, 32, 64)
    for start in range(38):
        weights = (buffer[start : start + 2], w2, None, None)
        prepared = read_weights(
            ReferenceEngine(), weights, SETTINGS, WeightLayout(), torch.bfloat16
        ).weights
        assert torch.allclose(dequantize(prepared.w1), weights[0].detach(), atol=0.3)
    assert len(_kept[buffer]) == 20, "as many as fit side by side"


def test_strides_are_part_of_what_a_weight_is():
    """A square matrix and its transpose share address, shape and version."""
    w1, w2 = torch.randn(2, 128, 64), torch.randn(2, 64, 64)

    def codes(down):
        weights = (w1, down, None, None)
        return dequantize(
            read_weights(
                ReferenceEngine(), weights, SETTINGS, WeightLayout(), torch.bfloat16
            ).weights.w2
        )

    assert torch.equal(codes(w2.mT), codes(w2).mT)
    assert not torch.equal(codes(w2.mT), codes(w2))


def test_forgetting_a_parameter_forgets_its_views(prepared):
    moe, x = make_layer(bias=True), make_tokens(19, 32)
    before = whole_layer(moe, x)
    moe.c_fc.weight.data.mul_(-1.5)
    moe.invalidate_caches()
    assert not torch.equal(whole_layer(moe, x), before) and len(prepared) == 2


def test_a_graph_keeps_what_it_reads(monkeypatch):
    """A captured graph holds addresses only: other settings for the same weights must not free its
    buffers.
    """
    moe, engine, x = make_layer(), Following(), make_tokens(19, 32)
    monkeypatch.setattr(Plan, "choose", lambda *_: engine)
    whole_layer(moe, x)
    (kept,) = _kept[moe.c_fc.weight].values()
    codes = weakref.ref(kept.cache.weights.w1.codes)
    del kept
    with monkeypatch.context() as capture:
        capture.setattr(stacked_cache, "is_cuda", lambda _: True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        whole_layer(moe, x)
    with SonicMoEConfig(fp8_mode="perf", save_z="e4m3").activate():
        moe(x)
    gc.collect()
    assert engine.events == ["made", "made"] and codes() is not None
    del moe
    gc.collect()
    assert codes() is None


# A forward that is outstanding while the codes it read are overwritten


@pytest.mark.parametrize("face", [module, whole_layer])
def test_backward_over_overwritten_codes_is_refused(face, following):
    moe, x = make_layer(), make_tokens(19, 32)
    stale = face(moe, x).sum()
    with torch.no_grad():
        moe.c_fc.weight.mul_(-1.5)
    fresh = face(moe, x).sum()
    with pytest.raises(RuntimeError, match="expert weights were modified by an inplace operation"):
        stale.backward()
    fresh.backward()
    assert following.events == ["made", "remade"]


def test_backward_before_the_next_forward_reads_the_codes_of_its_own(following):
    moe, x = make_layer(), make_tokens(19, 32)
    expected = run_layer(moe, x, torch.ones(19, 32), use_fp8=True)[2]
    out, _ = moe(x, use_fp8=True)
    with torch.no_grad():
        moe.c_fc.weight.mul_(-1.5)
    gradient = torch.autograd.grad(out.sum(), moe.c_proj.weight)[0]
    again = make_layer()
    del expected["router.weight"]
    assert torch.equal(
        gradient, torch.autograd.grad(again(x, use_fp8=True)[0].sum(), again.c_proj.weight)[0]
    )


def test_several_forwards_of_the_same_weights_may_be_outstanding(following):
    moe, x = make_layer(), make_tokens(19, 32)
    outputs = [module(moe, x) for _ in range(3)]
    other = torch.nn.Parameter(torch.ones(3, requires_grad=True))
    other.grad = torch.ones(3)
    torch.optim.SGD([other], lr=0.1).step()  # another model's optimizer, as in adversarial training
    outputs.append(module(moe, x))
    for out in outputs:
        out.sum().backward()
    assert following.events == ["made", "remade"]
