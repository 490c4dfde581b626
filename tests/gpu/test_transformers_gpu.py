"""transformers models on a GPU engine: FP8's error and no more, sentinels that cost nothing and
touch nothing.
"""

from __future__ import annotations

import pytest
import torch
from gpu.device import poisoned_allocator

pytest.importorskip("transformers", minversion="5.7")

from integrations.hf_models import FAMILIES, VOCABULARY, build, errors, relative_rmse, run

from sonicmoe.enums import ActivationType
from sonicmoe.functional.autograd import expert_mlp
from sonicmoe.functional.call import Plan, make_plan
from sonicmoe.integrations.transformers import register
from sonicmoe.layouts import WeightLayout

pytestmark = pytest.mark.gpu

H, I, E, K = 256, 128, 8, 4
FP8 = 0.12  # E4M3's 7 % on every gradient, and bf16 between the layers
BF16 = 0.04


@pytest.fixture(scope="module", autouse=True)
def needs_a_gpu_engine():
    """The reference engine runs on a GPU too; it proves nothing here."""
    probe = torch.zeros(1, H, device="cuda", dtype=torch.bfloat16)
    weights = (probe.new_zeros(1, 2 * I, H), probe.new_zeros(1, H, I), None, None)
    name = make_plan(ActivationType.SWIGLU, WeightLayout(), True).choose(probe, weights).name
    if name == "reference":
        pytest.skip("no GPU engine for FP8 in this build")


@pytest.fixture(autouse=True)
def registered():
    register()


def model_of(family: str) -> torch.nn.Module:
    """One MoE layer, H and I multiples of 128, bf16, on the GPU."""
    config = FAMILIES[family](1)
    config.hidden_size, config.intermediate_size, config.moe_intermediate_size = H, I, I
    return build(config).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_logits_and_every_gradient(family: str) -> None:
    """Up to the experts both runs are the same bits, so the router chooses the same experts."""
    model = model_of(family)
    expected = run(model, "eager")
    assert max(errors(run(model, "sonicmoe"), expected).values()) <= BF16
    found = errors(run(model, "sonicmoe_fp8"), expected)
    assert max(found.values()) <= FP8, found
    assert found["logits"] >= 1e-3, "nothing was quantised"


@pytest.mark.parametrize("implementation", ["sonicmoe", "sonicmoe_fp8"])
def test_gpt_oss_runs_in_bf16(implementation: str, monkeypatch, caplog) -> None:
    """The FP8 kernels have neither its activation nor biases: a warning says so, once."""
    names, original = [], Plan.choose

    def choose(self, x, weights):
        engine = original(self, x, weights)
        names.append(engine.name)
        return engine

    monkeypatch.setattr(Plan, "choose", choose)
    model = model_of("gpt-oss")
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj.mul_(6.0)  # beyond the clamps
    expected = run(model, "eager")
    with caplog.at_level("INFO", logger="sonicmoe"):
        found = errors(run(model, implementation), expected)
    assert max(found.values()) <= FP8, (
        found
    )  # a z that bf16 rounds across a bound turns its gradient on or off
    assert found["logits"] <= BF16 and set(names) == {"bf16"}
    # With a cold cache there are lines on compiling, too.
    warned = [record for record in caplog.records if "not hopper: " in record.message]
    assert [record.levelname for record in warned] == ["WARNING"] * (
        implementation == "sonicmoe_fp8"
    )


@pytest.mark.parametrize("implementation", ["sonicmoe", "sonicmoe_fp8"])
def test_same_bits_with_gradient_checkpointing_and_again(implementation: str) -> None:
    model = model_of("qwen3-moe")
    expected = run(model, implementation)
    assert max(errors(run(model, implementation), expected).values()) == 0
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert max(errors(run(model, implementation), expected).values()) == 0


@pytest.mark.parametrize("implementation", ["sonicmoe", "sonicmoe_fp8"])
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
        ids = torch.randint(
            3, VOCABULARY, (4, 48), generator=torch.Generator().manual_seed(1)
        ).cuda()
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


