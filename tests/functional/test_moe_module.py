"""`MoE` as a module: names and shapes, inference modes, autograd's rules, training, and the border."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from framework import torch
from functional.layer_golden import (
    MODES,
    assert_same_bits,
    batch,
    make_layer,
    make_tokens,
    run_layer,
)
from torch.utils.checkpoint import checkpoint

from sonicmoe import KernelBackendMoE, MoE, SonicMoEConfig, moe_general_routing_inputs
from sonicmoe.enums import ActivationType
from sonicmoe.errors import (
    ConfigError,
    DTypeError,
    ShapeError,
)
from sonicmoe.moe import Experts


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("activation", "width"), [(ActivationType.GEGLU, 48), (ActivationType.RELU_SQ, 24)]
)
def test_state_dict(activation, width, bias):
    moe = MoE(5, 2, 32, 24, activation, add_bias=bias, std=0.05)
    shapes = {name: tuple(value.shape) for name, value in moe.state_dict().items()}
    expected = {
        "router.weight": (5, 32),
        "c_fc.weight": (5, width, 32),
        "c_proj.weight": (5, 32, 24),
    }
    if bias:
        expected |= {"c_fc.bias": (5, width), "c_proj.bias": (5, 32)}
        assert not moe.c_fc.bias.any() and not moe.c_proj.bias.any()
    assert shapes == expected
    assert all(parameter.requires_grad for parameter in moe.parameters())
    for weight in (moe.c_fc.weight, moe.c_proj.weight):
        assert (
            weight.std().item() == pytest.approx(0.05, rel=0.1)
            and abs(weight.mean().item()) < 0.005
        )


def test_linear_maps_have_biases_unless_told_otherwise():
    """Upstream's `Experts` have them too."""
    assert Experts(2, 3, 4).bias.shape == (2, 4) and not Experts(2, 3, 4).bias.any()
    assert Experts(2, 3, 4, add_bias=False).bias is None


def test_is_glu_as_upstreams_scripts_say_it():
    assert MoE(2, 1, 8, 4, ActivationType.REGLU, is_glu=True).c_fc.weight.shape == (2, 8, 8)
    assert MoE(2, 1, 8, 4, ActivationType.GELU, is_glu=False).c_fc.weight.shape == (2, 4, 8)
    for activation, gated in ((ActivationType.REGLU, True), (ActivationType.GELU, False)):
        with pytest.raises(
            ConfigError, match=f"is_glu is {not gated}; {activation.value} needs {gated}"
        ):
            MoE(2, 1, 8, 4, activation, is_glu=not gated)


# Inference


@MODES
@pytest.mark.parametrize("inside", [nullcontext, torch.no_grad, torch.inference_mode])
def test_inference_keeps_nothing(inside, options, saves):
    """Inference is asked for, or it is a mode of PyTorch."""
    moe, (x, _), is_asked = make_layer(bias=True), batch(), inside is nullcontext
    x.requires_grad_()
    expected, expected_aux = moe(x, **options)
    for mode in (moe.train, moe.eval):
        with inside():
            out, aux = mode()(x, is_inference_mode=is_asked, **options)
        assert not out.requires_grad
        assert torch.equal(out, expected)
        assert aux is None if is_asked else torch.equal(aux, expected_aux)
    assert saves == [True, False, False] and expected.requires_grad
    assert moe(x, **options)[0].requires_grad, "the mode stuck to the layer"


@pytest.mark.parametrize(
    "options", [{"use_fp8": False}, {"use_fp8": True}, {"kernel_backend_moe": "torch"}], ids=str
)
def test_evaluation_differentiates_like_training(options):
    """As in any module: frozen adapters, probes and input gradients are taken in `eval()`."""
    moe, (x, dout) = make_layer(bias=True), batch()
    expected = run_layer(moe.train(), x, dout, **options)
    found = run_layer(moe.eval(), x, dout, **options)
    assert_same_bits(found, expected)
    assert found[2]["x"].any() and found[2]["c_fc.weight"].any() and not moe.training


@pytest.mark.parametrize("use_fp8", [False, True])
def test_a_main_grad_is_left_alone(use_fp8):
    """Autograd gets the gradients of weights that are passed to a call, whatever they carry."""
    moe, (x, dout) = make_layer(bias=True), batch(8)
    expected = run_layer(moe, x, dout, use_fp8=use_fp8)
    for weight in moe.parameters():
        weight.main_grad = torch.full_like(weight, float("nan"))
        weight.grad_added_to_main_grad = False
    assert_same_bits(run_layer(moe, x, dout, use_fp8=use_fp8), expected)
    for weight in moe.parameters():
        assert weight.main_grad.isnan().all() and not weight.grad_added_to_main_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_runs_again_keeps_what_its_backward_reads(reentrant, saves):
    """The first forward of the re-entrant kind runs without autograd; tests/oracle has the bits."""
    moe, (x, _) = make_layer(), batch()
    checkpoint(moe, x.requires_grad_(), use_reentrant=reentrant)[0].sum().backward()
    assert saves == [not reentrant, True]


def test_frozen_layer_keeps_nothing(saves):
    moe, (x, _) = make_layer().requires_grad_(False), batch()
    assert not moe(x)[0].requires_grad
    assert moe(x.requires_grad_())[0].requires_grad
    assert saves == [False, True]


def test_training_memory_is_what_autograd_sees():
    """Every byte kept for backward passes through the saved-tensor hooks (offloading,
    checkpointing): the bytes of the 8-bit `z` among it.
    """
    moe, (x, _) = make_layer(), batch()
    dtypes = []

    def keep(tensor):
        dtypes.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        moe(x, use_fp8=True)[0].sum().backward()
    assert torch.uint8 in dtypes


