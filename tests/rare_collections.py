"""Importing this has Python look for garbage seldom. A framework makes a million objects as it is
imported, and nearly all of them live as long as the process, so looking at them finds nothing.
"""

from __future__ import annotations

import gc

ALLOCATIONS = 100_000  # between two collections, in place of 700
gc.set_threshold(ALLOCATIONS, *gc.get_threshold()[1:])
