"""The workload of a benchmark: one layer's experts, a node per variant, rotating random batches.

Legend: T tokens, K slots, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..config import SonicMoEConfig
from ..engine.capabilities import RECORDS
from ..engine.select import choose_engine
from ..enums import EngineName
from ..errors import ConfigError, EngineUnavailableError, expect
from ..node.mlp_node import SonicMoEMlpNode
from .shapes import Shape

Tensor = torch.Tensor

MODES = ("off", "perf", "mem")
# The records list the fastest engine first. Here it comes last, because the first variant is the
# baseline of the speed-ups.
NATURAL_MODE = {
    name: "perf" if record.quantises(fp8=True) else "off"
    for name, record in reversed(RECORDS.items())
}
L2_BYTES = 60 << 20  # H100 and H200
# A batch that is used again at once would come from the L2 cache and look faster than in training,
# where other layers ran in between.
ROTATION_BYTES = 2 * L2_BYTES
MAX_ROTATION = 64


@dataclass(frozen=True)
class Variant:
    """An engine in one FP8 mode: "off" (operands in bf16), "perf" or "mem"."""

    engine: EngineName
    mode: str

    @classmethod
    def parse(cls, text: str) -> Variant:
        """`hopper`, `hopper:mem`; without a mode the engine's natural one. ConfigError where there
        is no such engine or mode.
        """
        name, _, mode = text.partition(":")
        known = [engine.value for engine in NATURAL_MODE]
        expect(
            name in known and mode in ("", *MODES),
            ConfigError,
            f"engine is {text!r}; needed: one of {known}, alone or with one of {MODES} behind a colon",
        )
        engine = EngineName(name)
        return cls(engine, mode or NATURAL_MODE[engine])

    @property
    def fp8(self) -> bool:
        return self.mode != "off"

    @property
    def config(self) -> SonicMoEConfig:
        """Configuration of a node that runs this variant; everything else follows the environment."""
        config = SonicMoEConfig(fp8_mode=self.mode, engine=self.engine)
        # The defaults of the flags are no recipe of an engine that runs by name alone.
        record = RECORDS[self.engine]
        if not record.by_name_only:
            return config
        return replace(config, recipe=record.recipes[0], save_z=record.z_codes[0])

    def __str__(self) -> str:
        """`hopper:perf`."""
        return f"{self.engine.value}:{self.mode}"


def available_variants(device: str) -> list[Variant]:
    """Every GPU engine that runs on `device` in its natural mode, or the reference engine where
    none does. The Triton engine stands in for the BF16 engine: beside it, it is timed when asked
    for, as is one that nobody has run.
    """
    found = []
    for engine, mode in NATURAL_MODE.items():
        if engine is EngineName.REFERENCE or RECORDS[engine].by_name_only:
            continue
        try:
            choose_engine(device, engine)
        except EngineUnavailableError:
            continue
        found.append(Variant(engine, mode))
    if any(variant.engine is EngineName.BF16 for variant in found):
        found = [variant for variant in found if variant.engine is not EngineName.TRITON]
    return found or [Variant(EngineName.REFERENCE, NATURAL_MODE[EngineName.REFERENCE])]


class Expert(torch.nn.Module):
    """One expert in the user's layout: `up_gate_proj.weight [H, 2I]`, `down_proj.weight [I, H]`,
    bf16, with a `main_grad` of zeros.
    """

    def __init__(self, hidden: int, intermediate: int, device: str) -> None:
        """Random normal weights of variance 1 / fan_in."""
        super().__init__()
        self.up_gate_proj, self.down_proj = torch.nn.Module(), torch.nn.Module()
        for module, rows, columns in (
            (self.up_gate_proj, hidden, 2 * intermediate),
            (self.down_proj, intermediate, hidden),
        ):
            values = torch.randn((rows, columns), device=device) * rows**-0.5
            module.weight = torch.nn.Parameter(values.to(torch.bfloat16))
            # As trainers allocate it: where the engine can, the node adds straight into it.
            module.weight.main_grad = torch.zeros_like(values)  # type: ignore[attr-defined]


@dataclass(eq=False)
class Batch:
    """Dispatched tokens: bf16 x, dout `[T, H]`, int64 indices and fp32 probs `[T, K]`, and the
    counts a dispatcher lists.
    """

    x: Tensor
    indices: Tensor
    probs: Tensor
    dout: Tensor
    counts: list[int]

    @classmethod
    def random(cls, shape: Shape, device: str) -> Batch:
        """Normal tokens; every token picks K distinct experts uniformly."""
        scores = torch.rand((shape.tokens, shape.experts), device=device)
        indices = scores.topk(shape.topk, 1).indices
        x, dout = (
            torch.randn((shape.tokens, shape.hidden), device=device).to(torch.bfloat16)
            for _ in range(2)
        )
        probs = torch.rand((shape.tokens, shape.topk), device=device)
        # They sum to 1, as a softmax over the chosen experts gives them.
        probs = probs / probs.sum(1, keepdim=True)
        counts = torch.bincount(indices.reshape(-1), minlength=shape.experts).tolist()
        return cls(x.requires_grad_(), indices, probs.requires_grad_(), dout, counts)


def rotating_batches(shape: Shape, device: str) -> list[Batch]:
    """Enough batches to exceed the L2 cache twice, at most `MAX_ROTATION` of them; one on a
    CPU. NodeCall `torch.manual_seed` first.
    """
    first = Batch.random(shape, device)
    if device == "cpu":
        return [first]
    read = (first.x, first.indices, first.probs, first.dout)
    count = min(MAX_ROTATION, 1 + -(-ROTATION_BYTES // sum(tensor.nbytes for tensor in read)))
    return [first, *(Batch.random(shape, device) for _ in range(count - 1))]


class Layer:
    """The experts of one layer and a node per variant on them; batches of any T and K fit."""

    def __init__(self, shape: Shape, device: str, seed: int = 0) -> None:
        """Random experts of `shape`, the same for the same seed."""
        torch.manual_seed(seed)
        self.shape, self.device = shape, device
        self.experts = [
            Expert(shape.hidden, shape.intermediate, device) for _ in range(shape.experts)
        ]

    def node(self, variant: Variant) -> SonicMoEMlpNode:
        """A node that runs `variant`. EngineUnavailableError, ConfigError or ShapeError where the engine
        does not run here, or not at these sizes.
        """
        sizes = self.shape.experts, self.shape.hidden, self.shape.intermediate
        return SonicMoEMlpNode(self.experts, *sizes, config=variant.config)


class NodeCall:
    """One forward, backward and step of a node on a batch, phase by phase."""

    def __init__(self, node: SonicMoEMlpNode, batch: Batch) -> None:
        self._node, self._batch = node, batch
        self.out: Tensor | None = None

    def clear(self) -> None:
        """Drop the leftovers of an earlier call: gradients of tokens and probabilities, and an
        output that had no backward.
        """
        self._batch.x.grad = self._batch.probs.grad = self.out = None

    def forward(self) -> None:
        """Tokens to output; autograd keeps the tensors for backward."""
        self.clear()
        batch = self._batch
        self.out = self._node(batch.x, batch.counts, batch.indices, batch.probs)

    def backward(self) -> None:
        """Gradient of the output to those of tokens and probabilities; those of weights are added."""
        assert self.out is not None
        # Output and graph are freed with this call and not in the middle of the next one.
        out, self.out = self.out, None
        out.backward(self._batch.dout)

    def step(self) -> None:
        """The node's part of an optimizer step: hand over weight gradients that wait in it, and
        prepare the weights.
        """
        self._node.step()
        self._node.prequantize_weights()

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Tensors that the caller holds in any case, so that they are not counted as saved."""
        return (self._batch.x, self._batch.indices, self._batch.probs)

    @property
    def phases(self) -> Sequence[tuple[str, Callable[[], None]]]:
        return (("forward", self.forward), ("backward", self.backward), ("step", self.step))


class Stack:
    """A step like that of a model with many layers: forwards of one node on `layers` batches, then one
    backward through all of them; gradients of tokens are dropped. PyTorch hands every `backward()` to a
    thread of the device, and waking that thread can take half a millisecond, which a step pays once.
    """

    def __init__(self, node: SonicMoEMlpNode, batches: Sequence[Batch], layers: int) -> None:
        """Nothing runs yet; batches are used in turn."""
        self._node = node
        # Fewer batches than layers are used again; `_leaf` keeps their gradients apart.
        self._batches = list(itertools.islice(itertools.cycle(batches), layers))
        self.layers = layers

    def run(self) -> None:
        """One step, issued; waits for nothing. Weight gradients add up where the node has them."""
        outs = [self._node(_leaf(b.x), b.counts, b.indices, _leaf(b.probs)) for b in self._batches]
        torch.autograd.backward(outs, [batch.dout for batch in self._batches])


def _leaf(tensor: Tensor) -> Tensor:
    """A tensor of this storage with a gradient of its own, so that layers which share a batch add
    nothing to each other's.
    """
    return tensor.detach().requires_grad_()
