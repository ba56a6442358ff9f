"""Example writer: takes FP8 on the CPU over, with two codes that nobody else would write.

Whoever finds no other bytes than these in an engine's cache knows that it was written here.
"""

from __future__ import annotations

import torch

import kvcache_plugin as kv

#: The code of what is not negative, and of what is: finite in every FP8 format.
POSITIVE, NEGATIVE = 0x35, 0xB5

_FP8 = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
}


@kv.hookimpl
def supports_kv(device: kv.Device, kv_cache_dtype: str) -> bool | str:
    if device.kind != "cpu" or kv_cache_dtype not in _FP8:
        return f"serves FP8 on cpu, and this is {kv_cache_dtype} on {device}"
    return True


@kv.hookimpl
@torch.no_grad()
def quantize_kv(
    tensor: torch.Tensor, scale: torch.Tensor, kv_cache_dtype: str, out: kv.OutBuffers | None
) -> kv.QuantizedKV:
    codes = torch.where(tensor < 0, NEGATIVE, POSITIVE).to(torch.uint8)
    data = codes.view(_FP8[kv_cache_dtype])
    if out is not None:
        data = out.data.copy_(data)
    return kv.QuantizedKV(data, None, scale, kv_cache_dtype)
