"""Importing this has Python look for garbage seldom. A framework makes a million objects as it is
imported, nearly all of which live as long as the process, and looking at them again and again was a
sixth of the time of a short process.
"""

from __future__ import annotations

import gc

ALLOCATIONS = 100_000  # between two collections, in place of 700
gc.set_threshold(ALLOCATIONS, *gc.get_threshold()[1:])
