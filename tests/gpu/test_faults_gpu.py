"""Training on a GPU that runs out of memory: the bits of an undisturbed run, on both GPU engines.

A run is two optimizer steps, of two micro-batches and of one, with changed weights in between. A
call that runs out of memory is repeated.
"""

from __future__ import annotations

import re
import traceback
from itertools import product

import pytest
import torch
from faults import FULL_GPU, PACKAGE, Allocations
from gpu.device import compiled_beforehand
from gpu.hopper_step import E, H, I, K
from node.direct_layers import DirectLayer, Setup

from sonicmoe import SonicMoEConfig
from sonicmoe.errors import OutOfMemoryError

pytestmark = pytest.mark.gpu

SMALL, LARGE = (E, H, I, K), (8, 1024, 1024, K)  # a step of the second takes hundreds of MiB


def hopper(**changes):
    return SonicMoEConfig(**{"fp8_mode": "perf", "engine": "hopper"} | changes)


def bf16(**changes):
    return SonicMoEConfig(fp8_mode="off", engine="bf16", **changes)


FP8, MEM, BF16 = hopper(), hopper(fp8_mode="mem"), bf16()
LEAST = hopper(fp8_mode="mem", iso_weight=True, recompute_z=True)
PLAIN_WGRAD, STAGEWISE = hopper(fp8_wgrad=False), bf16(stagewise_memory=True)
STEP = {"flush": "step"}
FUSED, NATIVE = {"arrangement": "fused"}, {"arrangement": "native"}

# Name: (configuration, where gradients go, options of the layer). `main_grad` is memory of its own or
# none yet; where "strided", plain operations flush it; "grad" is `.grad` without a `main_grad`. Where
# no mode is named, FP8 adds straight into the first two, and per-expert BF16 has memory of its own
# for one backward. No products: every mode, arrangement and destination has a case.
CASES = {
    "fp8": (FP8, "own", {}),
    "bf16": (BF16, "own", {}),
    "fp8, step": (FP8, "own", STEP),
    "fp8, mem": (MEM, "own", {}),
    "bf16, native": (BF16, "own", NATIVE),
    "fp8, fresh": (FP8, "none", {}),
    "fp8, grad": (FP8, "grad", {}),
    "fp8, strided": (FP8, "strided", {}),
    "fp8, least memory": (LEAST, "none", {}),
    "fp8, plain wgrad, mem": (hopper(fp8_mode="mem", fp8_wgrad=False), "own", {}),
    "fp8, plain wgrad, native": (PLAIN_WGRAD, "own", NATIVE),
    "fp8, stacked": (FP8, "none", FUSED),
    "fp8, mem, step": (MEM, "own", STEP),
    "bf16, recompute_z": (bf16(recompute_z=True), "none", {}),
    "bf16, grad": (BF16, "grad", {}),
    "bf16, step": (BF16, "own", STEP),
    "bf16, stagewise, native": (STAGEWISE, "own", NATIVE),
}


compiled = compiled_beforehand(
    *product(dict.fromkeys(config for config, _, _ in CASES.values()), (SMALL[:3], LARGE[:3]))
)


class Run:
    """Two optimizer steps of one layer; see the module's docstring.

    results: every tensor that a call gave. errors: those of the calls that had to be repeated.
    freed: called before a call is repeated.
    """

    def __init__(self, case, sizes=SMALL, tokens=(700, 333), freed=lambda: None):
        config, self.gradient, options = CASES[case]
        self.layer = DirectLayer(Setup(config, "cuda", torch.bfloat16, sizes), **options)
        self.node, self.weights = self.layer.node, self.layer.weights
        self.waits = "flush" in options
        self.batches = [self.layer.batch(seed, count) for seed, count in enumerate(tokens)]
        self.bind_gradients()
        self.freed, self.results, self.errors = freed, [], []
        self.allocations = Allocations()

    def run(self, allocations=None):
        self.allocations = allocations or Allocations()
        for micro_batches in (self.batches, self.batches[:1]):
            for batch in micro_batches:
                self.micro_batch(batch)
            self.repeated(self.node.step)
            self.update()
        return self

    def bind_gradients(self):
        if self.gradient in ("own", "none"):
            self.layer.bind(self.gradient)
            return
        for weight in self.weights:
            weight.grad = weight.main_grad = None
            if self.gradient == "grad":
                del weight.main_grad
            else:
                weight.main_grad = torch.zeros((*weight.shape, 2), device="cuda")[..., 0]

    def micro_batch(self, batch):
        graph = []

        def forward():
            x, indices, probs, _ = leaves_of(batch)
            with self.allocations:
                graph[:] = self.node(x, None, indices, probs), x, probs

        def backward():
            if not graph:
                forward()
            out, x, probs = graph
            graph.clear()
            with self.allocations:
                out.backward(batch[3])
            self.results += [out.detach(), x.grad, probs.grad]

        self.repeated(forward)
        self.repeated(backward)
        assert self.waits or self.node.gradient_bytes == 0

    def repeated(self, call):
        failed = False
        try:
            call()
        except torch.cuda.OutOfMemoryError as error:
            failed = True
            # The test's own tensors may not fit either.
            if comes_from_the_package(error):
                self.note(error)
        # Out here, because the frames of a traceback hold tensors.
        if failed:
            self.freed()
            call()

    def note(self, error):
        assert isinstance(error, OutOfMemoryError), error
        assert isinstance(error.__cause__, torch.cuda.OutOfMemoryError), error.__cause__
        assert "To need less: fewer tokens per call" in str(error), error
        self.errors.append(str(error))

    def update(self):
        self.freed()
        name = "grad" if self.gradient == "grad" else "main_grad"
        gradients = [getattr(weight, name) for weight in self.weights]
        self.results += [gradient.clone() for gradient in gradients]
        with torch.no_grad():
            for weight, gradient in zip(self.weights, gradients, strict=True):
                weight.add_(gradient.to(weight.dtype), alpha=-0.01)
        self.bind_gradients()


def leaves_of(batch):
    """Fresh leaves of x and of the probabilities."""
    x, indices, probs, dout = batch
    x, probs = (tensor.detach().clone().requires_grad_() for tensor in (x, probs))
    return x, indices, probs, dout


def comes_from_the_package(error):
    frames = traceback.extract_tb(error.__traceback__)
    return any(PACKAGE in frame.filename for frame in frames)


def phase(error):
    """forward, backward, weight gradients or step()."""
    return re.match("out of memory in the (.*?)(?: of [0-9]+ tokens)?:", error).group(1)


def assert_same_bits(run, wanted, what):
    torch.cuda.synchronize()
    for index, (got, want) in enumerate(zip(run.results, wanted.results, strict=True)):
        assert torch.equal(got, want), (what, index, run.errors)


@pytest.mark.parametrize("case", CASES)
def test_every_allocation_may_fail(case):
    """One after the other; the repeated call gives the bits of a run without the fault."""
    Run(case).run()  # makes what is made once per process
    wanted = Run(case).run(counted := Allocations())
    assert wanted.errors == [] and counted.seen > 20, counted.seen
    phases = set()
    for number in range(counted.seen):
        run = Run(case).run(Allocations(number, FULL_GPU))
        (error,) = run.errors  # a fault that nobody notices would be a fallback
        assert_same_bits(run, wanted, number)
        phases.add(phase(error))
    assert {"forward", "backward"} <= phases
