"""Files of a run that a disk, a kill or a stranger has changed: read, or refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

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
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of two steps beside its twin."""
    place = tmp_path_factory.mktemp("run")
    corpus = load_corpus([write_text(place / "text")])
    config = run_config(compare=True, train={"steps": 2}, precision="bf16")
    trainer = Trainer.start(config, corpus, place / "out")
    trainer.train()
    (place / "out" / "summary.json").write_text(json.dumps(trainer.summary()))
    return place / "out"


def survivors(
    damaged: Iterator[tuple[str, bytes]], path: Path, read: Callable[[], object]
) -> tuple[int, int]:
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


def test_a_damaged_checkpoint_is_read_or_refused(
    run: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    header, arrays = load_checkpoint(run / "checkpoint.npz")
    del header["format"]
    # A few of the arrays, because every case reads all of them.
    kept = {name: arrays[name] for name in sorted(arrays)[::12]}
    whole, path = tmp_path / "whole.npz", tmp_path / "checkpoint.npz"
    save_checkpoint(whole, header, kept)
    shapes = {name: array.shape for name, array in kept.items()}
    config = SavedRun.read(whole).config

    def read() -> None:
        SavedRun.read(path).require_resumable(config)
        require_matching_arrays(load_checkpoint(path)[1], shapes)

    count = request.config.getoption("--attacks")
    good, bad = survivors(variants(whole.read_bytes(), 1, count), path, read)
    # A bit that no reader looks at, or two arrays of one shape that changed places.
    assert bad > good and good + bad == count


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
def test_damaged_results_are_read_or_refused(
    run: Path, tmp_path: Path, request: pytest.FixtureRequest, name: str
) -> None:
    out = tmp_path / "out"
    shutil.copytree(run, out)
    count = request.config.getoption("--attacks")
    damaged = text_variants((run / name).read_bytes(), 2, count)
    good, bad = survivors(damaged, out / name, lambda: summarise([read_run(out)]))
    assert bad > 0 and good + bad == count


DEEP = "[" * 1500 + "]" * 1500


def foreign(run: Path, kind: str) -> tuple[dict, dict]:
    """The header and arrays of a checkpoint that is sound as a file, and no run."""
    header, arrays = load_checkpoint(run / "checkpoint.npz")
    del header["format"]
    config = header["config"]
    changes = {
        "no step": lambda: header.pop("step"),
        "text step": lambda: header.update(step="two"),
        "negative step": lambda: header.update(step=-1),
        "null config": lambda: header.update(config=None),
        "null model": lambda: config.update(model=None),
        "text size": lambda: config["model"].update(hidden_size="32"),
        "size for a supercomputer": lambda: config["model"].update(hidden_size=2**40),
        "layers without end": lambda: config["model"].update(num_layers=10**20),
        "infinite schedule": lambda: config["train"].update(min_lr_ratio=float("inf")),
        "text schedule": lambda: config["train"].update(warmup_ratio="0.1"),
        "data of numbers": lambda: header.update(data=[1]),
        "text that is gone": lambda: header.update(data=["/no/such/text"]),
        "other dtype": lambda: arrays.update(
            {"main/weight/lm_head.weight": arrays["main/weight/lm_head.weight"].astype("f8")}
        ),
        "arrays of text": lambda: arrays.update(
            {"main/weight/lm_head.weight": arrays["main/weight/lm_head.weight"].astype("U8")}
        ),
        "no moments": lambda: arrays.pop("main/moment1/lm_head.weight"),
    }
    changes[kind]()
    return header, arrays


@pytest.mark.parametrize("kind", [
    "no step", "text step", "negative step", "null config", "null model", "text size", "size for a supercomputer",
    "layers without end", "infinite schedule", "text schedule", "data of numbers", "text that is gone", "other dtype",
    "arrays of text", "no moments",
])  # fmt: skip
def test_resuming_a_foreign_checkpoint_is_one_line(run: Path, tmp_path: Path, kind: str) -> None:
    header, arrays = foreign(run, kind)
    save_checkpoint(tmp_path / "checkpoint.npz", header, arrays)
    result = CliRunner().invoke(main, ["train", "--resume", "--out", str(tmp_path)])
    line = result.stderr.splitlines()[-1]
    assert result.exit_code == 2, result.output
    assert "checkpoint" in line or "memory" in line
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.stdout == ""


@pytest.mark.parametrize("content", [NESTED, "", "null", "[]", "{", '{"step": 1}'])
def test_a_header_that_is_no_object_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr("ernie_compat.checkpoint.json.dumps", lambda _: content)
    save_checkpoint(tmp_path / "checkpoint.npz", {}, {})
    monkeypatch.undo()
    with pytest.raises(SonicMoEError, match=r"checkpoint\.npz"):
        SavedRun.read(tmp_path / "checkpoint.npz")


def test_sizes_of_the_command_are_refused_with_an_estimate(tmp_path: Path) -> None:
    for options in (["--hidden", str(10**12)], ["--layers", "9" * 20], ["--batch", str(10**12)]):
        arguments = [
            "train",
            "--framework",
            "torch",
            *SIZE_OPTIONS,
            *options,
            "--out",
            str(tmp_path),
        ]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2, result.output
        (line,) = result.stderr.splitlines()
        assert "GiB of memory, and this machine has" in line
