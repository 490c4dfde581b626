#!/usr/bin/env python3
"""Host time of the node's forward and backward on engine hopper, on any machine: its real host code over kernels that do nothing.

    python tools/ci/host_bench.py [--experts 64] [--stacked] [--profile]

Where launches take the host longer than the GPU needs for the work, this is what a step costs: below about 2048 tokens at the
reference shape. Tensors lie on the host and are taken for a GPU's; every stage runs, native passes included, up to the call of a
kernel. The launches themselves (about 15 per layer) and the GPU's allocator come on top. A step is eight layers forward, then one
`backward()`. Compare figures of one machine only.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import tvm_ffi

from sonicmoe import interop
from sonicmoe.bench import workload
from sonicmoe.bench.shapes import Shape
from sonicmoe.bench.steady import Stack
from sonicmoe.bench.workload import Batch, Layer, Variant
from sonicmoe.engine import hopper, hopper_passes
from sonicmoe.engine.select import EngineChoice
from sonicmoe.enums import EngineName
from sonicmoe.ernie_compat import SonicMoEMlpNode, mlp_node
from sonicmoe.kernels.sm90 import passes_source
from sonicmoe.quant import gpu as quant_gpu
from sonicmoe.routing import backends

FP8 = Variant(EngineName.HOPPER, "perf")
HIDDEN, INNER, TOPK = 256, 128, 8  # the host's work does not depend on them
KERNELS = (
    "quantize_rows", "gather_gated_gemm", "grouped_gemm", "aggregate_rows", "gather_dgated_gemm", "sum_or_zero",
    "gather_transpose_quantize", "gather_transpose_quantize_pair", "grouped_wgrad",
)  # fmt: skip


@click.command(help=__doc__)
@click.option("--experts", default=8, show_default=True, help="Local experts.")
@click.option("--tokens", default=64, show_default=True, help="Tokens of a batch.")
@click.option("--steps", default=120, show_default=True, help="Of eight layers each.")
@click.option("--stacked", is_flag=True, help="Two stacked parameters instead of two per expert.")
@click.option("--profile", is_flag=True, help="Print where Python's part goes (a profiler's own cost is in it).")
def main(experts: int, tokens: int, steps: int, stacked: bool, profile: bool) -> None:
    """Time steps, or profile them, and print."""
    take_host_for_gpu()
    launch_nothing()
    shape = Shape(tokens, HIDDEN, INNER, experts, min(TOPK, experts))
    stack = Stack(make_node(Layer(shape, "cpu"), stacked), [Batch.random(shape, "cpu")])
    stack.run()
    with torch.autograd.set_multithreading_enabled(False):  # a profiler sees one thread
        if profile:
            with cProfile.Profile() as profiler:
                for _ in range(steps):
                    stack.run()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
            return
        times = [step_us(stack) for _ in range(steps)]
    weights = "two stacked weights" if stacked else f"{2 * experts} weights"
    print(
        f"E={experts}, {weights}: {min(times):.0f} us per layer at best, median {statistics.median(times):.0f}; "
        f"{allocations(stack):.0f} allocations"
    )


def step_us(stack: Stack) -> float:
    """Microseconds per layer of one step."""
    start = time.perf_counter()
    stack.run()
    return 1e6 * (time.perf_counter() - start) / stack.layers


def allocations(stack: Stack) -> float:
    """Tensors per layer that a GPU's allocator would be asked for."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        stack.run()
    made = {"aten::empty", "aten::empty_strided"}  # those of other names go on to one of these
    return sum(event.count for event in profiler.key_averages() if event.key in made) / stack.layers


def take_host_for_gpu() -> None:
    """Every module that asks about a device is answered as for `cuda:0`, a Hopper GPU."""
    answers = {"is_cuda": lambda _: True, "device_name": lambda _: "cuda:0", "current_stream": lambda _: 0}
    asked = {name: getattr(interop, name) for name in answers}
    for module in [module for name, module in sys.modules.items() if name.startswith("sonicmoe.")]:
        for name, answer in answers.items():
            if getattr(module, name, None) is asked[name]:
                setattr(module, name, answer)


def launch_nothing() -> None:
    """Kernels become a native function that returns at once."""
    nothing = tvm_ffi.get_global_func("testing.nop")
    passes = hopper_passes.make_passes(passes_source().load(), **dict.fromkeys(KERNELS, nothing))
    hopper.passes_on = lambda device: passes
    weight_kernels = SimpleNamespace(
        num_checksums=lambda *_: 1, store_addresses=nothing, check_weights=nothing, quantize_weights=nothing
    )
    quant_gpu._kernels = lambda device: weight_kernels
    routing = backends.CudaKernels.__new__(backends.CudaKernels)
    routing._build, routing._scratch_per_expert, routing._forced_ctas = nothing, 1, 0
    backends._choose = lambda device: routing
    choice = EngineChoice(hopper.HopperEngine(), "measured without its kernels")
    mlp_node.choose_engine = workload.choose_engine = lambda *_: choice


def make_node(layer: Layer, stacked: bool) -> SonicMoEMlpNode:
    """A node on the layer's experts, or on stacked copies of their weights."""
    if not stacked:
        return layer.node(FP8)
    ups = [expert.up_gate_proj.weight.detach() for expert in layer.experts]
    downs = [expert.down_proj.weight.detach() for expert in layer.experts]
    weights = [torch.nn.Parameter(torch.stack(matrices)) for matrices in (ups, downs)]
    return SonicMoEMlpNode.from_fused(*weights, config=FP8.config)


if __name__ == "__main__":
    main()
