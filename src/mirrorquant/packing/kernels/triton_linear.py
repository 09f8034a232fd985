# mypy: ignore-errors
"""The Triton kernels of ``gpu.py``: a linear layer of at most 16 rows from bit planes."""

import triton
import triton.language as tl

__all__ = ["few_rows", "tensor_rows"]

_SIGN = tl.constexpr(-0x80000000)  # the sign bit of a float32
_MINUS_ONE = tl.constexpr(0xBF800000 - 0x100000000)  # the bits of -1.0


@triton.jit
def _signs(bits, left):
    """+1.0 where the bit that moves to the top by ``left`` is set, else -1.0: a shift and one logic operation."""
    return (((bits << left) & _SIGN) ^ _MINUS_ONE).to(tl.float32, bitcast=True)


@triton.jit
def _finish(sums, row, o, scale, shift, residual, y, rows, outputs, a, relu: tl.constexpr):
    is_real = (o < outputs) & (row < rows)
    result = sums * a
    if scale is not None:
        result = result * tl.load(scale + o, mask=o < outputs, other=0.0)
    if shift is not None:
        result = result + tl.load(shift + o, mask=o < outputs, other=0.0)
    place = row * outputs + o
    if residual is not None:
        result = result + tl.load(residual + place, mask=is_real, other=0.0).to(tl.float32)
    if relu:
        result = tl.maximum(result, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + place, result.to(y.dtype.element_ty), mask=is_real)


@triton.jit
def few_rows(
    x,
    weights,
    scale,
    shift,
    residual,
    y,
    rows,
    outputs,
    inputs,
    chunks,
    a,
    planes: tl.constexpr,
    relu: tl.constexpr,
    group: tl.constexpr,
    block: tl.constexpr,
    words: tl.constexpr,
    unroll: tl.constexpr,
):
    """y[row, o] = relu?(a * scale[o] * sum_k sign[o, k] * x[row, k] + shift[o] + residual[row, o]).

    A program has ``block`` outputs and ``group`` (1 to 4) rows. With words = 128 * warps each thread has 4 words of
    every output, so that the layouts of x [1, words] and of the bits [block, words] agree and x is read once for all.
    """
    o = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.program_id(1) * group
    w = tl.arange(0, words)[None, :]
    place = (w // 16) * 512 + w % 16
    sums0 = tl.zeros((block, words), dtype=tl.float32)
    sums1 = tl.zeros((block, words), dtype=tl.float32)
    sums2 = tl.zeros((block, words), dtype=tl.float32)
    sums3 = tl.zeros((block, words), dtype=tl.float32)
    length = chunks * 16
    for start in range(0, length, words):
        for plane in tl.static_range(planes):
            at = (plane * outputs + o[:, None]) * length + start + w
            bits = tl.load(weights + at, mask=(o[:, None] < outputs) & (start + w < length), other=0)
            for j0 in range(0, 32, unroll):
                for j1 in tl.static_range(unroll):
                    j = j0 + j1
                    sign = _signs(bits, 31 - j)
                    k = start * 32 + j * 16 + place
                    inside = k < inputs
                    at_x = x + row * inputs + k
                    sums0 += sign * tl.load(at_x, mask=inside, other=0.0).to(tl.float32)
                    if group > 1:
                        x1 = tl.load(at_x + inputs, mask=inside & (row + 1 < rows), other=0.0)
                        sums1 += sign * x1.to(tl.float32)
                    if group > 2:
                        x2 = tl.load(at_x + 2 * inputs, mask=inside & (row + 2 < rows), other=0.0)
                        sums2 += sign * x2.to(tl.float32)
                    if group > 3:
                        x3 = tl.load(at_x + 3 * inputs, mask=inside & (row + 3 < rows), other=0.0)
                        sums3 += sign * x3.to(tl.float32)
    _finish(tl.sum(sums0, 1), row, o, scale, shift, residual, y, rows, outputs, a, relu)
    if group > 1:
        _finish(tl.sum(sums1, 1), row + 1, o, scale, shift, residual, y, rows, outputs, a, relu)
    if group > 2:
        _finish(tl.sum(sums2, 1), row + 2, o, scale, shift, residual, y, rows, outputs, a, relu)
    if group > 3:
        _finish(tl.sum(sums3, 1), row + 3, o, scale, shift, residual, y, rows, outputs, a, relu)


@triton.jit
def tensor_rows(
    x,
    weights,
    scale,
    shift,
    residual,
    y,
    rows,
    outputs,
    inputs,
    chunks,
    a,
    planes: tl.constexpr,
    relu: tl.constexpr,
    block: tl.constexpr,
    step: tl.constexpr,
):
    """As ``few_rows``, for up to 16 rows of bfloat16 on tensor cores: a product takes 16 * step inputs."""
    o = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.arange(0, 16)[:, None]
    w = tl.arange(0, 16)[None, :]
    kk = tl.arange(0, 16 * step)[None, :]
    lefts = 31 - tl.arange(0, step)[None, :, None]
    sums = tl.zeros((16, block), dtype=tl.float32)
    for chunk in range(chunks):
        for plane in tl.static_range(planes):
            at = ((plane * outputs + o[:, None]) * chunks + chunk) * 16 + w
            bits = tl.load(weights + at, mask=o[:, None] < outputs, other=0)
            for j in range(0, 32, step):
                sign = _signs(bits[:, None, :], lefts - j).to(tl.bfloat16)
                sign = tl.trans(tl.reshape(sign, (block, 16 * step)))
                k = chunk * 512 + j * 16 + kk
                values = tl.load(x + row * inputs + k, mask=(row < rows) & (k < inputs), other=0.0)
                sums = tl.dot(values, sign, sums)
    _finish(sums, row, o[None, :], scale, shift, residual, y, rows, outputs, a, relu)
