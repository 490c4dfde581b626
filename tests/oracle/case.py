"""A training step of one expert layer as a line of text: every axis that a face or an engine may read."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

FP8_RECIPES = ("dx256", "iso128", "1x128", "iso32", "dx256-pow2")
# By what a gate goes through.
GATED = {
    "swiglu": "silu",
    "geglu": "gelu",
    "reglu": "relu",
    "swiglu_oai": "clamped_silu",
    "swiglu_clamp": "bounded_silu",
    "situ_glu": "situ",
    "geglu_tanh": "gelu_tanh",
}
UNGATED = ("relu_sq", "relu", "gelu", "silu", "gelu_tanh")
# Numbers that a layer sets for itself, of a size that its tokens reach.
OWN = {
    "swiglu_oai": (("alpha", 1.25), ("limit", 5.0)),
    "swiglu_clamp": (("limit", 4.0),),
    "situ_glu": (("beta", 4.0), ("linear_beta", 2.5)),
}
# How many times as large an outlier is as the rest.
LOUD, LOUD_UNIT = 30.0, 100.0
# T, H, I, E, K
SIZES = (
    *((37, 80, 48, 4, 3), (37, 256, 64, 4, 2), (150, 128, 144, 3, 2), (9, 3, 5, 3, 2)),
    *((1, 32, 16, 1, 1), (33, 130, 129, 5, 4), (0, 32, 16, 3, 2), (20, 16, 8, 12, 8)),
)
# The first value is the one that `shrink` prefers.
AXES: dict[str, tuple[Any, ...]] = {
    "face": (
        "node", "stacked", "triples", "moe", "plain", "transformers", "fleet", "steps", "sorted",
        "rows",
    ),
    "law": (
        "repeat", "poison", "memory", "full", "permuted", "trains", "recompute", "face", "arrangement", "split", "scaled",
        "nonfinite",
    ),
    "recipe": ("none", *FP8_RECIPES),
    "activation": (*GATED, *UNGATED),
    "own": (False, True),
    "dtype": ("float32", "bfloat16", "float16"),
    "bias": (False, True),
    "adapters": ("none", "up", "down", "both"),
    "trains": ("all", "biases", "b1", "b2", "weights", "codes"),
    "arrangement": ("per_expert", "fused", "native", "concat", "halves", "turned", "numbered"),
    "gradients": ("autograd", "main_grad", "unset"),
    "places": ("contiguous", "padded", "turned"),
    "flush": ("auto", "step"),
    "first": ("add", "overwrite"),
    "arrivals": ("plain", "x", "dout", "both"),
    "schedule": ("one", "two", "crossed", "checkpoint", "graph"),
    "save_z": ("adaptive", "int8", "e4m3", "bf16"),
    "recompute_z": (False, True),
    "stagewise_memory": (False, True),
    "fp8_wgrad": (True, False),
    "iso_weight": (False, True),
    "copies": (False, True),
    "counts": ("none", "list", "tensor"),
    "index": ("int64", "int32"),
    "spelling": ("contiguous", "strided"),
    "routing": ("full", "sentinels", "one", "nobody", "zero"),
    "scene": (
        "usual", "x element", "x column", "dout element", "dout row", "dout column",
        "w1 unit", "w1 element", "w2 unit", "w2 column",
    ),
    "sizes": SIZES,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One step. Its line names the fields that are not at their defaults.

    arrangement: how weights lie; "concat" is native with rows in halves, "turned" the fused one with
    columns in turns, "numbered" matrices of two modules as Megatron-Core has them. recipe: "none",
    or of FP8. own: the layer has activation parameters of its own. adapters: projections that have a
    low-rank pair. trains: which of weights and biases; biases beside weights that are frozen as "codes".
    gradients: where those of weights go: `.grad`, a `main_grad` that holds something, or one that is
    None. copies: FP8 copies are read in the place of weights that hold no memory. places: how elements
    of such a `main_grad` lie (`held.spelled`). arrivals: what its sender has quantised.
    spelling: how x, the probabilities, the ids and the gradient of the output lie in memory. scene:
    which part of an operand is `LOUD` times as large. schedule: one micro-batch, two, two whose
    backwards come in the other order, one whose forward runs again (for an odd seed in the re-entrant
    way), or one in a compiled graph. law: what is compared besides the bars.
    """

    face: str = "node"
    law: str = "repeat"
    recipe: str = "none"
    activation: str = "swiglu"
    own: bool = False
    dtype: str = "float32"
    bias: bool = False
    adapters: str = "none"
    trains: str = "all"
    arrangement: str = "per_expert"
    gradients: str = "autograd"
    places: str = "contiguous"
    flush: str = "auto"
    first: str = "add"
    arrivals: str = "plain"
    schedule: str = "one"
    save_z: str = "adaptive"
    recompute_z: bool = False
    stagewise_memory: bool = False
    fp8_wgrad: bool = True
    iso_weight: bool = False
    copies: bool = False
    counts: str = "none"
    index: str = "int64"
    spelling: str = "contiguous"
    routing: str = "full"
    scene: str = "usual"
    sizes: tuple[int, int, int, int, int] = SIZES[0]
    seed: int = 0

    # A line is split at blanks, of which the name of a scene has one.
    def __str__(self) -> str:
        given = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return " ".join(f"{f.name}={_text(getattr(self, f.name))}" for f in given) or "defaults"

    @classmethod
    def parse(cls, line: str) -> Case:
        """The case of a line; ValueError where it is none."""
        defaults = {known.name: known.default for known in fields(cls)}
        given: dict[str, Any] = {}
        for word in line.split():
            name, _, text = word.partition("=")
            if word == "defaults":
                continue
            if name not in defaults:
                raise ValueError(f"{name!r} is no axis; needed: one of {', '.join(defaults)}")
            given[name] = _value(text, defaults[name])
        return cls(**given)

    @property
    def fp8(self) -> bool:
        return self.recipe != "none"

    @property
    def frozen(self) -> bool:
        """Whether the weights are frozen."""
        return self.trains in ("biases", "b1", "b2", "codes")

    @property
    def gated(self) -> bool:
        return self.activation in GATED


