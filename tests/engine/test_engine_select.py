"""`choose_engine`: the decision, its reason, and its one log line."""

from __future__ import annotations

import logging
from dataclasses import replace

import framework  # noqa: F401  before anything of sonicmoe
import pytest

from sonicmoe.engine import select
from sonicmoe.engine.capabilities import BF16, HOPPER, RECORDS, TRITON
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.select import announce, choose_engine
from sonicmoe.engine.settings import TokenFormat, Workload
from sonicmoe.enums import ActivationType, EngineName, ZCode
from sonicmoe.errors import EngineUnavailableError
from sonicmoe.quant.recipes import RECIPES

FP8 = EngineSettings(recipe=RECIPES["dx256"])
WORKLOAD = Workload(FP8, 2048, 768)
PLAIN = replace(WORKLOAD, settings=EngineSettings())
MX = replace(WORKLOAD, settings=EngineSettings(recipe=RECIPES["iso32-pow2"], save_z=ZCode.BF16))


def with_settings(**changes):
    return replace(WORKLOAD, settings=replace(FP8, **changes))


# What the Hopper engine cannot do, and words of the reason.
BEYOND_HOPPER = {
    "H is 2056 and I is 768": replace(WORKLOAD, hidden_size=2056),
    "tokens are float16": replace(WORKLOAD, dtype="float16"),
    "tokens are float32": replace(WORKLOAD, dtype="float32"),
    "the recipe is 'deepseek-v3'": with_settings(recipe=RECIPES["deepseek-v3"]),
    "the activation is 'gelu'": with_settings(activation=ActivationType.GELU),
}
beyond_hopper = pytest.mark.parametrize("words", BEYOND_HOPPER)


@pytest.fixture
def machine(monkeypatch):
    """`machine(arch, *absent)`: a GPU of that architecture, and the packages that it lacks."""

    def make(arch, *absent):
        compilers = {BF16.name: "quack", TRITON.name: "triton"}
        missing = {
            n: f"{package} is absent" for n, package in compilers.items() if package in absent
        }
        monkeypatch.setattr(select, "arch_of", lambda device: arch)
        monkeypatch.setattr(select, "missing_tool", lambda record, *_: missing.get(record.name))

    return make


@pytest.fixture
def hopper(machine):
    machine("sm_90a")


def test_a_machine_without_a_gpu_runs_the_reference_engine():
    chosen = [choose_engine("cpu", name) for name in (EngineName.AUTO, EngineName.REFERENCE)]
    assert [choice.engine.name for choice in chosen] == ["reference", "reference"]
    assert "no GPU" in chosen[0].reason and chosen[1].reason not in ("", chosen[0].reason)
    assert not choose_engine("cpu", workload=WORKLOAD).falls_back


@pytest.mark.parametrize(
    "requested", [name for name in EngineName if name.value not in ("auto", "reference")]
)
def test_an_engine_that_cannot_run_on_a_cpu_is_refused_by_name(requested):
    with pytest.raises(EngineUnavailableError, match=requested.value) as caught:
        choose_engine("cpu", requested)
    assert "reference" in str(caught.value)


GROUPED, TRITON_GEMMS = "grouped GEMMs in the dtype of the tokens", "grouped GEMMs in Triton"
OTHER_GPUS = {
    "sm_100a": ("bf16", f"a Blackwell GPU: {GROUPED}"),
    "sm_103a": ("bf16", f"a Blackwell Ultra GPU: {GROUPED}"),
    "sm_120a": ("bf16", f"a Blackwell RTX GPU: {GROUPED}"),
    "sm_121a": ("bf16", f"a Blackwell GB10 GPU: {GROUPED}"),
    **dict.fromkeys(("sm_80", "sm_86", "sm_89"), ("triton", TRITON_GEMMS)),
}


