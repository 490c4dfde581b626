"""Warm-up: plan, worker processes, record, check, command."""

import json
import os
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from fake_jobs import DyingJob, FailingJob, FakeJob, every_model_needs
from pairwise import pairwise
from racer import load

import sonicmoe.jit_warmup as jit_warmup_module
from sonicmoe.cli.main import main
from sonicmoe.config import SonicMoEConfig, current_config
from sonicmoe.engine.capabilities import BF16, missing_package
from sonicmoe.engine.compile_plan import plan, warm_up_plan
from sonicmoe.enums import EngineName, ZCode
from sonicmoe.errors import ConfigError, DeviceError
from sonicmoe.jit import no_compile
from sonicmoe.jit.errors import CompileForbiddenError
from sonicmoe.jit.plan import ModelSpec
from sonicmoe.jit.warmup import SELECTED, check, read_records, warm_up
from sonicmoe.jit_warmup import warmup_jit

SPEC = ModelSpec(8, 3072, 1536)
DIMENSIONS = ["--E", "8", "--H", "3072", "--I", "1536"]


def states(kernels):
    return {outcome.kernel: outcome.state for outcome in kernels}


def command(*options):
    """`sonicmoe warmup` in this process."""
    return CliRunner().invoke(main, ["warmup", *map(str, options)])


def test_everything_is_compiled_then_forbidden(cache, field):
    jobs = [FakeJob(size, field.log, 0.1) for size in range(1, 7)]
    with no_compile(), pytest.raises(CompileForbiddenError, match=r"fake\[H="):
        warm_up(SPEC, cache, compile_jobs=jobs)
    seen = []
    report = warm_up(SPEC, cache, jobs=3, compile_jobs=jobs, progress=seen.append)
    assert report.complete and len(seen) == 6 and set(states(report.kernels).values()) == {"built"}
    assert field.builds() == dict.fromkeys(range(1, 7), 1)
    with no_compile():
        again = warm_up(SPEC, cache, compile_jobs=jobs)
        assert set(states(again.kernels).values()) == {"cached"}
        assert all(load(job.compile(cache)) == 4096 for job in jobs)


def test_failures_do_not_stop_the_others(cache, field):
    """One that its compiler refuses, and one whose compiler dies."""
    good = [FakeJob(size, field.log) for size in (1, 4, 5)]
    bad = [FailingJob(2, field.log), DyingJob(3, field.log)]
    report = warm_up(SPEC, cache, jobs=1, compile_jobs=[good[0], *bad, *good[1:]])
    found = states(report.kernels)
    assert {name for name, state in found.items() if state == "built"} == {job.name for job in good}
    messages = {one.kernel: one.message for one in report.kernels if one.state == "failed"}
    assert "ValueError: expected ';'" in messages.pop("fake_2")
    assert "fake_3 did not compile (exit status 41)" in messages.pop("fake_3") and not messages
    assert not report.complete and report.record is None


def test_an_error_of_progress_ends_the_warm_up_and_loses_nothing(cache, jobs):
    def fail(outcome):
        raise ValueError(f"no room to print {outcome.kernel}")

    for found in ([], ["fake_1"]):
        assert [each.kernel for each in check(SPEC, cache, jobs(1)).kernels if each.state == "cached"] == found  # fmt: skip
        with pytest.raises(ValueError, match="no room to print fake_1"):
            warm_up(SPEC, cache, jobs=1, compile_jobs=jobs(1), progress=fail)


def test_record_says_what_was_warmed_with_versions(cache, field, jobs):
    (job,) = jobs(1)
    report = warm_up(SPEC, cache, compile_jobs=[job])
    path = field.root / "warmed" / f"{SPEC.digest(SELECTED)}.json"
    assert report.record == path
    (record,) = read_records(field.root)
    assert record["model"] == {
        "E": 8, "H": 3072, "I": 1536, "dtype": "bfloat16", "activation": "swiglu", "arch": "sm_90a",
        "activation_parameters": [], "adapters": False,
    }  # fmt: skip
    assert record["kernels"] == [{"kernel": "fake_1", "key": str(job.key())}]
    assert {"sonicmoe", "apache-tvm-ffi", "triton"} <= set(record["versions"])
    assert record["precision"] == SELECTED
    # A FIFO would hang the reader, and a deep nesting end it; a link is not followed.
    os.mkfifo(path.with_name("a.json"))
    path.with_name("b.json").write_text("[" * 100_000)
    path.with_name("c.json").write_text("[]")
    (field.folder / "elsewhere.json").write_text("{}")
    path.with_name("d.json").symlink_to(field.folder / "elsewhere.json")
    assert read_records(cache.root) == [record], "records that are none are left out"


