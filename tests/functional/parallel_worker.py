"""One of two ranks: trains a small MoE under DDP and FSDP2 and compares it with one process that
sees both ranks' batches; and what two processes have to agree on. parts_worker.py is the program.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from functional.layer_golden import views
from node.direct_layers import Expert
from pairwise import pairwise
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from sonicmoe import MoE, moe_TC_softmax_topk_layer
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import ActivationType
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.layer.plan import make_plan, number_of
from sonicmoe.layouts import WeightLayout

RANKS, STEPS, H, I, E = 2, 3, 32, 48, 4


def layer(seed: int = 0) -> MoE:
    torch.manual_seed(seed)
    moe = MoE(E, 2, H, I, "swiglu", True, 0.2)
    torch.nn.init.normal_(moe.router.weight)
    return moe


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(24, H, generator=generator), torch.randn(24, H, generator=generator)


def loss_of(model: torch.nn.Module, step: int, rank: int, use_fp8: bool) -> torch.Tensor:
    x, target = batch(step, rank)
    return (model(x, use_fp8=use_fp8)[0] - target).square().mean()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """A gradient of nearly zero moves its weight by next to nothing. With AdamW's own `eps` it moves
    it by the whole learning rate, in the direction of a rounding error.
    """
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)


def alone(use_fp8: bool) -> list[dict[str, torch.Tensor]]:
    """Gradients and weights after every step of one process that accumulates over both ranks'
    batches.
    """
    moe = layer()
    optimizer, history = optimizer_of(moe), []
    for step in range(STEPS):
        for rank in range(RANKS):
            (loss_of(moe, step, rank, use_fp8) / RANKS).backward()
        history.append(
            {f"grad {name}": parameter.grad.clone() for name, parameter in moe.named_parameters()}
        )
        optimizer.step()
        optimizer.zero_grad()
        history[-1] |= {
            name: parameter.detach().clone() for name, parameter in moe.named_parameters()
        }
    return history


def check_training(wrap, rank: int, use_fp8: bool, compiled: bool) -> None:
    moe = layer()
    model = wrap(moe) or moe
    forward = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer = optimizer_of(model)
    before = {name: whole(parameter) for name, parameter in moe.named_parameters()}
    for step, expected in enumerate(alone(use_fp8)):
        loss_of(forward, step, rank, use_fp8).backward()
        found = {
            f"grad {name}": whole(parameter.grad) for name, parameter in moe.named_parameters()
        }
        optimizer.step()
        optimizer.zero_grad()
        found |= {name: whole(parameter) for name, parameter in moe.named_parameters()}
        # The same products and sums as in one process: equal bits here. Room for libraries whose
        # last bits depend on where a tensor lies.
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
        for name, old in before.items():
            assert not torch.equal(found[name], old), f"{name} did not train in step {step}"
        before = {name: found[name] for name in before}


def check_changes_of_sharded_weights(rank: int) -> None:
    """Gathered weights reappear in the same memory with the same version: copies prepared of them
    must not.
    """
    layers = [layer(seed) for seed in (0, 5)]
    moe = layer()
    fully_shard(moe, reshard_after_forward=True)
    x, _ = batch(0, rank)
    expected = [other(x, use_fp8=True)[0] for other in layers]
    prepare, prepared = ReferenceEngine.prepare_weights, []
    ReferenceEngine.prepare_weights = lambda *arguments: prepared.append(1) or prepare(*arguments)
    for turn in range(10):  # the allocator returns the same address often, not always
        with torch.no_grad():
            for mine, its in zip(moe.parameters(), layers[turn % 2].parameters(), strict=True):
                mine.copy_(distribute_tensor(its, mine.device_mesh, mine.placements))
            torch.testing.assert_close(moe(x, use_fp8=True)[0], expected[turn % 2])
    ReferenceEngine.prepare_weights = prepare
    assert len(prepared) == 10


def check_numbers_of_plans() -> None:
    """Compilers keep graphs on disk: a number must not mean other settings in another process."""
    halves = WeightLayout(split_half=True)
    mine = [number_of(make_plan(ActivationType.GEGLU, halves, fp8)) for fp8 in (True, False, None)]
    everybodys: list[list[int]] = [[]] * RANKS
    dist.all_gather_object(everybodys, mine)
    assert everybodys == [mine] * RANKS and len(set(mine)) == 3


class Experts(torch.nn.Module):
    """A node over modules that FSDP2 shards; the same weights for everybody."""

    def __init__(self, flush: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = [(torch.randn(H, 2 * I) * 0.2, torch.randn(I, H) * 0.2) for _ in range(E)]
        self.experts = torch.nn.ModuleList(Expert(*pair) for pair in made)
        self.nodes = [SonicMoEMlpNode(self.experts, E, H, I, flush=flush)]

    def run(self, seed: int, scale: float) -> None:
        x, dout = batch(seed, 0)
        indices = torch.rand(24, E, generator=torch.Generator().manual_seed(seed)).topk(2).indices
        self(x, indices).backward(dout * scale)

    def forward(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.nodes[0](x, None, indices, torch.full((24, 2), 0.5))
        return out


def check_node(rank: int) -> None:
    """Through autograd its gradients are reduced; those that wait cannot be, and it says so."""
    wanted = Experts("auto")
    for other in range(RANKS):
        wanted.run(other, 1 / RANKS)
    for flush in ("auto", "backward", "step"):
        module = Experts(flush)
        fully_shard(module)
        module.run(rank, 1.0)
        try:
            module.nodes[0].step()
        except RuntimeError as error:
            assert flush == "step" and "resharded as FSDP2 does" in str(error), error
            continue
        assert flush != "step"
        for mine, its in zip(module.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), its.grad, rtol=1e-4, atol=1e-5)


class TopK(torch.nn.Module):
    """Upstream's function on the weights of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moe = self.layer
        arguments = x, moe.router.weight, *views(moe), 2
        out: torch.Tensor = moe_TC_softmax_topk_layer(*arguments)[0]
        return out


