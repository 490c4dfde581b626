"""PaddleFleet's configuration object: what every field does here, and what is said about the rest."""

from __future__ import annotations

import logging

import pytest

from sonicmoe.config import SonicMoEConfig, reload_environment
from sonicmoe.enums import ActivationType, EngineName, ZCode
from sonicmoe.fleet import configuration
from sonicmoe.fleet.configuration import FIELDS, FP8Config, refresh_fp8_config
from sonicmoe.fleet.situ import encode_situ_activation

# FLEET's own names: those of its runtime configuration, and those that its user's configuration
# adds.
RUNTIME = {
    "enabled", "fp8_wgrad", "fuse_y1_quant", "fuse_y1_bf16_trunc", "recompute_z",
    "swiglu_clamp_value", "situ_beta", "situ_linear_beta", "epilogue_quant", "save_z_fp8",
    "fused_gated", "fused_swiglu_quant", "alignment_assumed", "iso32_weight",
    "fused_weight_layout",
}  # fmt: skip
USERS = {
    "use_fp8", "use_quack_gemm", "fused_zy1_quant", "assume_aligned", "stagewise_memory",
    "gemm_num_sms",
}  # fmt: skip
SWIGLU, CLAMPED = ActivationType.SWIGLU, ActivationType.SWIGLU_CLAMP
SITU = ActivationType.SITU_GLU


@pytest.fixture(autouse=True)
def fresh():
    """No configuration made yet: making one may say a line."""
    configuration._node_config.cache_clear()
    yield
    configuration._node_config.cache_clear()


def with_fields(**fields):
    config = FP8Config()
    for name, value in fields.items():
        setattr(config, name, value)
    return config


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, logger="sonicmoe")
    return lambda: [r.getMessage() for r in caplog.records if "PaddleFleet" in r.getMessage()]


class TestFields:
    def test_every_name_of_the_contract_is_there_as_attribute_and_method(self):
        assert set(FIELDS) == RUNTIME | USERS
        config = FP8Config()
        for name in FIELDS:
            assert getattr(config, f"resolve_{name}")() == getattr(config, name)

    def test_two_names_of_one_field_are_one(self):
        config = with_fields(use_fp8=True, assume_aligned=True)
        assert config.enabled and config.alignment_assumed and config.resolve_assume_aligned()

    def test_none_is_the_default_but_of_the_linear_bound(self):
        config = with_fields(**dict.fromkeys(FIELDS))
        assert vars(config) == vars(FP8Config()) | {"situ_linear_beta": None}


class TestDefaults:
    def test_follow_the_environment(self, monkeypatch):
        for name, text in {
            "SONIC_MOE_SITU_BETA": "2",
            "SONIC_MOE_SITU_LINEAR_BETA": "none",
            "SONIC_MOE_FP8_WGRAD": "0",
            "SONIC_MOE_FP8_RECOMPUTE_Z": "1",
            "SONIC_MOE_FP8_ISO32_WEIGHT": "1",
            "SONIC_MOE_FP8_SAVE_Z": "e4m3",
        }.items():
            monkeypatch.setenv(name, text)
        config = refresh_fp8_config()
        assert (config.situ_beta, config.situ_linear_beta) == (2.0, None)
        assert config.recompute_z and config.iso32_weight and config.save_z_fp8
        assert not config.fp8_wgrad


class TestNodeConfig:
    @pytest.mark.parametrize("name", ["fp8_wgrad", "recompute_z"])
    @pytest.mark.parametrize("value", [True, False])
    def test_switches_arrive_over_the_environment(self, name, value, monkeypatch):
        variable = f"SONIC_MOE_FP8_{name.removeprefix('fp8_').upper()}"
        monkeypatch.setenv(variable, str(int(not value)))
        config = with_fields(**{name: value})
        assert getattr(config.node_config(fp8=True).resolve(), name) is value

    def test_a_call_says_whether_it_is_fp8_and_else_the_field_does(self):
        config = FP8Config()
        assert config.node_config(fp8=True).fp8_mode == "perf"
        assert config.node_config().fp8_mode == "off"
        config.enabled = True
        assert config.node_config().fp8_mode == "perf"
        assert config.node_config(fp8=False).fp8_mode == "off"

    def test_the_mode_that_frees_memory_and_other_fields_in_force_stay(self):
        with SonicMoEConfig(fp8_mode="mem", recipe="1x128", engine="reference").activate():
            made = FP8Config().node_config(fp8=True)
        assert made.fp8_mode == "mem"
        assert made.recipe == "1x128" and made.engine is EngineName.REFERENCE
        assert FP8Config().node_config(fp8=True).recipe is None

    def test_the_cap_on_multiprocessors(self, monkeypatch):
        config = FP8Config()
        assert config.node_config(fp8=True).gemm_num_sms is None
        config.gemm_num_sms = 64
        assert config.node_config(fp8=True).gemm_num_sms == 64
        monkeypatch.setenv("SONIC_MOE_GEMM_NUM_SMS", "32")
        reload_environment()
        assert FP8Config().gemm_num_sms == 32
        assert config.node_config(fp8=True).resolve().gemm_num_sms == 64
        config.gemm_num_sms = 0
        assert config.node_config(fp8=True).resolve().gemm_num_sms == 0
        config.gemm_num_sms = None
        assert config.node_config(fp8=True).resolve().gemm_num_sms == 32

    @pytest.mark.parametrize(
        "name", ["fused_gated", "fused_swiglu_quant", "epilogue_quant", "fuse_y1_quant"]
    )
    def test_what_cannot_be_had_is_said_once(self, name, said):
        config = with_fields(save_z_fp8=True)
        config.node_config(fp8=True)
        assert said() == []
        setattr(config, name, False)
        for fp8 in (True, False, True):
            config.node_config(fp8=fp8)
        assert len(said()) == 1 and f"{name} off has no effect" in said()[0]

    def test_stagewise_memory_prints_there_and_frees_nothing_here(self, said):
        config = with_fields(stagewise_memory=True)
        assert not config.node_config(fp8=True).resolve().stagewise_memory
        assert "stagewise_memory has no effect" in said()[-1]


