#!/usr/bin/env python3
"""Time routing metadata and token aggregation on the GPU, beside a pipeline of PyTorch sorts and
beside a plain copy.

Each variant is captured in a CUDA graph of several calls over rotating inputs; the variants of one
shape are replayed in turns, so that all see the same clocks. A figure is the median over rounds of
one call's GPU time, from CUDA events.
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

from sonicmoe.routing.backends import CudaKernels, TritonKernels, arch_of
from sonicmoe.routing.build import build_routing
from sonicmoe.routing.combine import scatter_to_slots

Tensor = torch.Tensor
METADATA_SHAPES = (
    (8192, 8, 8), (8192, 8, 32), (8192, 8, 128), (8192, 8, 512), (16384, 8, 32), (32768, 8, 32),
    (131072, 8, 8), (131072, 8, 128), (524288, 8, 8), (524288, 8, 128),
)  # fmt: skip
# (T, K, H, experts everywhere): experts 0..31 are here, so 256 leave one slot in eight.
AGGREGATE_SHAPES = (
    (8192, 8, 3072, 32), (8192, 8, 7168, 32), (8192, 4, 2048, 32), (2048, 8, 3072, 32), (32768, 1, 3072, 32),
    (32768, 8, 3072, 256),
)  # fmt: skip


def sort_pipeline(indices: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    """The least that a sort-based dispatcher computes: order, token of each row, row of each slot,
    offsets. No padding.
    """
    slots, topk = indices.numel(), indices.shape[1]
    ids = indices.reshape(-1)
    group = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    ordered, order = torch.sort(group, stable=True)
    offsets = torch.searchsorted(ordered, torch.arange(num_experts + 1, device=ids.device))
    slot_row = torch.empty(slots, dtype=torch.int64, device=ids.device)
    slot_row.scatter_(0, order, torch.arange(slots, device=ids.device))
    return order, (order // topk).to(torch.int32), slot_row, offsets, ordered


def padded_sort_pipeline(
    indices: Tensor, probs: Tensor, num_experts: int, rows: int
) -> tuple[Tensor, ...]:
    """The same outputs as the kernel, by PyTorch operations and without a host sync."""
    order, token, _, offsets, ordered = sort_pipeline(indices, num_experts)
    slots, device = indices.numel(), indices.device
    counts = offsets[1:] - offsets[:-1]
    padded = (counts + 127) // 128 * 128
    first = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    valid = ordered < num_experts
    expert = ordered.clamp(max=num_experts - 1)
    row = torch.where(
        valid, first[expert] + torch.arange(slots, device=device) - offsets[expert], rows
    )
    slot_row = torch.empty(slots, dtype=torch.int64, device=device).scatter_(
        0, order, torch.where(valid, row, -1)
    )
    row_token = torch.full((rows + 1,), -1, dtype=torch.int32, device=device).scatter_(
        0, row, token
    )[:rows]
    row_prob = torch.zeros(rows + 1, device=device).scatter_(0, row, probs.reshape(-1)[order])[
        :rows
    ]
    return (
        counts.to(torch.int32),
        first,
        row_token,
        slot_row,
        row_prob,
    )


def routed(tokens: int, topk: int, experts: int) -> list[tuple[Tensor, Tensor]]:
    """Distinct ids per token where there are enough experts; every slot is routed here."""
    pairs = []
    for _ in range(INPUTS):
        ids = torch.rand(tokens, max(experts, topk), device="cuda").topk(topk, dim=1).indices
        pairs.append((ids % experts, torch.rand(tokens, topk, device="cuda")))
    return pairs


def metadata_rows(
    shapes: tuple[tuple[int, int, int], ...], extra: dict[str, int], rounds: int
) -> list[dict[str, Any]]:
    """One result per shape; `extra` names further launch shapes to time (see CudaKernels)."""
    arch = arch_of("cuda:0")
    kernels: dict[str, Any] = {"cuda": CudaKernels(arch), "triton": TritonKernels()}
    kernels |= {name: CudaKernels(arch, ctas) for name, ctas in extra.items()}
    results = []
    for tokens, topk, experts in shapes:
        inputs = routed(tokens, topk, experts)
        rows = build_routing(*inputs[0], experts).num_rows

        def build(
            choice: Any, number: int, inputs: Any = inputs, experts: int = experts, rows: int = rows
        ) -> Any:
            indices, probs = inputs[number]
            return choice.build(indices, probs, experts, 128, rows)

        def sort(number: int, inputs: Any = inputs, experts: int = experts) -> Any:
            return sort_pipeline(inputs[number][0], experts)

        def sort_padded(
            number: int, inputs: Any = inputs, experts: int = experts, rows: int = rows
        ) -> Any:
            indices, probs = inputs[number]
            return padded_sort_pipeline(indices, probs, experts, rows)

        variants: dict[str, Callable[[int], Any]] = {
            name: functools.partial(build, choice) for name, choice in kernels.items()
        }
        variants |= {"sort": sort, "sort_padded": sort_padded}
        times = interleaved_us(variants, 20 if tokens * topk <= 2**20 else 5, rounds)
        results.append(
            {
                "T": tokens, "K": topk, "E": experts, "TK": tokens * topk,
                "us": {name: round(median, 2) for name, (median, _) in times.items()},
                "smallest_us": {name: round(least, 2) for name, (_, least) in times.items()},
                "ratio_sort": round(times["sort"][0] / times["cuda"][0], 2),
                "ratio_sort_padded": round(times["sort_padded"][0] / times["cuda"][0], 2),
                "host_us": round(host_us(variants["cuda"]), 1),
            }
        )  # fmt: skip
        print_metadata(results[-1])
        del variants, inputs
    return results


def print_metadata(row: dict[str, Any]) -> None:
    """One aligned line."""
    times = "  ".join(f"{name} {value:8.2f}" for name, value in row["us"].items())
    print(
        f"metadata T={row['T']:<7} K={row['K']:<3} E={row['E']:<4} us: {times}  | sort/cuda {row['ratio_sort']:5.2f}"
        f"  padded sort/cuda {row['ratio_sort_padded']:5.2f}  host {row['host_us']:.1f} us"
    )


def aggregate_rows(
    shapes: tuple[tuple[int, int, int, int], ...], copy: float, rounds: int
) -> list[dict[str, Any]]:
    """Achieved bandwidth of the weighted and the unweighted sum, bf16, and the time of the dprobs
    scatter.
    """
    kernels: dict[str, Any] = {"cuda": CudaKernels(arch_of("cuda:0")), "triton": TritonKernels()}
    results = []
    for tokens, topk, width, everywhere in shapes:
        indices, probs = routed(tokens, topk, everywhere)[0]
        routing = build_routing(
            indices, probs, 32, torch.bincount(indices.reshape(-1), minlength=32).tolist()[:32]
        )
        rows = torch.randn(routing.num_rows, width, device="cuda").to(torch.bfloat16)
        row_values = torch.randn(routing.num_rows, device="cuda")

        def combine(
            choice: Any, weighted: bool, _: int, rows: Any = rows, routing: Any = routing
        ) -> Any:
            shape = (routing.num_tokens, int(rows.shape[1]))
            out = torch.empty(shape, dtype=rows.dtype, device="cuda")
            choice.aggregate_rows(rows, routing.slot_row, routing.row_prob, out, weighted)
            return out

        def dprobs(_: int, values: Any = row_values, routing: Any = routing) -> Any:
            return scatter_to_slots(values, routing)

        variants: dict[str, Callable[[int], Any]] = {"dprobs": dprobs}
        for name, choice in kernels.items():
            for label, weighted in (("weighted", True), ("plain", False)):
                variants[f"{name}_{label}"] = functools.partial(combine, choice, weighted)
        times = interleaved_us(variants, 6, rounds)
        valid, fixed = sum(routing.counts_on_host()), tokens * (8 * topk + 2 * width)
        moved = {True: valid * (2 * width + 4) + fixed, False: valid * 2 * width + fixed}
        tbps = {
            name: moved["weighted" in name] / median / 1e6
            for name, (median, _) in times.items()
            if name != "dprobs"
        }
        result: dict[str, Any] = {
            "T": tokens, "K": topk, "H": width, "TK": valid,
            "us": {name: round(median, 2) for name, (median, _) in times.items()},
            "TB/s": {name: round(value, 3) for name, value in tbps.items()},
            "of_copy": {name: round(value / copy, 3) for name, value in tbps.items()},
        }  # fmt: skip
        results.append(result)
        line = "  ".join(
            f"{n} {result['us'][n]:7.1f} us {result['TB/s'][n]:.2f} ({result['of_copy'][n]:.0%})"
            for n in tbps
        )
        print(
            f"aggregate T={tokens:<6} K={topk:<2} TK={valid:<6} H={width:<5} {line}  dprobs {result['us']['dprobs']:.1f} us"
        )
        del rows, variants
    return results


@click.command()
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write every figure here."
)
@click.option("--rounds", default=30, show_default=True, help="Timed replays of each variant.")
@click.option("--shapes/--no-shapes", default=False, help="Also time grids of fixed sizes.")
def main(json_path: Path | None, rounds: int, shapes: bool) -> None:
    """Time routing metadata and token aggregation on the GPU."""
    extra = {f"grid{ctas}": ctas for ctas in (132, 108, 64, 32)} if shapes else {}
    copy = copy_tbps()
    print(f"{torch.cuda.get_device_name()}  copy {copy:.3f} TB/s")
    report = {
        "device": torch.cuda.get_device_name(),
        "copy_tbps": round(copy, 3),
        "metadata": metadata_rows(METADATA_SHAPES, extra, rounds),
        "aggregate": aggregate_rows(AGGREGATE_SHAPES, copy, rounds),
    }
    if json_path:
        json_path.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
