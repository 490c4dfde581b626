"""One layer in three ways on this device, in turns: stock PyTorch compiled, and this package in BF16
and in FP8.

Legend: T tokens, K slots, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..engine.select import choose_engine
from ..enums import ActivationType, EngineName
from ..errors import SonicMoEError
from ..functional.autograd import expert_mlp
from ..host import require_memory
from ..layouts import WeightLayout
from .answer import BF16, FP8, KEPT_CALLS, STOCK, Answer, Way, workload_of
from .shapes import Shape
from .timing import in_turns, peak_mib, wall_us
from .workload import Batch

Tensor = torch.Tensor
Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
WARM_UPS, ROUNDS, CALLS = 3, 5, 8
CALLS_OF_WEIGHTS = {"new": 1, "kept": KEPT_CALLS}
# `torch.nn.functional` has it from PyTorch 2.10 on.
grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


def stock(x: Tensor, ids: Tensor, probs: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The layer of plain PyTorch: slots sorted by expert, two grouped products, and a sum over the
    slots of a token. x `[T, H]`, ids and probs `[T, K]`, w1 `[E, 2I, H]` with gate before up, w2
    `[E, H, I]` -> `[T, H]`.
    """
    tokens, slots = ids.shape
    order = ids.reshape(-1).argsort(stable=True)
    every = torch.arange(w1.shape[0], device=ids.device)
    counts = (ids.reshape(-1, 1) == every).sum(0)
    offsets = counts.cumsum(0).to(torch.int32)
    rows = x[order // slots]
    gate, up = grouped_mm(rows, w1.transpose(1, 2), offs=offsets).chunk(2, -1)
    y1 = torch.nn.functional.silu(gate) * up
    y2 = grouped_mm(y1, w2.transpose(1, 2), offs=offsets)
    back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=ids.device))
    weighted = y2[back].reshape(tokens, slots, -1) * probs[..., None].to(y2.dtype)
    return weighted.sum(1)


def ours(use_fp8: bool) -> Layer:
    """The layer of this package over the same stacked weights."""

    def layer(x: Tensor, ids: Tensor, probs: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return expert_mlp(
            x, ids, probs, w1, w2, None, None, ActivationType.SWIGLU,
            layout=WeightLayout(split_half=True), use_fp8=use_fp8,
        )  # fmt: skip

    return layer


@dataclass(eq=False)
class Entrant:
    """One way, and the tensors that all ways share."""

    layer: Layer
    batch: Batch
    weights: tuple[Tensor, Tensor]

    def clear(self) -> None:
        for tensor in (self.batch.x, self.batch.probs, *self.weights):
            tensor.grad = None

    def call(self, write: bool) -> None:
        """Forward and backward with fresh gradients; `write`: count a write of the weights before,
        as an optimizer's step does.
        """
        batch = self.batch
        self.clear()
        for weight in self.weights if write else ():
            torch.autograd.graph.increment_version(weight)
        self.layer(batch.x, batch.indices, batch.probs, *self.weights).backward(batch.dout)

    def wall_us(self, mode: str) -> float:
        """Microseconds of a call in one round of a mode. A cycle of untimed calls comes before, as the
        way before this one may have left other copies of the weights.
        """
        cycle, device = CALLS_OF_WEIGHTS[mode], self.batch.x.device
        for number in range(cycle):
            self.call(number == 0)
        writes = itertools.cycle(number == 0 for number in range(cycle))
        return wall_us(lambda: self.call(next(writes)), device, CALLS)

    def peak_mib(self) -> float | None:
        """MiB of a call above what lies there before it; None on a CPU."""
        if self.batch.x.device.type == "cpu":
            return None
        self.call(True)
        self.clear()
        return peak_mib(lambda: self.call(True), self.batch.x.device)


def random_weights(shape: Shape, device: str) -> tuple[Tensor, Tensor]:
    """Normal bf16 parameters w1 `[E, 2I, H]` and w2 `[E, H, I]` of variance 1 / H and 1 / I."""
    sizes = (2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
    made = (
        torch.randn((shape.experts, *size), device=device, dtype=torch.bfloat16) * size[1] ** -0.5
        for size in sizes
    )
    w1, w2 = (torch.nn.Parameter(values) for values in made)
    return w1, w2


def layers(device: str) -> dict[str, Layer]:
    """Every way by its name."""
    # A CPU only checks the program, and generates no code for it.
    compiled = torch.compile(stock, backend="aot_eager" if device == "cpu" else "inductor")
    return {STOCK: compiled, BF16: ours(False), FP8: ours(True)}


def contest(shape: Shape, device: str, rounds: int = ROUNDS) -> Answer:
    """Warm every way up, time all of them in turns, then take each one's peak of memory. A way that
    cannot run at these sizes, or here, has the reason in place of figures.
    """
    if device != "cpu":
        # Weights and their gradients, which every way holds; a card too small for them says so.
        numbers = 3 * shape.experts * shape.hidden * shape.intermediate
        require_memory(2 * 2 * numbers, f"the layer {shape}", torch.cuda.mem_get_info()[0])
    torch.manual_seed(0)
    batch, weights = Batch.random(shape, device), random_weights(shape, device)
    entrants: dict[str, Entrant] = {}
    refusals: dict[str, str] = {}
    for name, layer in layers(device).items():
        entrant = Entrant(layer, batch, weights)
        try:
            _may_run(name, shape, device)
            for _ in range(WARM_UPS):
                entrant.call(True)
            entrants[name] = entrant
        # RuntimeError: what PyTorch says of sizes that its products do not take, or of memory.
        except (SonicMoEError, RuntimeError) as error:
            refusals[name] = " ".join(str(error).split())[:300]
    pairs = [(mode, name) for mode in CALLS_OF_WEIGHTS for name in entrants]
    walls = in_turns(dict(zip(pairs, pairs, strict=True)), rounds,
                     lambda pair: entrants[pair[1]].wall_us(pair[0]))  # fmt: skip
    ways = tuple(
        Way(name, refusal=refusals[name])
        if name in refusals
        else Way(name, *_medians(name, walls), entrants[name].peak_mib())
        for name in (STOCK, BF16, FP8)
    )
    notes = (
        "stock: grouped_mm under torch.compile; wall times, median of rounds in turns; bf16 .grad",
        "memory: the peak of a call above what lies there before it, with its gradients",
    )
    return Answer(shape, ways, notes, measured=True)


def _may_run(name: str, shape: Shape, device: str) -> None:
    """EngineUnavailableError where FP8 would run without FP8: its times would be BF16's."""
    if name == FP8 and device != "cpu":
        choose_engine(device, EngineName.HOPPER, workload_of(shape, name))


def _medians(name: str, walls: Mapping[tuple[str, str], list[float]]) -> tuple[float, float]:
    """A way's microseconds with new and with kept weights."""
    new, kept = (statistics.median(walls[mode, name]) for mode in CALLS_OF_WEIGHTS)
    return new, kept
