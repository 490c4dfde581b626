"""One turn of torchtitan_bench.py: torchtitan's trainer with these experts, from its beginning to its
end, after which nothing of it may be left, because two of these models do not fit on a GPU.

Imported when it is known whether torchtitan runs on a CPU.
"""

from __future__ import annotations

import gc
import os
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity
from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.minimal_async_ep import api
from torchtitan.models.common.token_dispatcher import MinimalAsyncEPTokenDispatcher
from torchtitan.models.qwen3.config_registry import qwen3_30b_a3b, qwen3_moe_debug
from torchtitan.tools.utils import device_module, device_type
from torchtitan.trainer import Trainer
from torchtitan_tokens import NoTokenizer, OurTokens

from sonicmoe.bench.timing import trace_of
from sonicmoe.bench.trace import Kernel, covered_us
from sonicmoe.distributed_utils import clear_ep_cache

DOOR = "sonicmoe.integrations.torchtitan"
POLICIES = {"full": FullAC.Config, "selective": SelectiveAC.Config, "none": lambda: None}
STEPS_OF_A_TURN = 5
VOCABULARY = 4096  # tokens that occur, so few that fifty steps teach something
# An exchange of rows in a trace: NCCL's all-to-all, which no collective of FSDP2 uses, gloo's, the
# copies of MinimalAsyncEP, and our kernels over symmetric memory.
EXCHANGES = re.compile(
    r"ncclDevKernel_SendRecv|gloo:all_to_all|_copy_(rows|full_counts)_to_peer"
    r"|sonicmoe::.*::(arrive(_with_tokens)?|(send|take)_(tokens|again)|(send|sum)_back)\b"
)
# What computes, and whether torchtitan's dispatcher is MinimalAsyncEP.
CONTESTANTS = {
    "stock": (None, False),
    "minimal": (None, True),
    "bf16": ({"fp8_mode": "off"}, False),
    "fp8": ({"fp8_mode": "perf"}, False),
    "fp8-codes": ({"fp8_mode": "perf", "gather_codes": True}, False),
    "bf16-no-wait": ({"fp8_mode": "off"}, False),
    "fp8-no-wait": ({"fp8_mode": "perf", "gather_codes": True}, False),
    "fp8-rows": ({"fp8_mode": "perf"}, False),
}


@dataclass(frozen=True)
class Job:
    """What all turns have in common."""

    layers: int
    length: int
    steps: int
    expert_parallel: int
    checkpoint: str
    backend: str  # of torch.compile, or "none"
    quick: bool
    micro_batches: int  # of a step, whose gradients are accumulated
    balanced: bool  # the router gives every expert as many tokens

    def config(self, experts: str, sequences: int, folder: str) -> Trainer.Config:
        """torchtitan's own job of this model, with these experts in it."""
        config = qwen3_moe_debug() if self.quick else qwen3_30b_a3b()
        model = config.model_spec.model
        model.layers = model.layers[: self.layers]
        if self.quick:
            shrink(model.layers)
        options, is_minimal = CONTESTANTS[experts]
        if is_minimal:
            ask_for_minimal(model.layers)
        config.dump_folder, config.debug.seed, config.metrics.log_freq = folder, 0, 1
        vocabulary = min(VOCABULARY, model.vocab_size)
        config.dataloader = OurTokens.Config(vocabulary=vocabulary, drawn=0.5)
        config.tokenizer = NoTokenizer.Config()
        # With torchtitan's 600 the loss stops falling smoothly at step 34, and no two runs compare then.
        config.lr_scheduler.warmup_steps = 2400
        config.optimizer.implementation = "foreach" if self.quick else "fused"  # which is CUDA's
        config.training.local_batch_size, config.training.seq_len = sequences, self.length
        ranks = int(os.environ["WORLD_SIZE"])
        config.training.global_batch_size = sequences * ranks * self.micro_batches
        config.debug.moe_force_load_balance = self.balanced
        # The counts of torchtitan's all-to-all come to the host, which no CUDA graph can hold.
        config.training.disable_cuda_graphs = True
        # In the first step a rank may have to compile our kernels.
        config.comm.init_timeout_seconds = 1800
        config.parallelism.expert_parallel_degree = self.expert_parallel
        # The default one asks FSDP2 for more than PyTorch 2.13 has, on more than one rank.
        config.parallelism.spmd_backend = "partial_dtensor"
        if self.backend != "none":
            config.compile = CompileConfig(enable=True, backend=self.backend)
        config.activation_checkpoint = POLICIES[self.checkpoint]()
        config.checkpoint.enable = False
        if options is not None:
            in_fp8 = experts == "fp8-rows"
            waits = not experts.endswith("no-wait")
            rows = {"wait_for_counts": waits, "fp8": in_fp8, "fp8_grad": in_fp8}
            config.override.imports = [(f"{DOOR}.routed_experts", {**options, "transport": rows})]
            if self.checkpoint == "selective":
                config.override.imports.append(f"{DOOR}.selective_ac")
        return config


def shrink(layers: list[Any], experts: int = 8) -> None:
    """The debug model has 64 experts, too many for a CPU."""
    for moe in (layer.moe for layer in layers):
        routed = moe.routed_experts
        for config in (moe, moe.router, routed.inner_experts, routed.token_dispatcher):
            config.num_experts = experts
        moe.router.gate.out_features, routed.inner_experts.hidden_dim = experts, 128
        moe.router.top_k = routed.token_dispatcher.top_k = 2


