"""transformers models on a GPU engine: FP8's error and no more, sentinels that cost nothing and
touch nothing.
"""

from __future__ import annotations

import pytest
import torch
from gpu.device import poisoned_allocator
from gpu.engine_cases import make_case
from node.direct_layers import assert_same_bits

pytest.importorskip("transformers", minversion="5.7")

from integrations.hf_models import FAMILIES, VOCABULARY, build, errors, relative_rmse, run

from sonicmoe.enums import ActivationType
from sonicmoe.functional.autograd import expert_mlp
from sonicmoe.functional.call import Plan
from sonicmoe.integrations.transformers import register
from sonicmoe.layouts import WeightLayout

pytestmark = pytest.mark.gpu

H, I, E, K = 256, 128, 8, 4
FP8 = 0.12  # E4M3's 7 % on every gradient, and bf16 between the layers
BF16 = 0.04
both = pytest.mark.parametrize("implementation", ["sonicmoe", "sonicmoe_fp8"])


@pytest.fixture(autouse=True)
def registered():
    register()


@pytest.fixture
def chosen(monkeypatch):
    """The engine of every call, and the dtype of its tokens."""
    found, original = [], Plan.choose

    def choose(self, x, weights):
        engine = original(self, x, weights)
        found.append((engine.name, x.dtype))
        return engine

    monkeypatch.setattr(Plan, "choose", choose)
    return found


def model_of(family: str) -> torch.nn.Module:
    """One MoE layer, H and I multiples of 128, bf16, on the GPU."""
    config = FAMILIES[family](1)
    config.hidden_size, config.intermediate_size, config.moe_intermediate_size = H, I, I
    return build(config).to("cuda", torch.bfloat16)


def some_ids(rows: int, length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator).cuda()


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_logits_and_every_gradient(family: str) -> None:
    """Up to the experts both runs are the same bits, so the router chooses the same experts."""
    model = model_of(family)
    expected = run(model, "eager")
    assert max(errors(run(model, "sonicmoe"), expected).values()) <= BF16
    found = errors(run(model, "sonicmoe_fp8"), expected)
    assert max(found.values()) <= FP8, found
    assert found["logits"] >= 1e-3, "nothing was quantised"


@both
def test_gpt_oss_runs_in_bf16(implementation: str, chosen, caplog) -> None:
    """The FP8 kernels have neither its activation nor biases: a warning says so, once."""
    model = model_of("gpt-oss")
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj.mul_(6.0)  # beyond the clamps
    expected = run(model, "eager")
    with caplog.at_level("INFO", logger="sonicmoe"):
        found = errors(run(model, implementation), expected)
    # A z that bf16 rounds across a bound turns its gradient on or off.
    assert max(found.values()) <= FP8, found
    assert found["logits"] <= BF16 and {name for name, _ in chosen} == {"bf16"}
    # With a cold cache there are lines on compiling, too.
    levels = [record.levelname for record in caplog.records if "not hopper: " in record.message]
    assert levels == ["WARNING"] * (implementation == "sonicmoe_fp8")


@both
def test_same_bits_with_gradient_checkpointing_and_again(implementation: str) -> None:
    model = model_of("qwen3-moe")
    expected = run(model, implementation)
    assert max(errors(run(model, implementation), expected).values()) == 0
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert max(errors(run(model, implementation), expected).values()) == 0


@both
def test_compiled_in_one_graph(implementation: str) -> None:
    torch._dynamo.reset()
    model = model_of("qwen3-moe")
    expected = run(model, implementation)
    model.forward = torch.compile(model.forward, fullgraph=True)
    # Other kernels around the experts round elsewhere; a token whose router stood between two
    # experts may take the other.
    assert errors(run(model, implementation), expected)["logits"] <= 0.05


def test_fp8_training_follows_eager() -> None:
    def losses(name: str) -> torch.Tensor:
        model = model_of("mixtral")
        model.set_experts_implementation(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        ids = some_ids(4, 48, seed=1)
        history = []
        for _ in range(5):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append(loss.item())
        return torch.tensor(history)

    eager, fp8 = losses("eager"), losses("sonicmoe_fp8")
    assert eager[-1] < 0.4 * eager[0]
    assert ((fp8 - eager).abs() / eager).max() <= 0.05


@both
def test_fp32_parameters_under_autocast(implementation: str, chosen) -> None:
    """Norms return fp32 there; the experts get bf16 all the same, so that a GPU engine takes them."""
    model = model_of("mixtral").float()
    with torch.autocast("cuda", torch.bfloat16):
        expected, found = run(model, "eager"), run(model, implementation)
    assert {dtype for _, dtype in chosen} == {torch.bfloat16}
    assert "reference" not in {name for name, _ in chosen}
    bound = FP8 if implementation == "sonicmoe_fp8" else BF16
    assert max(errors(found, expected).values()) <= bound


def experts_run(invalid: float, use_fp8: bool) -> list[torch.Tensor]:
    """Mask of valid slots, out, dx, dprobs, dw1, dw2 of split-half weights as transformers stores
    them. What an invalid slot carries is nobody's business.
    """
    sizes = {"hidden": H, "intermediate": I, "experts": E, "topk": K}
    case = make_case(700, **sizes, invalid=invalid, empty=(), seed=3)
    probs = torch.where(case.valid, case.probs, float("nan"))
    leaves = [leaf.requires_grad_() for leaf in (case.x, probs, *case.weights[:2])]
    x, probs, w1, w2 = leaves
    out = expert_mlp(
        x, case.indices, probs, w1, w2, None, None, ActivationType.SWIGLU,
        layout=WeightLayout(split_half=True), use_fp8=use_fp8,
    )  # fmt: skip
    return [case.valid, out.detach(), *torch.autograd.grad(out, leaves, case.dout)]


@pytest.mark.parametrize("invalid", [0.0, 0.5, 0.99, 1.0])
def test_sentinels_touch_nothing_under_a_poisoned_allocator(invalid: float) -> None:
    """FP8 of the valid slots is as far from the unquantised run as ever."""
    found = []
    for use_fp8 in (False, True):
        clean = experts_run(invalid, use_fp8)
        with poisoned_allocator():
            assert_same_bits(experts_run(invalid, use_fp8), clean)
        assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in clean)
        here, out, dx, dprobs, *_ = clean
        assert not dprobs[~here].any()
        assert not out[~here.any(-1)].any() and not dx[~here.any(-1)].any()
        found.append(clean[1:])
    if invalid == 0.5:
        for plain, fp8 in zip(*found, strict=True):
            assert 1e-3 <= relative_rmse(fp8, plain) <= FP8
