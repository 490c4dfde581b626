"""What holds for every case: results lie within the bars of the golden, and the law that the case names.

A law runs the step again in a way that may not change a bit, and says which results differ; or it says
itself, in words, what is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from framework import IS_PADDLE
from oracle.case import AXES, Case
from oracle.faces import FACES, HELD, LAYERS, Trial, device_of, normal, run
from oracle.golden import ROUTERS, Scene, golden, scene_of

Found = dict[str, np.ndarray]

PLAIN = {"float32": 1e-5, "bfloat16": 1.2e-2, "float16": 2e-3}
# Relative RMSE of E4M3 with many slots, and what a single one adds. Where the slope jumps, the rounding
# of x and w1 flips whole entries of dz.
E4M3, ACROSS_A_JUMP = (0.075, 0.3), (0.3, 2.0)
NARROW = 0.2  # a sum of one product has the error of one
FLIPS, A_FLIP = 0.15, 2.5  # the same of 16-bit values, and what one of them adds among few
A_ROUNDING = 5e-3
TRIALS = 3  # in which each call fails once
JUMPS = ("relu", "reglu", "swiglu_oai", "swiglu_clamp")


def bar(case: Case, scene: Scene, name: str) -> float:
    """How far a result may be from the golden."""
    loud = case.scene != "usual"
    if not case.fp8 and case.arrivals == "plain":
        flips = case.dtype != "float32" and case.activation in JUMPS
        among = max(int(scene.valid.sum()) * scene.down.shape[1], 1) ** 0.5
        # A loud row of w1 multiplies what is rounded in the few slopes that it has.
        worse = 4.0 if case.scene == "w1 unit" else 1.0 + loud
        return FLIPS + A_FLIP / among if flips else PLAIN[case.dtype] * worse
    # An output that an outlier decides has the errors of few numbers, and bounds both halves of SiTU-GLU.
    jumps = case.activation in (*JUMPS, "situ_glu") if loud else case.activation in JUMPS
    base, of_one = ACROSS_A_JUMP if jumps else E4M3
    if case.scene == "w1 unit" and name in ("dx", "db1"):
        # Its loud row of w1 multiplies the few slopes that the rounding of a large z has moved, and
        # sums of dz have few others.
        return 10.0 if name == "dx" else 1.0
    few = of_one / max(int(scene.valid.sum()), 1) ** 0.5
    narrow = NARROW / min(scene.down.shape[1:]) ** 0.5
    return (2.2 if loud else 1.0) * (base + few + narrow)


def beyond_the_bars(case: Case, scene: Scene, found: Found) -> list[str]:
    """What is off, in words."""
    exact, wrong = golden(scene), []
    for name, got in found.items():
        wanted, limit = exact[name], bar(case, scene, name)
        held = HELD if name in ("dw1", "dw2") and _keeps_what_was_there(case) else 0.0
        if got.shape != wanted.shape:
            wrong.append(f"{name} has shape {got.shape}; needed: {wanted.shape}")
            continue
        size = np.linalg.norm(wanted)
        size = max(size, exact["of dprobs"] ** 0.5) if name == "dprobs" else size
        # fp32 sums on top of what was there.
        noise = 2e-7 * held * wanted.size**0.5
        error = np.linalg.norm(got - held - wanted)
        if not error <= limit * size + noise:  # NaN is beyond every bar
            wrong.append(f"{name} is off by {error / (size or 1.0):.3g}; at most {limit:.3g}")
        if not np.array_equal(got[untouched := _untouched(name, scene)], 0 * got[untouched] + held):
            wrong.append(f"{name} has values where nothing was routed")
    return wrong


def _keeps_what_was_there(case: Case) -> bool:
    return case.gradients == "main_grad" and case.first == "add"


def _untouched(name: str, scene: Scene) -> np.ndarray:
    """Rows of a result that no valid slot reaches: of tokens, slots or experts."""
    if name in ("out", "dx"):
        return ~scene.valid.any(-1)
    if name == "dprobs":
        return ~scene.valid
    busy = np.isin(np.arange(scene.num_experts), scene.indices)
    return ~busy if name != "drouter" else np.zeros_like(busy)


def repeat(case: Case, scene: Scene, engine: str) -> Iterator[Found]:
    yield run(case, scene, engine)


def poison(case: Case, scene: Scene, engine: str) -> Iterator[Found]:
    """Nobody reads a token, a gradient or a probability that no valid slot names."""
    lonely = ~scene.valid.any(-1)
    for bad in (np.nan, np.inf):
        x, dout = scene.x.copy(), scene.dout.copy()
        x[lonely], dout[lonely] = bad, bad
        probs = np.where(scene.valid, scene.probs, bad)
        yield run(case, replace(scene, x=x, dout=dout, probs=probs), engine)


def memory(case: Case, scene: Scene, engine: str) -> Iterator[Found]:
    """Nobody reads what nobody wrote: fresh memory is full of NaN. PyTorch has a switch for that."""
    if not IS_PADDLE:
        from sonicmoe.diagnostics.experts_under_test import memory_full_of_nan

        with memory_full_of_nan(device_of(engine)):
            yield run(case, scene, engine)


def full(case: Case, scene: Scene, engine: str) -> Iterator[Found | str]:
    """Calls that found no memory have changed nothing, and may be made again."""
    counted, draw = Trial(), random.Random(case.seed)
    yield run(case, scene, engine, counted)
    for part in range(TRIALS):  # early, in the middle, and late in each call
        place = (part + draw.random()) / TRIALS
        trial = Trial([int(place * made) if made else None for made in counted.seen])
        yield run(case, scene, engine, trial)
        # Biases and adapters are arranged, and Paddle copies tokens, before a call knows what would need
        # less.
        for error in () if IS_PADDLE or case.bias or scene.pairs else trial.errors:
            if "out of memory in the " not in error or "To need less: fewer tokens" not in error:
                yield f"an allocation fails with {error!r}"


def permuted(case: Case, scene: Scene, engine: str) -> Iterator[Found]:
    """Experts are numbered in another way."""
    order = np.random.default_rng(case.seed).permutation(scene.num_experts)
    found = run(case, scene.permuted(order), engine)
    back = np.argsort(order)
    yield {
        name: got if name in ("out", "dx", "dprobs") else got[back] for name, got in found.items()
    }


def trains(case: Case, scene: Scene, engine: str) -> Iterator[Found]:
    """Whatever else trains too."""
    yield run(replace(case, trains="all"), scene, engine)


def recompute(case: Case, scene: Scene, engine: str) -> Iterator[Found]:
    """z is computed again in the backward, or is kept; or is freed in the middle of it, or is not. And
    weight gradients of one backward wait for the end of the step, or do not.
    """
    for mode in ("recompute_z", "stagewise_memory"):
        yield from _as(replace(case, **{mode: not getattr(case, mode)}), case, scene, engine)
    if case.schedule not in ("two", "crossed"):
        flush = "step" if case.flush == "auto" else "auto"
        yield from _as(replace(case, flush=flush), case, scene, engine)


def split(case: Case, scene: Scene, engine: str) -> Iterator[Found]:
    """The backwards of micro-batches come in the other order, the forward runs once more, or nothing is
    compiled.
    """
    other = SPLIT_AS[case.schedule]
    for found in _as(replace(case, schedule=other), case, scene, engine):
        # Weight gradients of two micro-batches are sums in the order of the backwards.
        same = ["out", "dx", "dprobs"] if other in ("two", "crossed") else [*found]
        yield {name: found[name] for name in same if name in found}


SPLIT_AS = {
    "checkpoint": "one",
    "graph": "one",
    "one": "checkpoint",
    "two": "crossed",
    "crossed": "two",
}


def scaled(case: Case, scene: Scene, engine: str) -> Iterator[Found]:
    """The gradient of the output is a power of two times as large, and so is every other."""
    for factor in (2.0**12, 2.0**-12):
        found = run(case, replace(scene, dout=factor * scene.dout), engine)
        held = HELD if _keeps_what_was_there(case) else 0.0
        weights = ("dw1", "dw2") if held else ()  # a sum with what was there is rounded otherwise
        yield {name: got if name == "out" else got / factor
               for name, got in found.items() if name not in weights}  # fmt: skip


def arrangement(case: Case, scene: Scene, engine: str) -> Iterator[Found]:
    """The same weights lie in another order, or their copies do alone."""
    yield from _as(replace(case, copies=not case.copies), case, scene, engine)
    for other in LAYERS[case.face].takes.get("arrangement", AXES["arrangement"]):
        yield from _as(replace(case, arrangement=other), case, scene, engine)


def face(case: Case, scene: Scene, engine: str) -> Iterator[Found]:
    """Another face is given the same step."""
    for other in FACES:
        if other != case.face and not {other, case.face} & {*ROUTERS}:
            yield from _as(replace(case, face=other), case, scene, engine, but="arrangement counts")


def _as(other: Case, case: Case, scene: Scene, engine: str, but: str = "") -> Iterator[Found]:
    """A run of another case that has the same operands, where its face can express it; what `but`
    names may differ."""
    fitted = normal(other, engine)
    differing = [name for name in AXES if getattr(fitted, name) != getattr(other, name)]
    if fitted != case and set(differing) <= set(but.split()):
        yield run(fitted, scene, engine)


def nonfinite(case: Case, scene: Scene, engine: str) -> Iterator[str]:
    """A NaN of one token, or of its gradient, stays in its token and in its experts' gradients."""
    served = np.flatnonzero(scene.valid.any(-1))
    # Blocks of several tokens share a scale, and a product with a probability of 0 may be left out.
    if not len(served) or case.recipe.startswith("iso") or case.routing == "zero":
        return
    token = served[case.seed % len(served)]
    others = np.arange(len(scene.x)) != token
    idle = ~np.isin(np.arange(scene.num_experts), scene.indices[token])
    # Engine `hopper` makes weight gradients of whole blocks, and dx of those.
    names = ("out",) if engine.startswith("hopper") else ("out", "dx", "dprobs")
    for operand in ("x", "dout"):
        quiet, bad = (getattr(scene, operand).copy() for _ in range(2))
        quiet[token], bad[token, case.seed % bad.shape[1]] = 0.0, np.nan
        clean, spoilt = (run(case, replace(scene, **{operand: a}), engine) for a in (quiet, bad))
        for name, got in spoilt.items():
            kept = others if name in names else idle if name in ("dw1", "dw2") else slice(0)
            if not np.array_equal(got[kept], clean[name][kept]):
                yield f"a NaN in {operand} of token {token} changes {name} of others"
            hurt = ~idle if name in ("dw1", "dw2") else token
            if (
                name in ("dx", "dw1", "out")[: 3 if operand == "x" else 2]
                and np.isfinite(got[hurt]).all()
            ):
                yield f"a NaN in {operand} of token {token} is lost in {name}"


