"""One of two ranks on two GPUs: `symmetric_gpu_worker.py RANK DIRECTORY`. Every case runs through
symmetric memory, waiting for counts and not, and through collectives, and prints whether all bits are
equal: what arrives, the output and every gradient.
"""

from __future__ import annotations

import os
import random
import sys
import time

import torch
import torch.distributed as dist
from gpu.device import captured, raw

from sonicmoe import SonicMoEConfig
from sonicmoe.ep import make_dispatcher
from sonicmoe.ernie_compat import SonicMoEMlpNode

E, K, H, I = 8, 4, 512, 256
MOST = 1024
# Tokens of both ranks, and the experts that these choose among.
CASES = {
    "even": ((256, 256), range(E)),
    "uneven": ((300, 171), range(E)),
    "a rank without tokens": ((0, 65), range(E)),
    "a rank that receives nothing": ((130, 77), range(E // 2)),
    "one token": ((0, 1), range(E)),
    "more tokens than before": ((1024, 3), range(E)),
}


def inputs(tokens: int, experts: range, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randperm(len(experts), generator=generator)[:K] for _ in range(tokens)]
    ids = torch.stack(drawn) + experts[0] if tokens else torch.zeros(0, K, dtype=torch.int64)
    ids = torch.where(torch.rand(tokens, K, generator=generator) < 0.15, -1, ids)
    draw = lambda: torch.randn(tokens, H, generator=generator).to("cuda", torch.bfloat16)  # noqa: E731
    probs = torch.rand(tokens, K, generator=generator).to("cuda")
    return {"x": draw(), "ids": ids.to("cuda"), "probs": probs, "dout": draw()}


def step(dispatcher, given, fp8: bool, rank: int) -> dict[str, torch.Tensor]:
    """Everything that a rank sees of one layer."""
    generator = torch.Generator().manual_seed(100 + rank)
    shapes = (E // 2, H, 2 * I), (E // 2, I, H)
    weights = [torch.randn(s, generator=generator).mul(s[1] ** -0.5).to("cuda") for s in shapes]
    weights = [torch.nn.Parameter(weight.to(torch.bfloat16)) for weight in weights]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    config = SonicMoEConfig(fp8_mode="perf" if fp8 else "off")
    node = SonicMoEMlpNode.from_fused(*weights, config=config)
    x, probs = (given[name].clone().requires_grad_() for name in ("x", "probs"))
    received = dispatcher.dispatch(x, given["ids"], probs, fp8=fp8, fp8_grad=fp8)
    out = node(
        received.x, received.tokens_per_expert, received.indices, received.probs,
        x_scale=received.x_scale, dx_to=received.dx_to, dout_source=received.dout_source,
    )  # fmt: skip
    y = dispatcher.combine(out, received.handle)
    y.backward(given["dout"])
    node.step()
    real = (received.indices >= 0).any(1)
    arrived = {"x": received.x.view(torch.uint8), "ids": received.indices, "probs": received.probs}
    if received.x_scale is not None:
        arrived["scales"] = received.x_scale
    named = {name: tensor[real] for name, tensor in arrived.items()}
    named |= {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad}
    named |= {"dw1": weights[0].main_grad, "dw2": weights[1].main_grad}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def differing(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(raw(found[name]), raw(wanted[name]))]


def captured_exchange(dispatcher, rank: int) -> None:
    """A graph of dispatch and combine, replayed with other tokens."""
    given, other = (inputs(200, range(E), seed + rank) for seed in (50, 60))

    def there_and_back() -> torch.Tensor:
        received = dispatcher.dispatch(given["x"], given["ids"], given["probs"])
        # Rows that are not real hold anything; nobody reads them.
        return dispatcher.combine(received.x, received.handle)

    there_and_back()
    graph, out = captured(there_and_back, there_and_back)
    for source in (other, given, other):
        for name, tensor in source.items():
            given[name].copy_(tensor.clone())
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, there_and_back()), "a replay differs"
    torch.cuda.synchronize()
    print("captured: equal", flush=True)


def main(rank: int, directory: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=2,
        device_id=torch.device("cuda", rank),
    )
    made = make_dispatcher(E, dist.group.WORLD)
    print(f"auto takes {made.name}", flush=True)
    # Whatever is not written holds NaN.
    poison = torch.full((2**28,), 0x7F, dtype=torch.uint8, device="cuda")
    del poison
    blind = {"wait_for_counts": False}
    options = {"collective": {}, "symmetric": {}, "blind": blind}
    options["bounded"] = {**blind, "max_load": 2.0}
    dispatchers = {
        name: make_dispatcher(
            E,
            dist.group.WORLD,
            kind="symmetric" if name in ("blind", "bounded") else name,
            max_tokens=MOST,
            **more,
        )
        for name, more in options.items()
    }
    skew = random.Random(rank)
    for precision in ("bf16", "fp8"):
        for case, (tokens, experts) in CASES.items():
            bad = []
            for seed in range(4):
                given = inputs(tokens[(rank + seed) % 2], experts, 10 * seed + rank)
                wanted = step(dispatchers["collective"], given, precision == "fp8", rank)
                for name in ("symmetric", "blind", "bounded", "symmetric"):
                    time.sleep(skew.random() * 0.01)
                    found = step(dispatchers[name], given, precision == "fp8", rank)
                    bad += [f"{name}: {key}" for key in differing(found, wanted)]
            print(f"{precision}, {case}: {sorted(set(bad)) or 'equal'}", flush=True)
    captured_exchange(dispatchers["blind"], rank)
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
