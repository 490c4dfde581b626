"""Worlds are run once per session; tests look at what they left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from worlds import TESTS, paddle_variables, run_world


@pytest.fixture(scope="session")
def world_results(tmp_path_factory):
    """`world_results(framework, world)`: one dictionary of arrays per rank. A world that failed is
    not tried again.
    """
    made: dict[tuple[str, int], list[dict[str, np.ndarray]] | BaseException] = {}

    def run(framework: str, world: int):
        if (framework, world) not in made:
            try:
                made[framework, world] = start(framework, world)
            except BaseException as error:
                made[framework, world] = error
                raise
        outcome = made[framework, world]
        if isinstance(outcome, BaseException):
            pytest.fail(
                f"the world of {world} {framework} ranks failed before: {type(outcome).__name__}"
            )
        return outcome

    def start(framework: str, world: int):
        directory: Path = tmp_path_factory.mktemp(f"{framework}{world}")
        launch = paddle_variables(world) if framework == "paddle" else [{}] * world
        variables = [{**each, "SONICMOE_TEST_FRAMEWORK": framework} for each in launch]
        run_world(
            lambda rank: [TESTS / "ep" / "ep_worker.py", world, rank, directory],
            variables,
        )
        return [dict(np.load(directory / f"{rank}.npz")) for rank in range(world)]

    return run
