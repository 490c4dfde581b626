"""That public calls leave their caller's tensors alone: a snapshot around a call, and the calls
that host and GPU suites make.

A kernel may write through a raw address: whole storages are compared, the bytes between and around
a view's own too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch

from sonicmoe import KernelBackendMoE, MoE, SonicMoEConfig
from sonicmoe.enums import ActivationType
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.functional import moe_general_routing_inputs, moe_TC_softmax_topk_layer
from sonicmoe.functional.autograd import expert_mlp
from sonicmoe.layouts import WeightLayout

T, H, I, E, K = 150, 256, 128, 4, 2
MARGIN = 64  # elements around a tensor, enough to keep it aligned
SPELLINGS = ("contiguous", "strided")


@contextmanager
def untouched(**tensors):
    """Assert that nothing of these tensors changes inside: bytes, version counter, memory, shape,
    whether it wants a gradient, `.grad`.
    """
    before = {
        name: (storage_bytes(tensor).clone(), facts(tensor)) for name, tensor in tensors.items()
    }
    yield
    for name, tensor in tensors.items():
        held, was = before[name]
        assert facts(tensor) == was, f"{name}: {facts(tensor)}, was {was}"
        assert torch.equal(storage_bytes(tensor), held), f"{name}: its bytes changed"


def storage_bytes(tensor):
    """All of the memory that the tensor is a view of."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.detach().untyped_storage())


def facts(tensor):
    grad = id(tensor.grad) if tensor.is_leaf and tensor.grad is not None else None
    layout = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return (*layout, tensor._version, tensor.requires_grad, grad)


def spelled(values, spelling, leaf=False):
    """The same values inside a larger memory: in one piece, or every second element of it."""
    step = 2 if spelling == "strided" else 1
    memory = torch.zeros(
        2 * MARGIN + step * values.numel(), dtype=values.dtype, device=values.device
    )
    view = memory[MARGIN : MARGIN + step * values.numel() : step].reshape(values.shape)
    if step > 1:  # reshaping has copied nothing: strides of a regular lattice
        view = memory.as_strided(
            values.shape, [step * stride for stride in values.stride()], MARGIN
        )
    view = view.copy_(values).detach()
    return view.requires_grad_() if leaf else view


@dataclass
class Given:
    """What a caller has, on one device: x, dout `[T, H]`, ids and probabilities `[T, K]`, native
    weights, biases.
    """

    x: torch.Tensor
    dout: torch.Tensor
    indices: torch.Tensor
    probs: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    b1: torch.Tensor
    b2: torch.Tensor
    router: torch.Tensor