class Routed(Experts):
    """A node on a routing that is the same in every call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, torch.arange(48).reshape(24, 2) % E)


def result_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    return out[0] if isinstance(out, tuple) else out


# What makes a module of each face, and the shape of its tokens.
FACES = {
    "MoE": (layer, (24, H)),
    "MoE on a batch": (layer, (2, 12, H)),
    "functional": (TopK, (24, H)),
    "node": (lambda: Routed("auto"), (24, H)),
}


def check_results_written_in_place(rank: int, face: str, reshard: bool, x_grad: bool) -> None:
    """`out += x` on what a sharded layer returned: FSDP2 hangs its hooks on the result, and an
    operation in place on a view would go around them.
    """
    make, shape = FACES[face]

    def run(model: torch.nn.Module, seed: int) -> None:
        x = batch(seed, 0)[0].reshape(shape).requires_grad_(x_grad)
        out = result_of(model, x)
        assert not out._is_view(), face
        out += x
        out.square().mean().backward()

    expected, sharded = make(), make()
    for other in range(RANKS):
        run(expected, other)
    fully_shard(sharded, reshard_after_forward=reshard)
    run(sharded, rank)
    for mine, its in zip(sharded.parameters(), expected.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor), face
        torch.testing.assert_close(whole(mine.grad), its.grad / RANKS, rtol=1e-4, atol=1e-5)


def check_all(rank: int) -> None:
    check_numbers_of_plans()
    check_node(rank)
    # DDP first: a process that has sharded a module keeps no prepared weights.
    check_training(DistributedDataParallel, rank, use_fp8=True, compiled=False)
    check_changes_of_sharded_weights(rank)
    for face, reshard, x_grad in pairwise(list(FACES), (True, False), (True, False)):
        check_results_written_in_place(rank, face, reshard, x_grad)
    for use_fp8, compiled in ((False, False), (True, True)):
        check_training(fully_shard, rank, use_fp8, compiled)
