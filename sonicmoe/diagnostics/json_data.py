"""Findings as JSON. Imports no framework."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any


def plain(
    value: Any,
    *,
    text: Callable[[str], str] = str,
    not_finite: Callable[[float], Any] = lambda number: None,
) -> Any:
    """Nested data with enums as their values.

    Args:
        text: what becomes of a string that is no key.
        not_finite: what becomes of NaN and infinity, which JSON does not have.
    """
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, dict):
        return {
            str(key): plain(item, text=text, not_finite=not_finite) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain(item, text=text, not_finite=not_finite) for item in value]
    if isinstance(value, str):
        return text(value)
    return not_finite(value) if isinstance(value, float) and not math.isfinite(value) else value
