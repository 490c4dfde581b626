"""Worlds of several ranks, one after the other. In the ways of `WAYS` each rank trains a layer whose codes
FSDP2 gathers beside one whose values it gathers, and compares losses, gradients and weights to the
bit; `CHECKS` has what else they do.

python sharded_worker.py FOLDER DEVICE RANKS WAY ... [RANKS WAY ...]
"""

from __future__ import annotations

import copy
import io
import pickle
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch._dynamo.config  # which the first DTensor of each rank would import
import torch._inductor.lowering  # which the first graph of each rank would import
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import run_ranks
from functional import parts_worker
from functional.sharded_models import TopK, adapted, decoder, make_layer, whole
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from sonicmoe import MoE, SonicMoEConfig, moe_TC_softmax_topk_layer
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.errors import ConfigError, LayoutError
from sonicmoe.fsdp import gather_codes
from sonicmoe.quant.format import Orientation
from sonicmoe.weights.cache import PreparedWeights
from sonicmoe.weights.gathered import LayerCodes
from sonicmoe.weights.shards import ExpertShard, codes_behind

H, I, E, STEPS = 128, 128, 4, 2
BF16 = torch.bfloat16
DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cpu"


def moe(experts: int = E, bias: bool = False, dtype: torch.dtype = BF16, seed: int = 0) -> MoE:
    return make_layer(H, I, experts=experts, bias=bias, seed=seed).to(dtype)


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(24, H, generator=generator, device="cpu").to(DEVICE, BF16)


