"""Findings as JSON. Imports no framework."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any


def plain(value: Any) -> Any:
    """Nested data with enums as their values, and None for a number that is not finite: JSON has
    neither NaN nor infinity.
    """
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return None if isinstance(value, float) and not math.isfinite(value) else value
