"""Every other GPU that Triton serves: CUDA from 8.0, and ROCm."""

from __future__ import annotations

from typing import Final

from kvcache_plugin import Device, KVDescription, hookimpl
from kvcache_plugin.hardware.triton_hooks import (
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

#: Triton compiles for this CUDA capability and newer ones.
_OLDEST: Final = (8, 0)


@hookimpl
def supports_kv(device: Device, kv_cache_dtype: str) -> bool | str:
    is_old = device.capability is not None and device.capability < _OLDEST
    if device.kind not in ("cuda", "rocm") or is_old:
        return f"serves CUDA from sm_80, and ROCm, and this is {device}"
    return supports(kv_cache_dtype)


@hookimpl
def describe_kv(device: Device, kv_cache_dtype: str) -> KVDescription:
    return KVDescription(how(device, kv_cache_dtype))
