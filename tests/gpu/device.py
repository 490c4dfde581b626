"""What GPU tests do to the device and to its memory, whatever they test."""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest
import torch
from worlds import start_world

from sonicmoe.jit import no_compile
from sonicmoe.jit.child import search_path
from sonicmoe.jit_warmup import warmup_jit

DEVICE = "cuda"
LONG = 100_000_000  # cycles: a stream that sleeps so long is behind everything else


def compiled_beforehand(*layers):
    """An autouse fixture for a file: what warm-up plans for each `(config, (E, H, I))` is compiled,
    and no test of the file may compile.
    """

    @pytest.fixture(scope="module", autouse=True)
    def compiled():
        for config, sizes in layers:
            assert warmup_jit(*sizes, DEVICE, config=config, jobs=os.cpu_count()).complete
        with no_compile():
            yield

    return compiled


@contextmanager
def waiting_is_an_error():
    """Inside the block a call that waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(call, before=lambda: None):
    """`(graph, what the captured call gave)`. `before` runs first, on a stream of its own, because a
    capture must not hold what is made once.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        before()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def start_two_ranks(worker, *arguments, **variables):
    """`worker RANK ARGUMENTS` twice, for `worlds.finish`."""
    # Packages may come from a path that only this process's `sys.path` knows.
    variables = {"PYTHONPATH": search_path(), **variables}
    return start_world(lambda rank: [worker, rank, *arguments], [variables] * 2)


def raw(tensor):
    """As bytes, among which NaN equals itself."""
    return tensor.detach().contiguous().view(torch.uint8)


def fill_free_memory(byte):
    """Leave `byte` in what the allocator will hand out next, in large blocks and in small ones."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    sizes = [2**30] + [2**size for size in (12, 16, 19) for _ in range(256)]
    held = [torch.full((size,), byte, dtype=torch.uint8, device=DEVICE) for size in sizes]
    torch.cuda.synchronize()
    del held