LAWS: dict[str, Callable[[Case, Scene, str], Iterator[Found | str]]] = {
    law.__name__: law
    for law in (
        repeat,
        poison,
        memory,
        full,
        permuted,
        trains,
        recompute,
        split,
        scaled,
        arrangement,
        face,
        nonfinite,
    )
}


def broken(
    case: Case,
    engine: str = "reference",
    found: Found | None = None,
    scene: Scene | None = None,
) -> list[str]:
    """The faults of a case, in words; none where it is sound. found: the results of a run, where a caller
    has them. scene: its operands, where a caller has them.
    """
    scene = scene or scene_of(case)
    found = found or run(case, scene, engine)
    wrong = beyond_the_bars(case, scene, found)
    for again in LAWS[case.law](case, scene, engine):
        if isinstance(again, str):
            wrong.append(again)
            continue
        for name in sorted({*found} & {*again}):
            one, other = found[name], again[name]
            if _adds_as_weights_lie(case, engine, name):
                same = np.linalg.norm(one - other) <= A_ROUNDING * np.linalg.norm(one)
            else:
                same = np.array_equal(one, other, equal_nan=True)
            wrong += [] if same else [f"{name} has other bits under law {case.law!r}"]
    return wrong


def _adds_as_weights_lie(case: Case, engine: str, name: str) -> bool:
    """Engine `bf16` reads weights where they lie, so its dx adds gate and up in the order of w1's rows."""
    moved = case.law in ("face", "arrangement")
    return moved and engine.startswith("bf16") and name in ("dx", "up.a")
