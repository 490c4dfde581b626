"""Commands, options, values, counts and links that the guides name are right."""

import re
from dataclasses import replace

import click
import numerics_report
import pytest
from processes import ROOT

from sonicmoe.cli.bench import bench, chosen_shapes
from sonicmoe.cli.main import COMMANDS, main
from sonicmoe.config import SonicMoEConfig, current_config
from sonicmoe.engine.capabilities import BF16, missing_package
from sonicmoe.engine.compile_plan import warm_up_plan
from sonicmoe.jit.cuda_source import CudaSource
from sonicmoe.jit.plan import PRECISIONS, ModelSpec

GUIDES = (
    "README.md", "CONTRIBUTING.md", "ernie_compat/README.md",
    *(f"docs/{name}.md" for name in (
        "cluster", "design", "env", "finetuning", "install", "jit", "kernels", "migrating", "newcomer",
        "numerics", "performance", "megatron",
        "pytorch", "transformers", "troubleshooting", "verify",
    )),
)  # fmt: skip
FURTHER = tuple(
    str(path.relative_to(ROOT))
    for folder in ("lab", "recipes")
    for path in sorted((ROOT / "docs" / folder).glob("*.md"))
)
TEXTS = {guide: (ROOT / guide).read_text(encoding="utf-8") for guide in (*GUIDES, *FURTHER)}
NAME_NO_COMMAND = {
    "docs/finetuning.md", "docs/megatron.md", "docs/migrating.md", "docs/pytorch.md", "docs/transformers.md",
}  # fmt: skip


