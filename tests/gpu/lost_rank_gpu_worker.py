"""One of two ranks on two GPUs: `lost_rank_gpu_worker.py RANK DIRECTORY KIND PLACE`.

Rank 1 kills itself at the place: before a dispatch, a combine, or one of their backwards that rank 0
is in. KIND is a dispatcher's ("collective" over NCCL, or "deepep").
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from sonicmoe.ep import make_dispatcher

E, H, K, T = 8, 512, 2, 256
TIMEOUT_S = 20
METHODS = {
    "dispatch": "dispatch",
    "combine": "combine",
    "dispatch of dout": "dispatch_cached",
    "combine of dx": "combine",
}


def main(rank: int, directory: str, kind: str, place: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT_S),
        device_id=torch.device("cuda", rank),
    )
    dispatcher = make_dispatcher(E, dist.group.WORLD, kind=kind)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(T, H, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)]).to("cuda")
    probs = torch.rand(T, K, generator=generator).to("cuda").requires_grad_()

    def step(dying: bool) -> None:
        transport, name = dispatcher.transport, METHODS[place]
        original, skipped = getattr(transport, name), place == "combine of dx"

        def dies(*arguments: object, **options: object) -> object:
            nonlocal skipped
            if skipped:  # the first combine is the forward's
                skipped = False
                return original(*arguments, **options)
            torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)

        if dying:
            setattr(transport, name, dies)
        received = dispatcher.dispatch(x, ids, probs)
        out = dispatcher.combine(received.x * 1.0, received.handle)
        out.backward(torch.ones_like(out))
        torch.cuda.synchronize()

    step(dying=False)
    print("a whole step is done", flush=True)
    step(dying=rank == 1)
    print("not reached", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4])
