#!/usr/bin/env python3
"""Host time of a layer's forward and backward on a Hopper GPU's engines, on any machine: their real
host code over kernels that do nothing.

    benchmarks/host_bench.py                                         # the node, 8 experts
    benchmarks/host_bench.py --face transformers --experts 128 --profile
    benchmarks/host_bench.py --framework paddle --experts 64
    benchmarks/host_bench.py --face node --face frozen --count       # calls of functions, as JSON
    benchmarks/host_bench.py --precision bf16 --face transformers    # engine bf16 in place of hopper

| face | weights | gradients |
|---|---|---|
| node | two of each expert | `main_grad` |
| grad | as node, in a backward of its own | `.grad` |
| stacked | two stacked weights of a node | `main_grad` |
| step | as node; every backward is followed by `step()`, so that weights are made again | `main_grad` |
| MoE | a `MoE` with its router | `.grad` |
| transformers | an experts module of transformers | `.grad` |
| written | the same, written before every forward, as by an optimizer | `.grad` |
| gathered | the same, in a process whose weights FSDP2 gathers, where nothing is kept of them | `.grad` |
| frozen | the same | none |

Where launches take the host longer than the GPU needs for the work, this is what a step costs:
below about 1024 tokens at the reference shape. Tensors lie on the host and are taken for a GPU's;
every stage runs, native passes included, up to the call of a kernel. The launches themselves (about
15 per layer) and the GPU's allocator come on top. A step is eight layers forward, then one
`backward()`; of grad, step, MoE and transformers' faces eight times forward and backward. Compare
times of one machine only; a count of calls is the same on every machine with the same versions of
Python and PyTorch.
"""

from __future__ import annotations

import contextlib
import cProfile
import itertools
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import tvm_ffi

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from host_layers import LAYERS, moe_step, node_step, transformers_step

NODE_FACES = "node", "grad", "stacked", "step"
MODULE_FACES = "transformers", "written", "gathered", "frozen"


def _several(name: str, kept: str, default: Any, kind: Any, text: str) -> Any:
    words = f"{text}; may be repeated."
    return click.option(
        name, kept, multiple=True, default=[default], type=kind, help=words, show_default=True
    )


@click.command(help=__doc__)
@click.option("--framework", type=click.Choice(["torch", "paddle"]), default="torch", show_default=True)  # fmt: skip
@_several("--experts", "experts", 8, int, "Local experts")
@click.option("--tokens", default=64, show_default=True, help="Tokens of a batch.")
@click.option("--steps", default=120, show_default=True, help="Of eight layers each.")
@_several("--face", "faces", "node", click.Choice([*NODE_FACES, "MoE", *MODULE_FACES]), "Whose layer")  # fmt: skip
@_several("--precision", "precisions", "fp8", click.Choice(["fp8", "bf16"]),
          "FP8 on engine hopper, BF16 on engine bf16")  # fmt: skip
@click.option("--profile", is_flag=True, help="Print where Python's part goes, with a profiler's own cost.")  # fmt: skip
@click.option("--count", is_flag=True, help="Count calls of functions, and print them as JSON.")
def main(
    framework: str, experts: tuple[int, ...], tokens: int, steps: int, faces: tuple[str, ...],
    precisions: tuple[str, ...], profile: bool, count: bool,
) -> None:  # fmt: skip
    """Time steps, count their calls or profile them, and print."""
    if framework == "paddle":  # before anything of sonicmoe is imported
        import paddle

        if not set(faces) <= {"node", "stacked"}:
            raise click.UsageError("with Paddle the faces are node and stacked")
        paddle.enable_compat(scope={"sonicmoe"}, silent=True)
    launch_nothing()
    made = {}
    for precision, face, local in itertools.product(precisions, faces, experts):
        is_fp8, sizes = precision == "fp8", (local, tokens)
        if face in NODE_FACES:
            step = node_step(*sizes, is_fp8, face)
        elif face == "MoE":
            step = moe_step(*sizes, is_fp8)
        else:
            step = transformers_step(*sizes, is_fp8, face)
        made[f"{face}, {'' if is_fp8 else 'bf16, '}E={local}"] = step
    take_host_for_gpu()
    counts = {}
    for name, step in made.items():
        step()
        with one_thread(framework):  # a profiler sees one
            if profile:
                print_profile(step, steps)
            elif count:
                counts[name] = count_calls(step)
            else:
                times = [step_us(step) for _ in range(steps)]
                print(
                    f"{framework}, {name}: {min(times):.0f} us per layer at best, "
                    f"median {statistics.median(times):.0f}; {count_allocations(step):.0f} allocations"
                )
    if count:
        print(json.dumps(counts))


def count_calls(step: Callable[[], None]) -> float:
    """Calls of functions per layer, Python's own and C's, in the third step."""
    step()
    step()
    with cProfile.Profile() as profiler:
        step()
    return sum(entry.callcount for entry in profiler.getstats()) / LAYERS


def print_profile(step: Callable[[], None], steps: int) -> None:
    """Where Python's part of the steps goes."""
    with cProfile.Profile() as profiler:
        for _ in range(steps):
            step()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def step_us(step: Callable[[], None]) -> float:
    """Microseconds per layer of one step."""
    start = time.perf_counter()
    step()
    return 1e6 * (time.perf_counter() - start) / LAYERS


