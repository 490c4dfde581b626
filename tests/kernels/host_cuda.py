"""CUDA sources rewritten for the host compiler, so that the very kernels run, on host tensors,
where there is no GPU.

Launches become loops over host threads (`host_cuda.h`); the few PTX instructions and runtime calls
become functions of the same meaning. A source that uses anything else does not compile.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import kept

from sonicmoe.jit.cache import CompileCache
from sonicmoe.jit.toolchain import find_toolkit

OPTIMISED = "-O1"
ROOT = Path(__file__).parents[2]
HEADER = Path(__file__).with_name("host_cuda.h")
NUM_SMS = 2

REWRITES = (
    (r"([\w:]+(?:<[^<>;]*>)?)\s*<<<(.*?)>>>\(", r"host_cuda::launch([](auto... a) { \1(a...); }, \2)("),
    (r'asm volatile\("ld\.global\.nc\..*?: "l"\(address\)\);', "host_cuda::load16(word, address);"),
    (r'asm volatile\("ld\.acquire\.sys[^;]*;" : "=r"\((\w+)\) : "l"\((\w+)\) : "memory"\);',
     r"\1 = __atomic_load_n(\2, __ATOMIC_ACQUIRE);"),
    (r'asm volatile\("st\.release\.sys[^;]*;" ::"l"\((\w+)\), "r"\((\w+)\) : "memory"\);',
     r"__atomic_store_n(\1, \2, __ATOMIC_RELEASE);"),
    (r'asm volatile\("mov\.u64 %0, %globaltimer;" : "=l"\((\w+)\)\);', r"\1 = host_cuda::nanoseconds();"),
    (r'asm volatile\("trap;"\);', "host_cuda::trap();"),
    (r'asm\("cvt\.rn\.satfinite\.e4m3x2\.f32 [^;]*;" : "=h"\((\w+)\) : "f"\((\w)\), "f"\((\w)\)\);',
     r"\1 = host_cuda::e4m3x2(\2, \3);"),
    (r'asm\("cvt\.rn\.f16x2\.e4m3x2 [^;]*;" : "=r"\((\w+)\) : "h"\((.*?)\)\);',
     r"\1 = host_cuda::halves_of_e4m3x2(\2);"),
    (r'asm\(instruction .*?"\+r"\((.*?)\) : "r"\((.*?)\)\);', r"\1 = host_cuda::max_of_halves<Vector16>(\1, \2);"),
    (r"#include <tvm/ffi/extra/cuda/device_guard.h>", ""),
    (r'#include "\.\./(?:host/|cuda/)?', '#include "'),  # all files lie in one folder
    (r"tensor\.device\(\)\.device_type == kDLCUDA", "tensor.device().device_type == kDLCPU"),
    (r"cudaGetLastError\(\)", "cuda_success()"),
    (r"cudaDeviceGetAttribute\(&sms, .*?, device\)", f"(sms = {NUM_SMS}, cuda_success())"),
    (r"cudaStreamIsCapturing\(.*?, &capturing\)", "cuda_success()"),
)  # fmt: skip


def rewritten(source: str) -> str:
    """The source in standard C++."""
    for pattern, replacement in REWRITES:
        source = re.sub(pattern, replacement, source, flags=re.DOTALL)
    return f'#include "{HEADER}"\n{source}'


def cuda_include() -> Path:
    """The headers of the toolkit that kernels are compiled with."""
    toolkit = find_toolkit()
    assert toolkit is not None, "needs nvcc and its headers"
    return toolkit.home / "include"


def load(name: str, sources: tuple[Path, ...], artefacts: CompileCache) -> Any:
    """The `tvm_ffi.Module` of CUDA sources and the headers beside them; streams are ignored."""
    import tvm_ffi

    key = kept.key_of(name, [*sources, *_headers(sources), HEADER, Path(__file__)], REWRITES)
    found = artefacts.build(key, lambda folder: build(sources, folder / "host.so"))
    return tvm_ffi.load_module(str(found.file("host.so")))


def _headers(sources: tuple[Path, ...]) -> list[Path]:
    own, kernels = sources[0].parent, sources[0].parent.parent
    # Blackwell's sources include headers of all architectures.
    folders = [kernels / "cuda", own] if own.name == "blackwell" else [own]
    headers = [file for folder in folders for file in folder.glob("*.cuh")]
    return [*headers, *kernels.glob("*.hpp"), *kernels.glob("host/*.hpp")]


def build(sources: tuple[Path, ...], library: Path) -> None:
    """Rewrite and compile the sources."""
    import tvm_ffi

    found = tvm_ffi.libinfo
    include = found.find_include_path(), found.find_dlpack_include_path(), cuda_include()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in (*sources, *_headers(sources)):
            renamed = file.with_suffix(".cpp") if file.suffix == ".cu" else file
            text = rewritten(file.read_text(encoding="utf-8"))
            (folder / renamed.name).write_text(text, encoding="utf-8")
        # One translation unit: headers of tvm-ffi take longer than the kernels.
        units = [folder / file.with_suffix(".cpp").name for file in sources]
        whole = "".join(f'#include "{unit}"\n' for unit in units)
        flags = *(f"-I{path}" for path in include), "-std=c++20", OPTIMISED, "-ffp-contract=off"
        kept.compile_shared(library, whole, *flags)
