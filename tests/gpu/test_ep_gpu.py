"""Two GPUs: the Hopper engine behind NCCL and behind DeepEP, by the program that a person would run, and the node's side stream."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from sonicmoe import SonicMoEConfig
from sonicmoe.ernie_compat import SonicMoEMlpNode

ROOT = Path(__file__).resolve().parents[2]
SIZES = "--tokens 4096 --hidden 1024 --intermediate 512 --experts 16 --topk 4 --repeats 5 --steps 20".split()  # noqa: SIM905
E, H, I, K, T = 4, 512, 256, 2, 777
pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def smoke():
    """The figures of tools/ci/multicard_smoke.py."""
    command = [sys.executable, str(ROOT / "tools" / "ci" / "multicard_smoke.py"), "--json", *SIZES]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=540)
    assert result.stdout.strip(), result.stderr[-4000:]
    figures = json.loads(result.stdout.splitlines()[-1])
    return figures, result.returncode, result.stderr


def layers_of(figures, dispatcher):
    return [layer for layer in figures["layers"] if dispatcher in layer["dispatcher"]]


@two_gpus
def test_every_check_held(smoke):
    figures, code, said = smoke
    assert code == 0 and figures["failures"] == [], said[-4000:]
    assert figures["ranks"] == 2 and abs(figures["training"]["ranks"] / figures["training"]["alone"] - 1) <= 5e-3


@two_gpus
@pytest.mark.parametrize("dispatcher,kind", [("nccl", "collective"), ("DeepEP", "deepep")])
def test_layer_equals_one_gpu(smoke, dispatcher, kind):
    figures = smoke[0]
    if kind in figures["skipped"]:
        assert kind == "deepep", "NCCL is always there"
        pytest.skip(f"DeepEP did NOT run: {figures['skipped'][kind]}")
    layers = layers_of(figures, dispatcher)
    assert {layer["precision"] for layer in layers} == {"fp8", "bf16"}
    for layer in layers:
        assert set(layer["errors"]) == {"y", "dx", "dweights", "up_gate", "down"}
        assert layer["finite"] and layer["poison_changes_nothing"] and layer["repeats_bit_identical"]
        times = layer["times"]
        assert times["tokens_per_s"] > 0 and all(
            times[f"{stage}_ms"] > 0 for stage in ("dispatch", "expert", "combine")
        )


class Expert(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.up_gate_proj, self.down_proj = nn.Module(), nn.Module()
        self.up_gate_proj.weight = nn.Parameter(torch.randn(H, 2 * I, generator=generator) * H**-0.5)
        self.down_proj.weight = nn.Parameter(torch.randn(I, H, generator=generator) * I**-0.5)


def train(split, fp8_mode):
    """Main gradients after three micro-batches in flight, memory under pressure meanwhile."""
    generator = torch.Generator().manual_seed(5)
    experts = nn.ModuleList(Expert(generator) for _ in range(E)).to("cuda", torch.bfloat16)
    for parameter in experts.parameters():
        parameter.main_grad = None
    node = SonicMoEMlpNode(experts, E, H, I, config=SonicMoEConfig(fp8_mode=fp8_mode), split_wgrad=split)
    gradients = []
    for seed in range(3):
        made = torch.Generator().manual_seed(seed)
        x = torch.randn(T, H, generator=made).to("cuda", torch.bfloat16).requires_grad_()
        ids = torch.stack([torch.randperm(E, generator=made)[:K] for _ in range(T)]).cuda()
        probs = torch.rand(T, K, generator=made).cuda().requires_grad_()
        out = node(x, None, ids, probs)
        out.backward(torch.randn(T, H, generator=made).to("cuda", torch.bfloat16))
        del out
        # What the side stream still reads must not be handed out again: fill whatever the allocator gives.
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
