"""One layer under expert parallelism in every way that `ep_bench.py` measures.

Legend: T tokens of a rank, H hidden, I intermediate, E experts of all ranks, K slots, W ranks,
L = E / W experts of a rank, R rows received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from timing import backend_of

from sonicmoe import SonicMoEConfig
from sonicmoe.enums import ActivationType
from sonicmoe.ep import Dispatched, Dispatcher
from sonicmoe.ep.select import KINDS
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.functional.routed import ExpertGroup, name_of, routed_mlp
from sonicmoe.layer.plan import make_plan, number_of
from sonicmoe.layouts import NATIVE

Tensor = torch.Tensor
# FP8 mode, the engine that a GPU must run it on, and whether rows travel in FP8 to the experts.
PRECISIONS = {
    "bf16": ("off", "bf16", False),
    "fp8": ("perf", "hopper", False),
    "fp8-rows": ("perf", "hopper", True),
}
MAX_LOAD = 1.5
# Public since PyTorch 2.10.
grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


class Shape(NamedTuple):
    """T is per rank, E of all ranks."""

    T: int
    H: int
    I: int
    E: int
    K: int


@dataclass
class Contestant:
    """One way to run the layer, and what was found about it.

    call: one forward and backward. results: of the last call, y, dx, dprobs, dw1 `[L, 2I, H]` (gate
    first) and dw2; None where there are none.
    """

    name: str
    call: Callable[[], None]
    results: Callable[[], dict[str, Tensor]] | None = None
    walls: list[float] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


class Layer:
    """This rank's tokens, routes and experts."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        """Every rank draws its own tokens, and routes them evenly and at random."""
        self.shape, self.device = shape, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.local = shape.E // self.ranks
        generator = torch.Generator(device).manual_seed(self.rank)

        def normal(*sizes: int, std: float = 1.0) -> Tensor:
            drawn = torch.randn(sizes, generator=generator, device=device).mul_(std)
            return drawn.to(torch.bfloat16)

        self.x = normal(shape.T, shape.H).requires_grad_()
        self.dout = normal(shape.T, shape.H)
        scores = torch.rand(shape.T, shape.E, generator=generator, device=device)
        chosen, self.ids = scores.topk(shape.K, 1)
        self.probs = torch.softmax(chosen, 1).requires_grad_()
        self.counts = torch.bincount(self.ids.reshape(-1), minlength=shape.E)
        up = normal(self.local, 2 * shape.I, shape.H, std=shape.H**-0.5)
        down = normal(self.local, shape.H, shape.I, std=shape.I**-0.5)
        self.weights = up.requires_grad_(), down.requires_grad_()
        self.y = self.x

    @cached_property
    def native(self) -> list[Tensor]:
        """Copies of the weights for every operator, gate and up rows in turns."""
        return [weight.requires_grad_() for weight in native_copies(self)]

    def run(self, layer: Callable[[], Tensor]) -> None:
        """Forward and backward; gradients of the call before are dropped first."""
        for leaf in (self.x, self.probs, *self.weights):
            leaf.grad = None
        y = layer()
        y.backward(self.dout)
        self.y = y.detach()

    def results(self, dw1: Tensor | None, dw2: Tensor | None) -> dict[str, Tensor]:
        """Results of the last `run`, with these weight gradients."""
        found = {"y": self.y, "dx": self.x.grad, "dprobs": self.probs.grad, "dw1": dw1, "dw2": dw2}
        return {name: tensor.clone() for name, tensor in found.items() if tensor is not None}

    def peer(self, name: str, layer: Callable[[], Tensor]) -> Contestant:
        """A way that writes bf16 `.grad`."""
        weights = self.weights
        return Contestant(
            name, lambda: self.run(layer), lambda: self.results(*[w.grad for w in weights])
        )


# -- as trainers run it -------------------------------------------------------------------------


