"""Compile keys: stable, static, and complete."""

import json

import processes
import pytest

from sonicmoe.enums import ActivationType
from sonicmoe.jit import CompileKey
from sonicmoe.jit.errors import KeyFieldError
from sonicmoe.jit.key import source_fingerprint

BASE = {
    "arch": "sm_90a",
    "statics": {
        "H": 3072, "E": 8, "activation": ActivationType.SWIGLU, "tile": [128, 192], "fast": True,
    },
    "fingerprint": {"sources": "abc", "abi": "x86_64-glibc"},
    "toolchain": {"nvcc": "13.0.88"},
}  # fmt: skip


def test_digest_is_the_same_in_every_process_and_order():
    key = CompileKey.make("gemm", **BASE)
    reordered = dict(reversed(BASE["statics"].items()))
    assert CompileKey.make("gemm", **{**BASE, "statics": reordered}).digest == key.digest
    program = (
        "from sonicmoe.jit import CompileKey; from sonicmoe.enums import ActivationType\n"
        "print(CompileKey.make('gemm', arch='sm_90a', statics={'tile': (128, 192), 'fast': True, 'E': 8, 'H': 3072,"
        "'activation': 'swiglu'}, fingerprint={'abi': 'x86_64-glibc', 'sources': 'abc'}, toolchain={'nvcc': '13.0.88'}).digest)"
    )
    printed = processes.of_checkout("-c", program, PYTHONHASHSEED="1")
    assert printed.stdout.strip() == key.digest


@pytest.mark.parametrize(
    "change",
    [
        {"arch": "sm_100a"},
        {"statics": {**BASE["statics"], "H": 3073}},
        {"statics": {**BASE["statics"], "fast": False}},
        {"statics": {**BASE["statics"], "fast": 1}},
        {"fingerprint": {"sources": "abd", "abi": "x86_64-glibc"}},
        {"toolchain": {"nvcc": "13.1.0"}},
    ],
)
def test_every_part_counts(change):
    changed = CompileKey.make("gemm", **{**BASE, **change})
    assert changed.digest != CompileKey.make("gemm", **BASE).digest


def test_toolchain_does_not_change_the_family():
    other = CompileKey.make("gemm", **{**BASE, "toolchain": {"nvcc": "13.1.0"}})
    unknown = CompileKey.make("gemm", **{**BASE, "toolchain": None})
    key = CompileKey.make("gemm", **BASE)
    assert key.family == other.family == unknown.family
    record = json.loads(json.dumps(key.record()))
    assert key.accepts(record) and unknown.accepts(record) and not other.accepts(record)
    with pytest.raises(KeyFieldError, match="toolchain"):
        _ = unknown.digest


@pytest.mark.parametrize("value", [1.5, object(), {"a": 1}, [1, 2.0], b"x"])
def test_values_without_a_stable_spelling_are_refused(value):
    with pytest.raises(KeyFieldError, match=r"gemm\.alpha"):
        CompileKey.make("gemm", **{**BASE, "statics": {"alpha": value}})


@pytest.mark.parametrize(
    ("kernel", "arch"),
    [("../evil", "sm_90a"), ("Gemm", "sm_90a"), ("", "sm_90a"), ("gemm", "../x")],
)
def test_names_cannot_leave_the_cache(kernel, arch):
    with pytest.raises(KeyFieldError):
        CompileKey.make(kernel, **{**BASE, "arch": arch})


def test_fingerprint_follows_quoted_headers(tmp_path):
    include = tmp_path / "include"
    include.mkdir()
    source, near, far = tmp_path / "k.cu", tmp_path / "near.cuh", include / "far.cuh"
    source.write_text('#include "near.cuh"\n#include <cuda_runtime.h>\n')
    near.write_text('  # include "far.cuh"\n#include "not_there.h"\n')
    far.write_text('#include "../near.cuh"\n')  # a cycle
    before = source_fingerprint([source], [include])
    assert source_fingerprint([source], [include]) == before
    far.write_text("// changed\n")
    assert source_fingerprint([source], [include]) != before
