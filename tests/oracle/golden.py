"""The expert MLP and its gradients in fp64, expert by expert, in the plainest way, and the operands of a
case. Nothing here is shared with the package, not even the names of its activations.

User layouts throughout: `up_gate [E, H, N1]` split-half with gate first (N1 = 2I) or ungated (N1 =
I), `down [E, I, H]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from oracle.case import GATED, LOUD, LOUD_UNIT, OWN, Case

CLAMPED = 7.0  # where GPT-OSS's gate stops growing
# Of the standard deviation of z: clamps are reached, by one element of z in 12 (`swiglu_oai`).
GAINS = {"swiglu_oai": 4.0, "swiglu_clamp": 5.0, "situ_glu": 2.0}
ADAPTER_SCALE, RANK = 0.7, 5
WHOLE = "whole numbers"  # a scene that no covering set has
ROUTERS = ("moe", "plain")  # faces that route by themselves
erf = np.vectorize(math.erf, otypes=[np.float64])


def base_of(activation):
    """Name of the function applied to the gate, or to everything when there is no gate."""
    return GATED.get(activation, activation)


def up_factor(activation, up, own=()):
    """What an up half multiplies by, and its derivative; `own`: the layer's parameters."""
    if activation == "swiglu_oai":
        limit = dict(own).get("limit", CLAMPED)
        return np.clip(up, -limit, limit) + 1.0, (np.abs(up) <= limit).astype(np.float64)
    if activation == "swiglu_clamp":
        limit = dict(own).get("limit", 10.0)
        return np.clip(up, -limit, limit), (np.abs(up) <= limit).astype(np.float64)
    cap = dict(own).get("linear_beta") if activation == "situ_glu" else None
    if cap is not None:
        return cap * np.tanh(up / cap), np.cosh(up / cap) ** -2.0
    return up, np.ones_like(up)


def value(name, v, own=()):
    """act(v) of fp64 numbers; `own`: the layer's parameters."""
    if name == "clamped_silu":
        alpha, limit = dict(own).get("alpha", 1.702), dict(own).get("limit", CLAMPED)
        return value("silu", alpha * np.minimum(v, limit)) / alpha
    if name == "bounded_silu":
        return value("silu", np.minimum(v, dict(own).get("limit", 10.0)))
    if name == "situ":
        beta = dict(own).get("beta", 1.0)
        return beta * np.tanh(v / beta) / (1.0 + np.exp(-v))
    if name == "silu":
        return v / (1.0 + np.exp(-v))
    if name == "gelu":
        return 0.5 * v * (1.0 + erf(v / math.sqrt(2.0)))
    power = {"relu": 1, "relu_sq": 2}
    return tanh_gelu(v)[0] if name == "gelu_tanh" else np.maximum(v, 0.0) ** power[name]


def slope(name, v, own=()):
    """act'(v) of fp64 numbers; `own`: the layer's parameters."""
    if name == "clamped_silu":
        alpha, limit = dict(own).get("alpha", 1.702), dict(own).get("limit", CLAMPED)
        return np.where(v <= limit, slope("silu", alpha * v), 0.0)
    if name == "bounded_silu":
        return np.where(v <= dict(own).get("limit", 10.0), slope("silu", v), 0.0)
    if name == "situ":
        beta, sigma = dict(own).get("beta", 1.0), 1.0 / (1.0 + np.exp(-v))
        return sigma / np.cosh(v / beta) ** 2 + value(name, v, own) * (1.0 - sigma)
    if name == "silu":
        sigma = 1.0 / (1.0 + np.exp(-v))
        return sigma + v * sigma * (1.0 - sigma)
    if name == "gelu":
        density = np.exp(-0.5 * v * v) / math.sqrt(2.0 * math.pi)
        return 0.5 * (1.0 + erf(v / math.sqrt(2.0))) + v * density
    relu = {"relu": (v > 0.0) * 1.0, "relu_sq": 2.0 * np.maximum(v, 0.0)}
    return tanh_gelu(v)[1] if name == "gelu_tanh" else relu[name]