def ask_for_minimal(layers: list[Any]) -> None:
    """Their stock dispatcher becomes MinimalAsyncEP."""
    api._buffer_state = api._buffer_key = None  # one in a process, of another turn's sizes before
    for routed in (layer.moe.routed_experts for layer in layers):
        stock = routed.token_dispatcher
        sizes = {"num_experts": stock.num_experts, "top_k": stock.top_k}
        routed.token_dispatcher = MinimalAsyncEPTokenDispatcher.Config(**sizes)


@dataclass
class Figures:
    """Of one turn: seconds and loss of every step; the peak of memory in bytes; the share of a step
    that exchanges take; operations a token, and the GPU's peak of them. None: there is none.
    """

    flops: int
    peak_flops: float | None
    peak: float | None = None
    exchange: float | None = None
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def step(self) -> float:
        """Median seconds without the first fifth, in which torch.compile works and clocks rise."""
        return statistics.median(self.seconds[max(1, len(self.seconds) // 5) :])

    def over_ranks(self) -> None:
        """Take the largest peak of memory, and the mean share of exchanges."""
        found = (self.peak or 0.0, self.exchange or 0.0)
        mine = torch.tensor(found, dtype=torch.float64, device=device_type)
        ranks = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(ranks, mine)
        peaks, shares = torch.stack(ranks).T.tolist()
        self.peak, self.exchange = max(peaks) or None, statistics.fmean(shares) or None


class Turn(Trainer):
    """A trainer that begins with the weights of the first one, and runs on its process groups: NCCL
    keeps memory for each group.
    """

    dims: ClassVar[ParallelDims | None] = None
    start: ClassVar[dict[str, torch.Tensor]] = {}  # this rank's part, on the host

    def init_distributed(self) -> ParallelDims:
        Turn.dims = Turn.dims or super().init_distributed()
        return Turn.dims

    def take_start(self) -> None:
        """Write the weights of the first, or keep them, if this is the first."""
        state = self.model_parts[0].state_dict()  # under the stock names, whoever computes
        for name, tensor in state.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if name in self.start:
                local.copy_(self.start[name])
            else:
                self.start[name] = local.to("cpu", copy=True)
        self.model_parts[0].load_state_dict(state)

    def prepare(self, quick: bool) -> None:
        """Take the weights of the first turn, and begin with nothing measured."""
        self.take_start()
        metrics = self.metrics_processor
        self.found = Figures(metrics.num_flops_per_token, None if quick else metrics.gpu_peak_flops)
        metrics.log = lambda step, loss, *_, **__: self.found.losses.append(loss)
        self.data, self.quick = self.batch_generator(self.dataloader), quick

    def measure(self, steps: int, others: int) -> None:
        """These steps of its own schedule. others: bytes of this GPU that other turns hold."""
        found = self.found
        for _ in range(steps):
            if len(found.seconds) == 1:
                device_module.reset_peak_memory_stats()
            begin = time.perf_counter()
            self._step(self.data)  # waits for the device, because it gives the loss to the host
            found.seconds.append(time.perf_counter() - begin)
        if not self.quick:
            found.peak = max(found.peak or 0, torch.cuda.max_memory_allocated() - others)

    def profile(self) -> None:
        """One more step under the profiler, which does not count."""
        kind = ProfilerActivity.CPU if self.quick else ProfilerActivity.CUDA
        with torch.profiler.profile(activities=[kind]) as profiler:
            self._step(self.data)
        self.found.losses.pop()
        self.found.exchange = 1e-6 * exchange_us(trace_of(profiler)) / self.found.step
        self.found.over_ranks()

    def _step(self, data: Any) -> None:
        self.step += 1
        self.gc_handler.run(self.step)
        self.train_step(data)


def run_turns(job: Job, names: Sequence[str], sequences: int) -> dict[str, Figures]:
    """Train with each of these experts, and free everything. Several models live side by side, and take
    turns of a few steps, so that a host that is slower for a while is so for all of them.
    """
    turns, held = dict[str, Turn](), dict[str, int]()

    def of_others(name: str) -> int:
        return sum(size for other, size in held.items() if other != name)

    # Every model has graphs of its own.
    torch._dynamo.config.recompile_limit = 8 * len(names)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            turns[name] = Turn(job.config(name, sequences, folder))
            turns[name].prepare(job.quick)
            held[name] = torch.cuda.memory_allocated() - of_others(name)
        for first in range(0, job.steps, STEPS_OF_A_TURN):
            for name, turn in turns.items():
                device_module.reset_peak_memory_stats()
                turn.measure(min(STEPS_OF_A_TURN, job.steps - first), of_others(name))
                held[name] = torch.cuda.memory_allocated() - of_others(name)
        for turn in turns.values():  # last, because launches take longer behind a profiler
            turn.profile()
            turn.close()
    found = {name: turn.found for name, turn in turns.items()}
    turns.clear()
    del turn
    clear_ep_cache()
    torch._dynamo.reset()  # compiled blocks know their parameters
    gc.collect()
    device_module.empty_cache()
    return found


def exchange_us(trace: dict[str, Any]) -> float:
    """Microseconds of a trace in which rows travelled between ranks, or one waited for another."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    found = [e for e in events if EXCHANGES.search(e["name"])]
    kernels = [Kernel(e["name"], e["ts"], e["dur"], "", "") for e in found]
    return covered_us(sorted(kernels, key=lambda kernel: kernel.start))
