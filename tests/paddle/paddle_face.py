"""Whether the Paddle suites can run here; importable without any framework."""

from __future__ import annotations

import importlib.metadata
import os


def _skip_reason() -> str | None:
    chosen = os.environ.get("SONICMOE_TEST_FRAMEWORK", "torch")
    if chosen != "paddle":
        return f"the framework under test is {chosen}; set SONICMOE_TEST_FRAMEWORK=paddle"
    for distribution in ("paddlepaddle", "paddlepaddle-gpu"):
        try:
            importlib.metadata.version(distribution)
            return None
        except importlib.metadata.PackageNotFoundError:
            continue
    return "paddlepaddle is not installed"


SKIP_REASON = _skip_reason()
