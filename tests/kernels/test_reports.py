"""Reading what a grouped GEMM moves from its PTX, and what it takes from the report of ptxas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kernels import ptxas_report
from kernels.gemm_matrix import shape_for
from kernels.mx_matrix import mx_shape
from kernels.ptx_report import Traffic, mx_problems, problems, traffic
from kernels.ptxas_report import (
    KernelResources,
    SpillError,
    parse_ptxas,
    performance_losses,
    require_no_spills,
    require_no_stack,
)

from sonicmoe.kernels import mx_gemm
from sonicmoe.kernels.quack_gemm import down_kernel, up_kernel, wgrad_up_kernel

LOAD = "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint.cta_group::2"
STORE = "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint"
ADD = "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group"
# As of a down-projection in tiles of 256 x 256: y1 is read by map 1, w2 by map 3, y2 stored by 5.
DOWN = f"""
	mov.b64 	%rd1, kernel_cutlass_param_1;
	mov.b64 	%rd3, kernel_cutlass_param_3;
	cvta.param.u64 	%rd7, %rd1;
	add.s64 	%rd8, %rd3, 0;
	cvta.param.u64 	%rd9, %rd8;
	mov.b32 	%r627, 65536;
	mbarrier.arrive.expect_tx.shared.b64 %rd186, [%r41+80], %r627;
	{LOAD} [%r530+124928], [%rd7, {{%r529, %r38}}], [%r528], %rd73;
	{LOAD} [%r547+124928], [%rd9, {{%r546, %r38}}], [%r544], %rd86;
	{LOAD} [%r548+124928], [%rd9, {{%r546, %r38}}], [%r544], %rd86;
	tcgen05.mma.cta_group::2.kind::f16 [%r1], %rd1, %rd2, %r3, %p1;
	clusterlaunchcontrol.try_cancel.async.shared::cta.b128 [%r83], [%r1051];
	mov.b64 	%rd5, kernel_cutlass_param_5;
	{STORE} [%rd5, {{%r184, %r185}}], [%r165], %rd268;
"""
KERNEL = down_kernel(shape_for("sm_100a"))


def of(text, kernel=KERNEL):
    return problems(kernel.name, dict(kernel.statics), traffic(text))


def test_copies_are_counted_by_their_tensor_maps():
    found = traffic(DOWN)
    assert found.loads == {"1": 1, "3": 2} and found.stores == {"5": 1} and found.adds == {}
    assert found.expected_bytes == (65536,)
    assert found.tcgen05 == found.clc == 1
    assert found.wgmma == found.mma_sync == found.cp_async == 0
    assert of(DOWN) == []


@pytest.mark.parametrize(
    ("lost", "instead", "words"),
    [
        ("[%rd7, {", "[%rd9, {", "loads by 1 tensor maps; needed: 2, for ('y1', 'w2')"),
        (f"{STORE} [%rd5", "nop [%rd5", "stores by 0 tensor maps; needed: 1"),
        ("%r627, 65536", "%r627, 32768", "barriers wait for (32768,) bytes; needed: 65536"),
        ("tcgen05.mma", "wgmma.mma_async", "needed: as sm100 alone"),
        ("clusterlaunchcontrol.try_cancel", "nop", "asks 0 times for its next tile"),
    ],
)
def test_what_a_compiler_lost_is_named(lost, instead, words):
    assert DOWN.count(lost) == 1
    (problem,) = of(DOWN.replace(lost, instead))
    assert words in problem


def test_gathered_rows_and_additions_are_asked_for_where_they_belong():
    """The text of the down-projection is neither an up-projection nor a weight gradient."""
    up, wgrad = up_kernel(shape_for("sm_100a"), store_z=True), wgrad_up_kernel(shape_for("sm_100a"))
    text = " ".join(of(DOWN, up))
    assert "loads by 2 tensor maps; needed: 1" in text and "0 gathering copies" in text
    assert "stores by 1 tensor maps; needed: 2, for ('z', 'y1')" in text
    assert "adds by 0 tensor maps" in " ".join(of(DOWN, wgrad))
    assert traffic(DOWN.replace(STORE, ADD)).adds == {"5": 1}


def test_a_tensor_map_that_is_no_parameter_is_an_error():
    with pytest.raises(ValueError, match="in %rd7 is no parameter"):
        traffic(DOWN.replace("mov.b64 	%rd1, kernel_cutlass_param_1;", ""))


def test_what_is_missing_from_a_kernel_with_scales_is_found():
    """Figures of `up` as it is compiled for sm_100a."""
    kernel = mx_gemm.up_kernel(mx_shape("sm_100a"), store_z=True)
    name, statics = kernel.name, dict(kernel.statics)
    sound = Traffic(
        loads={"1": 1, "3": 1, "5": 1, "7": 1}, stores={"9": 4, "11": 4}, adds={},
        expected_bytes=(16, 68608), gathers=0, cp_async=0, wgmma=0, mma_sync=0, tcgen05=4, clc=2,
    )  # fmt: skip
    assert mx_problems(name, statics, sound) == []
    for changes, words in (
        ({"loads": {"1": 1, "3": 1}}, "loads by 2 tensor maps; needed: 4"),
        ({"stores": {"9": 4}}, "stores by 1 tensor maps; needed: 2, for ('z', 'y1')"),
        ({"expected_bytes": (16, 65536)}, "needed: 68608 of a stage"),
        ({"adds": {"9": 1}}, "adds by 1"),
        ({"tcgen05": 0}, "another family"),
        ({"clc": 0}, "asks 0 times for its next tile"),
    ):
        (problem,) = mx_problems(name, statics, replace(sound, **changes))
        assert words in problem


PTXAS = """\
[1/2] nvcc -Xptxas -v -c gemm.cu
ptxas info    : 12 bytes gmem, 8 bytes cmem[4]
ptxas info    : Compiling entry function '_Z4gemmPKf' for 'sm_90a'
ptxas info    : Function properties for _Z4gemmPKf
    552 bytes stack frame, 504 bytes spill stores, 620 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 552 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compile time = 100.000 ms
