"""Every stage of a step in fp64, expert by expert, straight from the definition: the values that
`bisect` compares with. numpy only.

Row stages lie in expert order with zero padding rows, as routing lays them out; see `RowLayout`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .formulas import activate
from .step_dump import Array, StepDump

TENSORS = ("out", "dx", "ds", "dw1", "dw2")
BIAS_GRADIENTS = ("db1", "db2")


@dataclass(frozen=True, eq=False)
class RowLayout:
    """Which row of the padded, expert-sorted layout serves which slot: the routing contract,
    computed with a plain loop.

    fields: the tensors of `RoutingMetadata` by name, and `row_slot`.
    row_expert: `[R]`, the owner of every row, padding included.
    """

    fields: dict[str, Array]
    row_expert: Array

    @classmethod
    def of(cls, step: StepDump, alignment: int) -> RowLayout:
        """Tokens of an expert in ascending order, each expert padded to `alignment`."""
        experts, (tokens, topk) = step.num_experts, step.indices.shape
        flat, probs = step.indices.reshape(-1), step.probs.reshape(-1)
        # Slot t * K + k in ascending order is token order, because a token picks an expert once.
        slots = [np.flatnonzero(flat == expert) for expert in range(experts)]
        counts = np.array([len(own) for own in slots], dtype=np.int64)
        padded = -(-counts // alignment) * alignment
        # Expert e owns rows first[e] to first[e + 1], its padding rows at the end of them.
        first = np.concatenate([[0], np.cumsum(padded)])
        row_slot = np.full(int(first[-1]), -1, dtype=np.int64)
        for expert, own in enumerate(slots):
            row_slot[first[expert] : first[expert] + len(own)] = own
        real = row_slot >= 0
        slot_row = np.full(tokens * topk, -1, dtype=np.int64)
        slot_row[row_slot[real]] = np.flatnonzero(real)
        fields = {
            "expert_counts": counts, "padded_offsets": first,
            # `max` is for K = 0, where there is no row but the division is evaluated.
            "row_token": np.where(real, row_slot // max(topk, 1), -1), "row_slot": row_slot,
            "slot_row": slot_row.reshape(tokens, topk),
            "row_prob": np.where(real, np.append(probs, 0.0)[row_slot], 0.0),
        }  # fmt: skip
        return cls(fields, np.repeat(np.arange(experts), padded))

    @property
    def real(self) -> Array:
        """Rows that serve a slot."""
        return np.asarray(self.fields["row_slot"] >= 0)


def golden_stages(step: StepDump, layout: RowLayout) -> dict[str, Array]:
    """fp64 values of every stage that `bisect.STAGES` names, those of backward only when the step
    has a `dout`.
    """
    x, w1, w2 = (array.astype(np.float64) for array in (step.x, step.w1, step.w2))
    token, slot = layout.fields["row_token"], layout.fields["row_slot"]
    probability = layout.fields["row_prob"].astype(np.float64)[:, None]
    owners = [
        np.flatnonzero((layout.row_expert == e) & layout.real) for e in range(step.num_experts)
    ]
    computed = step.settings.computed
    activation, parameters = computed.activation, computed.activation_parameters
    b1, b2 = (None if bias is None else bias.astype(np.float64) for bias in (step.b1, step.b2))
    # A caller looks for NaN and infinity, so numpy need not warn of them.
    with np.errstate(all="ignore"):
        z = grouped(gathered(x, token), w1.transpose(0, 2, 1), owners, b1)
        y1, _ = activate(z, np.zeros_like(z[:, : w2.shape[2]]), activation, parameters)
        y2 = grouped(y1, w2.transpose(0, 2, 1), owners, b2)
        stages = {
            # Quantised stages are expected to hold the unquantised values: the golden has no
            # rounding at all.
            "x": x, "probs": step.probs.astype(np.float64),
            "w1": w1, "w2": w2, "w1_fp8": w1, "w2_fp8": w2,
            "x_fp8": x, "z": z, "z_saved": z, "y1": y1, "y2": y2,
            "out": summed(probability * y2, token, len(x)),
        }  # fmt: skip
        stages |= {} if b1 is None or b2 is None else {"b1": b1, "b2": b2}
        if step.dout is None:
            return stages
        dout = step.dout.astype(np.float64)
        dy1 = grouped(gathered(dout, token), w2, owners)
        _, dz = activate(z, probability * dy1, activation, parameters)
        dx_rows = grouped(dz, w1, owners)
        y1s, x_rows, dout_rows = probability * y1, gathered(x, token), gathered(dout, token)
        # d out / d prob is <dout, y2>, and y2 has the bias.
        ds = np.zeros(step.indices.size)
        ds[slot[layout.real]] = (dy1 * y1).sum(1)[layout.real]
        if b2 is not None:
            ds[slot[layout.real]] += (dout_rows * b2[layout.row_expert]).sum(1)[layout.real]
            stages |= {"db1": sums(dz, owners), "db2": sums(probability * dout_rows, owners)}
        dw1, dw2 = outer(dz, x_rows, owners), outer(dout_rows, y1s, owners)
        return stages | {
            "dout": dout, "dout_fp8": dout, "dy1": dy1, "dz": dz, "dz_fp8": dz, "y1s": y1s,
            "ds": ds.reshape(step.probs.shape),
            "dx_rows": dx_rows, "dx": summed(dx_rows, token, len(x)), "dw1": dw1, "dw2": dw2,
            "wgrad_x": x_rows, "wgrad_dz": dz, "wgrad_dout": dout_rows, "wgrad_y1s": y1s,
        }  # fmt: skip


def golden_tensors(step: StepDump) -> dict[str, Array]:
    """fp64 results of a step that has a `dout`, by the names in `TENSORS`; behind them those of
    `BIAS_GRADIENTS`, where the step has biases.
    """
    stages = golden_stages(step, RowLayout.of(step, alignment=1))
    return {name: stages[name] for name in (*TENSORS, *BIAS_GRADIENTS) if name in stages}


def gathered(tokens: Array, row_token: Array) -> Array:
    """`[T, C]` -> `[R, C]`, zeros in padding rows."""
    rows = np.zeros((len(row_token), tokens.shape[1]))
    real = row_token >= 0
    rows[real] = tokens[row_token[real]]
    return rows


def grouped(
    rows: Array, matrices: Array, owners: list[Array], biases: Array | None = None
) -> Array:
    """Per expert `rows_e @ matrices[e] + biases[e]`."""
    result = np.zeros((len(rows), matrices.shape[2]))
    for expert, (matrix, own) in enumerate(zip(matrices, owners, strict=True)):
        product = rows[own] @ matrix
        result[own] = product if biases is None else product + biases[expert]
    return result


def sums(rows: Array, owners: list[Array]) -> Array:
    """Per expert the sum of its rows."""
    return np.stack([rows[own].sum(0) for own in owners])


def outer(left: Array, right: Array, owners: list[Array]) -> Array:
    """Per expert `left_e^T right_e`."""
    return np.stack([left[own].T @ right[own] for own in owners])


def summed(rows: Array, row_token: Array, tokens: int) -> Array:
    """`[R, C]` -> `[T, C]`: the sum of every token's rows."""
    result = np.zeros((tokens, rows.shape[1]))
    real = row_token >= 0
    # A token has up to K rows. `+=` with an index array would add one of them only.
    np.add.at(result, row_token[real], rows[real])
    return result
