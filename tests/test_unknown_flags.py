"""A misspelt `SONIC_MOE_*` variable is reported whichever face meets it first, once per process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from framework import torch

from sonicmoe import MoE
from sonicmoe.config import (
    FLAGS_BY_ENV,
    FLEETS_VARIABLES,
    current_config,
    unknown_flags,
    warn_unknown_flags,
)
from sonicmoe.enums import ActivationType
from sonicmoe.functional import moe_general_routing_inputs
from sonicmoe.jit_warmup import warmup_jit

MISSPELT = {"SONIC_MOE_FP8_MOD": "perf"}
LINE = "unknown environment variable SONIC_MOE_FP8_MOD is ignored; did you mean SONIC_MOE_FP8_MODE?"


def through_moe() -> None:
    kinds = {"activation_function": ActivationType.SWIGLU, "add_bias": False, "std": 0.02}
    MoE(num_experts=4, num_experts_per_tok=2, hidden_size=32, intermediate_size=32, **kinds)(
        torch.randn(6, 32)
    )


def through_a_function() -> None:
    tokens, experts = torch.arange(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    w1, w2 = torch.randn(2, 16, 8).permute(1, 2, 0), torch.randn(2, 8, 8).permute(1, 2, 0)
    routed = torch.randn(4, 8), torch.ones(4), tokens, experts
    last = None, ActivationType.SWIGLU, False
    moe_general_routing_inputs(*routed, w1, None, w2, None, 2, *last)


FACES = {
    "MoE": through_moe,
    "functional": through_a_function,
    "warmup_jit": lambda: warmup_jit(8, 64, 64, device="cpu"),
    "configuration": current_config,
}
# Names of other programs, which are left alone.
OTHERS = (
    *("PATH", "SONICMOE", "SONICMOE_", "SONICMOE_TEST_FRAMEWORK", "MOE_ENGINE", "USE_GEMM"),
    *("MOE_LAYERS", "QUACK", "GEMM_TUNING", "SUPERSONIC", "SONIC_PI"),
)


@pytest.mark.parametrize("face", FACES)
def test_every_face_reports_it_once(
    face: str, set_flags: Callable[..., None], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    set_flags(**MISSPELT, SONIC_MOE_CACHE_DIR=str(tmp_path))
    for _ in range(3):
        FACES[face]()
    assert caplog.messages.count(LINE) == 1


def near_misses(name: str) -> set[str]:
    """A letter missing, doubled or exchanged with the next one, in upper and lower case."""
    missing = {name[:at] + name[at + 1 :] for at in range(len(name))}
    doubled = {name[:at] + name[at] + name[at:] for at in range(len(name))}
    exchanged = {
        name[:at] + name[at + 1] + name[at] + name[at + 2 :] for at in range(len(name) - 1)
    }
    typed = missing | doubled | exchanged | {name, name.title()}
    return (typed | {one.lower() for one in typed}) - set(FLAGS_BY_ENV)


def test_every_near_miss_of_every_flag_names_that_flag() -> None:
    for name in FLAGS_BY_ENV:
        for typed in near_misses(name):
            assert unknown_flags({typed: "1"}) == {typed: name}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("SONIC_MOE_VALIDATE_DISPATCHES", "SONIC_MOE_VALIDATE_DISPATCH"),
        ("SONIC_MOE_SAVE_Z", "SONIC_MOE_FP8_SAVE_Z"),
        ("sonic_moe_fp8_mode", "SONIC_MOE_FP8_MODE"),
        ("SONICMOE_FP8", "SONIC_MOE_FP8_MODE"),
        ("SONICMOE_ENGIN", "SONIC_MOE_ENGINE"),
        ("sonicmoe_cache", "SONIC_MOE_CACHE_DIR"),
        ("SonicMoe_Engine", "SONIC_MOE_ENGINE"),
        ("use_quack_gemm", "USE_QUACK_GEMM"),
        ("SONIC_MOE_COLOUR_OF_THE_LOGO_ON_THE_PAGE", None),
        ("sonic_moe_qqqqqqqqqqqqqqqqqqqqqqqqqqq", None),
    ],
)
def test_what_people_typed_is_reported(typed: str, meant: str | None) -> None:
    environ = dict.fromkeys((*FLAGS_BY_ENV, *OTHERS, typed), "1")
    assert unknown_flags(environ) == {typed: meant}


@pytest.mark.parametrize("name", FLEETS_VARIABLES)
def test_a_variable_of_fleets_own_engine_is_told_from_a_slip(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert name not in FLAGS_BY_ENV and unknown_flags({name: "1"}) == {name: None}
    monkeypatch.setenv(name, "1")
    for _ in range(2):
        warn_unknown_flags()
    (message,) = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert message.endswith(f"it is one of PaddleFleet's own engine: {FLEETS_VARIABLES[name]}")
