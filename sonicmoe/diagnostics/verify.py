"""Checks of any experts of PyTorch against fp64, which `sonicmoe verify` runs.

Experts are a callable `experts(x, ids, probs, w1, w2) -> out` with x and out `[T, H]`, ids and probs
`[T, K]`, and stacked weights in a layout of `ExpertLayout`. Each check draws operands, runs forward
and backward, and compares `out` and the gradients of x, probs, w1 and w2 with the definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from .experts_under_test import (
    BLOCK,
    TOKENS,
    ExpertsUnderTest,
    HeldExperts,
    NotRunError,
    WrongResultError,
    compare,
    memory_full_of_nan,
    run,
    same_bits,
    weights_of,
)
from .step_dump import StepDump

PASSED, FAILED, NOT_RUN = "pass", "FAIL", "not run"
Check = Callable[[ExpertsUnderTest], str]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check: `PASSED`, `FAILED` or `NOT_RUN`, and a line about it."""

    check: str
    state: str
    detail: str


def verify(name: str, subject: ExpertsUnderTest, check: Check | None = None) -> Finding:
    """Run one of `CHECKS`, or another under that name. If the callable raises, it has failed."""
    try:
        return Finding(name, PASSED, (check or CHECKS[name])(subject))
    except NotRunError as reason:
        return Finding(name, NOT_RUN, str(reason))
    except WrongResultError as wrong:
        return Finding(name, FAILED, str(wrong))
    # Foreign code may raise anything, and the other checks still say something. `sys.exit` in it
    # would end this process as if all had passed.
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        return Finding(name, FAILED, f"{type(error).__name__}: {text[:300]}")


def _against_golden(subject: ExpertsUnderTest, case: StepDump) -> str:
    return compare(subject, case, run(subject, case))


def _idle_expert(subject: ExpertsUnderTest) -> str:
    case, idle = subject.case(), subject.sizes.experts // 2
    pool = [expert for expert in range(case.num_experts) if expert != idle]
    tokens, slots = np.indices(case.indices.shape)
    return _against_golden(subject, case.but(indices=np.array(pool)[(tokens + slots) % len(pool)]))


def _one_expert(subject: ExpertsUnderTest) -> str:
    case = subject.case()
    indices = np.full((len(case.x), 1), subject.sizes.experts - 1)
    return _against_golden(subject, case.but(indices=indices, probs=case.probs[:, :1]))


def _no_tokens(subject: ExpertsUnderTest) -> str:
    case = subject.case()
    return _against_golden(subject, case.but(**{name: getattr(case, name)[:0] for name in TOKENS}))


def with_absent_ids(case: StepDump) -> StepDump:
    """A third of the slots names experts of other ranks: -1, E and beyond, in any place. Every
    seventh token has nobody here.
    """
    experts, drawn = case.num_experts, np.random.default_rng(1)
    spelt = drawn.choice([-1, experts, experts + 5], case.indices.shape)
    away = drawn.random(case.indices.shape) < 1 / 3
    away[::7] = True
    return case.but(indices=np.where(away, spelt, case.indices))


def _absent_ids(subject: ExpertsUnderTest) -> str:
    words = _against_golden(subject, with_absent_ids(subject.case()))
    with memory_full_of_nan(subject.device):  # what nobody writes for them shows
        _against_golden(subject, with_absent_ids(subject.case()))
    return words


def _poisoned_rows(subject: ExpertsUnderTest) -> str:
    case = with_absent_ids(subject.case())
    away = (case.indices < 0) | (case.indices >= case.num_experts)
    rows = away.all(1)
    changes = {name: getattr(case, name).copy() for name in ("x", "dout", "probs")}
    changes["x"][rows], changes["dout"][rows], changes["probs"][away] = np.nan, np.nan, np.nan
    found = run(subject, case.but(**changes))
    return same_bits(found, run(subject, case), "where nobody's tokens are NaN")


def _bad_token(subject: ExpertsUnderTest) -> str:
    case = subject.case()
    case = case.but(indices=case.indices[:, :1], probs=case.probs[:, :1])
    x = case.x.copy()
    x[0] = np.nan
    clean, spoilt = run(subject, case), run(subject, case.but(x=x))
    expert = int(case.indices[0, 0])
    for found in (clean, spoilt):
        for name, part in (("out", 0), ("dx", 0), ("ds", 0), ("dw1", expert), ("dw2", expert)):
            found[name][part] = 0.0
    return same_bits(spoilt, clean, "beyond the token's own row and expert")


def _poisoned_memory(subject: ExpertsUnderTest) -> str:
    with memory_full_of_nan(subject.device):
        return _idle_expert(subject)


