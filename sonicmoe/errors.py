"""Exceptions of the package. Each message names the argument, what came and what is needed."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class SonicMoEError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(SonicMoEError, ValueError):
    """A flag or a configuration field has a value the package does not know."""


class ShapeError(SonicMoEError, ValueError):
    """A tensor has the wrong shape, stride or size."""


class DTypeError(SonicMoEError, TypeError):
    """A tensor has the wrong dtype."""


class DeviceError(SonicMoEError, ValueError):
    """Tensors live on different devices, or on one the engine cannot use."""


class RoutingError(SonicMoEError, ValueError):
    """Routing indices, probabilities or counts break the routing contract."""


class LayoutError(SonicMoEError, ValueError):
    """A weight, or the object that holds it, does not have the layout the node reads."""


class StaleWeightsError(SonicMoEError, RuntimeError):
    """Prepared weights are older than the parameters, and cannot be made again from them."""


class FrameworkError(SonicMoEError, ImportError):
    """Paddle or PyTorch is missing, too old, or reached the package through the wrong door."""


class OutOfMemoryError(SonicMoEError, MemoryError):
    """The device, or the host, has no memory for a call; the message says what lowers the need.

    What is raised is also of the framework's own class (`torch.cuda.OutOfMemoryError`), and the
    framework's error is its cause.
    """


class RankLostError(SonicMoEError, RuntimeError):
    """A collective failed because another rank of the group has died or does not answer."""


class EngineUnavailableError(SonicMoEError, RuntimeError):
    """The requested engine cannot run here; the message says why and what can."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'train'?` with the closest name; "" where none is close."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"; did you mean {near[0]!r}?" if near else ""


def expect(condition: bool, error: type[SonicMoEError], message: str) -> None:
    """Raise ``error(message)`` unless ``condition`` holds."""
    if not condition:
        raise error(message)


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Inside, an `OSError` that names no file, as that of a full disk, gets the name of this one."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
