"""The records of the engines and the rule that reads them: no framework, no GPU, no compiler."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from types import SimpleNamespace

import pytest
from public_models import EXPERT_SIZES
from worlds import ROOT

from sonicmoe.architectures import DEFAULT_ARCH
from sonicmoe.engine import capabilities
from sonicmoe.engine.capabilities import (
    BF16,
    HOPPER,
    HOST,
    MXFP8,
    RECORDS,
    REFERENCE,
    EngineRecord,
    missing_package,
    missing_tool,
    problem,
    require,
)
from sonicmoe.engine.settings import EngineSettings, TokenFormat, Workload
from sonicmoe.enums import ACTIVATIONS, ActivationType, EngineName, ZCode
from sonicmoe.errors import ConfigError, DTypeError, ShapeError
from sonicmoe.kernels.blackwell.quack_gemm import PACKAGES
from sonicmoe.quant.recipes import RECIPES

FP8, PLAIN = EngineSettings(recipe=RECIPES["dx256"]), EngineSettings()
HOPPER_LOAD, BF16_LOAD = Workload(FP8, 2048, 768), Workload(PLAIN, 2048, 768)
# Those that compute the activation or its gradient.
GATED_KERNELS = {
    EngineName.BF16: {"bf16_gemm", "bf16_dgated"},
    EngineName.HOPPER: {"fp8_grouped_gemm", "fp8_dgated"},
}


def changed(workload: Workload, **changes) -> Workload:
    """With other fields; names of settings go to the settings."""
    own = {name: changes.pop(name) for name in [*changes] if name in vars(workload)}
    return replace(workload, settings=replace(workload.settings, **changes), **own)


@pytest.mark.parametrize("sizes", EXPERT_SIZES.values(), ids=EXPERT_SIZES)
def test_public_models_are_served(sizes):
    for record, workload in ((HOPPER, HOPPER_LOAD), (BF16, BF16_LOAD), (REFERENCE, HOPPER_LOAD)):
        hidden, intermediate = sizes
        served = replace(workload, hidden_size=hidden, intermediate_size=intermediate)
        assert problem(record, served, "sm_90a") is None
    for more_hidden, more_inner in ((8, 0), (0, 32)):
        size = {"hidden_size": hidden + more_hidden, "intermediate_size": intermediate + more_inner}
        words = f"H is {size['hidden_size']} and I is {size['intermediate_size']}"
        assert words in problem(HOPPER, replace(HOPPER_LOAD, **size), "sm_90a")


BY_128 = TokenFormat.E4M3_1X128
MX_LOAD = changed(HOPPER_LOAD, recipe=RECIPES["iso32-pow2"], save_z=ZCode.BF16)
CANNOT = (
    (HOPPER, {"recipe": None}, ConfigError, "FP8 is off"),
    (HOPPER, {"recipe": RECIPES["1x128"]}, ConfigError,
     "the recipe is '1x128', and its kernels are made for 'dx256'"),
    (HOPPER, {"recipe": RECIPES["dx256-pow2"]}, ConfigError, "the recipe is 'dx256-pow2'"),
    (HOPPER, {"activation": ActivationType.SILU}, ConfigError,
     "the activation is 'silu', and it has ['swiglu', 'geglu', 'reglu', 'swiglu_oai', "),
    (HOPPER, {"save_z": ZCode.E4M3}, ConfigError,
     "z is saved as 'e4m3', and it stores 'adaptive' or 'int8' or 'bf16'"),
    (HOPPER, {"dtype": "float16"}, DTypeError, "tokens are float16, and it takes bfloat16"),
    (HOPPER, {"hidden_size": 2056}, ShapeError,
     "H is 2056 and I is 768, and it needs multiples of 16 and 64"),
    (HOPPER, {"intermediate_size": 96}, ShapeError, "H is 2048 and I is 96"),
    (MXFP8, {"tokens": BY_128}, DTypeError, "tokens come as 'e4m3_1x128'"),
    (MXFP8, {"recipe": RECIPES["iso128"]}, ConfigError, "made for 'iso32-pow2'"),
    (MXFP8, {"save_z": ZCode.INT8}, ConfigError, "it stores 'bf16'"),
    (MXFP8, {"activation": ActivationType.GELU}, ConfigError, "the activation is 'gelu'"),
    (MXFP8, {"bias": True}, ConfigError, "the experts have biases, and it has none"),
    (MXFP8, {"low_rank": True}, ConfigError, "the experts have low-rank adapters, and it has no"),
    (MXFP8, {"intermediate_size": 752}, ShapeError, "it needs multiples of 32 and 32"),
    (MXFP8, {"dtype": "float16"}, DTypeError, "tokens are float16"),
    (BF16, {"tokens": BY_128}, DTypeError, "tokens come as 'e4m3_1x128', and it"),
    (BF16, {"recipe": RECIPES["dx256"]}, ConfigError,
     "FP8 is on (recipe 'dx256'), and it quantises nothing"),
    (BF16, {"dtype": "float32"}, DTypeError,
     "tokens are float32, and it takes bfloat16 or float16"),
    (BF16, {"hidden_size": 3076}, ShapeError,
     "H is 3076 and I is 768, and it needs multiples of 8 and 8"),
    (REFERENCE, {"tokens": BY_128, "recipe": None}, ConfigError,
     "tokens come as 'e4m3_1x128', and FP8 is off"),
    (REFERENCE, {"tokens": BY_128, "recipe": RECIPES["wide256"]}, ConfigError,
     "tokens come as 'e4m3_1x128', and recipe 'wide256' reads them in 1x256 blocks"),
)  # fmt: skip
LOADS = {HOPPER: HOPPER_LOAD, MXFP8: MX_LOAD}


@pytest.mark.parametrize(
    ("record", "changes", "kind", "words"),
    CANNOT,
    # A test must have one name in all parallel workers, so no record is in it as text.
    ids=lambda value: value.name.value if isinstance(value, EngineRecord) else None,
)
def test_what_an_engine_cannot_compute(record, changes, kind, words):
    workload = changed(LOADS.get(record, BF16_LOAD), **changes)
    assert words in problem(record, workload)
    arch = record.architectures[0].name if record.architectures else DEFAULT_ARCH
    assert problem(record, workload) == problem(record, workload, arch)
    refusal = f"the {record.name.value} engine cannot compute this: "
    with pytest.raises(kind, match=refusal) as found:
        require(record, workload)
    assert words in str(found.value)


@pytest.mark.parametrize("record", [HOPPER, MXFP8, BF16], ids=lambda record: record.name.value)
@pytest.mark.parametrize(
    "arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_121a", "sm_110a"]
)
def test_other_architectures(record, arch):
    own = ", ".join(map(str, record.architectures))
    wanted = f"the architecture is {arch}, and its kernels are for {own}"
    served = arch in {known.name for known in record.architectures}
    assert problem(record, None, arch) == (None if served else wanted)
    assert problem(record, None, HOST).startswith("no GPU: tensors are on the host")
    assert problem(REFERENCE, None, arch) is problem(REFERENCE, None, HOST) is None


class TestActivationsOfRecords:
    """A record says an engine has a kernel exactly where its sources have one."""

    def test_hopper_has_those_of_the_header(self):
        header = (ROOT / "sonicmoe/kernels/sm90/activations.cuh").read_text(encoding="utf-8")
        named = dict(re.findall(r"^  X\((\w+), (\w+)\)", header, flags=re.M))
        assert {ActivationType(name) for name in named} == set(HOPPER.activations)
        assert all(ACTIVATIONS[activation].gated for activation in HOPPER.activations)
        # A struct has the parameters of the record.
        structs = r"^struct (\w+)[^;]*?kParameters = \"(.*?)\";"
        parameters = dict(re.findall(structs, header, re.M))
        for name, struct in named.items():
            record = ACTIVATIONS[ActivationType(name)]
            found = parameters.get(struct, "").split()
            assert set(found) == {parameter.name for parameter in record.parameters}, name

    def test_bf16_on_hopper_has_those_of_its_table(self):
        table = (ROOT / "sonicmoe/kernels/sm90/bf16_launch.hpp").read_text(encoding="utf-8")
        named = dict(re.findall(r"^  X\((\w+), \w+, (\w+)\)", table, flags=re.M))
        assert named == {
            activation.value: str(ACTIVATIONS[activation].gated).lower()
            for activation in BF16.activations
        }

    @pytest.mark.parametrize("record", [BF16, HOPPER], ids=lambda record: record.name.value)
    def test_on_hopper_parameters_of_a_layer_are_no_kernels(self, record):
        """Layers of one activation share their kernels; those of another do not."""
        activation = ActivationType.SWIGLU_CLAMP

        def keys(own=(), activation=activation):
            load = HOPPER_LOAD if record is HOPPER else BF16_LOAD
            settings = changed(load, activation=activation, activation_parameters=own)
            assert problem(record, settings) is None
            return {job.key() for job in record.jobs(settings, "sm_90a")}

        assert keys((("limit", 7.5),)) == keys()
        plain = keys(activation=ActivationType.SWIGLU)
        assert {key.kernel for key in plain} == {key.kernel for key in keys()}
        assert {key.kernel for key in plain - keys()} == GATED_KERNELS[record.name]


class TestTools:
    """What compiles and loads the kernels; a kernel in the cache needs no compiler."""

    @pytest.fixture
    def machine(self, monkeypatch):
        """`machine(packages, nvcc)`; returns the keys that the cache holds."""
        held = set()
        cache = SimpleNamespace(try_load=lambda key: key if key in held else None)
        monkeypatch.setattr(capabilities, "default_cache", lambda: cache)

        def make(packages, nvcc=True):
            found = lambda *names: tuple((name, packages.get(name, "absent")) for name in names)  # noqa: E731
            monkeypatch.setattr(capabilities, "package_versions", found)
            monkeypatch.setattr(capabilities, "find_toolkit", lambda: object() if nvcc else None)
            return held

        return make

    EVERYTHING = {"apache-tvm-ffi": "1", **PACKAGES}  # noqa: RUF012

    @pytest.mark.parametrize("record", [HOPPER, BF16], ids=lambda record: record.name.value)
    def test_without_the_loader(self, machine, record):
        machine({**PACKAGES})
        assert "apache-tvm-ffi, which loads" in missing_tool(record, None, "sm_90a")

    @pytest.mark.parametrize(
        ("record", "workload"), [(HOPPER, HOPPER_LOAD), (BF16, BF16_LOAD)], ids=["hopper", "bf16"]
    )
    def test_without_nvcc_the_cache_must_hold_every_kernel(self, machine, record, workload):
        held = machine(self.EVERYTHING, nvcc=False)
        jobs = record.jobs(workload, "sm_90a")
        held.update(job.key() for job in jobs[:-1])
        assert "no nvcc to compile its kernels" in missing_tool(record, workload, "sm_90a")
        held.add(jobs[-1].key())
        assert missing_tool(record, workload, "sm_90a") is None

    @pytest.mark.parametrize("found", ["0.6.4", None])
    def test_without_the_pinned_quack(self, machine, found):
        """Blackwell needs it, and Hopper does not."""
        packages = self.EVERYTHING | {"quack-kernels": found or "absent"}
        held = machine(packages)
        words = f"quack-kernels 0.6.5 compiles its GEMMs, and it is {found or 'absent'}"
        assert missing_tool(BF16, None, "sm_100a") == words
        assert missing_tool(BF16, BF16_LOAD, "sm_100a") == words
        assert missing_package(BF16.jobs(BF16_LOAD, "sm_100a")) == words
        held.update(job.key() for job in BF16.jobs(BF16_LOAD, "sm_100a"))
        assert missing_tool(BF16, BF16_LOAD, "sm_100a") is None
        held.clear()
        plain_wgrad = changed(HOPPER_LOAD, fp8_wgrad=False)
        for record, load in ((BF16, BF16_LOAD), (HOPPER, HOPPER_LOAD), (HOPPER, plain_wgrad)):
            assert missing_tool(record, None, "sm_90a") is None
            assert missing_tool(record, load, "sm_90a") is None


def test_pinned_versions_are_those_of_the_installation():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = project["project"]["optional-dependencies"].values()
    pinned = dict(
        text.split(";")[0].strip().split("==") for group in groups for text in group if "==" in text
    )
    assert {name: pinned[name] for name in PACKAGES} == PACKAGES == dict(BF16.packages)


def listed(members) -> str:
    return ", ".join(f"`{getattr(member, 'value', member)}`" for member in members) or "none"


def rows_of_the_page() -> list[str]:
    """The table of docs/engines.md: a row for each property, a column for each engine."""
    properties = {
        "GEMMs": lambda r: r.gemms,
        "architectures": lambda r: ", ".join(map(str, r.architectures)) or "any device, a host too",
        "tokens and weights": lambda r: listed(r.dtypes),
        "recipes": lambda r: "all, and none" if r is REFERENCE else listed(filter(None, r.recipes)),
        "activations": lambda r: (
            "all" if set(r.activations) == set(ActivationType) else listed(r.activations)
        ),
        "codes of the saved z": lambda r: listed(r.z_codes),
        "H, I multiples of": lambda r: f"{r.hidden_multiple}, {r.intermediate_multiple}",
        "biases": lambda r: "yes" if r.biases else "no",
        "low-rank adapters": lambda r: "yes" if r.low_rank else "no",
        "token formats": lambda r: listed(r.tokens),
        "gradients into": lambda r: listed(r.gradients),
        "loaded by": lambda r: r.loads_with or "–",
        "compiled by": lambda r: ", ".join(
            [r.compiler or "–", *(f"{n} {v}" for n, v in r.packages)]
        ),
    }
    header = ["", *(f"`{name.value}`" for name in RECORDS)]
    rows = [[name, *map(text, RECORDS.values())] for name, text in properties.items()]
    return [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in (header, *rows)]


def test_the_table_of_the_engines_is_that_of_the_records():
    page = (ROOT / "docs/engines.md").read_text(encoding="utf-8")
    header, *rows = rows_of_the_page()
    wanted = "\n".join([header, "|---" * (len(RECORDS) + 1) + "|", *rows])
    assert f"{wanted}\n\n" in page, f"docs/engines.md needs this table:\n{wanted}"
