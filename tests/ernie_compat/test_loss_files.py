"""`python -m ernie_compat.lossgap` on files of losses: the forms it reads, the gap, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ernie_compat.gap_runs import LossGapError
from ernie_compat.loss_files import LossFile, compare_files, read_losses
from ernie_compat.lossgap import lossgap
from ernie_compat.metrics import loss_gap, smoothed
from ernie_compat.model_config import SMOOTHING_WINDOW

ROOT = Path(__file__).resolve().parents[2]
LOSSES, STEPS = (2.5, 1.25, 0.5), (10, 20, 30)
RECORDS = [{"step": s, "loss": x, "lr": 0.1} for s, x in zip(STEPS, LOSSES, strict=True)]
HISTORY = {"log_history": [*RECORDS, {"step": 30, "eval_loss": 0.7}], "epoch": 1}
# Text, steps, rows left out.
FORMS: dict[str, tuple[str, tuple[int, ...] | None, int]] = {
    "a loss on each line": ("2.5\n1.25\n\n0.5\n", None, 0),
    "with comments": ("# of run 7\n2.5\n1.25\n# resumed\n5e-1", None, 0),
    "csv": ("step,loss,lr\n10,2.5,0.1\n20,1.25,0.1\n30,0.5,0.1\n", STEPS, 0),
    "csv of Windows": ("\ufeffStep,Loss\r\n10,2.5\r\n20,1.25\r\n30,0.5\r\n", STEPS, 0),
    "quoted": ('"Step","loss"\n"10","2.5"\n"20","1.25"\n"30","0.5"\n', STEPS, 0),
    "csv with an evaluation": ("step,loss,eval\n10,2.5,\n20,1.25,\n20,,9\n30,0.5,", STEPS, 1),
    "tabs": ("iteration\tloss\n10\t2.5\n20\t1.25\n30\t0.5\n", STEPS, 0),
    "semicolons": ("loss;time\n2.5;1\n1.25;2\n0.5;3\n", None, 0),
    "spaces": ("step   loss\n10     2.5\n20  1.25\n30 0.5\n", STEPS, 0),
    "only column": ("train/loss\n2.5\n1.25\n0.5\n", None, 0),
    "json lines": ("\n".join(map(json.dumps, RECORDS)) + "\n", STEPS, 0),
    "json lines with an evaluation": (
        "\n".join(map(json.dumps, [*RECORDS, {"step": 30, "eval": 1}])), STEPS, 1,
    ),
    "json list of numbers": (json.dumps(LOSSES), None, 0),
    "json list of records": (json.dumps(RECORDS, indent=1), STEPS, 0),
    "trainer_state.json": (json.dumps(HISTORY), STEPS, 1),
}  # fmt: skip


def written(path, text):
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("form", FORMS)
def test_forms(form, tmp_path):
    text, steps, left_out = FORMS[form]
    path = written(tmp_path / "losses", text)
    assert read_losses(path) == LossFile(path, LOSSES, steps, left_out)


def test_one_row_is_enough(tmp_path):
    path = written(tmp_path / "losses", '{"step": 10, "loss": 2.5}\n')
    assert read_losses(path) == LossFile(path, (2.5,), (10,), 0)


@pytest.mark.parametrize(
    ("text", "column"),
    [("a,b\n9,2.5\n9,1.25\n9,0.5", "b"), ("9,2.5\n9,1.25\n9,0.5\n", "2"),
     ("A b\n2.5 9\n1.25 9\n0.5 9", "a"), ('[{"x": 2.5}, {"x": 1.25}, {"y": 1, "x": 0.5}]', "x")],
)  # fmt: skip
def test_another_column(text, column, tmp_path):
    assert read_losses(written(tmp_path / "losses", text), column).losses == LOSSES


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "losses is empty"),
        ("# nothing\n", "losses is empty"),
        ("loss\n", "has no losses"),
        ("[]", "has no losses"),
        ("step,loss\n", "has no losses"),
        ("step,loss\n1,\n", "has no losses"),
        ("a,b\n1,2\n", "has no column 'loss'; its columns are ['a', 'b'], and --column names one"),
        ("1,2\n3,4\n", "has no column 'loss'; its columns are ['1', '2'], and --column"),
        ('{"a": 1, "b": 2}\n{"a": 1, "b": 3}', "no column 'loss'; its columns are ['a', 'b']"),
        ("step,loss\n1,2\n2\n", "losses, line 3, has 1 cells; needed: 2, as in the first line"),
        ("2.5\n1.2 x\n", "losses, line 2, has 2 cells; needed: 1"),
        ("2.5\nabc\n", "losses, line 2: loss is 'abc'; needed: a positive number"),
        ("2.5\nnan\n", "losses, line 2: loss is 'nan'; needed: a positive number"),
        ("2.5\n0\n", "losses, line 2: loss is '0'"),
        ("2.5\n-1\n", "losses, line 2: loss is '-1'"),
        ("2.5\ninf\n", "losses, line 2: loss is 'inf'"),
        ('{"loss": NaN, "s": 1}\n{"loss": 1, "s": 2}', "losses, line 1: loss is nan"),
        ('{"loss": true}', "entry 1: loss is True"),
        ('{"loss": [1]}', "entry 1: loss is [1]"),
        ('{"loss": 1' + 400 * "0" + "}", "needed: a positive number"),
        ('{"loss": 1}\n{"loss": \n', "losses, line 2, is no JSON"),
        ('[1, "a"]', "losses, entry 2 is 'a'; needed: an object, or a number"),
        ('{"log_history": 3}', "has no list of losses"),
        (10**6 * "[", "losses, line 1, is no JSON"),
        ("step,loss\n2,1\n1,1\n", "line 3: step 1 comes after 2; needed: ascending steps"),
        ("step,loss\n2,1\n2,1\n", "line 3: step 2 comes after 2"),
        ("step,loss\n1.5,1\n", "line 2: step is '1.5'; needed: a whole number"),
        ("step,loss\nx,1\n", "line 2: step is 'x'; needed: a whole number"),
        ("step,loss\nnan,1\n", "line 2: step is 'nan'"),
        ("\xff\xfe1", "cannot read"),
    ],
)
def test_what_is_no_file_of_losses_is_refused(text, words, tmp_path):
    path = tmp_path / "losses"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(LossGapError, match=re.escape(words)) as refused:
        read_losses(path)
    assert str(path) in str(refused.value)


def noisy(seed, count=100):
    steps = np.arange(1, count + 1)
    noise = np.random.default_rng(seed).standard_normal(count)
    return tuple(float(value) for value in 1 + 4 / steps + 0.01 * noise)


def test_the_gap_is_that_of_runs_with_compare():
    run, reference = noisy(0), noisy(1)
    steps = tuple(range(10, 1010, 10))
    one = LossFile(Path("a"), run, None, 0)
    gap = compare_files(one, LossFile(Path("b"), reference, steps, 0))
    curve = smoothed(run) / smoothed(reference) - 1
    assert gap.gap == loss_gap(run, reference) > 0
    assert gap.signed_gap == pytest.approx(curve[-25:].mean())
    assert (gap.kind, gap.seed, gap.steps) == ("a against b", None, 100)
    assert np.array_equal(gap.at, steps)
    worse = LossFile(Path("w"), tuple(1.01 * value for value in reference), None, 0)
    gap = compare_files(worse, LossFile(Path("b"), reference, None, 0))
    assert gap.signed_gap == pytest.approx(0.01) and gap.gap == pytest.approx(0.01)


def of(path, count, steps=None):
    return LossFile(Path(path), count * (1.0,), None if steps is None else tuple(steps), 0)


@pytest.mark.parametrize(
    ("run", "reference", "words"),
    [
        (of("a", 100), of("b", 99), "a has 100 losses, b has 99 losses; needed: equally many"),
        (of("a", 5, range(1, 6)), of("b", 4),
         "a has 5 losses at steps 1 to 5, b has 4 losses; needed: equally many"),
        (of("a", 5, range(1, 6)), of("b", 4, range(1, 5)),
         "a has 5 losses at steps 1 to 5, b has 4 losses at steps 1 to 4: step 5 is in one of them "
         "alone; needed: the same steps in both"),
        (of("a", 3, (1, 2, 3)), of("b", 3, (1, 3, 4)), "step 2 is in one of them alone"),
    ],
)  # fmt: skip
def test_losses_that_do_not_fit_are_refused(run, reference, words):
    with pytest.raises(LossGapError, match=re.escape(words)):
        compare_files(run, reference)


def invoke(*arguments):
    return CliRunner().invoke(lossgap, [*map(str, arguments)])


def metrics(directory, losses, reference=None):
    """What `sonicmoe train` leaves of these losses."""
    directory.mkdir(parents=True, exist_ok=True)
    fixed = {"aux_loss": 0.0, "z_loss": 0.0, "grad_norm": 1.0, "learning_rate": 1e-3,
             "tokens_per_s": 10.0, "seconds": 1.0, "load_imbalance": 1.0,
             "expert_load": [[0.5, 0.5]], "full_precision_loss": reference}  # fmt: skip
    lines = [json.dumps({"step": n, "loss": x, **fixed}) for n, x in enumerate(losses, start=1)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def csv_of(path, losses, column="loss"):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{n}\t{x!r}" for n, x in enumerate(losses, start=1)]
    return written(path, "\n".join([f"step\t{column}", *lines]))


def test_command_on_two_files_on_runs_and_on_one_of_each(tmp_path):
    """The same numbers, however they are handed over."""
    run, reference = noisy(0), noisy(1)
    files = csv_of(tmp_path / "fp8.tsv", run), csv_of(tmp_path / "bf16.tsv", reference)
    runs = metrics(tmp_path / "fp8", run), metrics(tmp_path / "bf16", reference)
    for pair in (files, runs, (files[0], runs[1]), (runs[0], files[1])):
        result = invoke(*pair, "--json", "--plot", tmp_path / "gap.png")
        assert result.exit_code == 0, result.output
        data = json.loads(result.stdout)
        assert data["runs"][0]["gap"] == loss_gap(run, reference)
        assert data["runs"][0]["seed"] is None
        assert data["summaries"][0]["gap"]["low"] is None
        assert [one["rows"] for one in data["files"]] == [100, 100]
        assert data["files"][0]["steps"] == [1, 100]
        assert data["files"][0]["end"] == pytest.approx(np.mean(run[-SMOOTHING_WINDOW:]))
        assert (tmp_path / "gap.png").stat().st_size > 10_000
    said = invoke(*files)
    assert "1 to 100" in said.stdout and "one run, which chance may explain" in said.stdout
    assert "| losses | rows |" in said.stdout


def test_the_table_says_over_how_many_rows_a_short_run_is_averaged(tmp_path):
    losses = tuple(range(20, 0, -1))
    short = csv_of(tmp_path / "a", losses), csv_of(tmp_path / "b", losses)
    assert "3.0000 (last 5)" in invoke(*short).stdout
    (one, _) = json.loads(invoke(*short, "--json").stdout)["files"]
    assert (one["end"], one["window"]) == (3.0, 5)


def test_command_refuses_in_one_line(tmp_path):
    one, two = csv_of(tmp_path / "a", noisy(0)), csv_of(tmp_path / "b", noisy(1, 99))
    alone = metrics(tmp_path / "alone", noisy(2))
    compared = metrics(tmp_path / "compared", noisy(2), 1.0)
    for arguments, words in {
        (one,): "1 paths, with files of losses among them; needed: two, the losses of a run and",
        (one, one, one): "3 paths, with files of losses among them",
        (one, two): "step 100 is in one of them alone",
        (one, tmp_path / "none"): "none is not there",
        (alone,): "holds no finished run: summary.json is missing",
        (compared, compared, "--column", "x"): "--column is for files of losses",
        (one, two, "--column", "x"): "has no column 'x'; its columns are ['step', 'loss']",
    }.items():
        result = invoke(*arguments)
        assert result.exit_code == 2 and words in result.output, result.output
        assert len(result.output.splitlines()) == 1


def test_the_commands_of_the_page_run(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    section = page.split("### Two files of losses")[1].split("\n## ")[0]
    assert f"averaged over the last {SMOOTHING_WINDOW} rows" in " ".join(section.split())
    (block,) = re.findall(r"^```sh\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    for name, seed in (("fp8", 0), ("bf16", 1)):
        csv_of(Path(f"{name}.csv"), noisy(seed))
        csv_of(Path(f"{name}.tsv"), noisy(seed), "train_loss")
        directory = Path("outputs", name)
        directory.mkdir(parents=True)
        records = [{"step": n, "loss": x} for n, x in enumerate(noisy(seed), start=1)]
        (directory / "trainer_state.json").write_text(json.dumps({"log_history": records}))
    train_loss = (line.replace('"loss"', '"train_loss"') for line in open_metrics(noisy(1)))
    Path("runs/bf16/metrics.jsonl").write_text("".join(train_loss))
    for line in block.splitlines():
        result = CliRunner().invoke(lossgap, shlex.split(line)[3:])
        assert result.exit_code == 0, result.output
    assert Path("gap.png").exists()


def open_metrics(losses):
    path = metrics(Path("runs/bf16"), losses) / "metrics.jsonl"
    return path.read_text().splitlines(keepends=True)


@pytest.mark.parametrize("has_steps", [True, False])
def test_steps_without_a_loss_are_dropped_from_both(has_steps, tmp_path):
    whole, reference = list(noisy(0)), list(noisy(1))
    run = [*whole[:7], float("nan"), *whole[8:]]
    reference[30] = float("nan")
    files = [tmp_path / "run", tmp_path / "reference"]
    for path, losses in zip(files, (run, reference), strict=True):
        if has_steps:
            csv_of(path, tuple(losses))
        else:
            written(path, "\n".join(map(repr, losses)))
    refused = invoke(*files)
    assert refused.exit_code == 2 and "--skip-missing drops its step" in refused.output
    result = invoke(*files, "--skip-missing", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    kept = [n for n in range(len(run)) if n not in (7, 30)]
    assert data["skipped_steps"] == 2 and [one["rows"] for one in data["files"]] == [98, 98]
    wanted = loss_gap(tuple(run[n] for n in kept), tuple(reference[n] for n in kept))
    assert data["runs"][0]["gap"] == wanted
    said = invoke(*files, "--skip-missing").stdout
    assert "2 steps without a loss in one of the files were dropped from both" in said


def test_a_step_that_one_file_lacks_is_dropped_from_the_other(tmp_path):
    files = csv_of(tmp_path / "a", noisy(0)), csv_of(tmp_path / "b", noisy(1, 99))
    assert "--skip-missing drops those that one lacks" in invoke(*files).output
    data = json.loads(invoke(*files, "--skip-missing", "--json").stdout)
    assert data["skipped_steps"] == 1 and [one["rows"] for one in data["files"]] == [99, 99]
    assert all(one["steps"] == [1, 99] for one in data["files"])
    none = csv_of(tmp_path / "none", (float("nan"),))
    words = "have no step at which both have a loss"
    assert words in invoke(none, files[0], "--skip-missing").output
    compared = metrics(tmp_path / "compared", noisy(2), 1.0)
    assert "--skip-missing is for files" in invoke(compared, compared, "--skip-missing").output
