"""The suites of the trainers run where the trainer is installed: `make doors`."""

from __future__ import annotations

import importlib.util

import framework

# Module of the trainer: the test files about it.
SUITES = {"torchtitan": "test_torchtitan_*", "megatron": "test_megatron_*"}
collect_ignore_glob = [
    files
    for module, files in SUITES.items()
    if framework.IS_PADDLE or not importlib.util.find_spec(module)
]
