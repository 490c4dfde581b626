"""Worlds are run once for all parallel workers of a run; tests look at what they left."""

from __future__ import annotations

import numpy as np
import pytest
from filelock import FileLock
from worlds import TESTS, finish, paddle_variables, start_world


def started(framework, world, folder, *arguments):
    """The ranks of a world of `ep_worker.py`."""
    launch = paddle_variables(world) if framework == "paddle" else [{}] * world
    variables = [{**each, "SONICMOE_TEST_FRAMEWORK": framework} for each in launch]
    worker = TESTS / "ep" / "ep_worker.py"
    return start_world(lambda rank: [worker, world, rank, folder, *arguments], variables)


@pytest.fixture(scope="session")
def start_ranks():
    """Tests get `started` as a fixture, because their modules cannot import this file."""
    return started


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
                    ended = finish(started(framework, world, folder))
                    assert [code for code, _, _ in ended] == [0] * world, ended
                    (folder / "complete").touch()
            if not (folder / "complete").exists():
                pytest.fail(f"the {folder.name} failed before")
            loaded[framework, world] = [
                dict(np.load(folder / f"{rank}.npz")) for rank in range(world)
            ]
        return loaded[framework, world]

    return results
