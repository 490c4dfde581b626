"""What `doctor` says a call would run is what the node, `MoE` and a model of transformers run."""

import functools
import importlib.util

import pytest
import torch
from click.testing import CliRunner

from sonicmoe import MoE, SonicMoEConfig
from sonicmoe.cli.doctor import doctor, engine_lines
from sonicmoe.config import current_config
from sonicmoe.diagnostics import doctor_calls, selftest
from sonicmoe.diagnostics.doctor_calls import calls_on
from sonicmoe.diagnostics.doctor_report import CallState, Report
from sonicmoe.diagnostics.selftest import H, I
from sonicmoe.engine import select
from sonicmoe.engine.capabilities import BF16
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.engine.select import EngineChoice, choose_engine
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.errors import SonicMoEError
from sonicmoe.functional import call
from sonicmoe.node import choices

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)
SETTINGS = {
    "defaults": {},
    "perf": {"SONIC_MOE_FP8_MODE": "perf"},
    "mem, plain wgrad": {"SONIC_MOE_FP8_MODE": "mem", "SONIC_MOE_FP8_WGRAD": "0"},
    "another recipe": {"SONIC_MOE_FP8_MODE": "perf", "SONIC_MOE_FP8_RECIPE": "deepseek-v3"},
    "z in e4m3": {"SONIC_MOE_FP8_SAVE_Z": "e4m3"},
    "reference": {"SONIC_MOE_ENGINE": "reference"},
    "bf16": {"SONIC_MOE_ENGINE": "bf16"},
    "hopper": {"SONIC_MOE_ENGINE": "hopper"},
}
# Architecture, and the engine whose kernels nothing can compile there.
MACHINES = {
    "cpu": None,
    "H200": ("sm_90a", None),
    "H200 without quack": ("sm_90a", BF16),
    "A100": ("sm_80", None),
}


@pytest.fixture(params=MACHINES)
def device(request, monkeypatch):
    """Its name, on a machine that is made up; tensors stay on the host."""
    machine = MACHINES[request.param]
    if machine is None:
        return "cpu"
    arch, lacking = machine
    monkeypatch.setattr(select, "arch_of", lambda device: arch)
    missing = lambda record, *_: "quack is absent" if record is lacking else None  # noqa: E731
    monkeypatch.setattr(select, "missing_tool", missing)
    return "cuda:0"


@pytest.fixture
def chosen(monkeypatch, device):
    """Engine, precision and reason of every choice that calls make, as if their tensors lay on
    `device`. The reference engine then computes them.
    """
    made = []

    def ready(_, requested, workload):
        choice = choose_engine(device, requested, workload)
        recipe = (choice.settings or workload.settings).recipe
        precision = "bfloat16" if recipe is None else f"FP8 ({recipe.name})"
        made.append((choice.engine.name, precision, choice.reason))
        return EngineChoice(ReferenceEngine(), choice.reason, settings=choice.settings)

    for module in (choices, call):
        monkeypatch.setattr(module, "ready_engine", ready)
    call._made.clear()
    yield made
    call._made.clear()


def node(config=None):
    w1, w2 = (torch.randn(2, *s).bfloat16().requires_grad_() for s in ((2 * I, H), (H, I)))
    made = SonicMoEMlpNode.from_native(w1, w2, config=config)
    made(tokens(), None, torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1))


def layer(use_fp8=None):
    MoE(2, 1, H, I).bfloat16()(tokens(), use_fp8=use_fp8)


@functools.cache
def built(implementation):
    from integrations.hf_models import FAMILIES, build

    from sonicmoe.integrations.transformers import register

    register()
    config = FAMILIES["qwen3-moe"](1)
    config.hidden_size, config.moe_intermediate_size = H, I
    return build(config, implementation).bfloat16()


def model(implementation):
    built(implementation)(input_ids=torch.arange(8).reshape(1, 8))


def tokens():
    return torch.randn(4, H).bfloat16()


CALLS = {
    "node": node,
    'node with fp8_mode="perf"': lambda: node(SonicMoEConfig(fp8_mode="perf")),
    "MoE and the functional API": layer,
    "MoE and the functional API with use_fp8=True": lambda: layer(True),
    'transformers "sonicmoe"': lambda: model("sonicmoe"),
    'transformers "sonicmoe_fp8"': lambda: model("sonicmoe_fp8"),
}


@needs_transformers
@pytest.mark.parametrize("settings", SETTINGS)
def test_doctors_answer_is_what_runs(settings, device, chosen, set_flags):
    set_flags(**SETTINGS[settings])
    said = {state.call: state for state in calls_on(current_config(), device)}
    assert list(said) == list(CALLS)
    assert chosen == [], "doctor runs nothing"
    for name, run in CALLS.items():
        chosen.clear()
        call._made.clear()
        try:
            run()
        except SonicMoEError as error:
            found = CallState(name, None, None, str(error))
        else:
            found = CallState(name, *chosen[0])
        assert found == said[name]


def test_the_answers_differ_where_they_should(monkeypatch, set_flags):
    """`doctor` said "FP8 off" on a machine where `use_fp8=True` runs in FP8."""
    set_flags()
    monkeypatch.setattr(select, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(select, "missing_tool", lambda *_: None)
    states = calls_on(current_config(), "cuda:0")
    plain, fp8 = ({(state.engine, state.precision) for state in states[n::2]} for n in (0, 1))
    assert (plain, fp8) == ({("bf16", "bfloat16")}, {("hopper", "FP8 (dx256)")})
    lines = engine_lines(Report(calls=states))
    assert [name for name, _ in lines] == ["engine", "engine"]
    assert lines[0][1].startswith("bf16 in bfloat16 for node, MoE and the functional API, trans")
    assert lines[1][1].startswith('hopper in FP8 (dx256) for node with fp8_mode="perf", MoE and ')


@pytest.mark.parametrize(
    ("found", "words"),
    [(None, "transformers >= 5.7 is not installed"), ("5.6.2", "transformers is 5.6.2; needed: >= 5.7")],
)  # fmt: skip
def test_transformers_that_cannot_be_used(found, words, monkeypatch, set_flags):
    def version(name):
        if found is None:
            raise doctor_calls.PackageNotFoundError(name)
        return found

    set_flags()
    monkeypatch.setattr(doctor_calls, "version", version)
    assert calls_on(current_config(), "cpu")[-1] == CallState("transformers", None, None, words)


def test_every_call_is_on_the_screen(monkeypatch, tmp_path, set_flags):
    set_flags(SONIC_MOE_CACHE_DIR=str(tmp_path), SONIC_MOE_LOCAL_CACHE_DIR=str(tmp_path))
    monkeypatch.setattr(selftest.SelfTest, "run", lambda test: [])
    screen = CliRunner().invoke(doctor, ["--framework", "torch"], env={"COLUMNS": "400"}).stdout
    lines = [line for line in screen.splitlines() if line.startswith("engine ")]
    for state in calls_on(current_config(), selftest.find_device().name):
        assert any(state.call in line and state.reason in line for line in lines)
