"""Training over ranks: the single process's numbers, any number of ranks after any other, and the
end of a rank.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner
from ranks_worker import BATCH, SCENARIOS, SIGNALS, run_scenario
from small_run import SIZE_OPTIONS, run_python
from worlds import TESTS, finish, free_ports, start_world, torchrun_variables

from ernie_compat.checkpoint import load_checkpoint
from ernie_compat.corpus import load_corpus
from ernie_compat.metrics import read_metrics
from ernie_compat.train_command import train
from ernie_compat.trainer import CHECKPOINT_NAME, METRICS_NAME

WORLD = 4
WORKER = TESTS / "ernie_compat" / "ranks_worker.py"
# Relative distance of four ranks from one process in fp32, where sums over the ranks have another
# order: 2e-7, 3e-7 and 3e-7 (an fp32 loss has steps of 9e-8) over 4 seeds and two orders of summation.
FIRST_STEP, LATER, GRADIENT = 2e-6, 2e-5, 5e-6
# Beside them Paddle's libraries instead of PyTorch's, as in test_ernie_paddle.py.
PADDLE_FIRST_STEP, PADDLE_LATER, PADDLE_GRADIENT = 1e-5, 1e-4, 1e-4


class World(NamedTuple):
    directory: Path
    said: list[str]
    codes: list[int]


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    """`alone(scenario)`: the directory of one process that sees the whole batch."""
    made: dict[str, Path] = {}

    def run(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("alone")
            run_scenario(name, load_corpus([text]), made[name])
        return made[name]

    return run


@pytest.fixture(scope="module")
def world(text, alone, tmp_path_factory):
    """The directory of every scenario on four ranks, of which "resumed" continues what one process
    began; what they said in the end; and their exit codes.
    """
    directory = tmp_path_factory.mktemp("world")
    for name in SCENARIOS:
        (directory / name).mkdir()
    shutil.copy(alone("half") / CHECKPOINT_NAME, directory / "resumed" / CHECKPOINT_NAME)
    names = *SCENARIOS, *SIGNALS
    ports = dict(zip(names, map(str, free_ports(len(names))), strict=True))
    given = json.dumps(torchrun_variables(WORLD)), json.dumps(ports)
    ((code, printed, said),) = finish(
        start_world(lambda _: [WORKER, text, directory, *given], [{}])
    )
    assert code == 0 and "Traceback" not in said, said
    return World(directory, said.splitlines(), json.loads(printed))


def arrays(path):
    return load_checkpoint(path)[1]


def losses_of(directory):
    return [record.loss for record in read_metrics(directory / METRICS_NAME)]


def assert_trained_alike(ours, theirs, first, later, norm):
    """Losses, and the norm of the first gradient: AdamW would forgive a factor in it."""
    actual, wanted = (read_metrics(path / METRICS_NAME) for path in (ours, theirs))
    assert actual[0].loss == pytest.approx(wanted[0].loss, rel=first)
    assert actual[0].grad_norm == pytest.approx(wanted[0].grad_norm, rel=norm)
    assert actual[0].expert_load == wanted[0].expert_load
    assert losses_of(ours) == pytest.approx(losses_of(theirs), rel=later) and len(actual) == 6


@pytest.mark.trained
@pytest.mark.parametrize("name", ["plain", "micro"])
def test_four_ranks_train_as_one(world, alone, name):
    assert_trained_alike(world.directory / name, alone(name), FIRST_STEP, LATER, GRADIENT)
    ours, theirs = (
        arrays(path / CHECKPOINT_NAME) for path in (world.directory / name, alone(name))
    )
    assert {n: a.shape for n, a in ours.items()} == {n: a.shape for n, a in theirs.items()}


def test_repeated_runs_are_bit_identical(world):
    names = "fp8", "fp8 again"
    first, second = (arrays(world.directory / name / CHECKPOINT_NAME) for name in names)
    assert len({tuple(losses_of(world.directory / name)) for name in names}) == 1
    assert [n for n in first if first[n].tobytes() != second[n].tobytes()] == [] and len(first) > 50


def assert_loaded(run, source):
    """A resumed run began with the bits of the checkpoint of another."""
    saved, loaded = arrays(source / CHECKPOINT_NAME), arrays(run / "loaded.npz")
    assert {name.removeprefix("main/"): array.tobytes() for name, array in saved.items()} == {
        name: array.tobytes() for name, array in loaded.items()
    }


@pytest.mark.trained
def test_one_process_checkpoint_resumes_on_four_ranks(world, alone):
    assert_loaded(world.directory / "resumed", alone("half"))
    continued = losses_of(world.directory / "resumed")
    assert continued[-3:] == pytest.approx(losses_of(alone("plain"))[3:], rel=LATER)


@pytest.mark.trained
def test_four_ranks_checkpoint_resumes_in_one_process(world, alone, text, tmp_path):
    shutil.copy(world.directory / "half" / CHECKPOINT_NAME, tmp_path / CHECKPOINT_NAME)
    trainer = run_scenario("resumed", load_corpus([text]), tmp_path)
    assert_loaded(tmp_path, world.directory / "half")
    continued = [record.loss for record in trainer.records]
    assert continued[-3:] == pytest.approx(losses_of(alone("plain"))[3:], rel=LATER)


def test_a_killed_rank_stops_the_others_with_one_line(world):
    assert world.codes == [-9, 1, 1, 1]
    said = [line for line in world.said if line.startswith("sonicmoe train:")]
    for rank in (1, 2, 3):
        (line,) = [line for line in said if f"train: rank {rank} of 4 lost another" in line]
        assert line.endswith("start all ranks again from the last checkpoint")
    assert len(said) == 3


def test_a_kill_between_two_checkpoints_leaves_a_run_that_continues(world):
    """One process continues it, though the metrics were ahead of the checkpoint."""
    directory = world.directory / "killed"
    steps = [record.step for record in read_metrics(directory / METRICS_NAME)]
    header, saved = load_checkpoint(directory / CHECKPOINT_NAME)
    assert (header.step, steps) == (3, [1, 2, 3, 4])
    assert all(np.isfinite(array).all() for array in saved.values())
    again = CliRunner().invoke(train, ["--resume", "--steps", "5", "--out", str(directory)])
    assert again.exit_code == 0, again.output
    assert load_checkpoint(directory / CHECKPOINT_NAME)[0].step == 5
    assert [record.step for record in read_metrics(directory / METRICS_NAME)] == [1, 2, 3, 4, 5]


def test_interrupted_ranks_save_one_checkpoint_together(world):
    """One rank alone gets the signal: the others must not wait for it in vain."""
    directory = world.directory / "interrupted"
    assert [path.read_text() for path in directory.glob("*.code")] == ["130"] * WORLD
    assert load_checkpoint(directory / CHECKPOINT_NAME)[0].step == 4
    assert (
        len([line for line in world.said if "interrupted at step 4; checkpoint saved" in line]) == 1
    )


def test_torchrun_trains(text, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    launcher += [str(free_ports(1)[0]), "-m", "sonicmoe", "train", *SIZE_OPTIONS]
    options = ["--framework", "torch", "--data", str(text)]
    result = run_python(*launcher, *options, "--steps", "3", "--out", str(tmp_path), "--json")
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["ranks"] == 2 and summary["steps"] == 3 and np.isfinite(summary["held_out_loss"])
    assert result.stderr.count("step 3/3") == 1 and "Warning" not in result.stderr
    assert "torch on cpu, 2 ranks, experts in fp8" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".png") == [
        CHECKPOINT_NAME, "metrics.jsonl", "summary.json",
    ]  # fmt: skip


@pytest.mark.trained
@pytest.mark.paddle
def test_paddles_launcher_trains_and_its_ranks_train_as_one(text, alone, tmp_path):
    """Two processes of Paddle's CPU build (gloo) against one process of its PyTorch twin."""
    # As the installed console command is.
    script, out = tmp_path / "sonicmoe", tmp_path / "out"
    script.write_text("from sonicmoe.cli.main import main\nmain()\n")
    launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", "2"]
    launcher += ["--backend", "gloo", "--log_dir", str(tmp_path / "log"), str(script), "train"]
    options = ["--framework", "paddle", "--precision", "fp32", "--steps", "6"]
    options += [*SIZE_OPTIONS, "--batch", str(BATCH), "--micro-batches", "2", "--data", str(text)]
    # The launcher itself would take any free port, and may find that another world has it by the
    # time its ranks have imported Paddle.
    port = str(free_ports(1)[0])
    result = run_python(*launcher, *options, "--out", str(out), FLAGS_START_PORT=port)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"127.0.0.1:{port}" in result.stdout + result.stderr
    summary = json.loads((out / "summary.json").read_text())
    found = summary["config"]["framework"], summary["ranks"], summary["steps"]
    assert found == ("paddle", 2, 6)
    assert_trained_alike(out, alone("micro"), PADDLE_FIRST_STEP, PADDLE_LATER, PADDLE_GRADIENT)
