"""An engine that updates its codes in place, as the GPU's FP8 engines do."""

from __future__ import annotations

import dataclasses

import numpy as np
from framework import numpy

from sonicmoe.engine.capabilities import REFERENCE
from sonicmoe.engine.reference import ReferenceEngine


class Following(ReferenceEngine):
    """Overwrites its codes where it is told of a write, or finds one itself.

    events: "made": in new buffers; "remade": in the old ones, as told; "found": in the old ones, by
        its own guard.
    is_blind: its guard finds nothing, as a sample may.
    """

    name = "following"
    record = REFERENCE  # what it computes, and into which memory, is the reference engine's

    def __init__(self):
        self.events, self.is_blind = [], False

    def keep(self, previous, written=False):
        return self.is_blind and not written

    def refresh(self, source, settings, previous=None, written=True):
        natives = source.native()[:2]
        if previous is None:
            self.events.append("made")
            fresh = self.prepare_weights(*natives, None, None, settings)
            return dataclasses.replace(fresh, store=[native.clone() for native in natives])
        if written or not all(map(np.array_equal, map(numpy, natives), map(numpy, previous.store))):
            self.events.append("remade" if written else "found")
            fresh = self.prepare_weights(*natives, None, None, settings)
            for name in ("w1", "w2", "w1_dgrad", "w2_dgrad"):
                getattr(previous, name).overwrite(getattr(fresh, name))
            for old, native in zip(previous.store, natives, strict=True):
                old.copy_(native)
        return previous
