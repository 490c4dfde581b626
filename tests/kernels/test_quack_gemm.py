"""The BF16 GEMMs without a GPU: what is chosen, planned and refused, and that variants compile for
every architecture, without spills and with the loads of every operand.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import processes
import pytest
from kept import key_of
from kernels import ptx_report
from kernels.gemm_matrix import (
    ALSO_GATES,
    TARGETS,
    dgated_of_every_formula,
    every_variant,
    few_variants,
    shape_for,
)
from kernels.mx_matrix import ARCHS as MX_ARCHS
from kernels.mx_matrix import every_mx_variant, few_mx_variants
from kernels.ptx_report import Traffic
from kernels.ptxas_report import parse_ptxas, require_no_spills, resource_usage
from worlds import ROOT, environment

from sonicmoe.engine.capabilities import missing_package
from sonicmoe.enums import ActivationType
from sonicmoe.errors import ConfigError
from sonicmoe.jit import CompileCache, CompileKey
from sonicmoe.jit.toolchain import find_toolkit
from sonicmoe.kernels.blackwell.cute_kernel import CuteKernel
from sonicmoe.kernels.blackwell.quack_gemm import (
    all_kernels,
    candidates,
    choose_config,
    down_kernel,
)
from sonicmoe.kernels.blackwell.quack_tilings import (
    FAMILIES,
    PRODUCTS,
    GemmConfig,
    family_of,
)

ARCH = "sm_100a"
SHAPE = shape_for(ARCH)
MISSING = missing_package(all_kernels(SHAPE))
needs_quack = pytest.mark.skipif(
    MISSING is not None or importlib.util.find_spec("tvm_ffi") is None or find_toolkit() is None,
    reason="needs quack-kernels, nvidia-cutlass-dsl, apache-tvm-ffi and nvcc",
)


WORKER = Path(__file__).with_name("quack_variants.py")
FOUND = "found.json"


def compiled(
    variants: Sequence[CuteKernel], artefacts: CompileCache
) -> list[tuple[CuteKernel, str, Traffic]]:
    """Each with its report of ptxas and what its PTX moves. One process compiles all that nobody has
    compiled.
    """
    assert variants
    keys = {kernel: key_of_report(kernel) for kernel in variants}
    missing = [kernel for kernel, key in keys.items() if artefacts.try_load(key) is None]
    for kernel, found in zip(missing, answers(missing), strict=True):
        text = json.dumps(found)
        artefacts.build(keys[kernel], lambda to, text=text: (to / FOUND).write_text(text))
    kept = {kernel: artefacts.try_load(key) for kernel, key in keys.items()}
    found = {kernel: json.loads(of.file(FOUND).read_text()) for kernel, of in kept.items()}
    return [(kernel, report, Traffic(**moved)) for kernel, (_, report, moved) in found.items()]


def key_of_report(kernel: CuteKernel) -> CompileKey:
    made_of, readers = kernel.key(), (WORKER, Path(ptx_report.__file__))
    facts = made_of.statics, made_of.fingerprint, made_of.toolchain
    return key_of(f"{kernel.name}_report", readers, *facts, arch=kernel.arch)


def answers(variants: Sequence[CuteKernel]) -> list[list[Any]]:
    toolkit = find_toolkit()
    assert toolkit is not None
    if not variants:
        return []
    asked = ((kernel.arch, kernel.entry, dict(kernel.statics)) for kernel in variants)
    requests = [[number, *one] for number, one in enumerate(asked)]
    # Not `-P`: the program imports from its own folder.
    done = subprocess.run(
        [sys.executable, str(WORKER), str(toolkit.home / "bin" / "ptxas")],
        input="\n".join(map(json.dumps, requests)), capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = {number: answer for number, *answer in map(json.loads, done.stdout.splitlines())}
    assert len(found) == len(variants)
    refused = {variants[number]: words for number, words in found.items() if len(words) == 1}
    assert not refused, refused
    return [found[number] for number in range(len(variants))]


def require_sound(kernel: CuteKernel, report: str, moved: Traffic) -> None:
    """No spills, and every operand is loaded, every result stored."""
    resources = parse_ptxas(report)
    assert len(resources) == 1, (kernel, report)
    assert resources[0].arch == kernel.arch and resources[0].registers > 0, (kernel, report)
    try:
        require_no_spills(resources)
    except Exception as error:
        pytest.fail(f"{kernel.name} {dict(kernel.statics)}: {error}")
    problems = ptx_report.problems(kernel.name, dict(kernel.statics), moved)
    assert not problems, (kernel.name, dict(kernel.statics), problems)


@needs_quack
@pytest.mark.kernels
def test_variants_compile_without_spills_and_load_every_operand(artefacts):
    """A few for each target, and every formula of an activation, whose text is one for all targets."""
    few = [kernel for target in TARGETS for kernel in few_variants(*target)]
    assert {(kernel.arch, dict(kernel.statics)["family"]) for kernel in few} == set(TARGETS)
    few = dict.fromkeys([*few, *dgated_of_every_formula("sm_120a")])
    activations = {dict(kernel.statics).get("activation") for kernel in few}
    assert activations >= {kind.value for kind in ActivationType} - {k.value for k in ALSO_GATES}
    # MXFP8's come along, because importing CuTe DSL takes as long as three variants.
    for kernel, report, moved in compiled([*few, *few_mx_variants()], artefacts):
        require_sound(kernel, report, moved)


@needs_quack
@pytest.mark.kernels
@pytest.mark.every_variant
@pytest.mark.parametrize(("arch", "family"), [*TARGETS, *((arch, "mx") for arch in MX_ARCHS)])
def test_every_variant_is_sound(arch, family, artefacts):
    every = every_mx_variant(arch) if family == "mx" else every_variant(shape_for(arch, family))
    for kernel, report, moved in compiled(every, artefacts):
        require_sound(kernel, report, moved)


@needs_quack
@pytest.mark.kernels
def test_an_artefact_loads_without_quack_and_says_what_it_takes(artefacts):
    kernel = down_kernel(replace(SHAPE, bias=True))
    artefact = kernel.compile(artefacts)
    require_no_spills(resource_usage(artefact))
    program = (
        "import sys; sys.modules['cutlass'] = sys.modules['quack'] = None\n"
        "from pathlib import Path; import torch\n"
        "from sonicmoe.jit import CompileCache, no_compile\n"
        "from sonicmoe.enums import ActivationType\n"
        "from sonicmoe.kernels.blackwell.quack_gemm import MlpShape, down_kernel\n"
        f"cache = CompileCache(Path({str(artefacts.root)!r}), Path({str(artefacts.local_root)!r}))\n"
        f"with no_compile(): launch = down_kernel(MlpShape(3072, 1536, ActivationType.SWIGLU, bias=True, arch={ARCH!r})).load(cache)\n"
        "half = {'dtype': torch.bfloat16}\n"
        "try: launch(torch.zeros(128, 64, **half), torch.zeros(2, 32, 64, **half), torch.zeros(128, 32, **half),\n"
        "            torch.zeros(2, 32), torch.zeros(3, dtype=torch.int32), None, 66)\n"
        "except ValueError as error: print(error)"
    )
    done = processes.run(["-c", program], environment(), ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "expected device_type=cuda" in done.stdout
    assert "cu_rows: Tensor([n4], int32), gather_index: None, max_clusters: int32" in done.stdout


def problems(family: str, config: GemmConfig, gathers: bool) -> list[str]:
    """Why a class of quack cannot run a tiling. It asserts some of this while it traces, and some of
    it nowhere: a kernel would then hang, or add up wrong rows.
    """
    (rows, columns), (along_m, along_n) = config.tile, config.cluster
    shared = rows == 256 and along_m % 2 == 0  # by two blocks, which multiply together
    # Of the threads that compute a tile; of sm100's the sums lie in tensor memory.
    sums = rows * columns // (128 if config.pingpong else 256)
    wrong = {
        "experts are padded to 128 rows": rows % 128 != 0,
        "gated stores take 32 columns": columns % 32 != 0,
        "A is gathered for a cluster of one block along N": gathers and along_n != 1,
    }
    of_family = {
        "sm100": {
            "one warp of a block multiplies": config.pingpong,
            "256 rows need a pair of blocks": rows == 256 and not shared,
            "512 columns of tensor memory": columns > (512 if shared else 256),
        },
        "sm120": {
            "these GPUs share no copies": config.cluster != (1, 1),
            "a tile has at most 128 rows": rows > 128,
            "a thread holds at most 160 sums": sums > 160,
        },
    }
    return [words for words, holds in (wrong | of_family[family]).items() if holds]


@pytest.mark.parametrize(("arch", "family"), TARGETS)
def test_tilings_keep_to_what_the_kernels_can_do(arch, family):
    shape = shape_for(arch, family)
    assert tuple(FAMILIES[family].candidates) == PRODUCTS
    for product in PRODUCTS:
        found = candidates(product, shape)
        assert len({config for config, _ in found}) == len(found)
        times = [time for _, time in found]
        assert times == sorted(times) and times[0] == 1.0, product
        gathers = product not in ("down", "dgrad")
        for config, _ in found:
            assert problems(family, config, gathers) == [], (product, config)
            assert not config.clc or arch != "sm_90a", "its hardware hands out no tiles"
    assert {kernel.arch for kernel in every_variant(shape)} == {arch}


def test_the_family_follows_the_architecture():
    """Hopper has GEMMs of our own."""
    assert {arch: family_of(arch) for arch, family in TARGETS[:4]} == dict(TARGETS[:4])
    for arch in ("sm_80", "sm_89", "sm_75", "sm_90", "sm_90a"):
        words = f"arch='{arch}' has no grouped GEMMs; needed: one of"
        with pytest.raises(ConfigError, match=words):
            shape_for(arch)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
def test_a_cap_on_multiprocessors_leaves_the_tiles_to_the_blocks(arch):
    """Cluster launch control starts a block per tile, whatever number of clusters it is given."""
    free, capped = shape_for(arch), shape_for(arch, capped=True)
    for product in PRODUCTS:
        assert choose_config(product, free) == replace(choose_config(product, capped), clc=True)
    assert all(dict(kernel.statics)["clc"] for kernel in all_kernels(free))
    assert not any(dict(kernel.statics)["clc"] for kernel in all_kernels(capped))
    on_hopper = [all_kernels(shape_for("sm_90a", "sm120", capped=cap)) for cap in (False, True)]
    assert on_hopper[0] == on_hopper[1]
