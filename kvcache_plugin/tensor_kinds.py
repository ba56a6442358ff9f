"""What kind of number or tensor one is, before it is read, and how a message tells it."""

from __future__ import annotations

import math
from numbers import Real

import torch


def as_float(number: object) -> float | None:
    """A real number of any type as a float, ``None`` for anything else, a bool among it."""
    if isinstance(number, bool) or not isinstance(number, Real):
        return None
    try:
        return float(number)
    except OverflowError:  # an integer beyond float64
        return math.inf if number > 0 else -math.inf  # type: ignore[operator]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an ordinary array in memory: not sparse, and not nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def describe(tensor: torch.Tensor) -> str:
    """Dtype, shape and, where it is special, layout of a tensor, for a message."""
    shape = "nested" if tensor.is_nested else f"shape {tuple(tensor.shape)}"
    layout = "" if tensor.layout is torch.strided else f" in layout {tensor.layout}"
    return f"{tensor.dtype} of {shape}{layout}"


def holds_numbers(dtype: torch.dtype) -> bool:
    """Whether each element of a tensor is one floating-point number; packed float4 holds two."""
    return dtype.is_floating_point and dtype != getattr(torch, "float4_e2m1fn_x2", None)
