"""CUDA SM120 (12.x): NVFP4 by FlashInfer, or by Triton where that is not used; FP8 by Triton."""

from __future__ import annotations

from kvcache_plugin import Device, hookimpl
from kvcache_plugin.hardware.flashinfer_nvfp4 import (
    dequantize_kv,
    describe_kv,
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


@hookimpl
def supports_kv(device: Device, kv_cache_dtype: str) -> bool | str:
    return supports(device, kv_cache_dtype, major=12)
