"""Experts of anybody as a callable, and how far they are from fp64: what the checks of `verify` share.

Errors are relative and have no scale: RMSE over the norm, of each expert and of each 128 tokens, so
that one wrong expert is not lost among many right ones. Where the definition gives zero, zero it has
to be.
"""

from __future__ import annotations

import importlib
import math
import runpy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ..enums import ActivationType
from ..errors import ConfigError, did_you_mean, expect
from ..layouts import ExpertLayout, convert_weights
from .capture import to_numpy
from .cases import VERIFIED, CaseSizes, as_case, random_step
from .golden_stages import TENSORS, golden_tensors
from .step_dump import Array, StepDump, StepSettings

Tensor = torch.Tensor
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
BLOCK = 128  # tokens of one part
TOKENS = ("x", "indices", "probs", "dout")  # what a case has of each token


class WrongResultError(Exception):
    """A check failed; the text says by how much, or what differs."""


class NotRunError(Exception):
    """A check that this machine or callable does not allow; the text says why."""


@dataclass(frozen=True)
class ExpertsUnderTest:
    """The experts that are verified.

    Attributes:
        experts: the callable.
        layout: of w1 and w2, a value of `ExpertLayout`.
        activation, parameters: as `StepSettings` has them.
        dtype: of x and the weights, by name; probs are fp32.
        tolerance: most relative error of a part; default: that of the dtype in `TOLERANCES`. An FP8
            module needs one of its own.
    """

    experts: Experts
    layout: str = ExpertLayout.HALVES.value
    activation: str = ActivationType.SWIGLU.value
    parameters: dict[str, float] = field(default_factory=dict)
    dtype: str = "float32"
    device: str = "cpu"
    tolerance: float | None = None
    sizes: CaseSizes = VERIFIED

    def __post_init__(self) -> None:
        # A comparison with NaN is false, so under such a tolerance nothing would ever be too far off.
        words = f"tolerance is {self.tolerance}; needed: a finite number above 0"
        expect(0 < self.bound < math.inf, ConfigError, words)
        try:
            float(torch.zeros((), device=self.device))  # one without memory, as meta, has no value
        except Exception as error:
            reason = str(error).partition("\n")[0]
            words = (
                f"device is {self.device!r} ({reason}); needed: one that PyTorch computes on here"
            )
            raise ConfigError(words) from error

    @property
    def bound(self) -> float:
        return TOLERANCES[self.dtype] if self.tolerance is None else self.tolerance

    def case(self, seed: int = 0) -> StepDump:
        """Operands with values exact in every dtype; each token picks distinct experts."""
        own: dict[str, Any] = {
            "activation": self.activation,
            "activation_parameters": self.parameters,
        }
        settings = StepSettings(recipe=None, dtype=self.dtype, **own)
        rng, size = np.random.default_rng(seed), (self.sizes.tokens, self.sizes.hidden)
        tokens = rng.standard_normal(size), rng.standard_normal(size)
        drawn = settings, self.sizes, rng, lambda *shape: rng.standard_normal(shape), tokens
        return as_case(random_step("normal", *drawn))


def load(name: str) -> Experts:
    """The callable `package.module:function` or `file.py:function`. ConfigError where there is none."""
    place, _, attribute = name.rpartition(":")
    needed = "package.module:function or file.py:function"
    expect(bool(place and attribute), ConfigError, f"experts are {name!r}; needed: {needed}")
    module: Any
    try:
        if place.endswith(".py"):
            module = SimpleNamespace(**runpy.run_path(place, run_name=Path(place).stem))
        else:
            module = importlib.import_module(place)
    except (Exception, SystemExit) as error:  # of a wrong name, or of the code that it names
        words = f"experts {name!r} cannot be loaded ({type(error).__name__}: {error})"
        raise ConfigError(f"{words}; needed: {needed}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        public = [
            each for each, value in vars(module).items() if each[0] != "_" and callable(value)
        ]
        words = f"{place} has no callable {attribute!r}{did_you_mean(attribute, public)}"
        raise ConfigError(f"{words}; needed: one of {sorted(public)[:20]}")
    return cast("Experts", found)


def weights_of(subject: ExpertsUnderTest, case: StepDump) -> tuple[Tensor, Tensor]:
    """w1 and w2 of a case as the callable takes them, leaves that want gradients."""
    native = torch.tensor(case.w1), torch.tensor(case.w2)
    placed = convert_weights(*native, ExpertLayout.INTERLEAVED, subject.layout)
    moved = (w.to(subject.device, getattr(torch, subject.dtype)) for w in placed)
    w1, w2 = (w.requires_grad_() for w in moved)
    return w1, w2


