"""What an error says where memory runs out. Law `full` of tests/oracle fails any allocation of a step,
and has the bits of whoever repeats the call.
"""

from __future__ import annotations

import pytest
from faults import FULL_GPU, FULL_HOST, Allocations, out_of_memory
from framework import IS_PADDLE, tensor, torch
from node.node_harness import FP8, FULL, Layer

from sonicmoe import SonicMoEConfig
from sonicmoe.errors import OutOfMemoryError
from sonicmoe.out_of_memory import is_out_of_memory

MEM = SonicMoEConfig(engine="reference", fp8_mode="mem")
FROM_SCRATCH = SonicMoEConfig(engine="reference", fp8_mode="perf", recompute_z=True)


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
