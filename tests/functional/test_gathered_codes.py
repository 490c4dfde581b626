"""Ranks that shard a layer train like one process, and where FSDP2 gathers the codes of experts it computes
to the bit what it computes on gathered values.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import framework
import pytest
import torch
from worlds import run_world

from sonicmoe import ActivationType, MoE
from sonicmoe.fsdp import _moe, coded
from sonicmoe.quant import gpu
from sonicmoe.quant.format import Orientation
from sonicmoe.quant.recipes import BlockShape
from sonicmoe.quant.reference import quantize, transpose_storage

pytestmark = pytest.mark.skipif(framework.IS_PADDLE, reason="the PyTorch face")
WORKER = Path(__file__).with_name("sharded_worker.py")
WAYS = (
    "kept", "resharded", "masters", "checkpointed", "accumulated", "compiled", "offloaded", "on meta", "assigned",
    "functional", "gate and up apart", "halves, clamped", "values",
)  # fmt: skip
CHECKS = "what is gathered", "quantised once", "checkpoints", "refusals"
# By the libraries that they need.
MODELS = {
    ("accelerate", "peft"): ["layers"],
    ("transformers", "peft"): ["transformers"],
    ("peft",): ["LoRA"],
    ("transformers",): ["qwen3", "gpt-oss", "frozen"],
    ("accelerate", "transformers"): ["accelerate"],
}


def run(folder, device, *worlds):
    (out,) = run_world(lambda _: [WORKER, folder, device, *worlds], [{}], timeout=600)
    assert out.endswith("equal\n")


@pytest.mark.trained
def test_what_is_sharded_trains_as_in_one_process_and_codes_as_values(tmp_path):
    """Layers and parts of them, what is gathered, and what is refused."""
    models = [way for needed, ways in MODELS.items() if all(map(find_spec, needed)) for way in ways]
    # A process that has sharded a module keeps no prepared weights, so "parts" is first, with DDP.
    two = 2, "parts", *WAYS, *CHECKS, *models
    # Five experts: 2, 2, 1 and none; and two copies of two shards each.
    four = 4, "uneven", "fewer", "hybrid", "another axis"
    run(tmp_path, "cpu", *two, *four)


@pytest.mark.gpu
@pytest.mark.trained
def test_on_gpus(tmp_path):
    """As many as two; one copies codes without a collective."""
    ways = "resharded", "uneven", "checkpointed", "accumulated", "compiled"
    run(tmp_path, "cuda", min(2, torch.cuda.device_count()), *ways)


@pytest.mark.parametrize("block", [(256, 128), (128, 128)])
@pytest.mark.parametrize("orientation", list(Orientation))
def test_both_orders_are_transposed_by_the_kernel(monkeypatch, block, orientation):
    """The kernel knows blocks of 128 columns, and backward's order of w1 has some of 256."""
    torch.manual_seed(0)
    rows = quantize(torch.randn(2, 400, 272), BlockShape(*block))
    given, wanted = rows, transpose_storage(rows)
    if orientation is Orientation.COLUMNS:
        given, wanted = wanted, given

    class Kernels:
        @staticmethod
        def transpose_bytes(codes, scales, out, out_scales, stream):
            n_rows, n_cols = codes.shape[1:]
            assert scales.shape[1] in (-(-n_rows // 128), -(-n_rows // 256))
            assert scales.shape[2] == -(-n_cols // 128) and scales.is_contiguous()
            out.copy_(codes.transpose(1, 2))
            out_scales.copy_(scales.transpose(1, 2))

    monkeypatch.setattr(gpu, "is_cuda", lambda _: True)
    monkeypatch.setattr(gpu, "_kernels", lambda _: Kernels)
    monkeypatch.setattr(gpu, "current_stream", lambda _: 0)
    found = gpu.transposed(given)
    assert found.orientation is wanted.orientation and found.shape == wanted.shape
    assert torch.equal(found.bytes, wanted.bytes)
    assert torch.equal(found.scale_inv, wanted.scale_inv)


@pytest.mark.parametrize("use_fp8", [False, True])
def test_values_are_gathered_with_a_reason(use_fp8, caplog):
    caplog.set_level("INFO", "sonicmoe")
    layer = MoE(4, 2, 64, 32, ActivationType.SWIGLU, False, 0.1)
    assert coded(_moe(layer), use_fp8).chooses_codes() is use_fp8
    said = [line for line in caplog.messages if "gathers values" in line]
    assert len(said) == (not use_fp8)
    assert all("because the experts compute without FP8" in line for line in said)
