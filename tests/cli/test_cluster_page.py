"""docs/cluster.md: its commands run in its order, on fake kernels, and what it says of kernels and
records is so.
"""

import json
import re
import shlex

from click.testing import CliRunner
from fake_jobs import FakeJob, every_model_needs
from processes import ROOT
from racers import Field

from sonicmoe.cli.main import main
from sonicmoe.config import FLAGS_BY_ENV, reload_environment
from sonicmoe.diagnostics.doctor import warmed_models

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


class Shell:
    """Runs the lines of a block: variables, and commands of this package in this process."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.monkeypatch, self.ran = folder, monkeypatch, []

    def here(self, word):
        """Paths of the page, below a temporary folder."""
        if word.startswith("/") or word.endswith(".pack"):
            return str(self.folder / word.lstrip("/"))
        return word

    def run(self, line):
        name, *words = map(self.here, shlex.split(line))
        if name == "export":
            variable, _, value = words[0].partition("=")
            assert variable in FLAGS_BY_ENV, f"{variable} is no flag"
            self.monkeypatch.setenv(variable, self.here(value))
            reload_environment()  # as the next command of a shell would read it
        elif name == "sonicmoe":
            result = CliRunner().invoke(main, words)
            assert result.exit_code == 0, f"{line}: {result.output}"
            self.ran.append(line)
        else:
            assert name == "torchrun", f"{line}: the test does not know how to run this"


def test_the_commands_run_in_the_order_of_the_page(tmp_path, monkeypatch):
    (tmp_path / "fake").mkdir()
    field = Field(tmp_path / "fake")
    every_model_needs((FakeJob(size, field.log) for size in (1, 2)), monkeypatch)
    monkeypatch.setenv("SONIC_MOE_LOCAL_CACHE_DIR", str(tmp_path / "local"))
    shell = Shell(tmp_path, monkeypatch)
    for block in BLOCKS:
        for line in block.splitlines():
            shell.run(line)
    assert len(shell.ran) == 6 and sum("warmup" in line for line in shell.ran) == 5
    # Each kernel was compiled once: the second directory got them from the pack, although the page
    # had forbidden to compile by then.
    assert field.log.read_text().count("\n") == 2
    assert len(warmed_models(tmp_path / "opt" / "sonicmoe")) == 1
    assert not (tmp_path / "local" / "artefacts").exists()


def test_doctors_lines_are_those_of_the_page(tmp_path):
    block = re.search(r"```text\n(.*?)```", PAGE, flags=re.DOTALL)[1]
    words = re.sub(r"\n {2,}", " ", block).strip()
    cache, warmed = re.split(r"\nwarmed +", words)
    record = {
        "model": {
            "E": 8, "H": 3072, "I": 1536, "dtype": "bfloat16", "activation": "swiglu",
            "arch": "sm_90a", "activation_parameters": [],
        },
        "precision": "both",
        "kernels": 18 * [{}],
        "at": "2026-11-22T20:00:00Z",
        "versions": {
            "sonicmoe": "0.1.0", "apache-tvm-ffi": "0.1.15.post2", "nvidia-cutlass-dsl": "4.8.1",
            "quack-kernels": "0.6.5", "triton": "absent",
        },
    }  # fmt: skip
    (tmp_path / "warmed").mkdir()
    (tmp_path / "warmed" / "record.json").write_text(json.dumps(record))
    assert warmed_models(tmp_path) == (warmed,)
    assert cache.startswith("cache ")


def test_the_durations_are_those_of_their_page():
    measured = (ROOT / "docs" / "lab" / "cold_start.md").read_text(encoding="utf-8")
    section = measured.split("## Cold start")[1]
    rows = re.findall(r"^\| .* \| ([\d.]+) \|$", section, flags=re.MULTILINE)
    table = PAGE.split("## How long it takes")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| .* \| ([\d.]+) \|$", table, flags=re.MULTILINE)) == sorted(rows)
    (slow,) = re.findall(r"took (\d+ s \(FP8\) and \d+ s \(BF16\))", section.replace("\n", " "))
    assert slow in table.replace("\n", " ")
