"""CPU: FP8 and NVFP4 by C kernels, with the reference's bits.

The kernels are compiled by the machine's C compiler when a CPU is first selected, which takes a
second or two, and are then in the user's cache. Where that cannot be, the reference serves.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Final

from kvcache_plugin import Device, KVDescription, KVScales, OutBuffers, QuantizedKV, hookimpl
from kvcache_plugin.hardware import cpu_check, cpu_launch
from kvcache_plugin.hardware.cpu_library import Library, UnavailableError, load

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_FNUZ: Final = "fp8_e4m3fnuz"


@hookimpl
def supports_kv(device: Device, kv_cache_dtype: str) -> bool | str:
    if device.kind != "cpu":
        return f"serves the CPU, and this is {device}"
    if kv_cache_dtype not in cpu_launch.FORMATS:
        return f"serves {', '.join(cpu_launch.FORMATS)}, and this is {kv_cache_dtype}"
    library = _library()
    return library if isinstance(library, str) else True


@hookimpl
def describe_kv() -> KVDescription:
    return KVDescription("C kernels, compiled on this machine")


@hookimpl
def validate_kv_scales(scales: KVScales, kv_cache_dtype: str) -> KVScales:
    return scales.for_fnuz() if kv_cache_dtype == _FNUZ else scales


@hookimpl
def quantize_kv(
    tensor: torch.Tensor, scale: torch.Tensor, kv_cache_dtype: str, out: OutBuffers | None
) -> QuantizedKV | None:
    library = _library()
    assert isinstance(library, Library)
    return cpu_launch.quantize(library, tensor, scale, kv_cache_dtype, out)


@hookimpl
def quantize_kv_pair(
    key: torch.Tensor,
    value: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    kv_cache_dtype: str,
    out: tuple[OutBuffers, OutBuffers] | None,
) -> tuple[QuantizedKV, QuantizedKV] | None:
    """One after the other: that saves the way through the hooks, half the time of a token."""
    library = _library()
    assert isinstance(library, Library)
    k_out, v_out = (None, None) if out is None else out
    k = cpu_launch.quantize(library, key, k_scale, kv_cache_dtype, k_out)
    if k is None:
        return None
    v = cpu_launch.quantize(library, value, v_scale, kv_cache_dtype, v_out)
    return None if v is None else (k, v)


@hookimpl
def dequantize_kv(quantized: QuantizedKV, dtype: torch.dtype) -> torch.Tensor | None:
    library = _library()
    assert isinstance(library, Library)
    return cpu_launch.dequantize(library, quantized, dtype)


@cache
def _library() -> Library | str:
    """The compiled kernels, or why there are none, with the remedy."""
    try:
        return load(cpu_check.what_is_wrong)
    except UnavailableError as error:
        if error.is_fault:
            logger.warning(
                "K and V on the CPU are left to the reference, which is slow: %s "
                "[errors#cpu-kernels-missing]",
                error,
            )
        return str(error)
