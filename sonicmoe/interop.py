"""Which framework, which device, which stream: the only file that asks.

Every other module writes `import torch` at its top. Under PyTorch that is PyTorch; under Paddle it
is Paddle's torch proxy, switched on by `paddle.enable_compat(scope={"sonicmoe"})` before the first
import of this package. The torch API used in the package stays inside what the proxy supports.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

from .errors import DeviceError, FrameworkError, LayoutError
from .host import install_hint, too_old

MINIMUM_PADDLE = (3, 3)
HOW_TO_ENABLE = (
    'call paddle.enable_compat(scope={"sonicmoe"}, silent=True) before the first `import sonicmoe`'
)


def parse_version(text: str) -> tuple[int, ...]:
    """The leading (major, minor) integers of a version string; ("3.3.1+cpu" -> (3, 3))."""
    return tuple(int(part) for part in text.split("+", maxsplit=1)[0].split(".")[:2])


def check_paddle_version(text: str) -> None:
    """Raise FrameworkError for a Paddle older than 3.3, which has no torch proxy. A development
    build ("0.0.0") passes.
    """
    if (0, 0) < parse_version(text) < MINIMUM_PADDLE:
        raise FrameworkError(too_old(text))


def _import_framework() -> Any:
    # Looked up and not imported: a program that uses PyTorch must not load Paddle, and the other
    # way round.
    paddle = sys.modules.get("paddle")
    proxied = hasattr(paddle, "enable_compat") or "torch" in sys.modules
    if paddle is not None and hasattr(paddle, "__version__") and not proxied:
        check_paddle_version(paddle.__version__)
    # Under the proxy this statement finds Paddle's module, because `enable_compat` replaces `torch`
    # for importers inside the named scope.
    try:
        import torch
    except ImportError as error:
        if paddle is not None:
            check_paddle_version(paddle.__version__)
            raise FrameworkError(
                f"paddle is loaded but its torch proxy is not enabled for sonicmoe: {HOW_TO_ENABLE}"
            ) from error
        raise FrameworkError(
            f"sonicmoe needs PyTorch ({install_hint('torch')}), or Paddle >= 3.3 "
            f"({install_hint('paddle')}); with Paddle, {HOW_TO_ENABLE}"
        ) from error
    return torch


torch = _import_framework()


def _is_paddle() -> bool:
    # Both frameworks may be loaded. The class of tensors tells which of them `torch` is here.
    paddle = sys.modules.get("paddle")
    return paddle is not None and torch.Tensor is getattr(paddle, "Tensor", None)


FRAMEWORK: str = "paddle" if _is_paddle() else "torch"
IS_PADDLE: bool = FRAMEWORK == "paddle"


# What stands for a tensor while Paddle traces a static graph.
_STATIC_VALUES = ("Value", "Variable")


def require_framework_tensor(value: Any, argument: str) -> None:
    """Raise unless `value` is a dense tensor of the framework this package was imported under.
    LayoutError where it is sparse or nested, FrameworkError where it belongs to the other framework
    or to a static graph, TypeError where it is no tensor at all.
    """
    # The usual case first, and `is_dense` written out: every argument of every call is asked.
    if isinstance(value, torch.Tensor):
        dense = value.is_dense() if IS_PADDLE else value.layout == torch.strided
        if not dense or (not IS_PADDLE and value.is_nested):
            kind = "nested" if not IS_PADDLE and value.is_nested else "sparse"
            raise LayoutError(f"{argument} is {kind}; needed: a dense tensor")
        return
    module = type(value).__module__
    if module.startswith("paddle") and not IS_PADDLE:
        raise FrameworkError(
            f"{argument} is a paddle tensor but sonicmoe was imported with PyTorch: {HOW_TO_ENABLE}"
        )
    if module.startswith("paddle") and type(value).__name__ in _STATIC_VALUES:
        raise FrameworkError(
            f"{argument} is a value of a static graph, and this call runs in dynamic graphs alone: "
            "leave it out of what paddle.jit.to_static traces"
        )
    if module.startswith("torch") and IS_PADDLE:
        raise FrameworkError(
            f"{argument} is a torch tensor but sonicmoe runs through Paddle's torch proxy in this process"
        )
    raise TypeError(f"{argument} must be a {FRAMEWORK} tensor, got {type(value).__name__}")


def is_dense(*tensors: Any) -> bool:
    """Whether each of these tensors has a value at every place of its shape."""
    for tensor in tensors:
        if IS_PADDLE:
            if not tensor.is_dense():
                return False
        # Some nested tensors call themselves strided, and have no shape.
        elif tensor.layout != torch.strided or tensor.is_nested:
            return False
    return True


def _wants_gradient(tensor: Any) -> bool:
    return not tensor.stop_gradient


# Whether autograd wants a gradient for a tensor. In C where it can be: every forward asks it often.
requires_grad: Callable[[Any], bool] = _wants_gradient if IS_PADDLE else attrgetter("requires_grad")


def _paddle_records() -> bool:
    tracer = sys.modules["paddle"].base.framework._dygraph_tracer()
    return bool(tracer is None or tracer._has_grad)


# Whether autograd records now; False in `no_grad` and in Paddle's reentrant recompute forward.
grad_enabled: Callable[[], bool] = _paddle_records if IS_PADDLE else torch.is_grad_enabled


def is_capturing(like: Any) -> bool:
    """Whether the current stream records a CUDA graph. Paddle does not tell."""
    return not IS_PADDLE and is_cuda(like) and torch.cuda.is_current_stream_capturing()


# The number of the backward that runs on this thread, below 0 where none does. Paddle does not say.
_backward_on_this_thread: Callable[[], int] = (
    (lambda: -1) if IS_PADDLE else torch._C._current_graph_task_id
)


def in_backward() -> bool:
    """Whether a backward runs on this thread; False under Paddle."""
    return _backward_on_this_thread() >= 0


def is_recomputed() -> bool:
    """Whether the forward that runs now is one of the two of activation checkpointing: the first,
    whose saved tensors `torch.utils.checkpoint` drops, or the second, inside the backward. Where
    hooks of somebody else take the saved tensors, and under Paddle, the answer is False.
    """
    if _backward_on_this_thread() >= 0:
        return True
    hooks = _top_hooks and _top_hooks(False)
    return bool(hooks) and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


# Private. Without it no forward is known to be the first one of two.
_top_hooks: Any = (
    None if IS_PADDLE else getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
)


def plain_ops() -> AbstractContextManager[Any]:
    """No autograd and no automatic mixed precision: for index casts, flushes and cache builds
    outside the graph.
    """
    if _autocasts():
        return _plain_ops()
    # The usual cases. Inside an autograd function there is nothing to switch off.
    return torch.no_grad() if grad_enabled() else _NOTHING


def _paddle_autocasts() -> bool:
    return bool(sys.modules["paddle"].is_autocast_enabled())


# For any device: one question, and of others the switches below are off anyway.
_autocasts: Callable[[], bool] = (
    _paddle_autocasts if IS_PADDLE else torch._C._is_any_autocast_enabled
)
_NOTHING = nullcontext()


@contextmanager
def _plain_ops() -> Iterator[None]:
    if IS_PADDLE:
        with torch.no_grad(), sys.modules["paddle"].amp.auto_cast(False):
            yield
    else:
        with (
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            yield


# The depth counts blocks of all threads: the first one to enter saves the program's switches, and
# the last one to leave restores them. A save per block would restore "exact" where blocks of two
# threads overlap.
_IEEE = threading.Lock()
_ieee_depth = 0
_ieee_saved: tuple[Any, ...] = ()


@contextmanager
def ieee_matmul() -> Iterator[None]:
    """fp32 matrix products in fp32: without the TF32 or bf16 short cuts that programs switch on
    (and Paddle has on) for speed.

    The switches are process-wide: products that other threads run meanwhile are exact too. Nests,
    also across threads.
    """
    global _ieee_depth, _ieee_saved
    with _IEEE:
        if _ieee_depth == 0:
            _ieee_saved = _swap_matmul_precision(_EXACT)
        _ieee_depth += 1
    try:
        yield
    finally:
        with _IEEE:
            _ieee_depth -= 1
            if _ieee_depth == 0:
                _swap_matmul_precision(_ieee_saved)


_EXACT: tuple[Any, ...] = (False,) if IS_PADDLE else ("ieee", "ieee")


def _swap_matmul_precision(wanted: tuple[Any, ...]) -> tuple[Any, ...]:
    """Set the framework's switches and return what they were."""
    if IS_PADDLE:
        core = sys.modules["paddle"].base.core
        found: tuple[Any, ...] = (core.get_cublas_switch(),)
        core.set_cublas_switch(*wanted)
        return found
    # One switch for cuBLAS and one for the CPU's matrix library.
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    found = tuple(backend.fp32_precision for backend in backends)
    for backend, precision in zip(backends, wanted, strict=True):
        backend.fp32_precision = precision
    return found


