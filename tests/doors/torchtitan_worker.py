"""One rank of torchtitan jobs on a CPU, one after the other: `python -m doors.torchtitan_worker
FOLDER PORTS` under torchrun's variables; the last line is what was found, as JSON.

The first job is the stock one. It saves its weights before the first step, and every other job of
that model begins with them. The last checkpoint of job "bf16" is loaded into a stock model again.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from doors import torchtitan_on_cpu as on_cpu
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.token_dispatcher import MinimalAsyncEPTokenDispatcher
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.gpt_oss.config_registry import gpt_oss_debugmodel_flex
from torchtitan.trainer import Trainer

DOOR = "sonicmoe.integrations.torchtitan"
BF16 = [f"{DOOR}.routed_experts", f"{DOOR}.selective_ac"]
CODES = {"fp8_mode": "perf", "gather_codes": True}
EP, TP = {"expert_parallel_degree": 2}, {"tensor_parallel_degree": 2}
# Name: overrides, steps, and what a job changes in parallelism. FSDP2 has the ranks that TP leaves.
JOBS = {
    "stock": ([], 5, EP),
    "bf16": (BF16, 5, EP),
    "fp8": ([(f"{DOOR}.routed_experts", {"fp8_mode": "perf"})], 5, EP),
    "fp8, codes": ([(f"{DOOR}.routed_experts", CODES)], 5, EP),
    "fp8, FSDP2 alone": ([(f"{DOOR}.routed_experts", {"fp8_mode": "perf"})], 3, {}),
    "fp8, FSDP2 alone, codes": ([(f"{DOOR}.routed_experts", CODES)], 3, {}),
    "compiled": (BF16, 2, EP),
    "not waiting, full": (BF16, 2, EP),
    "experts alone": ([f"{DOOR}.grouped_experts"], 2, EP),
    "FSDP2 alone": (BF16, 2, {}),
    "TP, stock": ([], 2, TP),
    "TP": (BF16, 2, TP),
    "EP + TP, stock": ([], 2, EP | TP),
    "EP + TP": (BF16, 2, EP | TP),
    "gpt-oss, TP, stock": ([], 2, TP),
    "gpt-oss, TP": (BF16, 2, TP),
    "gpt-oss, EP, stock": ([], 2, EP),
    "gpt-oss, EP": (BF16, 2, EP),
}


def trainer_of(name, folder, start=None):
    imports, steps, parallel = JOBS[name]
    debug_model = gpt_oss_debugmodel_flex if "gpt-oss" in name else deepseek_v3_debugmodel
    config = on_cpu.job(debug_model(), folder, steps=steps, imports=imports)
    if "gpt-oss" in name:
        config.activation_checkpoint = None
        # DTensor remembers a shape of the other model's, whose tokens choose as many.
        for layer in config.model_spec.model.layers:
            layer.moe.router.top_k = layer.moe.routed_experts.token_dispatcher.top_k = 3
    if "not waiting" in name:
        # MinimalAsyncEP needs symmetric memory, and asks for full recompute. The engine needs none.
        config.activation_checkpoint = FullAC.Config()
        for layer in config.model_spec.model.layers:
            if (moe := getattr(layer, "moe", None)) is not None:
                sizes = {"num_experts": moe.num_experts, "top_k": moe.router.top_k}
                asked = MinimalAsyncEPTokenDispatcher.Config(**sizes)
                moe.routed_experts.token_dispatcher = asked
    if name in ("compiled", "not waiting, full"):
        config.compile.enable, config.compile.components = True, ["model"]
        config.compile.backend = "aot_eager"
    # torchtitan's default backend asks FSDP2 for more than PyTorch 2.13 has, on more than one rank.
    config.parallelism.spmd_backend = "partial_dtensor"
    for field, value in parallel.items():
        setattr(config.parallelism, field, value)
    config.checkpoint.initial_load_path = start and str(start)
    return Trainer(config)


def checkpoint_of(trainer, step):
    """Save the model alone."""
    trainer.checkpointer.save(step, last_step=True)
    return Path(trainer.config.dump_folder) / "checkpoint" / f"step-{step}"


def whole(state):
    """A state dict as plain tensors."""
    return {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in state.items()}


def state_of(trainer):
    return trainer.model_parts[0].state_dict()


def equal(ours, stock):
    return set(ours) == set(stock) and all(torch.equal(ours[name], stock[name]) for name in stock)


def replaces_dispatchers(trainer):
    """Whether the engine takes the way to the experts too, over all ranks."""
    modules = trainer.model_parts[0].modules()
    return any(getattr(module, "_group", None) is not None for module in modules)


def gathers_codes(trainer):
    """Whether the experts' parameters are shards whose codes were gathered."""
    experts = [p for n, p in trainer.model_parts[0].named_parameters() if "inner_experts" in n]
    chosen = [p._local_tensor.codes.chooses_codes() for p in experts]
    return len(chosen) > 1 and all(chosen)


def is_held_once(trainer):
    """Whether the state dict that the trainer holds lies in the weights, and asynchronous
    checkpoints, which copy memory and not values, are right all the same.
    """
    state, weights = state_of(trainer), list(trainer.model_parts[0].parameters())
    places = {weight.to_local().untyped_storage().data_ptr() for weight in weights}
    experts = [t for name, t in state.items() if "inner_experts" in name]
    shared = all(t.to_local().untyped_storage().data_ptr() in places for t in experts)
    copied = StateDictStager(pin_memory=False, share_memory=False).stage(state)
    return shared and equal(whole(copied), whole(state))


def end(trainer):
    trainer.close()
    torch.distributed.destroy_process_group()


def main(folder, ports):
    folder, ports, start, found = Path(folder), ports.split(","), None, {}
    for number, name in enumerate(JOBS):
        # A port is free again only some time after its world has ended.
        os.environ["MASTER_PORT"] = ports[number]
        trainer = trainer_of(name, folder / str(number), start if "gpt-oss" not in name else None)
        if start is None:
            start = checkpoint_of(trainer, 0)
        elif "gpt-oss" not in name:
            assert trainer.checkpointer.load(-1)
        found[name] = on_cpu.losses(trainer)
        imports, _, parallel = JOBS[name]
        takes_all = "expert_parallel_degree" in parallel and imports and name != "experts alone"
        assert replaces_dispatchers(trainer) == bool(takes_all), name
        if name == "bf16":
            found["held once"] = is_held_once(trainer)
            ours, saved = whole(state_of(trainer)), checkpoint_of(trainer, 5)
        if "codes" in name:
            assert gathers_codes(trainer), name
        end(trainer)
    os.environ["MASTER_PORT"] = ports[-1]
    trainer = trainer_of("stock", folder / "again", saved)
    assert trainer.checkpointer.load(-1)
    found["exchanged"] = equal(ours, whole(state_of(trainer)))
    end(trainer)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
