"""Flags and configuration: parsing, precedence, near misses, and the page generated from the
registry.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
from processes import ROOT

from sonicmoe.config import (
    FLAGS,
    FLAGS_BY_ENV,
    ResolvedConfig,
    SonicMoEConfig,
    current_config,
    read_flags,
)
from sonicmoe.enums import EngineName, FirstBackward, ZCode
from sonicmoe.errors import ConfigError
from sonicmoe.flags import Flag

SetFlags = Callable[..., None]

BOOLEANS = {
    **dict.fromkeys(("1", "true", "ON", " yes "), True),
    **dict.fromkeys(("0", "False", "off", "no", ""), False),
}

# Every spelling a parser takes, and spellings it must refuse. A new flag fails
# `test_every_flag_is_covered` until it is here.
ACCEPTED = {
    "fp8_mode": {"perf": "perf", "MEM": "mem", "": "off", "0": "off", "off": "off", "none": "off"},
    "save_z": {
        "Adaptive": ZCode.ADAPTIVE,
        "int8": ZCode.INT8,
        "E4M3": ZCode.E4M3,
        " bf16 ": ZCode.BF16,
    },
    "recipe": {"1x128": "1x128", "iso256": "iso256", "iso128-pow2": "iso128-pow2"},
    "engine": {
        "auto": EngineName.AUTO,
        "Reference": EngineName.REFERENCE,
        "hopper": EngineName.HOPPER,
    },
    "first_backward": {"add": FirstBackward.ADD, " Overwrite ": FirstBackward.OVERWRITE},
    "cache_dir": {
        "/some/where": Path("/some/where"),
        "relative": Path.cwd() / "relative",
        "~/kernels": Path.home() / "kernels",
    },
    "local_cache_dir": {"/node/local": Path("/node/local")},
    "compile_jobs": {"auto": "auto", "OFF": "off", "0": "off", "16": "16", " 08 ": "8"},
    "gemm_num_sms": {"all": 0, "0": 0, " 96 ": 96, "2": 2},
    "lock_timeout_s": {"1": 1.0, "2.5": 2.5, "1e3": 1000.0},
    "situ_beta": {"1": 1.0, " 4.0 ": 4.0, "2.5e-3": 0.0025},
    "situ_linear_beta": {"25": 25.0, "none": math.inf, " OFF ": math.inf, "inf": math.inf},
}
REFUSED = {
    "fp8_mode": ["perff", "1", "fp8"],
    "save_z": ["int4", "", "fp8"],
    "recipe": ["iso100", "ISO128", ""],
    "engine": ["cpu", ""],
    "first_backward": ["write", "1", ""],
    "cache_dir": ["", "  ", "~nosuchuser/x", "a\0b", "a\udcff", "\ud800"],
    "local_cache_dir": [""],
    "compile_jobs": ["", "-1", "1.5", "all", "\u0663"],
    "gemm_num_sms": ["1", "-4", "1.5", "half", "\u0663"],
    "lock_timeout_s": ["0", "-1", "inf", "nan", "soon", ""],
    "situ_beta": ["0", "-1", "1e-39", "1e39", "nan", "inf", "none", "True", ""],
    "situ_linear_beta": ["0", "-1", "1e-39", "1e39", "nan", "-inf", ""],
}


def accepted(flag: Flag[Any]) -> dict[str, object]:
    return ACCEPTED.get(flag.field, BOOLEANS)


def refused(flag: Flag[Any]) -> list[str]:
    return REFUSED.get(flag.field, ["2", "maybe", "y e s"])


def a_value_other_than_the_default(flag: Flag[Any]) -> tuple[str, object]:
    return next((text, value) for text, value in accepted(flag).items() if value != flag.default)


ALL_FLAGS = [pytest.param(flag, id=flag.env) for flag in FLAGS]


def test_every_flag_is_covered() -> None:
    not_boolean = {flag.field for flag in FLAGS if not isinstance(flag.default, bool)}
    assert not_boolean == set(ACCEPTED) == set(REFUSED)
    fields = [field.name for field in dataclasses.fields(SonicMoEConfig)]
    assert [flag.field for flag in FLAGS] == fields and len(FLAGS_BY_ENV) == len(fields)


each_flag = pytest.mark.parametrize("flag", ALL_FLAGS)


@each_flag
def test_both_doors_take_the_same_spellings(flag: Flag[Any], set_flags: SetFlags) -> None:
    for text, value in accepted(flag).items():
        set_flags(**{flag.env: text})
        assert getattr(current_config(), flag.field) == value
        assert getattr(SonicMoEConfig(**{flag.field: text}), flag.field) == value


@each_flag
def test_bad_values_are_refused_by_both_doors(flag: Flag[Any], set_flags: SetFlags) -> None:
    for text in refused(flag):
        wanted = f"={re.escape(repr(text))} is not understood; needed: \\S"
        with pytest.raises(ConfigError, match=rf"SonicMoEConfig\.{flag.field}{wanted}") as raised:
            SonicMoEConfig(**{flag.field: text})
        assert "\n" not in str(raised.value)
        with pytest.raises(ConfigError, match=f"{flag.env}{wanted}"):
            read_flags({flag.env: text})
        if {"\0", "\ud800"} & set(text):  # no environment holds those
            continue
        set_flags(**{flag.env: text})
        for _ in range(2):  # a refusal is not remembered as a configuration
            with pytest.raises(ConfigError, match=f"{flag.env}{wanted}"):
                current_config(SonicMoEConfig(fp8_mode="perf", engine="reference", recipe="1x128"))


@each_flag
def test_value_of_a_wrong_type_names_the_field(flag: Flag[Any]) -> None:
    for value in (object(), *([] if isinstance(flag.default, bool) else [True])):
        words = rf"SonicMoEConfig\.{flag.field} got {re.escape(repr(value))}.*; needed: "
        with pytest.raises(ConfigError, match=words):
            SonicMoEConfig(**{flag.field: value})


@each_flag
def test_precedence(flag: Flag[Any], set_flags: SetFlags) -> None:
    """Explicit beats activated beats environment beats default."""
    built_in = getattr(current_config(), flag.field)
    text, value = a_value_other_than_the_default(flag)
    set_flags(**{flag.env: text})
    assert getattr(current_config(), flag.field) == value != built_in
    with SonicMoEConfig(**{flag.field: built_in}).activate():
        assert getattr(current_config(), flag.field) == built_in
        assert getattr(current_config(SonicMoEConfig(**{flag.field: value})), flag.field) == value
    assert getattr(current_config(), flag.field) == value


def test_activations_nest_and_end_with_their_block() -> None:
    outer, inner = SonicMoEConfig(recompute_z=True, save_z="e4m3"), SonicMoEConfig(save_z="bf16")
    with outer.activate() as entered:
        assert entered is outer and current_config().recompute_z
        assert not current_config(inner).recompute_z, "an explicit one hides the activated one"
        with pytest.raises(RuntimeError, match="inside"), inner.activate():
            assert current_config().save_z is ZCode.BF16
            raise RuntimeError("inside")
        assert current_config().save_z is ZCode.E4M3
    assert current_config().save_z is ZCode.ADAPTIVE


def test_the_environment_is_read_once(monkeypatch: pytest.MonkeyPatch, set_flags: SetFlags) -> None:
    mine, first = SonicMoEConfig(recompute_z=True), current_config()
    own = current_config(mine)
    monkeypatch.setenv("SONIC_MOE_FP8_MODE", "perf")
    assert current_config() is first and current_config(mine) is own
    set_flags()
    assert current_config().fp8 and current_config(mine).fp8 and current_config(mine).recompute_z


def test_default_directories_follow_the_environment(
    set_flags: SetFlags, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for place in ("first", "second"):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / place))
        set_flags(XDG_CACHE_HOME=str(tmp_path / place))
        assert current_config().cache_dir == tmp_path / place / "sonicmoe"
        assert current_config().local_cache_dir == tmp_path / place / f"sonicmoe-{os.getuid()}"


def test_directories_are_absolute_whoever_moves_later(
    set_flags: SetFlags, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    set_flags(SONIC_MOE_CACHE_DIR="kernels")
    configs = current_config(), current_config(SonicMoEConfig(cache_dir=Path("own")))
    monkeypatch.chdir("/")
    assert [config.cache_dir for config in configs] == [tmp_path / "kernels", tmp_path / "own"]
    assert current_config().cache_dir == tmp_path / "kernels"


def test_a_working_directory_that_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match=r"cache_dir='kernels'.*needed: an absolute path"):
        SonicMoEConfig(cache_dir="kernels")
    assert SonicMoEConfig(cache_dir="/kernels").resolve().cache_dir == Path("/kernels")


def test_no_home_and_no_temporary_directory_are_one_line_where_they_are_needed(
    set_flags: SetFlags, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/nonexistent"])
    assert current_config() == ResolvedConfig() and current_config().cache_dir.is_absolute()

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    set_flags(HOME=None, XDG_CACHE_HOME=None)
    config = current_config()
    assert not config.fp8 and "cache_dir" not in repr(config)
    with pytest.raises(ConfigError, match=r"HOME is unset .*; set SONIC_MOE_CACHE_DIR$"):
        _ = config.cache_dir
    with pytest.raises(ConfigError, match=r"cache_dir='~/x'.*home directory in it is not known"):
        SonicMoEConfig(cache_dir="~/x")
    with pytest.raises(ConfigError, match=r"nonexistent.*; set SONIC_MOE_LOCAL_CACHE_DIR"):
        _ = config.local_cache_dir
    set_flags(SONIC_MOE_CACHE_DIR="/kernels", SONIC_MOE_LOCAL_CACHE_DIR="/local")
    assert current_config().cache_dir == Path("/kernels")
    assert current_config().local_cache_dir == Path("/local")


def test_configurations_are_values() -> None:
    """Equal, hashable, copied and sent to other processes, whether they were resolved or not."""
    one, same = SonicMoEConfig(fp8_mode="PERF"), SonicMoEConfig(fp8_mode="perf")
    one.resolve()
    assert one == same and hash(one) == hash(same) and one != SonicMoEConfig()
    assert repr(one) == "SonicMoEConfig(fp8_mode='perf')"
    for copied in (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), dataclasses.replace(one)):
        assert copied == one and copied.resolve() == one.resolve()
    assert one.resolve() != one and one.resolve() == ResolvedConfig(fp8_mode="perf")
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.fp8_mode = "off"
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.resolve().fp8_mode = "off"
    with pytest.raises(TypeError, match="fp8_mod"):
        SonicMoEConfig(fp8_mod="perf")


def test_env_page_is_up_to_date() -> None:
    result = processes.of_checkout(ROOT / "tools" / "ci" / "generate_env_docs.py", "--check")
    assert result.returncode == 0, result.stderr