class _Exchange(torch.autograd.Function):
    """Rows between ranks, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, leaving: list[int], arriving: list[int]) -> Tensor:
        ctx.way_back = arriving, leaving
        return exchanged(rows, leaving, arriving)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return exchanged(gradient.contiguous(), *ctx.way_back), None, None


def exchanged(rows: Tensor, leaving: list[int], arriving: list[int]) -> Tensor:
    """Rows in rank order, exchanged with all ranks."""
    arrived = rows.new_empty(sum(arriving), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows, arriving, leaving)
    return arrived


def compiled_experts(device: torch.device) -> Callable[..., Tensor]:
    """Stock experts on rows in expert order."""

    def experts(rows: Tensor, offsets: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gate, value = grouped_mm(rows, up.transpose(1, 2), offs=offsets).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * value
        return grouped_mm(hidden, down.transpose(1, 2), offs=offsets)

    return torch.compile(experts, backend=backend_of(device), dynamic=True)


def all_to_all(layer: Layer) -> Contestant:
    """Sort by expert, exchange counts and wait for them, a row a slot, experts, and back."""
    experts, table = compiled_experts(layer.device), (layer.ranks, layer.local)

    def forward() -> Tensor:
        order = torch.argsort(layer.ids.reshape(-1), stable=True)
        token = order // layer.shape.K
        slots = layer.x[token]
        # A line of counts for each rank on the other side.
        arriving = torch.empty_like(layer.counts)
        dist.all_to_all_single(arriving, layer.counts)
        arriving = arriving.view(table)
        lines = torch.stack([layer.counts.view(table), arriving])
        sizes = lines.sum(2).tolist()  # here the host waits
        rows = _Exchange.apply(slots, *sizes)
        expert = torch.arange(layer.local, device=rows.device).repeat(layer.ranks)
        of_row = torch.repeat_interleave(expert, arriving.flatten(), output_size=rows.shape[0])
        permuted = torch.argsort(of_row, stable=True)
        offsets = arriving.sum(0).cumsum(0).to(torch.int32)
        out = experts(rows[permuted], offsets, *layer.weights)
        unpermuted = torch.empty_like(out).index_copy(0, permuted, out)
        home = _Exchange.apply(unpermuted, *sizes[::-1])
        scaled = (home.float() * layer.probs.flatten()[order, None]).to(home.dtype)
        return torch.zeros_like(layer.x).index_add(0, token, scaled)

    return layer.peer("all-to-all", forward)


def minimal_async_ep(layer: Layer) -> Contestant:
    """torchtitan's own dispatcher over symmetric memory, and the same experts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.minimal_async_ep import api
    from torchtitan.models.common.token_dispatcher import MinimalAsyncEPTokenDispatcher

    shape, experts = layer.shape, compiled_experts(layer.device)
    api._buffer_state = api._buffer_key = None  # one in a process, of another shape before
    dispatcher = MinimalAsyncEPTokenDispatcher.Config(
        num_experts=shape.E,
        top_k=shape.K,
        hidden_dim=shape.H,
        num_max_tokens_per_rank=shape.T,
        dtype=torch.bfloat16,
        device=layer.device,
    ).build()
    dispatcher.wire_meshes(ep_mesh=init_device_mesh(layer.device.type, (layer.ranks,)))

    def forward() -> Tensor:
        routed = layer.x, layer.probs, layer.ids, layer.counts
        rows, counts, metadata = dispatcher.dispatch(*routed)
        out = experts(rows, counts.cumsum(0).to(torch.int32), *layer.weights)
        return dispatcher.combine(out, metadata, layer.x)

    return layer.peer("MinimalAsyncEP", forward)


# -- ours ---------------------------------------------------------------------------------------


def config_of(precision: str, device: torch.device) -> SonicMoEConfig:
    """With the engine by name, because another one in its place would be timed unnoticed."""
    mode, engine, _ = PRECISIONS[precision]
    return SonicMoEConfig(fp8_mode=mode, engine=engine if device.type == "cuda" else "reference")


def native_copies(layer: Layer) -> tuple[Tensor, Tensor]:
    """The layer's weights, gate and up rows in turns."""
    up, down = (weight.detach() for weight in layer.weights)
    return up.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous(), down.clone()


def gate_first(dw1: Tensor) -> Tensor:
    """Gate rows before up rows, of rows in turns."""
    return dw1.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


class OurExperts:
    """The node on copies of the layer's weights, with fp32 `main_grad`."""

    def __init__(self, layer: Layer, precision: str) -> None:
        self.weights = [torch.nn.Parameter(weight) for weight in native_copies(layer)]
        for weight in self.weights:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
        config = config_of(precision, layer.device)
        self._node = SonicMoEMlpNode.from_native(*self.weights, config=config)
        self.prepare = self._node.prequantize_weights

    def __call__(self, tokens: Dispatched) -> Tensor:
        """`[R, H]`."""
        given = tokens.x, tokens.tokens_per_expert, tokens.indices, tokens.probs
        return self._node(*given, tokens.x_scale, tokens.dx_to, tokens.dout_source)

    def end_call(self) -> None:
        """Behind every backward."""
        self._node.step()  # FP8 quantises the weights anew

    def clear(self) -> None:
        """Zeros in `main_grad`."""
        self._node.step()
        for weight in self.weights:
            weight.main_grad.zero_()

    def gradients(self) -> tuple[Tensor, Tensor]:
        """dw1 `[L, 2I, H]` (gate first) and dw2."""
        self._node.step()
        up, down = (weight.main_grad for weight in self.weights)
        return gate_first(up), down


