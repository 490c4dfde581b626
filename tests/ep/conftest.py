"""Worlds are run once for all parallel workers of a run; tests look at what they left."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from filelock import FileLock
from worlds import TESTS, finish, paddle_variables, start_world

ENVIRONMENT = "SONICMOE_TEST_FRAMEWORK"
WORKER = TESTS / "ep" / "ep_worker.py"
TIMEOUT_S = 600  # of all worlds one after the other


def ranks_of(framework, world, folder, name):
    """`(exit code, stdout, stderr)` of each rank, each in an interpreter of its own."""
    launch = paddle_variables(world) if framework == "paddle" else [{}] * world
    variables = [{**each, ENVIRONMENT: framework} for each in launch]
    return finish(start_world(lambda rank: [WORKER, folder, rank, name], variables))


@pytest.fixture(scope="session")
def run_ranks():
    """Tests get `ranks_of` as a fixture, because their modules cannot import this file."""
    return ranks_of


@pytest.fixture(scope="session")
def left_by(session_folder):
    """`left_by(framework, name)`: the folder of a world of `ep_worker.py`. One that failed is not tried
    again.
    """

    def folder_of(framework, name):
        folder = session_folder / f"worlds of {framework}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                folder.mkdir()
                if framework == "torch":
                    every = start_world(lambda _: [WORKER, folder], [{ENVIRONMENT: framework}])
                    ended = finish(every, TIMEOUT_S)
                else:
                    (folder / name).mkdir()
                    ended = ranks_of(framework, 2, folder / name, name)
                (folder / "said").write_text("\n".join(said[-4000:] for _, _, said in ended))
        return folder / name

    return folder_of


@pytest.fixture(scope="session")
def forked_ranks(left_by):
    """`forked_ranks(name)`: the exit codes of a world's ranks, and what they have said."""

    def found(name):
        folder = left_by("torch", name)
        codes = folder / "codes"
        assert codes.exists(), (folder.parent / "said").read_text()
        return json.loads(codes.read_text()), (folder / "said").read_text()

    return found


@pytest.fixture(scope="session")
def world_results(left_by):
    """`world_results(framework, world)`: one dictionary of arrays per rank."""

    @cache
    def results(framework, world):
        folder = left_by(framework, f"results {world}")
        files = [folder / f"{rank}.npz" for rank in range(world)]
        said = folder / "said" if framework == "torch" else folder.parent / "said"
        assert all(file.exists() for file in files), said.read_text()
        return [dict(np.load(file)) for file in files]

    return results