ptxas info    : Compiling entry function 'clean' for 'sm_90a'
ptxas info    : Function properties for clean
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
ptxas info    : Function properties for helper
    16 bytes stack frame, 16 bytes spill stores, 16 bytes spill loads
"""
LOSS = "(C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to"
SERIALISED = f"ptxas info    : {LOSS} ill formed pipeline stage in the function 'clean'\n"
IGNORED = (
    "(C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count."
)


def test_every_figure_of_ptxas_is_read():
    gemm = KernelResources("_Z4gemmPKf", "sm_90a", 168, 552, 504, 620, 1024)
    assert parse_ptxas(PTXAS) == (gemm, KernelResources("clean", "sm_90a", 10))
    assert parse_ptxas("ninja: no work to do.") == ()
    line = f"ptxas info    : {IGNORED}\n"
    first, second = performance_losses(line + PTXAS + line + SERIALISED)
    assert first == IGNORED and second.startswith(LOSS)
    assert performance_losses(PTXAS) == ()


def test_what_ptxas_spilled_serialised_or_left_on_the_stack_is_named():
    gemm, clean = parse_ptxas(PTXAS)
    require_no_spills([clean])
    require_no_stack([clean])
    indexed = KernelResources("row_maxima", "sm_90a", registers=40, stack_bytes=256)
    require_no_spills([indexed])
    spills = "^_Z4gemmPKf spills 504 bytes of stores and 620 of loads at 168 registers"
    for require, kernels, words in (
        (require_no_spills, [gemm, clean], spills),
        (require_no_spills, parse_ptxas(PTXAS + SERIALISED)[1:], "clean: ptxas serialised"),
        (require_no_stack, [clean, indexed], r"on the stack: row_maxima has 256 bytes$"),
    ):
        with pytest.raises(SpillError, match=words):
            require(kernels)


def test_spills_are_allowed_by_name_architecture_and_bytes(monkeypatch):
    kernels = parse_ptxas(PTXAS)
    for allowed in (
        {},
        {("sm_90a", "gemmPK"): 1123},
        {("sm_100a", "gemmPK"): 2000},
        {("sm_90a", "clean"): 2000},
    ):
        monkeypatch.setattr(ptxas_report, "ALLOWED", allowed)
        with pytest.raises(SpillError, match="_Z4gemmPKf spills"):
            require_no_spills(kernels)
    monkeypatch.setattr(ptxas_report, "ALLOWED", {("sm_90a", "gemmPK"): 504 + 620})
    require_no_spills(kernels)
