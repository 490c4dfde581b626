"""What the package refuses by name: every row of the tables beside this file."""

from __future__ import annotations

from importlib import import_module

import pytest
from framework import IS_PADDLE

OF_BOTH = ("of_node", "of_fleet", "of_weights")
OF_TORCH = ("of_functional", "of_ranks")
TABLES = {
    name: import_module(f"refusals.{name}").ROWS
    for name in (*OF_BOTH, *(() if IS_PADDLE else OF_TORCH))
}
ROWS = [
    pytest.param(row, id=f"{name}-{row.words}") for name, table in TABLES.items() for row in table
]
CALLS = {f"{row.call.__module__}.{row.call.__qualname__}": row.call
         for table in TABLES.values() for row in table if not row.is_scene}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_the_error_names_what_came_and_what_is_needed(row):
    with pytest.raises(row.error, match=row.words):
        row.run()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_is_sound_without_the_change(call):
    call()
