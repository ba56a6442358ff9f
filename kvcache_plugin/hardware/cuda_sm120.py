"""CUDA SM120 (12.x): NVFP4 by FlashInfer, or by Triton where that is not used; FP8 by Triton."""

from __future__ import annotations

from typing import Final

from kvcache_plugin import Device, hookimpl
from kvcache_plugin.hardware.flashinfer_nvfp4 import (
    dequantize_kv,
    describe_kv,
    quantize_kv,
    quantize_kv_pair,
    validate_kv_scales,
)
from kvcache_plugin.hardware.triton_hooks import supports

__all__ = [
    "dequantize_kv",
    "describe_kv",
    "quantize_kv",
    "quantize_kv_pair",
    "supports_kv",
    "validate_kv_scales",
]

_MAJOR: Final = 12


@hookimpl
def supports_kv(device: Device, kv_cache_dtype: str) -> bool | str:
    if device.capability is None or device.capability[0] != _MAJOR:
        return f"serves CUDA 12.x, and this is {device}"
    return supports(kv_cache_dtype)
