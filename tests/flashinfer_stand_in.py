"""A stand-in for FlashInfer's two NVFP4 functions, which take CPU tensors here.

It refuses what they refuse, or cannot do, and computes as their kernels are compiled: reciprocals
that are up to 1 ulp off, subnormal numbers flushed to zero, e2m1 of NaN +6. The real package is
held against the same expectations in ``tests/engine/test_flashinfer.py``.
"""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from kvcache_plugin.hardware import flashinfer_package
from tests.oracles import BLOCK_SIZE, E2M1, E4M3, Array, decoded, nvfp4_values, packed, rounded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pytest

VERSION = "0.7.4"
QUANTIZES = (100, 103, 107, 110, 120, 121)
DEQUANTIZES = (80, 86, 89, 90, *QUANTIZES)

_SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal
_E2M1_OF_NAN = 7
#: The values that one thread of the quantizer loads; two of them share a block scale.
_PER_THREAD = 8


class StandIn(types.ModuleType):
    """The module, and what it was called with.

    :param quantizes: capabilities that its quantizer declares; ``dequantizes`` likewise.
    """

    __version__ = VERSION

    def __init__(
        self, quantizes: Sequence[int] = QUANTIZES, dequantizes: Sequence[int] = DEQUANTIZES
    ) -> None:
        super().__init__("flashinfer")
        self.calls: list[tuple[str, tuple[int, ...]]] = []

        def nvfp4_kv_quantize(
            input: torch.Tensor,
            global_scale: torch.Tensor,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self.calls.append(("nvfp4_kv_quantize", tuple(input.shape)))
            with _as_a_kernel():
                return _quantize(input, global_scale)

        def nvfp4_kv_dequantize(
            fp4_data: torch.Tensor,
            block_scales: torch.Tensor,
            global_scale: torch.Tensor,
            output_dtype: torch.dtype = torch.bfloat16,
        ) -> torch.Tensor:
            self.calls.append(("nvfp4_kv_dequantize", tuple(fp4_data.shape)))
            with _as_a_kernel():
                return _dequantize(fp4_data, block_scales, global_scale, output_dtype)

        self.nvfp4_kv_quantize: Any = declaring(quantizes, nvfp4_kv_quantize)
        self.nvfp4_kv_dequantize: Any = declaring(dequantizes, nvfp4_kv_dequantize)


@contextmanager
def _as_a_kernel() -> Iterator[None]:
    """What torch does inside, a kernel does there: no mode sees it."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def declaring(capabilities: Sequence[int], function: Callable[..., Any]) -> Any:
    """The function with FlashInfer's way to ask what GPUs it serves."""
    annotated: Any = function
    annotated.is_compute_capability_supported = lambda cc: cc in capabilities
    return annotated


def _quantize(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x.shape  # as there: ValueError for another number of dimensions
    if columns % BLOCK_SIZE:
        raise ValueError(f"{columns} columns are no multiple of {BLOCK_SIZE}")
    _check_kernel(x, scale, loads=4)
    _check(x.dtype in (torch.float16, torch.bfloat16), f"no kernel for {x.dtype}")
    _check(rows * columns < 2**31, "32-bit index")
    codes, block_codes = nvfp4(x.float().numpy(), scale.numpy(), x.dtype)
    return torch.from_numpy(codes), torch.from_numpy(block_codes)


def _dequantize(
    data: torch.Tensor, block_scales: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    rows, columns = data.shape[0], 2 * data.shape[1]
    if columns % BLOCK_SIZE:
        raise ValueError(f"{columns} columns are no multiple of {BLOCK_SIZE}")
    _check_kernel(data, scale, loads=2)
    _check_kernel(block_scales, scale, loads=1)
    _check(dtype in (torch.float16, torch.bfloat16), f"no kernel for {dtype}")
    _check(data.dtype == block_scales.dtype == torch.uint8, "bytes")
    _check(tuple(block_scales.shape) == (rows, columns // BLOCK_SIZE), "shape of block_scales")
    _check(rows * columns < 2**31, "32-bit index")
    (g,) = _flushed(scale.numpy())
    values = nvfp4_values(data.numpy(), block_scales.numpy(), g, np.float32)
    return torch.from_numpy(_flushed(values)).to(dtype)


def _check_kernel(tensor: torch.Tensor, scale: torch.Tensor, loads: int) -> None:
    """What the launch needs; ``loads`` bytes are read at once."""
    _check(tensor.dim() == 2, "2-d")
    _check(tensor.is_contiguous(), "contiguous")
    _check(tensor.device == scale.device, "the same device")
    _check(scale.dtype == torch.float32 and scale.numel() == 1, "a float32 global scale")
    _check(tensor.shape[0] > 0, "a grid of no blocks")
    _check(tensor.data_ptr() % loads == 0, "misaligned address")
    _check(not tensor.requires_grad and not scale.requires_grad, "no gradients")
    _check(not tensor.is_neg(), "no lazy negation")


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"FlashInfer's kernel: {what}")


# In the place of the package.


def install(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType | None) -> None:
    """Makes it what ``import flashinfer`` finds; ``None`` for nothing."""
    monkeypatch.setitem(sys.modules, "flashinfer", module)


def forget() -> None:
    """Lets the next call ask again what is installed."""
    flashinfer_package.installed.cache_clear()
    flashinfer_package.why_not_flashinfer.cache_clear()
    flashinfer_package._proven.clear()


# The arithmetic.


def nvfp4(x: Array, scale: Array, dtype: torch.dtype) -> tuple[Array, Array]:
    """Packed codes and block scales of ``[rows, columns]``, the values of a 16-bit ``dtype``."""
    threads = x.reshape(*x.shape[:-1], -1, 2, _PER_THREAD)
    with np.errstate(all="ignore"):
        largest = _largest_bfloat16(threads) if dtype == torch.bfloat16 else _largest(threads)
        ideal = _flushed(reciprocal(scale) * _flushed(largest * np.float32(1 / 6)))
        block_codes = rounded(ideal, E4M3)
        sf = decoded(block_codes, E4M3)
        served = reciprocal(_flushed(sf * scale))
        r = np.where(sf == 0, np.float32(0), served)
        scaled = _flushed(_flushed(threads) * r[..., np.newaxis])
    codes = rounded(scaled, E2M1)
    codes[np.isnan(scaled)] = _E2M1_OF_NAN
    return packed(codes.reshape(x.shape)), block_codes[..., 0].copy()


def reciprocal(x: Array) -> Array:
    """``1 / x``, one of the two float32 that it lies between: which depends on ``x`` alone."""
    x = _flushed(x)
    with np.errstate(all="ignore"):
        exact = 1 / x.astype(np.float64)
        nearest = exact.astype(np.float32)
        other_way = np.where(nearest > exact, -np.inf, np.inf).astype(np.float32)
        other = np.where(nearest == exact, nearest, np.nextafter(nearest, other_way))
    takes_other = (x.view(np.uint32) * np.uint32(2654435761)) >> np.uint32(31) == 1
    return _flushed(np.where(takes_other & np.isfinite(exact), other, nearest))


def _flushed(x: Array) -> Array:
    flushed: Array = np.where(np.abs(x) < _SMALLEST_NORMAL, np.copysign(0, x), x)
    return flushed.astype(np.float32)


def _largest(threads: Array) -> Array:
    """float16: the largest magnitude of both threads; NaN only where there is nothing else."""
    largest = np.fmax.reduce(np.abs(threads), axis=(-1, -2))
    return np.stack([largest, largest], axis=-1)


def _largest_bfloat16(threads: Array) -> Array:
    """bfloat16: ``a > b ? a : b`` in its order, so that a NaN may hide what came before it.

    The two threads may then disagree; the block scale is that of the first.
    """
    magnitudes = _flushed(np.abs(threads))
    even, odd = magnitudes[..., 0::2], magnitudes[..., 1::2]
    lanes = []
    for lane in (even, odd):
        own = lane[..., 0]
        for i in range(1, lane.shape[-1]):
            own = _greater(own, lane[..., i])
        lanes.append(_greater(own[..., ::-1], own))
    return _greater(*lanes)


def _greater(a: Array, b: Array) -> Array:
    return np.where(a > b, a, b)