def take_host_for_gpu() -> None:
    """Every module that asks about a device is answered as for `cuda:0`, a Hopper GPU."""
    from sonicmoe import interop

    answers = {"is_cuda": True, "device_name": "cuda:0", "current_stream": 0}
    replace_everywhere({
        name: (getattr(interop, name), lambda _, answer=answer: answer)
        for name, answer in answers.items()
    })  # fmt: skip
    steady_addresses()


def steady_addresses() -> None:
    """Fresh gradients lie where those of the step before lay, as a GPU's allocator has it; the
    host's hands out other addresses at times, whose destinations would be made anew.
    """
    from sonicmoe import interop
    from sonicmoe.gradients import batch

    held = dict[Any, Any]()

    def steady(shape: Any, dtype: Any, device: Any) -> Any:
        if (shape, dtype) not in held:
            held[shape, dtype] = interop.empty(shape, dtype, device)
        return held[shape, dtype].detach()  # autograd keeps a gradient that nobody else holds

    # There alone: all other memory takes the way that it takes on a GPU, without a detour.
    batch.empty = steady


def count_allocations(step: Callable[[], None]) -> float:
    """Tensors per layer that the engine asks the framework's allocator for."""
    from sonicmoe import interop
    from sonicmoe.gradients import batch

    count = 0

    def counting(empty: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            return empty(*arguments)

        return counted

    steady = batch.empty
    replace_everywhere({"empty": (interop.empty, counting(interop.empty))})
    batch.empty = counting(steady)
    step()
    return count / LAYERS


def replace_everywhere(changes: dict[str, tuple[Any, Any]]) -> None:
    """Exchange `(old, new)` of each name in every module that imported it."""
    for module in [module for name, module in sys.modules.items() if name.startswith("sonicmoe.")]:
        for name, (old, new) in changes.items():
            if getattr(module, name, None) is old:
                setattr(module, name, new)


def launch_nothing() -> None:
    """Kernels become a native function that returns at once."""
    from sonicmoe import interop
    from sonicmoe.engine import (
        bf16,
        bf16_program,
        bf16_sm90,
        hopper,
        hopper_layer,
        hopper_passes,
        hopper_program,
    )
    from sonicmoe.engine.select import EngineChoice
    from sonicmoe.kernels.host import program_source
    from sonicmoe.layer import plan
    from sonicmoe.quant import gpu as quant_gpu
    from sonicmoe.routing import backends

    nothing = tvm_ffi.get_global_func("testing.nop")
    names = ("swiglu ",)  # as both modules would export them
    native = program_source("sm_90a").load()
    kernels = dict.fromkeys(hopper_program.KERNELS, nothing)
    kernels["wgrad_destination"] = lambda *_: nothing  # any object will do
    passes = hopper_passes.Passes(native, (names, names), kernels)
    hopper_layer.passes_on = lambda *_: passes
    of_weights = "store_addresses", "check_weights", "quantize_weights"
    weight_kernels = SimpleNamespace(
        num_checksums=lambda *_: 1, **dict.fromkeys(of_weights, nothing)
    )
    quant_gpu._kernels = lambda device: weight_kernels
    routing = backends.CudaKernels.__new__(backends.CudaKernels)
    routing._build, routing._forced_ctas = nothing, 0
    routing._memory_of = lambda *_: ((0, 0, 0, 0, 0, 1 << 20), 1 << 20)
    backends._choose = lambda device: routing
    kernels, matrices = dict.fromkeys(bf16_program.KERNELS, nothing), lambda *_: nothing
    to_tokens = bf16_sm90.Passes(native, kernels, "bfloat16", matrices, (0.0, 0.0))
    bf16_sm90.passes_on = lambda *_: to_tokens
    # Any object will do for a destination.
    module = SimpleNamespace(wgrad=nothing, wgrad_destination=lambda *_: nothing)
    wgrad = bf16_sm90.Wgrad(native, module, "bfloat16")
    bf16_sm90.wgrad_on = lambda *_: wgrad
    bf16._is_hopper = lambda device: True
    made = {
        is_fp8: EngineChoice(engine(), "measured without its kernels")
        for is_fp8, engine in ((True, hopper.HopperEngine), (False, bf16.Bf16Engine))
    }

    def ready_engine(device: str, requested: Any, workload: Any) -> Any:
        return made[workload.settings.recipe is not None]

    plan.ready_engine = ready_engine
    if not interop.IS_PADDLE:
        import torch

        torch.cuda.is_current_stream_capturing = lambda: False
        torch.cuda.current_stream = lambda device=None: None


@contextlib.contextmanager
def one_thread(framework: str) -> Iterator[None]:
    """Backward stays on the calling thread, as Paddle's does anyway."""
    if framework == "paddle":
        yield
        return
    import torch

    # PyTorch's switch takes effect where it is made, not where it is entered.
    with torch.autograd.set_multithreading_enabled(False):
        yield


if __name__ == "__main__":
    main()
