#!/usr/bin/env python3
"""The cost model of a sweep at sizes that its grid does not have: layers of models, and other sizes.

    benchmarks/off_grid_bench.py FILE                        # one Hopper GPU: measure, continuing what is there
    benchmarks/off_grid_bench.py FILE --fit SWEEP            # any machine: fit SWEEP, print its error at each point

A point is measured as `sonicmoe bench --sweep` measures one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sonicmoe.bench.cost_model import fit_model
from sonicmoe.bench.points import read_points
from sonicmoe.bench.shapes import SHAPES, Shape

MODELS = ("qwen3-235b-a22b-ep8", "mixtral-8x7b", "gpt-oss-120b-ep4", "olmoe-1b-7b",
          "ernie-4.5-21b-a3b", "ernie-4.5-300b-a47b-ep8")  # fmt: skip
# H, I, E, K, and every T
OTHERS = (
    (2048, 1024, 64, 8, (1536, 6000)), (2560, 1536, 64, 6, (3000, 12288)),
    (3072, 1536, 24, 4, (1500, 10000)), (2048, 1408, 64, 6, (4096, 16000)),
    (5120, 1536, 48, 6, (2000, 8192)), (4096, 2048, 16, 2, (3000, 12000)),
    (7168, 2048, 8, 4, (768, 6144)), (4096, 1536, 96, 8, (5000,)), (2880, 2880, 32, 4, (2048,)),
)  # fmt: skip


def shapes() -> list[Shape]:
    """Points that share experts follow each other, as a sweep wants them."""
    own = [SHAPES[name] for name in MODELS]
    own += [Shape(T, H, I, E, K) for H, I, E, K, tokens in OTHERS for T in tokens]
    return sorted(own, key=lambda s: (s.experts, s.hidden, s.intermediate, s.tokens))


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--fit", "sweep_file", type=click.Path(path_type=Path, exists=True),
              help="Score the fit of this sweep.")  # fmt: skip
def main(file: Path, sweep_file: Path | None) -> None:
    """Measure, or score."""
    if sweep_file is None:
        # Here, because it imports torch, which a score does not need.
        from sonicmoe.bench.sweep import sweep
        from sonicmoe.bench.workload import Variant

        print(sweep(file, shapes(), Variant.parse("hopper"), print), "points measured now")
        return
    model = fit_model([point for point in read_points(sweep_file) if point.us is not None])
    errors = []
    for point in read_points(file):
        if point.us is not None:
            found = float(model.predict([point.shape])[0])
            errors.append(100 * (found / point.us - 1))
            print(f"{point.shape}: {point.us:,.0f} us, predicted {found:,.0f}, {errors[-1]:+.1f} %")
    mean = sum(map(abs, errors)) / len(errors)
    print(f"{len(errors)} points: mean {mean:.2f} %, worst {max(errors, key=abs):+.1f} %")


if __name__ == "__main__":
    main()