def is_cuda(tensor: Any) -> bool:
    """Whether `tensor` lives on an NVIDIA GPU."""
    return bool(tensor.place.is_gpu_place()) if IS_PADDLE else bool(tensor.is_cuda)


def device_name(tensor: Any) -> str:
    """A comparable, printable device: "cpu", "cuda:0"."""
    if IS_PADDLE:
        place = tensor.place
        return f"cuda:{place.gpu_device_id()}" if place.is_gpu_place() else "cpu"
    return str(tensor.device)


# The device of a tensor, in the form that `empty` takes.
device_of: Callable[[Any], Any] = attrgetter("place" if IS_PADDLE else "device")


def empty(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """`torch.empty` on a device that `device_of` gave.

    Without Paddle's checks of arguments, which take longer than allocating, and for PyTorch by
    `empty_strided`, whose arguments PyTorch parses in a third less time.
    """
    if IS_PADDLE:
        return sys.modules["paddle"]._C_ops.empty(shape, dtype, device)
    strides: tuple[int, ...]
    # A layer asks some eighteen times, and nearly always for one axis or two.
    match shape:
        case (_,):
            strides = (1,)
        case (_, columns):
            strides = (columns or 1, 1)
        case _:
            strides = contiguous_strides(shape)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of this shape, as PyTorch gives them."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * (size or 1))
    return tuple(reversed(strides[: len(shape)]))


def require_same_device(tensors: Iterable[tuple[str, Any]]) -> None:
    """Raise DeviceError naming the first tensor that lives elsewhere than the first of `(name,
    tensor)` pairs.
    """
    first: tuple[str, Any] | None = None
    for name, tensor in tensors:
        if first is None:
            first = (name, tensor)
        elif not same_device(tensor, first[1]):
            places = f"{name} is on {device_name(tensor)} but {first[0]} is on"
            raise DeviceError(f"{places} {device_name(first[1])}; all must be on one device")


def same_device(one: Any, other: Any) -> bool:
    """Asked several times in every forward; PyTorch compares devices faster than it names them."""
    if IS_PADDLE:
        return device_name(one) == device_name(other)
    return bool(one.device == other.device)


def current_stream(tensor: Any) -> int:
    """The raw handle of the caller's compute stream on the tensor's device; 0 on the CPU."""
    if not is_cuda(tensor):
        return 0
    if IS_PADDLE:
        paddle = sys.modules["paddle"]
        return int(paddle.base.libpaddle._get_current_raw_stream(tensor.place.gpu_device_id()))
    # PyTorch's Stream object costs more than a launch.
    return int(torch._C._cuda_getCurrentRawStream(tensor.get_device()))


data_ptr: Callable[[Any], int] = torch.Tensor.data_ptr  # the address of the first element


def holds_memory(tensor: Any) -> bool:
    """Whether the framework has not freed the memory of `tensor`, which has elements. Reading a
    freed one ends the process.
    """
    if IS_PADDLE:
        return bool(tensor._is_initialized())
    # FSDP and ZeRO give a weight that they have gathered before a storage of size 0.
    return bool(tensor.untyped_storage().nbytes())


writes_of: Callable[[Any], int] = attrgetter(
    "inplace_version" if IS_PADDLE else "_version"
)  # so far, in place


def count_write(tensor: Any) -> None:
    """Have PyTorch count what a kernel has written, or memory that was freed, as it counts its own
    writes: autograd then refuses another backward that has saved the tensor.
    """
    torch.autograd.graph.increment_version(tensor)


def free(tensor: Any) -> None:
    """Give the memory of one of PyTorch's tensors back, whoever holds the tensor, and count a
    write. A part of a larger buffer stays.
    """
    memory = tensor.untyped_storage()
    if memory.nbytes() == tensor.nbytes:
        count_write(tensor)
        memory.resize_(0)


def owns_storage(tensor: Any) -> bool:
    """Whether nothing else lies in the memory that `tensor` lies in: it is no part of a larger buffer,
    whose views count their writes together.
    """
    whole = tensor._holder_size() if IS_PADDLE else tensor.untyped_storage().nbytes()
    return bool(whole == numel(tensor) * tensor.element_size())


def aligned(tensor: Any, detached: bool = True) -> Any:
    """Contiguous and on a 16-byte address, as kernels read it 16 bytes at a time; copied only if it
    is not. detached: it does not want a gradient either, which PyTorch's tensors may on their way
    to a kernel.
    """
    if ((detached or IS_PADDLE) and requires_grad(tensor)) or not tensor.is_contiguous():
        tensor = tensor.detach().contiguous()
    return tensor if data_ptr(tensor) % 16 == 0 else tensor.detach().clone()


def numel(tensor: Any) -> int:
    """Element count from the shape; the proxy's `numel()` would be a tensor and a sync."""
    count = 1
    for size in tensor.shape:
        count *= int(size)
    return count


@functools.lru_cache(maxsize=64)
def dtype_name(dtype: Any) -> str:
    """A framework-neutral dtype name: "bfloat16", "float32", "float8_e4m3fn", "int64"."""
    # There are a dozen dtypes, and names of them are asked for in every call.
    text = str(dtype)
    for prefix in ("torch.", "paddle."):
        text = text.removeprefix(prefix)
    return text