class TestZ:
    """`save_z_fp8` off, Fleet's default, keeps z in BF16."""

    def test_is_bf16_and_the_log_says_so_once(self, said):
        for _ in range(2):
            assert FP8Config().node_config(fp8=True).save_z is ZCode.BF16
            configuration._node_config.cache_clear()
        assert len(said()) == 1 and "SONIC_MOE_FP8_SAVE_Z=adaptive halves" in said()[0]

    @pytest.mark.parametrize("given", [None, "int8", "e4m3"])
    def test_in_fp8_is_the_8_bit_code(self, given):
        with SonicMoEConfig(save_z=given).activate():
            made = with_fields(save_z_fp8=True).node_config(fp8=True)
        assert made.save_z is ZCode(given or "adaptive")

    @pytest.mark.parametrize("given", ["adaptive", "int8", "e4m3", "bf16"])
    def test_is_what_the_flag_says_unless_the_field_is_set(self, given, monkeypatch, said):
        monkeypatch.setenv("SONIC_MOE_FP8_SAVE_Z", given)
        assert FP8Config().node_config(fp8=True).save_z is ZCode(given)
        assert said() == []
        config = with_fields(save_z_fp8=given == "bf16")
        other = ZCode.ADAPTIVE if given == "bf16" else ZCode.BF16
        assert config.node_config(fp8=True).save_z is other

    def test_nothing_is_said_where_it_is_not_kept(self, said):
        config = FP8Config()
        assert config.node_config(fp8=False).save_z is None
        config.recompute_z = True
        assert config.node_config(fp8=True).save_z is ZCode.BF16
        assert said() == []


BETAS = (("beta", 4.0), ("linear_beta", 25.0))
NUMBERS_OF_ITS_OWN = {"situ_beta": 3.0, "situ_linear_beta": 5.0}
DESCRIBED = encode_situ_activation(2.0, None)
CLAMP = {"swiglu_clamp_value": 7}


class TestActivation:
    @pytest.mark.parametrize(
        ("fields", "given", "wanted"),
        [
            ({}, (), (SWIGLU, ())),
            ({}, (SWIGLU,), (SWIGLU, ())),
            ({}, ("swiglu",), (SWIGLU, ())),
            ({}, ("swiglu_precise",), (SWIGLU, ())),
            ({}, ("geglu",), (ActivationType.GEGLU, ())),
            ({}, (ActivationType.REGLU,), (ActivationType.REGLU, ())),
            # A clamp makes SwiGLU the clamped one.
            *((CLAMP, (each,), (CLAMPED, (("limit", 7.0),)))
              for each in (SWIGLU, "swiglu", "swiglu_precise", CLAMPED)),
            *(({"swiglu_clamp_value": off}, (SWIGLU,), (SWIGLU, ())) for off in (0, 0.0, -1.0, None)),
            # SiTU has the numbers of the layer, and a description precedes them.
            *(({}, (each,), (SITU, BETAS)) for each in (SITU, "situ_glu")),
            ({"situ_beta": 2.0, "situ_linear_beta": "none"}, (SITU,), (SITU, (("beta", 2.0),))),
            *((NUMBERS_OF_ITS_OWN, (DESCRIBED + more,), (SITU, (("beta", 2.0),))) for more in ("", ":approx")),
            (NUMBERS_OF_ITS_OWN, ("situ_glu:b=2.0",), (SITU, (("beta", 2.0), ("linear_beta", 5.0)))),
        ],
    )  # fmt: skip
    def test_of_a_call(self, fields, given, wanted):
        assert with_fields(**fields).activation(*given) == wanted


class TestVariables:
    @pytest.mark.parametrize("name", ["SONIC_MOE_STAGEWISE_MEMORY", "USE_QUACK_GEMM"])
    def test_of_another_meaning_are_reported_once(self, name, monkeypatch, said):
        refresh_fp8_config()
        assert said() == []
        monkeypatch.setenv(name, "1")
        reload_environment()
        for _ in range(3):
            refresh_fp8_config()
        assert len(said()) == 1 and f"{name}=1" in said()[0]
