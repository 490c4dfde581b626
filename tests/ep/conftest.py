"""Worlds are run once for all parallel workers of a run; tests look at what they left."""

from __future__ import annotations

import numpy as np
import pytest
from filelock import FileLock
from worlds import TESTS, finish, paddle_variables, start_world

WORKER = TESTS / "ep" / "ep_worker.py"


def started(framework, world, folder, *arguments):
    """The ranks of a world of `ep_worker.py`, each in an interpreter of its own."""
    launch = paddle_variables(world) if framework == "paddle" else [{}] * world
    variables = [{**each, "SONICMOE_TEST_FRAMEWORK": framework} for each in launch]
    return start_world(lambda rank: [WORKER, world, rank, folder, *arguments], variables)


def started_as_one(world, folder, *arguments):
    """A process that is the parent of PyTorch's ranks."""
    command = [WORKER, world, "all", folder, *arguments]
    return start_world(lambda _: command, [{"SONICMOE_TEST_FRAMEWORK": "torch"}])


@pytest.fixture(scope="session")
def start_ranks():
    """Tests get `started` as a fixture, because their modules cannot import this file."""
    return started


@pytest.fixture(scope="session")
def start_ranks_as_one():
    return started_as_one


@pytest.fixture(scope="session")
def world_results(session_folder):
    """`world_results(framework, world)`: one dictionary of arrays per rank. A world that failed is
    not tried again.
    """
    loaded: dict[tuple[str, int], list[dict[str, np.ndarray]]] = {}

    def results(framework: str, world: int):
        if (framework, world) not in loaded:
            folder = session_folder / f"world of {world} {framework} ranks"
            with FileLock(f"{folder}.lock"):
                if not folder.exists():
                    folder.mkdir()
                    as_one = framework == "torch"
                    ended = finish(
                        started_as_one(world, folder)
                        if as_one
                        else started(framework, world, folder)
                    )
                    assert not any(code for code, _, _ in ended), ended
                    (folder / "complete").touch()
            if not (folder / "complete").exists():
                pytest.fail(f"the {folder.name} failed before")
            loaded[framework, world] = [
                dict(np.load(folder / f"{rank}.npz")) for rank in range(world)
            ]
        return loaded[framework, world]

    return results