def test_record_writes_through_no_link(cache, field, jobs):
    victim = field.folder / "victim"
    victim.write_text("precious")
    record = warm_up(SPEC, cache, compile_jobs=jobs(1), jobs=1).record
    record.unlink()
    for name in (record.name, f"{record.name}.{os.getpid()}.partial"):
        record.with_name(name).symlink_to(victim)
    again = warm_up(SPEC, cache, compile_jobs=jobs(1), jobs=1).record
    assert again == record and not record.is_symlink() and victim.read_text() == "precious"


def test_check_sees_what_is_missing_and_writes_nothing(cache, field, jobs):
    assert not check(SPEC, cache, jobs(2)).complete and not field.root.exists()
    artefact = jobs(1)[0].compile(cache)
    assert states(check(SPEC, cache, jobs(2)).kernels) == {"fake_1": "cached", "fake_2": "missing"}
    (artefact.path / "kernel.so").write_bytes(b"")
    assert states(check(SPEC, cache, jobs(2)).kernels) == {"fake_1": "missing", "fake_2": "missing"}


FP8_KERNELS = {
    *("fp8_grouped_gemm", "fp8_dgated", "fp8_wgrad", "quantize", "wgrad_operands"),
    "bias_gradients",
}
BF16_KERNELS = {f"bf16_{name}" for name in ("gemm", "dgated", "wgrad")}
EVERY_RUN = {"routing_metadata", "aggregate", "flush", "peer_rows"}
BLACKWELL = replace(SPEC, arch="sm_100a")
MISSING = missing_package(BF16.jobs(None, "sm_100a"))


def names(planned):
    return {job.name for job in planned.jobs}


CHANGES = [
    *({}, {"fp8_wgrad": False}, {"recompute_z": True}, {"fp8_wgrad": False, "recompute_z": True}),
    *({"stagewise_memory": True}, {"iso_weight": True}),
]


@pytest.mark.parametrize(
    ("dtype", "fp8_mode", "changes"),
    pairwise(["bfloat16", "float32"], ["off", "perf", "mem"], CHANGES),
)
def test_default_plan_covers_whatever_a_run_chooses(dtype, fp8_mode, changes):
    spec = ModelSpec(8, 3072, 1536, dtype)
    needed = plan(spec, current_config(SonicMoEConfig(fp8_mode=fp8_mode, **changes)))
    named = {job.name for job in needed}
    assert named >= EVERY_RUN and set(needed) <= set(warm_up_plan(spec).jobs)
    own = {"quantize", "fp8_grouped_gemm", "fp8_dgated"}
    assert own & named == (own if fp8_mode != "off" else set()), "of fp32 master weights too"


def test_what_each_precision_compiles():
    both, fp8, bf16 = (warm_up_plan(SPEC, precision) for precision in ("both", "fp8", "bf16"))
    assert [p.precision for p in (both, fp8, bf16)] == ["both", "fp8", "bf16"]
    assert not (both.left_out or fp8.left_out or bf16.left_out)
    assert names(fp8) == FP8_KERNELS | EVERY_RUN | {"program"}
    assert names(bf16) == BF16_KERNELS | EVERY_RUN | {"expert_rows", "program"}
    assert set(both.jobs) == set(fp8.jobs) | set(bf16.jobs)
    assert len(set(both.jobs)) == len(both.jobs)
    for plain in (fp8, bf16):
        adapted = warm_up_plan(replace(SPEC, adapters=True), plain.precision).jobs
        assert set(plain.jobs) < set(adapted), "a layer may run without them, too"
        more = set(adapted) - set(plain.jobs)
        gemms = {job.name for job in more if dict(job.defines).get("LOW_RANK")}
        assert len(gemms) == 2 and {job.name for job in more} == gemms | {"low_rank"}


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_blackwell_has_a_bf16_kernel_for_each_product():
    products = {"up", "up_again", "down", "dgated", "dgrad", "wgrad"}
    wanted = {f"bf16_{product}" for product in products} | EVERY_RUN | {"expert_rows"}
    assert names(warm_up_plan(BLACKWELL, "bf16")) == wanted


def test_fp8_has_no_bf16_kernels_unless_the_setting_asks_for_them(
    own_caches, monkeypatch, set_flags
):
    """By the variable and from a program; a check looks for the same kernels."""
    places = {"SONIC_MOE_CACHE_DIR": own_caches.root, "SONIC_MOE_LOCAL_CACHE_DIR": own_caches.local}
    set_flags(**{name: str(path) for name, path in places.items()})
    plain = {"bf16_wgrad", "expert_rows"}

    def checked():
        report = command(*DIMENSIONS, "--precision", "fp8", "--check", "--json").stdout
        return {kernel["kernel"] for kernel in json.loads(report)["kernels"]}

    fp8 = FP8_KERNELS | EVERY_RUN | {"program"}
    assert checked() == fp8
    seen = []
    monkeypatch.setattr(jit_warmup_module, "warm_up", lambda *_, compile_jobs, **__: seen.append(
        names(compile_jobs)) or SimpleNamespace(kernels=()))  # fmt: skip
    for fp8_wgrad in (True, False):
        warmup_jit(8, 3072, 1536, config=SonicMoEConfig(fp8_mode="perf", fp8_wgrad=fp8_wgrad))
    assert seen == [fp8, fp8 | plain]
    set_flags(SONIC_MOE_FP8_WGRAD="0")
    assert checked() == fp8 | plain


