"""The layer of the node's GPU tests; run as a program, one forward, backward and step of a smaller one,
for a sanitizer.
"""

from __future__ import annotations

import torch
from gpu.device import DEVICE
from node.direct_layers import DirectLayer, Setup

from sonicmoe import SonicMoEConfig

FP8 = SonicMoEConfig(fp8_mode="perf", engine="hopper")  # by name: a fallback would prove nothing
E, H, I, K, T = 6, 512, 384, 3, 700


def layer(config=FP8, *, sizes=(E, H, I, K), tokens=T, device=DEVICE, **options):
    """In bf16; a parameter with fp32 `main_grad` for each expert's projection, unless the options
    say otherwise. The same weights for the same seed.
    """
    return DirectLayer(Setup(config, device, torch.bfloat16, sizes, tokens), **options)


def main():
    results = layer(sizes=(3, 256, 128, 2), tokens=200).step(0)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in results)
    print("one step is done")


if __name__ == "__main__":
    main()