def our_layer(
    layer: Layer, name: str, dispatcher: Dispatcher, precision: str, experts: OurExperts
) -> Contestant:
    """dispatch, node, combine."""
    in_fp8 = PRECISIONS[precision][2]

    def forward() -> Tensor:
        routed = layer.x, layer.ids, layer.probs
        forms = {"fp8": in_fp8, "fp8_grad": in_fp8}
        tokens = dispatcher.dispatch(*routed, **forms, meanwhile=experts.prepare)
        return dispatcher.combine(experts(tokens), tokens.handle)

    def call() -> None:
        layer.run(forward)
        experts.end_call()

    def results() -> dict[str, Tensor]:
        # Once more, because `main_grad` is the sum of many calls.
        experts.clear()
        layer.run(forward)
        return layer.results(*experts.gradients())

    return Contestant(name, call, results)


def our_operator(layer: Layer, name: str, options: dict[str, Any], precision: str) -> Contestant:
    """The operator that compiled blocks of torchtitan have, with bf16 `.grad`. It quantises the
    weights in both passes.
    """
    with config_of(precision, layer.device).activate():
        plan = replace(make_plan(ActivationType.SWIGLU, NATIVE, None), is_own=True)
    in_fp8 = PRECISIONS[precision][2]
    travel = {**options, "fp8": in_fp8, "fp8_grad": in_fp8}
    place = number_of(plan), name_of(ExpertGroup(layer.shape.E, dist.group.WORLD, travel))
    weights = layer.native

    def routed(x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        return routed_mlp(*place, x, ids, probs, (*weights, None, None))

    # All ways of a table are graphs of this one function, more than the eight that may be.
    torch._dynamo.config.recompile_limit = 64
    compiled = torch.compile(routed, backend=backend_of(layer.device), fullgraph=True)

    def call() -> None:
        for weight in weights:
            weight.grad = None
        layer.run(lambda: compiled(layer.x, layer.ids, layer.probs))

    def results() -> dict[str, Tensor]:
        dw1, dw2 = (weight.grad for weight in weights)
        return layer.results(None if dw1 is None else gate_first(dw1), dw2)

    return Contestant(name, call, results)


def ways() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every transport that `make_dispatcher` offers, waiting for counts and not: its name, and
    options.
    """
    bounded = {"wait_for_counts": False, "max_load": MAX_LOAD}
    found = {"waiting": {}, "no wait": {"wait_for_counts": False}, f"load {MAX_LOAD}": bounded}
    for kind in KINDS:
        for way, options in found.items():
            if kind not in ("auto", "local"):
                yield f"{kind}, {way}", {"kind": kind, **options}


# -- parts of it --------------------------------------------------------------------------------


def stock_alone(layer: Layer) -> Contestant:
    """Compiled grouped_mm on rows that have arrived and are in expert order."""
    experts, counts = compiled_experts(layer.device), layer.counts.clone()
    dist.all_reduce(counts)
    mine = counts.view(layer.ranks, layer.local)[layer.rank]
    offsets = mine.cumsum(0).to(torch.int32)
    rows = torch.randn(int(mine.sum()), layer.shape.H, device=layer.device, dtype=torch.bfloat16)
    dout = torch.randn_like(rows)
    rows.requires_grad_()

    def call() -> None:
        for leaf in (rows, *layer.weights):
            leaf.grad = None
        experts(rows, offsets, *layer.weights).backward(dout)

    return Contestant("experts alone, grouped_mm", call)


def ours_alone(
    layer: Layer, dispatcher: Dispatcher, precision: str, experts: OurExperts
) -> Contestant:
    """The node on rows that have arrived."""
    with torch.no_grad():
        tokens = dispatcher.dispatch(layer.x, layer.ids, layer.probs)
    rows, probs = tokens.x.clone().requires_grad_(), tokens.probs.clone().requires_grad_()
    tokens, dout = tokens._replace(x=rows, probs=probs), torch.randn_like(tokens.x)

    def call() -> None:
        rows.grad = probs.grad = None
        experts(tokens).backward(dout)
        experts.end_call()

    return Contestant(f"experts alone, {precision}", call)
