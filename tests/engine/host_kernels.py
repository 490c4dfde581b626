"""The kernels that the Hopper engine's passes launch, computed on the host from what a launch is
given: shapes, dtypes, addresses.

Written from the comments at the entry points in `sonicmoe/kernels`; each refuses arguments of other
shapes than those say. Rows behind `padded_offsets[E]` are left alone, as on the GPU.
"""

from __future__ import annotations

import ctypes
import itertools

import torch

from sonicmoe.engine.activations import activate, activate_backward
from sonicmoe.engine.capabilities import HOPPER
from sonicmoe.engine.gradient_places import WgradOutput
from sonicmoe.engine.reference_operands import saved_z
from sonicmoe.engine.settings import EngineSettings
from sonicmoe.enums import ActivationType, ZCode
from sonicmoe.quant.format import BlockScaledTensor, Code, Orientation
from sonicmoe.quant.recipes import RECIPES, BlockShape, iso, rows
from sonicmoe.quant.reference import dequantize, quantize, transpose_storage
from sonicmoe.routing.backends import PlainKernels

# As the modules of the up projection and of dgated export them: in two orders, because neither
# number, nor the order of parameters, is the other's.
OF_UP = (
    *("swiglu ", "geglu ", "reglu ", "geglu_tanh ", "swiglu_oai alpha limit"),
    *("swiglu_clamp limit", "situ_glu beta linear_beta"),
)
OF_DGATED = (
    *("situ_glu linear_beta beta", "reglu ", "swiglu_oai limit alpha", "swiglu_clamp limit"),
    *("swiglu ", "geglu_tanh ", "geglu "),
)
ACTIVATION_NAMES = OF_UP, OF_DGATED
RECIPE = RECIPES[HOPPER.recipes[0]]
BY_ROWS, BY_BLOCKS = rows(128), iso(128)
OF_W1, OF_DZ = RECIPE.w1, RECIPE.dz
PLAIN = PlainKernels()
FEW_ROWS = 300  # whose sums `narrow_gradient` does not divide
DPROB_COLUMNS = 0  # set to what the module under test was built with


def held(argument):
    """The host memory of a launch argument as a torch tensor, in its strides; others as they are."""
    if not hasattr(argument, "data_ptr") or isinstance(argument, torch.Tensor):
        return argument
    dtype = getattr(torch, str(argument.dtype))
    shape, strides = tuple(argument.shape), tuple(argument.strides)
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_uint8 * ((last + 1) * dtype.itemsize)).from_address(argument.data_ptr())
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def at(view, dtype=None, shape=None):
    """`held` of a contiguous argument; `dtype` and `shape`: what it must have."""
    found, sizes = str(view.dtype).removeprefix("torch."), tuple(view.shape)
    assert view.is_contiguous(), sizes
    assert dtype is None or found in dtype.split("|"), f"{found} {sizes}, needed {dtype}"
    assert shape is None or sizes == tuple(shape), f"{sizes}, needed {tuple(shape)}"
    return held(view)


