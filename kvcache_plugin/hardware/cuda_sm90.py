"""CUDA SM90 (Hopper), and 8.0 to 8.9 as far as those go: FP8 and NVFP4 by Triton.

NVFP4 is Triton's here too: FlashInfer compiles the body of its quantizers for SM100 and newer, and
on an older card they answer with uninitialised memory or an exception.
"""

from __future__ import annotations

from typing import Final

from kvcache_plugin import Device, KVDescription, hookimpl
from kvcache_plugin.hardware.triton_hooks import (
    NVFP4,
    dequantize_kv,
    how,
    quantize_kv,
    quantize_kv_pair,
    supports,
    validate_kv_scales,
)

__all__ = [
    "dequantize_kv",
    "describe_kv",
    "quantize_kv",
    "quantize_kv_pair",
    "supports_kv",
    "validate_kv_scales",
]

_MAJORS: Final = (8, 9)


@hookimpl
def supports_kv(device: Device, kv_cache_dtype: str) -> bool | str:
    if device.capability is None or device.capability[0] not in _MAJORS:
        return f"serves CUDA from sm_80 to sm_90, and this is {device}"
    return supports(kv_cache_dtype)


@hookimpl
def describe_kv(device: Device, kv_cache_dtype: str) -> KVDescription:
    why = "; FlashInfer has no NVFP4 quantizer below SM100" if kv_cache_dtype == NVFP4 else ""
    return KVDescription(how(device, kv_cache_dtype) + why)
