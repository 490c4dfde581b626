"""A fault at one allocation: the n-th one that the package asks the framework for fails.

Under PyTorch every operation whose result has memory of its own counts, on a host and on a GPU;
under Paddle every operation of its own operator table that does not work in place.
"""

from __future__ import annotations

import sys

from framework import IS_PADDLE, torch

PACKAGE = "/sonicmoe/"
if IS_PADDLE:
    import paddle

    FULL_GPU = "ResourceExhaustedError: Out of memory error on GPU 0. Cannot allocate 2.0GB memory."
    FULL_HOST = "ResourceExhaustedError: Fail to alloc memory of 2147483648 size."
    CAUGHT = (MemoryError, OSError)  # Paddle makes an OSError of every error in a backward
else:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    FULL_GPU = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."
    FULL_HOST = (
        "[enforce fail at alloc_cpu.cpp:126] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 2147483648 bytes. Error code 12 (Cannot allocate memory)"
    )
    CAUGHT = (torch.cuda.OutOfMemoryError,)


def out_of_memory(text):
    """As the framework raises it."""
    if IS_PADDLE:
        return MemoryError(text)
    return torch.cuda.OutOfMemoryError(text) if text is FULL_GPU else RuntimeError(text)


def asked_by_the_package():
    """Whether a function of the package is on the stack, below nothing of a test's own."""
    frame = sys._getframe(1)
    while frame is not None:
        if PACKAGE in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class Allocations:
    """Counts allocations of the package inside the block, and fails the one with number `fails_at`.

    None: only counts.
    """

    def __init__(self, fails_at=None, text=FULL_GPU):
        self.fails_at, self.text, self.seen = fails_at, text, 0
        self._entered = None

    @property
    def failed(self):
        return self.fails_at is not None and self.seen > self.fails_at

    def note(self):
        """An allocation has just been made."""
        if asked_by_the_package():
            number, self.seen = self.seen, self.seen + 1
            if number == self.fails_at:
                raise out_of_memory(self.text)

    def __enter__(self):
        self._entered = _PaddleOperators(self) if IS_PADDLE else _TorchMode(self)
        self._entered.__enter__()
        return self

    def __exit__(self, *error):
        self._entered.__exit__(*error)


if IS_PADDLE:

    class _PaddleOperators:
        def __init__(self, allocations):
            self.allocations, self.originals = allocations, {}

        def __enter__(self):
            table = paddle._C_ops
            for name in dir(table):
                operator = getattr(table, name)
                if name.startswith("_") or name.endswith("_") or not callable(operator):
                    continue
                self.originals[name] = operator
                setattr(table, name, self.counted(operator))

        def __exit__(self, *_):
            for name, operator in self.originals.items():
                setattr(paddle._C_ops, name, operator)

        def counted(self, operator):
            def call(*arguments, **options):
                result = operator(*arguments, **options)
                self.allocations.note()
                return result

            return call

else:

    class _TorchMode(TorchDispatchMode):
        def __init__(self, allocations):
            super().__init__()
            self.allocations = allocations

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            given = {
                storage_of(tensor) for tensor in tree_leaves((args, kwargs)) if is_held(tensor)
            }
            made = [tensor for tensor in tree_leaves(result) if is_held(tensor)]
            if any(tensor.numel() and storage_of(tensor) not in given for tensor in made):
                self.allocations.note()
            return result

    def is_held(value):
        return isinstance(value, torch.Tensor)

    def storage_of(tensor):
        return tensor.untyped_storage()._cdata
