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


class UpProjection:
    """In place of the autograd function of the up-projection; it cannot be applied."""

    @staticmethod
    def apply(*args: Any, **kwargs: Any) -> NoReturn:
        """Raise EngineUnavailableError."""
        _refuse("_UpProjection")


class DownProjection:
    """In place of the autograd function of the down-projection; it cannot be applied."""

    @staticmethod
    def apply(*args: Any, **kwargs: Any) -> NoReturn:
        """Raise EngineUnavailableError."""
        _refuse("_DownProjection")


def attach_preallocated_gated_outputs(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise EngineUnavailableError: the outputs of the up-projection are made where it runs."""
    _refuse("attach_preallocated_gated_outputs")


def _refuse(name: str) -> NoReturn:
    raise EngineUnavailableError(
        f"{name} is a part of PaddleFleet's in-tree copy of run_sonic_moe, and this engine computes both "
        "projections in one call: call paddlefleet_ops.sonicmoe.run_sonic_moe"
    )
