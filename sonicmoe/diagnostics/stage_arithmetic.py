"""The expected values of a stage, recomputed in fp64 from the values that the engine itself fed
into that stage.

A fault then shows in the stage where it arises and in no later one. Quantisation is applied exactly
where engines apply it, so only rounding is left between a correct stage and its expectation. An
input that the engine does not show is itself recomputed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..enums import ZCode, is_glu
from ..quant.folding import with_row_scales
from ..quant.format import Code
from ..quant.recipes import BlockShape, ScaleFormat
from ..quant.reference import dequantize, quantize
from ..quant.tokens import tokens_of
from .formulas import activate
from .golden_stages import RowLayout, gathered, grouped, outer, summed, sums, user_layout
from .step_capture import to_numpy
from .step_dump import Array, StepDump


class StageArithmetic:
    """`expected(name)` for every stage of `bisect.STAGES` but routing, computed when asked for and
    kept.
    """

    def __init__(self, step: StepDump, layout: RowLayout, shown: dict[str, Array]) -> None:
        """`shown`: stage values of the run, in the shapes of the golden."""
        self._step, self._layout, self._shown = step, layout, shown
        self._kept: dict[str, Array] = {}
        # Real rows only: padding rows are zeros in the result, whatever the engine left in them.
        self._owners = [
            np.flatnonzero((layout.row_expert == e) & layout.real) for e in range(step.num_experts)
        ]
        self._token = layout.fields["row_token"]
        self._probability = layout.fields["row_prob"].astype(np.float64)[:, None]
        self._activation = step.settings.activation_type

    def expected(self, name: str) -> Array:
        """The stage from the best known inputs."""
        if name not in self._kept:
            # One method per stage, named after it. Each asks for its inputs by `_best`, so methods
            # may call each other for stages that the engine does not show; the graph has no cycle,
            # because stages are listed in the order in which they run.
            compute: Callable[[], Array] = getattr(self, f"_{name}")
            # NaN and infinity are the faults that a caller looks for, so numpy need not warn.
            with np.errstate(all="ignore"):
                self._kept[name] = compute()
        return self._kept[name]

    def _best(self, name: str) -> Array:
        # The engine's own value, if it shows one, and only else this class's. The difference then
        # holds one stage's error and none of its inputs'.
        shown = self._shown.get(name)
        return self.expected(name) if shown is None else shown.astype(np.float64)

    def _stored(self, values: Array, operand: str, code: Code = Code.E4M3) -> Array:
        """As an engine stores a GEMM operand (or z): quantised as the recipe says, else rounded to
        the dtype of the tokens.
        """
        recipe = self._step.settings.fp8_recipe
        # Weight gradients may run on unquantised operands beside a quantised forward.
        kept_plain = operand.startswith("wgrad_") and not self._step.settings.flags.fp8_wgrad
        if recipe is None or kept_plain:
            return self._rounded(values)
        return quantised(values, getattr(recipe, operand), code, recipe.scale_format)

    def _rounded(self, values: Array, dtype: str | None = None) -> Array:
        return through_torch(
            values, lambda tensor: tensor.to(getattr(torch, dtype or self._step.settings.dtype))
        )

    def _x(self) -> Array:
        return self._step.x.astype(np.float64)

    def _w1(self) -> Array:
        return self._step.w1.astype(np.float64)

    def _w2(self) -> Array:
        return self._step.w2.astype(np.float64)

    def _b1(self) -> Array:
        assert self._step.b1 is not None
        return self._step.b1.astype(np.float64)

    def _b2(self) -> Array:
        assert self._step.b2 is not None
        return self._step.b2.astype(np.float64)

    def _bias(self, name: str) -> Array | None:
        """As the engine reads it, in fp32; None in a step without biases."""
        return None if self._step.b1 is None else self._best(name)

    def _probs(self) -> Array:
        return self._step.probs.astype(np.float64)

    def _dout(self) -> Array:
        assert self._step.dout is not None
        return self._step.dout.astype(np.float64)

    def _w1_fp8(self) -> Array:
        return self._stored(self._best("w1"), "w1")

    def _w2_fp8(self) -> Array:
        return self._stored(self._best("w2"), "w2")

    def _dgrad_weight(self, name: str) -> Array:
        recipe = self._step.settings.fp8_recipe
        # Equal blocks mean that forward and dgrad read one buffer. Otherwise dgrad reads a second
        # quantisation of the same weight, which rounds differently and is no stage of its own.
        if recipe is None or getattr(recipe, f"{name}_dgrad") == getattr(recipe, name):
            return self._best(f"{name}_fp8")
        return self._stored(self._best(name), f"{name}_dgrad")

    def _x_fp8(self) -> Array:
        return self._read("x")

    def _read(self, tokens: str) -> Array:
        """x or dout as the GEMMs read it: as it came, where it arrived in FP8."""
        came = getattr(self._step, f"{tokens}_codes") is not None
        return self._best(tokens) if came else self._stored(self._best(tokens), tokens)

    def _rows_read(self, tokens: str) -> Array:
        """x or dout in expert order, as the GEMMs read it."""
        recipe = self._step.settings.fp8_recipe
        if recipe is None or not recipe.in_expert_order(tokens):
            return gathered(self._best(f"{tokens}_fp8"), self._token)
        # One operand serves this product and that of wgrad, where both are quantised.
        if self._step.settings.flags.fp8_wgrad:
            return self._best(f"wgrad_{tokens}")
        return self._stored(gathered(self._best(tokens), self._token), tokens)

    # No rounding here: engines keep z in fp32 in the accumulator, and its rounded form is the stage
    # `z_saved`.
    def _z(self) -> Array:
        return grouped(
            self._rows_read("x"),
            self._best("w1_fp8").transpose(0, 2, 1),
            self._owners,
            self._bias("b1"),
        )

    def _z_saved(self) -> Array:
        code = self._step.settings.flags.save_z
        # In an unquantised step z is stored in the dtype of the tokens, which `_stored` does.
        if code is ZCode.BF16 and self._step.settings.recipe is not None:
            return self._rounded(self._best("z"), "bfloat16")
        return self._stored(self._best("z"), "z", Code.INT8 if code is ZCode.INT8 else Code.E4M3)

    def _activated(self, z: Array, dy1: Array | None = None) -> tuple[Array, Array]:
        width = self._step.w2.shape[2]
        # `activate` returns value and gradient together; forward needs the value alone.
        dy1 = np.zeros((len(z), width)) if dy1 is None else dy1
        return activate(z, dy1, self._activation, self._step.settings.parameters)

    def _y1(self) -> Array:
        return self._stored(self._activated(self._best("z"))[0], "y1")

    def _y2(self) -> Array:
        matrices, bias = self._best("w2_fp8").transpose(0, 2, 1), self._bias("b2")
        return self._rounded(grouped(self._best("y1"), matrices, self._owners, bias))

    def _out(self) -> Array:
        return summed(self._probability * self._best("y2"), self._token, len(self._step.x))

    def _dout_fp8(self) -> Array:
        return self._read("dout")

    def _dy1(self) -> Array:
        return grouped(self._rows_read("dout"), self._dgrad_weight("w2"), self._owners)

    def _dz(self) -> Array:
        # Backward reads the stored z, which is rounded or quantised, and not the z that forward
        # computed.
        return self._activated(self._best("z_saved"), self._probability * self._best("dy1"))[1]

    def _ds(self) -> Array:
        # d out / d prob is <dout, y2>. Since y2 = w2 y1 and dy1 = w2^T dout, the same number is
        # <dy1, y1>, which needs no y2 in backward.
        products = (self._best("dy1") * self._activated(self._best("z_saved"))[0]).sum(1)
        bias = self._bias("b2")
        if bias is not None:  # y2 = w2 y1 + b2; neither b2 nor this dout is quantised
            of_experts = bias[self._layout.row_expert]
            products = products + (gathered(self._best("dout"), self._token) * of_experts).sum(1)
        result = np.zeros(self._step.probs.size)
        # Slots without a row (dropped, or of another rank) keep a gradient of exactly zero.
        result[self._layout.fields["row_slot"][self._layout.real]] = products[self._layout.real]
        return result.reshape(self._step.probs.shape)

    def _y1s(self) -> Array:
        return self._probability * self._activated(self._best("z_saved"))[0]

    def _dz_fp8(self) -> Array:
        return self._stored(self._best("dz"), "dz")

    def _dx_rows(self) -> Array:
        return self._rounded(grouped(self._best("dz_fp8"), self._dgrad_weight("w1"), self._owners))

    def _dx(self) -> Array:
        return summed(self._best("dx_rows"), self._token, len(self._step.x))

    # Weight gradients contract over tokens, so they have operands of their own, in the blocks that
    # the recipe names for them.
    def _wgrad_dout(self) -> Array:
        return self._gathered_operand("dout")

    def _wgrad_y1s(self) -> Array:
        return self._row_operand("y1s", "dout")

    def _dw2(self) -> Array:
        return outer(self._best("wgrad_dout"), self._best("wgrad_y1s"), self._owners)

    def _wgrad_x(self) -> Array:
        return self._gathered_operand("x")

    def _wgrad_dz(self) -> Array:
        return self._row_operand("dz", "x")

    # Where wgrad reads the codes of x (dout), its scale per row stands with dz (y1s); `quant.folding`.
    def _folds(self, tokens: str) -> bool:
        recipe, one_scale = self._step.settings.fp8_recipe, self._step.has_row_scales(tokens)
        folds = recipe is not None and (recipe.folds_wgrad or one_scale)
        return folds and self._step.settings.flags.fp8_wgrad

    def _gathered_operand(self, tokens: str) -> Array:
        if not self._folds(tokens):
            rows = gathered(self._best(tokens), self._token)
            return self._stored(rows, f"wgrad_{tokens}")
        codes, scale = self._folded_codes(tokens)
        return gathered(codes * scale, self._token)

    def _row_operand(self, rows: str, tokens: str) -> Array:
        """dz or y1s, which meets x or dout in a product."""
        values = self._best(rows)
        if not self._folds(tokens):
            return self._stored(values, f"wgrad_{rows}")
        scale = gathered(self._folded_codes(tokens)[1], self._token)
        return self._stored(values * scale, f"wgrad_{rows}") / np.where(scale > 0, scale, 1.0)

    def _folded_codes(self, tokens: str) -> tuple[Array, Array]:
        """x or dout `[T, H]` as wgrad reads it, and one scale per row `[T, 1]`."""
        held, recipe = getattr(self._step, f"{tokens}_codes"), self._step.settings.fp8_recipe
        assert recipe is not None
        if held is not None:
            codes = torch.tensor(held.astype(np.uint8)).view(torch.float8_e4m3fn)
            scale = getattr(self._step, f"{tokens}_scale").astype(np.float32)
            q = tokens_of(codes, torch.tensor(scale))
        else:
            values = torch.tensor(self._best(tokens).astype(np.float32))
            q = quantize(values, getattr(recipe, tokens), scale_format=recipe.scale_format)
        q = with_row_scales(q)
        return tuple(  # type: ignore[return-value]
            to_numpy(part.to(torch.float32)).astype(np.float64) for part in (q.codes, q.scale_inv)
        )

    def _dw1(self) -> Array:
        return outer(self._best("wgrad_dz"), self._best("wgrad_x"), self._owners)

    def _db2(self) -> Array:
        rows = gathered(self._best("dout"), self._token)
        return sums(self._probability * rows, self._owners)

    def _db1(self) -> Array:
        return sums(self._best("dz"), self._owners)

    def _flush(self) -> Array:
        return user_layout(self._best("dw1"), self._best("dw2"), is_glu(self._activation))


def quantised(values: Array, block: BlockShape, code: Code, scale_format: ScaleFormat) -> Array:
    """fp64 values after block-scaled quantisation of their fp32 rounding."""
    return through_torch(
        values, lambda tensor: dequantize(quantize(tensor, block, code, scale_format))
    )


def through_torch(values: Array, operation: Callable[[torch.Tensor], torch.Tensor]) -> Array:
    """Apply a tensor operation to the fp32 rounding of `values`."""
    # The package's own quantiser and casts are used here, so that the rounding is theirs bit for
    # bit. They take fp32.
    tensor = torch.tensor(np.ascontiguousarray(values, dtype=np.float32))
    return to_numpy(operation(tensor)).astype(np.float64)
