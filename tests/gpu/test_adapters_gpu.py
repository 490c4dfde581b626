"""Low-rank adapters on a GPU: engines `bf16` and `triton`, which add plain grouped GEMMs, against the
reference engine; and a transformers model with adapters of peft.
"""

from __future__ import annotations

import pytest
import torch
from gpu.device import captured, fill_free_memory, waiting_is_an_error
from gpu.engine_cases import REFERENCE, SWIGLU, E, assert_same_bits, make_case

from sonicmoe.engine.bf16 import Bf16Engine
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.low_rank import NAMES_OF_FACTORS, Adapters, LowRank
from sonicmoe.engine.triton import TritonEngine
from sonicmoe.enums import ActivationType

pytestmark = pytest.mark.gpu

ENGINES = pytest.mark.parametrize("engine", [Bf16Engine(), TritonEngine()], ids=lambda e: e.name)


def adapters_of(case, which=("up", "down"), rank=16):
    generator = torch.Generator("cuda").manual_seed(1)

    def pair(weight):
        experts, outputs, inputs = weight.shape
        a, b = (
            torch.randn(size, generator=generator, device="cuda") * scale
            for size, scale in (
                ((experts, rank, inputs), inputs**-0.5),
                ((experts, outputs, rank), 0.3),
            )
        )
        return LowRank(a, b, 1.5)

    pairs = zip(("up", "down"), case.weights, strict=False)
    return Adapters(**{name: pair(weight) for name, weight in pairs if name in which})


def run(case, engine, adapters, **settings):
    chosen = EngineSettings(case.activation, activation_parameters=case.parameters, **settings)
    weights = engine.prepare_weights(*case.weights, chosen).with_adapters(adapters)
    out, saved = engine.forward(case.x, case.routing(), weights, chosen)
    dx, dprobs, pending = engine.backward_dx(case.dout, saved, weights)
    factors = zip(NAMES_OF_FACTORS, pending.adapters(), strict=True)
    named = {name: gradient for name, gradient in factors if gradient is not None}
    return {"out": out, "dx": dx, "dprobs": dprobs} | named


def check(actual, wanted):
    assert actual.keys() == wanted.keys()
    for name, got in actual.items():
        one, other = got.double(), wanted[name].double()
        assert bool(torch.isfinite(one).all()), name
        assert float((one - other).norm()) < 0.01 * float(other.norm()), name


@ENGINES
@pytest.mark.parametrize(
    ("activation", "which", "rank"),
    [
        (SWIGLU, ("up", "down"), 16),
        (ActivationType.SWIGLU_OAI, ("up", "down"), 5),
        (ActivationType.GELU, ("up",), 64),
        (ActivationType.GEGLU, ("down",), 128),
    ],
    ids=str,
)
def test_equal_the_reference_engine(engine, activation, which, rank):
    case = make_case(activation=activation, bias=rank == 5)
    adapters = adapters_of(case, which, rank)
    check(run(case, engine, adapters), run(case, REFERENCE, adapters))


@ENGINES
def test_bits_repeat_on_poisoned_memory_and_nothing_waits(engine):
    case = make_case()
    adapters, routing = adapters_of(case), case.routing()
    case.routing = lambda counts=None: routing  # whose worst case of rows is known beforehand
    wanted = run(case, engine, adapters)
    for byte in (0xFF, 0x7B):
        fill_free_memory(byte)
        with waiting_is_an_error():
            found = run(case, engine, adapters)
        assert_same_bits(found, wanted)
    assert_same_bits(run(case, engine, adapters, recompute_z=True), wanted)
    assert not bool(wanted["up.a"][4].any()) and wanted["up.a"].shape[0] == E


@ENGINES
def test_in_a_graph(engine):
    case = make_case()
    adapters, routing = adapters_of(case), case.routing()
    case.routing = lambda counts=None: routing
    wanted = run(case, engine, adapters)
    graph, found = captured(
        lambda: run(case, engine, adapters), lambda: run(case, engine, adapters)
    )
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(found, wanted)


@pytest.mark.parametrize("implementation", ["sonicmoe", "sonicmoe_fp8"])
def test_a_model_with_adapters_of_peft(implementation):
    pytest.importorskip("transformers", minversion="5.7")
    peft = pytest.importorskip("peft", minversion="0.17")
    from gpu.test_transformers_gpu import BF16, FP8, model_of
    from integrations.hf_models import errors
    from integrations.hf_models import run as run_model

    from sonicmoe.integrations.transformers import register

    register()
    torch.manual_seed(3)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    options = {"target_modules": [], "init_lora_weights": False}
    config = peft.LoraConfig(r=16, target_parameters=targets, **options)
    model = peft.get_peft_model(model_of("mixtral"), config).get_base_model()
    expected = run_model(model, "eager")
    found = errors(run_model(model, implementation), expected)
    assert len(found) == 1 + 4 and all("lora_" in name or name == "logits" for name in found)
    assert max(found.values()) <= (FP8 if implementation == "sonicmoe_fp8" else BF16), found