@pytest.mark.parametrize(("change", "config", "words"), [
    ({"H": 3080}, {}, "fp8: not hopper: H is 3080 and I is 1536, and it needs multiples of 16 and 64"),
    ({"I": 1504}, {}, "fp8: not hopper: H is 3072 and I is 1504"),
    ({"activation": "gelu"}, {}, "fp8: not hopper: the activation is 'gelu'"),
    ({"dtype": "float16"}, {}, "fp8: not hopper: tokens are float16"),
    ({"arch": "sm_100a"}, {}, "fp8: not hopper: the architecture is sm_100a"),
    ({}, {"recipe": "iso128"}, "fp8: not hopper: the recipe is 'iso128'"),
    ({}, {"save_z": ZCode.E4M3}, "fp8: not hopper: z is saved as 'e4m3'"),
    ({}, {"engine": EngineName.BF16}, "fp8: the configuration asks for engine 'bf16'"),
])  # fmt: skip
def test_what_has_no_fp8_kernels_is_left_out_unless_asked_for(change, config, words, tmp_path):
    sizes = {"E": 8, "H": 3072, "I": 1536, **change}
    planned = warm_up_plan(ModelSpec(**sizes), config=current_config(SonicMoEConfig(**config)))
    assert planned.left_out[0].startswith(words) and planned.precision != "both"
    assert names(planned) >= EVERY_RUN and not FP8_KERNELS & names(planned)
    twice = [line for line in planned.left_out if line.startswith("fp8 with fp8_wgrad=0")]
    assert not twice, "said once"
    with pytest.raises(ConfigError, match="precision='fp8' has no kernels for this model: fp8: "):
        warmup_jit(**sizes, precision="fp8", config=SonicMoEConfig(cache_dir=tmp_path, **config))


def test_gpus_before_hopper_are_given_triton_kernels():
    planned = warm_up_plan(ModelSpec(8, 3072, 1536, arch="sm_80"), "bf16")
    products = {"up", "down", "dgated", "dgrad", "wgrad_down", "wgrad_up"}
    assert names(planned) >= {f"triton_{product}" for product in products} | EVERY_RUN
    assert {job.arch for job in planned.jobs} == {"sm_80"}
    # Where engine `bf16` serves, they are not compiled.
    assert not any(name.startswith("triton") for name in names(warm_up_plan(SPEC)))


@pytest.mark.parametrize(("asked", "kind", "words"), [
    ({"E": 0}, ConfigError, "E=0"), ({"H": -1}, ConfigError, "H=-1"),
    ({"I": 1.5}, ConfigError, r"I=1\.5"), ({"dtype": "int8"}, ConfigError, "dtype='int8'"),
    ({"activation_parameters": (("limit", 7.0),)}, ConfigError, "activation_parameters"),
    ({"precision": "int4"}, ConfigError, "precision='int4'; needed: one of"),
    ({"device": "tpu"}, DeviceError, "device='tpu'"),
    ({"activation": "swish"}, ConfigError, r"^activation is 'swish'; needed: one of \['swiglu', "),
    ({"config": {}}, ConfigError, r"^config is \{\}; needed: a SonicMoEConfig, or None$"),
])  # fmt: skip
def test_what_a_program_cannot_ask_for(asked, kind, words, tmp_path):
    with pytest.raises(kind, match=words):
        warmup_jit(**{"E": 8, "H": 64, "I": 64, "cache_dir": tmp_path, **asked})
    with pytest.raises(ConfigError, match="activation='tanh'"):
        ModelSpec(8, 64, 64, activation="tanh")


def test_a_check_says_how_many_kernels_are_missing(own_caches, jobs, monkeypatch):
    every_model_needs(jobs(2), monkeypatch)
    asked = [
        *(*DIMENSIONS, "--dtype", "float16", "--activation", "situ_glu"),
        *("--activation-parameter", "beta=4", "--jobs", "2"),
        *("--cache-dir", own_caches.folder / "a cache"),
    ]
    found = command(*asked, "--check")
    words = "2 kernels are missing: the same command without --check, and with --arch sm_90a"
    assert found.exit_code == 1 and words in found.stdout.splitlines()[-1]
    built = command(*asked, "--arch", "sm_90a")
    assert built.exit_code == 0 and "; recorded in " in built.stdout.replace("\n", " ")
    # Nothing is missing, so nothing is to be run, and a check has recorded nothing.
    found = command(*asked, "--check")
    assert found.exit_code == 0 and "are missing" not in found.stdout
    assert "recorded" not in found.stdout


