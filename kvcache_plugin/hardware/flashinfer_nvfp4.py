"""The hooks with NVFP4 by FlashInfer where it serves the GPU, and all else by Triton.

FlashInfer loads its kernels at the first call, or compiles them: it belongs before the capture of
a CUDA graph. Nothing here reads a value of a tensor, or waits for the device.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import torch

from kvcache_plugin import Device, KVDescription, KVTolerance, OutBuffers, QuantizedKV, hookimpl
from kvcache_plugin.hardware import triton_hooks
from kvcache_plugin.hardware.flashinfer_package import (
    DEQUANTIZE,
    QUANTIZE,
    call,
    installed,
    why_not_flashinfer,
)
from kvcache_plugin.hardware.triton_hooks import NVFP4, validate_kv_scales

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "dequantize_kv",
    "describe_kv",
    "quantize_kv",
    "quantize_kv_pair",
    "supports",
    "validate_kv_scales",
]

#: How far its quantizer may be from the reference: "FlashInfer" in ``docs/numerics.md``.
TOLERANCE: Final = KVTolerance(codes=1 / 64, block_scales=1 / 16, nan=True)
#: It numbers values in 32 bits.
MOST_VALUES: Final = torch.iinfo(torch.int32).max

_DTYPES: Final = (torch.float16, torch.bfloat16)
_VALUES_PER_SCALE: Final = 16
#: Values that a block of 128 of its threads takes at once.
_QUANTIZE_STEP: Final = 1024
_DEQUANTIZE_STEP: Final = 2048
#: Values that a warp takes at once when it quantizes.
_WARP: Final = 256
#: It loads two values, or four codes, at once, from addresses that are multiples of these.
_VALUES_ALIGNMENT: Final = 4
_CODES_ALIGNMENT: Final = 2


def supports(device: Device, kv_cache_dtype: str, *, major: int) -> bool | str:
    """Whether a module serves a format on a device, or why not.

    :param major: of the CUDA capability that the module is for.
    """
    if device.capability is None or device.capability[0] != major:
        return f"serves CUDA {major}.x, and this is {device}"
    return triton_hooks.supports(kv_cache_dtype)


@hookimpl
def describe_kv(device: Device, kv_cache_dtype: str) -> KVDescription:
    how = triton_hooks.how(device, kv_cache_dtype)
    if kv_cache_dtype != NVFP4:
        return KVDescription(how)
    why_not = why_not_flashinfer(device)
    if why_not:
        return KVDescription(f"{how}; {why_not}")
    by_flashinfer = f"FlashInfer {installed().version} {QUANTIZE}; float32 input by {how}"
    return KVDescription(by_flashinfer, TOLERANCE)


@hookimpl
def quantize_kv(
    tensor: torch.Tensor,
    scale: torch.Tensor,
    kv_cache_dtype: str,
    device: Device,
    out: OutBuffers | None,
) -> QuantizedKV:
    if not _is_flashinfers(tensor.dtype, kv_cache_dtype, device):
        return triton_hooks.quantize_kv(tensor, scale, kv_cache_dtype, device, out)
    data, block_scales = _quantized(tensor, scale, device)
    if out is not None:
        data = out.data.copy_(data)
        if out.block_scales is not None:
            block_scales = out.block_scales.copy_(block_scales)
    return QuantizedKV(data, block_scales, scale, kv_cache_dtype)


@hookimpl
def quantize_kv_pair(
    key: torch.Tensor,
    value: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    kv_cache_dtype: str,
    device: Device,
    out: tuple[OutBuffers, OutBuffers] | None,
) -> tuple[QuantizedKV, QuantizedKV] | None:
    """In one launch by Triton. FlashInfer has no such launch: what is its goes in two."""
    if any(_is_flashinfers(side.dtype, kv_cache_dtype, device) for side in (key, value)):
        k_out, v_out = (None, None) if out is None else out
        return (
            quantize_kv(key, k_scale, kv_cache_dtype, device, k_out),
            quantize_kv(value, v_scale, kv_cache_dtype, device, v_out),
        )
    return triton_hooks.quantize_kv_pair(key, value, k_scale, v_scale, kv_cache_dtype, device, out)


@hookimpl
def dequantize_kv(quantized: QuantizedKV, dtype: torch.dtype, device: Device) -> torch.Tensor:
    if not _is_flashinfers(dtype, quantized.kv_cache_dtype, device):
        return triton_hooks.dequantize_kv(quantized, dtype)
    return _dequantized(quantized, dtype, device)


def _is_flashinfers(dtype: torch.dtype, kv_cache_dtype: str, device: Device) -> bool:
    """Whether FlashInfer takes it. It knows no float32, which narrowed would be rounded twice."""
    return kv_cache_dtype == NVFP4 and dtype in _DTYPES and not why_not_flashinfer(device)


def _quantized(
    tensor: torch.Tensor, scale: torch.Tensor, device: Device
) -> tuple[torch.Tensor, torch.Tensor]:
    *lead, head_dim = tensor.shape
    count = tensor.numel()
    if count:
        columns = row_length(count, _QUANTIZE_STEP)
        rows = _packed(tensor, _VALUES_ALIGNMENT).view(-1, columns)
        parts = [
            call(QUANTIZE, device, part, scale.detach().resolve_neg())
            for part in torch.split(rows, MOST_VALUES // columns)
        ]
        codes = _joined([part_codes for part_codes, _ in parts])
        block_scales = _joined([part_scales for _, part_scales in parts])
    else:  # CUDA refuses a launch of no blocks
        codes = block_scales = tensor.new_empty(0, dtype=torch.uint8)
    return (
        codes.view(*lead, head_dim // 2),
        block_scales.view(*lead, head_dim // _VALUES_PER_SCALE).view(torch.float8_e4m3fn),
    )


def _dequantized(quantized: QuantizedKV, dtype: torch.dtype, device: Device) -> torch.Tensor:
    data, block_scales = quantized.data, quantized.block_scales
    assert block_scales is not None
    *lead, length = data.shape
    count = 2 * data.numel()
    if not count:
        return data.new_empty((*lead, 2 * length), dtype=dtype)
    columns = row_length(count, _DEQUANTIZE_STEP)
    codes = _packed(data, _CODES_ALIGNMENT).view(-1, columns // 2)
    scales = _packed(block_scales.view(torch.uint8)).view(-1, columns // _VALUES_PER_SCALE)
    scale = quantized.scale.detach().resolve_neg()
    most = MOST_VALUES // columns
    values = [
        call(DEQUANTIZE, device, *part, scale, dtype)
        for part in zip(torch.split(codes, most), torch.split(scales, most), strict=True)
    ]
    return _joined(values).view(*lead, 2 * length)


@lru_cache(maxsize=1024)
def row_length(count: int, step: int) -> int:
    """The length of the rows that ``count`` values, a multiple of 16, are cut into.

    A block of FlashInfer's threads takes one row, ``step`` values at once; the block scales, and so
    the codes, are the same wherever rows begin at a multiple of 16. So rows are as long as one step
    where the count allows: the 128 values of a head would leave seven of eight threads idle.

    Rows of whole warps come first. In others the threads beyond a row's end have left before the
    rest of their warp shuffles with all 32 in the mask: allowed, but better not relied on.
    """
    whole_warps = range(step, 0, -_WARP)
    others = range(step, 0, -_VALUES_PER_SCALE)
    return next(length for length in itertools.chain(whole_warps, others) if not count % length)


def _packed(tensor: torch.Tensor, alignment: int = 1) -> torch.Tensor:
    """The same values without gaps, and where FlashInfer can load them: no copy, mostly."""
    packed = tensor.detach().resolve_neg().contiguous()
    return packed.clone() if packed.data_ptr() % alignment else packed


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
