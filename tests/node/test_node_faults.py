"""Out of memory at any allocation of a training run: the error helps, nothing is left half done,
and whoever repeats the call gets the bits of a run without the fault. Nor does memory full of NaN
change a bit.

A run is two optimizer steps, of two micro-batches and of one, with changed weights in between, so
that faults meet forward, backward, weight gradients, the flush, and a second preparation of the
weights. As a program this file fails every allocation of every case:

    PYTHONPATH=.:tests python tests/node/test_node_faults.py
"""

from __future__ import annotations

import random

import pytest
from engine.moe_golden import make_problem
from faults import CAUGHT, FULL_GPU, FULL_HOST, Allocations, out_of_memory
from framework import IS_PADDLE, numpy, tensor, torch
from node.node_harness import FP8, FULL, Layer, assert_equal

from sonicmoe import SonicMoEConfig
from sonicmoe.errors import OutOfMemoryError, SonicMoEError
from sonicmoe.out_of_memory import is_out_of_memory

MEM = SonicMoEConfig(engine="reference", fp8_mode="mem")
FROM_SCRATCH = SonicMoEConfig(engine="reference", fp8_mode="perf", recompute_z=True)
PER_EXPERT = "per_expert"
SAMPLE = 4  # allocations that fail per case; each is a run of its own

# Name: (configuration, arrangement of the parameters, where gradients go, options of the node).
CASES = {
    "plain": (FULL, PER_EXPERT, "bound", {}),
    "plain, stacked, fresh main_grad": (FULL, "fused", "fresh", {}),
    "plain, .grad": (FULL, PER_EXPERT, "grad", {}),
    "fp8": (FP8, PER_EXPERT, "bound", {}),
    "fp8, mem": (MEM, PER_EXPERT, "fresh", {}),
    "fp8, recompute z": (FROM_SCRATCH, "fused", "bound", {}),
    "step": (FULL, PER_EXPERT, "bound", {"flush": "step"}),
    "step, fp8": (FP8, "fused", "bound", {"flush": "step"}),
}


def batches():
    sizes = {"hidden": 16, "intermediate": 12, "experts": 3, "topk": 2, "empty": ()}
    made = [make_problem(seed=seed, tokens=9 + 4 * seed, **sizes) for seed in range(2)]
    return [p.but(up_gate=made[0].up_gate, down=made[0].down) for p in made]


class Run:
    """Two optimizer steps of one layer.

    results: every tensor that a call gave, as numpy arrays.
    errors: those of the calls that had to be repeated.
    """

    def __init__(self, case, allocations, repeat_backward=False):
        config, arrangement, self.gradient, options = CASES[case]
        self.batches, self.allocations = batches(), allocations
        self.repeat_backward = repeat_backward
        self.layer = Layer(self.batches[0], arrangement=arrangement, config=config, **options)
        self.results, self.errors = [], []

    def run(self):
        for micro_batches in (self.batches, self.batches[:1]):
            self.bind_gradients()
            for batch in micro_batches:
                self.micro_batch(batch)
            self.repeated(self.layer.node.step)
            self.update()
        return self

    def bind_gradients(self):
        if self.gradient != "grad":
            self.layer.set_main_grad(0.0 if self.gradient == "bound" else None)
            return
        for weight in self.layer.weights:
            weight.grad = None

    def micro_batch(self, batch):
        out = []

        def forward():
            x, probs = (tensor(a, torch.float32, grad=True) for a in (batch.x, batch.probs))
            indices = tensor(batch.indices).to(torch.int64)
            with self.allocations:
                out[:] = self.layer.node(x, None, indices, probs), x, probs

        def backward():
            if not out:  # repeated: a graph whose backward failed is not used again
                forward()
            result, dout = out[0], tensor(batch.dout, torch.float32)
            if not self.repeat_backward:
                held, out[:] = list(out), []
            with self.allocations:
                result.backward(dout)
            out[:] = out or held

        self.repeated(forward)
        self.repeated(backward)
        result, x, probs = out
        self.results += [numpy(result), numpy(x.grad), numpy(probs.grad)]

    def repeated(self, call):
        try:
            call()
        except (*CAUGHT, OutOfMemoryError) as error:
            self.errors.append(error)
            call()

    def update(self):
        name = "grad" if self.gradient == "grad" else "main_grad"
        gradients = [getattr(weight, name) for weight in self.layer.weights]
        self.results += [numpy(gradient) for gradient in gradients]
        with torch.no_grad():
            for weight, gradient in zip(self.layer.weights, gradients, strict=True):
                weight.copy_(weight.detach() - 0.05 * gradient.to(weight.dtype))


