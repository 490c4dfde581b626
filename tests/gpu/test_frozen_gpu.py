"""CUDA graphs of LoRA over experts that are frozen as FP8 codes. Law `trains` of test_oracle_gpu.py has the
bits of weights that have the same codes.
"""

from __future__ import annotations

import pytest
import torch
from gpu.device import captured
from node.direct_layers import assert_same_bits
from oracle.case import Case
from oracle.faces import LAYERS, everywhere
from oracle.golden import scene_of

pytestmark = pytest.mark.gpu

SPARE = 1 << 20  # bytes; codes of the smaller projection are two of them


class Step:
    """A layer with frozen weights, pairs and biases beside them, and a batch of its own. A call gives the
    output and every gradient.
    """

    def __init__(self, face, seed):
        case = Case.parse(
            # In the activation for which test_oracle_gpu.py has kernels with adapters.
            f"face={face} trains=codes activation=geglu_tanh adapters=both bias=True "
            f"arrangement=native recipe=dx256 dtype=bfloat16 sizes=256x512x512x8x2 seed={seed}"
        )
        self.scene = scene_of(case)
        self.layer = layer = LAYERS[face](case, self.scene, "hopper")
        self.x = layer.leaf(self.scene.x, layer.dtype, True)
        self.probs = layer.leaf(self.scene.probs, torch.float32, True)
        self.dout = layer.leaf(self.scene.dout, layer.dtype, False)
        self.indices = layer.tensor(self.scene.indices, torch.int64)

    @property
    def trained(self):
        factors = [factor for pair in self.layer.pairs.values() for factor in pair[:2]]
        return [self.x, self.probs, *self.layer.biases, *factors]

    @property
    def written(self):
        """What a training loop writes between two replays, and a loader."""
        return [*self.trained, self.dout, self.indices, *self.layer.weights]

    def __call__(self):
        with everywhere(self.layer.config):
            out = self.layer.call(self.x, self.probs, self.indices, self.scene)
            return [out.detach(), *torch.autograd.grad(out, self.trained, self.dout)]


@pytest.mark.parametrize("face", ["stacked", "transformers"])
def test_captured_in_a_cuda_graph(face):
    """A replay computes with the factors, the biases and the codes that are there by then; and the
    graph holds no transposed codes, which each backward makes in memory of the graph.
    """
    step, other = Step(face, 0), Step(face, 1)

    def warm():
        for _ in range(3):
            step()

    captured(lambda: torch.zeros(1, device="cuda"))  # what the first capture of a process allocates
    before = torch.cuda.memory_allocated()
    graph, results = captured(step, warm)
    held = torch.cuda.memory_allocated() - before
    assert held <= sum(result.nbytes for result in results) + SPARE, held
    for source in (Step(face, 0), other):
        with torch.no_grad():
            for mine, its in zip(step.written, source.written, strict=True):
                mine.copy_(its)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(results, source())