def run(
    subject: ExpertsUnderTest, case: StepDump, weights: Sequence[Tensor] | None = None
) -> dict[str, Array]:
    """One forward and backward: `TENSORS` in fp64, weight gradients in native layout. Those of sharded
    weights are gathered.
    """
    dtype = getattr(torch, subject.dtype)
    x, dout = (torch.tensor(array).to(subject.device, dtype) for array in (case.x, case.dout))
    ids = torch.tensor(case.indices, device=subject.device)
    probs = torch.tensor(case.probs, dtype=torch.float32, device=subject.device)
    leaves = [x.requires_grad_(), probs.requires_grad_(), *(weights or weights_of(subject, case))]
    out = subject.experts(x, ids, probs, *leaves[2:])
    if tuple(out.shape) != tuple(x.shape):
        raise WrongResultError(f"out has shape {tuple(out.shape)}; needed: {tuple(x.shape)}")
    out.backward(dout.to(out.dtype))
    found = [out]
    for name, leaf in zip(("x", "probs", "w1", "w2"), leaves, strict=True):
        if leaf.grad is None:
            raise WrongResultError(f"{name} has no gradient")
        found.append(leaf.grad.full_tensor() if isinstance(leaf.grad, DTensor) else leaf.grad)
        leaf.grad = None
    found[3:] = convert_weights(found[3], found[4], subject.layout, ExpertLayout.INTERLEAVED)
    arrays = (to_numpy(tensor).astype(np.float64) for tensor in found)
    return dict(zip(TENSORS, arrays, strict=True))


def part_errors(name: str, got: Array, wanted: Array, case: StepDump) -> Array:
    """Relative RMSE of each part of one of `TENSORS`: 128 tokens, or an expert. Infinite where
    anything but zero stands in a part that is zero.
    """
    if name in ("out", "dx"):
        starts = range(0, len(got), BLOCK)
        pairs = [(got[at : at + BLOCK], wanted[at : at + BLOCK]) for at in starts]
    elif name == "ds":
        # Slots of ids that are not here are a part of their own, which has to be zero.
        own = [case.indices == expert for expert in range(case.num_experts)]
        masks = [*own, ~np.logical_or.reduce(own)]
        pairs = [(got[mask], wanted[mask]) for mask in masks]
    else:
        pairs = list(zip(got, wanted, strict=True))
    whole = float(np.linalg.norm(wanted))
    errors = []
    for mine, its in pairs:
        norm = float(np.linalg.norm(its))
        if name == "ds" and norm:
            # One number per slot, and a small one is no smaller in error: an expert counts at least
            # as its share of all slots.
            norm = max(norm, whole * math.sqrt(its.size / max(wanted.size, 1)))
        off = float(np.linalg.norm(mine - its))
        errors.append(off / norm if norm else (math.inf if mine.any() else 0.0))
    return np.array(errors or [0.0])


def compare(subject: ExpertsUnderTest, case: StepDump, got: dict[str, Array]) -> str:
    """The worst error of these tensors in words. WrongResultError where a part is further off than
    the tolerance.
    """
    worst, golden = 0.0, golden_tensors(case)
    for name, array in got.items():
        wanted = golden[name]
        if array.shape != wanted.shape:
            raise WrongResultError(f"{name} has shape {array.shape}; needed: {wanted.shape}")
        if not np.isfinite(array).all():
            bad = int((~np.isfinite(array)).sum())
            raise WrongResultError(f"{name}: {bad} of {array.size} are not finite")
        errors = part_errors(name, array, wanted, case)
        if errors.max() > subject.bound:
            part = int(errors.argmax())
            said = "not zero" if math.isinf(errors[part]) else f"{errors[part]:.2g} off"
            raise WrongResultError(f"{name}, part {part}: {said}; at most {subject.bound:g}")
        worst = max(worst, float(errors.max()))
    return f"worst part {worst:.1e} of {subject.bound:g}"


def same_bits(got: dict[str, Array], wanted: dict[str, Array], what: str) -> str:
    """WrongResultError that names the first tensor that differs."""
    for name, array in wanted.items():
        if not np.array_equal(got[name], array, equal_nan=True):
            count = int((got[name] != array).sum())
            raise WrongResultError(f"{name}: {count} of {array.size} differ {what}")
    return "equal to the bit"


class HeldExperts(torch.nn.Module):
    """The callable as a module with parameters, as a trainer holds it."""

    def __init__(self, subject: ExpertsUnderTest, case: StepDump) -> None:
        super().__init__()
        self.experts = subject.experts
        self.w1, self.w2 = map(torch.nn.Parameter, weights_of(subject, case))

    def forward(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        return self.experts(x, ids, probs, self.w1, self.w2)


@contextmanager
def memory_full_of_nan(device: str, filled: bool = True) -> Iterator[None]:
    """PyTorch's deterministic mode, in which every fresh `torch.empty` is full of NaN, or of the
    largest integer. filled: without it the mode alone, to compare with. NotRunError where it is not.
    """
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = filled
    try:
        if filled and not bool(torch.isnan(torch.empty(7, device=device)).all()):
            raise NotRunError(f"fresh memory on {device} is not filled")
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]