def tanh_gelu(v):
    """Value and slope of GELU in its tanh form."""
    u = math.sqrt(2.0 / math.pi) * (v + 0.044715 * v**3)
    inner = math.sqrt(2.0 / math.pi) * (1.0 + 3.0 * 0.044715 * v * v)
    flat = 0.5 * (1.0 + np.tanh(u))
    return v * flat, flat + 0.5 * v * inner / np.cosh(np.minimum(np.abs(u), 300.0)) ** 2


@dataclass(frozen=True)
class Scene:
    """fp64 arrays whose values are exact in the dtypes that a face will see.

    pairs: factors `a [E, R, in]`, `b [E, out, R]` of adapters by projection. router: `[E, H]` where
    the layer routes by itself; then `indices` and `probs` follow from it.
    """

    activation: str
    x: np.ndarray
    indices: np.ndarray
    probs: np.ndarray
    dout: np.ndarray
    up_gate: np.ndarray
    down: np.ndarray
    b1: np.ndarray | None = None
    b2: np.ndarray | None = None
    own: tuple = ()
    pairs: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    router: np.ndarray | None = None

    @property
    def num_experts(self):
        return self.up_gate.shape[0]

    @property
    def valid(self):
        return (self.indices >= 0) & (self.indices < self.num_experts)

    def tokens(self, which):
        """The same layer on some of its tokens."""
        rows = {name: getattr(self, name)[which] for name in ("x", "indices", "probs", "dout")}
        return replace(self, **rows)

    def permuted(self, order):
        """The same with expert `order[e]` in the place of e."""
        place = np.argsort(order)
        indices = np.where(
            self.valid, place[np.clip(self.indices, 0, len(order) - 1)], self.indices
        )
        moved = {name: None if (held := getattr(self, name)) is None else held[order]
                 for name in ("up_gate", "down", "b1", "b2", "router")}  # fmt: skip
        pairs = {name: (a[order], b[order]) for name, (a, b) in self.pairs.items()}
        return replace(self, indices=indices, pairs=pairs, **moved)


def golden(scene):
    """Output and gradients by name; those of factors are "up.a", "up.b" and so on. "of dprobs": the
    size of a probability's gradient, which is a product of two vectors and may be 0 by chance.
    """
    with np.errstate(over="ignore"):  # of an exponential whose inverse is then 0
        return _golden(scene)


def _golden(scene):
    s, gated, inner = scene, scene.activation in GATED, scene.down.shape[1]
    base = base_of(s.activation)
    up_gate, down = (_merged(s, name) for name in ("up", "down"))
    found = {"out": np.zeros_like(s.x), "dx": np.zeros_like(s.x), "dprobs": np.zeros_like(s.probs)}
    found |= {"dw1": np.zeros_like(up_gate), "dw2": np.zeros_like(down), "of dprobs": 0.0}
    if s.b1 is not None:
        found |= {"db1": np.zeros_like(s.b1), "db2": np.zeros_like(s.b2)}
    for e in range(s.num_experts):
        t, k = np.nonzero(s.indices == e)
        z = s.x[t] @ up_gate[e] + (0.0 if s.b1 is None else s.b1[e])
        gate, up = (z[:, :inner], z[:, inner:]) if gated else (z, np.ones_like(z))
        act, d_act = value(base, gate, s.own), slope(base, gate, s.own)
        factor, d_factor = up_factor(s.activation, up, s.own)
        y1 = act * factor
        y2 = y1 @ down[e] + (0.0 if s.b2 is None else s.b2[e])
        p = s.probs[t, k][:, None]
        np.add.at(found["out"], t, p * y2)
        found["dprobs"][t, k] = (s.dout[t] * y2).sum(-1)
        lengths = np.linalg.norm(s.dout[t], axis=-1) * np.linalg.norm(y2, axis=-1)
        found["of dprobs"] += (lengths**2).sum() / s.x.shape[1]
        dy2 = p * s.dout[t]
        dy1 = dy2 @ down[e].T
        dz = dy1 * factor * d_act
        dz = np.concatenate([dz, dy1 * act * d_factor], -1) if gated else dz
        found["dw1"][e], found["dw2"][e] = s.x[t].T @ dz, y1.T @ dy2
        np.add.at(found["dx"], t, dz @ up_gate[e].T)
        if s.b1 is not None:
            found["db1"][e], found["db2"][e] = dz.sum(0), dy2.sum(0)
    found |= _of_factors(s, found)
    return found if s.router is None else found | _of_router(s, found)