class Block(nn.Module):
    """A layer between two others, as a decoder has it."""

    def __init__(self, layer: nn.Module, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.before = nn.Linear(H, H, bias=False, dtype=next(layer.parameters()).dtype)
        self.moe, self.checkpointed = layer, checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        if self.checkpointed:
            return x + checkpoint(self.run, x, use_reentrant=False)
        return x + self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        out = self.moe(x, use_fp8=True) if isinstance(self.moe, MoE) else self.moe(x)
        return out[0] if isinstance(out, tuple) else out


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes: gloo sends no e4m3."""
    return tensor.contiguous().view(torch.uint8)


class GatheredBytes:
    """What FSDP2 copies into its all-gathers, counted. It stands for the operator that copies."""

    def __init__(self) -> None:
        self.total, self._copy_in = 0, torch.ops.fsdp.all_gather_copy_in

    def __enter__(self) -> GatheredBytes:
        torch.ops.fsdp.all_gather_copy_in = self
        return self

    def __exit__(self, *_: object) -> None:
        torch.ops.fsdp.all_gather_copy_in = self._copy_in

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copy_in, name)  # the compiler asks every operator for its overloads

    def __call__(self, inputs: Any, *others: Any) -> Any:
        self.total += sum(each.nbytes for each in inputs)
        return self._copy_in(inputs, *others)


def trained(
    model: nn.Module, rank: int, steps: int, micro: int = 1, adam: Any = None
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses, and gradients and weights at the end, and the bytes that were gathered."""
    found: dict[str, torch.Tensor] = {}
    losses = []
    trainable = [p for p in model.parameters() if p.requires_grad]
    adam = adam or torch.optim.AdamW(trainable, lr=1e-2)
    with GatheredBytes() as gathered_bytes:
        for step in range(steps):
            for part in range(micro):
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(part == micro - 1)
                loss = (model(batch(step * micro + part, rank)).float() - 1).square().mean()
                loss.backward()
                losses.append(loss.item())
            gradients = {
                n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None
            }
            found |= {f"grad {name}": gradient for name, gradient in gradients.items()}
            adam.step()
            adam.zero_grad()
    return losses, found | {n: whole(p) for n, p in model.named_parameters()}, gathered_bytes.total


class Way(NamedTuple):
    """One setting of the comparison.

    layer: what is sharded. shard: with FSDP2, after `prepare`, which is given the layer whose codes
    are to be gathered. bytes: at most so many of those that values take; 1.0 where values must be
    gathered. exact: whether both quantise the same numbers.
    """

    layer: Callable[[], nn.Module]
    shard: Callable[[Any], Any] = fully_shard
    prepare: Callable[[Any], Any] = lambda layer: gather_codes(layer, use_fp8=True)
    bytes: float = 0.55
    steps: int = STEPS
    micro: int = 1
    exact: bool = True


def of_names(block: Any) -> int:
    return gather_codes(block.moe, weights=block.moe.names(), **block.moe.options)


def each(module: Any, **options: Any) -> None:
    """The layer in a unit of its own, inside of the model's."""
    fully_shard(module.moe, **options)
    fully_shard(module, **options)


def hybrid(module: Any) -> None:
    ranks = dist.get_world_size()
    mesh = dist.init_device_mesh(DEVICE, (2, ranks // 2), mesh_dim_names=("copies", "shards"))
    fully_shard(module, mesh=mesh)


def on_meta(module: Any, assigns: bool = False) -> None:
    """Values come after the sharding, from a state dict: into memory, or, as accelerate loads, other
    parameters take the place of the shards.
    """
    state = {name: value.clone() for name, value in module.state_dict().items()}
    module.to("meta")
    each(module)
    parts = {
        name: distribute_tensor(state[name], parameter.device_mesh, parameter.placements)
        for name, parameter in module.named_parameters()
    }
    if not assigns:
        module.to_empty(device=DEVICE)
    module.load_state_dict(parts, assign=assigns)


def compiled(module: Any) -> None:
    each(module)
    module.moe.compile(backend="aot_eager" if DEVICE == "cpu" else "inductor")


def lora() -> Any:
    return adapted(Block(moe()), "moe.c_fc.weight", "moe.c_proj.weight").to(BF16)


def experts_of(family: str) -> Any:
    return decoder(family, "sonicmoe_fp8").to(BF16)


def functional(apart: bool = False, **options: Any) -> Block:
    return Block(TopK(moe(), apart, use_fp8=True, **options))


HALVES: dict[str, Any] = {
    "concat_layout": True,
    "activation_type": "swiglu_clamp",
    "activation_parameters": {"limit": 0.5},
}
MASTERS = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
WAYS = {
    "kept": Way(lambda: Block(moe()), partial(fully_shard, reshard_after_forward=False)),
    "resharded": Way(lambda: Block(moe()), each, steps=8),
    "uneven": Way(lambda: Block(moe(5, bias=True)), each, bytes=0.6),
    "fewer": Way(lambda: Block(moe(2)), each, bytes=0.6),
    "masters": Way(lambda: Block(moe(dtype=torch.float32)), partial(each, mp_policy=MASTERS), exact=False),
    "checkpointed": Way(lambda: Block(moe(), checkpointed=True), each),
    "compiled": Way(lambda: Block(moe()), compiled),
    "accumulated": Way(lambda: Block(moe()), each, micro=2),
    "offloaded": Way(lambda: Block(moe()), partial(each, offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "hybrid": Way(lambda: Block(moe()), hybrid),
    "on meta": Way(lambda: Block(moe(5)), on_meta, bytes=0.6),
    "assigned": Way(lambda: Block(moe(5)), partial(on_meta, assigns=True), bytes=0.6),
    "functional": Way(functional, each, of_names),
    "gate and up apart": Way(lambda: functional(True), each, of_names),
    "halves, clamped": Way(lambda: functional(**HALVES), each, of_names),
    "LoRA": Way(lora, each, bytes=0.6),
    "qwen3": Way(lambda: experts_of("qwen3-moe"), each, gather_codes),
    "gpt-oss": Way(lambda: experts_of("gpt-oss"), each, gather_codes, bytes=0.7),
    "values": Way(lambda: Block(moe()), each, lambda model: gather_codes(model, use_fp8=False), bytes=1.0),
}  # fmt: skip


def check(name: str, rank: int) -> None:
    """Train with gathered codes and with gathered values."""
    way = WAYS[name]
    found = []
    for codes in (False, True):
        model = way.layer()
        if codes:
            assert way.prepare(model) == 1
        way.shard(model)
        found.append(trained(model, rank, way.steps, way.micro))
    (losses, state, all_bytes), (coded_losses, coded_state, coded_bytes) = found
    if way.exact:
        assert losses == coded_losses, (name, losses, coded_losses)
        assert state.keys() == coded_state.keys()
        for key, value in state.items():
            assert torch.equal(value, coded_state[key]), (name, key)
    else:
        torch.testing.assert_close(
            torch.tensor(losses), torch.tensor(coded_losses), rtol=0.02, atol=0
        )
    assert coded_bytes <= way.bytes * all_bytes, (name, coded_bytes / all_bytes)
    assert coded_bytes == all_bytes or way.bytes < 1.0, (name, coded_bytes, all_bytes)


def sharded(layer: nn.Module, **options: Any) -> Any:
    """Two units, of which the inner one gathers codes."""
    block = Block(layer)
    gather_codes(block, use_fp8=True)
    each(block, **options)
    return block


def check_what_is_gathered(rank: int) -> None:
    """Forward's order for a forward and backward's for a backward, of codes that are kept in one. The
    values between are one NaN.
    """
    orders, hold = [], LayerCodes.hold

    def held(codes: LayerCodes, role: int, outputs: Any, gathered: Any) -> None:
        orders.append(gathered.like.orientation)
        assert codes._kept is not None and not codes._kept.two_orders
        hold(codes, role, outputs, gathered)

    LayerCodes.hold = held
    rows, columns = Orientation.ROWS, Orientation.COLUMNS
    for iso_weight in (False, True):
        with SonicMoEConfig(iso_weight=iso_weight).activate():
            block = sharded(moe())
            orders.clear()
            block(batch(0, rank)).sum().backward()
        assert orders == [rows, rows, columns, columns]
    LayerCodes.hold = hold
    block.moe.unshard()
    weight = block.moe.c_fc.weight
    assert tuple(weight.shape) == (E, 2 * I, H) and weight.untyped_storage().nbytes() == 2
    assert weight.isnan().all() and codes_behind(weight) is not None
    block.moe.reshard()


def check_quantised_once(rank: int) -> None:
    """After an optimizer step, a write or an announcement; and not for frozen experts after steps."""
    prepare, made = ReferenceEngine.prepare_weights, []
    ReferenceEngine.prepare_weights = lambda *given: made.append(1) or prepare(*given)
    look, looked = PreparedWeights.read, []
    PreparedWeights.read = lambda *given, **options: looked.append(1) or look(*given, **options)
    block = sharded(moe())
    adam = torch.optim.SGD(block.parameters(), lr=0.1)

    def passes() -> int:
        made.clear()
        for micro in range(2):
            block(batch(micro, rank)).float().square().mean().backward()
        return len(made)

    assert [passes(), passes()] == [1, 0]
    adam.step()
    assert [passes(), passes()] == [1, 0]
    assert len(looked) == 8  # in forwards alone
    before = block(batch(0, rank))
    with torch.no_grad():
        block.moe.c_proj.weight.mul_(2.0)
    assert passes() == 1 and not torch.equal(block(batch(0, rank)), before)
    block.moe.c_fc.weight._local_tensor.plain().mul_(2.0)  # a write that leaves no trace
    assert passes() == 0
    block.moe.invalidate_caches()
    assert passes() == 1
    block.moe.requires_grad_(False)
    adam.zero_grad()
    passes()
    adam.step()
    assert passes() == 0
    ReferenceEngine.prepare_weights, PreparedWeights.read = prepare, look


def check_frozen(rank: int) -> None:
    """Experts frozen as codes are sharded as codes, also under a policy that casts, and where a
    parameter's shape is not that of the codes: a byte a weight is gathered, and gradients of tokens
    and whole state dicts have the bits of one process.
    """
    from sonicmoe.integrations.frozen import freeze_experts

    def gradient(layer: nn.Module) -> torch.Tensor:
        x = batch(0, rank).requires_grad_()
        layer(x).float().square().mean().backward()
        return x.grad

    models = [experts_of(family).requires_grad_(False) for family in ("qwen3-moe", "gpt-oss")]
    for expected, options in zip(models, ({}, {"mp_policy": MASTERS}), strict=True):
        values, codes = copy.deepcopy(expected), copy.deepcopy(expected)
        freeze_experts(codes)
        alone, state = gradient(codes), codes.state_dict()
        totals = []
        for layer in (values, codes):
            each(layer, **options)
            with GatheredBytes() as gathered_bytes:
                found = gradient(layer)
            totals.append(gathered_bytes.total)
        assert torch.equal(found, alone)
        assert totals[1] < 0.55 * totals[0], totals
        sharded_state = {name: whole(raw(part)) for name, part in codes.state_dict().items()}
        assert sharded_state.keys() == state.keys()
        assert all(torch.equal(raw(part), sharded_state[name]) for name, part in state.items())
        with shared_folder(rank) as folder:
            dcp.save(codes.state_dict(), checkpoint_id=folder)
            with torch.no_grad():
                for parameter in codes.parameters():
                    parameter.zero_()
            assert not torch.equal(gradient(codes), alone)
            loaded = codes.state_dict()
            dcp.load(loaded, checkpoint_id=folder)
            codes.load_state_dict(loaded)
        assert torch.equal(gradient(codes), alone)


@contextmanager
def shared_folder(rank: int) -> Iterator[str]:
    """A folder of all ranks."""
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    yield folder[0]
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


def through_a_checkpoint(rank: int, saved: nn.Module, loaded: nn.Module) -> dict[str, Any]:
    """The state dict of one module with what DCP has saved of the other."""
    state = loaded.state_dict()
    with shared_folder(rank) as folder:
        dcp.save(saved.state_dict(), checkpoint_id=folder)
        dcp.load(state, checkpoint_id=folder)
    return state


def check_checkpoints(rank: int) -> None:
    """DCP saves and loads values under stock names; a copy and a pickle of a module have values."""
    block, other = sharded(moe(5)), Block(moe(5, seed=7))
    fully_shard(other)
    assert set(block.state_dict()) == set(other.state_dict())
    other.load_state_dict(through_a_checkpoint(rank, block, other))
    for mine, its in zip(block.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(mine), whole(its)) and whole(mine).dtype == BF16
    file = io.BytesIO()
    torch.save({n: p._local_tensor for n, p in block.named_parameters()}, file)
    file.seek(0)
    assert {type(part) for part in torch.load(file).values()} == {torch.Tensor}
    # A checkpoint of other weights: codes follow.
    third = Block(moe(5, seed=8))
    fully_shard(third)
    wanted = third(batch(0, rank))
    through_a_checkpoint(rank, third, block)  # into the memory of its shards
    assert torch.equal(block(batch(0, rank)), wanted)
    layer = moe()
    gather_codes(layer)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert not any(isinstance(p.data, ExpertShard) for p in copied.parameters())
        assert torch.equal(copied(batch(0, rank))[0], layer(batch(0, rank))[0])


def along_rows(parameter: nn.Parameter) -> Shard | None:
    """A placement that cuts experts along another axis than theirs."""
    return Shard(1) if parameter.dim() == 3 else None


def check_refusals(rank: int) -> None:
    """Of what is sharded; each names what came and what is needed. tests/refusals has the others."""
    block, x = sharded(moe()), batch(0, rank)
    in_rows = sharded(moe(), shard_placement_fn=along_rows)
    weight = block.moe.c_fc.weight
    on_meta = weight._local_tensor.to("meta")
    block(x)
    block.moe.unshard()
    weights = block.moe.c_fc.weight, block.moe.c_proj.weight
    block.moe.reshard()
    w1, w2 = (weight.permute(1, 2, 0) for weight in weights)
    freed = partial(moe_TC_softmax_topk_layer, x, moe().router.weight, w1, None, w2, None, 2)
    calls: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (LayoutError, "needed: gather_codes before it", lambda: gather_codes(block)),
        (LayoutError, "without CPUOffloadPolicy", lambda: on_meta.fsdp_pre_all_gather(weight.device_mesh)),
        (LayoutError, "weight is sharded along another axis", lambda: in_rows(x)),
        (LayoutError, "were freed, as FSDP2 does", lambda: freed(use_fp8=True)),
        # This call leaves its codes gathered.
        (ConfigError, "gathered codes of the experts for .*, and this call computes with engine 'reference', recipe None",
         lambda: block.moe(x, use_fp8=False)),
    ]  # fmt: skip
    for error, words, call in calls:
        try:
            call()
        except error as found:
            assert re.search(words, str(found)), found
        else:
            raise AssertionError(words)


def check_axis_under_expert_parallelism(rank: int) -> None:
    """FSDP2 may cut another axis than that of the experts, which expert parallelism has cut."""
    mesh = dist.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("fsdp", "ep"))
    layer = moe()
    for part in (layer.c_fc, layer.c_proj):
        part.weight = nn.Parameter(distribute_tensor(part.weight.detach(), mesh["ep"], [Shard(0)]))
    gather_codes(layer, use_fp8=True)
    fully_shard(layer, mesh=mesh["fsdp"], shard_placement_fn=along_rows)
    try:
        layer.unshard()
    except LayoutError as error:
        assert "weight is sharded along another axis" in str(error)
    else:
        raise AssertionError


def check_accelerate(rank: int) -> None:
    """Its own preparation, with the model on meta between, of a model whose optimizer is there."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    found = []
    for codes, efficient in ((False, False), (True, False), (True, True)):
        model = experts_of("qwen3-moe")
        if codes:
            gather_codes(model)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=efficient, reshard_after_forward=True,
            auto_wrap_policy="no_wrap",
        )  # fmt: skip
        plugin.set_mixed_precision("bf16")
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = DistributedType.FSDP
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator._prepare_fsdp2(model, optimizer)
        losses, _, gathered = trained(model, rank, 3, adam=optimizer)
        found.append((losses, gathered))
    (losses, all_bytes), *coded = found
    for coded_losses, coded_bytes in coded:
        assert coded_bytes < 0.55 * all_bytes
        torch.testing.assert_close(
            torch.tensor(losses), torch.tensor(coded_losses), rtol=0.02, atol=0
        )


CHECKS: dict[str, Callable[[int], None]] = {
    "parts": parts_worker.check_all,
    "layers": partial(parts_worker.check_table, parts_worker.LAYERS),
    "transformers": partial(parts_worker.check_table, parts_worker.TRANSFORMERS),
    "what is gathered": check_what_is_gathered,
    "quantised once": check_quantised_once,
    "checkpoints": check_checkpoints,
    "frozen": check_frozen,
    "refusals": check_refusals,
    "another axis": check_axis_under_expert_parallelism,
    "accelerate": check_accelerate,
}


def run(store: str, ranks: int, ways: list[str], rank: int) -> None:
    backend = "gloo"
    if DEVICE != "cpu":
        backend = "nccl"
        torch.set_default_device(DEVICE)
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    for name in ways:
        CHECKS.get(name, partial(check, name))(rank)
        torch._dynamo.reset()  # the compiler allows few graphs of one function
        print(name, flush=True)
    dist.destroy_process_group()


def main() -> None:
    folder, _, *words = sys.argv[1:]
    torch.set_num_threads(1)
    # Libraries are imported once for all ranks.
    if "LoRA" in words:
        lora()
    if "transformers" in words:
        decoder()
    worlds: list[tuple[int, list[str]]] = []
    for word in words:
        if word.isdecimal():
            worlds.append((int(word), []))
        else:
            worlds[-1][1].append(word)
    for number, (ranks, ways) in enumerate(worlds):
        join = partial(run, f"{folder}/store {number}", ranks, ways)
        assert run_ranks(ranks, join) == [0] * ranks, ways
    print("equal")


if __name__ == "__main__":
    main()
