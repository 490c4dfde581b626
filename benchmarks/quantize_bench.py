#!/usr/bin/env python3
"""Time the FP8 quantisers on the GPU, as bandwidth beside that of a plain copy in the same run.

Each variant is captured in a CUDA graph of several calls over rotating inputs; the variants of one
shape are replayed in turns, so that all see the same clocks. A figure is the median over rounds of
one call's GPU time, from CUDA events. A copy of as many bytes as the quantiser moves is one of the
variants: small tensors stay in the L2 cache for both.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from gpu_timing import INPUTS, copy_tbps, host_us, interleaved_us

from sonicmoe.layouts import WeightLayout
from sonicmoe.quant import gpu
from sonicmoe.quant.recipes import rows
from sonicmoe.quant.reference import quantize
from sonicmoe.weight_source import WeightSource

Tensor = torch.Tensor
ROW_SHAPES = ((8192, 3072), (1024, 3072), (8192, 2048), (8192, 7168), (65536, 1536), (8192, 2880))
# (E, H, I): the reference shape, Qwen3-30B-A3B on 8 GPUs, DeepSeek-V3 on 32
WEIGHT_SHAPES = ((8, 3072, 1536), (16, 2048, 768), (8, 7168, 2048))


def copies_of(num_bytes: int) -> Callable[[int], Any]:
    """Copies that read and write `num_bytes` together."""
    sources = [torch.empty(num_bytes // 2, dtype=torch.uint8, device="cuda") for _ in range(INPUTS)]
    target = torch.empty_like(sources[0])
    return lambda number: target.copy_(sources[number])


def print_line(label: str, row: dict[str, Any]) -> None:
    """One aligned line."""
    times = "  ".join(f"{name} {value:7.2f}" for name, value in row["us"].items())
    shares = "  ".join(
        f"{name} {row['TB/s'][name]:.2f} ({row['of_copy'][name]:.0%})" for name in row["TB/s"]
    )
    print(f"{label:<34} us: {times}  | TB/s: {shares}  host {row['host_us']:.1f} us")


def figures(
    times: dict[str, tuple[float, float]], moved: dict[str, int], copy: float
) -> dict[str, Any]:
    """Microseconds of all variants; of those that move bytes, bandwidth and its share of a large
    copy's.
    """
    tbps = {name: count / times[name][0] / 1e6 for name, count in moved.items()}
    return {
        "us": {name: round(median, 2) for name, (median, _) in times.items()},
        "smallest_us": {name: round(least, 2) for name, (_, least) in times.items()},
        "TB/s": {name: round(value, 3) for name, value in tbps.items()},
        "of_copy": {name: round(value / copy, 3) for name, value in tbps.items()},
    }


def row_results(
    shapes: tuple[tuple[int, int], ...], copy: float, rounds: int
) -> list[dict[str, Any]]:
    """Tokens to FP8 in one pass, bf16."""
    results = []
    for tokens, columns in shapes:
        inputs = [
            torch.randn(tokens, columns, device="cuda").to(torch.bfloat16) for _ in range(INPUTS)
        ]
        wanted = quantize(inputs[0], rows(128))
        assert torch.equal(
            gpu.quantize_rows(inputs[0]).codes.view(torch.uint8), wanted.codes.view(torch.uint8)
        )
        num_bytes = inputs[0].numel() * 2 + wanted.nbytes

        def ours(number: int, inputs: list[Tensor] = inputs) -> Any:
            return gpu.quantize_rows(inputs[number])

        times = interleaved_us({"rows": ours, "copy": copies_of(num_bytes)}, 20, rounds)
        moved = {"rows": num_bytes, "copy": num_bytes}
        results.append(
            {
                "T": tokens,
                "C": columns,
                **figures(times, moved, copy),
                "host_us": round(host_us(ours), 1),
            }
        )
        print_line(f"rows T={tokens} C={columns}", results[-1])
    return results


def weight_source(experts: int, hidden: int, inner: int, transposed: bool) -> WeightSource:
    """Split-half bf16 matrices of their own, transposed as ERNIE and Fleet have them, or not."""

    def matrices(*shape: int) -> tuple[Tensor, ...]:
        made = (torch.randn(shape, device="cuda").to(torch.bfloat16) for _ in range(experts))
        return tuple(matrix.t().contiguous() if transposed else matrix for matrix in made)

    return WeightSource(
        matrices(2 * inner, hidden), matrices(hidden, inner), WeightLayout(transposed, True)
    )


def updated(weights: gpu.QuantizedWeights, source: WeightSource, force: bool, _: int) -> None:
    """One update, for the timer."""
    weights.update(source, force=force)


def weight_results(
    shapes: tuple[tuple[int, int, int], ...], copy: float, rounds: int
) -> list[dict[str, Any]]:
    """Both weights into both orders, into one order, one order to the other, and the guard when
    nothing changed.
    """
    results = []
    for experts, hidden, inner in shapes:
        sources = {
            name: weight_source(experts, hidden, inner, name == "ernie")
            for name in ("ernie", "native")
        }
        both = {name: gpu.QuantizedWeights() for name in sources}
        half = gpu.QuantizedWeights(iso_weight=True)
        for name, source in sources.items():
            both[name].update(source)
            wanted = quantize(source.native()[0], gpu.W1_BLOCK)
            assert torch.equal(
                both[name].w1.codes.view(torch.uint8), wanted.codes.view(torch.uint8)
            ), name
        half.update(sources["ernie"])
        variants: dict[str, Callable[[int], Any]] = {
            f"both_{name}": functools.partial(updated, both[name], source, True)
            for name, source in sources.items()
        }
        variants["forward_only"] = functools.partial(updated, half, sources["ernie"], True)
        variants["transpose"] = lambda _, half=half: (half.w1_dgrad, half.w2_dgrad)  # type: ignore[misc]
        variants["unchanged"] = functools.partial(updated, both["ernie"], sources["ernie"], False)
        read, code = 2 * 3 * experts * hidden * inner, half.nbytes
        moved = {
            "both_ernie": read + 2 * code,
            "both_native": read + 2 * code,
            "forward_only": read + code,
        }
        moved |= {"transpose": 2 * code, "copy": read + 2 * code}
        variants["copy"] = copies_of(moved["copy"])
        times = interleaved_us(variants, 6, rounds)
        host = round(host_us(variants["unchanged"]), 1)
        results.append(
            {"E": experts, "H": hidden, "I": inner, **figures(times, moved, copy), "host_us": host}
        )
        print_line(f"weights E={experts} H={hidden} I={inner}", results[-1])
    return results


@click.command()
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write every figure here."
)
@click.option("--rounds", default=30, show_default=True, help="Timed replays of each variant.")
def main(json_path: Path | None, rounds: int) -> None:
    """Time the FP8 quantisers on the GPU."""
    copy = copy_tbps()
    print(f"{torch.cuda.get_device_name()}  copy {copy:.3f} TB/s")
    report = {
        "device": torch.cuda.get_device_name(),
        "copy_tbps": round(copy, 3),
        "rows": row_results(ROW_SHAPES, copy, rounds),
        "weights": weight_results(WEIGHT_SHAPES, copy, rounds),
    }
    if json_path:
        json_path.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