@pytest.mark.parametrize("arch", OTHER_GPUS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_gpus_run_another_engine_and_say_that_it_has_no_fp8(machine, arch, dtype):
    machine(arch)
    name, words = OTHER_GPUS[arch]
    choice = choose_engine("cuda:0", workload=replace(PLAIN, dtype=dtype))
    assert choice.engine.name == name and not choice.falls_back
    assert choice.reason.startswith("a") and choice.reason.endswith(words)
    fp8 = choose_engine("cuda:0", workload=replace(WORKLOAD, dtype=dtype))
    assert fp8.engine.name == name and fp8.falls_back and fp8.settings == replace(FP8, recipe=None)
    why = f"the architecture is {arch}, and its kernels are for sm_90a"
    assert fp8.reason.startswith(f"not hopper: {why}")
    with pytest.raises(EngineUnavailableError, match=why):
        choose_engine("cuda:0", EngineName.HOPPER, WORKLOAD)


def test_mxfp8_runs_by_name_only(machine):
    machine("sm_100a")
    choice = choose_engine("cuda:0", EngineName.MXFP8, MX)
    assert choice.engine.name == "mxfp8" and not choice.falls_back
    choice = choose_engine("cuda:0", workload=MX)
    assert choice.engine.name != "mxfp8" and "mxfp8" not in choice.reason


class TestOnHopper:
    def test_fp8_runs_the_hopper_engine_and_bf16_the_bf16_engine(self, hopper):
        choice = choose_engine("cuda:0", workload=WORKLOAD)
        assert choice.engine.name == "hopper"
        assert not choice.falls_back and "Hopper GPU" in choice.reason
        for workload in (None, PLAIN):
            assert choose_engine("cuda:0", workload=workload).engine.name == "bf16"

    @beyond_hopper
    @pytest.mark.parametrize(
        ("absent", "engine", "how"),
        [
            ((), "bf16", GROUPED),
            (("quack",), "triton", TRITON_GEMMS),
            (("quack", "triton"), "reference", None),
        ],
        ids=["complete", "without quack", "without quack and Triton"],
    )
    def test_what_it_cannot_do_falls_back(self, machine, words, absent, engine, how):
        """To an engine without the recipe, or to plain operations where none can either."""
        machine("sm_90a", *absent)
        workload = BEYOND_HOPPER[words]
        choice = choose_engine("cuda:0", workload=workload)
        assert choice.falls_back
        assert choice.reason.startswith("not hopper: ") and words in choice.reason
        if engine == "reference" or workload.dtype == "float32":
            assert choice.engine.name == "reference" and choice.settings is None
        else:
            assert choice.engine.name == engine
            assert choice.reason.endswith(f"{how}, without FP8")
            assert choice.settings == replace(workload.settings, recipe=None)

    @pytest.mark.parametrize("activation", ActivationType, ids=lambda member: member.value)
    @pytest.mark.parametrize("recipe", [None, RECIPES["dx256"]], ids=["plain", "fp8"])
    def test_auto_never_picks_an_engine_without_the_activation(
        self, hopper, monkeypatch, activation, recipe
    ):
        """Not even where only the record of that one engine lacks it."""
        workload = with_settings(activation=activation, recipe=recipe)
        chosen = choose_engine("cuda:0", workload=workload).engine.name
        assert activation in RECORDS[EngineName(chosen)].activations
        for record in (HOPPER, BF16, TRITON):
            others = tuple(member for member in record.activations if member is not activation)
            monkeypatch.setitem(RECORDS, record.name, replace(record, activations=others))
        choice = choose_engine("cuda:0", workload=workload)
        assert choice.engine.name == "reference" and choice.falls_back
        assert f"the activation is '{activation.value}'" in choice.reason


class TestLines:
    def told(self, caplog, *choices, device="cuda:0"):
        with caplog.at_level(logging.INFO, logger="sonicmoe"):
            for _ in range(3):
                for choice in choices:
                    announce(choice, device)
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    def test_once_per_engine_and_device(self, caplog):
        choice = choose_engine("cpu")
        self.told(caplog, choice, device="cpu")
        lines = self.told(caplog, choice, device="cuda:1")
        line = f"engine reference on {{}}: {choice.reason}"
        assert lines == [("INFO", line.format("cpu")), ("INFO", line.format("cuda:1"))]

    @pytest.mark.parametrize(
        ("workload", "level"),
        [(WORKLOAD, "INFO"), (replace(WORKLOAD, dtype="float16"), "WARNING")],
        ids=["serves", "falls back"],
    )
    def test_a_fallback_is_a_warning(self, hopper, caplog, workload, level):
        choice = choose_engine("cuda:0", workload=workload)
        line = f"engine {choice.engine.name} on cuda:0: {choice.reason}"
        assert self.told(caplog, choice) == [(level, line)]

    @pytest.mark.parametrize("fp8", [False, True])
    def test_experts_in_fp32_are_told_what_to_do(self, hopper, fp8):
        workload = replace(WORKLOAD if fp8 else PLAIN, dtype="float32")
        choice = choose_engine("cuda:0", workload=workload)
        assert choice.engine.name == "reference" and choice.falls_back
        assert choice.reason.endswith("; needed: a model in bfloat16, or autocast to it")
        assert ("needed" in (choose_engine("cpu", workload=workload).on_gpus or "")) == fp8
        assert "needed" not in choose_engine("cuda:0", workload=PLAIN).reason

    def test_tokens_in_fp8_do_not_change_the_engine(self, hopper, caplog):
        """An engine that cannot read them is handed their values, and the log says so once."""
        read = replace(WORKLOAD, tokens=TokenFormat.E4M3_1X128)
        assert choose_engine("cuda:0", workload=read).dequantises is None
        assert choose_engine("cuda:0", workload=WORKLOAD).dequantises is None
        workload = replace(PLAIN, tokens=TokenFormat.E4M3_1X128)
        choice = choose_engine("cuda:0", workload=workload)
        assert choice.engine.name == "bf16" and not choice.falls_back
        assert choice.dequantises == "tokens come as 'e4m3_1x128', and it takes ['plain']"
        assert choose_engine("cuda:0", EngineName.BF16, workload).dequantises is not None
        (level, _), (second, line) = self.told(caplog, choice)
        assert (level, second) == ("INFO", "WARNING")
        assert "bf16 on cuda:0: tokens that arrive in FP8 are dequantised to bfloat16" in line
