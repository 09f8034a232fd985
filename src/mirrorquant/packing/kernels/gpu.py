"""Packed linear layers on an NVIDIA GPU: bits are unpacked in registers, so that a small batch reads 1 bit per weight.

With few rows a linear layer takes as long as reading its weights. The Triton kernels read the bit planes, make +-1 of
them in registers and multiply: in float32, or for more rows of bfloat16 on tensor cores. For more rows than
``FEW_ROWS`` each call unpacks the weights, and cuBLAS multiplies.

The layout: int32 words [plane, O, chunk, 16]; bit j of word w of a chunk belongs to input 512 chunk + 16 j + w, so that
the 16 inputs of a tensor-core step are neighbors. A set bit is +1; three levels are the mean of two planes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec

import torch
from torch import Tensor

from mirrorquant.packing.kernels import fallback
from mirrorquant.packing.kernels.layer import Epilogue, Geometry
from mirrorquant.packing.kernels.prepared import HEADER_BYTES, with_header

__all__ = ["FEW_ROWS", "is_gpu", "linear", "prepare", "serves", "unpack"]

FEW_ROWS = 16
_WORDS = 16
_CHUNK = 32 * _WORDS
_FEWEST_INPUTS = 64  # with fewer, the two layouts could not be distinguished by size, nor would it pay

_HAS_TRITON = find_spec("triton") is not None  # else the torch layout serves


def serves(shape: Sequence[int], levels: Sequence[float], device: torch.device) -> bool:
    """Whether a weight on this device is laid out for the Triton kernel."""
    has = _HAS_TRITON and device.type == "cuda"
    return has and len(shape) == 2 and shape[1] >= _FEWEST_INPUTS and fallback.affine(levels) is not None


def prepare(codes: Tensor, levels: Sequence[float]) -> Tensor:
    """Level indices [O, K] as bit planes, after a header."""
    outputs, inputs = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -inputs % _CHUNK))
    planes = torch.stack([padded > plane for plane in range(len(levels) - 1)])
    bits = planes.view(len(planes), outputs, -1, 32, _WORDS).to(torch.int32)
    weights = (bits << torch.arange(32, dtype=torch.int32, device=codes.device)[:, None]).sum(-2, dtype=torch.int32)
    return with_header("gpu", weights.reshape(-1).view(torch.uint8), codes.shape, 1, len(levels))


def is_gpu(prepared: Tensor, shape: Sequence[int], levels: Sequence[float]) -> bool:
    """Whether a prepared weight has this layout: by its size, since reading its header would wait for the GPU."""
    words = (len(levels) - 1) * shape[0] * math.ceil(shape[1] / _CHUNK) * _WORDS
    return len(shape) == 2 and prepared.numel() == HEADER_BYTES + 4 * words


def unpack(prepared: Tensor, shape: Sequence[int], levels: Sequence[float], dtype: torch.dtype) -> Tensor:
    """The weight [O, K] in a floating-point type."""
    words = prepared[HEADER_BYTES:].view(torch.int32).view(len(levels) - 1, shape[0], -1, 1, _WORDS)
    shifts = torch.arange(32, dtype=torch.int32, device=prepared.device)[:, None]
    codes = (words >> shifts & 1).sum(0, dtype=torch.uint8).view(shape[0], -1)[:, : shape[1]]
    weight = torch.full(shape, levels[0], dtype=dtype, device=prepared.device)  # not a copy, which no graph captures
    for number, level in enumerate(levels[1:], 1):
        weight.masked_fill_(codes == number, level)
    return weight


def linear(x: Tensor, prepared: Tensor, geometry: Geometry, epilogue: Epilogue) -> Tensor:
    """As ``kernels.linear``, for x on a GPU and a weight of this layout."""
    shape, levels, activation = geometry[:3]
    (outputs, inputs), planes, unit = shape, len(levels) - 1, fallback.affine(levels)
    rows, chunks = x.numel() // inputs, math.ceil(inputs / _CHUNK)
    small = 0 < rows <= FEW_ROWS and x.dtype in (torch.float32, torch.bfloat16)
    if not small or unit is None or unit[1] != 0 or activation != "float32":
        weight = unpack(prepared, shape, levels, x.dtype if activation == "float32" else torch.float32)
        return fallback.apply(x, weight, geometry, epilogue)
    from mirrorquant.packing.kernels import triton_linear

    scale, shift, residual, relu = epilogue
    residual = None if residual is None else residual.contiguous()
    y = x.new_empty((*x.shape[:-1], outputs))
    on_tensor_cores, tile = _tile(rows, chunks, x.dtype)
    kernel = triton_linear.tensor_rows if on_tensor_cores else triton_linear.few_rows
    grid = (math.ceil(outputs / tile["block"]), math.ceil(rows / tile.get("group", rows)))
    tensors = x.contiguous(), prepared[HEADER_BYTES:].view(torch.int32), scale, shift, residual, y
    sizes = rows, outputs, inputs, chunks
    with nullcontext() if x.device.index == torch.cuda.current_device() else torch.cuda.device(x.device):
        kernel[grid](*tensors, *sizes, unit[0] / planes, planes=planes, relu=relu, **tile)
    return y


def _tile(rows: int, chunks: int, dtype: torch.dtype) -> tuple[bool, dict[str, int]]:
    """Whether on tensor cores, and the tile: the fastest of those tried for 4096 x 4096 on an H200."""
    if rows > 4 and dtype == torch.bfloat16:
        return True, {"block": 16, "step": 32, "num_warps": 2}
    warps = 2 if chunks > 8 else 1
    group = math.ceil(rows / math.ceil(rows / 4))
    size = {1: {"block": 2, "unroll": 32}, 2: {"block": 4, "unroll": 32}}.get(group, {"block": 4, "unroll": 4})
    return False, {**size, "group": group, "words": 128 * warps, "num_warps": warps}
