"""The Hopper engine's border, which needs no GPU: what it refuses, in which words, and what it
prepares on the host.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from engine.moe_golden import make_problem, native_weights
from framework import tensor, torch

from sonicmoe.bench.public_models import expert_sizes
from sonicmoe.config import SonicMoEConfig
from sonicmoe.engine import hopper, hopper_passes
from sonicmoe.engine.hopper import HopperEngine, hopper_unavailable, settings_problem
from sonicmoe.engine.interface import Change, EngineSettings
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import ActivationType, ZCode
from sonicmoe.errors import ConfigError, DTypeError, ShapeError
from sonicmoe.interop import data_ptr
from sonicmoe.kernels import sm90
from sonicmoe.layouts import WeightSource
from sonicmoe.quant.gpu import QuantizedWeights
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.routing.build import build_routing

FP8 = EngineSettings(recipe=RECIPES["iso128"])
ENGINE = HopperEngine()
GATED = [ActivationType.SWIGLU, ActivationType.GEGLU, ActivationType.REGLU]


@pytest.fixture
def capability(monkeypatch):
    """Pretend that every GPU has this compute capability, and that its kernels can be had."""
    monkeypatch.setattr(hopper, "missing_tool", lambda: None)

    def pretend(*found):
        monkeypatch.setattr(hopper.torch.cuda, "get_device_capability", lambda *_: found)

    pretend(9, 0)
    return pretend


class TestSettings:
    @pytest.mark.parametrize("activation", GATED, ids=lambda a: a.value)
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"recompute_z": True},
            {"iso_weight": True},
            {"frees_stagewise": True},
            {"fp8_wgrad": False},
        ],
        ids=lambda changes: next(iter(changes), "default"),
    )
    def test_what_it_computes(self, activation, changes):
        assert settings_problem(replace(FP8, activation=activation, **changes)) is None

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"recipe": None}, "FP8 is off"),
            (
                {"recipe": RECIPES["1x128"]},
                "the recipe is '1x128', and its kernels are made for 'iso128'",
            ),
            ({"recipe": RECIPES["iso128-pow2"]}, "the recipe is 'iso128-pow2'"),
            (
                {"activation": ActivationType.SILU},
                "the activation is 'silu', and it has ['swiglu', 'geglu', 'reglu']",
            ),
            ({"save_z": ZCode.E4M3}, "z is saved as 'e4m3', and it stores 'int8'"),
            ({"save_z": ZCode.BF16}, "z is saved as 'bf16'"),
        ],
    )
    def test_what_it_does_not(self, changes, words):
        settings = replace(FP8, **changes)
        assert words in settings_problem(settings)
        with pytest.raises(ConfigError, match="the hopper engine cannot compute these settings"):
            ENGINE.refresh(source(), settings)

    def test_the_default_configuration_in_fp8_suits_it(self):
        config = SonicMoEConfig(fp8_mode="perf").resolve()
        assert settings_problem(EngineSettings.from_config(config, ActivationType.SWIGLU)) is None


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
def test_what_a_pass_shows_is_a_view_of_its_scratch(dtype):
    """At the address that was said, in either framework: what a listener writes there, later
    launches read.
    """
    memory, spare = (torch.zeros((4096,), dtype=torch.uint8) for _ in range(2))
    observer, kind = hopper_passes._Observer([spare, memory]), getattr(torch, dtype)
    view = observer._view(kind, data_ptr(memory) + 1024, 3, 5)
    assert (
        view.dtype == kind
        and list(view.shape) == [3, 5]
        and data_ptr(view) == data_ptr(memory) + 1024
    )
    view.copy_(torch.ones((3, 5), dtype=kind))
    size = 15 * hopper_passes._BYTES[kind]
    written = [place for place, byte in enumerate(memory.tolist()) if byte]
    assert (
        written and min(written) >= 1024 and max(written) < 1024 + size and not any(spare.tolist())
    )
    assert list(observer._view(kind, data_ptr(memory) + 4096, 0, 5).shape) == [0, 5]
    with pytest.raises(AssertionError, match="outside its scratch"):
        observer._view(kind, data_ptr(memory) + 4096, 1, 1)


class TestUnavailable:
    def test_on_the_host(self):
        assert hopper_unavailable("cpu", FP8) == "no GPU: tensors are on cpu"

    @pytest.mark.parametrize("found", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
    def test_other_gpus(self, capability, found):
        capability(*found)
        assert f"cuda:1 has compute capability {found[0]}.{found[1]}" in hopper_unavailable(
            "cuda:1", FP8
        )

    def test_the_device_that_is_asked_about(self, monkeypatch):
        asked = []
        monkeypatch.setattr(hopper, "missing_tool", lambda: None)
        monkeypatch.setattr(
            hopper.torch.cuda, "get_device_capability", lambda index: asked.append(index) or (9, 0)
        )
        for device in ("cuda", "cuda:0", "cuda:3"):
            assert hopper_unavailable(device, FP8) is None
        assert asked == [0, 0, 3]

    @pytest.mark.parametrize("sizes", expert_sizes().values(), ids=expert_sizes())
    def test_public_models_are_served(self, capability, sizes):
        assert hopper_unavailable("cuda:0", FP8, sizes=sizes) is None

    @pytest.mark.parametrize(
        "sizes", [(2056, 768), (2040, 768), (2048, 736), (2048, 96), (8, 64)], ids=str
    )
    def test_other_sizes_are_not(self, capability, sizes):
        wanted = f"H is {sizes[0]} and I is {sizes[1]}, and it needs multiples of 16 and 64"
        assert hopper_unavailable("cuda:0", FP8, sizes=sizes) == wanted

    @pytest.mark.parametrize("dtype", ["float16", "float32"])
    def test_other_dtypes(self, capability, dtype):
        for spelling in (dtype, getattr(torch, dtype)):
            assert (
                hopper_unavailable("cuda:0", FP8, spelling)
                == f"tokens are {dtype}, and it takes bfloat16"
            )
        assert hopper_unavailable("cuda:0", FP8, torch.bfloat16) is None

    def test_biases(self, capability):
        assert (
            hopper_unavailable("cuda:0", FP8, bias=True)
            == "the experts have biases, and it has none"
        )

    @pytest.mark.parametrize(
        "changes", [{"recipe": None}, {"recipe": RECIPES["1x128"]}, {"save_z": ZCode.E4M3}]
    )
    def test_other_settings(self, capability, changes):
        settings = replace(FP8, **changes)
        assert hopper_unavailable("cuda:0", settings) == settings_problem(settings) is not None

    def test_a_machine_that_cannot_have_its_kernels(self, capability, monkeypatch):
        monkeypatch.setattr(hopper, "missing_tool", lambda: "there is no nvcc")
        assert hopper_unavailable("cuda:0", FP8) == "there is no nvcc"
        assert hopper_unavailable("cuda:0", replace(FP8, recipe=None)) == "FP8 is off"

    def test_kernels_need_a_compiler_or_a_warm_cache(self, monkeypatch, tmp_path):
        held = set()
        monkeypatch.setattr(sm90, "package_versions", lambda name: ((name, "1"),))
        monkeypatch.setattr(
            sm90,
            "default_cache",
            lambda: SimpleNamespace(try_load=lambda key: key if key in held else None),
        )
        monkeypatch.setattr(sm90, "find_toolkit", lambda: None)
        assert "no nvcc to compile its kernels" in sm90.missing_tool()
        held.update(job.key() for job in sm90.engine_sources())
        assert sm90.missing_tool() is None
        held.clear()
        monkeypatch.setattr(sm90, "find_toolkit", object)
        assert sm90.missing_tool() is None
        monkeypatch.setattr(sm90, "package_versions", lambda name: ((name, "absent"),))
        assert "apache-tvm-ffi" in sm90.missing_tool()

    def test_plain_weight_gradients_need_the_bf16_gemms(self, capability, monkeypatch):
        plain = replace(FP8, fp8_wgrad=False)
        monkeypatch.setattr(hopper, "bf16_unavailable", lambda *_: None)
        assert hopper_unavailable("cuda:0", plain) is None
        monkeypatch.setattr(hopper, "bf16_unavailable", lambda *_: "a package is missing")
        assert hopper_unavailable("cuda:0", FP8) is None
        found = hopper_unavailable("cuda:0", plain)
        assert (
            found
            == "fp8_wgrad is off and the BF16 weight gradients cannot run: a package is missing"
        )


def source(dtype=torch.bfloat16, experts=2, hidden=144, inner=64):
    """Native matrices, as views of two stacked tensors."""
    problem = make_problem(experts=experts, hidden=hidden, intermediate=inner)
    w1, w2, _, _ = native_weights(problem)
    w1, w2 = (tensor(w, torch.float32).to(dtype) for w in (w1, w2))
    return WeightSource(tuple(w1.unbind(0)), tuple(w2.unbind(0)))


def stacked(given):
    return torch.stack(list(given.up)), torch.stack(list(given.down))


def same(a, b):
    codes = [q.codes.view(torch.uint8).to(torch.int64) for q in (a, b)]
    return bool((codes[0] == codes[1]).all()) and bool((a.scale_inv == b.scale_inv).all())


class TestPreparedWeights:
    """On the host the exact quantiser serves: what is prepared equals the reference engine's."""

    def test_equals_the_reference_engine(self):
        weights = stacked(source())
        ours = ENGINE.prepare_weights(*weights, None, None, FP8)
        theirs = ReferenceEngine().prepare_weights(*weights, None, None, FP8)
        assert same(ours.w1, theirs.w1) and same(ours.w2, theirs.w2)
        assert ours.w1_dgrad.shape == theirs.w1.shape and ours.w1_dgrad.codes.shape == (2, 144, 128)
        assert (ours.num_experts, ours.hidden_size, ours.intermediate_size) == (2, 144, 64)

    def test_iso_weight_holds_one_order(self):
        ours = ENGINE.refresh(source(), replace(FP8, iso_weight=True))
        assert ours.w1_dgrad is ours.w1 and ours.w2_dgrad is ours.w2

    def test_rows_that_the_activation_cannot_have_are_refused(self):
        given = source()
        halves = WeightSource(tuple(up[:64] for up in given.up), given.down)
        with pytest.raises(
            ShapeError, match="w1 has 64 rows per expert; swiglu with I=64 needs 128"
        ):
            ENGINE.refresh(halves, FP8)

    def test_the_store_is_kept(self):
        given = source()
        first = ENGINE.refresh(given, FP8)
        assert isinstance(first.store, QuantizedWeights)
        assert ENGINE.refresh(given, FP8, first, Change.NO).store is first.store

    def test_weights_that_changed_are_quantised_again(self):
        first = ENGINE.refresh(source(), FP8)
        given = source()
        with torch.no_grad():
            for matrix in (*given.up, *given.down):
                matrix.copy_(matrix * 0.5)
        again = ENGINE.refresh(given, FP8, first, Change.NO)
        assert again.store is first.store
        assert same(
            again.w1, ReferenceEngine().prepare_weights(*stacked(given), None, None, FP8).w1
        )

    def test_it_updates_in_place_and_the_others_do_not(self):
        assert ENGINE.refresh(source(), FP8).updated_in_place
        assert not ReferenceEngine().refresh(source(), FP8).updated_in_place

    def test_biases_are_refused(self):
        w1, w2 = stacked(source())
        b1, b2 = (torch.zeros(list(w.shape[:2]), dtype=torch.float32) for w in (w1, w2))
        with pytest.raises(ConfigError, match="the hopper engine has no biases"):
            ENGINE.prepare_weights(w1, w2, b1, b2, FP8)
        with pytest.raises(ConfigError, match="the hopper engine has no biases"):
            ENGINE.refresh(WeightSource.stacked(w1, w2, b1, b2), FP8)

    def test_weights_that_do_not_fit_are_refused(self):
        w1, w2 = stacked(source())
        with pytest.raises(ShapeError, match="swiglu with I=48 needs 96"):
            ENGINE.prepare_weights(w1, w2[:, :, :48], None, None, FP8)


def test_plain_weights_are_refused_in_forward():
    w1, w2 = stacked(source())
    plain = ReferenceEngine().prepare_weights(w1, w2, None, None, EngineSettings())
    routing = build_routing(torch.zeros([3, 1], dtype=torch.int64), torch.ones([3, 1]), 2)
    with pytest.raises(DTypeError, match="weights are plain, the settings have recipe 'iso128'"):
        ENGINE.forward(torch.zeros([3, 144], dtype=torch.bfloat16), routing, plain, FP8)