def count(case):
    return Run(case, allocations := Allocations()).run(), allocations.seen


def check(case, number, wanted, **options):
    """The run whose allocation `number` fails gives the bits of `wanted`; returns whether a call
    raised.
    """
    text = FULL_GPU if number % 2 else FULL_HOST
    run = Run(case, Allocations(number, text), **options).run()
    assert_equal(run.results, wanted.results)
    if not run.errors:
        return False
    (error,) = run.errors
    assert "out of memory in the " in str(error), error
    assert "To need less: fewer tokens per call" in str(error), error
    if not IS_PADDLE:  # which raises an OSError with this text from a backward
        assert isinstance(error, OutOfMemoryError | SonicMoEError)
        assert is_out_of_memory(error.__cause__) and str(error.__cause__) == text
    return True


@pytest.mark.parametrize("case", CASES)
def test_repeated_calls_give_the_bits_of_a_run_without_a_fault(case, caplog):
    wanted, allocations = count(case)
    assert wanted.errors == [] and allocations > 2 * SAMPLE
    numbers = random.Random(case).sample(range(allocations), SAMPLE)
    assert sum(check(case, number, wanted) for number in numbers) >= SAMPLE / 2
    assert not [record for record in caplog.records if "node.step()" in record.getMessage()]


@pytest.mark.skipif(IS_PADDLE, reason="Paddle runs a PyLayer's backward once")
@pytest.mark.parametrize("case", ["plain", "fp8", "plain, .grad", "step"])
def test_the_same_graph_takes_a_second_backward(case):
    """Whose first one ran out of memory."""
    wanted, allocations = count(case)
    for number in random.Random(case).sample(range(allocations), SAMPLE):
        check(case, number, wanted, repeat_backward=True)


class TestError:
    def raised(self, config=FULL, text=FULL_GPU):
        layer, allocations = Layer(config=config), Allocations(3, text)
        x, probs = (tensor(a, torch.float32) for a in (layer.problem.x, layer.problem.probs))
        with pytest.raises(OutOfMemoryError) as caught, allocations:
            layer.node(x, None, tensor(layer.problem.indices), probs)
        return caught.value

    def test_names_what_is_not_on_already(self):
        plain, fp8, mem = (str(self.raised(config)) for config in (FULL, FP8, MEM))
        assert "SONIC_MOE_FP8_MODE=mem" in plain and "where FP8 will do" in plain
        assert "SONIC_MOE_FP8_MODE=mem" in fp8 and "where FP8 will do" not in fp8
        assert "SONIC_MOE_FP8_MODE" not in mem and "SONIC_MOE_FP8_RECOMPUTE_Z=1" in mem
        assert "SONIC_MOE_FP8_RECOMPUTE_Z" not in str(self.raised(FROM_SCRATCH))
        for text in (plain, fp8, mem):
            assert "nothing has changed" in text and "docs/troubleshooting.md" in text
            assert ("expandable_segments" in text) is not IS_PADDLE

    @pytest.mark.parametrize("text", [FULL_GPU, FULL_HOST])
    def test_has_the_frameworks_words(self, text):
        error = self.raised(text=text)
        # It is caught by those who catch the framework's or Python's.
        assert isinstance(error, MemoryError) and isinstance(error, RuntimeError)
        if not IS_PADDLE:
            assert isinstance(error, torch.cuda.OutOfMemoryError | torch.OutOfMemoryError)
        assert type(error).__name__ == "OutOfMemoryError"
        assert text[:100] in str(error).splitlines()[0]
        assert str(error.__cause__) == text

    def test_others_stay_what_they_are(self):
        assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"))
        assert not is_out_of_memory(ValueError("out of memory"))
        assert is_out_of_memory(out_of_memory(FULL_HOST))
        for text in ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling"):
            assert is_out_of_memory(RuntimeError(text))


def main():
    for case in CASES:
        wanted, allocations = count(case)
        failures = []
        for number in range(allocations):
            for options in ({}, {"repeat_backward": True}):
                if options and (IS_PADDLE or CASES[case][0] is MEM):
                    continue
                try:
                    check(case, number, wanted, **options)
                except Exception as error:
                    failures.append(f"{number}{options or ''}: {type(error).__name__} {error}")
        found = f"{case}: {allocations} allocations, {len(failures)} failures"
        print(found, *failures[:5], sep="\n  ")


if __name__ == "__main__":
    main()
