"""Findings as JSON. Imports no framework."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any


def plain(value: Any) -> Any:
    """Nested data with enums as their values; numbers that are not finite, which JSON does not have,
    become None.
    """
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