def given(device, spelling="contiguous", seed=0):
    """bf16, both sentinels among the ids, NaN as their probabilities, int32 ids and a stride-0
    gradient where spelled otherwise.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0, dtype=torch.bfloat16, leaf=True, as_=spelling):
        return spelled(
            (torch.randn(shape, generator=generator) * scale).to(device, dtype), as_, leaf
        )

    ids = torch.rand(T, E, generator=generator).topk(K, 1).indices
    dropped = torch.rand(T, K, generator=generator) < 0.3
    ids = torch.where(dropped, torch.where(torch.rand(T, K, generator=generator) < 0.5, -1, E), ids)
    probs = torch.where(dropped, float("nan"), torch.rand(T, K, generator=generator) + 0.05)
    strided = spelling == "strided"
    dout = normal(T, H, leaf=False)
    return Given(
        x=normal(T, H),
        dout=dout[:1, :1].expand(T, H) if strided else dout,
        indices=spelled(ids.to(device, torch.int32 if strided else torch.int64), spelling),
        probs=spelled(probs.to(device), spelling, leaf=True),
        # GPU engines read weights where they lie, and in one piece
        w1=normal(E, 2 * I, H, scale=H**-0.5, as_="contiguous"),
        w2=normal(E, H, I, scale=I**-0.5, as_="contiguous"),
        b1=normal(E, 2 * I, scale=0.3),
        b2=normal(E, H, scale=0.3),
        router=normal(E, H),
    )


Call = Callable[[], list[torch.Tensor]]
Face = Callable[[Given, bool], tuple[dict[str, torch.Tensor], Call]]


def named(have, *names):
    return {name: getattr(have, name) for name in names}


def differentiated(out, inputs, dout):
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def expert_mlp_face(have, fp8, layout=None):
    """Biases where the engine has them: not under FP8."""
    names = ["x", "probs", "w1", "w2", *([] if fp8 else ["b1", "b2"])]
    biases = (None, None) if fp8 else (have.b1, have.b2)

    def forward(**mode):
        weights = have.w1, have.w2, *biases
        given = (have.x, have.indices, have.probs, *weights, ActivationType.SWIGLU)
        return expert_mlp(*given, layout=layout, use_fp8=fp8, **mode)

    def call():
        with torch.no_grad():
            forward(inference=True)
        return differentiated(forward(), [getattr(have, name) for name in names], have.dout)

    return named(have, *names, "indices", "dout"), call


def topk_layer_face(have, fp8):
    def call():
        weights = have.w1.permute(1, 2, 0), None, have.w2.permute(1, 2, 0), None
        out, *_ = moe_TC_softmax_topk_layer(have.x, have.router, *weights, K, use_fp8=fp8)
        return differentiated(out, [have.x, have.router, have.w1, have.w2], have.dout)

    return named(have, "x", "router", "w1", "w2", "dout"), call


def general_routing_face(have, fp8):
    """Every (token, expert, score) triple, those of no expert here too."""
    tokens = torch.arange(T, device=have.x.device, dtype=have.indices.dtype).repeat_interleave(K)
    experts = have.indices.reshape(-1).clone()
    scores = have.probs.detach().reshape(-1).clone().requires_grad_()

    def call():
        out, _ = moe_general_routing_inputs(
            have.x, scores, tokens, experts, have.w1.permute(1, 2, 0), None, have.w2.permute(1, 2, 0), None, E,
            concat_layout=True, use_fp8=fp8, max_experts_per_token=K,
        )  # fmt: skip
        return differentiated(out, [have.x, scores, have.w1, have.w2], have.dout)

    tensors = {"token_indices": tokens, "expert_indices": experts, "router_scores": scores}
    return tensors | named(have, "x", "w1", "w2", "dout"), call


def moe_face(have, **options):
    torch.manual_seed(0)
    moe = MoE(E, K, H, I, std=0.1).to(have.x.device, torch.bfloat16)

    def call():
        with torch.no_grad():
            moe(have.x, is_inference_mode=True, **options)
        out, loss = moe(have.x, **options)
        inputs = [have.x, *moe.parameters()]
        return [loss.detach(), *differentiated(out, inputs, have.dout)]

    return named(have, "x", "dout") | dict(moe.named_parameters()), call


FACES: dict[str, Face] = {
    "expert_mlp": expert_mlp_face,
    # As transformers stores them.
    "expert_mlp, split halves": partial(expert_mlp_face, layout=WeightLayout(split_half=True)),
    "moe_TC_softmax_topk_layer": topk_layer_face,
    "moe_general_routing_inputs": general_routing_face,
    "MoE": lambda have, fp8: moe_face(have, use_fp8=fp8),
    # The comparison in plain PyTorch, which has no FP8.
    "MoE, plain": lambda have, _: moe_face(have, kernel_backend_moe=KernelBackendMoE.torch),
}


def assert_computed(results):
    assert all(bool(torch.isfinite(result).all()) and bool(result.any()) for result in results), (
        "computed nothing"
    )


def check_face(face, have, fp8):
    """Call it twice: weights are prepared in the first call and found prepared in the second."""
    tensors, call = FACES[face](have, fp8)
    with untouched(**tensors):
        for _ in range(2):
            results = call()
    assert_computed(results)


def make_node(have, config, **options):
    """`(node, parameters by name)`: ERNIE's arrangement, fp32 `main_grad`s in memory of their own."""

    def projection(values):
        values = values.detach().T.contiguous()
        parameter = torch.nn.Parameter(spelled(values, "contiguous"))
        halves = torch.full(values.shape, 0.5, device=values.device)
        parameter.main_grad = spelled(halves, "contiguous")
        return SimpleNamespace(weight=parameter)

    experts = [
        SimpleNamespace(up_gate_proj=projection(up), down_proj=projection(down))
        for up, down in zip(have.w1, have.w2, strict=True)
    ]
    names = ("up_gate_proj", "down_proj")
    parameters = {
        f"experts[{i}].{name}": getattr(e, name).weight
        for i, e in enumerate(experts)
        for name in names
    }
    return SonicMoEMlpNode(experts, E, H, I, config=config, **options), parameters


def check_node(have, config: SonicMoEConfig, **options):
    """Nothing changes but `main_grad`, and that in `step()` alone where gradients wait for it."""
    node, parameters = make_node(have, config, **options)
    counts = [int((have.indices == e).sum()) for e in range(E)]
    listed, inputs = list(counts), named(have, "x", "indices", "probs", "dout") | parameters
    main_grads = {
        f"{name}.main_grad": parameter.main_grad for name, parameter in parameters.items()
    }
    waits = options.get("flush") == "step"
    before_step = main_grads if waits else {}
    with untouched(**inputs):
        with untouched(**before_step):
            node.prequantize_weights()
            with torch.no_grad():
                node(have.x, counts, have.indices, have.probs)
            for tokens_per_expert in (None, counts):
                given = (have.x, tokens_per_expert, have.indices, have.probs)
                results = differentiated(node(*given), [have.x, have.probs], have.dout)
                node(*given).backward(have.dout, inputs=list(parameters.values()))
            node.invalidate_caches()
        node.step()
    assert counts == listed
    assert_computed(results)
    for name, parameter in parameters.items():
        main_grad = main_grads[f"{name}.main_grad"]
        assert parameter.main_grad is main_grad, f"{name}: its main_grad was replaced"
        assert bool((main_grad != 0.5).any()), f"{name}: its main_grad got nothing"
        whole = storage_bytes(main_grad).view(torch.float32)
        assert not bool(whole[:MARGIN].any()) and not bool(whole[-MARGIN:].any()), (
            f"{name}: written beside main_grad"
        )