def code_of(text):
    """Every line of code: fenced in no language or in a shell's, indented, or between backticks."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    shells = [block for language, block in blocks if language in {"", "sh", "bash"}]
    fenced = [line for block in shells for line in block.splitlines()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^    (\S.*)$", prose, flags=re.MULTILINE)
    return [*fenced, *re.findall(r"`([^`\n]+)`", prose), *indented]


def invocations(text):
    """Every `sonicmoe command ...` in code, up to the end of the code or a comment."""
    pattern = r"(?:^|-m |=\S+ |[;|&] |do |profile |taskset -c \S+ )sonicmoe ((?!-)[^#;|&]+)"
    return [match.group(1) for part in code_of(text) if (match := re.search(pattern, part))]


def scripts(text):
    """`(path, options)` of every script of tools/ci and benchmarks that is run in code, by Python or by itself."""
    pattern = r"(?:^|[ =])((?:tools/ci|benchmarks)/\w+\.(?:py|sh))((?: [^#;|&]*)?)"
    found = [match for part in code_of(text) for match in re.finditer(pattern, part)]
    return [(match.group(1), re.findall(r"--[\w-]+", match.group(2))) for match in found]


@pytest.mark.parametrize("guide", (*GUIDES, *FURTHER))
def test_commands_and_options_exist(guide):
    found = invocations(TEXTS[guide])
    assert found or guide in NAME_NO_COMMAND or guide in FURTHER
    assert [problem for invocation in found for problem in problems(invocation)] == []


def problems(invocation):
    """Every reason why `sonicmoe <invocation>` would be refused; of what the user must fill in
    (`N`, `$seed`) any value will do.
    """
    name, *given = invocation.split()
    if name not in COMMANDS:
        yield f"{name} is no command"
        return
    command = main.get_command(click.Context(main), name)
    typed = [one for one in command.params if isinstance(one, click.Option)]
    options = {opt: one for one in typed for opt in (*one.opts, *one.secondary_opts)}
    takes_arguments = any(isinstance(parameter, click.Argument) for parameter in command.params)
    words = iter(given)
    for word in words:
        opt, _, attached = word.partition("=")
        if word == "--help":
            continue
        if not word.startswith("--"):
            if not takes_arguments:
                yield f"{invocation}: {word} is no option"
        elif opt not in options:
            yield f"{invocation}: no {opt}"
        elif not options[opt].is_flag:
            value = attached or next(words, "--")
            if value.startswith("--") or not fits(options[opt], value):
                yield f"{invocation}: {opt} {value}"


def fits(option, value):
    """Whether an option takes this value; paths are not looked for."""
    if re.fullmatch(r"\$\w+|[A-Z]+", value) or isinstance(option.type, click.Path):
        return True
    try:
        option.type.convert(value, option, None)
    except click.BadParameter:
        return False
    return True


@pytest.mark.parametrize("guide", (*GUIDES, *FURTHER))
def test_scripts_and_their_options_exist(guide):
    for path, used in scripts(TEXTS[guide]):
        assert (ROOT / path).exists(), path
        # A shell script hands its options on.
        program = ROOT / path if path.endswith(".py") else ROOT / "tools" / "ci" / "core_tests.py"
        code = program.read_text(encoding="utf-8")
        if "@timing." in code:  # options that benchmarks share
            code += (ROOT / "benchmarks" / "timing.py").read_text(encoding="utf-8")
        known = set(re.findall(r"[\"'](--[\w-]+)[\"']", code))
        if program.stem == "numerics_report":  # it has options of the commands too
            known |= {opt for one in numerics_report.main.params for opt in one.opts}
        assert set(used) <= known | {"--help"}, f"{path}: {set(used) - known}"


def test_the_commands_of_the_step_table_measure_its_shapes():
    section = TEXTS["docs/lab/layer_times.md"].split("\n## ")[0]
    (loop,) = re.findall(r"for E in ([\d ]+);", section)
    measured = set()
    for invocation in invocations(section):
        for experts in loop.split() if "$E" in invocation else [""]:
            words = invocation.replace("$E", experts).split()[1:]
            given = bench.make_context("bench", words).params
            sizes = {f: given[f] for f in ("hidden", "intermediate", "experts", "topk")}
            measured |= set(chosen_shapes(given["names"], given["tokens"], sizes, "cuda:0"))
    rows = re.findall(r"^\| (\d+), (\d+), (\d+), (\d+), (\d+) \|", section, flags=re.MULTILINE)
    sizes = {tuple(vars(shape).values()) for shape in measured}
    assert len(rows) == 18 and {tuple(map(int, row)) for row in rows} == sizes


MISSING = missing_package(BF16.jobs(None, "sm_100a"))


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_the_warm_up_compiles_what_its_page_says():
    text = TEXTS["docs/jit.md"].replace("\n", " ")
    (sizes,) = set(re.findall(r"warmup --E (\d+) --H (\d+) --I (\d+)", text))
    spec = ModelSpec(*map(int, sizes))
    jobs = {precision: warm_up_plan(spec, precision).jobs for precision in PRECISIONS}
    words = "These are N kernels; `--precision fp8` compiles N of them, `bf16` N."
    said = re.search(words.replace("N", r"(\d+)"), text)
    assert [int(n) for n in said.groups()] == [len(jobs[p]) for p in ("both", "fp8", "bf16")]
    plain = current_config(SonicMoEConfig(fp8_wgrad=False))
    with_plain = warm_up_plan(spec, "fp8", plain).jobs
    assert f"Under `SONIC_MOE_FP8_WGRAD=0` FP8 needs {len(with_plain)}:" in text
    assert len(with_plain) == len(jobs["fp8"]) + 2
    assert "FP8 needs two kernels more" in TEXTS["docs/cluster.md"].replace("\n ", "")
    assert all(isinstance(job, CudaSource) for job in (*jobs["both"], *with_plain))
    blackwell = warm_up_plan(replace(spec, arch="sm_100a"), "bf16").jobs
    by_cute = sum(not isinstance(job, CudaSource) for job in blackwell)
    words = f"`bf16` has {len(blackwell)} kernels, and CuTe DSL compiles {by_cute} of them"
    assert words in text
    table = TEXTS["docs/jit.md"].split("| part | kernels | compiler |")[1].split("\n\n")[0]
    column = "".join(row.split("|")[2] for row in table.splitlines()[2:])
    assert set(re.findall(r"`([a-z_0-9]+)`", column)) == {job.name for job in jobs["both"]}


@pytest.mark.parametrize("guide", (*GUIDES, *FURTHER))
def test_links_and_files_exist(guide):
    text = TEXTS[guide]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)  # `x[i](y)` is no link
    for target, anchor in re.findall(r"\]\(([\w./-]+|(?=#))(?:#([\w-]+))?\)", prose):
        linked = (ROOT / guide).parent / target if target else ROOT / guide
        assert linked.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", linked.read_text(), flags=re.MULTILINE)
            headings = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in titles}
            assert anchor in headings
    steps = set(re.findall(r"^`([\w/.]+)`:$", text, flags=re.MULTILINE))  # files a recipe makes
    folders = re.findall(r"`((?:tools|benchmarks|tests|sonicmoe|docs|examples)/[\w/]*)`", text)
    assert [folder for folder in folders if not (ROOT / folder).exists()] == []
    named = re.findall(r"`((?:tools|tests|sonicmoe|docs|examples)/[\w/.]+\.\w+)", text)
    for path in set(named) - steps:
        assert (ROOT / path).exists(), path
