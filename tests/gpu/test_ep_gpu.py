"""Two GPUs: the Hopper engine behind NCCL and behind DeepEP, by the program that a person would
run, and the node's side stream.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from sonicmoe import SonicMoEConfig
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.jit.cache import default_cache

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "tokens": 4096,
    "hidden": 1024,
    "intermediate": 512,
    "experts": 16,
    "topk": 4,
    "repeats": 5,
    "steps": 20,
}
PRECISIONS = ("fp8", "bf16", "fp8-dispatch")
OPTIONS = [
    "--device",
    "cuda",
    "--no-wait",
    "--precisions",
    *PRECISIONS,
    *(word for n, size in SIZES.items() for word in (f"--{n}", str(size))),
]
STAGES = ("dispatch", "expert", "combine")
E, H, I, K, T = 4, 512, 256, 2, 777
pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def smoke():
    """`(figures, stderr)` of benchmarks/multicard_smoke.py, with the kernels that this machine has
    compiled already.
    """
    program = ROOT / "benchmarks" / "multicard_smoke.py"
    command = [
        sys.executable,
        str(program),
        "--json",
        "--cache",
        str(default_cache().root),
        *OPTIONS,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.stdout.strip(), result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1]), result.stderr


def layers_of(figures, dispatcher):
    return [layer for layer in figures["layers"] if dispatcher in layer["dispatcher"]]


@two_gpus
def test_every_check_held(smoke):
    figures, said = smoke
    assert figures["failures"] == [] and figures["failed_ranks"] == 0, said[-4000:]
    assert figures["ranks"] == 2 and figures["device"] == "cuda"
    assert figures["gap_to_one_process"] <= 5e-3
    assert figures["unmoved_parameters"] == figures["differing_parameters"] == 0


@two_gpus
@pytest.mark.parametrize("dispatcher,kind", [("nccl", "collective"), ("DeepEP", "deepep")])
def test_layer_equals_one_gpu(smoke, dispatcher, kind):
    figures, said = smoke
    if kind in figures["skipped"]:
        assert kind == "deepep", "NCCL is always there"
        pytest.skip(f"DeepEP did NOT run: {figures['skipped'][kind]}")
    layers = layers_of(figures, dispatcher)
    assert {layer["precision"] for layer in layers} == {*PRECISIONS}, said[-4000:]
    for layer in layers:
        for case in (layer["even"], layer["idle_rank"]):
            assert set(case["errors"]) == {"y", "dx", "dweights", "up_gate", "down"}
            assert (
                case["finite"] and case["poison_changes_nothing"] and case["repeats_bit_identical"]
            )
        times = layer["times"]
        assert times["tokens_per_s"] > 0 and sum(
            times[f"{stage}_share"] for stage in STAGES
        ) == pytest.approx(1)


class Expert(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.up_gate_proj, self.down_proj = nn.Module(), nn.Module()
        self.up_gate_proj.weight = nn.Parameter(
            torch.randn(H, 2 * I, generator=generator) * H**-0.5
        )
        self.down_proj.weight = nn.Parameter(torch.randn(I, H, generator=generator) * I**-0.5)


def train(split, fp8_mode):
    """Main gradients after three micro-batches in flight, memory under pressure meanwhile."""
    generator = torch.Generator().manual_seed(5)
    experts = nn.ModuleList(Expert(generator) for _ in range(E)).to("cuda", torch.bfloat16)
    for parameter in experts.parameters():
        parameter.main_grad = None
    node = SonicMoEMlpNode(
        experts, E, H, I, config=SonicMoEConfig(fp8_mode=fp8_mode), split_wgrad=split
    )
    gradients = []
    for seed in range(3):
        made = torch.Generator().manual_seed(seed)
        x = torch.randn(T, H, generator=made).to("cuda", torch.bfloat16).requires_grad_()
        ids = torch.stack([torch.randperm(E, generator=made)[:K] for _ in range(T)]).cuda()
        probs = torch.rand(T, K, generator=made).cuda().requires_grad_()
        out = node(x, None, ids, probs)
        out.backward(torch.randn(T, H, generator=made).to("cuda", torch.bfloat16))
        del out
        # What the side stream still reads must not be handed out again: fill whatever the allocator
        # gives.
        torch.full([T * K * 4, 2 * I], float("nan"), device="cuda", dtype=torch.bfloat16)
        gradients += [x.grad, probs.grad]
    node.step()
    return [*gradients, *(parameter.main_grad for parameter in experts.parameters())]


@pytest.mark.parametrize("fp8_mode", ["off", "perf"])
def test_split_wgrad_changes_no_bit(fp8_mode):
    whole = train(False, fp8_mode)
    for _ in range(3):
        for a, b in zip(train(True, fp8_mode), whole, strict=True):
            assert bool(torch.isfinite(a).all()) and torch.equal(a, b)


def test_accumulators_outlive_their_node():
    """The node is gone while its side stream is still to add: the memory that the caller gets next
    must not be added to.
    """
    generator = torch.Generator().manual_seed(5)
    experts = nn.ModuleList(Expert(generator) for _ in range(E)).to("cuda", torch.bfloat16)
    node = SonicMoEMlpNode(
        experts, E, H, I, config=SonicMoEConfig(fp8_mode="perf"), split_wgrad=True
    )
    x = torch.randn(T, H, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)]).cuda()
    probs = torch.rand(T, K, generator=generator).cuda()
    node(x, None, ids, probs).sum().backward()
    node.step()
    torch.cuda.synchronize()
    bytes_held, side = node.gradient_bytes, node._state.wgrad_queue._stream
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
    node(x, None, ids, probs).sum().backward()
    del node, experts
    gc.collect()
    taken = [
        torch.zeros(elements, device="cuda")
        for elements in (bytes_held // 12, bytes_held // 6)
        for _ in range(8)
    ]
    torch.cuda.synchronize()
    assert bytes_held > 0 and not any(bool(tensor.any()) for tensor in taken)
