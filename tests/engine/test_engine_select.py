"""`choose_engine`: the decision, its reason, and its one log line."""

from __future__ import annotations

import logging
from dataclasses import replace

import framework  # noqa: F401  before anything of sonicmoe
import pytest

from sonicmoe.engine import select
from sonicmoe.engine.capabilities import BF16, HOPPER, RECORDS, TRITON
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.engine.select import ENGINES, announce, choose_engine
from sonicmoe.engine.settings import TokenFormat, Workload
from sonicmoe.enums import ActivationType, EngineName, ZCode
from sonicmoe.errors import EngineUnavailableError
from sonicmoe.quant.recipes import RECIPES

FP8 = EngineSettings(recipe=RECIPES["dx256"])
WORKLOAD = Workload(FP8, 2048, 768)
# What the Hopper engine cannot do, and words of the reason.
BEYOND_HOPPER = [
    (replace(WORKLOAD, hidden_size=2056), "H is 2056 and I is 768"),
    (replace(WORKLOAD, intermediate_size=96), "H is 2048 and I is 96"),
    (replace(WORKLOAD, dtype="float16"), "tokens are float16"),
    (replace(WORKLOAD, dtype="float32"), "tokens are float32"),
    (replace(WORKLOAD, bias=True), "the experts have biases"),
    (
        replace(WORKLOAD, settings=replace(FP8, recipe=RECIPES["deepseek-v3"])),
        "the recipe is 'deepseek-v3'",
    ),
    (replace(WORKLOAD, settings=replace(FP8, save_z=ZCode.E4M3)), "z is saved as 'e4m3'"),
    (
        replace(WORKLOAD, settings=replace(FP8, activation=ActivationType.GELU)),
        "the activation is 'gelu'",
    ),
]
beyond_hopper = pytest.mark.parametrize(
    ("workload", "words"), BEYOND_HOPPER, ids=[words for _, words in BEYOND_HOPPER]
)


@pytest.fixture
def hopper(monkeypatch):
    """A machine with a Hopper GPU and every package."""
    monkeypatch.setattr(select, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(select, "missing_tool", lambda *_: None)


@pytest.fixture
def without_bf16(monkeypatch):
    """A machine on which the BF16 GEMMs cannot be compiled."""
    monkeypatch.setattr(
        select, "missing_tool", lambda record, *_: "quack is absent" if record is BF16 else None
    )


@pytest.fixture
def without_packages(monkeypatch):
    """A machine that has neither quack nor Triton."""
    absent = {BF16.name: "quack is absent", TRITON.name: "triton is absent"}
    monkeypatch.setattr(select, "missing_tool", lambda record, *_: absent.get(record.name))


@pytest.mark.parametrize("requested", [EngineName.AUTO, EngineName.REFERENCE])
def test_a_machine_without_a_gpu_runs_the_reference_engine(requested):
    choice = choose_engine("cpu", requested)
    assert isinstance(choice.engine, ReferenceEngine)
    assert choice.engine.name == "reference"
    assert choice.reason


def test_the_default_is_auto_and_says_why():
    assert "no GPU" in choose_engine("cpu").reason
    assert choose_engine("cpu", EngineName.REFERENCE).reason != choose_engine("cpu").reason


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (WORKLOAD, "FP8 emulated exactly (recipe dx256)"),
        (
            replace(WORKLOAD, settings=replace(FP8, recipe=RECIPES["deepseek-v3"])),
            "FP8 emulated exactly (recipe deepseek-v3)",
        ),
        (replace(WORKLOAD, settings=EngineSettings()), "FP8 off"),
        (None, "FP8, where it is on, emulated exactly"),
    ],
    ids=["dx256", "deepseek-v3", "off", "unknown"],
)
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_plain_operations_say_whether_fp8_is_on(device, workload, words, monkeypatch):
    monkeypatch.setattr(select, "arch_of", lambda device: "sm_70")
    reason = choose_engine(device, workload=workload).reason
    assert reason.endswith(f"plain tensor operations in fp32, {words}")


@pytest.mark.parametrize(
    "requested",
    [name for name in EngineName if name not in (EngineName.AUTO, EngineName.REFERENCE)],
)
def test_an_engine_that_cannot_run_on_a_cpu_is_refused_by_name(requested):
    with pytest.raises(EngineUnavailableError, match=requested.value) as caught:
        choose_engine("cpu", requested)
    assert "reference" in str(caught.value)


def test_every_engine_of_the_build_carries_its_name():
    for name, make in ENGINES.items():
        assert make().name == name.value


def test_announced_once_per_engine_and_device(caplog):
    choice = choose_engine("cpu")
    with caplog.at_level(logging.INFO, logger="sonicmoe"):
        for device in ("cpu", "cpu", "cuda:1", "cpu"):
            announce(choice, device)
    assert [r.getMessage() for r in caplog.records] == [
        f"engine reference on {d}: {choice.reason}" for d in ("cpu", "cuda:1")
    ]


