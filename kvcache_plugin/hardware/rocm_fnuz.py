"""ROCm FNUZ (gfx940, gfx941, gfx942): FP8 as e4m3fnuz with doubled scales, NVFP4, by Triton."""

from __future__ import annotations

from typing import Final

from kvcache_plugin import Device, KVDescription, hookimpl
from kvcache_plugin.hardware.triton_hooks import (
    FNUZ,
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

_OCP_ARCHS: Final = ("gfx950", "gfx12")


@hookimpl
def supports_kv(device: Device, kv_cache_dtype: str) -> bool | str:
    if not device.is_fnuz:
        ocp = ", whose FP8 formats are OCP's" if device.arch.startswith(_OCP_ARCHS) else ""
        return f"serves the FNUZ GPUs gfx940, gfx941 and gfx942, and this is {device}{ocp}"
    return supports(kv_cache_dtype)


@hookimpl
def describe_kv(device: Device, kv_cache_dtype: str) -> KVDescription:
    doubled = "; checkpoint scales are doubled" if kv_cache_dtype == FNUZ else ""
    return KVDescription(how(device, kv_cache_dtype) + doubled)