def blocks(n, size=128):
    return -(-n // size)


def values(codes, scale, block, code=Code.E4M3, orientation=Orientation.ROWS):
    """What codes stand for, in fp32, as a logical matrix."""
    codes = at(codes, "uint8|int8").view(code.dtype)
    return dequantize(BlockScaledTensor(codes, at(scale, "float32"), block, code, orientation))


def put(q, codes, scale, stop_rows=None):
    """Write codes and scales of the logical rows before `stop_rows`."""
    columns = q.orientation is Orientation.COLUMNS
    codes, scale = at(codes, "uint8", q.codes.shape), at(scale, "float32", q.scale_inv.shape)
    row_axis, block = (1, q.block.rows) if columns else (0, q.block.rows)
    stop = int(q.codes.shape[row_axis]) if stop_rows is None else stop_rows
    codes.narrow(row_axis, 0, stop).copy_(q.bytes.narrow(row_axis, 0, stop))
    count = blocks(stop, block)
    scale.narrow(row_axis, 0, count).copy_(q.scale_inv.narrow(row_axis, 0, count))


def grouped(a, w, offsets):
    """`a [R, K]` times the transposed `w [E, N, K]` of each row's expert; rows of nobody are zeros."""
    out = torch.zeros((int(a.shape[0]), int(w.shape[1])))
    for expert, (first, last) in enumerate(itertools.pairwise(offsets)):
        out[first:last] = a[first:last] @ w[expert].T
    return out


def gather(tokens, row_token):
    picked = tokens[row_token.clamp(min=0).to(torch.int64)]
    real = (row_token >= 0).reshape([-1] + [1] * (picked.dim() - 1))
    return torch.where(real, picked, torch.zeros_like(picked))


def offsets_of(padded_offsets, weights):
    found = at(padded_offsets, "int64", [int(weights.shape[0]) + 1]).tolist()
    assert all(offset % 128 == 0 for offset in found)
    return found


def quantize_rows(x, codes, scale, stream):
    assert x.data_ptr() % 16 == 0
    put(quantize(at(x, "bfloat16"), BY_ROWS), codes, scale)


def launched_activation(names, number, *values):
    """The activation and its parameters, as the functions of `activations` take them."""
    name, *parameters = names[number].split()
    assert all(isinstance(value, float) for value in values)
    return ActivationType(name), tuple(zip(parameters, values, strict=False))


def bias_of(rows, bias, offsets):
    """What is added to rows `[R, N]`, padding rows of an expert included."""
    added = torch.zeros_like(rows)
    if bias is not None:
        each = at(bias, "float32", (len(offsets) - 1, rows.shape[1]))
        for expert, (first, last) in enumerate(itertools.pairwise(offsets)):
            added[first:last] = each[expert]
    return added


def adapter_of(rows, u, factor, offsets):
    """What a low-rank adapter adds to rows `[R, N]`."""
    if u is None:
        assert factor is None
        return torch.zeros_like(rows)
    factor = at(factor, "bfloat16", (len(offsets) - 1, rows.shape[1], u.shape[1])).float()
    return grouped(at(u, "bfloat16").float(), factor, offsets)


HALF = "bfloat16|float16"


def wide_rows(given, scale, gathers, row_token):
    """fp32 rows in expert order, zeros without a token."""
    token = at(row_token, "int32").to(torch.int64)
    if scale is None:
        rows = at(given, HALF).float()
    else:
        by_rows = scale.shape[0] == given.shape[0] and scale.shape[1] == blocks(given.shape[1])
        rows = values(given, scale, BY_ROWS if by_rows else OF_DZ)
    rows = rows[token.clamp(min=0)] if gathers else rows
    return torch.where((token >= 0).unsqueeze(1), rows, 0.0)


def narrow_rows(given, scale, gathers, factor, row_token, padded_offsets, out, by, stream):
    rows, factor = wide_rows(given, scale, gathers, row_token), at(factor, HALF).float()
    product = grouped(rows, factor, offsets_of(padded_offsets, factor))
    at(out, HALF, product.shape).copy_(by * product)


def prepare_factor(source, straight, transposed, stream):
    _, rows, columns = source.shape
    if straight is not None:
        straight.zero_()[:, :rows, :columns] = source
    if transposed is not None:
        transposed.zero_()[:, :columns, :rows] = source.transpose(1, 2)


def gradient_parts(rows, experts, wide, width, rank):
    """Sums of few rows need none."""
    return 3 if rows > FEW_ROWS else 0


def narrow_gradient(
    given, scale, gathers, transposed, narrow, row_prob, row_token, padded_offsets, wide_first, parts, out, stream
):  # fmt: skip
    if narrow.shape[0] > FEW_ROWS:
        assert at(parts, "float32").numel() >= 3
    if transposed:
        rows = values(given, scale, BY_BLOCKS).T
        rows = torch.where((at(row_token, "int32") >= 0).unsqueeze(1), rows, 0.0)
    else:
        rows = wide_rows(given, scale, gathers, row_token)
    thin = at(narrow, HALF).float()
    if row_prob is not None:
        thin = thin * at(row_prob, "float32").unsqueeze(1)
    out = at(out, "float32")
    offsets = at(padded_offsets, "int64").tolist()
    assert len(offsets) == len(out) + 1
    for expert, (first, last) in enumerate(itertools.pairwise(offsets)):
        product = thin[first:last].T @ rows[first:last]
        rank = out.shape[2 if wide_first else 1]
        out[expert] = product[:rank].T if wide_first else product[:rank]


def narrow_both(
    given, scale, gathers, factor, narrow, row_prob, row_token, padded_offsets, parts, out, gradient, by, stream
):  # fmt: skip
    narrow_rows(given, scale, gathers, factor, row_token, padded_offsets, out, by, stream)
    of_narrow = False, narrow, row_prob, row_token, padded_offsets, True
    narrow_gradient(given, scale, gathers, *of_narrow, parts, gradient, stream)


def gather_gated_gemm(
    a, a_scale, b, b_scale, b1, u, factor, row_token, padded_offsets, z, z_scale, y1, y1_scale, activation, first, second,
    store_z, multiprocessors, stream,
):  # fmt: skip
    of_w1 = OF_W1 if b_scale.shape[1] < blocks(b.shape[1]) else BY_BLOCKS
    index, w = at(row_token, "int32"), values(b, b_scale, of_w1)
    offsets, r = offsets_of(padded_offsets, w), int(index.shape[0])
    assert w.shape[1] % 128 == 0
    out = grouped(gather(values(a, a_scale, BY_ROWS), index), w, offsets)
    out = out + bias_of(out, b1, offsets) + adapter_of(out, u, factor, offsets)
    kind, own = launched_activation(OF_UP, activation, first, second)
    if store_z:
        wide = str(z.dtype) == "bfloat16"
        code = ZCode.BF16 if wide else ZCode.ADAPTIVE
        settings = EngineSettings(kind, RECIPE, save_z=code, activation_parameters=own)
        q = saved_z(out, settings, torch.bfloat16)
    if store_z and wide:
        at(z, "bfloat16", out.shape)[: offsets[-1]] = q[: offsets[-1]]
    elif store_z:
        found = at(z, "int8|uint8", out.shape)
        scales = at(z_scale, "float32", (r, blocks(int(out.shape[1]))))
        found.view(torch.int8)[: offsets[-1]] = q.codes[: offsets[-1]]
        scales[: offsets[-1]] = q.scale_inv[: offsets[-1]]
    y = activate(out, kind, own)
    put(quantize(y, BY_ROWS), y1, y1_scale, offsets[-1])


def grouped_gemm(
    a, a_scale, b, b_scale, bias, u, factor, padded_offsets, out, multiprocessors, stream
):
    r, k = tuple(a.shape)
    depth = 256 if b_scale.shape[2] < blocks(k) else 128  # of K that shares a scale
    by_blocks = r > 0 and a_scale.shape[0] == r // 128
    assert tuple(a_scale.shape) == ((r // 128 if by_blocks else r), blocks(k, depth))
    w = values(b, b_scale, BlockShape(128, depth))
    offsets = offsets_of(padded_offsets, w)
    block = BlockShape(128 if by_blocks else 1, depth)
    product = grouped(values(a, a_scale, block), w, offsets)
    product = product + bias_of(product, bias, offsets) + adapter_of(product, u, factor, offsets)
    at(out, "bfloat16", product.shape)[: offsets[-1]] = product[: offsets[-1]].to(torch.bfloat16)


def aggregate_rows(given, slot_row, row_prob, out, weighted, stream):
    out = at(out, f"{HALF}|float32", (slot_row.shape[0], given.shape[1]))
    row_prob = at(row_prob, "float32", [given.shape[0]])
    PLAIN.aggregate_rows(at(given, HALF), at(slot_row, "int64"), row_prob, out, weighted)


def gather_dgated_gemm(
    dout, dout_scale, w2, w2_scale, u, factor, row_token, row_prob, padded_offsets, z, z_scale, dz, dz_scale, dprob_parts,
    dz_t, dz_t_scale, y1s_t, y1s_t_scale, wide, activation, first, second, multiprocessors, stream,
):  # fmt: skip
    index, w = at(row_token, "int32"), values(w2, w2_scale, BY_BLOCKS)
    offsets, r, inner = offsets_of(padded_offsets, w), int(index.shape[0]), int(w.shape[1])
    prob, last = at(row_prob, "float32", [r]).unsqueeze(1), offsets[-1]
    dy1 = grouped(gather(values(dout, dout_scale, BY_ROWS), index), w, offsets)
    dy1 = dy1 + adapter_of(dy1, u, factor, offsets)
    if str(z.dtype) == "bfloat16":
        kept = at(z, "bfloat16", (r, 2 * inner)).to(torch.float32).clone()
    else:
        kept = values(z, z_scale, BY_ROWS, Code.ADAPTIVE)
    kept[last:] = 0
    weighted = dy1 * torch.where(prob > 0, prob, 0.0)
    gate = launched_activation(OF_DGATED, activation, first, second)
    y1, gradient = activate_backward(kept, weighted, *gate)
    real = (index >= 0).unsqueeze(1)
    y1s, gradient = y1 * prob * real, gradient * real
    parts = at(dprob_parts, "float32", (blocks(inner, DPROB_COLUMNS), r))
    for part, column in enumerate(range(0, inner, DPROB_COLUMNS)):
        parts[part, :last] = (dy1 * y1)[:last, column : column + DPROB_COLUMNS].sum(1)
    q = quantize(gradient, OF_DZ)
    put(q, dz, dz_scale, last)
    if wide:
        at(dz_t, "bfloat16", gradient.shape)[:last] = gradient[:last].to(torch.bfloat16)
        at(y1s_t, "bfloat16", y1s.shape)[:last] = y1s[:last].to(torch.bfloat16)
    else:
        if dz_t is not None:
            put(transpose_storage(q), dz_t, dz_t_scale, last)
        if y1s_t is not None:
            put(transpose_storage(quantize(y1s, BY_BLOCKS)), y1s_t, y1s_t_scale, last)


def dout_rows(tokens, scale, row_token):
    """Rows without a token are zeros."""
    plain = at(tokens, "bfloat16").float() if scale is None else values(tokens, scale, BY_ROWS)
    return gather(plain, at(row_token, "int32"))


def sums_of_experts(rows, padded_offsets, sums):
    offsets = at(padded_offsets, "int64").tolist()
    sums = at(sums, "float32", (len(offsets) - 1, rows.shape[1]))
    for expert, (first, last) in enumerate(itertools.pairwise(offsets)):
        sums[expert] = rows[first:last].sum(0)


def sum_dz(dz, dz_scale, row_token, padded_offsets, parts, db1, stream):
    assert at(parts, "float32").numel() >= dz.shape[0] // 128 * dz.shape[1]
    real = (at(row_token, "int32") >= 0).unsqueeze(1)
    rows = torch.where(real, values(dz, dz_scale, OF_DZ), 0.0)
    sums_of_experts(rows, padded_offsets, db1)


def sum_tokens(tokens, scale, b2, row_prob, row_token, padded_offsets, sums, parts, db2, stream):
    rows = dout_rows(tokens, scale, row_token)
    added = bias_of(rows, b2, at(padded_offsets, "int64").tolist())
    # Only where there is a token: elsewhere nobody has written the partial sum.
    real = at(row_token, "int32") >= 0
    first = at(sums, "float32")[0]
    first[real] += (rows * added)[real].sum(1)
    if db2 is not None:
        assert at(parts, "float32").numel() >= len(rows) // 128 * rows.shape[1]
        sums_of_experts(rows * at(row_prob, "float32").unsqueeze(1), padded_offsets, db2)


def sum_or_zero(index, given, out, stream):
    given = at(given, "float32")
    assert len(given.shape) == 2 and given.shape[0] > 0
    total = given[0].clone()
    for part in given[1:]:
        total += part
    PLAIN.gather_or_zero(at(index, "int64"), total, at(out, "float32", index.shape))


def gather_transpose_quantize(x, row_token, padded_offsets, codes, scale, stream):
    assert x.data_ptr() % 16 == 0
    last = int(at(padded_offsets, "int64")[-1])
    gathered = gather(at(x, "bfloat16").to(torch.float32), at(row_token, "int32"))
    put(transpose_storage(quantize(gathered, BY_BLOCKS)), codes, scale, last)


def gather_transpose_quantize_pair(
    x, y, row_token, padded_offsets, x_codes, x_scale, y_codes, y_scale, stream
):
    assert tuple(x.shape) == tuple(y.shape)
    gather_transpose_quantize(x, row_token, padded_offsets, x_codes, x_scale, stream)
    gather_transpose_quantize(y, row_token, padded_offsets, y_codes, y_scale, stream)


def gather_transpose_requantize(
    given, given_scale, row_token, padded_offsets, codes, scale, stream
):
    """Tokens that nobody names may hold anything."""
    last = int(at(padded_offsets, "int64")[-1])
    gathered = gather(values(given, given_scale, BY_ROWS), at(row_token, "int32"))
    put(transpose_storage(quantize(gathered, BY_BLOCKS)), codes, scale, last)


def wgrad_products(a, a_scale, b, b_scale, padded_offsets, size):
    """`(expert, gradient [M, N])` of the experts that have rows; `size`: E, M, N."""

    def operand(codes, scale):
        rows = 256 if scale.shape[0] < blocks(codes.shape[0]) else 128
        return values(codes, scale, BlockShape(128, rows), orientation=Orientation.COLUMNS)

    left, right = operand(a, a_scale), operand(b, b_scale)
    experts, *matrix = size
    assert matrix == [left.shape[1], right.shape[1]] and left.shape[0] == right.shape[0]
    offsets = at(padded_offsets, "int64", [experts + 1]).tolist()
    for expert, (first, last) in enumerate(itertools.pairwise(offsets)):
        assert first % 128 == last % 128 == 0
        if last > first:
            yield expert, left[first:last].T @ right[first:last]


class Destination:
    """What `wgrad_destination` is told."""

    def __init__(self, m, n, split, places, output):
        self.size, self.split, numbers = (m, n), split, list(places)
        self.output = WgradOutput(output)
        self.places = [numbers[i : i + 4] for i in range(0, len(numbers), 4)]

    def put(self, expert, gradient):
        """Where somebody wants it; rows of a gradient are gate and up in turns."""
        address, stride_m, stride_part, stride_n = self.places[expert]
        if address == 0:
            return
        (m, n), parts = self.size, 2 if self.split else 1
        sizes, strides = (m // parts, parts, n), (stride_m, stride_part, stride_n)
        count = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        dtype = torch.bfloat16 if self.output is WgradOutput.WRITE_BF16 else torch.float32
        memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
        held = torch.frombuffer(memory, dtype=dtype).as_strided(sizes, strides)
        if self.output is WgradOutput.ADD_F32:
            held += gradient.reshape(sizes)
        else:
            held.copy_(gradient.reshape(sizes))


def grouped_wgrad(a, a_scale, b, b_scale, padded_offsets, destination, multiprocessors, stream):
    operands = a, a_scale, b, b_scale, padded_offsets
    size = len(destination.places), *destination.size
    if any(destination.size):
        if destination.output is not WgradOutput.ADD_F32:
            assert at(a).shape[1] > 0, "without rows the caller writes zeros"
            for expert in range(size[0]):
                destination.put(expert, torch.zeros(size[1:]))
        for expert, gradient in wgrad_products(*operands, size):
            destination.put(expert, gradient)


KERNELS = {
    function.__name__: function
    for function in (
        quantize_rows, gather_gated_gemm, grouped_gemm, aggregate_rows, gather_dgated_gemm, sum_or_zero,
        gather_transpose_quantize, gather_transpose_quantize_pair, gather_transpose_requantize,
        grouped_wgrad, sum_dz, sum_tokens, narrow_rows, narrow_gradient, narrow_both, gradient_parts, prepare_factor,
    )
} | {"wgrad_destination": Destination, "parts_of_both": gradient_parts}  # fmt: skip