@pytest.mark.parametrize(
    ("arch", "gpu"),
    [
        ("sm_100a", "Blackwell"),
        ("sm_103a", "Blackwell Ultra"),
        ("sm_120a", "Blackwell RTX"),
        ("sm_121a", "Blackwell GB10"),
    ],
)
def test_blackwell_runs_the_bf16_engine_and_says_that_it_has_no_fp8(arch, gpu, monkeypatch):
    monkeypatch.setattr(select, "arch_of", lambda device: arch)
    monkeypatch.setattr(select, "missing_tool", lambda *_: None)
    plain = choose_engine("cuda:0", workload=replace(WORKLOAD, settings=EngineSettings()))
    assert plain.engine.name == "bf16" and not plain.falls_back
    assert plain.reason == f"a {gpu} GPU: grouped GEMMs in the dtype of the tokens"
    fp8 = choose_engine("cuda:0", workload=WORKLOAD)
    assert fp8.engine.name == "bf16" and fp8.falls_back and fp8.settings.recipe is None
    assert fp8.reason.startswith(f"not hopper: the architecture is {arch}, and its kernels are for")
    with pytest.raises(EngineUnavailableError, match=f"the architecture is {arch}"):
        choose_engine("cuda:0", EngineName.HOPPER, WORKLOAD)