def _merged(scene, name):
    weight = scene.up_gate if name == "up" else scene.down
    if name not in scene.pairs:
        return weight
    a, b = scene.pairs[name]
    return weight + ADAPTER_SCALE * np.einsum("eri,enr->ein", a, b)


def _of_factors(scene, found):
    """By the product rule from the gradients of the merged weights."""
    gradients = {}
    for name, (a, b) in scene.pairs.items():
        merged = found["dw1" if name == "up" else "dw2"]
        gradients[f"{name}.a"] = ADAPTER_SCALE * np.einsum("enr,ein->eri", b, merged)
        gradients[f"{name}.b"] = ADAPTER_SCALE * np.einsum("ein,eri->enr", merged, a)
    return gradients


def _softmax(values):
    shifted = np.exp(values - values.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def _of_router(scene, found):
    """Probabilities are the softmax of the chosen logits, so dx has a second part."""
    p, d = scene.probs, found["dprobs"]
    dlogits = np.zeros((len(scene.x), scene.num_experts))
    np.put_along_axis(dlogits, scene.indices, p * (d - (p * d).sum(-1, keepdims=True)), -1)
    return {"dx": found["dx"] + dlogits @ scene.router, "drouter": dlogits.T @ scene.x}


def rounded(array, dtype):
    """fp64 values after rounding to a dtype, to the nearest, ties to even."""
    if dtype != "bfloat16":
        return np.asarray(array, dtype).astype(np.float64)
    bits = np.asarray(array, np.float32).view(np.uint32)
    kept = bits + 0x7FFF + ((bits >> 16) & 1) & np.uint32(0xFFFF0000)
    return kept.astype(np.uint32).view(np.float32).astype(np.float64)


def scene_of(case: Case) -> Scene:
    """The operands of a case, the same everywhere."""
    tokens, hidden, inner, experts, topk = case.sizes
    rng = np.random.default_rng(case.seed)
    width = inner * (2 if case.gated else 1)
    gain = GAINS.get(case.activation, 1.0)

    def normal(*shape, scale=1.0, dtype=case.dtype):
        return rounded(rng.standard_normal(shape) * scale, dtype)

    # `RandomState` is frozen; the streams of numpy's newer generators may change.
    indices = _indices(np.random.RandomState(7) if case.scene == WHOLE else rng, case)
    scene = Scene(
        case.activation,
        x=normal(tokens, hidden),
        indices=indices,
        probs=rounded(rng.uniform(0.05, 1.0, (tokens, topk)), "float32"),
        dout=normal(tokens, hidden),
        up_gate=normal(experts, hidden, width, scale=gain * hidden**-0.5),
        down=normal(experts, inner, hidden, scale=inner**-0.5),
        own=OWN[case.activation] if case.own else (),
    )
    scene = _of_whole_numbers(scene) if case.scene == WHOLE else _with_an_outlier(scene, case, rng)
    if case.trains == "codes":
        up_gate, down = map(_in_codes, (scene.up_gate, scene.down))
        scene = replace(scene, up_gate=up_gate, down=down)
    if case.routing == "zero":
        scene = replace(scene, probs=np.zeros_like(scene.probs))
    if case.bias:
        biases = [normal(experts, size, scale=0.3) for size in (width, hidden)]
        biases = [np.rint(4 * bias) for bias in biases] if case.scene == WHOLE else biases
        scene = replace(scene, **dict(zip(("b1", "b2"), biases, strict=True)))
    for name, ins, outs in (("up", hidden, width), ("down", inner, hidden)):
        if case.adapters in (name, "both"):
            a = normal(experts, RANK, ins, scale=ins**-0.5)
            scene.pairs[name] = a, normal(experts, outs, RANK, scale=0.5)
    return _routed_by_itself(scene, rng, topk) if case.face in ROUTERS else scene


# Where the outlier of a scene lies: the array, and the axes that it extends along.
LOUD_PARTS = {
    "x element": ("x", ()), "x column": ("x", (0,)),
    "dout element": ("dout", ()), "dout row": ("dout", (1,)), "dout column": ("dout", (0,)),
    # One pre-activation of one expert, for every token; one of y1; one output.
    "w1 unit": ("up_gate", (1,)), "w1 element": ("up_gate", ()),
    "w2 unit": ("down", (2,)), "w2 column": ("down", (1,)),
}  # fmt: skip


def _with_an_outlier(scene, case, rng):
    if case.scene == "usual":
        return scene
    name, along = LOUD_PARTS[case.scene]
    array = getattr(scene, name).copy()
    if array.size:
        place = (slice(None) if a in along else rng.integers(n) for a, n in enumerate(array.shape))
        array[tuple(place)] *= LOUD_UNIT if case.scene == "w1 unit" else LOUD
    return replace(scene, **{name: rounded(array, case.dtype)})


def _in_codes(weight):
    """Rounded to what E4M3 holds exactly under a power of two, of an expert or of a part of it: four
    significant bits, and no bit below the smallest code.
    """
    largest = np.abs(weight).max(axis=(1, 2), keepdims=True)
    smallest = 2.0 ** (np.ceil(np.log2(largest / 448.0)) - 9)
    exponents = np.frexp(weight)[1]
    unit = np.maximum(np.ldexp(1.0, exponents - 4), smallest)
    return np.rint(weight / unit) * unit


def _of_whole_numbers(scene):
    """Small integers, few in a weight's column, and powers of two: every sum of a layer without an
    exponential is exact in fp32, whatever the order of its terms.
    """
    rng = np.random.RandomState(11)

    def integers(like, most=2, share=1.0):
        kept = rng.uniform(size=like.shape) < share
        return (rng.randint(-most, most + 1, size=like.shape) * kept).astype(np.float64)

    hidden, inner = scene.x.shape[1], scene.down.shape[1]
    return replace(
        scene,
        x=integers(scene.x),
        dout=integers(scene.dout, most=1, share=0.5),
        up_gate=integers(scene.up_gate, share=8 / hidden),
        down=integers(scene.down, most=1, share=8 / inner),
        probs=2.0 ** -rng.randint(0, 3, size=scene.probs.shape),
    )


def _indices(rng, case):
    """Distinct experts in a row; sentinels in any position, and an expert that nobody chooses."""
    tokens, _, _, experts, topk = case.sizes
    pool = np.arange(experts)
    if case.routing == "sentinels":
        busy = pool[pool != 2] if experts > 2 else pool
        pool = np.concatenate([busy, [-1, experts, -1, experts + 5]])
    rows = np.array([rng.permutation(pool)[:topk] for _ in range(tokens)], np.int64)
    indices = rows.reshape(tokens, topk)
    if case.routing in ("one", "nobody"):
        indices = np.full_like(indices, -1)
        indices[:, 0] = experts - 1 if case.routing == "one" else -1
    return indices


def _routed_by_itself(scene, rng, topk):
    router = rounded(rng.standard_normal(scene.up_gate.shape[:2]) * 0.3, "float32")
    logits = scene.x @ router.T
    indices = np.argsort(-logits, axis=-1, kind="stable")[:, :topk]
    probs = _softmax(np.take_along_axis(logits, indices, -1)) if len(logits) else scene.probs
    return replace(scene, router=router, indices=indices, probs=probs)
