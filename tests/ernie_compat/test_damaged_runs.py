"""Files of a run that a disk, a kill or a stranger has changed: read, or refused in one line."""

from __future__ import annotations

import json
import shutil

import pytest
from click.testing import CliRunner
from damage import NESTED, text_variants, variants
from small_run import SIZE_OPTIONS, run_config, write_text

from ernie_compat.checkpoint import load_checkpoint, require_matching_arrays, save_checkpoint
from ernie_compat.corpus import load_corpus
from ernie_compat.gap_runs import read_run, summarise
from ernie_compat.saved_run import SavedRun
from ernie_compat.trainer import Trainer
from sonicmoe.cli.main import main
from sonicmoe.errors import SonicMoEError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run of two steps beside its twin."""
    place = tmp_path_factory.mktemp("run")
    corpus = load_corpus([write_text(place / "text")])
    config = run_config(compare=True, train={"steps": 2}, precision="bf16")
    trainer = Trainer.start(config, corpus, place / "out")
    trainer.train()
    (place / "out" / "summary.json").write_text(json.dumps(trainer.summary()))
    return place / "out"


def survivors(damaged, path, read):
    """Write each variant to `path` and read it: how many were read, how many refused. Any other
    exception fails the test with the kind of damage.
    """
    good = bad = 0
    for number, (kind, content) in enumerate(damaged):
        path.write_bytes(content)
        try:
            read()
            good += 1
        except SonicMoEError as error:
            assert str(error).strip(), f"{kind}, case {number}"
            bad += 1
        except Exception as error:
            pytest.fail(f"{kind}, case {number}: {type(error).__name__}: {error}")
    return good, bad


def test_a_damaged_checkpoint_is_read_or_refused(run, tmp_path, request):
    header, arrays = load_checkpoint(run / "checkpoint.npz")
    del header["format"]
    # A few of the arrays, because every case reads all of them.
    kept = {name: arrays[name] for name in sorted(arrays)[::12]}
    whole, path = tmp_path / "whole.npz", tmp_path / "checkpoint.npz"
    save_checkpoint(whole, header, kept)
    shapes = {name: array.shape for name, array in kept.items()}
    config = SavedRun.read(whole).config

    def read():
        SavedRun.read(path).require_resumable(config)
        require_matching_arrays(load_checkpoint(path)[1], shapes)

    count = request.config.getoption("--attacks")
    good, bad = survivors(variants(whole.read_bytes(), 1, count), path, read)
    # A bit that no reader looks at, or two arrays of one shape that changed places.
    assert bad > good and good + bad == count


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
def test_damaged_results_are_read_or_refused(run, tmp_path, request, name):
    out = tmp_path / "out"
    shutil.copytree(run, out)
    count = request.config.getoption("--attacks")
    damaged = text_variants((run / name).read_bytes(), 2, count)
    good, bad = survivors(damaged, out / name, lambda: summarise([read_run(out)]))
    assert bad > 0 and good + bad == count


HEAD = "main/weight/lm_head.weight"
# What makes a checkpoint, sound as a file, no run: changes of its header and arrays.
FOREIGN = {
    "no step": lambda header, arrays: header.pop("step"),
    "text step": lambda header, arrays: header.update(step="two"),
    "negative step": lambda header, arrays: header.update(step=-1),
    "null config": lambda header, arrays: header.update(config=None),
    "null model": lambda header, arrays: header["config"].update(model=None),
    "text size": lambda header, arrays: header["config"]["model"].update(hidden_size="32"),
    "size for a supercomputer": lambda header, arrays: header["config"]["model"].update(hidden_size=2**40),
    "layers without end": lambda header, arrays: header["config"]["model"].update(num_layers=10**20),
    "infinite schedule": lambda header, arrays: header["config"]["train"].update(min_lr_ratio=float("inf")),
    "text schedule": lambda header, arrays: header["config"]["train"].update(warmup_ratio="0.1"),
    "data of numbers": lambda header, arrays: header.update(data=[1]),
    "text that is gone": lambda header, arrays: header.update(data=["/no/such/text"]),
    "other dtype": lambda header, arrays: arrays.update({HEAD: arrays[HEAD].astype("f8")}),
    "arrays of text": lambda header, arrays: arrays.update({HEAD: arrays[HEAD].astype("U8")}),
    "no moments": lambda header, arrays: arrays.pop("main/moment1/lm_head.weight"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOREIGN)
def test_resuming_a_foreign_checkpoint_is_one_line(run, tmp_path, kind):
    header, arrays = load_checkpoint(run / "checkpoint.npz")
    del header["format"]
    FOREIGN[kind](header, arrays)
    save_checkpoint(tmp_path / "checkpoint.npz", header, arrays)
    result = CliRunner().invoke(main, ["train", "--resume", "--out", str(tmp_path)])
    line = result.stderr.splitlines()[-1]
    assert result.exit_code == 2, result.output
    assert "checkpoint" in line or "memory" in line
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.stdout == ""


def test_a_checkpoint_with_a_nan_is_refused_by_name_and_continued_on_demand(run, tmp_path):
    header, arrays = load_checkpoint(run / "checkpoint.npz")
    del header["format"]
    arrays[HEAD][0, 0] = float("nan")
    save_checkpoint(tmp_path / "checkpoint.npz", header, arrays)
    resume = ["train", "--resume", "--out", str(tmp_path)]
    refused = CliRunner().invoke(main, resume)
    assert refused.exit_code == 2 and refused.stderr.count(f"array '{HEAD}': 1 of") == 1
    assert "--allow-nonfinite" in refused.stderr
    # At its last step, so that it has nothing left to compute.
    assert CliRunner().invoke(main, [*resume, "--allow-nonfinite"]).exit_code == 0


@pytest.mark.parametrize("content", [NESTED, "", "null", "[]", "{", '{"step": 1}'])
def test_a_header_that_is_no_object_is_refused(run, tmp_path, monkeypatch, content):
    monkeypatch.setattr("ernie_compat.checkpoint.json.dumps", lambda _: content)
    save_checkpoint(tmp_path / "checkpoint.npz", {}, {})
    monkeypatch.undo()
    with pytest.raises(SonicMoEError, match=r"checkpoint\.npz"):
        SavedRun.read(tmp_path / "checkpoint.npz")


def test_sizes_of_the_command_are_refused_with_an_estimate(tmp_path):
    for options in (["--hidden", str(10**12)], ["--layers", "9" * 20], ["--batch", str(10**12)]):
        arguments = ["train", "--framework", "torch", *SIZE_OPTIONS, *options]
        result = CliRunner().invoke(main, [*arguments, "--out", str(tmp_path)])
        assert result.exit_code == 2, result.output
        (line,) = result.stderr.splitlines()
        assert "GiB of memory, and this machine has" in line
