"""The BF16 GEMMs without a GPU: what is chosen, planned and refused, and that every variant
compiles for Hopper without spills.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import preloaded
import pytest
from framework import torch
from kernels.ptxas_report import parse_ptxas, require_no_spills, resource_usage
from worlds import ROOT, environment

from sonicmoe import SonicMoEConfig
from sonicmoe.config import current_config
from sonicmoe.engine.capabilities import missing_package
from sonicmoe.engine.compile_plan import plan
from sonicmoe.enums import ActivationType, is_glu
from sonicmoe.jit import CompileCache, no_compile
from sonicmoe.jit.cute_kernel import CuteKernel
from sonicmoe.jit.errors import CompileForbiddenError
from sonicmoe.jit.plan import ModelSpec
from sonicmoe.jit.toolchain import find_toolkit
from sonicmoe.kernels import quack_gemm
from sonicmoe.kernels.quack_gemm import (
    CANDIDATES,
    GemmConfig,
    GroupedGemms,
    MlpShape,
    Stored,
    all_kernels,
    candidates,
    choose_config,
    down_kernel,
    expert_rows_source,
    wgrad_up_kernel,
)

SWIGLU, ARCH = ActivationType.SWIGLU, "sm_90a"
SHAPE = MlpShape(3072, 1536, SWIGLU, arch=ARCH)
# With these the epilogues compute all that they can: a softcap of up is off by default.
OWN = {ActivationType.SITU_GLU: (("beta", 4.0), ("linear_beta", 25.0))}
MISSING = missing_package(all_kernels(SHAPE))
needs_quack = pytest.mark.skipif(
    MISSING is not None or importlib.util.find_spec("tvm_ffi") is None or find_toolkit() is None,
    reason="needs quack-kernels, nvidia-cutlass-dsl, apache-tvm-ffi and nvcc",
)


def tiled(product: str, config: GemmConfig, shape: MlpShape = SHAPE):
    make, options = (
        getattr(quack_gemm, f"{product}_kernel"),
        {"store_z": True} if product == "up" else {},
    )
    return make(shape, config=config, **options)


def every_variant() -> tuple[CuteKernel, ...]:
    """Each tiling of each product; each activation and bias with each tiling of `up` and one of the
    others; another dtype.
    """
    variants = [
        tiled(product, config) for product, found in CANDIDATES.items() for config, _ in found
    ]
    for activation in ActivationType:
        for bias in (False, True):
            own = OWN.get(activation, ())
            shape = MlpShape(3072, 1536, activation, bias=bias, parameters=own, arch=ARCH)
            variants += all_kernels(shape, recompute_z=True)
            variants += [tiled("up", config, shape) for config, _ in candidates("up", shape)]
    variants += all_kernels(replace(SHAPE, dtype="float16"), recompute_z=True)
    variants += [
        wgrad_up_kernel(SHAPE, config, stored)
        for stored in Stored
        for config, _ in CANDIDATES["wgrad_up"]
    ]
    return tuple(dict.fromkeys(variants))


TILING = ("tile", "cluster", "pingpong", "swizzle")


def shown_by(kernel: CuteKernel) -> set[tuple]:
    """What one variant shows: that its builder takes each of its choices, a tiling being one choice.

    Whether a variant spills depends on the values that its epilogue keeps beside the sums of its
    tile. So an activation is shown beside the most sums that it ever meets, and without z, which
    leaves `up` registers to spare, a variant shows only that z may be left out.
    """
    statics = dict(kernel.statics)
    follow = (*TILING, "gated", "parameters")  # from the tiling and from the activation
    choices = {name: value for name, value in statics.items() if name not in follow}
    choices["tiling"] = tuple(statics[name] for name in TILING)
    if "activation" in choices and sums_of(kernel) < most_sums(kernel.entry, choices["activation"]):
        del choices["activation"]
    if not choices.get("store_z", True):
        choices = {"store_z": False}
    return {(kernel.entry, *choice) for choice in choices.items()}


def sums_of(kernel: CuteKernel) -> int:
    """Registers of a thread that hold sums of a tile."""
    config = {name: value for name, value in kernel.statics if name in TILING}
    return GemmConfig(**config).accumulators


@cache
def most_sums(entry: str, activation: str) -> int:
    variants = (kernel for kernel in every_variant() if kernel.entry == entry)
    return max(
        sums_of(kernel) for kernel in variants if dict(kernel.statics)["activation"] == activation
    )


def covering_variants() -> tuple[CuteKernel, ...]:
    """A small set of variants that shows all that all of them show: those that alone show
    something, then others greedily.
    """
    left = {kernel: shown_by(kernel) for kernel in every_variant()}
    counts = Counter(choice for choices in left.values() for choice in choices)
    chosen = [kernel for kernel, found in left.items() if any(counts[one] == 1 for one in found)]
    missing = set(counts).difference(*map(left.pop, chosen))
    while missing:
        best = max(left, key=lambda kernel: len(left[kernel] & missing))
        missing -= left.pop(best)
        chosen.append(best)
    return tuple(chosen)


def test_a_covering_set_leaves_no_choice_out() -> None:
    variants, chosen = every_variant(), covering_variants()
    assert set(chosen) < set(variants) and len(chosen) <= 0.35 * len(variants)
    shown, choices = (set().union(*map(shown_by, set_)) for set_ in (chosen, variants))
    assert shown == choices
    statics, whole = (
        [dict(kernel.statics) | {"product": kernel.name, "entry": kernel.entry} for kernel in set_]
        for set_ in (chosen, variants)
    )
    for one in ("product", "tile", "dtype", "bias", "store_z", "stored", "activation"):
        found, wanted = (
            {(s["entry"], s[one]) for s in set_ if one in s} for set_ in (statics, whole)
        )
        assert found == wanted, one
    for activation in filter(is_glu, ActivationType):
        wide = {"product": "bf16_up", "activation": activation.value, "tile": (128, 192)}
        assert any(wide.items() <= s.items() for s in statics), wide


@needs_quack
@pytest.mark.slow
def test_variants_compile_for_hopper_without_spills(pytestconfig: pytest.Config) -> None:
    """A covering set of the variants; all of them, three times as many, with `--every-variant`."""
    found = every_variant() if pytestconfig.getoption("--every-variant") else covering_variants()
    toolkit, variants = find_toolkit(), found
    assert toolkit is not None and variants
    requests = [
        [number, kernel.entry, dict(kernel.statics)] for number, kernel in enumerate(variants)
    ]
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("quack_variants.py")), ARCH, str(toolkit.home / "bin" / "ptxas")],
        input="\n".join(map(json.dumps, requests)), capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    reports = dict(json.loads(line) for line in done.stdout.splitlines())
    assert len(reports) == len(variants)
    for number, kernel in enumerate(variants):
        resources = parse_ptxas(reports[number])
        assert len(resources) == 1 and resources[0].arch == ARCH and resources[0].registers > 0, (
            kernel,
            reports[number],
        )
        try:
            require_no_spills(resources)
        except Exception as error:
            pytest.fail(f"{kernel.name} {dict(kernel.statics)}: {error}")


@needs_quack
def test_an_artefact_loads_without_quack_and_says_what_it_takes(artefacts: CompileCache) -> None:
    kernel = down_kernel(replace(SHAPE, bias=True))
    artefact = kernel.compile(artefacts)
    require_no_spills(resource_usage(artefact))
    program = (
        "import sys; sys.modules['cutlass'] = sys.modules['quack'] = None\n"
        "from pathlib import Path; import torch\n"
        "from sonicmoe.jit import CompileCache, no_compile\n"
        "from sonicmoe.enums import ActivationType\n"
        "from sonicmoe.kernels.quack_gemm import MlpShape, down_kernel\n"
        f"cache = CompileCache(Path({str(artefacts.root)!r}), Path({str(artefacts.local_root)!r}))\n"
        f"with no_compile(): launch = down_kernel(MlpShape(3072, 1536, ActivationType.SWIGLU, bias=True, arch={ARCH!r})).load(cache)\n"
        "half = {'dtype': torch.bfloat16}\n"
        "try: launch(torch.zeros(128, 64, **half), torch.zeros(2, 32, 64, **half), torch.zeros(128, 32, **half),\n"
        "            torch.zeros(2, 32), torch.zeros(3, dtype=torch.int32), None, 66)\n"
        "except ValueError as error: print(error)"
    )
    done = preloaded.run("torch", ["-c", program], environment(), ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "expected device_type=cuda" in done.stdout
    assert "cu_rows: Tensor([n4], int32), gather_index: None, max_clusters: int32" in done.stdout


@needs_quack
def test_row_kernels_compile_without_spills(artefacts: CompileCache) -> None:
    resources = resource_usage(expert_rows_source("sm_90a").compile(artefacts))
    assert len(resources) == 5  # index; sums of rows and of columns for two dtypes each
    require_no_spills(resources)
    assert all(item.stack_bytes == 0 for item in resources)
    module = expert_rows_source("sm_90a").load(artefacts)
    counts = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(Exception, match="row_token must be on a CUDA device"):
        module.index_rows(
            counts,
            counts,
            torch.zeros(3, dtype=torch.int64),
            counts,
            torch.zeros(3, dtype=torch.int32),
            0,
        )


@pytest.mark.parametrize(
    ("hidden", "tile", "cluster"),
    [
        (3072, (128, 192), (1, 2)),
        (6144, (128, 192), (1, 2)),
        (2880, (128, 192), (2, 1)),
        (5120, (128, 192), (2, 1)),
        (2048, (128, 256), (2, 1)),
        (512, (128, 256), (2, 1)),
        (128, (128, 128), (2, 1)),
    ],
)
def test_tiles_fit_the_width(hidden: int, tile: tuple[int, int], cluster: tuple[int, int]) -> None:
    """3072 is 8 pairs of 192; 2880 and 5120 are 15 and 27 tiles of 192, pairs of which would end
    outside; 2048 is 8 of 256.
    """
    config = choose_config("down", replace(SHAPE, hidden=hidden))
    assert (config.tile, config.cluster) == (tile, cluster)


@pytest.mark.parametrize("hidden", [2048, 2560, 2880, 3072, 3584, 4096, 5120, 6144, 7168, 8192])
@pytest.mark.parametrize(
    "intermediate", [512, 768, 1024, 1408, 1536, 1792, 2048, 2560, 2880, 4864, 6400, 14336]
)
def test_no_tiling_computes_much_for_nothing(hidden: int, intermediate: int) -> None:
    shape = MlpShape(hidden, intermediate, SWIGLU, arch=ARCH)
    for product in CANDIDATES:
        width = shape.width(product)
        assert choose_config(product, shape).columns(width) <= 1.1 * width, product


def test_tilings_keep_to_what_the_kernels_can_do() -> None:
    for product, found in CANDIDATES.items():
        assert len({config for config, _ in found}) == len(found)
        times = [time for _, time in found]
        assert times == sorted(times) and times[0] == 1.0, product
        for config, _ in found:
            assert config.tile[0] % 128 == 0, "experts are padded to 128 rows"
            assert config.tile[1] % 32 == 0, "gated stores take 32 columns"
            assert config.cluster[1] == 1 or product in ("down", "dgrad"), (
                "a gather takes no cluster along N"
            )
            assert config.accumulators <= 192, "a thread has at most 240 registers"


def test_up_has_fewer_sums_beside_a_bias_or_an_ungated_activation() -> None:
    assert choose_config("up", SHAPE).accumulators == 192
    for shape in (replace(SHAPE, bias=True), replace(SHAPE, activation=ActivationType.GELU)):
        assert {config.accumulators for config, _ in candidates("up", shape)} == {128}
        assert choose_config("up", shape).accumulators == 128


def test_no_variant_depends_on_sizes_but_through_its_tiling() -> None:
    large, wide = (
        replace(SHAPE, hidden=6144, intermediate=3072),
        replace(SHAPE, hidden=2880, intermediate=2880),
    )
    assert all_kernels(large) == all_kernels(SHAPE) != all_kernels(wide)


def test_plan_covers_a_training_run_with_and_without_biases() -> None:
    def planned(spec: ModelSpec, **config: object) -> set[str]:
        return {
            job.name for job in plan(spec, current_config(SonicMoEConfig(**config)))
        } & BF16_NAMES

    BF16_NAMES = {kernel.name for kernel in all_kernels(SHAPE, recompute_z=True)} | {"expert_rows"}
    spec = ModelSpec(8, 3072, 1536)
    everything = BF16_NAMES - {"bf16_up_again"} if MISSING is None else set()
    assert planned(spec) == everything
    assert planned(spec, engine="reference") == set()
    assert planned(spec, fp8_mode="perf") == set()
    plain_wgrad = {"expert_rows", "bf16_wgrad"}
    assert planned(spec, fp8_mode="perf", fp8_wgrad=False) == (plain_wgrad if everything else set())
    assert planned(replace(spec, arch="sm_100a")) == set()
    assert planned(replace(spec, dtype="float32")) == everything, "fp32 master weights, bf16 tokens"
    assert planned(replace(spec, H=3076)) == set()
    if everything:
        assert planned(spec, recompute_z=True) == BF16_NAMES
        jobs = plan(spec, current_config(SonicMoEConfig(engine="bf16")))
        assert {dict(job.statics)["bias"] for job in jobs if job.name == "bf16_up"} == {False, True}


@needs_quack
def test_a_compile_is_refused_where_it_is_forbidden(tmp_path: Path) -> None:
    gemms = GroupedGemms(SHAPE, 132)
    with (
        SonicMoEConfig(cache_dir=tmp_path / "cache", local_cache_dir=tmp_path / "local").activate(),
        no_compile(),
        pytest.raises(CompileForbiddenError, match=r"bf16_down\[.*dtype=bfloat16"),
    ):
        gemms.down(None, None, None, None, None)


def test_widths_of_z() -> None:
    for activation in ActivationType:
        assert MlpShape(64, 24, activation, arch=ARCH).n1 == (48 if is_glu(activation) else 24)
