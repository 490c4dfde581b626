"""Run under TRITON_INTERPRET=1: the Triton engine on the host against the reference engine.
`python -m kernels.triton_engine_interpreted CHECK...`.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from kernels.triton_interpreter import repair

repair()

from engine.fp8_layer import PLAIN, Case, assert_same_bits  # noqa: E402
from oracle.case import drawn  # noqa: E402
from oracle.engines import broken_on_host, chosen_on_host  # noqa: E402
from oracle.faces import ON_HOST, normal  # noqa: E402

from sonicmoe.engine import plain_engine  # noqa: E402
from sonicmoe.engine import triton as triton_engine  # noqa: E402
from sonicmoe.engine.gpu import Gpu  # noqa: E402
from sonicmoe.engine.triton import TritonEngine  # noqa: E402

OURS = TritonEngine()
CASE = Case(150, 72, 40)  # no tile divides these
# Plain GEMMs add an adapter's part to z that is rounded, which passes a clamp now and then.
BARS = {"none": {"db1": 8e-3, "else": 4e-3}, "beside": {"else": 2.0}}


def cases() -> int:
    """Some of tests/oracle's, of few numbers, because the interpreter takes seconds for each; every second
    one adds to memory of the parameters.
    """
    chosen_on_host(pytest.MonkeyPatch())
    fitted = partial(normal, engine="triton" + ON_HOST)
    adding = {"face": "node", "gradients": "main_grad", "trains": "all"}
    found = [
        replace(
            fitted(replace(case, **adding)) if number % 2 else case,
            law="repeat", scene="usual", sizes=(21, 72, 40, 3, 1),
        )
        for number, case in enumerate(drawn(14, 2, fitted))
    ]  # fmt: skip
    wrong = {
        str(case): broken_on_host(case, "triton", BARS.get(case.adapters, BARS["beside"]))
        for case in found
    }
    wrong = {case: words for case, words in wrong.items() if words}
    assert not wrong, wrong
    return len(found)


def tiles() -> int:
    """Those of the other architectures, and a part of the GPU."""
    wanted = CASE.run(OURS)
    with_gpu("sm_90a", 1)
    other = CASE.run(OURS)
    assert all(torch.allclose(other[n], wanted[n], rtol=0.02, atol=0.02) for n in wanted)
    with_gpu("sm_80", 8)
    assert_same_bits(CASE.run(OURS, replace(PLAIN, gemm_num_sms=3)), wanted)
    with_gpu("sm_80", 1)
    return 2


def with_gpu(arch, multiprocessors):
    """The interpreter runs the kernels of this GPU where the tensors are."""
    triton_engine.gpu_of = lambda device: Gpu(arch, multiprocessors)


CHECKS = {check.__name__: check for check in (cases, tiles)}

if __name__ == "__main__":
    plain_engine.is_cuda = lambda weight: True
    triton_engine._launch_scope = lambda tensor: nullcontext()
    with_gpu("sm_80", 1)
    for check in sys.argv[1:]:
        print(check, CHECKS[check](), "checked")
