"""PaddleFleet's configuration object: what every field does here, and what is said about the rest."""

from __future__ import annotations

import logging
from itertools import product

import pytest

from sonicmoe.config import SonicMoEConfig, reload_environment
from sonicmoe.enums import ActivationType, EngineName, ZCode
from sonicmoe.fleet import configuration
from sonicmoe.fleet.configuration import FIELDS, FP8Config, refresh_fp8_config
from sonicmoe.fleet.situ import encode_situ_activation, parse_situ_activation

# FLEET's own names: those of its runtime configuration, and behind them those that its user's adds.
NAMES = {
    "enabled", "fp8_wgrad", "fuse_y1_quant", "fuse_y1_bf16_trunc", "recompute_z", "swiglu_clamp_value",
    "situ_beta", "situ_linear_beta", "epilogue_quant", "save_z_fp8", "fused_gated", "fused_swiglu_quant",
    "alignment_assumed", "iso32_weight", "fused_weight_layout",
    "use_fp8", "use_quack_gemm", "fused_zy1_quant", "assume_aligned", "stagewise_memory", "gemm_num_sms",
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
        assert set(FIELDS) == NAMES
        config = FP8Config()
        for name in FIELDS:
            assert getattr(config, f"resolve_{name}")() == getattr(config, name)

    def test_two_names_of_one_field_are_one(self):
        config = with_fields(use_fp8=True, assume_aligned=True)
        assert config.enabled and config.alignment_assumed and config.resolve_assume_aligned()

    def test_none_is_the_default_but_of_the_linear_bound(self):
        config = with_fields(**dict.fromkeys(FIELDS))
        assert vars(config) == vars(FP8Config()) | {"situ_linear_beta": None}

    def test_defaults_follow_the_environment(self, set_flags):
        set_flags(
            SONIC_MOE_SITU_BETA="2", SONIC_MOE_SITU_LINEAR_BETA="none", SONIC_MOE_FP8_WGRAD="0",
            SONIC_MOE_FP8_RECOMPUTE_Z="1", SONIC_MOE_FP8_ISO32_WEIGHT="1", SONIC_MOE_FP8_SAVE_Z="e4m3",
        )  # fmt: skip
        config = refresh_fp8_config()
        assert (config.situ_beta, config.situ_linear_beta) == (2.0, None)
        assert config.recompute_z and config.iso32_weight and config.save_z_fp8
        assert not config.fp8_wgrad


SMS = {"SONIC_MOE_GEMM_NUM_SMS": "32"}
# What nobody sets is Fleet's default: BF16.
Z = [
    ({}, {"save_z_fp8": None}, {"save_z": ZCode.BF16}),
    ({}, {"save_z_fp8": True}, {"save_z": ZCode.ADAPTIVE}),
]
# A flag says which code it is, unless the field says that it has another number of bits.
Z += [
    ({"SONIC_MOE_FP8_SAVE_Z": code.value}, {"save_z_fp8": bits}, {"save_z": found})
    for code in ZCode for bits, found in (
        (None, code), (True, ZCode.ADAPTIVE if code is ZCode.BF16 else code), (False, ZCode.BF16),
    )
]  # fmt: skip


class TestNodeConfig:
    @pytest.mark.parametrize(
        ("variables", "fields", "wanted"),
        [
            *Z,
            *(({f"SONIC_MOE_FP8_{name.removeprefix('fp8_').upper()}": str(int(not on))}, {name: on}, {name: on})
              for name in ("fp8_wgrad", "recompute_z") for on in (True, False)),
            ({}, {}, {"gemm_num_sms": 0}),
            ({}, {"gemm_num_sms": 64}, {"gemm_num_sms": 64}),
            *((SMS, {"gemm_num_sms": given}, {"gemm_num_sms": found})
              for given, found in ((64, 64), (0, 0), (None, 32))),
            (SMS, {}, {"gemm_num_sms": 32}),
            ({}, {"stagewise_memory": True}, {"stagewise_memory": False}),
        ],
    )  # fmt: skip
    def test_fields_precede_the_environment(self, variables, fields, wanted, set_flags):
        set_flags(**variables)
        made = with_fields(**fields).node_config(fp8=True).resolve()
        assert {name: getattr(made, name) for name in wanted} == wanted

    @pytest.mark.parametrize("enabled", [False, True])
    def test_a_call_says_whether_it_is_fp8_and_else_the_field_does(self, enabled):
        config = with_fields(enabled=enabled)
        modes = [config.node_config(fp8=fp8).fp8_mode for fp8 in (True, False, None)]
        assert modes == ["perf", "off", "perf" if enabled else "off"]

    def test_the_mode_that_frees_memory_and_other_fields_in_force_stay(self):
        with SonicMoEConfig(fp8_mode="mem", recipe="1x128", engine="reference").activate():
            made = FP8Config().node_config(fp8=True)
        assert made.fp8_mode == "mem"
        assert made.recipe == "1x128" and made.engine is EngineName.REFERENCE
        assert FP8Config().node_config(fp8=True).recipe is None

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            *(({name: False}, f"{name} off has no effect")
              for name in ("fused_gated", "fused_swiglu_quant", "epilogue_quant", "fuse_y1_quant")),
            ({"stagewise_memory": True}, "stagewise_memory has no effect"),
            ({"save_z_fp8": False}, "SONIC_MOE_FP8_SAVE_Z=adaptive halves"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_had_is_said_once(self, fields, words, said):
        config = with_fields(save_z_fp8=True)
        config.node_config(fp8=True)
        assert said() == []
        for name, value in fields.items():
            setattr(config, name, value)
        for fp8 in (True, False, True):
            config.node_config(fp8=fp8)
            configuration._node_config.cache_clear()
        assert len(said()) == 1 and words in said()[0]

    def test_nothing_is_said_of_a_z_that_is_not_kept(self, said, set_flags):
        config = FP8Config()
        assert config.node_config(fp8=False).save_z is None
        config.recompute_z = True
        assert config.node_config(fp8=True).save_z is ZCode.BF16
        set_flags(SONIC_MOE_FP8_SAVE_Z="bf16")
        FP8Config().node_config(fp8=True)
        assert said() == []


BETAS = (("beta", 4.0), ("linear_beta", 25.0))
NUMBERS_OF_ITS_OWN = {"situ_beta": 3.0, "situ_linear_beta": 5.0}
DESCRIBED = encode_situ_activation(2.0, None)
CLAMP = {"swiglu_clamp_value": 7}


@pytest.mark.parametrize(
    ("fields", "given", "wanted"),
    [
        ({}, (), (SWIGLU, ())),
        *(({}, (each,), (SWIGLU, ())) for each in (SWIGLU, "swiglu", "swiglu_precise")),
        ({}, ("geglu",), (ActivationType.GEGLU, ())),
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
def test_the_activation_of_a_call(fields, given, wanted):
    assert with_fields(**fields).activation(*given) == wanted


@pytest.mark.parametrize("name", ["SONIC_MOE_STAGEWISE_MEMORY", "USE_QUACK_GEMM"])
def test_variables_of_another_meaning_are_reported_once(name, monkeypatch, said):
    refresh_fp8_config()
    assert said() == []
    monkeypatch.setenv(name, "1")
    reload_environment()
    for _ in range(3):
        refresh_fp8_config()
    assert len(said()) == 1 and f"{name}=1" in said()[0]


# SiTU-GLU as one word.

LOW, HIGH = 1.1754943508222875e-38, 8.507059173023462e37


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "situ_glu:b=4.0:lb=25.0"),
        ((4, 25), "situ_glu:b=4.0:lb=25.0"),
        ((1.0, None), "situ_glu:b=1.0:lb=none"),
        ((1.0, " Off "), "situ_glu:b=1.0:lb=none"),
        ((0.1, 1 / 3, False), "situ_glu:b=0.1:lb=0.3333333333333333:approx"),
        ((LOW, HIGH), f"situ_glu:b={LOW}:lb={HIGH}"),
    ],
)
def test_encoding(arguments, word):
    assert encode_situ_activation(*arguments) == word


def test_reading_is_the_inverse():
    for given in product((LOW, 1 / 3, HIGH), (None, 1 / 3, 25.0), (True, False)):
        numbers = dict(zip(("beta", "linear_beta"), given, strict=False))
        assert parse_situ_activation(encode_situ_activation(*given)) == numbers


@pytest.mark.parametrize(
    ("word", "numbers"),
    [
        ("situ_glu", {}),
        ("situ_glu:b=2", {"beta": 2.0}),
        ("situ_glu:lb=none:approx", {"linear_beta": None}),
        ("situ_glu:lb=NULL:precise", {"linear_beta": None}),
        ("swiglu", None),
        ("situ_glue", None),
        (None, None),
    ],
)
def test_parts_that_are_missing_stay_open(word, numbers):
    assert parse_situ_activation(word) == numbers
