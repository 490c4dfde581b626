"""Routing metadata by three nested Python loops: what `build_routing` must equal, written so that
nobody has to trust it.
"""

from __future__ import annotations

import numpy as np


def naive_routing(indices, probs, num_experts, alignment):
    """Every field of `RoutingMetadata` as plain Python numbers and lists."""
    num_tokens, topk = indices.shape
    counts, padded = [], []
    row_token, row_prob = [], []
    slot_row = [[-1] * topk for _ in range(num_tokens)]
    for expert in range(num_experts):
        count = 0
        for token in range(num_tokens):
            for slot in range(topk):
                if int(indices[token, slot]) == expert:
                    slot_row[token][slot] = len(row_token)
                    row_token.append(token)
                    row_prob.append(float(np.float32(probs[token, slot])))
                    count += 1
        counts.append(count)
        while len(row_token) % alignment:
            row_token.append(-1)
            row_prob.append(0.0)
        padded.append(len(row_token) - sum(padded))
    return {
        "num_tokens": num_tokens,
        "topk": topk,
        "num_experts": num_experts,
        "alignment": alignment,
        "num_rows": len(row_token),
        "host_counts": tuple(counts),
        "expert_counts": counts,
        "padded_offsets": [sum(padded[:e]) for e in range(num_experts + 1)],
        "row_token": row_token,
        "slot_row": slot_row,
        "row_prob": row_prob,
    }
