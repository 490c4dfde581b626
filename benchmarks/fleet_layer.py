"""One MoE layer as PaddleFleet runs it, through PyTorch: the two stacked parameters of one rank with
fp32 `main_grad`, a dispatcher, tokens and gradients in BF16 or in FP8. For `fleet_bench.py` and the
GPU tests.

Legend: T tokens of a rank, H hidden, I intermediate, E experts of all ranks, K slots.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sonicmoe import SonicMoEConfig
from sonicmoe.ep import Dispatcher
from sonicmoe.ep.interface import Dispatched
from sonicmoe.fleet.configuration import FP8Config
from sonicmoe.fleet.layer import layer_of
from sonicmoe.fleet.quantizer import quantize_activation_blockscaled_fast
from sonicmoe.fleet.run import run_sonic_moe
from sonicmoe.fleet.weight_copies import (
    clear_all_fp8_weight_caches,
    copies_of,
    quantize_native_fp8_weights,
)
from sonicmoe.fleet.weight_layout import fused_grouped_w1_to_sonic, fused_transpose_w2_layout

Tensor = torch.Tensor
STAGES = (
    "dispatch",
    "experts",
    "combine",
    "dout_dispatch",
    "experts_backward",
    "dx_combine",
)


@dataclass(frozen=True)
class Sizes:
    """tokens is per rank, experts of all ranks."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int


class Arm(NamedTuple):
    """What travels in FP8, and what computes: the engine that a GPU must have, and whether FP8."""

    fp8_tokens: bool
    fp8_gradients: bool
    engine: str
    fp8: bool


# The first is the truth of the comparison, the second differs from the third in the wire alone.
ARMS = {
    "bf16 engine": Arm(False, False, "bf16", False),
    "bf16 dispatch": Arm(False, False, "hopper", True),
    "fp8 dispatch": Arm(True, True, "hopper", True),
}


class Batch(NamedTuple):
    """bf16 `[T, H]`, int64 `[T, K]`, fp32 `[T, K]`, and the gradient of the output, bf16 `[T, H]`."""

    x: Tensor
    ids: Tensor
    probs: Tensor
    dout: Tensor

    @classmethod
    def random(cls, sizes: Sizes, device: str, seed: int) -> Batch:
        """The same values on every device; a tenth of the slots is dropped."""
        generator = torch.Generator().manual_seed(seed)
        x, dout = (
            torch.randn(sizes.tokens, sizes.hidden, generator=generator).to(torch.bfloat16)
            for _ in range(2)
        )
        scores = torch.rand(sizes.tokens, sizes.experts, generator=generator)
        ids = scores.topk(sizes.topk, 1).indices
        ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
        probs = torch.rand(ids.shape, generator=generator) / sizes.topk
        return cls(*(each.to(device) for each in (x, ids, probs, dout)))


def weights_of(sizes: Sizes, device: str, rank: int = 0, ranks: int = 1) -> list[Tensor]:
    """`weight1 [E/ranks, H, 2I]` and `weight2 [E/ranks, I, H]`, bf16, by expert the same whatever
    rank has it, with `main_grad` of zeros.
    """
    count = sizes.experts // ranks
    hidden, inner = sizes.hidden, sizes.intermediate
    halves: list[list[Tensor]] = [[], []]
    for expert in range(rank * count, (rank + 1) * count):
        generator = torch.Generator(device).manual_seed(1000 + expert)
        for half, (rows, columns) in zip(
            halves, ((hidden, 2 * inner), (inner, hidden)), strict=True
        ):
            values = torch.randn(rows, columns, generator=generator, device=device)
            half.append((values * rows**-0.5).to(torch.bfloat16))
    made = [torch.nn.Parameter(torch.stack(half)) for half in halves]
    for weight in made:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    return made


class Experts:
    """The experts of one rank under one arm; `engine` overrides the arm's."""

    def __init__(self, weights: list[Tensor], arm: Arm, engine: str | None = None) -> None:
        self.weights = weights
        config = FP8Config()
        # By name, because another engine in its place would be timed unnoticed.
        with SonicMoEConfig(engine=engine or arm.engine).activate():
            settings = config.node_config(fp8=arm.fp8)
        hidden = int(weights[1].shape[2])
        self.node = layer_of(*weights, hidden).node(settings, *config.activation())
        self._fp8 = arm.fp8

    def __call__(self, received: Dispatched) -> Tensor:
        return self.node(
            received.x,
            received.tokens_per_expert,
            received.indices,
            received.probs,
            received.x_scale,
            received.dx_to,
            received.dout_source,
            copies_of(*self.weights) if self._fp8 else None,
        )

    @torch.no_grad()
    def clear(self) -> None:
        """As an optimizer does after its step."""
        for weight in self.weights:
            weight.main_grad.zero_()  # type: ignore[attr-defined]


def run(dispatcher: Dispatcher, experts: Experts, batch: Batch, arm: Arm) -> dict[str, Tensor]:
    """y, gradients of x and probs, and of both weights, of one forward and backward."""
    experts.clear()
    x, probs = batch.x.clone().requires_grad_(), batch.probs.clone().requires_grad_()
    for _ in steps(dispatcher, experts, (x, batch.ids, probs), batch.dout, arm, found := {}):
        pass
    w1, w2 = (weight.main_grad.clone() for weight in experts.weights)  # type: ignore[attr-defined]
    return {"y": found["y"].detach(), "dx": x.grad, "dprobs": probs.grad, "dw1": w1, "dw2": w2}