class TestOnHopper:
    def test_fp8_runs_the_hopper_engine(self, hopper):
        choice = choose_engine("cuda:0", workload=WORKLOAD)
        assert choice.engine.name == "hopper"
        assert not choice.falls_back and "Hopper GPU" in choice.reason

    @pytest.mark.parametrize(
        "workload", [None, replace(WORKLOAD, settings=EngineSettings())], ids=["unknown", "plain"]
    )
    def test_without_fp8_the_bf16_engine_runs(self, hopper, workload):
        assert choose_engine("cuda:0", workload=workload).engine.name == "bf16"

    @beyond_hopper
    def test_what_it_cannot_do_falls_back(self, hopper, workload, words):
        """To BF16 without the recipe, or to plain operations where BF16 cannot either."""
        choice = choose_engine("cuda:0", workload=workload)
        assert choice.falls_back
        assert choice.reason.startswith("not hopper: ") and words in choice.reason
        if workload.dtype == "float32":
            assert choice.engine.name == "reference" and choice.settings is None
        else:
            assert choice.engine.name == "bf16" and choice.reason.endswith("without FP8")
            assert choice.settings == replace(workload.settings, recipe=None)

    @beyond_hopper
    def test_and_to_the_triton_engine_without_quack(self, hopper, without_bf16, workload, words):
        choice = choose_engine("cuda:0", workload=workload)
        if workload.dtype != "float32":
            assert choice.engine.name == "triton" and choice.falls_back
            assert choice.settings == replace(workload.settings, recipe=None)
            assert choice.reason.endswith("grouped GEMMs in Triton, without FP8")

    @beyond_hopper
    def test_and_to_plain_operations_without_quack_and_triton(
        self, hopper, without_packages, workload, words
    ):
        choice = choose_engine("cuda:0", workload=workload)
        assert choice.engine.name == "reference" and choice.falls_back and choice.settings is None
        assert choice.reason.startswith("not hopper: ") and words in choice.reason

    @beyond_hopper
    def test_and_is_refused_by_name(self, hopper, workload, words):
        with pytest.raises(EngineUnavailableError) as caught:
            choose_engine("cuda:0", EngineName.HOPPER, workload)
        assert "engine 'hopper' cannot run: " in str(caught.value) and words in str(caught.value)
        assert "able: ['reference']" in str(caught.value)

    def test_by_name_without_a_workload_it_needs_none_of_the_bf16_packages(
        self, hopper, without_packages
    ):
        assert choose_engine("cuda:0", EngineName.HOPPER).engine.name == "hopper"
        with pytest.raises(
            EngineUnavailableError,
            match=r"quack is absent; able: \['reference', 'hopper'\]",
        ):
            choose_engine("cuda:0", EngineName.BF16)

    def test_an_engine_of_the_other_precision_is_refused_by_name(self, hopper):
        with pytest.raises(
            EngineUnavailableError, match=r"FP8 is on \(recipe 'dx256'\), and it quantises nothing"
        ):
            choose_engine("cuda:0", EngineName.BF16, WORKLOAD)
        with pytest.raises(
            EngineUnavailableError,
            match=r"FP8 is off, and its GEMMs are FP8; able: \['reference', 'bf16', 'triton'\]",
        ):
            choose_engine("cuda:0", EngineName.HOPPER, replace(WORKLOAD, settings=EngineSettings()))

    def test_another_gpu_falls_back(self, hopper, monkeypatch):
        monkeypatch.setattr(select, "arch_of", lambda device: "sm_80")
        choice = choose_engine("cuda:0", workload=WORKLOAD)
        assert choice.falls_back and choice.engine.name == "triton"
        assert "the architecture is sm_80, and its kernels are for sm_90a" in choice.reason
        assert choice.settings == replace(FP8, recipe=None)

    @pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_gpus_before_hopper_run_the_triton_engine(self, hopper, monkeypatch, arch, dtype):
        monkeypatch.setattr(select, "arch_of", lambda device: arch)
        workload = replace(WORKLOAD, settings=EngineSettings(), dtype=dtype)
        choice = choose_engine("cuda:0", workload=workload)
        assert choice.engine.name == "triton" and not choice.falls_back
        assert choice.reason.startswith("a") and choice.reason.endswith("GEMMs in Triton")

    def test_without_quack_a_hopper_gpu_runs_the_triton_engine(self, hopper, without_bf16):
        workload = replace(WORKLOAD, settings=EngineSettings())
        choice = choose_engine("cuda:0", workload=workload)
        assert choice.engine.name == "triton"

    @pytest.mark.parametrize("activation", ActivationType, ids=lambda member: member.value)
    @pytest.mark.parametrize("recipe", [None, RECIPES["dx256"]], ids=["plain", "fp8"])
    def test_auto_never_picks_an_engine_without_the_activation(
        self, hopper, monkeypatch, activation, recipe
    ):
        """Not even where only the record of that one engine lacks it."""
        settings = replace(FP8, activation=activation, recipe=recipe)
        workload = replace(WORKLOAD, settings=settings)
        chosen = choose_engine("cuda:0", workload=workload).engine.name
        assert activation in RECORDS[EngineName(chosen)].activations
        for record in (HOPPER, BF16, TRITON):
            others = tuple(member for member in record.activations if member is not activation)
            monkeypatch.setitem(RECORDS, record.name, replace(record, activations=others))
        choice = choose_engine("cuda:0", workload=workload)
        assert choice.engine.name == "reference" and choice.falls_back
        assert f"the activation is '{activation.value}'" in choice.reason

    def test_parameters_of_a_layer_go_to_an_engine_that_takes_them(self, hopper, monkeypatch):
        oai = EngineSettings(ActivationType.SWIGLU_OAI, activation_parameters=(("alpha", 1.5),))
        assert choose_engine("cuda:0", workload=Workload(oai, 64, 64)).engine.name == "bf16"
        monkeypatch.setitem(RECORDS, BF16.name, replace(BF16, sets_parameters=False))
        assert choose_engine("cuda:0", workload=Workload(oai, 64, 64)).engine.name == "triton"
        monkeypatch.setitem(RECORDS, TRITON.name, replace(TRITON, sets_parameters=False))
        choice = choose_engine("cuda:0", workload=Workload(oai, 64, 64))
        assert choice.engine.name == "reference" and choice.falls_back
        assert "alpha of swiglu_oai is 1.5, and it computes with 1.702 alone" in choice.reason

    def test_the_host_is_no_fallback(self):
        assert not choose_engine("cpu", workload=WORKLOAD).falls_back

    @pytest.mark.parametrize(
        ("workload", "level"),
        [(WORKLOAD, "INFO"), (BEYOND_HOPPER[0][0], "WARNING")],
        ids=["serves", "falls back"],
    )
    def test_a_fallback_is_a_warning(self, hopper, caplog, workload, level):
        choice = choose_engine("cuda:0", workload=workload)
        with caplog.at_level(logging.INFO, logger="sonicmoe"):
            for _ in range(3):
                announce(choice, "cuda:0")
        (record,) = caplog.records
        assert record.levelname == level
        assert record.getMessage() == f"engine {choice.engine.name} on cuda:0: {choice.reason}"

    def test_two_reasons_to_fall_back_are_two_lines(self, hopper, caplog):
        with caplog.at_level(logging.INFO, logger="sonicmoe"):
            for workload, _ in (*BEYOND_HOPPER[:2], *BEYOND_HOPPER[:2]):
                announce(choose_engine("cuda:0", workload=workload), "cuda:0")
        assert len(caplog.records) == 2

    def test_tokens_in_fp8_do_not_change_the_engine(self, hopper, caplog):
        """An engine that cannot read them is handed their values, and the log says so once."""
        read = replace(WORKLOAD, tokens=TokenFormat.E4M3_1X128)
        assert choose_engine("cuda:0", workload=read).dequantises is None
        workload = replace(WORKLOAD, tokens=TokenFormat.E4M3_ROW)
        choice = choose_engine("cuda:0", workload=workload)
        assert choice.engine.name == "hopper" and not choice.falls_back
        assert (
            choice.dequantises == "tokens come as 'e4m3_row', and it takes ['plain', 'e4m3_1x128']"
        )
        assert choose_engine("cuda:0", EngineName.HOPPER, workload).dequantises is not None
        assert choose_engine("cuda:0", workload=WORKLOAD).dequantises is None
        with caplog.at_level(logging.INFO, logger="sonicmoe"):
            for _ in range(3):
                announce(choice, "cuda:0")
        assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
        assert "engine hopper on cuda:0: tokens that arrive in FP8 are dequantised to bfloat16" in (
            caplog.records[1].getMessage()
        )

    def test_the_reference_engine_reads_tokens_in_fp8(self):
        for tokens in TokenFormat:
            workload = replace(WORKLOAD, tokens=tokens)
            assert choose_engine("cpu", workload=workload).dequantises is None
