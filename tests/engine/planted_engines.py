"""Engines with a fault each, for processes that try them."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from sonicmoe.engine.reference import ReferenceEngine


def trials_of_this_process():
    """Command lines of the processes that try engines for it."""
    found = []
    for children in Path("/proc/self/task").glob("*/children"):
        for number in children.read_text().split():
            with suppress(OSError):  # it has ended meanwhile
                found.append(Path("/proc", number, "cmdline").read_text())
    return [line for line in found if "sonicmoe.engine.trial" in line]


class Sound(ReferenceEngine):
    """Nothing is wrong with it, and its libraries talk."""

    def forward(self, *arguments, **options):
        print("a library says hello")
        return super().forward(*arguments, **options)


class WrongNumber(ReferenceEngine):
    """One element of dx."""

    def backward_dx(self, *arguments):
        dx, dprobs, pending = super().backward_dx(*arguments)
        dx[7, 3] += 1.0
        return dx, dprobs, pending


class Overwrites(ReferenceEngine):
    """Gradients that are stored where they should be added."""

    def backward_dw(self, pending, targets):
        for tensor in targets.tensors():
            tensor.fill_(0.0)
        super().backward_dw(pending, targets)


class Differs(ReferenceEngine):
    """Every call adds in another order, or so it looks."""

    calls = 0

    def forward(self, *arguments, **options):
        out, saved = super().forward(*arguments, **options)
        type(self).calls += 1
        return out * (1 + 2**-7 * (self.calls % 2)), saved


class Faults(ReferenceEngine):
    """Ends its process in backward."""

    def backward_dx(self, *arguments):
        os.kill(os.getpid(), signal.SIGSEGV)
        return super().backward_dx(*arguments)


class Raises(ReferenceEngine):
    """As a framework raises what CUDA reports: the error, then lines of advice."""

    def backward_dw(self, *_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nsome advice")


class NoMemory(ReferenceEngine):
    """On a GPU that others fill."""

    def forward(self, *_, **__):
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")


class NeverEnds(ReferenceEngine):
    """Loops without forward progress, and without being interrupted."""

    def backward_dw(self, *_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)  # other tests need the processor


class NeverBegins(ReferenceEngine):
    """Its import fails on this machine."""

    def __init__(self):
        sys.exit("this package needs another machine")
