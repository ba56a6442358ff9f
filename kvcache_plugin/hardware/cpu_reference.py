"""CPU reference: plain torch, slow and exact; the last resort on every other device.

It defines the arithmetic that every implementation is compared with: IEEE float32, round to
nearest with ties to even, saturation before the cast and so the same with every torch. The tables
are in ``docs/numerics.md``.
"""

from __future__ import annotations

import logging
from functools import cache
from itertools import pairwise

import torch

from kvcache_plugin import Device, KVScales, OutBuffers, QuantizedKV, hookimpl

logger = logging.getLogger(__name__)

_FP8 = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
}
_NVFP4 = "nvfp4"
_FLOAT32_MAX = torch.finfo(torch.float32).max
_BLOCK_SCALE_MAX = torch.finfo(torch.float8_e4m3fn).max
_NVFP4_BLOCK = 16

# OCP Microscaling specification 1.0: the magnitudes of codes 0 to 7; bit 3 is the sign.
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_MAX = _E2M1_MAGNITUDES[-1]
_E2M1_SIGN = 0b1000
# Halfway points between neighbours. A tie goes to the even code: upwards where the code above the
# halfway point is even.
_E2M1_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_E2M1_TIES_UP = (0.75, 1.75, 3.5)


@hookimpl(trylast=True)
def supports_kv(kv_cache_dtype: str) -> bool | str:
    if kv_cache_dtype not in (*_FP8, _NVFP4):
        return f"serves {', '.join([*_FP8, _NVFP4])}, and this is {kv_cache_dtype}"
    return True


@hookimpl(trylast=True)
def validate_kv_scales(scales: KVScales, kv_cache_dtype: str) -> KVScales:
    return scales.for_fnuz() if kv_cache_dtype == "fp8_e4m3fnuz" else scales


@hookimpl(trylast=True)
def quantize_kv(
    tensor: torch.Tensor,
    scale: torch.Tensor,
    kv_cache_dtype: str,
    device: Device,
    out: OutBuffers | None,
) -> QuantizedKV:
    _say_if_last_resort(device)
    tensor = tensor.detach()  # no_grad() takes longer, and single tokens are written here
    if kv_cache_dtype == _NVFP4:
        data, block_scales = _nvfp4_codes(tensor.float(), scale)
    else:
        dtype = _FP8[kv_cache_dtype]
        largest = torch.finfo(dtype).max
        scaled = tensor / _per_head(scale)  # in float32, as the scale is, which has dimensions
        data, block_scales = scaled.clamp_(-largest, largest).to(dtype), None
    if out is not None:
        data = out.data.copy_(data)
        if out.block_scales is not None and block_scales is not None:
            block_scales = out.block_scales.copy_(block_scales)
    return QuantizedKV(data, block_scales, scale, kv_cache_dtype)


@hookimpl(trylast=True)
@torch.no_grad()
def dequantize_kv(quantized: QuantizedKV, dtype: torch.dtype, device: Device) -> torch.Tensor:
    _say_if_last_resort(device)
    if quantized.kv_cache_dtype == _NVFP4:
        return _nvfp4_values(quantized).to(dtype)
    return (quantized.data.float() * _per_head(quantized.scale)).to(dtype)


def _per_head(scale: torch.Tensor) -> torch.Tensor:
    """``[1]`` or ``[H]``, so that it broadcasts against ``[..., H, head_dim]``."""
    return scale if scale.numel() == 1 else scale.unsqueeze(-1)


def _nvfp4_codes(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed e2m1 codes and e4m3 block scales of float32 ``x``.

    ``sf = R_e4m3(min(m / (6·g), 448))`` and ``code = R_e2m1(clamp(x·r, ±6))`` with
    ``r = min(1 / (sf·g), largest float32)``, 0 where ``sf`` is 0; ``m`` is the block's largest
    magnitude, NaN left out.
    """
    blocks = _blocks(x)
    magnitudes = blocks.abs()
    largest = magnitudes.masked_fill(magnitudes.isnan(), 0.0).amax(-1)
    # A block with an infinity has the largest scale, also where 6·g is infinite and the quotient
    # of the two would be NaN.
    ideal = (largest / (_E2M1_MAX * scale)).clamp(max=_BLOCK_SCALE_MAX)
    ideal = ideal.masked_fill(largest.isinf(), _BLOCK_SCALE_MAX)
    block_scales = ideal.to(torch.float8_e4m3fn)
    served = block_scales.float()
    reciprocal = (1.0 / (served * scale)).clamp(max=_FLOAT32_MAX).masked_fill(served == 0, 0.0)
    codes = _e2m1_codes(magnitudes * reciprocal.unsqueeze(-1))
    codes = torch.where(blocks.signbit(), codes | _E2M1_SIGN, codes).flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, block_scales


def _e2m1_codes(magnitudes: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 7 of magnitudes; NaN is 0, and all above 5 is 6.0, which is code 7."""
    codes = torch.zeros_like(magnitudes, dtype=torch.uint8)
    for halfway in _E2M1_TIES_DOWN:
        codes += magnitudes > halfway
    for halfway in _E2M1_TIES_UP:
        codes += magnitudes >= halfway
    return codes


def _nvfp4_values(quantized: QuantizedKV) -> torch.Tensor:
    """``(lut[code] · sf) · g`` in float32."""
    assert quantized.block_scales is not None
    data = quantized.data
    codes = torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)
    # A table would have to be copied to the device: add up the steps from code to code instead.
    magnitudes = torch.zeros_like(codes, dtype=torch.float32)
    for code, (below, here) in enumerate(pairwise(_E2M1_MAGNITUDES), start=1):
        magnitudes += ((codes & 0b111) >= code).float() * (here - below)
    values = torch.where(codes >= _E2M1_SIGN, -magnitudes, magnitudes)
    scaled = _blocks(values) * quantized.block_scales.float().unsqueeze(-1) * quantized.scale
    return scaled.flatten(-2)


def _blocks(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // _NVFP4_BLOCK, _NVFP4_BLOCK)


def _say_if_last_resort(device: Device) -> None:
    if device.kind != "cpu":
        _say_last_resort(device)


@cache
def _say_last_resort(device: Device) -> None:
    logger.warning(
        "K and V on %s are quantized by the CPU reference, plain torch, as the last resort: exact, "
        "and slow. `kvcache-plugin explain --device %s` says what is missing "
        "[errors#cpu-reference-serves]",
        device,
        device,
    )
