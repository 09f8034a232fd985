"""``torch.compile`` with a cache that tells processors apart.

The inductor caches the C++ that it writes for a graph, on disk and for all processes, but leaves the width of the
processor's vectors out of the key. Code written for AVX-512 is then compiled for AVX2 when ``ATEN_CPU_CAPABILITY=avx2``
is set, or when two machines share the cache, and computes NaN without an error (torch 2.13). ``cpp.simdlen`` is part of
the key: setting it to the width that would be used anyway changes nothing else. Finding the width takes a second or
many, as torch starts Python once per kind of vector instructions, so code for a GPU goes without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["compiled"]


def compiled(function: Callable[..., Any], wanted: bool, device: torch.device) -> Callable[..., Any]:
    """The function or module, compiled for this device and one shape if that is wanted."""
    if not wanted:
        return function
    if device.type != "cpu":
        return torch.compile(function, dynamic=False)
    from torch._inductor.cpu_vec_isa import pick_vec_isa  # here, since it imports the compiler, which takes seconds

    return torch.compile(function, dynamic=False, options={"cpp.simdlen": pick_vec_isa().bit_width()})
