"""ROCm FNUZ (gfx940, gfx941, gfx942): converts checkpoint scales for e4m3fnuz."""

from __future__ import annotations

from kvcache_plugin import Device, KVScales, hookimpl

_FORMAT = "fp8_e4m3fnuz"


@hookimpl
def supports_kv(device: Device, kv_cache_dtype: str) -> bool | str:
    if not device.is_fnuz:
        return f"serves the FNUZ GPUs gfx940, gfx941 and gfx942, and this is {device}"
    if kv_cache_dtype != _FORMAT:
        return f"converts scales for {_FORMAT} alone"
    return True


@hookimpl
def validate_kv_scales(scales: KVScales) -> KVScales:
    return scales.for_fnuz()
