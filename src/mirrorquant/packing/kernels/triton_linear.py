# mypy: ignore-errors
"""The Triton kernel of ``gpu.py``: a linear layer of at most 16 rows from bit planes."""

import triton
import triton.language as tl

__all__ = ["few_rows"]


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
    has_scale: tl.constexpr,
    has_shift: tl.constexpr,
    has_residual: tl.constexpr,
    relu: tl.constexpr,
    parts: tl.constexpr,
    block: tl.constexpr,
    words: tl.constexpr,
):
    """y[row, o] = relu?(a * scale[o] * sum_k sign[o, k] * x[row, k] + shift[o] + residual[row, o])."""
    o = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.arange(0, 16)
    w = tl.arange(0, words)
    sums = tl.zeros((16, block), dtype=tl.float32)
    for chunk in range(chunks):
        for plane in tl.static_range(planes):
            at = ((plane * outputs + o[None, :]) * chunks + chunk) * words + w[:, None]
            bits = tl.load(weights + at, mask=o[None, :] < outputs, other=0)
            for j in tl.static_range(32):
                sign = tl.where((bits >> j) & 1 != 0, 1.0, -1.0).to(tl.bfloat16)
                k = chunk * (32 * words) + j * words + w
                inside = (row[:, None] < rows) & (k[None, :] < inputs)
                values = tl.load(x + row[:, None] * inputs + k[None, :], mask=inside, other=0.0)
                for _ in tl.static_range(parts):
                    part = values.to(tl.bfloat16)
                    sums = tl.dot(part, sign, sums)
                    values = values - part.to(values.dtype)
    result = sums * a
    is_real = (row[:, None] < rows) & (o[None, :] < outputs)
    if has_scale:
        result = result * tl.load(scale + o, mask=o < outputs, other=0.0)[None, :]
    if has_shift:
        result = result + tl.load(shift + o, mask=o < outputs, other=0.0)[None, :]
    place = row[:, None] * outputs + o[None, :]
    if has_residual:
        result = result + tl.load(residual + place, mask=is_real, other=0.0).to(tl.float32)
    if relu:
        result = tl.maximum(result, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + place, result.to(y.dtype.element_ty), mask=is_real)
