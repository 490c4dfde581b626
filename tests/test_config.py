"""Flags and configuration: parsing, precedence, near misses, and the page generated from the
registry.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sonicmoe.config import (
    FLAGS,
    FLAGS_BY_ENV,
    PREFIX,
    Flag,
    ResolvedConfig,
    SonicMoEConfig,
    _environment,
    current_config,
    unknown_flags,
    warn_unknown_flags,
)
from sonicmoe.enums import EngineName, ZCode
from sonicmoe.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]

BOOLEANS = {
    "1": True,
    "true": True,
    "ON": True,
    " yes ": True,
    "0": False,
    "False": False,
    "off": False,
    "no": False,
    "": False,
}

# Every spelling a parser takes, and spellings it must refuse. A new flag fails
# `test_every_flag_is_covered` until it is here.
ACCEPTED = {
    "fp8_mode": {"perf": "perf", "MEM": "mem", "": "off", "0": "off", "off": "off", "none": "off"},
    "save_z": {"int8": ZCode.INT8, "E4M3": ZCode.E4M3, " bf16 ": ZCode.BF16},
    "recipe": {"1x128": "1x128", "iso256": "iso256", "iso128-pow2": "iso128-pow2"},
    "engine": {
        "auto": EngineName.AUTO,
        "Reference": EngineName.REFERENCE,
        "hopper": EngineName.HOPPER,
    },
    "cache_dir": {
        "/some/where": Path("/some/where"),
        "relative": Path("relative"),
        "~/kernels": Path.home() / "kernels",
    },
    "local_cache_dir": {"/node/local": Path("/node/local")},
    "lock_timeout_s": {"1": 1.0, "2.5": 2.5, "1e3": 1000.0},
}
REFUSED = {
    "fp8_mode": ["perff", "1", "fp8"],
    "save_z": ["int4", "", "fp8"],
    "recipe": ["iso100", "ISO128", ""],
    "engine": ["cpu", ""],
    "cache_dir": ["", "  "],
    "local_cache_dir": [""],
    "lock_timeout_s": ["0", "-1", "inf", "nan", "soon", ""],
}


def accepted(flag: Flag) -> dict[str, object]:
    return ACCEPTED.get(flag.field, BOOLEANS)


def refused(flag: Flag) -> list[str]:
    return REFUSED.get(flag.field, ["2", "maybe", "y e s"])


def resolved(value: object) -> object:
    """`off` exists so that an explicit field can beat the environment; an engine sees None."""
    return None if value == "off" else value


def a_value_other_than_the_default(flag: Flag) -> tuple[str, object]:
    return next((text, value) for text, value in accepted(flag).items() if value != flag.default)


ACCEPT_CASES = [
    pytest.param(flag, text, id=f"{flag.env}={text!r}") for flag in FLAGS for text in accepted(flag)
]
REFUSE_CASES = [
    pytest.param(flag, text, id=f"{flag.env}={text!r}") for flag in FLAGS for text in refused(flag)
]
ALL_FLAGS = [pytest.param(flag, id=flag.env) for flag in FLAGS]


def test_every_flag_is_covered() -> None:
    not_boolean = {flag.field for flag in FLAGS if not isinstance(flag.default, bool)}
    assert not_boolean == set(ACCEPTED) == set(REFUSED)


def test_registry_and_dataclasses_have_the_same_fields() -> None:
    names = {flag.field for flag in FLAGS}
    assert names == {field.name for field in dataclasses.fields(SonicMoEConfig)}
    assert names == {field.name for field in dataclasses.fields(ResolvedConfig)}
    assert len(FLAGS_BY_ENV) == len(FLAGS) == len(names)


@pytest.mark.parametrize(("flag", "text"), ACCEPT_CASES)
def test_environment_value_is_parsed(
    flag: Flag, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(flag.env, text)
    assert getattr(current_config(), flag.field) == resolved(accepted(flag)[text])


@pytest.mark.parametrize(("flag", "text"), ACCEPT_CASES)
def test_configuration_takes_the_same_spellings(flag: Flag, text: str) -> None:
    assert getattr(SonicMoEConfig(**{flag.field: text}), flag.field) == accepted(flag)[text]


@pytest.mark.parametrize(("flag", "text"), REFUSE_CASES)
def test_bad_value_is_refused_by_both_doors(
    flag: Flag, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match=rf"SonicMoEConfig\.{flag.field}={text!r} is not understood; needed: \S"
    ):
        SonicMoEConfig(**{flag.field: text})
    monkeypatch.setenv(flag.env, text)
    with pytest.raises(ConfigError, match=f"{flag.env}={text!r} is not understood; needed: \\S"):
        current_config()


@pytest.mark.parametrize("flag", ALL_FLAGS)
def test_value_of_a_wrong_type_names_the_field(flag: Flag) -> None:
    with pytest.raises(
        ConfigError, match=rf"SonicMoEConfig\.{flag.field} got .*object.*; needed: "
    ):
        SonicMoEConfig(**{flag.field: object()})


@pytest.mark.parametrize(
    "field", ["fp8_mode", "recipe", "save_z", "engine", "cache_dir", "lock_timeout_s"]
)
def test_boolean_is_no_value_of_a_named_setting(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"SonicMoEConfig\.{field} got True"):
        SonicMoEConfig(**{field: True})


@pytest.mark.parametrize("flag", ALL_FLAGS)
def test_precedence(flag: Flag, monkeypatch: pytest.MonkeyPatch) -> None:
    """Explicit beats activated beats environment beats default."""
    built_in = getattr(current_config(), flag.field)
    text, value = a_value_other_than_the_default(flag)
    monkeypatch.setenv(flag.env, text)
    assert getattr(current_config(), flag.field) == value != built_in
    explicit_default = built_in if flag.default is None else flag.default
    with SonicMoEConfig(**{flag.field: explicit_default}).activate():
        assert getattr(current_config(), flag.field) == built_in
        assert getattr(current_config(SonicMoEConfig(**{flag.field: value})), flag.field) == value
    assert getattr(current_config(), flag.field) == value


def test_explicit_configuration_hides_the_activated_one() -> None:
    with SonicMoEConfig(recompute_z=True, save_z="e4m3").activate():
        resolved = current_config(SonicMoEConfig(save_z="bf16"))
        assert resolved.save_z is ZCode.BF16
        assert resolved.recompute_z is False


def test_activations_nest_and_end_with_their_block() -> None:
    outer, inner = SonicMoEConfig(save_z="e4m3"), SonicMoEConfig(save_z="bf16")
    with outer.activate() as entered:
        assert entered is outer
        with inner.activate():
            assert current_config().save_z is ZCode.BF16
        assert current_config().save_z is ZCode.E4M3
    assert current_config().save_z is ZCode.INT8


def test_activation_ends_when_the_block_raises() -> None:
    with pytest.raises(RuntimeError, match="inside"), SonicMoEConfig(recompute_z=True).activate():
        raise RuntimeError("inside")
    assert current_config().recompute_z is False


def test_the_environment_is_read_alike_from_any_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONIC_MOE_FP8_MODE", "perf")
    monkeypatch.delenv("SONIC_MOE_FP8_WGRAD", raising=False)
    read = _environment()
    assert read[list(FLAGS_BY_ENV).index("SONIC_MOE_FP8_MODE")] == "perf" and read[
        -1
    ] == os.environ.get("HOME")
    assert read[list(FLAGS_BY_ENV).index("SONIC_MOE_FP8_WGRAD")] is None
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert _environment() == read


def test_default_directories_follow_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "first"))
    for place in ("first", "second"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / place))
        assert current_config().cache_dir == tmp_path / place / "sonicmoe"
        assert current_config().local_cache_dir == tmp_path / "first" / f"sonicmoe-{os.getuid()}"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "second"))
    assert current_config().local_cache_dir == tmp_path / "second" / f"sonicmoe-{os.getuid()}"


def test_derived_properties() -> None:
    assert not current_config().fp8
    perf, mem = (current_config(SonicMoEConfig(fp8_mode=mode)) for mode in ("perf", "mem"))
    assert perf.fp8 and not perf.frees_stagewise
    assert mem.fp8 and mem.frees_stagewise
    assert perf.replace(stagewise_memory=True).frees_stagewise and not perf.frees_stagewise


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("SONIC_MOE_FP8_MOD", "SONIC_MOE_FP8_MODE"),
        ("SONIC_MOE_VALIDATE_DISPATCHES", "SONIC_MOE_VALIDATE_DISPATCH"),
        ("SONIC_MOE_SAVE_Z", "SONIC_MOE_FP8_SAVE_Z"),
        ("SONIC_MOE_QQQQQQQQQQQQQQQQQQQQQQQQQQQ", None),
    ],
)
def test_near_miss(name: str, nearest: str | None) -> None:
    environ = dict.fromkeys((*FLAGS_BY_ENV, "PATH", "SONICMOE", name), "1")
    assert unknown_flags(environ) == {name: nearest}


def test_unknown_flag_is_logged_once_with_the_suggestion(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"{PREFIX}FP8_WGRADS"
    monkeypatch.setenv(name, "1")
    with caplog.at_level(logging.WARNING, logger="sonicmoe"):
        warn_unknown_flags()
        warn_unknown_flags()
    messages = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert len(messages) == 1
    assert f"did you mean {PREFIX}FP8_WGRAD?" in messages[0]


def check_env_page(script: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), "--check"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environ)


def test_env_page_is_up_to_date() -> None:
    result = check_env_page(ROOT / "tools" / "ci" / "generate_env_docs.py")
    assert result.returncode == 0, result.stderr


def test_outdated_env_page_is_refused(tmp_path: Path) -> None:
    """The same script on a copy of the page with one flag renamed."""
    (tmp_path / "tools" / "ci").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    script = tmp_path / "tools" / "ci" / "generate_env_docs.py"
    script.write_text(
        (ROOT / "tools" / "ci" / "generate_env_docs.py").read_text(encoding="utf-8"),
        encoding="utf-8",
    )
    page = (ROOT / "docs" / "env.md").read_text(encoding="utf-8")
    (tmp_path / "docs" / "env.md").write_text(
        page.replace("FP8_SAVE_Z", "FP8_SAVED_Z"), encoding="utf-8"
    )
    result = check_env_page(script)
    assert result.returncode == 1
    assert "docs/env.md is out of date: run `make docs`" in result.stderr
