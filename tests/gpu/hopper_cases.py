"""Operands for the Hopper engine, what it must compute from them, and how far from that it may be.

Two yardsticks. The reference engine emulates the same recipe: both quantise the same values, so
they differ by the order of additions, by the bits a tensor core keeps of a sum, by a rounding of dz
and y1s to bf16, and by the few codes that these push over a rounding boundary. And fp64 arithmetic
on the unquantised operands, from which no tensor may be further than the emulation is.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from gpu.activation_cases import gain_of, gated

from sonicmoe.engine.capabilities import HOPPER
from sonicmoe.engine.hopper import HopperEngine
from sonicmoe.engine.interface import EngineSettings, NativeBuffer
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import ActivationType
from sonicmoe.observe import listening
from sonicmoe.quant.format import BlockScaledTensor, Orientation
from sonicmoe.quant.recipes import RECIPES
from sonicmoe.routing.build import build_routing

DEVICE = "cuda"
OURS, REFERENCE = HopperEngine(), ReferenceEngine()
FP8 = EngineSettings(recipe=RECIPES["dx256"])
H, I, E, K = 512, 384, 6, 3
GATES = HOPPER.activations
# An FP8 code is 6 to 12 % wide: values that differ by 1e-3 disagree in 1 % of the codes, which is 1
# % of relative RMSE.
CLOSE = 0.025
# At ReGLU's jump an int8 code of z that flips between 0 and 1 turns a whole entry of dz on or off.
# So do codes beside a limit.
CLOSE_AT_A_JUMP = 0.04
JUMPS = (ActivationType.REGLU, ActivationType.SWIGLU_CLAMP)
RATIO, SLACK = 1.05, 3e-3


@dataclass
class Case:
    """Operands in bf16 (probabilities fp32); w1 `[E, 2I, H]` interleaved and w2 `[E, H, I]`."""

    x: torch.Tensor
    dout: torch.Tensor
    indices: torch.Tensor
    probs: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    activation: ActivationType = ActivationType.SWIGLU
    parameters: tuple = ()

    @property
    def num_experts(self):
        return int(self.w1.shape[0])

    @property
    def valid(self):
        return (self.indices >= 0) & (self.indices < self.num_experts)

    @property
    def counts(self):
        """Tokens per expert, on the host."""
        return torch.bincount(self.indices[self.valid], minlength=self.num_experts).tolist()

    def routing(self, counts=None):
        return build_routing(self.indices, self.probs, self.num_experts, counts)

    def tokens(self, index):
        """The same layer on some of its tokens."""
        picked = {
            name: getattr(self, name)[index].contiguous()
            for name in ("x", "dout", "indices", "probs")
        }
        return replace(self, **picked)

    def accumulators(self):
        experts, n1, hidden = self.w1.shape
        return NativeBuffer.zeros(experts, n1, hidden, int(self.w2.shape[2]), False, DEVICE)


def make_case(
    tokens=700, *, hidden=H, intermediate=I, experts=E, topk=K, activation=ActivationType.SWIGLU, invalid=0.3, empty=(4,), seed=0
):  # fmt: skip
    """Random operands of unit scale; both sentinels at `invalid` of the slots, no token for the
    experts in `empty`.
    """
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*size, scale=1.0):
        return (torch.randn(size, generator=generator, device=DEVICE) * scale).to(torch.bfloat16)

    def uniform(*size):
        return torch.rand(size, generator=generator, device=DEVICE)

    scores = uniform(tokens, experts)
    scores[:, list(empty)] = -1.0
    indices = scores.topk(topk, 1).indices
    indices = torch.where(scores.gather(1, indices) < 0, -1, indices)
    dropped, sentinel = (
        uniform(tokens, topk) < invalid,
        torch.where(uniform(tokens, topk) < 0.5, -1, experts),
    )
    return Case(
        x=normal(tokens, hidden),
        dout=normal(tokens, hidden),
        indices=torch.where(dropped, sentinel, indices),
        probs=uniform(tokens, topk) + 0.05,
        w1=normal(experts, 2 * intermediate, hidden, scale=gain_of(activation) * hidden**-0.5),
        w2=normal(experts, hidden, intermediate, scale=intermediate**-0.5),
        activation=activation,
    )


def make_blocked_case(tokens, *, experts=4, topk=2, **options):
    """Experts take turns at blocks of 128 tokens: `128 * experts` tokens quantise in the same
    blocks wherever they lie.
    """
    case = make_case(tokens, experts=experts, topk=topk, empty=(), **options)
    turn = torch.arange(tokens, device=DEVICE).unsqueeze(1) // 128
    return replace(case, indices=(turn + torch.arange(topk, device=DEVICE)) % experts)


def run(case, engine=None, settings=FP8, *, accumulators=None, counts=None):
    """Everything a forward and a backward give, by name."""
    engine, own = engine or OURS, case.parameters
    settings = replace(settings, activation=case.activation, activation_parameters=own)
    weights, routing = (
        engine.prepare_weights(case.w1, case.w2, None, None, settings),
        case.routing(counts),
    )
    out, saved = engine.forward(case.x, routing, weights, settings)
    accumulators = accumulators or case.accumulators()
    dx, dprobs = engine.backward(case.dout, saved, weights, accumulators)
    return {
        "out": out,
        "dx": dx,
        "dprobs": dprobs,
        "dw1": accumulators.dw1,
        "dw2": accumulators.dw2,
    }


def golden(case):
    """fp64, expert by expert, by automatic differentiation of the definition."""
    x, probs, dout = (
        case.x.double().requires_grad_(),
        case.probs.double().requires_grad_(),
        case.dout.double(),
    )
    out = torch.zeros_like(dout)
    dx, dprobs = torch.zeros_like(dout), torch.zeros_like(probs)
    dws = [torch.zeros(w.shape, dtype=torch.float64, device=DEVICE) for w in (case.w1, case.w2)]
    for e in range(case.num_experts):
        token, slot = torch.nonzero(case.indices == e, as_tuple=True)
        w1, w2 = (w[e].double().requires_grad_() for w in (case.w1, case.w2))
        z = x[token] @ w1.T
        y1 = gated(case.activation, z[:, ::2], z[:, 1::2], case.parameters)
        served = (y1 @ w2.T) * probs[token, slot].unsqueeze(1)
        gradients = torch.autograd.grad(served, (x, probs, w1, w2), dout[token])
        out.index_add_(0, token, served.detach())
        for total, gradient in zip((dx, dprobs, dws[0][e], dws[1][e]), gradients, strict=True):
            total.add_(gradient)
    return {"out": out, "dx": dx, "dprobs": dprobs, "dw1": dws[0], "dw2": dws[1]}


def parts(name, tensor, case):
    """fp64 `[blocks, elements]`: blocks of 128 tokens, or one of each expert."""
    tensor = tensor.double()
    if name in ("out", "dx"):
        missing = -tensor.shape[0] % 128
        return torch.nn.functional.pad(tensor, (0, 0, 0, missing)).reshape(
            -1, 128 * tensor.shape[1]
        )
    if name == "dprobs":
        return torch.stack(
            [
                torch.where(case.indices == e, tensor, 0.0).reshape(-1)
                for e in range(case.num_experts)
            ]
        )
    return tensor.reshape(tensor.shape[0], -1)


def errors(name, actual, wanted, case):
    """Relative RMSE of each part; the plain norm where nothing is wanted.

    dprobs has one number per slot, and a small one is no smaller in error: an expert counts at
    least as its share of all slots.
    """
    actual, wanted = parts(name, actual, case), parts(name, wanted, case)
    error, norm = (actual - wanted).norm(dim=1), wanted.norm(dim=1)
    if name == "dprobs":
        slots = torch.tensor(case.counts, device=DEVICE, dtype=torch.float64)
        norm = torch.maximum(norm, wanted.norm() * (slots / slots.sum().clamp(min=1)).sqrt())
    return torch.where(norm > 0, error / norm.clamp(min=1e-300), error)


def leeway(name, case):
    """What the bounds of each part are multiplied with: few slots are few draws, and no average."""
    slots = torch.tensor(case.counts, device=DEVICE, dtype=torch.float64)
    if name in ("out", "dx"):
        slots = parts(name, case.valid.sum(1, keepdim=True), case).sum(1)
    return 1 + (8 if name == "dprobs" else 4) / slots.clamp(min=1).sqrt()


def check(case, settings=FP8, got=None):
    """Assert that every tensor is close to the emulation and no further from fp64 than it, in every
    block and expert.
    """
    got = got or run(case, settings=settings)
    emulated, exact = run(case, REFERENCE, settings), golden(case)
    close = CLOSE_AT_A_JUMP if case.activation in JUMPS else CLOSE
    for name, actual in got.items():
        assert actual.shape == exact[name].shape and actual.dtype == emulated[name].dtype, name
        assert bool(torch.isfinite(actual).all()), name
        more = leeway(name, case)
        assert_within(
            errors(name, actual, emulated[name], case), close * more, f"{name} from the emulation"
        )
        ours, theirs = (errors(name, t, exact[name], case) for t in (actual, emulated[name]))
        assert_within(ours, RATIO * theirs + SLACK * more, f"{name} from fp64")
    unserved = ~case.valid.any(1)
    assert bool((got["dprobs"][~case.valid] == 0).all())
    assert bool((got["out"][unserved] == 0).all()) and bool((got["dx"][unserved] == 0).all())


def assert_within(found, bounds, what):
    bad = torch.nonzero(~(found <= bounds)).flatten().tolist()
    parts_of = [f"{part}: {float(found[part]):.4f} > {float(bounds[part]):.4f}" for part in bad[:5]]
    assert not bad, f"{what}, {len(bad)} of {len(found)} parts: {'; '.join(parts_of)}"


def assert_same_bits(actual, wanted, names=None):
    for name in names or wanted:
        assert torch.equal(raw(actual[name]), raw(wanted[name])), name


def raw(tensor):
    """As bytes, among which NaN equals itself."""
    return tensor.detach().contiguous().view(torch.uint8)


def digest(case=None):
    """Of every bit of one forward and backward; another process must find the same."""
    named = run(case or make_case(900, seed=21))
    joined = hashlib.sha256()
    for name in sorted(named):
        joined.update(raw(named[name]).cpu().numpy().tobytes())
    return joined.hexdigest()


def run_with_stages(case, settings=FP8):
    """`run`, and every stage tensor of `[R, ...]` or `[..., R]`, its padding rows included, up to
    the last row of an expert.
    """
    routing, seen = case.routing(), {}

    def keep(name, value):
        for field, tensor in owned(value, routing.num_rows, int(routing.padded_offsets[-1])):
            seen[f"stage {name}{field}"] = tensor.clone()
        return value

    with listening(keep):
        return run(case, settings=settings) | seen


def owned(value, rows, used):
    """`(suffix, tensor)` of what experts own of a stage tensor; nothing of those that have no rows."""
    if not isinstance(value, BlockScaledTensor):
        return [("", value[:used])] if value.shape[0] == rows else []
    if rows not in value.codes.shape:
        return []
    used_scales = used // value.block.rows
    if value.orientation is Orientation.COLUMNS:
        return [
            (".codes", value.codes.view(torch.uint8)[:, :used]),
            (".scale_inv", value.scale_inv[:, :used_scales]),
        ]
    return [
        (".codes", value.codes.view(torch.uint8)[:used]),
        (".scale_inv", value.scale_inv[:used_scales]),
    ]


def fill_free_memory(byte):
    """Leave `byte` in what the allocator will hand out next, in large blocks and in small ones."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = [torch.full((2**30,), byte, dtype=torch.uint8, device="cuda")]
    held += [
        torch.full((2**size,), byte, dtype=torch.uint8, device="cuda")
        for size in (12, 16, 19)
        for _ in range(256)
    ]
    torch.cuda.synchronize()
    del held