def steps(
    dispatcher: Dispatcher,
    experts: Experts,
    inputs: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    arm: Arm,
    found: dict[str, Tensor],
    mark: Callable[[str], None] = lambda name: None,
) -> Iterator[str]:
    """One forward and backward; `mark(stage)` is called as the host has launched each of `STAGES`,
    on the stream that runs it. Yields before the forward and before the backward.
    """
    x, ids, probs = inputs
    yield "forward"
    options = {"fp8": arm.fp8_tokens, "fp8_grad": arm.fp8_gradients}
    received = dispatcher.dispatch(x, ids, probs, **options)
    # Tokens in FP8 stand beside the tensor that gets their gradient.
    entry = received.x if received.dx_to is None else received.dx_to
    mark("dispatch")
    out = experts(received)
    mark("experts")
    y = dispatcher.combine(out, received.handle)
    mark("combine")
    # The gradient of the experts' output is there once the combine's backward has sent it, and that
    # of the tokens once the experts' backward has run. Hooks only look.
    out.register_hook(lambda _: mark("dout_dispatch"))
    entry.register_hook(lambda _: mark("experts_backward"))
    yield "backward"
    y.backward(dout)
    mark("dx_combine")
    found["y"] = y


def call_fleet(
    weights: list[Tensor], batch: Batch, engine: str, config: FP8Config | None = None
) -> dict[str, Tensor]:
    """`run_sonic_moe` as Fleet's experts call it behind an FP8 dispatch: e4m3 tokens with packed
    words, and the handle that the combine's backward has filled with bytes. Results as `run`'s, but
    for dx: PyTorch has no gradient of e4m3 tensors.
    """
    hidden, handle = int(batch.x.shape[1]), {}
    arguments = fleet_arguments(weights, batch, handle, config)
    probs = arguments["topk_scores"]
    with SonicMoEConfig(engine=engine).activate():
        out = run_sonic_moe(**arguments)
        dout, words = quantize_activation_blockscaled_fast(batch.dout, pack_scale_words=True)
        handle["data"], handle["scale"] = dout, words.view(torch.uint8).reshape(-1, hidden // 32)
        # What autograd carries is a placeholder, which nobody reads.
        out.backward(torch.full_like(out, float("nan")))
    assert not handle, "a handle is emptied by the backward that reads it"
    w1, w2 = (weight.main_grad for weight in weights)  # type: ignore[attr-defined]
    assert probs.grad is not None
    return {"y": out.detach(), "dprobs": probs.grad, "dw1": w1, "dw2": w2}


def fleet_arguments(
    weights: list[Tensor], batch: Batch, handle: dict[str, Tensor], config: FP8Config | None = None
) -> dict[str, Any]:
    """Of `run_sonic_moe` behind an FP8 dispatch: tokens quantised as the sender does it."""
    codes, words = quantize_activation_blockscaled_fast(batch.x, pack_scale_words=True)
    return {
        "hidden_states": codes,
        "topk_indices": batch.ids,
        "topk_scores": batch.probs.clone().requires_grad_(),
        "K": int(batch.ids.shape[1]),
        "E": int(weights[1].shape[0]),
        "w1": weights[0],
        "w2": weights[1],
        "fp8": True,
        "fp8_scale": words,
        "fp8_combine_grad_handle": handle,
        "fp8_config": FP8Config() if config is None else config,
    }


@torch.no_grad()
def to_sonic(weights: list[Tensor]) -> None:
    """From the grouped layout to Sonic's, as Fleet does it: w1 with its `main_grad`, w2 without."""
    w1, w2 = weights
    w1.data = fused_grouped_w1_to_sonic(w1.data)
    w1.main_grad = fused_grouped_w1_to_sonic(w1.main_grad)  # type: ignore[attr-defined]
    w2.data = fused_transpose_w2_layout(w2.data)


def give_copies(weights: list[Tensor], *, iso32: bool = True) -> None:
    """Quantise, and set the attributes that Fleet's experts set."""
    payload = quantize_native_fp8_weights(*weights, iso32=iso32)
    for name, weight in zip(("w1", "w2"), weights, strict=True):
        codes, scale, *rest = payload[name]
        transposed = codes.transpose(1, 2) if payload["format"] == "iso32" else rest[0]
        weight.fp8 = (codes, scale)  # type: ignore[attr-defined]
        weight.transposed_fp8 = (transposed, rest[-1])  # type: ignore[attr-defined]


def take_copies(weights: list[Tensor]) -> None:
    """As Fleet does before the optimizer."""
    clear_all_fp8_weight_caches()
    for weight in weights:
        weight.fp8 = weight.transposed_fp8 = None  # type: ignore[attr-defined]


@contextmanager
def freed(weights: list[Tensor]) -> Iterator[None]:
    """Inside, the parameters keep their shapes and hold no memory, as in a step of Fleet's."""
    held = [weight.detach().to("cpu", copy=True) for weight in weights]
    for weight in weights:
        weight.untyped_storage().resize_(0)
    try:
        yield
    finally:
        for weight, values in zip(weights, held, strict=True):
            weight.untyped_storage().resize_(values.untyped_storage().nbytes())
            with torch.no_grad():
                weight.data.copy_(values)


class Clock:
    """Microseconds of each stage, by the device's clock on a GPU."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device != "cpu"
        self._marks: list[tuple[str, Any]] = []

    def __call__(self, name: str) -> None:
        if self._on_gpu:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        else:
            moment = time.perf_counter()
        self._marks.append((name, moment))

    def read(self) -> dict[str, float]:
        """By stage; the first mark is the start. Waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        marks = self._marks
        return {
            name: 1e3 * before.elapsed_time(after) if self._on_gpu else 1e6 * (after - before)
            for (_, before), (name, after) in itertools.pairwise(marks)
        }


def relative(actual: Tensor, wanted: Tensor) -> float:
    """||actual - wanted|| / ||wanted||, in fp64."""
    actual, wanted = actual.double(), wanted.double()
    return float((actual - wanted).norm() / wanted.norm().clamp_min(1e-30))