def _text(value: Any) -> str:
    text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text.replace(" ", "-")


def _value(text: str, like: Any) -> Any:
    if isinstance(like, tuple):
        return tuple(map(int, text.split("x")))
    if isinstance(like, bool):
        return {"True": True, "False": False}[text]
    return type(like)(text).replace("-", " ") if like == "usual" else type(like)(text)


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The smallest case that still fails, as far as one change after the other leads there."""
    changed = True
    while changed:
        changed = False
        for simpler in _simpler(case):
            if fails(simpler):
                case, changed = simpler, True
                break
    return case


def _simpler(case: Case) -> Iterator[Case]:
    for name, values in AXES.items():
        if name != "sizes" and getattr(case, name) != values[0]:
            yield replace(case, **{name: values[0]})
    for place, size in enumerate(case.sizes):
        least = case.sizes[4] if place == 3 else 1
        for smaller in dict.fromkeys((least, size // 2, size - 1)):
            if least <= smaller < size:
                sizes = (*case.sizes[:place], smaller, *case.sizes[place + 1 :])
                yield replace(case, sizes=sizes)


Normal = Callable[[Case], Case]
Value = tuple[str, Any]  # of an axis
# A case that takes longer is chosen where it has so many missing pairs more than another one. A graph has
# to be compiled, some laws make many runs, and these schedules have two calls.
COSTS: dict[Value, int] = {
    ("schedule", "graph"): 9, ("schedule", "two"): 2, ("schedule", "crossed"): 2, ("schedule", "checkpoint"): 2,
    ("law", "full"): 3, ("law", "face"): 3, ("law", "nonfinite"): 3, ("law", "arrangement"): 1,
}  # fmt: skip


def drawn(count: int, seed: int, normal: Normal) -> Iterator[Case]:
    """Cases of random values; `normal` puts what a face does not have to what it has."""
    rng = random.Random(seed)
    for _ in range(count):
        yield normal(_random(rng))


def _random(rng: random.Random, **given: Any) -> Case:
    values = {name: rng.choice(known) for name, known in AXES.items()}
    return Case(**values | given, seed=rng.randrange(1000))


def covering(normal: Normal, seed: int = 0, apart: Iterable[tuple[str, str]] = ()) -> list[Case]:
    """Cases in which every pair of values of two axes occurs that occurs in a few thousand draws; apart:
    axes whose values need not meet.
    """
    rng = random.Random(seed)
    missing, drawn_with = _Missing(), dict[tuple[int, int], Case]()
    for case in drawn(3000, seed, normal):
        drawn_with |= dict.fromkeys(missing.add(case), case)
    for one, other in apart:
        missing.leave_out(one, other)
    chosen = []
    # Rare pairs, which were drawn last, go first, because common ones come beside them.
    for pair in reversed(drawn_with):
        if missing.has(*pair):
            chosen.append(missing.most_beside(sum(pair), drawn_with[pair], normal, rng))
            missing.remove(chosen[-1])
    return chosen


class _Missing:
    """The pairs that no case has yet. Each value of an axis is a bit, because one operation then asks for
    all pairs of a value in a case.

    bits: of each value. beside: the values, as a sum of bits, that no case has beside that of a bit.
    """

    def __init__(self) -> None:
        self.bits: dict[Value, int] = {}
        self.beside = defaultdict[int, int](int)

    def bits_of(self, case: Case) -> list[int]:
        values = (_value_of(name, getattr(case, name)) for name in AXES)
        return [self.bits.setdefault(value, 1 << len(self.bits)) for value in values]

    def add(self, case: Case) -> Iterator[tuple[int, int]]:
        """The pairs that are new."""
        bits = self.bits_of(case)
        whole = sum(bits)
        for bit in bits:
            new = whole & ~self.beside[bit] & ~bit
            self.beside[bit] |= new
            yield from ((bit, other) for other in bits if other < bit and other & new)

    def leave_out(self, *axes: str) -> None:
        """All pairs of two axes."""
        one, other = (
            [bit for (name, _), bit in self.bits.items() if name == axis] for axis in axes
        )
        for bits, others in ((one, other), (other, one)):
            for bit in bits:
                self.beside[bit] &= ~sum(others)

    def has(self, one: int, other: int) -> bool:
        return bool(self.beside[one] & other)

    def remove(self, case: Case) -> None:
        bits = self.bits_of(case)
        others = ~sum(bits)
        for bit in bits:
            self.beside[bit] &= others

    def worth(self, case: Case) -> int:
        """How many missing pairs a case has, less its costs."""
        bits = self.bits_of(case)
        whole = sum(bits)
        count = sum((self.beside[bit] & whole).bit_count() for bit in bits) // 2
        costs = (cost for (name, value), cost in COSTS.items() if getattr(case, name) == value)
        return count - sum(costs)

    def most_beside(self, pair: int, case: Case, normal: Normal, rng: random.Random) -> Case:
        """A case with this pair and many others. From one that has the pair, each other axis in turn goes
        to the value that is missing beside most of the case's, where that gains pairs.
        """
        worth, whole = self.worth(case), sum(self.bits_of(case))
        for name in rng.sample(list(AXES), len(AXES)) * 2:

            def gain(value: Any, name: str = name, whole: int = whole) -> int:
                bit = self.bits.get(_value_of(name, value), 0)
                return (self.beside[bit] & whole).bit_count() - COSTS.get((name, value), 0)

            value = max(rng.sample(AXES[name], len(AXES[name])), key=gain)
            if value == getattr(case, name):
                continue
            changed = normal(replace(case, **{name: value}))
            bits, gained = sum(self.bits_of(changed)), self.worth(changed)
            if bits & pair == pair and gained > worth:
                case, worth, whole = changed, gained, bits
        return case


def _value_of(name: str, value: Any) -> Value:
    """K is left out, because faces that have one slot a token have no other K."""
    return name, value[:4] if name == "sizes" else value


def lines(text: str) -> Iterable[str]:
    """The cases of a corpus; what follows a # is a remark."""
    cut = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in cut if line]
