"""One of two ranks: Fleet's layer in every form that has ranks. Results to `<out>/<rank>.npz`.

Arguments: rank, directory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import double_cases as cases
import framework  # noqa: F401, before anything of the package
import numpy as np
import paddle
from fleet.double import model

RANKS = 2


def main(rank, directory):
    paddle.distributed.init_parallel_env()
    group = paddle.distributed.get_group()
    results = {}
    with cases.engine() as fleet:
        for form, changes in cases.RANK_FORMS.items():
            config = cases.config_of(fleet, **changes)
            layer = fleet.layer.MoELayer(config, group)
            experts = layer.grouped_gemm_experts
            whole = model.initialise(model.PlainMoE(config, fleet.layer.TopKRouter))
            for name, parameter in layer.named_parameters():
                full = dict(whole.named_parameters())[name]
                part = cases.own(form, name, cases.as_numpy(full), rank, RANKS)
                paddle.assign(paddle.to_tensor(part).astype(parameter.dtype), output=parameter)
            cases.give_main_grads(layer)
            mine = slice(rank * cases.RANK_TOKENS, (rank + 1) * cases.RANK_TOKENS)
            batches = [(x[mine], dout[mine]) for x, dout in cases.RANK_BATCHES]
            found = cases.run(layer, batches, after=experts.convert_weights_to_grouped_layout)
            sent = fleet.fused_a2a.get_buffer(group).sent_bytes
            results |= {f"{form}/{name}": value for name, value in found.items()}
            results[f"{form}/sent"] = np.array(sent)
    np.savez(directory / f"{rank}.npz", **results)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