def test_a_warm_up_says_which_kernels_no_other_node_finds(own_caches, jobs, monkeypatch):
    """The cache directory takes nothing, so a cluster is not warm."""
    shared, local = own_caches.root, own_caches.local

    def summary(*options, count=2):
        every_model_needs(jobs(count), monkeypatch)
        done = command(*DIMENSIONS, "--jobs", "1", *options)
        assert done.exit_code == 0
        return done.stdout.splitlines()[-1]

    assert f"1 of 1 kernels in {shared}," in summary(count=1)
    kept = shared.rename(shared.with_name("kept"))
    shared.write_text("no directory")
    nobody = f"{local} of this node, where no other node looks,"
    assert f"2 of 2 kernels in {nobody}" in summary()
    assert f"2 of 2 kernels in {nobody}" in summary("--check")
    shared.unlink()
    kept.rename(shared)
    assert f"2 of 2 kernels in {shared}, 1 of them in {nobody}" in summary("--check")
    assert json.loads(command(*DIMENSIONS, "--check", "--json").stdout)["only_local"] == 1
    copied = summary()
    assert f"2 of 2 kernels in {shared}," in copied and nobody not in copied


SITU = ("--activation", "situ_glu")


@pytest.mark.usefixtures("own_caches")
def test_parameters_of_the_activation_are_warmed(tmp_path, monkeypatch):
    """From the command, from a program, and back from a record. On Hopper they are no other kernels."""

    def keys(*options):
        report = json.loads(command(*DIMENSIONS, *SITU, "--check", "--json", *options).stdout)
        return {kernel["key"] for kernel in report["kernels"]}

    own = ("--activation-parameter", "beta=4", "--activation-parameter", "linear_beta=25")
    assert keys() == keys("--activation-parameter", "beta=1") == keys(*own)
    asked = []
    monkeypatch.setattr(jit_warmup_module, "warm_up", lambda spec, *_, **__: asked.append(spec)
                        or SimpleNamespace(kernels=()))  # fmt: skip
    numbers = {"beta": 4, "linear_beta": 25.0}
    warmup_jit(8, 3072, 1536, activation="situ_glu", activation_parameters=numbers)
    (spec,) = asked
    assert ModelSpec(**json.loads(json.dumps(asdict(spec)))) == spec
    assert spec.activation_parameters == (("beta", 4.0), ("linear_beta", 25.0))


ODD = ["--E", "8", "--H", "3080", "--I", "1536", "--check"]


@pytest.mark.parametrize(("changed", "nearest"), [
    ({"--H": 3071}, "H=3072 I=1536 (hopper, bf16, triton)"),
    ({"--I": 1530}, "H=3072 I=1536 (hopper); H=3072 I=1528 (bf16, triton)"),
    ({"--arch": "sm_100a", "--H": 3001}, "H=3000 I=1536 (bf16, triton)"),
])  # fmt: skip
@pytest.mark.parametrize("more", [[], ["--check"]])
def test_sizes_that_no_engine_takes_are_refused_with_the_nearest(
    own_caches, changed, nearest, more
):
    """It compiled the kernels of every run, ended well, and left a record that the doctor showed."""
    sizes = {"--E": 8, "--H": 3072, "--I": 1536, **changed}
    said = command(*(word for pair in sizes.items() for word in pair), *more)
    assert said.exit_code == 1 and said.stdout == ""
    (line,) = said.stderr.splitlines()
    assert "not hopper: " in line and line.endswith(f"the nearest sizes that one takes: {nearest}")
    assert not own_caches.root.exists() or read_records(own_caches.root) == []


@pytest.mark.usefixtures("own_caches")
@pytest.mark.parametrize(("asked", "code", "words"), [
    (ODD, 1, "left out, fp8: not hopper: H is 3080 and I is 1536, and it needs multiples"),
    ([*ODD, "--precision", "fp8"], 2, "Error: precision='fp8' has no kernels for this model"),
    ([*DIMENSIONS, "--activation-parameter", "beta"], 2, "'beta'; needed: NAME=VALUE"),
    ([*DIMENSIONS, *SITU, "--activation-parameter", "b=1"], 2, "has 'b'; situ_glu has ['beta'"),
    (["--E", "8", "--H", "0"], 2, "--H"),
    (["--E", 4], 2, "Missing options --H, --I; for example: sonicmoe warmup --E 8 --H 3072 --I 1536\n"),
])  # fmt: skip
def test_what_the_command_leaves_out_or_refuses(asked, code, words):
    said = command(*asked)
    assert said.exit_code == code and words in said.output
    assert said.output.startswith("Error: ") == (code == 2)
