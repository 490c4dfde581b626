"""One of the two processes in which `verify` checks experts under FSDP2.

`python -m sonicmoe.diagnostics.verify_ranks REQUEST.json RANK` writes its state and detail as JSON
beside the request.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from . import experts_under_test as tested
from .cases import Sizes
from .verify import RANKS, verify


def main(request: str, rank: int) -> None:
    """One rank."""
    plain: dict[str, Any] = json.loads(Path(request).read_text(encoding="utf-8"))
    loaded = {"experts": tested.load(plain["name"]), "sizes": Sizes(**plain["sizes"])}
    subject = tested.Subject(**{**plain, **loaded})
    on_gpu = subject.device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(rank)
    place: dict[str, Any] = {
        "init_method": f"file://{request}.store",
        "rank": rank,
        "world_size": RANKS,
    }
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo", **place)
    finding = verify("FSDP2", subject, _train)
    outcome = json.dumps([finding.state, finding.detail])
    Path(f"{request}.{rank}").write_text(outcome, encoding="utf-8")


def _train(subject: tested.Subject) -> str:
    """Each rank sees half of the tokens. In the second step the weights are others: gathered ones
    come back in the same memory, and nothing that was made of the old ones may be used.
    """
    case = subject.case()
    model = tested.Held(subject, case)
    fully_shard(model, mesh=init_device_mesh(subject.device.partition(":")[0], (RANKS,)))
    for seed in (0, 1):
        other = subject.case(seed)
        with torch.no_grad():
            fresh = tested.weights_of(subject, other)
            held: Any  # `fully_shard` has made DTensors of the parameters
            for held, whole in zip(model.parameters(), fresh, strict=True):
                held.copy_(distribute_tensor(whole.detach(), held.device_mesh, held.placements))
        now = case.but(w1=other.w1, w2=other.w2)
        half = slice(torch.distributed.get_rank(), None, RANKS)
        own = now.but(**{name: getattr(now, name)[half] for name in tested.TOKENS})
        sharded = replace(subject, experts=lambda x, ids, probs, *_: model(x, ids, probs))
        found = tested.run(sharded, own, tuple(model.parameters()))
        tested.compare(subject, own, {name: found[name] for name in ("out", "dx", "ds")})
        # FSDP2 averages over the ranks, and the golden sums over all tokens.
        sums = {name: RANKS * found[name] for name in ("dw1", "dw2")}
        words = tested.compare(subject, now, sums)
    return words


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
