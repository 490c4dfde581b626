"""One of two ranks that all-reduce `main_grad`: `direct_ranks_worker.py RANK DIRECTORY ENGINE`.

ENGINE is "reference" (a host, gloo) or "hopper" (a GPU for each rank, NCCL). Each rank adds its own
micro-batches into a communication buffer, which is reduced as a whole after `step()`. Prints how far
its gradients are from those of one process that ran both ranks' micro-batches.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from node.direct_layers import DirectLayer, Setup, relative

from sonicmoe import SonicMoEConfig


def setup_of(engine: str, rank: int) -> Setup:
    config = SonicMoEConfig(engine=engine, fp8_mode="perf")
    if engine == "reference":
        return Setup(config, dtype=torch.bfloat16)
    torch.cuda.set_device(rank)
    return Setup(config, "cuda", torch.bfloat16, (4, 272, 320, 2), 300)


def main(rank: int, directory: str, engine: str) -> None:
    setup = setup_of(engine, rank)
    backend = "gloo" if setup.device == "cpu" else "nccl"
    dist.init_process_group(
        backend, init_method=f"file://{directory}/store", rank=rank, world_size=2
    )
    layer, alone = DirectLayer(setup, memory="slices"), DirectLayer(setup, memory="own")
    for seeds in ((0, 1), (2, 3)):  # the buffer is cleared in between, and not replaced
        for weight in layer.weights:
            weight.main_grad.zero_()
        alone.clear()
        layer.step(seeds[rank], 4 + seeds[rank])
        # No synchronisation: what the node launched and what the reduction reads are in order.
        (buffer,) = layer.allocations
        dist.all_reduce(buffer.memory)
        alone.step(*seeds, *(4 + seed for seed in seeds))
        errors = map(relative, layer.main_grads, alone.main_grads)
        print(f"{max(errors):.3e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
