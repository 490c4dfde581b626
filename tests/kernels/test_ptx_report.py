"""Reading what a grouped GEMM moves from its PTX."""

from __future__ import annotations

import pytest
from kernels.gemm_matrix import shape_for
from kernels.ptx_report import problems, traffic

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


def of(text: str, kernel=KERNEL) -> list[str]:
    return problems(kernel.name, dict(kernel.statics), traffic(text))


def test_copies_are_counted_by_their_tensor_maps() -> None:
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
def test_what_a_compiler_lost_is_named(lost: str, instead: str, words: str) -> None:
    assert DOWN.count(lost) == 1
    (problem,) = of(DOWN.replace(lost, instead))
    assert words in problem


def test_gathered_rows_and_additions_are_asked_for_where_they_belong() -> None:
    """The text of the down-projection is neither an up-projection nor a weight gradient."""
    up, wgrad = up_kernel(shape_for("sm_100a"), store_z=True), wgrad_up_kernel(shape_for("sm_100a"))
    text = " ".join(of(DOWN, up))
    assert "loads by 2 tensor maps; needed: 1" in text and "0 gathering copies" in text
    assert "stores by 1 tensor maps; needed: 2, for ('z', 'y1')" in text
    assert "adds by 0 tensor maps" in " ".join(of(DOWN, wgrad))
    assert traffic(DOWN.replace(STORE, ADD)).adds == {"5": 1}


def test_a_tensor_map_that_is_no_parameter_is_an_error() -> None:
    with pytest.raises(ValueError, match="in %rd7 is no parameter"):
        traffic(DOWN.replace("mov.b64 	%rd1, kernel_cutlass_param_1;", ""))