# Autograd


@MODES
def test_backward_twice(options):
    moe, (x, dout) = make_layer(), batch()
    with SonicMoEConfig(stagewise_memory=True).activate():
        loss = (moe(x, **options)[0] * dout).sum()
    once = torch.autograd.grad(loss, list(moe.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(moe.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_configuration_of_the_forward_serves_its_backward():
    moe, (x, dout) = make_layer(), batch()
    expected = run_layer(moe, x, dout, use_fp8=True)[2]
    with SonicMoEConfig(fp8_mode="perf").activate():
        loss = (moe(x)[0] * dout).sum()
    gradient = torch.autograd.grad(loss, moe.c_fc.weight)[0]
    assert torch.equal(gradient, expected["c_fc.weight"])


# Border


def test_sizes_of_numpy_are_sizes():
    moe = MoE(*map(np.int64, (4, 2, 8, 8)))
    assert moe(torch.zeros(3, 8))[0].shape == (3, 8)


class Adapted(torch.nn.Module):
    """A router with an adapter, which has the base layer's weight, as peft's have."""

    def __init__(self, base):
        super().__init__()
        self.base, self.adapter = base, torch.nn.Linear(32, 5)
        self.weight = base.weight

    def forward(self, x):
        return self.base(x) + self.adapter(x)


def test_the_router_is_a_module():
    """What stands in its place computes, trains and has its hooks, as in plain PyTorch."""
    moe, (x, _), called = make_layer(), batch(), []
    moe.router = Adapted(moe.router)
    moe.router.register_forward_hook(lambda *_: called.append(1))
    gradients = []
    for backend in ("torch", "sonicmoe"):
        out, aux = moe(x, backend)
        wanted = [moe.router.adapter.weight, moe.router.adapter.bias, moe.c_fc.weight]
        gradients.append([out, *torch.autograd.grad(out.square().sum() + aux, wanted)])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    assert called == [1, 1] and gradients[1][1].abs().max() > 0
    moe.router = torch.nn.Linear(32, 6)
    with pytest.raises(ShapeError, match=r"router's output has shape \(19, 6\); needed: \[T, 5\]"):
        moe(x)


@pytest.mark.parametrize("backend", [each.value for each in list(KernelBackendMoE)[1:]])
def test_tokens_and_router_of_two_dtypes(backend):
    moe, x = make_layer(), make_tokens(19, 32).bfloat16()
    words = r"x \(hidden_states\) is bfloat16, router_w \(router.weight\) is float32; convert one, or use autocast"
    with pytest.raises(DTypeError, match=words):
        moe(x, backend)
    with torch.autocast("cpu", torch.bfloat16):
        assert moe(x, backend)[0].dtype == torch.bfloat16
    assert moe.bfloat16()(x, backend)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize("face", ["MoE", "triples", "transformers"])
def test_estimators_get_shapes_from_tensors_without_values(face, use_fp8):
    """`FakeTensorMode`, in which memory estimators run a step."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    kind = experts_of_transformers(use_fp8) if face == "transformers" else None
    with FakeTensorMode():
        layer = MoE(4, 2, 32, 48, add_bias=True) if kind is None else kind()
        x = torch.randn(10, 32, requires_grad=True)
        slots = torch.arange(20)
        if face == "MoE":
            out, aux = layer(x, use_fp8=use_fp8)
            out = out + aux
        elif face == "triples":
            w1, w2 = layer.c_fc.weight.permute(1, 2, 0), layer.c_proj.weight.permute(1, 2, 0)
            weights = w1, layer.c_fc.bias, w2, layer.c_proj.bias
            given = torch.rand(20), slots // 2, slots % layer.num_experts
            options = {"use_fp8": use_fp8, "max_experts_per_token": 2}
            out, counts = moe_general_routing_inputs(x, *given, *weights, **options)
            assert counts.shape == (layer.num_experts,)
        else:
            out = layer(x, slots.reshape(10, 2) % 4, torch.rand(10, 2))
        out.sum().backward()
    assert out.shape == x.grad.shape == (10, 32)
    for name, parameter in layer.named_parameters():
        # Of triples nobody asks the router.
        if "router" not in name or face == "MoE":
            assert parameter.grad.shape == parameter.shape, name


def experts_of_transformers(use_fp8):
    transformers = pytest.importorskip("transformers", minversion="5.7")
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    from sonicmoe.integrations.transformers import register

    register()
    config = transformers.MixtralConfig(hidden_size=32, intermediate_size=48, num_local_experts=4)
    config._experts_implementation = "sonicmoe_fp8" if use_fp8 else "sonicmoe"
    return lambda: MixtralExperts(config)


def test_every_optimizer_of_pytorch_takes_a_layer_but_those_that_the_page_names():
    """Stacked weights have three axes."""
    found = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    refused = set()
    for name, kind in found.items():
        if not issubclass(kind, torch.optim.Optimizer) or kind is torch.optim.Optimizer:
            continue
        layer = MoE(4, 2, 32, 48)
        before = layer.c_fc.weight.detach().clone()

        def loss(layer=layer):
            layer.zero_grad()
            value = layer(torch.ones(10, 32))[0].square().sum()
            value.backward()
            return value

        try:
            kind(layer.parameters(), lr=0.1).step(loss)
        except (ValueError, RuntimeError):
            refused.add(name)
            continue
        assert not torch.equal(layer.c_fc.weight, before), name
    assert refused == {"Muon", "SparseAdam"} & set(found)