@pytest.mark.parametrize("implementation", ["sonicmoe", "sonicmoe_fp8"])
def test_fp32_parameters_under_autocast(implementation: str, monkeypatch) -> None:
    """Norms return fp32 there; the experts get bf16 all the same, so that a GPU engine takes them."""
    names, original = [], Plan.choose

    def choose(self, x, weights):
        engine = original(self, x, weights)
        names.append((engine.name, x.dtype))
        return engine

    monkeypatch.setattr(Plan, "choose", choose)
    model = model_of("mixtral").float()
    with torch.autocast("cuda", torch.bfloat16):
        expected, found = run(model, "eager"), run(model, implementation)
    assert {dtype for _, dtype in names} == {torch.bfloat16} and "reference" not in {
        name for name, _ in names
    }
    assert max(errors(found, expected).values()) <= (
        FP8 if implementation == "sonicmoe_fp8" else BF16
    )


@pytest.mark.parametrize("implementation", ["sonicmoe", "sonicmoe_fp8"])
def test_decoding_with_a_cache(implementation: str) -> None:
    """Two tokens a step: every step's logits are those of the whole text, up to what other
    attention kernels round.
    """
    model = model_of("qwen3-moe").eval()
    model.set_experts_implementation(implementation)
    ids = torch.randint(3, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(2)).cuda()
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "output_scores": True}
    generated = model.generate(ids, **options, return_dict_in_generate=True)
    with torch.inference_mode():
        whole = model(generated.sequences).logits[:, 4:-1]
    assert generated.sequences.shape == (2, 13)
    assert relative_rmse(torch.stack(generated.scores, 1), whole) <= 0.05


# Sentinels


def experts_run(invalid: float, use_fp8: bool, tokens: int = 700) -> list[torch.Tensor]:
    """Mask of valid slots, out, dx, dprobs, dw1, dw2 of split-half weights as transformers stores
    them.
    """
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to("cuda", torch.bfloat16)

    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(tokens)])
    dropped = torch.rand(tokens, K, generator=generator) < invalid
    ids[dropped] = torch.where(torch.rand(tokens, K, generator=generator) < 0.5, -1, E + 2)[dropped]
    here = ((ids >= 0) & (ids < E)).cuda()
    probs = torch.rand(tokens, K, generator=generator).cuda()
    probs = torch.where(
        here, probs, float("nan")
    ).requires_grad_()  # what an invalid slot carries is nobody's business
    x, w1, w2 = normal(tokens, H), normal(E, 2 * I, H) * H**-0.5, normal(E, H, I) * I**-0.5
    leaves = [leaf.requires_grad_() for leaf in (x, w1, w2)]
    out = expert_mlp(
        x, ids.cuda(), probs, w1, w2, None, None, ActivationType.SWIGLU,
        layout=WeightLayout(split_half=True), use_fp8=use_fp8,
    )  # fmt: skip
    dx, dw1, dw2, dprobs = torch.autograd.grad(out, [*leaves, probs], normal(tokens, H))
    return [here, out.detach(), dx, dprobs, dw1, dw2]


@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize("invalid", [0.0, 0.5, 0.99, 1.0])
def test_sentinels_touch_nothing_under_a_poisoned_allocator(use_fp8: bool, invalid: float) -> None:
    clean = experts_run(invalid, use_fp8)
    with poisoned_allocator():
        poisoned = experts_run(invalid, use_fp8)
    for a, b in zip(clean, poisoned, strict=True):
        assert torch.equal(a, b) and bool(torch.isfinite(a.float()).all())
    here, out, dx, dprobs, *_ = clean
    assert not dprobs[~here].any()
    assert not out[~here.any(-1)].any() and not dx[~here.any(-1)].any()


def test_fp8_of_valid_slots_does_not_depend_on_the_invalid_ones() -> None:
    """The same valid slots among invalid ones of either spelling: FP8 against the unquantised run."""
    for fp8, plain in zip(experts_run(0.5, True)[1:], experts_run(0.5, False)[1:], strict=True):
        assert 1e-3 <= relative_rmse(fp8, plain) <= FP8
