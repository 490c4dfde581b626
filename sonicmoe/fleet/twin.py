"""Names that only PaddleFleet's in-tree copy of `run_sonic_moe` reads. It binds them when it is
imported, so they must be there. It runs only where `run_sonic_moe` cannot be imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ..config import active_config
from ..errors import EngineUnavailableError


@contextmanager
def enable_fp8(enable: bool = True) -> Iterator[None]:
    """FP8 on or off for everything inside the block that was not given a configuration."""
    around = active_config()
    found = around.resolve().fp8_mode
    mode = ("perf" if found == "off" else found) if enable else "off"
    with dataclasses.replace(around, fp8_mode=mode).activate():
        yield


class _InFleetsCopyAlone:
    """A name that can be bound and not used: an autograd function of one projection, whose `apply`
    raises, or a function.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise EngineUnavailableError."""
        raise EngineUnavailableError(
            f"{self._name} is a part of PaddleFleet's in-tree copy of run_sonic_moe, and this engine computes both "
            "projections in one call: call paddlefleet_ops.sonicmoe.run_sonic_moe"
        )

    __call__ = apply


UpProjection = _InFleetsCopyAlone("_UpProjection")
DownProjection = _InFleetsCopyAlone("_DownProjection")
attach_preallocated_gated_outputs = _InFleetsCopyAlone("attach_preallocated_gated_outputs")
