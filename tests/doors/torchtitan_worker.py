"""One rank of torchtitan jobs on a CPU, one after the other: `python -m doors.torchtitan_worker
FOLDER PLAN` under torchrun's variables; the last line is the losses of every job as JSON.

The first job is the stock one. It saves its weights before the first step, and each other job
begins with them. The last checkpoint of job "bf16" is loaded into a stock model again.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from doors import torchtitan_on_cpu as on_cpu
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.trainer import Trainer

DOOR = "sonicmoe.integrations.torchtitan"
BF16 = [f"{DOOR}.routed_experts", f"{DOOR}.selective_ac"]
# torchtitan's default backend asks FSDP2 for more than PyTorch 2.13 has, on more than one rank.
SEVERAL_RANKS = {"spmd_backend": "partial_dtensor"}
TP = {"tensor_parallel_degree": 2, **SEVERAL_RANKS}
# Name: overrides, steps, and what a job changes in parallelism and compilation.
JOBS = {
    "stock": ([], 20, {}),
    "bf16": (BF16, 20, {}),
    "fp8": ([(f"{DOOR}.routed_experts", {"fp8_mode": "perf"})], 20, {}),
    "grouped": ([f"{DOOR}.grouped_experts"], 3, {}),
    "compiled": (BF16, 3, {"compile": True}),
    "stock, TP": ([], 3, TP),
    "bf16, TP": (BF16, 3, TP),
}


def trainer_of(name, folder, start=None, **changes):
    imports, steps, own = JOBS[name]
    config = on_cpu.job(deepseek_v3_debugmodel(), folder, steps=steps, imports=imports)
    for field, value in {**changes, **own}.items():
        if field == "compile":
            config.compile.enable, config.compile.components = value, ["model"]
            config.compile.backend = "aot_eager"
        else:
            setattr(config.parallelism, field, value)
    config.checkpoint.initial_load_path = start and str(start)
    return Trainer(config)


def checkpoint_of(trainer, step):
    """Save the model alone."""
    trainer.checkpointer.save(step, last_step=True)
    return Path(trainer.config.dump_folder) / "checkpoint" / f"step-{step}"


def whole(trainer):
    """The state dict as plain tensors."""
    state = trainer.model_parts[0].state_dict()
    return {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in state.items()}


def end(trainer):
    trainer.close()
    torch.distributed.destroy_process_group()


def main(folder, plan):
    folder, plan = Path(folder), json.loads(plan)
    changes, start, found = plan["changes"], None, {}
    for number, name in enumerate(plan["jobs"]):
        # A port is free again only some time after its world has ended.
        os.environ["MASTER_PORT"] = plan["ports"].pop()
        parallel = JOBS[name][2].get("tensor_parallel_degree", 1) > 1
        trainer = trainer_of(name, folder / str(number), start, **({} if parallel else changes))
        if start is None:
            start = checkpoint_of(trainer, 0)
        else:
            assert trainer.checkpointer.load(-1)
        found[name] = on_cpu.losses(trainer)
        if name == "bf16":
            ours, saved = whole(trainer), checkpoint_of(trainer, 20)
        end(trainer)
    os.environ["MASTER_PORT"] = plan["ports"].pop()
    trainer = trainer_of("stock", folder / "again", saved, **changes)
    assert trainer.checkpointer.load(-1)
    again = whole(trainer)
    found["same names"] = set(again) == set(ours)
    found["same weights"] = all(torch.equal(again[name], ours[name]) for name in again)
    end(trainer)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
