"""Out of memory: told apart from other errors, and raised again with what lowers the need.

The frameworks have a class for it (`torch.cuda.OutOfMemoryError`), hosts and drivers have texts
only. What is raised here is of all classes that a caller may catch, and the framework's error is
its cause.
"""

from __future__ import annotations

from typing import Any

import torch

from .engine.settings import EngineSettings
from .errors import OutOfMemoryError
from .interop import IS_PADDLE

# PyTorch's error is also a RuntimeError, and Paddle's a MemoryError. Programs catch either.
FRAMEWORK_ERROR: type[Exception] = MemoryError if IS_PADDLE else torch.cuda.OutOfMemoryError


class _DeviceOutOfMemoryError(
    OutOfMemoryError,
    RuntimeError if IS_PADDLE else FRAMEWORK_ERROR,  # type: ignore[misc]
):
    """An instance of every class that callers of either framework catch."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Processes hand exceptions to each other, and the public name is of another class."""
        return _raised_elsewhere, self.args


def _raised_elsewhere(*arguments: Any) -> OutOfMemoryError:
    return _DeviceOutOfMemoryError(*arguments)


# A traceback shows the public name, which a caller can import.
_DeviceOutOfMemoryError.__name__ = _DeviceOutOfMemoryError.__qualname__ = "OutOfMemoryError"

# The texts of errors that have no class of their own: drivers (a kernel that loads on a full GPU
# among them), cuBLAS, and PyTorch's allocator on a host.
_TEXTS = (
    "out of memory",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "not enough memory",
)
STATES = {
    "forward": "nothing has changed, and the call may be repeated",
    "backward": (
        "this layer has added no weight gradient of the backward, but layers that it had passed "
        "before have: drop the gradients of this optimizer step everywhere (node.discard_grads(), "
        "zero_grad) and run the step again"
    ),
    "weight gradients": (
        "this addition has added nothing, and one that a schedule put off may be repeated; after "
        "an error in a backward, drop the gradients of this optimizer step everywhere "
        "(node.discard_grads(), zero_grad) and run the step again"
    ),
    "make_copies()": "nothing has changed, and the call may be repeated",
    "step()": "nothing is lost, and the call may be repeated",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be had: of a GPU or of the host."""
    if isinstance(error, MemoryError | FRAMEWORK_ERROR):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def raise_with_advice(
    error: Exception, during: str, settings: EngineSettings | None, like: Any = None
) -> None:
    """Raise an `OutOfMemoryError` from `error` if it is one without advice; else return.

    Args:
        during: a key of `STATES`.
        settings: of the layer, where they are known; advice leaves out what is on already.
        like: a tensor of the call `[T, ...]`, for the number of tokens.
    """
    # An inner call may have given its advice already.
    if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
        return
    tokens = "" if like is None else f" of {int(like.shape[0])} tokens"
    # The frameworks' messages have several lines or sentences; the whole error is the cause.
    lines = str(error).strip().splitlines() or [type(error).__name__]
    reason = max(lines, key=lambda line: "memory" in line)
    raise _DeviceOutOfMemoryError(
        f"out of memory in the {during}{tokens}: {reason.strip()[:300]}\n"
        f"State: {STATES[during]}.\n"
        f"To need less: {'; '.join(_remedies(settings))} "
        "(docs/troubleshooting.md, Out of memory)"
    ) from error


class advising:
    """While inside, an error is raised as `raise_with_advice` does."""

    def __init__(self, during: str, settings: EngineSettings | None, like: Any = None) -> None:
        self._about = during, settings, like

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None and isinstance(error, Exception):
            raise_with_advice(error, *self._about)


def _remedies(settings: EngineSettings | None) -> list[str]:
    # Each remedy is named only where the layer does not use it yet.
    remedies = ["fewer tokens per call"]
    if settings is None or settings.recipe is None:
        remedies.append('fp8_mode="mem" (SONIC_MOE_FP8_MODE=mem) where FP8 will do')
    elif not settings.frees_stagewise:
        remedies.append('fp8_mode="mem" (SONIC_MOE_FP8_MODE=mem)')
    if settings is None or not settings.recompute_z:
        remedies.append("recompute_z=True (SONIC_MOE_FP8_RECOMPUTE_Z=1)")
    if settings is not None and settings.recipe is not None and not settings.iso_weight:
        remedies.append("iso_weight=True (SONIC_MOE_FP8_ISO32_WEIGHT=1)")
    if not IS_PADDLE:
        remedies.append(
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True where free memory is in pieces"
        )
    return remedies
