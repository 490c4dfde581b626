"""One MoE layer over the ranks of a host, for `multicard_smoke.py`: checks against one rank alone."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sonicmoe import SonicMoEConfig
from sonicmoe.ep import Dispatcher, LocalDispatcher, make_dispatcher
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.errors import ConfigError, EngineUnavailableError
from sonicmoe.jit import no_compile
from sonicmoe.jit_warmup import warmup_jit

Tensor = torch.Tensor
PRECISIONS = {
    "fp8": ("perf", "hopper"),
    "bf16": ("off", "bf16"),
    "fp8-dispatch": ("perf", "hopper"),
}  # FP8 mode, and the engine that a GPU must run it on
TRAVELS_IN_FP8 = ("fp8-dispatch",)  # both ways to the experts: x, and dout
POISON_BYTES = 1 << 30
CHECKED_SHARE = 8


class LayerSizes(NamedTuple):
    """tokens is per rank, experts of all ranks."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int


class Batch(NamedTuple):
    """One rank's tokens bf16 `[T, H]`, routing, and the gradient of the output."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    dout: Tensor


class World:
    """What the ranks of one group do together; every method is collective."""

    def __init__(self, sizes: LayerSizes, device: torch.device, group: Any) -> None:
        """Read rank and size."""
        self.sizes, self.device, self.group = sizes, device, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.on_gpu = device.type == "cuda"

    def warm_up(self, precisions: Sequence[str]) -> list[str]:
        """Rank 0 compiles into the shared cache what all ranks need, every precision at once; names
        of the kernels.
        """
        names: list[str] = []
        if self.rank == 0 and self.on_gpu:
            local = self.sizes.experts // self.size
            shape = local, self.sizes.hidden, self.sizes.intermediate, str(self.device)
            with ThreadPoolExecutor(len(precisions) or 1) as pool:
                reports = pool.map(
                    lambda precision: warmup_jit(*shape, config=self._config(precision)), precisions
                )
                names = [outcome.kernel for report in reports for outcome in report.kernels]
        self.meet()
        return names

    def meet(self) -> None:
        """Wait for all ranks."""
        dist.barrier(self.group, device_ids=[self.device.index] if self.on_gpu else None)

    def nothing_compiles(self) -> Any:
        """After warm-up, a compile is an error that names the kernel."""
        return no_compile() if self.on_gpu else nullcontext()

    def dispatcher(self, kind: str, waits: bool) -> tuple[Dispatcher | None, str]:
        """`(dispatcher, "")`, or `(None, why not)`; waits: for the counts."""
        if kind == "deepep" and not self.on_gpu:
            return None, "DeepEP needs GPUs"
        try:
            given = {"kind": kind, "max_tokens": self.sizes.tokens, "wait_for_counts": waits}
            return make_dispatcher(self.sizes.experts, self.group, **given), ""
        # A buffer may be there and may not do without counts.
        except (EngineUnavailableError, ConfigError) as error:
            return None, str(error)

    def check(self, dispatcher: Dispatcher, precision: str) -> dict[str, dict[str, Any]]:
        """Against one rank that holds everything; poisoned memory; repetition. By case: tokens
        everywhere, an idle last rank.
        """
        return {
            case: self._check(dispatcher, precision, batches)
            for case, batches in self._checked_batches().items()
        }

    def differences(
        self, one: Dispatcher, other: Dispatcher, precision: str
    ) -> dict[str, dict[str, float]]:
        """Where two dispatchers do not give the same bits on this rank: by case, the relative L2 of
        each result that differs.
        """
        found: dict[str, dict[str, float]] = {}
        for case, batches in self._checked_batches().items():
            first, second = (self._run(d, batches[self.rank], precision) for d in (one, other))
            found[case] = {
                name: _relative(second[name], tensor)
                for name, tensor in first.items()
                if not torch.equal(second[name], tensor)
            }
        return found

    def _checked_batches(self) -> dict[str, list[Batch]]:
        """Everybody's tokens, by case."""
        sizes = self.sizes._replace(tokens=max(1, self.sizes.tokens // CHECKED_SHARE))
        return {
            case: [self._batch(sizes, rank, idle) for rank in range(self.size)]
            for case, idle in (("even", False), ("idle_rank", True))
        }

    def _check(
        self, dispatcher: Dispatcher, precision: str, batches: list[Batch]
    ) -> dict[str, Any]:
        first = self._run(dispatcher, batches[self.rank], precision)
        again = self._run(dispatcher, batches[self.rank], precision)
        self._poison()
        poisoned = self._run(dispatcher, batches[self.rank], precision)
        return {
            "errors": self._errors(first, batches, precision),
            "finite": all(bool(torch.isfinite(t).all()) for t in poisoned.values()),
            "repeats_bit_identical": all(torch.equal(first[name], again[name]) for name in first),
            "poison_changes_nothing": all(
                torch.equal(first[name], poisoned[name]) for name in first
            ),
        }

    def _run(self, dispatcher: Dispatcher, batch: Batch, precision: str) -> dict[str, Tensor]:
        """y, dx, dweights of the rank's tokens and the gradients of its experts."""
        node = self._node(dispatcher, precision)
        x, weights = batch.x.clone().requires_grad_(), batch.weights.clone().requires_grad_()
        fp8 = precision in TRAVELS_IN_FP8
        received = dispatcher.dispatch(x, batch.ids, weights, fp8=fp8, fp8_grad=fp8)
        given = received.x, received.tokens_per_expert, received.indices, received.probs
        out = node(*given, received.x_scale, received.dx_to, received.dout_source)
        y = dispatcher.combine(out, received.handle)
        y.backward(batch.dout)
        node.step()
        up, down = (weight.main_grad for weight in self._weights)
        found = {"y": y.detach(), "dx": _grad(x), "dweights": _grad(weights)}
        return {**found, "up_gate": up, "down": down}

    def _errors(
        self, mine: dict[str, Tensor], batches: list[Batch], precision: str
    ) -> dict[str, float]:
        """Rank 0 only: relative L2 against all experts and all tokens in this process."""
        gathered = {name: self._gather(tensor) for name, tensor in mine.items()}
        if self.rank:
            return {}
        together = Batch(*(torch.cat(tensors) for tensors in zip(*batches, strict=True)))
        wanted = self._run(LocalDispatcher(self.sizes.experts), together, precision)
        return {name: _relative(torch.cat(gathered[name]), wanted[name]) for name in wanted}

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor; they may differ in rows, and a collective cannot."""
        rows = [torch.zeros([1], dtype=torch.int64, device=self.device) for _ in range(self.size)]
        dist.all_gather(rows, torch.full_like(rows[0], tensor.shape[0]), group=self.group)
        counts = [int(count) for count in rows]
        padded = tensor.new_zeros([max(counts), *tensor.shape[1:]])
        padded[: tensor.shape[0]] = tensor
        pieces = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(pieces, padded, group=self.group)
        return [piece[:count] for piece, count in zip(pieces, counts, strict=True)]

    def _node(self, dispatcher: Dispatcher, precision: str) -> SonicMoEMlpNode:
        count = dispatcher.num_local_experts
        first = self.rank * count if count < self.sizes.experts else 0
        experts = [self._expert(expert) for expert in range(first, first + count)]
        self._weights = [
            torch.nn.Parameter(torch.stack(half)) for half in zip(*experts, strict=True)
        ]
        for weight in self._weights:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        return SonicMoEMlpNode.from_fused(*self._weights, config=self._config(precision))

    def _config(self, precision: str) -> SonicMoEConfig:
        """On a GPU with the engine by name: another one in its place would be checked and timed
        unnoticed.
        """
        mode, engine = PRECISIONS[precision]
        return SonicMoEConfig(fp8_mode=mode, engine=engine if self.on_gpu else "reference")

    def _expert(self, expert: int) -> list[Tensor]:
        """The weights of an expert, the same on any rank."""
        generator = torch.Generator(self.device).manual_seed(1000 + expert)
        hidden, width = self.sizes.hidden, self.sizes.intermediate
        made = (
            torch.randn(size, generator=generator, device=self.device) * size[0] ** -0.5
            for size in ((hidden, 2 * width), (width, hidden))
        )
        return [values.to(torch.bfloat16) for values in made]

    def _batch(self, sizes: LayerSizes, rank: int, idle: bool = False) -> Batch:
        """Routing is uneven (low ids are likelier) and a tenth of the slots is dropped.

        idle: the last rank has no tokens, and expert 0 gets none.
        """
        generator = torch.Generator().manual_seed(rank)
        tokens = 0 if idle and rank == self.size - 1 else sizes.tokens
        chance = torch.linspace(2.0, 0.5, sizes.experts).expand(sizes.tokens, -1)
        ids = torch.multinomial(chance, sizes.topk, generator=generator)
        ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
        if idle:
            ids[ids == 0] = -1
        x, dout = (
            torch.randn(sizes.tokens, sizes.hidden, generator=generator).to(torch.bfloat16)
            for _ in range(2)
        )
        weights = torch.rand(ids.shape, generator=generator)
        return Batch(*(tensor[:tokens].to(self.device) for tensor in (x, ids, weights, dout)))

    def _poison(self) -> None:
        """Leave NaN in the memory that the allocator hands out next."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            # Small blocks and large ones: the caching allocator keeps the kinds apart.
            sizes = [1 << 19] * 64 + [POISON_BYTES // 8] * 8
            blocks = [torch.full([n], 0xFF, dtype=torch.uint8, device=self.device) for n in sizes]
            torch.cuda.synchronize(self.device)
            del blocks


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _relative(actual: Tensor, wanted: Tensor) -> float:
    actual, wanted = actual.double(), wanted.double()
    return float((actual - wanted).norm() / wanted.norm().clamp_min(1e-30))