def _repeated(subject: ExpertsUnderTest) -> str:
    case = subject.case()
    first = run(subject, case)
    for _ in range(3):
        same_bits(run(subject, case), first, "in another run")
    return "equal to the bit in four runs"


def _written_weights(subject: ExpertsUnderTest) -> str:
    case, other = subject.case(), subject.case(seed=1)
    weights, new = weights_of(subject, case), weights_of(subject, other)
    run(subject, case, weights)
    with torch.no_grad():
        for mine, its in zip(weights, new, strict=True):
            mine.copy_(its)
    changed = case.but(w1=other.w1, w2=other.w2)
    return compare(subject, changed, run(subject, changed, weights))


def _checkpoint(subject: ExpertsUnderTest) -> str:
    case = subject.case()
    trained, fresh = HeldExperts(subject, case), HeldExperts(subject, subject.case(seed=1))
    run(subject, case, (fresh.w1, fresh.w2))
    kept = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    fresh.load_state_dict(kept)
    wanted = run(subject, case, (trained.w1, trained.w2))
    return same_bits(run(subject, case, (fresh.w1, fresh.w2)), wanted, "after load_state_dict")


def _expert_parallel(subject: ExpertsUnderTest) -> str:
    """Two ranks one after the other: each has half of the experts, and takes the others' ids for
    absent ones. A rank's weights are a slice of their own storage.
    """
    case = subject.case()
    half = case.num_experts // 2
    parts = []
    for first, last in ((0, half), (half, case.num_experts)):
        local = np.where(case.indices < first, -1, case.indices - first)
        own = case.but(indices=local, w1=case.w1[first:last], w2=case.w2[first:last])
        parts.append(run(subject, own))
    total = {name: parts[0][name] + parts[1][name] for name in ("out", "dx", "ds")}
    joined = {name: np.concatenate([part[name] for part in parts]) for name in ("dw1", "dw2")}
    return compare(subject, case, total | joined)


def _sharded(subject: ExpertsUnderTest) -> str:
    """FSDP2 over a group of this process alone. In the second step the weights are others: gathered ones
    come back in the same tensors, and nothing that was made of the old ones may be used. The process
    has sharded a module then, so it keeps no codes of weights any more.
    """
    if dist.is_initialized():
        raise NotRunError("this process is in a group already")
    kind = subject.device.partition(":")[0]
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        case = subject.case()
        model = HeldExperts(subject, case)
        fully_shard(model, mesh=init_device_mesh(kind, (1,)))
        sharded = replace(subject, experts=lambda x, ids, probs, *_: model(x, ids, probs))
        for seed in (0, 1):
            other = subject.case(seed)
            held: Any  # `fully_shard` has made DTensors of the parameters
            with torch.no_grad():
                for held, whole in zip(model.parameters(), weights_of(subject, other), strict=True):
                    held.copy_(distribute_tensor(whole.detach(), held.device_mesh, held.placements))
            now = case.but(w1=other.w1, w2=other.w2)
            words = compare(subject, now, run(sharded, now, tuple(model.parameters())))
        return words
    finally:
        dist.destroy_process_group()


def _large(subject: ExpertsUnderTest) -> str:
    if not subject.device.startswith("cuda"):
        raise NotRunError("needs a GPU")
    # The last 128 tokens behind as many as take z past 2^31 numbers.
    sizes = replace(subject.sizes, tokens=BLOCK, intermediate=1024)
    case = replace(subject, sizes=sizes).case()
    case = case.but(indices=np.zeros((BLOCK, 1), np.int64), probs=case.probs[:, :1])
    times = 2**31 // (case.w1.shape[1] * BLOCK) + 2
    repeated = {name: np.tile(getattr(case, name), (times, 1)) for name in TOKENS}
    repeated["dout"][:-BLOCK] = 0.0  # so that weight gradients are those of the last tokens
    found = run(subject, case.but(**repeated))
    compare(subject, case, {"out": found["out"][:BLOCK]})
    last = {name: found[name][-BLOCK:] for name in ("out", "dx", "ds")}
    return compare(subject, case, last | {name: found[name] for name in ("dw1", "dw2")})


CHECKS: dict[str, Check] = {
    "values": lambda subject: _against_golden(subject, subject.case()),
    "an expert without tokens": _idle_expert,
    "all tokens on one expert": _one_expert,
    "no tokens": _no_tokens,
    "ids that are not here": _absent_ids,
    "NaN in rows of nobody": _poisoned_rows,
    "NaN in one token": _bad_token,
    "NaN in fresh memory": _poisoned_memory,
    "repeated bits": _repeated,
    "weights written in place": _written_weights,
    "checkpoint round trip": _checkpoint,
    "expert parallelism": _expert_parallel,
    "FSDP2": _sharded,
    "beyond 2^31 elements": _large,
}
